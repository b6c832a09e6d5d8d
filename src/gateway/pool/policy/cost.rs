//! The reference with which engines are compared: the cost of prompts and outputs on Llama 3.1 8B
//! and one H200.
//!
//! ```text
//! step = STEP + SEQUENCE x sequences + PROMPT_TOKEN x prompt tokens in it
//! ```
//!
//! Only ratios matter: the pace of each engine relative to these numbers is learned (`pace.rs`).
//! All values are in seconds, fitted to closed loops of 1 to 128 streams and to lone prompts of
//! 16,000 tokens on vLLM 0.22.1.

/// One step of the model, apart from sequences and prompts.
pub(in crate::pool) const STEP: f64 = 5.0e-3;
/// Each sequence in a step: 2.1 ms for a hundred.
pub(in crate::pool) const SEQUENCE: f64 = 21.0e-6;
/// Prefill of one prompt token: 0.5 s for 16,000.
pub(in crate::pool) const PROMPT_TOKEN: f64 = 31.0e-6;
/// From the gateway to the first token of an empty prompt on an idle engine, including two passes
/// through the API server.
pub(in crate::pool) const FIRST_TOKEN: f64 = 17.0e-3;
