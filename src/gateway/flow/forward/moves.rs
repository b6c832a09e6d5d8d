//! A request that moves on because an engine does not serve it, and one that no engine serves.
//!
//! Engines of one pool may serve different models, routes and lengths, and the lists of what they
//! serve may be out of date. Such an answer is no fault, and costs no attempt. Bounds: a request
//! moves on at most [`MOVES_MAX`] times.

use tokio::time::Instant;

use super::Attempts;
use crate::flow::exchange::Upstream;
use crate::flow::prepare;
use crate::flow::record::{RecordGuard, Recorder};
use crate::flow::refused_here::Refused;
use crate::pool::{Lack, Lease};
use sluice_core::openai::Refusal;

/// How often a request goes on to another engine because one does not serve its model, its route or its length.
const MOVES_MAX: u32 = 8;

impl<U: Upstream> Attempts<'_, U> {
    /// Notes what the engine of an attempt has not. Returns whether another engine may have it.
    pub(super) fn moves_on(&mut self, refused: Refused, lease: &Lease) -> bool {
        let asks = &mut self.prepared.asks;
        let lack = match refused {
            Refused::Model => asks.model.map(Lack::Model),
            Refused::Route => asks.route.map(Lack::Route),
            Refused::Length(limit) => Some(Lack::Length(limit)),
        };
        match refused {
            Refused::Model => {}
            Refused::Route => asks.needs_route = true,
            Refused::Length(limit) => asks.longer_than = asks.longer_than.max(limit),
        }
        if let Some(lack) = lack {
            lease.refused_by_engine(lack);
        }
        lease.success(Instant::now());
        let may = self.moves < MOVES_MAX && self.prepared.only.is_none();
        self.moves += u32::from(may);
        may
    }

    /// The last engine that served the model serves it no more.
    pub(super) fn unserved<R: Recorder>(&self, record: &mut RecordGuard<'_, R>) -> Refusal {
        let table = self.backends.router.current();
        let model = record.model.clone().unwrap_or_default();
        record.refused_model = Some((*model).into());
        // The table may be older than the change.
        match prepare::unknown_model(&table, self.incoming.key.as_ref(), &model) {
            Refusal::UnknownModel { model, mut valid } => {
                valid.retain(|name| *name != model);
                Refusal::UnknownModel { model, valid }
            }
            other => other,
        }
    }
}
