//! Why an upgrade does not take place, from the side of the new gateway.
//!
//! Nothing has changed then: the running gateway goes on. Every message says what to do.

use std::io;
use std::path::PathBuf;

/// See the header of this file.
#[derive(Debug, thiserror::Error)]
pub enum UpgradeError {
    /// There is none to take over from.
    #[error(
        "no running gateway answers at {path} ({source}); start without --upgrade if none runs; else name its fleet.state, or stop it first if its version has no upgrade",
        path = path.display()
    )]
    NoGateway {
        /// Its socket.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
    /// The running gateway belongs to another user.
    #[error("the running gateway belongs to user {running}, this one to user {own}; start it as user {running}")]
    OtherUser {
        /// Its user id.
        running: u32,
        /// That of this process.
        own: u32,
    },
    /// The two versions do not understand each other.
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
    /// A signal came before it served.
    #[error("stopped by a signal before it took over; the running gateway goes on")]
    Stopped,
    /// The running gateway has given it up.
    #[error("the running gateway goes on: {0}")]
    Withdrawn(String),
    /// The connection between the two broke.
    #[error("the hand-over was broken off ({0}); the running gateway goes on unless it has ended; its log says why")]
    Broken(#[from] io::Error),
}
