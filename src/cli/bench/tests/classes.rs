//! Results by the classes of the gateway, from each source of classes.
//!
//! The scripted engine counts 3 tokens in every second prompt and 9,000 in the others.

use std::path::Path;

use serde_json::Value;

use super::*;

async fn engine_of_two_lengths() -> MockEngine {
    MockEngine::start(|number| {
        let stream = completion_stream(3);
        let long = |piece: String| piece.replace("\"prompt_tokens\":3", "\"prompt_tokens\":9000");
        let pieces = if number % 2 == 0 { stream } else { stream.into_iter().map(long).collect() };
        MockResponse::stream(pieces, Duration::ZERO)
    })
    .await
}

async fn saved(flags: &[&str], path: &Path) -> Value {
    let engine = engine_of_two_lengths().await;
    let url = engine.url();
    let own = ["--base-url", &url, "--model", "m", "--num-prompts", "10", "--max-concurrency", "1"];
    let save = ["--result-filename", path.to_str().unwrap()];
    assert_eq!(code(&[&own[..], &save, flags].concat()).await, (0, String::new()));
    serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap()
}

fn counts(json: &Value, by: &str) -> Vec<(String, u64)> {
    let slices = json["sluice"]["summary"][by].as_object().into_iter().flatten();
    slices.map(|(name, slice)| (name.clone(), slice["completed"].as_u64().unwrap())).collect()
}

fn named(counts: &[(&str, u64)]) -> Vec<(String, u64)> {
    counts.iter().map(|(name, count)| ((*name).to_owned(), *count)).collect()
}

#[tokio::test]
async fn results_are_by_the_classes_that_the_gateway_has_and_otherwise_by_short_and_long() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("r.json");
    let usual = saved(&[], &path).await;
    assert_eq!(counts(&usual, "by_class"), named(&[("long", 5), ("short", 5)]));
    let given = saved(&["--by-class", "few:max=4", "--by-class", "most:min=4"], &path).await;
    assert_eq!(counts(&given, "by_class"), named(&[("few", 5), ("most", 5)]));
    let config = folder.path().join("sluice.toml");
    let text = "[[pool]]\nname = \"all\"\n[[pool.backend]]\nname = \"a\"\nurl = \"http://127.0.0.1:9\"\n\
                [[class]]\nname = \"tiny\"\nprompt_tokens = { max = 4 }\n";
    std::fs::write(&config, text).unwrap();
    let of_file = saved(&["--by-class", config.to_str().unwrap()], &path).await;
    assert_eq!(counts(&of_file, "by_class"), named(&[("other", 5), ("tiny", 5)]));
    let status = "{\"pools\":[],\"classes\":[{\"name\":\"brief\",\"min_tokens\":0,\"max_tokens\":4},{\"name\":\"vast\",\"min_tokens\":4}]}";
    let gateway = MockEngine::start(|_| MockResponse::stream(vec![status.to_owned()], Duration::ZERO)).await;
    let reported = saved(&["--metrics-url", &gateway.url()], &path).await;
    assert_eq!(counts(&reported, "by_class"), named(&[("brief", 5), ("vast", 5)]));
    assert_eq!(file::load(&path).unwrap()[0].config.gateway_classes[0].requests, "0 to 4");
    says(code(&["--base-url", &gateway.url(), "--model", "m", "--by-class", "/nowhere.toml"]).await, 2, "--by-class");
}

#[tokio::test]
async fn the_loads_own_classes_are_shown_beside_others_and_alone_if_the_gateway_is_unknown() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("r.json");
    let load = ["--class", "chat:in=3", "--class", "rag:in=9000"];
    let alone = saved(&load, &path).await;
    let count = |json: &Value, by: &str| counts(json, by).iter().map(|(_, count)| count).sum::<u64>();
    assert_eq!((count(&alone, "by_class"), count(&alone, "by_load_class")), (10, 0));
    assert!(counts(&alone, "by_class").iter().all(|(name, _)| name == "chat" || name == "rag"));
    let both = saved(&[&load[..], &["--by-class", "few:max=4", "--by-class", "most:min=4"]].concat(), &path).await;
    assert_eq!(counts(&both, "by_class"), named(&[("few", 5), ("most", 5)]));
    assert_eq!(count(&both, "by_load_class"), 10);
}
