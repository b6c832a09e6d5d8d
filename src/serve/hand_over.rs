//! The running gateway's side of an upgrade: lets a newer gateway take over, and then reports the
//! capacity that this gateway still uses.
//!
//! From the release of the deciders until the visitor has answered the first claims, every failure
//! and time limit below restores the previous state.

use std::convert::Infallible;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use tokio::net::UnixStream;
use tokio::time::{Instant, sleep, timeout};

use crate::running::Running;
use crate::upgrade::Door;
use crate::upgrade::wire::{
    Accepted, Answer, ClaimedBackend, Claims, Conceded, Hello, OpenSocket, PROTOCOL, Port, Ready, Said, receive, send,
    send_descriptors,
};
use sluice_gateway::pool::{Admission, Bound, Claim, Cordon};

/// Time limit of a visitor's first message.
const HELLO_MAX: Duration = Duration::from_secs(5);
/// Time limit of the new gateway's start, which loads tokenizers, adopts engines and probes them.
const START_MAX: Duration = Duration::from_secs(120);
/// Time limit of the new gateway's first answer to claims.
const CONCEDED_MAX: Duration = Duration::from_secs(10);
const WITHDRAWN_MAX: Duration = Duration::from_secs(1);
const LOOK: Duration = Duration::from_millis(20);
/// Time after which unchanged claims are repeated.
const REPEAT: Duration = Duration::from_secs(1);
/// Most gateways that may drain when another upgrade begins.
const GATEWAYS_MAX: u32 = 8;

#[derive(Debug, thiserror::Error)]
enum NotHandedOver {
    /// The visitor is not a gateway, or left.
    #[error(transparent)]
    Nothing(io::Error),
    #[error("{0}")]
    Refused(String),
    #[error("the new gateway (pid {pid}) has failed before it served ({error}); its log says why; this one goes on")]
    Failed { pid: u32, error: io::Error },
    #[error("a signal stops this gateway; the new one (pid {pid}) ends too")]
    Stopped { pid: u32 },
}

impl Running {
    /// Hands over to the gateway that asks. Returns the process id of that gateway once this one
    /// accepts no more connections. Then the caller must call [`Running::drain`]. `None`: this
    /// gateway goes on, because the visitor was refused or failed (the log says why), or because
    /// `stop` completed before the new gateway was ready.
    pub async fn hand_over(&mut self, door: &Door, visitor: UnixStream, stop: impl Future<Output = ()>) -> Option<u32> {
        let begun = Instant::now();
        match self.try_to_hand_over(door, visitor, stop).await {
            Ok(pid) => {
                let (in_flight, waiting) = self.app.core.admission.load();
                tracing::info!(
                    pid,
                    in_flight,
                    waiting,
                    "handed over in {:.0?}: requests go on here to their end, new connections are accepted there",
                    begun.elapsed()
                );
                Some(pid)
            }
            // The visitor may be a starting gateway that only checks whether another one listens
            // here.
            Err(NotHandedOver::Nothing(error)) => {
                tracing::debug!(%error, "a visitor of upgrade.sock has said nothing");
                None
            }
            Err(error) => {
                tracing::warn!("no upgrade: {error}");
                None
            }
        }
    }

    async fn try_to_hand_over(
        &mut self,
        door: &Door,
        mut visitor: UnixStream,
        stop: impl Future<Output = ()>,
    ) -> Result<u32, NotHandedOver> {
        let hello = timeout(HELLO_MAX, receive::<Hello>(&mut visitor)).await;
        let hello = hello.unwrap_or_else(|late| Err(late.into())).map_err(NotHandedOver::Nothing)?;
        let accepted = match self.check(&hello, &visitor) {
            Ok(()) => self.release().await.map_err(|busy| busy.to_string()),
            refused => refused,
        };
        if let Err(why) = accepted {
            let _ = send(&mut visitor, &Answer::Refused { why: why.clone() }).await;
            return Err(NotHandedOver::Refused(why));
        }
        tracing::info!(pid = hello.pid, version = hello.version, "a new gateway starts to take over");
        let pid = hello.pid;
        let started = tokio::select! {
            started = self.until_it_serves(door, &mut visitor, pid, stop) => started,
            never = refuse_others(door, pid) => match never {},
        };
        if let Err(error) = started {
            // Otherwise the other process would take the end of the connection for the end of this
            // process, and serve.
            let withdrawn = Said::Withdrawn { why: error.to_string() };
            let _ = timeout(WITHDRAWN_MAX, send(&mut visitor, &withdrawn)).await;
            drop(visitor);
            self.own_all();
            self.take_back().await;
            return Err(error);
        }
        self.leave_to(visitor).await;
        Ok(pid)
    }

    fn check(&self, hello: &Hello, visitor: &UnixStream) -> Result<(), String> {
        if hello.sluice_upgrade != PROTOCOL {
            return Err(format!(
                "version {} asks to take over in another way than version {} does; stop this gateway, then start the other one without --upgrade",
                hello.version,
                env!("CARGO_PKG_VERSION")
            ));
        }
        let own = rustix::process::geteuid().as_raw();
        match visitor.peer_cred() {
            Ok(credentials) if credentials.uid() == own => {}
            Ok(credentials) => {
                let theirs = credentials.uid();
                return Err(format!(
                    "it belongs to user {own}, the new one to user {theirs}; start that one as user {own}"
                ));
            }
            Err(error) => return Err(format!("the user of the new gateway is not known: {error}")),
        }
        if self.draining.load(Relaxed) >= GATEWAYS_MAX {
            return Err(format!(
                "{GATEWAYS_MAX} gateways before it still finish their requests; try again when one has ended, or lower server.drain_timeout"
            ));
        }
        Ok(())
    }

    async fn until_it_serves(
        &self,
        door: &Door,
        visitor: &mut UnixStream,
        pid: u32,
        stop: impl Future<Output = ()>,
    ) -> Result<(), NotHandedOver> {
        let failed = |error| NotHandedOver::Failed { pid, error };
        tokio::select! {
            ready = self.until_it_is_ready(door, visitor) => ready.map_err(failed)?,
            () = stop => return Err(NotHandedOver::Stopped { pid }),
        }
        let exchanged = async {
            let claims = self.app.core.admission.claim();
            send(visitor, &message(&claims, self.draining.load(Relaxed), &self.app.core.admission)).await?;
            apply(&self.app.core.admission, &claims, &receive(visitor).await?);
            Ok(())
        };
        timeout(CONCEDED_MAX, exchanged).await.unwrap_or_else(|late| Err(late.into())).map_err(failed)
    }

    async fn until_it_is_ready(&self, door: &Door, visitor: &mut UnixStream) -> io::Result<()> {
        let (sockets, descriptors) = self.open_sockets(door)?;
        let accepted = Accepted {
            sluice_upgrade: PROTOCOL,
            version: env!("CARGO_PKG_VERSION").to_owned(),
            pid: std::process::id(),
            sockets,
        };
        send(visitor, &Answer::Accepted(accepted)).await?;
        send_descriptors(visitor, &descriptors).await?;
        drop(descriptors);
        let Ready {} = timeout(START_MAX, receive(visitor)).await??;
        Ok(())
    }

    fn open_sockets(&self, door: &Door) -> io::Result<(Vec<OpenSocket>, Vec<OwnedFd>)> {
        let (mut sockets, mut descriptors) = (Vec::new(), Vec::new());
        for (port, address, descriptor) in &self.sockets {
            sockets.push(OpenSocket { port: *port, address: Some(*address) });
            descriptors.push(descriptor.try_clone()?);
        }
        sockets.push(OpenSocket { port: Port::Upgrade, address: None });
        descriptors.push(door.descriptor()?);
        Ok((sockets, descriptors))
    }

    fn own_all(&self) {
        own_all(&self.app.core.admission);
    }

    /// Called once the new gateway has answered the first claims: accepts no more connections, and
    /// reports until this process ends.
    async fn leave_to(&mut self, successor: UnixStream) {
        self.app.core.flow.hand_over();
        if let Some(cluster) = &self.cluster {
            cluster.leave();
        }
        tokio::join!(self.ending.hand_over(), self.admin_ending.hand_over());
        self.sockets.clear();
        let (admission, draining) = (Arc::clone(&self.app.core.admission), Arc::clone(&self.draining));
        let mut ending = self.end.subscribe();
        self.tasks.push(tokio::spawn(async move {
            tokio::select! {
                error = report(successor, &admission, &draining) => {
                    tracing::warn!(%error, "the new gateway has ended; requests here go on to their end");
                    own_all(&admission);
                    open_all(&admission);
                }
                _ = ending.wait_for(|ending| *ending) => {}
            }
        }));
    }
}

async fn refuse_others(door: &Door, pid: u32) -> Infallible {
    loop {
        refuse_second(door.visitor().await, pid).await;
    }
}

async fn refuse_second(mut other: UnixStream, pid: u32) {
    let why = format!("an upgrade is under way (pid {pid}); try again when it has ended");
    let answer = async {
        let _: Hello = receive(&mut other).await?;
        send(&mut other, &Answer::Refused { why }).await
    };
    // A visitor that does not identify itself gets no answer.
    let _ = timeout(HELLO_MAX, answer).await;
}

async fn report(
    mut successor: UnixStream,
    admission: &Admission,
    draining: &std::sync::atomic::AtomicU32,
) -> io::Error {
    // The new gateway waits for the first claims before it accepts connections.
    let (mut said, mut at, mut is_content) = (Vec::new(), Instant::now(), false);
    loop {
        let claims = admission.claim();
        if is_content && claims == said && at.elapsed() < REPEAT {
            sleep(LOOK).await;
            continue;
        }
        let exchanged = async {
            send(&mut successor, &message(&claims, draining.load(Relaxed), admission)).await?;
            receive::<Conceded>(&mut successor).await
        };
        match exchanged.await {
            Ok(conceded) => is_content = apply(admission, &claims, &conceded),
            Err(error) => return error,
        }
        (said, at) = (claims, Instant::now());
        sleep(LOOK).await;
    }
}

/// Puts the concessions in force. Returns whether they cover all claims.
fn apply(admission: &Admission, claims: &[Claim], conceded: &Conceded) -> bool {
    let places = || claims.iter().zip(&conceded.backends);
    admission.set_bounds(places().map(|(claim, to)| (claim.backend, Bound::Share(to.map(|to| to.share)))));
    for (claim, to) in places() {
        if let Some(to) = to {
            admission.set_cordon(claim.backend, to.cordon);
        }
    }
    places().all(|(claim, to)| to.is_none_or(|to| to.share == claim.share))
}

/// Opens all backends, because without a gateway that manages engines only health decides about
/// rotation.
fn open_all(admission: &Admission) {
    for backend in admission.view().into_iter().flat_map(|pool| pool.backends) {
        admission.set_cordon(backend.id, Cordon::Open);
    }
}

fn own_all(admission: &Admission) {
    let all = admission.view().into_iter().flat_map(|pool| pool.backends);
    admission.set_bounds(all.map(|backend| (backend.id, Bound::Share(None))));
}

fn message(claims: &[Claim], draining: u32, admission: &Admission) -> Said {
    let claimed = |claim: &Claim| ClaimedBackend {
        pool: claim.pool.to_string(),
        backend: claim.name.to_string(),
        authority: claim.address.authority.to_string(),
        draining: claim.draining,
        share: claim.share,
    };
    let (gateways, in_ledger) = (draining + 1, admission.is_divided());
    Said::Claims(Claims { gateways, in_ledger, claims: claims.iter().map(claimed).collect() })
}
