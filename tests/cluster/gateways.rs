//! Gateways as processes, and clients that always have requests open at each of them.
//!
//! A gateway is `sluice serve` with a generated configuration; both the configuration and the log
//! are in a folder of this gateway. Every wait ends with an error after [`TIMEOUT`].

use std::fs;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use nix::sys::signal::Signal;
use sluice_admin::{AdminClient, Status};
use tempfile::TempDir;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::process::Child;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep, timeout};

use crate::engine::Engine;
use crate::ports::free_port;
use crate::serve::{self, serve};

pub(crate) const TIMEOUT: Duration = Duration::from_secs(60);
pub(crate) const LOOK: Duration = Duration::from_millis(20);
pub(crate) const LEASE: Duration = Duration::from_secs(2);

pub(crate) struct Gateway {
    pub(crate) name: String,
    pub(crate) port: u16,
    pub(crate) admin: AdminClient,
    admin_port: u16,
    folder: TempDir,
    child: Option<Child>,
}

pub(crate) struct Setup<'s> {
    pub(crate) store: &'s str,
    pub(crate) mode: &'s str,
    pub(crate) slots: u32,
    pub(crate) engines: &'s [Arc<Engine>],
    pub(crate) more: &'s str,
    pub(crate) leader: Leader<'s>,
}

#[derive(Clone, Copy, Default)]
pub(crate) struct Leader<'s> {
    /// Further lines of `[cluster]`.
    pub(crate) lines: &'s str,
    /// The lease of both the ledger and the election; [`LEASE`] if `None`.
    pub(crate) lease: Option<Duration>,
    /// A state folder that several gateways share.
    pub(crate) state: Option<&'s Path>,
    /// Further lines of `[server]`.
    pub(crate) server: &'s str,
    /// Further lines of `[fleet]`.
    pub(crate) fleet: &'s str,
    /// Further tables.
    pub(crate) tables: &'s str,
}

impl Gateway {
    pub(crate) async fn start(name: &str, setup: &Setup<'_>) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let (port, admin_port) = (free_port(), free_port());
        let Setup { store, mode, slots, engines, more, leader } = setup;
        let (lines, server, fleet, lease) = (leader.lines, leader.server, leader.fleet, leader.lease.unwrap_or(LEASE));
        let mut text = format!(
            "[server]\nlisten = \"127.0.0.1:{port}\"\nadmin = \"127.0.0.1:{admin_port}\"\nthreads = 2\ndrain_timeout = \"20s\"\n{server}\n\
             [health]\nprobe_interval = \"200ms\"\n[fleet]\nstate = {:?}\n{fleet}\n\
             [cluster]\nname = \"{name}\"\netcd = [\"{store}\"]\nlease = \"{lease:?}\"\nmode = \"{mode}\"\n{lines}\n\
             [[model]]\nname = \"m\"\n[[pool]]\nname = \"p\"\nmodels = [\"m\"]\nslots = {slots}\n{more}\n\
             queue = {{ length = 512, timeout = \"20s\" }}\n",
            leader.state.map_or_else(|| folder.path().join("state"), Path::to_owned),
        );
        for (number, engine) in engines.iter().enumerate() {
            text += &format!("[[pool.backend]]\nname = \"e{number}\"\nurl = \"http://127.0.0.1:{}\"\n", engine.port);
        }
        text += leader.tables;
        fs::write(folder.path().join("sluice.toml"), text).unwrap();
        let admin = AdminClient::new(&format!("127.0.0.1:{admin_port}"), None).unwrap();
        let mut gateway = Self { name: name.to_owned(), port, admin, admin_port, folder, child: None };
        gateway.run(&[]).await;
        gateway
    }

    pub(crate) async fn run(&mut self, arguments: &[&str]) {
        let before = self.child.replace(serve(self.folder.path(), arguments).unwrap());
        if let Some(mut before) = before {
            timeout(TIMEOUT, before.wait()).await.expect("the process before ends").unwrap();
        }
        self.until("it answers", async |gateway| gateway.status().await.is_some()).await;
    }

    pub(crate) fn log(&self) -> String {
        serve::log(self.folder.path(), usize::MAX)
    }

    pub(crate) async fn status(&self) -> Option<Status> {
        self.admin.get("/admin/status").await.ok()
    }

    pub(crate) async fn share(&self) -> u64 {
        let status = self.status().await.expect("it answers");
        status.pools[0].backends[0].share.get("slots").copied().unwrap_or(0)
    }

    pub(crate) async fn standing(&self) -> String {
        self.status().await.and_then(|status| status.cluster).map(|cluster| cluster.standing).unwrap_or_default()
    }

    pub(crate) async fn is_ready(&self) -> bool {
        let request = "GET /ready HTTP/1.1\r\nhost: g\r\nconnection: close\r\n\r\n";
        exchange(self.port, request).await.is_some_and(|answer| answer.starts_with("HTTP/1.1 200"))
    }

    pub(crate) async fn until(&self, what: &str, mut is_so: impl AsyncFnMut(&Self) -> bool) -> Duration {
        let begun = Instant::now();
        while !is_so(self).await {
            assert!(begun.elapsed() < TIMEOUT, "{}: not within {TIMEOUT:?}: {what}\n{}", self.name, self.log());
            sleep(LOOK).await;
        }
        begun.elapsed()
    }

    pub(crate) fn signal(&self, signal: Signal) {
        serve::signal(self.child.as_ref().expect("it runs"), signal).unwrap();
    }

    pub(crate) fn pid(&self) -> u32 {
        self.child.as_ref().and_then(Child::id).expect("it runs")
    }

    pub(crate) async fn post(&self, path: &str) -> String {
        self.post_json(path, "").await
    }

    pub(crate) async fn post_json(&self, path: &str, body: &str) -> String {
        let length = body.len();
        let request = format!(
            "POST {path} HTTP/1.1\r\nhost: 127.0.0.1\r\nx-sluice-admin: 1\r\ncontent-length: {length}\r\nconnection: close\r\n\r\n{body}"
        );
        exchange(self.admin_port, &request).await.unwrap_or_default()
    }

    pub(crate) async fn ended(&mut self) {
        let mut child = self.child.take().expect("it runs");
        let status = timeout(TIMEOUT, child.wait()).await.expect("it stops").unwrap();
        assert!(status.success(), "{}: {status}\n{}", self.name, self.log());
    }

    pub(crate) async fn kill(&mut self) {
        self.child.take().expect("it runs").kill().await.unwrap();
    }

    pub(crate) async fn stop(&mut self) {
        self.signal(Signal::SIGTERM);
        self.ended().await;
    }
}

/// The answer to one request; `None` after an error or after [`TIMEOUT`].
pub(crate) async fn exchange(port: u16, request: &str) -> Option<String> {
    let talk = async {
        let mut stream = TcpStream::connect(("127.0.0.1", port)).await.ok()?;
        stream.write_all(request.as_bytes()).await.ok()?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer).await.ok()?;
        Some(answer)
    };
    timeout(TIMEOUT, talk).await.ok()?
}

/// Whether the whole answer to one streamed request with `sequences` sequences of `tokens` tokens
/// came.
pub(crate) async fn complete(port: u16, sequences: u32, tokens: u64) -> bool {
    let body = format!(r#"{{"model":"m","prompt":"a","stream":true,"max_tokens":{tokens},"n":{sequences}}}"#);
    let length = body.len();
    let request = format!(
        "POST /v1/completions HTTP/1.1\r\nhost: g\r\nconnection: close\r\ncontent-type: application/json\r\n\
         content-length: {length}\r\n\r\n{body}"
    );
    exchange(port, &request).await.is_some_and(|answer| answer.contains("[DONE]"))
}

/// Clients of which each always has one request open. A request takes half a second to three
/// seconds.
pub(crate) struct Load {
    clients: JoinSet<()>,
    served: Arc<AtomicU64>,
    paused: Arc<AtomicBool>,
}

impl Load {
    pub(crate) fn on(ports: &[u16], clients: usize) -> Self {
        let (mut all, served) = (JoinSet::new(), Arc::new(AtomicU64::new(0)));
        let paused = Arc::new(AtomicBool::new(false));
        for (number, port) in ports.iter().copied().enumerate() {
            for client in 0..clients {
                let (served, paused) = (Arc::clone(&served), Arc::clone(&paused));
                let mut next = (number * 31 + client * 7) as u64;
                all.spawn(async move {
                    loop {
                        while paused.load(Relaxed) {
                            sleep(LOOK).await;
                        }
                        next = (next * 1_103_515_245 + 12_345) % (1 << 31);
                        match complete(port, 1, 10 + next % 50).await {
                            true => drop(served.fetch_add(1, Relaxed)),
                            false => sleep(Duration::from_millis(100)).await,
                        }
                    }
                });
            }
        }
        Self { clients: all, served, paused }
    }

    pub(crate) fn pause(&self, paused: bool) {
        self.paused.store(paused, Relaxed);
    }

    pub(crate) fn served(&self) -> u64 {
        self.served.load(Relaxed)
    }

    pub(crate) async fn end(mut self) -> u64 {
        self.clients.shutdown().await;
        self.served()
    }
}
