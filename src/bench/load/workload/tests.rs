//! Tests of workloads: the request for each number, and hit rates of an unlimited cache.

use super::*;
use crate::load::adapters::AdapterChoice;
use crate::load::dataset::{DatasetFormat, ReadOptions, TokenCounter, TraceKeys, parse};

fn mixed(api: Api) -> Workload {
    let tokens = if api == Api::Chat { PromptTokens::Words } else { PromptTokens::Ids(1_000..8_000) };
    let short = Class::new("short", Length::Exactly(20), Length::Exactly(8), 15.0);
    let long = Class::new("long", Length::Between { min: 300, max: 310 }, Length::Exactly(4), 1.0);
    Workload { api, tokens, ..Workload::of_classes("m", vec![short, long], 7) }
}

fn body(request: &LoadRequest) -> serde_json::Value {
    serde_json::from_slice(&request.body).unwrap()
}

fn ids(request: &LoadRequest) -> Vec<u64> {
    body(request)["prompt"].as_array().unwrap().iter().map(|id| id.as_u64().unwrap()).collect()
}

#[test]
fn a_request_is_a_function_of_seed_and_number() {
    let workload = mixed(Api::Completions);
    assert_eq!(workload.request(41), workload.request(41));
    assert_ne!(workload.request(41).body, workload.request(42).body);
    let other = Workload { seed: 8, ..workload.clone() };
    assert_ne!(workload.request(41).body, other.request(41).body);
}

#[test]
fn token_id_prompts_have_exactly_the_length_asked_for_and_stay_in_the_vocabulary() {
    let workload = mixed(Api::Completions);
    for ordinal in 0..200 {
        let request = workload.request(ordinal);
        let ids = ids(&request);
        assert_eq!(ids.len(), request.prompt_tokens as usize);
        assert!(ids.iter().all(|id| (1_000..8_000).contains(id)));
        assert_eq!(body(&request)["max_tokens"], request.output_tokens);
        let range = if request.class == 0 { 20..=20 } else { 300..=310 };
        assert!(range.contains(&request.prompt_tokens));
    }
}

#[test]
fn chat_prompts_are_one_word_for_each_token() {
    let request = mixed(Api::Chat).request(3);
    let body = body(&request);
    let text = body["messages"][0]["content"].as_str().unwrap();
    assert_eq!(text.split(' ').count(), request.prompt_tokens as usize);
}

#[test]
fn classes_are_chosen_in_proportion_to_their_weights() {
    let workload = mixed(Api::Completions);
    let long = (0..16_000).filter(|ordinal| workload.class_of(*ordinal) == 1).count();
    assert!((900..1_100).contains(&long), "{long} of 16000 are long, 1000 expected");
}

fn prefixed(prompt: Length, prefix: Prefix) -> Workload {
    let class = Class { prefix, ..Class::new("c", prompt, Length::Exactly(1), 1.0) };
    Workload::of_classes("m", vec![class], 3)
}

#[test]
fn an_extra_prefix_comes_before_the_length_and_is_the_same_for_all() {
    let prefix = Prefix { kind: PrefixKind::Extra(32), ..Prefix::default() };
    let workload = prefixed(Length::Exactly(10), prefix);
    let (one, two) = (workload.request(1), workload.request(2));
    assert_eq!((one.prompt_tokens, two.prompt_tokens), (42, 42));
    assert_eq!(ids(&one)[..32], ids(&two)[..32]);
    assert_ne!(ids(&one)[32..], ids(&two)[32..]);
}

fn hit_rate(workload: &Workload, count: u64) -> f64 {
    let mut seen = std::collections::HashSet::new();
    let (mut found, mut all) = (0, 0);
    for ordinal in 0..count {
        let ids = ids(&workload.request(ordinal));
        all += ids.len();
        let blocks = ids.chunks_exact(BLOCK as usize).enumerate().map(|(at, _)| &ids[..(at + 1) * BLOCK as usize]);
        let mut fresh = false;
        for prefix in blocks {
            fresh |= seen.insert(prefix.to_vec());
            found += if fresh { 0 } else { BLOCK as usize };
        }
    }
    found as f64 / all as f64
}

#[test]
fn a_shared_prefix_gives_the_configured_hit_rate() {
    for (share, groups, expected) in [(0.6, 4, 0.6), (0.25, 1, 0.25), (0.0, 1, 0.0), (0.9, 8, 0.9)] {
        let prefix = Prefix { kind: PrefixKind::Share(share), groups, warm: 1.0 };
        let rate = hit_rate(&prefixed(Length::Between { min: 150, max: 650 }, prefix), 800);
        assert!((rate - expected).abs() < 0.02, "{rate} instead of {expected}");
    }
    let half = Prefix { kind: PrefixKind::Share(0.8), groups: 1, warm: 0.5 };
    let rate = hit_rate(&prefixed(Length::Exactly(400), half), 800);
    assert!((rate - 0.4).abs() < 0.03, "{rate}");
}

#[test]
fn an_adapter_is_requested_as_the_model() {
    let names = vec!["a".to_owned(), "b".to_owned()];
    let workload =
        Workload { adapters: Adapters { names, choice: AdapterChoice::RoundRobin }, ..mixed(Api::Completions) };
    assert_eq!((&body(&workload.request(0))["model"], workload.request(0).adapter), (&"a".into(), Some(0)));
    assert_eq!((&body(&workload.request(1))["model"], workload.request(1).adapter), (&"b".into(), Some(1)));
}

#[test]
fn the_configured_share_of_clients_leaves_during_the_response() {
    let workload = Workload { leaving: 0.25, ..mixed(Api::Completions) };
    let leaving: Vec<u32> = (0..4_000).filter_map(|ordinal| workload.request(ordinal).leave_after).collect();
    assert!((880..1_120).contains(&leaving.len()), "{}", leaving.len());
    assert!(leaving.contains(&0) && leaving.contains(&7) && leaving.iter().all(|events| *events < 8));
}

#[test]
fn blocks_of_a_trace_with_the_same_name_are_the_same_tokens() {
    let text = "{\"timestamp\":0,\"input_length\":40,\"output_length\":3,\"hash_ids\":[7,8]}\n\
                {\"timestamp\":9,\"input_length\":50,\"output_length\":3,\"hash_ids\":[7,9]}\n\
                {\"timestamp\":9,\"input_length\":10,\"output_length\":3,\"hash_ids\":[7,8]}\n";
    let options = ReadOptions { counter: &TokenCounter::Bytes, output: None, limit: 0, shuffle: None, model: "m" };
    let items = parse(text, "x", &DatasetFormat::Timed(TraceKeys::default()), &options).unwrap();
    let workload = Workload { source: RequestSource::Items(Arc::new(items)), ..mixed(Api::Completions) };
    let [one, two, three] = [0, 1, 2].map(|ordinal| ids(&workload.request(ordinal)));
    assert_eq!((one.len(), two.len(), three.len()), (40, 50, 10));
    assert_eq!(one[..16], two[..16]);
    assert_ne!(one[16..32], two[16..32]);
    assert_eq!(one[..10], three[..]);
}

#[test]
fn an_invalid_workload_is_refused_and_the_error_names_its_class() {
    let change = |change: &dyn Fn(&mut Class)| {
        let mut workload = mixed(Api::Completions);
        if let RequestSource::Classes(classes) = &mut workload.source {
            change(&mut classes[1]);
        }
        workload.check().unwrap_err()
    };
    assert_eq!(change(&|class| class.weight = 0.0), BenchError::BadWeight("long".into(), 0.0));
    let reversed = Length::Between { min: 5, max: 4 };
    assert_eq!(change(&|class| class.prompt = reversed), BenchError::BadLength("long".into(), "prompt"));
    assert!(change(&|class| class.prefix.warm = 1.5).to_string().contains("1.5"));
    let ids_in_chat = Workload { api: Api::Chat, ..mixed(Api::Completions) };
    assert_eq!(ids_in_chat.check(), Err(BenchError::IdsInChat));
    assert_eq!(Workload::of_classes("m", vec![], 1).check(), Err(BenchError::NoClasses));
    let no_groups = prefixed(Length::Exactly(40), Prefix { groups: 0, ..Prefix::default() }).check().unwrap_err();
    assert!(no_groups.to_string().ends_with("has 0 different prefixes; give 1 or more"), "{no_groups}");
}
