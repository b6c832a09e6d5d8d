//! `sluice reload`: a running gateway reads its configuration file again.
//!
//! Prints what changed, one line each. A file that is refused changes nothing, and all its problems are printed.
//! Exit codes: 0 reloaded; 1 refused, or no gateway responds; 2 wrong usage.

use std::io::Write as _;
use std::process::ExitCode;

use serde::Deserialize;

use super::admin_command::{AdminPort, with_client};
use crate::admin::{AdminClient, AdminClientError, RESTART_TIMEOUT};

/// Let a running gateway read its configuration file again.
#[derive(Clone, Debug, clap::Args)]
#[command(after_help = "Exit status: 0 reloaded, 1 refused: nothing has changed, and the problems are listed")]
pub struct ReloadArgs {
    #[command(flatten)]
    port: AdminPort,
}

/// The response of the gateway.
#[derive(Debug, Deserialize)]
struct Reloaded {
    changes: Vec<String>,
}

/// Runs the command.
pub fn run(args: &ReloadArgs) -> ExitCode {
    with_client(&args.port, async |client| {
        let (code, out, err) = reload(client).await;
        let _ = write!(std::io::stdout(), "{out}");
        eprint!("{err}");
        code
    })
}

/// Returns the exit code, and what is written to stdout and to stderr.
async fn reload(client: &AdminClient) -> (ExitCode, String, String) {
    // Before a reload of engines the gateway may run vLLM to list its flags.
    match client.post_within::<Reloaded>("/admin/reload", RESTART_TIMEOUT).await {
        Ok(Reloaded { changes }) if changes.is_empty() => {
            (ExitCode::SUCCESS, "reloaded: nothing changed\n".to_owned(), String::new())
        }
        Ok(Reloaded { changes }) => {
            let lines: String = changes.iter().map(|change| format!("  {change}\n")).collect();
            (ExitCode::SUCCESS, format!("reloaded:\n{lines}"), String::new())
        }
        Err(error) => {
            let problems = match &error {
                AdminClientError::Refused { problems, .. } => problems.as_slice(),
                _ => &[],
            };
            let lines: String = problems.iter().map(|problem| format!("error: {problem}\n")).collect();
            (ExitCode::FAILURE, String::new(), format!("{lines}{error}\n"))
        }
    }
}
