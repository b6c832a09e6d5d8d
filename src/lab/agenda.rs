//! What happens when, apart from what engines and the gateway do: arrivals, later turns, changes of engines, probes.
//!
//! Arrivals are drawn before the run begins, as `sluice bench` draws them. Events of one moment happen in the order in which
//! they were entered, so a run does not depend on chance.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::time::Duration;

use crate::setup::EngineChange;
use sluice_bench::load::conversation::Conversation;

/// Something that happens at a certain time.
#[derive(Debug)]
pub(crate) enum Event {
    /// A request, or the first turn of a conversation, of one kind of traffic.
    Arrival {
        /// Which traffic.
        traffic: usize,
        /// Its number there.
        ordinal: u64,
    },
    /// The next turn of a conversation.
    Turn {
        /// Which traffic.
        traffic: usize,
        /// The conversation so far.
        conversation: Box<Conversation>,
    },
    /// A change of an engine.
    Change {
        /// Which engine.
        engine: usize,
        /// What happens to it.
        change: EngineChange,
    },
    /// The gateway's health probes.
    Probe,
}

/// Events by time.
#[derive(Debug, Default)]
pub(crate) struct Agenda {
    order: BinaryHeap<Reverse<(Duration, usize)>>,
    /// By number of entry.
    events: Vec<Option<Event>>,
    /// Entries that are not [`Event::Probe`] or [`Event::Change`].
    loads: usize,
}

impl Agenda {
    /// Enters an event.
    pub(crate) fn add(&mut self, at: Duration, event: Event) {
        self.loads += usize::from(is_load(&event));
        self.order.push(Reverse((at, self.events.len())));
        self.events.push(Some(event));
    }

    /// When the next event happens.
    pub(crate) fn next_at(&self) -> Option<Duration> {
        self.order.peek().map(|Reverse((at, _))| *at)
    }

    /// Takes the next event that happens at `now` or before.
    pub(crate) fn take(&mut self, now: Duration) -> Option<Event> {
        self.next_at().filter(|at| *at <= now)?;
        let Reverse((_, entry)) = self.order.pop()?;
        let event = self.events[entry].take();
        self.loads -= usize::from(event.as_ref().is_some_and(is_load));
        event
    }

    /// Whether requests are still to come.
    pub(crate) fn has_load(&self) -> bool {
        self.loads > 0
    }
}

fn is_load(event: &Event) -> bool {
    matches!(event, Event::Arrival { .. } | Event::Turn { .. })
}
