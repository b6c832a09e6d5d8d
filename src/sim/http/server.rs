//! Accepts connections, and has the handle that controls a server inside a process.
//!
//! HTTP/1.1 as uvicorn serves it: idle connections close after `--timeout-keep-alive`, errors are
//! vLLM's objects, unknown routes get 404. A client that closes the connection aborts the request.
//! [`spawn`] runs a server on the current tokio runtime. A process can run several. Bodies are
//! bounded by [`MAX_BODY`](crate::http::reply::MAX_BODY).

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::net::TcpListener;
use tokio::sync::broadcast::Sender;
use tokio::sync::mpsc;
use tokio_util::task::TaskTracker;

use crate::http::routes;
use crate::observe::kv_events::Publisher;
use crate::observe::stats::{Ended, Stats};
use crate::process::config::SimConfig;
use crate::process::fault::Fault;
use crate::real_time::engine_loop::EngineLoop;
use crate::real_time::state::{MemoryOrder, ServerState};

/// Time for a connection to end after the server was stopped.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(1);
/// Pause after a failed accept (out of file descriptors).
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);

/// Totals and current state of a server.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Snapshot {
    /// Sequences that ended by a stop or at the token limit.
    pub finished: u64,
    /// Sequences aborted because the client disconnected.
    pub aborted: u64,
    /// Sequences that ended by an error.
    pub failed: u64,
    /// Sequences in flight, in any state.
    pub in_flight: u64,
    /// Sequences in the running list after the last step.
    pub running: usize,
    /// Sequences waiting after the last step, including `deferred`.
    pub waiting: usize,
    /// Share of KV blocks in use after the last step.
    pub kv_usage: f64,
    /// Tokens generated.
    pub generated_tokens: u64,
    /// Preemptions.
    pub preemptions: u64,
    /// Most sequences that a scheduler had at once, waiting or running.
    pub most: u64,
    /// Sequences that wait for an adapter slot after the last step; part of `waiting`.
    pub deferred: usize,
    /// Prompt tokens of requests that got their first token.
    pub prompt_tokens: u64,
    /// Tokens looked up in the prefix cache, and tokens found there.
    pub prefix: (u64, u64),
}

/// A running server. Dropping the handle leaves the server running. [`Handle::shutdown`] ends it.
#[derive(Debug)]
pub struct Handle {
    addr: SocketAddr,
    shared: Arc<ServerState>,
    tasks: TaskTracker,
}

/// Starts a server on a bound listener.
pub fn spawn(config: SimConfig, listener: TcpListener) -> std::io::Result<Handle> {
    let addr = listener.local_addr()?;
    let fault = config.fault;
    let shared = Arc::new(ServerState::new(config));
    let tasks = TaskTracker::new();
    for (number, rank) in shared.ranks.iter().enumerate() {
        let events = shared.config.kv_events.map(|port| Publisher::bind(addr.ip(), port, number)).transpose()?;
        if let Some(events) = &events {
            let _ = rank.kv_messages.set(events.messages());
        }
        tasks.spawn(EngineLoop::new(Arc::clone(&shared), Arc::clone(rank), events).run());
    }
    tasks.spawn(accept(listener, Arc::clone(&shared), tasks.clone()));
    if let Some(fault) = fault {
        shared.fault(fault);
    }
    Ok(Handle { addr, shared, tasks })
}

impl Handle {
    /// The address on which the server listens.
    pub fn addr(&self) -> SocketAddr {
        self.addr
    }

    /// Totals and current state of all data-parallel ranks together; `kv_usage` is the value of the
    /// fullest rank, and `most` the largest value of any rank.
    pub fn snapshot(&self) -> Snapshot {
        let in_flight = self.shared.concurrency.lock().in_flight;
        let sum = self.by_rank().into_iter().reduce(|sum, rank| Snapshot {
            finished: sum.finished + rank.finished,
            aborted: sum.aborted + rank.aborted,
            failed: sum.failed + rank.failed,
            in_flight,
            running: sum.running + rank.running,
            waiting: sum.waiting + rank.waiting,
            kv_usage: sum.kv_usage.max(rank.kv_usage),
            generated_tokens: sum.generated_tokens + rank.generated_tokens,
            preemptions: sum.preemptions + rank.preemptions,
            most: sum.most.max(rank.most),
            deferred: sum.deferred + rank.deferred,
            prompt_tokens: sum.prompt_tokens + rank.prompt_tokens,
            prefix: (sum.prefix.0 + rank.prefix.0, sum.prefix.1 + rank.prefix.1),
        });
        Snapshot { in_flight, ..sum.unwrap_or_default() }
    }

    /// Subscribers of the KV events of all ranks.
    pub fn kv_subscribers(&self) -> usize {
        self.shared.ranks.iter().map(|rank| rank.kv_messages.get().map_or(0, Sender::receiver_count)).sum()
    }

    /// Blocks that are published in the prefix caches of all ranks.
    pub fn published_blocks(&self) -> usize {
        self.shared.ranks.iter().map(|rank| rank.stats.lock().prefix_blocks).sum()
    }

    /// Totals and current state of each data-parallel rank. `in_flight` is known only for the whole
    /// server, and 0 here.
    pub fn by_rank(&self) -> Vec<Snapshot> {
        self.shared.ranks.iter().map(|rank| Snapshot::of(&rank.stats.lock())).collect()
    }
}

impl Snapshot {
    fn of(stats: &Stats) -> Self {
        Self {
            finished: stats.ended(Ended::Stop) + stats.ended(Ended::Length),
            aborted: stats.ended(Ended::Abort),
            failed: stats.ended(Ended::Error),
            in_flight: 0,
            running: stats.gauges.running,
            waiting: stats.gauges.waiting + stats.gauges.deferred,
            kv_usage: stats.gauges.kv_usage,
            generated_tokens: stats.generation_tokens,
            preemptions: stats.preemptions,
            most: stats.most,
            deferred: stats.gauges.deferred,
            prompt_tokens: stats.prompt_tokens,
            prefix: stats.prefix,
        }
    }
}

impl Handle {
    /// Injects a fault; [`Fault::None`] removes all faults.
    pub fn fault(&self, fault: Fault) {
        self.shared.fault(fault);
    }

    /// Receives orders to free the memory of the simulated device when the engine sleeps, and to
    /// take it when it wakes. Without a receiver, that memory is not simulated.
    pub fn memory_orders(&self) -> mpsc::Receiver<MemoryOrder> {
        let (orders, inbox) = mpsc::channel(1);
        *self.shared.memory.lock() = Some(orders);
        inbox
    }

    /// Resolves when the engine has died.
    pub async fn died(&self) {
        self.shared.dead.cancelled().await;
    }

    /// Refuses new requests and waits at most `within` for requests in flight. Returns whether all
    /// have ended; `false` at once if the engine is dead.
    pub async fn drain(&self, within: Duration) -> bool {
        const POLL_EVERY: Duration = Duration::from_millis(5);
        self.shared.draining.store(true, Ordering::Relaxed);
        let deadline = tokio::time::Instant::now() + within;
        while self.shared.concurrency.lock().in_flight > 0 {
            if tokio::time::Instant::now() >= deadline || self.shared.dead.is_cancelled() {
                return false;
            }
            tokio::time::sleep(POLL_EVERY).await;
        }
        true
    }

    /// Stops as after SIGTERM: requests in flight end with an error and connections close. Returns
    /// when all tasks have ended.
    pub async fn shutdown(self) {
        self.shared.stop.cancel();
        self.tasks.close();
        self.tasks.wait().await;
    }

    /// Stops as after SIGKILL: connections are closed immediately.
    pub async fn kill(self) {
        self.shared.killed.cancel();
        self.shutdown().await;
    }
}

async fn accept(listener: TcpListener, shared: Arc<ServerState>, tasks: TaskTracker) {
    loop {
        let accepted = tokio::select! {
            accepted = listener.accept() => accepted,
            () = shared.stop.cancelled() => return,
        };
        let Ok((stream, peer)) = accepted else {
            tokio::time::sleep(ACCEPT_PAUSE).await;
            continue;
        };
        // Tokens are small writes. Nagle's algorithm would add the peer's delayed ack to each.
        let _ = stream.set_nodelay(true);
        let shared = Arc::clone(&shared);
        tasks.spawn(async move {
            let service = service_fn(|request| routes::handle(Arc::clone(&shared), peer, request));
            let connection = http1::Builder::new()
                .timer(TokioTimer::new())
                .header_read_timeout(shared.config.http_keep_alive)
                .serve_connection(TokioIo::new(stream), service);
            tokio::pin!(connection);
            tokio::select! {
                biased;
                () = shared.killed.cancelled() => return,
                // A client or an injected fault may break a connection.
                _ = connection.as_mut() => return,
                () = shared.stop.cancelled() => {}
            }
            connection.as_mut().graceful_shutdown();
            // A client that does not read the rest in time is disconnected.
            let _ = tokio::time::timeout(CLOSE_TIMEOUT, connection).await;
        });
    }
}
