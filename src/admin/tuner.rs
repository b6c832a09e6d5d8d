//! The routes of the online tuner. Every response is a [`TunerReport`].
//!
//! | method and path | effect |
//! |---|---|
//! | GET `/admin/tuner` | none |
//! | POST `/admin/tuner/freeze` | no more changes; the change under trial is undone |
//! | POST `/admin/tuner/resume` | the tuner goes on |
//! | POST `/admin/tuner/reset` | the limits of the configuration file are in force again |
//! | POST `/admin/tuner/approve/{id}` | the tuner makes the proposed change |

use http::StatusCode;

use super::unsaved::UnsavedOrder;
use sluice_online::tuner::report::TunerReport;

/// An operator's order to the tuner.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TunerOrder {
    /// Make no changes.
    Freeze,
    /// Go on.
    Resume,
    /// Put the limits of the configuration in force again.
    Reset,
    /// Make the change with this number.
    Approve(String),
}

/// Why an order is refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TunerError {
    /// The tuner does not wait for approvals.
    #[error("the tuner does not wait for approvals: tuner.mode is \"{mode}\"; \"approve\" makes it wait")]
    NotWaiting {
        /// The mode in force.
        mode: String,
    },
    /// The tuner is frozen.
    #[error("the tuner makes no changes now: it is frozen, {why}; approve again once it goes on")]
    Frozen {
        /// The reason.
        why: String,
    },
    /// The order is in force, but the gateway loses it at the next restart.
    #[error(transparent)]
    NotSaved(#[from] UnsavedOrder),
    /// There is no such proposal.
    #[error("there is no proposal {id} (now there are: {}); see `sluice tuner show`", if known.is_empty() { "none" } else { known })]
    UnknownProposal {
        /// The requested proposal.
        id: String,
        /// The proposals that exist.
        known: String,
    },
}

impl TunerError {
    pub(super) fn status(&self) -> (StatusCode, &'static str) {
        match self {
            Self::NotWaiting { .. } | Self::Frozen { .. } => (StatusCode::CONFLICT, "not_waiting"),
            Self::NotSaved(_) => (StatusCode::INTERNAL_SERVER_ERROR, "not_saved"),
            Self::UnknownProposal { .. } => (StatusCode::NOT_FOUND, "no_such_proposal"),
        }
    }
}

/// The online tuner, for the admin API. Calls may block.
pub trait TunerControl {
    /// The state of the tuner, and reasons.
    fn tuner(&self) -> TunerReport;

    /// Carries out an order.
    fn order_tuner(&self, order: TunerOrder) -> Result<TunerReport, TunerError>;
}
