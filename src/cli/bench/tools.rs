//! `sluice bench report` and `sluice bench compare`: commands for saved results.
//!
//! They read files of `--save-result`, and files of `vllm bench serve` that hold single requests. A
//! file may hold a sweep. Exit codes: 0 done, with any verdict; 1 a file cannot be read or written;
//! 2 wrong usage.

use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context as _, bail};
use clap::{Args, Subcommand};

use crate::cli::terminal::{fitted, table_width};
use sluice_bench::report::columns::Columns;
use sluice_bench::report::compare::{self, CompareOptions, Comparison, Unit};
use sluice_bench::result::file;
use sluice_bench::{RunResult, report};
use sluice_core::stats::Estimate;

/// Commands for saved results
#[derive(Clone, Debug, Subcommand)]
pub(super) enum Tool {
    /// Draw saved results: one self-contained HTML file, and SVG plots
    Report(ReportArgs),
    /// Compare two saved results: changes, their certainty, and whether they matter
    Compare(CompareArgs),
}

#[derive(Clone, Debug, Args)]
pub(super) struct CompareArgs {
    /// The result to compare with
    #[arg(value_name = "A.json")]
    a: PathBuf,
    /// The result that may be better or worse
    #[arg(value_name = "B.json")]
    b: PathBuf,
    /// Confidence of all intervals together, in percent
    #[arg(long, value_name = "PERCENT", default_value_t = 95.0)]
    confidence: f64,
    /// Largest change of a rate or latency that does not matter, in percent
    #[arg(long, value_name = "PERCENT", default_value_t = 5.0)]
    margin: f64,
    /// Like --margin, for shares of requests (failed, within objectives), in percentage points
    #[arg(long, value_name = "POINTS", default_value_t = 1.0)]
    margin_points: f64,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

#[derive(Clone, Debug, Args)]
pub(super) struct ReportArgs {
    /// Files written by --save-result; several results are drawn as a sweep
    #[arg(value_name = "FILE", required = true)]
    files: Vec<PathBuf>,
    /// File for the page; - is stdout
    #[arg(long, value_name = "FILE", default_value = "report.html")]
    html: PathBuf,
    /// Also write each plot as an SVG file into this folder
    #[arg(long, value_name = "DIR")]
    svg: Option<PathBuf>,
}

pub(super) fn run(tool: &Tool) -> ExitCode {
    let done = match tool {
        Tool::Report(args) => draw(args),
        Tool::Compare(args) => return compare(args),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("bench: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn draw(args: &ReportArgs) -> anyhow::Result<()> {
    let mut runs = Vec::new();
    for path in &args.files {
        runs.extend(file::load(path)?);
    }
    page(&runs, &args.html)?;
    args.svg.as_deref().map_or(Ok(()), |folder| plots(&runs, folder))
}

pub(super) fn page(runs: &[RunResult], path: &Path) -> anyhow::Result<()> {
    let html = report::html(runs);
    if path == Path::new("-") {
        return std::io::stdout().write_all(html.as_bytes()).context("cannot write to stdout");
    }
    std::fs::write(path, html).with_context(|| format!("cannot write {}", path.display()))?;
    eprintln!("wrote {}", path.display());
    Ok(())
}

fn compare(args: &CompareArgs) -> ExitCode {
    let wrong = |what: &str, why: &str| {
        eprintln!("bench: {what}: {why}");
        ExitCode::from(2)
    };
    if !(50.0..100.0).contains(&args.confidence) {
        return wrong("--confidence", "give a percentage from 50 to below 100");
    }
    if !(args.margin.is_finite() && args.margin >= 0.0 && args.margin_points.is_finite() && args.margin_points >= 0.0) {
        return wrong("--margin", "give a percentage of 0 or more");
    }
    let options = CompareOptions {
        confidence: args.confidence / 100.0,
        margin: args.margin / 100.0,
        points: args.margin_points / 100.0,
    };
    let print = |text: String| std::io::stdout().write_all(text.as_bytes()).context("cannot write to stdout");
    let done = result_pairs(args).and_then(|pairs| {
        let many = pairs.len() > 1;
        let mut all = Vec::new();
        for ResultPair { name, a, b } in pairs {
            let comparison = compare::compare(&a, &b, options)?;
            if args.json {
                let mut json = comparison.json();
                json["name"] = name.into();
                all.push(json);
                continue;
            }
            let title = if many { format!("\n{name}\n") } else { String::new() };
            print(fitted(&format!("{title}{}\n", comparison_text(&comparison))))?;
        }
        match (args.json, many) {
            (false, _) => Ok(()),
            (true, true) => print(format!("{:#}\n", serde_json::Value::Array(all))),
            (true, false) => print(format!("{:#}\n", all.pop().unwrap_or_default())),
        }
    });
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("bench: {error:#}");
            ExitCode::FAILURE
        }
    }
}

struct ResultPair {
    name: String,
    a: RunResult,
    b: RunResult,
}

/// The results to compare: one from each file, or two sweeps, run by run.
fn result_pairs(args: &CompareArgs) -> anyhow::Result<Vec<ResultPair>> {
    let (a, mut b) = (file::load(&args.a)?, file::load(&args.b)?);
    if let ([a], [b]) = (&a[..], &b[..]) {
        return Ok(vec![ResultPair { name: String::new(), a: a.clone(), b: b.clone() }]);
    }
    let key = |run: &RunResult| (run.config.max_concurrency, run.config.request_rate.map(f64::to_bits));
    let (mut pairs, mut alone) = (Vec::new(), 0);
    // The first run is paired with the first run of its kind, the second with the second.
    for run in a {
        match b.iter().position(|other| key(other) == key(&run)) {
            Some(at) => pairs.push(ResultPair { name: report::name(&run), a: run, b: b.remove(at) }),
            None => alone += 1,
        }
    }
    if alone + b.len() > 0 {
        eprintln!("note: {alone} runs of A and {} of B have no counterpart and are ignored", b.len());
    }
    if pairs.is_empty() {
        bail!("the sweeps have no concurrency or rate in common; compare runs with the same configuration");
    }
    Ok(pairs)
}

fn comparison_text(comparison: &Comparison) -> String {
    let mut table = Columns::new(["", "A", "B", "change", "interval", "verdict"]);
    for row in &comparison.rows {
        let Estimate { value, low, high } = row.change.0;
        let (scale, unit) = if row.unit == Unit::Share { (100.0, " pt") } else { (100.0, " %") };
        let end = |value: f64| if value.is_finite() { format!("{:+.1}", value * scale) } else { "?".to_owned() };
        table.add([
            row.name.clone(),
            number(row.unit, row.a.value),
            number(row.unit, row.b.value),
            if value.is_finite() { format!("{:+.1}{unit}", value * scale) } else { "-".to_owned() },
            format!("{}{} .. {}", if row.rough { "~ " } else { "" }, end(low), end(high)),
            comparison.verdict_on(row).to_owned(),
        ]);
    }
    let table = table.text(Some(table_width()));
    // If the loads differ, the numbers are worthless, so the verdict comes first.
    let mut text = match comparison.loads.is_empty() {
        true => format!("{table}\n{}\n", comparison.verdict()),
        false => format!("{}\n\n{table}\n", comparison.verdict()),
    };
    if comparison.rows.iter().any(|row| row.rough) {
        text.push_str("~: an approximate interval: too few requests, or too clustered, for a guaranteed one.\n");
    }
    if comparison.rows.iter().any(|row| !row.change.0.is_bounded()) {
        text.push_str("?: the change is unbounded on that side.\n");
    }
    text.push_str(&format!(
        "All intervals together: about {} %. They cover randomness within a run, not other differences between the runs (age, caches, \
         machine): repeat the comparison to confirm a difference.\n",
        comparison.options.confidence * 100.0
    ));
    comparison.notes.iter().for_each(|note| text.push_str(&format!("note: {note}\n")));
    text
}

fn number(unit: Unit, value: f64) -> String {
    match unit {
        Unit::Share => format!("{:.2} %", value * 100.0),
        Unit::PerSecond => format!("{value:.2}"),
        Unit::Seconds if value < 10.0 => format!("{:.1} ms", value * 1e3),
        Unit::Seconds => format!("{value:.2} s"),
    }
}

fn plots(runs: &[RunResult], folder: &Path) -> anyhow::Result<()> {
    let plots = report::plots(runs);
    if plots.is_empty() {
        bail!("nothing to plot: these results are neither one run nor a sweep over concurrency or rate");
    }
    std::fs::create_dir_all(folder).with_context(|| format!("cannot make {}", folder.display()))?;
    for (name, svg) in plots {
        let path = folder.join(name);
        std::fs::write(&path, svg).with_context(|| format!("cannot write {}", path.display()))?;
        eprintln!("wrote {}", path.display());
    }
    Ok(())
}
