//! The gateway under test, as a process that runs three engines, and its state as the admin port
//! shows it.
//!
//! Engines are `engine.sh`, which becomes `sluice sim`, or fails in the way that the test has
//! written into a file. All files are in one temporary folder. The engines have the name of this
//! folder in their environment, by which the test finds them and kills them at the end.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context as _, bail};
use nix::sys::signal::Signal;
use serde_json::Value;
use sluice_admin::{AdminClient, RestartOptions, Status, flag};
use tempfile::TempDir;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::UnixStream;
use tokio::process::Child;
use tokio::time::{Instant, sleep};

use crate::ports::free_port;
use crate::processes;
use crate::program::binary;
use crate::serve::{self, serve};

pub(crate) const TIMEOUT: Duration = Duration::from_secs(60);
pub(crate) const LOOK: Duration = Duration::from_millis(20);
pub(crate) const ENGINES: [&str; 3] = ["a", "b", "c"];

/// A gateway, and the folder with its files and the files of its engines.
pub(crate) struct Rig {
    pub(crate) port: u16,
    pub(crate) ports: [u16; 3],
    admin: AdminClient,
    folder: TempDir,
    child: Option<Child>,
}

impl Rig {
    /// Starts a gateway and waits until its engines serve. `fleet`: further lines of `[fleet]`.
    pub(crate) async fn start(fleet: &str) -> anyhow::Result<Self> {
        let folder = tempfile::tempdir()?;
        let engines = [(); 3].map(|()| free_port());
        let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/rolling/engine.sh");
        let mut text = format!(
            "[health]\nprobe_interval = \"100ms\"\nstall = \"2s\"\nejection_base = \"200ms\"\nejection_max = \"1s\"\n\
             [fleet]\ngrace = \"500ms\"\nramp = \"150ms\"\nbackoff = \"100ms\"\nbackoff_max = \"400ms\"\n\
             restarts = 1000\nwarm_up = 2\ndrain = \"20s\"\nstart_timeout_scale = 0.05\n{fleet}\n\
             [[model]]\nname = \"m\"\n[[pool]]\nname = \"p\"\nmodels = [\"m\"]\n\
             queue = {{ length = 512, timeout = \"60s\" }}\n"
        );
        for (name, port) in ENGINES.iter().zip(engines) {
            text += &format!(
                "[[pool.backend]]\nname = \"{name}\"\n[pool.backend.launch]\n\
                 command = [\"/bin/bash\", {script:?}, \"{name}\"]\nport = {port}\n\
                 env = {{ RIG = {:?}, SLUICE = {:?} }}\nargs = {{ max-num-seqs = 64 }}\n",
                folder.path(),
                binary(),
            );
        }
        let rig = Self::serving(folder, engines, &text).await?;
        rig.settled().await?;
        Ok(rig)
    }

    /// Starts a gateway with this text as configuration file, to which `serving` adds the
    /// addresses.
    pub(crate) async fn serving(folder: TempDir, ports: [u16; 3], text: &str) -> anyhow::Result<Self> {
        let (port, admin_port) = (free_port(), free_port());
        let server = format!("[server]\nlisten = \"127.0.0.1:{port}\"\nadmin = \"127.0.0.1:{admin_port}\"\n");
        fs::write(folder.path().join("sluice.toml"), server + text)?;
        let admin = AdminClient::new(&format!("127.0.0.1:{admin_port}"), None)?;
        let mut rig = Self { port, ports, admin, folder, child: None };
        rig.run().await?;
        Ok(rig)
    }

    /// Starts the gateway's process and waits until its admin port responds.
    pub(crate) async fn run(&mut self) -> anyhow::Result<()> {
        self.child = Some(serve(self.folder.path(), &[])?);
        self.until("the gateway responds", async |rig| Ok(rig.status().await.is_ok())).await
    }

    /// Starts a gateway that takes the place of the running one, and waits until the old one has
    /// ended.
    pub(crate) async fn upgrade(&mut self) -> anyhow::Result<()> {
        let new = serve(self.folder.path(), &["--upgrade"])?;
        let mut old = self.child.replace(new).context("the gateway does not run")?;
        let status = tokio::time::timeout(TIMEOUT, old.wait()).await.context("the old one does not end")??;
        anyhow::ensure!(status.success(), "the old one ended with {status}:\n{}", self.log());
        Ok(())
    }

    /// Asks the running gateway to hand over, as a newer gateway does, and then breaks off. The
    /// running gateway must go on.
    pub(crate) async fn fail_upgrade(&self) -> anyhow::Result<()> {
        let mut stream = UnixStream::connect(self.path(".sluice/upgrade.sock")).await?;
        let hello = br#"{"sluice_upgrade":1,"version":"9.9","pid":77}"#;
        stream.write_u32_le(u32::try_from(hello.len())?).await?;
        stream.write_all(hello).await?;
        let mut answer = vec![0; stream.read_u32_le().await? as usize];
        stream.read_exact(&mut answer).await?;
        let answer = String::from_utf8(answer)?;
        anyhow::ensure!(answer.contains("accepted"), "{answer}");
        drop(stream);
        self.until("it goes on", async |rig| Ok(rig.log().contains("has failed before it served"))).await?;
        self.settled().await
    }

    pub(crate) async fn kill(&mut self) -> anyhow::Result<()> {
        let mut child = self.child.take().context("the gateway does not run")?;
        child.kill().await?;
        Ok(())
    }

    pub(crate) async fn stop(&mut self) -> anyhow::Result<()> {
        let mut child = self.child.take().context("the gateway does not run")?;
        serve::signal(&child, Signal::SIGTERM)?;
        let status = tokio::time::timeout(TIMEOUT, child.wait()).await.context("it does not stop")??;
        anyhow::ensure!(status.success(), "ended with {status}:\n{}", self.log());
        Ok(())
    }

    /// Stops the gateway, which must leave no engine behind.
    pub(crate) async fn stop_all(&mut self) -> anyhow::Result<()> {
        self.stop().await?;
        let left = self.processes()?;
        anyhow::ensure!(left.is_empty(), "left: {left:?}\n{}", self.log());
        Ok(())
    }

    pub(crate) async fn status(&self) -> anyhow::Result<Status> {
        Ok(self.admin.get("/admin/status").await?)
    }

    /// Orders a restart of an engine. Returns the number of the change.
    pub(crate) async fn restart(&self, name: &str, sets: &[String], switches: &[&str]) -> anyhow::Result<u64> {
        let flags: Vec<_> = sets.iter().map(|set| flag(set)).collect::<Result<_, _>>()?;
        let (hold, cut) = (switches.contains(&"hold"), switches.contains(&"cut"));
        let flags = RestartOptions::of_flags(flags.iter().map(|(name, value)| (name, value)));
        Ok(self.admin.restart("p", name, &RestartOptions { hold, cut, ..flags }).await?.change)
    }

    pub(crate) async fn drain(&self, name: &str) -> anyhow::Result<()> {
        let _: Value = self.admin.post(&format!("/admin/backends/p/{name}/drain")).await?;
        Ok(())
    }

    pub(crate) async fn enable(&self, name: &str) -> anyhow::Result<()> {
        let _: Value = self.admin.post(&format!("/admin/backends/p/{name}/enable")).await?;
        Ok(())
    }

    pub(crate) async fn reconfigure(&self, from: &str, to: &str) -> anyhow::Result<()> {
        self.edit(from, to)?;
        let _: Value = self.admin.post("/admin/reload").await?;
        Ok(())
    }

    pub(crate) fn edit(&self, from: &str, to: &str) -> anyhow::Result<()> {
        let path = self.path("sluice.toml");
        let text = fs::read_to_string(&path)?;
        anyhow::ensure!(text.contains(from), "nothing to replace: {from:?} in\n{text}");
        Ok(fs::write(&path, text.replace(from, to))?)
    }

    /// The lines of the configuration file that describe a backend.
    pub(crate) fn described(&self, name: &str) -> anyhow::Result<String> {
        let text = fs::read_to_string(self.path("sluice.toml"))?;
        let from = text.find(&format!("[[pool.backend]]\nname = \"{name}\"")).context("no such backend")?;
        let rest = &text[from..];
        let end = rest[1..].find("[[pool.backend]]").map_or(rest.len(), |end| end + 1);
        Ok(rest[..end].to_owned())
    }

    /// Processes of one engine: its script, and the simulator that the script becomes.
    pub(crate) fn processes_of(&self, name: &str) -> anyhow::Result<Vec<i32>> {
        let mark = format!("#p/{name}#");
        let is = |word: &[u8]| word.starts_with(b"SLUICE_ENGINE=") && String::from_utf8_lossy(word).contains(&mark);
        let of = |pid: &i32| processes::has(*pid, is);
        Ok(self.processes()?.into_iter().map(|(pid, _)| pid).filter(of).collect())
    }

    /// Whether all engines have processes, and each process has this variable (`NAME=value`) in its
    /// environment. If `set` is false, each process must lack it.
    pub(crate) fn all_have(&self, variable: &str, set: bool) -> anyhow::Result<bool> {
        let has = |pid: &i32| processes::has(*pid, |word| word == variable.as_bytes());
        for name in ENGINES {
            let processes = self.processes_of(name)?;
            if processes.is_empty() || processes.iter().any(|pid| has(pid) != set) {
                return Ok(false);
            }
        }
        Ok(true)
    }

    pub(crate) async fn settled(&self) -> anyhow::Result<()> {
        self.until("all engines serve", async |rig| {
            let Ok(status) = rig.status().await else { return Ok(false) };
            let backends = &status.pools[0].backends;
            Ok(backends.iter().all(|backend| {
                let serves = backend.engine.as_ref().is_some_and(|e| e.step == "serve" && e.change.is_none());
                serves && backend.state == "ready"
            }))
        })
        .await
    }

    pub(crate) async fn until(
        &self,
        what: &str,
        holds: impl AsyncFn(&Self) -> anyhow::Result<bool>,
    ) -> anyhow::Result<()> {
        let deadline = Instant::now() + TIMEOUT;
        while !holds(self).await? {
            if Instant::now() > deadline {
                bail!("timed out waiting until {what}; the end of the log:\n{}", self.log());
            }
            sleep(LOOK).await;
        }
        Ok(())
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    pub(crate) fn log(&self) -> String {
        serve::log(self.folder.path(), 60)
    }

    pub(crate) fn journal(&self) -> anyhow::Result<Vec<Value>> {
        let mut lines = Vec::new();
        for name in [".sluice/journal.1.jsonl", ".sluice/journal.jsonl"] {
            let text = fs::read_to_string(self.path(name)).unwrap_or_default();
            for line in text.lines().filter(|line| !line.is_empty()) {
                lines.push(serde_json::from_str(line)?);
            }
        }
        Ok(lines)
    }

    /// Id and command line of all engine processes of this rig, found by their environment.
    pub(crate) fn processes(&self) -> anyhow::Result<Vec<(i32, String)>> {
        let command = |pid: i32| {
            // The process may have ended by now.
            let words = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
            (pid, String::from_utf8_lossy(&words).replace('\0', " "))
        };
        Ok(processes::with(self.of_engine()).into_iter().map(command).collect())
    }

    fn of_engine(&self) -> impl Fn(&[u8]) -> bool + use<> {
        let mark = format!("RIG={}", self.folder.path().display());
        move |word| word == mark.as_bytes()
    }
}

impl Drop for Rig {
    fn drop(&mut self) {
        drop(self.child.take());
        processes::kill_with(self.of_engine());
    }
}
