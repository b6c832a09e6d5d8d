//! From the configuration of a backend and its settings to a checked command line and environment.
//!
//! A flag that the installed vLLM does not have ends the process with status 2, minutes after the old engine was stopped. So
//! the program's flags are read once ([`InstalledFlagsCache`]) and everything that can be checked is checked before a stop:
//! names, types, allowed values, contradictions and files.

mod arguments;
mod checks;
mod command_line;
mod config_file;
mod effective;
mod installed_flags;
mod plan;
mod program;
mod settings_rules;

pub(crate) use arguments::words_of;
pub use checks::adapter_rank;
pub(crate) use installed_flags::InstalledFlagsCache;
pub use plan::check_values;
pub(crate) use plan::{LaunchPlan, max_adapter_rank, schedules_by_priority, sequences};
pub(crate) use program::find_program;

#[cfg(test)]
mod tests;
