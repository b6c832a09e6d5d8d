//! Measures what the contract defines, from the bytes that go by and the times they came at.
//!
//! [`stream`] TTFT, ITL, TPOT, E2EL of a stream · [`body`] usage and error of an answer that comes at once ·
//! [`strip`] takes injected usage out again · [`histogram`] a stream's own latency counters · [`slo`] goodput.
//!
//! Used by the gateway and by its witnesses alike, so that both mean the same by the same word. Time is a parameter.

pub mod body;
pub mod forward;
pub mod histogram;
pub mod slo;
pub mod stream;
pub mod strip;

pub use body::{BodyMeter, BodyStats};
pub use forward::Forward;
pub use histogram::{ITL_BUCKETS_SECONDS, ItlHistogram};
pub use slo::{Objectives, Timings};
pub use stream::{StreamMeter, StreamStats};
pub use strip::Strip;
