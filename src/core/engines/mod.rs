//! The kinds of engine that a pool can have.
//!
//! | kind | file | server |
//! |---|---|---|
//! | | `flag_table.rs` | flags of a program that is not vLLM |
//! | | `rules.rs` | the facts by which kinds differ |
//! | `vllm` | `vllm.rs` | vLLM |
//! | `sglang` | `sglang.rs` | SGLang |
//! | `llama.cpp` | `llama_cpp.rs` | llama-server |
//! | `triton` | `triton.rs` | Triton, by the protocol of KServe |
//! | `openai` | `openai.rs` | any other server with the API of OpenAI |
//! | `serial` | `serial.rs` | a process that does one job at a time |
//!
//! A new kind is a file with a constant, and a line in each of the two lists below.

mod flag_table;
mod rules;
mod vllm;
mod sglang;
mod llama_cpp;
mod triton;
mod openai;
mod serial;

pub use flag_table::{FlagForm, FlagTable};
pub use rules::{EngineRules, Health, MetricsPage, SlotsPage};

/// The table of kinds: name, word in the configuration, file.
macro_rules! kinds {
    ($($(#[$doc:meta])* $name:ident = $label:literal in $file:ident,)+) => {
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
    /// A server with the API of OpenAI.
    OpenAi = "openai" in openai,
    /// One job at a time.
    Serial = "serial" in serial,
}

impl EngineKind {
    /// The kind that a server names as the owner of its models, if that contradicts this kind.
    pub fn contradicted_by(self, owner: &str) -> Option<Self> {
        let own = self.rules().owner?;
        Self::ALL.into_iter().find(|kind| kind.rules().owner == Some(owner)).filter(|_| own != owner)
    }
}

#[cfg(test)]
mod tests;
