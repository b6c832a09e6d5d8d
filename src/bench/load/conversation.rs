//! One conversation: each turn is a request that contains the whole conversation so far.
//!
//! A turn includes the server's earlier responses, so it uses the prefix cache as a real user's
//! turn does. All turns have the same class and adapter.
//!
//! Prompts are text, because responses carry no token ids. A conversation begins with the class's
//! [`PrefixKind::Extra`] prefix, if any, as a system prompt. Bounds: [`MAX_TURNS`].

use std::time::Duration;

use crate::load::body::{Prompt, PromptPart, PromptTokens};
use crate::load::session::{MAX_TURNS, Sessions};
use crate::load::workload::{LoadRequest, PrefixKind, RequestSource, Sender, Workload};
use crate::seed::{Purpose, rng_for};

/// Marks the segment ids (see [`LoadRequest::shared`]) of messages, so that they differ from the
/// ids of prefixes.
const MESSAGE: u64 = 1 << 63;

/// One conversation so far.
#[derive(Debug)]
pub struct Conversation {
    session: u64,
    class: u32,
    adapter: Option<u32>,
    turns: u32,
    begun: u32,
    messages: Vec<(&'static str, String)>,
    tokens: u32,
    shared: Vec<(u64, u32)>,
}

impl Conversation {
    /// Conversation number `session`, before the first turn.
    pub fn new(workload: &Workload, sessions: &Sessions, session: u64) -> Self {
        let mut rng = rng_for(workload.seed, Purpose::Session, session);
        let class = workload.class_of(session);
        let mut conversation = Self {
            session,
            class,
            adapter: workload.adapters.of(workload.seed, session),
            turns: sessions.turns.draw(&mut rng),
            begun: 0,
            messages: Vec::new(),
            tokens: 0,
            shared: Vec::new(),
        };
        if let RequestSource::Classes(classes) = &workload.source
            && let prefix = classes[class as usize].prefix
            && let PrefixKind::Extra(_) = prefix.kind
        {
            let (text, [system, _]) = prefix.parts(workload.seed, class, session, 0, rng);
            if system.count > 0 {
                let count = system.count;
                conversation.push(&workload.tokens, "system", text, &mut [system], count);
            }
        }
        conversation
    }

    /// Index of the class.
    pub fn class(&self) -> u32 {
        self.class
    }

    /// The request number of the current turn.
    pub fn ordinal(&self) -> u64 {
        self.session * u64::from(MAX_TURNS) + u64::from(self.begun.saturating_sub(1))
    }

    /// Begins the next turn with a user's message; `None` after the last turn.
    pub fn next_turn(&mut self, workload: &Workload, sessions: &Sessions) -> Option<LoadRequest> {
        if self.begun == self.turns {
            return None;
        }
        self.begun += 1;
        let turn = self.begun - 1;
        let output = self.push_user(workload, sessions, turn);
        let prompt = Prompt::Turns(&self.messages);
        let lengths = (self.tokens, output);
        let sender = Sender { adapter: self.adapter, user: workload.user_of(self.session) };
        let request = workload.build_request(self.class, sender, self.ordinal(), lengths, prompt);
        let session = Some((self.session, turn));
        let keep_text = self.begun < self.turns;
        // Later turns contain responses, whose tokens the server chose.
        let generated = turn == 0;
        Some(LoadRequest { session, keep_text, generated, shared: self.shared.clone(), ..request })
    }

    /// Adds the response to the current turn.
    pub fn respond(&mut self, text: String, tokens: u64) {
        let tokens = u32::try_from(tokens).unwrap_or(u32::MAX);
        self.messages.push(("assistant", text));
        self.tokens = self.tokens.saturating_add(tokens);
        self.shared.push((self.response_segment(), tokens));
    }

    /// The segment id of the response to the current turn, as in [`LoadRequest::shared`].
    pub fn response_segment(&self) -> u64 {
        MESSAGE | (self.ordinal() << 1) | 1
    }

    /// How long the user waits from the response until the next turn.
    pub fn think(&self, workload: &Workload, sessions: &Sessions) -> Duration {
        let mean = sessions.think;
        Duration::from_secs_f64(rng_for(workload.seed, Purpose::Think, self.ordinal()).exponential() * mean)
    }

    /// Adds the user's message. Returns the output tokens to request.
    fn push_user(&mut self, workload: &Workload, sessions: &Sessions, turn: u32) -> u32 {
        let mut rng = rng_for(workload.seed, Purpose::Prompt, self.ordinal());
        let (mut count, mut output) = (1, 1);
        if let RequestSource::Classes(classes) = &workload.source {
            let class = &classes[self.class as usize];
            let length = sessions.later.filter(|_| turn > 0).unwrap_or(class.prompt);
            (count, output) = (length.draw(&mut rng), class.output.draw(&mut rng));
        }
        self.push(&workload.tokens, "user", MESSAGE | (self.ordinal() << 1), &mut [PromptPart { rng, count }], count);
        output
    }

    fn push(&mut self, kind: &PromptTokens, role: &'static str, segment: u64, parts: &mut [PromptPart], tokens: u32) {
        let mut text = String::new();
        if !self.messages.is_empty() {
            text.push(' ');
        }
        kind.push_text(&mut text, parts, role == "user" && self.begun == 1);
        self.messages.push((role, text));
        self.tokens = self.tokens.saturating_add(tokens);
        self.shared.push((segment, tokens));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::load::length::Length;
    use crate::load::workload::{Class, Prefix};

    #[test]
    fn conversations_of_a_class_share_its_system_prompt_and_each_turn_repeats_those_before_it() {
        let prefix = Prefix { kind: PrefixKind::Extra(4), ..Prefix::default() };
        let class = Class { prefix, ..Class::new("chat", Length::Exactly(3), Length::Exactly(2), 1.0) };
        let workload = Workload::of_classes("m", vec![class], 5).with_text_prompts();
        let sessions = Sessions { turns: Length::Exactly(2), later: None, think: 1.0 };
        let mut talks = [0, 1].map(|session| Conversation::new(&workload, &sessions, session));
        let firsts = talks.each_mut().map(|talk| talk.next_turn(&workload, &sessions).unwrap());
        assert_eq!(firsts[0].shared[0], firsts[1].shared[0]);
        assert_ne!(firsts[0].shared[1], firsts[1].shared[1]);
        assert_eq!((firsts[0].prompt_tokens, firsts[0].shared[0].1), (7, 4));
        let words = |request: &LoadRequest| {
            let body: serde_json::Value = serde_json::from_slice(&request.body).unwrap();
            body["prompt"].as_str().unwrap().to_owned()
        };
        let [one, other] = firsts.each_ref().map(words);
        assert_eq!(one.split(' ').take(4).collect::<Vec<_>>(), other.split(' ').take(4).collect::<Vec<_>>());
        talks[0].respond(" a a".to_owned(), 2);
        let second = talks[0].next_turn(&workload, &sessions).unwrap();
        assert_eq!((second.prompt_tokens, second.session), (12, Some((0, 1))));
        assert!(words(&second).starts_with(&(one + " a a ")));
        assert_eq!(second.shared[..2], firsts[0].shared);
        assert!(talks[0].next_turn(&workload, &sessions).is_none());
    }
}
