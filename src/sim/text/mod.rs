//! Text and tokens: vocabularies, chat templates, synthetic words, and the planned output of a request.
//!
//! The generated text is synthetic; its length, its tokens and its log probabilities have the form that vLLM gives them.

pub(crate) mod instance;
pub(crate) mod logprobs;
pub(crate) mod planned_output;
pub(crate) mod template;
pub mod vocabulary;
pub mod words;
