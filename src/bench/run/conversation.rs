//! Sends the turns of one conversation, each after the response to the turn before it.
//!
//! A turn carries the whole conversation so far, with the server's own responses, so the prefix cache sees what it would
//! see from a real user. The conversation keeps its class and its adapter. It ends early when a turn fails or its client
//! leaves. Bounds: at most [`MAX_TURNS`] turns; prompts are text, because responses carry no token ids.

use std::time::Duration;

use tokio::time::Instant;

use crate::load::body::{Prompt, PromptPart, push_words};
use crate::load::session::{MAX_TURNS, Sessions};
use crate::load::workload::{RequestSource, Workload};
use crate::result::record::Record;
use crate::run::sender::RequestSender;
use crate::seed::{Purpose, stream};

/// One conversation so far.
struct Conversation {
    session: u64,
    class: u32,
    adapter: Option<u32>,
    turns: u32,
    /// Role and text of each message.
    messages: Vec<(&'static str, String)>,
    tokens: u32,
}

impl Conversation {
    fn new(workload: &Workload, sessions: &Sessions, session: u64) -> Self {
        let mut rng = stream(workload.seed, Purpose::Session, session);
        Self {
            session,
            class: workload.class_of(session),
            adapter: workload.adapters.of(workload.seed, session),
            turns: sessions.turns.draw(&mut rng),
            messages: Vec::new(),
            tokens: 0,
        }
    }

    fn ordinal(&self, turn: u32) -> u64 {
        self.session * u64::from(MAX_TURNS) + u64::from(turn)
    }

    /// Adds the user's message of a turn. Returns the output tokens to request.
    fn push_user(&mut self, workload: &Workload, sessions: &Sessions, turn: u32) -> u32 {
        let mut rng = stream(workload.seed, Purpose::Prompt, self.ordinal(turn));
        let (mut count, mut output) = (1, 1);
        if let RequestSource::Classes(classes) = &workload.source {
            let class = &classes[self.class as usize];
            let length = sessions.later.filter(|_| turn > 0).unwrap_or(class.prompt);
            (count, output) = (length.draw(&mut rng), class.output.draw(&mut rng));
        }
        let mut text = String::new();
        // On completions the turns are concatenated to one text.
        if turn > 0 {
            text.push(' ');
        }
        push_words(&mut text, &mut [PromptPart { rng, count }]);
        self.messages.push(("user", text));
        self.tokens = self.tokens.saturating_add(count);
        output
    }

    fn push_assistant(&mut self, text: String, tokens: u64) {
        self.messages.push(("assistant", text));
        self.tokens = self.tokens.saturating_add(u32::try_from(tokens).unwrap_or(u32::MAX));
    }
}

/// Runs conversation number `session`. Its first turn is due at `due`, or now.
pub(super) async fn run_conversation(
    sender: &RequestSender,
    sessions: &Sessions,
    session: u64,
    mut due: Option<Instant>,
) -> Vec<Record> {
    let workload = &sender.plan.workload;
    let mut conversation = Conversation::new(workload, sessions, session);
    let mut records = Vec::new();
    for turn in 0..conversation.turns {
        let output = conversation.push_user(workload, sessions, turn);
        let ordinal = conversation.ordinal(turn);
        let lengths = (conversation.tokens, output);
        let prompt = Prompt::Turns(&conversation.messages);
        let mut request = workload.build_request(conversation.class, conversation.adapter, ordinal, lengths, prompt);
        request.session = Some((session, turn));
        request.keep_text = turn + 1 < conversation.turns;
        let Some(sent) = sender.send(ordinal, request, due).await else { break };
        let (completed, tokens) = (sent.record.is_completed(), sent.record.output_tokens);
        records.push(sent.record);
        if !completed {
            break;
        }
        conversation.push_assistant(sent.text.unwrap_or_default(), tokens);
        let think = stream(workload.seed, Purpose::Think, ordinal).exponential() * sessions.think;
        due = Some(Instant::now() + Duration::from_secs_f64(think));
    }
    records
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::client::load_client::LoadClient;
    use crate::client::mock::{MockEngine, MockResponse, completion_stream, small_workload};
    use crate::load::arrival::{Arrival, Extent};
    use crate::load::length::Length;
    use crate::run::plan::RunPlan;
    use crate::run::progress::Progress;
    use crate::run::runner::run;

    #[tokio::test]
    async fn a_turn_carries_the_conversation_so_far_and_waits_for_the_response_before_it() {
        let engine = MockEngine::start(|_| MockResponse::stream(completion_stream(2), Duration::ZERO)).await;
        let sessions = Sessions { turns: Length::Exactly(3), later: Some(Length::Exactly(1)), think: 0.0 };
        let arrival = Arrival::ClosedLoop { streams: 2 };
        let plan = RunPlan::new(small_workload().with_text_prompts(), arrival, Extent::Requests(4));
        let plan = RunPlan { sessions: Some(sessions), ..plan };
        let client = LoadClient::new(&[engine.url()], plan.workload.api, Duration::from_secs(20)).unwrap();
        let result = run(&plan, &Arc::new(client), &Arc::new(Progress::default())).await.unwrap();
        assert_eq!(result.requests.len(), 12);
        let turns: Vec<_> = result.requests.iter().map(|record| record.session.unwrap()).collect();
        assert_eq!(&turns[..4], [(0, 0), (0, 1), (0, 2), (1, 0)]);
        for pair in result.requests.windows(2).filter(|pair| pair[0].session.unwrap().0 == pair[1].session.unwrap().0) {
            assert!(pair[1].sent >= pair[0].ended, "a turn was sent before the response to the one before it");
        }
        let prompts = engine.bodies().into_iter().map(|body| body["prompt"].as_str().unwrap().to_owned());
        let longest = prompts.max_by_key(String::len).unwrap();
        // Three words, " a a", one word, " a a", one word.
        let words: Vec<&str> = longest.split(' ').collect();
        assert_eq!(words.len(), 9, "{longest}");
        assert_eq!((&words[3..5], &words[6..8]), (&["a", "a"][..], &["a", "a"][..]));
    }
}
