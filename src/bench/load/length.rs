//! The length of a prompt or output in tokens: fixed, or drawn for each request.
//!
//! | syntax | meaning |
//! |---|---|
//! | `200` | always 200 |
//! | `100-300` | uniform over the integers 100 to 300, both included |
//! | `lognormal:MEDIAN:SIGMA` | log-normal; the logarithm has mean ln MEDIAN, deviation SIGMA |
//! | `lognormal:MEDIAN:SIGMA:MAX` | the same, limited to MAX |
//!
//! Real lengths are close to log-normal, with mean MEDIAN * exp(SIGMA^2 / 2). Bounds: 1 to
//! [`MAX_TOKENS`].

use std::fmt;
use std::str::FromStr;

use sluice_core::base::Rng;

/// The longest prompt or response in tokens, which bounds memory.
pub const MAX_TOKENS: u32 = 1 << 24;

/// A number of tokens.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Length {
    /// Always this many.
    Exactly(u32),
    /// Uniform from `min` to `max`, both included.
    Between {
        /// The smallest length.
        min: u32,
        /// The largest length.
        max: u32,
    },
    /// Log-normal, rounded, limited to 1 to `max`.
    LogNormal {
        /// The median.
        median: f64,
        /// Standard deviation of the logarithm.
        sigma: f64,
        /// The largest length.
        max: u32,
    },
}

/// A text that is not a length.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("'{0}' is not a length; write 200, 100-300 or lognormal:MEDIAN:SIGMA[:MAX]")]
pub struct BadLength(pub String);

impl Length {
    /// Uniform from `mean * (1 - ratio)` (rounded down, at least 1) to `mean * (1 + ratio)`
    /// (rounded up), like `--random-range-ratio` of `vllm bench serve`.
    pub fn around(mean: u32, ratio: f64) -> Self {
        if ratio <= 0.0 {
            return Self::Exactly(mean);
        }
        let min = (f64::from(mean) * (1.0 - ratio)).floor().max(1.0) as u32;
        Self::Between { min, max: (f64::from(mean) * (1.0 + ratio)).ceil() as u32 }
    }

    /// Whether every draw is from 1 to [`MAX_TOKENS`].
    pub fn is_possible(self) -> bool {
        match self {
            Self::Exactly(tokens) => (1..=MAX_TOKENS).contains(&tokens),
            Self::Between { min, max } => min > 0 && min <= max && max <= MAX_TOKENS,
            Self::LogNormal { median, sigma, max } => {
                median >= 1.0
                    && median.is_finite()
                    && sigma.is_finite()
                    && sigma >= 0.0
                    && (1..=MAX_TOKENS).contains(&max)
            }
        }
    }

    /// Draws one length.
    pub fn draw(self, rng: &mut Rng) -> u32 {
        match self {
            Self::Exactly(tokens) => tokens,
            Self::Between { min, max } => {
                let span = u64::from(max - min) + 1;
                let offset = (u128::from(rng.next_u64()) * u128::from(span)) >> 64;
                min + u32::try_from(offset).unwrap_or(0)
            }
            Self::LogNormal { median, sigma, max } => {
                let tokens = (median.ln() + sigma * normal(rng)).exp().round();
                (tokens.max(1.0) as u32).min(max)
            }
        }
    }
}

/// A standard normal sample (Box and Muller 1958).
pub(crate) fn normal(rng: &mut Rng) -> f64 {
    let radius = (-2.0 * (1.0 - rng.unit()).ln()).sqrt();
    radius * (std::f64::consts::TAU * rng.unit()).cos()
}

impl FromStr for Length {
    type Err = BadLength;

    fn from_str(text: &str) -> Result<Self, BadLength> {
        let bad = || BadLength(text.to_owned());
        let length = if let Some(parts) = text.strip_prefix("lognormal:") {
            let parts: Vec<&str> = parts.split(':').collect();
            let number = |at: usize| parts.get(at).and_then(|part| part.parse::<f64>().ok()).ok_or_else(bad);
            let max = match parts.len() {
                2 => MAX_TOKENS,
                3 => parts[2].parse().map_err(|_| bad())?,
                _ => return Err(bad()),
            };
            Self::LogNormal { median: number(0)?, sigma: number(1)?, max }
        } else if let Some((min, max)) = text.split_once('-') {
            Self::Between { min: min.parse().map_err(|_| bad())?, max: max.parse().map_err(|_| bad())? }
        } else {
            Self::Exactly(text.parse().map_err(|_| bad())?)
        };
        if length.is_possible() { Ok(length) } else { Err(bad()) }
    }
}

impl fmt::Display for Length {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Exactly(tokens) => write!(f, "{tokens}"),
            Self::Between { min, max } => write!(f, "{min}-{max}"),
            Self::LogNormal { median, sigma, max: MAX_TOKENS } => write!(f, "lognormal:{median}:{sigma}"),
            Self::LogNormal { median, sigma, max } => write!(f, "lognormal:{median}:{sigma}:{max}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_written_is_read_and_written_again() {
        for text in ["200", "100-300", "lognormal:800:0.75", "lognormal:800:0.75:4096"] {
            assert_eq!(text.parse::<Length>().unwrap().to_string(), text);
        }
        for text in [
            "",
            "0",
            "5-4",
            "0-4",
            "x",
            "lognormal:8",
            "lognormal:0:1",
            "lognormal:8:-1",
            "lognormal:8:1:0",
            "99999999",
        ] {
            let error = text.parse::<Length>().unwrap_err().to_string();
            assert!(error.starts_with(&format!("'{text}' is not a length")), "{error}");
        }
    }

    #[test]
    fn a_range_ratio_rounds_outwards() {
        assert_eq!(Length::around(1024, 0.0), Length::Exactly(1024));
        assert_eq!(Length::around(15, 0.1), Length::Between { min: 13, max: 17 });
        assert_eq!(Length::around(1, 0.9), Length::Between { min: 1, max: 2 });
    }

    #[test]
    fn draws_have_the_distribution_asked_for() {
        let mut rng = Rng::new(3);
        let mut draws: Vec<u32> =
            (0..20_000).map(|_| Length::LogNormal { median: 500.0, sigma: 0.8, max: 4_000 }.draw(&mut rng)).collect();
        draws.sort_unstable();
        // The standard error is 1.2533 * sigma / sqrt(n) of the median: 0.7 %.
        assert!((485..515).contains(&draws[10_000]), "{}", draws[10_000]);
        // One standard deviation up is the 84.13th percentile.
        let upper = f64::from(draws[16_827]) / 500.0;
        assert!((upper.ln() - 0.8).abs() < 0.05, "{upper}");
        assert!(*draws.last().unwrap() <= 4_000 && draws[0] >= 1);
        let between = Length::Between { min: 3, max: 5 };
        let seen: std::collections::BTreeSet<u32> = (0..200).map(|_| between.draw(&mut rng)).collect();
        assert_eq!(seen.into_iter().collect::<Vec<_>>(), [3, 4, 5]);
    }
}
