//! Measures the online tuner on simulated engines: the attainment that it reaches from wrong
//! limits, compared with the attainment of the best static limits.
//!
//! ```sh
//! cargo bench -p sluice-lab --bench limits -- config/lab/tuner/*.toml --seeds 3 --jobs 2
//! cargo bench -p sluice-lab --bench limits -- config/lab/tuner/mixed.toml --events
//! ```
//!
//! Every file has 20 minutes of traffic, and wrong limits as variants. Each variant runs with the
//! tuner and without. The best static setting is the setting of a grid that is best with the first
//! seed. It then runs with every seed. The result is the share of the requests in the second half
//! that met all configured objectives. With `--simulate`, the tuner simulates a change before it
//! tries it, as in a gateway whose `tuner.simulation` describes the engines.

use std::path::PathBuf;
use std::sync::atomic::{AtomicUsize, Ordering};

use parking_lot::Mutex;

use sluice_bench::nth_seed;
use sluice_core::meter::slo::Timings;
use sluice_lab::{Forecaster, Lab, LabRun, Scenario, Variant, run};

const USAGE: &str = "limits FILE.. [--seeds N] [--jobs N] [--events] [--no-grid] [--simulate] [--setting KEY=VALUE ..]";
/// Requests count if they arrive after this time in seconds.
const HALF: f64 = 600.0;

/// The grid for one pool: keys of the gateway, each with its values.
const ONE_POOL: [(&str, &[&str]); 3] = [
    ("pool.all.long_prefix.threshold", &["1k", "5k", "10k"]),
    ("pool.all.long_prefix.slots", &["1", "2", "4", "64"]),
    ("pool.all.slots", &["16", "48", "256"]),
];
const TWO_POOLS: [(&str, &[&str]); 4] = [
    ("pool.short.prompt_tokens.max", &["1k", "1500", "2k", "3k", "4k", "5k", "7k"]),
    ("pool.long.long_prefix.slots", &["1", "2", "4"]),
    ("pool.short.long_prefix.threshold", &["2k", "5k"]),
    ("pool.short.slots", &["64"]),
];

#[derive(Clone)]
struct Options {
    seeds: u64,
    jobs: usize,
    events: bool,
    grid: bool,
    simulate: bool,
    /// Keys and values of one setting, which runs instead of the grid.
    setting: Vec<String>,
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut options = Options { seeds: 1, jobs: 2, events: false, grid: true, simulate: false, setting: Vec::new() };
    let mut files = Vec::new();
    let mut args = std::env::args().skip(1).filter(|arg| arg != "--bench");
    while let Some(arg) = args.next() {
        match arg.as_str() {
            "--seeds" => options.seeds = args.next().ok_or(USAGE)?.parse()?,
            "--jobs" => options.jobs = args.next().ok_or(USAGE)?.parse()?,
            "--events" => options.events = true,
            "--no-grid" => options.grid = false,
            "--simulate" => options.simulate = true,
            "--setting" => options.setting.push(args.next().ok_or(USAGE)?),
            _ if arg.starts_with("--") => return Err(USAGE.into()),
            _ => files.push(PathBuf::from(arg)),
        }
    }
    if files.is_empty() {
        return Err(USAGE.into());
    }
    println!(
        "| load | best static | start | left alone | with the tuner | of the best | changes kept, tried | tried in the second half |"
    );
    println!("|---|--:|---|--:|--:|--:|--:|--:|");
    for file in files {
        load(&Scenario::load(&file)?, &options)?;
    }
    Ok(())
}

fn grid(keys: &[(&str, &[&str])]) -> Vec<Vec<String>> {
    keys.iter().fold(vec![Vec::new()], |all, (key, values)| {
        let with = |chosen: &Vec<String>| {
            let each = values.iter().map(|value| {
                let mut sets = chosen.clone();
                sets.push(format!("{key}={}", quoted(value)));
                if let Some(pool) = key.strip_suffix(".short.prompt_tokens.max") {
                    sets.push(format!("{pool}.long.prompt_tokens.min={}", quoted(value)));
                }
                sets
            });
            each.collect::<Vec<_>>()
        };
        all.iter().flat_map(with).collect()
    })
}

fn quoted(value: &str) -> String {
    if value.parse::<u64>().is_ok() { value.to_owned() } else { format!("\"{value}\"") }
}

fn load(scenario: &Scenario, options: &Options) -> Result<(), Box<dyn std::error::Error>> {
    let starts = scenario.file.variants();
    let with = |start: &Variant, sets: &[String]| {
        scenario.lab(&Variant { set: [&start.set[..], sets].concat(), ..start.clone() })
    };
    let first = scenario.lab(&Variant::default())?;
    let keys: &[(&str, &[&str])] = if first.config.pools.len() == 1 { &ONE_POOL } else { &TWO_POOLS };
    let settings = match (options.setting.is_empty(), options.grid) {
        (false, _) => vec![options.setting.clone()],
        (true, true) => grid(keys),
        (true, false) => Vec::new(),
    };
    let mut labs = Vec::new();
    for start in &starts {
        labs.push(with(start, &["tuner.mode=\"off\"".to_owned()])?);
        let tuned = with(start, &["tuner.mode=\"apply\"".to_owned()])?;
        let forecaster = tuned.forecaster.map(|by| Forecaster { limits: by.limits.filter(|_| options.simulate), ..by });
        labs.push(Lab { forecaster, ..tuned });
    }
    let of_starts = means(&labs, options);
    let labs = settings.iter().map(|sets| scenario.lab(&Variant { set: sets.clone(), ..Variant::default() }));
    let labs: Vec<Lab> = labs.collect::<Result<_, _>>()?;
    let once = means(&labs, &Options { seeds: 1, events: false, ..options.clone() });
    let best = (0..labs.len()).max_by(|one, other| once[*one].0.total_cmp(&once[*other].0));
    let (shown, best) = match best {
        Some(at) => {
            let mean = means(&labs[at..=at], &Options { events: false, ..options.clone() })[0].0;
            (format!("{:.1} % ({})", 100.0 * mean, settings[at].join(", ").replace("pool.", "")), mean)
        }
        None => ("not run".to_owned(), f64::NAN),
    };
    for (start, pair) in starts.iter().zip(of_starts.chunks(2)) {
        let (alone, tuned) = (&pair[0], &pair[1]);
        println!(
            "| {} | {shown} | {} | {:.1} % | {:.1} % | {:.1} % | {:.1}, {:.1} | {:.1} |",
            scenario.file.title,
            start.name,
            100.0 * alone.0,
            100.0 * tuned.0,
            100.0 * tuned.0 / best,
            tuned.1[0],
            tuned.1[1],
            tuned.1[2],
        );
    }
    Ok(())
}

/// Means over the seeds. They are the attainment in the second half, and the numbers of changes
/// kept, tried, and tried in the second half.
fn means(labs: &[Lab], options: &Options) -> Vec<(f64, [f64; 3])> {
    let jobs: Vec<(usize, u64)> =
        (0..labs.len()).flat_map(|lab| (0..options.seeds).map(move |run| (lab, nth_seed(1, run)))).collect();
    let (next, sums) = (AtomicUsize::new(0), Mutex::new(vec![(0.0, [0.0; 3]); labs.len()]));
    std::thread::scope(|scope| {
        for _ in 0..options.jobs {
            scope.spawn(|| {
                while let Some((lab, seed)) = jobs.get(next.fetch_add(1, Ordering::Relaxed)) {
                    let found = run(&labs[*lab], *seed).expect("a valid scenario");
                    let attained = attainment(&labs[*lab], &found);
                    let counts = changes(&found);
                    if options.events {
                        found.tuning.iter().for_each(|event| eprintln!("{event}"));
                        eprintln!("       {:.2} %", 100.0 * attained);
                    }
                    let mut sums = sums.lock();
                    sums[*lab].0 += attained / options.seeds as f64;
                    for (sum, count) in sums[*lab].1.iter_mut().zip(counts) {
                        *sum += count / options.seeds as f64;
                    }
                }
            });
        }
    });
    sums.into_inner()
}

fn changes(run: &LabRun) -> [f64; 3] {
    use sluice_online::event::EventKind;
    let count = |kind: EventKind, from: f64| {
        run.tuning.iter().filter(|event| event.kind == kind && event.at >= from).count() as f64
    };
    [count(EventKind::Kept, 0.0), count(EventKind::Tried, 0.0), count(EventKind::Tried, HALF)]
}

/// The share of the requests in the second half that met the configured objectives. All pools have
/// the same objectives.
fn attainment(lab: &Lab, run: &LabRun) -> f64 {
    let objectives = lab.config.pools[0].slo.objectives();
    let time = |seconds: f64| std::time::Duration::from_secs_f64(seconds);
    let (mut met, mut all) = (0.0, 0.0);
    for record in run.result.requests.iter().filter(|record| record.sent >= HALF) {
        let timings =
            Timings { ttft: Some(time(record.ttft)), tpot: record.tpot().map(time), e2el: Some(time(record.latency)) };
        all += 1.0;
        met += f64::from(u8::from(objectives.met(record.is_completed(), record.prompt_tokens, &timings)));
    }
    met / all
}
