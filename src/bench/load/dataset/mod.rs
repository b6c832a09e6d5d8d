//! Requests read from files: conversations, published traces, and the gateway's own access log.
//!
//! | name | file | gives |
//! |---|---|---|
//! | `sharegpt` | JSON array (or lines) of `conversations` | first question as text, length of the first answer |
//! | `custom` | JSON lines with `prompt`, `output_tokens` | text |
//! | `burstgpt` | CSV with `Timestamp`, `Request tokens`, `Response tokens`; a class for each `Model` | lengths, moments |
//! | `azure` | CSV `TIMESTAMP,ContextTokens,GeneratedTokens` | lengths, moments |
//! | `mooncake` | JSON lines, `timestamp` in ms, blocks of 512 tokens | lengths, moments, shared prefixes |
//! | `timed_trace` | the same with other units, blocks and key names | lengths, moments, shared prefixes |
//! | `access_log` | the gateway's access log | lengths, moments, adapters |
//!
//! Traces hold no prompts, only lengths: prompts are made up, and where a trace names the blocks of a prompt, equal names
//! become equal tokens, so that prefixes are shared as they were. Moments are seconds from the first request of the file.
//!
//! Lengths of texts need a tokenizer. With one they are exact; without, [`BYTES_PER_TOKEN`] bytes are taken for a token,
//! which is the usual ratio for English, and only decides which conversations are kept and how long answers may get.
//!
//! Bounds: files up to [`MAX_FILE`] bytes, [`MAX_ITEMS`] requests. A row that cannot be read is an error with its line;
//! a file is not what it says, and half of a trace is not that trace.

mod records;
mod text;
mod trace;

use std::path::Path;
use std::sync::Arc;

use crate::result::record::ClassConfig;
use crate::seed::{Purpose, stream};

pub use text::Counter;
pub use trace::Labels;

/// The longest file that is read, bytes: the larger BurstGPT file has 250 MB.
pub const MAX_FILE: u64 = 4 << 30;
/// The most requests kept of a file.
pub const MAX_ITEMS: usize = 10_000_000;
/// Bytes taken for one token where there is no tokenizer.
pub const BYTES_PER_TOKEN: usize = 4;

/// One request of a file.
#[derive(Clone, Debug, PartialEq)]
pub struct Item {
    /// When it arrived, seconds from the first of the file; nothing where the file has no moments.
    pub at: Option<f64>,
    /// Index into [`Items::classes`].
    pub class: u32,
    /// Index into the workload's adapters, where the file names one.
    pub adapter: Option<u32>,
    /// Output tokens to ask for. At least 1.
    pub output: u32,
    /// What is asked.
    pub prompt: ItemPrompt,
}

/// What is asked.
#[derive(Clone, Debug, PartialEq)]
pub enum ItemPrompt {
    /// This text, of about so many tokens.
    Text {
        /// As it is sent.
        text: Arc<str>,
        /// Counted or estimated.
        tokens: u32,
    },
    /// A made-up prompt of `tokens`, beginning with these blocks of `block` tokens each.
    Made {
        /// Its length. At least 1.
        tokens: u32,
        /// Names of blocks: equal names are equal tokens.
        blocks: Arc<[u64]>,
        /// Tokens in a block.
        block: u32,
    },
}

/// All of a file.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Items {
    /// In order of their moments, where there are any.
    pub list: Vec<Item>,
    /// Kinds of requests.
    pub classes: Vec<ClassConfig>,
    /// Names that the file has for models other than the one asked for.
    pub adapters: Vec<String>,
    /// What a reader should know of the reading: rows left out, lengths estimated.
    pub notes: Vec<String>,
}

/// Which kind of file.
#[derive(Clone, Debug, PartialEq)]
pub enum Format {
    /// Conversations.
    ShareGpt,
    /// Prompts of one's own.
    Custom,
    /// BurstGPT.
    BurstGpt,
    /// Azure LLM inference traces of 2023 and 2024.
    Azure,
    /// JSON lines with moments, lengths and names of blocks.
    Timed(Labels),
    /// The gateway's access log.
    AccessLog,
}

/// How a file is to be read.
#[derive(Debug)]
pub struct Reading<'a> {
    /// Counts tokens of texts.
    pub counter: &'a Counter,
    /// This output length for all, whatever the file says.
    pub output: Option<u32>,
    /// At most so many requests (0: all).
    pub limit: usize,
    /// Mix the order of conversations and prompts by this seed. Traces keep theirs.
    pub shuffle: Option<u64>,
    /// What the run sends as `"model"`; other names of an access log become adapters.
    pub model: &'a str,
}

/// Why a file gives no requests.
#[derive(Debug, thiserror::Error)]
pub enum DatasetError {
    /// The system says no.
    #[error("cannot read the dataset {0}: {1}")]
    Io(String, std::io::Error),
    /// Longer than [`MAX_FILE`].
    #[error("the dataset {0} is larger than {MAX_FILE} bytes; cut it")]
    TooLarge(String),
    /// A column or key is missing.
    #[error("the dataset {file} has no column '{missing}' (it has {found}); {hint}")]
    Column {
        /// The file.
        file: String,
        /// What is missing.
        missing: String,
        /// What there is.
        found: String,
        /// What to do.
        hint: String,
    },
    /// A row that cannot be read.
    #[error("the dataset {file}, line {line}: {why}")]
    Row {
        /// The file.
        file: String,
        /// Counted from 1.
        line: usize,
        /// What is wrong.
        why: String,
    },
    /// Nothing to send.
    #[error("the dataset {file} holds no request to send{why}")]
    Empty {
        /// The file.
        file: String,
        /// What was left out.
        why: String,
    },
    /// A tokenizer that cannot be used.
    #[error("cannot load the tokenizer {0}: {1}; give a tokenizer.json, or the folder that holds one")]
    Tokenizer(String, String),
}

impl Items {
    /// Request number `ordinal`; from the beginning again when there are fewer.
    ///
    /// # Panics
    /// When there is none; [`load`] never returns that.
    pub fn at(&self, ordinal: u64) -> &Item {
        &self.list[(ordinal % self.list.len() as u64) as usize]
    }

    /// The recorded moments; nothing when the file has none.
    pub fn moments(&self) -> Option<Vec<f64>> {
        self.list.iter().map(|item| item.at).collect()
    }
}

/// Reads the file at `path`.
///
/// # Errors
/// See [`DatasetError`].
pub fn load(path: &Path, format: &Format, reading: &Reading<'_>) -> Result<Items, DatasetError> {
    let file = path.display().to_string();
    let io = |error| DatasetError::Io(file.clone(), error);
    if std::fs::metadata(path).map_err(io)?.len() > MAX_FILE {
        return Err(DatasetError::TooLarge(file));
    }
    let bytes = std::fs::read(path).map_err(io)?;
    if bytes.starts_with(&[0x1f, 0x8b]) {
        return Err(io(std::io::Error::other("it is compressed; unpack it first (gunzip)")));
    }
    parse(&String::from_utf8_lossy(&bytes), &file, format, reading)
}

/// Reads the text of a file called `file`.
///
/// # Errors
/// See [`DatasetError`].
pub fn parse(text: &str, file: &str, format: &Format, reading: &Reading<'_>) -> Result<Items, DatasetError> {
    let text = text.strip_prefix('\u{feff}').unwrap_or(text);
    let mut items = match format {
        Format::ShareGpt => text::sharegpt(text, file, reading)?,
        Format::Custom => text::custom(text, file, reading)?,
        Format::BurstGpt => trace::burstgpt(text, file)?,
        Format::Azure => trace::azure(text, file)?,
        Format::Timed(labels) => trace::timed(text, file, labels)?,
        Format::AccessLog => records::access_log(text, file, reading)?,
    };
    if items.list.is_empty() {
        let why = items.notes.first().map_or(String::new(), |note| format!(": {note}"));
        return Err(DatasetError::Empty { file: file.to_owned(), why });
    }
    items.begin_at_zero();
    if items.list[0].at.is_none()
        && let Some(seed) = reading.shuffle
    {
        shuffle(&mut items.list, seed);
    }
    let limit = if reading.limit == 0 { MAX_ITEMS } else { reading.limit.min(MAX_ITEMS) };
    items.list.truncate(limit);
    if let Some(output) = reading.output {
        items.list.iter_mut().for_each(|item| item.output = output.max(1));
    }
    Ok(items)
}

impl Items {
    fn begin_at_zero(&mut self) {
        // A file with some moments missing has none: they cannot be kept.
        if self.list.iter().any(|item| item.at.is_none()) {
            self.list.iter_mut().for_each(|item| item.at = None);
            return;
        }
        self.list.sort_by(|a, b| f64::total_cmp(&a.at.unwrap_or(0.0), &b.at.unwrap_or(0.0)));
        let first = self.list.first().and_then(|item| item.at).unwrap_or(0.0);
        self.list.iter_mut().for_each(|item| item.at = item.at.map(|at| at - first));
    }

    /// The index of the class called `name`, made when it is new.
    fn class(&mut self, name: &str) -> u32 {
        let found = self.classes.iter().position(|class| class.name == name);
        let index = found.unwrap_or_else(|| {
            self.classes.push(ClassConfig { name: name.to_owned(), ..ClassConfig::default() });
            self.classes.len() - 1
        });
        self.classes[index].weight += 1.0;
        index as u32
    }
}

/// Fisher and Yates.
fn shuffle(list: &mut [Item], seed: u64) {
    let mut rng = stream(seed, Purpose::Shuffle, 0);
    for last in (1..list.len()).rev() {
        list.swap(last, rng.below(last + 1));
    }
}

/// Lines that are not blank, numbered from 1.
fn lines(text: &str) -> impl Iterator<Item = (usize, &str)> {
    (1..).zip(text.lines()).map(|(number, line)| (number, line.trim())).filter(|(_, line)| !line.is_empty())
}

fn row(file: &str, line: usize, why: impl Into<String>) -> DatasetError {
    DatasetError::Row { file: file.to_owned(), line, why: why.into() }
}

#[cfg(test)]
mod tests;
