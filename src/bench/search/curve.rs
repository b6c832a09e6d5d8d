//! Misses over rate, from all that the runs have shown.
//!
//! No single run tells two neighbouring rates apart: 3,000 requests with 1 % of misses, which come in clumps, leave the
//! rate open by 5 % either way. All runs together do. The model is local: near the boundary the odds of a miss grow as a
//! power b of the rate r,
//!
//! ```text
//! ln(m / (1 - m)) = ln(a / (1 - a)) + b ln(r / r*)        m: share of misses, a: the allowed share
//! ```
//!
//! with two unknowns, r* (the answer) and b (how steep: 10 for a server with a loose end, hundreds for a cliff). Each
//! pair on a grid is weighted by its likelihood, so the result is a distribution of r*, not a number: it says where to look
//! next, when to stop, and how much to take off to be safe. A likelihood does not mind that a run ended early because it
//! had seen enough.
//!
//! Clumps: the log-likelihood is divided by the dispersion phi (quasi-likelihood; McCullagh and Nelder, 9.2). phi is
//! Pearson's statistic per degree of freedom at the best pair; while there are few runs, the mean design effect inside
//! them if that is larger. It is inflated as an estimate with few degrees of freedom is. A background of misses that no rate
//! explains ([`BACKGROUND`]) keeps one stray miss far below the boundary from upsetting everything.

use sluice_core::stats::Dependence;

/// Of the intervals that are read from the curve.
pub(super) const CONFIDENCE: f64 = 0.9;
/// Exponents tried: 4 and up by factors of 1.5, to 500.
const SLOPES: usize = 13;
const GENTLEST: f64 = 4.0;
const SLOPE_STEP: f64 = 1.5;
/// Step of ln r*.
const STEP: f64 = 0.004;
/// The grid reaches this far beyond the lowest and highest rate run, in ln r.
const REACH: f64 = 0.12;
/// More misses than this many times the allowed say "far above" and no more: the model is local.
const LOCAL: f64 = 20.0;
/// Misses at any rate, over the allowed share.
const BACKGROUND: f64 = 0.05;
/// Runs below this share of the highest rate run tell nothing about the boundary, and make the grid long.
const NEAR: f64 = 0.5;
/// Degrees of freedom from which Pearson's statistic is trusted alone.
const TRUSTED: f64 = 6.0;

/// What one run has shown.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Point {
    /// Requests per second that were really sent.
    pub(super) rate: f64,
    /// Requests that counted.
    pub(super) requests: f64,
    /// Of them, those that missed an objective.
    pub(super) misses: f64,
    /// Design effect of hits and misses inside the run, 1 or more.
    pub(super) effect: f64,
}

/// The distribution of the boundary. See the head of this file.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Curve {
    /// ln r*, exponent, weight; weights sum to 1.
    cells: Vec<(f64, f64, f64)>,
    allowed: f64,
}

impl Curve {
    /// What `points` say about the rate with the share `allowed` of misses. Nothing for no points.
    pub(super) fn of(points: &[Point], allowed: f64) -> Option<Self> {
        let usable = |point: &&Point| point.rate > 0.0 && point.requests > 0.0;
        let top = points.iter().filter(usable).map(|point| point.rate).reduce(f64::max)?;
        let local =
            |point: &Point| Point { misses: point.misses.min(point.requests * (LOCAL * allowed).min(0.5)), ..*point };
        let points: Vec<Point> = points.iter().filter(usable).filter(|p| p.rate >= top * NEAR).map(local).collect();
        let bottom = points.iter().map(|point| point.rate).fold(top, f64::min);
        let (low, high) = (bottom.ln() - REACH, top.ln() + REACH);
        let mut cells = Vec::new();
        for step in 0..=((high - low) / STEP).ceil() as usize {
            let boundary = low + step as f64 * STEP;
            for exponent in 0..SLOPES {
                let slope = GENTLEST * SLOPE_STEP.powi(exponent as i32);
                let fit: f64 = points.iter().map(|point| point.log_likelihood(boundary, slope, allowed)).sum();
                cells.push((boundary, slope, fit));
            }
        }
        let best = cells.iter().copied().max_by(|a, b| a.2.total_cmp(&b.2))?;
        let dispersion = dispersion(&points, best.0, best.1, allowed);
        cells.iter_mut().for_each(|cell| cell.2 = ((cell.2 - best.2) / dispersion).exp());
        let total: f64 = cells.iter().map(|cell| cell.2).sum();
        cells.iter_mut().for_each(|cell| cell.2 /= total);
        Some(Self { cells, allowed })
    }

    /// With this `probability`, the rate with the share `misses` of misses is not above the result.
    pub(super) fn rate(&self, misses: f64, probability: f64) -> f64 {
        let shift = logit(misses) - logit(self.allowed);
        let mut rates: Vec<(f64, f64)> =
            self.cells.iter().map(|(boundary, slope, weight)| (boundary + shift / slope, *weight)).collect();
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

impl Point {
    fn share(&self, boundary: f64, slope: f64, allowed: f64) -> f64 {
        let odds = (logit(allowed) + slope * (self.rate.ln() - boundary)).clamp(-30.0, 30.0);
        // Above one half only far beyond what the model is for; the end keeps logarithms finite.
        (1.0 / (1.0 + (-odds).exp())).clamp(BACKGROUND * allowed, 0.999)
    }

    fn log_likelihood(&self, boundary: f64, slope: f64, allowed: f64) -> f64 {
        let share = self.share(boundary, slope, allowed).min((LOCAL * allowed).min(0.5));
        self.misses * share.ln() + (self.requests - self.misses) * (-share).ln_1p()
    }
}

fn dispersion(points: &[Point], boundary: f64, slope: f64, allowed: f64) -> f64 {
    let pearson: f64 = points
        .iter()
        .map(|point| {
            let expected = point.share(boundary, slope, allowed).min((LOCAL * allowed).min(0.5));
            (point.misses - point.requests * expected).powi(2) / (point.requests * expected * (1.0 - expected))
        })
        .sum();
    let freedom = points.len().saturating_sub(2).max(1) as f64;
    // Runs without misses have no clumps to see.
    let seen: Vec<f64> = points.iter().filter(|point| point.misses > 0.0).map(|point| point.effect).collect();
    let inside = if seen.is_empty() { 1.0 } else { seen.iter().sum::<f64>() / seen.len() as f64 };
    let between = (pearson / freedom).max(1.0);
    let effect = if freedom >= TRUSTED { between } else { between.max(inside) };
    Dependence { effect, freedom }.inflation(CONFIDENCE)
}

fn logit(share: f64) -> f64 {
    let share = share.clamp(1e-9, 1.0 - 1e-9);
    (share / (1.0 - share)).ln()
}
