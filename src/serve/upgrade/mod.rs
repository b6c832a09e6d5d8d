//! An upgrade: a newer gateway takes the place of the running one, and no connection is refused and no stream cut.
//!
//! ```text
//!   new                                          old
//!   checks its configuration
//!   connects to upgrade.sock in fleet.state ---> checks user and version
//!                                                ends what decides (engines, tuner, experiments), saves, unlocks the journal
//!            <--- descriptors of the sockets ---
//!   starts: adopts engines, probes backends
//!            ---- ready ------------------------> lowers its shares of all backends to what it uses
//!            <--- claims ------------------------
//!            ---- conceded ---------------------> accepts no more; its requests go on to their end
//!            <--- claims ------------------------
//!   accepts connections
//!            <--- conceded, claims, ... -------->  ends when its connections have
//! ```
//!
//! Until `conceded` arrives, every failure of the new gateway makes the old one go on as before: it says `withdrawn`, locks the
//! journal and adopts its engines again. A connection that ends without that word means that the old process has ended: then the
//! new one serves alone. So never both accept connections, and never none. `conceded` also says which backends may get work, since
//! their engines are the new one's. After it, what the old one uses counts as foreign use in the new one
//! ([`foreign`](crate::pool::foreign)), so that the limits hold across both. A gateway that drains may be followed by more upgrades: each one
//! claims for itself and for those before it.
//!
//! Bounds: one upgrade at a time; eight gateways that drain; messages of 4 MiB; the times in
//! `successor.rs` and `predecessor.rs`.

mod error;
mod wire;
mod door;
mod predecessor;
mod successor;

use std::path::PathBuf;

use crate::config::{ClusterLeader, Config};

pub use door::{Door, DoorError};
pub use error::UpgradeError;
pub(super) use predecessor::Predecessor;
pub use predecessor::{Opened, take_over};
pub(super) use wire::Port;

/// Where `upgrade.sock` is: in `fleet.state`, and where several gateways share that, in a folder of this one, by its port.
pub fn folder(config: &Config) -> PathBuf {
    let state = &config.fleet.state;
    match &config.cluster {
        Some(cluster) if cluster.leader != ClusterLeader::None => {
            state.join(format!("gateway-{}", config.server.listen.port()))
        }
        _ => state.clone(),
    }
}
