//! Applies the rules of `suspects.rs`, which recognise bodies that kill engines, to the attempts of
//! a request.
//!
//! Before a delivery, a body that engines died of is refused or waits for its turn. After a
//! delivery whose connection broke, the death of the engine is reported if there was one. Bound:
//! [`DEATHS_MAX`] deaths for one request.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

use super::Attempts;
use crate::flow::attempt::AttemptResult;
use crate::flow::exchange::{ClientGone, Downstream, Upstream};
use crate::flow::record::{Outcome, RecordGuard, Recorder, UpstreamFault};
use crate::flow::respond;
use crate::flow::suspects::TurnOf;
use crate::pool::Lease;
use sluice_core::openai::Refusal;

/// Engine deaths after which a request is not delivered again.
const DEATHS_MAX: u32 = 2;

impl<U: Upstream> Attempts<'_, U> {
    /// Refuses a body that engines died of. A suspect waits for its turn, and is never copied.
    pub(super) fn check_body<R: Recorder>(&mut self, record: &mut RecordGuard<'_, R>) -> Result<(), Refusal> {
        let checked = self.backends.suspects.check(self.body, Instant::now());
        let refused = |left: Duration| Refusal::SuspectedCrash { seconds: respond::whole_seconds(left) };
        record.trial = checked.map_err(refused)?;
        if record.trial.is_some() {
            self.copies.clear();
        }
        Ok(())
    }

    /// Waits for the turn of a suspect; other requests do not wait.
    pub(super) async fn wait_for_turn<D: Downstream, R: Recorder>(
        &self,
        of: TurnOf,
        down: &mut D,
        record: &RecordGuard<'_, R>,
    ) -> Result<(), ClientGone> {
        let Some(trial) = &record.trial else { return Ok(()) };
        tokio::select! {
            biased;
            () = trial.turn(of) => Ok(()),
            () = down.gone() => Err(ClientGone),
            // The wait for a lease that follows then ends at once.
            () = self.backends.abort.cancelled() => Ok(()),
        }
    }

    /// Notes for the body how an attempt ended, if the engine died or the response was complete.
    pub(super) async fn note_end<X, R: Recorder>(
        &mut self,
        result: &AttemptResult<X>,
        lease: &Lease,
        record: &mut RecordGuard<'_, R>,
    ) {
        let outcome = match result {
            AttemptResult::Finished => record.outcome,
            AttemptResult::Failed(failed) => failed.outcome,
        };
        let suspects = self.backends.suspects;
        let is_death = match outcome {
            Outcome::Completed => {
                if let Some(trial) = &record.trial {
                    trial.acquitted();
                }
                false
            }
            Outcome::UpstreamError(UpstreamFault::Hung) => !self.backends.abort.is_cancelled(),
            // The connection was lost in this attempt, or in the one before without a byte of a
            // response, and no new one could be established.
            Outcome::UpstreamError(UpstreamFault::Broken | UpstreamFault::Connect) if record.is_lost => {
                let backend = lease.backend();
                let is_certain = suspects.breaks(backend, lease.others_in_flight());
                if !is_certain && matches!(result, AttemptResult::Finished) {
                    // The client has the end of its response, and does not wait for the verdict.
                    let (suspects, body, trial) = (Arc::clone(suspects), self.body, record.trial.take());
                    tokio::spawn(async move {
                        if suspects.others_broke(backend).await {
                            suspects.died(body, trial.as_ref(), backend, Instant::now());
                        }
                    });
                    return;
                }
                is_certain || suspects.others_broke(backend).await
            }
            _ => false,
        };
        if is_death {
            self.deaths += 1;
            suspects.died(self.body, record.trial.as_ref(), lease.backend(), Instant::now());
            if record.trial.is_none() && !self.is_suspended() {
                record.trial = Some(suspects.trial(self.body));
            }
        }
    }

    /// Whether the request must not be delivered again, because [`DEATHS_MAX`] engines died of it.
    pub(super) fn is_suspended(&self) -> bool {
        self.deaths >= DEATHS_MAX
    }
}
