//! `sluice lab run`: runs the variants of a scenario and prints a table, JSON or an HTML page.
//!
//! Runs are spread over the cores. Their duration goes to stderr.

use std::collections::BTreeSet;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Instant;

use anyhow::Context as _;
use clap::Args;

use crate::cli::terminal::table_width;
use sluice_bench::report;
use sluice_bench::result::file;
use sluice_core::base::Period;
use sluice_lab::study::VariantRuns;
use sluice_lab::{LabError, Measure, Options, Scenario, Study, expect, sweep, table};

/// The flags of `sluice lab run`.
#[derive(Clone, Debug, Args)]
pub(super) struct RunArgs {
    /// The file with the scenario
    #[arg(value_name = "FILE")]
    file: PathBuf,
    /// Number of runs of each variant [default: seeds in the file]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    seeds: Option<u64>,
    /// The first seed; the other seeds are 16 apart
    #[arg(long, value_name = "SEED", default_value_t = 1)]
    seed: u64,
    /// Change the gateway's configuration in all variants (repeatable)
    #[arg(long, value_name = "KEY=VALUE")]
    set: Vec<String>,
    /// One variant for each value: a key of the gateway, vllm.FLAG, vllm@BACKEND.FLAG, load,
    /// engines or gpu (repeatable)
    #[arg(long, value_name = "KEY=VALUE,..")]
    sweep: Vec<String>,
    /// Run only the variant with this name (repeatable)
    #[arg(long, value_name = "NAME")]
    variant: Vec<String>,
    /// Measures to compare, such as short.ttft.p99, all.failed or hit_rate (repeatable) [default:
    /// measures in the file]
    #[arg(long, value_name = "MEASURE")]
    measure: Vec<Measure>,
    /// Duration of traffic that has no duration in the file, such as 5m [default: duration in the
    /// file]
    #[arg(long, value_name = "TIME")]
    duration: Option<Period>,
    /// Number of threads [default: number of cores]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..))]
    threads: Option<u16>,
    /// Print JSON instead of the table
    #[arg(long)]
    json: bool,
    /// Write an HTML page with plots
    #[arg(long, value_name = "FILE")]
    html: Option<PathBuf>,
    /// Save the first run of each variant in this folder, in the format of vllm bench serve
    #[arg(long, value_name = "FOLDER")]
    save: Option<PathBuf>,
}

pub(super) fn run(args: &RunArgs) -> ExitCode {
    let begun = Instant::now();
    let (study, unmet) = match study(args) {
        Ok(study) => study,
        Err(error) => {
            eprintln!("lab: {error}");
            return ExitCode::from(2);
        }
    };
    let runs = study.variants.len() * study.seeds.len();
    eprintln!("{runs} runs in {:.1} s", begun.elapsed().as_secs_f64());
    for variant in &study.variants {
        let Some(why) = &variant.failure else { continue };
        let hint = if why.starts_with("status 404") { ": is its model one of the configuration?" } else { "" };
        eprintln!("{}: no request completed; the first one failed: {why}{hint}", variant.name);
    }
    unmet.iter().for_each(|unmet| eprintln!("expectation not met: {unmet}"));
    match show(args, &study) {
        Ok(()) if unmet.is_empty() => ExitCode::SUCCESS,
        Ok(()) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("lab: {error:#}");
            ExitCode::FAILURE
        }
    }
}

/// Runs the study. Returns the study and the expectations of the file that are not met.
fn study(args: &RunArgs) -> Result<(Study, Vec<String>), LabError> {
    let mut scenario = Scenario::load(&args.file)?;
    scenario.file.set.extend(args.set.iter().cloned());
    scenario.file.duration = args.duration.or(scenario.file.duration);
    // Expectations hold for the file as written, without changes by flags.
    let is_unchanged =
        args.set.is_empty() && args.sweep.is_empty() && args.variant.is_empty() && args.duration.is_none();
    let expected = if is_unchanged { std::mem::take(&mut scenario.file.expect) } else { Vec::new() };
    if let Some(note) = not_checked(scenario.file.expect.len()) {
        eprintln!("{note}");
    }
    let mut variants = scenario.file.variants();
    if let Some(unknown) = args.variant.iter().find(|name| !variants.iter().any(|variant| variant.name == **name)) {
        let names: Vec<&str> = variants.iter().map(|variant| variant.name.as_str()).collect();
        return Err(LabError::Sweep(format!("no variant is called '{unknown}'; the file has {}", names.join(", "))));
    }
    variants.retain(|variant| args.variant.is_empty() || args.variant.contains(&variant.name));
    let variants = sweep::vary(&variants, &args.sweep)?;
    let written = scenario.file.measures.iter().map(|text| text.parse()).collect::<Result<Vec<Measure>, _>>()?;
    let mut measures = if args.measure.is_empty() { written } else { args.measure.clone() };
    for measure in expect::measures(&expected)? {
        if !measures.contains(&measure) {
            measures.push(measure);
        }
    }
    let threads = args.threads.map_or_else(|| std::thread::available_parallelism().map_or(1, usize::from), usize::from);
    let seeds = args.seeds.unwrap_or(scenario.file.seeds);
    let keep = args.html.is_some() || args.save.is_some() || is_single(variants.len(), seeds);
    let study = Study::run(&scenario, &variants, &measures, Options { seed: args.seed, seeds, threads, keep })?;
    let unmet = expect::unmet(&study, &expected)?;
    Ok((study, unmet))
}

fn not_checked(count: usize) -> Option<String> {
    let s = if count == 1 { "" } else { "s" };
    let why = "expectations hold for the file without --set, --sweep, --variant and --duration";
    (count > 0).then(|| format!("{count} expectation{s} not checked: {why}"))
}

fn is_single(variants: usize, seeds: u64) -> bool {
    variants == 1 && seeds == 1
}

fn show(args: &RunArgs, study: &Study) -> anyhow::Result<()> {
    if let Some(folder) = &args.save {
        std::fs::create_dir_all(folder).with_context(|| folder.display().to_string())?;
        let names = file_names(study.variants.iter().map(|variant| variant.name.as_str()));
        study.variants.iter().zip(&names).try_for_each(|(variant, name)| save(folder, name, variant))?;
    }
    if let Some(path) = &args.html {
        std::fs::write(path, page(study)).with_context(|| path.display().to_string())?;
    }
    let text = if args.json {
        format!("{:#}\n", table::json(study))
    } else if let (true, Some(first)) = (
        is_single(study.variants.len(), study.seeds.len() as u64),
        study.variants.first().and_then(|one| one.first.as_ref()),
    ) {
        report::table::table(&first.result, Some(table_width()))
    } else {
        table::text(study)
    };
    // A reader that leaves early (`| head`) is no failure.
    let _ = std::io::stdout().lock().write_all(text.as_bytes());
    Ok(())
}

/// A file name for each variant: letters and digits of the name, and the variant's number (from 1)
/// if an earlier variant has the same file name.
fn file_names<'a>(variants: impl Iterator<Item = &'a str>) -> Vec<String> {
    let mut taken = BTreeSet::new();
    let named = variants.zip(1..).map(|(variant, number)| {
        let plain: String =
            variant.chars().map(|letter| if letter.is_ascii_alphanumeric() { letter } else { '-' }).collect();
        let mut name = plain.clone();
        let mut numbers = number..;
        // Names that differ only in case count as equal, because file systems may ignore case.
        while !taken.insert(name.to_ascii_lowercase()) {
            name = format!("{plain}-{}", numbers.next().unwrap_or(number));
        }
        name
    });
    named.collect()
}

/// Saves a run as `NAME.json`, for `sluice bench report` and `compare`.
fn save(folder: &Path, name: &str, variant: &VariantRuns) -> anyhow::Result<()> {
    let Some(run) = &variant.first else { return Ok(()) };
    let mut result = run.result.clone();
    result.config.label = Some(variant.name.clone());
    Ok(file::save(&result, &folder.join(format!("{name}.json")), true, false)?)
}

fn page(study: &Study) -> String {
    let labelled = |variant: &VariantRuns| {
        let mut result = variant.first.as_ref()?.result.clone();
        result.config.label = Some(variant.name.clone());
        Some(result)
    };
    let runs: Vec<_> = study.variants.iter().filter_map(labelled).collect();
    let title = if study.title.is_empty() { "Simulation" } else { &study.title };
    let note = format!(
        "Means over {} seeds with the half-width of their 95 % interval, and the change from the first variant. ~: the \
         change may be chance (its interval contains 0). Engines are simulated.",
        study.seeds.len()
    );
    report::variants::page(title, &note, &table::rows(study), &runs)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_variant_has_a_file_of_its_own() {
        let names = |of: &[&str]| file_names(of.iter().copied());
        assert_eq!(names(&["round robin", "least-work"]), ["round-robin", "least-work"]);
        assert_eq!(names(&["größe", "grüße", "a b", "A-b"]), ["gr--e", "gr--e-2", "a-b", "A-b-4"]);
        assert_eq!(names(&["a-2", "a", "a", "a?", "a "]), ["a-2", "a", "a-3", "a-", "a--5"]);
    }

    #[test]
    fn expectations_that_are_not_checked_are_counted() {
        assert_eq!(not_checked(0), None);
        let note = not_checked(2).unwrap();
        assert!(note.starts_with("2 expectations not checked: expectations hold for the file without --set"), "{note}");
    }
}
