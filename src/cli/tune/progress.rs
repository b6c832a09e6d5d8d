//! The progress of a tuning on stderr: a line for each ended trial, with the best so far and the
//! time left.
//!
//! The report has the whole reason of an engine that does not start. The time left is the mean time
//! of the trials so far times the number of trials that the budget or a grid leaves. In fact less
//! time is left if the search ends earlier or leaves settings out.

use std::time::{Duration, Instant};

use crate::cli::bench::find_rate::text;
use sluice_lab::table::number;
use sluice_tune::report::table::minutes;
use sluice_tune::setting::name;
use sluice_tune::{Budget, Effort, Method, Outcome, Plan, Progress, Trial};

/// Longest reason in a line, characters.
const REASON: usize = 100;

#[derive(Debug)]
pub(super) struct Shown {
    budget: Budget,
    /// Whether engines are real, so that trials take long enough to show their steps.
    real: bool,
    /// Most trials of the search.
    most: Option<usize>,
    /// Trials from the journal, which take no time.
    replayed: usize,
    count: usize,
    engine_seconds: f64,
    began: Instant,
}

impl Shown {
    pub(super) fn new(plan: &Plan, settings: usize, replayed: usize, real: bool) -> Self {
        let grid = matches!(plan.method, Method::Race | Method::Random | Method::AutoTune).then_some(settings);
        let most = plan.budget.trials.into_iter().chain(grid).min();
        Self { budget: plan.budget, real, most, replayed, count: 0, engine_seconds: 0.0, began: Instant::now() }
    }

    pub(super) fn show(&mut self, progress: &Progress<'_>) {
        match progress {
            Progress::Begins(setting, _) if self.real && self.count >= self.replayed => {
                eprintln!("{} ..", name(setting));
            }
            Progress::Load(report) if self.real => eprintln!("    {}", text::report(report)),
            Progress::Predicted(..) | Progress::Begins(..) | Progress::Load(_) => {}
            Progress::Ended(trial, best) => {
                self.count += 1;
                self.engine_seconds += trial.seconds + trial.start_seconds;
                eprintln!("{}", self.line(trial, *best, self.began.elapsed()));
            }
        }
    }

    fn line(&self, trial: &Trial, best: Option<&Trial>, elapsed: Duration) -> String {
        let of = self.most.map_or(String::new(), |most| format!(" of {most}"));
        let which = match trial.effort {
            Effort::Confirm => "confirmation".to_owned(),
            _ => format!("{}{of}", self.count),
        };
        let time = minutes(trial.seconds + trial.start_seconds);
        let mut line = format!("{which}: {}: {}, {time} of engine time", name(&trial.setting), what(trial));
        if let Some((value, best)) = best.and_then(|best| Some((best.value()?, best))) {
            // An earlier line, about the trial of that setting, has named the setting.
            let is_this = best.setting == trial.setting && trial.effort != Effort::Confirm;
            line += &if is_this { "; the best so far".to_owned() } else { format!("; best {}", number(value)) };
        }
        if let Some(left) = self.left(elapsed).filter(|left| trial.effort != Effort::Confirm && !left.is_zero()) {
            line += &format!("; at most about {} left", minutes(left.as_secs_f64()));
        }
        line
    }

    /// The longest time that the search may still take, without the confirmations.
    fn left(&self, elapsed: Duration) -> Option<Duration> {
        let fresh = self.count.checked_sub(self.replayed).filter(|fresh| *fresh > 0)?;
        let by_trials = self.most.map(|most| elapsed.mul_f64(most.saturating_sub(self.count) as f64 / fresh as f64));
        let speed = elapsed.as_secs_f64() / self.engine_seconds.max(1e-9);
        let unspent = |most: Duration| (most.as_secs_f64() - self.engine_seconds).max(0.0);
        let by_time = self.budget.time.filter(|_| self.replayed == 0).map(|most| {
            // Simulated time passes faster than real time.
            Duration::from_secs_f64(unspent(most) * speed.min(1.0))
        });
        by_trials.into_iter().chain(by_time).min()
    }
}

fn what(trial: &Trial) -> String {
    match &trial.outcome {
        Outcome::Measured { value, .. } => number(value.value),
        Outcome::Worse { .. } => "not better".to_owned(),
        Outcome::Starts => "starts".to_owned(),
        Outcome::Exceeds { .. } => trial.outcome.exceeds().unwrap_or_default(),
        Outcome::Lossy { measure } => format!("so many requests fail that {measure} is one of theirs"),
        Outcome::ColdCache { hit_rate, wanted } => {
            format!("its prefix caches held {:.0} % of the prompts and not {:.0} %", hit_rate * 100.0, wanted * 100.0)
        }
        Outcome::Unmet { group, .. } if trial.outcome.is_incomplete() => format!("'{group}' does not complete"),
        Outcome::Unmet { group, objective, ratio } => {
            format!("'{group}' misses {objective}: {ratio:.2} times the bound")
        }
        Outcome::Refused { reason, .. } => format!("does not start: {}", shortened(reason)),
    }
}

/// The first line of a reason, cut at a word.
fn shortened(reason: &str) -> String {
    let line = reason.lines().next().unwrap_or_default();
    if line.chars().count() <= REASON {
        return line.to_owned();
    }
    let cut: String = line.chars().take(REASON).collect();
    let whole = cut.rsplit_once(' ').map_or(cut.as_str(), |(whole, _)| whole);
    format!("{} ..", whole.trim_end_matches([',', ';', ':', '.']))
}
