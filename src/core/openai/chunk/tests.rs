//! Tests of the reading of single events: the fast path against scanning, and both against a JSON
//! tree.
//!
//! Events are generated, to cover every combination of fields that an engine may send.

use super::super::response::TokenUsage;
use super::*;
use proptest::prelude::*;
use serde_json::Value;

fn chat(data: &str) -> StreamEvent {
    read(Dialect::Choices, format!("data: {data}\n\n").as_bytes())
}

fn kind(data: &str) -> EventKind {
    chat(data).kind
}

#[test]
fn output_is_what_the_contract_calls_output() {
    use EventKind::{Content, Empty};
    let delta = |delta: &str| kind(&format!(r#"{{"choices":[{{"index":0,"delta":{delta},"finish_reason":null}}]}}"#));
    assert_eq!(delta(r#"{"role":"assistant","content":""}"#), Empty);
    assert_eq!(delta(r#"{"content":""}"#), Empty);
    assert_eq!(delta(r#"{"content":null}"#), Empty);
    assert_eq!(delta(r#"{"tool_calls":[]}"#), Empty);
    assert_eq!(delta("{}"), Empty);
    for filled in [
        r#"{"content":"a"}"#,
        r#"{"content":" "}"#,
        r#"{"reasoning":"a"}"#,
        r#"{"reasoning_content":"a"}"#,
        r#"{"tool_calls":[{"index":0}]}"#,
        r#"{"function_call":{"name":"f"}}"#,
    ] {
        assert_eq!(delta(filled), Content, "{filled}");
    }
    let last = chat(r#"{"choices":[{"index":0,"delta":{"content":""},"finish_reason":"stop"}]}"#);
    assert_eq!((last.kind, last.finish), (Content, true));
    assert_eq!(kind(r#"{"choices":[{"index":0,"text":"","finish_reason":null}]}"#), Empty);
    assert_eq!(kind(r#"{"choices":[{"index":1,"text":"x","finish_reason":null}]}"#), Content);
}

#[test]
fn how_an_answer_ended_and_whether_it_is_a_refusal_is_read_in_every_dialect() {
    use FinishReason::{ContentFilter, Length, Other, Stop, ToolCalls};
    let answer = |finish, refused| Answer { finish, refused };
    for (reason, wanted) in [
        ("stop", answer(Some(Stop), false)),
        ("length", answer(Some(Length), false)),
        ("tool_calls", answer(Some(ToolCalls), false)),
        ("content_filter", answer(Some(ContentFilter), true)),
        ("repetition", answer(Some(Other), false)),
    ] {
        let event = chat(&format!(r#"{{"choices":[{{"index":0,"delta":{{}},"finish_reason":"{reason}"}}]}}"#));
        assert_eq!(event.answer, wanted, "{reason}");
        let body = format!(r#"{{"choices":[{{"message":{{"content":"a"}},"finish_reason":"{reason}"}}]}}"#);
        assert_eq!(response::read(body.as_bytes()).answer, wanted, "{reason}");
    }
    let refusal =
        |text: &str| chat(&format!(r#"{{"choices":[{{"delta":{{"refusal":{text}}},"finish_reason":null}}]}}"#));
    assert_eq!((refusal(r#""no""#).kind, refusal(r#""no""#).answer), (EventKind::Content, answer(None, true)));
    assert_eq!((refusal("null").answer, refusal(r#""""#).answer), (Answer::default(), Answer::default()));
    let body = br#"{"choices":[{"message":{"content":null,"refusal":"no"},"finish_reason":"stop"}]}"#;
    assert_eq!(response::read(body).answer, answer(Some(Stop), true));
    let of = |dialect, data: &str| read(dialect, format!("data: {data}\n\n").as_bytes()).answer;
    let message = |reason: &str| {
        let data = format!(r#"{{"type":"message_delta","delta":{{"stop_reason":"{reason}"}},"usage":{{}}}}"#);
        of(Dialect::Messages, &data)
    };
    assert_eq!([message("end_turn"), message("max_tokens")], [answer(Some(Stop), false), answer(Some(Length), false)]);
    assert_eq!(message("refusal"), answer(Some(ContentFilter), true));
    let body = br#"{"type":"message","stop_reason":"tool_use","usage":{"input_tokens":1,"output_tokens":2}}"#;
    assert_eq!(response::read(body).answer, answer(Some(ToolCalls), false));
    let response = |data: &str| of(Dialect::Responses, data);
    assert_eq!(response(r#"{"type":"response.completed"}"#), answer(Some(Stop), false));
    assert_eq!(response(r#"{"type":"response.incomplete"}"#), answer(Some(Length), false));
    assert_eq!(response(r#"{"type":"response.refusal.delta","delta":"no"}"#), answer(None, true));
}

#[test]
fn an_aborted_response_differs_from_one_that_ends() {
    let end = |reason: &str| {
        let event = chat(&format!(r#"{{"choices":[{{"index":0,"text":"","finish_reason":{reason}}}]}}"#));
        (event.finish, event.aborted)
    };
    assert_eq!(end(r#""abort""#), (true, true));
    assert_eq!(end(r#""length""#), (true, false));
    assert_eq!((end("null"), end("{}")), ((false, false), (false, false)));
    let body = |reason: &str| {
        response::read(
            format!(r#"{{"choices":[{{"text":"a"}},{{"finish_reason":"{reason}"}}],"usage":null}}"#).as_bytes(),
        )
        .error
    };
    assert_eq!((body("abort"), body("stop")), (Some(response::UpstreamError::aborted()), None));
}

#[test]
fn usage_errors_and_the_end_are_distinguished() {
    let usage = chat(r#"{"choices":[],"usage":{"prompt_tokens":5,"total_tokens":7,"completion_tokens":2}}"#);
    assert_eq!(usage.kind, EventKind::Usage);
    assert_eq!(usage.usage, Some(TokenUsage { prompt: Some(5), completion: Some(2), cached: None }));
    let error = chat(r#"{"error":{"message":"busy","type":"x","param":null,"code":503}}"#);
    assert_eq!((error.kind, error.error.unwrap().code), (EventKind::Error, Some(503)));
    let flat = chat(r#"{"object":"error","message":"old","type":"x","param":null,"code":500}"#);
    assert_eq!((flat.kind, flat.error.unwrap().code), (EventKind::Error, Some(500)));
    assert_eq!(kind("[DONE]"), EventKind::Done);
    assert_eq!(read(Dialect::Choices, b": keep-alive\n\n").kind, EventKind::Ping);
    assert_eq!(kind(r#"{"choices":[{"delta":{"content":"a"#), EventKind::Other);
    let text = kind(r#"{"choices":[{"index":0,"delta":{"content":"{\"error\":1}"},"finish_reason":null}]}"#);
    assert_eq!(text, EventKind::Content);
}

#[test]
fn responses_events_are_understood() {
    let of = |name: &str, data: &str| read(Dialect::Responses, format!("event: {name}\ndata: {data}\n\n").as_bytes());
    let delta =
        of("response.output_text.delta", r#"{"type":"response.output_text.delta","delta":"a","sequence_number":4}"#);
    assert_eq!(delta.kind, EventKind::Content);
    assert_eq!(
        of("response.created", r#"{"type":"response.created","response":{"usage":null,"error":null}}"#).kind,
        EventKind::Lifecycle
    );
    let end = of(
        "response.completed",
        r#"{"type":"response.completed","response":{"usage":{"input_tokens":5,"output_tokens":2}}}"#,
    );
    assert!(end.finish);
    assert_eq!(end.usage, Some(TokenUsage { prompt: Some(5), completion: Some(2), cached: None }));
    let failed = of(
        "response.failed",
        r#"{"type":"response.failed","response":{"error":{"code":"server_error","message":"m"}}}"#,
    );
    assert_eq!((failed.kind, failed.error.unwrap().message.as_str()), (EventKind::Error, "m"));
    let error = of("error", r#"{"type":"error","code":"503","message":"m"}"#);
    assert_eq!(error.error.unwrap().code, Some(503));
}

#[test]
fn anthropic_events_are_understood() {
    let of = |data: &str| read(Dialect::Messages, format!("event: x\ndata: {data}\n\n").as_bytes());
    let start = of(r#"{"type":"message_start","message":{"content":[],"usage":{"input_tokens":9,"output_tokens":0}}}"#);
    assert_eq!((start.kind, start.usage.unwrap().prompt), (EventKind::Lifecycle, Some(9)));
    assert_eq!(
        of(r#"{"type":"content_block_delta","index":0,"delta":{"type":"text_delta","text":"a"}}"#).kind,
        EventKind::Content
    );
    assert_eq!(
        of(r#"{"type":"content_block_delta","index":0,"delta":{"type":"text_delta","text":""}}"#).kind,
        EventKind::Empty
    );
    let end = of(r#"{"type":"message_delta","delta":{"stop_reason":"end_turn"},"usage":{"output_tokens":3}}"#);
    assert_eq!((end.finish, end.usage.unwrap().completion), (true, Some(3)));
    assert_eq!(of(r#"{"type":"message_stop"}"#).kind, EventKind::Done);
    assert_eq!(of(r#"{"type":"ping"}"#).kind, EventKind::Ping);
    let error = of(r#"{"type":"error","error":{"type":"overloaded_error","message":"m"}}"#);
    assert_eq!(error.kind, EventKind::Error);
}

#[test]
fn what_only_keeps_a_connection_alive_or_announces_a_response_is_no_progress() {
    let of = |dialect, event: &str| read(dialect, event.as_bytes()).kind;
    for (dialect, event, kind) in [
        (Dialect::Choices, ": ping\n\n", EventKind::Ping),
        (Dialect::Choices, "event: ping\ndata: {}\n\n", EventKind::Ping),
        (Dialect::Choices, "data: \n\n", EventKind::Ping),
        (Dialect::Choices, "retry: 500\n\n", EventKind::Ping),
        (Dialect::Choices, "data: {\"choices\":[],\"prompt_filter_results\":[]}\n\n", EventKind::Lifecycle),
        (Dialect::Responses, "data: {\"type\":\"response.in_progress\"}\n\n", EventKind::Lifecycle),
        (Dialect::Responses, "event: keepalive\ndata: {\"type\":\"keepalive\"}\n\n", EventKind::Ping),
        (Dialect::Responses, "data: {\"type\":\"response.output_text.delta\",\"delta\":\"\"}\n\n", EventKind::Empty),
    ] {
        assert_eq!(of(dialect, event), kind, "{event}");
        assert!(!kind.is_progress() && kind.is_preamble());
    }
    let item = "data: {\"type\":\"response.output_item.added\",\"item\":{}}\n\n";
    assert_eq!(of(Dialect::Responses, item), EventKind::Part);
    assert_eq!(
        of(Dialect::Choices, "data: {\"type\":\"transcript.text.delta\",\"delta\":\"a\"}\n\n"),
        EventKind::Content
    );
    assert_eq!(of(Dialect::Choices, "data: {\"type\":\"transcript.text.done\",\"text\":\"a\"}\n\n"), EventKind::Done);
    for end in ["data: [DONE] \n\n", "data:[DONE]\r\n\r\n", "data:  [DONE]"] {
        assert_eq!(of(Dialect::Choices, end), EventKind::Done, "{end:?}");
    }
}

#[test]
fn cohere_s_events_are_understood() {
    let of = |data: &str| read(Dialect::Cohere, format!("data: {data}\n\n").as_bytes());
    let text = r#"{"type":"content-delta","index":0,"delta":{"message":{"content":{"text":"a"}}}}"#;
    let call = r#"{"type":"tool-call-start","index":0,"delta":{"message":{"tool_calls":{"id":"x"}}}}"#;
    for (data, kind) in [
        (r#"{"type":"message-start","id":"x","delta":{"message":{"role":"assistant"}}}"#, EventKind::Lifecycle),
        (r#"{"type":"content-start","index":0,"delta":{"message":{"content":{"type":"text"}}}}"#, EventKind::Part),
        (text, EventKind::Content),
        (call, EventKind::Content),
        (r#"{"type":"content-end","index":0}"#, EventKind::Part),
        ("[DONE]", EventKind::Done),
        (r#"{"message":"no type"}"#, EventKind::Other),
    ] {
        assert_eq!(of(data).kind, kind, "{data}");
    }
    let end = of(
        r#"{"type":"message-end","delta":{"finish_reason":"MAX_TOKENS","usage":{"billed_units":{"input_tokens":5.0,"output_tokens":3.0},"tokens":{"input_tokens":7.0,"output_tokens":3.0},"cached_tokens":2.0}}}"#,
    );
    let usage = TokenUsage { prompt: Some(7), completion: Some(3), cached: Some(2) };
    assert_eq!((end.kind, end.finish, end.usage), (EventKind::Usage, true, Some(usage)));
    assert_eq!(end.answer.finish, Some(FinishReason::Length));
}

#[test]
fn cutting_usage_leaves_valid_json_without_it() {
    for (json, want) in [
        (r#"{"id":"x","usage":{"a":1}}"#, r#"{"id":"x"}"#),
        (r#"{"usage":{"a":1},"id":"x"}"#, r#"{"id":"x"}"#),
        (r#"{"a":[{"usage":1}], "usage" : {"a":1} ,"id":"x"}"#, r#"{"a":[{"usage":1}] ,"id":"x"}"#),
        (r#"{"usage":7}"#, "{}"),
    ] {
        let event = format!("data: {json}\n\n");
        let span = usage_member(event.as_bytes()).unwrap();
        let cut = format!("{}{}", &event[..span.start], &event[span.end..]);
        assert_eq!(cut, format!("data: {want}\n\n"));
    }
    assert_eq!(usage_member(b"data: {\"id\":1}\n\n"), None);
}

fn event() -> impl Strategy<Value = String> {
    let text = prop_oneof![
        Just(String::new()),
        ".{1,8}",
        Just("\"}],\"choices\":[{".to_owned()),
        Just("\\\u{1f600}\n".to_owned())
    ];
    let text = text.prop_map(|text| Value::from(text).to_string());
    let null = prop_oneof![
        Just("\"logprobs\":null"),
        Just("\"finish_reason\":null"),
        Just("\"token_ids\":null"),
        Just("\"stop_reason\":null"),
        Just("\"finish_reason\":\"stop\""),
        Just("\"stop_reason\":7"),
    ];
    let tail = prop_oneof![
        Just(""),
        Just(",\"usage\":null"),
        Just(",\"usage\":{\"prompt_tokens\":3,\"total_tokens\":5,\"completion_tokens\":2}"),
        Just(",\"usage\":{\"prompt_tokens\":03,\"total_tokens\":5,\"completion_tokens\":2}"),
        Just(
            ",\"usage\":{\"prompt_tokens\":3,\"total_tokens\":5,\"completion_tokens\":2,\"prompt_tokens_details\":null}"
        ),
        Just(",\"error\":null"),
        Just(",\"error\":{\"code\":503}"),
        Just(",\"kv_transfer_params\":null"),
    ];
    let keys = prop_oneof![
        Just(("chat.completion.chunk", "\"delta\":{\"content\":", "}")),
        Just(("chat.completion.chunk", "\"delta\":{\"reasoning\":", "}")),
        Just(("chat.completion.chunk", "\"delta\":{\"role\":\"assistant\",\"content\":", "}")),
        Just(("text_completion", "\"text\":", "")),
        Just(("text_completion", "\"delta\":{\"content\":", "}")),
    ];
    let tails = prop::collection::vec(tail, 0..3);
    (keys, text, prop::collection::vec(null, 0..4), tails, 0u32..3, any::<prop::sample::Index>(), 0u8..12).prop_map(
        |((object, open, close), text, nulls, tails, index, at, damage)| {
            let nulls: String = nulls.iter().map(|null| format!(",{null}")).collect();
            let mut event = format!(
                "data: {{\"id\":\"chatcmpl-1\",\"object\":\"{object}\",\"created\":17,\"model\":\"m\",\"choices\":[{{\"index\":{index},{open}{text}{close}{nulls}}}]{}}}\n\n",
                tails.concat()
            );
            // Sometimes one character is lost or doubled.
            let at = event.char_indices().nth(at.index(event.chars().count())).map_or(0, |(at, _)| at);
            match damage {
                0 => drop(event.remove(at)),
                1 => event.insert(at, event[at..].chars().next().unwrap_or('x')),
                _ => {}
            }
            event
        },
    )
}

proptest! {
    #[test]
    fn the_fast_path_and_scanning_give_the_same_event(event in event()) {
        if let Some(fast) = fast::choices(event.as_bytes(), &mut Memo::default()) {
            prop_assert_eq!(fast, read_by_scanning(Dialect::Choices, event.as_bytes()), "{}", event);
        }
    }

    #[test]
    fn remembered_events_do_not_change_how_later_ones_are_read(events in prop::collection::vec(event(), 1..6)) {
        let mut memo = Memo::default();
        for event in events.iter().chain(&events) {
            let got = read_next(Dialect::Choices, event.as_bytes(), &mut memo);
            prop_assert_eq!(got, read_by_scanning(Dialect::Choices, event.as_bytes()), "{}", event);
        }
    }

    #[test]
    fn scanning_agrees_with_a_tree(event in event()) {
        let data = event.strip_prefix("data: ").map(str::trim_end).unwrap_or_default();
        let Ok(tree) = serde_json::from_str::<Value>(data) else { return Ok(()) };
        let Some(choice) = tree["choices"].get(0) else { return Ok(()) };
        let filled = |value: &Value| value.as_str().is_some_and(|text| !text.is_empty());
        let content = filled(&choice["text"]) || filled(&choice["delta"]["content"]) || filled(&choice["delta"]["reasoning"]);
        let got = read(Dialect::Choices, event.as_bytes());
        prop_assume!(!event.contains("finish_reason\":null") || !event.contains("finish_reason\":\"stop"));
        let want = if tree["error"].is_object() { EventKind::Error }
            else if content || filled(&choice["finish_reason"]) { EventKind::Content }
            else { EventKind::Empty };
        prop_assert_eq!(got.kind, want, "{}", event);
    }

    #[test]
    fn arbitrary_events_never_panic(bytes in prop::collection::vec(any::<u8>(), 0..120), event in event()) {
        for dialect in [Dialect::Choices, Dialect::Responses, Dialect::Messages] {
            let _ = read(dialect, &bytes);
            let _ = read(dialect, event.as_bytes());
        }
        let _ = usage_member(&bytes);
    }
}

#[test]
fn the_usual_events_take_the_fast_path() {
    for event in [
        "data: {\"id\":\"chatcmpl-1\",\"object\":\"chat.completion.chunk\",\"created\":17,\"model\":\"m\",\"choices\":[{\"index\":0,\"delta\":{\"content\":\" a\"},\"logprobs\":null,\"finish_reason\":null,\"token_ids\":null}]}\n\n",
        "data: {\"id\":\"chatcmpl-1\",\"object\":\"chat.completion.chunk\",\"created\":17,\"model\":\"m\",\"choices\":[{\"index\":0,\"delta\":{\"reasoning\":\" a\"},\"logprobs\":null,\"finish_reason\":null}],\"usage\":{\"prompt_tokens\":3,\"total_tokens\":5,\"completion_tokens\":2}}\n\n",
        "data: {\"id\":\"cmpl-1\",\"object\":\"text_completion\",\"created\":17,\"model\":\"m\",\"choices\":[{\"index\":0,\"text\":\" a\",\"logprobs\":null,\"finish_reason\":null,\"stop_reason\":null,\"token_ids\":null}],\"usage\":null}\n\n",
    ] {
        assert_eq!(
            fast::choices(event.as_bytes(), &mut Memo::default()),
            Some(read_by_scanning(Dialect::Choices, event.as_bytes())),
            "{event}"
        );
        assert_eq!(fast::choices(event.as_bytes(), &mut Memo::default()).unwrap().kind, EventKind::Content);
    }
}

#[test]
fn usage_that_is_given_twice_the_second_time_as_null_reads_the_same_on_both_paths() {
    let event = concat!(
        r#"data: {"id":"chatcmpl-1","object":"text_completion","created":17,"model":"m","choices":[{"index":0,"text":""}],"#,
        r#""usage":{"prompt_tokens":3,"total_tokens":5,"completion_tokens":2},"usage":null}"#,
        "\n\n"
    );
    assert_eq!(read(Dialect::Choices, event.as_bytes()), read_by_scanning(Dialect::Choices, event.as_bytes()));
}
