//! `sluice report`: a page about a day of requests, from the records that the gateway wrote.
//!
//! Reads any number of files of `[records]` (or of the access log), in any order, writes one HTML
//! file, and prints a summary. With `--lab`, or with the names of a GPU and a model, the worst five
//! minutes are replayed on simulated engines with other settings (`what_if.rs`).
//!
//! Exit codes: 0 done; 1 the page could not be written; 2 the records or the scenario are not
//! valid.

mod variants;
mod what_if;

use std::collections::BTreeSet;
use std::fs::File;
use std::io::BufReader;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context as _, bail};
use clap::Args;

use super::terminal::wrapped;
use sluice_bench::records::{self, Day, summary, worst};
use sluice_bench::report::sections;
use what_if::Answer;

const COLUMNS: usize = 80;

/// Make an HTML page of a day of requests from the gateway's records.
#[derive(Clone, Debug, Args)]
pub struct ReportArgs {
    /// Files that the gateway wrote ([records], or [access_log]), in any order
    #[arg(value_name = "FILE", required = true)]
    files: Vec<PathBuf>,
    /// The HTML page to write
    #[arg(long, short, value_name = "FILE", default_value = "report.html")]
    output: PathBuf,
    #[command(flatten)]
    lab: what_if::WhatIfArgs,
}

struct Made {
    page: String,
    summary: String,
}

/// Runs the command.
pub fn run(args: &ReportArgs) -> ExitCode {
    let Made { page, summary } = match make(args) {
        Ok(made) => made,
        Err(error) => {
            eprintln!("report: {error:#}");
            return ExitCode::from(2);
        }
    };
    if let Err(error) = std::fs::write(&args.output, page) {
        eprintln!("report: cannot write {}: {error}", args.output.display());
        return ExitCode::FAILURE;
    }
    println!("{}", wrapped(summary.trim_end(), COLUMNS));
    eprintln!("wrote {}", args.output.display());
    ExitCode::SUCCESS
}

fn make(args: &ReportArgs) -> anyhow::Result<Made> {
    let day = read(&args.files)?;
    let Some(period) = worst::worst(&day.entries) else {
        let files = if args.files.len() == 1 { "the file has" } else { "the files have" };
        let left_out = day.notes.join(" ");
        bail!("{files} no record of a request that generates text; is [records] in the configuration? {left_out}");
    };
    let mut all = records::sections(&day.entries);
    let Answer { section, sentences } = what_if::answer(&args.lab, &day.entries, &args.files, &period)?;
    all.insert(1, section);
    let [first, last] = [day.entries.first(), day.entries.last()].map(|entry| entry.map_or(0.0, |entry| entry.at));
    let title = format!("Requests from {} to {} UTC", records::clock(first), records::clock(last));
    let page = sections::page("sluice report", &title, &day.notes, &all);
    let notes: String = day.notes.iter().map(|note| format!("Note: {note}\n")).collect();
    Ok(Made { page, summary: summary::text(&day.entries, &period) + &notes + &sentences })
}

fn read(files: &[PathBuf]) -> anyhow::Result<Day> {
    let (mut day, mut seen) = (Day::default(), BTreeSet::new());
    for path in files {
        let name = path.display().to_string();
        let file = open(path)?;
        if !seen.insert(path.canonicalize().with_context(|| format!("cannot read {name}"))?) {
            bail!("{name} is given twice; its requests would count twice");
        }
        day.read(&name, BufReader::new(file))?;
    }
    day.sort();
    Ok(day)
}

fn open(path: &Path) -> anyhow::Result<File> {
    let context = || format!("cannot read {}", path.display());
    let file = File::open(path).with_context(context)?;
    if file.metadata().with_context(context)?.is_dir() {
        bail!("{} is a folder; give the files in it", path.display());
    }
    Ok(file)
}

#[cfg(test)]
mod tests;
