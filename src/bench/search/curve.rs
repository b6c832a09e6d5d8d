//! Estimates the boundary from all trials: the share of misses as a function of the rate.
//!
//! One trial is not enough, because 3,000 requests with 1 % of misses, in clusters, give the
//! boundary only to within 5 %. Near the boundary, the odds of a miss are assumed to grow as a
//! power b of the rate r:
//!
//! ```text
//! ln(m / (1 - m)) = ln(a / (1 - a)) + b ln(r / r*)        m: share of misses, a: the allowed share
//! ```
//!
//! Unknown are the boundary r* and the steepness b, which is 10 if attainment falls slowly, and
//! hundreds if it falls at once. Pairs of both on a grid are weighted by likelihood, which is valid
//! even if trials ended early. The distribution of r* gives the next rate, the end of the search,
//! and the safety margin.
//!
//! Because misses come in clusters, the log-likelihood is divided by the dispersion phi
//! (quasi-likelihood; McCullagh and Nelder, 9.2). phi is Pearson's statistic per degree of freedom
//! at the best pair, with few trials at least the mean design effect inside them. It is inflated
//! for the few degrees of freedom. Some misses occur at any rate ([`BACKGROUND`]), so a miss far
//! below the boundary has little weight.

use serde::{Deserialize, Serialize};
use sluice_core::stats::Dependence;

pub(super) const CONFIDENCE: f64 = 0.9;
/// Number of steepnesses b on the grid, from 4 by factors of 1.5 to 500.
const SLOPES: usize = 13;
const GENTLEST: f64 = 4.0;
const SLOPE_STEP: f64 = 1.5;
/// Step of ln r* on the grid.
const STEP: f64 = 0.004;
/// The grid extends this far beyond the tried rates, in ln r.
const REACH: f64 = 0.12;
/// Shares of misses count as at most this multiple of the allowed share, because the model holds
/// only near the boundary.
const LOCAL: f64 = 20.0;
/// Share of misses that occurs at any rate, as a part of the allowed share.
const BACKGROUND: f64 = 0.05;
/// Trials below this share of the highest rate are not used, because they say little and would
/// lengthen the grid.
const NEAR: f64 = 0.5;
/// Degrees of freedom from which Pearson's statistic is used without the design effect.
const TRUSTED: f64 = 6.0;

/// The counts of one trial.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct RatePoint {
    /// Requests per second that were sent.
    pub rate: f64,
    /// Requests that counted.
    pub requests: f64,
    /// Counted requests that missed an objective.
    pub misses: f64,
    /// Design effect of the misses inside the trial, 1 or more.
    pub effect: f64,
}

#[derive(Clone, Copy, Debug, PartialEq)]
struct Cell {
    boundary: f64,
    slope: f64,
    /// The log-likelihood while the grid is built, later the cell's share of the whole likelihood.
    weight: f64,
}

#[derive(Clone, Debug, PartialEq)]
pub(super) struct Curve {
    cells: Vec<Cell>,
    allowed: f64,
}

impl Curve {
    /// Fits the curve to find the rate with the share `allowed` of misses. `None` without points.
    pub(super) fn fit(points: &[RatePoint], allowed: f64) -> Option<Self> {
        let usable = |point: &&RatePoint| point.rate > 0.0 && point.requests > 0.0;
        let top = points.iter().filter(usable).map(|point| point.rate).reduce(f64::max)?;
        let local = |point: &RatePoint| RatePoint {
            misses: point.misses.min(point.requests * (LOCAL * allowed).min(0.5)),
            ..*point
        };
        let points: Vec<RatePoint> = points.iter().filter(usable).filter(|p| p.rate >= top * NEAR).map(local).collect();
        let bottom = points.iter().map(|point| point.rate).fold(top, f64::min);
        let (low, high) = (bottom.ln() - REACH, top.ln() + REACH);
        let mut cells = Vec::new();
        for step in 0..=((high - low) / STEP).ceil() as usize {
            let boundary = low + step as f64 * STEP;
            for exponent in 0..SLOPES {
                let slope = GENTLEST * SLOPE_STEP.powi(exponent as i32);
                let fit: f64 = points.iter().map(|point| point.log_likelihood(boundary, slope, allowed)).sum();
                cells.push(Cell { boundary, slope, weight: fit });
            }
        }
        let best = cells.iter().copied().max_by(|a, b| a.weight.total_cmp(&b.weight))?;
        let dispersion = dispersion(&points, best.boundary, best.slope, allowed);
        cells.iter_mut().for_each(|cell| cell.weight = ((cell.weight - best.weight) / dispersion).exp());
        let total: f64 = cells.iter().map(|cell| cell.weight).sum();
        cells.iter_mut().for_each(|cell| cell.weight /= total);
        Some(Self { cells, allowed })
    }

    /// The quantile `probability` of the rate with the share `misses` of misses.
    pub(super) fn rate(&self, misses: f64, probability: f64) -> f64 {
        let shift = logit(misses) - logit(self.allowed);
        let mut rates: Vec<(f64, f64)> =
            self.cells.iter().map(|cell| (cell.boundary + shift / cell.slope, cell.weight)).collect();
        rates.sort_unstable_by(|a, b| a.0.total_cmp(&b.0));
        let mut below = 0.0;
        for (rate, weight) in &rates {
            below += weight;
            if below >= probability {
                return rate.exp();
            }
        }
        rates.last().map_or(0.0, |(rate, _)| rate.exp())
    }
}

impl RatePoint {
    fn share(&self, boundary: f64, slope: f64, allowed: f64) -> f64 {
        let odds = (logit(allowed) + slope * (self.rate.ln() - boundary)).clamp(-30.0, 30.0);
        // The clamps keep logarithms finite far outside the range of the model.
        (1.0 / (1.0 + (-odds).exp())).clamp(BACKGROUND * allowed, 0.999)
    }

    fn log_likelihood(&self, boundary: f64, slope: f64, allowed: f64) -> f64 {
        let share = self.share(boundary, slope, allowed).min((LOCAL * allowed).min(0.5));
        self.misses * share.ln() + (self.requests - self.misses) * (-share).ln_1p()
    }
}

fn dispersion(points: &[RatePoint], boundary: f64, slope: f64, allowed: f64) -> f64 {
    let pearson: f64 = points
        .iter()
        .map(|point| {
            let expected = point.share(boundary, slope, allowed).min((LOCAL * allowed).min(0.5));
            (point.misses - point.requests * expected).powi(2) / (point.requests * expected * (1.0 - expected))
        })
        .sum();
    let freedom = points.len().saturating_sub(2).max(1) as f64;
    // The design effect of a trial without misses is unknown.
    let effects: Vec<f64> = points.iter().filter(|point| point.misses > 0.0).map(|point| point.effect).collect();
    let inside = if effects.is_empty() { 1.0 } else { effects.iter().sum::<f64>() / effects.len() as f64 };
    let between = (pearson / freedom).max(1.0);
    let effect = if freedom >= TRUSTED { between } else { between.max(inside) };
    Dependence { effect, freedom }.inflation(CONFIDENCE)
}

fn logit(share: f64) -> f64 {
    let share = share.clamp(1e-9, 1.0 - 1e-9);
    (share / (1.0 - share)).ln()
}
