//! Sums over the requests of each backend, key and pool since the start, from which findings and
//! `sluice diagnose` take differences.
//!
//! Bounds: [`NAMES_MAX`], names of earlier configurations included; further requests count as
//! "other". A request costs a look-up and an uncontended lock, and a request with a key costs two
//! of each.

use std::collections::BTreeMap;
use std::sync::Arc;

use parking_lot::Mutex;

use super::series::Bounded;
use crate::flow::{Outcome, Record};

/// The most combinations of home pool, pool and backend, and also the most keys.
const NAMES_MAX: usize = 1_024;
const OTHER: &str = "other";

type Name = Option<Arc<str>>;

/// Sums by engine and by key.
pub struct TotalsTable {
    /// Sums by home pool, and by the pool and the backend of the last attempt.
    engines: Bounded<[Name; 3], Mutex<Totals>>,
    keys: Bounded<Name, Mutex<Totals>>,
}

/// The sums of everything that has been seen.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct TotalsView {
    /// By home pool.
    pub pools: Vec<(Arc<str>, Totals)>,
    /// By the pool and the backend of the last attempt.
    pub backends: Vec<([Arc<str>; 2], Totals)>,
    /// By API key.
    pub keys: Vec<(Arc<str>, Totals)>,
}

impl std::fmt::Debug for TotalsTable {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("TotalsTable").finish_non_exhaustive()
    }
}

impl Default for TotalsTable {
    fn default() -> Self {
        Self { engines: Bounded::new(NAMES_MAX), keys: Bounded::new(NAMES_MAX) }
    }
}

impl TotalsTable {
    /// Adds a request.
    pub fn count(&self, record: &Record) {
        if record.home.is_none() {
            return;
        }
        let other = || Some(OTHER.into());
        let engine = |name| self.engines.get(name, || [other(), other(), other()], |_| Mutex::default());
        engine([record.home.clone(), record.pool.clone(), record.backend.clone()]).lock().add(record);
        if record.key.is_some() {
            self.keys.get(record.key.clone(), other, |_| Mutex::default()).lock().add(record);
        }
    }

    /// Adds an attempt when it fails at this backend of a pool, because the request may end much
    /// later. The attempt has no home pool, because the request will count there once.
    pub fn attempt_failed(&self, [pool, backend]: &[Arc<str>; 2]) {
        let other = || Some(OTHER.into());
        let name = [None, Some(Arc::clone(pool)), Some(Arc::clone(backend))];
        self.engines.get(name, || [other(), other(), other()], |_| Mutex::default()).lock().failed += 1.0;
    }

    /// The sums so far.
    pub fn view(&self) -> TotalsView {
        let (mut pools, mut backends) = (BTreeMap::<_, Totals>::new(), BTreeMap::<_, Totals>::new());
        for ([home, pool, backend], totals) in self.engines.entries() {
            let totals = *totals.lock();
            if let Some(home) = home {
                let sum = pools.entry(home).or_default();
                *sum = sum.and(&totals);
            }
            if let (Some(pool), Some(backend)) = (pool, backend) {
                let sum = backends.entry([pool, backend]).or_default();
                *sum = sum.and(&totals);
            }
        }
        let keys = self.keys.entries().into_iter();
        TotalsView {
            pools: pools.into_iter().collect(),
            backends: backends.into_iter().collect(),
            keys: keys.map(|(key, totals)| (key.unwrap_or_default(), *totals.lock())).collect(),
        }
    }
}

/// Weighted sums of a logarithm and of its square, for a mean with an uncertainty.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Moments {
    weight: f64,
    sum: f64,
    /// Sums of the squared weight times the logarithm to the power of 0, 1 and 2.
    squares: [f64; 3],
}

impl Moments {
    /// Adds the logarithm of a positive value; other values are left out.
    pub fn add(&mut self, value: f64) {
        self.add_weighted(value, 1.0);
    }

    /// Adds the logarithm of a positive value, with a positive weight.
    pub fn add_weighted(&mut self, value: f64, weight: f64) {
        self.add_ln(value.ln(), weight);
    }

    fn add_ln(&mut self, ln: f64, weight: f64) {
        if ln.is_finite() && weight > 0.0 {
            let square = weight * weight;
            (self.weight, self.sum) = (self.weight + weight, self.sum + weight * ln);
            let added = [square, square * ln, square * ln * ln];
            self.squares.iter_mut().zip(added).for_each(|(sum, value)| *sum += value);
        }
    }

    /// The effective number of values. This many values of equal weight have the same uncertainty.
    pub fn count(&self) -> f64 {
        if self.squares[0] > 0.0 { self.weight * self.weight / self.squares[0] } else { 0.0 }
    }

    /// The geometric mean.
    pub fn mean(&self) -> f64 {
        if self.weight > 0.0 { (self.sum / self.weight).exp() } else { f64::NAN }
    }

    /// Variance of the mean of the logarithms; infinite below two values.
    fn variance_of_mean(&self) -> f64 {
        let count = self.count();
        if count < 2.0 {
            return f64::INFINITY;
        }
        let (mean, [zeroth, first, second]) = (self.sum / self.weight, self.squares);
        let spread = (second - 2.0 * mean * first + mean * mean * zeroth).max(0.0) / (self.weight * self.weight);
        // Equal values of a few requests prove little.
        spread * count / (count - 1.0) + 0.01 / count
    }

    /// The factor between the geometric means of `self` and `other` that is exceeded with
    /// certainty: four standard errors below the measured factor.
    pub fn surely_above(&self, other: &Self) -> f64 {
        let error = (self.variance_of_mean() + other.variance_of_mean()).sqrt();
        let ratio = self.sum / self.weight - other.sum / other.weight;
        let sure = (ratio - 4.0 * error).exp();
        if sure.is_finite() { sure } else { 0.0 }
    }

    fn since(self, before: Self) -> Self {
        let squares = std::array::from_fn(|power| self.squares[power] - before.squares[power]);
        Self { weight: self.weight - before.weight, sum: self.sum - before.sum, squares }
    }
}

/// Sums over the requests of a backend, a key or a pool.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Totals {
    /// Requests that ended.
    pub ended: f64,
    /// Requests that were shed.
    pub shed: f64,
    /// Requests that a failing backend or a timeout ended. In sums of a backend, also attempts that
    /// were repeated.
    pub failed: f64,
    /// Seconds in the queue of the gateway.
    pub queue_wait: f64,
    /// Seconds to get a connection.
    pub connect: f64,
    /// Requests that reached a backend.
    pub sent: f64,
    /// Prompt and output tokens.
    pub tokens: f64,
    /// Lengths of prompts, tokens.
    pub prompts: Moments,
    /// Lengths of prompts, weighted by the square of the length, so that few long prompts count
    /// most.
    pub long_prompts: Moments,
    /// Times per output token, seconds.
    pub tpot: Moments,
    /// Sum of the times from sending to the first token, seconds, and their number.
    pub engine_ttft: (f64, f64),
    /// Times to the first token weighted by the length of the prompt: seconds times tokens, and
    /// tokens.
    pub token_ttft: (f64, f64),
    /// Estimated lengths of prompts divided by the engine's count, weighted by the count.
    pub estimates: Moments,
}

impl Totals {
    fn add(&mut self, record: &Record) {
        self.ended += 1.0;
        match record.outcome {
            Outcome::Shed(_) => self.shed += 1.0,
            Outcome::UpstreamError(_) | Outcome::Timeout(_) => self.failed += 1.0,
            _ => {}
        }
        self.queue_wait += record.queue_wait.as_secs_f64();
        if record.backend.is_some() {
            self.sent += 1.0;
            self.connect += record.connect_time.as_secs_f64();
        }
        let prompt = record.prompt_tokens();
        self.tokens += (prompt + record.generated_tokens()) as f64;
        if !record.generates() {
            return;
        }
        let estimated = record.estimate.map_or(0, |estimate| estimate.tokens) as f64;
        let ln = estimated.ln();
        self.prompts.add_ln(ln, 1.0);
        self.long_prompts.add_ln(ln, estimated * estimated);
        let counted = record.stats.as_ref().and_then(|stats| stats.usage.prompt);
        if let Some((estimate, counted)) = record.estimate.zip(counted) {
            self.estimates.add_weighted(estimate.tokens as f64 / counted as f64, counted as f64);
        }
        // The times say nothing if the client held the engine up, nor for a continued stream, in
        // which another engine sent the first token and the time per token includes the pause.
        if record.held_up || record.continued > 0 {
            return;
        }
        if let Some(ttft) = record.backend_ttft {
            self.add_ttft(ttft.as_secs_f64(), estimated);
        }
        if let Some(tpot) = record.stats.as_ref().and_then(|stats| stats.tpot) {
            self.tpot.add(tpot.as_secs_f64());
        }
    }

    /// Adds the time from sending to the first token of a prompt of `tokens`.
    pub fn add_ttft(&mut self, seconds: f64, tokens: f64) {
        self.engine_ttft = (self.engine_ttft.0 + seconds, self.engine_ttft.1 + 1.0);
        self.token_ttft = (self.token_ttft.0 + seconds * tokens, self.token_ttft.1 + tokens);
    }

    /// The requests that are not in the earlier sums `before`.
    pub fn since(&self, before: &Self) -> Self {
        let differ = |now: (f64, f64), before: (f64, f64)| (now.0 - before.0, now.1 - before.1);
        Self {
            ended: self.ended - before.ended,
            shed: self.shed - before.shed,
            failed: self.failed - before.failed,
            queue_wait: self.queue_wait - before.queue_wait,
            connect: self.connect - before.connect,
            sent: self.sent - before.sent,
            tokens: self.tokens - before.tokens,
            prompts: self.prompts.since(before.prompts),
            long_prompts: self.long_prompts.since(before.long_prompts),
            tpot: self.tpot.since(before.tpot),
            engine_ttft: differ(self.engine_ttft, before.engine_ttft),
            token_ttft: differ(self.token_ttft, before.token_ttft),
            estimates: self.estimates.since(before.estimates),
        }
    }

    /// Both together.
    pub fn and(&self, other: &Self) -> Self {
        self.since(&Self::default().since(other))
    }

    /// Mean seconds in the queue.
    pub fn mean_wait(&self) -> f64 {
        self.queue_wait / self.ended.max(1.0)
    }

    /// Mean seconds from sending to the first token.
    pub fn mean_engine_ttft(&self) -> f64 {
        if self.engine_ttft.1 > 0.0 { self.engine_ttft.0 / self.engine_ttft.1 } else { f64::NAN }
    }

    /// Mean seconds from sending to the first token, weighted by the length of the prompt.
    pub fn mean_token_ttft(&self) -> f64 {
        if self.token_ttft.1 > 0.0 { self.token_ttft.0 / self.token_ttft.1 } else { f64::NAN }
    }
}
