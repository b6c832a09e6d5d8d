//! No client can make its long prompt look short, or the prompts of other clients shorter or
//! longer.
//!
//! There are a short and a long pool, each with one engine, so `x-sluice-pool` of a response shows
//! the estimated class of the prompt. The engines report the usage that a test sets.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::client::{STREAMED, TestClient, chat, post};
use crate::engine::{Engine, LAST, STREAM, Step, chunk, ending, event, json, send};
use crate::test_gateway::{TestGateway, eventually, key_digest};

const BOUNDARY: u64 = 5_000;
const KEYS: [&str; 2] = ["one", "other"];

struct Engines {
    short: Engine,
    long: Engine,
    usage: Arc<AtomicU64>,
}

impl Engines {
    async fn start() -> Self {
        let usage = Arc::new(AtomicU64::new(10));
        let engine = async || {
            let usage = Arc::clone(&usage);
            Engine::start(move |_, _| {
                let tokens = usage.load(Ordering::SeqCst);
                let body = format!(
                    r#"{{"choices":[{{"text":"x","finish_reason":"stop"}}],"usage":{{"prompt_tokens":{tokens},"completion_tokens":1}}}}"#
                );
                vec![Step::Send(json(body.as_bytes()))]
            })
            .await
        };
        Self { short: engine().await, long: engine().await, usage }
    }

    async fn gateway(&self, model: &str) -> TestGateway {
        let keys = KEYS.map(|key| {
            let digest = key_digest(key);
            format!("{{ name = \"{key}\", sha256 = \"{digest}\", models = [\"*\"] }}")
        });
        let (short, long) = (self.short.url(), self.long.url());
        let text = format!(
            "[server]\nlisten = \"127.0.0.1:0\"\nadmin = \"127.0.0.1:0\"\n[auth]\nkeys = [{}]\n\
             [[model]]\nname = \"m\"\n{model}\n\
             [[pool]]\nname = \"short\"\nmodels = [\"m\"]\nprompt_tokens = {{ max = \"5k\" }}\nusage = \"off\"\n\
             [[pool.backend]]\nname = \"s\"\nurl = \"{short}\"\n\
             [[pool]]\nname = \"long\"\nmodels = [\"m\"]\nprompt_tokens = {{ min = \"5k\" }}\nusage = \"off\"\n\
             [[pool.backend]]\nname = \"l\"\nurl = \"{long}\"\n",
            keys.join(", ")
        );
        TestGateway::from_text(&text, &[]).await
    }

    fn report(&self, tokens: u64) {
        self.usage.store(tokens, Ordering::SeqCst);
    }
}

async fn pool_of(client: &mut TestClient, key: &str, body: &str) -> String {
    let headers = format!("authorization: Bearer {key}\r\n");
    let response = client.request(post("/v1/completions", &headers, body.as_bytes())).await;
    assert_eq!(response.status(), 200, "{}", response.text());
    response.head.header("x-sluice-pool").unwrap().to_owned()
}

fn completion(prompt: &str, member: &str) -> String {
    format!(r#"{{"model":"m",{member}"prompt":{prompt}}}"#)
}

fn english(tokens: usize) -> String {
    format!("\"{}\"", "the quick brown fox jumps over the lazy dog and runs away again ".repeat(tokens / 13))
}

#[tokio::test(flavor = "multi_thread")]
async fn a_long_prompt_is_long_wherever_its_escapes_stand() {
    let engines = Engines::start().await;
    let gateway = engines.gateway("").await;
    let mut client = gateway.client().await;
    // Escapes of low surrogates, of which each counts as nothing after a high one, fill 32 windows
    // of 512 bytes. An estimate from samples at these places would find no text.
    let mut prompt = english(20_000).into_bytes();
    let length = prompt.len() - 2;
    for window in 0..32 {
        let start = 1 + (length - 512) * window / 31;
        prompt[start..start + 510].copy_from_slice(&br"\udc00".repeat(85));
    }
    let prompt = String::from_utf8(prompt).unwrap();
    assert_eq!(pool_of(&mut client, "one", &completion(&prompt, "")).await, "long");
    assert_eq!(pool_of(&mut client, "one", &completion(&english(2_000), "")).await, "short");
    gateway.settled().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn token_ids_are_counted_however_they_are_written() {
    let engines = Engines::start().await;
    let gateway = engines.gateway("").await;
    let mut client = gateway.client().await;
    for id in ["7", "7.0", "7e0", "true"] {
        let ids = |count| format!("[{}]", vec![id; count].join(","));
        assert_eq!(pool_of(&mut client, "one", &completion(&ids(6_000), "")).await, "long", "{id}");
        assert_eq!(pool_of(&mut client, "one", &completion(&ids(4_000), "")).await, "short", "{id}");
    }
    gateway.settled().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn truncated_prompts_do_not_make_the_prompts_of_others_short() {
    let engines = Engines::start().await;
    let gateway = engines.gateway("").await;
    let mut client = gateway.client().await;
    let long = english(9_000);
    assert_eq!(pool_of(&mut client, "other", &completion(&long, "")).await, "long");
    for (tokens, member) in
        [(100, r#""truncate_prompt_tokens":100,"#), (2_600, r#""truncate_prompt_tokens":2600,"#), (2_600, "")]
    {
        engines.report(tokens);
        for _ in 0..50 {
            pool_of(&mut client, "one", &completion(&long, member)).await;
        }
        assert_eq!(pool_of(&mut client, "other", &completion(&long, "")).await, "long", "{tokens} {member}");
    }
    gateway.settled().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_client_whose_short_prompt_was_long_is_estimated_longer_from_then_on() {
    let engines = Engines::start().await;
    let gateway = engines.gateway("").await;
    let mut client = gateway.client().await;
    // The engine reports three times as many prompt tokens as the gateway expects for this text.
    let odd = completion(&english(3_000), "");
    engines.report(3_000);
    for _ in 0..30 {
        assert_eq!(pool_of(&mut client, "other", &odd).await, "short");
    }
    engines.report(3 * 3_000);
    assert_eq!(pool_of(&mut client, "one", &odd).await, "short");
    engines.report(3_000);
    eventually("its next one is long", async || pool_of(&mut gateway.client().await, "one", &odd).await == "long")
        .await;
    assert_eq!(pool_of(&mut client, "other", &odd).await, "short", "another client's is not");
    gateway.settled().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn with_a_tokenizer_unusual_text_is_counted_wherever_that_changes_the_pool() {
    let engines = Engines::start().await;
    let tokenizer = concat!("tokenizer = \"", env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/tiny/tokenizer.json\"");
    let gateway = engines.gateway(tokenizer).await;
    let mut client = gateway.client().await;
    // Random letters have several times as many tokens as words.
    let mut state = 1u32;
    let letters: String = (0..12_000)
        .map(|_| {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            char::from(b'a' + (state >> 24) as u8 % 26)
        })
        .collect();
    assert_eq!(pool_of(&mut client, "one", &completion(&format!("\"{letters}\""), "")).await, "long");
    assert_eq!(pool_of(&mut client, "one", &completion(&english(2_000), "")).await, "short");
    gateway.settled().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_prompt_that_proves_longer_is_charged_while_it_runs() {
    let usage = format!("}}],\"usage\":{{\"prompt_tokens\":{BOUNDARY},\"completion_tokens\":1}}}}\n\n");
    let first = event("a").replace("}]}\n\n", &usage);
    let steps = vec![send(STREAM.to_owned() + &chunk(&first)), Step::Gate, send(chunk(&ending()) + LAST)];
    let engine = Engine::always(steps).await;
    let gateway = TestGateway::over(&[engine.url()], &[]).await;
    let mut client = gateway.client().await;
    client.send(chat(STREAMED)).await.until("usage").await;
    let held = async || gateway.metric("sluice_outstanding_tokens", &[]).await;
    eventually("its true length is held", async || held().await >= BOUNDARY as f64).await;
    engine.open_gate();
    assert!(client.response().await.whole);
    gateway.settled().await;
}
