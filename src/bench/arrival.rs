//! When requests are due: the schedule of a run, drawn before the run begins.
//!
//! Open arrivals (Poisson, constant, bursts) fix the moment of every request in advance, whatever
//! the server does: that is how independent users behave, and it is what makes queues visible. A
//! closed loop keeps a number of streams busy and sends the next request when the last has ended;
//! it has no schedule, and says nothing about tails under a load that does not wait.
//!
//! Rules, with rate r in requests per second:
//!
//! - Poisson: gaps are exponential with mean 1/r. When a number of requests N is asked for, all times
//!   are scaled so that the last is N/r, as `vllm bench serve` does; that removes the spread of the
//!   count, so it is not exactly a Poisson process. When a duration is asked for nothing is scaled.
//! - Constant: request i is due at (i + 1)/r.
//! - Burst: `size` requests at once, every size/r seconds, the first burst at time 0.
//!
//! Times are offsets from the start of the run. At most [`MAX_REQUESTS`] of them.

use std::time::Duration;

use super::{BenchError, Purpose, stream};

/// The most requests in one schedule: 16 bytes each in the plan and some 100 in the result, so a
/// gigabyte at the very most.
pub const MAX_REQUESTS: u64 = 5_000_000;

/// How requests arrive.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Arrival {
    /// Independent arrivals at `rate` requests per second.
    Poisson {
        /// Requests per second.
        rate: f64,
    },
    /// Evenly spaced arrivals at `rate` requests per second.
    Constant {
        /// Requests per second.
        rate: f64,
    },
    /// `size` requests at the same moment, `rate` requests per second on average.
    Burst {
        /// Requests per second on average.
        rate: f64,
        /// Requests in one burst.
        size: u32,
    },
    /// `streams` requests in flight all the time.
    ClosedLoop {
        /// Requests in flight.
        streams: u32,
    },
}

/// How long a run is.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Extent {
    /// This many requests.
    Requests(u64),
    /// Requests are due for this long (and then those in flight are waited for).
    Lasting(Duration),
}

impl Arrival {
    /// Checks that this arrival sends something.
    ///
    /// # Errors
    /// A rate, size or stream count that is not above 0.
    pub fn check(self) -> Result<(), BenchError> {
        let (rate, count, what) = match self {
            Self::Poisson { rate } | Self::Constant { rate } => (rate, 1, ""),
            Self::Burst { rate, size } => (rate, size, "a burst size"),
            Self::ClosedLoop { streams } => (1.0, streams, "a number of streams"),
        };
        if !(rate.is_finite() && rate > 0.0) {
            return Err(BenchError::BadArrival("a rate"));
        }
        if count == 0 { Err(BenchError::BadArrival(what)) } else { Ok(()) }
    }

    /// The moments at which requests are due, ascending; empty for a closed loop.
    ///
    /// # Errors
    /// As [`Arrival::check`]; or more than [`MAX_REQUESTS`] requests.
    pub fn schedule(self, extent: Extent, seed: u64) -> Result<Vec<Duration>, BenchError> {
        self.check()?;
        let rate = match self {
            Self::Poisson { rate } | Self::Constant { rate } | Self::Burst { rate, .. } => rate,
            Self::ClosedLoop { .. } => return Ok(Vec::new()),
        };
        let expected = match extent {
            Extent::Requests(count) => count as f64,
            Extent::Lasting(length) => (rate * length.as_secs_f64()).ceil(),
        };
        if expected > MAX_REQUESTS as f64 {
            return Err(BenchError::TooManyRequests(expected as u64, MAX_REQUESTS));
        }
        let mut times = self.draw(extent, seed);
        if let (Self::Poisson { .. }, Extent::Requests(count)) = (self, extent) {
            stretch(&mut times, count as f64 / rate);
        }
        Ok(times.into_iter().map(Duration::from_secs_f64).collect())
    }

    /// Times in seconds, before any scaling.
    fn draw(self, extent: Extent, seed: u64) -> Vec<f64> {
        let mut rng = stream(seed, Purpose::Arrival, 0);
        let mut now = 0.0;
        let mut times = Vec::new();
        loop {
            let sent = times.len() as u64;
            now = match self {
                Self::Poisson { rate } => now + rng.exponential() / rate,
                Self::Constant { rate } => (sent + 1) as f64 / rate,
                Self::Burst { rate, size } => ((sent / u64::from(size)) * u64::from(size)) as f64 / rate,
                Self::ClosedLoop { .. } => return times,
            };
            let ended = match extent {
                Extent::Requests(count) => sent >= count,
                Extent::Lasting(length) => now > length.as_secs_f64() || sent >= MAX_REQUESTS,
            };
            if ended {
                return times;
            }
            times.push(now);
        }
    }
}

fn stretch(times: &mut [f64], end: f64) {
    let Some(last) = times.last().copied().filter(|last| *last > 0.0) else { return };
    for time in times {
        *time *= end / last;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MINUTE: Duration = Duration::from_secs(60);

    #[test]
    fn a_poisson_schedule_follows_from_its_seed() {
        let arrival = Arrival::Poisson { rate: 30.0 };
        let schedule = arrival.schedule(Extent::Lasting(MINUTE), 1).unwrap();
        assert_eq!(schedule, arrival.schedule(Extent::Lasting(MINUTE), 1).unwrap());
        assert_ne!(schedule, arrival.schedule(Extent::Lasting(MINUTE), 2).unwrap());
        assert!(schedule.is_sorted());
        assert!(*schedule.last().unwrap() <= MINUTE);
    }

    #[test]
    fn a_poisson_schedule_has_the_rate_and_the_variance_of_one() {
        let times = Arrival::Poisson { rate: 50.0 }.schedule(Extent::Lasting(MINUTE * 10), 3).unwrap();
        // 30000 expected with a standard deviation of 173.
        assert!((29_300..30_700).contains(&times.len()), "{} arrivals", times.len());
        // Counts in one-second windows: variance equals the mean.
        let mut counts = vec![0.0; 600];
        for time in &times {
            counts[(time.as_secs() as usize).min(599)] += 1.0;
        }
        let mean = counts.iter().sum::<f64>() / 600.0;
        let variance = counts.iter().map(|count| (count - mean) * (count - mean)).sum::<f64>() / 600.0;
        assert!((0.8..1.2).contains(&(variance / mean)), "variance {variance} mean {mean}");
    }

    #[test]
    fn a_counted_poisson_schedule_ends_exactly_at_n_over_rate() {
        let times = Arrival::Poisson { rate: 4.0 }.schedule(Extent::Requests(100), 9).unwrap();
        assert_eq!(times.len(), 100);
        assert_eq!(times.last().unwrap().as_secs_f64(), 25.0);
    }

    #[test]
    fn constant_and_burst_arrivals_are_where_they_should_be() {
        let seconds = |arrival: Arrival| -> Vec<f64> {
            arrival.schedule(Extent::Requests(5), 0).unwrap().iter().map(Duration::as_secs_f64).collect()
        };
        assert_eq!(seconds(Arrival::Constant { rate: 2.0 }), [0.5, 1.0, 1.5, 2.0, 2.5]);
        assert_eq!(seconds(Arrival::Burst { rate: 2.0, size: 2 }), [0.0, 0.0, 1.0, 1.0, 2.0]);
    }

    #[test]
    fn a_closed_loop_has_no_schedule() {
        let arrival = Arrival::ClosedLoop { streams: 3 };
        assert_eq!(arrival.schedule(Extent::Requests(5), 0), Ok(vec![]));
    }

    #[test]
    fn an_arrival_that_sends_nothing_or_too_much_is_refused() {
        let poisson = |rate| Arrival::Poisson { rate }.schedule(Extent::Lasting(MINUTE), 0);
        assert_eq!(poisson(0.0), Err(BenchError::BadArrival("a rate")));
        assert_eq!(poisson(f64::NAN), Err(BenchError::BadArrival("a rate")));
        assert_eq!(poisson(1e6), Err(BenchError::TooManyRequests(60_000_000, MAX_REQUESTS)));
        assert!(Arrival::Burst { rate: 1.0, size: 0 }.check().is_err());
        assert!(Arrival::ClosedLoop { streams: 0 }.check().is_err());
    }
}
