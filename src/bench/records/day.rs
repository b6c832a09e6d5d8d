//! The sections of a report: the traffic; latencies by class and pool, by length and by time; and
//! the causes.
//!
//! Tables have a row for each class, for each length in each pool, and for each interval with
//! requests.

use std::collections::BTreeMap;

use super::table::{Interval, count, e2el, head, latencies, met, percent, quantile, queue, ttft};
use super::{Entry, Group, LENGTHS, causes, group};
use crate::report::sections::{Dots, Section};

/// Number of classes in a plot; the largest classes are shown.
const PLOTTED: usize = 4;

/// The sections of a report; `entries` are in the order of arrival.
pub fn sections(entries: &[Entry]) -> Vec<Section> {
    let classes = group(entries, |entry| entry.class.to_string());
    vec![
        volume(entries),
        by_class(entries),
        causes::ttft_parts(&classes),
        by_time(entries, &classes),
        by_length(entries),
        causes::slow(entries),
        causes::failures(entries),
    ]
}

fn volume(entries: &[Entry]) -> Section {
    let all: Vec<&Entry> = entries.iter().collect();
    let sum = |of: fn(&Entry) -> u64| entries.iter().map(of).sum::<u64>();
    let of = |is: fn(&Entry) -> bool| count(&all, is).to_string();
    let (prompt, cached, output) = (sum(|entry| entry.prompt), sum(|entry| entry.cached), sum(|entry| entry.output));
    let tiles = [
        (entries.len().to_string(), "requests", "that generate text".to_owned()),
        (of(Entry::is_completed), "completed", String::new()),
        (of(Entry::is_shed), "shed", "no room, or no backend ready".to_owned()),
        (of(Entry::is_broken), "failed", "an engine broke, or too late".to_owned()),
        (of(|entry| &*entry.outcome == "client_gone"), "left", "by the client".to_owned()),
        (of(|entry| &*entry.outcome == "refused"), "refused", "the client's fault".to_owned()),
        (met(&all), "met objectives", "of requests with objectives".to_owned()),
        (tokens(prompt), "prompt tokens", format!("{} from prefix caches", percent(cached as f64, prompt as f64))),
        (tokens(output), "output tokens", String::new()),
    ];
    Section { title: "The traffic".to_owned(), tiles: tiles.into(), ..Section::default() }
}

fn tokens(count: u64) -> String {
    match count as f64 {
        count if count >= 1e9 => format!("{:.2} G", count / 1e9),
        count if count >= 1e6 => format!("{:.1} M", count / 1e6),
        count if count >= 1e4 => format!("{:.0} k", count / 1e3),
        _ => count.to_string(),
    }
}

fn by_class(entries: &[Entry]) -> Section {
    let groups = group(entries, |entry| (entry.class.to_string(), entry.pool.to_string()));
    let rows = groups.iter().map(|((class, pool), entries)| latencies(&[class, pool], entries));
    let note = "The gateway gave each request a class by the length of its prompt ([[class]]); the pool is where it ran. Milliseconds; TPOT and \
                E2EL of completed requests.";
    Section {
        title: "By class and pool".to_owned(),
        note: note.to_owned(),
        rows: std::iter::once(head(&["class", "pool"])).chain(rows).collect(),
        ..Section::default()
    }
}

fn by_length(entries: &[Entry]) -> Section {
    let groups = group(entries, |entry| (entry.length(), entry.pool.to_string()));
    let mut rows = vec![head(&["prompt tokens", "pool"])];
    for (_, length) in LENGTHS {
        let of_length = groups.iter().filter(|((name, _), _)| *name == length);
        rows.extend(of_length.map(|((_, pool), entries)| latencies(&[length, pool], entries)));
    }
    Section {
        title: "By length of the prompt".to_owned(),
        note: "As the engine counted it, or as estimated. Milliseconds.".to_owned(),
        rows,
        ..Section::default()
    }
}

/// The interval with the longest P99 of TTFT (E2EL if not streamed), and that P99.
pub(super) fn slowest_interval(entries: &[Entry], interval: Interval) -> Option<(i64, f64)> {
    let p99 = |entries: &Group<'_>| quantile(entries, 0.99, Entry::latency);
    let intervals = group(entries, |entry| interval.number(entry));
    let all = intervals.iter().filter_map(|(number, entries)| Some((*number, p99(entries)?)));
    all.max_by(|one, other| one.1.total_cmp(&other.1))
}

fn by_time(entries: &[Entry], classes: &BTreeMap<String, Group<'_>>) -> Section {
    let interval = Interval::of(entries);
    let slowest = slowest_interval(entries, interval).map(|(number, _)| number);
    let intervals = group(entries, |entry| interval.number(entry));
    let rows = intervals.iter().map(|(number, entries)| {
        let mark = if Some(*number) == slowest && intervals.len() > 1 { "slowest" } else { "" };
        latencies(&[&interval.clock(*number), mark], entries)
    });
    let (first, day) = (intervals.keys().next().copied().unwrap_or(0), (24.0 * 3_600.0 / interval.seconds) as i64);
    let (origin, unit, x) = match interval.name {
        "minute" => (first, 60.0, format!("minute since {}, UTC", interval.clock(first))),
        _ => (first.div_euclid(day) * day, 3_600.0, "hour since midnight of the first day, UTC".to_owned()),
    };
    let place = |number: i64| (number - origin) as f64 * interval.seconds / unit;
    let lengths = group(entries, |entry| entry.length().to_owned());
    let mut plotted: Vec<_> = if classes.len() > 1 { classes } else { &lengths }.iter().collect();
    plotted.sort_by_key(|(_, entries)| std::cmp::Reverse(entries.len()));
    plotted.truncate(PLOTTED);
    let course = |title: &str, y: &str, of: &dyn Fn(&[&Entry]) -> Option<f64>| {
        let points = |entries: &Group<'_>| {
            let intervals = group(entries.iter().copied(), |entry| interval.number(entry));
            intervals.iter().filter_map(|(number, entries)| Some((place(*number), of(entries)?))).collect()
        };
        let series = plotted.iter().map(|(name, entries)| ((*name).clone(), points(entries))).collect();
        Dots { title: title.to_owned(), x: x.clone(), y: y.to_owned(), series, connected: true, ..Dots::default() }
    };
    // Queue times are often close to 0, where a logarithmic axis would show microseconds.
    let latency = |dots: Dots| Dots { may_be_log: true, ..dots };
    let dots = vec![
        course("Requests", &format!("per {}", interval.name), &|entries| Some(entries.len() as f64)),
        latency(course("TTFT P99", "ms", &|entries| ttft(entries, 0.99))),
        course("Queue P99", "ms", &|entries| queue(entries, 0.99)),
        latency(course("E2EL P99", "ms", &|entries| e2el(entries, 0.99))),
    ];
    Section {
        title: format!("By {}", interval.name),
        note:
            "When requests arrived, UTC. Milliseconds. Plots: by class, or by prompt tokens where there is one class."
                .to_owned(),
        rows: std::iter::once(head(&["from", ""])).chain(rows).collect(),
        dots: if intervals.len() > 1 { dots } else { Vec::new() },
        ..Section::default()
    }
}
