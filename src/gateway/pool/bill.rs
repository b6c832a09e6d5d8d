//! The charge to the owner of a request: seconds of the engine, by the estimate at the grant and by
//! usage at the end.
//!
//! ```text
//! work = computed prompt tokens x prompt_ns + output tokens x output_ns
//!
//! prompt_ns = prefill of one token at the measured pace of the engine
//! output_ns = time per output token of the engine / sequences that decode at once
//! ```
//!
//! An engine that prefills works for one request; one that decodes works for all of its sequences
//! in each step. So the sum over the requests of an engine is about the time that it was busy: a
//! second of GPU costs the same, however it is used. Tokens that the engine had in its prefix cache
//! cost nothing. The prices at the grant apply, also to the correction at the end.

use super::queue::OwnerIndex;
use crate::config::limits::MAX_TOKENS;
use sluice_core::base::PoolId;

/// Nanoseconds of an engine for one token: of a prompt, and of an output.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Price {
    pub(super) prompt_ns: u32,
    pub(super) output_ns: u32,
}

/// One charge.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Bill {
    /// The home pool of the request, and its owner there. The place of an owner may be another's by
    /// the time of the correction.
    pub(super) pool: PoolId,
    pub(super) owner: OwnerIndex,
    pub(super) id: u64,
    /// The owner's level before the charge: the bits of its seconds.
    pub(super) start: u64,
    /// Tokens that were charged.
    pub(super) computed: u64,
    pub(super) output: u64,
    /// The estimated output tokens.
    pub(super) estimate: u64,
    /// Tokens of the prompt that were expected in the engine's prefix cache.
    pub(super) cached: u64,
    pub(super) price: Price,
}

impl Price {
    /// From seconds for one token.
    pub(super) fn new(prompt: f64, output: f64) -> Self {
        // A conversion saturates; a free token would let its owner have all.
        let ns = |seconds: f64| ((seconds * 1e9) as u32).max(1);
        Self { prompt_ns: ns(prompt), output_ns: ns(output) }
    }

    /// Seconds for this many tokens.
    pub(super) fn of(self, computed: u64, output: u64) -> f64 {
        let ns = |tokens: u64, price: u32| tokens.min(MAX_TOKENS.0) as f64 * f64::from(price);
        (ns(computed, self.prompt_ns) + ns(output, self.output_ns)) * 1e-9
    }
}

impl Bill {
    /// Seconds that were charged.
    pub(super) fn charged(&self) -> f64 {
        self.price.of(self.computed, self.output)
    }

    /// The owner's level before the charge.
    pub(super) fn start(&self) -> f64 {
        f64::from_bits(self.start)
    }

    /// The seconds that the owner owes in addition when the request has taken this many tokens.
    /// Below 0, the owner gets them back.
    pub(super) fn correct(&mut self, computed: u64, output: u64) -> f64 {
        let before = self.charged();
        (self.computed, self.output) = (computed, output);
        self.charged() - before
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_correction_makes_the_charge_that_of_the_tokens_that_were_taken() {
        let price = Price::new(31e-6, 125e-6);
        let mut bill = Bill {
            pool: PoolId::new(0),
            owner: 1,
            id: 7,
            start: 0,
            computed: 1_000,
            output: 512,
            estimate: 512,
            cached: 0,
            price,
        };
        assert!((bill.charged() - 0.095).abs() < 1e-9);
        assert!((bill.correct(0, 16) + 0.093).abs() < 1e-9, "cached, and shorter");
        assert_eq!(bill.correct(0, 16), 0.0, "once");
        assert_eq!(Price::new(0.0, f64::NAN), Price { prompt_ns: 1, output_ns: 1 });
        assert!(Price::new(1e9, 1e9).of(u64::MAX, u64::MAX).is_finite());
    }
}
