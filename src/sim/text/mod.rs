//! Text and tokens: vocabularies, chat templates, made-up words, and the texts a request asks for.
//!
//! The generated text is made up; its length, its tokens and its log probabilities have the form that vLLM gives them.

pub(crate) mod logprobs;
pub(crate) mod planned_output;
pub(crate) mod template;
pub mod vocabulary;
pub mod words;
