//! The new gateway's side of an upgrade: asks the running one for the sockets, and counts the
//! capacity that the old gateway still uses.
//!
//! While the connection is silent, the last claims stay in force: the old process lives. When it
//! ends, the kernel closes the connection, and the claims are void.

use std::collections::HashSet;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering::Relaxed};
use std::time::Duration;

use tokio::net::UnixStream;
use tokio::time::timeout;

use super::door::Door;
use super::error::UpgradeError;
use super::wire::{
    Accepted, Answer, ClaimedBackend, Claims, Conceded, ConcededBackend, Hello, PROTOCOL, Port, Ready, Said, receive,
    receive_descriptors, receive_if_open, send,
};
use crate::sockets::Sockets;
use sluice_config::Config;
use sluice_core::base::BackendId;
use sluice_gateway::pool::{Admission, BackendView, Cordon, PoolView, Share};

/// Time limit of the running gateway's answer. Before it answers, it ends the deciders and saves
/// their state.
const ANSWER_MAX: Duration = Duration::from_secs(30);
/// Time limit of the first claims, once this gateway is ready.
const CLAIMS_MAX: Duration = Duration::from_secs(10);
/// Silence of a draining gateway after which the log warns.
const SILENCE: Duration = Duration::from_secs(10);

/// Open sockets, and the gateway that this one takes over from.
#[derive(Debug, Default)]
pub struct Opened {
    pub(crate) sockets: Sockets,
    pub(crate) predecessor: Option<Predecessor>,
}

impl Opened {
    /// The process id of the gateway that this one takes over from.
    pub fn predecessor_pid(&self) -> Option<u32> {
        self.predecessor.as_ref().map(|predecessor| predecessor.pid)
    }
}

impl From<Sockets> for Opened {
    fn from(sockets: Sockets) -> Self {
        Self { sockets, predecessor: None }
    }
}

#[derive(Debug)]
pub(crate) struct Predecessor {
    stream: UnixStream,
    pid: u32,
    unsaid: Option<Conceded>,
    claimed: HashSet<BackendId>,
    gateways: Arc<AtomicU32>,
    stopped: Arc<AtomicBool>,
}

/// Asks the running gateway for the sockets that this configuration has too. Then the running
/// gateway waits until this one serves or ends. `stopped`: this gateway must end before it serves.
///
/// # Errors
/// No gateway runs, or it refuses. Nothing has changed.
pub async fn take_over(config: &Config, stopped: Arc<AtomicBool>) -> Result<(Opened, Option<Door>), UpgradeError> {
    let folder = &super::folder(config);
    let path = Door::path(folder);
    let connected = UnixStream::connect(&path).await;
    let mut stream = connected.map_err(|source| UpgradeError::NoGateway { path, source })?;
    let (running, own) = (stream.peer_cred()?.uid(), rustix::process::geteuid().as_raw());
    if running != own {
        return Err(UpgradeError::OtherUser { running, own });
    }
    let hello =
        Hello { sluice_upgrade: PROTOCOL, version: env!("CARGO_PKG_VERSION").to_owned(), pid: std::process::id() };
    let asked = async {
        send(&mut stream, &hello).await?;
        let accepted = match receive(&mut stream).await? {
            Answer::Refused { why } => return Err(UpgradeError::Refused(why)),
            Answer::Accepted(accepted) => accepted,
        };
        if accepted.sluice_upgrade != PROTOCOL {
            return Err(UpgradeError::OtherProtocol { version: accepted.version });
        }
        let descriptors = receive_descriptors(&stream).await?;
        Ok((accepted, descriptors))
    };
    let (accepted, descriptors) = timeout(ANSWER_MAX, asked).await.map_err(std::io::Error::from)??;
    tracing::info!(pid = accepted.pid, version = accepted.version, "taking over from the running gateway");
    let (pid, mut door) = (accepted.pid, None);
    let sockets = sort(accepted, descriptors, config, |socket| {
        door = Some(Door::inherited(folder, socket)?);
        Ok(())
    })?;
    let (unsaid, claimed, gateways) = Default::default();
    let predecessor = Predecessor { stream, pid, unsaid, claimed, gateways, stopped };
    Ok((Opened { sockets, predecessor: Some(predecessor) }, door))
}

/// Selects the sockets that this configuration has too. The others are closed here, and by the
/// previous gateway after the hand-over.
fn sort(
    accepted: Accepted,
    descriptors: Vec<OwnedFd>,
    config: &Config,
    mut keep_door: impl FnMut(OwnedFd) -> std::io::Result<()>,
) -> std::io::Result<Sockets> {
    if accepted.sockets.len() != descriptors.len() {
        return Err(std::io::Error::other("a socket is missing; raise the limit on open files"));
    }
    let mut sockets = Sockets::default();
    for (socket, descriptor) in accepted.sockets.into_iter().zip(descriptors) {
        let (key, wanted, place) = match socket.port {
            Port::Upgrade => {
                keep_door(descriptor)?;
                continue;
            }
            Port::Unknown => continue,
            Port::Clients => ("server.listen", config.server.listen, &mut sockets.client),
            Port::Admin => ("server.admin", config.server.admin, &mut sockets.admin),
        };
        match socket.address {
            Some(address) if address == wanted => *place = Some(descriptor.into()),
            Some(address) => tracing::info!("{key} is {wanted} now: {address} is closed once this gateway serves"),
            None => {}
        }
    }
    Ok(sockets)
}

impl Predecessor {
    /// Number of draining gateways that are connected to this one, directly or through each other.
    pub(crate) fn gateways(&self) -> Arc<AtomicU32> {
        Arc::clone(&self.gateways)
    }

    /// Completes the hand-over once this gateway can serve. The previous gateway claims its use,
    /// names the backends that an operator has taken out of rotation, and claims again once it
    /// accepts no more connections. Then this gateway may accept connections. If the previous
    /// gateway ends meanwhile, this one serves alone.
    pub(crate) async fn confirm(&mut self, admission: &Admission) -> Result<(), UpgradeError> {
        self.check_stopped()?;
        // If this fails, the next answer gives the reason.
        let _ = send(&mut self.stream, &Ready {}).await;
        let claims = timeout(CLAIMS_MAX, self.claims()).await.map_err(std::io::Error::from)??;
        let Some(claims) = claims else {
            tracing::warn!(
                pid = self.pid,
                "the gateway before this one has ended while it handed over: this one serves"
            );
            return Ok(());
        };
        self.check_stopped()?;
        for (place, claim) in places(&claims.claims, &admission.view()).into_iter().zip(&claims.claims) {
            if let Some(backend) = place.filter(|_| claim.draining) {
                admission.set_draining(backend, true);
            }
        }
        let conceded = self.concede(claims, admission);
        let _ = send(&mut self.stream, &conceded).await;
        // There is no time limit, because the previous gateway may have handed over already.
        self.unsaid = self.next_claims().await?.map(|claims| self.concede(claims, admission));
        Ok(())
    }

    fn check_stopped(&self) -> Result<(), UpgradeError> {
        if self.stopped.load(Relaxed) { Err(UpgradeError::Stopped) } else { Ok(()) }
    }

    /// Counts the claims of the previous gateway until it ends.
    pub(crate) async fn follow(mut self, admission: Arc<Admission>) {
        let ended = loop {
            if let Some(conceded) = self.unsaid.take()
                && let Err(error) = send(&mut self.stream, &conceded).await
            {
                break Some(error.to_string());
            }
            match self.next_claims().await {
                Ok(Some(claims)) => self.unsaid = Some(self.concede(claims, &admission)),
                Ok(None) => break None,
                Err(error) => break Some(error.to_string()),
            }
        };
        for backend in &self.claimed {
            admission.concede(*backend, Share::default());
        }
        self.gateways.store(0, Relaxed);
        // The kernel closes the connection after an orderly end and after a kill.
        match ended {
            None => tracing::info!(pid = self.pid, "the gateway before this one has ended"),
            Some(reason) => tracing::info!(pid = self.pid, reason, "the gateway before this one has ended"),
        }
    }

    /// The next claims; `None`: the previous gateway's process has ended.
    async fn claims(&mut self) -> Result<Option<Claims>, UpgradeError> {
        match receive_if_open(&mut self.stream).await? {
            Some(Said::Claims(claims)) => Ok(Some(claims)),
            Some(Said::Withdrawn { why }) => Err(UpgradeError::Withdrawn(why)),
            None => Ok(None),
        }
    }

    /// [`Predecessor::claims`] without a time limit.
    async fn next_claims(&mut self) -> Result<Option<Claims>, UpgradeError> {
        let pid = self.pid;
        let mut receiving = std::pin::pin!(self.claims());
        if let Ok(claims) = timeout(SILENCE, &mut receiving).await {
            return claims;
        }
        tracing::warn!(
            pid,
            "the gateway before this one is silent; what it used last still counts against the limits until its process ends"
        );
        receiving.await
    }

    fn concede(&mut self, claims: Claims, admission: &Admission) -> Conceded {
        self.gateways.store(claims.gateways, Relaxed);
        // A ledger that counts the previous gateway's use divides the limits between the two.
        let by_ledger = claims.in_ledger && admission.is_divided();
        let view = admission.view();
        let places = places(&claims.claims, &view);
        let concede = |(place, claim): (&Option<BackendId>, &ClaimedBackend)| {
            let place = (*place)?;
            let share = if by_ledger { claim.share } else { admission.concede(place, claim.share)? };
            let mut all = view.iter().flat_map(|pool| &pool.backends);
            Some(ConcededBackend { share, cordon: cordon(all.find(|backend| backend.id == place)?) })
        };
        let backends = places.iter().zip(&claims.claims).map(concede).collect();
        let now: HashSet<BackendId> = places.into_iter().flatten().filter(|_| !by_ledger).collect();
        for backend in self.claimed.difference(&now) {
            admission.concede(*backend, Share::default());
        }
        self.claimed = now;
        Conceded { backends }
    }
}

fn cordon(backend: &BackendView) -> Cordon {
    match backend.cordon {
        Cordon::Open if backend.draining => Cordon::Draining,
        // Earlier versions do not know `Idle`.
        Cordon::Idle => Cordon::Starting,
        cordon => cordon,
    }
}

/// The backend that each claim means: with the same pool, name and address, otherwise with that
/// address, because a backend that was renamed or moved to another pool is the same engine.
fn places(claims: &[ClaimedBackend], view: &[PoolView]) -> Vec<Option<BackendId>> {
    let all = || view.iter().flat_map(|pool| pool.backends.iter().map(move |backend| (&pool.name, backend)));
    let mut taken = HashSet::new();
    let mut places: Vec<Option<BackendId>> = claims
        .iter()
        .map(|claim| {
            let same = all().find(|(pool, backend)| {
                ***pool == *claim.pool
                    && *backend.name == *claim.backend
                    && *backend.address.authority == *claim.authority
            });
            same.map(|(_, backend)| backend.id).filter(|id| taken.insert(*id))
        })
        .collect();
    for (place, claim) in places.iter_mut().zip(claims).filter(|(place, _)| place.is_none()) {
        let other =
            all().find(|(_, backend)| *backend.address.authority == *claim.authority && !taken.contains(&backend.id));
        *place = other.map(|(_, backend)| backend.id).filter(|id| taken.insert(*id));
    }
    places
}
