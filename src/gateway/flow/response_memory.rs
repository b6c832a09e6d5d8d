//! The memory in which responses wait for clients that read slower than engines send.
//!
//! A client, by its [`Origin`], that is alone may use all of it. Where several want some,
//! each has an equal share. A client above its share may use what is free beyond [`RESERVE`] of the
//! memory, which stays for clients below theirs.
//!
//! Bounds: `server.max_response_memory` for all; one entry for each client that holds some. A read of
//! an engine that was begun with room may exceed it by its size.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

use parking_lot::Mutex;

use super::incoming::IncomingRequest;
use crate::origin::Origin;

/// The part of the memory that no client above its share may use.
const RESERVE: usize = 4;

/// The memory for slow clients. Without a bound until it is configured.
#[derive(Debug)]
pub struct ResponseMemory {
    max: AtomicUsize,
    held: Mutex<Held>,
}

#[derive(Debug, Default)]
struct Held {
    bytes: usize,
    clients: HashMap<Origin, Share>,
}

#[derive(Debug, Default)]
struct Share {
    bytes: usize,
    holders: usize,
}

impl Held {
    /// Whether a client may hold more.
    fn has_room(&self, client: &Origin, max: usize) -> bool {
        let own = self.clients.get(client).map_or(0, |share| share.bytes);
        let others = self.clients.len().saturating_sub(1);
        match others {
            0 => self.bytes < max,
            _ if own < max / (others + 1) => self.bytes < max,
            _ => self.bytes < max - max / RESERVE,
        }
    }
}

impl Default for ResponseMemory {
    fn default() -> Self {
        Self { max: AtomicUsize::new(usize::MAX), held: Mutex::default() }
    }
}

impl ResponseMemory {
    /// Sets the bound, in bytes.
    pub fn configure(&self, max: u64) {
        self.max.store(usize::try_from(max).unwrap_or(usize::MAX), Relaxed);
    }

    /// Bytes that wait for clients, and the bound.
    pub fn view(&self) -> (u64, u64) {
        (self.held.lock().bytes as u64, self.max.load(Relaxed) as u64)
    }

    /// Clients that hold some.
    #[cfg(test)]
    fn clients(&self) -> usize {
        self.held.lock().clients.len()
    }
}

/// Where a response of one request may wait.
#[derive(Clone, Copy, Debug)]
pub(super) struct MemoryOwner<'a> {
    pub(super) memory: &'a Arc<ResponseMemory>,
    pub(super) incoming: &'a IncomingRequest,
}

impl MemoryOwner<'_> {
    /// Begins to hold memory, none yet.
    pub(super) fn hold(&self) -> HeldMemory {
        HeldMemory::new(Arc::clone(self.memory), self.incoming.origin)
    }
}

/// What one response holds; returned when dropped.
#[derive(Debug)]
pub(super) struct HeldMemory {
    memory: Arc<ResponseMemory>,
    client: Origin,
    bytes: usize,
}

impl HeldMemory {
    fn new(memory: Arc<ResponseMemory>, client: Origin) -> Self {
        memory.held.lock().clients.entry(client).or_default().holders += 1;
        Self { memory, client, bytes: 0 }
    }

    /// Whether its client may hold more.
    pub(super) fn has_room(&self) -> bool {
        self.memory.held.lock().has_room(&self.client, self.memory.max.load(Relaxed))
    }

    /// Holds `bytes` in all from now on.
    pub(super) fn set(&mut self, bytes: usize) {
        let mut held = self.memory.held.lock();
        held.bytes = held.bytes + bytes - self.bytes;
        if let Some(share) = held.clients.get_mut(&self.client) {
            share.bytes = share.bytes + bytes - self.bytes;
        }
        self.bytes = bytes;
    }
}

impl Drop for HeldMemory {
    fn drop(&mut self) {
        self.set(0);
        let mut held = self.memory.held.lock();
        if let Entry::Occupied(mut share) = held.clients.entry(self.client) {
            share.get_mut().holders -= 1;
            if share.get().holders == 0 {
                share.remove();
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn memory(max: u64) -> Arc<ResponseMemory> {
        let memory = ResponseMemory::default();
        memory.configure(max);
        Arc::new(memory)
    }

    fn hold(memory: &Arc<ResponseMemory>, name: &str) -> HeldMemory {
        HeldMemory::new(Arc::clone(memory), Origin::of_key(name))
    }

    #[test]
    fn a_client_alone_may_use_all_and_several_have_their_shares() {
        let memory = memory(800);
        let mut greedy = hold(&memory, "greedy");
        greedy.set(799);
        assert!(greedy.has_room(), "alone");
        greedy.set(800);
        assert!(!greedy.has_room());
        greedy.set(600);
        let mut modest = hold(&memory, "modest");
        assert!(modest.has_room() && !greedy.has_room(), "a quarter stays for who has less");
        modest.set(199);
        assert!(modest.has_room());
        greedy.set(200);
        assert!(greedy.has_room() && modest.has_room());
        modest.set(401);
        assert!(!modest.has_room() && greedy.has_room(), "601 of 800 are held");
        drop((greedy, modest));
        assert_eq!((memory.view(), memory.clients()), ((0, 800), 0));
    }

    #[test]
    fn a_client_has_one_share_however_many_responses_it_has() {
        let memory = memory(800);
        let mut many: Vec<HeldMemory> = (0..8).map(|_| hold(&memory, "many")).collect();
        let one = hold(&memory, "one");
        many.iter_mut().for_each(|held| held.set(75));
        assert_eq!(memory.clients(), 2);
        assert!(many.iter().all(|held| !held.has_room()) && one.has_room());
        drop(one);
        assert!(many.iter().all(HeldMemory::has_room), "alone again");
        many.truncate(1);
        assert_eq!((memory.view().0, memory.clients()), (75, 1));
    }
}
