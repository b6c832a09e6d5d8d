//! Counters of speculative decoding, from vLLM's `spec_decode_*`, and the acceptance that they
//! show.
//!
//! The counts of all engines on a page are added. At most [`POSITIONS`] positions of a draft are
//! read.

/// Number of positions of a draft that are read.
pub const POSITIONS: usize = 32;
/// Fewest drafts from which an acceptance is computed.
const DRAFTS_MIN: f64 = 200.0;

/// Counters since the engine's start.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct DraftCounts {
    /// Drafts that were verified.
    pub drafts: f64,
    /// Tokens of these drafts.
    pub tokens: f64,
    accepted: [f64; POSITIONS],
}

impl DraftCounts {
    pub(super) fn add(&mut self, position: Option<&str>, value: f64) {
        let at = position.and_then(|position| position.parse::<usize>().ok()).and_then(|at| self.accepted.get_mut(at));
        if let Some(accepted) = at {
            *accepted += value;
        }
    }

    /// Accepted tokens.
    pub fn accepted(&self) -> f64 {
        self.accepted.iter().sum()
    }

    /// The counts since `before`; all counts, if the engine has restarted since then.
    #[must_use]
    pub fn since(&self, before: &Self) -> Self {
        if self.drafts < before.drafts {
            return *self;
        }
        let accepted = std::array::from_fn(|at| self.accepted[at] - before.accepted[at]);
        Self { drafts: self.drafts - before.drafts, tokens: self.tokens - before.tokens, accepted }
    }

    /// For each position up to the last at which a token was accepted: the share of drafts that
    /// were accepted up to this position. `None` for fewer than 200 drafts.
    pub fn acceptance(&self) -> Option<Vec<f64>> {
        if self.drafts < DRAFTS_MIN {
            return None;
        }
        let known = self.accepted.iter().rposition(|accepted| *accepted > 0.0).map_or(1, |last| last + 1);
        // If the page was read during a step, a position may have a higher count than the previous
        // position.
        let mut most = 1.0f64;
        let rates = self.accepted[..known].iter().map(|accepted| {
            most = most.min(accepted.max(0.0) / self.drafts);
            most
        });
        Some(rates.collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::vllm::metrics::MetricsSnapshot;

    fn page(drafts: u32, positions: [u32; 3]) -> DraftCounts {
        let mut page = format!("vllm:spec_decode_num_drafts_total{{engine=\"0\"}} {drafts}\n");
        page += &format!("vllm:spec_decode_num_draft_tokens_total{{engine=\"0\"}} {}\n", 3 * drafts);
        for (position, accepted) in positions.iter().enumerate() {
            let labels = format!("engine=\"0\",position=\"{position}\"");
            page += &format!("vllm:spec_decode_num_accepted_tokens_per_pos_total{{{labels}}} {accepted}\n");
        }
        MetricsSnapshot::parse(&page).drafts
    }

    #[test]
    fn acceptance_is_by_position_and_since_a_moment() {
        let (first, later) = (page(1_000, [700, 400, 100]), page(2_000, [1_200, 500, 100]));
        assert_eq!(first.acceptance().unwrap(), [0.7, 0.4, 0.1]);
        assert_eq!(later.since(&first).acceptance().unwrap(), [0.5, 0.1]);
        assert_eq!((first.tokens, first.accepted()), (3_000.0, 1_200.0));
        assert_eq!(first.since(&later), first, "the engine has started again");
        assert_eq!(page(199, [100, 0, 0]).acceptance(), None);
        assert_eq!(page(1_000, [0, 0, 0]).acceptance().unwrap(), [0.0], "nothing is accepted");
        // Counts that contradict each other.
        assert_eq!(page(1_000, [2_000, 400, 900]).acceptance().unwrap(), [1.0, 0.4, 0.4]);
        assert_eq!(
            MetricsSnapshot::parse("vllm:spec_decode_num_accepted_tokens_per_pos_total{position=\"99\"} 3\n")
                .drafts
                .accepted(),
            0.0
        );
    }
}
