//! `sluice check`: validates a configuration and prints it with all defaults.
//!
//! A valid configuration is printed to stdout as TOML that can be used unchanged. A comment at each
//! key names the origin: a line of the file, `--set`, or a default. Secrets are shown as references
//! or masked. Warnings and errors go to stderr. A start and a reload make the same checks
//! ([`checks`]).
//!
//! No socket is bound and no engine started. The program of a `launch` runs only with `--help`. A
//! program without a list of flags after 20 s is named on stderr. Only `--probe` contacts backends
//! (`check/probe.rs`), instead of printing. Exit codes: 0 valid; 1 a backend is not as configured
//! (`--probe`); 2 wrong usage; 78 not valid.

mod probe;

use std::io::Write;
use std::process::ExitCode;

use super::config_file::{ConfigFile, NoFile};
use sluice_config::{Config, Loaded, Problems, Resolved};
use sluice_gateway::telemetry::log;
use sluice_serve::checks::{self, Purpose};

/// Exit code of a configuration error (`EX_CONFIG` of sysexits.h).
pub const EXIT_CONFIG: u8 = 78;
const EXIT_USAGE: u8 = 2;

/// Validate a configuration and print it with all defaults.
#[derive(Clone, Debug, clap::Args)]
#[command(after_help = "\
Exit status: 0 valid, 2 wrong usage, 78 not valid; with --probe also 1, if a backend is not as configured")]
pub struct CheckArgs {
    #[command(flatten)]
    file: ConfigFile,
    /// Change one value, such as pool.short.slots=32 or server.listen=0.0.0.0:8080 (repeatable)
    #[arg(long = "set", value_name = "KEY=VALUE")]
    pub set: Vec<String>,
    /// Ask every backend instead of printing the configuration: whether the backend responds, the
    /// version, and whether it serves the models of the pool
    #[arg(long)]
    pub probe: bool,
    /// Print errors only
    #[arg(long, short)]
    pub quiet: bool,
}

/// Runs the command on the process's stdout and stderr.
pub fn run(args: &CheckArgs) -> ExitCode {
    if !args.quiet
        && let Err(error) = log::init_warnings("sluice_fleet")
    {
        eprintln!("warnings of engines are not shown: {error}");
    }
    ExitCode::from(check(args, &mut std::io::stdout().lock(), &mut std::io::stderr().lock()))
}

/// Returns the exit code. A reader that leaves early (`| head`) is no failure.
fn check(args: &CheckArgs, out: &mut dyn Write, err: &mut dyn Write) -> u8 {
    let Some(file) = args.file.path() else {
        let _ = writeln!(err, "{}", NoFile { instead: "" });
        return EXIT_USAGE;
    };
    let loaded = match Config::load(&file, &args.set) {
        Ok(loaded) => loaded,
        Err(problems) => {
            let _ = writeln!(err, "{problems}");
            return EXIT_CONFIG;
        }
    };
    let remarks = match checked(&loaded) {
        Ok(remarks) => remarks,
        Err(problems) => {
            let _ = writeln!(err, "{problems}");
            return EXIT_CONFIG;
        }
    };
    if !args.quiet {
        for remark in remarks {
            let _ = writeln!(err, "warning: {}: {remark}", loaded.source);
        }
        report(args, &loaded, out, err);
    }
    if args.probe { probe::run(&loaded.config, args.quiet, out, err) } else { 0 }
}

fn checked(loaded: &Loaded) -> Result<Vec<String>, Problems> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    match runtime {
        Ok(runtime) => runtime.block_on(checks::check(loaded, Purpose::Look)),
        Err(error) => Ok(vec![format!("the engines are not checked: no thread can be started: {error}")]),
    }
}

/// Writes warnings, the configuration unless `--probe` is given, and "ok".
fn report(args: &CheckArgs, loaded: &Loaded, out: &mut dyn Write, err: &mut dyn Write) {
    let mut warnings = String::new();
    let _ = Problems::write_warnings(&mut warnings, &loaded.source, &loaded.warnings);
    let _ = write!(err, "{warnings}");
    if !args.probe {
        let _ = write!(out, "{}", Resolved { config: &loaded.config, origins: Some(&loaded.origins) });
    }
    let _ = writeln!(err, "{}: ok", loaded.source);
}

#[cfg(test)]
mod tests {
    use clap::Parser as _;

    use super::*;

    #[derive(clap::Parser)]
    struct Cli {
        #[command(flatten)]
        args: CheckArgs,
    }

    fn run_on(text: &str, flags: &[&str]) -> (u8, String, String) {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("sluice.toml");
        std::fs::write(&file, text).unwrap();
        let words = ["check", file.to_str().unwrap()].into_iter().chain(flags.iter().copied());
        let args = Cli::try_parse_from(words).unwrap().args;
        let (mut out, mut err) = (Vec::new(), Vec::new());
        let code = check(&args, &mut out, &mut err);
        (code, String::from_utf8(out).unwrap(), String::from_utf8(err).unwrap())
    }

    const POOL: &str = "[[pool]]\nname = \"p\"\n[[pool.backend]]\nname = \"b\"\nurl = \"http://127.0.0.1:8000\"\n";
    const OPEN: &str = "--set=server.listen=:8080";

    #[test]
    fn a_valid_file_is_printed_with_origins_and_exits_0() {
        let (code, out, err) = run_on(POOL, &["--set=pool.p.slots=3", OPEN]);
        assert_eq!(code, 0);
        assert!(out.contains("# line 5\n") && out.contains("# --set\n") && out.contains("# default\n"), "{out}");
        assert!(err.contains("warning: ") && err.ends_with(": ok\n"), "{err}");
        let (code, out, err) = run_on(POOL, &["-q", OPEN]);
        assert_eq!((code, out.as_str(), err.as_str()), (0, "", ""));
    }

    #[test]
    fn a_file_without_need_to_act_has_no_warning() {
        let (code, _, err) = run_on(POOL, &[]);
        assert_eq!((code, err.lines().count()), (0, 1), "{err}");
    }

    #[test]
    fn an_invalid_file_prints_every_problem_to_stderr_and_exits_78() {
        for quiet in [&[][..], &["--quiet"]] {
            let (code, out, err) = run_on(POOL, &[&["--set=pool.p.slots=0", "--set=banana=1"], quiet].concat());
            assert_eq!((code, out.as_str()), (78, ""));
            assert!(
                err.contains("pool[0].slots") && err.contains("banana: unknown key") && err.contains("2 errors"),
                "{err}"
            );
        }
    }

    #[test]
    fn the_file_is_given_at_most_once() {
        let parsed = |words: &[&str]| Cli::try_parse_from([&["check"], words].concat()).is_ok();
        assert!(parsed(&["a.toml"]) && parsed(&["--config", "a.toml"]));
        assert!(parsed(&[]) && !parsed(&["a.toml", "--config", "b.toml"]));
    }
}
