//! Falls back: a request that its arm of an experiment cannot serve is served as if there were no
//! experiment.
//!
//! An arm cannot serve a request if it has no backend left to try, has no room in time, or if the
//! engine does not know the model. The request keeps arrival time and attempts, and gets one more
//! attempt for the one that the arm took.

use super::Attempts;
use crate::flow::admit::AdmitError;
use crate::flow::classify;
use crate::flow::exchange::{Downstream, Upstream};
use crate::flow::record::{RecordGuard, Recorder};
use crate::pool::Lease;
use sluice_core::openai::ShedReason;

impl<U: Upstream> Attempts<'_, U> {
    /// Waits for a lease on a backend of the request's arm; if the arm cannot serve the request, on
    /// any backend.
    pub(super) async fn lease<D: Downstream, R: Recorder>(
        &mut self,
        down: &mut D,
        record: &mut RecordGuard<'_, R>,
    ) -> Result<Lease, AdmitError> {
        match self.lease_as_placed(down, record).await {
            Err(AdmitError::Shed { reason: ShedReason::ShuttingDown, home }) => {
                Err(AdmitError::Shed { reason: ShedReason::ShuttingDown, home })
            }
            Err(error @ (AdmitError::Shed { .. } | AdmitError::Refused(_) | AdmitError::Unserved))
                if self.fall_back(record) =>
            {
                if let (AdmitError::Shed { reason, .. }, Some(assigned)) = (error, &mut record.assigned) {
                    assigned.lacked_room = reason.is_for_room();
                }
                self.lease_as_placed(down, record).await
            }
            other => other,
        }
    }

    /// Takes the request out of its arm. Returns `false` if it is in no arm, or no pool serves it
    /// without one.
    pub(super) fn fall_back<R: Recorder>(&mut self, record: &mut RecordGuard<'_, R>) -> bool {
        let table = self.backends.router.current();
        let tokens = self.prepared.placed.request.need.prompt_tokens;
        let model = record.model.as_deref().and_then(|name| table.model(name));
        let Some(placement) = model.and_then(|model| classify::place(&table, model.route, tokens)) else {
            return false;
        };
        let adapter = model.and_then(|model| model.route.adapter);
        let Some(arm) = self.prepared.arm.take() else { return false };
        let placed = &mut self.prepared.placed;
        placed.request.adapter = adapter;
        placed.request.asks.model = Some(self.prepared.own_model);
        placed.request.avoid.retain(|backend| !arm.others.contains(backend));
        placed.request.pinned = false;
        placed.move_to(table, placement);
        if let Some(body) = self.request.body_without_arm.take() {
            self.request.body = body;
        }
        record.set_home(placed.home());
        record.arm = None;
        if let Some(assigned) = &mut record.assigned {
            assigned.fell_back = true;
        }
        true
    }
}
