//! What the `sluice` command does: one file, or one folder, for each subcommand.
//!
//! Exit codes are the same everywhere: 0 ok, 1 failed while running, 2 wrong usage, 78 configuration
//! error (nothing was bound or started). Results go to stdout, progress and logs to stderr.

pub mod demo;
pub mod sim;
