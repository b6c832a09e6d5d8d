//! An upgrade: a newer gateway replaces the running one. No connection is refused and no stream is
//! cut.
//!
//! ```text
//!   new                                          old
//!   checks its configuration
//!   connects to upgrade.sock in fleet.state ---> checks user and version
//!                                                ends the deciders (engines, tuner,
//!                                                experiments), saves, unlocks the journal
//!            <--- descriptors of the sockets ---
//!   starts: adopts engines, probes backends
//!            ---- ready -----------------------> lowers its shares of all backends to its use
//!            <--- claims -----------------------
//!            ---- conceded --------------------> accepts no more; its requests go on to their end
//!            <--- claims -----------------------
//!   accepts connections
//!            <--- conceded, claims, ... ------->  ends when its connections have
//! ```
//!
//! Until the old gateway receives `conceded`, every failure of the new one makes the old one go on
//! as before: it sends `withdrawn`, locks the journal and adopts its engines again. If the
//! connection ends without `withdrawn`, the old process has ended, and the new one serves alone. So
//! exactly one of them accepts connections.
//!
//! From then on, the old gateway's use counts as foreign use in the new one
//! (`sluice_gateway::pool`), so the limits hold across both. More upgrades may follow while
//! gateways drain. Each gateway claims for itself and for the gateways before it. `conceded` also
//! says which backends may get work.
//!
//! Bounds: one upgrade at a time; eight gateways that drain; messages of 4 MiB; the times in
//! `hand_over.rs` and `predecessor.rs`.

mod error;
pub(crate) mod wire;
mod door;
mod predecessor;

use std::path::PathBuf;

use sluice_config::{ClusterLeader, Config};

pub use door::{Door, DoorError};
pub use error::UpgradeError;
pub(crate) use predecessor::Predecessor;
pub use predecessor::{Opened, take_over};
pub(crate) use wire::Port;

/// The folder of `upgrade.sock`: `fleet.state`, or, if several gateways share it, a subfolder named
/// by the client port.
pub fn folder(config: &Config) -> PathBuf {
    let state = &config.fleet.state;
    match &config.cluster {
        Some(cluster) if cluster.leader != ClusterLeader::None => {
            state.join(format!("gateway-{}", config.server.listen.port()))
        }
        _ => state.clone(),
    }
}
