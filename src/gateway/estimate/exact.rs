//! Exact prompt lengths with the model's own tokenizer, outside the threads of the request path.
//!
//! Tokenizing costs about a microsecond per token, so it is done only if the prompt has enough
//! bytes that the estimate may choose the wrong side of a boundary. It runs on tokio's blocking
//! threads, at most [`MAX_AT_ONCE`] counts at a time; a request waits at most [`MAX_WAIT`] for its
//! count to start. If the count does not start in that time, or the text is over [`MAX_TEXT`], the
//! estimate is used.
//!
//! A conversation also costs template tokens that only the engine knows. They are learned as a
//! moving mean per message of the reported usage minus the counted content
//! ([`ExactCounter::learn`]). Prompts with media are not counted.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use parking_lot::Mutex;
use tokenizers::Tokenizer;
use tokio::sync::Semaphore;
use tokio::time::timeout;

use sluice_core::openai::scan::{Scanner, Text};
use sluice_core::openai::shape::PromptSink;
use sluice_core::openai::{Route, prompt};

/// The most counts that run at the same time. They compete with the proxy's threads.
pub const MAX_AT_ONCE: usize = 2;
/// The most bytes of prompt text that are counted. Beyond about 250,000 tokens no boundary is near.
pub const MAX_TEXT: usize = 1 << 20;
/// The longest wait of a request for a permit. In this time, about twenty counts of 5,000 tokens
/// end.
pub const MAX_WAIT: Duration = Duration::from_millis(50);
/// Template tokens per message before any were learned.
pub const TEMPLATE_PRIOR: f64 = 5.0;
/// Samples that the mean template cost remembers.
const TEMPLATE_MEMORY: f64 = 50.0;
/// Lower bound of the learned template tokens per message, because every template separates
/// messages by a token.
const TEMPLATE_MIN: f64 = 1.0;
/// Upper bound of the learned template tokens per message.
const TEMPLATE_MAX: f64 = 200.0;

/// Why a tokenizer cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum ExactError {
    /// The file is missing, or is not a tokenizer.
    #[error("cannot use the tokenizer {path}: {why}; give the tokenizer.json of the model")]
    Load {
        /// The file.
        path: PathBuf,
        /// The reason.
        why: String,
    },
}

/// A counted prompt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Counted {
    /// Tokens of the text itself.
    pub content: u64,
    /// Messages that a template wraps.
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
    /// Reads a `tokenizer.json`; blocks. Counts run within `permits`, which all counters of a
    /// process share.
    ///
    /// # Errors
    /// The file cannot be read, or is not a tokenizer.
    pub fn load(path: impl AsRef<Path>, permits: Arc<Semaphore>) -> Result<Self, ExactError> {
        let path = path.as_ref();
        let tokenizer = Tokenizer::from_file(path)
            .map_err(|error| ExactError::Load { path: path.to_owned(), why: error.to_string() })?;
        Ok(Self {
            tokenizer: Arc::new(tokenizer),
            permits,
            template: Arc::new(Mutex::new(Template { per_message: TEMPLATE_PRIOR, samples: 0 })),
        })
    }

    /// Permits for [`MAX_AT_ONCE`] counts.
    pub fn new_permits() -> Arc<Semaphore> {
        Arc::new(Semaphore::new(MAX_AT_ONCE))
    }

    /// The permits for counts.
    pub fn permits(&self) -> Arc<Semaphore> {
        Arc::clone(&self.permits)
    }

    /// This tokenizer with the template cost that another counter of the same model has learned.
    pub fn continuing(mut self, before: &Self) -> Self {
        self.template = Arc::clone(&before.template);
        self
    }

    /// Whether this counter and another one learn the same template cost.
    pub fn has_template_of(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.template, &other.template)
    }

    /// Counts the prompt of `body` with the template; `None` if it cannot be counted within the
    /// bounds.
    pub async fn count(&self, route: Route, body: Bytes) -> Option<Counted> {
        let permit = timeout(MAX_WAIT, Arc::clone(&self.permits).acquire_owned()).await.ok()?.ok()?;
        let tokenizer = Arc::clone(&self.tokenizer);
        let counted = tokio::task::spawn_blocking(move || {
            let _permit = permit;
            content(&tokenizer, route, &body)
        });
        let (content, messages) = counted.await.ok()??;
        let template = (self.template.lock().per_message * messages as f64).round() as u64;
        Some(Counted { content, messages, total: content + template })
    }

    /// Learns the template cost from the usage of a counted request.
    pub fn learn(&self, counted: &Counted, prompt_tokens: u64) {
        if counted.messages == 0 || prompt_tokens < counted.content {
            return;
        }
        let cost = (prompt_tokens - counted.content) as f64 / counted.messages as f64;
        let mut template = self.template.lock();
        template.samples += 1;
        let share = 1.0 / (template.samples as f64).min(TEMPLATE_MEMORY);
        let off = cost.clamp(TEMPLATE_MIN, TEMPLATE_MAX) - template.per_message;
        template.per_message += share * off;
    }
}

impl std::fmt::Debug for ExactCounter {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ExactCounter").field("template", &self.template).finish_non_exhaustive()
    }
}

fn content(tokenizer: &Tokenizer, route: Route, body: &[u8]) -> Option<(u64, u64)> {
    let mut collected = Collected::default();
    let mut prompts = 1;
    let mut scanner = Scanner::new(body);
    let read = scanner.object(|scanner, key| {
        let key = key.bytes();
        if !prompt::member(scanner, route, &key, &mut collected, &mut prompts)? {
            prompt::other(scanner, &key, &mut collected)?;
        }
        Ok::<_, sluice_core::openai::RequestError>(())
    });
    read.ok()?;
    if collected.uncountable {
        return None;
    }
    // A template adds special tokens itself; a bare prompt gets them from the tokenizer.
    let special = collected.messages == 0;
    let mut tokens = collected.token_ids;
    for text in &collected.texts {
        tokens += tokenizer.encode_fast(text.as_str(), special).ok()?.len() as u64;
    }
    Some((tokens, collected.messages))
}

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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::estimate::PromptEstimator;
    use serde_json::json;
    use sluice_core::base::Rng;
    use sluice_core::openai::request;

    const TOKENIZER: &str = "../../tests/fixtures/tiny/tokenizer.json";

    #[tokio::test]
    async fn prompts_of_all_shapes_are_counted() {
        let counter = ExactCounter::load(TOKENIZER, ExactCounter::new_permits()).unwrap();
        let tokenizer = Tokenizer::from_file(TOKENIZER).unwrap();
        let direct = |text: &str| tokenizer.encode(text, false).unwrap().len() as u64;
        let text = "a \"quoted\" line\nand caf\u{e9} \u{6f22}\u{5b57}";
        let count = async |route, body: serde_json::Value| {
            counter.count(route, body.to_string().into()).await.map(|counted| counted.total)
        };
        assert_eq!(count(Route::Completions, json!({"prompt": text})).await, Some(direct(text)));
        assert_eq!(count(Route::Completions, json!({"prompt": [text, "b"]})).await, Some(direct(text) + direct("b")));
        assert_eq!(count(Route::Completions, json!({"prompt": [[1, 2], [3]]})).await, Some(3));
        let messages = json!({"messages": [{"role": "user", "content": text}, {"role": "user", "content": [{"type": "text", "text": "b"}]}]});
        assert_eq!(count(Route::ChatCompletions, messages).await, Some(direct(text) + direct("b") + 10));
        let image = json!({"messages": [{"content": [{"type": "image_url", "image_url": {"url": "x"}}]}]});
        assert_eq!(count(Route::ChatCompletions, image).await, None);
        assert_eq!(count(Route::Completions, json!({"prompt": "x".repeat(MAX_TEXT + 1)})).await, None);
        assert_eq!(counter.count(Route::Completions, Bytes::from_static(b"{")).await, None);
    }

    #[tokio::test(start_paused = true)]
    async fn over_the_bound_there_is_no_count_and_a_short_wait() {
        let start = tokio::time::Instant::now();
        let counter = ExactCounter::load(TOKENIZER, Arc::new(Semaphore::new(0))).unwrap();
        assert_eq!(counter.count(Route::Completions, Bytes::from_static(b"{\"prompt\":\"a\"}")).await, None);
        assert!(start.elapsed() < 2 * MAX_WAIT, "{:?}", start.elapsed());
    }

    #[tokio::test]
    async fn the_template_s_cost_is_learned() {
        let counter = ExactCounter::load(TOKENIZER, ExactCounter::new_permits()).unwrap();
        let body = Bytes::from_static(br#"{"messages":[{"content":"a b"},{"content":"c"}]}"#);
        for _ in 0..20 {
            let counted = counter.count(Route::ChatCompletions, body.clone()).await.unwrap();
            counter.learn(&counted, counted.content + 2 * 9);
        }
        let counted = counter.count(Route::ChatCompletions, body).await.unwrap();
        assert_eq!(counted.total, counted.content + 18);
    }

    #[test]
    fn the_error_for_a_missing_file_has_its_path() {
        let message =
            ExactCounter::load("no/such/tokenizer.json", ExactCounter::new_permits()).unwrap_err().to_string();
        assert!(message.starts_with("cannot use the tokenizer no/such/tokenizer.json: "), "{message}");
    }

    fn sample(kind: usize, rng: &mut Rng) -> String {
        let english = "the of and to in is that for it was on are as with they at be this from have or by one had not but what all were when we there can an your which their said if do will each about how up out them then she many some so these would other into has more her two like him see time could no make than first been its who now people my made over did down only way find use may water long little very after words called just where most know";
        let cjk: Vec<char> = "\u{7684}\u{4e00}\u{662f}\u{4e0d}\u{4e86}\u{4eba}\u{6211}\u{5728}\u{6709}\u{4ed6}\u{8fd9}\u{4e2d}\u{5927}\u{6765}\u{4e0a}\u{56fd}\u{3002}\u{ff0c}\u{3053}\u{308c}\u{306f}\u{3067}\u{3059}".chars().collect();
        let code = [
            "fn main() {\n",
            "    let x = 1;\n",
            "    return x + 2;\n",
            "}\n",
            "if (a == b) {\n",
            "for i in 0..n {\n",
            "# comment\n",
            "self.value = None\n",
        ];
        let words: Vec<&str> = english.split(' ').collect();
        let count = 30 + rng.below(400);
        (0..count)
            .map(|_| match kind {
                0 => format!("{} ", words[rng.below(words.len())]),
                1 => cjk[rng.below(cjk.len())].to_string(),
                2 => code[rng.below(code.len())].to_owned(),
                _ => format!("{}, ", rng.below(100_000)),
            })
            .collect()
    }

    /// The mean relative error over 50 new prompts, after each of these numbers of learned prompts.
    fn errors_after(tokenizer: &Tokenizer, learned: &[usize], kinds: &[usize]) -> Vec<f64> {
        let (mut rng, mut ratio, mut seen) = (Rng::new(11), PromptEstimator::default(), 0);
        let mut next = || {
            let text = sample(kinds[rng.below(kinds.len())], &mut rng);
            let body = json!({"prompt": text}).to_string();
            let shape = request::read(Route::Completions, body.as_bytes()).unwrap().shape;
            (shape, tokenizer.encode_fast(text, false).unwrap().len() as u64)
        };
        let mut errors = Vec::new();
        for learned in learned {
            while seen < *learned {
                let (shape, actual) = next();
                ratio.learn(&shape, actual);
                seen += 1;
            }
            let off = |(shape, actual): (_, u64)| (ratio.estimate(&shape, 0).tokens as f64 / actual as f64 - 1.0).abs();
            errors.push((0..50).map(|_| off(next())).sum::<f64>() / 50.0);
        }
        errors
    }

    #[test]
    fn estimates_are_near_the_counts_of_a_real_tokenizer() {
        let tokenizer = Tokenizer::from_file(TOKENIZER).unwrap();
        let kinds =
            [("english", &[0][..]), ("cjk", &[1]), ("code", &[2]), ("digits", &[3]), ("all four", &[0, 1, 2, 3])];
        for (name, kinds) in kinds {
            let errors = errors_after(&tokenizer, &[0, 50, 200], kinds);
            println!("{name}: mean relative error {errors:.3?} after 0, 50 and 200 samples");
            let bound = if kinds.len() == 1 { 0.03 } else { 0.15 };
            assert!(errors[1] < bound && errors[2] < bound, "{name}: {errors:?}");
        }
    }
}
