//! Speculative decoding as clients and scrapers see it: events of several tokens, and
//! `vllm:spec_decode_*`.

use super::*;
use crate::engine::{Drafter, Speculation};

#[tokio::test]
async fn accepted_drafts_come_in_one_event_and_are_counted_by_position() {
    let handle = server(|config| {
        config.speed = 50.0;
        config.engine.async_scheduling = false;
        config.engine.speculation = Some(Speculation {
            drafter: Drafter::Lookup,
            tokens: 3,
            acceptance: vec![1.0, 0.5, 0.0],
            kinds: Vec::new(),
            proposed: 1.0,
            length: 3.0,
            is_greedy: false,
            by_sequences: Vec::new(),
        });
    })
    .await;
    let body = r#"{"prompt":"once","max_tokens":1000,"ignore_eos":true,"stream":true,
        "stream_options":{"include_usage":true,"continuous_usage_stats":true}}"#;
    let stream = call(&handle, "POST", COMPLETION, body).await.1;
    let chunks =
        stream.split("\n\n").filter_map(|event| serde_json::from_str::<Value>(event.strip_prefix("data: ")?).ok());
    let counted: Vec<u64> = chunks
        .filter(|chunk| chunk["choices"].as_array().is_some_and(|choices| !choices.is_empty()))
        .filter_map(|chunk| chunk["usage"]["completion_tokens"].as_u64())
        .collect();
    let steps: Vec<u64> = counted.windows(2).map(|pair| pair[1] - pair[0]).collect();
    assert_eq!(counted.last(), Some(&1000));
    // Two or three tokens a step. If the reader was late, tokens of several steps come together.
    let (_, whole) = steps.split_last().unwrap();
    assert!(whole.iter().all(|tokens| *tokens >= 2), "{steps:?}");
    let page = call(&handle, "GET", "/metrics", "").await.1;
    let read = metrics::MetricsSnapshot::parse(&page);
    assert_eq!((read.drafts.tokens, read.generation_tokens), (3.0 * read.drafts.drafts, 1000.0));
    let shown = read.drafts.acceptance().unwrap();
    assert!(shown[0] == 1.0 && (shown[1] - 0.5).abs() < 0.1 && shown.len() == 2, "{shown:?}");
    let sum = format!(
        "vllm:spec_decode_num_accepted_tokens_total{{engine=\"0\",model_name=\"m\"}} {:?}",
        read.drafts.accepted()
    );
    assert!(page.contains(&sum), "{sum} is not in {page}");
    handle.shutdown().await;
}

#[tokio::test]
async fn an_engine_without_drafts_does_not_count_them() {
    let handle = server(|_| {}).await;
    assert!(!call(&handle, "GET", "/metrics", "").await.1.contains("spec_decode"));
    handle.shutdown().await;
}
