//! The charges of requests to their key's limits on tokens, however the requests end.
//!
//! The key has limits per minute and per day. Each case is a script of the engine, and the tokens
//! that the key must have used.

use super::*;
use crate::flow::keys::KeyUsage;

/// SHA-256 of "k".
const KEY: &str = "[[auth.keys]]\nname = \"k\"\n\
    sha256 = \"8254c329a92850f6d539dd376f4816ee2764517da5e0235514af433164480d7a\"\n\
    limit = { tokens_per_minute = \"60k\", tokens_per_day = \"1M\" }\n";

struct Keyed {
    test: TestFlow,
    usage: Arc<KeyUsage>,
}

impl Keyed {
    fn new(script: &Script) -> Self {
        let learned = LearnedState::default();
        let scripts = || vec![script.clone()];
        let test = TestFlow::of(config_of("p", KEY), &learned, scripts(), scripts());
        Self { test, usage: learned.key_usage }
    }

    fn used(&self) -> u64 {
        self.usage.tokens(Instant::now())[0].day.unwrap().0
    }

    async fn request(&self, route: Route, body: &'static str, leaves_after: Option<u64>) -> Record {
        let leaves_at = leaves_after.map(|after| Instant::now() + Duration::from_millis(after));
        let mut incoming = self.test.incoming(body);
        incoming.route = route;
        incoming.key = self.test.flow.routing_table().keys.authenticate(["k"]).unwrap();
        let mut client = TestClient { leaves_at, ..TestClient::default() };
        self.test.flow.run(incoming, &mut client).await;
        self.test.records.0.lock().pop().unwrap()
    }
}

async fn charged(script: Script, body: &'static str, leaves_after: Option<u64>) -> (u64, Outcome) {
    let keyed = Keyed::new(&script);
    let record = keyed.request(Route::ChatCompletions, body, leaves_after).await;
    (keyed.used(), record.outcome)
}

const REPORTED: &str = r#"{"choices":[{"message":{"content":"abc"},"finish_reason":"stop"}],"usage":{"prompt_tokens":9,"completion_tokens":2}}"#;
const UNREPORTED: &str = r#"{"choices":[{"message":{"content":"sixteen letters!"},"finish_reason":"stop"}]}"#;

#[tokio::test(start_paused = true)]
async fn a_request_is_charged_with_what_it_used_however_it_ends() {
    let prompt = Keyed::new(&good()).request(Route::ChatCompletions, STREAM, None).await.estimate.unwrap().tokens;
    let cut = || Script::Stream(vec![(10, ROLE), (0, WORD), (5, WORD), (5, WORD)], false);
    let slow = || Script::Stream(vec![(10, ROLE), (0, WORD), (9_000, WORD)], true);
    for (what, script, body, leaves_after, expected) in [
        ("a stream", good(), STREAM, None, 11),
        ("a body", Script::Json(200, REPORTED), PLAIN, None, 11),
        ("a body without usage", Script::Json(200, UNREPORTED), PLAIN, None, prompt + 4),
        ("a cut stream", cut(), STREAM, None, prompt + 3),
        ("a client that left a stream", slow(), STREAM, Some(100), prompt + 1),
        ("a client that left before the first token", Script::NeverAnswers, STREAM, Some(100), prompt),
        ("a refusal of the engine", Script::Json(400, r#"{"error":{"message":"no"}}"#), PLAIN, None, 0),
        ("a failure of the engine", Script::Json(500, "{}"), PLAIN, None, 0),
        ("no connection", Script::NoConnection, PLAIN, None, 0),
    ] {
        let (used, outcome) = charged(script, body, leaves_after).await;
        assert_eq!(used, expected, "{what}: {outcome:?}");
    }
    // The engine may have generated any part of the body, so the whole charge stays.
    let (used, outcome) = charged(Script::NeverAnswers, PLAIN, Some(100)).await;
    assert_eq!((used, outcome), (prompt + 16_384, Outcome::ClientGone));
}

#[tokio::test(start_paused = true)]
async fn usage_beyond_all_bounds_is_in_no_record_and_no_limit() {
    const HOSTILE: &str = r#"{"choices":[{"message":{"content":"sixteen letters!"},"finish_reason":"stop"}],"usage":{"prompt_tokens":1000000000000,"completion_tokens":1000000000000}}"#;
    let keyed = Keyed::new(&Script::Json(200, HOSTILE));
    let record = keyed.request(Route::ChatCompletions, PLAIN, None).await;
    assert_eq!(record.generated_tokens(), 4);
    assert_eq!(keyed.used(), record.estimate.unwrap().tokens + 4);
    let stream = Script::Stream(
        vec![
            (10, WORD),
            (0, LAST),
            (
                0,
                "data: {\"choices\":[],\"usage\":{\"prompt_tokens\":900000000000,\"completion_tokens\":900000000000}}\n\n",
            ),
            (0, DONE),
        ],
        true,
    );
    let keyed = Keyed::new(&stream);
    let record = keyed.request(Route::ChatCompletions, STREAM, None).await;
    assert_eq!((record.generated_tokens(), record.prompt_tokens()), (2, record.estimate.unwrap().tokens));
    assert_eq!(keyed.used(), record.estimate.unwrap().tokens + 2);
}

#[tokio::test(start_paused = true)]
async fn a_stored_conversation_counts_in_the_estimate_of_the_request_that_continues_it() {
    const MADE: &str = r#"{"id":"resp_1","output":[],"usage":{"input_tokens":7000,"output_tokens":1000}}"#;
    let keyed = Keyed::new(&Script::Json(200, MADE));
    let first = keyed.request(Route::Responses, r#"{"model":"m","input":"hi"}"#, None).await;
    assert!(first.estimate.unwrap().tokens < 100);
    let next = r#"{"model":"m","input":"hi","previous_response_id":"resp_1"}"#;
    let second = keyed.request(Route::Responses, next, None).await;
    assert!((8_000..8_100).contains(&second.estimate.unwrap().tokens), "{:?}", second.estimate);
    assert_eq!(keyed.used(), 16_000, "as the engine counted it, once each");
}
