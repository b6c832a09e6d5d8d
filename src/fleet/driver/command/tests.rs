//! An operator's commands against a shell.
//!
//! Arguments, output and failures of the commands.

use std::collections::BTreeMap;
use std::fs;

use super::*;
use sluice_config::ArgValue;

fn words(words: &[&str]) -> sluice_config::Words {
    words.iter().map(|word| (*word).to_owned()).collect()
}

/// An "engine" that is a file: start creates it, stop removes it, status tests for it.
fn rig(start: &str) -> (tempfile::TempDir, CommandDriver) {
    let folder = tempfile::tempdir().unwrap();
    let up = folder.path().join("up").display().to_string();
    let commands = Control {
        args: BTreeMap::new(),
        start: words(&["sh", "-c", &start.replace("UP", &up), "start", ARGS_PLACEHOLDER]),
        stop: words(&["rm", &up]),
        status: words(&["test", "-e", &up]),
        timeout: Duration::from_secs(30),
    };
    let driver = CommandDriver::new("short/gpu0", commands, folder.path());
    (folder, driver)
}

fn settings() -> EngineSettings {
    let args = [("max-num-seqs", ArgValue::Int(32)), ("served-model-name", ArgValue::Text("it's".into()))];
    EngineSettings { args: BTreeMap::from(args.map(|(name, value)| (name.to_owned(), value))) }
}

#[tokio::test]
async fn commands_start_and_stop_an_engine_and_get_its_settings() {
    let (folder, driver) = rig("echo \"$@\" >UP; echo \"$SLUICE_BACKEND $SLUICE_ARGS $SLUICE_ARGS_JSON\" >>UP");
    assert_eq!(driver.status().await, EngineStatus::Absent);
    assert_eq!(driver.start(&settings()).await, Ok(EngineIdentity::Command));
    let wanted = "--max-num-seqs=32 --served-model-name=it's\nshort/gpu0 --max-num-seqs=32 \
                  '--served-model-name=it'\\''s' {\"max-num-seqs\":32,\"served-model-name\":\"it's\"}\n";
    assert_eq!(fs::read_to_string(folder.path().join("up")).unwrap(), wanted);
    assert_eq!(
        (driver.status().await, driver.find_running(None).await),
        (EngineStatus::Running, Some(EngineIdentity::Command))
    );
    assert!(driver.start(&settings()).await.is_err(), "one at a time");
    fs::remove_file(folder.path().join("up")).unwrap();
    assert_eq!(driver.status().await, EngineStatus::Ended(Exit::Unseen));
    fs::write(folder.path().join("up"), "").unwrap();
    driver.stop(StopRules::default()).await.unwrap();
    assert_eq!(driver.status().await, EngineStatus::Absent);
    driver.stop(StopRules::default()).await.expect("rm would fail now: nothing is there");
    assert_eq!(driver.adopt(&EngineIdentity::Command).await, Ok(false));
}

#[tokio::test]
async fn what_commands_print_is_the_log_that_operators_can_follow() {
    let (_folder, driver) = rig("echo pulling; echo ready >&2; printf half");
    assert_eq!(driver.log_lines(None, 10).unwrap().lines, Vec::<String>::new());
    driver.start(&settings()).await.unwrap();
    let all = driver.log_lines(None, 10).unwrap();
    assert_eq!(all.lines, ["pulling", "ready"]);
    assert!(all.note.unwrap().starts_with("short/gpu0 is started by commands, and this is what they print"));
    assert_eq!(driver.log_lines(None, 1).unwrap().lines, ["ready"]);
    // The incomplete line "half" is not shown yet.
    assert_eq!(driver.log_lines(Some(all.next), 10).unwrap().lines, Vec::<String>::new());
    let mut file = driver.open_output().unwrap();
    io::Write::write_all(&mut file, b" a line\n").unwrap();
    assert_eq!(driver.log_lines(Some(all.next), 10).unwrap().lines, ["half a line"]);
    assert_eq!(driver.log_lines(Some(1 << 40), 10).unwrap().lines.len(), 3, "a file that was begun anew");
    let first = driver.log_lines(Some(0), 1).unwrap();
    assert_eq!((&first.lines[..], first.next), (&["pulling".to_owned()][..], 8));
}

#[tokio::test]
async fn a_failed_command_is_reported_with_its_output() {
    let (_folder, driver) = rig("echo 'no such image' >&2; exit 125");
    let failure = driver.start(&settings()).await.unwrap_err();
    assert_eq!(failure.class, FailureClass::CommandFailed);
    assert!(failure.to_string().contains("no such image") && failure.to_string().contains("125"), "{failure}");
}

#[tokio::test]
async fn a_command_that_prints_much_is_reported_with_its_last_lines_and_leaves_a_small_file() {
    let (_folder, driver) = rig("yes pulling | head -c 3000000; sleep 2; echo 'no space left' >&2; exit 1");
    let failure = driver.start(&settings()).await.unwrap_err();
    assert!(failure.to_string().contains("pulling | pulling | no space left"), "{failure}");
    assert!(length(&driver.output) <= OUTPUT_MAX as u64, "{}", length(&driver.output));
}

#[tokio::test]
async fn an_engine_that_writes_to_the_output_of_its_start_is_cut_and_writes_on() {
    for status in [words(&["true"]), words(&[])] {
        let (_folder, mut driver) = rig("echo started");
        driver.commands.status = words(&["false"]);
        driver.start(&settings()).await.unwrap();
        (driver.commands.status, driver.status_interval) = (status, Duration::from_millis(10));
        let mut engine = driver.open_output().unwrap();
        engine.write_all("loading\n".repeat(50_000).as_bytes()).unwrap();
        assert_eq!(driver.tail(usize::MAX).len(), OUTPUT_MAX / 8);
        let watched = timeout(Duration::from_secs(1), driver.wait_for_exit());
        assert!(watched.await.is_err(), "it runs");
        assert!(length(&driver.output) <= OUTPUT_MAX as u64 / 2);
        engine.write_all(b"ValueError: No available memory for the cache blocks\n").unwrap();
        assert_eq!(driver.diagnose(None).class, FailureClass::NoKvMemory);
        assert_eq!(driver.log_lines(None, 2).unwrap().lines[0], "loading");
    }
}

#[tokio::test]
async fn a_command_that_does_not_exit_is_killed_with_its_children() {
    let (folder, mut driver) = rig("sleep 600 & echo $! >UP; wait");
    driver.commands.timeout = Duration::from_secs(3);
    let failure = driver.start(&settings()).await.unwrap_err();
    assert!(failure.to_string().contains("it must exit"), "{failure}");
    let child: i32 = fs::read_to_string(folder.path().join("up")).unwrap().trim().parse().unwrap();
    // The signal was sent, but on a loaded machine the child dies later.
    let deadline = Instant::now() + Duration::from_secs(60);
    while ProcessEntry::read(child).is_some_and(|row| row.is_alive()) {
        assert!(Instant::now() < deadline, "the child outlived its command");
        sleep(Duration::from_millis(10)).await;
    }
}

#[tokio::test]
async fn a_command_is_not_reaped_by_another_one_that_ends_first() {
    let (folder, driver) = rig("true");
    let up = folder.path().join("up");
    let start = words(&["sh", "-c", "echo >$0; sleep 0.3", &up.display().to_string()]);
    let none = EngineSettings::default();
    let other = CommandDriver::new("short/gpu0", driver.commands.clone(), folder.path());
    let ended = driver.run("start", &start, &none);
    let meanwhile = async {
        while !up.exists() {
            sleep(Duration::from_millis(5)).await;
        }
        // The driver sees the command alive, then ended. The call that waits for the command runs
        // on this thread, too, so it sees the end later.
        other.reap_daemons();
        std::thread::sleep(Duration::from_millis(600));
        other.reap_daemons();
    };
    let (ended, ()) = tokio::join!(ended, meanwhile);
    assert!(ended.unwrap().success());
    assert!(other.daemons.lock().is_empty());
}

#[tokio::test]
async fn an_engine_has_ended_after_several_failed_status_commands_in_a_row() {
    let (folder, mut driver) = rig("true");
    let calls = folder.path().join("calls").display().to_string();
    // Fails at the third and fourth call, and from the sixth on.
    let script = format!("echo >>{calls}; n=$(wc -l <{calls}); test $n -lt 3 -o $n -eq 5");
    driver.commands.status = words(&["sh", "-c", &script]);
    driver.status_interval = Duration::from_millis(1);
    *driver.up.lock().await = true;
    assert_eq!(driver.wait_for_exit().await, Exit::Unseen);
    assert_eq!(fs::read_to_string(&calls).unwrap().lines().count(), 8);
}

#[tokio::test]
async fn output_from_before_the_last_start_is_not_diagnosed() {
    let (folder, driver) = rig("echo 'ValueError: No available memory for the cache blocks'; touch UP");
    driver.start(&settings()).await.unwrap();
    assert_eq!(driver.diagnose(None).class, FailureClass::NoKvMemory);
    driver.stop(StopRules::default()).await.unwrap();
    let mut commands = driver.commands.clone();
    commands.start = words(&["touch", &folder.path().join("up").display().to_string()]);
    let second = CommandDriver::new("short/gpu0", commands, folder.path());
    second.start(&settings()).await.unwrap();
    assert_eq!((second.diagnose(None).class, second.tail(9).len()), (FailureClass::EngineFailed, 1));
}

#[tokio::test]
async fn wrong_settings_are_refused_before_a_command_runs() {
    let (_folder, mut driver) = rig("true");
    let wrong = EngineSettings { args: BTreeMap::from([("max-num-seqs".to_owned(), ArgValue::Text("banana".into()))]) };
    assert_eq!(driver.check(&wrong).await.unwrap_err().class, FailureClass::BadArguments);
    let with = |pairs: &[(&str, i64)]| EngineSettings {
        args: pairs.iter().map(|(name, value)| ((*name).to_owned(), ArgValue::Int(*value))).collect(),
    };
    let none = driver.check(&with(&[("max-num-seqs", 0)])).await.unwrap_err();
    assert!(none.to_string().contains("at least 1"), "{none}");
    let below = with(&[("max_num_batched_tokens", 64), ("max-num-seqs", 128)]);
    assert_eq!(driver.check(&below).await.unwrap_err().class, FailureClass::BadArguments);
    driver.commands.stop = words(&["no-such-program-anywhere"]);
    let name = driver.check(&settings()).await.unwrap_err();
    assert_eq!(name.class, FailureClass::ProgramMissing);
    assert!(name.advice.contains("correct control.stop; the gateway searches"), "{name}");
    driver.commands.stop = words(&["/no/such/program"]);
    let path = driver.check(&settings()).await.unwrap_err();
    assert_eq!(path.advice, "install the program, or correct control.stop");
}

#[test]
fn words_are_quoted_for_a_shell() {
    assert_eq!([quote("a-b=1"), quote(""), quote("a b"), quote("it's")], ["a-b=1", "''", "'a b'", r"'it'\''s'"]);
}
