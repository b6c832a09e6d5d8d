//! Streams whose engine fails after tokens were sent: either another engine continues them and the
//! client sees one answer, or the client gets the error and the record gets the reason.
//!
//! Engines answer as vLLM does, each under a different id and time.

use serde_json::{Value, json};
use sluice_core::openai::NotContinued;

use super::*;

/// A chunk of a chat by the engine with this number.
pub(super) fn event(engine: u32, delta: &str, finish: &str) -> &'static str {
    let event = format!(
        "data: {{\"id\":\"chatcmpl-{engine}\",\"object\":\"chat.completion.chunk\",\"created\":{engine},\"model\":\"m\",\
         \"choices\":[{{\"index\":0,\"delta\":{delta},\"logprobs\":null,\"finish_reason\":{finish}}}]}}\n\n"
    );
    Box::leak(event.into_boxed_str())
}

pub(super) fn role(engine: u32) -> &'static str {
    event(engine, "{\"role\":\"assistant\",\"content\":\"\"}", "null")
}

pub(super) fn word(engine: u32, text: &str) -> &'static str {
    event(engine, &format!("{{\"content\":{}}}", json!(text)), "null")
}

pub(super) fn last(engine: u32, text: &str) -> &'static str {
    event(engine, &format!("{{\"content\":{}}}", json!(text)), "\"stop\"")
}

fn usage(engine: u32, prompt: u64, completion: u64) -> &'static str {
    let total = prompt + completion;
    let event = format!(
        "data: {{\"id\":\"chatcmpl-{engine}\",\"object\":\"chat.completion.chunk\",\"created\":{engine},\"model\":\"m\",\
         \"choices\":[],\"usage\":{{\"prompt_tokens\":{prompt},\"total_tokens\":{total},\
         \"completion_tokens\":{completion}}}}}\n\n"
    );
    Box::leak(event.into_boxed_str())
}

/// An engine that fails after these words.
fn dying(engine: u32, words: &[&str]) -> Script {
    let words = words.iter().map(|text| (5, word(engine, text)));
    Script::Stream([(10, role(engine))].into_iter().chain(words).collect(), false)
}

/// An engine that completes an answer.
pub(super) fn completing(engine: u32, words: &[&str], prompt: u64) -> Script {
    let (end, before) = words.split_last().unwrap();
    let words = before.iter().map(|text| (5, word(engine, text)));
    let ending = [(5, last(engine, end)), (0, usage(engine, prompt, words.len() as u64 + 1)), (0, DONE)];
    Script::Stream([(10, role(engine))].into_iter().chain(words).chain(ending).collect(), true)
}

pub(super) fn text(client: &TestClient) -> String {
    String::from_utf8(client.body.clone()).unwrap()
}

/// The body of a request by its number.
pub(super) fn body(test: &TestFlow, number: usize) -> Value {
    serde_json::from_slice(&test.flow.upstream().calls.lock()[number].2).unwrap()
}

/// Checks that all memory that was taken for continuation was returned.
pub(super) fn assert_nothing_kept(test: &TestFlow) {
    assert_eq!(test.flow.kept_for_continuation(), 0);
}

#[tokio::test(start_paused = true)]
async fn another_engine_continues_the_text_and_the_client_sees_one_answer() {
    let test =
        TestFlow::new(vec![dying(1, &["Es", " \u{fc}ber", " 水"])], vec![completing(2, &["😀", ".\n", "!"], 15)]);
    let (client, record) = test.request(STREAM).await;
    let whole = [
        role(1),
        word(1, "Es"),
        word(1, " \u{fc}ber"),
        word(1, " 水"),
        &word(2, "😀").replace("chatcmpl-2", "chatcmpl-1").replace("\"created\":2", "\"created\":1"),
        &word(2, ".\n").replace("chatcmpl-2", "chatcmpl-1").replace("\"created\":2", "\"created\":1"),
        &last(2, "!").replace("chatcmpl-2", "chatcmpl-1").replace("\"created\":2", "\"created\":1"),
        DONE,
    ];
    assert_eq!(text(&client), whole.concat());
    assert!(client.finished && !client.aborted);
    assert_eq!((record.outcome, record.continued, record.not_continued), (Outcome::Completed, 1, None));
    assert_eq!(record.retries.as_slice(), [RetryReason::Broken]);
    assert_eq!(record.retried_on.as_slice(), [["p".into(), "a".into()]], "the engine that failed");
    assert_eq!(*test.records.1.lock(), record.retried_on.to_vec());
    let stats = record.stats.unwrap();
    assert_eq!((stats.usage.prompt, stats.usage.completion, stats.ttft), (Some(12), Some(6), Some(ms(15))));
    assert_eq!((stats.token_events, stats.content_events), (6, 6));
    let sent = body(&test, 1);
    assert_eq!(sent["messages"][1], json!({"role": "assistant", "content": "Es \u{fc}ber 水"}));
    assert_eq!((&sent["continue_final_message"], &sent["add_generation_prompt"]), (&json!(true), &json!(false)));
    assert_eq!(test.asked(), [(7001, "req".to_owned()), (7002, "req-r2".to_owned())]);
    assert_nothing_kept(&test);
}

fn ms(ms: u64) -> Duration {
    Duration::from_millis(ms)
}

#[tokio::test(start_paused = true)]
async fn usage_that_the_client_requested_is_that_of_the_whole() {
    const USAGE_TOO: &str = r#"{"model":"m","stream":true,"stream_options":{"include_usage":true},"messages":[]}"#;
    let test = TestFlow::new(vec![dying(1, &["a", " b"])], vec![completing(2, &[" c", " d"], 11)]);
    let (client, _) = test.request(USAGE_TOO).await;
    let usage = json!({"prompt_tokens": 9, "total_tokens": 13, "completion_tokens": 4});
    assert!(text(&client).contains(&format!("\"usage\":{}", usage_text(&usage))), "{}", text(&client));
}

#[tokio::test(start_paused = true)]
async fn only_kinds_of_engines_that_continue_a_message_are_asked_to() {
    for (engine, continued) in [("vllm", 1), ("sglang", 0), ("openai", 0)] {
        let key = format!("engine = \"{engine}\"");
        let test = TestFlow::with(vec![dying(1, &["a"])], vec![completing(2, &[" b"], 9)], &key);
        let (_, record) = test.request(STREAM).await;
        assert_eq!(record.continued, continued, "{engine}");
        assert_eq!(record.not_continued.is_some(), continued == 0, "{engine}");
        assert_eq!(test.asked().len(), 1 + continued as usize, "{engine}");
    }
}

#[tokio::test(start_paused = true)]
async fn an_engine_that_has_loaded_the_model_from_another_place_does_not_continue_it() {
    for (roots, adapters, continues) in
        [(["org/m", "org/m"], ["/a", "/b"], true), (["org/m", "org/m-2"], ["/a", "/a"], false)]
    {
        let test = TestFlow::new(vec![dying(1, &["a"])], vec![completing(2, &[" b"], 9)]);
        for (engine, id) in test.flow.routing_table().pools[0].backends.iter().enumerate() {
            let cards = [("m", roots[engine]), ("adapter", adapters[engine])];
            test.flow.admission().set_roots(*id, cards);
        }
        let (client, record) = test.request(STREAM).await;
        assert_eq!(record.continued, u32::from(continues));
        assert_eq!(record.not_continued, (!continues).then_some(NotContinued::NoEngine));
        assert_eq!(text(&client).contains("error"), !continues, "{}", text(&client));
    }
}

#[tokio::test(start_paused = true)]
async fn the_next_engine_counts_the_prompt_whose_usage_the_client_requested() {
    let usage = |options: &str| format!(r#"{{"model":"m","stream":true,"messages":[],{options}}}"#).leak();
    let counted = Some(Script::Json(200, r#"{"count":8,"max_model_len":99,"tokens":[1,2],"token_strs":null}"#));
    let wanted = r#""stream_options":{"include_usage":true}"#;
    for (request, answer, counts, prompt) in [
        (usage(wanted), counted.clone(), 1, 8),
        (usage(wanted), None, 1, 9),
        (usage(wanted), Some(Script::NeverAnswers), 1, 9),
        (usage(&format!(r#"{wanted},"reasoning_effort":"low""#)), counted.clone(), 0, 9),
        (usage(r#""user":"u""#), counted, 0, 9),
    ] {
        let test = TestFlow::new(vec![dying(1, &["a", " b"])], vec![completing(2, &[" c", " d"], 11)]);
        *test.flow.upstream().request_count.lock() = answer;
        let (client, record) = test.request(request).await;
        let bodies = test.flow.upstream().counts.lock().clone();
        let as_sent = bodies.iter().filter(|counted| *counted == &test.flow.upstream().calls.lock()[0].2);
        assert_eq!((as_sent.count(), bodies.len()), (counts, counts + 1), "{request}");
        assert_eq!(record.stats.unwrap().usage.prompt, Some(prompt), "{request}");
        assert_eq!(text(&client).contains(&format!("\"prompt_tokens\":{prompt},")), request.contains("include"));
    }
}

#[tokio::test(start_paused = true)]
async fn the_next_engine_counts_a_text_whose_events_had_several_tokens() {
    const LIMITED: &str = r#"{"model":"m","stream":true,"max_tokens":9,"stream_options":{"include_usage":true},
        "messages":[{"role":"user","content":"hi"}]}"#;
    let count = |count: u64| Script::Json(200, Box::leak(format!("{{\"count\":{count}}}").into_boxed_str()));
    for (counted, left, completion) in [
        (Some(count(5)), Some(4), 7),
        // Two tokens of an answer can be one token of a prompt, so a count below the number of
        // events is ignored.
        (Some(count(1)), Some(7), 4),
        (Some(Script::NeverAnswers), Some(7), 4),
        (None, Some(7), 4),
        (Some(count(9)), None, 9),
        (Some(count(12)), None, 9),
    ] {
        let test = TestFlow::new(vec![dying(1, &["a b", " c d e"])], vec![completing(2, &[" f", " g"], 11)]);
        *test.flow.upstream().text_count.lock() = counted;
        *test.flow.upstream().request_count.lock() = Some(count(3));
        let (client, record) = test.request(LIMITED).await;
        let asked: Value = serde_json::from_slice(&test.flow.upstream().counts.lock()[1]).unwrap();
        assert_eq!(asked, json!({"model": "m", "prompt": "a b c d e", "add_special_tokens": false}));
        assert_eq!((record.outcome, record.not_continued), (Outcome::Completed, None));
        let usage = json!({"prompt_tokens": 3, "total_tokens": 3 + completion, "completion_tokens": completion});
        assert!(text(&client).contains(&format!("\"usage\":{}", usage_text(&usage))), "{}", text(&client));
        let sent = test.asked().len() == 2;
        assert_eq!(sent.then(|| body(&test, 1)["max_tokens"].as_u64().unwrap()), left);
        assert_eq!(text(&client).contains("\"finish_reason\":\"length\""), left.is_none());
    }
}

#[tokio::test(start_paused = true)]
async fn a_text_that_the_engine_counted_is_not_counted_again() {
    let counting = |text: &str, tokens: u64| {
        let usage = format!(",\"usage\":{{\"prompt_tokens\":3,\"completion_tokens\":{tokens}}}}}\n\n");
        &*Box::leak((word(1, text).trim_end().strip_suffix('}').unwrap().to_owned() + &usage).into_boxed_str())
    };
    // A stop string holds text back, so the text has fewer tokens than the engine has counted.
    const STOPS: &str =
        r#"{"model":"m","stream":true,"stop":"END","max_tokens":9,"messages":[{"role":"user","content":"hi"}]}"#;
    for (request, counts, completion) in [(STREAM, 0, 6), (STOPS, 1, 5)] {
        let events = vec![(10, role(1)), (5, counting("a b", 2)), (5, counting(" c d e", 5))];
        let test = TestFlow::new(vec![Script::Stream(events, false)], vec![completing(2, &[" f"], 11)]);
        *test.flow.upstream().text_count.lock() = Some(Script::Json(200, r#"{"count":4}"#));
        let (_, record) = test.request(request).await;
        assert_eq!((record.continued, record.stats.unwrap().usage.completion), (1, Some(completion)));
        assert_eq!(test.flow.upstream().counts.lock().len(), counts);
        assert_eq!(body(&test, 1)["max_tokens"].as_u64(), (counts > 0).then_some(5));
    }
}

fn usage_text(usage: &Value) -> String {
    format!(
        "{{\"prompt_tokens\":{},\"total_tokens\":{},\"completion_tokens\":{}}}",
        usage["prompt_tokens"], usage["total_tokens"], usage["completion_tokens"]
    )
}

#[tokio::test(start_paused = true)]
async fn errors_in_the_stream_hangs_and_early_ends_are_continued_too() {
    let begun = |end: Vec<(u64, &'static str)>, in_order| {
        Script::Stream([(10, role(1)), (5, word(1, "a"))].into_iter().chain(end).collect(), in_order)
    };
    let internal =
        "data: {\"error\":{\"message\":\"EngineCore died\",\"type\":\"x\",\"code\":500}}\n\ndata: [DONE]\n\n";
    let abort = event(1, "{\"content\":\"\"}", "\"abort\"");
    let half = &word(1, " b")[..60];
    for (what, failing, reason) in [
        ("an error", begun(vec![(5, internal)], true), RetryReason::InStream),
        ("an abort", begun(vec![(5, abort), (0, DONE)], true), RetryReason::InStream),
        ("an early end", begun(vec![], true), RetryReason::Broken),
        ("half an event", begun(vec![(1, half)], false), RetryReason::Broken),
        ("a hang", begun(vec![(3_600_000, DONE)], true), RetryReason::Timeout),
    ] {
        let test = TestFlow::new(vec![failing], vec![completing(2, &[" b", " c"], 10)]);
        let (client, record) = test.request(STREAM).await;
        assert_eq!((record.outcome, record.continued), (Outcome::Completed, 1), "{what}");
        assert_eq!(record.retries.as_slice(), [reason], "{what}");
        let text = text(&client);
        assert!(!text.contains("error") && !text.contains("abort") && text.ends_with(DONE), "{what}: {text}");
        assert_eq!(text.matches("\"content\"").count(), 4, "{what}: {text}");
        assert_eq!(record.stats.unwrap().usage.completion, Some(3), "{what}");
        assert_nothing_kept(&test);
    }
}

#[tokio::test(start_paused = true)]
async fn an_answer_that_cannot_be_continued_ends_with_the_error_and_the_reason() {
    for (request, words, reason) in [
        (r#"{"model":"m","stream":true,"messages":[],"seed":1}"#, &["a"][..], NotContinued::Seed),
        (r#"{"model":"m","stream":true,"messages":[],"n":2}"#, &["a"], NotContinued::Choices),
        (r#"{"model":"m","stream":true,"messages":[],"logprobs":true}"#, &["a"], NotContinued::Logprobs),
        (STREAM, &["<think>", "hm"], NotContinued::Reasoning),
        (r#"{"model":"m","stream":true,"messages":[],"stop":"END"}"#, &["the", " E"], NotContinued::StopPrefix),
    ] {
        let test = TestFlow::new(vec![dying(1, words)], vec![completing(2, &["b"], 10)]);
        let (client, record) = test.request(request).await;
        assert_eq!((record.not_continued, record.continued), (Some(reason), 0), "{request}");
        assert_eq!(record.outcome, Outcome::UpstreamError(UpstreamFault::Broken));
        let text = text(&client);
        assert!(text.contains("event: error") && !text.contains("[DONE]") && client.aborted, "{text}");
        assert_eq!(record.stats.unwrap().token_events, words.len() as u64);
        assert_eq!(test.asked().len(), 1);
        assert_nothing_kept(&test);
    }
}

#[tokio::test(start_paused = true)]
async fn it_is_off_where_the_operator_or_the_client_says_so() {
    let test = TestFlow::new(vec![dying(1, &["a"])], vec![completing(2, &["b"], 10)]);
    let mut incoming = test.incoming(STREAM);
    incoming.no_continue = true;
    test.flow.run(incoming, &mut TestClient::default()).await;
    assert_eq!(test.records.0.lock().pop().unwrap().not_continued, Some(NotContinued::Header));
    let test = TestFlow::new(vec![dying(1, &["a"])], vec![completing(2, &["b"], 10)]);
    let mut config = Config::clone(&test.flow.routing_table().config);
    config.retry.on_failure = sluice_config::Continue::Off;
    test.configure(config);
    let (_, record) = test.request(STREAM).await;
    assert_eq!(record.not_continued, Some(NotContinued::Off));
    // SHA-256 of "secret".
    let key = "[[auth.keys]]\nname = \"team\"\ncontinue = \"off\"\n\
               sha256 = \"2bb80d537b1da3e38bd30361aa855686bde0eacd7162fef6a25fe97bf527a25b\"";
    let test = TestFlow::with(vec![dying(1, &["a"])], vec![completing(2, &["b"], 10)], key);
    let mut incoming = test.incoming(STREAM);
    incoming.key = test.flow.routing_table().keys.authenticate(Some("secret")).unwrap();
    test.flow.run(incoming, &mut TestClient::default()).await;
    assert_eq!(test.records.0.lock().pop().unwrap().not_continued, Some(NotContinued::Off));
}

#[tokio::test(start_paused = true)]
async fn a_body_on_which_engines_die_again_and_again_is_not_continued_for_ever() {
    let test = TestFlow::new(vec![dying(1, &["a", " b"])], vec![dying(2, &[" c"])]);
    let (client, record) = test.request(STREAM).await;
    assert_eq!((record.continued, record.not_continued), (1, Some(NotContinued::Suspect)));
    assert_eq!(record.outcome, Outcome::UpstreamError(UpstreamFault::Broken));
    let text = text(&client);
    assert!(text.contains("\" c\"") && text.matches("event: error").count() == 1, "{text}");
    assert_eq!((test.asked().len(), record.stats.unwrap().token_events), (2, 3));
    assert_nothing_kept(&test);
}

#[tokio::test(start_paused = true)]
async fn an_engine_that_refuses_or_fits_not_ends_the_answer_with_one_error() {
    let other_model = Box::leak(word(2, "b").replace("\"m\"", "\"n\"").into_boxed_str());
    for (second, reason) in [
        (Script::Json(400, "{\"error\":{\"message\":\"Can only continue...\"}}"), NotContinued::Refused),
        (Script::Stream(vec![(1, role(2)), (1, other_model)], true), NotContinued::OtherModel),
        (Script::NoConnection, NotContinued::NoEngine),
        (completing(2, &["b"], 10), NotContinued::Differs),
    ] {
        let words: &[&str] = if reason == NotContinued::Differs { &["a", "\n"] } else { &["a"] };
        let test = TestFlow::new(vec![dying(1, words)], vec![second]);
        let (client, record) = test.request(STREAM).await;
        assert_eq!(record.not_continued, Some(reason));
        let text = text(&client);
        assert!(text.matches("event: error").count() == 1 && client.aborted && !client.finished, "{text}");
        assert_eq!(text.matches("\"content\"").count(), words.len() + 1, "{reason:?}: {text}");
        assert_nothing_kept(&test);
    }
}

#[tokio::test(start_paused = true)]
async fn blanks_at_the_seam_are_neither_lost_nor_doubled() {
    let test = TestFlow::new(vec![dying(1, &["a", ".\n", "\n"])], vec![completing(2, &["\n", "\n", "b"], 10)]);
    let (client, record) = test.request(STREAM).await;
    let text = text(&client);
    assert_eq!((text.matches("\\n").count(), text.matches("\"content\":\"b\"").count()), (2, 1), "{text}");
    assert_eq!(body(&test, 1)["messages"][1]["content"], "a.");
    assert_eq!(record.stats.unwrap().usage.completion, Some(4), "one piece is whole, and three came from the other");
}

#[tokio::test(start_paused = true)]
async fn limits_shrink_and_an_answer_at_its_limit_is_ended_by_the_gateway() {
    const LIMITED: &str = r#"{"model":"m","stream":true,"messages":[],"max_tokens":3}"#;
    let test = TestFlow::new(vec![dying(1, &["a", " b"])], vec![completing(2, &[" c"], 10)]);
    test.request(LIMITED).await;
    assert_eq!(body(&test, 1)["max_tokens"], 1);
    let test = TestFlow::new(vec![dying(1, &["a", " b", " c"])], vec![completing(2, &["d"], 10)]);
    let (client, record) = test.request(LIMITED).await;
    let text = text(&client);
    assert!(text.contains("\"finish_reason\":\"length\"") && text.ends_with(DONE) && client.finished, "{text}");
    assert_eq!((record.outcome, record.continued, test.asked().len()), (Outcome::Completed, 0, 1));
}

#[tokio::test(start_paused = true)]
async fn an_answer_of_which_only_the_end_is_missing_is_ended_by_the_gateway() {
    let cut = Script::Stream(vec![(1, role(1)), (1, word(1, "a")), (1, last(1, " b"))], false);
    let test = TestFlow::new(vec![cut], vec![completing(2, &["d"], 10)]);
    let (client, record) = test.request(STREAM).await;
    assert_eq!(text(&client), [role(1), word(1, "a"), last(1, " b"), DONE].concat());
    assert_eq!((record.outcome, test.asked().len()), (Outcome::Completed, 1));
}

#[tokio::test(start_paused = true)]
async fn a_client_that_leaves_at_the_seam_leaves_the_queue() {
    let test = TestFlow::with(vec![dying(1, &["a"])], vec![completing(2, &["b"], 10)], "slots = 1");
    let mut other = TestClient::default();
    let slow = Script::Stream(vec![(60_000, role(3)), (1, last(3, "c")), (0, DONE)], true);
    test.flow.upstream().scripts.lock()[1].1 = vec![slow].into();
    let mut client = TestClient { leaves_at: Some(Instant::now() + ms(500)), ..TestClient::default() };
    let begun = Instant::now();
    let leaving = async {
        test.flow.run(test.incoming(STREAM), &mut client).await;
        let record = test.records.0.lock().pop().unwrap();
        assert_eq!((record.outcome, record.continued), (Outcome::ClientGone, 0));
        assert_eq!((begun.elapsed(), record.stats.unwrap().token_events), (ms(500), 1));
    };
    let staying = async {
        // This request takes the other engine's only slot before the first engine dies.
        sleep(ms(1)).await;
        test.flow.run(test.incoming(PLAIN), &mut other).await;
    };
    tokio::join!(leaving, staying);
    test.idle();
    assert_nothing_kept(&test);
}
