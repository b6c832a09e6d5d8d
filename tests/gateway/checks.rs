//! `sluice check` agrees with `sluice serve` and with a reload.
//!
//! All three refuse the same configurations with the same words. There is one exception: a file
//! that the user of the check may not read is a warning of the check, not an error.

use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _};
use std::path::Path;

use nix::sys::signal::Signal;

use crate::commands::{output, run, sluice};
use crate::ports::free_port;
use crate::stop::Program;
use crate::test_gateway::{TestGateway, eventually};

/// A configuration with one engine, which `command` starts (usually this program as a simulator).
/// `table` is the rest of the `launch` table.
fn configuration(state: &Path, command: &str, table: &str) -> String {
    format!(
        "[server]\nlisten = \"127.0.0.1:0\"\nadmin = \"127.0.0.1:0\"\n[fleet]\nstate = {state:?}\n\
         [[model]]\nname = \"m\"\n[[pool]]\nname = \"p\"\nmodels = [\"m\"]\n\
         [[pool.backend]]\nname = \"a\"\nlaunch = {{ command = {command}, {table} }}\n"
    )
}

fn sim(flags: &str) -> String {
    format!(
        "[{:?}, \"sim\", \"m\", \"--sim-speed\", \"1000\", \"--sim-startup\", \"0.1\"{flags}]",
        env!("CARGO_BIN_EXE_sluice")
    )
}

/// Invalid configurations: command, rest of the `launch` table, and a part of the error message.
fn wrong() -> Vec<(String, String, &'static str)> {
    let port = free_port();
    let args = |args: &str| (sim(""), format!("port = {port}, args = {{ {args} }}"));
    let with = |(command, table): (String, String), said| (command, table, said);
    vec![
        (
            "[\"vllm-is-not-here\", \"serve\", \"m\"]".to_owned(),
            format!("port = {port}"),
            "vllm-is-not-here: not in PATH",
        ),
        (
            "[\"/nowhere/vllm\", \"serve\", \"m\"]".to_owned(),
            format!("port = {port}"),
            "/nowhere/vllm: not an executable file",
        ),
        (sim(", \"--port\", \"8001\""), format!("port = {port}"), "--port 8001 contradicts launch.port"),
        (sim(", \"--port=8001\""), "port = 0".to_owned(), "set the port in launch.port only"),
        (sim(", \"--no-such-flag\", \"1\""), format!("port = {port}"), "no flag --no-such-flag"),
        with(args("port = 8001"), "--port 8001 contradicts launch.port"),
        with(args("max-num-seqs = \"many\""), "max-num-seqs"),
        with(args("max-num-seqs = 0"), "max-num-seqs = 0 must be at least 1"),
        with(args("max_num_seqs = 0"), "max-num-seqs = 0 must be at least 1"),
        with(args("max-num-seqs = [\"1\", \"2\"]"), "max-num-seqs takes one value"),
        with(args("max-num-sequences = 4"), "no flag --max-num-sequences; did you mean max-num-seqs?"),
        with(args("max-num-seqs = 4, max_num_seqs = 8"), "used twice"),
        with(args("--max-num-seqs = 4"), "without its leading dashes"),
        with(args("gpu-memory-utilization = 1.5"), "must be above 0 and at most 1"),
        with(args("max-num-seqs = 512, max-num-batched-tokens = 256"), "must be greater than or equal to max_num_seqs"),
        with(args("tensor-parallel-size = 2"), "needs 2 devices, gpu lists 1"),
        with(args("ssl-certfile = \"/x.pem\""), "remove ssl-certfile"),
        with(args("model = \"other\""), "set the model in one of the two"),
        with(args("lora-modules = [\"x=/nowhere\"], enable-lora = true"), "the folder /nowhere does not exist"),
    ]
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_check_refuses_a_start_and_a_reload_refuse_with_the_same_words() {
    let folder = tempfile::tempdir().unwrap();
    let (file, state) = (folder.path().join("sluice.toml"), folder.path().join("state"));
    let path = file.to_str().unwrap();
    let good = configuration(&state, &sim(""), &format!("port = {}, gpu = [0]", free_port()));
    std::fs::write(&file, &good).unwrap();
    let (code, out, err) = run(&["check", path]).await;
    assert_eq!(code, 0, "{out}{err}");
    assert!(!state.exists(), "check writes nothing");
    let gateway = TestGateway::from_file(&file).await;
    let admin = format!("http://{}", gateway.admin());
    for (command, table, said) in wrong() {
        let table = if table.contains("tensor-parallel") { format!("{table}, gpu = [0]") } else { table };
        std::fs::write(&file, configuration(&folder.path().join("other"), &command, &table)).unwrap();
        let (code, out, checked) = run(&["check", path]).await;
        assert_eq!((code, out.as_str()), (78, ""), "{command} {table}: {checked}");
        assert!(checked.contains(said), "{command} {table}: {checked}");
        let (code, _, served) = run(&["serve", path]).await;
        assert_eq!(code, 78, "{served}");
        assert!(served.ends_with(&checked), "{served}\nand {checked}");
        std::fs::write(&file, configuration(&state, &command, &table)).unwrap();
        let (code, out, reloaded) = run(&["reload", "--admin", &admin]).await;
        assert_eq!((code, out.as_str()), (1, ""), "{reloaded}");
        assert!(reloaded.contains(said) && reloaded.contains("nothing was changed"), "{reloaded}");
    }
    let table = format!("port = {}, args = {{ max-num-seqs = 0, port = 1 }}", free_port());
    std::fs::write(&file, configuration(&state, "[\"/nowhere/vllm\", \"serve\", \"m\"]", &table)).unwrap();
    let (_, _, checked) = run(&["check", path]).await;
    for said in ["/nowhere/vllm: not an", "--port 1 contradicts", "max-num-seqs = 0 must be"] {
        assert!(checked.contains(said), "{checked}");
    }
    std::fs::write(&file, good.replace("name = \"m\"\n", "name = \"m\"\naliases = [\"n\"]\n")).unwrap();
    let (code, out, err) = run(&["reload", "--admin", &admin]).await;
    assert_eq!((code, err.as_str()), (0, ""), "{out}");
    assert!(out.starts_with("reloaded:\n") && out.contains("aliases"), "{out}");
    gateway.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_engine_that_does_not_change_is_not_checked_again_at_a_reload() {
    let folder = tempfile::tempdir().unwrap();
    let (file, state) = (folder.path().join("sluice.toml"), folder.path().join("state"));
    let program = folder.path().join("vllm");
    std::os::unix::fs::symlink(env!("CARGO_BIN_EXE_sluice"), &program).unwrap();
    let command = format!("[{program:?}, \"sim\", \"m\", \"--sim-speed\", \"1000\", \"--sim-startup\", \"0.1\"]");
    let text = configuration(&state, &command, "port = 0");
    std::fs::write(&file, &text).unwrap();
    let gateway = TestGateway::from_file(&file).await;
    let admin = format!("http://{}", gateway.admin());
    std::fs::remove_file(&program).unwrap();
    let reload = async |text: String| {
        std::fs::write(&file, text).unwrap();
        run(&["reload", "--admin", &admin]).await
    };
    let (code, out, err) = reload(text.replace("models = [\"m\"]", "models = [\"m\"]\nslots = 7")).await;
    assert_eq!(code, 0, "{err}");
    assert!(out.contains("slots"), "{out}");
    let (code, _, err) = reload(text.replace("port = 0", "port = 0, args = { max-num-seqs = 4 }")).await;
    assert_eq!(code, 1, "{err}");
    assert!(err.contains("not an executable file"), "{err}");
    gateway.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn files_and_folders_that_a_start_would_fail_at_are_named() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("sluice.toml");
    let path = file.to_str().unwrap();
    std::fs::write(folder.path().join("file"), "").unwrap();
    std::fs::write(folder.path().join("tokenizer.json"), "{}").unwrap();
    let text = configuration(&folder.path().join("file/state"), &sim(""), "port = 0");
    std::fs::write(&file, text.replace("[[pool]]", "tokenizer = \"tokenizer.json\"\n[[pool]]")).unwrap();
    let (code, _, err) = run(&["check", path]).await;
    assert_eq!(code, 78, "{err}");
    assert!(err.contains("model[0].tokenizer: ") && err.contains("fleet.state: "), "{err}");
    let (code, _, served) = run(&["serve", path]).await;
    assert_eq!(code, 78, "{served}");
    assert!(served.contains("fleet.state: "), "{served}");
}

/// A copy of the program that every user can run, and a user who may not read a file without any
/// permission. `None` is the current user.
fn another_user(folder: &Path) -> (std::path::PathBuf, Option<u32>) {
    let program = folder.join("sluice");
    std::fs::set_permissions(folder, std::fs::Permissions::from_mode(0o755)).unwrap();
    std::fs::copy(env!("CARGO_BIN_EXE_sluice"), &program).unwrap();
    // Root may read every file, so another user must run the program.
    (program, (std::fs::metadata("/proc/self").unwrap().uid() == 0).then_some(65_534))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn files_that_are_denied_are_a_remark_of_check_and_end_a_start() {
    let folder = tempfile::tempdir().unwrap();
    let (program, user) = another_user(folder.path());
    let (file, state) = (folder.path().join("sluice.toml"), folder.path().join("state"));
    std::fs::create_dir(&state).unwrap();
    std::fs::set_permissions(&state, std::fs::Permissions::from_mode(0o0)).unwrap();
    let command = format!("[{program:?}, \"sim\", \"m\"]");
    std::fs::write(&file, configuration(&state, &command, "port = 0")).unwrap();
    let run = async |subcommand: &str| {
        let mut command = tokio::process::Command::new(&program);
        command.args([subcommand, file.to_str().unwrap()]);
        if let Some(user) = user {
            command.uid(user).gid(user);
        }
        output(&mut command).await
    };
    let (code, _, checked) = run("check").await;
    assert_eq!(code, 0, "{checked}");
    assert!(checked.contains("run sluice check as that user"), "{checked}");
    assert_eq!(checked.matches("fleet.state").count(), 1, "{checked}");
    let (code, _, served) = run("serve").await;
    assert_eq!(code, 78, "{served}");
    assert!(served.contains("fleet.state: ") && served.contains("Permission denied"), "{served}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn signals_that_come_while_a_start_checks_the_configuration_do_not_kill_it() {
    let folder = tempfile::tempdir().unwrap();
    let (file, asked) = (folder.path().join("sluice.toml"), folder.path().join("asked"));
    let script = format!("touch '{}'; exec sleep 60", asked.display());
    let text =
        configuration(&folder.path().join("state"), &format!("[\"sh\", \"-c\", {script:?}, \"serve\"]"), "port = 0");
    std::fs::write(&file, text).unwrap();
    let mut program = Program::begin(&file);
    eventually("its program is asked for its flags", async || asked.exists()).await;
    program.signal(Signal::SIGHUP);
    program.signal(Signal::SIGTERM);
    program.line("stopped while the configuration was checked").await;
    assert_eq!(program.code().await, Some(0), "{}", program.log);
    assert!(!folder.path().join("state/journal.jsonl").exists(), "nothing was started");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn without_a_name_the_file_of_the_folder_is_read_unless_engines_are_given() {
    let folder = tempfile::tempdir().unwrap();
    let run = async |args: &[&str]| output(sluice(args).current_dir(folder.path())).await;
    for args in [&["serve"][..], &["serve", "--upgrade"], &["check"]] {
        let (code, _, said) = run(args).await;
        assert!(code == 2 && said.contains("there is no ./sluice.toml"), "{args:?}: {said}");
    }
    std::fs::write(folder.path().join("sluice.toml"), "[server]\nlissten = 1\n").unwrap();
    for args in [&["serve"][..], &["check"], &["serve", "sluice.toml"], &["serve", "--config", "sluice.toml"]] {
        let (code, _, said) = run(args).await;
        assert!(code == 78 && said.contains("sluice.toml:2:1: server.lissten"), "{args:?}: {said}");
    }
    let taken = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = taken.local_addr().unwrap().to_string();
    let (code, _, said) = run(&["serve", "--backend", "http://127.0.0.1:9", "--listen", &address]).await;
    assert!(code == 1 && said.contains("in use") && said.contains("started from flags"), "{said}");
    for args in [
        &["serve", "a.toml", "--config", "b.toml"][..],
        &["serve", "a.toml", "--backend", "http://a"],
        &["serve", "--listen", ":1"],
    ] {
        assert_eq!(run(args).await.0, 2, "{args:?}");
    }
}
