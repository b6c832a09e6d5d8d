//! `sluice check`: validates a configuration and prints it with all defaults.
//!
//! A valid configuration is printed to stdout as TOML that can be used as it is. A comment at each key names its origin: a
//! line of the file, `--set`, or a default. Secrets are shown as their references or masked. Warnings go to stderr. An
//! invalid configuration prints all its errors to stderr and nothing to stdout. Nothing is bound, started or contacted.

use std::io::Write;
use std::path::PathBuf;
use std::process::ExitCode;

use crate::config::{Config, Problems, Resolved};

/// Exit code of a configuration error (`EX_CONFIG` of sysexits.h).
pub const EXIT_CONFIG: u8 = 78;

/// Validate a configuration and print it with all defaults.
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

/// Runs the command. Returns the exit code. A reader that leaves early (`| head`) is no failure.
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

#[cfg(test)]
mod tests {
    use super::*;

    fn run_on(text: &str, set: &[&str]) -> (u8, String, String) {
        let folder = tempfile::tempdir().unwrap();
        let config = folder.path().join("sluice.toml");
        std::fs::write(&config, text).unwrap();
        let args = CheckArgs { config, set: set.iter().map(|&set| set.to_owned()).collect() };
        let (mut out, mut err) = (Vec::new(), Vec::new());
        let code = check(&args, &mut out, &mut err);
        (code, String::from_utf8(out).unwrap(), String::from_utf8(err).unwrap())
    }

    const POOL: &str = "[[pool]]\nname = \"p\"\n[[pool.backend]]\nname = \"b\"\nurl = \"http://127.0.0.1:8000\"\n";

    #[test]
    fn a_valid_file_is_printed_with_origins_and_exits_0() {
        let (code, out, err) = run_on(POOL, &["pool.p.slots=3"]);
        assert_eq!(code, 0);
        assert!(out.contains("# line 5\n") && out.contains("# --set\n") && out.contains("# default\n"), "{out}");
        assert!(err.contains("warning: ") && err.ends_with(": ok\n"), "{err}");
    }

    #[test]
    fn an_invalid_file_prints_every_problem_to_stderr_and_exits_78() {
        let (code, out, err) = run_on(POOL, &["pool.p.slots=0", "banana=1"]);
        assert_eq!((code, out.as_str()), (78, ""));
        assert!(
            err.contains("pool[0].slots") && err.contains("banana: unknown key") && err.contains("2 errors"),
            "{err}"
        );
    }
}
