//! A small Gaussian process: a distribution of functions of a few variables, given noisy values.
//!
//! Kernel: Matern 5/2 with a length for each coordinate, k(r) = (1 + s + s^2/3) exp(-s), s =
//! sqrt(5) r, r^2 = sum (d_i / l_i)^2 (Rasmussen and Williams 2006, 4.2). Values are standardised:
//! mean 0, variance 1. Lengths and noise maximise the marginal likelihood on a grid, one coordinate
//! after the other. Coordinates run from 0 to 1.
//!
//! Cost: n^3 for each of some hundred likelihoods; meant for up to a few hundred values.

const LENGTHS: [f64; 5] = [0.15, 0.35, 0.8, 2.0, 6.0];
/// Candidate standard deviations of the noise, relative to the standard deviation of the values.
const NOISES: [f64; 4] = [0.02, 0.06, 0.18, 0.5];
/// Passes over all coordinates.
const PASSES: usize = 2;

#[derive(Clone, Debug)]
pub(super) struct Gaussian {
    points: Vec<Vec<f64>>,
    lengths: Vec<f64>,
    /// Lower triangle of the Cholesky factor of the kernel matrix, row by row.
    factor: Vec<Vec<f64>>,
    /// Inverse of the kernel matrix times the standardised values.
    weights: Vec<f64>,
    mean: f64,
    deviation: f64,
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Prediction {
    pub(super) mean: f64,
    pub(super) deviation: f64,
}

impl Gaussian {
    /// `None` if there are fewer than two values, or if all values are equal.
    pub(super) fn fit(points: &[Vec<f64>], values: &[f64]) -> Option<Self> {
        let count = values.len() as f64;
        let mean = values.iter().sum::<f64>() / count;
        let deviation = (values.iter().map(|value| (value - mean).powi(2)).sum::<f64>() / count).sqrt();
        if values.len() < 2 || !(deviation > 1e-12 && deviation.is_finite()) {
            return None;
        }
        let standard: Vec<f64> = values.iter().map(|value| (value - mean) / deviation).collect();
        let (lengths, noise) = likeliest(points, &standard);
        let factor = factor(points, &lengths, noise)?;
        let weights = backward(&factor, &forward(&factor, &standard));
        Some(Self { points: points.to_vec(), lengths, factor, weights, mean, deviation })
    }

    pub(super) fn predict(&self, point: &[f64]) -> Prediction {
        let near: Vec<f64> = self.points.iter().map(|other| kernel(point, other, &self.lengths)).collect();
        let mean: f64 = near.iter().zip(&self.weights).map(|(near, weight)| near * weight).sum();
        let explained: f64 = forward(&self.factor, &near).iter().map(|part| part * part).sum();
        let deviation = (1.0 - explained).max(1e-9).sqrt();
        Prediction { mean: self.mean + self.deviation * mean, deviation: self.deviation * deviation }
    }

    /// Expected gain over `best` at a point, in the unit of the values.
    pub(super) fn expected_improvement(&self, point: &[f64], best: f64) -> f64 {
        let Prediction { mean, deviation } = self.predict(point);
        let z = (mean - best) / deviation;
        let density = (-z * z / 2.0).exp() / (2.0 * std::f64::consts::PI).sqrt();
        (mean - best) * normal_share(z) + deviation * density
    }

    /// Correlation of the function at two points, 0 to 1.
    pub(super) fn likeness(&self, one: &[f64], other: &[f64]) -> f64 {
        kernel(one, other, &self.lengths)
    }
}

/// P(Z <= z) of a standard normal Z, to 1e-7 (Abramowitz and Stegun 26.2.17).
fn normal_share(z: f64) -> f64 {
    let t = 1.0 / (1.0 + 0.231_641_9 * z.abs());
    let terms = [0.319_381_530, -0.356_563_782, 1.781_477_937, -1.821_255_978, 1.330_274_429];
    let polynomial = terms.iter().rev().fold(0.0, |sum, term| (sum + term) * t);
    let upper = (-z * z / 2.0).exp() / (2.0 * std::f64::consts::PI).sqrt() * polynomial;
    if z >= 0.0 { 1.0 - upper } else { upper }
}

fn kernel(one: &[f64], other: &[f64], lengths: &[f64]) -> f64 {
    let square: f64 = one.iter().zip(other).zip(lengths).map(|((a, b), length)| ((a - b) / length).powi(2)).sum();
    let s = (5.0 * square).sqrt();
    (1.0 + s + s * s / 3.0) * (-s).exp()
}

fn factor(points: &[Vec<f64>], lengths: &[f64], noise: f64) -> Option<Vec<Vec<f64>>> {
    let mut rows: Vec<Vec<f64>> = Vec::with_capacity(points.len());
    for (at, point) in points.iter().enumerate() {
        let mut row: Vec<f64> = Vec::with_capacity(at + 1);
        for (column, other) in points[..=at].iter().enumerate() {
            let own = if column == at { noise * noise + 1e-9 } else { 0.0 };
            let before: &[f64] = if column == at { &row } else { &rows[column] };
            let sum: f64 = row[..column].iter().zip(before).map(|(a, b)| a * b).sum();
            let left = kernel(point, other, lengths) + own - sum;
            let value = if column == at { (left > 0.0).then(|| left.sqrt())? } else { left / rows[column][column] };
            row.push(value);
        }
        rows.push(row);
    }
    Some(rows)
}

fn forward(factor: &[Vec<f64>], b: &[f64]) -> Vec<f64> {
    let mut x: Vec<f64> = Vec::with_capacity(b.len());
    for (row, value) in factor.iter().zip(b) {
        let sum: f64 = row.iter().zip(&x).map(|(a, x)| a * x).sum();
        x.push((value - sum) / row[x.len()]);
    }
    x
}

fn backward(factor: &[Vec<f64>], b: &[f64]) -> Vec<f64> {
    let mut x = b.to_vec();
    for at in (0..x.len()).rev() {
        let sum: f64 = (at + 1..x.len()).map(|below| factor[below][at] * x[below]).sum();
        x[at] = (x[at] - sum) / factor[at][at];
    }
    x
}

fn likeliest(points: &[Vec<f64>], standard: &[f64]) -> (Vec<f64>, f64) {
    let dimensions = points.first().map_or(0, Vec::len);
    let (mut lengths, mut noise) = (vec![LENGTHS[2]; dimensions], NOISES[1]);
    let mut best = likelihood(points, standard, &lengths, noise);
    for _ in 0..PASSES {
        for at in 0..dimensions {
            for length in LENGTHS {
                let mut other = lengths.clone();
                other[at] = length;
                let found = likelihood(points, standard, &other, noise);
                if found > best {
                    (best, lengths) = (found, other);
                }
            }
        }
        for other in NOISES {
            let found = likelihood(points, standard, &lengths, other);
            if found > best {
                (best, noise) = (found, other);
            }
        }
    }
    (lengths, noise)
}

fn likelihood(points: &[Vec<f64>], values: &[f64], lengths: &[f64], noise: f64) -> f64 {
    let Some(factor) = factor(points, lengths, noise) else { return f64::NEG_INFINITY };
    let solved = forward(&factor, values);
    let fit: f64 = solved.iter().map(|part| part * part).sum();
    let size: f64 = factor.iter().enumerate().map(|(at, row)| row[at].ln()).sum();
    -0.5 * fit - size
}

#[cfg(test)]
mod tests {
    use super::*;
    use sluice_core::base::Rng;

    fn sample(count: usize, noise: f64, seed: u64) -> (Vec<Vec<f64>>, Vec<f64>) {
        let mut rng = Rng::new(seed);
        let points: Vec<Vec<f64>> = (0..count).map(|_| vec![rng.unit(), rng.unit(), rng.unit()]).collect();
        let values = points.iter().map(|point| truth(point) + noise * (rng.unit() - 0.5) * 3.46).collect();
        (points, values)
    }

    /// The third coordinate does not matter.
    fn truth(point: &[f64]) -> f64 {
        5.0 + (3.0 * point[0]).sin() + 0.5 * (point[1] - 0.3).powi(2)
    }

    #[test]
    fn a_smooth_function_is_learned_and_its_error_is_covered() {
        let (points, values) = sample(40, 0.0, 1);
        let process = Gaussian::fit(&points, &values).unwrap();
        let (others, truths) = sample(200, 0.0, 2);
        let (mut covered, mut worst) = (0, 0.0f64);
        for (point, truth) in others.iter().zip(truths) {
            let Prediction { mean, deviation } = process.predict(point);
            covered += usize::from((mean - truth).abs() <= 3.0 * deviation);
            worst = worst.max((mean - truth).abs());
        }
        assert!(covered >= 190 && worst < 0.25, "{covered} of 200, {worst}");
        assert!(process.lengths[2] > process.lengths[0], "{:?}", process.lengths);
    }

    #[test]
    fn noise_is_separated_from_the_function() {
        // The function's deviation is about 0.3, three times the noise.
        let noise = |size: f64| {
            let (points, values) = sample(80, size, 3);
            let standard: Vec<f64> = values.iter().map(|value| (value - 5.6) / 0.3).collect();
            likeliest(&points, &standard).1
        };
        assert_eq!(noise(0.0), NOISES[0]);
        assert!(noise(0.1) > NOISES[1], "{}", noise(0.1));
    }

    #[test]
    fn improvement_is_expected_where_it_is_unknown_and_not_where_it_is_known() {
        let points: Vec<Vec<f64>> = [0.0, 0.1, 0.2].map(|x| vec![x]).to_vec();
        let process = Gaussian::fit(&points, &[1.0, 2.0, 3.0]).unwrap();
        let gain = |x: f64| process.expected_improvement(&[x], 3.0);
        assert!(gain(0.3) > gain(0.1) && gain(0.3) > gain(0.0), "{} {} {}", gain(0.3), gain(0.1), gain(0.0));
        assert!(Gaussian::fit(&points[..1], &[1.0]).is_none());
        assert!(Gaussian::fit(&points, &[1.0; 3]).is_none());
    }

    #[test]
    fn the_normal_distribution_is_that_of_the_tables() {
        for (z, share) in [(0.0, 0.5), (1.0, 0.841_344_7), (-1.96, 0.024_997_9), (3.0, 0.998_650_1)] {
            assert!((normal_share(z) - share).abs() < 1e-6, "{z}");
        }
    }
}
