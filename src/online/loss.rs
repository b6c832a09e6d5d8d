//! What one finished request says about the limits: whether it met its objectives, by how far it missed them, and where it lost
//! its time.
//!
//! The loss of a request is 0 if it met all objectives. Otherwise it is 1 + log2(r) / 5, where r is the largest ratio of a
//! measured time to its bound, and at most 3. That of a request that was shed is 4. So the mean loss is at least the share of
//! requests that missed, and it still falls when all of them miss by less or fewer are shed.

use std::time::Duration;

use sluice_core::meter::StreamStats;
use sluice_core::meter::slo::Objectives;
use sluice_core::openai::ShedReason;
use sluice_gateway::flow::Record;
use sluice_gateway::flow::record::{Outcome, Stage};

/// The loss of a request that was shed.
pub const LOSS_OF_SHED: f64 = 4.0;
/// A time of two to the power of this times its bound loses as much again as one that is just late.
const OCTAVES: f64 = 5.0;
/// The largest loss of a request that was served. It is reached at a thousand times the bound: where a limit is far too low, a
/// first step makes waits shorter and not yet short, and that must count.
const LOSS_OF_LATE: f64 = 3.0;

/// Where a request lost its time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cause {
    /// In the gateway's queue: a limit held it up.
    Queue,
    /// On the engine before its first token: others were there before it.
    Engine,
    /// Between its tokens: others slowed the engine's steps.
    Decode,
}

/// What is known of the speed of an undisturbed request.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Undisturbed {
    /// Prompt tokens per second of a prefill.
    pub prefill_rate: f64,
    /// Seconds per output token.
    pub tpot: f64,
}

/// What a request says.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Judged {
    /// See the header.
    pub loss: f64,
    /// Where it lost its time, if it missed an objective.
    pub cause: Option<Cause>,
    /// Seconds for which it was on a backend; `None`: never, or not to its end.
    pub service: Option<f64>,
}

/// TTFT, TPOT and E2EL of a request over their bounds; 0 where there is none.
fn ratios(stats: &StreamStats, prompt_tokens: u64, objectives: &Objectives) -> [f64; 3] {
    let bounds = objectives.of_prompt(prompt_tokens);
    let ratio = |bound: Option<Duration>, measured: Option<Duration>| match (bound, measured) {
        (Some(bound), Some(measured)) => measured.as_secs_f64() / bound.as_secs_f64().max(1e-9),
        _ => 0.0,
    };
    [ratio(bounds.ttft, stats.ttft), ratio(bounds.tpot, stats.tpot), ratio(bounds.e2el, stats.e2el)]
}

/// The TPOT of a request over its bound; `None`: it has no bound, or was not measured.
pub(crate) fn tpot_ratio(record: &Record, objectives: &Objectives) -> Option<f64> {
    let [_, tpot, _] = ratios(record.stats.as_ref()?, record.prompt_tokens(), objectives);
    (tpot > 0.0).then_some(tpot)
}

/// The largest of them: above 1, the request missed an objective.
pub fn worst_ratio(stats: &StreamStats, prompt_tokens: u64, objectives: &Objectives) -> f64 {
    ratios(stats, prompt_tokens, objectives).into_iter().fold(0.0, f64::max)
}

/// Judges a request. `None`: it says nothing about limits, because it generates nothing, its client left, it was refused, or a
/// backend failed.
pub fn judge(record: &Record, objectives: &Objectives, undisturbed: Undisturbed) -> Option<Judged> {
    if !record.generates() || objectives.is_empty() {
        return None;
    }
    match record.outcome {
        Outcome::Completed => {}
        Outcome::Shed(ShedReason::QueueFull | ShedReason::QueueTimeout) => {
            return Some(Judged { loss: LOSS_OF_SHED, cause: Some(Cause::Queue), service: None });
        }
        Outcome::Timeout(Stage::FirstByte) => {
            return Some(Judged { loss: LOSS_OF_SHED, cause: Some(Cause::Engine), service: None });
        }
        _ => return None,
    }
    let stats = record.stats.as_ref()?;
    let prompt_tokens = record.prompt_tokens();
    let [ttft, tpot, e2el] = ratios(stats, prompt_tokens, objectives);
    let worst = ttft.max(tpot).max(e2el);
    let queued = record.queue_wait.as_secs_f64();
    let service = Some((record.total.as_secs_f64() - queued).max(0.0));
    if worst <= 1.0 {
        return Some(Judged { loss: 0.0, cause: None, service });
    }
    let own = prompt_tokens as f64 / undisturbed.prefill_rate.max(1.0);
    let on_engine = record.backend_ttft.map_or(0.0, |ttft| (ttft.as_secs_f64() - own).max(0.0));
    let decoded = stats.e2el.zip(stats.ttft).map_or(0.0, |(e2el, ttft)| e2el.saturating_sub(ttft).as_secs_f64());
    let slowed = (decoded - stats.generated() as f64 * undisturbed.tpot).max(0.0);
    let cause = match (ttft > 1.0, e2el > 1.0) {
        (false, false) => Cause::Decode,
        (_, true) if slowed > queued.max(on_engine) => Cause::Decode,
        _ if queued > on_engine => Cause::Queue,
        _ => Cause::Engine,
    };
    Some(Judged { loss: (1.0 + worst.log2() / OCTAVES).min(LOSS_OF_LATE), cause: Some(cause), service })
}
