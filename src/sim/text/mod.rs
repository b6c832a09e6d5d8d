//! Text and tokens: vocabularies, chat templates, synthetic words, and the planned output of a
//! request.
//!
//! The generated text is synthetic; length, tokens and log probabilities have vLLM's form.

pub(crate) mod instance;
pub(crate) mod logprobs;
pub(crate) mod planned_output;
pub(crate) mod template;
pub mod vocabulary;
pub mod words;
