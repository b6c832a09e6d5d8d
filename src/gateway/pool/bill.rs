//! The charge to the owner of a request: engine seconds, estimated at the grant and corrected by
//! usage at the end.
//!
//! ```text
//! work = computed prompt tokens x prompt_ns + output tokens x output_ns
//!
//! prompt_ns = prefill of one token at the measured pace of the engine
//! output_ns = time per output token of the engine / sequences that decode at once
//! ```
//!
//! An engine in prefill works for one request; in decoding, each step works for all sequences. So
//! the charges of all requests of an engine add up to about the time that the engine was busy, and
//! a second of GPU costs the same however it is used. Tokens from the prefix cache cost nothing.
//! The prices at the grant also apply to the correction.

use super::queue::OwnerIndex;
use sluice_config::limits::MAX_TOKENS;
use sluice_core::base::PoolId;

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Price {
    pub(super) prompt_ns: u32,
    pub(super) output_ns: u32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Bill {
    /// The home pool of the request, and the owner there. At the correction, another `id` in the
    /// table shows that another owner now has this place.
    pub(super) pool: PoolId,
    pub(super) owner: OwnerIndex,
    pub(super) id: u64,
    /// The owner's level before the charge, in seconds, as the bits of an `f64`.
    pub(super) start: u64,
    pub(super) computed: u64,
    pub(super) output: u64,
    pub(super) estimate: u64,
    /// Prompt tokens that were expected in the engine's prefix cache.
    pub(super) cached: u64,
    pub(super) price: Price,
}

impl Price {
    /// Prices from the seconds for one prompt token and one output token.
    pub(super) fn new(prompt: f64, output: f64) -> Self {
        // The conversion saturates. At least 1 ns: with free tokens an owner could take everything.
        let ns = |seconds: f64| ((seconds * 1e9) as u32).max(1);
        Self { prompt_ns: ns(prompt), output_ns: ns(output) }
    }

    pub(super) fn of(self, computed: u64, output: u64) -> f64 {
        let ns = |tokens: u64, price: u32| tokens.min(MAX_TOKENS.0) as f64 * f64::from(price);
        (ns(computed, self.prompt_ns) + ns(output, self.output_ns)) * 1e-9
    }
}

impl Bill {
    pub(super) fn charged(&self) -> f64 {
        self.price.of(self.computed, self.output)
    }

    pub(super) fn start(&self) -> f64 {
        f64::from_bits(self.start)
    }

    /// Charges these tokens instead of the estimate. Returns the seconds that the owner owes in
    /// addition, or gets back if they are negative.
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
