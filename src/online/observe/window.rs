//! Windows: how the requests that arrived since a moment fared, pool by pool.
//!
//! A request counts in the window in which it arrives, so never for later limits. Requests that
//! arrive together fare alike, so the error of a mean is computed over batches (Law and Kelton,
//! "Simulation Modeling and Analysis", batch means).
//!
//! Bounds: [`BATCHES_MAX`]; later arrivals count only in the next window.

use std::time::Duration;

use super::lengths::Lengths;
use super::loss::{Cause, Judged};
use super::usage::Usage;

/// Length of a batch.
pub const BATCH: Duration = Duration::from_secs(5);
/// 40 minutes of batches.
const BATCHES_MAX: usize = 480;
/// With more requests per backend a queue is long, and requests in it count as late.
const LONG_QUEUE: usize = 16;
/// The loss of a request in a long queue. It is the most that a served request loses.
const LOSS_OF_WAITING: f64 = 3.0;

/// The requests of one batch.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Batch {
    /// Number of requests.
    pub requests: f64,
    /// Sum of the losses.
    pub loss: f64,
    /// Requests that missed an objective.
    pub missed: f64,
}

/// One pool in a window.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct PoolWindow {
    pub(super) from: Duration,
    /// Ended requests, in batches by arrival.
    pub batches: Vec<Batch>,
    /// Prompt lengths.
    pub lengths: Lengths,
    /// Prompt lengths of requests that lost time in the queue.
    pub queued: Lengths,
    /// Loss of ended requests by cause: queue, engine, decode.
    pub causes: [f64; 3],
    /// Requests with a bound on TPOT, and how many of them missed it.
    pub tpot: (f64, f64),
    /// Requests that ended in the window, whenever they arrived.
    pub ended: f64,
    /// Served requests, and the sum of their seconds on a backend.
    pub served: (f64, f64),
    /// The most sequences of one request since the pool was configured.
    pub widest: u32,
    /// Use of the limits.
    pub usage: Usage,
}

impl PoolWindow {
    pub(crate) fn new(from: Duration) -> Self {
        Self { from, ..Self::default() }
    }

    /// Counts a request that arrived at `at`, with a prompt of `tokens`.
    pub(crate) fn add(&mut self, at: Duration, tokens: u64, judged: Judged) {
        let Some(since) = at.checked_sub(self.from) else { return };
        let batch = (since.as_secs_f64() / BATCH.as_secs_f64()) as usize;
        if batch >= BATCHES_MAX {
            return;
        }
        if self.batches.len() <= batch {
            self.batches.resize(batch + 1, Batch::default());
        }
        let batch = &mut self.batches[batch];
        batch.requests += 1.0;
        batch.loss += judged.loss;
        self.lengths.add(tokens);
        if let Some(seconds) = judged.service {
            self.served.0 += 1.0;
            self.served.1 += seconds;
        }
        if let Some(cause) = judged.cause {
            batch.missed += 1.0;
            self.causes[cause as usize] += judged.loss;
            if cause == Cause::Queue {
                self.queued.add(tokens);
            }
        }
    }

    pub(super) fn add_tpot(&mut self, at: Duration, ratio: Option<f64>) {
        let Some(ratio) = ratio.filter(|_| at >= self.from) else { return };
        self.tpot.0 += 1.0;
        self.tpot.1 += f64::from(u8::from(ratio > 1.0));
    }

    /// The demand, if known: requests at once on each backend if all arrivals were served at the
    /// present speed (Little's law).
    pub fn demand(&self) -> Option<f64> {
        let (served, seconds) = self.served;
        let rate = self.arrival_rate().filter(|_| served > 0.0 && self.usage.in_rotation > 0)?;
        Some(rate * (seconds / served) / self.usage.in_rotation as f64)
    }

    /// Arrivals per second, if known. They are the ended requests plus the rise of requests in
    /// flight, because fewer requests end than arrive while a backlog grows.
    pub fn arrival_rate(&self) -> Option<f64> {
        let ((from, first), (until, last)) = self.usage.in_flight?;
        let lasted = until.saturating_sub(from).as_secs_f64();
        (lasted >= BATCH.as_secs_f64()).then(|| (self.ended + last as f64 - first as f64).max(0.0) / lasted)
    }

    /// Whether requests in flight have become more by at least a long queue.
    pub(crate) fn backlog_grows(&self) -> bool {
        let long = LONG_QUEUE * self.usage.in_rotation.max(1);
        self.usage.in_flight.is_some_and(|((_, first), (_, last))| last > first + long)
    }

    /// Number of requests of this window that wait, if the queue is long; otherwise 0.
    fn late_in_queue(&self) -> f64 {
        let is_long = self.usage.queue > LONG_QUEUE * self.usage.in_rotation.max(1);
        let Some(((_, first), (_, last))) = self.usage.in_flight.filter(|_| is_long) else { return 0.0 };
        let arrived = self.ended + last as f64 - first as f64;
        (arrived - self.lengths.total()).clamp(0.0, self.usage.queue as f64)
    }

    /// Mean loss of a request.
    pub fn loss_per_request(&self) -> f64 {
        self.loss() / (self.lengths.total() + self.late_in_queue()).max(1.0)
    }

    /// Loss of all requests.
    pub fn loss(&self) -> f64 {
        self.causes.iter().sum::<f64>() + self.late_in_queue() * LOSS_OF_WAITING
    }

    /// Loss with this cause.
    pub fn loss_by(&self, cause: Cause) -> f64 {
        let waiting = if cause == Cause::Queue { self.late_in_queue() * LOSS_OF_WAITING } else { 0.0 };
        self.causes[cause as usize] + waiting
    }
}

/// Some pools since a moment.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Window {
    /// The beginning; earlier arrivals do not count.
    pub from: Duration,
    /// The pools, in the requested order.
    pub pools: Vec<PoolWindow>,
}

/// The mean loss of a window.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Score {
    /// Requests.
    pub requests: f64,
    /// Mean loss of a request; see [`crate::observe::loss`].
    pub loss: f64,
    /// Standard error of the loss.
    pub error: f64,
    /// Share of the requests that met all objectives.
    pub attainment: f64,
    /// Standard error of the attainment.
    pub attainment_error: f64,
    /// Arrivals per second.
    pub rate: f64,
    /// The largest mean loss of two adjacent batches; misses come in clusters.
    pub peak: f64,
}

impl Score {
    /// Puts the number of observed requests into a belief that has no verdict yet.
    pub fn describe_before_verdict(&self, belief: &mut (Self, String)) {
        if belief.0.requests == 0.0 && self.requests > 0.0 {
            belief.1 = format!("{:.0} requests were observed, not yet enough to judge", self.requests);
        }
    }
}

impl Window {
    /// The score of the arrivals until `until`, over all pools.
    pub fn score(&self, until: Duration) -> Score {
        self.score_with(self.pools.iter().map(PoolWindow::late_in_queue).sum(), until)
    }

    /// The score without the requests in a long queue.
    pub(crate) fn score_of_ended(&self, until: Duration) -> Score {
        self.score_with(0.0, until)
    }

    fn score_with(&self, waiting: f64, until: Duration) -> Score {
        let batches = (until.saturating_sub(self.from).as_secs_f64() / BATCH.as_secs_f64()).floor() as usize;
        let mut sums = vec![Batch::default(); batches];
        for pool in &self.pools {
            for (sum, batch) in sums.iter_mut().zip(&pool.batches) {
                sum.requests += batch.requests;
                sum.loss += batch.loss;
                sum.missed += batch.missed;
            }
        }
        for sum in &mut sums {
            let share = waiting / batches as f64;
            sum.requests += share;
            sum.loss += share * LOSS_OF_WAITING;
            sum.missed += share;
        }
        let total = |of: fn(&Batch) -> f64| sums.iter().map(of).sum::<f64>();
        let (requests, missed) = (total(|batch| batch.requests), total(|batch| batch.missed));
        if requests == 0.0 {
            return Score { attainment: 1.0, ..Score::default() };
        }
        let (loss, missed) = (total(|batch| batch.loss) / requests, missed / requests);
        let count = sums.len() as f64;
        // Variance of a ratio of two sums over batches.
        let error_of = |mean: f64, of: fn(&Batch) -> f64| {
            let residual = sums.iter().map(|batch| (of(batch) - mean * batch.requests).powi(2)).sum::<f64>();
            if count > 1.0 { (residual * count / (count - 1.0)).sqrt() / requests } else { f64::INFINITY }
        };
        let (error, attainment_error) = (error_of(loss, |batch| batch.loss), error_of(missed, |batch| batch.missed));
        let seconds = batches as f64 * BATCH.as_secs_f64();
        let of_two = |two: &[Batch]| {
            let requests: f64 = two.iter().map(|batch| batch.requests).sum();
            two.iter().map(|batch| batch.loss).sum::<f64>() / requests.max(1.0)
        };
        let peak = sums.windows(2).map(of_two).fold(loss, f64::max);
        let arrived: Option<f64> = self.pools.iter().map(PoolWindow::arrival_rate).sum();
        let rate = arrived.unwrap_or(requests / seconds);
        Score { requests, loss, error, attainment: 1.0 - missed, attainment_error, rate, peak }
    }

    /// Shares of the lost time by cause: queue, engine, decode; 0 without loss.
    pub fn lost(&self) -> [f64; 3] {
        let by = |cause: Cause| self.pools.iter().map(|pool| pool.loss_by(cause)).sum::<f64>();
        let lost = [by(Cause::Queue), by(Cause::Engine), by(Cause::Decode)];
        let total: f64 = lost.iter().sum();
        lost.map(|part| if total > 0.0 { part / total } else { 0.0 })
    }

    /// Share of the requests with a bound on TPOT that miss it; `None`: no such request.
    pub fn tpot_missed(&self) -> Option<f64> {
        let sum = |of: fn(&PoolWindow) -> f64| self.pools.iter().map(of).sum::<f64>();
        let (all, missed) = (sum(|pool| pool.tpot.0), sum(|pool| pool.tpot.1));
        (all > 0.0).then(|| missed / all)
    }

    /// Lengths of all prompts.
    pub fn lengths(&self) -> Lengths {
        let mut all = Lengths::default();
        self.pools.iter().for_each(|pool| all.merge(&pool.lengths));
        all
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_that_wait_in_a_long_queue_lose_their_time_there() {
        let mut pool = PoolWindow::new(Duration::ZERO);
        let late = Judged { loss: 1.2, cause: Some(Cause::Engine), service: Some(1.0) };
        (0..10).for_each(|_| pool.add(Duration::ZERO, 200, late));
        (pool.usage.in_rotation, pool.ended) = (2, 10.0);
        let window = |before: usize, queue: usize| {
            let mut pool = pool.clone();
            (pool.usage.queue, pool.usage.in_flight) = (queue, Some(((Duration::ZERO, before), (BATCH, queue))));
            Window { from: Duration::ZERO, pools: vec![pool] }
        };
        let short = window(0, 2 * LONG_QUEUE);
        assert_eq!((short.lost(), short.score(BATCH).requests), ([0.0, 1.0, 0.0], 10.0));
        let long = window(0, 90);
        let score = long.score(BATCH);
        assert!((0.957..0.958).contains(&long.lost()[0]), "270 of 282: {:?}", long.lost());
        assert!((long.pools[0].loss_per_request() - score.loss).abs() < 1e-12, "{score:?}");
        assert_eq!((score.requests, score.attainment), (100.0, 0.0));
        assert_eq!(window(60, 90).score(BATCH).requests, 40.0, "those that waited before are not of this window");
        assert_eq!(window(90, 80).score(BATCH).requests, 10.0, "a queue that becomes shorter");
    }

    #[test]
    fn slots_are_needed_for_what_arrives_and_not_for_what_waits() {
        let mut pool = PoolWindow::new(Duration::ZERO);
        let served = Judged { loss: 0.0, cause: None, service: Some(2.0) };
        (0..100).for_each(|_| pool.add(Duration::ZERO, 200, served));
        pool.usage.in_rotation = 2;
        assert_eq!(pool.demand(), None, "nothing is known of what arrives");
        (pool.ended, pool.usage.queue) = (100.0, 1_000);
        pool.usage.in_flight = Some(((Duration::ZERO, 1_000), (2 * BATCH, 1_100)));
        assert_eq!(pool.demand(), Some(20.0), "20 a second for 2 s each on two backends");
    }
}
