//! The event queue of the simulation: arrivals, later turns of conversations, changes of engines,
//! probes, looks of the online tuner, of the autoscaler and for causes of slow requests.
//!
//! The events of an engine are in its virtual server. Arrivals are drawn before the run starts, as
//! `sluice bench` draws them. Events with the same time are taken in the order in which they were
//! added, so a run is deterministic.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::time::Duration;

use crate::setup::EngineChange;
use sluice_bench::load::conversation::Conversation;

#[derive(Debug)]
pub(crate) enum Event {
    /// A request, or the first turn of a conversation.
    Arrival {
        /// Index of the traffic.
        traffic: usize,
        /// Number of the request or conversation within the traffic.
        ordinal: u64,
    },
    Turn {
        traffic: usize,
        /// The conversation so far.
        conversation: Box<Conversation>,
    },
    Change {
        engine: usize,
        change: EngineChange,
    },
    /// The gateway's health probes.
    Probe,
    /// The online tuner looks at the pools.
    Tune,
    /// The autoscaler looks at the pool.
    Scale,
    /// The gateway looks for causes of slow requests.
    Look,
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
    pub(crate) fn add(&mut self, at: Duration, event: Event) {
        self.requests += usize::from(is_request(&event));
        self.order.push(Reverse((at, self.events.len())));
        self.events.push(Some(event));
    }

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

    /// Whether the queue has an event that sends a request.
    pub(crate) fn has_requests(&self) -> bool {
        self.requests > 0
    }
}

fn is_request(event: &Event) -> bool {
    matches!(event, Event::Arrival { .. } | Event::Turn { .. })
}
