//! vLLM seen from outside: flags, versions, Prometheus page, log and failures.
//!
//! The facts are about vLLM 0.32 and 0.33, with names of older versions where they differ. All
//! functions are pure.

pub mod version;
mod whole_number;
mod json_parts;
pub mod flags;
pub mod flag_effect;
pub mod args;
pub mod secrets;
pub mod failure;
pub mod logs;
pub mod drafts;
pub mod kv_events;
pub mod kv_size;
pub mod metrics;
pub mod rank_page;
