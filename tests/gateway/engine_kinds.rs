//! The kind of an engine that no file names, and engines of another kind than the file says.
//!
//! A pool with `engine = "auto"` takes the kind that probes find. If a file says another kind,
//! status, log and `sluice check --probe` have the line to write instead.

use serde_json::Value;
use sluice_sim::{Profile, Sglang, SimConfig};
use tokio::net::TcpListener;

use crate::client::{CHAT, TestClient, change, chat, get, post};
use crate::commands::run;
use crate::engine::{Engine, completion};
use crate::test_gateway::{TestGateway, eventually};

const LOADING: &str = r#"{"error":{"code":503,"message":"Loading model","type":"unavailable_error"}}"#;
const PROPS: &str = r#"{"default_generation_settings":{"n_ctx":512},"total_slots":3}"#;
const OWNED_BY_SGLANG: &str = r#"{"object":"list","data":[{"id":"m","owned_by":"sglang"}]}"#;

/// A file with one pool. `engine` is a further line of the pool, or empty.
fn file(urls: &[String], engine: &str) -> String {
    let mut text = format!(
        "[server]\nlisten = \"127.0.0.1:0\"\nadmin = \"127.0.0.1:0\"\n[health]\nprobe_interval = \"20ms\"\n[[model]]\n\
         name = \"m\"\n[[pool]]\nname = \"only\"\nmodels = [\"m\"]\n{engine}\n"
    );
    for (index, url) in urls.iter().enumerate() {
        text += &format!("[[pool.backend]]\nname = \"b{index}\"\nurl = \"{url}\"\n");
    }
    text
}

async fn pool(gateway: &TestGateway) -> Value {
    let status = TestClient::to(gateway.admin()).await.request(get("/admin/status")).await;
    status.json()["pools"][0].clone()
}

async fn kind_is(gateway: &TestGateway, kind: &str) {
    eventually(kind, async || pool(gateway).await["kind"] == kind && gateway.state(0) == "ready").await;
}

async fn llama() -> Engine {
    let engine = Engine::always(completion()).await;
    engine.set_page("/props", 200, PROPS);
    engine
}

async fn triton() -> Engine {
    let engine = Engine::always(completion()).await;
    for (path, status) in [("/health", 404), ("/v1/models", 404), ("/v2/health/ready", 200)] {
        engine.set_page(path, status, "");
    }
    engine.set_page("/v2", 200, r#"{"name":"triton","version":"2.60.0","extensions":[]}"#);
    engine
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_pool_without_a_kind_takes_the_one_of_its_engines() {
    let mut config = SimConfig::new("m", Profile::named("h200-llama-8b").unwrap());
    config.sglang = Some(Sglang { metrics: true });
    config.engine.max_num_seqs = 3;
    let sglang = sluice_sim::spawn(config, TcpListener::bind("127.0.0.1:0").await.unwrap()).unwrap();
    let gateway = TestGateway::from_text(&file(&[format!("http://{}", sglang.addr())], ""), &[]).await;
    kind_is(&gateway, "sglang").await;
    eventually("the limit of its own page is in force", async || gateway.slots_limit() == 3).await;
    assert_eq!(gateway.request(chat(CHAT)).await.status(), 200);
    gateway.settled().await;

    let llama = llama().await;
    llama.set_page("/health", 503, LOADING);
    let gateway = TestGateway::from_text(&file(&[llama.url()], "engine = \"auto\""), &[]).await;
    llama.set_page("/health", 200, "");
    kind_is(&gateway, "llama.cpp").await;
    eventually("its slots are known", async || gateway.slots_limit() == 3).await;

    let triton = triton().await;
    let gateway = TestGateway::from_text(&file(&[triton.url()], ""), &[]).await;
    kind_is(&gateway, "triton").await;
    assert_eq!(gateway.request(post("/v2/models/m/infer", "", b"{}")).await.status(), 200);
    assert!(triton.seen()[0].head.starts_with("POST /v2/models/m/infer "), "{:?}", triton.seen());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_that_cannot_be_recognised_is_served_as_a_vllm() {
    let engine = Engine::always(completion()).await;
    let gateway = TestGateway::over(&[engine.url()], &["health.probe_interval=20ms"]).await;
    kind_is(&gateway, "vllm").await;
    assert_eq!(gateway.request(chat(CHAT)).await.status(), 200);
    assert!(pool(&gateway).await["backends"][0]["engine_differs"].is_null());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_found_kind_outlasts_reloads_and_follows_the_engines() {
    let engine = llama().await;
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("sluice.toml");
    let text = file(&[engine.url()], "");
    std::fs::write(&path, &text).unwrap();
    let gateway = TestGateway::from_file(&path).await;
    kind_is(&gateway, "llama.cpp").await;
    for (text, kind) in
        [(text.clone(), "llama.cpp"), (file(&[engine.url()], "engine = \"openai\""), "openai"), (text, "llama.cpp")]
    {
        std::fs::write(&path, &text).unwrap();
        assert_eq!(TestClient::to(gateway.admin()).await.request(change("/admin/reload")).await.status(), 200);
        assert_eq!(pool(&gateway).await["kind"], kind);
        assert_eq!(gateway.request(chat(CHAT)).await.status(), 200);
    }
    // A server of another kind takes the place of the first one.
    engine.set_page("/props", 404, "");
    engine.set_page("/health", 503, "");
    eventually("it is down", async || gateway.state(0) != "ready").await;
    engine.set_page("/health_generate", 200, "");
    engine.set_list(200, OWNED_BY_SGLANG);
    engine.set_page("/health", 200, "");
    eventually("the pool follows", async || pool(&gateway).await["kind"] == "sglang").await;
    assert_eq!(gateway.request(chat(CHAT)).await.status(), 200, "the request ends its probation");
    kind_is(&gateway, "sglang").await;
    gateway.settled().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn engines_of_two_kinds_do_not_change_the_kind_of_their_pool() {
    let (one, other) = (llama().await, Engine::always(completion()).await);
    other.set_list(200, OWNED_BY_SGLANG);
    other.set_page("/health_generate", 200, "");
    let gateway = TestGateway::from_text(&file(&[one.url(), other.url()], ""), &[]).await;
    eventually("both are named", async || {
        let pool = pool(&gateway).await;
        let said = |index: usize| pool["backends"][index]["engine_differs"].as_str().unwrap_or_default().to_owned();
        let kind = pool["kind"].as_str().unwrap_or_default().to_owned();
        let is_named =
            |index: usize, label: &str| label == kind || said(index).contains(&format!("engine = \"{label}\""));
        is_named(0, "llama.cpp") && is_named(1, "sglang")
    })
    .await;
    assert_eq!(gateway.request(chat(CHAT)).await.status(), 200, "they serve nevertheless");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_engine_of_another_kind_than_the_file_says_is_named_by_status_and_check() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("sluice.toml");
    for (kind, found) in [
        ("vllm", "llama.cpp"),
        ("sglang", "llama.cpp"),
        ("triton", "llama.cpp"),
        ("llama.cpp", "triton"),
        ("openai", "triton"),
        ("serial", "triton"),
    ] {
        let engine = if found == "triton" { triton().await } else { llama().await };
        let text = file(&[engine.url()], &format!("engine = \"{kind}\""));
        let gateway = TestGateway::from_text(&text, &[]).await;
        let advice = format!("it is {found}, and its pool is of the kind {kind}: write engine = \"{found}\"");
        eventually(&advice, async || {
            let said = pool(&gateway).await["backends"][0]["engine_differs"].clone();
            said.as_str().is_some_and(|said| said.starts_with(&advice))
        })
        .await;
        assert_eq!(pool(&gateway).await["kind"], kind, "the file decides");
        std::fs::write(&path, &text).unwrap();
        let (code, out, _) = run(&["check", "--probe", path.to_str().unwrap()]).await;
        assert!(code == 1 && out.contains("failed  only/b0") && out.contains(&advice), "{code} {out}");
        std::fs::write(&path, file(&[engine.url()], "")).unwrap();
        let (code, out, _) = run(&["check", "--probe", path.to_str().unwrap()]).await;
        assert!(code == 0 && out.contains(&format!("{found}, ")), "{code} {out}");
    }
    let unknown = Engine::always(completion()).await;
    unknown.set_page("/health", 404, "");
    std::fs::write(&path, file(&[unknown.url()], "")).unwrap();
    let (code, out, _) = run(&["check", "--probe", path.to_str().unwrap()]).await;
    assert!(code == 1 && out.contains("is probably no vllm") && out.contains("openai, serial"), "{out}");
}
