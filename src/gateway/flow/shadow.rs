//! Serves a copy for a shadow arm.
//!
//! `copies.rs` says how a copy differs from a request, and has the bounds. A copy ends with exactly
//! one record, as a request does, and the response is dropped. A copy that was cut, found no room
//! or was refused leaves no observation.

use std::sync::Arc;

use bytes::Bytes;

use super::copies::PendingCopy;
use super::exchange::{ClientGone, Downstream, ResponseHead, Upstream};
use super::forward::{Attempts, Backends};
use super::prepare;
use super::record::{Outcome, RecordGuard, Recorder};
use super::response_owners::ResponseOwners;
use crate::experiment::CopyOutcome;

pub(super) async fn serve<U: Upstream, R: Recorder>(
    backends: Backends<'_, U>,
    recorder: &R,
    owners: &ResponseOwners,
    copy: PendingCopy,
) {
    let PendingCopy { mut incoming, mut in_flight } = copy;
    let mut record =
        RecordGuard::new(recorder, Some(incoming.route), Arc::clone(&incoming.request_id), incoming.arrived);
    record.upstream_id = Arc::clone(&incoming.upstream_id);
    record.origin = incoming.origin;
    record.copy = Some(CopyOutcome::Cut);
    let outcome = match prepare::prepare((owners, backends.admission), &incoming, &mut record).await {
        Ok(prepared) => {
            Attempts::new(backends, &mut incoming, prepared, None).run_copy(&mut Discard, &mut record).await
        }
        Err(_) => {
            record.outcome = Outcome::Refused;
            CopyOutcome::Refused
        }
    };
    if !matches!(outcome, CopyOutcome::Completed | CopyOutcome::Failed) {
        record.assigned = None;
    }
    record.copy = Some(outcome);
    in_flight.outcome = outcome;
}

struct Discard;

impl Downstream for Discard {
    async fn head(&mut self, _: ResponseHead) -> Result<(), ClientGone> {
        Ok(())
    }

    async fn body(&mut self, _: Bytes, _: bool) -> Result<(), ClientGone> {
        Ok(())
    }

    async fn finish(&mut self) -> Result<(), ClientGone> {
        Ok(())
    }

    fn abort(&mut self) {}

    async fn gone(&mut self) {
        std::future::pending().await
    }
}
