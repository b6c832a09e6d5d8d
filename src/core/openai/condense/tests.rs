//! Tests that a document read part by part, however it is cut, gives the same values as the
//! document read at once.
//!
//! Documents are generated; the members that readers look for are among others.

use proptest::prelude::*;
use serde_json::{Value, json};

use super::*;
use crate::openai::chunk::{self, Memo};
use crate::openai::event::{Dialect, StreamEvent};
use crate::openai::long_event::LongEvent;
use crate::openai::response::{self, ResponseReader, ResponseSummary};

fn parts(pieces: &[&[u8]]) -> (Vec<Value>, bool) {
    let (mut condenser, mut parts) = (Condenser::default(), Vec::new());
    for piece in pieces {
        condenser.feed(piece, |part| parts.push(serde_json::from_slice(part).expect("a part is JSON")));
    }
    (parts, condenser.is_complete())
}

fn read(pieces: &[&[u8]]) -> ResponseSummary {
    let (mut condenser, mut reader) = (Condenser::default(), ResponseReader::default());
    for piece in pieces {
        condenser.feed(piece, |part| reader.read(part));
    }
    reader.summary()
}

fn long(dialect: Dialect, pieces: &[&[u8]]) -> StreamEvent {
    let mut event = LongEvent::new(dialect);
    pieces.iter().for_each(|piece| event.feed(piece));
    event.finish(&mut Memo::default())
}

#[test]
fn members_come_one_by_one_and_long_ones_are_cut() {
    let text = "t".repeat(2 * TEXT);
    let document = json!({
        "id": "x", "data": [{"embedding": [1, 2, 3]}, {"embedding": [4]}],
        "response": {"instructions": text, "usage": {"input_tokens": 5}},
        "choices": [{"text": "a"}, null, {"text": "b", "logprobs": {"tokens": ["a", "b"]}}],
    });
    let (seen, complete) = parts(&[document.to_string().as_bytes()]);
    assert!(complete);
    for part in [
        json!({"id": "x"}),
        json!({"data": [{"embedding": [1]}]}),
        json!({"response": {"instructions": "t".repeat(TEXT)}}),
        json!({"response": {"usage": {"input_tokens": 5}}}),
        json!({"choices": [{"text": "a"}]}),
        json!({"choices": [null]}),
        json!({"choices": [{"text": "b", "logprobs": {"tokens": ["a"]}}]}),
    ] {
        assert!(seen.contains(&part), "{part} of {seen:?}");
    }
}

#[test]
fn the_bound_of_a_part_holds_for_any_document() {
    let wide: serde_json::Map<String, Value> =
        (0..9_000).map(|at| (format!("key {at}"), json!("v".repeat(90)))).collect();
    let deep = "{\"a\":".repeat(500) + "1" + &"}".repeat(500);
    let document = format!(
        r#"{{"choices":[{{"logprobs":{},"deep":{deep},"finish_reason":"stop"}}],"w":{},"usage":{{"prompt_tokens":1}}}}"#,
        Value::from(wide.clone()),
        Value::from(wide)
    );
    let mut condenser = Condenser::default();
    for piece in document.as_bytes().chunks(1_000) {
        condenser.feed(piece, |_| {});
        assert!(condenser.part.capacity() < 4 * PART, "{}", condenser.part.capacity());
    }
    assert!(condenser.is_complete());
    let summary = read(&[document.as_bytes()]);
    assert!(summary.answer.finish.is_some() && summary.usage.is_some());
}

#[test]
fn what_is_no_object_or_breaks_off_is_not_complete() {
    for broken in ["", "[1]", "7", "{", r#"{"a"}"#, r#"{"a":1"#, r#"{"a":1}x"#, r#"{"a":1,}"#, r#"{"a" 1}"#, "{1:2}"] {
        assert!(!parts(&[broken.as_bytes()]).1, "{broken}");
    }
    assert!(parts(&[b"\xEF\xBB\xBF { } \n"]).1);
}

/// Any value; some objects have the members that readers look for.
fn value() -> impl Strategy<Value = Value> {
    let scalar = prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        any::<i32>().prop_map(Value::from),
        ".{0,12}".prop_map(Value::from),
        Just(json!("\\\"}],\u{1f600}\n")),
        Just(json!("stop")),
        Just(json!("abort")),
        Just(json!("response.output_text.delta")),
        Just(json!("response.completed")),
        Just(json!("message_delta")),
    ];
    let key = prop_oneof![
        "[a-z]{0,3}",
        prop::sample::select(vec![
            "usage",
            "error",
            "choices",
            "message",
            "response",
            "delta",
            "finish_reason",
            "stop_reason",
            "index",
            "content",
            "text",
            "refusal",
            "tool_calls",
            "prompt_tokens",
            "completion_tokens",
            "total_tokens",
            "input_tokens",
            "output_tokens",
            "prompt_tokens_details",
            "cached_tokens",
            "code",
            "type",
            "object",
            "meta",
            "billed_units",
        ])
        .prop_map(str::to_owned),
    ];
    scalar.prop_recursive(4, 40, 5, move |inner| {
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..4).prop_map(Value::from),
            prop::collection::btree_map(key.clone(), inner, 0..5)
                .prop_map(|map| Value::Object(map.into_iter().collect())),
        ]
    })
}

fn cut<'a>(bytes: &'a [u8], cuts: &[prop::sample::Index]) -> Vec<&'a [u8]> {
    let mut cuts: Vec<usize> = cuts.iter().map(|cut| cut.index(bytes.len() + 1)).collect();
    cuts.extend([0, bytes.len()]);
    cuts.sort_unstable();
    cuts.windows(2).map(|pair| &bytes[pair[0]..pair[1]]).collect()
}

proptest! {
    #[test]
    fn parts_in_any_pieces_read_as_the_whole(
        members in prop::collection::vec((0usize..8, value()), 0..6),
        cuts in prop::collection::vec(any::<prop::sample::Index>(), 0..9),
        pretty in any::<bool>(),
    ) {
        let names = ["usage", "error", "choices", "message", "response", "type", "delta", "data"];
        let map: serde_json::Map<String, Value> =
            members.into_iter().map(|(name, value)| (names[name].to_owned(), value)).collect();
        let map = Value::from(map);
        let text = if pretty { serde_json::to_string_pretty(&map).unwrap() } else { map.to_string() };
        // Condensing keeps only the beginning of long texts and arrays, so it may count fewer bytes
        // of output.
        let without_text = |summary: ResponseSummary| ResponseSummary { text: 0, ..summary };
        let singles: Vec<&[u8]> = text.as_bytes().chunks(1).collect();
        let whole = without_text(response::read(text.as_bytes()));
        prop_assert_eq!(&without_text(read(&cut(text.as_bytes(), &cuts))), &whole, "{}", text);
        prop_assert_eq!(&without_text(read(&singles)), &whole, "{}", text);
        let without_text = |event: StreamEvent| StreamEvent { text: 0, ..event };
        let event = format!("event: response.completed\r\ndata: {}\n\n", text.replace('\n', "\ndata:"));
        for dialect in [Dialect::Choices, Dialect::Responses, Dialect::Messages] {
            let whole = without_text(chunk::read_by_scanning(dialect, event.as_bytes()));
            let singles: Vec<&[u8]> = event.as_bytes().chunks(1).collect();
            prop_assert_eq!(&without_text(long(dialect, &cut(event.as_bytes(), &cuts))), &whole, "{}", event);
            prop_assert_eq!(&without_text(long(dialect, &singles)), &whole, "{}", event);
        }
    }

    #[test]
    fn any_bytes_in_any_pieces_give_the_same_parts(
        tokens in prop::collection::vec(prop::sample::select(vec![
            "{", "}", "[", "]", ",", ":", "\"", "\\", "\"a\"", "\"choices\"", "\"response\"", "1", "null", " ", "\\u00", "\n", "x",
        ]), 0..40),
        cuts in prop::collection::vec(any::<prop::sample::Index>(), 0..9),
    ) {
        let text = tokens.concat();
        let text = format!("{{\"choices\":[{text}");
        let seen = |pieces: &[&[u8]]| {
            let (mut condenser, mut parts) = (Condenser::default(), Vec::new());
            pieces.iter().for_each(|piece| condenser.feed(piece, |part| parts.push(part.to_vec())));
            (parts, condenser.is_complete())
        };
        let whole = seen(&[text.as_bytes()]);
        prop_assert_eq!(&seen(&cut(text.as_bytes(), &cuts)), &whole);
        prop_assert_eq!(&seen(&text.as_bytes().chunks(1).collect::<Vec<_>>()), &whole);
    }
}
