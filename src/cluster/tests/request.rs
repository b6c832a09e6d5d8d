//! One request in the simulated world.

/// One request on an engine. Times are ticks.
#[derive(Clone, Debug)]
pub(super) struct Request {
    pub(super) gateway: usize,
    pub(super) start: u64,
    pub(super) slots: u64,
    pub(super) tokens: u64,
    pub(super) permit: bool,
    /// The engine has it from this tick to that one.
    pub(super) arrives: u64,
    pub(super) ends: u64,
    /// When its gateway has seen its first token, and its end.
    pub(super) settles: u64,
    pub(super) seen_end: u64,
    /// It was admitted on a share that was not renewed in time, or was given up because that was not renewed for ten leases:
    /// in `keep` that may exceed the limit.
    pub(super) loose: bool,
}

impl Request {
    pub(super) fn at_engine(&self, tick: u64) -> bool {
        self.arrives <= tick && tick < self.ends
    }
}
