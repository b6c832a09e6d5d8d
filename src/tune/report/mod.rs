//! The result of a tuning as text, JSON, `result.txt`, flags and a page.
//!
//! [`answer`] puts the result in sentences, which every other form contains.

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
