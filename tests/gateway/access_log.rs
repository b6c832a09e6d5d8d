//! What the access log says of requests that were refused.

use serde_json::Value;

use crate::client::{chat, post};
use crate::test_gateway::{TestGateway, access_log};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_refused_request_shows_its_path_or_model_bounded_and_escaped() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("access.log");
    let log = format!("access_log={{path=\"{}\"}}", path.display());
    let gateway = TestGateway::over(&["http://127.0.0.1:9".to_owned()], &[&log]).await;
    let long = "x".repeat(1_000);
    gateway.request(post("/v1/nothing?api_key=secret", "", b"{}")).await.is(404, "route_not_found");
    access_log(&path, 1).await;
    gateway.request(post(&format!("/{long}"), "", b"{}")).await.is(404, "route_not_found");
    access_log(&path, 2).await;
    let model = format!("no\\u001b[31m\\n\\u009b{long}");
    let body = format!(r#"{{"model":"{model}","messages":[{{"role":"user","content":"private"}}]}}"#);
    gateway.request(chat(&body)).await.is(404, "model_not_found");
    let text = access_log(&path, 3).await;
    let lines: Vec<Value> = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!(lines[0]["path"], "/v1/nothing", "without its query, which may hold a key");
    assert_eq!(lines[1]["path"].as_str().unwrap().len(), 256);
    let refused = lines[2]["refused_model"].as_str().expect("no model in the line");
    assert!(refused.starts_with("no\u{fffd}[31m\u{fffd}\u{fffd}xxx") && refused.chars().count() == 256, "{refused}");
    assert!(lines[2]["path"].is_null() && lines[2]["model"].is_null() && lines[0]["refused_model"].is_null());
    assert!(!text.contains("secret") && !text.contains("private") && !text.contains('\u{1b}'));
    gateway.stop().await;
}
