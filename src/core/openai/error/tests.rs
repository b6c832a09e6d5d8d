//! Tests of every refusal.
//!
//! Each must have both shapes, and a code that no other refusal has.

use super::*;
use crate::openai::LimitUnit;

fn all() -> Vec<Refusal> {
    let shed = ShedReason::ALL.map(|reason| Refusal::Shed { reason, retry_after: 0 });
    let rest = [
        Refusal::BadRequest { message: "'n' must be an integer".into(), param: Some("n") },
        Refusal::NoModel,
        Refusal::ExceedsBackend(TooLarge { unit: LimitUnit::Sequences, wanted: u64::MAX, limit: u64::MAX }),
        Refusal::ExceedsKey(TooLarge { unit: LimitUnit::Tokens, wanted: u64::MAX, limit: u64::MAX }),
        Refusal::BodyTooLarge { limit: 7 },
        Refusal::BodyExpands { times: 100 },
        Refusal::EncodingNotSupported,
        Refusal::UnknownResponse { id: "r".repeat(999) },
        Refusal::BodyTimeout,
        Refusal::HeaderTimeout,
        Refusal::HeadersTooLarge,
        Refusal::NoKey,
        Refusal::BadKey,
        Refusal::OriginNotAllowed { origin: "https://a.example".into() },
        Refusal::ModelForbidden { model: "m\"".into() },
        Refusal::UnknownModel { model: "x".repeat(999), valid: (0..30).map(|n| format!("m{n}")).collect() },
        Refusal::UnknownRoute { hint: None },
        Refusal::MethodNotAllowed { allow: "POST" },
        Refusal::ExpectationFailed,
        Refusal::KeyLimit { key: "team-a".into(), limit: KeyLimit::RequestRate(2), retry_after: 3 },
        Refusal::UpgradeRefused,
        Refusal::CodingNotSupported,
        Refusal::UpstreamBusy { message: "the engine is full".into(), retry_after: 0 },
        Refusal::UpstreamBroke,
        Refusal::UpstreamRefusedGateway,
        Refusal::SuspectedCrash { seconds: 300 },
        Refusal::UpstreamTimeout,
        Refusal::Internal,
    ];
    shed.into_iter().chain(rest).collect()
}

#[test]
fn every_refusal_has_openai_s_shape_and_a_code_of_its_own() {
    let mut codes = std::collections::HashSet::new();
    for refusal in all() {
        let body: Value = serde_json::from_slice(&refusal.body(ErrorFormat::OpenAi)).unwrap();
        let error = body["error"].as_object().unwrap();
        assert_eq!(error.keys().collect::<Vec<_>>(), ["code", "message", "param", "type"]);
        assert_eq!(error["code"], refusal.code());
        assert!(codes.insert(refusal.code()), "{refusal:?}");
        assert!((400..=599).contains(&refusal.status()));
        assert!(error["message"].as_str().unwrap().len() < 400, "{refusal:?}");
    }
    assert_eq!(codes, error_codes().collect());
}

#[test]
fn every_refusal_has_anthropic_s_shape_too() {
    for refusal in all() {
        let body: Value = serde_json::from_slice(&refusal.body(ErrorFormat::Anthropic)).unwrap();
        assert_eq!(body["type"], "error");
        assert!(body["error"]["type"].is_string() && body["error"]["message"].is_string());
    }
}

#[test]
fn retry_after_is_a_second_at_least_and_only_on_408_429_and_503() {
    for refusal in all() {
        assert_eq!(refusal.retry_after().is_some(), matches!(refusal.status(), 408 | 429 | 503), "{refusal:?}");
        assert!(refusal.retry_after().is_none_or(|seconds| seconds >= 1));
    }
}

#[test]
fn the_refusal_of_an_unknown_model_lists_at_most_twenty_names() {
    let refusal = Refusal::UnknownModel { model: "x".into(), valid: (0..23).map(|n| format!("m{n}")).collect() };
    let body: Value = serde_json::from_slice(&refusal.body(ErrorFormat::OpenAi)).unwrap();
    let message = body["error"]["message"].as_str().unwrap();
    assert!(message.contains("m19") && !message.contains("m20") && message.ends_with("and 3 more"), "{message}");
}

#[test]
fn a_stream_that_fails_ends_with_an_error_event() {
    let event = String::from_utf8(sse_error_event(StreamFailure::UpstreamBroke, ErrorFormat::OpenAi)).unwrap();
    let data = event.strip_prefix("\n\nevent: error\ndata: ").unwrap().strip_suffix("\n\n").unwrap();
    let value: Value = serde_json::from_str(data).unwrap();
    assert_eq!(value["error"]["code"], "upstream_broke");
    let event = String::from_utf8(sse_error_event(StreamFailure::UpstreamIdle, ErrorFormat::Anthropic)).unwrap();
    assert!(event.contains(r#""type":"api_error""#), "{event}");
}
