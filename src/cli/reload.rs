//! `sluice reload`: a running gateway reads the configuration file again.
//!
//! Prints the changes, one per line, or all problems of a file that is refused. Exit codes: 0
//! reloaded; 1 refused, or no gateway responds; 2 wrong usage.

use std::io::Write as _;
use std::process::ExitCode;

use serde::Deserialize;

use super::admin_command::{AdminPort, with_client};
use sluice_admin::{AdminClient, AdminClientError, RESTART_TIMEOUT};

/// Make a running gateway read the configuration file again.
#[derive(Clone, Debug, clap::Args)]
#[command(after_help = "Exit status: 0 reloaded, 1 refused: nothing has changed, and the problems are listed")]
pub struct ReloadArgs {
    #[command(flatten)]
    port: AdminPort,
}

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

async fn reload(client: &AdminClient) -> (ExitCode, String, String) {
    // The time limit is long, because programs of engines may first list their flags.
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
