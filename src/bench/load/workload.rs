//! The requests of a run: request number `n` is a pure function of (seed, n).
//!
//! A workload has *classes* ("short": 200 prompt tokens, 128 output tokens, weight 30) or *items*
//! read from a file (`dataset`). With classes, each request draws a class by weight, then two
//! lengths. Requests do not depend on when or in which order they are sent, so several
//! configurations can be tested with the same requests.
//!
//! A shared prefix of kind `Extra` is added before a prompt of the class's length
//! (`--random-prefix-len`). A prefix of kind `Share` replaces the first part of the prompt. With
//! `Share(0.6)`, the server should find 60 % of the prompt tokens in the prefix cache, except at
//! the first use of a prefix. The cache holds blocks of [`BLOCK`] tokens, so a `Share` prefix is
//! rounded to whole blocks, up or down at random, so that the mean stays exact. `run::scrape`
//! measures the real hit rate. Bounds: [`MAX_REQUESTS`](super::arrival::MAX_REQUESTS).

use std::fmt;
use std::sync::Arc;

use bytes::Bytes;

use crate::error::BenchError;
use crate::load::adapters::{Adapters, pick};
use crate::load::body::{Api, BodyFields, Names, Prompt, PromptPart, PromptTokens};
use crate::load::dataset::{Item, ItemPrompt, Items};
use crate::load::length::Length;
use crate::result::record::{ClassConfig, Slo};
use crate::seed::{Purpose, rng_for};
use sluice_core::base::Rng;

/// Default tokens in a block of vLLM's prefix cache.
pub const BLOCK: u32 = 16;

/// One kind of request.
#[derive(Clone, Debug, PartialEq)]
pub struct Class {
    /// Name in reports.
    pub name: String,
    /// Prompt length in tokens.
    pub prompt: Length,
    /// Output length in tokens.
    pub output: Length,
    /// Weight relative to the other classes. Above 0.
    pub weight: f64,
    /// The prefix that prompts share.
    pub prefix: Prefix,
    /// Objectives of the class; if empty, the objectives of the run apply.
    pub slo: Slo,
}

/// The prefix that prompts of a class share.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Prefix {
    /// The length.
    pub kind: PrefixKind,
    /// Number of different prefixes, at least 1. All are equally likely.
    pub groups: u32,
    /// Share of the requests with a shared prefix, 0 to 1.
    pub warm: f64,
}

/// The length of a shared prefix.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub enum PrefixKind {
    /// Nothing is shared.
    #[default]
    None,
    /// This many tokens before a prompt of the class's length.
    Extra(u32),
    /// This share of the prompt, 0 to 1.
    Share(f64),
}

impl fmt::Display for Prefix {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.kind {
            PrefixKind::None => return Ok(()),
            PrefixKind::Extra(tokens) => write!(f, "{tokens} tokens more")?,
            PrefixKind::Share(share) => write!(f, "{} % of the prompt", share * 100.0)?,
        }
        write!(f, ", {} of them", self.groups)?;
        if self.warm < 1.0 { write!(f, ", for {} % of the prompts", self.warm * 100.0) } else { Ok(()) }
    }
}

impl Default for Prefix {
    fn default() -> Self {
        Self { kind: PrefixKind::None, groups: 1, warm: 1.0 }
    }
}

/// The source of requests.
#[derive(Clone, Debug, PartialEq)]
pub enum RequestSource {
    /// Classes, drawn by weight. Records refer to classes by index.
    Classes(Vec<Class>),
    /// Read from a file.
    Items(Arc<Items>),
}

/// The requests of a run.
#[derive(Clone, Debug, PartialEq)]
pub struct Workload {
    /// The `"model"` of requests without an adapter.
    pub model: String,
    /// The API to call.
    pub api: Api,
    /// The source of requests.
    pub source: RequestSource,
    /// The mix of adapters.
    pub adapters: Adapters,
    /// The form of generated prompts: token ids or text. Chats need text.
    pub tokens: PromptTokens,
    /// Other fields of the body.
    pub fields: BodyFields,
    /// Share of the requests whose client leaves early, 0 to 1.
    pub leaving: f64,
    /// Number of different users that requests name in `user`; 0 for requests without `user`.
    pub users: u32,
    /// Seed of all randomness.
    pub seed: u64,
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct Sender {
    pub(crate) adapter: Option<u32>,
    pub(crate) user: Option<u32>,
}

/// One request, ready to be sent.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct LoadRequest {
    /// Index of the class.
    pub class: u32,
    /// Index of the adapter.
    pub adapter: Option<u32>,
    /// Conversation and turn.
    pub session: Option<(u64, u32)>,
    /// Prompt tokens (exact for token ids).
    pub prompt_tokens: u32,
    /// Whether the prompt was generated to have `prompt_tokens`. The prompts of a file are counted
    /// or estimated.
    pub generated: bool,
    /// Requested output tokens.
    pub output_tokens: u32,
    /// Number of token events after which the client leaves.
    pub leave_after: Option<u32>,
    /// Whether the text of the response is kept.
    pub keep_text: bool,
    /// The shared beginning of the prompt, as segments with id and number of tokens. Equal segments
    /// have equal tokens. The rest of the prompt is unique.
    pub shared: Vec<(u64, u32)>,
    /// The JSON body.
    pub body: Bytes,
}

impl Workload {
    /// Completion requests of `classes` for `model`, with token ids as prompts and other defaults.
    pub fn of_classes(model: &str, classes: Vec<Class>, seed: u64) -> Self {
        Self {
            model: model.to_owned(),
            api: Api::Completions,
            source: RequestSource::Classes(classes),
            adapters: Adapters::default(),
            tokens: PromptTokens::Ids(1_000..8_000),
            fields: BodyFields { ignore_eos: true, ..BodyFields::default() },
            leaving: 0.0,
            users: 0,
            seed,
        }
    }

    /// Checks that every request can be built.
    pub fn check(&self) -> Result<(), BenchError> {
        match &self.tokens {
            PromptTokens::Ids(range) if range.is_empty() => {
                return Err(BenchError::EmptyVocabulary(range.start, range.end));
            }
            PromptTokens::Ids(_) if self.api == Api::Chat => return Err(BenchError::IdsInChat),
            _ => {}
        }
        self.adapters.check()?;
        self.fields.check()?;
        if !(0.0..=1.0).contains(&self.leaving) {
            return Err(BenchError::BadShare("clients that leave", self.leaving));
        }
        match &self.source {
            RequestSource::Classes(classes) if classes.is_empty() => Err(BenchError::NoClasses),
            RequestSource::Classes(classes) => classes.iter().try_for_each(Class::check),
            RequestSource::Items(items) if items.list.is_empty() => Err(BenchError::NoClasses),
            RequestSource::Items(_) => Ok(()),
        }
    }

    /// The classes, for a result.
    pub fn class_configs(&self) -> Vec<ClassConfig> {
        match &self.source {
            RequestSource::Classes(classes) => classes
                .iter()
                .map(|class| ClassConfig {
                    name: class.name.clone(),
                    weight: class.weight,
                    slo: class.slo,
                    prompt: class.prompt.to_string(),
                    output: class.output.to_string(),
                    prefix: class.prefix.to_string(),
                })
                .collect(),
            RequestSource::Items(items) => items.classes.clone(),
        }
    }

    /// The class of request number `ordinal`.
    pub fn class_of(&self, ordinal: u64) -> u32 {
        match &self.source {
            RequestSource::Classes(classes) => {
                let unit = rng_for(self.seed, Purpose::Class, ordinal).unit();
                pick(unit, classes.iter().map(|class| class.weight)) as u32
            }
            RequestSource::Items(items) => items.at(ordinal).class,
        }
    }

    /// Request number `ordinal`.
    pub fn request(&self, ordinal: u64) -> LoadRequest {
        match &self.source {
            RequestSource::Classes(_) => self.request_in_class(self.class_of(ordinal), ordinal),
            RequestSource::Items(items) => self.item_request(items.at(ordinal), ordinal),
        }
    }

    /// Request number `ordinal` in the class at index `class`, for warm-up. An item keeps the class
    /// of the file.
    ///
    /// # Panics
    /// Requests are generated and there is no such class.
    pub fn request_in_class(&self, class: u32, ordinal: u64) -> LoadRequest {
        let RequestSource::Classes(classes) = &self.source else { return self.request(ordinal) };
        let shape = &classes[class as usize];
        let mut rng = rng_for(self.seed, Purpose::Prompt, ordinal);
        let length = shape.prompt.draw(&mut rng);
        let output = shape.output.draw(&mut rng);
        let (text, mut parts) = shape.prefix.parts(self.seed, class, ordinal, length, rng);
        let shared = vec![(text, parts[0].count)];
        let request = self.generated_request(class, self.adapters.of(self.seed, ordinal), ordinal, &mut parts, output);
        LoadRequest { shared, ..request }
    }

    fn item_request(&self, item: &Item, ordinal: u64) -> LoadRequest {
        let adapter = item.adapter.or_else(|| self.adapters.of(self.seed, ordinal));
        match &item.prompt {
            ItemPrompt::Text { text, tokens } => {
                let text = Prompt::Text(text);
                let sender = Sender { adapter, user: self.user_of(ordinal) };
                self.build_request(item.class, sender, ordinal, (*tokens, item.output), text)
            }
            ItemPrompt::Made { tokens, blocks, block } => {
                let mut parts = block_parts(self.seed, ordinal, *tokens, blocks, *block);
                let shared = blocks.iter().copied().zip(parts.iter().map(|part| part.count)).collect();
                let request = self.generated_request(item.class, adapter, ordinal, &mut parts, item.output);
                LoadRequest { shared, ..request }
            }
        }
    }

    fn generated_request(
        &self,
        class: u32,
        adapter: Option<u32>,
        ordinal: u64,
        parts: &mut [PromptPart],
        output: u32,
    ) -> LoadRequest {
        let tokens = parts.iter().map(|part| part.count).sum();
        let sender = Sender { adapter, user: self.user_of(ordinal) };
        self.build_request(class, sender, ordinal, (tokens, output), Prompt::Parts(parts))
    }

    pub(crate) fn build_request(
        &self,
        class: u32,
        sender: Sender,
        ordinal: u64,
        lengths: (u32, u32),
        prompt: Prompt<'_>,
    ) -> LoadRequest {
        let Sender { adapter, user } = sender;
        let model = adapter.and_then(|index| self.adapters.names.get(index as usize)).unwrap_or(&self.model);
        let (prompt_tokens, output_tokens) = lengths;
        LoadRequest {
            class,
            adapter,
            session: None,
            prompt_tokens,
            generated: matches!(prompt, Prompt::Parts(_)),
            output_tokens,
            leave_after: self.leave_after(ordinal, output_tokens),
            keep_text: false,
            shared: Vec::new(),
            body: self.fields.body(self.api, &self.tokens, Names { model, user }, prompt, output_tokens),
        }
    }

    pub(crate) fn user_of(&self, ordinal: u64) -> Option<u32> {
        let users = self.users as usize;
        (users > 0).then(|| rng_for(self.seed, Purpose::User, ordinal).below(users) as u32)
    }

    fn leave_after(&self, ordinal: u64, output: u32) -> Option<u32> {
        let mut rng = rng_for(self.seed, Purpose::Leave, ordinal);
        (rng.unit() < self.leaving).then(|| rng.below(output as usize) as u32)
    }
}

impl Class {
    /// A class without a shared prefix and without objectives.
    pub fn new(name: &str, prompt: Length, output: Length, weight: f64) -> Self {
        Self { name: name.to_owned(), prompt, output, weight, prefix: Prefix::default(), slo: Slo::default() }
    }

    fn check(&self) -> Result<(), BenchError> {
        if !(self.weight.is_finite() && self.weight > 0.0) {
            return Err(BenchError::BadWeight(self.name.clone(), self.weight));
        }
        for (length, what) in [(self.prompt, "prompt"), (self.output, "output")] {
            if !length.is_possible() {
                return Err(BenchError::BadLength(self.name.clone(), what));
            }
        }
        let Prefix { kind, groups, warm } = self.prefix;
        let share = if let PrefixKind::Share(share) = kind { share } else { 0.0 };
        for (what, share) in [("the prefix", share), ("requests with a prefix", warm)] {
            if !(0.0..=1.0).contains(&share) {
                return Err(BenchError::BadShare(what, share));
            }
        }
        if groups == 0 { Err(BenchError::NoPrefixGroups(self.name.clone())) } else { Ok(()) }
    }
}

impl Prefix {
    /// The segment id of the shared prefix, and the two parts of a prompt of `length` tokens: the
    /// prefix, and the rest, drawn from `own`. With [`PrefixKind::Extra`], the rest alone has
    /// `length` tokens.
    pub(super) fn parts(self, seed: u64, class: u32, ordinal: u64, length: u32, own: Rng) -> (u64, [PromptPart; 2]) {
        let mut rng = rng_for(seed, Purpose::Prefix, ordinal);
        let group = rng.below(self.groups as usize) as u64;
        let warm = rng.unit() < self.warm;
        let (shared, rest) = match self.kind {
            PrefixKind::Extra(tokens) if warm => (tokens, length),
            PrefixKind::Share(share) if warm => {
                let blocks = f64::from(length) * share / f64::from(BLOCK);
                let up = u32::from(rng.unit() < blocks.fract());
                let shared = ((blocks as u32 + up) * BLOCK).min(length);
                (shared, length - shared)
            }
            _ => (0, length),
        };
        let text = u64::from(class) << 32 | group;
        let common = rng_for(seed, Purpose::Common, text);
        (text, [PromptPart { rng: common, count: shared }, PromptPart { rng: own, count: rest }])
    }
}

fn block_parts(seed: u64, ordinal: u64, tokens: u32, blocks: &[u64], block: u32) -> Vec<PromptPart> {
    let mut parts = Vec::with_capacity(blocks.len() + 1);
    let mut left = tokens;
    for id in blocks {
        let count = left.min(block);
        parts.push(PromptPart { rng: rng_for(seed, Purpose::Common, *id), count });
        left -= count;
    }
    parts.push(PromptPart { rng: rng_for(seed, Purpose::Prompt, ordinal), count: left });
    parts
}

#[cfg(test)]
mod tests;
