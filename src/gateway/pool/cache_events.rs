//! Events about an engine's prefix cache correct the expectations of `prefix.rs`.
//!
//! A follower of the engine's events (in `sluice-fleet`) gets each finished request with a prompt
//! ([`ServedPrompt`]) and finds out in which blocks the engine has the beginnings of the prompt. It
//! returns [`CacheNews`]: beginnings that are *linked* to blocks stay until the news say that the
//! block is gone. The news also count written blocks, those of other clients included.
//!
//! While the events are not in order, and for requests that the events do not name, the estimate
//! counts. `event_reports.rs` applies news and reports requests.

use std::sync::Arc;

use tokio::sync::mpsc;

use sluice_core::openai::PromptPrefix;

/// A finished request.
#[derive(Clone, Debug)]
pub struct ServedPrompt {
    /// The name of the request in the events.
    pub session: u64,
    /// The hashed beginnings of the prompt.
    pub prefix: Arc<PromptPrefix>,
    /// The tokens of the prompt, as the engine counted them.
    pub prompt_tokens: u64,
    /// Prompt tokens that the engine reports as cached; `None`: it does not report them.
    pub cached: Option<u64>,
}

/// Changes of an engine's prefix cache.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CacheNews {
    /// The gateway has subscribed to the events just now.
    pub subscribed: bool,
    /// The cache was emptied, before everything else in these news.
    pub cleared: bool,
    /// Tokens in the blocks that the engine has written.
    pub written_tokens: u64,
    /// Beginnings whose blocks are known.
    pub linked: Vec<u64>,
    /// Linked beginnings whose blocks are gone.
    pub gone: Vec<u64>,
    /// Linked beginnings whose blocks are no longer known, because events were lost.
    pub unlinked: Vec<u64>,
    /// The follower's state after the news.
    pub view: EventsView,
}

/// Whether the events of an engine can be used.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum EventsState {
    /// There is no connection, or no event has come yet.
    #[default]
    Absent,
    /// Events come in order.
    Followed,
    /// The engine serves prompts, and no events come.
    Silent,
}

impl EventsState {
    /// Every name [`EventsState::label`] can return.
    pub const LABELS: [&'static str; 3] = ["absent", "followed", "silent"];

    /// The name in metrics and the admin API.
    pub fn label(self) -> &'static str {
        match self {
            Self::Absent => "absent",
            Self::Followed => "followed",
            Self::Silent => "silent",
        }
    }
}

/// The follower of an engine's events, as shown.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct EventsView {
    /// Whether the events count.
    pub state: EventsState,
    /// Blocks in the engine's cache that the events have named.
    pub blocks: u64,
    /// Prompts that were linked to blocks.
    pub linked: u64,
    /// Prompts whose blocks the events did not name.
    pub unlinked: u64,
    /// How often events were lost: a gap in their numbers, or a message that could not be read.
    pub losses: u64,
}

#[derive(Debug)]
pub(super) struct EventFollower {
    pub(super) served: mpsc::Sender<ServedPrompt>,
    pub(super) view: EventsView,
}
