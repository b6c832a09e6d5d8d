//! What gateways that no longer renew may still have running on an engine: at most what the others do not explain.
//!
//! ```text
//!   left(t) = running(t) - the sum over the others of what the engine had of them for sure at t
//! ```
//!
//! `running(t)` is what the engine says; `t` is at most [`PAGE_AGE`] before it was asked, and the ends of requests are seen at
//! most [`END_AGE`] after `t`. What the engine had of another gateway at that moment is not known, but bounded from
//! below: each publishes, window by window, the fewest of its sequences that the engine had for sure. So a sample is judged
//! later, when every other has written after this member's own write, sent [`END_AGE`] after `t` or later: a compare-and-swap
//! succeeds only over the state before it, so that plan was made later still, and the windows that were published meanwhile
//! contain `t` and `t + END_AGE`. If more windows passed than are published, nothing of that gateway counts.
//!
//! At `t + END_AGE` a gateway counts no sequence that had ended at `t`, and none that had not begun at `t`, since a sequence counts
//! only [`SURE_AGE`] after its first token. Were it counted at its first token, one that began after `t` would stand for
//! one that had ended before `t` unseen, and hide a request of a gateway that is silent.
//!
//! What gateways whose lease is over had is one entry of the ledger, [`UNEXPLAINED`], whose beat moves when another is added. They
//! start nothing new, so what they have left only falls: a bound that held once holds for as long as that beat stands still. A
//! sample counts only if the beat was the same before it. What the others have just started is
//! not known to be at the engine, so that under load a few requests may stay unexplained until there is a calm moment.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::Duration;

use crate::ledger::{Entry, Ledger, UNEXPLAINED, WINDOWS, is_gateway};
use crate::silence::END_AGE;
#[cfg(doc)]
use crate::silence::SURE_AGE;
use crate::usage::{LocalUse, Page};

/// A page is at most so old when it is asked for: vLLM renews it with each step of its engine.
pub(crate) const PAGE_AGE: Duration = Duration::from_secs(1);
/// A member that has not planned for so long has not asked either.
const GAP: Duration = Duration::from_secs(2);
/// Plans that are remembered.
const LOOKS_MAX: usize = 16;

/// Beats by gateway.
type Beats = BTreeMap<String, u64>;

/// What was so at one plan.
#[derive(Clone, Debug)]
struct Look {
    at: Duration,
    beats: Beats,
    /// The fewest settled sequences of this member since the plan before, by backend.
    settled: BTreeMap<String, u64>,
}

/// What all engines said at one moment.
#[derive(Clone, Debug)]
struct Sample {
    at: Duration,
    /// The plan before that moment.
    before: Look,
    /// The beats in this member's first write after it.
    after: Option<Beats>,
    /// What each engine said that it runs.
    running: BTreeMap<String, u64>,
    /// What it had of this member for sure.
    own: BTreeMap<String, u64>,
}

/// What is known of those whose lease is over.
#[derive(Clone, Debug, Default)]
pub(crate) struct Census {
    sample: Option<Sample>,
    /// What may be left on each backend, for one beat of the entry.
    bounds: BTreeMap<String, (u64, u64)>,
    /// When an engine last said what it runs, or since when it has been asked.
    pages: BTreeMap<String, Duration>,
    /// The last plans, the latest first.
    looks: VecDeque<Look>,
}

fn beats(ledger: &Ledger) -> Beats {
    ledger.gateways.iter().map(|(id, entry)| (id.clone(), entry.beat)).collect()
}

impl Census {
    /// Takes a sample, or judges the last one. `over` are the gateways whose lease is over now.
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

    /// A sample of these pages, if there is a plan before them at which the lease of a gateway was over.
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

    /// Notes a bound, unless there is a smaller one for the same beat.
    fn bound(&mut self, backend: &str, beat: u64, left: u64) {
        match self.bounds.get_mut(backend) {
            Some((known, least)) if *known == beat => *least = left.min(*least),
            _ => drop(self.bounds.insert(backend.to_owned(), (beat, left))),
        }
    }

    /// This ledger was sent by this member at that time, and written.
    pub(crate) fn wrote(&mut self, sent: Duration, ledger: &Ledger) {
        if let Some(sample) = self.sample.as_mut().filter(|sample| sent >= sample.at + END_AGE) {
            sample.after.get_or_insert_with(|| beats(ledger));
        }
    }

    /// When an engine last said what it runs, or since when it has been asked.
    pub(crate) fn page(&self, backend: &str) -> Option<Duration> {
        self.pages.get(backend).copied()
    }

    /// What may be left on a backend, for this beat of the entry; `None`: not known yet.
    pub(crate) fn left(&self, backend: &str, beat: u64) -> Option<u64> {
        self.bounds.get(backend).filter(|(known, _)| *known == beat).map(|(_, left)| *left)
    }
}

impl Sample {
    /// Whether every gateway that renews has written since this member's write.
    fn is_complete(&self, own: &str, ledger: &Ledger, over: &BTreeSet<String>) -> bool {
        let Some(after) = &self.after else { return false };
        others(own, ledger, over).all(|(id, entry)| after.get(id).is_none_or(|beat| entry.beat > *beat))
    }

    /// Sequences on a backend that were those of gateways which renew, at least.
    fn explained(&self, own: &str, backend: &str, ledger: &Ledger, over: &BTreeSet<String>) -> u64 {
        let settled = others(own, ledger, over).filter_map(|(id, entry)| {
            let windows = usize::try_from(entry.beat.checked_sub(*self.before.beats.get(id)?)?).ok()?;
            let settled = &entry.backends.get(backend)?.settled;
            (windows <= WINDOWS).then(|| settled[..windows].iter().copied().min().unwrap_or(0))
        });
        settled.sum::<u64>() + self.own.get(backend).copied().unwrap_or(0)
    }
}

/// The other gateways, less those whose lease is over.
fn others<'l>(
    own: &'l str,
    ledger: &'l Ledger,
    over: &'l BTreeSet<String>,
) -> impl Iterator<Item = (&'l String, &'l Entry)> {
    ledger.gateways.iter().filter(move |(id, _)| *id != own && is_gateway(id) && !over.contains(*id))
}
