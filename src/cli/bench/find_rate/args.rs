//! The flags of `sluice bench --find-rate`.
//!
//! All other flags here need `--find-rate`, which conflicts with the flags of sweeps, changing
//! rates and saved results.

use clap::Args;

#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Search")]
pub(crate) struct FindRateArgs {
    /// Search for the highest rate at which enough requests meet their objectives (--goodput, or
    /// the objectives of --class)
    #[arg(long, conflicts_with_all = [
        "sweep_max_concurrency", "sweep_request_rate", "ramp_up_strategy", "rate_steps", "multi_turn", "duration",
        "html", "csv", "save_result", "append_result", "result_filename",
    ])]
    pub(crate) find_rate: bool,
    /// Percentage of requests that must meet their objectives
    #[arg(long, hide_short_help = true, value_name = "PERCENT", default_value_t = 99.0, requires = "find_rate")]
    pub(super) find_rate_attainment: f64,
    /// Requests of a short run; long runs have three times as many. With fewer, the search is
    /// faster and less exact
    #[arg(long, hide_short_help = true, value_name = "N", default_value_t = 1500, requires = "find_rate")]
    pub(super) find_rate_requests: usize,
    /// Stop when the rate is known within this many percent either way
    #[arg(long, hide_short_help = true, value_name = "PERCENT", default_value_t = 3.5, requires = "find_rate")]
    pub(super) find_rate_tolerance: f64,
    /// Most runs
    #[arg(long, hide_short_help = true, value_name = "N", default_value_t = 40, requires = "find_rate")]
    pub(super) find_rate_runs: usize,
}
