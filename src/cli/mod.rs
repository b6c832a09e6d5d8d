//! The command line: one file per subcommand.
//!
//! Each has a clap `Args` struct and a `run` that returns the exit code: 0 ok, 1 failed while running,
//! 2 wrong usage (clap's own), 78 configuration error. Results go to stdout, everything else to stderr.

pub mod check;
