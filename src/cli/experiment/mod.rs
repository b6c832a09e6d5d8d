//! `sluice experiment list|show|create|remove|start|stop|promote|report`: experiments of a running
//! gateway.
//!
//! Each subcommand is one call of the admin API; `text` and `page` show the report.
//!
//! Exit codes: 0 done; 1 refused or failed (the message says why, and the remedy); 2 wrong usage.

mod text;
mod page;
mod written;

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::{Subcommand, ValueEnum};
use serde_json::{Map, Value};

use super::admin_command::{AdminPort, exit_code, with_client};
use super::terminal::print_to_stdout;
use sluice_admin::{AdminClient, AdminClientError, encode};
use sluice_gateway::experiment::ExperimentReport;

/// Experiments of a running gateway.
#[derive(Clone, Debug, clap::Args)]
pub struct ExperimentArgs {
    #[command(flatten)]
    port: AdminPort,
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
    /// Show the arms of an experiment and their measurements
    Show {
        /// The experiment
        name: String,
        /// Print JSON
        #[arg(long)]
        json: bool,
    },
    /// Create an experiment, or replace one that was created with this command; it survives
    /// restarts of the gateway
    Create {
        /// TOML with one [[experiment]], as in the configuration, or a JSON object with the same
        /// keys; -: from stdin
        file: PathBuf,
    },
    /// Remove an experiment that was created with `create`
    Remove {
        /// The experiment
        name: String,
    },
    /// Let requests take part in an experiment
    Start {
        /// The experiment
        name: String,
    },
    /// Let no request take part in an experiment; requests in flight finish in their arm
    Stop {
        /// The experiment
        name: String,
    },
    /// Serve all units of an experiment with one arm
    Promote {
        /// The experiment
        name: String,
        /// The arm that serves all units
        #[arg(required_unless_present = "named", conflicts_with = "named")]
        arm: Option<String>,
        /// Same as ARM
        #[arg(long = "arm", value_name = "ARM", hide = true)]
        named: Option<String>,
    },
    /// Write a report about an experiment
    Report {
        /// The experiment
        name: String,
        /// The format of the report
        #[arg(long, value_enum, default_value_t = Format::Table)]
        format: Format,
        /// The file of the report [default: stdout]
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

#[derive(Debug, thiserror::Error)]
enum Failed {
    #[error(transparent)]
    Client(#[from] AdminClientError),
    #[error("{message}\n{}", problems.join("\n"))]
    Problems { message: String, problems: Vec<String> },
    #[error("cannot read {}: {reason}", path.display())]
    Input { path: PathBuf, reason: String },
    #[error("{}: name: missing; name the experiment", .0.display())]
    NoName(PathBuf),
    #[error("cannot write {path}: {source}")]
    Output { path: String, source: std::io::Error },
}

impl Failed {
    fn with_problems(error: AdminClientError) -> Self {
        match error {
            AdminClientError::Refused { message, problems, .. } if !problems.is_empty() => {
                Self::Problems { message, problems }
            }
            error => Self::Client(error),
        }
    }
}

fn read_object(file: &Path) -> Result<Map<String, Value>, Failed> {
    let failed = |reason: String| Failed::Input { path: file.to_owned(), reason };
    let text = match file.to_str() {
        Some("-") => std::io::read_to_string(std::io::stdin()),
        _ => std::fs::read_to_string(file),
    };
    written::experiment(&text.map_err(|error| failed(error.to_string()))?).map_err(failed)
}

/// Runs the command.
pub fn run(args: &ExperimentArgs) -> ExitCode {
    with_client(&args.port, async |client| exit_code(act(client, &args.command).await))
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
        Command::Create { file } => {
            let object = read_object(file)?;
            let name = object.get("name").and_then(Value::as_str).ok_or_else(|| Failed::NoName(file.clone()))?;
            // This cannot fail, because all keys are strings.
            let body = serde_json::to_vec(&object).unwrap_or_default();
            let report: ExperimentReport = client.put(&path(name), body.into()).await.map_err(Failed::with_problems)?;
            print(&text::phase(&report))
        }
        Command::Remove { name } => {
            let _: Value = client.delete(&path(name)).await?;
            print(&format!("{name} is removed"))
        }
        Command::Start { name } => order(client, &format!("{}/start", path(name))).await,
        Command::Stop { name } => order(client, &format!("{}/stop", path(name))).await,
        Command::Promote { name, arm, named } => {
            // clap requires either `arm` or `named`.
            let arm = arm.as_ref().or(named.as_ref()).map_or_else(String::new, |arm| encode(arm));
            order(client, &format!("{}/promote/{arm}", path(name))).await
        }
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
                    .map(|()| eprintln!("wrote {}", path.display()))
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
    // This cannot fail, because all keys are strings.
    serde_json::to_string(value).unwrap_or_default()
}

fn print(text: &str) -> Result<(), Failed> {
    let written = print_to_stdout(&format!("{text}\n"));
    written.map_err(|source| Failed::Output { path: "to stdout".to_owned(), source })
}
