//! Messages of Anthropic's form whose engine fails after tokens were sent: another engine continues
//! them as a chat, and the client sees one message.

use serde_json::{Value, json};
use sluice_core::openai::{NotContinued, Route};

use super::continued::{assert_nothing_kept, body, completing, text};
use super::*;

const MESSAGE: &str = r#"{"model":"m","stream":true,"max_tokens":9,"stop_sequences":["END"],"system":"s",
    "messages":[{"role":"user","content":[{"type":"text","text":"hi"}]}]}"#;
const WITHOUT_STOP: &str = r#"{"model":"m","stream":true,"max_tokens":9,"messages":[{"role":"user","content":"hi"}]}"#;
const WITH_TOOLS: &str =
    r#"{"model":"m","stream":true,"max_tokens":9,"tools":[{"name":"t"}],"messages":[{"role":"user","content":"hi"}]}"#;
const WITH_IMAGE: &str = r#"{"model":"m","stream":true,"max_tokens":9,
    "messages":[{"role":"user","content":[{"type":"text","text":"hi"},{"type":"document","title":"d"}]}]}"#;

fn event(name: &str, mut members: Value) -> &'static str {
    members["type"] = json!(name);
    Box::leak(format!("event: {name}\ndata: {members}\n\n").into_boxed_str())
}

fn start() -> &'static str {
    let message = json!({"id": "msg-1", "type": "message", "role": "assistant", "content": [], "model": "m",
        "usage": {"input_tokens": 12, "output_tokens": 0}});
    event("message_start", json!({"message": message}))
}

fn block() -> &'static str {
    event("content_block_start", json!({"index": 0, "content_block": {"type": "text", "text": ""}}))
}

fn word(text: &str) -> &'static str {
    event("content_block_delta", json!({"index": 0, "delta": {"type": "text_delta", "text": text}}))
}

fn end(reason: &str, tokens: u64) -> [&'static str; 3] {
    let usage = json!({"input_tokens": 12, "output_tokens": tokens});
    [
        event("content_block_stop", json!({"index": 0})),
        event("message_delta", json!({"delta": {"stop_reason": reason, "stop_sequence": null}, "usage": usage})),
        event("message_stop", json!({})),
    ]
}

/// An engine that fails after these events.
fn dying(events: &[&'static str]) -> Script {
    Script::Stream(events.iter().map(|event| (5, *event)).collect(), false)
}

async fn request(test: &TestFlow, body: &'static str) -> (TestClient, Record) {
    let mut incoming = test.incoming(body);
    (incoming.route, incoming.path) = (Route::Messages, "/v1/messages?beta=true".to_owned());
    let mut client = TestClient::default();
    test.flow.run(incoming, &mut client).await;
    let record = test.records.0.lock().pop().unwrap();
    test.idle();
    assert_nothing_kept(test);
    (client, record)
}

#[tokio::test(start_paused = true)]
async fn a_message_goes_on_as_a_chat_and_the_client_sees_one_message() {
    let first = [start(), block(), word("Es"), word(" \u{fc}ber"), word("\n")];
    for error in [None, Some(event("error", json!({"error": {"type": "internal_error", "message": "died"}})))] {
        let script = dying(&[&first[..], error.as_slice()].concat());
        let test = TestFlow::new(vec![script], vec![completing(2, &["\n", "水", "!"], 16)]);
        let (client, record) = request(&test, MESSAGE).await;
        let whole = [&first[..], &[word("水"), word("!")], &end("end_turn", 5)].concat();
        assert_eq!(text(&client), whole.concat());
        assert!(client.finished && !client.aborted);
        assert_eq!((record.outcome, record.continued, record.not_continued), (Outcome::Completed, 1, None));
        let stats = record.stats.unwrap();
        assert_eq!((stats.usage.prompt, stats.usage.completion), (Some(12), Some(5)));
        let want = json!({
            "model": "m", "max_tokens": 7, "stop": ["END"], "stream": true, "stream_options": {"include_usage": true},
            "continue_final_message": true, "add_generation_prompt": false,
            "messages": [
                {"role": "system", "content": "s"}, {"role": "user", "content": "hi"},
                {"role": "assistant", "content": "Es \u{fc}ber"},
            ],
        });
        assert_eq!(body(&test, 1), want);
        assert_eq!(*test.flow.upstream().paths.lock(), ["/v1/messages?beta=true", "/v1/chat/completions"]);
    }
}

#[tokio::test(start_paused = true)]
async fn the_gateway_ends_a_message_of_which_only_the_end_is_missing() {
    let words = ["1", "2", "3", "4", "5", "6", "7", "8", "9"].map(word);
    let at_limit = [&[start(), block()], &words[..]].concat();
    let ended = [&at_limit[..], &end("end_turn", 9)[..2]].concat();
    for (events, rest) in [(&at_limit, &end("max_tokens", 9)[..]), (&ended, &end("end_turn", 9)[2..])] {
        let test = TestFlow::new(vec![dying(events)], vec![completing(2, &["x"], 9)]);
        let (client, record) = request(&test, WITHOUT_STOP).await;
        let parts = |text: &str| text.split("\n\n").skip(9).map(str::to_owned).collect::<Vec<_>>();
        assert_eq!(parts(&text(&client)), parts(&[events, rest].concat().concat()));
        assert_eq!((record.outcome, test.asked().len()), (Outcome::Completed, 1));
    }
}

#[tokio::test(start_paused = true)]
async fn a_message_that_has_no_exact_form_as_a_chat_ends_with_the_error_and_the_reason() {
    let thinking =
        event("content_block_delta", json!({"index": 0, "delta": {"type": "thinking_delta", "thinking": "hm"}}));
    let texts = &[start(), block(), word("a")][..];
    let stopped = [texts, &end("end_turn", 1)[..1]].concat();
    for (message, events, why) in [
        (WITH_TOOLS, texts, NotContinued::Translation),
        (WITH_IMAGE, texts, NotContinued::Translation),
        (MESSAGE, &[start(), block(), thinking], NotContinued::Reasoning),
        (MESSAGE, &stopped, NotContinued::UsageUnknown),
    ] {
        let test = TestFlow::new(vec![dying(events)], vec![completing(2, &["x"], 9)]);
        let (client, record) = request(&test, message).await;
        assert_eq!(
            (record.not_continued, record.continued, test.asked().len()),
            (Some(why), 0, 1),
            "{message} {events:?}"
        );
        let sent = text(&client);
        assert!(sent.starts_with(&events.concat()) && sent.contains("event: error"), "{sent}");
    }
}
