//! The output of a search: a line for each trial as it ends, and the result as text or JSON.
//!
//! Lines go to stderr, the result to stdout. Rates have four significant digits, shares are in
//! percent.

use std::io::Write as _;

use anyhow::Context as _;
use serde_json::{Value, json};

use sluice_bench::search::{
    DELIVERED, ProvenRate, SearchEnd, SearchGoal, SearchResult, TrialKind, TrialLoad, TrialReport, TrialVerdict,
};
use sluice_core::stats::Estimate;

pub(in crate::cli) const HEADER: &str = "run                        requests  within objectives     took  finding";

pub(super) fn load(load: &TrialLoad) -> String {
    match load {
        TrialLoad::Stream => "one stream".to_owned(),
        TrialLoad::Saturated(streams) => format!("{streams} streams"),
        TrialLoad::Rate(rate) => format!("{} per second", digits(*rate)),
    }
}

fn digits(value: f64) -> String {
    let places = (3.0 - value.abs().max(1e-9).log10().floor()).clamp(0.0, 9.0) as usize;
    format!("{value:.places$}")
}

fn kind(report: &TrialReport) -> &'static str {
    match (report.load, report.kind) {
        (TrialLoad::Stream | TrialLoad::Saturated(_), _) => "capacity",
        (_, TrialKind::Look) => "look",
        (_, TrialKind::Sample) => "sample",
        (_, TrialKind::Proof) => "proof",
    }
}

pub(in crate::cli) fn report(report: &TrialReport) -> String {
    let verdict = match (report.load, report.verdict) {
        (TrialLoad::Rate(_), TrialVerdict::Holds) => "holds".to_owned(),
        (TrialLoad::Rate(_), TrialVerdict::Fails) => "fails".to_owned(),
        _ => format!("{} per second", digits(report.stats.throughput.value)),
    };
    let late = if report.stats.delivered < DELIVERED {
        format!(" (this client sent {:.0} % of it)", report.stats.delivered * 100.0)
    } else {
        String::new()
    };
    format!(
        "{:<9}{:<18}{:>8}  {:>15.2} %  {:>5.0} s  {verdict}{late}",
        kind(report),
        load(&report.load),
        report.requests,
        report.attainment.value * 100.0,
        report.stats.seconds,
    )
}

pub(super) fn print(found: &SearchResult, goal: &SearchGoal, halted: bool, json: bool) -> anyhow::Result<()> {
    let text = if json { format!("{:#}\n", as_json(found, goal, halted)) } else { as_text(found, goal, halted) };
    std::io::stdout().write_all(text.as_bytes()).context("cannot write to stdout")
}

fn percent(share: f64) -> String {
    format!("{:.2} %", share * 100.0)
}

fn as_text(found: &SearchResult, goal: &SearchGoal, halted: bool) -> String {
    let wanted = format!("{} % of requests within their objectives", goal.attainment * 100.0);
    let mut text = match found.best {
        Some(ProvenRate { rate, attainment }) => format!(
            "Highest rate with {wanted}: {} requests per second\n  proven by a run of its own: {} were ({} to {}, 95 %)\n",
            digits(rate),
            percent(attainment.value),
            percent(attainment.low),
            percent(attainment.high),
        ),
        None => format!("No rate is proven to keep {wanted}.\n"),
    };
    if let Some(Estimate { value, low, high }) = found.boundary {
        text.push_str(&format!(
            "  all runs together put the boundary at {} per second ({} to {}, 90 %)\n",
            digits(value),
            digits(low),
            digits(high)
        ));
    }
    let seconds: f64 = found.trials.iter().map(|report| report.stats.seconds).sum();
    let requests: usize = found.trials.iter().map(|report| report.requests).sum();
    text.push_str(&format!("  {} runs, {requests} requests that counted, {seconds:.0} s\n", found.trials.len()));
    let why = match found.ending {
        _ if halted => "The search was ended early, so this result is not final.",
        SearchEnd::Found => return text,
        SearchEnd::NoRate => {
            "Requests fail or miss their objectives even at a very low rate. Loosen the \
             objectives, shorten the requests, or use a faster server; where they fail, the warnings say why."
        }
        SearchEnd::BelowFloor => "The highest rate is not above the rate that was asked for.",
        SearchEnd::ClientLimit => {
            "This client could not send as fast as required, so the server may sustain a higher rate. Use a faster \
             machine for the client, or longer requests."
        }
        SearchEnd::TrialLimit => {
            "The limit on runs was reached before the rate was known within the tolerance: a higher rate may hold too. \
             Raise --find-rate-runs or --find-rate-requests."
        }
    };
    text + why + "\n"
}

pub(in crate::cli) fn ending(end: SearchEnd) -> &'static str {
    match end {
        SearchEnd::Found => "found",
        SearchEnd::NoRate => "no_rate",
        SearchEnd::BelowFloor => "below_floor",
        SearchEnd::ClientLimit => "client_limit",
        SearchEnd::TrialLimit => "out_of_runs",
    }
}

fn as_json(found: &SearchResult, goal: &SearchGoal, halted: bool) -> Value {
    let ending = if halted { "stopped" } else { ending(found.ending) };
    let report = |report: &TrialReport| {
        let rate = if let TrialLoad::Rate(rate) = report.load { json!(rate) } else { Value::Null };
        json!({
            "load": load(&report.load),
            "request_rate": rate,
            "kind": kind(report),
            "holds": matches!(report.load, TrialLoad::Rate(_)).then_some(report.verdict == TrialVerdict::Holds),
            "requests": report.requests,
            "attainment": report.attainment,
            "request_throughput": report.stats.throughput,
            "delivered": report.stats.delivered,
            "duration": report.stats.seconds,
        })
    };
    json!({
        "request_rate": found.best.map(|best| best.rate),
        "attainment": found.best.map(|best| best.attainment),
        "boundary": found.boundary,
        "target": goal.attainment,
        "ending": ending,
        "runs": found.trials.iter().map(report).collect::<Vec<_>>(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use sluice_bench::search::TrialStats;

    fn found() -> SearchResult {
        let attainment = Estimate { value: 0.9931, low: 0.9899, high: 0.9953 };
        let throughput = Estimate { value: 31.5, low: 31.0, high: 32.0 };
        let stats = TrialStats { throughput, delivered: 1.0, seconds: 142.4 };
        let load = TrialLoad::Rate(31.416);
        let report = TrialReport {
            load,
            kind: TrialKind::Proof,
            verdict: TrialVerdict::Holds,
            requests: 4500,
            group: 0,
            attainment,
            stats,
        };
        let boundary = Some(Estimate { value: 32.0, low: 31.0, high: 33.0 });
        SearchResult {
            best: Some(ProvenRate { rate: 31.416, attainment }),
            boundary,
            most: 40.0,
            safe: None,
            ending: SearchEnd::Found,
            trials: vec![report],
        }
    }

    #[test]
    fn the_result_is_a_rate_with_its_proof() {
        let text = as_text(&found(), &SearchGoal::new(2.0), false);
        assert!(
            text.starts_with("Highest rate with 99 % of requests within their objectives: 31.42 requests per second\n")
        );
        assert!(
            text.contains("99.31 % were (98.99 % to 99.53 %, 95 %)")
                && text.contains("32.00 per second (31.00 to 33.00, 90 %)")
        );
        let line = report(&found().trials[0]);
        assert_eq!(line, "proof    31.42 per second      4500            99.31 %    142 s  holds");
        assert_eq!(line.find("99.31").map(|at| at + 7), HEADER.find("     took"), "under its head");
        let json = as_json(&found(), &SearchGoal::new(2.0), false);
        assert_eq!(
            (&json["ending"], &json["runs"][0]["kind"], &json["runs"][0]["holds"]),
            (&json!("found"), &json!("proof"), &json!(true))
        );
    }

    #[test]
    fn a_search_without_a_result_says_what_to_do() {
        let nothing = |ending| SearchResult {
            best: None,
            boundary: None,
            most: f64::INFINITY,
            safe: None,
            ending,
            trials: Vec::new(),
        };
        let text = |ending| as_text(&nothing(ending), &SearchGoal::new(2.0), false);
        assert!(text(SearchEnd::NoRate).contains("Loosen the objectives"));
        assert!(text(SearchEnd::ClientLimit).contains("faster machine"));
        assert!(text(SearchEnd::TrialLimit).contains("--find-rate-runs"));
        assert!(as_text(&nothing(SearchEnd::TrialLimit), &SearchGoal::new(2.0), true).contains("ended early"));
        assert_eq!(as_json(&nothing(SearchEnd::NoRate), &SearchGoal::new(2.0), false)["request_rate"], Value::Null);
    }
}
