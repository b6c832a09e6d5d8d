//! Counts the tokens of a text: exactly with a tokenizer, otherwise by bytes.
//!
//! Counts by bytes are used only to decide which conversations are kept and how long responses may
//! be. With a tokenizer, a run also counts the tokens of responses. A text that the tokenizer
//! cannot encode is counted by bytes.

use std::path::Path;
use std::sync::Arc;

use tokenizers::Tokenizer;

use super::error::DatasetError;
use super::item::Items;

/// Bytes that count as one token without a tokenizer, as is usual for English.
pub const BYTES_PER_TOKEN: usize = 4;

/// A counter of tokens.
#[derive(Clone, Debug, Default)]
pub enum TokenCounter {
    /// By bytes.
    #[default]
    Bytes,
    /// By a tokenizer, with the special tokens that a server would add.
    Exact(Arc<Tokenizer>),
}

impl TokenCounter {
    /// A counter with the tokenizer at `path`: a `tokenizer.json`, or a folder with one.
    pub fn exact(path: &Path) -> Result<Self, DatasetError> {
        let file = if path.is_dir() { path.join("tokenizer.json") } else { path.to_owned() };
        let bad = |error: tokenizers::Error| DatasetError::Tokenizer(file.display().to_string(), error.to_string());
        Ok(Self::Exact(Arc::new(Tokenizer::from_file(&file).map_err(bad)?)))
    }

    /// Tokens of `text`; at least 1.
    pub fn count(&self, text: &str) -> u32 {
        let count = match self {
            Self::Bytes => text.len().div_ceil(BYTES_PER_TOKEN),
            Self::Exact(tokenizer) => tokenizer
                .encode_fast(text, true)
                .map_or_else(|_| text.len().div_ceil(BYTES_PER_TOKEN), |encoding| encoding.get_ids().len()),
        };
        u32::try_from(count).unwrap_or(u32::MAX).max(1)
    }

    /// Tokens of a generated text, which has no special tokens; 0 if it is empty.
    pub fn output(&self, text: &str) -> u64 {
        self.plain(text) as u64
    }

    fn plain(&self, text: &str) -> usize {
        match self {
            Self::Bytes => text.len().div_ceil(BYTES_PER_TOKEN),
            Self::Exact(tokenizer) => tokenizer
                .encode_fast(text, false)
                .map_or_else(|_| text.len().div_ceil(BYTES_PER_TOKEN), |encoding| encoding.get_ids().len()),
        }
    }

    /// Number of special tokens that the tokenizer, like a server, adds to the prompt of a
    /// completion.
    pub fn special(&self) -> u32 {
        match self {
            Self::Bytes => 0,
            Self::Exact(tokenizer) => {
                tokenizer.encode_fast("", true).map_or(0, |encoding| encoding.get_ids().len() as u32)
            }
        }
    }

    /// The tokenizer, if there is one.
    pub fn tokenizer(&self) -> Option<&Arc<Tokenizer>> {
        match self {
            Self::Bytes => None,
            Self::Exact(tokenizer) => Some(tokenizer),
        }
    }

    /// Size of the tokenizer's vocabulary, without added tokens.
    pub fn vocabulary(&self) -> Option<u32> {
        match self {
            Self::Bytes => None,
            Self::Exact(tokenizer) => u32::try_from(tokenizer.get_vocab_size(false)).ok(),
        }
    }

    pub(super) fn note_estimate(&self, items: &mut Items) {
        if let Self::Bytes = self {
            items.notes.push(format!(
                "text lengths are estimated: {BYTES_PER_TOKEN} bytes per token; give --tokenizer for exact ones"
            ));
        }
    }
}
