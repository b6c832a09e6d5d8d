//! A fit as a table: the measured and the simulated cells of each row, and a summary of the errors.
//!
//! Errors are simulated / measured - 1, in percent. An error that is not judged is in brackets, and
//! the summary leaves it out.

use std::fmt::Write;

use super::play::quantile;
use super::rows::{MEASURED, Row};
use super::search::errors;

/// Median and largest absolute error of the judged cells, as shares; NaN without cells.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Spread {
    /// Number of cells.
    pub cells: usize,
    /// Median error.
    pub median: f64,
    /// Largest error.
    pub max: f64,
}

impl Spread {
    /// The spread over these rows.
    pub fn of<'a>(rows: impl Iterator<Item = (&'a Row, &'a [f64; 4])>) -> Self {
        let all: Vec<f64> = rows.flat_map(|(row, cells)| errors(row, cells)).flatten().map(f64::abs).collect();
        Self { cells: all.len(), median: quantile(all.clone(), 0.5), max: quantile(all, 1.0) }
    }
}

impl std::fmt::Display for Spread {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { cells, median, max } = self;
        write!(f, "{cells} cells: median error {:.1} %, largest {:.1} %", 100.0 * median, 100.0 * max)
    }
}

/// The table of all rows.
pub fn table(rows: &[Row], simulated: &[[f64; 4]]) -> String {
    let width = rows.iter().map(|row| row.name.chars().count()).max().unwrap_or(0);
    let mut text = format!("{:width$}", "measured, simulated, error");
    for column in MEASURED {
        let _ = write!(text, " | {column:^27}");
    }
    for (row, cells) in rows.iter().zip(simulated) {
        let _ = write!(text, "\n{:width$}", row.name);
        for ((measured, simulated), error) in row.measured.iter().zip(cells).zip(errors(row, cells)) {
            let _ = match (measured, error) {
                (Some(measured), Some(error)) => {
                    write!(text, " | {measured:9.2} {simulated:9.2} {:+6.1}%", 100.0 * error)
                }
                (Some(measured), None) => {
                    let error = format!("({:+.0}%)", 100.0 * (simulated / measured - 1.0));
                    write!(text, " | {measured:9.2} {simulated:9.2} {error:>7}")
                }
                (None, _) => write!(text, " | {:>9} {simulated:9.2} {:7}", "-", ""),
            };
        }
    }
    let spread = Spread::of(rows.iter().zip(simulated));
    let _ = write!(text, "\n{spread}");
    text
}
