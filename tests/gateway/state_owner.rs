//! The owner of a gateway's state.
//!
//! The gateway refuses state that another user controls. That a journal names a process is no
//! reason to stop it. If a change cannot be saved, the response is an error.

use std::fs::{self, Permissions};
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::Path;
use std::process::{Child, Command, Stdio};

use crate::client::{TestClient, change};
use crate::commands::run;
use crate::engine::{Engine, completion};
use crate::test_gateway::{TestGateway, eventually, one_pool};

fn set_mode(path: &Path, mode: u32) {
    fs::set_permissions(path, Permissions::from_mode(mode)).unwrap();
}

fn write(file: &Path, url: &str, state: &Path) {
    fs::write(file, one_pool(&[url.to_owned()]) + &format!("[fleet]\nstate = {state:?}\n")).unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_state_that_others_may_write_to_is_refused_by_check_and_serve_until_it_is_mended() {
    let folder = tempfile::tempdir().unwrap();
    let (file, state) = (folder.path().join("sluice.toml"), folder.path().join("state"));
    write(&file, "http://127.0.0.1:9", &state);
    fs::create_dir(&state).unwrap();
    let (config, journal, socket) = (file.to_str().unwrap(), state.join("journal.jsonl"), state.join("upgrade.sock"));
    let reset = || {
        set_mode(&state, 0o700);
        [&journal, &socket].into_iter().for_each(|path| drop(fs::remove_file(path)));
    };
    let cases: [(&Path, &str, &dyn Fn()); 4] = [
        (&state, "chmod go-w", &|| set_mode(&state, 0o777)),
        (&journal, "chmod go-w", &|| {
            fs::write(&journal, "").unwrap();
            set_mode(&journal, 0o666);
        }),
        (&journal, "rm -r", &|| symlink("/dev/null", &journal).unwrap()),
        (&socket, "chmod go-w", &|| {
            drop(std::os::unix::net::UnixListener::bind(&socket).unwrap());
            set_mode(&socket, 0o777);
        }),
    ];
    for (path, command, spoil) in cases {
        reset();
        assert_eq!(run(&["check", config]).await.0, 0);
        spoil();
        let mend = format!("{command} {}", path.display());
        for arguments in [&["check", config][..], &["serve", "--config", config][..]] {
            let (code, out, err) = run(arguments).await;
            assert_eq!(code, 78, "{arguments:?}: {out}{err}");
            assert!(format!("{out}{err}").contains(&mend), "{mend}: {out}{err}");
        }
        assert!(Command::new("sh").args(["-c", &mend]).status().unwrap().success());
        assert_eq!(run(&["check", config]).await.0, 0, "after {mend}");
    }
}

struct Foreign(Child);

impl Foreign {
    fn start() -> Self {
        Self(Command::new("sleep").arg("600").stdout(Stdio::null()).spawn().unwrap())
    }

    /// Start time of the process, in clock ticks since boot.
    fn started(&self) -> u64 {
        let stat = fs::read_to_string(format!("/proc/{}/stat", self.0.id())).unwrap();
        stat.rsplit_once(") ").unwrap().1.split(' ').nth(19).unwrap().parse().unwrap()
    }

    fn lives(&mut self) -> bool {
        self.0.try_wait().unwrap().is_none()
    }
}

impl Drop for Foreign {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_process_that_a_journal_names_is_not_stopped_unless_it_carries_the_mark() {
    let folder = tempfile::tempdir().unwrap();
    let state = folder.path().join("state");
    fs::create_dir(&state).unwrap();
    let mut foreign = Foreign::start();
    let boot = fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap();
    let line = serde_json::json!({
        "at": "2026-01-01T00:00:00Z", "backend": "p/gone", "identity": "i",
        "life": {
            "step": "serve", "wanted": { "args": {} }, "good": { "args": {} }, "change": null, "ended": null,
            "leaving": false, "why": null, "then": "start", "restarts": [], "attempts": 0,
        },
        "trace": {
            "by": "process", "pid": foreign.0.id(), "started": foreign.started(), "boot": boot.trim(),
            "mark": format!("{}#p/gone#18c0ffee", state.display()),
        },
    });
    let journal = state.join("journal.jsonl");
    fs::write(&journal, format!("{line}\n")).unwrap();
    set_mode(&journal, 0o600);
    let text = format!(
        "[server]\nlisten = \"127.0.0.1:0\"\nadmin = \"127.0.0.1:0\"\n[fleet]\nstate = {state:?}\n\
         [[model]]\nname = \"m\"\n[[pool]]\nname = \"p\"\nmodels = [\"m\"]\n\
         [[pool.backend]]\nname = \"a\"\nlaunch = {{ command = [{:?}, \"sim\", \"m\", \"--sim-speed\", \"1000\"] }}\n",
        env!("CARGO_BIN_EXE_sluice")
    );
    let gateway = TestGateway::from_text(&text, &[]).await;
    // The gateway looks for the engine that the journal names, and then writes into the journal
    // that this engine does not run.
    eventually("the leftover is settled", async || {
        let text = fs::read_to_string(&journal).unwrap_or_default();
        text.lines().any(|line| line.contains("\"p/gone\"") && line.contains("\"step\":\"off\""))
    })
    .await;
    assert!(foreign.lives());
    assert!(gateway.stop().await);
    assert!(foreign.lives());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_order_that_cannot_be_saved_is_not_answered_with_success() {
    let engine = Engine::always(completion()).await;
    let folder = tempfile::tempdir().unwrap();
    let state = folder.path().join("state");
    fs::create_dir(&state).unwrap();
    let text = one_pool(&[engine.url()])
        + &format!(
            "[[experiment]]\nname = \"x\"\nmodels = [\"m\"]\n[[experiment.arm]]\nname = \"base\"\nweight = 50\n\
             [[experiment.arm]]\nname = \"new\"\nweight = 50\n[fleet]\nstate = {state:?}\n"
        );
    let gateway = TestGateway::from_text(&text, &[]).await;
    for (path, file) in [("/admin/experiments/x/stop", "experiments.json"), ("/admin/tuner/freeze", "tuner.json")] {
        // A folder at the path of the temporary file prevents every user, even root, from making
        // this file.
        let obstacle = state.join(format!("{file}.tmp"));
        let _ = fs::remove_file(&obstacle);
        fs::create_dir(&obstacle).unwrap();
        let response = TestClient::to(gateway.admin()).await.request(change(path)).await;
        assert_eq!(response.status(), 500, "{path}: {}", response.text());
        let error = &response.json()["error"];
        assert_eq!(error["code"], "not_saved", "{path}");
        assert!(error["message"].as_str().unwrap().contains("is carried out, but cannot be saved in"), "{error}");
        fs::remove_dir(&obstacle).unwrap();
        let response = TestClient::to(gateway.admin()).await.request(change(path)).await;
        assert_eq!(response.status(), 200, "{path}: {}", response.text());
        assert!(state.join(file).is_file());
    }
    gateway.settled().await;
}
