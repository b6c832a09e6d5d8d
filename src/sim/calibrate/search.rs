//! Searches for the constants with which simulated rows are closest to the measured ones.
//!
//! The distance is the mean over all measured cells of |log(simulated / measured)|. The part of an
//! error beyond [`TOLERATED`] is added again with the factor [`STRESS`], so that no row is
//! sacrificed for the others. The median TTFT of a single stream is left out: it depends on a few
//! latencies, not on queueing.
//!
//! A deterministic pattern search moves each constant up and down by a share and keeps
//! improvements. Without an improvement, it reduces the share. Constants on which no row depends do
//! not change. Bounds: a few shares, each with at most [`SWEEPS`] passes through the constants.

use super::play::play;
use super::rows::{MEASURED, Row};
use crate::machine::{Constants, Gpu, Layout, Model, Profile, ProfileError};

/// Errors beyond this have a higher weight.
const TOLERATED: f64 = 0.12;
/// Factor for the part of an error beyond [`TOLERATED`].
const STRESS: f64 = 3.0;
const THOROUGH: &[f64] = &[0.25, 0.12, 0.06, 0.03];
/// Most passes through all constants with one share.
const SWEEPS: usize = 3;
/// Least improvement of the distance that counts. A smaller one may be rounding.
const GAIN: f64 = 1e-5;
/// Number of draws of arrivals and jitter. A cell is the median over the draws.
const DRAWS: u64 = 3;

/// A constant that the search moves within a range.
#[derive(Clone, Copy, Debug)]
pub struct FittedConstant {
    /// Table in the file of constants.
    pub table: &'static str,
    /// Key in that table.
    pub key: &'static str,
    low: f64,
    high: f64,
}

const fn constant(table: &'static str, key: &'static str, low: f64, high: f64) -> FittedConstant {
    FittedConstant { table, key, low, high }
}

/// The constants that are fitted.
pub const FITTED: &[FittedConstant] = &[
    constant("efficiency", "bandwidth", 0.2, 1.0),
    constant("efficiency", "linear", 0.2, 1.0),
    constant("efficiency", "attention", 0.1, 1.0),
    constant("step", "layer_us", 5.0, 500.0),
    constant("step", "sequence_us", 0.5, 100.0),
    constant("step", "lora_layer_us", 1.0, 500.0),
    constant("step", "lora_token_layer_us", 0.005, 5.0),
    constant("host", "launch_layer_us", 20.0, 5000.0),
    constant("host", "stall_share", 0.01, 1.0),
    constant("host", "lora_stall_share", 0.01, 1.0),
    constant("front_end", "request_us", 10.0, 10_000.0),
    constant("front_end", "token_us", 1.0, 1000.0),
    constant("front_end", "in_us", 50.0, 50_000.0),
];

/// The constants of a host, in the order of the loads of `sluice sim fit --server`.
pub const HOST: &[FittedConstant] = &[
    constant("front_end", "request_us", 10.0, 20_000.0),
    constant("front_end", "token_us", 1.0, 2000.0),
    constant("host", "launch_layer_us", 20.0, 5000.0),
    constant("front_end", "first_token_us", 0.01, 50.0),
    constant("front_end", "in_us", 50.0, 50_000.0),
    constant("host", "step_us", 50.0, 20_000.0),
    constant("front_end", "out_us", 50.0, 50_000.0),
    constant("host", "stall_share", 0.001, 1.0),
    constant("host", "lora_stall_share", 0.001, 1.0),
];

/// Why constants cannot be fitted.
#[expect(missing_docs, reason = "the messages say it")]
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum FitError {
    #[error(transparent)]
    Profile(#[from] ProfileError),
    #[error(
        "row '{row}' cannot be simulated: {column} has no value; a request that does not fit into the KV cache of this model \
         on this GPU is refused, and in a short run none may arrive"
    )]
    Row { row: String, column: &'static str },
}

/// The settings of a fit.
#[derive(Clone, Debug)]
pub struct FitSettings {
    /// The GPU that the rows were measured on.
    pub gpu: Gpu,
    /// The model that was served.
    pub model: Model,
    /// Group size and number formats.
    pub layout: Layout,
    /// The constants that are fitted.
    pub fitted: &'static [FittedConstant],
    /// Draws of arrivals and jitter; a cell is their median.
    pub draws: u64,
    /// Shares by which the search moves constants, the largest first.
    pub shares: &'static [f64],
    /// The most passes through the constants with each share.
    pub sweeps: usize,
}

impl FitSettings {
    /// The settings of a thorough search.
    pub fn new(gpu: Gpu, model: Model, layout: Layout) -> Self {
        Self { gpu, model, layout, fitted: FITTED, draws: DRAWS, shares: THOROUGH, sweeps: SWEEPS }
    }

    /// Simulates each row with these constants.
    pub fn play_all(&self, constants: &Constants, rows: &[Row]) -> Result<Vec<[f64; 4]>, FitError> {
        let profile = Profile::new(self.gpu.clone(), self.model.clone(), self.layout, constants)?;
        let workers_wanted = std::thread::available_parallelism().map_or(1, usize::from).min(rows.len().max(1));
        let mut played = vec![[f64::NAN; 4]; rows.len()];
        std::thread::scope(|scope| {
            let workers: Vec<_> = (0..workers_wanted)
                .map(|first| {
                    let profile = &profile;
                    let mine = move || rows.iter().enumerate().skip(first).step_by(workers_wanted);
                    scope
                        .spawn(move || mine().map(|(at, row)| (at, play(profile, row, self.draws))).collect::<Vec<_>>())
                })
                .collect();
            for (at, cells) in workers.into_iter().flat_map(|worker| worker.join().unwrap_or_default()) {
                played[at] = cells;
            }
        });
        rows.iter().zip(&played).try_for_each(|(row, cells)| is_simulated(row, cells))?;
        Ok(played)
    }

    fn distance(&self, constants: &Constants, rows: &[Row]) -> Result<f64, FitError> {
        let played = self.play_all(constants, rows)?;
        let (mut sum, mut cells) = (0.0, 0.0);
        for (row, simulated) in rows.iter().zip(played) {
            for error in errors(row, &simulated).into_iter().flatten() {
                let log = error.ln_1p().abs();
                sum += log + STRESS * (log - TOLERATED).max(0.0);
                cells += 1.0;
            }
        }
        Ok(sum / f64::max(cells, 1.0))
    }

    /// Three-fold cross-validation: predicts each third of the rows with constants fitted to the
    /// other two thirds. Returns the rows, third by third, and their simulated cells.
    pub fn leave_thirds_out(&self, start: &Constants, rows: &[Row]) -> Result<(Vec<Row>, Vec<[f64; 4]>), FitError> {
        let (mut left, mut cells) = (Vec::new(), Vec::new());
        for third in 0..3 {
            let (out, kept) = split(rows, third);
            let fitted = self.fit(start, &kept)?;
            cells.extend(self.play_all(&fitted, &out)?);
            left.extend(out);
        }
        Ok((left, cells))
    }

    /// The constants nearest to the rows, searched from `start`.
    pub fn fit(&self, start: &Constants, rows: &[Row]) -> Result<Constants, FitError> {
        let mut best = (self.distance(start, rows)?, start.clone());
        for share in self.shares {
            for _ in 0..self.sweeps {
                let before = best.0;
                for parameter in self.fitted {
                    for factor in [1.0 + share, 1.0 / (1.0 + share)] {
                        let Some(tried) = moved(&best.1, parameter, factor)? else { continue };
                        let distance = self.distance(&tried, rows)?;
                        if distance < best.0 - GAIN {
                            best = (distance, tried);
                            break;
                        }
                    }
                }
                if best.0 > before - GAIN {
                    break;
                }
            }
        }
        Ok(best.1)
    }
}

fn is_simulated(row: &Row, cells: &[f64; 4]) -> Result<(), FitError> {
    let has_value = |cell: f64| cell.is_finite() && cell > 0.0;
    let missing = (0..cells.len()).find(|at| row.measured[*at].is_some() && !has_value(cells[*at]));
    missing.map_or(Ok(()), |at| Err(FitError::Row { row: row.name.clone(), column: MEASURED[at] }))
}

fn split(rows: &[Row], third: usize) -> (Vec<Row>, Vec<Row>) {
    let (left, kept): (Vec<_>, Vec<_>) = rows.iter().cloned().enumerate().partition(|(at, _)| at % 3 == third);
    let plain = |rows: Vec<(usize, Row)>| rows.into_iter().map(|(_, row)| row).collect();
    (plain(left), plain(kept))
}

/// Relative errors of the judged cells: simulated / measured - 1. `None` for a cell that was not
/// measured, and for the median TTFT of a single stream.
pub fn errors(row: &Row, simulated: &[f64; 4]) -> [Option<f64>; 4] {
    std::array::from_fn(|cell| {
        let judged = !(row.is_single_stream() && cell == 1);
        row.measured[cell].filter(|_| judged).map(|measured| simulated[cell] / measured - 1.0)
    })
}

/// Multiplies one of the constants. `None` if it is missing or already at the end of its range.
fn moved(
    constants: &Constants,
    FittedConstant { table: part, key, low, high }: &FittedConstant,
    factor: f64,
) -> Result<Option<Constants>, ProfileError> {
    let mut table = constants.table();
    let Some(value) = table.get_mut(*part).and_then(|part| part.get_mut(*key)) else { return Ok(None) };
    let old = value.as_float().unwrap_or(*low);
    let new = (old * factor).clamp(*low, *high);
    // Rounded to four digits, so that a file contains exactly the values that were tried.
    let digits = 10f64.powi(3 - new.abs().log10().floor() as i32);
    let new = (new * digits).round() / digits;
    if (new - old).abs() < 1e-12 {
        return Ok(None);
    }
    *value = toml::Value::Float(new);
    Constants::parse("(in the fit)", &table.to_string()).map(Some)
}
