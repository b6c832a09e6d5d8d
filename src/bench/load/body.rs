//! The JSON bodies of requests: prompts as token ids or as text, and the other fields.
//!
//! With token ids a prompt has an exact length without a tokenizer. Text of an exact length needs a
//! tokenizer (`text`). All prompts with the same shared prefix draw the prefix from the same random
//! number generator. Other tokens are independent.
//!
//! Bodies are written without a JSON tree, because a prompt may have 100,000 ids. Bounds: prompts
//! of [`MAX_TOKENS`](super::length::MAX_TOKENS).

use std::fmt::Write as _;
use std::ops::Range;

use bytes::Bytes;
use serde_json::{Map, Value};

use crate::error::BenchError;
pub(crate) use crate::load::text::PromptPart;
use crate::load::text::{ExactText, push_words};

/// Which API the requests use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Api {
    /// `/v1/completions`.
    Completions,
    /// `/v1/chat/completions`.
    Chat,
}

impl Api {
    /// The default path of requests.
    pub fn path(self) -> &'static str {
        match self {
            Self::Completions => "/v1/completions",
            Self::Chat => "/v1/chat/completions",
        }
    }
}

/// The tokens of generated prompts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PromptTokens {
    /// Ids drawn uniformly from this range (completions only).
    Ids(Range<u32>),
    /// One word for each token.
    Words,
    /// Text with exactly the requested tokens.
    Exact(ExactText),
}

impl PromptTokens {
    /// Writes text with the tokens of `parts`. A `whole` prompt has fewer, by the tokens that the
    /// server adds. The text needs no escaping.
    pub(crate) fn push_text(&self, text: &mut String, parts: &mut [PromptPart], whole: bool) {
        match self {
            Self::Exact(exact) if whole => exact.push_prompt(text, parts),
            Self::Exact(exact) => exact.push(text, parts),
            Self::Ids(_) | Self::Words => push_words(text, parts),
        }
    }
}

/// The fields that are the same in all bodies.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct BodyFields {
    /// Generate past an end-of-sequence token.
    pub ignore_eos: bool,
    /// Other fields, which replace generated fields of the same name.
    pub extra: Map<String, Value>,
}

#[derive(Clone, Copy)]
pub(crate) struct Names<'a> {
    pub(crate) model: &'a str,
    pub(crate) user: Option<u32>,
}

pub(crate) enum Prompt<'a> {
    /// Drawn from random number generators, part by part.
    Parts(&'a mut [PromptPart]),
    Text(&'a str),
    /// Role and text of each turn.
    Turns(&'a [(&'static str, String)]),
}

impl BodyFields {
    /// Checks that no extra field replaces a field that the measurement needs.
    pub fn check(&self) -> Result<(), BenchError> {
        match ["stream", "stream_options", "model", "prompt", "messages"]
            .into_iter()
            .find(|key| self.extra.contains_key(*key))
        {
            Some(key) => Err(BenchError::BadExtra(key)),
            None => Ok(()),
        }
    }

    pub(crate) fn body(
        &self,
        api: Api,
        tokens: &PromptTokens,
        names: Names<'_>,
        prompt: Prompt<'_>,
        output: u32,
    ) -> Bytes {
        let Names { model, user } = names;
        let size = match &prompt {
            // Seven bytes hold an id and a comma, or a word and a space.
            Prompt::Parts(parts) => 7 * parts.iter().map(|part| part.count as usize).sum::<usize>(),
            Prompt::Text(text) => text.len() * 9 / 8,
            Prompt::Turns(turns) => turns.iter().map(|(_, text)| text.len() * 9 / 8 + 40).sum(),
        };
        let mut body = String::with_capacity(256 + model.len() + size);
        body.push_str("{\"model\":");
        push_json(&mut body, model);
        match api {
            Api::Completions => {
                body.push_str(",\"prompt\":");
                push_prompt(&mut body, tokens, prompt);
            }
            Api::Chat => {
                body.push_str(",\"messages\":[");
                push_messages(&mut body, tokens, prompt);
                body.push(']');
            }
        }
        if let Some(user) = user.filter(|_| !self.extra.contains_key("user")) {
            let _ = write!(body, ",\"user\":\"user-{user}\"");
        }
        self.push_rest(&mut body, api, output);
        Bytes::from(body)
    }

    fn push_rest(&self, body: &mut String, api: Api, output: u32) {
        let limit = match api {
            Api::Completions => "max_tokens",
            Api::Chat => "max_completion_tokens",
        };
        if !self.extra.contains_key(limit) {
            let _ = write!(body, ",\"{limit}\":{output}");
        }
        if self.ignore_eos && !self.extra.contains_key("ignore_eos") {
            body.push_str(",\"ignore_eos\":true");
        }
        for (key, value) in &self.extra {
            body.push(',');
            push_json(body, key);
            let _ = write!(body, ":{value}");
        }
        body.push_str(",\"stream\":true,\"stream_options\":{\"include_usage\":true}}");
    }
}

fn push_json(body: &mut String, text: &str) {
    body.push_str(&Value::from(text).to_string());
}

fn push_prompt(body: &mut String, tokens: &PromptTokens, prompt: Prompt<'_>) {
    match (prompt, tokens) {
        (Prompt::Parts(parts), PromptTokens::Ids(range)) => {
            body.push('[');
            let before = body.len();
            match range.len() {
                1 => {
                    let count = parts.iter().map(|part| part.count as usize).sum();
                    *body += &format!("{},", range.start).repeat(count);
                }
                choices => parts.iter_mut().for_each(|part| {
                    (0..part.count).for_each(|_| push_id(body, range.start as usize + part.rng.below(choices)));
                }),
            }
            body.truncate(before.max(body.len().saturating_sub(1)));
            body.push(']');
        }
        (Prompt::Parts(parts), PromptTokens::Words | PromptTokens::Exact(_)) => {
            body.push('"');
            tokens.push_text(body, parts, true);
            body.push('"');
        }
        (Prompt::Text(text), _) => push_json(body, text),
        (Prompt::Turns(turns), _) => {
            let text: String = turns.iter().map(|(_, text)| text.as_str()).collect();
            push_json(body, &text);
        }
    }
}

/// Writes the digits itself: `write!` would take half of the time of a simulation.
fn push_id(body: &mut String, mut id: usize) {
    let mut text = *b"....................,";
    let mut from = text.len() - 1;
    loop {
        from -= 1;
        text[from] = b'0' + (id % 10) as u8;
        id /= 10;
        if id == 0 {
            break;
        }
    }
    body.push_str(str::from_utf8(&text[from..]).unwrap_or_default());
}

fn push_messages(body: &mut String, tokens: &PromptTokens, prompt: Prompt<'_>) {
    let open = |body: &mut String, role: &str, first: bool| {
        let _ = write!(body, "{}{{\"role\":\"{role}\",\"content\":", if first { "" } else { "," });
    };
    match prompt {
        Prompt::Parts(parts) => {
            open(body, "user", true);
            body.push('"');
            tokens.push_text(body, parts, true);
            body.push_str("\"}");
        }
        Prompt::Text(text) => {
            open(body, "user", true);
            push_json(body, text);
            body.push('}');
        }
        Prompt::Turns(turns) => {
            for (place, (role, text)) in turns.iter().enumerate() {
                open(body, role, place == 0);
                push_json(body, text);
                body.push('}');
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use sluice_core::base::Rng;

    fn parts() -> [PromptPart; 2] {
        [PromptPart { rng: Rng::new(1), count: 3 }, PromptPart { rng: Rng::new(2), count: 2 }]
    }

    fn parsed(fields: &BodyFields, api: Api, tokens: &PromptTokens, prompt: Prompt<'_>) -> Value {
        serde_json::from_slice(&fields.body(api, tokens, Names { model: "m\"odel", user: Some(7) }, prompt, 9)).unwrap()
    }

    #[test]
    fn ids_of_any_size_are_written_in_full_and_one_alone_is_repeated() {
        let prompt = |range: Range<u32>, counts: [u32; 2]| {
            let mut parts = [1, 2].map(|seed| PromptPart { rng: Rng::new(seed), count: counts[seed as usize - 1] });
            let body =
                parsed(&BodyFields::default(), Api::Completions, &PromptTokens::Ids(range), Prompt::Parts(&mut parts));
            body["prompt"].as_array().unwrap().iter().map(|id| id.as_u64().unwrap()).collect::<Vec<_>>()
        };
        let mut rng = Rng::new(1);
        let drawn: Vec<u64> = (0..40).map(|_| 5 + rng.below(4_000_000_000) as u64).collect();
        assert_eq!(prompt(5..4_000_000_005, [40, 0]), drawn);
        assert_eq!(prompt(0..1, [2, 1]), [0; 3]);
        assert_eq!(prompt(1_000..1_001, [0, 2]), [1_000; 2]);
        assert!(prompt(1_000..1_001, [0, 0]).is_empty() && prompt(1_000..2_000, [0, 0]).is_empty());
    }

    #[test]
    fn a_completions_body_has_ids_and_a_limit_and_requests_usage() {
        let fields = BodyFields { ignore_eos: true, ..BodyFields::default() };
        let body = parsed(&fields, Api::Completions, &PromptTokens::Ids(10..20), Prompt::Parts(&mut parts()));
        let ids = body["prompt"].as_array().unwrap();
        assert_eq!(ids.len(), 5);
        assert!(ids.iter().all(|id| (10..20).contains(&id.as_u64().unwrap())));
        assert_eq!(
            (&body["max_tokens"], &body["ignore_eos"], &body["stream"]),
            (&9.into(), &true.into(), &true.into())
        );
        assert_eq!((&body["model"], &body["user"]), (&"m\"odel".into(), &"user-7".into()));
        assert_eq!(body["stream_options"]["include_usage"], true);
    }

    #[test]
    fn a_longer_part_of_the_same_generator_begins_with_the_same_tokens() {
        let one = |count| [PromptPart { rng: Rng::new(7), count }];
        let ids = |count| {
            parsed(
                &BodyFields::default(),
                Api::Completions,
                &PromptTokens::Ids(0..9999),
                Prompt::Parts(&mut one(count)),
            )["prompt"]
                .clone()
        };
        assert_eq!(ids(3).as_array().unwrap()[..], ids(5).as_array().unwrap()[..3]);
    }

    #[test]
    fn a_chat_body_has_one_word_for_each_token_or_the_given_turns() {
        let fields = BodyFields::default();
        let body = parsed(&fields, Api::Chat, &PromptTokens::Words, Prompt::Parts(&mut parts()));
        assert_eq!(body["messages"][0]["content"].as_str().unwrap().split(' ').count(), 5);
        assert_eq!(body["max_completion_tokens"], 9);
        assert!(body.get("ignore_eos").is_none());
        let turns = [("user", "a \"b\"".to_owned()), ("assistant", "c".to_owned()), ("user", "d\n".to_owned())];
        let body = parsed(&fields, Api::Chat, &PromptTokens::Words, Prompt::Turns(&turns));
        assert_eq!(body["messages"][0]["content"], "a \"b\"");
        assert_eq!(
            (&body["messages"][1]["role"], &body["messages"][2]["content"]),
            (&"assistant".into(), &"d\n".into())
        );
        let body = parsed(&fields, Api::Completions, &PromptTokens::Words, Prompt::Turns(&turns));
        assert_eq!(body["prompt"], "a \"b\"cd\n");
    }

    #[test]
    fn extra_fields_replace_generated_fields_except_those_that_streaming_needs() {
        let extra = |text: &str| BodyFields { ignore_eos: true, extra: serde_json::from_str(text).unwrap() };
        let fields = extra(r#"{"temperature": 0, "ignore_eos": false, "max_tokens": 3}"#);
        fields.check().unwrap();
        let body = parsed(&fields, Api::Completions, &PromptTokens::Words, Prompt::Text("x"));
        assert_eq!(
            (&body["temperature"], &body["ignore_eos"], &body["max_tokens"]),
            (&0.into(), &false.into(), &3.into())
        );
        assert_eq!(extra(r#"{"stream": false}"#).check(), Err(BenchError::BadExtra("stream")));
    }
}
