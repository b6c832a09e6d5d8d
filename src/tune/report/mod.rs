//! The result of a tuning as text, as JSON, as `result.txt`, as flags, and as a page.
//!
//! `answer` says in sentences what came out; every other form contains it.

pub mod front;
pub mod predicted;
pub mod answer;
pub mod flags;
pub mod names;
pub mod table;
pub mod json;
pub mod result_txt;
pub mod page;
#[cfg(test)]
mod tests;
