//! The `sluice` binary.
//!
//! Hands the arguments to the subcommand they name and exits with what it says. Everything else is in the library, so
//! that tests and benches reach it.

use std::process::ExitCode;

fn main() -> ExitCode {
    let mut args = std::env::args().skip(1);
    match args.next().as_deref() {
        Some("sim") => sluice::cli::sim::run(args.collect()),
        _ => ExitCode::from(2),
    }
}
