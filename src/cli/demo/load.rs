//! The flags of `sluice demo`, and the load that follows from them.
//!
//! Lengths are exact, since prompts are token ids. Bound: [`MAX_SECONDS`] for each arrangement.

use std::time::Duration;

use super::arrangement::MODEL;
use sluice_bench::{Arrival, Class, Extent, Length, Prefix, PromptTokens, RunPlan, Slo, Workload};

pub(super) const RATES: [f64; 2] = [30.0, 2.0];
const MAX_SECONDS: f64 = 600.0;
/// Live load for each arrangement with `--once`, seconds.
const SECONDS_ONCE: f64 = 20.0;
/// Live load for each arrangement without `--once`, seconds; the page shows five minutes.
const SECONDS: f64 = 30.0;
/// A seed whose load is nearly the nominal one: in 20 s it has 580 short requests (600 are
/// expected) and 39 long ones (40 are expected). Some seeds have 30 long requests, some 50.
pub(super) const TYPICAL_SEED: u64 = 11;

/// Compare three ways of routing on simulated engines.
#[derive(Clone, Debug, clap::Args)]
pub struct DemoArgs {
    /// Run each arrangement live once, print the comparison, and exit
    #[arg(long)]
    pub once: bool,
    /// Print the results as JSON: with --once one object; otherwise one for the simulated
    /// comparison and one for each live round
    #[arg(long)]
    pub json: bool,
    /// Seconds of live load for each of the three arrangements [default: 30, with --once 20]
    #[arg(long, value_parser = seconds)]
    pub seconds: Option<f64>,
    /// Seed of the load: prompts and arrival times follow from it
    #[arg(long, default_value_t = TYPICAL_SEED)]
    pub seed: u64,
    /// Address for clients [default: 127.0.0.1:8080, or a free port if that port is taken]
    #[arg(long)]
    pub listen: Option<std::net::SocketAddr>,
    /// Address for metrics and the dashboard [default: 127.0.0.1:8081, or a free port if that port
    /// is taken]
    #[arg(long)]
    pub admin: Option<std::net::SocketAddr>,
}

fn seconds(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(value) if (1.0..=MAX_SECONDS).contains(&value) => Ok(value),
        _ => Err(format!("give a number of seconds from 1 to {MAX_SECONDS}")),
    }
}

impl DemoArgs {
    pub(super) fn seconds(&self) -> f64 {
        self.seconds.unwrap_or(if self.once { SECONDS_ONCE } else { SECONDS })
    }
}

pub(super) fn plan(seed: u64, seconds: f64) -> RunPlan {
    let class = |name: &str, prompt, output, weight| Class {
        name: name.to_owned(),
        prompt: Length::Exactly(prompt),
        output: Length::Exactly(output),
        weight,
        prefix: Prefix::default(),
        slo: Slo::default(),
    };
    let classes = vec![class("short", 200, 128, RATES[0]), class("long", 16_000, 64, RATES[1])];
    // Ids that every Llama 3 vocabulary has, without the special ids at the end.
    let workload = Workload { tokens: PromptTokens::Ids(1_000..100_000), ..Workload::of_classes(MODEL, classes, seed) };
    let extent = Extent::Lasting(Duration::from_secs_f64(seconds));
    RunPlan::new(workload, Arrival::Poisson { rate: RATES.iter().sum() }, extent)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn seconds_out_of_range_are_wrong_usage() {
        assert_eq!(seconds("20"), Ok(20.0));
        assert!(seconds("0").is_err());
        assert!(seconds("soon").is_err());
        assert!(seconds("NaN").is_err());
    }
}
