//! Measures `sluice tune` on simulated engines, by long runs and exhaustive searches that are
//! compared with the results of the tuner.
//!
//! ```sh
//! cargo bench -p sluice-tune --bench evidence -- grid space --seeds 20 --jobs 16 --out a.jsonl
//! cargo bench -p sluice-tune --bench evidence -- summary a.jsonl
//! ```
//!
//! | case | shows |
//! |---|---|
//! | `grid` | eight combinations, four workloads: certified rate, true capacity, cost |
//! | `space` | 481 settings of five flags: a model and random trials after 45 trials |
//! | `mixes` | two mixes of lengths, two engines behind the gateway: the best settings of each |
//! | `adapters` | tuned without and with LoRA adapters, run with adapters |
//! | `hand` | `config/tune/hand.toml`: the table of its experiments |
//!
//! A case is a list of independent items. An item is a true value, or a tuning with one seed. When
//! an item has ended, the program writes one line of JSON. The program skips items that are in the
//! file, so a run may be interrupted, and `cat` merges the files of several machines. The binary
//! needs no other file, so it can be copied to a machine of the same architecture. No item begins
//! after `--minutes`. An item takes at most some minutes of one core, and its line has this time as
//! `cpu`.

mod adapters;
mod grid;
mod hand;
mod item;
mod mixes;
mod space;
mod tuning;

use std::ops::Range;
use std::time::{Duration, Instant};

use item::{Item, Lines, run};

/// A case: its items for some seeds, and the summary of their lines.
struct Case {
    name: &'static str,
    items: fn(Range<u64>) -> Vec<Item>,
    summary: fn(&Lines) -> String,
}

const CASES: [Case; 5] = [
    Case { name: "grid", items: grid::items, summary: grid::summary },
    Case { name: "space", items: space::items, summary: space::summary },
    Case { name: "mixes", items: mixes::items, summary: mixes::summary },
    Case { name: "adapters", items: adapters::items, summary: adapters::summary },
    Case { name: "hand", items: hand::items, summary: hand::summary },
];

const USAGE: &str = "evidence CASE.. [--seeds N] [--from N] [--only TEXT] [--jobs N] [--minutes N] [--out FILE]\n\
                     evidence summary FILE..\n\
                     cases: grid space mixes adapters hand; --only: items whose name contains TEXT";

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let (mut words, mut out, mut only) = (Vec::new(), "evidence.jsonl".to_owned(), String::new());
    let (mut seeds, mut from, mut jobs, mut minutes) = (3, 0, 1, 100_000);
    let mut args = std::env::args().skip(1).filter(|arg| arg != "--bench");
    while let Some(arg) = args.next() {
        let mut value = || args.next().ok_or(USAGE);
        match arg.as_str() {
            "--seeds" => seeds = value()?.parse()?,
            "--from" => from = value()?.parse()?,
            "--jobs" => jobs = value()?.parse()?,
            "--minutes" => minutes = value()?.parse()?,
            "--only" => only = value()?,
            "--out" => out = value()?,
            _ if arg.starts_with("--") => return Err(USAGE.into()),
            _ => words.push(arg),
        }
    }
    if words.first().is_some_and(|word| word == "summary") {
        let lines = Lines::read(&words[1..])?;
        for case in CASES.iter().filter(|case| lines.has(case.name)) {
            println!("## {}\n\n{}\n{}", case.name, (case.summary)(&lines), lines.cost(case.name));
        }
        return Ok(());
    }
    let chosen: Vec<&Case> = CASES.iter().filter(|case| words.iter().any(|word| word == case.name)).collect();
    if chosen.is_empty() || chosen.len() < words.len() {
        return Err(USAGE.into());
    }
    let items = chosen.iter().flat_map(|case| (case.items)(from..from + seeds));
    let items = items.filter(|item| item.name.contains(&only)).collect();
    run(items, jobs, Instant::now() + Duration::from_secs(minutes * 60), out.as_ref())?;
    Ok(())
}
