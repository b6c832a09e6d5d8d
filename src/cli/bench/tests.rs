//! Tests of the command, with a scripted server, from the flags to the exit code and the files.

use clap::Parser as _;

use super::*;
use sluice_bench::result::file;
use sluice_bench::testing::{MockEngine, MockResponse, completion_stream};

mod classes;
mod lengths;

#[derive(Debug, clap::Parser)]
struct Parsed {
    #[command(flatten)]
    bench: BenchArgs,
}

fn parsed(flags: &[&str]) -> BenchArgs {
    Parsed::parse_from([&["bench", "--disable-tqdm", "--json"], flags].concat()).bench
}

#[test]
fn comparisons_know_every_alias_and_default_of_the_flags() {
    use clap::CommandFactory as _;
    use sluice_bench::report::flags::{ALIASES, defaults as known, is_covered};
    let command = Parsed::command();
    let (mut aliases, mut defaults) = (Vec::new(), Vec::new());
    for argument in command.get_arguments() {
        let Some(name) = argument.get_long().map(|name| format!("--{name}")) else { continue };
        let others = argument.get_all_aliases().unwrap_or_default();
        aliases.extend(others.iter().map(|alias| (format!("--{alias}"), name.clone())));
        // The flags of a search are left out, because a search saves no result. Switches are left
        // out, because they have no default value.
        let takes_a_value = argument.get_action().takes_values();
        if takes_a_value && !is_covered(&name) && !name.starts_with("--find-rate") {
            let value = argument.get_default_values().first().map(|value| value.to_string_lossy().into_owned());
            defaults.extend(value.map(|value| (name, value)));
        }
    }
    aliases.sort();
    defaults.sort();
    let owned = |(one, other): (&str, &str)| (one.to_owned(), other.to_owned());
    assert_eq!(aliases, ALIASES.map(owned));
    assert_eq!(defaults, known().map(owned).collect::<Vec<_>>());
}

async fn engine() -> MockEngine {
    MockEngine::start(|_| MockResponse::stream(completion_stream(3), Duration::from_millis(1))).await
}

async fn code(flags: &[&str]) -> (u8, String) {
    match measure_all(&parsed(flags)).await {
        Ok(code) => (u8::from(format!("{code:?}") != format!("{:?}", ExitCode::SUCCESS)), String::new()),
        Err(CommandError::Usage(error)) => (2, format!("{error:#}")),
        Err(CommandError::Failed(error)) => (1, format!("{error:#}")),
    }
}

#[track_caller]
fn says(outcome: (u8, String), code: u8, text: &str) {
    assert!(outcome.0 == code && outcome.1.contains(text), "{outcome:?} is not {code} with '{text}'");
}

#[tokio::test]
async fn a_run_is_measured_and_saved_with_all_its_requests() {
    let engine = engine().await;
    let folder = tempfile::tempdir().unwrap();
    let (path, csv) = (folder.path().join("deep/r.json"), folder.path().join("r.csv"));
    let flags = [
        "--base-url",
        &engine.url(),
        "--model",
        "m",
        "--num-prompts",
        "20",
        "--max-concurrency",
        "4",
        "--random-input-len",
        "5-9",
        "--random-output-len",
        "3",
        "--num-warmups",
        "2",
        "--seed",
        "5",
        "--goodput",
        "ttft:60000",
        "--metadata",
        "gpu=none",
        "--temperature",
        "0",
        "--result-filename",
        path.to_str().unwrap(),
        "--csv",
        csv.to_str().unwrap(),
    ];
    assert_eq!(code(&flags).await, (0, String::new()));
    let result = file::load(&path).unwrap().remove(0);
    assert_eq!(result.requests.len(), 20);
    assert_eq!((result.config.max_concurrency, result.config.seed), (Some(4), 5));
    assert_eq!(result.config.metadata["gpu"], "none");
    let class = &result.config.classes[0];
    assert_eq!((class.prompt.as_str(), class.output.as_str(), class.weight), ("5-9", "3", 1.0));
    assert_eq!(result.config.version, env!("CARGO_PKG_VERSION"));
    assert_eq!(result.reported["completed"], 20);
    assert_eq!(result.reported["request_rate"], "inf");
    assert_eq!(std::fs::read_to_string(&csv).unwrap().lines().count(), 21);
    let bodies = engine.bodies();
    assert_eq!(bodies.len(), 22);
    assert!(bodies.iter().all(|body| body["temperature"] == 0.0 && body["ignore_eos"] == true));
    assert!(bodies.iter().all(|body| (5..=9).contains(&body["prompt"].as_array().unwrap().len())));
}

#[tokio::test]
async fn texts_and_arrays_are_saved_as_by_vllm() {
    let engine = engine().await;
    let folder = tempfile::tempdir().unwrap();
    let (url, path) = (engine.url(), folder.path().join("r.json"));
    let saved = async |flags: &[&str]| {
        let base = ["--base-url", &url, "--model", "org/m", "--served-model-name", "m", "--num-prompts", "2"];
        let files = ["--random-input-len", "5", "--result-filename", path.to_str().unwrap()];
        assert_eq!(code(&[&base[..], &files, flags].concat()).await, (0, String::new()));
        file::load(&path).unwrap().remove(0).reported
    };
    let brief = saved(&[]).await;
    assert_eq!(brief["tokenizer_id"], "org/m");
    assert!(brief["latencies"].as_array().unwrap().iter().all(|latency| latency.as_f64().unwrap() > 0.0), "{brief:?}");
    assert_eq!(brief["queue_times"], serde_json::json!([0.0, 0.0]));
    assert_eq!(brief.get("generated_texts"), None);
    let detailed = saved(&["--save-detailed", "--skip-tokenizer-init"]).await;
    assert_eq!(detailed["tokenizer_id"], serde_json::Value::Null);
    assert_eq!(detailed["generated_texts"], serde_json::json!([" a a a", " a a a"]));
    let talk = saved(&["--save-detailed", "--multi-turn", "--prompt-text"]).await;
    assert_eq!(talk["generated_texts"], serde_json::json!(vec![" a a a"; 6]));
    let tokenizer = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/tiny/tokenizer.json");
    assert_eq!(saved(&["--tokenizer", tokenizer]).await["tokenizer_id"], tokenizer);
}

#[tokio::test]
async fn a_sweep_saves_each_run_in_one_file() {
    let engine = engine().await;
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("sweep.json");
    let flags = [
        "--base-url",
        &engine.url(),
        "--model",
        "m",
        "--sweep-max-concurrency",
        "1,3",
        "--sweep-num-prompts-factor",
        "4",
        "--random-input-len",
        "5",
        "--random-output-len",
        "3",
        "--result-filename",
        path.to_str().unwrap(),
    ];
    assert_eq!(code(&flags).await.0, 0);
    let runs = file::load(&path).unwrap();
    let what: Vec<_> = runs.iter().map(|run| (run.config.max_concurrency, run.requests.len())).collect();
    assert_eq!(what, [(Some(1), 4), (Some(3), 12)]);
}

#[tokio::test]
async fn the_error_of_a_refusing_server_is_quoted_and_fails_the_command() {
    let refusing = MockEngine::start(|_| MockResponse {
        status: 401,
        ..MockResponse::stream(vec![r#"{"error":{"message":"no key"}}"#.into()], Duration::ZERO)
    })
    .await;
    let url = refusing.url();
    let small = ["--base-url", &url, "--model", "m", "--num-prompts", "3", "--random-input-len", "5"];
    assert_eq!(code(&small).await, (1, String::new()));
    says(
        code(&[&small[..], &["--num-warmups", "1"]].concat()).await,
        1,
        "a warm-up request failed (status 401): no key",
    );
    let page = tempfile::tempdir().unwrap().path().join("new/page.html");
    code(&[&small[..], &["--num-warmups", "1", "--html", page.to_str().unwrap()]].concat()).await;
    assert!(
        page.parent().unwrap().is_dir() && !page.exists(),
        "the folder was created, and there is no result to show"
    );
    says(code(&["--base-url", &url, "--num-prompts", "3"]).await, 1, "the server lists no model; give --model");
    let not_found = |_| MockResponse { status: 404, ..MockResponse::stream(Vec::new(), Duration::ZERO) };
    let elsewhere = MockEngine::start(not_found).await;
    let other_url = elsewhere.url();
    says(
        code(&["--base-url", &other_url, "--num-prompts", "3"]).await,
        1,
        &format!("{other_url}/v1/models returned status 404; --base-url is the address without the path of requests"),
    );
    says(code(&[&small[..], &["--reset-prefix-cache"]].concat()).await, 1, "/reset_prefix_cache returned status 401");
    says(code(&[&small[..], &["--profile"]].concat()).await, 1, "/start_profile returned status 401");
}

#[tokio::test]
async fn a_profiler_that_does_not_stop_is_a_warning_and_the_result_is_kept() {
    // The calls are the list of models, /version, /start_profile, metrics, two requests,
    // /stop_profile.
    let engine = MockEngine::start(|number| MockResponse {
        status: if number == 6 { 500 } else { 200 },
        ..MockResponse::stream(completion_stream(3), Duration::ZERO)
    })
    .await;
    let path = tempfile::tempdir().unwrap().keep().join("runs.json");
    let url = engine.url();
    let flags = ["--base-url", &url, "--model", "m", "--num-prompts", "2", "--random-input-len", "5", "--profile"];
    let save = ["--save-result", "--result-filename", path.to_str().unwrap()];
    assert_eq!(code(&[&flags[..], &save].concat()).await, (0, String::new()));
    let text = std::fs::read_to_string(&path).unwrap();
    assert_eq!(engine.requests(), 7);
    assert!(text.contains("\"completed\":2") || text.contains("\"completed\": 2"), "{text}");
    assert!(
        text.contains("the trace may be missing: ") && text.contains("/stop_profile returned status 500"),
        "{text}"
    );
}

#[tokio::test]
async fn a_result_has_the_version_that_the_server_reports() {
    let engine = MockEngine::start(|number| match number {
        1 => MockResponse::stream(vec!["{\"version\":\"0.32.0\"}".to_owned()], Duration::ZERO),
        _ => MockResponse::stream(completion_stream(3), Duration::ZERO),
    })
    .await;
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("r.json");
    let flags = ["--base-url", &engine.url(), "--model", "m", "--num-prompts", "2", "--random-input-len", "5"];
    let save = ["--result-filename", path.to_str().unwrap()];
    assert_eq!(code(&[&flags[..], &save].concat()).await, (0, String::new()));
    assert_eq!(file::load(&path).unwrap().remove(0).config.server_versions, ["0.32.0"]);
}

#[tokio::test]
async fn an_unreachable_server_is_an_error_that_says_what_to_check() {
    let unused = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().to_string();
    says(code(&["--base-url", &format!("http://{unused}"), "--model", "m"]).await, 1, "is the server running?");
}

#[tokio::test]
async fn wrong_usage_is_found_before_the_first_request() {
    let engine = engine().await;
    let url = engine.url();
    let wrong = async |flags: &[&str], text: &str| {
        says(code(&[&["--base-url", &url, "--model", "m"], flags].concat()).await, 2, text);
    };
    wrong(&["--dataset-path", "x.json"], "--dataset-path needs the format of the file").await;
    wrong(&["--dataset-name", "sharegpt"], "--dataset-name sharegpt needs a file").await;
    wrong(&["--dataset-name", "azure", "--dataset-path", "/nowhere.csv"], "cannot read the dataset /nowhere.csv").await;
    wrong(&["--self-timed"], "no times of its own").await;
    wrong(&["--base-url", "ftp://gpu0"], "is not an address to send to").await;
    wrong(&["--backend", "openai-chat", "--prompt-token-ids"], "only completions take token ids").await;
    wrong(&["--extra-body", "[1]"], "--extra-body is not a JSON object").await;
    wrong(&["--extra-body", "{\"stream\":false}"], "may not set `stream`").await;
    wrong(&["--duration", "5"], "needs a --request-rate or a --max-concurrency").await;
    wrong(&["--lora-modules", "a", "--lora-weights", "1,2,3"], "3 weights for 1 adapters").await;
    wrong(&["--multi-turn", "--multi-turn-num-turns", "2000"], "1 to 1000 turns").await;
    wrong(&["--class", "a:weight=0"], "class 'a' has the weight 0").await;
    wrong(&["--vocabulary", "7"], "FIRST-LAST").await;
    let ramp = ["--ramp-up-strategy", "linear", "--ramp-up-start-rps", "9", "--ramp-up-end-rps", "1"];
    wrong(&ramp, "is above").await;
    assert_eq!(engine.requests(), 0);
    for flags in [["--request-rate", "-3"], ["--custom-output-len", "0"], ["--custom-output-len", "-2"]] {
        let error = Parsed::try_parse_from([&["bench"], &flags[..]].concat()).unwrap_err();
        assert_eq!(error.exit_code(), 2, "{flags:?}");
    }
}

#[tokio::test]
async fn a_trace_is_sent_at_its_own_times_or_at_a_rate() {
    let engine = engine().await;
    let folder = tempfile::tempdir().unwrap();
    let (path, saved) = (folder.path().join("t.jsonl"), folder.path().join("r.json"));
    let line = |at: u32| format!("{{\"timestamp\":{at},\"input_length\":8,\"output_length\":2,\"hash_ids\":[1]}}\n");
    std::fs::write(&path, [line(5_000), line(5_100), line(5_300)].concat()).unwrap();
    let url = engine.url();
    let base = [
        "--base-url",
        &url,
        "--model",
        "m",
        "--dataset-name",
        "mooncake",
        "--dataset-path",
        path.to_str().unwrap(),
        "--result-filename",
        saved.to_str().unwrap(),
    ];
    assert_eq!(code(&[&base[..], &["--trace-speed", "2"]].concat()).await.0, 0);
    let due = |saved: &std::path::Path| -> Vec<f64> {
        file::load(saved).unwrap()[0].requests.iter().map(|record| record.due.unwrap()).collect()
    };
    let moments = due(&saved);
    assert!(moments.iter().zip([0.0, 0.05, 0.15]).all(|(at, received)| (at - received).abs() < 1e-9), "{moments:?}");
    assert_eq!(
        code(&[&base[..], &["--no-self-timed", "--request-rate", "100", "--num-prompts", "5"]].concat()).await.0,
        0
    );
    assert_eq!(due(&saved).len(), 5);
}

#[tokio::test]
async fn a_dry_run_sends_nothing() {
    let nowhere = ["--base-url", "http://127.0.0.1:1", "--dry-run"];
    assert_eq!(code(&nowhere).await, (0, String::new()));
    assert_eq!(code(&[&nowhere[..], &["--model", "m"]].concat()).await, (0, String::new()));
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("records.jsonl");
    std::fs::write(&path, "{\"route\":\"models\"}\n{\"route\":\"completions\",\"model\":\"m\"}\n").unwrap();
    let args = parsed(&["--dataset-name", "access_log", "--dataset-path", path.to_str().unwrap()]);
    assert_eq!(requests::recorded_model(&args).as_deref(), Some("m"));
}
