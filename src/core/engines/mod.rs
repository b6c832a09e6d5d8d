//! The kinds of engine that a pool can have.
//!
//! | file | content |
//! |---|---|
//! | `flag_table.rs` | flags of a program that is not vLLM |
//! | `rules.rs` | the facts by which kinds differ |
//! | the others | the facts of one kind, as a constant `RULES` |
//!
//! To add a kind, write such a file and a line in the table of `kinds!` below. `cargo fmt` does not
//! see files that a macro declares: `rustfmt --edition 2024 src/core/engines/*.rs` formats them.

mod flag_table;
mod rules;

pub use flag_table::{FlagForm, FlagTable};
pub use rules::{EngineRules, Health, IdentityPage, MetricsPage, SlotsPage};

use crate::openai::Route;

/// The table of kinds: name, word in the configuration, file.
macro_rules! kinds {
    ($($(#[$doc:meta])* $name:ident = $label:literal in $file:ident,)+) => {
        $(mod $file;)+

        labels! {
            /// A kind of engine.
            #[derive(Default, Hash)]
            pub enum EngineKind {
                $($(#[$doc])* $name = $label,)+
            }
        }

        impl EngineKind {
            /// The words of all kinds.
            pub const LABELS: [&'static str; Self::ALL.len()] = [$($label),+];

            /// The facts of the kind.
            pub const fn rules(self) -> &'static EngineRules {
                match self {
                    $(Self::$name => &$file::RULES,)+
                }
            }
        }
    };
}

kinds! {
    /// vLLM.
    #[default]
    Vllm = "vllm" in vllm,
    /// SGLang.
    Sglang = "sglang" in sglang,
    /// llama.cpp's server.
    LlamaCpp = "llama.cpp" in llama_cpp,
    /// Triton.
    Triton = "triton" in triton,
    /// Any server with the API of OpenAI.
    OpenAi = "openai" in openai,
    /// A process that does one job at a time.
    Serial = "serial" in serial,
}

impl EngineKind {
    /// The kind whose servers write this `owned_by` into the list of models.
    pub fn of_owner(owner: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|kind| kind.rules().owners.contains(&owner))
    }

    /// Whether a server that was found to be of the `other` kind is certainly not of this kind.
    /// True if this kind can be recognised, or the two kinds have no route in common.
    pub fn excludes(self, other: Self) -> bool {
        let both = |route| (self.rules().serves)(route) && (other.rules().serves)(route);
        self != other && (self.rules().identity.is_some() || !Route::ALL.into_iter().any(both))
    }
}

#[cfg(test)]
mod tests;
