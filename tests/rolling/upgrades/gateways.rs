//! The gateways, of which each takes over from the one before.
//!
//! All share one configuration, one folder and one access log. At most [`DRAINING_MAX`] of them
//! drain when an upgrade begins.

use std::fs;
use std::net::SocketAddr;
use std::path::PathBuf;

use anyhow::{Context as _, ensure};
use nix::sys::signal::Signal;
use serde_json::Value;
use sluice_admin::{AdminClient, Status};
use tempfile::TempDir;
use tokio::process::Child;
use tokio::time::{Instant, sleep, timeout};

use super::engine::CountingEngine;
use crate::ports::free_port;
use crate::rig::{LOOK, TIMEOUT};
use crate::serve::{self, serve};

const DRAINING_MAX: usize = 5;

/// The newest gateway, and the older ones that still drain.
pub(super) struct Gateways {
    folder: TempDir,
    address: SocketAddr,
    admin: AdminClient,
    running: Child,
    draining: Vec<Child>,
    most: usize,
}

impl Gateways {
    pub(super) async fn start(engines: &[CountingEngine], slots: u32, permits: u32) -> anyhow::Result<Self> {
        let folder = tempfile::tempdir()?;
        let (port, admin) = (free_port(), free_port());
        let log = folder.path().join("access.jsonl");
        let mut text = format!(
            "[server]\nlisten = \"127.0.0.1:{port}\"\nadmin = \"127.0.0.1:{admin}\"\n[access_log]\npath = {log:?}\n\
             [[model]]\nname = \"m\"\n[[pool]]\nname = \"p\"\nmodels = [\"m\"]\nslots = {slots}\n\
             long_prefix = {{ threshold = \"1k\", slots = {permits} }}\nqueue = {{ length = 4096, timeout = \"50s\" }}\n"
        );
        for (number, engine) in engines.iter().enumerate() {
            text += &format!("[[pool.backend]]\nname = \"e{number}\"\nurl = \"http://{}\"\n", engine.address());
        }
        fs::write(folder.path().join("sluice.toml"), text)?;
        let running = serve(folder.path(), &[])?;
        let admin = AdminClient::new(&format!("127.0.0.1:{admin}"), None)?;
        let address = SocketAddr::from(([127, 0, 0, 1], port));
        let gateways = Self { folder, address, admin, running, draining: Vec::new(), most: 1 };
        let deadline = Instant::now() + TIMEOUT;
        while !gateways
            .status()
            .await
            .is_ok_and(|status| status.pools[0].backends.iter().all(|one| one.state == "ready"))
        {
            ensure!(Instant::now() < deadline, "it does not start:\n{}", gateways.log());
            sleep(LOOK).await;
        }
        Ok(gateways)
    }

    pub(super) fn address(&self) -> SocketAddr {
        self.address
    }

    /// The maximum number of gateways that served requests at once.
    pub(super) fn most(&self) -> usize {
        self.most
    }

    async fn status(&self) -> anyhow::Result<Status> {
        Ok(self.admin.get("/admin/status").await?)
    }

    /// Starts the next gateway, and returns when it has taken over.
    pub(super) async fn upgrade(&mut self) -> anyhow::Result<()> {
        let deadline = Instant::now() + TIMEOUT;
        while self.draining.len() >= DRAINING_MAX {
            self.reap()?;
            ensure!(Instant::now() < deadline, "gateways do not end:\n{}", self.log());
            sleep(LOOK).await;
        }
        let handed_over = self.handed_over();
        let next = serve(self.folder.path(), &["--upgrade"])?;
        self.draining.push(std::mem::replace(&mut self.running, next));
        while self.handed_over() == handed_over {
            ensure!(self.running.try_wait()?.is_none(), "the next one has ended:\n{}", self.log());
            ensure!(Instant::now() < deadline, "no hand-over:\n{}", self.log());
            sleep(LOOK).await;
        }
        self.reap()?;
        self.most = self.most.max(self.draining.len() + 1);
        Ok(())
    }

    fn handed_over(&self) -> usize {
        serve::log(self.folder.path(), usize::MAX).matches("handed over in").count()
    }

    /// Removes the gateways that have ended. Fails if one of them had an exit status other than 0.
    fn reap(&mut self) -> anyhow::Result<()> {
        let mut left = Vec::new();
        for mut child in std::mem::take(&mut self.draining) {
            match child.try_wait()? {
                Some(status) => ensure!(status.success(), "one ended with {status}:\n{}", self.log()),
                None => left.push(child),
            }
        }
        self.draining = left;
        Ok(())
    }

    pub(super) async fn until(&self, what: &str, holds: impl Fn() -> bool) -> anyhow::Result<()> {
        let deadline = Instant::now() + TIMEOUT;
        while !holds() {
            ensure!(Instant::now() < deadline, "timed out waiting until {what}:\n{}", self.log());
            sleep(LOOK).await;
        }
        Ok(())
    }

    /// Waits until only the newest gateway runs, and stops it. All requests must have ended.
    /// Returns a line for each backend on which this gateway still held slots or tokens.
    pub(super) async fn end(&mut self) -> anyhow::Result<Vec<String>> {
        for mut child in std::mem::take(&mut self.draining) {
            let status = timeout(TIMEOUT, child.wait()).await.context("it does not end")??;
            ensure!(status.success(), "one ended with {status}:\n{}", self.log());
        }
        let mut left = Vec::new();
        for backend in &self.status().await?.pools[0].backends {
            let used =
                (backend.slots.used, backend.tokens.used, backend.prefill_tokens.used, backend.long_prefills.used);
            if used != (0, 0, 0, 0) {
                left.push(format!("{}: {used:?}", backend.name));
            }
        }
        serve::signal(&self.running, Signal::SIGTERM)?;
        let status = timeout(TIMEOUT, self.running.wait()).await.context("it does not stop")??;
        ensure!(status.success(), "the last one ended with {status}:\n{}", self.log());
        Ok(left)
    }

    /// The ids of all requests, which must be completed.
    pub(super) fn access_log(&self) -> anyhow::Result<Vec<String>> {
        let text = fs::read_to_string(self.path("access.jsonl"))?;
        let id = |line: &str| {
            let line: Value = serde_json::from_str(line)?;
            ensure!(line["outcome"] == "completed", "{line}");
            Ok(line["request_id"].to_string())
        };
        text.lines().map(id).collect()
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    pub(super) fn log(&self) -> String {
        serve::log(self.folder.path(), 60)
    }
}
