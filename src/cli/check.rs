//! `sluice check`: is this configuration right, and what does it come to?
//!
//! A valid one is printed to stdout in full, defaults included, as TOML that could be used as it is,
//! with a comment at each key saying who decided it: a line of the file, `--set`, or a default. Secrets
//! are shown as their references or masked. Warnings go to stderr. One with errors prints all of them
//! to stderr and nothing to stdout. Nothing is bound, started or connected to.

use std::io::Write;
use std::path::PathBuf;
use std::process::ExitCode;

use crate::config::{Config, Problems, Resolved};

/// Exit code of a configuration error (`EX_CONFIG` of sysexits.h).
pub const EXIT_CONFIG: u8 = 78;

/// Validate a configuration and print what it comes to.
#[derive(Clone, Debug, clap::Args)]
pub struct CheckArgs {
    /// The configuration file
    #[arg(long, value_name = "FILE")]
    pub config: PathBuf,
    /// Change one value, such as pool.short.slots=32 or server.listen=0.0.0.0:8080 (repeatable)
    #[arg(long = "set", value_name = "KEY=VALUE")]
    pub set: Vec<String>,
}

/// Runs the command on the process's own stdout and stderr.
pub fn run(args: &CheckArgs) -> ExitCode {
    ExitCode::from(check(args, &mut std::io::stdout().lock(), &mut std::io::stderr().lock()))
}

/// Runs the command; returns the exit code. A reader that goes away early (`| head`) is no failure.
fn check(args: &CheckArgs, out: &mut dyn Write, err: &mut dyn Write) -> u8 {
    match Config::load(&args.config, &args.set) {
        Ok(loaded) => {
            let mut warnings = String::new();
            let _ = Problems::write_warnings(&mut warnings, &loaded.source, &loaded.warnings);
            let _ = write!(err, "{warnings}");
            let _ = write!(out, "{}", Resolved { config: &loaded.config, origins: Some(&loaded.origins) });
            let _ = writeln!(err, "{}: ok", loaded.source);
            0
        }
        Err(problems) => {
            let _ = writeln!(err, "{problems}");
            EXIT_CONFIG
        }
    }
}
