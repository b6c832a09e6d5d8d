//! The single attempt of a copy for a shadow arm (rules: `copies.rs`).
//!
//! A copy must take nothing from requests of clients: it does not wait for room, and no other
//! backend takes it over. Bounds: one attempt, repeated only after a stale connection, with the
//! deadlines of any other attempt.

use smallvec::SmallVec;

use super::{Attempts, note_lease};
use crate::experiment::CopyOutcome;
use crate::flow::attempt::AttemptResult;
use crate::flow::exchange::{Downstream, Upstream};
use crate::flow::record::{Outcome, RecordGuard, Recorder};
use sluice_core::openai::ShedReason;

impl<U: Upstream> Attempts<'_, U> {
    /// Sends a copy for a shadow arm, once, if there is room for it now.
    pub(in crate::flow) async fn run_copy<D: Downstream, R: Recorder>(
        &mut self,
        down: &mut D,
        record: &mut RecordGuard<'_, R>,
    ) -> CopyOutcome {
        let request = &mut self.prepared.placed.request;
        (request.pinned, request.spill) = (true, SmallVec::new());
        let lease = self.backends.admission.enter_copy(request);
        let Some(mut lease) = lease else {
            record.outcome = Outcome::Shed(ShedReason::NoBackend);
            return CopyOutcome::NoRoom;
        };
        note_lease(&mut lease, record);
        if let AttemptResult::Failed(failed) = self.attempt(&mut lease, down, record).await {
            record.outcome = failed.outcome;
        }
        match record.outcome {
            Outcome::Completed => CopyOutcome::Completed,
            _ if lease.abort_token().is_cancelled() => CopyOutcome::Cut,
            Outcome::Refused => CopyOutcome::Refused,
            _ => CopyOutcome::Failed,
        }
    }
}
