//! What the subcommands that use the admin API share: a client, a runtime, an exit code.
//!
//! Exit codes: 2 when address or token cannot be used, 1 when no runtime can be built or the command fails, else the command's
//! own.

use std::fmt::Display;
use std::process::ExitCode;

use crate::admin::AdminClient;

/// Runs `command` with a client of the admin port at `admin`.
pub(super) fn with_client(
    admin: &str,
    token: Option<&str>,
    command: impl AsyncFnOnce(&AdminClient) -> ExitCode,
) -> ExitCode {
    let client = match AdminClient::new(admin, token) {
        Ok(client) => client,
        Err(error) => return usage(&error),
    };
    let runtime = match tokio::runtime::Builder::new_current_thread().enable_all().build() {
        Ok(runtime) => runtime,
        Err(error) => {
            eprintln!("cannot start: {error}");
            return ExitCode::FAILURE;
        }
    };
    runtime.block_on(command(&client))
}

/// Reports wrong usage.
pub(super) fn usage(error: &impl Display) -> ExitCode {
    eprintln!("{error}");
    ExitCode::from(2)
}

/// The exit code of a result; an error is written to stderr.
pub(super) fn exit_code(result: Result<(), impl Display>) -> ExitCode {
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}
