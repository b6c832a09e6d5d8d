//! The highest rate at which the objectives hold.
//!
//! Objectives hold at a rate when the share of requests that meet all of theirs, the *attainment*, stays at the target
//! for as long as the load lasts. [`find_rate`] looks for the highest such rate:
//!
//! ```text
//! one stream     can a request alone meet them?            no: no rate will do, and the search ends here
//! saturated      what does the server finish with a backlog?
//! looks          at 0.8 of that, then up or down, then the geometric middle, until one rate holds and one
//!                not much above it fails (`bracket`); a look ends as soon as it can say anything (`judge`)
//! samples        of full length around the boundary; all together say where it is (`curve`), and they go on
//!                until that is known within the tolerance
//! proof          a run with requests of its own at the rate to report; lower if it does not hold
//! ```
//!
//! The rate reported is the middle of what is known, or lower:
//!
//! - where the server is steep, so low that even with 1 in 100 bad luck the attainment misses the target by no more than
//!   [`Goal::slack`];
//! - by half of what a run is blind to: a queue that grows by a share e of the load needs 1/e times the objective's span to
//!   miss it;
//! - not above 97 % of what the server finishes with a backlog. A rate above that may hold for hours, until one long burst
//!   has built a queue that never goes away.
//!
//! Measured with 100 seeds each. Three simulated engines: within 5 % of the capacity in 92, 95 and 99 of 100, attainment in
//! the long run more than 1 % below the target in none. M/M/1 queues with objectives of 10, 40 and 200 service times:
//! within 5 % in 85, 90 and 91; too high in 0, 9 and 0. A search sends 60,000 to 150,000 requests; [`Goal::requests`] and
//! [`Goal::tolerance`] buy less for less.
//!
//! Rates are compared by their ratio, so 0.05 and 5,000 requests per second take the same number of runs. The search
//! knows nothing of sockets and clocks: a [`Probe`] sends one load and reports each request, so the same code runs against
//! a server and on virtual time. Bounded by [`Goal::max_probes`].

mod bracket;
mod curve;
pub mod judge;
#[cfg(test)]
mod tests;

use std::future::Future;

use bracket::Bracket;
use curve::{Curve, Point};
pub use judge::{Finding, Judge, Manner, Rule};

use sluice_core::stats::{Estimate, mean, proportion};

/// Requests of the run with one stream that count.
pub const ALONE: usize = 30;
/// And those before them, which find a cold server.
pub const ALONE_WARMUP: usize = 2;
/// The first rate looked at, as a share of what the server finishes at most.
const FIRST: f64 = 0.8;
/// Samples at least.
const SAMPLES: usize = 6;
/// How likely the reported rate may miss even the slack.
const BAD_LUCK: f64 = 0.01;
/// A queue that grows by a share e of the load fills an objective after 1/e times its span. So a sample does not see an
/// overload smaller than one over the spans it lasts, and half of that is taken off.
const BLIND: f64 = 0.5 / (3.0 * Goal::SPANS);
/// The reported rate is at most this share of what the server finishes with a backlog. A rate above that may hold for
/// hours, until one long burst has built a queue that never goes away.
const DRAIN_SHARE: f64 = 0.97;
/// What a backlog drains at is taken at the lower end of its interval, but not below this share: answers of one length
/// end in waves, which look like doubt and are none.
const DRAIN_DOUBT: f64 = 0.98;
/// Runs kept for proofs.
const PROOFS: usize = 8;
/// Where samples are taken, as quantiles of what is known about the boundary.
const PLACES: [f64; 3] = [0.5, 0.2, 0.8];
/// After a proof that failed, the next rate is at most this share of it.
const STEP_DOWN: f64 = 0.985;
/// What was delivered must be this share of what was asked, or the client is too slow for a verdict.
pub const DELIVERED: f64 = 0.97;

/// What is searched for, and how thoroughly.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Goal {
    /// Share of requests that must meet their objectives, in (0, 1).
    pub attainment: f64,
    /// How far below that the long-run attainment at the reported rate may be at the very worst.
    pub slack: f64,
    /// The longest span that an objective allows, seconds: what a queue needs time to fill.
    pub patience: f64,
    /// Samples are taken until the rate is known within this share either way (90 %).
    pub tolerance: f64,
    /// Requests of a look at least; a sample and a proof have three times as many.
    pub requests: usize,
    /// Runs at most.
    pub max_probes: usize,
    /// Of the loads.
    pub seed: u64,
}

impl Goal {
    /// A look lasts this many times the patience at least; a sample and a proof three times that.
    pub const SPANS: f64 = 20.0;
    /// Of the patience, at the start of a run, that does not count.
    const WARMUP_SPANS: f64 = 4.0;

    /// 99 % and the thoroughness behind the figures above, for objectives of at most `patience` seconds.
    pub fn new(patience: f64) -> Self {
        Self { attainment: 0.99, slack: 0.01, patience, tolerance: 0.035, requests: 1500, max_probes: 40, seed: 0 }
    }

    /// What a run at `rate` is judged by.
    fn rule(&self, rate: f64, manner: Manner) -> Rule {
        let lasting = |spans: f64| (spans * self.patience * rate).ceil().max(0.0) as usize;
        let times = if manner == Manner::Look { 1 } else { 3 };
        let length = times * self.requests.max(lasting(Self::SPANS)).max(1);
        Rule { manner, target: self.attainment, warmup: lasting(Self::WARMUP_SPANS), length }
    }
}

/// What one run sends.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Load {
    /// One request after the other.
    Stream,
    /// This many requests in flight at any time: when one ends the next is sent.
    Saturated(usize),
    /// Requests per second, arriving as the workload says.
    Rate(f64),
}

/// One run.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Order {
    /// What to send.
    pub load: Load,
    /// How many at most.
    pub requests: usize,
    /// Of them, those that end first do not count for the throughput.
    pub warmup: usize,
    /// Of its arrivals and prompts.
    pub seed: u64,
}

/// What a run saw besides its requests.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Seen {
    /// Requests completed per second ([`throughput`]), without the warm-up that [`Order::warmup`] asks for.
    pub throughput: Estimate,
    /// What was sent over what was due to be sent until then; 1 unless the client was too slow.
    pub delivered: f64,
    /// How long it took, seconds.
    pub seconds: f64,
}

/// Requests per second from the moments (seconds, ascending) at which they ended, and where it is in the long run (90 %). The
/// first `warmup` do not count. 0 where nothing can be said.
pub fn throughput(ended: &[f64], warmup: usize) -> Estimate {
    let counted = ended.get(warmup.saturating_sub(1)..).unwrap_or_default();
    let gaps: Vec<f64> = counted.windows(2).map(|pair| pair[1] - pair[0]).collect();
    let gap = mean::of_series(&gaps, 0.9);
    let rate = |gap: f64| if gap > 0.0 { gap.recip() } else { f64::INFINITY };
    if gaps.is_empty() || gap.value <= 0.0 {
        return Estimate { value: 0.0, low: 0.0, high: f64::INFINITY };
    }
    Estimate { value: rate(gap.value), low: rate(gap.high), high: rate(gap.low) }
}

/// Something that can be put under load.
pub trait Probe {
    /// Why a run was not possible.
    type Error;

    /// Sends `order` and tells `judge` about each request, by ordinal in the order due: its strain when it has ended, or
    /// that it is infinite when it can no longer meet its objectives. Ends when all have been told about, or early (and
    /// what still runs is abandoned) as soon as the judge has a finding.
    ///
    /// # Errors
    /// The load could not be sent at all. Requests that fail are strain, not errors.
    fn run(&mut self, order: &Order, judge: &mut Judge) -> impl Future<Output = Result<Seen, Self::Error>>;
}

/// One probe and what came of it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Step {
    /// What was sent.
    pub load: Load,
    /// How thoroughly it was judged.
    pub manner: Manner,
    /// The verdict.
    pub finding: Finding,
    /// Requests that counted.
    pub requests: usize,
    /// Share of them that met their objectives.
    pub attainment: Estimate,
    /// The rest.
    pub seen: Seen,
}

/// How a search ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ending {
    /// The rate is known within the tolerance, and proven.
    Found,
    /// Not even a request alone meets the objectives often enough.
    NoRate,
    /// The client could not send as fast as asked, so the server may bear more than was found.
    ClientLimit,
    /// The bound on runs came first; what is reported is proven, but a higher rate may be too.
    OutOfProbes,
}

/// The result of a search.
#[derive(Clone, Debug, PartialEq)]
pub struct Found {
    /// The rate, and the attainment of its proof. Nothing when no proof held.
    pub best: Option<(f64, Estimate)>,
    /// Where the highest rate is, by all runs together (90 %).
    pub capacity: Option<Estimate>,
    /// Why it ended.
    pub ending: Ending,
    /// Every run, in order.
    pub steps: Vec<Step>,
}

/// Searches as the head of this file says. `tell` hears of each step as it ends.
///
/// # Errors
/// What the probe says.
pub async fn find_rate<P: Probe>(probe: &mut P, goal: &Goal, mut tell: impl FnMut(&Step)) -> Result<Found, P::Error> {
    let mut search = Search { goal, steps: Vec::new(), points: Vec::new(), drain: f64::INFINITY, client_late: false };
    let alone = search.step(probe, Load::Stream, Manner::Sample, &mut tell).await?;
    if alone.attainment.high < goal.attainment || alone.seen.throughput.value <= 0.0 {
        return Ok(search.end(None, Ending::NoRate));
    }
    let full = search.step(probe, Load::Saturated(goal.requests.max(1)), Manner::Sample, &mut tell).await?;
    let (alone, full) = (alone.seen.throughput, full.seen.throughput);
    let most = full.value.max(alone.value);
    search.drain = most.min(full.low.max(full.value * DRAIN_DOUBT));
    let mut bracket = Bracket::new(alone.value, most * FIRST);
    while let Some(rate) = bracket.next() {
        let step = search.step(probe, Load::Rate(rate), Manner::Look, &mut tell).await?;
        if let Some(ending) = search.must_end(&step) {
            return Ok(search.end(None, ending));
        }
        bracket.learn(rate, step.finding);
    }
    if bracket.is_hopeless() {
        return Ok(search.end(None, Ending::NoRate));
    }
    let mut rate = bracket.middle().unwrap_or(most * FIRST);
    // Samples, until the boundary is known well enough; not all at one rate, or the slope stays unknown.
    for probability in PLACES.into_iter().cycle() {
        let step = search.step(probe, Load::Rate(rate), Manner::Sample, &mut tell).await?;
        if let Some(ending) = search.must_end(&step) {
            return Ok(search.end(None, ending));
        }
        let taken = search.steps.iter().filter(|step| step.manner == Manner::Sample).count() - 2;
        if taken >= SAMPLES && search.is_known() || search.steps.len() + PROOFS >= goal.max_probes {
            break;
        }
        rate = search.boundary(probability).unwrap_or(rate);
    }
    let ending = match search.is_known() {
        _ if search.client_late => Ending::ClientLimit,
        true => Ending::Found,
        false => Ending::OutOfProbes,
    };
    let mut rate = search.safe_rate().unwrap_or(rate);
    loop {
        let step = search.step(probe, Load::Rate(rate), Manner::Proof, &mut tell).await?;
        if step.finding == Finding::Holds && step.seen.delivered >= DELIVERED {
            return Ok(search.end(Some((rate, step.attainment)), ending));
        }
        if let Some(ending) = search.must_end(&step) {
            return Ok(search.end(None, ending));
        }
        rate = search.safe_rate().unwrap_or(rate).min(rate * STEP_DOWN);
    }
}

struct Search<'a> {
    goal: &'a Goal,
    steps: Vec<Step>,
    points: Vec<Point>,
    /// Requests per second that the server finishes while it has a backlog.
    drain: f64,
    /// A rate failed that the client did not deliver, so the failure may be its own.
    client_late: bool,
}

impl Search<'_> {
    async fn step<P: Probe>(
        &mut self,
        probe: &mut P,
        load: Load,
        manner: Manner,
        tell: &mut impl FnMut(&Step),
    ) -> Result<Step, P::Error> {
        let goal = self.goal;
        // The first two are for their throughput: a target of 0 never ends them.
        let whole = |warmup, length| Rule { manner, target: 0.0, warmup, length };
        let rule = match load {
            Load::Rate(rate) => goal.rule(rate, manner),
            Load::Stream => whole(ALONE_WARMUP, ALONE),
            Load::Saturated(streams) => whole(streams, 3 * streams),
        };
        let mut judge = Judge::new(rule);
        let seed = goal.seed.wrapping_add(self.steps.len() as u64);
        let order = Order { load, requests: judge.at_most(), warmup: rule.warmup, seed };
        let seen = probe.run(&order, &mut judge).await?;
        let finding = judge.close();
        let hits = judge.hits();
        let step = Step { load, manner, finding, requests: hits.len(), attainment: judge.attainment(), seen };
        // Looks are left out: they stop where it suits them.
        if let (Load::Rate(asked), Manner::Sample | Manner::Proof) = (load, manner) {
            self.points.push(Point {
                rate: judge.rate().unwrap_or(asked),
                requests: hits.len() as f64,
                misses: hits.iter().filter(|hit| !**hit).count() as f64,
                effect: proportion::dependence(&hits).effect,
            });
        }
        self.client_late |= finding == Finding::Fails && seen.delivered < DELIVERED;
        tell(&step);
        self.steps.push(step);
        Ok(step)
    }

    /// Whether the search cannot go on after `step`.
    fn must_end(&self, step: &Step) -> Option<Ending> {
        if step.finding == Finding::Holds && step.seen.delivered < DELIVERED {
            return Some(Ending::ClientLimit);
        }
        (self.steps.len() >= self.goal.max_probes).then_some(Ending::OutOfProbes)
    }

    fn curve(&self) -> Option<Curve> {
        Curve::of(&self.points, 1.0 - self.goal.attainment)
    }

    fn boundary(&self, probability: f64) -> Option<f64> {
        Some(self.curve()?.rate(1.0 - self.goal.attainment, probability))
    }

    fn is_known(&self) -> bool {
        let Some(curve) = self.curve() else { return false };
        let at = |probability| curve.rate(1.0 - self.goal.attainment, probability);
        (at(0.95) / at(0.05)).ln() <= 2.0 * self.goal.tolerance
    }

    /// The rate to report: the middle of what is known, or lower where even the slack would be in doubt.
    fn safe_rate(&self) -> Option<f64> {
        let (curve, allowed) = (self.curve()?, 1.0 - self.goal.attainment);
        let safe = curve.rate(allowed + self.goal.slack, BAD_LUCK);
        let by_misses = curve.rate(allowed, 0.5).min(safe) * (1.0 - BLIND);
        Some(by_misses.min(self.drain * DRAIN_SHARE))
    }

    fn end(self, best: Option<(f64, Estimate)>, ending: Ending) -> Found {
        let capacity = self.curve().map(|curve| {
            let [low, value, high] =
                [0.05, 0.5, 0.95].map(|probability| curve.rate(1.0 - self.goal.attainment, probability));
            Estimate { value, low, high }
        });
        Found { best, capacity, ending, steps: self.steps }
    }
}
