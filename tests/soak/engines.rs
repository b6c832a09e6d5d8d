//! The engines of the soak: processes of `sluice sim`, or mock engines inside the test. Both can be
//! killed and revived.
//!
//! A killed engine ends as after SIGKILL: all its connections break at once, without an error
//! response. It returns on the same port. The counters of `sluice sim` then begin at zero, and the
//! counters of the mock go on.

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

const START: Duration = Duration::from_secs(20);
const RETRY: Duration = Duration::from_millis(20);
/// Speed of a simulated engine, as a multiple of the modelled GPU's speed. With it, short responses
/// take about ten milliseconds, and endless ones two minutes.
const SIM_SPEED: u32 = 5;

#[derive(Clone, Copy, PartialEq)]
pub(crate) enum Kind {
    /// The mock of `benches/overhead`, inside this process.
    Mock,
    /// A process of `sluice sim`, this many times as fast as the modelled GPU.
    Sim { speed: u32 },
}

impl Kind {
    pub(crate) const FAST: Self = Self::Sim { speed: SIM_SPEED };

    /// The kind in `SLUICE_SOAK_ENGINE`: `mock` or `sim`.
    pub(crate) fn from_env(default: Self) -> Self {
        match std::env::var("SLUICE_SOAK_ENGINE").as_deref() {
            Ok("mock") => Self::Mock,
            Ok("sim") => Self::FAST,
            _ => default,
        }
    }
}

enum Running {
    Mock(Arc<Counters>, JoinHandle<()>),
    Sim(Child, u32),
}

pub(crate) struct Engine {
    pub(crate) port: u16,
    model: &'static str,
    running: Running,
}

impl Engine {
    pub(crate) async fn start(kind: Kind, model: &'static str) -> anyhow::Result<Self> {
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        let port = listener.local_addr()?.port();
        let running = match kind {
            Kind::Mock => {
                let counters = Arc::new(Counters::default());
                Running::Mock(Arc::clone(&counters), tokio::spawn(serve(listener, counters)))
            }
            Kind::Sim { speed } => {
                drop(listener);
                Running::Sim(sim(port, model, speed)?, speed)
            }
        };
        let engine = Self { port, model, running };
        engine.accepts().await?;
        Ok(engine)
    }

    pub(crate) fn process(&self) -> anyhow::Result<u32> {
        match &self.running {
            Running::Mock(..) => Ok(std::process::id()),
            Running::Sim(child, _) => child.id().context("the engine has ended"),
        }
    }

    /// Kills the engine: connections break without a response.
    pub(crate) async fn kill(&mut self) {
        match &mut self.running {
            Running::Mock(counters, task) => {
                counters.killed.store(true, Relaxed);
                task.abort();
                let _ = task.await;
            }
            // The error is ignored, because an engine that has already ended needs no kill.
            Running::Sim(child, _) => drop(child.kill().await),
        }
    }

    pub(crate) async fn revive(&mut self) -> anyhow::Result<()> {
        match &mut self.running {
            Running::Mock(counters, task) => {
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
            Running::Sim(child, speed) => *child = sim(self.port, self.model, *speed)?,
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

fn sim(port: u16, model: &str, speed: u32) -> anyhow::Result<Child> {
    Command::new(crate::program::binary())
        .args(["sim", model, "--host", "127.0.0.1", "--port", &port.to_string(), "--sim-speed", &speed.to_string()])
        // A killed engine leaves its second process behind, which would otherwise wait for five
        // minutes.
        .args(["--max-model-len", "131072", "--sim-orphan", "0"])
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .kill_on_drop(true)
        .spawn()
        .context("sluice sim")
}
