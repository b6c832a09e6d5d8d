//! Why a gateway does not start.
//!
//! An unusable configuration (exit status 78) would fail at another start, too. Other causes may
//! not.

use crate::upgrade::UpgradeError;
use sluice_fleet::{JournalError, PortsError};
use sluice_gateway::proxy::ListenError;
use sluice_gateway::telemetry::{AccessLogError, TelemetryError};

/// Why a gateway did not start.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// A socket could not be opened.
    #[error(transparent)]
    Listen(#[from] ListenError),
    /// A tokenizer could not be loaded.
    #[error("model \"{model}\": {source}")]
    Tokenizer {
        /// The model.
        model: String,
        /// The cause.
        source: sluice_gateway::estimate::ExactError,
    },
    /// The access log could not be opened, or traces cannot be sent.
    #[error(transparent)]
    Telemetry(#[from] TelemetryError),
    /// The journal of the engines could not be opened.
    #[error(transparent)]
    Journal(#[from] JournalError),
    /// An engine could not get a port.
    #[error(transparent)]
    Ports(#[from] PortsError),
    /// A gateway that takes over got no share in the ledger.
    #[error("this gateway got no share of the ledger ({why}); the running gateway goes on")]
    NoShare {
        /// The reason.
        why: String,
    },
    /// The running gateway has not handed over.
    #[error(transparent)]
    Upgrade(#[from] UpgradeError),
}

impl StartError {
    /// Whether the configuration names something unusable.
    pub fn is_of_configuration(&self) -> bool {
        match self {
            Self::Tokenizer { .. } | Self::Ports(_) => true,
            Self::Journal(error) => matches!(error, JournalError::Unusable { .. } | JournalError::Untrusted(_)),
            Self::Telemetry(error) => matches!(error, TelemetryError::AccessLog(AccessLogError::Open { .. })),
            Self::Listen(_) | Self::NoShare { .. } | Self::Upgrade(_) => false,
        }
    }
}
