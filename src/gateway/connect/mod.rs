//! The only way to connect to engines, for requests, probes, scrapes, `check --probe` and changes
//! of engines.
//!
//! A name may have several addresses, of which only some work: `localhost` is `::1` and
//! `127.0.0.1`, but an engine may listen on one of them; a headless Kubernetes service has an
//! address for each pod. [`Connector::connect`] tries the addresses as RFC 8305 says, in the
//! resolver's order with alternating families (`order.rs`). The next address is tried when one
//! fails or after [`race::ATTEMPT_DELAY`] (`race.rs`). A TLS handshake is part of the attempt.
//! Resolving and all attempts together take at most the caller's limit.
//!
//! `names.rs` keeps the addresses of each name, learns which ones fail, and resolves names again in
//! the background. If all addresses of a name fail, the name is resolved at once, and new addresses
//! are tried.
//!
//! An engine may listen on another port than the configured one ([`Connector::redirect`]). The
//! configured endpoint stays the identity of the backend.
//!
//! Bounds: [`names::NAMES_MAX`] names, [`names::ADDRESSES_MAX`] addresses each,
//! [`race::RUNNING_MAX`] open attempts, one redirection for each engine of the gateway.

mod failure;
mod order;
mod race;
mod names;
mod redirections;

use std::net::SocketAddr;
use std::sync::{Arc, LazyLock};
use std::time::Duration;

use tokio::net::TcpStream;
use tokio::time::timeout;
use tokio_rustls::client::TlsStream;
use tokio_util::either::Either;

pub use failure::ConnectError;
use names::Names;
pub use names::{Resolve, SystemResolver};
use race::{Raced, race};
use redirections::Redirections;

use sluice_config::Address;
use sluice_config::tls::ClientTls;

/// A connection to an engine: plain for an `http` URL, with TLS for an `https` URL.
pub type EngineStream = Either<TcpStream, Box<TlsStream<TcpStream>>>;

/// Connects to engines. Requests and probes share one: see [`Connector::shared`].
#[derive(Debug)]
pub struct Connector<R = SystemResolver> {
    names: Names<R>,
    redirections: Redirections,
}

impl Connector {
    /// The connector of this process. It is shared so that a request does not first try an address
    /// that failed a probe.
    pub fn shared() -> Arc<Self> {
        static SHARED: LazyLock<Arc<Connector>> = LazyLock::new(|| Arc::new(Connector::new(SystemResolver)));
        Arc::clone(&SHARED)
    }
}

impl<R: Resolve> Connector<R> {
    /// A connector that knows no name yet.
    pub fn new(resolver: R) -> Self {
        Self { names: Names::new(resolver), redirections: Redirections::default() }
    }

    /// From now on, connects to `port` instead of the port of `to`, which must have an IP address.
    pub fn redirect(&self, to: &Address, port: u16) {
        self.redirections.set(to, port);
    }

    /// Whether a connection to `socket` may still be used for `to`: the name still has that
    /// address, which has not failed since, and the engine still listens on that port. Starts to
    /// resolve the name again if that is due.
    pub fn is_current(&self, to: &Address, socket: SocketAddr) -> bool {
        match to.ip {
            Some(_) => self.redirections.port(to) == socket.port(),
            None => self.names.is_current(&to.authority, socket),
        }
    }

    /// Makes the name of `to` due to be resolved again at the next use.
    #[cfg(test)]
    pub(crate) fn distrust(&self, to: &Address) {
        self.names.distrust(&to.authority);
    }

    /// A new connection to one of the addresses of `to`, with TLS if `to` has TLS settings, within
    /// `limit` in all.
    pub async fn connect(&self, to: &Address, limit: Duration) -> Result<(SocketAddr, EngineStream), ConnectError> {
        let connected = async {
            match to.ip {
                Some(ip) => {
                    let socket = SocketAddr::new(ip, self.redirections.port(to));
                    Ok((socket, open(socket, to.tls.as_ref()).await?))
                }
                None => self.connect_by_name(to, limit, |socket| open(socket, to.tls.as_ref())).await,
            }
        };
        match timeout(limit, connected).await {
            Ok(connected) => connected,
            Err(_) => {
                self.names.distrust(&to.authority);
                Err(ConnectError::Timeout)
            }
        }
    }

    async fn connect_by_name<T, F>(
        &self,
        to: &Address,
        limit: Duration,
        attempt: impl Fn(SocketAddr) -> F,
    ) -> Result<(SocketAddr, T), ConnectError>
    where
        F: Future<Output = Result<T, ConnectError>>,
    {
        let name = self.names.of(to);
        let mut failures = Vec::new();
        let mut addresses = self.names.addresses(&name).await?;
        while !addresses.is_empty() {
            let Raced { connected, failed, overtaken } = race(&addresses, limit, &attempt).await;
            name.failed(failed.iter().map(|(socket, _)| *socket).chain(overtaken));
            failures.extend(failed);
            if let Some((socket, connection)) = connected {
                name.worked(socket);
                return Ok((socket, connection));
            }
            // If the name has not changed, there are no new addresses, and the loop ends.
            let fresh = self.names.resolve_again(&name).await.unwrap_or_default();
            addresses = fresh.into_iter().filter(|new| failures.iter().all(|(old, _)| old != new)).collect();
            if failures.len() > names::ADDRESSES_MAX {
                break;
            }
        }
        Err(ConnectError::of(failures))
    }
}

/// Opens a TCP connection, and TLS in it if there are settings.
async fn open(socket: SocketAddr, tls: Option<&ClientTls>) -> Result<EngineStream, ConnectError> {
    let tcp = TcpStream::connect(socket).await.map_err(|error| ConnectError::Tcp(error.to_string()))?;
    // This call fails only on a closed socket, on which the first write fails as well.
    let _ = tcp.set_nodelay(true);
    match tls {
        None => Ok(Either::Left(tcp)),
        Some(tls) => match tls.connect(tcp).await {
            Ok(secure) => Ok(Either::Right(Box::new(secure))),
            Err(error) => Err(ConnectError::Tls(error.to_string())),
        },
    }
}

#[cfg(test)]
mod tests;
