//! Experiments as text: a table of all, and one experiment with its arms, quantities and verdicts.
//!
//! Latencies are in milliseconds. An interval after a change holds at all times, whenever it is
//! looked at.

use comfy_table::presets::UTF8_HORIZONTAL_ONLY;
use comfy_table::{ContentArrangement, Table};

use crate::cli::terminal::stdout_width;
use sluice_gateway::experiment::report::{ArmReport, ChangeReport, ComparisonReport, Range, RateReport};
use sluice_gateway::experiment::verdict::QUALITY;
use sluice_gateway::experiment::{ExperimentReport, Quantity};

pub(super) fn list(all: &[ExperimentReport]) -> String {
    if all.is_empty() {
        return "there are no experiments; declare them in [[experiment]] of the configuration".to_owned();
    }
    let mut table = table(&["experiment", "phase", "units", "requests", "verdict"]);
    for report in all {
        let requests: Vec<String> = report.arms.iter().map(|arm| format!("{} {}", arm.name, arm.requests)).collect();
        table.add_row([
            report.name.clone(),
            phase_of(report),
            percent(report.exposure),
            requests.join("\n"),
            verdicts(report).join("\n"),
        ]);
    }
    table.to_string()
}

pub(super) fn phase(report: &ExperimentReport) -> String {
    let why = report.why.as_ref().map_or_else(String::new, |why| format!(" ({why})"));
    format!("{} is {}{why}", report.name, phase_of(report))
}

fn phase_of(report: &ExperimentReport) -> String {
    report.promoted.as_ref().map_or_else(|| report.phase.clone(), |arm| format!("promoted: {arm}"))
}

/// A sentence for each arm: the decision, or else the current state.
pub(super) fn verdicts(report: &ExperimentReport) -> Vec<String> {
    let sentence = |comparison: &ComparisonReport| match &comparison.decided {
        Some(decided) => format!("{} (after {} requests)", decided.sentence, decided.requests),
        None => comparison.sentence.clone(),
    };
    let mismatches = report.comparisons.iter().filter_map(|comparison| {
        let mismatch = comparison.mismatch?;
        Some(format!(
            "do not trust this: {} of the requests are in {}, which is not what was configured; \
             check what is sticky, and whether something before the gateway drops requests",
            percent(mismatch.value),
            comparison.arm
        ))
    });
    let stops = report.arms.iter().filter_map(|arm| arm.stopped.clone().or_else(|| arm.waiting.clone()));
    mismatches.chain(stops).chain(report.comparisons.iter().map(sentence)).collect()
}

pub(super) fn causes(comparison: &ComparisonReport) -> impl Iterator<Item = String> {
    comparison.diagnosis.iter().map(|cause| format!("{}: {}", comparison.arm, cause.sentence))
}

pub(super) fn show(report: &ExperimentReport) -> String {
    let mut text = format!(
        "{}: {} of the units ({}) take part; confidence {} at all times together\n",
        phase(report),
        percent(report.exposure),
        report.sticky,
        percent(report.confidence)
    );
    verdicts(report).iter().for_each(|line| text += &format!("{line}\n"));
    text += &format!("\n{}\n", rows_as_table(&arm_rows(report)));
    report.arms.iter().filter_map(copies).for_each(|line| text += &format!("{line}\n"));
    for comparison in &report.comparisons {
        text += &format!("\n{}\n", rows_as_table(&comparison_rows(report, comparison)));
        causes(comparison).for_each(|line| text += &format!("{line}\n"));
    }
    text.trim_end().to_owned()
}

fn copies(arm: &ArmReport) -> Option<String> {
    let copies = arm.copies.as_ref()?;
    let ended = copies.ended.iter().map(|(outcome, count)| format!("{} {count}", outcome.label().replace('_', " ")));
    Some(format!("copies for {}: in flight {}, {}", arm.name, copies.in_flight, ended.collect::<Vec<_>>().join(", ")))
}

pub(super) fn arm_rows(report: &ExperimentReport) -> Vec<Vec<String>> {
    let head = ["arm", "share", "model", "requests", "failed", "missed", "fell back"];
    let row = |arm: &ArmReport| {
        vec![
            arm.name.clone(),
            arm.copies
                .as_ref()
                .map_or_else(|| percent(arm.share), |copies| format!("copies of {}", percent(copies.share))),
            arm.model.clone().unwrap_or_else(|| "as sent".to_owned()),
            arm.requests.to_string(),
            arm.failed.to_string(),
            if arm.missed.1 > 0 { format!("{} of {}", arm.missed.0, arm.missed.1) } else { "-".to_owned() },
            arm.fell_back.to_string(),
        ]
    };
    std::iter::once(head.map(str::to_owned).to_vec()).chain(report.arms.iter().map(row)).collect()
}

pub(super) fn comparison_rows(report: &ExperimentReport, comparison: &ComparisonReport) -> Vec<Vec<String>> {
    let control = &report.arms[0];
    let arm = report.arms.iter().find(|arm| arm.name == comparison.arm);
    let head = ["", "change", "interval", "P50", "P95", "requests", "planned", "verdict"];
    let mut rows = vec![head.map(str::to_owned).to_vec()];
    rows[0][0] = format!("{} beside {}", comparison.arm, control.name);
    for change in &comparison.changes {
        let both = |pick: fn(&sluice_gateway::experiment::report::QuantityReport) -> f64| {
            let of = |arm: &ArmReport| {
                let found = arm.quantities.iter().find(|one| one.quantity == change.quantity);
                found.map_or_else(|| "-".to_owned(), |one| value(change.quantity, pick(one)))
            };
            format!("{} / {}", arm.map_or_else(|| "-".to_owned(), of), of(control))
        };
        let known = change.change.filter(|_| change.used > 0);
        rows.push(vec![
            change.quantity.label().to_owned(),
            known.map_or_else(|| "-".to_owned(), |range| signed(range.value)),
            known.map_or_else(|| "-".to_owned(), interval),
            both(|one| one.p50.value),
            both(|one| one.p95.value),
            change.used.to_string(),
            planned(change),
            change.conclusion.map_or_else(String::new, |conclusion| conclusion.words().to_owned()),
        ]);
    }
    let counts = |of: fn(&ArmReport) -> u64| (arm.map_or(0, of), of(control));
    let (requests, judged) = (counts(|arm| arm.requests), counts(|arm| arm.missed.1));
    rows.push(rate_row("errors", &comparison.failures, requests, "no requests yet"));
    let none = if requests.0 + requests.1 > 0 { "no objectives" } else { "no requests yet" };
    rows.push(rate_row("missed objectives", &comparison.misses, judged, none));
    let seen = |rates: &RateReport| rates.arm > 0.0 || rates.control > 0.0;
    let quality = QUALITY.iter().zip(&comparison.quality).filter(|(_, rates)| seen(rates));
    rows.extend(quality.map(|(name, rates)| rate_row(name, rates, requests, "no requests yet")));
    rows
}

/// A row about an event's frequency in the arm and in the control. `counts`: the requests in the
/// arm and in the control. `none`: the verdict if one of them has no requests.
fn rate_row(name: &str, rates: &RateReport, counts: (u64, u64), none: &str) -> Vec<String> {
    let times = |range: Range| {
        let end = |end: Option<f64>| end.map_or_else(|| "..".to_owned(), |end| format!("{end:.2}"));
        format!("x {} to {}", end(range.low), end(range.high))
    };
    let is_known = counts.0 > 0 && counts.1 > 0;
    let share = |count: u64, share: f64| if count > 0 { percent(share) } else { "-".to_owned() };
    vec![
        name.to_owned(),
        format!("{} / {}", share(counts.0, rates.arm), share(counts.1, rates.control)),
        rates.times.filter(|_| is_known).map_or_else(|| "-".to_owned(), times),
        String::new(),
        String::new(),
        String::new(),
        String::new(),
        match (is_known, rates.worse) {
            (false, _) => none,
            (true, true) => "worse",
            (true, false) => "no harm found",
        }
        .to_owned(),
    ]
}

fn planned(change: &ChangeReport) -> String {
    change.planned.map_or_else(|| "-".to_owned(), |planned| planned.max(1).to_string())
}

fn interval(range: Range) -> String {
    match (range.low, range.high) {
        (Some(low), Some(high)) => format!("{} to {}", signed(low), signed(high)),
        _ => "too few requests".to_owned(),
    }
}

fn value(quantity: Quantity, value: f64) -> String {
    match quantity {
        Quantity::Tokens => format!("{:.0}", value * 1e3),
        _ => format!("{:.1} ms", value * 1e3),
    }
}

fn signed(share: f64) -> String {
    format!("{:+.1} %", share * 100.0)
}

fn percent(share: f64) -> String {
    format!("{:.1} %", share * 100.0)
}

fn table(head: &[&str]) -> Table {
    let mut table = Table::new();
    table.load_preset(UTF8_HORIZONTAL_ONLY);
    table.set_header(head);
    if let Some(width) = stdout_width() {
        table.set_content_arrangement(ContentArrangement::Dynamic).set_width(u16::try_from(width).unwrap_or(u16::MAX));
    }
    table
}

fn rows_as_table(rows: &[Vec<String>]) -> Table {
    let head: Vec<&str> = rows[0].iter().map(String::as_str).collect();
    let mut table = table(&head);
    table.add_rows(&rows[1..]);
    table
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rate_of_nothing_is_no_verdict() {
        let rates = RateReport {
            control: 0.0,
            arm: 0.0,
            times: Some(Range { value: 1.0, low: None, high: None }),
            worse: false,
        };
        let row = |counts, none| rate_row("errors", &rates, counts, none);
        let (first, last) = (|row: &[String]| row[1].clone(), |row: &[String]| row[7].clone());
        let none = row((0, 0), "no requests yet");
        assert_eq!((first(&none).as_str(), none[2].as_str(), last(&none).as_str()), ("- / -", "-", "no requests yet"));
        let one_side = row((3, 0), "no objectives");
        assert_eq!((first(&one_side).as_str(), last(&one_side).as_str()), ("0.0 % / -", "no objectives"));
        let both = row((3, 4), "no objectives");
        assert_eq!((first(&both).as_str(), last(&both).as_str()), ("0.0 % / 0.0 %", "no harm found"));
    }
}
