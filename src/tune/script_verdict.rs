//! The verdict of vLLM's `auto_tune.sh` on one setting, for comparison.
//!
//! The script sends 1,000 requests at once. If their P99 of E2EL is within the bound, the script
//! stops with this run. Otherwise it sends 100 requests at the integer rate above the measured
//! throughput, then at each lower integer rate, until P99 is within the bound. The value is the
//! throughput of that run.

use crate::backend::System;
use crate::error::TuneError;
use crate::trial::{Certified, Outcome, Trial};
use sluice_bench::search::{Judge, SearchGoal, TrialKind, TrialLoad, TrialRule};
use sluice_bench::{RunResult, search};
use sluice_core::stats::{Estimate, percentile};

const AT_ONCE: usize = 1000;
const AT_A_RATE: usize = 100;
/// Seconds that the script waits between runs, after it emptied the prefix cache.
const PAUSE: f64 = 5.0;
/// Seconds that the script waits after each setting.
const STOP: f64 = 10.0;

struct Report {
    throughput: f64,
    p99: f64,
}

/// Judges a system like the script, by the E2EL bound of the first class.
pub(crate) async fn judge<S: System>(system: &mut S, goal: &SearchGoal, trial: &mut Trial) -> Result<(), TuneError> {
    let first = run(system, goal, TrialLoad::Saturated(AT_ONCE), AT_ONCE, trial).await?;
    let bound = bound(system)?;
    trial.seconds += STOP;
    if first.p99 <= bound {
        trial.outcome = measured(first.throughput, first.throughput, AT_ONCE);
        return Ok(());
    }
    let mut rate = first.throughput.floor() as u64 + 1;
    while rate > 0 {
        trial.seconds += PAUSE;
        let found = run(system, goal, TrialLoad::Rate(rate as f64), AT_A_RATE, trial).await?;
        if found.p99 <= bound {
            trial.outcome = measured(found.throughput, rate as f64, AT_A_RATE);
            return Ok(());
        }
        rate -= 1;
    }
    let reason = format!("the lowest rate of 1/s does not meet an E2EL of {bound:.3} s at P99");
    trial.notes.push(reason);
    trial.outcome = Outcome::Worse { guess: 0.0 };
    Ok(())
}

fn measured(throughput: f64, rate: f64, requests: usize) -> Outcome {
    let of = |value| Estimate { value, low: f64::NEG_INFINITY, high: f64::INFINITY };
    let certified = Some(Certified { rate, attainment: of(0.99), proofs: 1, requests });
    Outcome::Measured { value: of(throughput), runs: Vec::new(), certified }
}

async fn run<S: System>(
    system: &mut S,
    goal: &SearchGoal,
    load: TrialLoad,
    requests: usize,
    trial: &mut Trial,
) -> Result<Report, TuneError> {
    // With a target of 0, no run ends early.
    let mut judge = Judge::new(TrialRule { kind: TrialKind::Sample, target: 0.0, warmup: 0, length: requests });
    // The script's client always draws the same requests.
    let stats = system.run(&search::Trial { load, requests, warmup: 0, seed: goal.seed }, &mut judge).await?;
    trial.loads += 1;
    trial.requests += requests as u64;
    trial.seconds += stats.seconds;
    let result = system.last().ok_or_else(|| TuneError::Goal("the system kept no requests".to_owned()))?;
    Ok(report(result))
}

fn report(result: &RunResult) -> Report {
    let completed = result.requests.iter().filter(|record| record.is_completed());
    let mut latencies: Vec<f64> = completed.map(|record| record.latency).collect();
    latencies.sort_by(f64::total_cmp);
    let p99 = if latencies.is_empty() { f64::INFINITY } else { percentile(&latencies, 0.99) };
    Report { throughput: latencies.len() as f64 / result.duration.max(1e-9), p99 }
}

fn bound<S: System>(system: &S) -> Result<f64, TuneError> {
    let bound = system.last().and_then(|result| result.config.slo_of(0).e2el);
    let text = "the method auto-tune needs an objective on E2EL: give the class e2el";
    Ok(bound.ok_or_else(|| TuneError::Goal(text.to_owned()))? / 1e3)
}
