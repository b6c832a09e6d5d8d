//! Streams as real servers send them, parsed whole and from random pieces.

use super::*;
use proptest::prelude::*;

fn read_all(api: Api, pieces: &[&[u8]]) -> Result<Vec<Message>, EventError> {
    let mut reader = EventReader::new(api);
    let mut messages = Vec::new();
    for piece in pieces {
        reader.feed(piece, |message| messages.push(message))?;
    }
    Ok(messages)
}

const NOTHING: Message = Message {
    token: false,
    usage: None,
    summary: false,
    error: None,
    done: false,
    aborted: false,
    choices: 0,
    finished: 0,
};
/// A chunk of the first choice with tokens. `SILENT` is a chunk without tokens.
const TOKEN: Message = Message { token: true, choices: 1, ..NOTHING };
const SILENT: Message = Message { choices: 1, ..NOTHING };
const DONE: Message = Message { done: true, ..NOTHING };

const COMPLETION: &[u8] = b": keep-alive\n\n\
    data: {\"id\":\"c\",\"choices\":[{\"index\":0,\"text\":\"\",\"finish_reason\":null}]}\n\n\
    data: {\"id\":\"c\",\"choices\":[{\"index\":0,\"text\":\" a\",\"finish_reason\":\"length\"}]}\r\n\r\n\
    data: {\"id\":\"c\",\"choices\":[],\"usage\":{\"prompt_tokens\":3,\"total_tokens\":5,\"completion_tokens\":2}}\n\n\
    data: [DONE]\n\n";

fn completion_messages() -> Vec<Message> {
    let counts = Usage { prompt_tokens: Some(3), completion_tokens: Some(2), cached_tokens: None };
    let usage = Message { usage: Some(counts), summary: true, ..NOTHING };
    vec![TOKEN, Message { finished: 1, ..TOKEN }, usage, DONE]
}

#[test]
fn a_completion_event_is_any_chunk_with_choices() {
    assert_eq!(read_all(Api::Completions, &[COMPLETION]), Ok(completion_messages()));
}

#[test]
fn a_chat_event_has_content_reasoning_or_calls_and_the_role_chunk_is_none() {
    let of = |delta: &str| {
        let line = format!("data: {{\"choices\":[{{\"index\":0,\"delta\":{delta},\"finish_reason\":null}}]}}\n\n");
        read_all(Api::Chat, &[line.as_bytes()]).unwrap()[0]
    };
    assert_eq!(of(r#"{"role":"assistant","content":""}"#), SILENT);
    assert_eq!(of(r#"{"content":null}"#), SILENT);
    assert_eq!(of(r#"{"content":""}"#), TOKEN);
    assert_eq!(of(r#"{"content":"a\"b"}"#), TOKEN);
    assert_eq!(of(r#"{"reasoning":"hm"}"#), TOKEN);
    assert_eq!(of(r#"{"tool_calls":[{"index":0}]}"#), TOKEN);
    assert_eq!(of(r#"{"reasoning":"","content":null}"#), SILENT);
    assert_eq!(of(r#"{"role":"assistant","content":"x"}"#), TOKEN);
    assert_eq!(of(r#"{"role":null,"content":""}"#), SILENT);
    assert_eq!(of(r#"{"tool_calls":[]}"#), SILENT);
}

#[test]
fn the_texts_of_all_choices_are_kept_on_request_with_what_else_they_say() {
    let texts = |api, stream: &[u8]| {
        let mut reader = EventReader::new(api).keeping_text();
        reader.feed(stream, |_| {}).unwrap();
        reader.into_texts().unwrap().into_iter().map(|one| (one.text, one.other)).collect::<Vec<_>>()
    };
    let said = |text: &str, other: &str| (text.to_owned(), other.to_owned());
    assert_eq!(texts(Api::Completions, COMPLETION), [said(" a", "")]);
    let chunk =
        |index: u32, delta: &str| format!("data: {{\"choices\":[{{\"index\":{index},\"delta\":{delta}}}]}}\n\n");
    let chat = [
        chunk(0, r#"{"reasoning":"hm","reasoning_content":"hm"}"#),
        chunk(1, r#"{"content":"b"}"#),
        chunk(0, r#"{"content":"a\n"}"#),
        chunk(0, r#"{"tool_calls":[{"index":0,"function":{"name":"f","arguments":"{}"}}]}"#),
        chunk(0, r#"{"content":null}"#),
    ];
    assert_eq!(texts(Api::Chat, chat.concat().as_bytes()), [said("a\n", "hmf{}"), said("b", "")]);
}

#[test]
fn null_is_absent_and_counts_may_be_floats_or_missing() {
    let of = |json: &str| read_all(Api::Completions, &[format!("data: {json}\n\n").as_bytes()]).unwrap()[0];
    let usage = |json: &str| of(json).usage;
    assert_eq!(of(r#"{"choices":null,"usage":null,"error":null}"#), NOTHING);
    let nulls = r#"{"choices":null,"usage":{"prompt_tokens":8,"total_tokens":null,"completion_tokens":null}}"#;
    assert_eq!(usage(nulls), Some(Usage { prompt_tokens: Some(8), ..Usage::default() }));
    assert!(of(nulls).summary);
    let last = of(r#"{"choices":[{"index":0,"text":"a","finish_reason":"stop"}],"usage":{"completion_tokens":2.0}}"#);
    assert_eq!((last.token, last.summary, last.finished), (true, false, 1));
    assert_eq!(last.usage.unwrap().completion_tokens, Some(2));
    assert_eq!(usage(r#"{"choices":[],"usage":"none"}"#), None);
    let filtered = r#"{"choices":[],"prompt_filter_results":[{"prompt_index":0}]}"#;
    assert_eq!(of(filtered), NOTHING);
    let second = of(r#"{"choices":[{"index":1,"text":"a","finish_reason":"stop"},{"index":"x","text":"b"}]}"#);
    assert_eq!((second.choices, second.finished), (3, 2));
}

#[test]
fn sse_is_read_as_it_is_specified() {
    let token = "data: {\"choices\":[{\"index\":0,\"text\":\"a\"}]}";
    let mark = format!("\u{feff}{token}\r\n\r\nretry: 5\nid: 7\nevent: message\n{token}\n\n");
    assert_eq!(read_all(Api::Completions, &[mark.as_bytes()]), Ok(vec![TOKEN, TOKEN]));
    let spread = "data: {\"choices\":\ndata:[{\"index\":0,\ndata: \"text\":\"a\"}]}\n\ndata:[DONE] \n";
    assert_eq!(read_all(Api::Completions, &[spread.as_bytes()]), Ok(vec![TOKEN, DONE]));
    let cut = read_all(Api::Completions, &[b"data: {\"choices\":[\n\n"]);
    assert_eq!(cut, Err(EventError::NotJson));
    let failed = Message { error: Some(StreamError { code: None }), ..NOTHING };
    let named = b"event: error\ndata: {\"detail\":\"out of memory\"}\n\n";
    assert_eq!(read_all(Api::Chat, &[named]), Ok(vec![failed]));
    let over = b"event: error\n\ndata: {\"detail\":\"a blank line ends an event\"}\n\n";
    assert_eq!(read_all(Api::Chat, &[over]), Ok(vec![NOTHING]));
}

#[test]
fn cached_tokens_are_read_if_reported() {
    let line = b"data: {\"choices\":[],\"usage\":{\"prompt_tokens\":9,\"completion_tokens\":1,\"prompt_tokens_details\":{\"cached_tokens\":8}}}\n\n";
    assert_eq!(read_all(Api::Chat, &[line]).unwrap()[0].usage.unwrap().cached_tokens, Some(8));
    let null = b"data: {\"choices\":[],\"usage\":{\"prompt_tokens\":9,\"completion_tokens\":1,\"prompt_tokens_details\":null}}\n\n";
    assert_eq!(read_all(Api::Chat, &[null]).unwrap()[0].usage.unwrap().cached_tokens, None);
}

#[test]
fn an_aborted_response_is_reported() {
    let line = b"data: {\"choices\":[{\"index\":0,\"text\":\"\",\"finish_reason\":\"abort\"}]}\n\n";
    assert!(read_all(Api::Completions, &[line]).unwrap()[0].aborted);
}

#[test]
fn an_error_object_is_seen_with_and_without_a_numeric_code() {
    let with = b"event: error\ndata: {\"error\":{\"message\":\"busy\",\"code\":503}}\n\n";
    let error = Message { error: Some(StreamError { code: Some(503) }), ..NOTHING };
    assert_eq!(read_all(Api::Chat, &[with]), Ok(vec![error]));
    let without = b"data: {\"error\":{\"message\":\"busy\",\"code\":\"upstream_broke\"}}\n\n";
    let error = Message { error: Some(StreamError { code: None }), ..NOTHING };
    assert_eq!(read_all(Api::Chat, &[without]), Ok(vec![error]));
}

#[test]
fn garbage_and_endless_lines_are_errors() {
    assert_eq!(read_all(Api::Chat, &[b"data: <html>\n"]), Err(EventError::NotJson));
    let half = vec![b'x'; MAX_LINE / 2 + 1];
    assert_eq!(read_all(Api::Chat, &[&half, &half]), Err(EventError::TooLong));
}

proptest! {
    #[test]
    fn any_split_gives_the_same_messages(mut cuts in proptest::collection::vec(0..COMPLETION.len(), 0..12)) {
        cuts.sort_unstable();
        let mut pieces = Vec::new();
        let mut from = 0;
        for cut in cuts {
            pieces.push(&COMPLETION[from..cut]);
            from = cut;
        }
        pieces.push(&COMPLETION[from..]);
        prop_assert_eq!(read_all(Api::Completions, &pieces), Ok(completion_messages()));
    }
}
