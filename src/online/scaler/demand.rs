//! The work per second that a pool is asked for, minute by minute, with a forecast.
//!
//! ```text
//! forecast(h) = level + h * slope              slope of the last 20 minutes, as far as certain; or
//!             = then(t + h) * level / then(t)  while that errs about as little
//! upper(h)    = forecast + z * sqrt(forecast)  z: 95 % quantile of the errors of 12 hours
//! ```
//!
//! then(t) is the smoothed demand a day before t. The ratio level / then(t) is limited to 1/2 to 2.
//! The error of a sum of independent requests grows with the root of the sum, so errors are divided
//! by the root of the forecast, and one `z` serves night and peak.
//!
//! Bounds: [`KEPT`] minutes. A minute in which the gateway was suspended is left out.

use std::collections::VecDeque;

/// Minutes of a day.
pub const DAY: usize = 1_440;
const KEPT: usize = DAY + 60;
/// Weight of the last minute in the level.
const LEVEL: f64 = 0.25;
/// Bound of the work per second.
const MOST: f64 = 1e12;
const SLOPE: usize = 20;
/// The demand a day before is averaged over this many minutes to each side.
const SMOOTH: usize = 3;
/// Minutes of the day before whose mean is compared with the level; it lags as much.
const LAG: usize = 8;
const ERRORS: usize = 720;
/// Errors that a quantile needs.
const ERRORS_MIN: usize = 30;
const QUANTILE: f64 = 0.95;
/// Factor by which the weight of an older error of a forecast falls each minute.
const FORGET: f64 = 0.98;
/// The largest ratio of the present demand to the demand a day ago; its inverse is the least.
const RATIO: f64 = 2.0;
/// The day before is used up to this multiple of the slope's error, because only the day before
/// shows when a rush begins.
const AS_CLOSE: f64 = 1.2;

/// The demand of a pool.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Demand {
    /// Work per second, the latest last; NaN: unknown.
    minutes: VecDeque<f64>,
    level: Option<f64>,
    /// Forecasts of minutes to come, by slope and by day before, the next minute first.
    pending: VecDeque<[Option<f64>; 2]>,
    /// Mean absolute errors, by slope and by day before.
    errors: [f64; 2],
    /// Demand minus the used forecast, divided by the root of the forecast.
    above: VecDeque<f64>,
    /// The quantile of `above`, once known.
    z: Option<f64>,
}

impl Demand {
    /// Sets the demand of the day before, minute by minute.
    pub fn set_day_before(&mut self, minutes: &[f64]) {
        self.minutes = minutes[minutes.len().saturating_sub(KEPT)..].iter().copied().collect();
    }

    /// Adds a minute, and a forecast for `ahead` minutes later.
    pub fn push(&mut self, demand: f64, ahead: usize) {
        let demand = if demand.is_finite() { demand.clamp(0.0, MOST) } else { f64::NAN };
        self.minutes.push_back(demand);
        if self.minutes.len() > KEPT {
            self.minutes.pop_front();
        }
        while self.pending.len() > ahead.max(1) {
            self.pending.pop_front();
        }
        if demand.is_nan() {
            self.pending.pop_front();
            return;
        }
        if self.pending.len() >= ahead.max(1)
            && let Some(due) = self.pending.pop_front()
        {
            self.judge(demand, due);
        }
        self.level = Some(self.level.map_or(demand, |level| level + LEVEL * (demand - level)));
        let next = [Some(self.by_slope(ahead)), self.by_day_before(ahead)];
        self.pending.push_back(next);
    }

    /// Adds unseen minutes.
    pub fn skip(&mut self, minutes: usize) {
        (0..minutes.min(KEPT)).for_each(|_| self.minutes.push_back(f64::NAN));
        self.minutes.drain(..self.minutes.len().saturating_sub(KEPT));
        self.pending.clear();
        if minutes > SLOPE {
            self.level = None;
        }
    }

    fn judge(&mut self, demand: f64, due: [Option<f64>; 2]) {
        let used = self.uses_day_before();
        for (mean, forecast) in self.errors.iter_mut().zip(due) {
            if let Some(forecast) = forecast {
                *mean = *mean * FORGET + (1.0 - FORGET) * (demand - forecast).abs();
            }
        }
        let Some(forecast) = due[usize::from(used)].or(due[0]) else { return };
        if forecast > 0.0 {
            self.above.push_back((demand - forecast) / forecast.sqrt());
            if self.above.len() > ERRORS {
                self.above.pop_front();
            }
            let mut above: Vec<f64> = self.above.iter().copied().collect();
            above.sort_by(f64::total_cmp);
            let at = (above.len() as f64 * QUANTILE) as usize;
            self.z = above.get(at).copied().filter(|_| above.len() >= ERRORS_MIN);
        }
    }

    fn uses_day_before(&self) -> bool {
        self.errors[1] <= AS_CLOSE * self.errors[0]
    }

    /// The forecast demand in `ahead` minutes.
    pub fn forecast(&self, ahead: usize) -> f64 {
        let by_day = self.by_day_before(ahead).filter(|_| self.uses_day_before());
        by_day.unwrap_or_else(|| self.by_slope(ahead))
    }

    /// The demand in `ahead` minutes that one minute in twenty exceeds.
    pub fn upper(&self, ahead: usize) -> f64 {
        let forecast = self.forecast(ahead);
        // Without `z`, a third is added: one standard deviation of 30 requests of uneven lengths.
        let margin = self.z.map_or(forecast / 3.0, |z| z * forecast.sqrt());
        (forecast + margin).max(0.0)
    }

    fn latest(&self, count: usize) -> impl Iterator<Item = f64> {
        self.minutes.iter().rev().take(count).copied().filter(|minute| !minute.is_nan())
    }

    fn by_slope(&self, ahead: usize) -> f64 {
        let level = self.level.unwrap_or(0.0);
        let points: Vec<f64> = self.latest(SLOPE).collect();
        let count = points.len() as f64;
        if points.len() < SLOPE / 2 {
            return level;
        }
        let mid = (count - 1.0) / 2.0;
        let mean = points.iter().sum::<f64>() / count;
        // The points are in reverse order of time.
        let at = |index: usize| mid - index as f64;
        let spread: f64 = (0..points.len()).map(|index| at(index).powi(2)).sum();
        let slope = points.iter().enumerate().map(|(index, y)| at(index) * (y - mean)).sum::<f64>() / spread;
        let residual: f64 = points.iter().enumerate().map(|(index, y)| (y - mean - slope * at(index)).powi(2)).sum();
        let error = (residual / (count - 2.0) / spread).sqrt();
        // A slope counts as far as it exceeds chance. At twice the standard error, three quarters
        // of it count.
        let certain = if slope == 0.0 { 0.0 } else { (1.0 - (error / slope).powi(2)).max(0.0) };
        (level + slope * certain * ahead as f64).max(0.0)
    }

    /// Mean demand a day before `ahead` minutes from now, over `before` minutes before that minute
    /// and `after` minutes after it.
    fn then(&self, ahead: usize, before: usize, after: usize) -> Option<f64> {
        let at = (self.minutes.len() + ahead).checked_sub(DAY + 1)?;
        let around = self.minutes.range(at.saturating_sub(before)..(at + after + 1).min(self.minutes.len()));
        let known: Vec<f64> = around.copied().filter(|minute| !minute.is_nan()).collect();
        (2 * known.len() > before + after).then(|| known.iter().sum::<f64>() / known.len() as f64)
    }

    /// Smoothed demand a day before `ahead` minutes from now, if seen.
    pub fn day_before(&self, ahead: usize) -> Option<f64> {
        self.then(ahead, SMOOTH, SMOOTH)
    }

    fn by_day_before(&self, ahead: usize) -> Option<f64> {
        let (now, later) = (self.then(0, LAG, 0)?, self.day_before(ahead)?);
        let level = self.level?;
        let busier = if now > 0.0 { (level / now).clamp(1.0 / RATIO, RATIO) } else { 1.0 };
        Some(later * busier)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use sluice_core::base::Rng;

    fn day(minute: usize) -> f64 {
        1_000.0 * (1.0 + 0.8 * (minute as f64 / DAY as f64 * std::f64::consts::TAU).sin())
    }

    fn noisy(value: f64, rng: &mut Rng) -> f64 {
        value + (rng.unit() - 0.5) * 20.0 * value.sqrt()
    }

    fn two_days() -> (Demand, Rng) {
        let (mut demand, mut rng) = (Demand::default(), Rng::new(1));
        (0..2 * DAY).for_each(|minute| demand.push(noisy(day(minute), &mut rng), 10));
        (demand, rng)
    }

    #[test]
    fn a_ramp_is_forecast_by_its_slope_and_noise_is_not() {
        let mut ramp = Demand::default();
        (0..40).for_each(|minute| ramp.push(100.0 + 10.0 * minute as f64, 5));
        let forecast = ramp.forecast(5);
        assert!((500.0..545.0).contains(&forecast), "{forecast}");
        let (mut flat, mut rng) = (Demand::default(), Rng::new(2));
        let mut worst: f64 = 0.0;
        for minute in 0..1_000 {
            flat.push(noisy(1_000.0, &mut rng), 5);
            worst = if minute > 20 { worst.max((flat.forecast(5) - 1_000.0).abs()) } else { 0.0 };
        }
        assert!(worst < 450.0, "{worst}");
    }

    #[test]
    fn the_upper_bound_is_exceeded_in_one_minute_of_twenty() {
        let (mut demand, mut rng) = two_days();
        let (mut bounds, mut exceeded) = (VecDeque::new(), 0);
        for minute in 0..DAY {
            let now = noisy(day(minute), &mut rng);
            if bounds.len() == 10 && bounds.pop_front().is_some_and(|bound| now > bound) {
                exceeded += 1;
            }
            demand.push(now, 10);
            bounds.push_back(demand.upper(10));
        }
        assert!((30..130).contains(&exceeded), "{exceeded} of {DAY}");
    }

    #[test]
    fn the_day_before_is_used_where_it_is_closer() {
        let mut demand = Demand::default();
        let step = |minute: usize| if minute % DAY < 600 { 100.0 } else { 400.0 };
        (0..DAY + 590).for_each(|minute| demand.push(step(minute), 30));
        let (now, later) = (demand.forecast(1), demand.forecast(30));
        assert!(now < 250.0 && later > 350.0, "{now} {later}");
        (0..60).for_each(|_| demand.push(100.0, 30));
        assert!(!demand.uses_day_before() && demand.forecast(30) < 150.0, "today is another day");
        let mut other = Demand::default();
        other.set_day_before(&(0..DAY).map(|minute| 1.5 * step(minute)).collect::<Vec<_>>());
        (0..580).for_each(|minute| other.push(step(minute), 5));
        assert!((380.0..420.0).contains(&other.forecast(40)), "another level, the same day: {}", other.forecast(40));
    }

    #[test]
    fn minutes_that_were_not_seen_are_left_out() {
        let (mut demand, _) = two_days();
        let before = demand.forecast(5);
        demand.push(f64::NAN, 5);
        demand.push(f64::INFINITY, 5);
        assert!(demand.forecast(5).is_finite() && (demand.forecast(5) - before).abs() < 200.0);
        demand.skip(usize::MAX);
        assert_eq!((demand.minutes.len(), demand.forecast(5), demand.upper(5)), (KEPT, 0.0, 0.0));
        demand.push(50.0, 5);
        assert_eq!(demand.forecast(5), 50.0);
    }
}
