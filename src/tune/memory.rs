//! Bisects the largest `gpu-memory-utilization` at which engines start and survive the worst load.
//!
//! An engine that starts may still run out of memory when all sequences run and all steps are full,
//! because vLLM measures only one kind of step and the allocator fragments. So each share is tried
//! under such a load, with the setting of the space that needs most memory. More memory is never
//! worse, so the largest share is tried first, then about log2 of the number of shares. Every
//! setting but the default gets the share found.

use crate::error::TuneError;
use crate::file::MemoryTable;
use crate::setting::Setting;
use sluice_config::ArgValue;

pub(crate) const SHARE: &str = "vllm.gpu-memory-utilization";
/// Keys whose larger values need more memory besides the KV cache, the most important key first.
const HUNGRY: [&str; 5] = [
    "vllm.max-num-seqs",
    "vllm.max-num-batched-tokens",
    "vllm.max-loras",
    "vllm.max-lora-rank",
    "vllm.max-cudagraph-capture-size",
];
const MOST: usize = 100;

/// Shares up to `held` survived, shares from `failed` on did not.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Bisection {
    shares: Vec<f64>,
    held: Option<usize>,
    failed: usize,
}

impl Bisection {
    pub(crate) fn new(table: &MemoryTable) -> Result<Self, TuneError> {
        let MemoryTable { from, to, step } = *table;
        if !(0.0 < from && from <= to && to <= 1.0 && step > 0.0 && (to - from) / step <= MOST as f64) {
            let text = format!("tune.memory needs 0 < from <= to <= 1 and a step for at most {MOST} values");
            return Err(TuneError::Goal(text));
        }
        let count = ((to - from) / step + 1e-9) as usize + 1;
        // Each share is computed from `to`, because repeated steps would add up rounding errors.
        let share = |at: usize| ((to - step * (count - 1 - at) as f64) * 1e6).round() / 1e6;
        let shares: Vec<f64> = (0..count).map(share).collect();
        Ok(Self { failed: shares.len(), held: None, shares })
    }

    pub(crate) fn next(&self) -> Option<f64> {
        let low = self.held.map_or(0, |held| held + 1);
        let at = if self.failed == self.shares.len() { self.failed - 1 } else { (low + self.failed) / 2 };
        (low < self.failed).then(|| self.shares[at.max(low)])
    }

    pub(crate) fn record(&mut self, share: f64, lived: bool) {
        let Some(at) = self.shares.iter().position(|other| *other == share) else { return };
        if lived { self.held = Some(at) } else { self.failed = at }
    }

    pub(crate) fn found(&self) -> Option<f64> {
        self.held.map(|held| self.shares[held])
    }
}

/// The setting that needs most memory: most sequences, then most tokens in a step, and so on.
pub(crate) fn hungriest(settings: &[Setting]) -> Setting {
    let need = |setting: &Setting| HUNGRY.map(|key| setting.get(key).and_then(ArgValue::number).unwrap_or(0.0));
    let larger =
        |one: &&Setting, other: &&Setting| need(one).partial_cmp(&need(other)).unwrap_or(std::cmp::Ordering::Equal);
    settings.iter().max_by(larger).cloned().unwrap_or_default()
}

/// A setting with this share, unless it has one.
pub(crate) fn with_share(setting: &Setting, share: f64) -> Setting {
    let mut setting = setting.clone();
    setting.entry(SHARE.to_owned()).or_insert(ArgValue::Float(share));
    setting
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::setting::value;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn the_largest_share_that_holds_is_found_in_few_steps(limit in 0.4f64..1.1) {
            let table = MemoryTable { from: 0.5, to: 0.99, step: 0.01 };
            let mut bisection = Bisection::new(&table).unwrap();
            let mut tried = Vec::new();
            while let Some(share) = bisection.next() {
                tried.push(share);
                bisection.record(share, share <= limit);
            }
            let expected = (50..=99).map(|share| f64::from(share) / 100.0).rfind(|share| *share <= limit);
            prop_assert_eq!(bisection.found(), expected);
            prop_assert!(tried.len() <= 7 && tried[0] == 0.99, "{:?}", tried);
        }
    }

    #[test]
    fn the_hungriest_setting_has_most_sequences_then_most_tokens() {
        let setting = |seqs: &str, tokens: &str| -> Setting {
            [("vllm.max-num-seqs", seqs), ("vllm.max-num-batched-tokens", tokens)]
                .map(|(key, text)| (key.to_owned(), value(text)))
                .into()
        };
        let settings = [Setting::new(), setting("64", "9000"), setting("256", "512"), setting("256", "2048")];
        assert_eq!(hungriest(&settings), settings[3]);
        let set = with_share(&settings[3], 0.95);
        assert_eq!((set.len(), with_share(&set, 0.5)), (3, set));
    }

    #[test]
    fn shares_that_make_no_sense_are_refused() {
        for (from, to, step) in [(0.0, 0.9, 0.1), (0.9, 0.8, 0.1), (0.5, 1.2, 0.1), (0.5, 0.9, 0.0), (0.5, 0.9, 1e-9)] {
            assert!(Bisection::new(&MemoryTable { from, to, step }).is_err(), "{from} {to} {step}");
        }
    }
}
