//! The engines behind the soak: processes of `sluice sim`, or mock engines inside the test, killed and revived alike.
//!
//! A killed engine ends as after SIGKILL: all its connections break at once, without an error response.
//! It returns on the same port, with its counters at zero (sim) or continued (mock).

use std::process::Stdio;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use anyhow::{Context as _, bail};
use tokio::net::{TcpListener, TcpStream};
use tokio::process::{Child, Command};
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep};

use crate::engine::{Counters, serve};

/// Time for an engine to accept connections after it was started.
const START: Duration = Duration::from_secs(20);
/// Pause between two attempts to connect or bind.
const RETRY: Duration = Duration::from_millis(20);
/// How much faster than the modelled GPU a simulated engine runs: short responses take some ten milliseconds,
/// endless ones two minutes.
const SIM_SPEED: &str = "5";

/// What stands behind the gateway.
#[derive(Clone, Copy, PartialEq)]
pub(crate) enum Kind {
    /// The mock of `benches/overhead`, inside this process.
    Mock,
    /// A process of `sluice sim`.
    Sim,
}

impl Kind {
    /// What `SLUICE_SOAK_ENGINE` asks for: `mock` or `sim`.
    pub(crate) fn from_env(default: Self) -> Self {
        match std::env::var("SLUICE_SOAK_ENGINE").as_deref() {
            Ok("mock") => Self::Mock,
            Ok("sim") => Self::Sim,
            _ => default,
        }
    }
}

enum Life {
    Mock(Arc<Counters>, JoinHandle<()>),
    Sim(Child),
}

/// One engine on a port of its own.
pub(crate) struct Engine {
    /// Where it listens on loopback.
    pub(crate) port: u16,
    model: &'static str,
    life: Life,
}

impl Engine {
    /// Start an engine that serves `model` on a free port.
    pub(crate) async fn start(kind: Kind, model: &'static str) -> anyhow::Result<Self> {
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        let port = listener.local_addr()?.port();
        let life = match kind {
            Kind::Mock => {
                let counters = Arc::new(Counters::default());
                Life::Mock(Arc::clone(&counters), tokio::spawn(serve(listener, counters)))
            }
            Kind::Sim => {
                drop(listener);
                Life::Sim(sim(port, model)?)
            }
        };
        let engine = Self { port, model, life };
        engine.accepts().await?;
        Ok(engine)
    }

    /// End it without a word.
    pub(crate) async fn kill(&mut self) {
        match &mut self.life {
            Life::Mock(counters, task) => {
                counters.killed.store(true, Relaxed);
                task.abort();
                let _ = task.await;
            }
            // An engine that has ended already is as dead as wanted.
            Life::Sim(child) => drop(child.kill().await),
        }
    }

    /// Start it again on its port.
    pub(crate) async fn revive(&mut self) -> anyhow::Result<()> {
        match &mut self.life {
            Life::Mock(counters, task) => {
                let deadline = Instant::now() + START;
                let listener = loop {
                    match TcpListener::bind(("127.0.0.1", self.port)).await {
                        Ok(listener) => break listener,
                        Err(e) if Instant::now() > deadline => return Err(e).context("port of a killed engine"),
                        Err(_) => sleep(RETRY).await,
                    }
                };
                counters.killed.store(false, Relaxed);
                *task = tokio::spawn(serve(listener, Arc::clone(counters)));
            }
            Life::Sim(child) => *child = sim(self.port, self.model)?,
        }
        self.accepts().await
    }

    async fn accepts(&self) -> anyhow::Result<()> {
        let deadline = Instant::now() + START;
        while TcpStream::connect(("127.0.0.1", self.port)).await.is_err() {
            if Instant::now() > deadline {
                bail!("the engine on port {} does not accept connections", self.port);
            }
            sleep(RETRY).await;
        }
        Ok(())
    }
}

fn sim(port: u16, model: &str) -> anyhow::Result<Child> {
    Command::new(crate::binary())
        .args(["sim", model, "--host", "127.0.0.1", "--port", &port.to_string(), "--sim-speed", SIM_SPEED])
        .args(["--max-model-len", "131072"])
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .kill_on_drop(true)
        .spawn()
        .context("sluice sim")
}
