//! The comparison in virtual time: the gateway's request path between simulated clients and
//! engines.
//!
//! A second of traffic takes about two thousandths of a second of work in a release build. The same
//! seed gives the same table on every machine.

use std::net::{Ipv4Addr, SocketAddr};
use std::path::Path;

use anyhow::Context as _;

use super::arrangement::{ALL, Arrangement, MODEL};
use super::compare::{Comparison, Row};
use super::stage::engine_config;
use sluice_bench::RunPlan;
use sluice_config::{Config, Surroundings};
use sluice_lab::{EngineSetup, Lab};

/// Simulated seconds of each arrangement: about 1,800 short and 120 long requests.
pub(super) const SECONDS: f64 = 60.0;

/// Simulates all arrangements under the load of `plan`.
///
/// # Errors
/// If a configuration or a flag is not valid.
pub(super) fn compare(plan: &RunPlan, seed: u64) -> anyhow::Result<Comparison> {
    let rows = std::thread::scope(|scope| {
        let threads = ALL.map(|arrangement| scope.spawn(move || row(arrangement, plan, seed)));
        let joined =
            threads.into_iter().map(|thread| thread.join().map_err(|_| anyhow::anyhow!("a simulation failed"))?);
        joined.collect::<anyhow::Result<Vec<Row>>>()
    })?;
    Ok(Comparison { rows, seconds: SECONDS, seed })
}

fn row(arrangement: Arrangement, plan: &RunPlan, seed: u64) -> anyhow::Result<Row> {
    // The addresses only distinguish the engines; no socket is opened.
    let urls = [8000, 8001].map(|port| format!("http://127.0.0.1:{port}"));
    let [listen, admin] = [8080, 8081].map(|port| SocketAddr::from((Ipv4Addr::LOCALHOST, port)));
    let surroundings = Surroundings::of_process(Path::new("."));
    let loaded = Config::parse(&arrangement.config(&urls, listen, admin), "demo", &[], &surroundings);
    let config = loaded.map_err(|problems| anyhow::anyhow!("{problems}"))?.config;
    let engine = |(index, args): (usize, &Vec<String>)| {
        let mut setup = EngineSetup::vllm(&format!("gpu{index}"), "h200", None, MODEL, args)?;
        setup.sim = engine_config(args, index as u64)?;
        anyhow::Ok(setup)
    };
    let engines = arrangement.engine_args().iter().enumerate().map(engine).collect::<anyhow::Result<Vec<_>>>()?;
    let run = sluice_lab::run(&Lab::new(config, engines, vec![plan.clone()]), seed)
        .with_context(|| format!("cannot simulate '{}'", arrangement.label()))?;
    Ok(Row::of(arrangement, &run.result))
}

#[cfg(test)]
mod tests {
    use super::super::load::{TYPICAL_SEED, plan};
    use super::*;

    #[test]
    fn permits_are_far_better_for_short_requests_and_the_same_seed_gives_the_same_table() {
        let compared = || compare(&plan(TYPICAL_SEED, 10.0), TYPICAL_SEED).unwrap();
        let (once, again) = (compared(), compared());
        assert_eq!(once.json(), again.json());
        assert_eq!(once.failures(), 0);
        let ratio = once.json()["ratios"]["short_p99_ttft"].as_f64().unwrap();
        assert!(ratio > 4.0, "round robin's P99 of short TTFT is only {ratio} times as long");
    }
}
