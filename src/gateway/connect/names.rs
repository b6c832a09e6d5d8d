//! The addresses of names: resolved at the first use, then again in the background every
//! [`RESOLVE_AGAIN`].
//!
//! - A request waits for the resolver only while no address is known. One query per name is open at
//!   a time. The query runs on a thread for blocking calls, and continues when the request that
//!   started it is gone.
//! - If the resolver fails, the addresses stay for [`STALE_MAX`], so that a failed name server
//!   takes no engine down at once.
//! - A name without an address is queried again after [`FAILED_AGAIN`].
//! - An address that failed is tried after the others for [`AVOIDED_FOR`], or until it works. A
//!   failure also makes the name due to be resolved again.
//!
//! Bounds: [`NAMES_MAX`] names with [`ADDRESSES_MAX`] addresses each.

use std::future::Future;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use dashmap::DashMap;
use parking_lot::Mutex;
use tokio::time::Instant;

use super::failure::ConnectError;
use super::order::interleaved;
use sluice_config::Address;
use sluice_config::limits;

/// How long the addresses of a name are used before it is resolved again.
const RESOLVE_AGAIN: Duration = Duration::from_secs(10);
/// The shortest time between two queries for a name without an address, or whose addresses all
/// fail.
const FAILED_AGAIN: Duration = Duration::from_secs(1);
/// How long addresses are used while the resolver fails. Afterwards another program may have them.
const STALE_MAX: Duration = Duration::from_secs(60);
/// How long an address that failed is tried after the others.
const AVOIDED_FOR: Duration = Duration::from_secs(60);
/// The most names: enough for the backends of a configuration and of a few earlier ones.
pub(super) const NAMES_MAX: usize = 4 * limits::MAX_BACKENDS;
/// The most addresses of a name; further ones are ignored.
pub(super) const ADDRESSES_MAX: usize = 128;

/// Finds the addresses of names.
pub trait Resolve: std::fmt::Debug + Send + Sync + 'static {
    /// The addresses of `host`, in the order in which to try them.
    fn resolve(&self, host: &str, port: u16) -> impl Future<Output = io::Result<Vec<SocketAddr>>> + Send;
}

/// The resolver of the operating system.
#[derive(Clone, Copy, Debug)]
pub struct SystemResolver;

impl Resolve for SystemResolver {
    async fn resolve(&self, host: &str, port: u16) -> io::Result<Vec<SocketAddr>> {
        Ok(tokio::net::lookup_host((host, port)).await?.collect())
    }
}

#[derive(Debug)]
pub(super) struct Names<R> {
    resolver: Arc<R>,
    known: DashMap<Arc<str>, Arc<Name>>,
}

#[derive(Debug)]
pub(super) struct Name {
    host: String,
    port: u16,
    state: Mutex<NameState>,
    /// Held while a query is open.
    asking: Arc<tokio::sync::Mutex<()>>,
}

#[derive(Debug, Default)]
struct NameState {
    addresses: Vec<SocketAddr>,
    /// When the resolver returned `addresses`.
    answered: Option<Instant>,
    /// When the last query was answered, with addresses or not.
    asked: Option<Instant>,
    /// The resolver's message, if the last query failed.
    failure: Option<String>,
    /// Whether to resolve the name again at its next use.
    is_due: bool,
    /// Addresses that failed, each with the moment until which it is tried last.
    avoided: Vec<(SocketAddr, Instant)>,
}

impl NameState {
    fn is_avoided(&self, address: &SocketAddr, now: Instant) -> bool {
        self.avoided.iter().any(|(other, until)| other == address && now < *until)
    }

    /// The known addresses in the order in which to try them; empty if none may be used any more.
    fn ordered(&self, now: Instant) -> Vec<SocketAddr> {
        let is_stale = |answered| self.failure.is_some() && now.saturating_duration_since(answered) >= STALE_MAX;
        if self.answered.is_none_or(is_stale) {
            return Vec::new();
        }
        interleaved(&self.addresses, |address| self.is_avoided(address, now))
    }

    /// Whether the name must be resolved again in the background, which the caller then does.
    fn take_due(&mut self, now: Instant) -> bool {
        let is_old = |asked| now.saturating_duration_since(asked) >= RESOLVE_AGAIN;
        let due = (self.is_due && !self.was_asked_just_now(now)) || self.asked.is_none_or(is_old);
        if due {
            // The query counts as asked now, so no other one starts.
            (self.is_due, self.asked) = (false, Some(now));
        }
        due
    }

    fn was_asked_just_now(&self, now: Instant) -> bool {
        self.asked.is_some_and(|asked| now.saturating_duration_since(asked) < FAILED_AGAIN)
    }

    fn answer(&mut self, answer: io::Result<Vec<SocketAddr>>, now: Instant) {
        self.asked = Some(now);
        self.is_due = false;
        match answer {
            Ok(found) if !found.is_empty() => {
                self.addresses.clear();
                for address in found {
                    if self.addresses.len() < ADDRESSES_MAX && !self.addresses.contains(&address) {
                        self.addresses.push(address);
                    }
                }
                (self.answered, self.failure) = (Some(now), None);
                let addresses = &self.addresses;
                self.avoided.retain(|(address, until)| now < *until && addresses.contains(address));
            }
            Ok(_) => self.failure = Some("the name has no address".to_owned()),
            Err(error) => self.failure = Some(error.to_string()),
        }
    }
}

impl Name {
    fn new(host: &str, port: u16) -> Self {
        Self { host: host.to_owned(), port, state: Mutex::default(), asking: Arc::default() }
    }

    pub(super) fn failed(&self, addresses: impl Iterator<Item = SocketAddr>) {
        let until = Instant::now() + AVOIDED_FOR;
        let mut state = self.state.lock();
        for address in addresses {
            state.is_due = true;
            state.avoided.retain(|(other, _)| *other != address);
            state.avoided.push((address, until));
        }
    }

    pub(super) fn worked(&self, address: SocketAddr) {
        self.state.lock().avoided.retain(|(other, _)| *other != address);
    }

    fn result(&self, now: Instant) -> Result<Vec<SocketAddr>, ConnectError> {
        let state = self.state.lock();
        let addresses = state.ordered(now);
        if !addresses.is_empty() {
            return Ok(addresses);
        }
        let why = state.failure.clone().unwrap_or_else(|| "the resolver was not asked".to_owned());
        Err(ConnectError::Resolve { host: self.host.clone(), why })
    }
}

impl<R: Resolve> Names<R> {
    pub(super) fn new(resolver: R) -> Self {
        Self { resolver: Arc::new(resolver), known: DashMap::new() }
    }

    /// The entry of an address whose host is a name.
    pub(super) fn of(&self, address: &Address) -> Arc<Name> {
        if let Some(known) = self.known.get(&address.authority) {
            return Arc::clone(&known);
        }
        if self.known.len() >= NAMES_MAX {
            self.known.clear();
        }
        let name = || Arc::new(Name::new(&address.endpoint.host, address.endpoint.port));
        Arc::clone(&self.known.entry(Arc::clone(&address.authority)).or_insert_with(name))
    }

    /// The addresses of a name in the order in which to try them. Waits for the resolver only if
    /// none is known.
    pub(super) async fn addresses(&self, name: &Arc<Name>) -> Result<Vec<SocketAddr>, ConnectError> {
        let now = Instant::now();
        let (known, due, asked) = {
            let mut state = name.state.lock();
            let (known, asked) = (state.ordered(now), state.asked);
            let wait = known.is_empty() && state.was_asked_just_now(now) && state.failure.is_some();
            let due = !wait && !known.is_empty() && state.take_due(now);
            (if wait { None } else { Some(known) }, due, asked)
        };
        match known {
            None => {}
            Some(known) if !known.is_empty() => {
                if due {
                    self.ask_in_background(name);
                }
                return Ok(known);
            }
            Some(_) => self.ask(name, asked).await,
        }
        name.result(Instant::now())
    }

    /// Resolves a name whose addresses have all failed, unless that was done just now.
    pub(super) async fn resolve_again(&self, name: &Arc<Name>) -> Result<Vec<SocketAddr>, ConnectError> {
        let now = Instant::now();
        let (just_now, asked) = {
            let state = name.state.lock();
            (state.was_asked_just_now(now), state.asked)
        };
        match just_now {
            // The answer to an open query counts.
            true => drop(name.asking.lock().await),
            false => self.ask(name, asked).await,
        }
        name.result(Instant::now())
    }

    /// Whether `socket` is an address of the name that has not failed lately, or all addresses have
    /// failed lately.
    pub(super) fn is_current(&self, authority: &str, socket: SocketAddr) -> bool {
        let Some(name) = self.known.get(authority).map(|name| Arc::clone(&name)) else { return false };
        let now = Instant::now();
        let (is_current, due) = {
            let mut state = name.state.lock();
            let is_better = |other: &SocketAddr| *other != socket && !state.is_avoided(other, now);
            let is_usable = !state.is_avoided(&socket, now) || !state.addresses.iter().any(is_better);
            (state.addresses.contains(&socket) && is_usable, state.take_due(now))
        };
        if due {
            self.ask_in_background(&name);
        }
        is_current
    }

    /// Makes the name due to be resolved again at the next use.
    pub(super) fn distrust(&self, authority: &str) {
        if let Some(name) = self.known.get(authority) {
            name.state.lock().is_due = true;
        }
    }

    /// Queries the resolver, unless another task has queried it since `seen`. The query continues
    /// when this future is dropped.
    async fn ask(&self, name: &Arc<Name>, seen: Option<Instant>) {
        let (name, resolver) = (Arc::clone(name), Arc::clone(&self.resolver));
        let asking = tokio::spawn(async move {
            let _one = name.asking.lock().await;
            if name.state.lock().asked != seen {
                return;
            }
            let answer = resolver.resolve(&name.host, name.port).await;
            name.state.lock().answer(answer, Instant::now());
        });
        let _ = asking.await;
    }

    fn ask_in_background(&self, name: &Arc<Name>) {
        // One open query suffices. The lock is taken here and not in the task, so that a caller
        // whose addresses all fail waits for this query.
        let Ok(open) = Arc::clone(&name.asking).try_lock_owned() else { return };
        let (name, resolver) = (Arc::clone(name), Arc::clone(&self.resolver));
        tokio::spawn(async move {
            let _open = open;
            let answer = resolver.resolve(&name.host, name.port).await;
            name.state.lock().answer(answer, Instant::now());
        });
    }
}
