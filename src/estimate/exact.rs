//! Exact prompt lengths with the model's own tokenizer, off the request path's threads.
//!
//! Tokenizing costs about a microsecond for each token, so it is done only when a configuration names a tokenizer and the estimate
//! is so near a boundary that it could decide wrongly. It runs on tokio's blocking threads, at most
//! [`MAX_AT_ONCE`] at a time over all requests: when all are busy, or the text is over [`MAX_TEXT`], there is no exact count and the
//! estimate stands. Waiting for a count would be a second queue that nobody bounds.
//!
//! What is counted is the same prompt that the shape is taken of. A conversation also costs template tokens that
//! only the engine knows; they are learned as a moving mean per message: usage minus counted content
//! ([`ExactCounter::learn`]). Media have no count here.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use bytes::Bytes;
use parking_lot::Mutex;
use tokenizers::Tokenizer;
use tokio::sync::Semaphore;

use crate::openai::scan::{Scanner, Text};
use crate::openai::shape::PromptSink;
use crate::openai::{Route, prompt};

/// Counts that run at the same time. They compete with the proxy's own threads for cores.
pub const MAX_AT_ONCE: usize = 2;
/// Bytes of prompt text that are counted; beyond about 250,000 tokens no boundary is near.
pub const MAX_TEXT: usize = 1 << 20;
/// Tokens a chat template is taken to add to each message before anything was learned.
pub const TEMPLATE_PRIOR: f64 = 5.0;
/// Samples that the mean template cost remembers.
const TEMPLATE_MEMORY: f64 = 50.0;
/// Template tokens per message that are believed.
const TEMPLATE_MAX: f64 = 200.0;

/// Why there is no counter.
#[derive(Debug, thiserror::Error)]
pub enum ExactError {
    /// The file is missing or not a tokenizer.
    #[error("cannot use the tokenizer {path}: {why}; give the tokenizer.json of the model")]
    Load {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        why: String,
    },
}

/// A counted prompt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Counted {
    /// Tokens of the text itself.
    pub content: u64,
    /// Messages that a template will wrap.
    pub messages: u64,
    /// Content and template together.
    pub total: u64,
}

/// The tokenizer of one model.
#[derive(Clone)]
pub struct ExactCounter {
    tokenizer: Arc<Tokenizer>,
    permits: Arc<Semaphore>,
    template: Arc<Mutex<Template>>,
}

#[derive(Debug)]
struct Template {
    per_message: f64,
    samples: u64,
}

impl ExactCounter {
    /// Reads a `tokenizer.json`. Blocks; for start-up and reload.
    ///
    /// # Errors
    /// When the file cannot be read or is not a tokenizer.
    pub fn load(path: impl AsRef<Path>) -> Result<Self, ExactError> {
        let path = path.as_ref();
        let tokenizer = Tokenizer::from_file(path)
            .map_err(|error| ExactError::Load { path: path.to_owned(), why: error.to_string() })?;
        Ok(Self {
            tokenizer: Arc::new(tokenizer),
            permits: Arc::new(Semaphore::new(MAX_AT_ONCE)),
            template: Arc::new(Mutex::new(Template { per_message: TEMPLATE_PRIOR, samples: 0 })),
        })
    }

    /// The same tokenizer limited by `permits`, so that several models share one bound.
    pub fn sharing(mut self, permits: Arc<Semaphore>) -> Self {
        self.permits = permits;
        self
    }

    /// Prompt tokens of `body`, template included; `None` when it cannot or should not be counted.
    pub async fn count(&self, route: Route, body: Bytes) -> Option<u64> {
        Some(self.count_parts(route, body).await?.total)
    }

    /// The same, with what [`ExactCounter::learn`] needs.
    pub async fn count_parts(&self, route: Route, body: Bytes) -> Option<Counted> {
        let permit = Arc::clone(&self.permits).try_acquire_owned().ok()?;
        let tokenizer = Arc::clone(&self.tokenizer);
        let counted = tokio::task::spawn_blocking(move || {
            let _permit = permit;
            content(&tokenizer, route, &body)
        });
        let (content, messages) = counted.await.ok()??;
        let template = (self.template.lock().per_message * messages as f64).round() as u64;
        Some(Counted { content, messages, total: content + template })
    }

    /// Learns the template's cost from the usage of a request that was counted.
    pub fn learn(&self, counted: &Counted, prompt_tokens: u64) {
        if counted.messages == 0 || prompt_tokens < counted.content {
            return;
        }
        let cost = (prompt_tokens - counted.content) as f64 / counted.messages as f64;
        let mut template = self.template.lock();
        template.samples += 1;
        let share = 1.0 / (template.samples as f64).min(TEMPLATE_MEMORY);
        let off = cost.min(TEMPLATE_MAX) - template.per_message;
        template.per_message += share * off;
    }
}

impl std::fmt::Debug for ExactCounter {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ExactCounter").field("template", &self.template).finish_non_exhaustive()
    }
}

/// Content tokens and messages of the prompt in `body`.
fn content(tokenizer: &Tokenizer, route: Route, body: &[u8]) -> Option<(u64, u64)> {
    let mut collected = Collected::default();
    let mut prompts = 1;
    let mut scanner = Scanner::new(body);
    let read = scanner.object(|scanner, key| {
        if !prompt::member(scanner, route, &key.bytes(), &mut collected, &mut prompts)? {
            scanner.skip()?;
        }
        Ok::<_, crate::openai::RequestError>(())
    });
    read.ok()?;
    if collected.uncountable {
        return None;
    }
    // A template adds its own special tokens; bare prompts get theirs from the tokenizer, once each.
    let special = collected.messages == 0;
    let mut tokens = collected.token_ids;
    for text in &collected.texts {
        tokens += tokenizer.encode_fast(text.as_str(), special).ok()?.len() as u64;
    }
    Some((tokens, collected.messages))
}

/// Prompt text in pieces, at most [`MAX_TEXT`] bytes of it.
#[derive(Default)]
struct Collected {
    texts: Vec<String>,
    bytes: usize,
    token_ids: u64,
    messages: u64,
    uncountable: bool,
}

impl Collected {
    fn push(&mut self, raw_len: usize, text: impl FnOnce() -> String) {
        self.bytes += raw_len;
        self.uncountable |= self.bytes > MAX_TEXT;
        if !self.uncountable {
            self.texts.push(text());
        }
    }
}

impl PromptSink for Collected {
    fn text(&mut self, text: Text<'_>) {
        self.push(text.raw.len(), || text.decode().into_owned());
    }

    fn json(&mut self, raw: &[u8]) {
        self.push(raw.len(), || String::from_utf8_lossy(raw).into_owned());
    }

    fn token_ids(&mut self, count: u64) {
        self.token_ids += count;
    }

    fn media(&mut self) {
        self.uncountable = true;
    }

    fn message(&mut self) {
        self.messages += 1;
    }
}
