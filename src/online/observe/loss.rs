//! Judges a finished request: whether it met its objectives, by how far it missed, and where it
//! lost time.
//!
//! The loss is 0 if all objectives were met, otherwise 1 + log2(r) / 5, at most 3, where r is the
//! largest ratio of a time to its bound. A request that was shed, or got no first byte in time,
//! loses 4. So the mean loss is at least the share of misses, and where all miss, it still falls if
//! they miss by less or fewer are shed.

use std::time::Duration;

use sluice_core::meter::StreamStats;
use sluice_core::meter::slo::Objectives;
use sluice_core::openai::ShedReason;
use sluice_gateway::flow::Record;
use sluice_gateway::flow::record::{Outcome, Stage};

/// Loss of a request that was shed or got no first byte.
pub const LOSS_OF_SHED: f64 = 4.0;
/// Doublings of a time over the bound that lose 1 more.
const OCTAVES: f64 = 5.0;
/// The largest loss of a served request, at a thousand times the bound. From a limit that is far
/// too low, a first step only shortens long waits, and that must count.
const LOSS_OF_LATE: f64 = 3.0;

/// Where a request lost time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cause {
    /// In the gateway's queue, by a limit.
    Queue,
    /// On the engine before the first token, behind earlier requests.
    Engine,
    /// Between tokens, by other requests in the steps.
    Decode,
}

/// The speed of an undisturbed request.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Undisturbed {
    /// Prompt tokens per second of a prefill.
    pub prefill_rate: f64,
    /// Seconds per output token.
    pub tpot: f64,
}

/// The judgement of a request.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Judged {
    /// The loss, 0 to 4; see [`crate::observe::loss`].
    pub loss: f64,
    /// Where the time was lost, if an objective was missed.
    pub cause: Option<Cause>,
    /// Seconds on a backend, if served to the end.
    pub service: Option<f64>,
}

/// TTFT, TPOT and E2EL over their bounds; 0 without a bound.
fn ratios(stats: &StreamStats, prompt_tokens: u64, objectives: &Objectives) -> [f64; 3] {
    let bounds = objectives.of_prompt(prompt_tokens);
    let ratio = |bound: Option<Duration>, measured: Option<Duration>| match (bound, measured) {
        (Some(bound), Some(measured)) => measured.as_secs_f64() / bound.as_secs_f64().max(1e-9),
        _ => 0.0,
    };
    [ratio(bounds.ttft, stats.ttft), ratio(bounds.tpot, stats.tpot), ratio(bounds.e2el, stats.e2el)]
}

/// TPOT over its bound; `None`: no bound, or not measured.
pub(crate) fn tpot_ratio(record: &Record, objectives: &Objectives) -> Option<f64> {
    let [_, tpot, _] = ratios(record.stats.as_ref()?, record.prompt_tokens(), objectives);
    (tpot > 0.0).then_some(tpot)
}

/// The largest ratio of a time to its bound; above 1, an objective was missed.
pub fn worst_ratio(stats: &StreamStats, prompt_tokens: u64, objectives: &Objectives) -> f64 {
    ratios(stats, prompt_tokens, objectives).into_iter().fold(0.0, f64::max)
}

/// Judges a request. `None`: the request says nothing about limits, because it has no objectives or
/// generates nothing, the client left, it was refused, or a backend failed.
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
