//! Tests of every measure, of the end of a stream, and of the bytes that go to the client.
//!
//! Each result must be independent of how the bytes are cut into chunks.

use super::*;
use crate::openai::Route;
use proptest::prelude::*;

const MS: Duration = Duration::from_millis(1);

fn delta(delta: &str, rest: &str) -> String {
    format!(
        "data: {{\"id\":\"chatcmpl-1\",\"object\":\"chat.completion.chunk\",\"created\":1,\"model\":\"m\",\"choices\":[{{\"index\":0,\"delta\":{delta},\"logprobs\":null,\"finish_reason\":null}}]{rest}}}\n\n"
    )
}

fn role() -> String {
    delta(r#"{"role":"assistant","content":""}"#, "")
}

fn text(text: &str) -> String {
    delta(&format!(r#"{{"content":"{text}"}}"#), "")
}

fn usage(completion: u64) -> String {
    format!(",\"usage\":{{\"prompt_tokens\":9,\"total_tokens\":{},\"completion_tokens\":{completion}}}", 9 + completion)
}

fn last() -> String {
    r#"data: {"id":"chatcmpl-1","choices":[{"index":0,"delta":{"content":"."},"finish_reason":"stop"}]}"#.to_owned()
        + "\n\n"
}

fn usage_event(completion: u64) -> String {
    format!("data: {{\"id\":\"chatcmpl-1\",\"choices\":[]{}}}\n\n", usage(completion))
}

const DONE: &str = "data: [DONE]\n\n";

/// Feeds chunks at the given milliseconds; returns the bytes for the client and the stats.
fn run(strip: Strip, chunks: &[(u64, &[u8])]) -> (Vec<u8>, StreamStats) {
    let start = Instant::now();
    let mut meter = StreamMeter::new(Dialect::Choices, start, strip);
    let mut out = Vec::new();
    for (at, chunk) in chunks {
        let forward = meter.feed(Bytes::copy_from_slice(chunk), start + MS * *at as u32);
        assert!(forward.iter().all(|piece| !piece.is_empty()));
        forward.iter().for_each(|piece| out.extend_from_slice(piece));
    }
    meter.finish().iter().for_each(|piece| out.extend_from_slice(piece));
    (out, meter.stats())
}

#[test]
fn every_measure_of_the_contract_is_right() {
    let (out, stats) = run(
        Strip::Nothing,
        &[
            (10, role().as_bytes()),
            (12, text("a").as_bytes()),
            (20, text("b").as_bytes()),
            (25, b": keep-alive\n\n"),
            (30, text("c").as_bytes()),
            (42, last().as_bytes()),
            (50, usage_event(4).as_bytes()),
            (51, DONE.as_bytes()),
        ],
    );
    assert_eq!(stats.ttft, Some(MS * 12));
    assert_eq!(stats.e2el, Some(MS * 42));
    assert_eq!(stats.tpot, Some(MS * 10));
    assert_eq!((stats.content_events, stats.events), (4, 8));
    assert_eq!(stats.itl.count(), 3);
    assert!((stats.itl.sum_seconds() - 0.030).abs() < 1e-9);
    assert!(stats.finished && stats.done && stats.is_complete() && !stats.token_itl);
    assert_eq!(stats.usage, TokenUsage { prompt: Some(9), completion: Some(4), cached: None });
    assert!(String::from_utf8(out).unwrap().contains(": keep-alive"));
}

#[test]
fn without_stripping_every_chunk_is_forwarded_as_the_same_buffer() {
    let mut meter = StreamMeter::new(Dialect::Choices, Instant::now(), Strip::Nothing);
    for part in ["data: {\"cho", "", "ices\":[]}\n", "\ndata: x"] {
        let chunk = Bytes::copy_from_slice(part.as_bytes());
        let forward = meter.feed(chunk.clone(), Instant::now());
        assert_eq!(forward.len(), usize::from(!part.is_empty()));
        assert!(forward.iter().all(|piece| piece.as_ptr() == chunk.as_ptr() && piece.len() == chunk.len()));
    }
    assert!(meter.finish().is_empty());
}

#[test]
fn events_of_one_chunk_share_its_time_and_their_gaps_are_zero() {
    let chunk = [text("a"), text("b"), text("c")].concat();
    let (_, stats) = run(Strip::Nothing, &[(5, chunk.as_bytes())]);
    assert_eq!((stats.itl.count(), stats.itl.counts()[0], stats.ttft), (2, 2, Some(MS * 5)));
}

#[test]
fn continuous_usage_gives_token_gaps() {
    let event = |tokens: u64| delta(r#"{"content":"a"}"#, &usage(tokens));
    let (_, stats) = run(
        Strip::Nothing,
        &[(10, event(1).as_bytes()), (22, event(4).as_bytes()), (25, event(4).as_bytes()), (30, event(5).as_bytes())],
    );
    assert!(stats.token_itl);
    // Three tokens 4 ms apart, an event without a new token, then one token 8 ms after the last
    // token.
    assert_eq!(stats.itl.count(), 4);
    assert!((stats.itl.sum_seconds() - 0.020).abs() < 1e-9);
    assert!((stats.itl.max_seconds() - 0.008).abs() < 1e-9);
}

/// The first events of a request to vLLM 0.22.1 with four drafts of n-grams, as (milliseconds,
/// tokens of the event).
const ACCEPTED: [(u64, u64); 18] = [
    (11, 1),
    (18, 1),
    (25, 2),
    (32, 2),
    (39, 1),
    (46, 2),
    (53, 3),
    (59, 2),
    (66, 1),
    (72, 3),
    (79, 2),
    (85, 4),
    (92, 4),
    (98, 2),
    (105, 1),
    (112, 5),
    (118, 1),
    (125, 3),
];

#[test]
fn accepted_drafts_count_as_tokens() {
    let events = |continuous: bool| {
        let mut tokens = 0;
        let mut events: Vec<(u64, String)> = ACCEPTED
            .iter()
            .map(|(at, more)| {
                tokens += more;
                (*at, delta(r#"{"content":"a"}"#, &if continuous { usage(tokens) } else { String::new() }))
            })
            .collect();
        let rest = if continuous { usage(tokens) } else { String::new() };
        let finish = last().replacen("}]}", &format!("}}]{rest}}}"), 1);
        events.push((125, [finish, usage_event(tokens), DONE.to_owned()].concat()));
        let chunks: Vec<(u64, &[u8])> = events.iter().map(|(at, event)| (*at, event.as_bytes())).collect();
        run(Strip::Nothing, &chunks).1
    };
    for continuous in [true, false] {
        let stats = events(continuous);
        assert_eq!((stats.generated(), stats.ttft, stats.e2el), (40, Some(MS * 11), Some(MS * 125)));
        // 114 ms for the 39 tokens after the first one, in 17 events.
        assert_eq!(stats.tpot, Some((MS * 114).div_f64(39.0)));
        assert_eq!(stats.token_itl, continuous);
        assert!((stats.itl.sum_seconds() - 0.114).abs() < 1e-6);
    }
    // The gaps are counted by token if every event has usage, otherwise by event, including the
    // last event.
    assert_eq!([true, false].map(|continuous| events(continuous).itl.count()), [39, 18]);
    assert!((events(true).itl.max_seconds() - 0.007).abs() < 1e-9);
}

#[test]
fn tokens_are_counted_by_events_where_the_engine_reports_none() {
    let captured = |name: &str| {
        let path = format!("{}/../../tests/fixtures/vllm-0.32/{name}.sse", env!("CARGO_MANIFEST_DIR"));
        run(Strip::Nothing, &[(5, &std::fs::read(path).unwrap())]).1
    };
    for name in ["chat-stream-n2", "completion-stream-n2", "completion-stream-list", "chat-stream", "completion-stream"]
    {
        let (plain, reported) = (captured(&format!("{name}-plain")), captured(&format!("{name}-usage")));
        assert_eq!(plain.usage, TokenUsage::default());
        assert_eq!(Some(plain.generated()), reported.usage.completion, "{name}");
    }
}

#[test]
fn sequences_side_by_side_share_their_time() {
    let chunks = [(10, text("a")), (50, [text("b"), last(), usage_event(10)].concat())];
    let chunks: Vec<(u64, &[u8])> = chunks.iter().map(|(at, text)| (*at, text.as_bytes())).collect();
    let (_, stats) = run(Strip::Nothing, &chunks);
    assert_eq!(stats.tpot_of_one(2), Some(MS * 10));
    assert_eq!(stats.tpot_of_one(10), None);
}

#[test]
fn an_error_before_any_content_is_marked() {
    let error = b"data: {\"error\":{\"message\":\"busy\",\"code\":503}}\n\n";
    let (_, early) = run(Strip::Nothing, &[(1, role().as_bytes()), (2, error), (3, DONE.as_bytes())]);
    assert!(early.error_before_content && !early.is_complete());
    assert_eq!(early.error.unwrap().code, Some(503));
    let (_, late) = run(Strip::Nothing, &[(1, text("a").as_bytes()), (2, error)]);
    assert!(!late.error_before_content && late.error.is_some());
}

#[test]
fn an_aborted_response_is_incomplete_although_it_ends_properly() {
    let finish = "data: {\"choices\":[{\"index\":0,\"text\":\"\",\"finish_reason\":\"abort\"}]}\n\ndata: [DONE]\n\n";
    let (_, stats) = run(Strip::Nothing, &[(1, text("a").as_bytes()), (2, finish.as_bytes())]);
    assert!(stats.done && !stats.is_complete() && !stats.error_before_content);
}

fn ended(dialect: Dialect, stream: &str, chunk: usize) -> StreamStats {
    let mut meter = StreamMeter::new(dialect, Instant::now(), Strip::Nothing);
    for part in stream.as_bytes().chunks(chunk) {
        meter.feed(Bytes::copy_from_slice(part), Instant::now());
    }
    meter.end_of_body(Instant::now());
    meter.finish();
    meter.stats()
}

#[test]
fn a_stream_is_complete_by_its_finish_reasons_whatever_stands_behind_them() {
    let of = |index: u32, rest: &str| format!("data: {{\"choices\":[{{\"index\":{index},{rest}}}]}}\n\n");
    let (word, stop) = ("\"delta\":{\"content\":\"a\"}", "\"delta\":{},\"finish_reason\":\"stop\"");
    let two = [of(0, word), of(1, word), of(1, stop)].concat();
    for end in
        ["", "data: [DONE]", "data: [DONE]\n", "data: [DONE] \n\n", "data:[DONE]\r\n\r\n", "\n\n", ": bye\n\n", " \n"]
    {
        for chunk in [1, 5, 4_000] {
            let stats = ended(Dialect::Choices, &[&two, &of(0, stop), end].concat(), chunk);
            assert!(stats.is_complete(), "{end:?}");
            let cut = ended(Dialect::Choices, &[&two, end].concat(), chunk);
            assert_eq!(cut.done, end.contains("[DONE]"), "{end:?}: choice 0 has no finish reason");
        }
    }
    let last = of(0, stop);
    assert!(ended(Dialect::Choices, &[&of(0, word), last.trim_end()].concat(), 7).is_complete(), "no line break");
    assert!(!ended(Dialect::Choices, &[&of(0, word), &last[..last.len() - 5]].concat(), 7).done, "half an event");
    assert!(!ended(Dialect::Choices, "", 1).done);
    let message = "data: {\"type\":\"message_delta\",\"delta\":{\"stop_reason\":\"end_turn\"}}\n\n";
    assert!(ended(Dialect::Messages, message, 9).is_complete());
    assert!(!ended(Dialect::Messages, "data: {\"type\":\"message_start\"}\n\n", 9).done);
}

#[test]
fn a_terminal_event_of_any_size_ends_a_stream_and_reports_its_usage() {
    let big = "x \\\"}]{".repeat(300_000);
    for (kind, line) in [("completed", "\n\n"), ("incomplete", "\r\n\r\n"), ("completed", "\n"), ("completed", "")] {
        let event = format!(
            "event: response.{kind}\ndata: {{\"type\":\"response.{kind}\",\"response\":{{\"instructions\":\"{big}\",\"output\":[{{\"content\":[{{\"logprobs\":[1,2]}}]}},3],\"usage\":{{\"input_tokens\":9,\"output_tokens\":2}},\"tools\":[[\"{big}\"]]}}}}{line}"
        );
        for chunk in [16 << 10, 1 << 20, 64 << 20] {
            let stats = ended(Dialect::Responses, &event, chunk);
            assert!(stats.is_complete(), "{kind} in {chunk}");
            assert_eq!(stats.usage, TokenUsage { prompt: Some(9), completion: Some(2), cached: None });
        }
        let cut = &event[..event.len() - 10 - line.len()];
        assert!(!ended(Dialect::Responses, cut, 1 << 20).done);
    }
    let failed = format!(
        "data: {{\"response\":{{\"tools\":[\"{big}\"],\"error\":{{\"code\":\"503\",\"message\":\"m\"}}}},\"type\":\"response.failed\"}}\n\n"
    );
    assert_eq!(ended(Dialect::Responses, &failed, 99_999).error.unwrap().code, Some(503));
}

#[test]
fn how_far_a_stream_has_come_is_what_its_engine_has_shown() {
    let mut meter = StreamMeter::new(Dialect::Choices, Instant::now(), Strip::Nothing);
    let mut feed = |text: &str| {
        meter.feed(Bytes::copy_from_slice(text.as_bytes()), Instant::now());
        (meter.stage(), meter.progress())
    };
    assert_eq!(feed(": ping\n\n"), (StreamStage::Waiting, 0));
    assert_eq!(feed("data: {\"choices\":[]}\n\n"), (StreamStage::Accepted, 0));
    assert_eq!(feed(&role()), (StreamStage::Begun, 0));
    assert_eq!(feed(&delta("{}", &usage(1))), (StreamStage::Begun, 1), "a token without text");
    assert_eq!(feed(&delta("{}", &usage(1))), (StreamStage::Begun, 1));
    assert_eq!(feed(&text("a")), (StreamStage::Open, 2));
    assert_eq!(feed(&role()), (StreamStage::Open, 2));
}

#[test]
fn a_response_without_text_has_its_ttft_at_the_finish_reason() {
    let finish = "data: {\"choices\":[{\"index\":0,\"delta\":{\"content\":\"\"},\"finish_reason\":\"stop\"}]}\n\n";
    let (_, stats) = run(Strip::Nothing, &[(3, role().as_bytes()), (8, finish.as_bytes())]);
    assert_eq!((stats.ttft, stats.e2el, stats.tpot), (Some(MS * 8), Some(MS * 8), None));
}

#[test]
fn an_event_too_long_to_hold_is_forwarded_when_stripping() {
    let long = format!("data: {{\"x\":\"{}\"}}\n\n", "y".repeat(3 << 20));
    let stream = [text("a"), long, usage_event(1), DONE.to_owned()].concat();
    let want = stream.replace(&usage_event(1), "");
    for size in [1 << 10, 100_000, 1 << 20, 4 << 20] {
        let chunks: Vec<(u64, &[u8])> = stream.as_bytes().chunks(size).map(|chunk| (1, chunk)).collect();
        let (out, stats) = run(Strip::InjectedUsage, &chunks);
        assert!(out == want.as_bytes(), "{size}");
        assert_eq!(stats.usage.completion, Some(1));
    }
}

#[test]
fn the_held_tail_of_a_broken_stream_is_forwarded_at_its_end() {
    let (out, stats) = run(Strip::InjectedUsage, &[(1, text("a").as_bytes()), (2, b"data: {\"choices\":[]")]);
    assert!(out.ends_with(b"data: {\"choices\":[]"));
    assert!(!stats.done);
}

/// A stream with one delta for each text, with or without continuous usage and a usage event at the
/// end.
fn stream(texts: &[String], continuous: bool, final_usage: bool) -> String {
    let rest = |tokens| if continuous { usage(tokens) } else { String::new() };
    let mut out = delta(r#"{"role":"assistant","content":""}"#, &rest(0));
    for (index, text) in texts.iter().enumerate() {
        let content = serde_json::Value::from(text.as_str());
        out += &delta(&format!(r#"{{"content":{content}}}"#), &rest(index as u64 + 1));
        if index % 3 == 2 {
            out += ": keep-alive\n\n";
        }
    }
    out += &last();
    if final_usage {
        out += &usage_event(texts.len() as u64 + 1);
    }
    out + DONE
}

proptest! {
    #[test]
    fn any_split_gives_the_same_bytes_and_stats(
        texts in prop::collection::vec(".{0,6}", 0..8),
        cuts in prop::collection::vec(any::<prop::sample::Index>(), 0..12),
        which in 0usize..4,
    ) {
        let (strip, sent, seen) = match which {
            0 => (Strip::Nothing, stream(&texts, true, true), stream(&texts, true, true)),
            1 => (Strip::InjectedUsage, stream(&texts, false, true), stream(&texts, false, false)),
            2 => (Strip::Continuous { keep_final: false }, stream(&texts, true, true), stream(&texts, false, false)),
            _ => (Strip::Continuous { keep_final: true }, stream(&texts, true, true), stream(&texts, false, true)),
        };
        let bytes = sent.as_bytes();
        let mut cuts: Vec<usize> = cuts.iter().map(|cut| cut.index(bytes.len() + 1)).collect();
        cuts.extend([0, bytes.len()]);
        cuts.sort_unstable();
        let chunks: Vec<(u64, &[u8])> = cuts.windows(2).map(|pair| (7, &bytes[pair[0]..pair[1]])).collect();
        let (out, stats) = run(strip, &chunks);
        prop_assert_eq!(String::from_utf8(out).unwrap(), seen);
        let (_, whole) = run(strip, &[(7, bytes)]);
        prop_assert_eq!(&stats, &whole);
        prop_assert_eq!(stats.usage.completion, Some(texts.len() as u64 + 1));
        let singles: Vec<(u64, &[u8])> = bytes.chunks(1).map(|chunk| (7, chunk)).collect();
        prop_assert_eq!(run(strip, &singles).1, whole);
    }

    #[test]
    fn arbitrary_bytes_are_forwarded_unchanged(chunks in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..40), 0..20)) {
        let timed: Vec<(u64, &[u8])> = chunks.iter().map(|chunk| (1, &chunk[..])).collect();
        prop_assert_eq!(run(Strip::Nothing, &timed).0, chunks.concat());
        // Random bytes have no usage, so stripping changes nothing either.
        prop_assert_eq!(run(Strip::InjectedUsage, &timed).0, chunks.concat());
    }
}

#[test]
fn usage_outside_the_bounds_counts_nowhere() {
    let bounds = UsageBounds { prompt_min: 0, prompt_max: 100, completion_max: 50, output_is_generated: true };
    let start = Instant::now();
    let metered = |events: &[String]| {
        let mut meter = StreamMeter::new(Dialect::Choices, start, Strip::Nothing);
        meter.set_bounds(bounds);
        for event in events {
            meter.feed(Bytes::copy_from_slice(event.as_bytes()), start);
        }
        (meter.tokens(), meter.stats())
    };
    let with = |text: &str, tokens: u64| {
        let usage = format!(r#""usage":{{"prompt_tokens":7,"completion_tokens":{tokens}}}"#);
        format!("data: {{\"choices\":[{{\"index\":0,\"delta\":{{\"content\":\"{text}\"}}}}],{usage}}}\n\n")
    };
    let (tokens, stats) = metered(&[with("a", 1), with("b", 1 << 50), with("c", 3)]);
    assert_eq!((tokens, stats.generated(), stats.usage.prompt), (3, 3, Some(7)));
    assert_eq!(stats.itl.count(), 3, "the gap to an event, and that of two tokens");
    let many: Vec<String> = (0..40).map(|_| with("word", 0)).collect();
    let (_, stats) = metered(&many);
    assert_eq!((stats.usage.completion, stats.generated()), (None, 40));
    let (_, stats) = metered(&[with(&"long ".repeat(1_000), 5)]);
    assert_eq!(stats.usage.completion, None, "5,000 bytes are more than 5 tokens");
    let (_, stats) = metered(&[with(&"long ".repeat(1_000), 1_100)]);
    assert_eq!(stats.usage.completion, Some(1_100), "the output has so many bytes");
}

#[test]
fn a_stream_of_a_job_ends_with_its_body() {
    let now = Instant::now();
    let mut meter = StreamMeter::new(Dialect::of(Route::GenerateStream), now, Strip::Nothing);
    meter.feed(Bytes::from_static(b"data: {\"model_name\":\"m\",\"text_output\":\"a\"}\n\ndata: plain\n\n"), now);
    assert!(!meter.is_done());
    meter.end_of_body(now);
    meter.finish();
    let stats = meter.stats();
    assert_eq!((stats.content_events, stats.is_complete(), stats.ttft), (2, true, Some(Duration::ZERO)));
    let mut failed = StreamMeter::new(Dialect::Plain, now, Strip::Nothing);
    failed.feed(Bytes::from_static(b"data: {\"error\":\"no GPU\"}\n\n"), now);
    failed.end_of_body(now);
    failed.finish();
    assert!(!failed.stats().is_complete() && failed.stats().error.is_some());
}
