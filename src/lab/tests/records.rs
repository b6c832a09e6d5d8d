//! Recorded requests as traffic.
//!
//! The requests are in the gateway's format, with hashes of the beginnings of prompts.

use crate::{LabFile, Measure, Options, Scenario, Study, Variant};

/// Hit rate and share of failures, in percent, of 40 requests for `model` whose prompts begin with
/// these hashes.
fn study(model: &str, hash: impl Fn(u32) -> String) -> Study {
    let folder = tempfile::tempdir().unwrap();
    let line = |number: u32| {
        format!(
            "{{\"version\":1,\"time\":\"2026-01-02T03:04:{number:02}Z\",\"total_ms\":1.0,\"route\":\"completions\",\"home\":\"all\",\
             \"model\":\"{model}\",\"prompt_tokens\":200,\"completion_tokens\":4,\"prompt_bytes\":800,\"prefix\":[\"{}\"]}}\n",
            hash(number)
        )
    };
    std::fs::write(folder.path().join("records.jsonl"), (0..40).map(line).collect::<String>()).unwrap();
    let text = "[[traffic]]\ntrace = { format = \"records\", path = \"records.jsonl\" }\n";
    let scenario = Scenario { file: LabFile::parse(text, "test").unwrap(), folder: folder.path().to_owned() };
    let options = Options { seed: 1, seeds: 1, threads: 1, keep: true };
    let measures: Vec<Measure> = ["hit_rate", "all.failed"].iter().map(|name| name.parse().unwrap()).collect();
    Study::run(&scenario, &[Variant::default()], &measures, options).unwrap()
}

fn hit_rate(hash: impl Fn(u32) -> String) -> f64 {
    let study = study("llama-3.1-8b", hash);
    let requests = &study.variants[0].first.as_ref().unwrap().result.requests;
    assert_eq!(requests.len(), 40);
    let ends = [0, 39].map(|place: usize| requests[place].due.unwrap());
    assert!((ends[1] - ends[0] - 39.0).abs() < 1e-6, "at the recorded times: {ends:?}");
    assert_eq!((study.estimate(0, 1).value, &study.variants[0].failure), (0.0, &None), "none failed");
    study.estimate(0, 0).value
}

#[test]
fn prompts_that_began_alike_share_blocks_in_the_simulated_cache() {
    // 128 of 200 tokens are in the hashed beginning, and the first request finds none of them.
    let [alike, unlike] = [hit_rate(|_| "0a".to_owned()), hit_rate(|number| format!("{number:x}"))];
    assert!((alike - 100.0 * 0.64 * 39.0 / 40.0).abs() < 5.0, "{alike}");
    assert!(unlike < 1.0, "{unlike}");
}

#[test]
fn why_no_request_completed_is_said() {
    let study = study("another", |_| "0a".to_owned());
    assert_eq!(study.estimate(0, 1).value, 100.0);
    assert_eq!(study.variants[0].failure.as_deref(), Some("status 404 (refused)"));
}
