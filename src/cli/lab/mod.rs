//! `sluice lab`: runs a configuration against simulated engines on virtual time.
//!
//! The scenario is a file (`sluice_lab::file` describes it). `run` compares its variants, or those of `--sweep`; one variant
//! and one seed print the table of `sluice bench`. `plan` finds the fewest GPUs for the traffic, `rate` the most traffic. Nothing is bound, started or contacted. Exit codes: 0 done; 1 an
//! expectation of the file is not met, or a file could not be written; 2 the scenario is not valid.

mod plan;
mod run;

use std::process::ExitCode;

use clap::{Args, Subcommand};

/// Try a configuration on simulated engines, faster than time.
#[derive(Clone, Debug, Args)]
pub struct LabArgs {
    #[command(subcommand)]
    command: LabCommand,
}

#[derive(Clone, Debug, Subcommand)]
enum LabCommand {
    /// Run the variants of a scenario and compare them
    Run(run::RunArgs),
    /// The fewest GPUs of each kind for the traffic and its objectives, and what they cost
    Plan(plan::PlanArgs),
    /// The highest rate at which the objectives hold
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
