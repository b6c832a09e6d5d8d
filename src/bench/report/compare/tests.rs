//! Comparisons of synthetic runs whose difference is known.
//!
//! One test counts how often equal runs are called different.

use super::*;
use crate::result::record::{ClassConfig, GatewayClass, Slo};
use crate::result::slices;
use sluice_core::base::Rng;

/// An open loop at 20 requests per second, with latencies times `slower`.
fn run(seed: u64, requests: u64, slower: f64) -> RunResult {
    let mut rng = Rng::new(Rng::new(seed).next_u64());
    let record = |index: u64| {
        let sent = index as f64 / 20.0;
        let ttft = slower * (0.05 + 0.002 * rng.exponential());
        let itls: Vec<f64> = (0..9).map(|_| slower * (0.009 + 0.002 * rng.unit())).collect();
        let latency = ttft + itls.iter().sum::<f64>();
        let outcome = Outcome::Completed;
        Record {
            index,
            sent,
            ended: sent + latency,
            outcome,
            prompt_tokens: 100,
            output_tokens: Some(10),
            ttft,
            latency,
            itls,
            ..Record::default()
        }
    };
    let requests: Vec<Record> = (0..requests).map(record).collect();
    let duration = requests.iter().map(|record| record.ended).fold(0.0, f64::max);
    RunResult { requests, duration, ..RunResult::default() }
}

fn compared(a: &RunResult, b: &RunResult) -> Comparison {
    compare(a, b, CompareOptions::default()).unwrap()
}

#[test]
fn what_prefix_caches_kept_of_the_first_run_is_named() {
    let with = |seed: u64, flags: &[&str], cached: Option<u64>| {
        let mut run = run(1, 50, 1.0);
        run.config.version = "0.1.0".to_owned();
        run.config.seed = seed;
        run.config.arguments = flags.iter().map(|flag| (*flag).to_owned()).collect();
        run.requests.iter_mut().for_each(|record| record.cached_tokens = cached);
        run
    };
    let said =
        |a: &RunResult, b: &RunResult| compared(a, b).notes.into_iter().find(|note| note.contains("prefix caches"));
    let same = said(&with(1, &[], None), &with(1, &[], None)).unwrap();
    assert!(same.starts_with("both runs sent the same prompts to the same servers"), "{same}");
    assert_eq!(said(&with(1, &[], None), &with(2, &[], None)), None);
    let emptied = with(1, &["--reset-prefix-cache"], None);
    assert_eq!(said(&emptied, &emptied), None);
    let known = said(&with(1, &[], Some(0)), &with(1, &[], Some(90))).unwrap();
    assert_eq!(known, "0 % of the prompt tokens were in prefix caches in A and 90 % in B");
    assert_eq!(said(&with(1, &[], Some(0)), &with(1, &[], Some(0))), None);
}

#[test]
fn two_equal_runs_are_rarely_called_different() {
    let mut different = 0;
    for seed in 0..30 {
        let comparison = compared(&run(2 * seed, 1000, 1.0), &run(2 * seed + 1, 1000, 1.0));
        different += usize::from(!matches!(comparison.word(), "no difference" | "undecided"));
    }
    assert!(different <= 4, "{different} of 30");
}

#[test]
fn two_long_equal_runs_have_no_difference_and_a_slower_one_is_worse() {
    let (a, b) = (run(1, 6000, 1.0), run(2, 6000, 1.0));
    let same = compared(&a, &b);
    assert_eq!(same.word(), "no difference", "{:?}", same.rows);
    assert_eq!(same.verdict(), "No difference: every change is within ±5 %.");
    let slower = compared(&a, &run(3, 6000, 1.2));
    assert_eq!(slower.word(), "worse");
    let verdicts: Vec<Verdict> =
        slower.rows.iter().filter(|row| row.unit == Unit::Seconds).map(|row| row.verdict).collect();
    assert_eq!(verdicts, [Verdict::Worse; 8]);
    let row = slower.rows.iter().find(|row| row.name == "TTFT P50").unwrap();
    assert!(row.change.0.contains(0.2) && (row.change.0.value - 0.2).abs() < 0.02, "{row:?}");
    assert_eq!(compared(&run(3, 6000, 1.2), &a).word(), "better");
    let throughput = slower.rows.iter().find(|row| row.name == "requests/s").unwrap();
    assert_eq!(throughput.verdict, Verdict::NoDifference, "an open loop delivers its configured rate");
}

#[test]
fn a_tail_of_few_requests_is_undecided() {
    let comparison = compared(&run(1, 100, 1.0), &run(2, 100, 1.03));
    let tail = comparison.rows.iter().find(|row| row.name == "TTFT P99").unwrap();
    assert_eq!(tail.verdict, Verdict::Undecided);
    assert!(tail.rough && tail.a.is_bounded());
    assert!(comparison.json()["rows"][3]["a"]["value"].is_number());
    assert!(comparison.verdict().contains("too short to decide"));
}

#[test]
fn a_large_difference_is_found_in_few_requests_and_in_an_overloaded_run() {
    let few = compared(&run(1, 150, 1.0), &run(2, 150, 1.5));
    assert_eq!(few.word(), "worse");
    assert!(
        few.rows.iter().filter(|row| row.unit == Unit::Seconds).all(|row| row.verdict == Verdict::Worse),
        "{few:?}"
    );
    let mut growing = run(3, 800, 1.0);
    for record in &mut growing.requests {
        record.ttft += record.sent * 0.1;
        record.latency += record.sent * 0.1;
    }
    let comparison = compared(&run(4, 800, 1.0), &growing);
    let verdict = |name: &str| comparison.rows.iter().find(|row| row.name == name).unwrap().verdict;
    assert_eq!((verdict("TTFT P50"), verdict("TPOT P50")), (Verdict::Worse, Verdict::NoDifference));
}

#[test]
fn failures_and_objectives_are_compared_as_shares() {
    let a = RunResult {
        config: RunConfig { slo: Slo { ttft: Some(60.0), ..Slo::default() }, ..RunConfig::default() },
        ..run(1, 2000, 1.0)
    };
    let mut b = RunResult { config: a.config.clone(), ..run(2, 2000, 1.3) };
    for record in b.requests.iter_mut().step_by(10) {
        record.outcome = Outcome::Failed("status 503".into());
    }
    let comparison = compared(&a, &b);
    let row = |name: &str| comparison.rows.iter().find(|row| row.name == name).unwrap();
    assert_eq!((row("failed").verdict, row("within objectives").verdict), (Verdict::Worse, Verdict::Worse));
    assert!((row("failed").change.0.value - 0.1).abs() < 1e-9);
    b.config.slo.ttft = Some(90.0);
    let differing = compared(&a, &b);
    assert!(differing.rows.iter().all(|row| row.name != "within objectives"));
    assert!(differing.notes.iter().any(|note| note.contains("objectives differ")));
}

#[test]
fn different_configurations_are_noted() {
    let a = RunResult { config: RunConfig { request_rate: Some(8.0), ..RunConfig::default() }, ..run(1, 100, 1.0) };
    let mut b =
        RunResult { config: RunConfig { request_rate: Some(10.0), ..RunConfig::default() }, ..run(1, 100, 1.0) };
    b.warnings.push("the load was not delivered".to_owned());
    b.config.model = "other".to_owned();
    let a = RunResult { config: RunConfig { model: "one".to_owned(), ..a.config.clone() }, ..a };
    let comparison = compared(&a, &b);
    assert_eq!(comparison.loads, ["request rate was '8' in A and '10' in B"]);
    let notes = comparison.notes;
    assert_eq!(notes[0], "the runs were configured differently: model was 'one' in A and 'other' in B");
    assert_eq!(notes[1], "B: the load was not delivered");
}

#[test]
fn neither_of_two_different_loads_is_better() {
    let a = run(1, 2000, 1.0);
    let longer = |tokens: u64| {
        let mut b = run(2, 2000, 0.5);
        b.requests.iter_mut().for_each(|record| record.prompt_tokens = tokens);
        compared(&a, &b)
    };
    assert_eq!(longer(103).word(), "better");
    let differing = longer(363);
    assert_eq!(differing.word(), "loads differ");
    let said = differing.verdict();
    assert!(
        said.starts_with(
            "The loads differ, so neither run is better or worse: prompts had 100 tokens in A and 363 in B"
        )
    );
    assert!(differing.rows.iter().all(|row| differing.verdict_on(row) == "-"));
    let json = differing.json();
    assert_eq!((&json["verdict"], &json["rows"][0]["verdict"]), (&"loads differ".into(), &"-".into()));
    assert!(!json.to_string().contains("B is better"));
}

fn class(name: &str) -> ClassConfig {
    ClassConfig { name: name.to_owned(), ..ClassConfig::default() }
}

fn mixed_lengths(seed: u64, short: u64, long: u64) -> RunResult {
    let mut run = run(seed, 2000, 1.0);
    run.config.classes = vec![class("short"), class("long")];
    for record in &mut run.requests {
        record.class = (record.index % 2) as u32;
        record.prompt_tokens = if record.class == 0 { short } else { long };
    }
    run
}

fn with_failures(mut run: RunResult, every: usize) -> RunResult {
    for record in run.requests.iter_mut().filter(|record| record.class == 1).step_by(every) {
        record.outcome = Outcome::Failed("status 503".into());
    }
    run
}

#[test]
fn a_class_with_other_lengths_is_another_load_and_is_named() {
    let a = mixed_lengths(1, 200, 16_000);
    let differing = compared(&a, &mixed_lengths(2, 363, 16_000));
    assert_eq!(
        differing.loads,
        ["prompts of class 'short' had 200 tokens in A and 363 in B on average, by the servers' count"]
    );
    assert_eq!(compared(&a, &mixed_lengths(2, 203, 16_100)).loads, Vec::<String>::new());
}

#[test]
fn requests_that_fail_are_judged_and_are_no_other_load() {
    let a = mixed_lengths(1, 200, 16_000);
    for every in [10, 2] {
        let b = with_failures(mixed_lengths(2, 200, 16_000), every);
        let comparison = compared(&a, &b);
        assert_eq!(comparison.loads, Vec::<String>::new());
        let failed = comparison.rows.iter().find(|row| row.name == "long: failed").unwrap();
        assert_eq!(failed.verdict, Verdict::Worse);
        // The lengths of failed requests are known even if the result has no classes.
        let plain = |run: &RunResult| RunResult { config: RunConfig::default(), ..run.clone() };
        let comparison = compared(&plain(&a), &plain(&b));
        assert_eq!((comparison.loads.len(), comparison.rows[0].verdict), (0, Verdict::Worse));
    }
}

#[test]
fn drawn_lengths_differ_by_chance() {
    let drawn = |seed: u64, middle: f64| {
        let (mut run, mut rng) = (run(seed, 60, 1.0), Rng::new(seed));
        run.requests.iter_mut().for_each(|record| record.prompt_tokens = (middle * (0.1 + rng.exponential())) as u64);
        run
    };
    for seed in 0..20 {
        assert_eq!(compared(&drawn(2 * seed, 1e3), &drawn(2 * seed + 1, 1e3)).loads, Vec::<String>::new(), "{seed}");
    }
    assert_eq!(compared(&drawn(1, 1e3), &drawn(2, 9e3)).word(), "loads differ");
}

#[test]
fn each_class_has_rows_of_its_own() {
    let mixed = |seed, slower_long: f64| {
        let mut run = run(seed, 4000, 1.0);
        run.config.classes = vec![class("short"), class("long")];
        for record in run.requests.iter_mut().step_by(2) {
            record.class = 1;
            record.ttft *= slower_long;
            record.latency += record.ttft * (1.0 - 1.0 / slower_long);
        }
        run
    };
    let comparison = compared(&mixed(1, 1.0), &mixed(2, 2.0));
    let verdict = |name: &str| comparison.rows.iter().find(|row| row.name == name).map(|row| row.verdict);
    assert_eq!(verdict("short: TTFT P50"), Some(Verdict::NoDifference));
    assert_eq!(verdict("long: TTFT P50"), Some(Verdict::Worse));
    assert_eq!((verdict("long: requests/s"), verdict("long: ITL P50")), (None, None));
    assert!(comparison.verdict().contains("long: TTFT P50"));
    let one_class = compared(&run(1, 100, 1.0), &run(2, 100, 1.0));
    assert!(one_class.rows.iter().all(|row| !row.name.contains(':')));
}

#[test]
fn classes_of_the_gateway_have_rows_unless_they_are_others_in_each_result() {
    let divided = |seed, end: &str, is_long: fn(u64) -> bool| {
        let mut run = run(seed, 400, 1.0);
        run.config.classes = vec![class("all")];
        let class = |name: &str, requests: &str| GatewayClass { name: name.to_owned(), requests: requests.to_owned() };
        let classes = vec![class("short", &format!("0 to {end}")), class("long", &format!("{end} and more"))];
        slices::divide(&mut run, classes, |record| usize::from(is_long(record.index)));
        run
    };
    let names = |a: &RunResult, b: &RunResult| {
        let comparison = compared(a, b);
        assert_eq!(comparison.loads, Vec::<String>::new());
        let rows = comparison.rows.iter().filter(|row| row.name.ends_with(": TTFT P99"));
        let differ = comparison.notes.iter().filter(|note| note.contains("classes of the gateway")).count();
        (rows.map(|row| row.name.clone()).collect::<Vec<_>>(), differ)
    };
    let even = |index: u64| index.is_multiple_of(2);
    let a = divided(1, "5k", even);
    assert_eq!(
        names(&a, &divided(2, "5k", even)),
        (vec!["short: TTFT P99".to_owned(), "long: TTFT P99".to_owned()], 0)
    );
    assert_eq!(names(&a, &divided(2, "8k", even)), (vec![], 1));
    let short = divided(1, "5k", |_| false);
    assert_eq!(names(&short, &divided(2, "5k", |_| false)), (vec![], 0), "the rows of all requests say the same");
}

#[test]
fn results_without_requests_are_refused() {
    let empty = RunResult::default();
    assert_eq!(compare(&run(1, 10, 1.0), &empty, CompareOptions::default()), Err(CompareError::NoRequests('B')));
    let mut failed = run(1, 10, 1.0);
    failed.requests.iter_mut().for_each(|record| record.outcome = Outcome::Failed("stream cut".into()));
    assert_eq!(compare(&failed, &empty, CompareOptions::default()), Err(CompareError::NothingCompleted('A')));
}
