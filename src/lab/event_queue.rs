//! The event queue of the simulation: arrivals, later turns of conversations, changes of engines, probes, looks
//! of the online tuner. The events of an
//! engine are in its virtual server.
//!
//! Arrivals are drawn before the run starts, as `sluice bench` draws them. Events with the same time are taken in the order
//! in which they were added, so a run is deterministic.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::time::Duration;

use crate::setup::EngineChange;
use sluice_bench::load::conversation::Conversation;

/// An event.
#[derive(Debug)]
pub(crate) enum Event {
    /// A request, or the first turn of a conversation, of one kind of traffic.
    Arrival {
        /// Index of the traffic.
        traffic: usize,
        /// Number of the request or conversation in this traffic.
        ordinal: u64,
    },
    /// The next turn of a conversation.
    Turn {
        /// Index of the traffic.
        traffic: usize,
        /// The conversation so far.
        conversation: Box<Conversation>,
    },
    /// A change of an engine.
    Change {
        /// Index of the engine.
        engine: usize,
        /// The change.
        change: EngineChange,
    },
    /// The gateway's health probes.
    Probe,
    /// The online tuner looks at the pools.
    Tune,
    /// The autoscaler looks at its pool.
    Scale,
}

/// Events, ordered by time.
#[derive(Debug, Default)]
pub(crate) struct EventQueue {
    order: BinaryHeap<Reverse<(Duration, usize)>>,
    /// Events in the order in which they were added; `None` once taken.
    events: Vec<Option<Event>>,
    /// Number of events in the queue that send a request.
    requests: usize,
}

impl EventQueue {
    /// Adds an event.
    pub(crate) fn add(&mut self, at: Duration, event: Event) {
        self.requests += usize::from(is_request(&event));
        self.order.push(Reverse((at, self.events.len())));
        self.events.push(Some(event));
    }

    /// The time of the next event.
    pub(crate) fn next_at(&self) -> Option<Duration> {
        self.order.peek().map(|Reverse((at, _))| *at)
    }

    /// Takes the next event that is due at `now`.
    pub(crate) fn take(&mut self, now: Duration) -> Option<Event> {
        self.next_at().filter(|at| *at <= now)?;
        let Reverse((_, entry)) = self.order.pop()?;
        let event = self.events[entry].take();
        self.requests -= usize::from(event.as_ref().is_some_and(is_request));
        event
    }

    /// Whether requests are still to be sent.
    pub(crate) fn has_requests(&self) -> bool {
        self.requests > 0
    }
}

fn is_request(event: &Event) -> bool {
    matches!(event, Event::Arrival { .. } | Event::Turn { .. })
}
