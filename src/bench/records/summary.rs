//! A day of records in a few lines of text, for a terminal of 80 columns.
//!
//! The text shows whether the HTML page is worth opening. Bounds: [`CLASSES`].

use super::causes::{Parts, slowest};
use super::day::slowest_interval;
use super::table::{Interval, clock, count, e2el, millis, ttft};
use super::worst::Period;
use super::{Entry, group};

/// Number of classes listed, the largest ones.
const CLASSES: usize = 8;
const NAME: usize = 20;

/// The text about records in the order of arrival. Sentences are not wrapped.
pub fn text(entries: &[Entry], worst: &Period) -> String {
    let all: Vec<&Entry> = entries.iter().collect();
    let (first, last) = (entries.first().map_or(0.0, |entry| entry.at), entries.last().map_or(0.0, |entry| entry.at));
    let [completed, shed, failed] = [Entry::is_completed, Entry::is_shed, Entry::is_broken].map(|is| count(&all, is));
    let left = count(&all, |entry| &*entry.outcome == "client_gone");
    let refused = count(&all, |entry| &*entry.outcome == "refused");
    let mut text = format!(
        "{} requests that generate text, {} to {} UTC: {completed} completed, {shed} shed, {failed} failed, {left} left by the \
         client, {refused} refused.\n\n",
        entries.len(),
        clock(first),
        clock(last)
    );
    text += &classes(entries);
    if let Some([(_, of_all), (streams, of_slow)]) = Parts::means(&all) {
        let streams = if streams == 1 { "1 stream".to_owned() } else { format!("{streams} streams") };
        text += &format!("\nTTFT is {}; of the slowest 1 % ({streams}) {}.\n", of_all.text(), of_slow.text());
    }
    let interval = Interval::of(entries);
    if let Some((slowest, p99)) = slowest_interval(entries, interval) {
        text += &format!("Slowest {}: {}, P99 {} ms. ", interval.name, interval.clock(slowest), millis(Some(p99)));
    }
    text += &format!(
        "Worst 5 minutes: from {}, {} of {} requests failed or missed an objective, P99 {} ms.\n",
        clock(worst.from),
        worst.missed,
        worst.requests,
        millis(Some(worst.p99).filter(|p99| *p99 > 0.0))
    );
    for (entry, cause) in slowest(entries, 1) {
        text += &format!(
            "Slowest request: {} ms at {}, {cause} ({}).\n",
            millis(entry.latency()),
            clock(entry.at),
            entry.place()
        );
    }
    text
}

fn classes(entries: &[Entry]) -> String {
    let mut classes: Vec<_> = group(entries, |entry| entry.class.to_string()).into_iter().collect();
    classes.sort_by_key(|(_, entries)| std::cmp::Reverse(entries.len()));
    let line = |name: &str, cells: [String; 6]| {
        let name: String = name.chars().take(NAME).collect();
        let cells: String = cells.iter().map(|cell| format!("{cell:>10}")).collect();
        format!("{name:<NAME$}{cells}\n")
    };
    let head = ["requests", "missed", "TTFT P50", "P99", "E2EL P50", "P99"].map(str::to_owned);
    let mut text = line("class (ms)", head);
    for (name, entries) in classes.iter().take(CLASSES) {
        let counts = [entries.len(), count(entries, Entry::is_miss)].map(|n| n.to_string());
        let times = [ttft(entries, 0.5), ttft(entries, 0.99), e2el(entries, 0.5), e2el(entries, 0.99)].map(millis);
        let [requests, missed] = counts;
        let [ttft_50, ttft_99, e2el_50, e2el_99] = times;
        text += &line(name, [requests, missed, ttft_50, ttft_99, e2el_50, e2el_99]);
    }
    if classes.len() > CLASSES {
        text += &format!("and {} more\n", classes.len() - CLASSES);
    }
    text
}
