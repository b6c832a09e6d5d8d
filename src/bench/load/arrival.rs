//! When requests are due: the schedule of a run, drawn before the run begins.
//!
//! In an open loop, due times do not depend on the server, as with independent users. Only such a
//! load shows how queues build up. A closed loop keeps a fixed number of requests in flight (its
//! *concurrency*) and has no schedule. A slow server slows its clients down, so a closed loop hides
//! queueing. With rate r in requests per second:
//!
//! | arrivals | due times |
//! |---|---|
//! | gamma | gaps from Gamma(shape b, scale 1/(r b)); *burstiness* b: 1 Poisson, less is burstier |
//! | constant | request i at (i + 1)/r |
//! | bursts | `size` requests every size/r seconds, the first burst at 0 |
//! | ramp | the gap before request i of N has the rate at i/(N - 1) of the way |
//! | steps | rates in turn; the integral of the rate over a gap is from Gamma(b, 1/b) |
//! | at once | all at 0 |
//! | recorded | the arrival times of a trace |
//!
//! For a given number N of Poisson or gamma arrivals, all times are scaled so that the last is N/r,
//! as in `vllm bench serve`. The process is then not exactly Poisson, because the number of
//! arrivals in that time does not vary. Times are offsets from the start of the run. Bounds:
//! [`MAX_REQUESTS`], [`MAX_SECONDS`].

use std::sync::Arc;
use std::time::Duration;

use crate::error::BenchError;
use crate::load::length::normal;
use crate::seed::{Purpose, rng_for};
use sluice_core::base::Rng;

/// The latest due time, seconds: thirty years.
pub const MAX_SECONDS: f64 = 1e9;
/// The most requests in one run. A result holds about 300 bytes for each, and 8 for each token.
pub const MAX_REQUESTS: u64 = 5_000_000;

/// How requests arrive.
#[derive(Clone, Debug, PartialEq)]
pub enum Arrival {
    /// Independent arrivals.
    Poisson {
        /// Requests per second.
        rate: f64,
    },
    /// Arrivals with gamma distributed gaps.
    Gamma {
        /// Requests per second.
        rate: f64,
        /// Shape of the gaps: 1 is Poisson, less is burstier.
        burstiness: f64,
    },
    /// Evenly spaced arrivals.
    Constant {
        /// Requests per second.
        rate: f64,
    },
    /// Groups of `size` simultaneous requests.
    Burst {
        /// Requests per second on average.
        rate: f64,
        /// Requests in one burst.
        size: u32,
    },
    /// A rate that changes from the first request to the last.
    Ramp {
        /// Requests per second at the first request.
        start: f64,
        /// Requests per second at the last request.
        end: f64,
        /// Whether the rate changes by equal factors instead of equal steps.
        geometric: bool,
        /// As in `Gamma`; if infinite, the gaps are not random.
        burstiness: f64,
    },
    /// Rates that follow one another.
    Steps {
        /// Rates (requests per second) and durations (seconds).
        steps: Vec<(f64, f64)>,
        /// As in `Gamma`, for gaps divided by the mean gap at that time.
        burstiness: f64,
    },
    /// All at the start.
    AtOnce,
    /// At these times, seconds from the start, ascending.
    Recorded(Arc<[f64]>),
    /// A fixed number of requests in flight.
    ClosedLoop {
        /// Requests in flight.
        concurrency: u32,
    },
}

/// How long a run is.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Extent {
    /// This many requests.
    Requests(u64),
    /// Send for this long, then wait for the rest.
    Lasting(Duration),
}

impl Arrival {
    /// Arrivals of the same kind at `rate` requests per second; Poisson if the kind has no rate.
    #[must_use]
    pub fn at_rate(&self, rate: f64) -> Self {
        match *self {
            Self::Gamma { burstiness, .. } => Self::Gamma { rate, burstiness },
            Self::Constant { .. } => Self::Constant { rate },
            Self::Burst { size, .. } => Self::Burst { rate, size },
            _ => Self::Poisson { rate },
        }
    }

    /// Checks that all numbers are above 0.
    pub fn check(&self) -> Result<(), BenchError> {
        let positive = |value: f64| value.is_finite() && value > 0.0;
        let wrong = match self {
            Self::Poisson { rate } | Self::Constant { rate } => (!positive(*rate)).then_some("a rate"),
            Self::Gamma { rate, burstiness } => {
                if positive(*rate) {
                    (!positive(*burstiness)).then_some("a burstiness")
                } else {
                    Some("a rate")
                }
            }
            Self::Burst { rate, size } => {
                if positive(*rate) {
                    (*size == 0).then_some("a burst size")
                } else {
                    Some("a rate")
                }
            }
            Self::Ramp { start, end, burstiness, .. } => {
                let sound = positive(*start) && positive(*end) && *burstiness > 0.0;
                (!sound).then_some("both rates of a ramp, and a burstiness,")
            }
            Self::Steps { steps, burstiness } => {
                let rates = !steps.is_empty() && steps.iter().all(|(rate, time)| positive(*rate) && positive(*time));
                if rates {
                    (!positive(*burstiness)).then_some("a burstiness")
                } else {
                    Some("every rate and time of the steps")
                }
            }
            Self::Recorded(recorded) => recorded.is_empty().then_some("a number of recorded times"),
            Self::ClosedLoop { concurrency } => (*concurrency == 0).then_some("a concurrency"),
            Self::AtOnce => None,
        };
        wrong.map_or(Ok(()), |what| Err(BenchError::BadArrival(what)))
    }

    /// Requests per second; `None` if the rate changes or is not given.
    pub fn rate(&self) -> Option<f64> {
        match self {
            Self::Poisson { rate } | Self::Gamma { rate, .. } | Self::Constant { rate } | Self::Burst { rate, .. } => {
                Some(*rate)
            }
            _ => None,
        }
    }

    /// The name in reports.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Poisson { .. } => "poisson",
            Self::Gamma { .. } => "gamma",
            Self::Constant { .. } => "constant",
            Self::Burst { .. } => "bursts",
            Self::Ramp { .. } => "ramp",
            Self::Steps { .. } => "steps",
            Self::AtOnce => "at once",
            Self::Recorded(_) => "recorded",
            Self::ClosedLoop { .. } => "closed loop",
        }
    }

    /// The due times, ascending; empty for a closed loop.
    ///
    /// # Errors
    /// [`Arrival::check`] fails, or the schedule exceeds a bound of this file.
    pub fn schedule(&self, extent: Extent, seed: u64) -> Result<Vec<Duration>, BenchError> {
        self.check()?;
        let expected = match (self, extent) {
            (Self::ClosedLoop { .. }, _) => return Ok(Vec::new()),
            (Self::AtOnce | Self::Ramp { .. }, Extent::Lasting(_)) => {
                return Err(BenchError::BadArrival("a number of requests, which this kind of arrival needs, "));
            }
            (Self::Recorded(recorded), _) => recorded.len() as f64,
            (_, Extent::Requests(count)) => count as f64,
            (Self::Steps { steps, .. }, _) => steps.iter().map(|(rate, time)| rate * time).sum(),
            (_, Extent::Lasting(length)) => (self.rate().unwrap_or(0.0) * length.as_secs_f64()).ceil(),
        };
        if expected > MAX_REQUESTS as f64 {
            return Err(BenchError::TooManyRequests(expected as u64, MAX_REQUESTS));
        }
        let mut times = self.draw(extent, seed);
        if let (Self::Poisson { rate } | Self::Gamma { rate, .. }, Extent::Requests(count)) = (self, extent) {
            stretch(&mut times, count as f64 / rate);
        }
        if let Some(last) = times.iter().copied().find(|time| *time > MAX_SECONDS) {
            return Err(BenchError::TooLong(last, MAX_SECONDS));
        }
        Ok(times.into_iter().map(Duration::from_secs_f64).collect())
    }

    fn draw(&self, extent: Extent, seed: u64) -> Vec<f64> {
        let mut rng = rng_for(seed, Purpose::Arrival, 0);
        let (mut now, mut times) = (0.0, Vec::new());
        loop {
            let sent = times.len() as u64;
            let next = match self {
                Self::Poisson { rate } => Some(now + rng.exponential() / rate),
                Self::Gamma { rate, burstiness } => Some(now + gamma(&mut rng, *burstiness) / rate),
                Self::Constant { rate } => Some((sent + 1) as f64 / rate),
                Self::Burst { rate, size } => Some(((sent / u64::from(*size)) * u64::from(*size)) as f64 / rate),
                Self::Ramp { start, end, geometric, burstiness } => {
                    let all = if let Extent::Requests(count) = extent { count } else { 1 };
                    let progress = sent as f64 / (all.max(2) - 1) as f64;
                    let rate = match geometric {
                        true => start * (end / start).powf(progress),
                        false => start + (end - start) * progress,
                    };
                    Some(now + gamma(&mut rng, *burstiness) / rate)
                }
                Self::Steps { steps, burstiness } => next_in_steps(steps, now, gamma(&mut rng, *burstiness)),
                Self::AtOnce => Some(0.0),
                Self::Recorded(recorded) => recorded.get(times.len()).copied(),
                Self::ClosedLoop { .. } => None,
            };
            let Some(next) = next else { return times };
            let ended = match extent {
                Extent::Requests(count) => sent >= count,
                Extent::Lasting(length) => next > length.as_secs_f64() || sent >= MAX_REQUESTS,
            };
            if ended {
                return times;
            }
            now = next;
            times.push(now);
        }
    }
}

/// A sample of the gamma distribution with mean 1 (Marsaglia and Tsang 2000); 1 for an infinite
/// shape.
fn gamma(rng: &mut Rng, shape: f64) -> f64 {
    if shape == 1.0 {
        return rng.exponential();
    }
    if shape.is_infinite() {
        return 1.0;
    }
    // Below 1, the sample for the shape plus 1 is multiplied by a power of a uniform number.
    let (d, boost) = match shape < 1.0 {
        true => (shape + 2.0 / 3.0, (1.0 - rng.unit()).powf(1.0 / shape)),
        false => (shape - 1.0 / 3.0, 1.0),
    };
    let c = 1.0 / (9.0 * d).sqrt();
    loop {
        let x = normal(rng);
        let v = (1.0 + c * x).powi(3);
        if v > 0.0 && (1.0 - rng.unit()).ln() < 0.5 * x * x + d - d * v + d * v.ln() {
            return d * v * boost / shape;
        }
    }
}

/// The next arrival after `now`. `unit`: the expected number of arrivals until then, drawn with
/// mean 1.
fn next_in_steps(steps: &[(f64, f64)], mut now: f64, mut unit: f64) -> Option<f64> {
    let mut end = 0.0;
    for (rate, time) in steps {
        end += time;
        if now >= end {
            continue;
        }
        let room = (end - now) * rate;
        if unit <= room {
            return Some(now + unit / rate);
        }
        unit -= room;
        now = end;
    }
    None
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
        // 30000 expected, standard deviation 173.
        assert!((29_300..30_700).contains(&times.len()), "{} arrivals", times.len());
        // Counts in one-second windows have a variance that equals the mean.
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
        let arrival = Arrival::ClosedLoop { concurrency: 3 };
        assert_eq!(arrival.schedule(Extent::Requests(5), 0), Ok(vec![]));
    }

    #[test]
    fn an_arrival_that_sends_nothing_or_too_much_is_refused() {
        let poisson = |rate| Arrival::Poisson { rate }.schedule(Extent::Lasting(MINUTE), 0);
        assert_eq!(poisson(0.0), Err(BenchError::BadArrival("a rate")));
        assert_eq!(poisson(f64::NAN), Err(BenchError::BadArrival("a rate")));
        assert_eq!(poisson(1e6), Err(BenchError::TooManyRequests(60_000_000, MAX_REQUESTS)));
        assert!(Arrival::Burst { rate: 1.0, size: 0 }.check().is_err());
        assert!(Arrival::ClosedLoop { concurrency: 0 }.check().is_err());
        assert!(Arrival::Gamma { rate: 1.0, burstiness: 0.0 }.check().is_err());
        assert!(Arrival::Steps { steps: vec![(1.0, 0.0)], burstiness: 1.0 }.check().is_err());
        assert!(Arrival::Recorded([].into()).check().is_err());
        assert!(Arrival::AtOnce.schedule(Extent::Lasting(MINUTE), 0).is_err());
    }

    fn gaps(arrival: &Arrival) -> (f64, f64) {
        let times = arrival.schedule(Extent::Lasting(MINUTE * 20), 11).unwrap();
        let gaps: Vec<f64> = times.windows(2).map(|pair| (pair[1] - pair[0]).as_secs_f64()).collect();
        let mean = gaps.iter().sum::<f64>() / gaps.len() as f64;
        let variance = gaps.iter().map(|gap| (gap - mean).powi(2)).sum::<f64>() / gaps.len() as f64;
        (mean, variance / (mean * mean))
    }

    #[test]
    fn gamma_gaps_have_the_rate_and_the_spread_of_their_shape() {
        for shape in [0.25, 0.5, 1.0, 4.0] {
            let (mean, spread) = gaps(&Arrival::Gamma { rate: 30.0, burstiness: shape });
            assert!((mean * 30.0 - 1.0).abs() < 0.04, "shape {shape}: mean {mean}");
            assert!((spread * shape - 1.0).abs() < 0.1, "shape {shape}: spread {spread}");
        }
        let (mean, spread) = gaps(&Arrival::Gamma { rate: 30.0, burstiness: 1e9 });
        assert!((mean * 30.0 - 1.0).abs() < 0.01 && spread < 1e-6, "{mean} {spread}");
    }

    #[test]
    fn a_ramp_goes_from_one_rate_to_the_other() {
        let ramp = |geometric| Arrival::Ramp { start: 1.0, end: 4.0, geometric, burstiness: f64::INFINITY };
        let seconds = |geometric| -> Vec<f64> {
            ramp(geometric).schedule(Extent::Requests(3), 0).unwrap().iter().map(Duration::as_secs_f64).collect()
        };
        assert_eq!(seconds(false), [1.0, 1.4, 1.65]);
        assert_eq!(seconds(true), [1.0, 1.5, 1.75]);
    }

    #[test]
    fn steps_have_each_rate_for_its_time_and_end() {
        let steps = Arrival::Steps { steps: vec![(100.0, 20.0), (10.0, 20.0), (200.0, 20.0)], burstiness: 1.0 };
        let times = steps.schedule(Extent::Lasting(MINUTE * 9), 2).unwrap();
        let within = |from: u64, to: u64| times.iter().filter(|time| (from..to).contains(&time.as_secs())).count();
        assert!((1_820..2_180).contains(&within(0, 20)), "{}", within(0, 20));
        assert!((143..257).contains(&within(20, 40)), "{}", within(20, 40));
        assert!((3_750..4_250).contains(&within(40, 60)), "{}", within(40, 60));
        assert_eq!(within(60, 600), 0);
    }

    #[test]
    fn steps_may_be_burstier_than_poisson_with_the_same_rates() {
        let times = |burstiness| {
            let steps = Arrival::Steps { steps: vec![(50.0, 300.0), (200.0, 300.0)], burstiness };
            steps.schedule(Extent::Lasting(MINUTE * 10), 4).unwrap()
        };
        // The squared coefficient of variation of the gaps is the inverse of the shape.
        for (burstiness, expected) in [(1.0, 1.0), (0.25, 4.0)] {
            let times: Vec<f64> = times(burstiness).iter().map(Duration::as_secs_f64).collect();
            for (from, to, rate) in [(0.0, 300.0, 50.0), (300.0, 600.0, 200.0)] {
                let own: Vec<f64> = times.iter().copied().filter(|at| (from..to).contains(at)).collect();
                let gaps: Vec<f64> = own.windows(2).map(|two| two[1] - two[0]).collect();
                let mean = gaps.iter().sum::<f64>() / gaps.len() as f64;
                let squares = gaps.iter().map(|gap| (gap - mean).powi(2)).sum::<f64>() / gaps.len() as f64;
                assert!((mean * rate - 1.0).abs() < 0.06, "{mean} at {rate}");
                assert!((squares / mean / mean / expected - 1.0).abs() < 0.15, "{squares} at {burstiness}");
            }
        }
    }

    #[test]
    fn recorded_times_are_not_changed_and_at_once_is_all_zero() {
        let recorded = Arrival::Recorded([0.0, 0.5, 0.5, 7.25].into());
        let times = |arrival: &Arrival, count| arrival.schedule(Extent::Requests(count), 0).unwrap();
        assert_eq!(times(&recorded, 9), [0, 500, 500, 7_250].map(Duration::from_millis));
        assert_eq!(times(&recorded, 2).len(), 2);
        assert_eq!(times(&Arrival::AtOnce, 3), [Duration::ZERO; 3]);
    }
}
