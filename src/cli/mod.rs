//! One file per subcommand.
//!
//! A subcommand gets what follows its name and returns the exit code of the process; results go to stdout, progress and
//! refusals to stderr. What it runs lives in the modules above: here is only reading of flags and putting together.

pub mod sim;
