//! The worst period of the records, replayed on simulated engines with other settings.
//!
//! The first row simulates the settings as they were. Its distance from the measurement shows how
//! far to trust the simulation. Without a configuration there is one model, so adapters are not
//! simulated.
//!
//! Bounds: one period of [`worst::PERIOD`] seconds, [`SEEDS`] runs of each setting.

use std::fs::File;
use std::io::{BufRead as _, BufReader, Write as _};
use std::path::PathBuf;

use anyhow::Context as _;
use clap::Args;
use tempfile::NamedTempFile;

use super::variants::variants;
use sluice_bench::records::{Entry, clock, read, worst};
use sluice_bench::report::sections::Section;
use sluice_lab::file::TrafficTable;
use sluice_lab::{LabFile, Measure, Options, Scenario, Study, Variant, table};

const SEEDS: u64 = 3;
/// Ratio between the P99 of the simulation and the P99 of the records from which on the simulation
/// says little.
const FAR: f64 = 2.0;
/// Percentage of failed requests above which a simulation says little.
const FAILED_MAX: f64 = 10.0;
/// A setting with this share of the best gain is preferred if it needs no more engines.
const NEARLY: f64 = 0.8;
const MEASURES: [&str; 4] = ["all.ttft.p99", "all.ttft.p50", "all.e2el.p99", "all.failed"];
const TTFT_P99: usize = 0;
const FAILED: usize = 3;
const TITLE: &str = "What would have helped";
const HOW: &str = "To see what would have helped, say which engines serve: --gpu h200 --model llama-3.1-8b [--config sluice.toml], or \
                   --lab FILE with a scenario of sluice lab. These minutes are then simulated with other settings.";

/// Flags that describe the engines for a simulation of the worst period.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "What would have helped")]
pub(super) struct WhatIfArgs {
    /// A file of `sluice lab` with the configuration, the engines and the variants to try; the
    /// records replace the traffic of the file
    #[arg(long, value_name = "FILE", conflicts_with_all = ["gpu", "model", "config"])]
    lab: Option<PathBuf>,
    /// The GPU of the engines: a preset of the simulator, or the path of a profile
    #[arg(long, value_name = "NAME", requires = "model")]
    gpu: Option<String>,
    /// The model: a preset, or the path of its `config.json`
    #[arg(long, value_name = "NAME", requires = "gpu")]
    model: Option<String>,
    /// The configuration of the gateway [default: one pool of as many engines as the records name]
    #[arg(long, value_name = "FILE", requires = "gpu")]
    config: Option<PathBuf>,
}

pub(super) struct Answer {
    pub(super) section: Section,
    pub(super) sentences: String,
}

/// Simulates the worst period of records that came from `files`.
pub(super) fn answer(
    args: &WhatIfArgs,
    entries: &[Entry],
    files: &[PathBuf],
    period: &worst::Period,
) -> anyhow::Result<Answer> {
    let what = format!(
        "The worst five minutes began at {} UTC: {} requests, {} of them failed or missed an objective, P99 {:.0} ms (TTFT; E2EL \
         where nothing was streamed).",
        clock(period.from),
        period.requests,
        period.missed,
        period.p99
    );
    let Some(mut scenario) = scenario(args, entries)? else {
        let rows = vec![vec!["not simulated".to_owned()], vec![HOW.to_owned()]];
        let section = Section { title: TITLE.to_owned(), note: what, rows, ..Section::default() };
        return Ok(Answer { section, sentences: HOW.to_owned() });
    };
    let is_configured = args.config.is_some() || args.lab.is_some();
    let trace = trace(files, period, is_configured)?;
    scenario.file.traffic = vec![traffic(&trace)?];
    scenario.file.duration = None;
    let variants = variants(&scenario);
    let [settings, requests] = [("setting", variants.len()), ("request", period.requests)].map(counted);
    eprintln!("report: simulating {settings} for {requests} ..");
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    let options = Options { seed: 1, seeds: SEEDS, threads, keep: false };
    let measures = MEASURES.map(str::parse::<Measure>).into_iter().collect::<Result<Vec<_>, _>>()?;
    let study =
        Study::run(&scenario, &variants, &measures, options).context("the worst five minutes cannot be simulated")?;
    let found = found(&study, &variants);
    let sentences = format!("{} {found}", fidelity(&study, entries, period));
    let note = format!(
        "{what} Below, these requests on simulated engines, {SEEDS} times with each setting, with the change from the first row and \
         ~ where that may be chance. {sentences}"
    );
    let section = Section { title: TITLE.to_owned(), note, rows: table::rows(&study), ..Section::default() };
    Ok(Answer { section, sentences: format!("{TITLE} in the worst 5 minutes (simulated): {sentences}") })
}

/// A number with a noun: `1 setting`, `2 settings`.
fn counted((noun, count): (&str, usize)) -> String {
    format!("{count} {noun}{}", if count == 1 { "" } else { "s" })
}

/// The scenario that the flags describe, with traffic that will be replaced.
fn scenario(args: &WhatIfArgs, entries: &[Entry]) -> anyhow::Result<Option<Scenario>> {
    if let Some(path) = &args.lab {
        return Ok(Some(Scenario::load(path)?));
    }
    let (Some(gpu), Some(model)) = (&args.gpu, &args.model) else { return Ok(None) };
    let mut engine =
        toml::Table::from_iter([("gpu".to_owned(), gpu.as_str().into()), ("model".to_owned(), model.as_str().into())]);
    let mut file = toml::Table::new();
    match &args.config {
        Some(path) => {
            let path = std::path::absolute(path).context("the path of --config")?;
            file.insert("config".to_owned(), path.display().to_string().into());
        }
        None => {
            let ran = entries.iter().filter(|entry| !entry.backend.is_empty());
            let mut names: Vec<_> = ran.map(|entry| &entry.backend).collect();
            names.sort_unstable();
            names.dedup();
            engine.insert("count".to_owned(), i64::try_from(names.len().max(1)).unwrap_or(1).into());
        }
    }
    file.insert("engine".to_owned(), vec![toml::Value::Table(engine)].into());
    file.insert("traffic".to_owned(), toml::Value::Array(Vec::new()));
    let file = LabFile::of_table(file, "the flags")?;
    Ok(Some(Scenario { file, folder: PathBuf::from(".") }))
}

/// The records of a period in a temporary file. Without names of models, every request is for the
/// only model.
fn trace(files: &[PathBuf], period: &worst::Period, with_models: bool) -> anyhow::Result<NamedTempFile> {
    let mut lines = Vec::new();
    for path in files {
        let file = File::open(path).with_context(|| format!("cannot read {}", path.display()))?;
        read::copy_between(BufReader::new(file), (period.from, period.to), &mut lines)?;
    }
    let mut out = NamedTempFile::new().context("cannot make a temporary file")?;
    for line in lines.lines() {
        let mut line: serde_json::Map<String, serde_json::Value> = serde_json::from_str(&line?)?;
        if !with_models {
            line.remove("model");
        }
        serde_json::to_writer(&mut out, &line)?;
        out.write_all(b"\n")?;
    }
    out.flush().context("cannot write a temporary file")?;
    Ok(out)
}

fn traffic(trace: &NamedTempFile) -> anyhow::Result<TrafficTable> {
    let path = trace.path().display().to_string();
    let trace = toml::Table::from_iter([("format".to_owned(), "records".into()), ("path".to_owned(), path.into())]);
    let table = toml::Table::from_iter([("trace".to_owned(), toml::Value::Table(trace))]);
    toml::Value::Table(table).try_into().context("the recorded traffic")
}

fn fidelity(study: &Study, entries: &[Entry], period: &worst::Period) -> String {
    let simulated = study.estimate(0, TTFT_P99).value;
    let inside = entries.iter().filter(|entry| entry.at >= period.from && entry.at < period.to);
    if !inside.clone().any(|entry| entry.ttft.is_some()) || !simulated.is_finite() {
        return "The records of these minutes have no TTFT to compare with.".to_owned();
    }
    let failed = study.estimate(0, FAILED).value;
    let warning = if failed > FAILED_MAX {
        " With that many failures, do not rely on the rest: engines may need flags (such as those for adapters), in a file for --lab."
    } else if !(period.p99 / FAR..=period.p99 * FAR).contains(&simulated) {
        " That is far apart, so do not rely on the rest: check --gpu, --model and the configuration."
    } else {
        ""
    };
    format!(
        "Simulated as it was, P99 of TTFT is {simulated:.0} ms and {failed:.1} % fail; measured was {:.0} ms.{warning}",
        period.p99
    )
}

/// The best other setting by P99 of TTFT, in a sentence. A setting without more engines is
/// preferred if it brings nearly as much.
fn found(study: &Study, variants: &[Variant]) -> String {
    let failed = |place: usize| study.estimate(place, FAILED).value;
    let better = |place: &usize| study.change(0, *place, TTFT_P99).high < 0.0 && failed(*place) <= failed(0);
    let change = |place: &usize| study.change(0, *place, TTFT_P99).value;
    let best_of = |with_engines: bool| {
        let allowed = |place: &usize| with_engines || variants[*place].count.is_none();
        let found = (1..study.variants.len()).filter(better).filter(allowed);
        found.min_by(|one, other| change(one).total_cmp(&change(other)))
    };
    let text =
        |place: usize| format!("\"{}\": P99 of TTFT {:+.0} %", study.variants[place].name, 100.0 * change(&place));
    match (best_of(false), best_of(true)) {
        (Some(own), Some(best)) if own == best => format!("Best was {}.", text(own)),
        (Some(own), Some(best)) if change(&own) <= NEARLY * change(&best) => {
            format!("Best without more engines was {}; {} would be little more.", text(own), text(best))
        }
        (Some(own), Some(best)) => format!("Best was {}; without more engines {}.", text(best), text(own)),
        (None, Some(best)) => format!("Best was {}; nothing without more engines helps for certain.", text(best)),
        (_, None) => "None of the other settings shortens P99 of TTFT for certain.".to_owned(),
    }
}
