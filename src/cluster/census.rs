//! Computes the most requests of silent gateways that an engine may still run.
//!
//! ```text
//!   left(t) = running(t) - the sum over the other gateways of the sequences
//!                          that the engine had for sure at t
//! ```
//!
//! The engine reports `running(t)` on a page, with `t` at most [`PAGE_AGE`] before the request for
//! the page. The other terms are lower bounds: for each window of time, each gateway publishes the
//! fewest of its sequences that the engine had for sure.
//!
//! A sample is judged after this member has written, at least [`END_AGE`] after `t`, and every
//! other gateway that renews has written after that. Compare-and-swap orders these writes, so the
//! published windows contain `t` and `t + END_AGE`. A gateway that has written more windows since
//! the sample than an entry holds counts as 0 sequences.
//!
//! Silent gateways share one entry, [`UNEXPLAINED`], and start no requests. So a bound holds until
//! another gateway falls silent, which changes the entry's beat. A sample bounds the requests of
//! the gateways that were in the entry at the plan before the sample. Under load, sequences that
//! just started may stay unexplained until a calm moment.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::Duration;

use crate::ledger::{Entry, Ledger, UNEXPLAINED, WINDOWS, is_gateway};
use crate::silence::END_AGE;
#[cfg(doc)]
use crate::silence::SURE_AGE;
use crate::usage::{LocalUse, Page};

/// Greatest age of a page's numbers when a member asks for the page. vLLM renews the numbers with
/// each step.
pub(crate) const PAGE_AGE: Duration = Duration::from_secs(1);
/// After a longer time without a plan, the times of the last pages are forgotten.
const GAP: Duration = Duration::from_secs(2);
const LOOKS_MAX: usize = 16;

type Beats = BTreeMap<String, u64>;

#[derive(Clone, Debug)]
struct Look {
    at: Duration,
    beats: Beats,
    /// By backend: the fewest settled sequences of this member since the previous plan.
    settled: BTreeMap<String, u64>,
}

#[derive(Clone, Debug)]
struct Sample {
    at: Duration,
    before: Look,
    /// The beats in this member's first write at least [`END_AGE`] after `at`.
    after: Option<Beats>,
    /// Sequences that each engine reported.
    running: BTreeMap<String, u64>,
    /// The fewest of this member's sequences that each engine had for sure.
    own: BTreeMap<String, u64>,
}

#[derive(Clone, Debug, Default)]
pub(crate) struct Census {
    sample: Option<Sample>,
    /// By backend: the beat of [`UNEXPLAINED`], and the most sequences of silent gateways at that
    /// beat.
    bounds: BTreeMap<String, (u64, u64)>,
    /// By backend: when the engine last sent a page, or if it sent none, when this member first
    /// asked.
    pages: BTreeMap<String, Duration>,
    /// The last plans, latest first.
    looks: VecDeque<Look>,
}

fn beats(ledger: &Ledger) -> Beats {
    ledger.gateways.iter().map(|(id, entry)| (id.clone(), entry.beat)).collect()
}

impl Census {
    /// Judges a complete sample, or takes a new one. `over`: the silent gateways.
    pub(crate) fn observe(
        &mut self,
        now: Duration,
        own: &str,
        ledger: &Ledger,
        local: &LocalUse,
        over: &BTreeSet<String>,
    ) {
        if let Some(sample) = &mut self.sample
            && sample.after.is_none()
        {
            let settled = |backend: &String| local.get(backend).map_or(0, |usage| usage.settled);
            sample.own.iter_mut().for_each(|(backend, least)| *least = settled(backend).min(*least));
        }
        if let Some(sample) = self.sample.take_if(|sample| sample.is_complete(own, ledger, over)) {
            for (backend, running) in &sample.running {
                let left = running.saturating_sub(sample.explained(own, backend, ledger, over));
                self.bound(backend, sample.before.beats.get(UNEXPLAINED).copied().unwrap_or(0), left);
            }
        }
        let last = self.looks.front().map(|look| look.at);
        let settled = local.iter().map(|(backend, usage)| (backend.clone(), usage.settled)).collect();
        self.looks.push_front(Look { at: now, beats: beats(ledger), settled });
        self.looks.truncate(LOOKS_MAX);
        let pages = local.iter().filter_map(|(backend, usage)| Some((backend.clone(), usage.page?)));
        let pages: BTreeMap<String, Page> = pages.collect();
        if last.is_none_or(|last| now.saturating_sub(last) > GAP) {
            self.pages.clear();
        }
        self.pages.retain(|backend, _| local.contains_key(backend));
        for backend in local.keys() {
            self.pages.entry(backend.clone()).or_insert(now);
        }
        self.pages.extend(pages.keys().map(|backend| (backend.clone(), now)));
        if self.sample.is_none() {
            self.sample = self.sample(now, pages);
        }
        let beat = ledger.gateways.get(UNEXPLAINED).map(|entry| entry.beat);
        self.bounds.retain(|_, (known, _)| beat == Some(*known));
    }

    /// A sample of these pages. `None` unless [`UNEXPLAINED`] was in the ledger at the last plan
    /// before the pages.
    fn sample(&self, at: Duration, pages: BTreeMap<String, Page>) -> Option<Sample> {
        let first = pages.values().map(|page| page.asked).min()?.saturating_sub(PAGE_AGE);
        let place = self.looks.iter().position(|look| look.at <= first)?;
        let before = self.looks[place].clone();
        let least = |backend: &String| {
            let windows = self.looks.iter().take(place).map(|look| look.settled.get(backend).copied().unwrap_or(0));
            windows.min().unwrap_or(0)
        };
        let own = pages.keys().map(|backend| (backend.clone(), least(backend))).collect();
        let running = pages.into_iter().map(|(backend, page)| (backend, page.running)).collect();
        before.beats.contains_key(UNEXPLAINED).then_some(Sample { at, before, after: None, running, own })
    }

    fn bound(&mut self, backend: &str, beat: u64, left: u64) {
        match self.bounds.get_mut(backend) {
            Some((known, least)) if *known == beat => *least = left.min(*least),
            _ => drop(self.bounds.insert(backend.to_owned(), (beat, left))),
        }
    }

    /// The store confirmed the write that this member sent at `sent`.
    pub(crate) fn wrote(&mut self, sent: Duration, ledger: &Ledger) {
        if let Some(sample) = self.sample.as_mut().filter(|sample| sent >= sample.at + END_AGE) {
            sample.after.get_or_insert_with(|| beats(ledger));
        }
    }

    /// When the engine last sent a page, or if it sent none, when this member first asked.
    pub(crate) fn page(&self, backend: &str) -> Option<Duration> {
        self.pages.get(backend).copied()
    }

    /// The most sequences of the silent gateways at this beat of their entry, if known.
    pub(crate) fn left(&self, backend: &str, beat: u64) -> Option<u64> {
        self.bounds.get(backend).filter(|(known, _)| *known == beat).map(|(_, left)| *left)
    }
}

impl Sample {
    /// Whether every other gateway that renews has written since the write of `after`.
    fn is_complete(&self, own: &str, ledger: &Ledger, over: &BTreeSet<String>) -> bool {
        let Some(after) = &self.after else { return false };
        others(own, ledger, over).all(|(id, entry)| after.get(id).is_none_or(|beat| entry.beat > *beat))
    }

    /// The fewest sequences on a backend that belonged to gateways which renew.
    ///
    /// A sequence counts only [`SURE_AGE`] after the first token. Otherwise a sequence that began
    /// after the page could be counted in place of one that ended before it, whose end its gateway
    /// has not seen. It would then explain a silent gateway's request.
    fn explained(&self, own: &str, backend: &str, ledger: &Ledger, over: &BTreeSet<String>) -> u64 {
        let settled = others(own, ledger, over).filter_map(|(id, entry)| {
            let windows = usize::try_from(entry.beat.checked_sub(*self.before.beats.get(id)?)?).ok()?;
            let settled = &entry.backends.get(backend)?.settled;
            (windows <= WINDOWS).then(|| settled[..windows].iter().copied().min().unwrap_or(0))
        });
        settled.sum::<u64>() + self.own.get(backend).copied().unwrap_or(0)
    }
}

fn others<'l>(
    own: &'l str,
    ledger: &'l Ledger,
    over: &'l BTreeSet<String>,
) -> impl Iterator<Item = (&'l String, &'l Entry)> {
    ledger.gateways.iter().filter(move |(id, _)| *id != own && is_gateway(id) && !over.contains(*id))
}
