//! `retry.continue` and `[drain]`: streams that continue on another engine, after a failure or
//! because their engine leaves service. The gateway decides for each request whether the
//! continuation is exact (`core/openai/not_continued.rs`).

use std::time::Duration;

use super::table::table;
use super::value::words;

words! {
    /// When a stream is continued on another engine.
    pub enum Continue {
        /// Never.
        Off = "off",
        /// When the engine has died, hangs, or reports an error; and when it is drained, see
        /// `drain.move_after`.
        Failures = "failures",
    }
}

table! {
    /// Engines that leave service: drained, restarted, stopped or no longer configured.
    pub struct Drain {
        /// Time after which running streams move to engines of the pool that have room, if
        /// `retry.continue` allows it. Streams without room elsewhere, and requests that cannot be
        /// continued, are waited for. Raise it to let short answers end where they are, because
        /// each move computes a prompt again.
        pub move_after: Duration = duration_or_zero("5s");
    }
}
