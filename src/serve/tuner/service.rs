//! The tuner service: the tuner with its files, and the orders of operators.
//!
//! An order changes the tuner under its lock. Changed limits come into force after that. If the
//! order cannot be saved, the answer says that the next start does not know of it. Bounds: see
//! [`TunerState`].

use std::sync::Arc;

use super::TunerState;
use crate::core::Core;
use sluice_admin::unsaved::UnsavedOrder;
use sluice_admin::{TunerError, TunerOrder};
use sluice_config::TunerMode;
use sluice_online::event::Event;
use sluice_online::tuner::report::TunerReport;

#[derive(Debug)]
pub(crate) struct TunerService {
    pub(super) core: Arc<Core>,
    pub(crate) state: TunerState,
}

impl TunerService {
    pub(crate) fn new(core: Arc<Core>, state: TunerState) -> Self {
        Self { core, state }
    }

    /// Puts changed limits and the tuner's experiment in force, and keeps the events.
    pub(super) fn follow(&self, changed: bool, events: Vec<Event>) {
        if changed {
            self.core.put_limits(|config| self.state.tuner.lock().put(config));
        }
        self.state.keep(events);
    }

    pub(crate) fn order(&self, order: TunerOrder) -> Result<TunerReport, TunerError> {
        let TunerState { tuner, observer, started, .. } = &self.state;
        let now = started.elapsed();
        let mut tuner = tuner.lock();
        let changed = match order {
            TunerOrder::Freeze => tuner.freeze(Some("by an operator".to_owned()), observer, now),
            TunerOrder::Resume => tuner.freeze(None, observer, now),
            TunerOrder::Reset => {
                tuner.reset(&self.core.config.load(), observer, now);
                true
            }
            TunerOrder::Approve(id) => {
                if tuner.mode() != TunerMode::Approve {
                    return Err(TunerError::NotWaiting { mode: tuner.mode().word().to_owned() });
                }
                if let Some(why) = tuner.report().frozen {
                    return Err(TunerError::Frozen { why });
                }
                if !tuner.approve(&id) {
                    let report = tuner.report();
                    let known: Vec<_> = report.proposals().map(|proposal| proposal.id.as_str()).collect();
                    return Err(TunerError::UnknownProposal { id, known: known.join(", ") });
                }
                false
            }
        };
        let events = tuner.take_events();
        drop(tuner);
        self.follow(changed, events);
        self.state.save().map_err(|error| UnsavedOrder {
            folder: self.core.config.load().fleet.state.clone(),
            reason: error.to_string(),
        })?;
        Ok(self.state.report())
    }
}
