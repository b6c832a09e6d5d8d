//! The `sluice` binary.

use std::process::ExitCode;

fn main() -> ExitCode {
    let mut args = std::env::args().skip(1);
    match args.next().as_deref() {
        Some("sim") => sluice::cli::sim::run(args.collect()),
        _ => ExitCode::from(2),
    }
}
