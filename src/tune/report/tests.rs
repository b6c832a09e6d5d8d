//! Reports of tunings with known outcomes: the order, the place of each number, and that no number
//! is made up.

use sluice_core::stats::{Change, Estimate, Sense};

use super::{answer, flags, json, page, result_txt, table};
use crate::file::TuneTable;
use crate::goal::Goal;
use crate::setting::{Setting, value};
use crate::trial::{Certified, Effort, Outcome, Trial};
use crate::tuner::{Comparison, Report};

fn range(value: f64, low: f64, high: f64) -> Estimate {
    Estimate { value, low, high }
}

fn measured(setting: &Setting, effort: Effort, value: Estimate) -> Trial {
    let certified =
        Certified { rate: value.value * 0.97, attainment: range(0.992, 0.99, 0.994), proofs: 3, requests: 4500 };
    let certified = (effort == Effort::Confirm).then_some(certified);
    Trial { outcome: Outcome::Measured { value, runs: Vec::new(), certified }, ..Trial::new(setting, effort, 1) }
}

fn goal() -> Goal {
    Goal::new(&TuneTable::default(), 1).unwrap()
}

/// The grid of auto_tune.sh. The search found 18.5 for the defaults and the winner. The
/// confirmations found the values given.
fn report(default: Estimate, winner: Estimate) -> Report {
    let (untuned, best) = (Setting::new(), setting(256, 2048));
    let search = Effort::Race(None);
    let lost = Trial { outcome: Outcome::Worse { guess: 18.5 }, ..Trial::new(&setting(128, 2048), search, 1) };
    let confirmed =
        [&best, &untuned].map(|own| measured(own, Effort::Confirm, if own.is_empty() { default } else { winner }));
    let rough = range(18.5, 18.3, 18.8);
    let trials = [measured(&untuned, search, rough), lost, measured(&best, search, rough)];
    let change = Change::ratio(&default, &winner);
    let verdict = change.verdict(Sense::HigherIsBetter, goal().margin);
    Report {
        trials: trials.into_iter().chain(confirmed.clone()).collect(),
        predicted: Vec::new(),
        pruned: Vec::new(),
        settings: 3,
        winner: Some(confirmed[0].clone()),
        default: Some(confirmed[1].clone()),
        comparison: Some(Comparison { change: change.0, verdict }),
        front: Vec::new(),
        out_of_budget: false,
        real: false,
    }
}

fn setting(seqs: u32, tokens: u32) -> Setting {
    let pairs = [("vllm.max-num-seqs", seqs), ("vllm.max-num-batched-tokens", tokens)];
    pairs.iter().map(|(key, number)| ((*key).to_owned(), value(&number.to_string()))).collect()
}

#[test]
fn defaults_that_are_as_good_come_first_and_nothing_is_to_be_changed() {
    for (winner, first) in [
        (range(19.7, 19.6, 19.8), "the defaults are as good: keep them. "),
        (range(20.2, 18.5, 22.0), "the defaults may be as good: keep them, or measure longer. "),
        (range(15.0, 14.9, 15.1), "the defaults are better: keep them. "),
    ] {
        let (report, goal) = (report(range(19.6, 19.5, 19.7), winner), goal());
        let lines = answer::answer(&report, &goal);
        assert!(lines[0].starts_with(first) && lines[1].starts_with("defaults: "), "{lines:?}");
        assert_eq!(answer::advised(&report, &goal), Some(Setting::new()));
        let found = json::json(&report, &goal);
        assert_eq!((&found["patch"], found["use"].as_array().unwrap().len()), (&serde_json::json!(""), 0));
        let text = table::text(&report, &goal);
        let rows: Vec<&str> = text.lines().skip_while(|line| !line.starts_with("setting")).skip(1).collect();
        assert!(rows[0].starts_with("defaults") && !text.contains("vllm serve"), "{text}");
        let script = result_txt::text(&report, &goal);
        assert!(script.contains("\nbest_max_num_seqs: default, best_num_batched_tokens: default, "), "{script}");
    }
}

#[test]
fn defaults_without_a_certified_rate_are_not_kept() {
    let (mut report, goal) = (report(range(19.6, 18.5, 20.7), range(20.2, 18.5, 22.0)), goal());
    let uncertified = |trial: &mut Trial| {
        let Outcome::Measured { certified, .. } = &mut trial.outcome else { panic!("it was measured") };
        *certified = None;
    };
    report.default.iter_mut().for_each(uncertified);
    let lines = answer::answer(&report, &goal);
    assert!(lines[0].starts_with("best: ") && lines[0].contains("requests/s certified"), "{lines:?}");
    assert!(lines[1].starts_with("defaults: no rate is certified"), "{lines:?}");
    assert!(lines[2].starts_with("only the best setting has a certified rate; the estimated"), "{lines:?}");
    assert!(!lines.concat().contains("keep them"), "{lines:?}");
    let winner = report.winner.clone().unwrap();
    assert_eq!(answer::advised(&report, &goal), Some(winner.setting));
    // If neither setting has a certified rate, the defaults may be as good.
    report.winner.iter_mut().for_each(uncertified);
    assert_eq!(answer::advised(&report, &goal), Some(Setting::new()));
}

#[test]
fn a_winner_that_is_certainly_better_comes_first_with_its_flags() {
    let (report, goal) = (report(range(18.0, 17.9, 18.1), range(19.6, 19.4, 19.7)), goal());
    let lines = answer::answer(&report, &goal);
    assert!(
        lines[0].starts_with("best: max-num-batched-tokens=2048 max-num-seqs=256: 19.0 requests/s certified"),
        "{lines:?}"
    );
    assert!(
        lines[2].starts_with("the gain over the defaults: the estimated highest rate changes by +8.9 %"),
        "{lines:?}"
    );
    let advised = answer::advised(&report, &goal).unwrap();
    assert_eq!(
        flags::patch(&advised),
        "# launch.args of every [[pool.backend]]\nmax-num-batched-tokens = 2048\nmax-num-seqs = 256\n"
    );
    assert!(result_txt::text(&report, &goal).contains("\nbest_max_num_seqs: 256, best_num_batched_tokens: 2048, "));
}

#[test]
fn a_rate_has_one_interval_that_of_its_confirmation_and_every_column_says_what_it_is() {
    let (report, goal) = (report(range(19.6, 19.4, 19.7), range(19.6, 19.4, 19.7)), goal());
    let text = table::text(&report, &goal);
    assert!(!text.contains("18.3") && !text.contains("18.8"), "{text}");
    let row = text.lines().find(|line| line.starts_with("defaults")).unwrap();
    let cells: Vec<&str> = row.split("  ").map(str::trim).filter(|cell| !cell.is_empty()).collect();
    assert_eq!(cells, ["defaults", "18.5", "19.6 (19.4 to 19.7)", "19.0"], "{text}");
    for meaning in [
        "search: a rough estimate",
        "confirmed: the estimate from other and more loads",
        "certified: the rate below it",
    ] {
        assert!(text.contains(meaning), "{text}");
    }
    // A setting that lost a race has no value anywhere.
    let lost = text.lines().find(|line| line.contains("max-num-seqs=128")).unwrap();
    assert!(lost.contains("not better") && !lost.contains("18"), "{lost}");
}

#[test]
fn every_form_says_whether_the_engines_were_real() {
    let goal = goal();
    for (real, own, other) in [(true, "real", "simulated"), (false, "simulated", "real")] {
        let report = Report { real, ..report(range(18.0, 17.9, 18.1), range(19.6, 19.4, 19.7)) };
        let page = page::page("title", &report, &goal);
        let text = table::text(&report, &goal);
        for form in [&page, &text] {
            assert!(
                form.contains(&format!("on {own} engines")) && !form.contains(&format!("{other} engines")),
                "{form}"
            );
        }
        assert!(page.contains(&format!("Engines are {own}")) && !page.contains(&format!("Engines are {other}")));
        assert_eq!(json::json(&report, &goal)["engines"], own);
    }
}

#[test]
fn what_is_unknown_is_said_in_words() {
    let (report, goal) = (report(range(18.0, 17.9, 18.1), range(19.6, 19.4, 19.7)), goal());
    let script = result_txt::text(&report, &goal).to_lowercase();
    assert!(script.contains("e2el: unknown") && !script.contains("nan"), "{script}");
    // A default without a value in the confirmation.
    let mut report = report;
    report.comparison = None;
    report.default =
        Some(Trial { outcome: Outcome::Worse { guess: 0.0 }, ..Trial::new(&Setting::new(), Effort::Confirm, 1) });
    let lines = answer::answer(&report, &goal);
    assert_eq!(lines[1], "defaults: no value, when it was measured again");
    assert!(answer::advised(&report, &goal).is_some_and(|advised| !advised.is_empty()));
}
