//! The flags of `vllm serve`: the table of flags, and the type, reader and writer of values, which
//! all of sluice uses.
//!
//! | subject | file |
//! |---|---|
//! | names, kinds and choices; names in other spellings | [`table`] |
//! | a value, read from a text | [`value`] |
//! | a command line, read as flags and values | [`parse`] |
//! | values, written as a command line | [`write`] |
//!
//! [`args`](super::args) reads a command line as strictly as vLLM does.

pub mod table;
pub mod value;
pub mod write;
pub mod parse;
