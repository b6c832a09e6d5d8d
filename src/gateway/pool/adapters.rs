//! The LoRA adapters of an engine: which of them hold a slot (`--max-loras`).
//!
//! As in vLLM, an adapter gets a slot with the first request for it, and keeps the slot until no
//! request for it is left and another adapter needs one. Requests for an adapter without a slot
//! wait until one is free. The order of grants shows which adapters have slots; the last probe
//! shows the number of slots. Bound: [`RECENT`] adapters, unless more of them have requests in
//! flight.

use smallvec::SmallVec;

use super::served::ModelKey;

/// Adapters that are remembered. When there are more, adapters without requests are dropped, oldest
/// first.
const RECENT: usize = 16;

/// Whether a request with an adapter can start on an engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AdapterPlace {
    /// The adapter has a slot, or the request needs none.
    Ready,
    /// The adapter must be copied into a free slot.
    Load,
    /// All slots belong to adapters that have requests. The field is a lower bound on the number of
    /// requests that must end before the adapter gets a slot: one for each adapter ahead, and the
    /// requests of the slot that is free first.
    Wait(u32),
    /// The engine does not serve the adapter.
    Missing,
}

#[derive(Clone, Debug, Default)]
pub(super) struct AdapterSlots {
    /// `None`: not known yet.
    slots: Option<usize>,
    /// Adapters and the number of their requests in flight, ordered by the first of these requests.
    recent: SmallVec<[(ModelKey, u32); 4]>,
}

impl AdapterSlots {
    pub(super) fn set_slots(&mut self, slots: usize) {
        self.slots = Some(slots);
    }

    /// Forgets the slots and adapters of a replaced engine, except adapters with requests in
    /// flight.
    pub(super) fn clear(&mut self) {
        self.slots = None;
        self.recent.retain(|(_, requests)| *requests > 0);
    }

    /// Whether a request with this adapter, which the engine serves, could start.
    pub(super) fn place(&self, adapter: ModelKey) -> AdapterPlace {
        let slots = self.slots.unwrap_or(usize::MAX);
        let own = self.recent.iter().position(|(id, _)| *id == adapter);
        let active = |part: &[(ModelKey, u32)]| part.iter().filter(|(_, requests)| *requests > 0).count();
        let wait = |before: usize| {
            let holders =
                self.recent.iter().map(|(_, requests)| *requests).filter(|requests| *requests > 0).take(slots);
            AdapterPlace::Wait((before - slots) as u32 + holders.min().unwrap_or(0))
        };
        match own.map(|at| (at, self.recent[at].1)) {
            Some((at, 1..)) if active(&self.recent[..at]) < slots => AdapterPlace::Ready,
            Some((at, 1..)) => wait(active(&self.recent[..at])),
            _ if active(&self.recent) >= slots => wait(active(&self.recent)),
            // No later adapter has taken the slot.
            Some((at, 0)) if self.recent.len() - at <= slots => AdapterPlace::Ready,
            _ => AdapterPlace::Load,
        }
    }

    pub(super) fn take(&mut self, adapter: ModelKey) {
        let known = self.recent.iter().position(|(id, _)| *id == adapter);
        if let Some(at) = known.filter(|at| self.recent[*at].1 > 0) {
            self.recent[at].1 += 1;
            return;
        }
        let oldest = || self.recent.iter().position(|(_, requests)| *requests == 0);
        if let Some(at) = known.or_else(|| oldest().filter(|_| self.recent.len() >= RECENT)) {
            self.recent.remove(at);
        }
        self.recent.push((adapter, 1));
    }

    pub(super) fn release(&mut self, adapter: ModelKey) {
        if let Some((_, requests)) = self.recent.iter_mut().find(|(id, _)| *id == adapter) {
            *requests = requests.saturating_sub(1);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn engine(slots: usize) -> (AdapterSlots, [ModelKey; 3]) {
        let ids = ["a", "b", "c"].map(ModelKey::of);
        let mut engine = AdapterSlots::default();
        engine.set_slots(slots);
        (engine, ids)
    }

    #[test]
    fn a_slot_belongs_to_the_adapters_that_came_first_until_they_have_no_requests_left() {
        let (mut engine, [a, b, c]) = engine(2);
        assert_eq!(engine.place(a), AdapterPlace::Load);
        [a, b, c, c].into_iter().for_each(|id| engine.take(id));
        let ready = AdapterPlace::Ready;
        assert_eq!([a, b, c].map(|id| engine.place(id)), [ready, ready, AdapterPlace::Wait(1)]);
        engine.release(a);
        assert_eq!([a, b, c].map(|id| engine.place(id)), [AdapterPlace::Wait(1), ready, ready]);
        [b, a, a].into_iter().for_each(|id| engine.take(id));
        assert_eq!([a, b, c].map(|id| engine.place(id)), [AdapterPlace::Wait(2), ready, ready], "two of b and of c");
        [a, a, b, b, c, c].into_iter().for_each(|id| engine.release(id));
        assert_eq!([a, b, c].map(|id| engine.place(id)), [ready, AdapterPlace::Load, ready], "a has replaced b");
    }

    #[test]
    fn without_known_slots_no_adapter_waits_and_what_is_remembered_is_bounded() {
        let mut engine = AdapterSlots::default();
        for number in 0..100 {
            let id = ModelKey::of(&number.to_string());
            assert_eq!(engine.place(id), AdapterPlace::Load);
            engine.take(id);
            engine.release(id);
            assert_eq!(engine.place(id), AdapterPlace::Ready);
        }
        assert_eq!(engine.recent.len(), RECENT);
    }
}
