//! The size of an engine's KV cache, from the labels of `cache_config_info`.
//!
//! `num_gpu_blocks x block_size` is the size only where all layers share one kind of block. Models
//! with sliding windows or state layers fill several blocks for each block of tokens, so the
//! product overstates the size. Newer engines state the size in the label `kv_cache_size_tokens`
//! (`kv_cache_max_concurrency` x context limit), and then the label counts. If the label is no
//! number, 0 or above the product, the product counts, and [`KvDoubt`] is the reason.

use std::fmt;

/// The size of the KV cache of one engine.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct KvSize {
    /// Tokens, if the labels show them.
    pub tokens: Option<u64>,
    /// Why `kv_cache_size_tokens` does not count.
    pub doubt: Option<KvDoubt>,
}

/// A value of `kv_cache_size_tokens` that cannot be the size.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KvDoubt {
    /// The value is no number.
    NotANumber,
    /// The value is 0.
    Zero,
    /// The value is above the product of blocks and block size.
    AboveBlocks {
        /// The value of the label, tokens.
        stated: u64,
        /// Blocks times block size, tokens.
        product: u64,
    },
}

impl fmt::Display for KvDoubt {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("kv_cache_size_tokens is ")?;
        match self {
            Self::NotANumber => f.write_str("no number"),
            Self::Zero => f.write_str("0"),
            Self::AboveBlocks { stated, product } => {
                write!(f, "{stated}, but num_gpu_blocks x block_size is only {product}")
            }
        }
    }
}

impl KvSize {
    /// Reads the size. `label`: the value of a label of `cache_config_info`.
    pub(super) fn read<'l>(label: impl Fn(&str) -> Option<&'l str>) -> Self {
        let number = |name: &str| label(name).and_then(|value| value.parse::<u64>().ok());
        let product =
            number("num_gpu_blocks").zip(number("block_size")).map(|(blocks, size)| blocks.saturating_mul(size));
        // An engine that does not know the size writes None.
        let stated = label("kv_cache_size_tokens").filter(|value| *value != "None");
        let stated = stated.map(|value| match (value.parse::<u64>(), product) {
            (Err(_), _) => Err(KvDoubt::NotANumber),
            (Ok(0), _) => Err(KvDoubt::Zero),
            (Ok(stated), Some(product)) if stated > product => Err(KvDoubt::AboveBlocks { stated, product }),
            (Ok(stated), _) => Ok(stated),
        });
        match stated {
            Some(Ok(stated)) => Self { tokens: Some(stated), doubt: None },
            Some(Err(doubt)) => Self { tokens: product, doubt: Some(doubt) },
            None => Self { tokens: product, doubt: None },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn size(blocks: Option<&'static str>, stated: Option<&'static str>) -> KvSize {
        KvSize::read(|name| match name {
            "num_gpu_blocks" => blocks,
            "block_size" => Some("16"),
            "kv_cache_size_tokens" => stated,
            _ => None,
        })
    }

    #[test]
    fn the_stated_size_counts_where_it_can_be_true_and_blocks_count_otherwise() {
        let known = |tokens| KvSize { tokens, doubt: None };
        assert_eq!(size(Some("1000"), Some("9000")), known(Some(9_000)), "a hybrid model");
        assert_eq!(size(Some("1000"), Some("16000")), known(Some(16_000)));
        for unknown in [None, Some("None")] {
            assert_eq!(size(Some("1000"), unknown), known(Some(16_000)));
            assert_eq!(size(None, unknown), known(None));
        }
        assert_eq!(size(None, Some("9000")), known(Some(9_000)));
        let doubted = |doubt| KvSize { tokens: Some(16_000), doubt: Some(doubt) };
        for (lie, doubt) in [
            ("many", KvDoubt::NotANumber),
            ("-1", KvDoubt::NotANumber),
            ("1e4", KvDoubt::NotANumber),
            ("99999999999999999999999", KvDoubt::NotANumber),
            ("0", KvDoubt::Zero),
            ("16001", KvDoubt::AboveBlocks { stated: 16_001, product: 16_000 }),
        ] {
            assert_eq!(size(Some("1000"), Some(lie)), doubted(doubt), "{lie}");
        }
        let shown = size(Some("1000"), Some("16001")).doubt.map(|doubt| doubt.to_string());
        assert_eq!(
            shown.as_deref(),
            Some("kv_cache_size_tokens is 16001, but num_gpu_blocks x block_size is only 16000")
        );
    }
}
