//! The flags of `sluice bench --find-rate`.
//!
//! All but the first need it. Single runs and sweeps have other flags, which conflict with these.

use clap::Args;

#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Search")]
pub(crate) struct FindRateArgs {
    /// Search the highest rate at which enough requests meet their objectives (--goodput, or those of --class)
    #[arg(long, conflicts_with_all = [
        "sweep_max_concurrency", "sweep_request_rate", "ramp_up_strategy", "rate_steps", "multi_turn", "duration",
        "html", "csv", "save_result", "append_result", "result_filename",
    ])]
    pub(crate) find_rate: bool,
    /// Percentage of requests that must meet their objectives
    #[arg(long, value_name = "PERCENT", default_value_t = 99.0, requires = "find_rate")]
    pub(super) find_rate_attainment: f64,
    /// Requests of a short run; long ones have three times as many. Fewer take less time and give a less certain rate
    #[arg(long, value_name = "N", default_value_t = 1500, requires = "find_rate")]
    pub(super) find_rate_requests: usize,
    /// Stop when the rate is known within this many percent either way
    #[arg(long, value_name = "PERCENT", default_value_t = 3.5, requires = "find_rate")]
    pub(super) find_rate_tolerance: f64,
    /// Runs at most
    #[arg(long, value_name = "N", default_value_t = 40, requires = "find_rate")]
    pub(super) find_rate_runs: usize,
}
