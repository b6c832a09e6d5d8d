//! Conversations: several turns, each asked when the one before it has been answered.
//!
//! A turn carries all that was said before it, the server's own answers included, so a prefix cache finds it as it would find
//! a real conversation. A user thinks between two turns, for a time drawn from an exponential distribution. The first turn
//! has the class's prompt length, the others their own; each answer has the class's output length. A conversation keeps its
//! class and its adapter, and ends early when a turn fails or its client leaves.
//!
//! Prompts are text, because an answer's token ids are not on the wire. The tokens asked for are those of all that was said;
//! what the server counts is what is recorded.
//!
//! Request number of turn t of conversation s: s * [`MAX_TURNS`] + t. Turn t of conversation s, without the answers, is a
//! pure function of the seed.

use std::time::Duration;

use tokio::time::Instant;

use crate::error::BenchError;
use crate::load::body::{Part, Prompt, Tokens, push_words};
use crate::load::length::Length;
use crate::load::workload::{Source, Workload};
use crate::result::record::Record;
use crate::run::runner::Sender;
use crate::seed::{Purpose, stream};

/// The most turns of one conversation.
pub const MAX_TURNS: u32 = 1_000;

/// What conversations are like.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sessions {
    /// Turns of each.
    pub turns: Length,
    /// Tokens that the user adds from the second turn on; nothing is the class's prompt length.
    pub later: Option<Length>,
    /// Mean time between an answer's end and the next turn, seconds.
    pub think: f64,
}

impl Sessions {
    /// Checks that conversations can be made.
    ///
    /// # Errors
    /// A number of turns, a length or a time that makes no sense.
    pub fn check(&self) -> Result<(), BenchError> {
        let bad = |what| Err(BenchError::BadSessions(what));
        let most = match self.turns {
            Length::Exactly(turns) | Length::Between { max: turns, .. } | Length::LogNormal { max: turns, .. } => turns,
        };
        if !self.turns.is_possible() || most > MAX_TURNS {
            return bad("from 1 to 1000 turns");
        }
        if self.later.is_some_and(|later| !later.is_possible()) {
            return bad("at least 1 token in each turn");
        }
        if self.think.is_finite() && self.think >= 0.0 { Ok(()) } else { bad("a think time of 0 or more") }
    }
}

/// One conversation so far.
struct Talk {
    session: u64,
    class: u32,
    adapter: Option<u32>,
    turns: u32,
    said: Vec<(&'static str, String)>,
    tokens: u32,
}

impl Talk {
    fn new(workload: &Workload, sessions: &Sessions, session: u64) -> Self {
        let mut rng = stream(workload.seed, Purpose::Session, session);
        Self {
            session,
            class: workload.class_of(session),
            adapter: workload.adapters.of(workload.seed, session),
            turns: sessions.turns.draw(&mut rng),
            said: Vec::new(),
            tokens: 0,
        }
    }

    fn ordinal(&self, turn: u32) -> u64 {
        self.session * u64::from(MAX_TURNS) + u64::from(turn)
    }

    /// Adds the user's part of a turn; returns the tokens of its answer.
    fn ask(&mut self, workload: &Workload, sessions: &Sessions, turn: u32) -> u32 {
        let mut rng = stream(workload.seed, Purpose::Prompt, self.ordinal(turn));
        let (mut count, mut output) = (1, 1);
        if let Source::Classes(classes) = &workload.source {
            let class = &classes[self.class as usize];
            let length = sessions.later.filter(|_| turn > 0).unwrap_or(class.prompt);
            (count, output) = (length.draw(&mut rng), class.output.draw(&mut rng));
        }
        let mut text = String::new();
        // On completions turns follow each other in one text.
        if turn > 0 {
            text.push(' ');
        }
        push_words(&mut text, &mut [Part { rng, count }]);
        self.said.push(("user", text));
        self.tokens = self.tokens.saturating_add(count);
        output
    }

    fn hear(&mut self, answer: String, tokens: u64) {
        self.said.push(("assistant", answer));
        self.tokens = self.tokens.saturating_add(u32::try_from(tokens).unwrap_or(u32::MAX));
    }
}

impl Sender {
    /// One conversation, whose first turn is due at `due`, or now.
    pub(crate) async fn session(&self, session: u64, due: Option<Instant>) -> Vec<Record> {
        let Some(sessions) = self.plan.sessions else { return Vec::new() };
        let workload = &self.plan.workload;
        let mut talk = Talk::new(workload, &sessions, session);
        let mut records = Vec::new();
        let mut due = due;
        for turn in 0..talk.turns {
            let output = talk.ask(workload, &sessions, turn);
            let ordinal = talk.ordinal(turn);
            let lengths = (talk.tokens, output);
            let mut question = workload.asked(talk.class, talk.adapter, ordinal, lengths, Prompt::Turns(&talk.said));
            question.session = Some((session, turn));
            question.keep_text = turn + 1 < talk.turns;
            let Some((record, text)) = self.send(ordinal, question, due).await else { break };
            let (completed, tokens) = (record.is_completed(), record.output_tokens);
            records.push(record);
            if !completed {
                break;
            }
            talk.hear(text.unwrap_or_default(), tokens);
            let think = stream(workload.seed, Purpose::Think, ordinal).exponential() * sessions.think;
            due = Some(Instant::now() + Duration::from_secs_f64(think));
        }
        records
    }
}

impl Workload {
    /// This workload as one of conversations: prompts are text.
    #[must_use]
    pub fn spoken(self) -> Self {
        Self { tokens: Tokens::Words, ..self }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::client::load_client::Client;
    use crate::client::mock::{Answer, MockEngine, completion_stream, small_workload};
    use crate::load::arrival::{Arrival, Extent};
    use crate::run::progress::Progress;
    use crate::run::runner::{Plan, run};

    #[tokio::test]
    async fn a_turn_carries_all_that_was_said_and_waits_for_its_answer() {
        let engine = MockEngine::start(|_| Answer::stream(completion_stream(2), Duration::ZERO)).await;
        let sessions = Sessions { turns: Length::Exactly(3), later: Some(Length::Exactly(1)), think: 0.0 };
        let arrival = Arrival::ClosedLoop { streams: 2 };
        let plan = Plan::new(small_workload().spoken(), arrival, Extent::Requests(4));
        let plan = Plan { sessions: Some(sessions), ..plan };
        let client = Client::new(&[engine.url()], plan.workload.api, Duration::from_secs(20)).unwrap();
        let result = run(&plan, &Arc::new(client), &Arc::new(Progress::default())).await.unwrap();
        assert_eq!(result.requests.len(), 12);
        let turns: Vec<_> = result.requests.iter().map(|record| record.session.unwrap()).collect();
        assert_eq!(&turns[..4], [(0, 0), (0, 1), (0, 2), (1, 0)]);
        for pair in result.requests.windows(2).filter(|pair| pair[0].session.unwrap().0 == pair[1].session.unwrap().0) {
            assert!(pair[1].sent >= pair[0].ended, "a turn was sent before its answer");
        }
        let last = engine.bodies().into_iter().map(|body| body["prompt"].as_str().unwrap().to_owned());
        let longest = last.max_by_key(String::len).unwrap();
        // Three words, " a a", one word, " a a", one word.
        let words: Vec<&str> = longest.split(' ').collect();
        assert_eq!(words.len(), 9, "{longest}");
        assert_eq!((&words[3..5], &words[6..8]), (&["a", "a"][..], &["a", "a"][..]));
    }

    #[test]
    fn sessions_that_make_no_sense_are_refused() {
        let fine = Sessions { turns: Length::Exactly(3), later: None, think: 1.0 };
        assert_eq!(fine.check(), Ok(()));
        for bad in [
            Sessions { turns: Length::Exactly(1_001), ..fine },
            Sessions { later: Some(Length::Exactly(0)), ..fine },
            Sessions { think: f64::NAN, ..fine },
        ] {
            assert!(bad.check().is_err(), "{bad:?}");
        }
    }
}
