//! The knee of a sweep: the concurrency beyond which latency grows and throughput does not.
//!
//! Two lines that meet at the knee are fitted to throughput over concurrency by least squares. The
//! knee is reported if the four rules of guidellm hold:
//!
//! - there are five points or more;
//! - the second slope is at most [`FLAT`] of the first;
//! - two lines leave at most half the squared error of one line;
//! - throughput at the knee is at least [`HIGH`] of the maximum.
//!
//! So there is no knee if throughput still grows at the end of the sweep, or if its curve is
//! smooth.

const FLAT: f64 = 0.25;
const HIGH: f64 = 0.85;
const POINTS: usize = 5;
/// Number of positions that are tried, between the second point and the last but one.
const POSITIONS: usize = 400;

/// The knee of points (concurrency, throughput) in order of concurrency; `None` if there is none.
pub fn knee(points: &[(f64, f64)]) -> Option<f64> {
    let points: Vec<(f64, f64)> = points.iter().copied().filter(|(x, y)| x.is_finite() && y.is_finite()).collect();
    if points.len() < POINTS || !points.is_sorted_by(|a, b| a.0 < b.0) {
        return None;
    }
    let (first, last) = (points[1].0, points[points.len() - 2].0);
    let most = points.iter().map(|(_, y)| *y).fold(0.0, f64::max);
    let one_line = fit(&points, None)?;
    let fits = (0..=POSITIONS).filter_map(|position| {
        let at = first + (last - first) * position as f64 / POSITIONS as f64;
        Some((at, fit(&points, Some(at))?))
    });
    let (at, two_lines) = fits.min_by(|a, b| a.1.squared_error.total_cmp(&b.1.squared_error))?;
    let accepted = two_lines.slope > 0.0
        && two_lines.slope + two_lines.bend <= FLAT * two_lines.slope
        && two_lines.squared_error <= 0.5 * one_line.squared_error
        && two_lines.start + two_lines.slope * at >= HIGH * most;
    accepted.then_some(at)
}

/// Two lines that meet at `at`: y = start + slope x + bend max(0, x - at).
struct Fit {
    start: f64,
    slope: f64,
    bend: f64,
    squared_error: f64,
}

fn fit(points: &[(f64, f64)], at: Option<f64>) -> Option<Fit> {
    let row = |x: f64| [1.0, x, at.map_or(0.0, |at| (x - at).max(0.0))];
    let mut normal = [[0.0; 4]; 3];
    for &(x, y) in points {
        let row = row(x);
        for i in 0..3 {
            for j in 0..3 {
                normal[i][j] += row[i] * row[j];
            }
            normal[i][3] += row[i] * y;
        }
    }
    if at.is_none() {
        normal[2] = [0.0, 0.0, 1.0, 0.0];
    }
    let [start, slope, bend] = solve(normal)?;
    let squared_error = points.iter().map(|&(x, y)| (y - start - slope * x - bend * row(x)[2]).powi(2)).sum();
    Some(Fit { start, slope, bend, squared_error })
}

/// Gaussian elimination with pivoting; `None`: no unique solution.
fn solve(mut rows: [[f64; 4]; 3]) -> Option<[f64; 3]> {
    for column in 0..3 {
        let pivot = (column..3).max_by(|a, b| rows[*a][column].abs().total_cmp(&rows[*b][column].abs()))?;
        rows.swap(column, pivot);
        if rows[column][column].abs() < 1e-12 {
            return None;
        }
        for row in 0..3 {
            if row != column {
                let factor = rows[row][column] / rows[column][column];
                let above = rows[column];
                rows[row].iter_mut().zip(above).for_each(|(cell, above)| *cell -= factor * above);
            }
        }
    }
    Some([0, 1, 2].map(|row| rows[row][3] / rows[row][row]))
}

#[cfg(test)]
mod tests {
    use super::*;

    const SWEEP: [f64; 12] = [1.0, 5.0, 10.0, 20.0, 30.0, 40.0, 50.0, 60.0, 70.0, 80.0, 90.0, 100.0];

    #[test]
    fn the_knee_of_two_lines_is_where_they_meet() {
        let points = SWEEP.map(|x| (x, x.min(50.0) * 3.0));
        assert!((knee(&points).unwrap() - 50.0).abs() < 1.0);
        // The knee lies between two points, first with noise, then with few points.
        let points = SWEEP.map(|x| (x, x.min(46.0) * 3.0 * (1.0 + 0.02 * (x * 7.0).sin())));
        assert!((knee(&points).unwrap() - 46.0).abs() < 3.0);
        let coarse = [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0].map(|x: f64| (x, x.min(50.0)));
        assert!((knee(&coarse).unwrap() - 50.0).abs() < 4.0);
    }

    #[test]
    fn a_curve_without_a_knee_has_none() {
        assert_eq!(knee(&SWEEP.map(|x| (x, 2.0 * x))), None, "still growing");
        assert_eq!(knee(&SWEEP.map(|x| (x, 80.0))), None, "flat from the start");
        assert_eq!(knee(&SWEEP[..4].iter().map(|x| (*x, x.min(10.0))).collect::<Vec<_>>()), None, "four points");
        assert_eq!(knee(&[(2.0, 1.0), (1.0, 2.0), (3.0, 3.0), (4.0, 3.0), (5.0, 3.0)]), None, "out of order");
        assert_eq!(knee(&[]), None);
    }
}
