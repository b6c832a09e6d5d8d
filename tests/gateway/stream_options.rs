//! For any `stream_options`, a client receives the bytes that the engine itself would have sent.
//!
//! This is a differential test. Every request goes to the engine directly, and through gateways
//! that request usage for themselves (`usage = "final"`, `"continuous"`) or do not (`"off"`). One
//! engine sends streams that were captured from vLLM, the other is simulated. Only the id and the
//! time of a response, which differ from request to request, are replaced before the comparison.

use std::net::SocketAddr;

use serde_json::Value;

use crate::client::{Response, TestClient, post};
use crate::engine::{Engine, ReceivedRequest, Step, response};
use crate::simulator::Sim;
use crate::test_gateway::{TestGateway, one_pool};

/// Spellings of a boolean that pydantic accepts, and an absent member.
const BOOLEANS: [&str; 9] = ["", "null", "false", "true", "0", "1", "\"true\"", "\"OFF\"", "1.0"];

/// `stream_options` in every combination of spellings, and in odd forms.
fn options() -> Vec<String> {
    let member = |name: &str, value: &str| match value {
        "" => String::new(),
        value => format!("\"{name}\": {value},"),
    };
    let mut all = Vec::new();
    for include in BOOLEANS {
        for continuous in BOOLEANS {
            let (include, continuous) =
                (member("include_usage", include), member("continuous_usage_stats", continuous));
            all.push(format!("\"stream_options\": {{{}}}", format!("{include}{continuous}").trim_end_matches(',')));
            all.push(format!("\"stream_options\":{{{}}}", format!("{continuous}{include}").trim_end_matches(',')));
        }
    }
    let odd = [
        r#""x":1"#,
        r#""stream_options":null"#,
        r#""stream_options":{"continuous_usage_stats":true},"stream_options":{"include_usage":false}"#,
        r#""stream_options":{"include_usage":true},"stream_options":{"continuous_usage_stats":true}"#,
        r#""stream_options":{"include_usage":true},"stream_options":null"#,
        r#""stream_options":{"continuous_usage_stats":false,"include_usage":false,"continuous_usage_stats":true}"#,
        r#""stream_options":{"continuous_usage_stats":true,"include_usage":true,"include_usage":false}"#,
        r#""stream_options":{"\u0063ontinuous_usage_stats":true,"include_usage":false,"z":{"include_usage":true}}"#,
        r#""\u0073tream_options":{"continuous_usage_stats":true}"#,
        r#""stream_options":{"include_usage":false , "continuous_usage_stats" : true }"#,
    ];
    all.extend(odd.map(str::to_owned));
    all
}

/// Requests for one token each, because an engine that generates faster than its stream is read
/// would send several tokens in one event.
fn bodies(options: &str) -> Vec<(&'static str, String)> {
    let chat = r#""messages":[{"role":"user","content":"hi"}],"max_tokens":1"#;
    let completion = r#""prompt":"hi","max_tokens":1"#;
    vec![
        ("/v1/chat/completions", format!(r#"{{"model":"m","stream":true,{options},{chat}}}"#)),
        ("/v1/completions", format!(r#"{{"model":"m",{completion},{options},"stream":1}}"#)),
    ]
}

/// The same requests, but for two sequences, for two prompts, and not streamed.
fn wider(bodies: Vec<(&'static str, String)>) -> Vec<(&'static str, String)> {
    let change = |(path, body): (&'static str, String)| {
        let two = body.replacen('{', "{\"n\":2,", 1);
        let prompts = body.replace("\"prompt\":\"hi\"", "\"prompt\":[\"hi\",\"ho\"]");
        let whole = body.replace("\"stream\":true", "\"stream\":false").replace("\"stream\":1", "\"stream\":0");
        [(path, two), (path, prompts), (path, whole)]
    };
    bodies.into_iter().flat_map(change).collect()
}

async fn ask(client: &mut TestClient, path: &str, body: &str) -> (u16, String) {
    let response: Response = client.request(post(path, "", body.as_bytes())).await;
    assert!(response.whole, "{body}");
    (response.status(), without_identity(&response.text()))
}

fn without_identity(text: &str) -> String {
    let mut out = String::new();
    let mut rest = text;
    loop {
        let found = ["\"id\":\"", "\"created\":"].map(|key| rest.find(key).map(|at| (at + key.len(), key)));
        let Some((at, key)) = found.into_iter().flatten().min() else { return out + rest };
        let end = if key.contains("id") { '"' } else { ',' };
        out += &rest[..at];
        rest = &rest[at + rest[at..].find(end).unwrap()..];
    }
}

async fn directly(engine: SocketAddr, bodies: &[(&'static str, String)]) -> Vec<(u16, String)> {
    let mut client = TestClient::to(engine).await;
    let mut responses = Vec::new();
    for (path, body) in bodies {
        responses.push(ask(&mut client, path, body).await);
    }
    responses
}

async fn compare(engine: SocketAddr, usages: &[&str], bodies: &[(&'static str, String)]) {
    let wanted = directly(engine, bodies).await;
    for usage in usages {
        let text = one_pool(&[format!("http://{engine}")]).replace("usage = \"off\"", &format!("usage = \"{usage}\""));
        let gateway = TestGateway::from_text(&text, &[]).await;
        let mut client = gateway.client().await;
        for ((path, body), wanted) in bodies.iter().zip(&wanted) {
            assert_eq!(ask(&mut client, path, body).await, *wanted, "usage = {usage}: {path} {body}");
        }
        gateway.settled().await;
    }
}

/// Whether vLLM reports usage for a body at the end, and whether it does in every event. `None` if
/// vLLM refuses the body.
fn reported(body: &Value) -> Option<(bool, bool)> {
    let truth = |value: &Value| match value {
        Value::Null => Some(false),
        Value::Bool(value) => Some(*value),
        Value::Number(value) => [0.0, 1.0].iter().position(|number| value.as_f64() == Some(*number)).map(|n| n == 1),
        Value::String(word) => match word.to_lowercase().as_str() {
            "true" | "t" | "yes" | "y" | "on" | "1" => Some(true),
            "false" | "f" | "no" | "n" | "off" | "0" => Some(false),
            _ => None,
        },
        _ => None,
    };
    let options = &body["stream_options"];
    let streamed = truth(&body["stream"])?;
    if !streamed && options.as_object().is_some_and(|options| !options.is_empty()) {
        return None;
    }
    let at_end = truth(&options["include_usage"])?;
    Some((at_end, truth(&options["continuous_usage_stats"])? && at_end))
}

/// Responds as vLLM 0.32 did when the fixtures were captured.
fn captured(seen: &ReceivedRequest) -> Vec<Step> {
    let body: Value = serde_json::from_slice(&seen.body).unwrap();
    let Some((at_end, continuous)) = reported(&body) else {
        return vec![Step::Send(response(400, "application/json", br#"{"error":{"message":"no","code":400}}"#))];
    };
    let kind = if seen.head.contains("/chat/") { "chat" } else { "completion" };
    let of = match () {
        () if body["n"] == 2 => "-n2",
        () if body["prompt"].is_array() => "-list",
        () => "",
    };
    let usage = ["plain", "usage", "continuous"][usize::from(at_end) + usize::from(continuous)];
    let path = format!("{}/tests/fixtures/vllm-0.32/{kind}-stream{of}-{usage}.sse", env!("CARGO_MANIFEST_DIR"));
    vec![Step::Send(response(200, "text/event-stream; charset=utf-8", &std::fs::read(path).unwrap()))]
}

#[tokio::test(flavor = "multi_thread")]
async fn streams_are_those_of_vllm_whatever_the_options() {
    let engine = Engine::start(|_, seen| captured(seen)).await;
    let all: Vec<_> = options().iter().flat_map(|options| bodies(options)).collect();
    compare(engine.address(), &["off", "final", "continuous"], &all).await;
    compare(engine.address(), &["final", "continuous"], &wider(all)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn streams_are_those_of_the_simulated_engine_whatever_the_options() {
    let engine = Sim::start(FAST);
    let all: Vec<_> = options().iter().flat_map(|options| bodies(options)).collect();
    compare(engine.address(), &["final", "continuous"], &all).await;
    compare(engine.address(), &["final"], &wider(all.into_iter().step_by(9).collect())).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn usage_that_the_engine_reports_unasked_is_passed_on() {
    let engine = Sim::start(&[FAST, &["--enable-force-include-usage"]].concat());
    let all: Vec<_> = options().iter().step_by(5).flat_map(|options| bodies(options)).collect();
    compare(engine.address(), &["off", "final"], &all).await;
}

/// Flags of an engine that generates without delay.
const FAST: &[&str] = &["--sim-speed", "1000", "--sim-startup", "0"];
