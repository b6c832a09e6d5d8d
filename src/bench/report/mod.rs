//! Results for people: tables in the terminal, HTML pages with plots, and comparisons.
//!
//! `table` prints one result in the terminal. `html` is a page of one or more results; `charts` chooses its plots,
//! `plot` and `scale` draw them as SVG, `page` writes the HTML. `knee` finds the best point of a sweep, `compare`
//! judges the difference of two results. What belongs into `result` is not computed here.

mod scale;
mod plot;
mod page;
pub mod knee;
mod charts;
pub mod html;
pub mod table;
pub mod compare;

pub use html::{html, name, plots};
