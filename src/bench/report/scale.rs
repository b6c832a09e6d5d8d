//! Axes of a chart: they map values to positions and choose the values to label (ticks).
//!
//! Ticks of a linear axis are multiples of 1, 2 or 5 times a power of ten. Ticks of a logarithmic
//! axis are at 1, 2 and 5 in each decade; if these are too many, at 1 and 3, or at powers of ten.
//! There are at least two ticks, unless the range is too narrow.

#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Scale {
    low: f64,
    high: f64,
    log: bool,
    from: f64,
    to: f64,
}

impl Scale {
    /// An axis from `low` at position `from` to `high` at position `to`. An empty range is widened,
    /// but not below 0, because a time or a count has no negative values. If `low` is not above 0,
    /// the axis is linear.
    pub(super) fn new(low: f64, high: f64, log: bool, from: f64, to: f64) -> Self {
        let log = log && low > 0.0;
        let (low, high) = match (high > low, log) {
            (true, _) => (low, high),
            (false, true) => (low / 2.0, low * 2.0),
            (false, false) => widened(low),
        };
        Self { low, high, log, from, to }
    }

    pub(super) fn reaches(&self, value: f64) -> bool {
        let slack = 1e-9 * self.high.abs();
        (self.low - slack..=self.high + slack).contains(&value)
    }

    pub(super) fn is_log(&self) -> bool {
        self.log
    }

    pub(super) fn at(&self, value: f64) -> f64 {
        let part = match self.log {
            true => (value.max(self.low) / self.low).ln() / (self.high / self.low).ln(),
            false => (value - self.low) / (self.high - self.low),
        };
        self.from + part.clamp(0.0, 1.0) * (self.to - self.from)
    }

    /// The values to label: about `wanted`, two or more if possible.
    pub(super) fn ticks(&self, wanted: usize) -> Vec<f64> {
        if self.log { self.log_ticks(wanted) } else { self.linear_ticks(wanted) }
    }

    fn linear_ticks(&self, wanted: usize) -> Vec<f64> {
        let step = nice((self.high - self.low) / wanted.max(1) as f64);
        let first = (self.low / step - 1e-9).ceil();
        let last = (self.high / step + 1e-9).floor();
        let count = (last - first).max(0.0) as usize;
        (0..=count.min(50)).map(|n| (first + n as f64) * step).collect()
    }

    fn log_ticks(&self, wanted: usize) -> Vec<f64> {
        let inside = |steps: &[f64]| -> Vec<f64> {
            let decades = self.low.log10().floor() as i32..=self.high.log10().ceil() as i32;
            let all = decades.flat_map(|decade| steps.iter().map(move |step| step * 10f64.powi(decade)));
            all.filter(|tick| *tick >= self.low * 0.999 && *tick <= self.high * 1.001).collect()
        };
        let choices = [inside(&[1.0, 2.0, 5.0]), inside(&[1.0, 3.0]), inside(&[1.0])];
        let fits = choices.iter().find(|ticks| ticks.len() <= wanted + 1 && ticks.len() >= 2);
        match fits {
            Some(ticks) => ticks.clone(),
            None if choices[2].len() > wanted => {
                let every = choices[2].len().div_ceil(wanted.max(1));
                choices[2].iter().copied().step_by(every).collect()
            }
            None if choices[0].len() >= 2 => choices[0].clone(),
            None => self.linear_ticks(wanted),
        }
    }
}

fn widened(value: f64) -> (f64, f64) {
    let half = 0.5 * value.abs().max(1.0);
    match value {
        _ if value > 0.0 => ((value - half).max(0.0), value + half),
        _ if value < 0.0 => (value - half, (value + half).min(0.0)),
        _ => (0.0, half),
    }
}

/// The smallest of 1, 2, 5 times a power of ten that is at least `step`.
pub(super) fn nice(step: f64) -> f64 {
    if !(step > 0.0 && step.is_finite()) {
        return 1.0;
    }
    let power = 10f64.powf(step.log10().floor());
    let factor = [1.0, 2.0, 5.0, 10.0].into_iter().find(|factor| factor * power >= step * 0.999).unwrap_or(10.0);
    factor * power
}

/// A number with about three significant digits: 1,500 or 0.25 or 3.0e9.
pub(super) fn short(value: f64) -> String {
    let size = value.abs();
    if size == 0.0 {
        return "0".to_owned();
    }
    if !(1e-4..1e7).contains(&size) {
        return format!("{value:.1e}");
    }
    let digits = (2 - size.log10().floor() as i32).clamp(0, 6) as usize;
    let text = format!("{value:.digits$}");
    let text = if text.contains('.') { text.trim_end_matches('0').trim_end_matches('.') } else { &text };
    let (whole, rest) = text.split_once('.').map_or((text, None), |(whole, rest)| (whole, Some(rest)));
    let (sign, whole) = whole.strip_prefix('-').map_or(("", whole), |whole| ("-", whole));
    let mut grouped = String::new();
    for (place, digit) in whole.chars().enumerate() {
        if place > 0 && (whole.len() - place) % 3 == 0 {
            grouped.push(',');
        }
        grouped.push(digit);
    }
    rest.map_or(format!("{sign}{grouped}"), |rest| format!("{sign}{grouped}.{rest}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ticks_are_round_numbers_inside_the_range() {
        let linear = Scale::new(0.0, 103.0, false, 0.0, 500.0);
        assert_eq!(linear.ticks(5), [0.0, 50.0, 100.0]);
        assert_eq!(linear.ticks(6), [0.0, 20.0, 40.0, 60.0, 80.0, 100.0]);
        let log = Scale::new(3.0, 250.0, true, 0.0, 500.0);
        assert_eq!(log.ticks(6), [5.0, 10.0, 20.0, 50.0, 100.0, 200.0]);
        let decades = Scale::new(1e-3, 1e4, true, 0.0, 500.0).ticks(8);
        assert_eq!((decades.len(), decades[0]), (8, 1e-3));
        assert!(Scale::new(7.1, 7.9, true, 0.0, 1.0).ticks(5).len() >= 2);
    }

    #[test]
    fn positions_are_limited_to_the_axis() {
        let scale = Scale::new(1.0, 100.0, true, 10.0, 210.0);
        assert_eq!(
            [0.0, 1.0, 10.0, 100.0, 1e9].map(|value| scale.at(value).round()),
            [10.0, 10.0, 110.0, 210.0, 210.0]
        );
        let flat = Scale::new(5.0, 5.0, false, 0.0, 1.0);
        assert_eq!(flat.at(5.0), 0.5);
        assert_eq!(Scale::new(0.3, 0.3, false, 0.0, 1.0).ticks(4)[0], 0.0, "no time before the beginning");
        assert!(Scale::new(0.0, 10.0, true, 0.0, 1.0).at(5.0) == 0.5, "an axis that begins at 0 is linear");
    }

    #[test]
    fn numbers_are_short_and_grouped() {
        let cases = [
            (0.0, "0"),
            (0.25, "0.25"),
            (1500.0, "1,500"),
            (12.0, "12"),
            (0.1 + 0.2, "0.3"),
            (-1234567.0, "-1,234,567"),
        ];
        for (value, text) in cases {
            assert_eq!(short(value), text);
        }
        assert_eq!(short(3e9), "3.0e9");
    }
}
