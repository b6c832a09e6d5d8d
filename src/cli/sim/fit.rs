//! `sluice sim fit DATA`: fits the simulator's constants to measured load tests, and reports how accurate the fit is.
//!
//! Prints the measured and simulated cells of each row, with the current constants and with the fitted ones, then each third
//! of the rows as predicted by a fit to the others. Deterministic. Exit codes: 0 done, 1 the data or a profile cannot be
//! used, 2 wrong usage.

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Context;
use clap::Parser;

use crate::sim::calibrate::search::{FITTED, FittedConstant};
use crate::sim::calibrate::{Setting, Spread, report, rows};
use crate::sim::{Constants, Gpu, Layout, Model};

/// Fits the simulator's constants to rows of a load test.
#[derive(Debug, Parser)]
#[command(name = "sluice sim fit")]
struct FitArgs {
    /// CSV: one line per run, what was sent and what was measured (columns: see --columns)
    #[arg(required_unless_present = "columns")]
    data: Option<PathBuf>,
    /// GPU that the rows were measured on: a built-in name or the path of a TOML file
    #[arg(long, default_value = "h200")]
    gpu: String,
    /// Model that it served: a built-in name or the path of a TOML file
    #[arg(long, default_value = "llama-3.1-8b")]
    model: String,
    /// GPUs that shared the model
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..))]
    tensor_parallel_size: u32,
    /// Constants to begin with, a file that this command wrote; the built-in ones if not given
    #[arg(long)]
    start: Option<PathBuf>,
    /// Where to write the fitted constants
    #[arg(long)]
    out: Option<PathBuf>,
    /// Only show what the constants to begin with make of the rows
    #[arg(long)]
    show: bool,
    /// Print the columns of DATA
    #[arg(long)]
    columns: bool,
}

/// Runs `sluice sim fit` with what follows `fit`.
pub(super) fn run(args: &[String]) -> ExitCode {
    let command = std::iter::once("sluice sim fit").chain(args.iter().map(String::as_str));
    let args = match FitArgs::try_parse_from(command) {
        Ok(args) => args,
        Err(error) => {
            // If this cannot be printed, there is nothing left to do.
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
    let Some(data) = args.data.as_ref().filter(|_| !args.columns) else {
        println!("{}", rows::columns());
        return Ok(());
    };
    let read =
        |path: &PathBuf| std::fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()));
    let rows = rows::parse(&read(data)?).with_context(|| data.display().to_string())?;
    let layout = Layout { tensor_parallel: args.tensor_parallel_size, ..Layout::default() };
    let setting = Setting::new(Gpu::load(&args.gpu)?, Model::load(&args.model)?, layout);
    let start = match &args.start {
        Some(path) => Constants::parse(&path.display().to_string(), &read(path)?)?,
        None => Constants::fitted(),
    };
    println!("== before the fit\n{}", report::table(&rows, &setting.play_all(&start, &rows)?));
    if args.show {
        return Ok(());
    }
    let fitted = setting.fit(&start, &rows)?;
    println!("\n== after the fit\n{}", report::table(&rows, &setting.play_all(&fitted, &rows)?));
    println!("\n== each third of the rows, predicted by a fit to the others");
    let (left, cells) = setting.leave_thirds_out(&start, &rows)?;
    println!("{}", report::table(&left, &cells));
    println!("\n== constants\n{}", changes(&start, &fitted));
    if let Some(path) = &args.out {
        let spread = Spread::of(rows.iter().zip(&setting.play_all(&fitted, &rows)?));
        let text =
            format!("# Written by sluice sim fit for {} and {}: {spread}.\n\n{}", args.gpu, args.model, fitted.table());
        std::fs::write(path, text).with_context(|| format!("cannot write {}", path.display()))?;
        println!("written to {}", path.display());
    }
    Ok(())
}

/// The fitted constants, each with its old value.
fn changes(start: &Constants, fitted: &Constants) -> String {
    let of = |constants: &Constants, part: &str, key: &str| {
        constants.table().get(part).and_then(|part| part.get(key)).and_then(toml::Value::as_float).unwrap_or(f64::NAN)
    };
    let line = |FittedConstant { table, key, .. }: &FittedConstant| {
        format!("{:32} {:>10} was {}", format!("{table}.{key}"), of(fitted, table, key), of(start, table, key))
    };
    FITTED.iter().map(line).collect::<Vec<_>>().join("\n")
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
        let setting = Setting::new(Gpu::load("h200").unwrap(), Model::load("llama-3.1-8b").unwrap(), Layout::default());
        let rows = rows::parse(&std::fs::read_to_string(path("rows.csv")).unwrap()).unwrap();
        let tpot = |constants: &Constants| setting.play_all(constants, &rows).unwrap()[0][2];
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
    }
}
