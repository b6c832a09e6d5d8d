//! `sluice lab plan` and `sluice lab rate`: GPUs for given traffic, and traffic for given GPUs.
//!
//! Both take objectives from the classes of the scenario, and print each trial on stderr and the
//! result on stdout.

use std::collections::BTreeSet;
use std::io::Write;
use std::path::PathBuf;
use std::process::ExitCode;

use clap::Args;
use serde_json::{Value, json};

use crate::cli::bench::find_rate::text;
use sluice_bench::search::{SearchResult, TrialReport};
use sluice_lab::plan::{MORE, PlanResult, plan};
use sluice_lab::prices::Prices;
use sluice_lab::rate::{goal, highest_rate};
use sluice_lab::study::seeds;
use sluice_lab::table::{aligned, number};
use sluice_lab::{LabError, Scenario, sweep};

/// The flags of `sluice lab plan`.
#[derive(Clone, Debug, Args)]
pub(super) struct PlanArgs {
    /// The file with the scenario
    #[arg(value_name = "FILE")]
    file: PathBuf,
    /// Prices of GPUs: a TOML file with per_hour.GPU = PRICE
    #[arg(long, value_name = "FILE")]
    prices: Option<PathBuf>,
    /// Number of runs of each trial [default: seeds in the file]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    seeds: Option<u64>,
    /// The first seed; the other seeds are 16 apart
    #[arg(long, value_name = "SEED", default_value_t = 1)]
    seed: u64,
    /// Print JSON instead of the table
    #[arg(long)]
    json: bool,
}

/// The flags of `sluice lab rate`.
#[derive(Clone, Debug, Args)]
pub(super) struct RateArgs {
    /// The file with the scenario
    #[arg(value_name = "FILE")]
    file: PathBuf,
    /// One search for each value: a key of the gateway, vllm.FLAG, vllm@BACKEND.FLAG, engines or
    /// gpu (repeatable)
    #[arg(long, value_name = "KEY=VALUE,..")]
    sweep: Vec<String>,
    /// The seed of the first trial
    #[arg(long, value_name = "SEED", default_value_t = 1)]
    seed: u64,
    /// Print JSON instead of the table
    #[arg(long)]
    json: bool,
}

pub(super) fn run_plan(args: &PlanArgs) -> ExitCode {
    finish(plan_results(args).map(|(prices, results)| match args.json {
        true => format!("{:#}\n", Value::Array(results.iter().map(|result| result_json(result, &prices)).collect())),
        false => plan_table(&results, &prices),
    }))
}

pub(super) fn run_rate(args: &RateArgs) -> ExitCode {
    finish(rates(args).map(|rates| match args.json {
        true => format!("{:#}\n", Value::Array(rates.iter().map(|(name, found)| rate_json(name, found)).collect())),
        false => rate_table(&rates),
    }))
}

fn finish(text: Result<String, LabError>) -> ExitCode {
    match text {
        Ok(text) => {
            // A reader that leaves early (`| head`) is no failure.
            let _ = std::io::stdout().lock().write_all(text.as_bytes());
            ExitCode::SUCCESS
        }
        Err(error) => {
            eprintln!("lab: {error}");
            ExitCode::from(2)
        }
    }
}

fn plan_results(args: &PlanArgs) -> Result<(Prices, Vec<PlanResult>), LabError> {
    let scenario = Scenario::load(&args.file)?;
    let prices = args.prices.as_deref().map_or_else(|| Ok(Prices::default()), Prices::load)?;
    let seeds = seeds(args.seed, args.seeds.unwrap_or(scenario.file.seeds), 1)?;
    let results = plan(&scenario, &prices, &seeds, |candidate, load, engines, attainment| {
        let load = (load * 1e3).round() / 1e3;
        eprintln!("{candidate}, traffic {load}x, engines {engines}: {attainment:.1} % meet their objectives");
    })?;
    Ok((prices, results))
}

fn plan_table(results: &[PlanResult], prices: &Prices) -> String {
    let unit = if prices.currency.is_empty() { "price".to_owned() } else { prices.currency.clone() };
    let head =
        ["candidate", "traffic", "engines", "GPUs", "attainment", "with one less", "headroom"].map(str::to_owned);
    let costs = ["/h", "/request", "/M tokens", "/M output"].map(|of| format!("{unit}{of}"));
    let mut rows = vec![head.into_iter().chain(costs).collect::<Vec<_>>()];
    let (mut notes, mut unpriced) = (String::new(), BTreeSet::new());
    for result in results {
        let mut row = vec![result.candidate.clone(), format!("{}x", result.load)];
        match &result.needs {
            Ok(need) => {
                let share = |(share, class): &(f64, String)| format!("{share:.1} % {class}");
                row.extend([need.engines.to_string(), need.gpus.to_string(), share(&need.attainment)]);
                row.push(need.with_one_less.as_ref().map_or_else(|| "-".to_owned(), share));
                row.push(headroom(need.headroom));
                let costs = need.cost.map(|cost| {
                    [cost.per_hour, cost.per_request, cost.per_million_tokens, cost.per_million_output].map(number)
                });
                row.extend(costs.unwrap_or_else(|| ["-"; 4].map(str::to_owned)));
                unpriced.extend(&need.unpriced);
            }
            Err(why) => {
                row.extend(["-"; 9].map(str::to_owned));
                notes += &format!("{}, {}x: {why}\n", result.candidate, result.load);
            }
        }
        rows.push(row);
    }
    notes += "headroom: by how much the traffic may grow until these engines miss the objectives\n";
    if !prices.per_hour.is_empty() && !unpriced.is_empty() {
        let names: Vec<&str> = unpriced.into_iter().map(String::as_str).collect();
        notes += &format!("no price for {}; add it to [per_hour] of the prices\n", names.join(", "));
    }
    aligned(&rows) + &notes
}

/// The possible growth of the traffic in words, as one of the steps that were tried.
fn headroom(found: f64) -> String {
    match found {
        least if least <= 0.0 => format!("below {:.0} %", (MORE[0] - 1.0) * 100.0),
        most if most >= MORE[MORE.len() - 1] - 1.0 => format!("{:.0} % or more", most * 100.0),
        between => format!("{:.0} %", between * 100.0),
    }
}

fn result_json(result: &PlanResult, prices: &Prices) -> Value {
    let mut value = json!({ "candidate": result.candidate, "load": result.load });
    match &result.needs {
        Ok(need) => {
            value["engines"] = need.engines.into();
            value["gpus"] = need.gpus.into();
            value["attainment"] = need.attainment.0.into();
            value["attainment_with_one_less"] = json!(need.with_one_less.as_ref().map(|(share, _)| share));
            value["headroom"] = need.headroom.into();
            value["with_a_batch"] = need.with_a_batch.into();
            if !prices.per_hour.is_empty() && !need.unpriced.is_empty() {
                value["unpriced"] = json!(need.unpriced);
            }
            if let Some(cost) = need.cost {
                value["cost"] = json!({
                    "currency": prices.currency,
                    "per_hour": cost.per_hour,
                    "per_request": cost.per_request,
                    "per_million_tokens": cost.per_million_tokens,
                    "per_million_output_tokens": cost.per_million_output,
                });
            }
        }
        Err(why) => value["error"] = why.as_str().into(),
    }
    value
}

fn rates(args: &RateArgs) -> Result<Vec<(String, SearchResult)>, LabError> {
    let scenario = Scenario::load(&args.file)?;
    let variants = sweep::vary(&scenario.file.variants(), &args.sweep)?;
    if variants.iter().any(|variant| variant.load.is_some()) {
        let text = "load has no effect here: the search replaces the rate; leave load out";
        return Err(LabError::Sweep(text.to_owned()));
    }
    let attainment = scenario.file.plan.attainment / 100.0;
    let search = |variant: &sluice_lab::Variant| {
        let lab = scenario.lab(variant)?;
        eprintln!("{}\n{}", variant.name, text::HEADER);
        let report = |trial: &TrialReport| eprintln!("{}", text::report(trial));
        Ok((variant.name.clone(), highest_rate(&lab, &goal(&lab.traffic, attainment, args.seed)?, report)?))
    };
    variants.iter().map(search).collect()
}

fn rate_table(rates: &[(String, SearchResult)]) -> String {
    let mut rows =
        vec![["variant", "proven rate (/s)", "attainment", "boundary (/s)", "trials"].map(str::to_owned).to_vec()];
    for (name, found) in rates {
        let best = found.best.map_or_else(|| "none".to_owned(), |best| number(best.rate));
        let boundary = found
            .boundary
            .map(|range| format!("{} (90 %: {} to {})", number(range.value), number(range.low), number(range.high)));
        let attainment = found.best.map(|best| format!("{:.1} %", best.attainment.value * 100.0));
        let [boundary, attainment] = [boundary, attainment].map(|text| text.unwrap_or_else(|| "-".to_owned()));
        rows.push(vec![name.clone(), best, attainment, boundary, found.trials.len().to_string()]);
    }
    aligned(&rows)
        + "boundary: the highest rate as estimated from all trials; a proven rate is lower by its safety margins\n"
}

fn rate_json(name: &str, found: &SearchResult) -> Value {
    json!({
        "variant": name,
        "rate": found.best.map(|best| best.rate),
        "attainment": found.best.map(|best| best.attainment.value),
        "boundary_90": found.boundary.map(|range| [range.low, range.value, range.high]),
        "ending": text::ending(found.ending),
        "trials": found.trials.len(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use sluice_lab::plan::Requirement;

    #[test]
    fn the_highest_rate_has_no_load() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let class = "{ name = \"a\", rate = 1, in = 10, out = 2, e2el = \"9s\" }";
        std::fs::write(file.path(), format!("[[traffic]]\nclass = [{class}]\n")).unwrap();
        let sweep = vec!["load=1,2".to_owned()];
        let args = RateArgs { file: file.path().to_owned(), sweep, seed: 1, json: false };
        let error = rates(&args).unwrap_err().to_string();
        assert!(error.contains("load has no effect here"), "{error}");
    }

    #[test]
    fn a_gpu_without_a_price_is_named_once_if_there_are_prices() {
        let needs = Requirement {
            engines: 2,
            gpus: 2,
            attainment: (100.0, "a".to_owned()),
            with_one_less: None,
            headroom: 0.25,
            with_a_batch: 100.0,
            cost: None,
            unpriced: vec!["h200".to_owned(), "l4".to_owned()],
        };
        let result = |load| PlanResult { candidate: "own".to_owned(), load, needs: Ok(needs.clone()) };
        let results = [result(1.0), result(2.0)];
        let prices = Prices { per_hour: [("a100-80".to_owned(), 1.0)].into(), ..Prices::default() };
        let table = plan_table(&results, &prices);
        assert_eq!(table.matches("no price for h200, l4; add it to [per_hour]").count(), 1, "{table}");
        assert_eq!(result_json(&results[0], &prices)["unpriced"], json!(["h200", "l4"]));
        assert!(!plan_table(&results, &Prices::default()).contains("no price"));
        assert!(table.contains("headroom") && table.contains("25 %") && !table.contains("busy"), "{table}");
    }

    #[test]
    fn headroom_is_the_step_that_was_met() {
        assert_eq!(
            [0.0, 0.1, 0.25, 1.0].map(headroom),
            ["below 10 %", "10 %", "25 %", "100 % or more"].map(str::to_owned)
        );
    }
}
