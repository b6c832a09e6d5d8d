//! From a backend's configuration and settings to a checked command line and environment.
//!
//! A flag that the installed vLLM lacks would end the new engine minutes after the old one was
//! stopped. So the flags of the program are read once ([`InstalledFlagsCache`]), and names, types,
//! values, contradictions and files are checked before a stop.

mod by_table;
mod checks;
mod config_file;
mod effective;
mod installed_flags;
mod plan;
mod program;
mod settings_rules;

pub use checks::adapter_rank;
pub(crate) use installed_flags::InstalledFlagsCache;
pub use plan::check_values;
pub(crate) use plan::{
    LaunchPlan, can_run_twice, gpus, max_adapter_rank, memory_share, schedules_by_priority, sequences, sleeps,
};
pub(crate) use program::find_program;

#[cfg(test)]
mod tests;
