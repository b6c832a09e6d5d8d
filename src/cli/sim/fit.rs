//! `sluice sim fit DATA`: fits the simulator's constants to measured load tests.
//!
//! With `--server` the rows are measured first ([`fit_server`](super::fit_server)) and only the
//! host's constants are fitted. Prints the measured and simulated cells of each row, with the
//! current and with the fitted constants. Then prints each third of the rows as a fit to the other
//! rows predicts it, which shows the accuracy. Exit codes: 0 done, 1 the data or a profile cannot
//! be used, 2 wrong usage.

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Context;
use clap::Parser;

use super::fit_server;
use sluice_sim::calibrate::rows::Server;
use sluice_sim::calibrate::search::{FittedConstant, HOST};
use sluice_sim::calibrate::{FitSettings, Row, Spread, report, rows};
use sluice_sim::{Constants, Gpu, Layout, Model};

/// Fits the simulator's constants to rows of a load test.
#[derive(Debug, Parser)]
#[command(name = "sluice sim fit")]
struct FitArgs {
    /// CSV file with one line per run: the load and the measurements (columns: see --columns)
    #[arg(required_unless_present_any = ["columns", "server"])]
    data: Option<PathBuf>,
    /// Instead of DATA: measure the host of the vLLM at this URL with a small load, in about a
    /// minute. The vLLM should have no other load
    #[arg(long, value_name = "URL", conflicts_with_all = ["data", "show"])]
    server: Option<String>,
    /// With --server: name of the model [default: the first that the server lists]
    #[arg(long, requires = "server")]
    served_model_name: Option<String>,
    /// With --server: the value of this flag at the server
    #[arg(long, requires = "server", default_value_t = 8192, value_parser = clap::value_parser!(u32).range(1..))]
    max_num_batched_tokens: u32,
    /// With --server: the value of this flag at the server
    #[arg(long, requires = "server", default_value_t = 256, value_parser = clap::value_parser!(u32).range(1..))]
    max_num_seqs: u32,
    /// GPU on which the rows were measured: a built-in name or the path of a TOML file
    #[arg(long, default_value = "h200")]
    gpu: String,
    /// Model that the GPU served: a built-in name or the path of a TOML file
    #[arg(long, default_value = "llama-3.1-8b")]
    model: String,
    /// GPUs that shared the model
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..))]
    tensor_parallel_size: u32,
    /// Constants to begin with: a built-in host, or a file that this command wrote [default: built
    /// in]
    #[arg(long)]
    start: Option<String>,
    /// File for the fitted constants
    #[arg(long)]
    out: Option<PathBuf>,
    /// Only show the rows as simulated with the constants to begin with
    #[arg(long)]
    show: bool,
    /// Print the columns of DATA
    #[arg(long)]
    columns: bool,
}

pub(super) fn run(args: &[String]) -> ExitCode {
    let command = std::iter::once("sluice sim fit").chain(args.iter().map(String::as_str));
    let args = match FitArgs::try_parse_from(command) {
        Ok(args) => args,
        Err(error) => {
            let _ = error.print();
            return if error.use_stderr() { ExitCode::from(2) } else { ExitCode::SUCCESS };
        }
    };
    match fit(&args) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error:#}");
            ExitCode::FAILURE
        }
    }
}

fn fit(args: &FitArgs) -> anyhow::Result<()> {
    if args.columns {
        println!("{}", rows::columns());
        return Ok(());
    }
    let layout = Layout { tensor_parallel: args.tensor_parallel_size, ..Layout::default() };
    let setting = FitSettings::new(Gpu::load(&args.gpu)?, Model::load(&args.model)?, layout);
    let start = args.start.as_ref().map_or_else(|| Ok(Constants::fitted()), |name| Constants::on_host(name))?;
    let (rows, setting) = match &args.server {
        Some(url) => (measured(args, url)?, FitSettings { fitted: HOST, ..setting }),
        None => (read(args)?, setting),
    };
    println!("== before the fit\n{}", report::table(&rows, &setting.play_all(&start, &rows)?));
    if args.show {
        return Ok(());
    }
    let fitted = setting.fit(&start, &rows)?;
    let cells = setting.play_all(&fitted, &rows)?;
    println!("\n== after the fit\n{}", report::table(&rows, &cells));
    if args.server.is_none() {
        println!("\n== each third of the rows, predicted by a fit to the others");
        let (left, cells) = setting.leave_thirds_out(&start, &rows)?;
        println!("{}", report::table(&left, &cells));
    }
    println!("\n== constants\n{}", changes(setting.fitted, &start, &fitted));
    if let Some(path) = &args.out {
        let spread = Spread::of(rows.iter().zip(&cells));
        let mut table = fitted.table();
        if args.server.is_some() {
            // The file of a host: the GPU's constants stay built in.
            table.retain(|part, _| part == "host" || part == "front_end");
        }
        let text = format!("# Written by sluice sim fit for {} and {}: {spread}.\n\n{table}", args.gpu, args.model);
        std::fs::write(path, text).with_context(|| format!("cannot write {}", path.display()))?;
        println!("written to {}", path.display());
    }
    Ok(())
}

fn read(args: &FitArgs) -> anyhow::Result<Vec<Row>> {
    let path = args.data.as_ref().context("give a file of rows, or --server")?;
    let text = std::fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))?;
    rows::parse(&text).with_context(|| path.display().to_string())
}

fn measured(args: &FitArgs, url: &str) -> anyhow::Result<Vec<Row>> {
    let server = Server {
        max_num_batched_tokens: args.max_num_batched_tokens,
        max_num_seqs: args.max_num_seqs,
        ..Server::default()
    };
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    // This comes before the loads, whose random tokens repeat nothing.
    if let Some(acceptance) = runtime.block_on(fit_server::acceptance(url)) {
        println!(
            "the server verifies drafts, and the fit assumes that it does not: fit a server without them.\n\
             For [[engine]] of a lab or tune file, from all requests since its start:\n{acceptance}\n"
        );
    }
    runtime.block_on(fit_server::measure(url, args.served_model_name.as_deref(), server))
}

/// The fitted constants with their old values.
fn changes(moved: &[FittedConstant], start: &Constants, fitted: &Constants) -> String {
    let of = |constants: &Constants, part: &str, key: &str| {
        constants.table().get(part).and_then(|part| part.get(key)).and_then(toml::Value::as_float).unwrap_or(f64::NAN)
    };
    let line = |FittedConstant { table, key, .. }: &FittedConstant| {
        format!("{:32} {:>10} was {}", format!("{table}.{key}"), of(fitted, table, key), of(start, table, key))
    };
    moved.iter().map(line).collect::<Vec<_>>().join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn args(line: &[&str]) -> Result<FitArgs, clap::Error> {
        FitArgs::try_parse_from(std::iter::once("fit").chain(line.iter().copied()))
    }

    #[test]
    fn the_command_names_its_gpu_and_model() {
        let parsed = args(&["rows.csv", "--gpu", "l4", "--out", "x.toml"]).unwrap();
        assert_eq!((parsed.gpu.as_str(), parsed.model.as_str()), ("l4", "llama-3.1-8b"));
        assert!(args(&[]).is_err() && args(&["--columns"]).is_ok());
        assert!(
            args(&["--server", "http://gpu:8000"]).is_ok() && args(&["rows.csv", "--server", "http://gpu"]).is_err()
        );
    }

    #[test]
    fn a_fit_writes_constants_that_it_reads_again() {
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(name).display().to_string();
        std::fs::write(path("rows.csv"), "prompt,output,streams,requests,tpot_mean\n64,32,1,2,5.2\n").unwrap();
        fit(&args(&[&path("rows.csv"), "--out", &path("c.toml")]).unwrap()).unwrap();
        let text = std::fs::read_to_string(path("c.toml")).unwrap();
        assert!(text.starts_with("# Written by sluice sim fit for h200 and llama-3.1-8b: 1 cells"), "{text}");
        let fitted = Constants::parse("c.toml", &text).unwrap();
        let setting =
            FitSettings::new(Gpu::load("h200").unwrap(), Model::load("llama-3.1-8b").unwrap(), Layout::default());
        let rows = rows::parse(&std::fs::read_to_string(path("rows.csv")).unwrap()).unwrap();
        let tpot = |constants: &Constants| setting.play_all(constants, &rows).unwrap()[0][2];
        assert_eq!(Constants::on_host(&path("c.toml")).unwrap(), fitted, "--sim-host takes it");
        assert!((tpot(&Constants::fitted()) / 5.2 - 1.0).abs() > 0.05 && (tpot(&fitted) / 5.2 - 1.0).abs() < 0.02);
        fit(&args(&[&path("rows.csv"), "--start", &path("c.toml"), "--show"]).unwrap()).unwrap();
    }

    #[test]
    fn what_cannot_be_used_is_named() {
        let error = |line: &[&str]| format!("{:#}", fit(&args(line).unwrap()).unwrap_err());
        assert!(error(&["/nowhere.csv"]).contains("/nowhere.csv"));
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), "prompt,output,streams\n1,1,1\n").unwrap();
        let path = file.path().to_str().unwrap();
        assert!(error(&[path, "--gpu", "h300"]).contains("unknown GPU 'h300'; built in: h200"));
        assert!(error(&[path, "--model", "x"]).contains("unknown model 'x'"));
        std::fs::write(file.path(), "prompt\n1\n").unwrap();
        assert!(error(&[path]).contains("line 2: output: is missing"));
        let rows = "name,prompt,output,streams,req_per_s\nsmall,64,4,1,9\nhuge,2000000,4,1,9\n";
        std::fs::write(file.path(), rows).unwrap();
        assert!(error(&[path]).contains("row 'huge' cannot be simulated: req_per_s has no value"));
    }
}
