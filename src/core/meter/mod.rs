//! Measures latencies, tokens and errors of responses from the forwarded bytes and their arrival
//! times.
//!
//! [`stream`] TTFT, ITL, TPOT, E2EL of a stream · [`body`] other responses · [`strip`] removes
//! injected usage · [`forward`] bytes for the client · [`histogram`] a stream's latency counters ·
//! [`slo`] goodput · [`usage`] bounds on reported token counts.
//!
//! The gateway and its independent checkers (load generator, simulator) share these definitions.
//! Time is a parameter.

pub mod body;
pub mod forward;
pub mod histogram;
pub mod slo;
pub mod stream;
pub mod strip;
pub mod usage;

pub use body::{BodyMeter, BodyStats};
pub use forward::Forward;
pub use histogram::{ITL_BUCKETS_SECONDS, ItlHistogram};
pub use slo::{Objectives, Timings};
pub use stream::{StreamMeter, StreamStage, StreamStats};
pub use strip::Strip;
pub use usage::{SeenOutput, UsageBounds};
