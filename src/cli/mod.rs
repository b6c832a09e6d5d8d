//! The command line: one file or folder for each subcommand.
//!
//! Each has a clap `Args` struct and a `run` that returns the exit code: 0 ok, 1 failed while
//! running, 2 wrong usage (as in clap), 78 configuration error. Results go to stdout, everything
//! else to stderr.

mod admin_command;
mod config_file;
mod backend_list;
mod backend_logs;
pub mod backend;
pub mod bench;
pub mod check;
pub mod demo;
pub mod diagnose;
pub mod experiment;
pub mod explain;
pub mod generate;
pub mod lab;
mod examples;
mod terminal;
mod line;
pub mod reload;
pub mod report;
mod runtime;
pub mod serve;
pub mod sim;
pub mod status;
pub mod top;
pub mod tune;
pub mod tuner;

use std::process::ExitCode;
use std::sync::LazyLock;

use clap::{CommandFactory as _, FromArgMatches as _, Parser, Subcommand};

/// A gateway in front of vLLM that keeps tail latency low
#[derive(Debug, Parser)]
#[command(name = "sluice", version, about, max_term_width = 100)]
pub struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Run the gateway
    Serve(serve::ServeArgs),
    /// Compare three ways of routing on simulated engines
    Demo(demo::DemoArgs),
    /// Generate load and measure latency and throughput as a client
    Bench(Box<bench::BenchArgs>),
    /// Try a configuration on simulated engines, faster than real time
    Lab(lab::LabArgs),
    /// Find the best settings of vLLM and of the gateway, on simulated engines or on real ones
    Tune(tune::TuneArgs),
    /// Make an HTML page of a day of requests from the gateway's records
    Report(report::ReportArgs),
    /// Validate a configuration and print it with all defaults
    Check(check::CheckArgs),
    /// Show pools and backends of a running gateway
    Status(status::StatusArgs),
    /// Find out what is slow, for whom, and why
    Diagnose(diagnose::DiagnoseArgs),
    /// Show a live view of a running gateway
    Top(top::TopArgs),
    /// Show, start, stop and promote experiments of a running gateway
    Experiment(experiment::ExperimentArgs),
    /// Show, freeze and approve the changes of a running gateway's online tuner
    Tuner(tuner::TunerArgs),
    /// Drain, restart and enable backends of a running gateway
    Backend(backend::BackendArgs),
    /// Make a running gateway read the configuration file again
    Reload(reload::ReloadArgs),
    /// Simulate `vllm serve` on a GPU of your choice
    #[command(disable_help_flag = true)]
    Sim(sim::SimArgs),
    /// Explain an error code, or list all codes
    Explain(explain::ExplainArgs),
    /// Print the version
    Version,
    /// Print a completion script for a shell
    Completions(generate::CompletionsArgs),
    /// Write the manual pages, one for each subcommand
    Man(generate::ManArgs),
}

/// The version, with the commit if the build names one in the variable `SLUICE_COMMIT`.
static VERSION: LazyLock<String> = LazyLock::new(|| match option_env!("SLUICE_COMMIT") {
    Some(commit) if !commit.is_empty() => format!("{} ({commit})", env!("CARGO_PKG_VERSION")),
    _ => env!("CARGO_PKG_VERSION").to_owned(),
});

fn command() -> clap::Command {
    examples::add(Cli::command().version(VERSION.as_str()))
}

/// Parses the command line and runs the subcommand.
pub fn run() -> ExitCode {
    // The simulator starts this program again for its engine process.
    if let Some(code) = sim::run_child() {
        return code;
    }
    let cli = Cli::from_arg_matches(&command().get_matches()).unwrap_or_else(|error| error.exit());
    match cli.command {
        Command::Serve(args) => serve::run(&args),
        Command::Demo(args) => demo::run(&args),
        Command::Bench(args) => bench::run(&args),
        Command::Lab(args) => lab::run(&args),
        Command::Tune(args) => tune::run(&args),
        Command::Report(args) => report::run(&args),
        Command::Check(args) => check::run(&args),
        Command::Status(args) => status::run(&args),
        Command::Diagnose(args) => diagnose::run(&args),
        Command::Top(args) => top::run(&args),
        Command::Experiment(args) => experiment::run(&args),
        Command::Tuner(args) => tuner::run(&args),
        Command::Backend(args) => backend::run(&args),
        Command::Reload(args) => reload::run(&args),
        Command::Sim(args) => sim::run(args.args),
        Command::Explain(args) => explain::run(&args),
        Command::Version => generate::version(&VERSION),
        Command::Completions(args) => generate::completions(&args, command()),
        Command::Man(args) => generate::man(&args, command()),
    }
}
