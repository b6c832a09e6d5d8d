//! Items of work, which several threads run. The result of an item is one line of JSON.
//!
//! A line is `{"item": NAME, "cpu": SECONDS, "found": VALUE}`. The program writes a line in one
//! piece when the item has ended. If the last line of a file is incomplete, it comes from a run
//! that was killed, and is ignored.

use std::collections::BTreeMap;
use std::fs::OpenOptions;
use std::io::{self, Write as _};
use std::path::Path;
use std::time::Instant;

use nix::sys::resource::{UsageWho, getrusage};
use parking_lot::Mutex;
use serde_json::{Value, json};

/// A part of a case that can run alone.
pub(crate) struct Item {
    /// Words separated by `/`, of which the first is the name of the case.
    pub(crate) name: String,
    work: Box<dyn Fn() -> Value + Send + Sync>,
}

impl Item {
    pub(crate) fn new(name: String, work: impl Fn() -> Value + Send + Sync + 'static) -> Self {
        Self { name, work: Box::new(work) }
    }
}

/// The lines of all files by item. If an item has several lines, the last one counts.
pub(crate) struct Lines(BTreeMap<String, (f64, Value)>);

impl Lines {
    pub(crate) fn read(files: &[impl AsRef<Path>]) -> io::Result<Self> {
        let mut lines = BTreeMap::new();
        for file in files {
            let text = std::fs::read_to_string(file)?;
            for line in text.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok()) {
                if let (Some(item), Some(cpu)) = (line["item"].as_str(), line["cpu"].as_f64()) {
                    lines.insert(item.to_owned(), (cpu, line["found"].clone()));
                }
            }
        }
        Ok(Self(lines))
    }

    /// For each item whose name begins with `start`, the rest of the name and the result.
    pub(crate) fn of<'a>(&'a self, start: &str) -> std::vec::IntoIter<(&'a str, &'a Value)> {
        let named = self.0.iter().filter_map(|(name, (_, found))| Some((name.strip_prefix(start)?, found)));
        named.collect::<Vec<_>>().into_iter()
    }

    pub(crate) fn has(&self, case: &str) -> bool {
        self.0.keys().any(|name| name.split('/').next() == Some(case))
    }

    /// CPU time of a case by kind of item. The kind is the name without its last part.
    pub(crate) fn cost(&self, case: &str) -> String {
        let mut kinds: BTreeMap<String, Vec<f64>> = BTreeMap::new();
        for (name, (cpu, _)) in &self.0 {
            let kind = name.rsplit_once('/').map_or("", |(kind, _)| kind);
            if kind.split('/').next() == Some(case) {
                kinds.entry(kind.to_owned()).or_default().push(*cpu);
            }
        }
        let row = |(kind, mut cpu): (String, Vec<f64>)| {
            cpu.sort_by(f64::total_cmp);
            let (sum, most) = (cpu.iter().sum::<f64>(), cpu[cpu.len() - 1]);
            format!(
                "CPU: {kind}: {} items, median {:.0} s, most {most:.0} s, {sum:.0} s in all\n",
                cpu.len(),
                cpu[cpu.len() / 2]
            )
        };
        kinds.into_iter().map(row).collect()
    }
}

/// User and system time of this thread, seconds.
fn cpu() -> f64 {
    getrusage(UsageWho::RUSAGE_THREAD).map_or(f64::NAN, |usage| {
        [usage.user_time(), usage.system_time()]
            .map(|time| time.tv_sec() as f64 + time.tv_usec() as f64 / 1e6)
            .iter()
            .sum()
    })
}

/// Runs the items that are not in the file, and appends their lines. No item begins after `until`.
pub(crate) fn run(items: Vec<Item>, jobs: usize, until: Instant, path: &Path) -> io::Result<()> {
    let done = if path.exists() { Lines::read(&[path])? } else { Lines(BTreeMap::new()) };
    let all = items.len();
    let mut left: Vec<Item> = items.into_iter().filter(|item| !done.0.contains_key(&item.name)).collect();
    eprintln!("{all} items, {} of them in {} already", all - left.len(), path.display());
    left.reverse();
    let mut file = OpenOptions::new().create(true).append(true).open(path)?;
    if path.metadata()?.len() > 0 && !std::fs::read_to_string(path)?.ends_with('\n') {
        file.write_all(b"\n")?;
    }
    let (left, file) = (Mutex::new(left), Mutex::new(file));
    let next = || if Instant::now() < until { left.lock().pop() } else { None };
    let work = || -> io::Result<()> {
        while let Some(item) = next() {
            let before = cpu();
            let found = (item.work)();
            let line = json!({ "item": item.name, "cpu": cpu() - before, "found": found });
            eprintln!("{line}");
            file.lock().write_all(format!("{line}\n").as_bytes())?;
        }
        Ok(())
    };
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..jobs.max(1)).map(|_| scope.spawn(work)).collect();
        let mut results =
            threads.into_iter().map(|thread| thread.join().unwrap_or_else(|_| Err(io::Error::other("an item failed"))));
        results.try_for_each(|result| result)
    })?;
    let left = left.into_inner().len();
    eprintln!("{left} items are left");
    Ok(())
}
