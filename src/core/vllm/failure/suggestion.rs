//! The flag values that vLLM itself names in error messages.
//!
//! Some refusals contain the largest value that would have worked, such as the longest context that
//! fits into the KV cache. The value is read from the message, so that the advice can name it.

use serde::{Deserialize, Serialize};

use super::class::FailureClass;

/// A flag with a value that would have worked, as the engine estimates.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FlagSuggestion {
    /// The flag, without dashes.
    pub flag: String,
    /// The value.
    pub value: i64,
}

impl FlagSuggestion {
    /// Reads the value from the message that shows the failure.
    pub(super) fn read(class: FailureClass, message: &str) -> Option<Self> {
        // The text before the number, and the flag to which the number belongs.
        let patterns: &[(&str, &str)] = match class {
            // 0.33: "the estimated maximum model length is 80272."; 0.6: "stored in KV cache
            // (17072)."
            FailureClass::KvTooSmall => {
                &[("estimated maximum model length is ", "max-model-len"), ("stored in KV cache (", "max-model-len")]
            }
            // "(max_position_embeddings=131072.0 or ..."; the name of the key differs.
            FailureClass::BadArguments => &[
                ("Mamba cache blocks (", "max-num-seqs"),
                ("derived max_model_len (max_position_embeddings=", "max-model-len"),
            ],
            _ => return None,
        };
        let (rest, flag) = patterns.iter().find_map(|(text, flag)| Some((message.split_once(text)?.1, flag)))?;
        let digits: String =
            rest.chars().take_while(|c| c.is_ascii_digit() || *c == ',').filter(|c| *c != ',').collect();
        let value = digits.parse().ok().filter(|value| *value > 0)?;
        Some(Self { flag: (*flag).to_owned(), value })
    }
}
