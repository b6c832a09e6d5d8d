//! State that the HTTP side and the engine loops of one server share.
//!
//! Locks are held for a few instructions and never across an await. Only the engine loop of a rank
//! touches the rank's engine.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};

use parking_lot::Mutex;
use tokio::sync::{mpsc, oneshot};
use tokio_util::sync::CancellationToken;

use super::command::{Command, Control};
use super::concurrency_limit::ConcurrencyLimit;
use super::rank::{Rank, least_loaded};
use crate::observe::http_metrics::Requests;
use crate::process::config::SimConfig;
use crate::process::fault::Fault;
use crate::unix_time::unix_seconds;

/// An order to the process that holds the memory of the simulated device.
#[derive(Debug)]
pub struct MemoryOrder {
    /// Take the memory, or free it.
    pub held: bool,
    /// Receives whether that was possible.
    pub done: oneshot::Sender<bool>,
}

/// State that the HTTP side and the engine loops of one server share.
#[derive(Debug)]
pub(crate) struct ServerState {
    pub(crate) config: SimConfig,
    /// The data-parallel ranks; at least one.
    pub(crate) ranks: Vec<Arc<Rank>>,
    pub(crate) concurrency: Mutex<ConcurrencyLimit>,
    /// Name and path of each adapter, by id. An unloaded adapter leaves a gap, so that ids stay
    /// valid.
    pub(crate) adapters: Mutex<Vec<Option<(String, String)>>>,
    pub(crate) next_id: AtomicU64,
    pub(crate) load: AtomicU64,
    pub(crate) garbage: AtomicBool,
    /// Whether no step runs, because of a fault.
    pub(crate) hung: AtomicBool,
    pub(crate) paused: AtomicBool,
    pub(crate) profiling: AtomicBool,
    /// Whether new requests are refused while the server waits for running requests.
    pub(crate) draining: AtomicBool,
    pub(crate) requests: Mutex<Requests>,
    pub(crate) started: f64,
    pub(crate) fingerprint: Arc<str>,
    /// Tokens after which a stream is broken off; 0 means never.
    pub(crate) reset_after: AtomicU32,
    pub(crate) dead: CancellationToken,
    pub(crate) stop: CancellationToken,
    /// Closes connections immediately, even in the middle of a response.
    pub(crate) killed: CancellationToken,
    /// The process that holds the memory of the simulated device; `None`: memory is not simulated.
    pub(crate) memory: Mutex<Option<mpsc::Sender<MemoryOrder>>>,
}

impl ServerState {
    pub(crate) fn new(config: SimConfig) -> Self {
        let adapters = config.adapters.iter().cloned().map(Some).collect();
        let settings = format!("{:?}{:?}{}", config.names, config.engine, config.max_model_len);
        let hash = twox_hash::XxHash3_64::oneshot(settings.as_bytes()) as u32;
        let fingerprint = format!("vllm-{}-{hash:08x}", config.version).into();
        let ranks = (0..config.data_parallel.max(1)).map(|_| Arc::default()).collect();
        Self {
            config,
            ranks,
            concurrency: Mutex::default(),
            adapters: Mutex::new(adapters),
            next_id: AtomicU64::new(1),
            load: AtomicU64::new(0),
            garbage: AtomicBool::new(false),
            hung: AtomicBool::new(false),
            paused: AtomicBool::new(false),
            profiling: AtomicBool::new(false),
            draining: AtomicBool::new(false),
            requests: Mutex::default(),
            started: unix_seconds(),
            fingerprint,
            reset_after: AtomicU32::new(0),
            dead: CancellationToken::new(),
            stop: CancellationToken::new(),
            killed: CancellationToken::new(),
            memory: Mutex::default(),
        }
    }

    /// Takes the memory of the simulated device, or frees it. Returns whether that was possible.
    pub(crate) async fn hold_memory(&self, held: bool) -> bool {
        let Some(orders) = self.memory.lock().clone() else { return true };
        let (done, result) = oneshot::channel();
        orders.send(MemoryOrder { held, done }).await.is_ok() && result.await.unwrap_or(false)
    }

    /// The first rank, which also has values that concern the whole server.
    pub(crate) fn first(&self) -> &Rank {
        &self.ranks[0]
    }

    /// The rank that a request goes to: `wanted` if given, otherwise the rank with the lowest load.
    /// `None`: there is no such rank.
    pub(crate) fn rank(&self, wanted: Option<i64>) -> Option<&Arc<Rank>> {
        match wanted {
            Some(wanted) => self.ranks.get(usize::try_from(wanted).ok()?),
            None => {
                let start = self.next_id.load(Ordering::Relaxed) as usize % self.ranks.len();
                self.ranks.get(least_loaded(&self.ranks, start))
            }
        }
    }

    /// Sends an operation to all engine loops and waits until it is carried out. Returns whether
    /// all succeeded; `None` if the engine is dead.
    pub(crate) async fn control(&self, control: Control) -> Option<bool> {
        let mut all = true;
        let results: Vec<_> = self
            .ranks
            .iter()
            .map(|rank| {
                let (done, result) = oneshot::channel();
                rank.send(Command::Control(control, Some(done)));
                result
            })
            .collect();
        for result in results {
            all &= tokio::select! {
                result = result => result.ok()?,
                () = self.dead.cancelled() => return None,
            };
        }
        Some(all)
    }

    /// Injects a fault; [`Fault::None`] removes all faults.
    pub(crate) fn fault(&self, fault: Fault) {
        match fault {
            Fault::None => {
                self.garbage.store(false, Ordering::Relaxed);
                self.hung.store(false, Ordering::Relaxed);
                self.reset_after.store(0, Ordering::Relaxed);
            }
            Fault::Garbage => self.garbage.store(true, Ordering::Relaxed),
            Fault::ResetMidstream(after) => self.reset_after.store(after.max(1), Ordering::Relaxed),
            Fault::Die => self.dead.cancel(),
            Fault::Hang => self.hung.store(true, Ordering::Relaxed),
            Fault::Stall(_) | Fault::OutOfMemory(_) | Fault::SlowStart(_) => {}
        }
        self.ranks.iter().for_each(|rank| rank.send(Command::Fault(fault)));
    }
}
