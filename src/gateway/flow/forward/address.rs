//! Sets the parts of a request that depend on the attempt: id and priority.
//!
//! Both are set when the backend is known and before the request is sent. The request still has the
//! values of the attempt before, so each part is set or removed every time.

use http::header::HeaderValue;

use super::Attempts;
use crate::flow::exchange::Upstream;
use crate::flow::respond::REQUEST_ID;
use crate::pool::Lease;

impl<U: Upstream> Attempts<'_, U> {
    /// Sets the id and the priority for this attempt on the leased backend.
    ///
    /// Each attempt has another id, because the engine may still be working on an earlier attempt
    /// whose connection broke, and vLLM identifies requests by this id. Before 0.14, vLLM mixed up
    /// two running requests with the same id. It still mixes them up where ids are not randomized,
    /// are passed to KV connectors, or are aborted from outside.
    pub(super) fn address_to(&mut self, lease: &Lease) {
        let id = &self.incoming.upstream_id;
        let value = match self.made {
            1 => HeaderValue::from_str(id),
            number => HeaderValue::from_str(&format!("{id}-r{number}")),
        };
        if let Ok(value) = value {
            self.request.headers.insert(REQUEST_ID, value);
        }
        self.prepared.priority.give(&mut self.request, self.incoming.route, lease.by_priority());
    }
}
