//! A folder with the file of a tuning, and with `sluice sim` in place of `vllm serve`. The tests
//! run `sluice tune` in it.
//!
//! The environment of engines contains the name of the folder as a mark. A test finds its engines
//! by the mark, and kills them if it fails.

use std::os::unix::fs::PermissionsExt as _;
use std::path::PathBuf;
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use tempfile::TempDir;

use crate::ports::free_port;
use crate::processes;

/// Time limit of every wait.
pub(crate) const TIMEOUT: Duration = Duration::from_secs(120);

/// A tuning in a separate folder.
pub(crate) struct Rig {
    folder: TempDir,
}

#[derive(Debug)]
pub(crate) struct Ran {
    pub(crate) code: Option<i32>,
    pub(crate) out: String,
    pub(crate) err: String,
}

impl Rig {
    pub(crate) fn new(tune: &str) -> Self {
        let rig = Self { folder: TempDir::new().unwrap() };
        std::fs::write(rig.path("t.toml"), tune).unwrap();
        rig
    }

    /// Also writes a configuration `sluice.toml` that launches `engines` simulated engines with
    /// these flags.
    pub(crate) fn real(engines: usize, flags: &str, tune: &str) -> Self {
        let rig = Self::new(&format!("config = \"sluice.toml\"\n{tune}"));
        let program = env!("CARGO_BIN_EXE_sluice");
        let words = format!("sim model --served-model-name m --sim-startup 0 {flags}");
        let words: Vec<String> = words.split_whitespace().map(|word| format!("{word:?}")).collect();
        let mut text = "[[model]]\nname = \"m\"\n[[pool]]\nname = \"p\"\n".to_owned();
        for engine in 0..engines {
            text += &format!(
                "[[pool.backend]]\nname = \"e{engine}\"\n[pool.backend.launch]\nport = {}\ncommand = [{program:?}, {}]\n\
                 env = {{ VLLM_CACHE_ROOT = {:?} }}\n",
                free_port(),
                words.join(", "),
                rig.path("cache")
            );
        }
        std::fs::write(rig.path("sluice.toml"), text).unwrap();
        rig
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    pub(crate) fn read(&self, name: &str) -> String {
        std::fs::read_to_string(self.path(name)).unwrap_or_default()
    }

    fn command(&self, args: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_sluice"));
        command.args(["tune", "t.toml"]).args(args).current_dir(self.folder.path()).stdin(Stdio::null());
        command.stdout(Stdio::piped()).stderr(Stdio::piped());
        command
    }

    /// Runs `sluice tune t.toml ARGS` to its end.
    pub(crate) fn tune(&self, args: &[&str]) -> Ran {
        ran(self.command(args).output().unwrap())
    }

    /// Runs `sluice tune t.toml ARGS` too, but no file can grow beyond `blocks` blocks of 512
    /// bytes, as on a full disk.
    pub(crate) fn tune_on_full_disk(&self, blocks: u32, args: &[&str]) -> Ran {
        let mut shell = Command::new("sh");
        let script = format!("trap '' XFSZ; ulimit -f {blocks}; exec \"$@\"");
        shell.args(["-c", &script, "sh", env!("CARGO_BIN_EXE_sluice"), "tune", "t.toml"]).args(args);
        ran(shell.current_dir(self.folder.path()).stdin(Stdio::null()).output().unwrap())
    }

    /// Runs `sluice tune --auto-tune-compat` with these environment variables, `bin` first in the
    /// path.
    pub(crate) fn tune_compat(&self, variables: &[(&str, PathBuf)]) -> Ran {
        let mut command = Command::new(env!("CARGO_BIN_EXE_sluice"));
        let path = format!("{}:{}", self.path("bin").display(), std::env::var("PATH").unwrap_or_default());
        command
            .args(["tune", "--auto-tune-compat"])
            .current_dir(self.folder.path())
            .stdin(Stdio::null())
            .env("PATH", path);
        ran(command.envs(variables.iter().cloned()).output().unwrap())
    }

    /// Starts a gateway with the configuration, so that its engines carry the mark of this folder.
    /// Returns the process and the address of its admin port.
    pub(crate) fn serve(&self) -> (Child, String) {
        let (listen, admin) = (free_port(), free_port());
        let head = format!(
            "[server]\nlisten = \"127.0.0.1:{listen}\"\nadmin = \"127.0.0.1:{admin}\"\n[fleet]\nramp = \"0s\"\nstate = {:?}\n",
            self.path("state").canonicalize().unwrap_or(self.path("state"))
        );
        std::fs::write(self.path("sluice.toml"), head + &self.read("sluice.toml")).unwrap();
        let mut command = Command::new(env!("CARGO_BIN_EXE_sluice"));
        command.args(["serve", "--config", "sluice.toml"]).current_dir(self.folder.path()).stdin(Stdio::null());
        let log = std::fs::File::create(self.path("serve.log")).unwrap();
        (command.stdout(log.try_clone().unwrap()).stderr(log).spawn().unwrap(), format!("http://127.0.0.1:{admin}"))
    }

    /// The backend of this name as the gateway reports it, or null while the gateway does not
    /// respond.
    pub(crate) fn backend(&self, admin: &str, name: &str) -> serde_json::Value {
        let mut command = Command::new(env!("CARGO_BIN_EXE_sluice"));
        let ran = ran(command.args(["backend", "--admin", admin, "list", "--json"]).output().unwrap());
        let list: serde_json::Value = serde_json::from_str(&ran.out).unwrap_or_default();
        let all = list.as_array().cloned().unwrap_or_default();
        let own = all.into_iter().map(|one| one["backend"].clone()).find(|backend| backend["name"] == name);
        own.unwrap_or_default()
    }

    /// Runs the commands by which a user recovers a backend that a killed tuner has left.
    pub(crate) fn give_back(&self, admin: &str, name: &str) {
        for action in [&["restart", name, "--reset", "--wait"][..], &["enable", name]] {
            let mut command = Command::new(env!("CARGO_BIN_EXE_sluice"));
            let ran = ran(command.args(["backend", "--admin", admin]).args(action).output().unwrap());
            assert_eq!(ran.code, Some(0), "{action:?}: {ran:?}");
        }
    }

    pub(crate) fn script(&self, name: &str, text: &str) {
        let path = self.path(name);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(&path, text).unwrap();
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).unwrap();
    }

    /// Starts `sluice tune t.toml ARGS` and does not wait.
    pub(crate) fn begin(&self, args: &[&str]) -> Child {
        self.command(args).spawn().unwrap()
    }

    /// Number of trials in the journal.
    pub(crate) fn trials(&self) -> usize {
        self.read("t.journal").lines().count().saturating_sub(1)
    }

    /// Number of starts of engines in the engines' journal.
    pub(crate) fn starts(&self) -> usize {
        let journal = self.read("t.engines/journal.jsonl");
        journal.lines().filter(|line| line.contains("\"step\":\"start\"") && line.contains("\"trace\"")).count()
    }

    /// Ids of the living processes of this folder's engines.
    pub(crate) fn engines(&self) -> Vec<i32> {
        processes::with(self.of_engine())
    }

    fn of_engine(&self) -> impl Fn(&[u8]) -> bool + use<> {
        let mark = format!("SLUICE_ENGINE={}", self.folder.path().canonicalize().unwrap().display());
        move |variable| variable.starts_with(mark.as_bytes())
    }
}

impl Drop for Rig {
    fn drop(&mut self) {
        processes::kill_with(self.of_engine());
    }
}

fn ran(output: Output) -> Ran {
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
    Ran { code: output.status.code(), out: text(output.stdout), err: text(output.stderr) }
}

pub(crate) fn until(what: &str, mut condition: impl FnMut() -> bool) {
    let began = Instant::now();
    while !condition() {
        assert!(began.elapsed() < TIMEOUT, "after {TIMEOUT:?} still not: {what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

pub(crate) fn end(child: Child) -> Ran {
    ran(child.wait_with_output().unwrap())
}
