//! Results for people: tables in the terminal, HTML pages with plots, and comparisons.
//!
//! `table` prints one result, `html` draws a page of results, `variants` compares variants, and a
//! caller fills `sections`. `compare` judges the difference of two results; `differences` and
//! `flags` compare their loads and settings.

mod scale;
mod series;
mod plot;
mod page;
pub mod knee;
mod charts;
mod overlay;
pub mod html;
pub mod variants;
pub mod sections;
pub mod columns;
pub mod table;
pub mod flags;
mod differences;
pub mod compare;

pub use html::{html, plots};
pub use overlay::{name, names};
