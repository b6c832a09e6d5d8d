//! Findings: causes of slow requests, each with a sentence, evidence, and what to do.
//!
//! The gateway passes its [`Facts`] every [`LOOK`]. The last [`RECENT`] is compared with the hour
//! before ([`causes`]). A cause seen in [`RAISE`] looks in a row becomes a finding. The finding
//! ends after [`CLEAR`] looks in a row without the cause, or [`CLEAR_BACKLOG`] for the load while
//! requests wait. One cause of a pool's load is shown at a time.
//!
//! Bounds: [`SAMPLES_MAX`], [`FINDINGS_MAX`]. Pure: time is a parameter.

mod finding;
pub mod facts;
mod minute;
mod engines;
mod load;
mod causes;

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use facts::{Facts, PageFacts};
pub use finding::{Cause, Finding};
use sluice_gateway::telemetry::totals::Totals;

/// Time between two looks.
pub const LOOK: Duration = Duration::from_secs(10);
const RECENT: Duration = Duration::from_secs(60);
/// Age of the oldest facts to compare with.
const OLDEST: Duration = Duration::from_secs(3_600);
/// Time for which every look is kept; later one a minute.
const FINE: Duration = Duration::from_secs(300);
/// Looks in a row with a new cause, after which it is a finding.
const RAISE: u32 = 2;
/// Looks in a row without the cause, after which a finding ends.
const CLEAR: u32 = 6;
/// [`CLEAR`] for a cause of the load while requests still wait.
const CLEAR_BACKLOG: u32 = 18;
/// The most facts kept: every look of the last five minutes, and one look a minute before that.
pub const SAMPLES_MAX: usize = 100;
/// The most findings, the most severe first.
pub const FINDINGS_MAX: usize = 16;

#[derive(Debug)]
struct Seen {
    finding: Finding,
    from: Duration,
    seen: u32,
    absent: u32,
    is_raised: bool,
}

/// The findings of a gateway.
#[derive(Debug, Default)]
pub struct Findings {
    samples: VecDeque<(Duration, Facts)>,
    known: BTreeMap<(Cause, String, String), Seen>,
}

/// The last minute of one key or engine.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct LastMinute {
    /// The pool of an engine; empty for a key.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub pool: String,
    /// The name.
    pub name: String,
    /// Requests that ended.
    pub requests: u64,
    /// Requests that were shed or failed.
    pub lost: u64,
    /// Prompt and output tokens.
    pub tokens: u64,
    /// Mean seconds in the gateway's queue.
    pub queue_wait_s: f64,
    /// Mean seconds from sending to the first token.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub engine_ttft_s: Option<f64>,
    /// Typical seconds per output token.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tpot_s: Option<f64>,
    /// Engine seconds that fair pools charged to a key.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub work_s: Option<f64>,
    /// Requests of a key that wait in fair pools now.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub waiting: Option<u64>,
    /// The engine's own metrics page.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub engine: Option<EngineMinute>,
}

/// The metrics page of an engine, as last read.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct EngineMinute {
    /// Requests that run.
    pub running: f64,
    /// Requests that wait in the engine.
    pub waiting: f64,
    /// Share of the KV cache in use, 0 to 1.
    pub kv_usage: f64,
    /// Preemptions in the last minute.
    pub preemptions: f64,
}

impl EngineMinute {
    fn new(now: &PageFacts, before: Option<PageFacts>) -> Self {
        // A sum that fell shows that the engine has started again.
        let before = before.map_or(now.preemptions, |before| before.preemptions);
        let preemptions = if now.preemptions >= before { now.preemptions - before } else { now.preemptions };
        Self { running: now.running, waiting: now.waiting, kv_usage: now.kv_usage, preemptions }
    }
}

impl LastMinute {
    fn new(pool: &str, name: &str, totals: &Totals) -> Self {
        let known = |value: f64| Some(value).filter(|value| value.is_finite());
        Self {
            pool: pool.to_owned(),
            name: name.to_owned(),
            requests: totals.ended as u64,
            lost: (totals.shed + totals.failed) as u64,
            tokens: totals.tokens as u64,
            queue_wait_s: totals.mean_wait(),
            engine_ttft_s: known(totals.mean_engine_ttft()),
            tpot_s: known(totals.tpot.mean()),
            work_s: None,
            waiting: None,
            engine: None,
        }
    }
}

/// The changes of one look.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Change {
    /// New findings.
    pub appeared: Vec<Finding>,
    /// Findings whose cause is gone.
    pub gone: Vec<Finding>,
}

impl Findings {
    /// Compares the facts at `now`, the time since the start.
    pub fn look(&mut self, facts: Facts, now: Duration) -> Change {
        let recent = self.samples.iter().rev().find(|(at, _)| *at + RECENT <= now);
        // The past ends before the first known change.
        let changed = self.known.values().filter(|seen| seen.finding.is_change).map(|seen| seen.from).min();
        let calm = self.samples.iter().rev().find(|(at, _)| *at + RECENT <= changed.unwrap_or(now)).or(recent);
        let found = match recent {
            Some((from, before)) => {
                let is_fine = |at: &Duration| *at + FINE >= now;
                let looks: Vec<&Facts> =
                    self.samples.iter().filter(|(at, _)| is_fine(at)).map(|(_, facts)| facts).collect();
                let recent = self.samples.iter().filter(|(at, _)| at >= from).count();
                let past =
                    self.samples.front().zip(calm).map(|((begun, first), (ended, last))| {
                        (first, last, ended.saturating_sub(*begun).as_secs_f64())
                    });
                let span = now.saturating_sub(*from).as_secs_f64();
                causes::of(&minute::Compared { now: &facts, before, span, looks: &looks, recent, past })
            }
            None => Vec::new(),
        };
        let queues = facts.pools.iter().filter(|pool| pool.queue > 0.0).map(|pool| pool.name.to_string()).collect();
        self.keep(facts, now);
        self.note(found, &queues, now)
    }

    fn keep(&mut self, facts: Facts, now: Duration) {
        self.samples.push_back((now, facts));
        let mut last_kept = None;
        self.samples.retain(|(at, _)| {
            let is_recent = *at + FINE >= now;
            let is_due = last_kept.is_none_or(|kept| *at >= kept + RECENT);
            let stays = *at + OLDEST >= now && (is_recent || is_due);
            if stays {
                last_kept = Some(*at);
            }
            stays
        });
        while self.samples.len() > SAMPLES_MAX {
            self.samples.pop_front();
        }
    }

    /// `queues`: the pools with requests that wait.
    fn note(&mut self, mut found: Vec<Finding>, queues: &BTreeSet<String>, now: Duration) -> Change {
        let mut change = Change::default();
        for seen in self.known.values_mut() {
            seen.absent += 1;
        }
        found.retain(|finding| !self.is_backlog(finding));
        for finding in found {
            let key = (finding.cause, finding.pool.clone(), finding.subject.clone());
            let known = self.known.len();
            let seen = match self.known.entry(key) {
                std::collections::btree_map::Entry::Occupied(entry) => entry.into_mut(),
                std::collections::btree_map::Entry::Vacant(_) if known >= 4 * FINDINGS_MAX => continue,
                std::collections::btree_map::Entry::Vacant(entry) => {
                    entry.insert(Seen { finding: finding.clone(), from: now, seen: 0, absent: 0, is_raised: false })
                }
            };
            (seen.finding, seen.absent) = (finding, 0);
            seen.seen += 1;
            if seen.seen >= RAISE && !std::mem::replace(&mut seen.is_raised, true) {
                change.appeared.push(seen.finding.clone());
            }
        }
        self.known.retain(|_, seen| {
            // A cause that is not a finding yet must be seen in each look.
            let is_backlogged = seen.finding.cause.is_load() && queues.contains(&seen.finding.pool);
            let clear = if is_backlogged { CLEAR_BACKLOG } else { CLEAR };
            let stays = seen.absent == 0 || (seen.is_raised && seen.absent < clear);
            if !stays && seen.is_raised {
                change.gone.push(seen.finding.clone());
            }
            stays
        });
        change
    }

    /// Whether the finding about the load only shows the backlog of an earlier one. A finding about
    /// a change of the load is shown even after one about a state of the load.
    fn is_backlog(&self, finding: &Finding) -> bool {
        let explains = |seen: &Seen| {
            let earlier = &seen.finding;
            let is_other = (earlier.cause, &earlier.subject) != (finding.cause, &finding.subject);
            let is_stronger = earlier.is_change || !finding.is_change;
            seen.is_raised && earlier.cause.is_load() && earlier.pool == finding.pool && is_other && is_stronger
        };
        finding.cause.is_load() && self.known.values().any(explains)
    }

    /// The last minute of every key, most tokens first, and of every engine; empty in the first
    /// minute.
    pub fn last_minute(&self) -> (Vec<LastMinute>, Vec<LastMinute>) {
        let Some((last, facts)) = self.samples.back() else { return Default::default() };
        let earlier = self.samples.iter().rev().find(|(at, _)| *at + RECENT <= *last);
        let Some((_, before)) = earlier else { return Default::default() };
        let of_key = |(key, totals): &(Arc<str>, Totals)| {
            let (work, earlier) = (facts.work(key), before.work(key).map_or(0.0, |(seconds, _)| seconds));
            LastMinute {
                // The work of an idle key begins again at zero.
                work_s: work.map(|(now, _)| if now >= earlier { now - earlier } else { now }),
                waiting: work.map(|(_, waiting)| waiting as u64),
                ..LastMinute::new("", key, &totals.since(&before.key(key)))
            }
        };
        let mut keys: Vec<LastMinute> = facts.keys.iter().map(of_key).filter(|key| key.requests > 0).collect();
        keys.sort_by_key(|key| std::cmp::Reverse(key.tokens));
        let engines = facts.pools.iter().flat_map(|pool| {
            pool.backends.iter().map(|backend| {
                let before = before.pool(&pool.name).and_then(|pool| pool.backend(&backend.name));
                let totals = backend.totals.since(&before.map(|before| before.totals).unwrap_or_default());
                LastMinute {
                    engine: backend.engine.map(|now| EngineMinute::new(&now, before.and_then(|before| before.engine))),
                    ..LastMinute::new(&pool.name, &backend.name, &totals)
                }
            })
        });
        (keys, engines.collect())
    }

    /// The findings as of `now`, the most severe first.
    pub fn all(&self, now: Duration) -> Vec<Finding> {
        let raised = self.known.values().filter(|seen| seen.is_raised);
        let shown = raised
            .map(|seen| Finding { since_seconds: now.saturating_sub(seen.from).as_secs_f64(), ..seen.finding.clone() });
        shown.take(FINDINGS_MAX).collect()
    }
}

#[cfg(test)]
mod tests;
