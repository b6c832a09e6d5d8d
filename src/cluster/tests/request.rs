//! One request in the simulated world.
//!
//! Times are ticks of 100 ms. The gateway sees the end of a request later than the engine.

#[derive(Clone, Debug)]
pub(super) struct Request {
    pub(super) gateway: usize,
    pub(super) start: u64,
    pub(super) slots: u64,
    pub(super) tokens: u64,
    pub(super) permit: bool,
    pub(super) arrives: u64,
    pub(super) ends: u64,
    /// When the gateway sees the first token.
    pub(super) settles: u64,
    /// When the gateway sees the end.
    pub(super) seen_end: u64,
    /// Whether the request may exceed the limit in mode `keep`. It may if it was admitted on a
    /// share that was not renewed in time, or by a gateway that has not renewed for ten leases,
    /// because others may then free the share.
    pub(super) loose: bool,
}

impl Request {
    pub(super) fn at_engine(&self, tick: u64) -> bool {
        self.arrives <= tick && tick < self.ends
    }
}
