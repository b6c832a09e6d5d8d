//! Measures what the contract defines, from the bytes that are forwarded and their times of arrival.
//!
//! [`stream`] TTFT, ITL, TPOT, E2EL of a stream · [`body`] usage and error of a response that is not streamed ·
//! [`strip`] removes injected usage · [`forward`] what goes to the client · [`histogram`] a stream's latency counters ·
//! [`slo`] goodput · [`usage`] the bounds within which reported token counts are believed.
//!
//! The gateway and its independent checkers (load generator, simulator) share these definitions. Time is a parameter.

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
