//! What is asked of the server: classes of requests, their lengths, and the prompts themselves.
//!
//! A workload is a set of classes ("short": 200 prompt tokens and 128 output tokens, weight 30).
//! Request number `n` of a workload, that is its class, both lengths and every token of its prompt,
//! is a pure function of (seed, n). It does not depend on when or in which order requests are sent,
//! so several arrangements of servers can be given exactly the same questions.
//!
//! On `/v1/completions` prompts are lists of token ids: their length is exact without a tokenizer,
//! here and in whatever stands in between. The ids are drawn uniformly, so no two prompts share a
//! prefix worth caching. On `/v1/chat/completions` a prompt must be text: one common short word for
//! each token, which is near the truth for English models but not exact; what the server reports
//! in `usage` is what counts.
//!
//! `ignore_eos` is always set: the output length is part of the question, not of the model's mood.

use std::fmt::Write as _;
use std::ops::Range;

use bytes::Bytes;

use super::{BenchError, Purpose, stream};
use crate::base::Rng;

/// Which API the requests use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Api {
    /// `/v1/completions` with token-id prompts.
    Completions,
    /// `/v1/chat/completions` with text.
    Chat,
}

impl Api {
    /// The path requests go to.
    pub fn path(self) -> &'static str {
        match self {
            Self::Completions => "/v1/completions",
            Self::Chat => "/v1/chat/completions",
        }
    }
}

/// A number of tokens, fixed or drawn for each request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Length {
    /// Always this many.
    Exactly(u32),
    /// Uniform over the integers from `min` to `max`, both included.
    Between {
        /// The smallest length.
        min: u32,
        /// The largest length.
        max: u32,
    },
}

impl Length {
    fn is_possible(self) -> bool {
        match self {
            Self::Exactly(tokens) => tokens > 0,
            Self::Between { min, max } => min > 0 && min <= max,
        }
    }

    fn draw(self, rng: &mut Rng) -> u32 {
        match self {
            Self::Exactly(tokens) => tokens,
            Self::Between { min, max } => {
                let span = u64::from(max - min) + 1;
                let offset = (u128::from(rng.next_u64()) * u128::from(span)) >> 64;
                min + u32::try_from(offset).unwrap_or(0)
            }
        }
    }
}

/// One kind of request.
#[derive(Clone, Debug, PartialEq)]
pub struct Class {
    /// How reports call it.
    pub name: String,
    /// Prompt length in tokens.
    pub prompt: Length,
    /// Output length in tokens.
    pub output: Length,
    /// Share of the requests, relative to the other classes' weights. Above 0.
    pub weight: f64,
}

/// The requests of a run.
#[derive(Clone, Debug, PartialEq)]
pub struct Workload {
    /// What goes into `"model"`.
    pub model: String,
    /// Which API to call.
    pub api: Api,
    /// The kinds of requests; a class is named by its index here.
    pub classes: Vec<Class>,
    /// Token ids that prompts are made of: first, and one after the last.
    pub vocabulary: Range<u32>,
    /// Where all randomness comes from.
    pub seed: u64,
}

/// One request, ready to be sent.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Question {
    /// Index into [`Workload::classes`].
    pub class: usize,
    /// Prompt tokens asked for (exact for token ids).
    pub prompt_tokens: u32,
    /// Output tokens asked for.
    pub output_tokens: u32,
    /// The JSON body.
    pub body: Bytes,
}

impl Workload {
    /// Checks that every request of this workload can be made.
    ///
    /// # Errors
    /// The first class, weight, length or vocabulary that makes no sense.
    pub fn check(&self) -> Result<(), BenchError> {
        if self.classes.is_empty() {
            return Err(BenchError::NoClasses);
        }
        if self.vocabulary.is_empty() {
            return Err(BenchError::EmptyVocabulary(self.vocabulary.start, self.vocabulary.end));
        }
        for class in &self.classes {
            if !(class.weight.is_finite() && class.weight > 0.0) {
                return Err(BenchError::BadWeight(class.name.clone(), class.weight));
            }
            for (length, what) in [(class.prompt, "prompt"), (class.output, "output")] {
                if !length.is_possible() {
                    return Err(BenchError::BadLength(class.name.clone(), what));
                }
            }
        }
        Ok(())
    }

    /// The class of request number `ordinal`, drawn by weight.
    pub fn class_of(&self, ordinal: u64) -> usize {
        let total: f64 = self.classes.iter().map(|class| class.weight).sum();
        let mut left = stream(self.seed, Purpose::Class, ordinal).unit() * total;
        for (index, class) in self.classes.iter().enumerate() {
            left -= class.weight;
            if left < 0.0 {
                return index;
            }
        }
        self.classes.len().saturating_sub(1)
    }

    /// Request number `ordinal`.
    pub fn question(&self, ordinal: u64) -> Question {
        self.question_in(self.class_of(ordinal), ordinal)
    }

    /// Request number `ordinal` as it would be in the class with index `class` (for warming up).
    ///
    /// # Panics
    /// When there is no such class.
    pub fn question_in(&self, class: usize, ordinal: u64) -> Question {
        let mut rng = stream(self.seed, Purpose::Prompt, ordinal);
        let shape = &self.classes[class];
        let prompt_tokens = shape.prompt.draw(&mut rng);
        let output_tokens = shape.output.draw(&mut rng);
        let body = self.body(&mut rng, prompt_tokens, output_tokens);
        Question { class, prompt_tokens, output_tokens, body }
    }

    fn body(&self, rng: &mut Rng, prompt_tokens: u32, output_tokens: u32) -> Bytes {
        // Seven bytes hold an id and its comma, or a word and its blank.
        let mut body = String::with_capacity(256 + self.model.len() + 7 * prompt_tokens as usize);
        body.push_str("{\"model\":");
        body.push_str(&serde_json::Value::from(self.model.as_str()).to_string());
        let limit = match self.api {
            Api::Completions => {
                body.push_str(",\"prompt\":[");
                self.push_ids(&mut body, rng, prompt_tokens);
                body.push(']');
                "max_tokens"
            }
            Api::Chat => {
                body.push_str(",\"messages\":[{\"role\":\"user\",\"content\":\"");
                push_words(&mut body, rng, prompt_tokens);
                body.push_str("\"}]");
                "max_completion_tokens"
            }
        };
        // Writing to a String cannot fail.
        let _ = write!(
            body,
            ",\"{limit}\":{output_tokens},\"temperature\":0,\"ignore_eos\":true,\"stream\":true,\
             \"stream_options\":{{\"include_usage\":true}}}}"
        );
        Bytes::from(body)
    }

    fn push_ids(&self, body: &mut String, rng: &mut Rng, count: u32) {
        for position in 0..count {
            if position > 0 {
                body.push(',');
            }
            let id = self.vocabulary.start as usize + rng.below(self.vocabulary.len());
            let _ = write!(body, "{id}");
        }
    }
}

/// Words that tokenizers of the common English models keep in one piece when a blank stands before.
const WORDS: [&str; 32] = [
    "the", "time", "of", "year", "people", "way", "day", "man", "thing", "woman", "life", "child", "world", "school",
    "state", "family", "group", "country", "hand", "part", "place", "case", "week", "company", "system", "number",
    "night", "point", "home", "water", "room", "money",
];

fn push_words(body: &mut String, rng: &mut Rng, count: u32) {
    for position in 0..count {
        if position > 0 {
            body.push(' ');
        }
        body.push_str(WORDS[rng.below(WORDS.len())]);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mixed(api: Api) -> Workload {
        let class = |name: &str, prompt, output, weight| Class { name: name.into(), prompt, output, weight };
        Workload {
            model: "m\"odel".into(),
            api,
            classes: vec![
                class("short", Length::Exactly(20), Length::Exactly(8), 15.0),
                class("long", Length::Between { min: 300, max: 310 }, Length::Exactly(4), 1.0),
            ],
            vocabulary: 1_000..100_000,
            seed: 7,
        }
    }

    #[test]
    fn a_question_is_a_function_of_seed_and_number() {
        let workload = mixed(Api::Completions);
        assert_eq!(workload.question(41), workload.question(41));
        assert_ne!(workload.question(41).body, workload.question(42).body);
        let other = Workload { seed: 8, ..workload.clone() };
        assert_ne!(workload.question(41).body, other.question(41).body);
    }

    #[test]
    fn token_id_prompts_have_exactly_the_length_asked_for_and_stay_in_the_vocabulary() {
        let workload = mixed(Api::Completions);
        for ordinal in 0..200 {
            let question = workload.question(ordinal);
            let body: serde_json::Value = serde_json::from_slice(&question.body).unwrap();
            let ids = body["prompt"].as_array().unwrap();
            assert_eq!(ids.len(), question.prompt_tokens as usize);
            assert!(ids.iter().all(|id| (1_000..100_000).contains(&id.as_u64().unwrap())));
            assert_eq!(body["max_tokens"], question.output_tokens);
            assert_eq!(body["model"], "m\"odel");
            assert_eq!(body["ignore_eos"], true);
            let range = if question.class == 0 { 20..=20 } else { 300..=310 };
            assert!(range.contains(&question.prompt_tokens));
        }
    }

    #[test]
    fn chat_prompts_are_one_word_for_each_token() {
        let question = mixed(Api::Chat).question(3);
        let body: serde_json::Value = serde_json::from_slice(&question.body).unwrap();
        let text = body["messages"][0]["content"].as_str().unwrap();
        assert_eq!(text.split(' ').count(), question.prompt_tokens as usize);
    }

    #[test]
    fn classes_come_in_the_proportion_of_their_weights() {
        let workload = mixed(Api::Completions);
        let long = (0..16_000).filter(|ordinal| workload.class_of(*ordinal) == 1).count();
        assert!((900..1_100).contains(&long), "{long} of 16000 are long, 1000 expected");
    }

    #[test]
    fn a_workload_that_makes_no_sense_is_refused_by_name() {
        let mut workload = mixed(Api::Completions);
        workload.classes[1].weight = 0.0;
        assert_eq!(workload.check(), Err(BenchError::BadWeight("long".into(), 0.0)));
        workload.classes[1].weight = 1.0;
        workload.classes[1].prompt = Length::Between { min: 5, max: 4 };
        assert_eq!(workload.check(), Err(BenchError::BadLength("long".into(), "prompt")));
        workload.classes.clear();
        assert_eq!(workload.check(), Err(BenchError::NoClasses));
    }
}
