//! Why an upgrade did not take place, from the view of the new gateway.
//!
//! The running gateway goes on, unchanged. The reasons of the running gateway arrive as text. Every
//! message says how to proceed.

use std::io;
use std::path::PathBuf;

/// Why an upgrade did not take place.
#[derive(Debug, thiserror::Error)]
pub enum UpgradeError {
    /// No gateway answers.
    #[error(
        "no gateway answers at {path} ({source}); if none is running, start without --upgrade; if one is running, set fleet.state to the folder of that gateway, or stop it first if its version has no upgrade",
        path = path.display()
    )]
    NoGateway {
        /// The path of the gateway's socket.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
    /// The running gateway belongs to another user.
    #[error("the running gateway belongs to user {running}, this one to user {own}; start it as user {running}")]
    OtherUser {
        /// The user id of the running gateway.
        running: u32,
        /// The user id of this process.
        own: u32,
    },
    /// The two versions have different protocols.
    #[error(
        "the running gateway (version {version}) hands over in another way than this one; stop it, then start without --upgrade"
    )]
    OtherProtocol {
        /// The version of the running gateway.
        version: String,
    },
    /// The running gateway refuses.
    #[error("the running gateway refuses: {0}")]
    Refused(String),
    /// A signal arrived before this gateway served.
    #[error("stopped by a signal before it took over; the running gateway goes on")]
    Stopped,
    /// The running gateway has withdrawn from the upgrade.
    #[error("the running gateway goes on: {0}")]
    Withdrawn(String),
    /// The connection between the two gateways broke.
    #[error("the hand-over was broken off ({0}); the running gateway goes on unless it has ended; its log says why")]
    Broken(#[from] io::Error),
}
