//! The mix of LoRA adapters: which adapter each request uses.
//!
//! Real traffic uses some adapters far more than others, and an engine with few adapter slots then
//! reloads the rarely used ones. So adapters can be chosen by weights or Zipf's law, besides evenly
//! or in turn as in `vllm bench serve`. The adapter of request `n` is a pure function of (seed, n),
//! unless a dataset names it. The name of the adapter is sent as `"model"`; the base model may be
//! part of the mix.

use crate::error::BenchError;
use crate::seed::{Purpose, rng_for};

/// A mix over adapters.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Adapters {
    /// The names, which are sent as `"model"`.
    pub names: Vec<String>,
    /// How the adapter of a request is chosen.
    pub choice: AdapterChoice,
}

/// How an adapter is chosen.
#[derive(Clone, Debug, Default, PartialEq)]
pub enum AdapterChoice {
    /// Each adapter with the same probability.
    #[default]
    Even,
    /// In turn, in the order of the requests.
    RoundRobin,
    /// The k-th name (from 1) in proportion to `1 / k^s`.
    Zipf(f64),
    /// Each request of the dataset names an adapter, or none for the base model.
    Named,
    /// In proportion to these weights: one for each name, and optionally a last one for the base
    /// model.
    Weights(Vec<f64>),
}

impl Adapters {
    /// Checks names, weights and exponent.
    pub fn check(&self) -> Result<(), BenchError> {
        let bad = |why: String| Err(BenchError::BadAdapters(why));
        for (place, name) in self.names.iter().enumerate() {
            if name.is_empty() || self.names[..place].contains(name) {
                return bad(format!("the name '{name}' is empty or given twice"));
            }
        }
        match &self.choice {
            AdapterChoice::Zipf(s) if !(s.is_finite() && *s >= 0.0) => {
                bad(format!("the exponent {s} is not 0 or more"))
            }
            AdapterChoice::Weights(weights) => {
                let (names, given) = (self.names.len(), weights.len());
                if given != names && given != names + 1 {
                    return bad(format!(
                        "{given} weights for {names} adapters; give one for each, and one more for the base model if it \
                         is to have a share"
                    ));
                }
                match weights.iter().find(|weight| !(weight.is_finite() && **weight > 0.0)) {
                    Some(weight) => bad(format!("the weight {weight} is not above 0")),
                    None => Ok(()),
                }
            }
            _ => Ok(()),
        }
    }

    /// The adapter of request `ordinal`, an index into the names; `None`: the base model.
    pub fn of(&self, seed: u64, ordinal: u64) -> Option<u32> {
        let count = self.names.len();
        if count == 0 {
            return None;
        }
        let mut rng = rng_for(seed, Purpose::Adapter, ordinal);
        let index = match &self.choice {
            AdapterChoice::Even => rng.below(count),
            AdapterChoice::Named => return None,
            AdapterChoice::RoundRobin => (ordinal % count as u64) as usize,
            AdapterChoice::Zipf(s) => pick(rng.unit(), zipf(count, *s)),
            AdapterChoice::Weights(weights) => pick(rng.unit(), weights.iter().copied()),
        };
        (index < count).then_some(index as u32)
    }

    /// The share of requests of each name; empty if a dataset decides it.
    pub fn shares(&self) -> Vec<f64> {
        let count = self.names.len();
        let weights: Vec<f64> = match &self.choice {
            AdapterChoice::Named => return Vec::new(),
            AdapterChoice::Even | AdapterChoice::RoundRobin => vec![1.0; count],
            AdapterChoice::Zipf(s) => zipf(count, *s).collect(),
            AdapterChoice::Weights(weights) => weights.clone(),
        };
        let total: f64 = weights.iter().sum();
        weights.iter().take(count).map(|weight| weight / total).collect()
    }
}

fn zipf(count: usize, s: f64) -> impl Iterator<Item = f64> + Clone {
    (1..=count).map(move |k| (k as f64).powf(-s))
}

/// An index into `weights`, drawn in proportion to the weights. `unit`: a random number in [0, 1).
pub(crate) fn pick(unit: f64, weights: impl Iterator<Item = f64> + Clone) -> usize {
    let mut left = unit * weights.clone().sum::<f64>();
    let mut last = 0;
    for (index, weight) in weights.enumerate() {
        left -= weight;
        last = index;
        if left < 0.0 {
            break;
        }
    }
    last
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shares(choice: AdapterChoice) -> [f64; 4] {
        let adapters = Adapters { names: vec!["a".into(), "b".into(), "c".into()], choice };
        adapters.check().unwrap();
        let promised = adapters.shares();
        let mut counts = [0.0; 4];
        for ordinal in 0..30_000 {
            counts[adapters.of(5, ordinal).map_or(3, |index| index as usize)] += 1.0 / 30_000.0;
        }
        assert!(promised.iter().zip(counts).all(|(share, seen)| (share - seen).abs() < 0.01), "{promised:?}");
        counts
    }

    #[track_caller]
    fn near(shares: [f64; 4], expected: [f64; 4]) {
        // Three standard errors of a share near 0.5 are 0.009.
        assert!(shares.iter().zip(expected).all(|(share, expected)| (share - expected).abs() < 0.01), "{shares:?}");
    }

    #[test]
    fn each_choice_has_its_shares() {
        near(shares(AdapterChoice::Even), [1.0 / 3.0, 1.0 / 3.0, 1.0 / 3.0, 0.0]);
        near(shares(AdapterChoice::RoundRobin), [1.0 / 3.0, 1.0 / 3.0, 1.0 / 3.0, 0.0]);
        near(shares(AdapterChoice::Zipf(1.0)), [6.0 / 11.0, 3.0 / 11.0, 2.0 / 11.0, 0.0]);
        near(shares(AdapterChoice::Weights(vec![70.0, 20.0, 10.0])), [0.7, 0.2, 0.1, 0.0]);
        near(shares(AdapterChoice::Weights(vec![1.0, 1.0, 1.0, 7.0])), [0.1, 0.1, 0.1, 0.7]);
    }

    #[test]
    fn without_adapters_it_is_the_base_model() {
        assert_eq!(Adapters::default().of(1, 0), None);
    }

    #[test]
    fn an_invalid_mix_is_refused_with_the_reason() {
        let error = |names: &[&str], choice| {
            let names = names.iter().map(|&name| name.to_owned()).collect();
            Adapters { names, choice }.check().unwrap_err().to_string()
        };
        assert!(error(&["a"], AdapterChoice::Weights(vec![1.0, 1.0, 1.0])).contains("3 weights for 1 adapters"));
        assert!(error(&["a"], AdapterChoice::Weights(vec![0.0])).contains("not above 0"));
        assert!(error(&["a"], AdapterChoice::Zipf(-1.0)).contains("exponent"));
        assert!(error(&["a", "a"], AdapterChoice::Even).contains("twice"));
    }
}
