//! Why requests were slow or failed: the parts of TTFT, the slowest requests, reasons of failures.
//!
//! TTFT is the wait for room on a backend (queue), the time from sending the request to the first
//! token (engine: the engine's queue and the prefill), and the rest (elsewhere: reading,
//! connecting, repeated attempts). A request's cause is the largest part. If that is the engine,
//! the cause also says how many earlier prompts were unfinished there. If few were, it says whether
//! the time was unusual for the length of the prompt.
//!
//! Bounds: [`SLOWEST`], [`REASONS`].

use std::collections::BTreeMap;

use super::table::{clock, count, millis, percent, quantile, row};
use super::{Entry, Group, group};
use crate::report::sections::Section;

const SLOWEST: usize = 20;
const REASONS: usize = 50;
/// The time in an engine is unusual from this multiple of the median for prompts of similar length.
const UNUSUAL: f64 = 3.0;

/// From this many unfinished earlier prompts on, these prompts are the cause. In a burst, the usual
/// time itself is long.
const CROWD: usize = 3;

#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct Parts {
    pub(super) ttft: f64,
    pub(super) queue: f64,
    pub(super) engine: f64,
    pub(super) elsewhere: f64,
}

impl Parts {
    fn of(entry: &Entry) -> Option<Self> {
        let (ttft, queue, engine) = (entry.ttft?, entry.queue, entry.engine?);
        Some(Self { ttft, queue, engine, elsewhere: (ttft - queue - engine).max(0.0) })
    }

    /// The number and the mean parts of all streams, and of the slowest hundredth of the streams.
    pub(super) fn means(entries: &[&Entry]) -> Option<[(usize, Self); 2]> {
        let mut all: Vec<Self> = entries.iter().filter_map(|entry| Self::of(entry)).collect();
        all.sort_by(|one, other| one.ttft.total_cmp(&other.ttft));
        let slow = &all[all.len() - all.len().div_ceil(100)..];
        (!all.is_empty()).then(|| [&all, slow].map(|part| (part.len(), Self::mean(part))))
    }

    fn mean(all: &[Self]) -> Self {
        let mean = |of: fn(&Self) -> f64| all.iter().map(of).sum::<f64>() / all.len() as f64;
        Self {
            ttft: mean(|part| part.ttft),
            queue: mean(|part| part.queue),
            engine: mean(|part| part.engine),
            elsewhere: mean(|part| part.elsewhere),
        }
    }

    fn largest(&self) -> (&'static str, f64) {
        let parts = [("queue", self.queue), ("engine", self.engine), ("elsewhere", self.elsewhere)];
        parts.into_iter().max_by(|one, other| one.1.total_cmp(&other.1)).unwrap_or(parts[0])
    }

    pub(super) fn text(&self) -> String {
        let [queue, engine, elsewhere] = whole_percents([self.queue, self.engine, self.elsewhere]);
        format!("queue {queue} %, engine {engine} %, elsewhere {elsewhere} %")
    }
}

/// Shares in whole percent that add up to 100. The shares with the largest remainders are rounded
/// up.
fn whole_percents(parts: [f64; 3]) -> [u32; 3] {
    let sum = parts.iter().sum::<f64>().max(f64::MIN_POSITIVE);
    let exact = parts.map(|part| 100.0 * part / sum);
    let mut whole = exact.map(|share| share.floor() as u32);
    let mut order = [0, 1, 2];
    order.sort_by(|one, other| exact[*other].fract().total_cmp(&exact[*one].fract()));
    let rest = 100_u32.saturating_sub(whole.iter().sum()) as usize;
    order.into_iter().take(rest).for_each(|part| whole[part] += 1);
    whole
}

pub(super) fn ttft_parts(classes: &BTreeMap<String, Group<'_>>) -> Section {
    let mut rows = vec![row(["class", "streams", "TTFT", "queue", "engine", "elsewhere", "largest part"])];
    for (name, entries) in classes {
        let names = [name.clone(), format!("{name}, slowest 1 %")];
        for (name, (streams, parts)) in names.into_iter().zip(Parts::means(entries).into_iter().flatten()) {
            let (largest, time) = parts.largest();
            let mut cells = vec![name, streams.to_string()];
            cells.extend([parts.ttft, parts.queue, parts.engine, parts.elsewhere].map(|time| millis(Some(time))));
            cells.push(format!("{largest} ({})", percent(time, parts.ttft)));
            rows.push(cells);
        }
    }
    let note = "Means of streams, milliseconds. Queue: the gateway waited for room on a backend. Engine: from sending the request \
                to its first token, so the engine's own queue and the prefill. Elsewhere: reading, connecting, attempts that were \
                repeated.";
    if rows.len() == 1 {
        return Section {
            title: "Where TTFT went".to_owned(),
            note: "No request was streamed.".to_owned(),
            ..Section::default()
        };
    }
    Section { title: "Where TTFT went".to_owned(), note: note.to_owned(), rows, ..Section::default() }
}

pub(super) fn failures(entries: &[Entry]) -> Section {
    let failed = entries.iter().filter(|entry| entry.is_shed() || entry.is_broken());
    let key = |entry: &Entry| [&entry.outcome, &entry.detail, &entry.class, &entry.backend].map(ToString::to_string);
    let mut reasons: Vec<([String; 4], Group<'_>)> = group(failed, key).into_iter().collect();
    reasons.sort_by_key(|(_, entries)| std::cmp::Reverse(entries.len()));
    let row_of = |(reason, entries): &([String; 4], Group<'_>)| {
        let times = [entries.first(), entries.last()].map(|entry| entry.map_or(String::new(), |entry| clock(entry.at)));
        reason.iter().cloned().chain([entries.len().to_string()]).chain(times).collect()
    };
    let mut rows = vec![row(["outcome", "reason", "class", "backend", "requests", "first", "last"])];
    rows.extend(reasons.iter().take(REASONS).map(row_of));
    let note = match (reasons.is_empty(), reasons.len().saturating_sub(REASONS)) {
        (true, _) => {
            rows.clear();
            "Nothing was shed and nothing failed.".to_owned()
        }
        (false, 0) => {
            "Requests that the gateway refused because no backend had room or was ready, and those that an engine broke or that took too long."
                .to_owned()
        }
        (false, more) => format!("{more} rarer reasons are left out."),
    };
    Section { title: "What was shed or failed, and why".to_owned(), note, rows, ..Section::default() }
}

pub(super) fn slowest<'a>(entries: &'a [Entry], most: usize) -> Vec<(&'a Entry, String)> {
    let mut all: Vec<&'a Entry> = entries.iter().filter(|entry| entry.latency().is_some()).collect();
    let time = |entry: &Entry| entry.latency().unwrap_or(0.0);
    all.sort_by(|one, other| time(other).total_cmp(&time(one)));
    all.truncate(most);
    let usual = usual(entries);
    all.into_iter().map(|entry| (entry, cause(entry, &usual, before(entry, entries)))).collect()
}

/// Number and tokens of earlier prompts that were unfinished on the engine of `entry`.
fn before(entry: &Entry, entries: &[Entry]) -> (usize, u64) {
    let times = |entry: &Entry| {
        let (ttft, engine) = (entry.ttft?, entry.engine?);
        Some((entry.at + (ttft - engine) / 1e3, entry.at + ttft / 1e3))
    };
    let Some((sent, _)) = times(entry).filter(|_| !entry.backend.is_empty()) else { return (0, 0) };
    let earlier = entries.iter().filter(|other| {
        other.backend == entry.backend
            && other.pool == entry.pool
            && times(other).is_some_and(|(began, first)| {
                // Of two requests sent at the same instant, the one with the sooner first token is
                // the earlier.
                let sooner = began < sent || began == sent && times(entry).is_some_and(|(_, own)| first < own);
                sooner && first > sent
            })
    });
    earlier.fold((0, 0), |(count, tokens), other| (count + 1, tokens + other.prompt))
}

/// Median times in the engine by range of lengths, milliseconds.
fn usual(entries: &[Entry]) -> BTreeMap<&'static str, f64> {
    let lengths = group(entries, Entry::length);
    lengths.iter().filter_map(|(name, entries)| Some((*name, quantile(entries, 0.5, |entry| entry.engine)?))).collect()
}

fn cause(entry: &Entry, usual: &BTreeMap<&'static str, f64>, (before, tokens): (usize, u64)) -> String {
    let Some(parts) = Parts::of(entry) else {
        let whole = entry.e2el.unwrap_or(0.0);
        return match entry.queue > whole / 2.0 {
            true => format!("queue ({})", percent(entry.queue, whole)),
            false => format!("{} output tokens", entry.output),
        };
    };
    let (largest, time) = parts.largest();
    let share = percent(time, parts.ttft);
    let usual = usual.get(entry.length()).copied().unwrap_or(0.0).max(f64::MIN_POSITIVE);
    match largest {
        "engine" if before >= CROWD => {
            format!("engine ({share}): {before} prompts with {tokens} tokens were before it there")
        }
        "engine" if time >= UNUSUAL * usual => {
            format!("engine ({share}), {:.1} times the usual for this length", time / usual)
        }
        "engine" => format!("engine ({share}), as usual for this length"),
        "elsewhere" if !entry.retries.is_empty() => format!("repeated attempts ({share}): {}", entry.retries),
        "elsewhere" => format!("reading or connecting ({share})"),
        queue => format!("{queue} ({share})"),
    }
}

pub(super) fn slow(entries: &[Entry]) -> Section {
    let row_of = |(entry, cause): &(&Entry, String)| {
        let backend =
            if entry.backend.is_empty() { "-".to_owned() } else { format!("{}/{}", entry.pool, entry.backend) };
        let mut cells = vec![clock(entry.at), cause.clone(), entry.class.to_string(), backend, entry.model.to_string()];
        cells.extend([entry.prompt, entry.cached, entry.output].map(|tokens| tokens.to_string()));
        cells.extend([Some(entry.queue), entry.engine, entry.ttft, entry.e2el].map(millis));
        cells.extend([entry.outcome.to_string(), entry.place()]);
        cells
    };
    let mut rows = vec![row([
        "arrived", "cause", "class", "backend", "model", "prompt", "cached", "output", "queue", "engine", "TTFT",
        "E2EL", "outcome", "record",
    ])];
    rows.extend(slowest(entries, SLOWEST).iter().map(row_of));
    let streams = count(&entries.iter().collect::<Vec<_>>(), |entry| entry.ttft.is_some());
    let by = if streams > 0 { "TTFT (E2EL where nothing was streamed)" } else { "E2EL" };
    let note = format!(
        "By {by}, milliseconds; prompt, cached and output in tokens. The last column is the file and the line."
    );
    Section { title: "The slowest requests".to_owned(), note, rows, ..Section::default() }
}

#[cfg(test)]
mod tests {
    use super::whole_percents;

    #[test]
    fn shares_in_percent_add_up_to_100() {
        assert_eq!(whole_percents([16.4, 83.3, 0.3]), [17, 83, 0]);
        assert_eq!(whole_percents([1.0, 1.0, 1.0]), [34, 33, 33]);
        assert_eq!(whole_percents([0.0, 5.0, 0.0]), [0, 100, 0]);
    }
}
