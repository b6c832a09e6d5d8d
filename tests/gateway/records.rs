//! Records of requests to simulated engines.
//!
//! The records contain no text and no secret, and a replay of them is the same traffic.

use std::collections::BTreeMap;
use std::path::Path;

use serde_json::Value;

use crate::client::post;
use crate::commands::run;
use crate::test_gateway::{TestGateway, access_log, key_digest, one_pool};

/// A secret key. No record may contain it or the ids in [`HEADERS`].
const KEY: &str = "sk-private-key";
const HEADERS: &str = "authorization: Bearer sk-private-key\r\nx-request-id: private-id\r\n";

async fn gateway(engines: &[String], path: &Path) -> TestGateway {
    let key = format!("[[auth.keys]]\nname = \"private-team\"\nsha256 = \"{}\"\n", key_digest(KEY));
    let sets = [format!("records={{path=\"{}\"}}", path.display())];
    TestGateway::from_text(&(one_pool(engines) + &key), &sets.each_ref().map(String::as_str)).await
}

fn stream(begin: &str, end: &str) -> Vec<u8> {
    let text = format!("private {begin} ").repeat(150) + end;
    let body = format!(
        "{{\"model\":\"m\",\"stream\":true,\"stream_options\":{{\"include_usage\":true}},\"max_tokens\":5,\"user\":\"private\",\
         \"messages\":[{{\"role\":\"user\",\"content\":\"{text}\"}}]}}"
    );
    post("/v1/chat/completions", HEADERS, body.as_bytes())
}

/// The records of a text in the order in which the requests arrived.
fn records(text: &str) -> Vec<Value> {
    let mut lines: Vec<Value> = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let arrived = |line: &Value| {
        let ended: jiff::Timestamp = line["time"].as_str().unwrap().parse().unwrap();
        ended.as_microsecond() as f64 - line["total_ms"].as_f64().unwrap() * 1e3
    };
    lines.sort_by(|one, other| arrived(one).total_cmp(&arrived(other)));
    lines
}

fn tokens(records: &[Value], key: &str) -> Vec<u64> {
    records.iter().map(|record| record[key].as_u64().unwrap_or_else(|| panic!("{key}: {record}"))).collect()
}

/// For each record, the index of the first record whose prompt begins in the same way.
fn alike(records: &[Value]) -> Vec<usize> {
    let mut first = BTreeMap::new();
    let begins = records.iter().map(|record| record["prefix"][0].as_str().expect("a hash").to_owned());
    begins.enumerate().map(|(place, begin)| *first.entry(begin).or_insert(place)).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_replay_has_the_lengths_and_the_shared_prefixes_of_the_records_which_hold_no_text() {
    let engines = [crate::health::sim().await, crate::health::sim().await];
    let urls = engines.each_ref().map(|engine| format!("http://{}", engine.addr()));
    let folder = tempfile::tempdir().unwrap();
    let [path, again, html] = ["records.jsonl", "again.jsonl", "report.html"].map(|name| folder.path().join(name));
    let [from, to, page] = [&path, &again, &html].map(|path| path.to_str().unwrap());

    let served = gateway(&urls, &path).await;
    for (number, (begin, end)) in
        [("one", "a"), ("one", "something else"), ("another", "a"), ("one", "b"), ("another", "c")].iter().enumerate()
    {
        assert_eq!(served.request(stream(begin, end)).await.status(), 200);
        access_log(&path, number + 1).await;
    }
    served.stop().await;
    let text = std::fs::read_to_string(&path).unwrap();
    for secret in ["private", KEY, "one", "something"] {
        assert!(!text.contains(secret), "{secret}: {text}");
    }
    let recorded = records(&text);
    assert_eq!(alike(&recorded), [0, 0, 2, 0, 2]);
    assert_eq!(tokens(&recorded, "completion_tokens"), [5; 5]);

    let replayed = gateway(&urls, &again).await;
    let url = format!("http://{}", replayed.address());
    let header = format!("Authorization=Bearer {KEY}");
    let words = ["bench", "--base-url", &url, "--model", "m", "--header", &header, "--dataset-name", "records"];
    let (code, out, err) = run(&[&words[..], &["--dataset-path", from, "--num-warmups", "0"]].concat()).await;
    assert_eq!(code, 0, "{out}{err}");
    replayed.stop().await;
    // The replay first asks for the list of models; that record has no prefix.
    let mut replay = records(&std::fs::read_to_string(&again).unwrap());
    replay.retain(|record| !record["prefix"].is_null());
    assert_eq!(tokens(&replay, "prompt_tokens"), tokens(&recorded, "prompt_tokens"));
    assert_eq!(tokens(&replay, "completion_tokens"), [5; 5]);
    assert_eq!(alike(&replay), alike(&recorded));

    let (code, out, err) = run(&["report", from, "-o", page]).await;
    assert_eq!(code, 0, "{out}{err}");
    // The summary is wrapped to the width of the terminal.
    let summary = out.split_whitespace().collect::<Vec<_>>().join(" ");
    assert!(summary.contains("5 completed, 0 shed, 0 failed"), "{out}");
    assert!(std::fs::read_to_string(page).unwrap().contains("Where TTFT went"));
    let (code, _, err) = run(&["report", from, to, from, "-o", page]).await;
    assert!(code == 2 && err.contains("is given twice"), "{err}");
    for engine in engines {
        engine.kill().await;
    }
}
