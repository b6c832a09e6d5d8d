//! The event queue of the simulation: arrivals, later turns of conversations, changes of engines,
//! probes, and the looks of the tuner, the autoscaler and the findings.
//!
//! The events of an engine are in its virtual server. Arrivals are drawn before the run, as `sluice
//! bench` draws them. Events of the same time keep the order in which they were added, so a run is
//! deterministic.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::time::Duration;

use crate::setup::EngineChange;
use sluice_bench::load::conversation::Conversation;

#[derive(Debug)]
pub(crate) enum Event {
    /// A request, or the first turn of a conversation.
    Arrival {
        traffic: usize,
        /// Number of the request within the traffic.
        ordinal: u64,
    },
    Turn {
        traffic: usize,
        conversation: Box<Conversation>,
    },
    Change {
        engine: usize,
        change: EngineChange,
    },
    Probe,
    Tune,
    Scale,
    Look,
}

#[derive(Debug, Default)]
pub(crate) struct EventQueue {
    order: BinaryHeap<Reverse<(Duration, usize)>>,
    /// Events in the order in which they were added; `None` once taken.
    events: Vec<Option<Event>>,
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

    pub(crate) fn take(&mut self, now: Duration) -> Option<Event> {
        self.next_at().filter(|at| *at <= now)?;
        let Reverse((_, entry)) = self.order.pop()?;
        let event = self.events[entry].take();
        self.requests -= usize::from(event.as_ref().is_some_and(is_request));
        event
    }

    pub(crate) fn has_requests(&self) -> bool {
        self.requests > 0
    }
}

fn is_request(event: &Event) -> bool {
    matches!(event, Event::Arrival { .. } | Event::Turn { .. })
}
