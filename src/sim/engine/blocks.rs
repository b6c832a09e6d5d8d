//! KV blocks, counted: how many are free, how many a sequence of some length needs.
//!
//! A block holds [`BLOCK_TOKENS`] tokens. As in vLLM one block is reserved as the null block, so `total` blocks
//! serve `total - 1`. Only counts are kept: which block it is matters to a prefix cache alone, whose seat is
//! `Request::cached_prefix`. Invariant: free + held by sequences = usable, always.

/// Tokens in one block.
pub const BLOCK_TOKENS: u32 = 16;

/// The pool of blocks of one engine.
#[derive(Clone, Debug)]
pub struct Blocks {
    usable: u32,
    free: u32,
}

impl Blocks {
    /// A pool of `total` blocks, of which one is the null block.
    pub fn new(total: u32) -> Self {
        let usable = total.saturating_sub(1);
        Self { usable, free: usable }
    }

    /// Blocks that hold `tokens` tokens.
    pub fn needed(tokens: u32) -> u32 {
        tokens.div_ceil(BLOCK_TOKENS)
    }

    /// Takes `count` blocks, or none when fewer are free.
    pub fn take(&mut self, count: u32) -> bool {
        let fits = count <= self.free;
        if fits {
            self.free -= count;
        }
        fits
    }

    /// Gives `count` blocks back.
    pub fn give(&mut self, count: u32) {
        self.free += count;
        debug_assert!(self.free <= self.usable, "more blocks came back than were taken");
    }

    /// Free blocks.
    pub fn free(&self) -> u32 {
        self.free
    }

    /// Blocks that sequences can hold together.
    pub fn usable(&self) -> u32 {
        self.usable
    }

    /// Share in use, 0 to 1: what vLLM shows as `kv_cache_usage_perc`.
    pub fn usage(&self) -> f64 {
        if self.usable == 0 { 0.0 } else { 1.0 - f64::from(self.free) / f64::from(self.usable) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_block_is_reserved_and_nothing_is_taken_that_does_not_fit() {
        let mut blocks = Blocks::new(5);
        assert!(!blocks.take(5));
        assert!(blocks.take(4));
        assert_eq!(blocks.usage(), 1.0);
        blocks.give(4);
        assert_eq!((blocks.free(), blocks.usage()), (4, 0.0));
        assert_eq!(Blocks::needed(17), 2);
    }
}
