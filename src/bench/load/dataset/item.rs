//! The requests of a dataset, independent of the file's format.
//!
//! An item has the text of a prompt, or only the length. Blocks that a trace names let generated
//! prompts share prefixes as the original prompts did. Bounds: [`MAX_ITEMS`].

use std::sync::Arc;

use crate::result::record::ClassConfig;

/// The most requests kept of a file.
pub const MAX_ITEMS: usize = 10_000_000;

/// One request of a file.
#[derive(Clone, Debug, PartialEq)]
pub struct Item {
    /// Arrival time, seconds from the first request of the file, if the file has times.
    pub at: Option<f64>,
    /// Index into [`Items::classes`].
    pub class: u32,
    /// Index into the workload's adapters, if the file names an adapter.
    pub adapter: Option<u32>,
    /// Requested output tokens, at least 1.
    pub output: u32,
    /// The prompt.
    pub prompt: ItemPrompt,
}

/// The prompt of an item.
#[derive(Clone, Debug, PartialEq)]
pub enum ItemPrompt {
    /// This text.
    Text {
        /// The prompt.
        text: Arc<str>,
        /// Tokens of the text, counted or estimated.
        tokens: u32,
    },
    /// A generated prompt that begins with these blocks.
    Made {
        /// Tokens of the prompt, at least 1.
        tokens: u32,
        /// Names of blocks. Blocks with equal names have equal tokens.
        blocks: Arc<[u64]>,
        /// Tokens in a block.
        block: u32,
    },
}

impl ItemPrompt {
    pub(super) fn set_block(&mut self, length: u32) {
        if let Self::Made { tokens, blocks, block } = self {
            *block = length.max(1);
            let fit = (*tokens / *block) as usize;
            if blocks.len() > fit {
                *blocks = blocks[..fit].into();
            }
        }
    }
}

/// The requests of a file.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Items {
    /// The requests, by time if the file has times.
    pub list: Vec<Item>,
    /// Kinds of requests.
    pub classes: Vec<ClassConfig>,
    /// The models that the file names, without the run's model.
    pub adapters: Vec<String>,
    /// Notes for the user.
    pub notes: Vec<String>,
}

impl Items {
    /// Request number `ordinal`; after the last item, the first follows.
    ///
    /// # Panics
    /// There are no items, which `load` never returns.
    pub fn at(&self, ordinal: u64) -> &Item {
        &self.list[(ordinal % self.list.len() as u64) as usize]
    }

    /// The arrival times, if the file has any.
    pub fn times(&self) -> Option<Vec<f64>> {
        self.list.iter().map(|item| item.at).collect()
    }

    pub(super) fn begin_at_zero(&mut self) {
        if self.list.iter().any(|item| item.at.is_none()) {
            self.list.iter_mut().for_each(|item| item.at = None);
            return;
        }
        self.list.sort_by(|a, b| f64::total_cmp(&a.at.unwrap_or(0.0), &b.at.unwrap_or(0.0)));
        let first = self.list.first().and_then(|item| item.at).unwrap_or(0.0);
        self.list.iter_mut().for_each(|item| item.at = item.at.map(|at| at - first));
    }

    pub(super) fn class(&mut self, name: &str) -> u32 {
        let found = self.classes.iter().position(|class| class.name == name);
        let index = found.unwrap_or_else(|| {
            self.classes.push(ClassConfig { name: name.to_owned(), ..ClassConfig::default() });
            self.classes.len() - 1
        });
        self.classes[index].weight += 1.0;
        index as u32
    }

    pub(super) fn note(&mut self, count: usize, what: &str) {
        if count > 0 {
            self.notes.push(format!("{count} {what}"));
        }
    }

    /// The index of the adapter `name`, added if new; `None`: the run's model.
    pub(super) fn adapter(&mut self, name: Option<&str>, model: &str) -> Option<u32> {
        let name = name.filter(|name| *name != model)?;
        let found = self.adapters.iter().position(|found| found == name);
        Some(found.unwrap_or_else(|| {
            self.adapters.push(name.to_owned());
            self.adapters.len() - 1
        }) as u32)
    }
}
