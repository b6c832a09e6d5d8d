//! What a search says: a line for each run as it ends, and the result for people and for programs.
//!
//! Lines go to stderr, the result to stdout. Rates are in requests per second, shares in percent; intervals say their
//! confidence. A search that did not find what it was asked for says what to do.

use std::io::Write as _;

use anyhow::Context as _;
use serde_json::{Value, json};

use crate::bench::search::{DELIVERED, Ending, Finding, Found, Goal, Load, Manner, Step};
use crate::stats::Estimate;

/// The head of the lines.
pub(super) const STEPS: &str = "run                        requests  within objectives     took  finding";

/// What is sent, in words.
pub(super) fn load(load: &Load) -> String {
    match load {
        Load::Stream => "one stream".to_owned(),
        Load::Saturated(streams) => format!("{streams} streams"),
        Load::Rate(rate) => format!("{} per second", digits(*rate)),
    }
}

/// Four digits that matter.
fn digits(value: f64) -> String {
    let places = (3.0 - value.abs().max(1e-9).log10().floor()).clamp(0.0, 9.0) as usize;
    format!("{value:.places$}")
}

fn manner(step: &Step) -> &'static str {
    match (step.load, step.manner) {
        (Load::Stream | Load::Saturated(_), _) => "capacity",
        (_, Manner::Look) => "look",
        (_, Manner::Sample) => "sample",
        (_, Manner::Proof) => "proof",
    }
}

/// One run.
pub(super) fn step(step: &Step) -> String {
    let finding = match (step.load, step.finding) {
        (Load::Rate(_), Finding::Holds) => "holds".to_owned(),
        (Load::Rate(_), Finding::Fails) => "fails".to_owned(),
        _ => format!("{} per second", digits(step.seen.throughput.value)),
    };
    let late = if step.seen.delivered < DELIVERED {
        format!(" (this client sent {:.0} % of it)", step.seen.delivered * 100.0)
    } else {
        String::new()
    };
    format!(
        "{:<9}{:<18}{:>8}  {:>15.2} %  {:>5.0} s  {finding}{late}",
        manner(step),
        load(&step.load),
        step.requests,
        step.attainment.value * 100.0,
        step.seen.seconds,
    )
}

/// Prints the result.
pub(super) fn print(found: &Found, goal: &Goal, halted: bool, json: bool) -> anyhow::Result<()> {
    let text = if json { format!("{:#}\n", as_json(found, goal, halted)) } else { as_text(found, goal, halted) };
    std::io::stdout().write_all(text.as_bytes()).context("cannot write to stdout")
}

fn percent(share: f64) -> String {
    format!("{:.2} %", share * 100.0)
}

fn as_text(found: &Found, goal: &Goal, halted: bool) -> String {
    let wanted = format!("{} % of requests within their objectives", goal.attainment * 100.0);
    let mut text = match found.best {
        Some((rate, attainment)) => format!(
            "Highest rate with {wanted}: {} requests per second\n  proven by a run of its own: {} were ({} to {}, 95 %)\n",
            digits(rate),
            percent(attainment.value),
            percent(attainment.low),
            percent(attainment.high),
        ),
        None => format!("No rate is proven to keep {wanted}.\n"),
    };
    if let Some(Estimate { value, low, high }) = found.capacity {
        text.push_str(&format!(
            "  all runs together put the boundary at {} per second ({} to {}, 90 %)\n",
            digits(value),
            digits(low),
            digits(high)
        ));
    }
    let seconds: f64 = found.steps.iter().map(|step| step.seen.seconds).sum();
    let requests: usize = found.steps.iter().map(|step| step.requests).sum();
    text.push_str(&format!("  {} runs, {requests} requests that counted, {seconds:.0} s\n", found.steps.len()));
    let why = match found.ending {
        _ if halted => "The search was ended early; nothing above is more than a beginning.",
        Ending::Found => return text,
        Ending::NoRate => {
            "Requests fail or miss their objectives even when they are alone, or nearly: no rate helps. Loosen the \
             objectives, shorten the requests, or use a faster server; where they fail, the warnings say why."
        }
        Ending::ClientLimit => {
            "This client could not send as fast as it was asked to, so the server may bear more. Use a faster \
             machine, or longer requests."
        }
        Ending::OutOfProbes => {
            "The bound on runs came before the rate was known within the tolerance: a higher rate may hold too. \
             Raise --find-rate-runs or --find-rate-requests."
        }
    };
    text + why + "\n"
}

fn as_json(found: &Found, goal: &Goal, halted: bool) -> Value {
    let end = |value: f64| if value.is_finite() { json!(value) } else { Value::Null };
    let estimate = |of: &Estimate| json!({"value": end(of.value), "low": end(of.low), "high": end(of.high)});
    let ending = match found.ending {
        _ if halted => "stopped",
        Ending::Found => "found",
        Ending::NoRate => "no_rate",
        Ending::ClientLimit => "client_limit",
        Ending::OutOfProbes => "out_of_runs",
    };
    let step = |step: &Step| {
        let rate = if let Load::Rate(rate) = step.load { json!(rate) } else { Value::Null };
        json!({
            "load": load(&step.load),
            "request_rate": rate,
            "kind": manner(step),
            "holds": matches!(step.load, Load::Rate(_)).then_some(step.finding == Finding::Holds),
            "requests": step.requests,
            "attainment": estimate(&step.attainment),
            "request_throughput": estimate(&step.seen.throughput),
            "delivered": end(step.seen.delivered),
            "duration": step.seen.seconds,
        })
    };
    json!({
        "request_rate": found.best.map(|(rate, _)| rate),
        "attainment": found.best.map(|(_, attainment)| estimate(&attainment)),
        "boundary": found.capacity.as_ref().map(estimate),
        "target": goal.attainment,
        "ending": ending,
        "runs": found.steps.iter().map(step).collect::<Vec<_>>(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::search::Seen;

    fn found() -> Found {
        let attainment = Estimate { value: 0.9931, low: 0.9899, high: 0.9953 };
        let throughput = Estimate { value: 31.5, low: 31.0, high: 32.0 };
        let seen = Seen { throughput, delivered: 1.0, seconds: 142.4 };
        let load = Load::Rate(31.416);
        let step = Step { load, manner: Manner::Proof, finding: Finding::Holds, requests: 4500, attainment, seen };
        let capacity = Some(Estimate { value: 32.0, low: 31.0, high: 33.0 });
        Found { best: Some((31.416, attainment)), capacity, ending: Ending::Found, steps: vec![step] }
    }

    #[test]
    fn the_result_is_a_rate_with_its_proof() {
        let text = as_text(&found(), &Goal::new(2.0), false);
        assert!(
            text.starts_with("Highest rate with 99 % of requests within their objectives: 31.42 requests per second\n")
        );
        assert!(
            text.contains("99.31 % were (98.99 % to 99.53 %, 95 %)")
                && text.contains("32.00 per second (31.00 to 33.00, 90 %)")
        );
        let line = step(&found().steps[0]);
        assert_eq!(line, "proof    31.42 per second      4500            99.31 %    142 s  holds");
        assert_eq!(line.find("99.31").map(|at| at + 7), STEPS.find("     took"), "under its head");
        let json = as_json(&found(), &Goal::new(2.0), false);
        assert_eq!(
            (&json["ending"], &json["runs"][0]["kind"], &json["runs"][0]["holds"]),
            (&json!("found"), &json!("proof"), &json!(true))
        );
    }

    #[test]
    fn what_was_not_found_says_what_to_do() {
        let nothing = |ending| Found { best: None, capacity: None, ending, steps: Vec::new() };
        let text = |ending| as_text(&nothing(ending), &Goal::new(2.0), false);
        assert!(text(Ending::NoRate).contains("Loosen the objectives"));
        assert!(text(Ending::ClientLimit).contains("faster machine"));
        assert!(text(Ending::OutOfProbes).contains("--find-rate-runs"));
        assert!(as_text(&nothing(Ending::OutOfProbes), &Goal::new(2.0), true).contains("ended early"));
        assert_eq!(as_json(&nothing(Ending::NoRate), &Goal::new(2.0), false)["request_rate"], Value::Null);
    }
}
