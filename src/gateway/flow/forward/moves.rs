//! Moves a request on when an engine does not serve it, and refuses a request that no engine
//! serves.
//!
//! Engines of one pool may serve different models, routes and lengths, and the lists of these may
//! be out of date. An answer that says so is no fault and costs no attempt. It moves the request
//! only if the whole body was read and more than one engine can serve the request.
//!
//! Bound: a request moves on at most [`MOVES_MAX`] times, because while the model's name is changed
//! engine by engine, only one engine may have the name. The refusal after the last move ends the
//! request, whatever `retry.attempts` is.

use http::StatusCode;
use tokio::time::Instant;

use super::Attempts;
use crate::flow::admit::AdmitError;
use crate::flow::attempt::{ResponseStart, WaitError};
use crate::flow::exchange::{Downstream, Upstream};
use crate::flow::prepare;
use crate::flow::record::{RecordGuard, Recorder};
use crate::flow::refused_here::{self, Refused};
use crate::flow::respond;
use crate::pool::{Lack, Lease};
use sluice_core::openai::Refusal;

/// How often a request moves on because an engine does not serve the model, route or length.
const MOVES_MAX: u32 = 8;

impl<U: Upstream> Attempts<'_, U> {
    /// Reads the body of a refusal after which another engine may serve the request. Returns
    /// whether all of it was read.
    ///
    /// # Errors
    /// The client left, or the backend was found hung. Any other error recurs in the pump.
    pub(super) async fn read_refusal<D: Downstream>(
        &self,
        response: &mut ResponseStart<U::Exchange>,
        down: &mut D,
        lease: &Lease,
    ) -> Result<bool, WaitError> {
        if self.prepared.placed.request.only.is_some() || !refused_here::may_be(&response.head) {
            return Ok(false);
        }
        let limits = (refused_here::PEEK_BYTES, refused_here::PEEK_TIME);
        match response.read_ahead(limits, down, lease).await {
            Err(error @ (WaitError::ClientGone | WaitError::Hung)) => Err(error),
            read => Ok(read.unwrap_or(false)),
        }
    }

    /// Whether this status says that the engine does not know the model of the arm, or has not
    /// loaded an adapter that other engines have.
    pub(super) fn lacks_model(&self, status: StatusCode) -> bool {
        status == StatusCode::NOT_FOUND && self.prepared.arm.is_some()
    }

    /// Notes the model, route or length that the engine does not serve. Returns whether another
    /// engine may be asked.
    pub(super) fn moves_on(&mut self, refused: Refused, lease: &Lease) -> bool {
        let asks = &mut self.prepared.placed.request.asks;
        let lack = match refused {
            Refused::Model => asks.model.map(Lack::Model),
            Refused::Route => asks.route.map(Lack::Route),
            Refused::Length(limit) => Some(Lack::Length(limit)),
            Refused::Rank => Some(Lack::Rank),
        };
        match refused {
            Refused::Model | Refused::Rank => {}
            Refused::Route => asks.needs_route = true,
            Refused::Length(limit) => asks.longer_than = asks.longer_than.max(limit),
        }
        if let Some(lack) = lack {
            lease.refused_by_engine(lack, Instant::now());
        }
        if refused != Refused::Rank {
            lease.success(Instant::now());
        }
        let may = self.moves < MOVES_MAX;
        self.moves += u32::from(may);
        may
    }

    /// The refusal of a request that one engine does not serve and no other takes now, if another
    /// engine may serve it later: that engine is ejected, is starting, or has no room. The first
    /// engine's answer would look final to the client.
    pub(super) fn shed_until_later<R: Recorder>(
        &self,
        refused: Option<Refused>,
        error: AdmitError,
        record: &mut RecordGuard<'_, R>,
    ) -> Option<Refusal> {
        let AdmitError::Shed { reason, home } = error else { return None };
        // Without a limit, the gateway does not know which engines take a longer prompt.
        refused.filter(|refused| *refused != Refused::Length(None))?;
        let admission = self.backends.admission;
        if !admission.may_serve_later(&self.prepared.placed.request) {
            return None;
        }
        let room_in = admission.retry_after(home, Instant::now());
        Some(respond::shed(reason, room_in, record))
    }

    /// Refuses a request for a model that the last engine no longer serves.
    pub(super) fn unserved<R: Recorder>(&self, record: &mut RecordGuard<'_, R>) -> Refusal {
        let table = self.backends.router.current();
        let model = record.model.clone().unwrap_or_default();
        record.refused_model = Some((*model).into());
        // The table may still list the model.
        match prepare::unknown_model(&table, self.incoming.key.as_ref(), &model) {
            Refusal::UnknownModel { model, mut valid } => {
                valid.retain(|name| *name != model);
                Refusal::UnknownModel { model, valid }
            }
            other => other,
        }
    }
}
