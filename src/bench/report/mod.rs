//! Results for people: tables in the terminal, HTML pages with plots, and comparisons.
//!
//! `table` prints one result in the terminal. `html` is a page of one or more results; `charts` chooses its plots,
//! `plot` and `scale` draw them as SVG, `page` writes the HTML. `variants` is a page
//! that compares variants, `sections` one of tables and dots that the caller fills. `knee` finds the knee of a sweep, `compare` judges the
//! difference of two results. Statistics are computed in `result`, not here.

mod scale;
mod plot;
mod page;
pub mod knee;
mod charts;
pub mod html;
pub mod variants;
pub mod sections;
pub mod table;
pub mod compare;

pub use html::{html, name, plots};
