//! `sluice tune` as a user runs it: arguments, messages, exit codes and the journal.
//!
//! Real processes of `sluice sim` take the place of engines. After each test no engine may be left.
//! On a busy machine chance may decide which setting wins, so most tests accept more than one
//! winner.

#[path = "../common/ports.rs"]
mod ports;
#[path = "../common/processes.rs"]
mod processes;
mod rig;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use rig::{Rig, end, until};

/// A load of requests whose measurement takes about a second.
const LOAD: &str = "[[traffic]]\nconcurrency = 6\nrequests = 18\n\
    class = [{ name = \"a\", in = 100, out = 30, e2el = \"60s\" }]\n";
/// A `[tune]` table with one objective, which two runs measure.
const TUNE: &str = "[tune]\nobjective = \"a.e2el.mean\"\nruns = 2\n";
const GRID: &str = "[[tune.dimension]]\nkey = \"vllm.max-num-seqs\"\nvalues = [1, 6]\n\
    [[tune.dimension]]\nkey = \"vllm.max-num-batched-tokens\"\nvalues = [512, 1024]\n";
const FAST: &str = "--sim-speed 200 --max-num-seqs 2 --max-model-len 2048";
const FLAGS: &str = "--sim-speed 2 --max-num-seqs 2 --max-model-len 2048";

fn grid() -> Rig {
    grid_of(1)
}

fn grid_of(engines: usize) -> Rig {
    Rig::real(engines, FLAGS, &format!("{LOAD}{TUNE}{GRID}"))
}

fn signal(child: &std::process::Child, signal: Signal) {
    kill(Pid::from_raw(child.id() as i32), signal).unwrap();
}

#[test]
fn a_grid_is_tuned_on_processes_and_no_process_is_left() {
    let rig = grid();
    let ran = rig.tune(&["--real"]);
    assert_eq!(ran.code, Some(0), "{ran:?}");
    // With one sequence at a time, requests wait six times as long.
    let rows: Vec<&str> = ran.out.lines().filter(|line| line.starts_with("max-num-")).collect();
    assert_eq!(rows.len(), 4, "{}", ran.out);
    assert!(ran.out.contains("best: max-num-batched-tokens=") && ran.out.contains("max-num-seqs=6"), "{}", ran.out);
    assert!(ran.out.contains("vllm serve: --max-num-batched-tokens="), "{}", ran.out);
    assert!(ran.err.contains("1 of 5: defaults: ") && ran.err.contains("; best "), "{}", ran.err);
    // The default, four settings, and then the winner and the default again. The winner needs no
    // new start if it ran last.
    assert!(rig.trials() == 7 && [6, 7].contains(&rig.starts()), "{} starts\n{}", rig.starts(), ran.err);
    assert_eq!(rig.engines(), Vec::<i32>::new());
}

#[test]
fn real_engines_that_the_file_describes_are_simulated_first() {
    let rig = Rig::real(1, FAST, &format!("[[engine]]\nargs = {{ max-model-len = 2048 }}\n{LOAD}{TUNE}{GRID}"));
    let ran = rig.tune(&["--real"]);
    assert_eq!(ran.code, Some(0), "{ran:?}");
    assert!(ran.out.contains("predicted") && ran.out.contains("best: "), "{}", ran.out);
}

#[test]
fn a_tuner_that_is_killed_resumes_and_leaves_no_engine() {
    let rig = grid();
    let child = rig.begin(&["--real"]);
    // The test waits for the engine of the third trial, because the engine of the second trial may
    // be about to stop.
    until("the engine of a third trial runs", || {
        rig.trials() >= 2 && rig.starts() > rig.trials() && !rig.engines().is_empty()
    });
    signal(&child, Signal::SIGKILL);
    let killed = end(child);
    assert_eq!(killed.code, None);
    let before = rig.read("t.journal");
    // While a process replaces its program, the kernel shows an empty environment, so the mark is
    // missing.
    until("the engine that is left is seen", || !rig.engines().is_empty());
    let ran = rig.tune(&["--real", "--resume"]);
    assert_eq!(ran.code, Some(0), "{ran:?}");
    assert!(ran.err.contains("trials are taken from the journal"), "{}", ran.err);
    assert!(
        ran.err.contains("p/e0: its engine runs already and is used") || ran.err.contains("p/e0: an engine was left"),
        "{}",
        ran.err
    );
    let whole = before.rfind('\n').map_or("", |end| &before[..=end]);
    assert!(rig.read("t.journal").starts_with(whole), "what was tried before is not in the journal any more");
    assert_eq!((rig.trials(), rig.engines()), (7, vec![]), "{}", ran.err);
}

#[test]
fn a_rate_search_that_was_killed_goes_on_after_its_last_load() {
    let class = "[[traffic]]\nrate = 5\nclass = [{ name = \"a\", in = 20, out = 5, e2el = \"500ms\" }]\n";
    let space = "[[tune.dimension]]\nkey = \"vllm.max-num-seqs\"\nvalues = [6]\n";
    let rig = Rig::real(1, FAST, &format!("{class}[tune]\nrequests = 30\n{space}"));
    let loads = |load: &str| rig.read("t.journal").matches(&format!("\"load\":{load}")).count();
    let child = rig.begin(&["--real"]);
    until("a rate was tried", || loads("{\"rate\":") >= 1 && rig.read("t.journal").ends_with('\n'));
    signal(&child, Signal::SIGKILL);
    end(child);
    let before = rig.read("t.journal");
    let before = before.rfind('\n').map_or("", |end| &before[..=end]).to_owned();
    let tried = before.matches("\"load\":{\"rate\":").count();
    let child = rig.begin(&["--real", "--resume"]);
    until("two more were tried", || loads("{\"rate\":") >= tried + 2);
    signal(&child, Signal::SIGTERM);
    let ran = end(child);
    assert_eq!((ran.code, rig.engines()), (Some(1), vec![]), "{ran:?}");
    assert!(rig.read("t.journal").starts_with(&before));
    // The resumed tuning did not repeat the loads that come before the rates.
    assert_eq!((loads("\"stream\""), loads("{\"saturated\":")), (1, 1), "{}", rig.read("t.journal"));
}

#[test]
fn the_winner_and_the_default_are_traced_where_the_engines_have_a_profiler() {
    let flags = format!("{FAST} --profiler-config {{\"profiler\":\"torch\"}}");
    let space = "[[tune.dimension]]\nkey = \"vllm.max-num-seqs\"\nvalues = [6]\n";
    let rig = Rig::real(1, &flags, &format!("{LOAD}{TUNE}{space}"));
    let ran = rig.tune(&["--real"]);
    assert_eq!(ran.code, Some(0), "{ran:?}");
    let traced = "the profiler traced 100 requests";
    let journal = rig.read("t.journal");
    // On a busy machine the default may win. Then there is only one setting to confirm.
    let confirmed =
        |setting: &str| journal.lines().any(|l| l.contains("\"effort\":\"confirm\"") && l.contains(setting));
    let settings = ["\"setting\":{}", "max-num-seqs"].iter().filter(|setting| confirmed(setting)).count();
    assert!(settings > 0, "{journal}");
    assert_eq!(journal.matches(traced).count(), settings, "{journal}");
    assert!(ran.out.contains(traced), "{}", ran.out);
}

#[test]
fn a_signal_stops_the_engines_and_the_tuning_goes_on_later() {
    let rig = grid();
    for stop in [Signal::SIGTERM, Signal::SIGINT] {
        let resume = rig.path("t.journal").exists();
        let had = rig.trials();
        let child = rig.begin(if resume { &["--real", "--resume"] } else { &["--real"] });
        until("another trial ended and an engine runs", || rig.trials() > had && !rig.engines().is_empty());
        signal(&child, stop);
        let ran = end(child);
        assert_eq!((ran.code, rig.engines()), (Some(1), vec![]), "{ran:?}");
        assert!(ran.err.contains("interrupted") && ran.err.contains("--resume"), "{}", ran.err);
    }
    assert_eq!(rig.tune(&["--real", "--resume"]).code, Some(0));
}

#[test]
fn keys_of_the_gateway_cost_no_start() {
    let space = "[[tune.dimension]]\nkey = \"pool.p.policy\"\nvalues = [\"round_robin\", \"least_work\"]\n\
        [[tune.dimension]]\nkey = \"vllm.max-num-seqs\"\nvalues = [2, 6]\n\
        [[tune.dimension]]\nkey = \"pool.p.slots\"\nvalues = [4, 8]\n";
    let rig = Rig::real(2, FLAGS, &format!("{LOAD}{TUNE}{space}"));
    let ran = rig.tune(&["--real", "--budget", "9"]);
    assert_eq!(ran.code, Some(0), "{ran:?}");
    // The table has a column for each key, and settings with both values of the gateway's policy.
    let head: Vec<&str> =
        ran.out.lines().find(|line| line.starts_with("setting ")).unwrap_or_default().split_whitespace().collect();
    assert_eq!(head.get(..4), Some(&["setting", "policy", "slots", "seqs"][..]), "{}", ran.out);
    let has = |policy: &str| ran.out.lines().any(|line| line.split_whitespace().nth(1) == Some(policy));
    assert!(has("round_robin") && has("least_work"), "{}", ran.out);
    // On a busy machine the gain may be uncertain. Then the report advises to keep the defaults,
    // and has no flags to set.
    let kept = ran.out.lines().any(|line| line.starts_with("the defaults ") && line.contains(": keep them"));
    assert_eq!(ran.out.contains("sluice serve: --set pool.p."), !kept, "{}", ran.out);
    assert!(kept || ran.out.contains("\nbest: pool.p.policy="), "{}", ran.out);
    // Each of the two engines is started for the default, for both values of the flag, and for at
    // most two confirmations.
    let starts = rig.starts() / 2;
    assert!((3..=5).contains(&starts) && rig.trials() >= 9, "{starts} starts, {} trials\n{}", rig.trials(), ran.err);
    assert_eq!(rig.engines(), Vec::<i32>::new());
}

#[test]
fn what_the_engine_refuses_is_learned_and_reported() {
    let space = "[[tune.dimension]]\nkey = \"vllm.max-model-len\"\nvalues = [2048, 70000, 90000, 131072]\n";
    let flags = "--sim-speed 20 --sim-gpu rtx3080-10 --sim-model llama-3.2-1b --gpu-memory-utilization 0.5 --max-model-len 2048";
    let rig = Rig::real(1, flags, &format!("{LOAD}{TUNE}{space}"));
    let ran = rig.tune(&["--real"]);
    assert_eq!(ran.code, Some(0), "{ran:?}");
    // The first refusal contains the longest length that would fit, so the tuner does not start the
    // other two settings.
    let refusals = ran.out.matches("estimated maximum model length").count();
    assert!(
        refusals == 1 && ran.out.matches("does not start").count() + ran.out.matches("left out").count() >= 3,
        "{}",
        ran.out
    );
    // Lines about the progress shorten the text of the refusal. The report has the whole text.
    assert!(ran.err.lines().all(|line| line.chars().count() < 300), "{}", ran.err);
    assert_eq!(rig.engines(), Vec::<i32>::new());
}

#[test]
fn an_engine_that_dies_under_load_loses_and_the_tuning_goes_on() {
    let space = "[[tune.dimension]]\nkey = \"vllm.max-num-seqs\"\nvalues = [2, 6]\n";
    let rig = Rig::real(1, &format!("{FLAGS} --sim-fault oom=3"), &format!("{LOAD}{TUNE}{space}"));
    let ran = rig.tune(&["--real"]);
    assert_eq!((ran.code, rig.engines()), (Some(0), vec![]), "{ran:?}");
    let died = ran.out.lines().find(|line| line.starts_with("max-num-seqs=6")).unwrap_or_default();
    // The engine can die during the warm-up or the measurement, and the diagnosis depends on which
    // process ends first.
    assert!(
        died.contains("does not start") && ["out_of_memory", "engine_died"].iter().any(|class| died.contains(class)),
        "{}",
        ran.out
    );
}

#[test]
fn a_server_that_never_starts_and_a_program_that_is_missing_are_named() {
    let never = Rig::real(1, "--max-model-len 999999999", &format!("{LOAD}{TUNE}{GRID}"));
    let ran = never.tune(&["--real"]);
    assert_eq!(ran.code, Some(1), "{ran:?}");
    assert!(ran.out.contains("no engine starts. With defaults, it says: p/e0: "), "{}", ran.out);
    let missing = grid();
    let config = missing.read("sluice.toml").replace(env!("CARGO_BIN_EXE_sluice"), "/nowhere/vllm");
    std::fs::write(missing.path("sluice.toml"), config).unwrap();
    let ran = missing.tune(&["--real"]);
    assert_eq!(ran.code, Some(1), "{ran:?}");
    assert!(ran.err.contains("program_missing") && ran.err.contains("/nowhere/vllm"), "{}", ran.err);
}

#[test]
fn engines_that_could_not_be_tuned_are_refused_before_any_starts() {
    let without = Rig::new(&format!("{LOAD}{TUNE}{GRID}"));
    let ran = without.tune(&["--real"]);
    assert_eq!(ran.code, Some(2), "{ran:?}");
    assert!(ran.err.contains("no backend of the configuration has launch"), "{}", ran.err);
    let busy = Rig::real(1, FLAGS, &format!("{LOAD}[tune]\nobjective = \"busy\"\n{GRID}"));
    let ran = busy.tune(&["--real"]);
    assert_eq!((ran.code, busy.starts()), (Some(2), 0), "{ran:?}");
    assert!(ran.err.contains("busy is known of simulated engines only"), "{}", ran.err);
}

#[test]
fn the_memory_is_what_the_engine_lives_with_under_load_and_not_at_the_start() {
    let rig = Rig::real(
        1,
        FAST,
        &format!(
            "{LOAD}{TUNE}[tune.memory]\nfrom = 0.9\nto = 0.98\nstep = 0.02\n\
        [[tune.dimension]]\nkey = \"vllm.max-num-seqs\"\nvalues = [6]\n"
        ),
    );
    // The engine starts with any share of the memory, but with more than 0.94 it runs out of memory
    // as soon as requests come.
    let script = format!(
        "#!/bin/sh\nfault=none\ncase \"$*\" in *utilization=0.96* | *utilization=0.98*) \
         fault=oom=3;; esac\nexec {} \"$@\" --sim-fault $fault\n",
        env!("CARGO_BIN_EXE_sluice")
    );
    rig.script("engine.sh", &script);
    let config = rig.read("sluice.toml").replace(env!("CARGO_BIN_EXE_sluice"), rig.path("engine.sh").to_str().unwrap());
    std::fs::write(rig.path("sluice.toml"), config).unwrap();
    let ran = rig.tune(&["--real"]);
    assert_eq!((ran.code, rig.engines()), (Some(0), vec![]), "{ran:?}");
    let refused = |share: &str| {
        let row = format!("gpu-memory-utilization={share} ");
        ran.out.lines().any(|line| line.starts_with(&row) && line.contains("does not start"))
    };
    assert!(refused("0.96") || refused("0.98"), "{}", ran.out);
    // On a busy machine the measured times are not reliable, so the default may win.
    assert!(ran.out.contains("\nevery setting but the defaults has max-num-seqs=6\n"), "{}", ran.out);
    let row = ran.out.lines().find(|line| line.starts_with("gpu-memory-utilization=0.94 "));
    assert!(row.is_some_and(|row| !row.contains("does not start")), "{}", ran.out);
}

#[test]
fn the_variables_of_auto_tune_are_taken_and_its_files_are_written() {
    let rig = Rig::new("");
    rig.script("bin/vllm", &format!("#!/bin/sh\nshift\nexec {} sim \"$@\" {FAST}\n", env!("CARGO_BIN_EXE_sluice")));
    let variables = [
        ("BASE", rig.path("base")),
        ("MODEL", "m".into()),
        ("INPUT_LEN", "20".into()),
        ("MAX_MODEL_LEN", "2048".into()),
        ("NUM_SEQS_LIST", "4".into()),
        ("NUM_BATCHED_TOKENS_LIST", "512".into()),
        ("OUTPUT_LEN", "2".into()),
        ("VLLM_CACHE_ROOT", rig.path("cache")),
    ];
    let ran = rig.tune_compat(&variables);
    assert_eq!((ran.code, rig.engines()), (Some(0), vec![]), "{ran:?}");
    let line = ran.out.lines().find_map(|line| line.strip_prefix("RESULT_FILE=")).unwrap_or_else(|| panic!("{ran:?}"));
    let result = std::fs::read_to_string(line).unwrap();
    assert!(result.contains("max_num_seqs: 4, max_num_batched_tokens: 512, request_rate: "), "{result}");
    assert!(result.contains("best_max_num_seqs: "), "{result}");
    let variables = [("INPUT_LEN", "5000".into())];
    let ran = rig.tune_compat(&variables);
    assert!(ran.code == Some(2) && ran.err.contains("raise MAX_MODEL_LEN"), "{ran:?}");
}

/// A gateway. Dropping it stops the gateway and its engines.
struct Gateway<'a>(&'a Rig, std::process::Child, String);

impl Gateway<'_> {
    /// The state of a backend and the flags of its engine, as the gateway shows them.
    fn shown(&self, name: &str) -> [String; 2] {
        let backend = self.0.backend(&self.2, name);
        [&backend["state"], &backend["engine"]["settings"]].map(|value| value.as_str().unwrap_or_default().to_owned())
    }

    /// The step in the life of a backend's engine.
    fn step(&self, name: &str) -> String {
        self.0.backend(&self.2, name)["engine"]["step"].as_str().unwrap_or_default().to_owned()
    }
}

impl Drop for Gateway<'_> {
    fn drop(&mut self) {
        signal(&self.1, Signal::SIGTERM);
        let _ = self.1.wait();
    }
}

#[test]
fn an_engine_of_a_gateway_that_serves_is_tuned_in_place_and_given_back() {
    let rig = grid_of(2);
    let (child, admin) = rig.serve();
    let gateway = Gateway(&rig, child, admin);
    let ready = |name: &str| gateway.shown(name)[0] == "ready" && gateway.step(name) == "serve";
    until("both backends are ready", || ready("e0") && ready("e1"));
    let before = ["e0", "e1"].map(|name| gateway.shown(name));
    let args = ["--gateway", &gateway.2, "--backend", "e0"];
    // The tuner is interrupted while it tries a setting, and continues later.
    let child = rig.begin(&args);
    until("a setting is tried", || rig.trials() >= 2 && gateway.shown("e0")[1] != before[0][1]);
    assert_eq!((gateway.shown("e0")[0].as_str(), ready("e1")), ("draining", true));
    signal(&child, Signal::SIGINT);
    let ran = end(child);
    assert!(ran.code == Some(1) && ran.err.contains("giving p/e0 back"), "{ran:?}");
    until("it is given back", || ["e0", "e1"].map(|name| gateway.shown(name)) == before);
    // A killed tuner cannot give the backend back, so the engine keeps the flags of the trial.
    let resume = [&args[..], &["--resume"]].concat();
    let child = rig.begin(&resume);
    until("another setting is tried", || gateway.shown("e0")[1] != before[0][1]);
    signal(&child, Signal::SIGKILL);
    end(child);
    until("the restart is over", || gateway.step("e0") == "serve");
    let ran = rig.tune(&resume);
    assert!(ran.code == Some(1) && ran.err.contains("`sluice backend restart e0 --reset`"), "{ran:?}");
    rig.give_back(&gateway.2, "e0");
    until("it is given back", || ["e0", "e1"].map(|name| gateway.shown(name)) == before);
    let ran = rig.tune(&resume);
    assert_eq!(ran.code, Some(0), "{ran:?}");
    assert!(ran.out.contains("best: max-num-batched-tokens=") && ran.out.contains("max-num-seqs=6"), "{}", ran.out);
    until("it is given back", || ["e0", "e1"].map(|name| gateway.shown(name)) == before);
}

#[test]
fn a_backend_that_cannot_be_spared_is_left_alone() {
    let rig = grid_of(1);
    let (child, admin) = rig.serve();
    let gateway = Gateway(&rig, child, admin);
    until("the backend is ready", || gateway.step("e0") == "serve");
    let ran = rig.tune(&["--gateway", &gateway.2, "--backend", "e0"]);
    assert!(ran.code == Some(1) && ran.err.contains("no other backend of its pool is ready"), "{ran:?}");
    let ran = rig.tune(&["--gateway", &gateway.2, "--backend", "e9", "--resume"]);
    assert!(ran.code == Some(1) && ran.err.contains("there is no backend 'e9'"), "{ran:?}");
    assert_eq!(gateway.shown("e0")[0], "ready");
}

/// A tuning of simulated engines on virtual time.
fn simulated(class: &str, tune: &str) -> Rig {
    Rig::new(&format!(
        "duration = \"3s\"\n[[engine]]\nargs = {{ stream-interval = 100 }}\n[[traffic]]\nrate = 20\nclass = [{class}]\n{tune}"
    ))
}

const CLASS: &str = "{ name = \"a\", in = 200, out = 10, e2el = \"1s\" }";

#[test]
fn bad_input_exits_with_2_and_says_what_to_change() {
    let many = "[[tune.dimension]]\nkey = \"vllm.max-num-seqs\"\nvalues = [1, 2]\n";
    for (tune, args, expected) in [
        ("", &[][..], "a table [tune] is missing; config/tune/scheduling.toml is a sample"),
        ("[tune]\n", &[], "the space is empty: it has no dimension"),
        (
            &format!("[tune]\nconstraints = [\"vllm.max-num-seqs > 5\"]\n{many}"),
            &[],
            "all of its 2 settings break a constraint",
        ),
        (&format!("[tune]\nobjectiv = \"rate\"\n{many}"), &[], "unknown field `objectiv`"),
        (&format!("[tune]\nobjective = \"fast\"\n{many}"), &[], "'fast' is not a measure"),
        (&format!("[tune]\n{many}"), &["--budget", "0"], "0 trials find nothing"),
        (&format!("[tune]\n{many}"), &["--method", "guess"], "'guess' is no method; there are race,"),
        (&format!("[tune]\n{many}"), &["--engines", "x"], "--real"),
        (&format!("[tune]\n{many}"), &["--resume"], "begin without --resume"),
    ] {
        let rig = simulated(CLASS, tune);
        let ran = rig.tune(args);
        assert_eq!(ran.code, Some(2), "{tune}: {ran:?}");
        assert!(ran.err.contains(expected), "{tune}: {}", ran.err);
        assert_eq!(rig.trials(), 0);
    }
}

#[test]
fn objectives_that_no_setting_meets_are_named_with_what_is_missing() {
    let class = "{ name = \"chat\", in = 200, out = 100, e2el = \"100ms\" }";
    let rig = simulated(class, &format!("[tune]\nrequests = 30\n{GRID}"));
    let ran = rig.tune(&[]);
    assert_eq!(ran.code, Some(1), "{ran:?}");
    assert!(ran.out.contains("even single requests of 'chat' miss E2EL by "), "{}", ran.out);
}

#[test]
fn a_full_disk_ends_the_tuning_with_a_whole_journal_that_is_continued() {
    let rig = simulated(
        CLASS,
        "[tune]\nobjective = \"a.e2el.p99\"\nruns = 2\n\
        [[tune.dimension]]\nkey = \"vllm.max-num-seqs\"\nvalues = [1, 2, 4, 8]\n",
    );
    let ran = rig.tune_on_full_disk(2, &[]);
    assert_eq!(ran.code, Some(1), "{ran:?}");
    assert!(ran.err.contains("cannot be written") && ran.err.contains("--resume"), "{}", ran.err);
    let (had, text) = (rig.trials(), rig.read("t.journal"));
    assert!(had >= 1 && text.ends_with('\n'), "{text}");
    let ran = rig.tune(&["--resume"]);
    assert_eq!(ran.code, Some(0), "{ran:?}");
    assert!(ran.err.contains(&format!("{had} trials are taken from the journal")), "{}", ran.err);
    assert!(rig.read("t.journal").starts_with(&text));
    // The tuner does not continue a journal of another kind of engine or of another seed.
    let ran = rig.tune(&["--resume", "--seed", "2"]);
    assert!(ran.code == Some(2) && ran.err.contains("it is of the seed 1 and not 2"), "{ran:?}");
    let ran = rig.tune(&["--resume", "--real"]);
    assert!(ran.code == Some(2) && ran.err.contains("it is of simulated engines and not of real ones"), "{ran:?}");
}
