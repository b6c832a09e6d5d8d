//! Measures the part of the online tuner that changes flags of engines, on simulated engines.
//!
//! | command | shows |
//! |---|---|
//! | `starts` | from wrong flags: requests in time, changes and restarts |
//! | `hours` | the same for each part of a load that changes |
//! | `planted` | whether a change that makes engines worse, or no difference, is promoted |
//! | `calibration` | the forecast and the realised gain of each change |
//!
//! The binary that `cargo bench --no-run -p sluice-lab --bench engines` builds runs on any machine
//! with the folder `config`. It reads only the given files and `config/one-pool.toml`, which these
//! files name. `--from SEED --seeds N` runs N seeds, SEED and every sixteenth number after it. The
//! faults are "10 % slower", "crashes under load", "hangs under load", "fails for long prompts" and
//! "no difference".
//!
//! ```sh
//! cd config/lab/tuner/engines
//! engines starts {chat,documents,mixed,memory}.toml --seeds 3 --jobs 32
//! engines hours stays.toml --repeat 14 --seeds 2 --jobs 8
//! engines planted faults.toml --only "10 % slower" --seeds 100 --jobs 32     # or faults-many.toml
//! engines planted faults.toml --only "no difference" --seeds 1000 --jobs 32
//! engines hours changes.toml --seeds 4 --jobs 8
//! engines hours day.toml --repeat 7
//! engines calibration {chat,changes}.toml --seeds 5 --jobs 32
//! ```

use std::path::PathBuf;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use parking_lot::Mutex;

use sluice_bench::nth_seed;
use sluice_bench::result::record::Outcome;
use sluice_core::meter::slo::Timings;
use sluice_core::stats::quantile::percentile;
use sluice_lab::{Forecaster, Lab, LabRun, Plant, PlantedFault, Scenario, Variant, run};
use sluice_online::engines::flags::EngineFlag;
use sluice_online::engines::forecast::{CandidateForecast, EngineAnswer, EngineQuestion, Realised};
use sluice_online::event::EventKind;
use sluice_online::limits::forecast::Forecast;

const USAGE: &str = "engines starts|planted|hours|calibration FILE.. [--from SEED] [--seeds N] [--jobs N] [--events] [--only NAME] [--repeat N]";

#[derive(Clone)]
struct Options {
    from: u64,
    seeds: u64,
    jobs: usize,
    events: bool,
    only: Option<String>,
    /// Number of times that the steps of the traffic run.
    repeat: usize,
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut options = Options { from: 1, seeds: 1, jobs: 2, events: false, only: None, repeat: 1 };
    let (mut what, mut files) = (String::new(), Vec::new());
    let mut args = std::env::args().skip(1).filter(|arg| arg != "--bench");
    while let Some(arg) = args.next() {
        match arg.as_str() {
            "--from" => options.from = args.next().ok_or(USAGE)?.parse()?,
            "--seeds" => options.seeds = args.next().ok_or(USAGE)?.parse()?,
            "--jobs" => options.jobs = args.next().ok_or(USAGE)?.parse()?,
            "--events" => options.events = true,
            "--repeat" => options.repeat = args.next().ok_or(USAGE)?.parse()?,
            "--only" => options.only = args.next(),
            _ if arg.starts_with("--") => return Err(USAGE.into()),
            _ if what.is_empty() => what = arg,
            _ => files.push(PathBuf::from(arg)),
        }
    }
    match what.as_str() {
        "starts" => starts(&files, &options),
        "planted" => planted(&files, &options),
        "hours" => hours(&files, &options),
        "calibration" => calibration(&files, &options),
        _ => Err(USAGE.into()),
    }
}

/// Runs every lab with every seed. Prints each result at once, so that it is not lost if the
/// program is stopped.
fn all<T: Send>(
    labs: &[Lab],
    options: &Options,
    of: impl Fn(&Lab, &LabRun, u64) -> T + Sync,
    line: impl Fn(usize, u64, &T) -> String + Sync,
) -> Vec<Vec<T>> {
    let jobs: Vec<(usize, u64)> =
        (0..labs.len()).flat_map(|lab| (0..options.seeds).map(move |run| (lab, nth_seed(options.from, run)))).collect();
    let (next, found) = (AtomicUsize::new(0), Mutex::new(Vec::new()));
    std::thread::scope(|scope| {
        for _ in 0..options.jobs {
            scope.spawn(|| {
                while let Some((lab, seed)) = jobs.get(next.fetch_add(1, Ordering::Relaxed)) {
                    let result = run(&labs[*lab], *seed).expect("a valid scenario");
                    if options.events {
                        events(&result);
                    }
                    let value = of(&labs[*lab], &result, *seed);
                    let mut found = found.lock();
                    println!("{}", line(*lab, *seed, &value));
                    found.push((*lab, value));
                }
            });
        }
    });
    let mut by_lab: Vec<Vec<T>> = labs.iter().map(|_| Vec::new()).collect();
    found.into_inner().into_iter().for_each(|(lab, value)| by_lab[lab].push(value));
    by_lab
}

fn events(run: &LabRun) {
    run.tuning.iter().for_each(|event| eprintln!("{event}"));
    if let Some(report) = &run.tuner {
        eprintln!("  {}; {}", report.engines.doing, report.engines.why);
    }
}

/// The share of the requests sent at `from` or later that met the configured objectives, and the
/// number of requests without a response.
fn attainment(lab: &Lab, run: &LabRun, from: f64) -> (f64, usize) {
    attainment_between(lab, run, from, f64::MAX)
}

fn is_shed(record: &sluice_bench::Record) -> bool {
    matches!(&record.outcome, Outcome::Failed(why) if why.starts_with("status 503"))
}

fn attainment_between(lab: &Lab, run: &LabRun, from: f64, to: f64) -> (f64, usize) {
    let objectives = lab.config.pools[0].slo.objectives();
    let (mut met, mut all, mut failed) = (0.0, 0.0, 0);
    for record in &run.result.requests {
        // A shed request got a 503, so it does not count as a request without a response.
        failed += usize::from(!record.is_completed() && !is_shed(record));
        if record.sent < from || record.sent >= to {
            continue;
        }
        let timings = Timings {
            ttft: Some(Duration::from_secs_f64(record.ttft)),
            tpot: record.tpot().map(Duration::from_secs_f64),
            e2el: Some(Duration::from_secs_f64(record.latency)),
        };
        all += 1.0;
        met += f64::from(u8::from(objectives.met(record.is_completed(), record.prompt_tokens, &timings)));
    }
    (met / all, failed)
}

/// A forecast for every change which says that the change reduces the loss to a quarter.
fn promises(_: &Lab, question: &EngineQuestion, _: u64) -> EngineAnswer {
    let now = Forecast { loss: 0.2, error: 0.0, attainment: 0.8 };
    let half = Forecast { loss: 0.05, error: 0.0, attainment: 0.95 };
    let found = CandidateForecast { forecast: Some(half), ..CandidateForecast::default() };
    let candidates = vec![found; question.candidates.len()];
    EngineAnswer { now: Some(now), absence: Some(0.0), candidates, ..EngineAnswer::default() }
}

/// Changes and requests of one run.
struct Trials {
    tried: usize,
    promoted: usize,
    undone: usize,
    failed: usize,
    /// Number of misses beyond the number that the rate of the first ten minutes would give.
    beyond: f64,
    requests: usize,
}

fn planted(files: &[PathBuf], options: &Options) -> Result<(), Box<dyn std::error::Error>> {
    let faults = [
        ("no difference", None),
        ("10 % slower", Some(PlantedFault::Slower(1.1))),
        ("crashes under load", Some(PlantedFault::CrashesAt(8))),
        ("hangs under load", Some(PlantedFault::HangsAt(8))),
        ("fails for long prompts", Some(PlantedFault::FailsAbove(2_000))),
    ];
    println!(
        "| load | fault | seed, or runs | tried | promoted | taken back | without a response | misses beyond, mean | allowed |"
    );
    println!("|---|---|--:|--:|--:|--:|--:|--:|--:|");
    for file in files {
        let scenario = Scenario::load(file)?;
        let row = |name: &str, which: String, runs: &[&Trials]| {
            let sum = |of: fn(&Trials) -> usize| runs.iter().map(|one| of(one)).sum::<usize>();
            let mean = |of: fn(&Trials) -> f64| runs.iter().map(|one| of(one)).sum::<f64>() / runs.len() as f64;
            // Allowed are 5 % of the misses that an objective of 99 % allows in 30 days, at the
            // rate of requests of these 40 minutes.
            let allowed = mean(|one| one.requests as f64) * 18.0 * 60.0 * 0.01 * 0.05;
            format!(
                "| {} | {name} | {which} | {} | {} | {} | {} | {:.0} | {allowed:.0} |",
                scenario.file.title,
                sum(|one| one.tried),
                sum(|one| one.promoted),
                sum(|one| one.undone),
                sum(|one| one.failed),
                mean(|one| one.beyond),
            )
        };
        let chosen = faults.iter().filter(|(name, _)| options.only.as_ref().is_none_or(|only| name == only));
        let (names, labs): (Vec<&str>, Vec<Lab>) = {
            let lab = |(name, fault): &(&'static str, Option<PlantedFault>)| {
                let mut lab = scenario.lab(&Variant::default())?;
                lab.forecaster = Some(Forecaster { flags: promises, limits: None });
                let flag = EngineFlag::GpuMemoryUtilization;
                let plants = (30..=95).filter(|value| *value != 92);
                lab.plants = plants
                    .filter_map(|value| Some(Plant { flag, value: f64::from(value) / 100.0, fault: (*fault)? }))
                    .collect();
                Ok::<_, sluice_lab::LabError>((*name, lab))
            };
            chosen.map(lab).collect::<Result<Vec<_>, _>>()?.into_iter().unzip()
        };
        let trials = |lab: &Lab, run: &LabRun, seed: u64| {
            let count =
                |kind| run.tuning.iter().filter(|event| event.kind == kind && event.key.contains(".engine.")).count();
            let share = |from: f64, to: f64| 1.0 - attainment_between(lab, run, from, to).0;
            let (_, failed) = attainment(lab, run, 0.0);
            let before = share(60.0, 600.0);
            let requests = run.result.requests.len();
            let trials = Trials {
                tried: count(EventKind::Tried),
                promoted: count(EventKind::Promoted),
                undone: count(EventKind::Undone),
                failed,
                beyond: (share(600.0, f64::MAX) - before) * requests as f64 * 0.75,
                requests,
            };
            if trials.promoted > 0 || (trials.failed > 0 && options.events) {
                eprintln!("seed {seed}: promoted {}, failed {}", trials.promoted, trials.failed);
                events(run);
            }
            trials
        };
        let line = |lab: usize, seed: u64, one: &Trials| row(names[lab], format!("seed {seed}"), &[one]);
        let found = all(&labs, options, trials, line);
        for (name, runs) in names.iter().zip(&found) {
            println!("{}", row(name, format!("all {}", runs.len()), &runs.iter().collect::<Vec<_>>()));
        }
    }
    Ok(())
}

/// Every start of a scenario in each of these modes of the tuner, with its name.
fn starts_of(scenario: &Scenario, options: &Options, modes: &[&'static str]) -> Result<Started, sluice_lab::LabError> {
    let mut started = Started::default();
    for variant in scenario.file.variants() {
        if options.only.as_ref().is_some_and(|only| variant.name != *only) {
            continue;
        }
        for mode in modes {
            let set = [&variant.set[..], &[format!("tuner.mode=\"{mode}\"")]].concat();
            started.labs.push(scenario.lab(&Variant { set, ..variant.clone() })?);
            started.names.push((variant.name.clone(), *mode));
        }
    }
    Ok(started)
}

#[derive(Default)]
struct Started {
    labs: Vec<Lab>,
    /// For each lab, the name of the start and the tuner's mode.
    names: Vec<(String, &'static str)>,
}

/// Changes of engines in a run: kept, tried, and the restarts that they took.
fn changes(lab: &Lab, run: &LabRun) -> [usize; 3] {
    let of_engines = run.tuning.iter().filter(|event| event.key.contains(".engine."));
    let count = |kind| of_engines.clone().filter(|event| event.kind == kind).count();
    let (kept, tried) = (count(EventKind::Kept), count(EventKind::Tried));
    // Each trial restarts one engine. Then a kept change restarts the other engines, and an undone
    // change restarts the first engine again.
    [kept, tried, tried + kept * (lab.engines.len() - 1) + count(EventKind::Undone)]
}

fn percent(share: f64) -> String {
    format!("{:.1}", 100.0 * share)
}

fn hours(files: &[PathBuf], options: &Options) -> Result<(), Box<dyn std::error::Error>> {
    println!(
        "| load | start | seed | tuner | % of the requests of each part that met their objectives | restarts | changes kept, tried | without a response |"
    );
    println!("|---|---|--:|---|---|--:|--:|--:|");
    for file in files {
        let mut scenario = Scenario::load(file)?;
        scenario.file.traffic.iter_mut().for_each(|traffic| traffic.steps = traffic.steps.repeat(options.repeat));
        let ends: Vec<f64> = scenario.file.traffic[0].steps.iter().fold(Vec::new(), |mut ends, (_, time)| {
            ends.push(ends.last().unwrap_or(&0.0) + time);
            ends
        });
        let Started { labs, names } = starts_of(&scenario, options, &["off", "apply"])?;
        let parts = |lab: &Lab, run: &LabRun, _| {
            let begins = std::iter::once(&0.0).chain(&ends);
            let met = begins.zip(&ends).map(|(from, to)| percent(attainment_between(lab, run, *from, *to).0));
            let [kept, tried, restarts] = changes(lab, run);
            let (met, failed) = (met.collect::<Vec<_>>().join(", "), attainment(lab, run, 0.0).1);
            format!("{met} | {restarts} | {kept}, {tried} | {failed} |")
        };
        all(&labs, options, parts, |lab, seed, row| {
            let (start, mode) = &names[lab];
            format!("| {} | {start} | {seed} | {mode} | {row}", scenario.file.title)
        });
    }
    Ok(())
}

/// The result of one run of `starts`.
struct Start {
    /// Attainment of the requests in the second half, and of all requests.
    met: [f64; 2],
    /// Mean and P99 of TTFT of all requests, seconds.
    ttft: [f64; 2],
    /// Requests without a response.
    failed: usize,
    /// Changes kept, changes tried, and restarts, as from [`changes`].
    changes: [usize; 3],
}

impl Start {
    fn of(lab: &Lab, run: &LabRun, half: f64) -> Self {
        let ((late, failed), (all, _)) = (attainment(lab, run, half), attainment(lab, run, 0.0));
        let completed = run.result.requests.iter().filter(|record| record.is_completed());
        let mut ttft: Vec<f64> = completed.map(|record| record.ttft).collect();
        ttft.sort_by(f64::total_cmp);
        let mean = ttft.iter().sum::<f64>() / ttft.len() as f64;
        Self { met: [late, all], ttft: [mean, percentile(&ttft, 0.99)], failed, changes: changes(lab, run) }
    }
}

fn starts(files: &[PathBuf], options: &Options) -> Result<(), Box<dyn std::error::Error>> {
    let columns = "load | start | seed, or runs | tuner | attainment, % | of all | TTFT of all: mean, P99, s | kept, tried, restarts";
    println!("| {columns} | without a response |");
    println!("|---|---|--:|---|--:|--:|--:|--:|--:|");
    for file in files {
        let scenario = Scenario::load(file)?;
        let Started { labs, names } = starts_of(&scenario, options, &["off", "apply"])?;
        let half = scenario.file.duration.map_or(0.0, |period| period.0.as_secs_f64() / 2.0);
        let row = |lab: usize, which: String, runs: &[&Start]| {
            let mean = |of: &dyn Fn(&Start) -> f64| runs.iter().map(|one| of(one)).sum::<f64>() / runs.len() as f64;
            let [kept, tried, restarts] = [0, 1, 2].map(|at| format!("{:.1}", mean(&|one| one.changes[at] as f64)));
            let (start, mode) = &names[lab];
            let [met, of_all] = [0, 1].map(|at| percent(mean(&|one| one.met[at])));
            let [ttft, p99] = [0, 1].map(|at| mean(&|one| one.ttft[at]));
            let (failed, title) = (mean(&|one| one.failed as f64), &scenario.file.title);
            let found = format!("{met} | {of_all} | {ttft:.2}, {p99:.1} | {kept}, {tried}, {restarts} | {failed:.1} |");
            format!("| {title} | {start} | {which} | {mode} | {found}")
        };
        let of = |lab: &Lab, run: &LabRun, _| Start::of(lab, run, half);
        let found = all(&labs, options, of, |lab, seed, one| row(lab, format!("seed {seed}"), &[one]));
        for (lab, runs) in found.iter().enumerate() {
            println!("{}", row(lab, format!("all {}", runs.len()), &runs.iter().collect::<Vec<_>>()));
        }
    }
    Ok(())
}

fn calibration(files: &[PathBuf], options: &Options) -> Result<(), Box<dyn std::error::Error>> {
    println!("| load | start | seed | flag | forecast gain | realised | range | verdict |");
    println!("|---|---|--:|---|--:|--:|---|---|");
    let (mut errors, mut inside) = (Vec::new(), 0);
    for file in files {
        let scenario = Scenario::load(file)?;
        let Started { labs, names } = starts_of(&scenario, options, &["apply"])?;
        let of = |_: &Lab, run: &LabRun, _| {
            run.tuner.as_ref().map(|report| report.engines.changes.clone()).unwrap_or_default()
        };
        let line = |lab: usize, seed: u64, changes: &Vec<Realised>| {
            let row = |change: &Realised| {
                let (low, high) = change.range;
                let forecast = change.forecast.map_or_else(|| "none".to_owned(), |gain| format!("{gain:.3}"));
                format!(
                    "| {} | {} | {seed} | {} {} to {} | {forecast} | {:.3} | {low:.3} to {high:.3} | {} |",
                    scenario.file.title,
                    names[lab].0,
                    change.flag.name(),
                    change.values.0,
                    change.values.1,
                    change.realised,
                    change.verdict,
                )
            };
            let none =
                || format!("| {} | {} | {seed} | no change was measured | | | | |", scenario.file.title, names[lab].0);
            if changes.is_empty() { none() } else { changes.iter().map(row).collect::<Vec<_>>().join("\n") }
        };
        for change in all(&labs, options, of, line).into_iter().flatten().flatten() {
            let Some(gain) = change.forecast else { continue };
            errors.push(change.realised - gain);
            inside += usize::from((change.range.0..=change.range.1).contains(&gain));
        }
    }
    let count = errors.len().max(1) as f64;
    let (mean, size) =
        (errors.iter().sum::<f64>() / count, errors.iter().map(|error| error.abs()).sum::<f64>() / count);
    println!(
        "\n{} forecasts: {inside} within the range of what was realised; realised minus forecast {mean:+.3} on average, {size:.3} in size",
        errors.len()
    );
    Ok(())
}
