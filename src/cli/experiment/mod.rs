//! `sluice experiment list|show|start|stop|promote|report`: the experiments of a running gateway.
//!
//! Exit codes: 0 done; 1 refused or failed (the message says why and what to do); 2 wrong usage.

mod text;
mod page;

use std::io::Write;
use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Subcommand, ValueEnum};

use super::admin_command::{exit_code, with_client};
use crate::admin::{AdminClient, AdminClientError, encode};
use crate::config;
use crate::experiment::ExperimentReport;

/// Experiments of a running gateway.
#[derive(Clone, Debug, clap::Args)]
pub struct ExperimentArgs {
    /// The admin port
    #[arg(long, value_name = "URL", global = true, default_value_t = format!("http://{}", config::DEFAULT_ADMIN))]
    pub admin: String,
    /// The admin token, if the gateway has one
    #[arg(long, value_name = "TOKEN", global = true, env = "SLUICE_ADMIN_TOKEN", hide_env_values = true)]
    pub token: Option<String>,
    #[command(subcommand)]
    command: Command,
}

#[derive(Clone, Debug, Subcommand)]
enum Command {
    /// Show all experiments and their verdicts
    List {
        /// Print JSON
        #[arg(long)]
        json: bool,
    },
    /// Show the arms of an experiment and what was measured
    Show {
        /// The experiment
        name: String,
        /// Print JSON
        #[arg(long)]
        json: bool,
    },
    /// Let requests take part
    Start {
        /// The experiment
        name: String,
    },
    /// Let no request take part; those in flight finish in their arm
    Stop {
        /// The experiment
        name: String,
    },
    /// Serve all units of an experiment with one arm
    Promote {
        /// The experiment
        name: String,
        /// The arm
        arm: String,
    },
    /// Write a report
    Report {
        /// The experiment
        name: String,
        /// What to write
        #[arg(long, value_enum, default_value_t = Format::Table)]
        format: Format,
        /// The file; otherwise it is printed
        #[arg(long, short, value_name = "FILE")]
        output: Option<PathBuf>,
    },
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum Format {
    /// A table for the terminal
    Table,
    /// The whole report
    Json,
    /// A page with plots of the confidence sequences, without external resources
    Html,
}

/// Why a command failed.
#[derive(Debug, thiserror::Error)]
enum Failed {
    #[error(transparent)]
    Client(#[from] AdminClientError),
    #[error("cannot write {path}: {source}")]
    Output { path: String, source: std::io::Error },
}

/// Runs the command.
pub fn run(args: &ExperimentArgs) -> ExitCode {
    with_client(&args.admin, args.token.as_deref(), async |client| exit_code(act(client, &args.command).await))
}

async fn act(client: &AdminClient, command: &Command) -> Result<(), Failed> {
    let path = |name: &str| format!("/admin/experiments/{}", encode(name));
    match command {
        Command::List { json } => {
            let all: Vec<ExperimentReport> = client.get("/admin/experiments").await?;
            print(&if *json { as_json(&all) } else { text::list(&all) })
        }
        Command::Show { name, json } => {
            let report: ExperimentReport = client.get(&path(name)).await?;
            print(&if *json { as_json(&report) } else { text::show(&report) })
        }
        Command::Start { name } => order(client, &format!("{}/start", path(name))).await,
        Command::Stop { name } => order(client, &format!("{}/stop", path(name))).await,
        Command::Promote { name, arm } => order(client, &format!("{}/promote/{}", path(name), encode(arm))).await,
        Command::Report { name, format, output } => {
            let report: ExperimentReport = client.get(&path(name)).await?;
            let written = match format {
                Format::Table => text::show(&report),
                Format::Json => as_json(&report),
                Format::Html => page::page(&report),
            };
            match output {
                None => print(&written),
                Some(path) => std::fs::write(path, written + "\n")
                    .map_err(|source| Failed::Output { path: path.display().to_string(), source }),
            }
        }
    }
}

async fn order(client: &AdminClient, path: &str) -> Result<(), Failed> {
    let report: ExperimentReport = client.post(path).await?;
    print(&text::phase(&report))
}

fn as_json(value: &impl serde::Serialize) -> String {
    // Cannot fail: all keys are strings.
    serde_json::to_string(value).unwrap_or_default()
}

fn print(text: &str) -> Result<(), Failed> {
    let mut out = std::io::stdout().lock();
    let written = writeln!(out, "{text}").and_then(|()| out.flush());
    written.map_err(|source| Failed::Output { path: "to stdout".to_owned(), source })
}
