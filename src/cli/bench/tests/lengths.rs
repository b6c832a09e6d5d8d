//! Compares the tokens asked for with the tokens counted.
//!
//! Simulated engines count with a tokenizer; scripted engines report any count.

use std::path::Path;

use serde_json::{Value, json};

use super::*;
use sluice_bench::RunResult;
use sluice_core::vllm::args::ServeArgs;
use sluice_sim::{Profile, SimConfig};

const TOKENIZER: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/tiny/tokenizer.json");
/// A template that adds tokens and strips a text's blanks, as templates of common models do.
const TEMPLATE: &str = "<|system|>answer in few words<|end|>{% for m in messages %}<|{{m.role}}|>{{m.content | trim}}\
                        <|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}";

async fn counting_engine(folder: &Path) -> sluice_sim::Handle {
    std::fs::copy(TOKENIZER, folder.join("tokenizer.json")).unwrap();
    let config = json!({"bos_token": "<|begin|>", "eos_token": "<|end|>", "chat_template": TEMPLATE});
    std::fs::write(folder.join("tokenizer_config.json"), config.to_string()).unwrap();
    let args = ["--served-model-name".to_owned(), "m".to_owned()];
    let args = [&[folder.display().to_string()], &args[..]].concat();
    let profile = Profile::named("h200-llama-8b").unwrap();
    let config = SimConfig::from_args(&ServeArgs::parse(&args).unwrap(), profile).unwrap();
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    sluice_sim::spawn(SimConfig { speed: 50.0, ..config }, listener).unwrap()
}

async fn measured(flags: &[&str]) -> RunResult {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("r.json");
    let saved = [flags, &["--result-filename", path.to_str().unwrap()]].concat();
    assert_eq!(code(&saved).await, (0, String::new()));
    file::load(&path).unwrap().remove(0)
}

#[tokio::test]
async fn with_a_tokenizer_text_prompts_have_exactly_the_tokens_asked_for() {
    let folder = tempfile::tempdir().unwrap();
    let engine = counting_engine(folder.path()).await;
    let url = format!("http://{}", engine.addr());
    let base = ["--base-url", &url, "--model", "m", "--num-prompts", "12", "--max-concurrency", "4"];
    let classes = ["--class", "short:in=200,out=4", "--class", "long:in=900-1100,out=2,prefix=0.5"];
    for api in [&["--backend", "openai-chat"][..], &["--prompt-text"]] {
        let exact = measured(&[&base[..], &classes, api, &["--tokenizer", TOKENIZER]].concat()).await;
        assert_eq!(exact.requests.len(), 12);
        for record in &exact.requests {
            assert_eq!(record.asked_tokens, None, "{api:?}: {record:?}");
            assert!(record.class == 1 || record.prompt_tokens == 200, "{api:?}: {record:?}");
        }
        assert!(exact.warnings.iter().all(|warning| !warning.contains("the load differs")), "{:?}", exact.warnings);
        let words = measured(&[&base[..], &classes, api].concat()).await;
        let warning = words.warnings.iter().find(|warning| warning.contains("the load differs"));
        assert!(warning.is_some_and(|warning| warning.contains("give --tokenizer")), "{:?}", words.warnings);
        assert!(words.requests.iter().all(|record| record.asked() < record.prompt_tokens), "{api:?}");
    }
    engine.shutdown().await;
}

#[tokio::test]
async fn without_usage_tokens_are_counted_by_the_tokenizer_or_unknown() {
    let chunk = |text: &str, finish: &str| {
        format!("data: {{\"choices\":[{{\"index\":0,\"text\":\"{text}\",\"finish_reason\":{finish}}}]}}\n\n")
    };
    let pieces = vec![chunk(" one two three four", "null"), chunk(" one two three four", "\"length\"")];
    let engine = MockEngine::start(move |_| MockResponse::stream(pieces.clone(), Duration::from_millis(1))).await;
    let url = engine.url();
    let base = ["--base-url", &url, "--model", "m", "--num-prompts", "3", "--random-input-len", "8", "--save-detailed"];
    let unknown = measured(&base).await;
    for key in ["total_output_tokens", "output_throughput", "total_token_throughput", "mean_tpot_ms", "p99_tpot_ms"] {
        assert_eq!(unknown.reported[key], Value::Null, "{key}");
    }
    assert_eq!((&unknown.reported["completed"], &unknown.reported["total_input_tokens"]), (&json!(3), &json!(24)));
    assert_eq!(unknown.reported["output_lens"], json!([null, null, null]));
    assert!(unknown.warnings.iter().any(|warning| warning.contains("output tokens are unknown")));
    let counted = measured(&[&base[..], &["--tokenizer", TOKENIZER]].concat()).await;
    let each = sluice_bench::load::dataset::TokenCounter::exact(Path::new(TOKENIZER)).unwrap();
    let each = each.output(" one two three four one two three four");
    assert!(each >= 8);
    assert_eq!(counted.reported["total_output_tokens"], 3 * each);
    assert!(counted.reported["mean_tpot_ms"].as_f64().unwrap() > 0.0);
    assert!(counted.warnings.iter().any(|warning| warning.contains("counted with the tokenizer")));
}

#[tokio::test]
async fn a_custom_data_set_has_the_output_length_of_vllm_unless_asked_otherwise() {
    let engine = engine().await;
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("p.jsonl");
    std::fs::write(&path, "{\"prompt\":\"a\",\"output_tokens\":7.0}\n{\"prompt\":\"b\",\"output_tokens\":\"9\"}\n")
        .unwrap();
    let url = engine.url();
    let data = ["--dataset-name", "custom", "--dataset-path", path.to_str().unwrap(), "--disable-shuffle"];
    let base =
        [&["--base-url", &url, "--model", "m", "--num-prompts", "2", "--max-concurrency", "1"], &data[..]].concat();
    let limits = |from: usize| -> Vec<u64> {
        engine.bodies()[from..].iter().map(|body| body["max_tokens"].as_u64().unwrap()).collect()
    };
    measured(&base).await;
    assert_eq!(limits(0), [256, 256]);
    measured(&[&base[..], &["--custom-output-len", "-1"]].concat()).await;
    assert_eq!(limits(2), [7, 9]);
    measured(&[&base[..], &["--custom-output-len", "30"]].concat()).await;
    assert_eq!(limits(4), [30, 30]);
}

#[tokio::test]
async fn requests_name_as_many_users_as_asked_for_and_a_conversation_keeps_its_own() {
    let engine = engine().await;
    let url = engine.url();
    let base = ["--base-url", &url, "--model", "m", "--num-prompts", "40", "--random-input-len", "5", "--users", "4"];
    measured(&base).await;
    let users = |from: usize| -> Vec<String> {
        engine.bodies()[from..].iter().map(|body| body["user"].as_str().unwrap().to_owned()).collect()
    };
    let seen: std::collections::BTreeSet<String> = users(0).into_iter().collect();
    assert_eq!(seen.into_iter().collect::<Vec<_>>(), ["user-0", "user-1", "user-2", "user-3"]);
    let talks = ["--num-prompts", "6", "--multi-turn", "--max-concurrency", "1", "--users", "4"];
    measured(&[&base[..4], &["--random-input-len", "5"], &talks].concat()).await;
    let turns = users(40);
    assert!(turns.len() == 18 && turns.chunks(3).all(|talk| talk.iter().all(|user| *user == talk[0])), "{turns:?}");
}
