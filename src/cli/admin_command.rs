//! Shared parts of the subcommands that use the admin API: a client, a runtime, an exit code.
//!
//! Exit codes: 2 if the address or the token cannot be used; 1 if the command fails; otherwise the
//! code that the command returns.

use std::fmt::Display;
use std::process::ExitCode;

use sluice_admin::AdminClient;

/// The flags that name the gateway.
#[derive(Clone, Debug, clap::Args)]
pub(super) struct AdminPort {
    /// Address of the admin port of the gateway
    #[arg(long, value_name = "URL", global = true, env = "SLUICE_ADMIN", default_value_t = format!("http://{}", sluice_config::DEFAULT_ADMIN))]
    admin: String,
    /// Admin token of the gateway, if it has one
    #[arg(long, value_name = "TOKEN", global = true, env = "SLUICE_ADMIN_TOKEN", hide_env_values = true)]
    token: Option<String>,
}

pub(super) fn with_client(port: &AdminPort, command: impl AsyncFnOnce(&AdminClient) -> ExitCode) -> ExitCode {
    let client = match AdminClient::new(&port.admin, port.token.as_deref()) {
        Ok(client) => client,
        Err(error) => return usage(&error),
    };
    match tokio::runtime::Builder::new_current_thread().enable_all().build() {
        Ok(runtime) => runtime.block_on(command(&client)),
        Err(error) => exit_code(Err(format!("cannot start: {error}"))),
    }
}

pub(super) fn usage(error: &impl Display) -> ExitCode {
    eprintln!("{error}");
    ExitCode::from(2)
}

pub(super) fn exit_code(result: Result<(), impl Display>) -> ExitCode {
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}
