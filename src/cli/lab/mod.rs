//! `sluice lab`: simulates the gateway and engines on virtual time.
//!
//! A file describes the scenario (`sluice_lab::file`). `run` compares the variants in the file or
//! of `--sweep`. If there is only one run, it prints the table of `sluice bench`. `plan` finds the
//! fewest GPUs for the traffic, `rate` the highest rate for the engines.
//!
//! Exit codes: 0 done; 1 an expectation of the file is not met, or a file could not be written; 2
//! the scenario is not valid.

mod plan;
mod run;

use std::process::ExitCode;

use clap::{Args, Subcommand};

/// Simulate a configuration and its engines, faster than real time.
#[derive(Clone, Debug, Args)]
pub struct LabArgs {
    #[command(subcommand)]
    command: LabCommand,
}

#[derive(Clone, Debug, Subcommand)]
enum LabCommand {
    /// Run the variants of a scenario and compare them
    Run(run::RunArgs),
    /// Find the fewest GPUs of each kind that meet the objectives, and their cost
    Plan(plan::PlanArgs),
    /// Find the highest rate at which the objectives are met
    Rate(plan::RateArgs),
}

/// Runs the command.
pub fn run(args: &LabArgs) -> ExitCode {
    match &args.command {
        LabCommand::Run(args) => run::run(args),
        LabCommand::Plan(args) => plan::run_plan(args),
        LabCommand::Rate(args) => plan::run_rate(args),
    }
}
