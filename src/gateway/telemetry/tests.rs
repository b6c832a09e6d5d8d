//! Compares the metrics page and the access log line with snapshots, and checks that a request
//! counts exactly once.
//!
//! Records are made by hand (`testing.rs`).

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use jiff::Timestamp;
use smallvec::smallvec;
use tokio::time::Instant;

use super::families::{self, MetricKind};
use super::line::{Shown, line};
use super::testing::{admission, completed, record, spec};
use super::*;
use crate::experiment::{CopyOutcome, Ending, ExperimentReport, Experiments, Observation, Quantity};
use crate::flow::keys::{KeyInFlight, KeyTokens};
use crate::flow::owner::KeyWork;
use crate::flow::record::{RetryReason, Stage, UpstreamFault};
use crate::flow::{Outcome, Record};
use crate::origin::Origin;
use crate::pool::{BackendLimits, HealthRules, Share};
use sluice_config::{Config, Machine, Surroundings};
use sluice_core::openai::{Answer, FinishReason, NotContinued, Route, ShedReason, TokenUsage};

fn telemetry() -> Telemetry {
    telemetry_of(admission(Instant::now()))
}

fn telemetry_of(admission: Arc<crate::pool::Admission>) -> Telemetry {
    let telemetry = Telemetry::with(Box::new(move || admission.view()), None);
    telemetry.show_clients(|| ClientView { connections: 7, connections_max: 64, ..ClientView::default() });
    telemetry
}

/// One request of each outcome, a spilled and a retried one, one without a route and one of an
/// experiment.
fn mixed() -> Vec<Record> {
    let ms = Duration::from_millis;
    let failed = |outcome| Record { pool: Some("short".into()), backend: Some("gpu0".into()), ..record(outcome) };
    vec![
        completed(ms(30), ms(6)),
        Record { home: Some("long".into()), class: Some("long".into()), ..completed(ms(900), ms(12)) },
        Record {
            retries: smallvec![RetryReason::Connect, RetryReason::StaleConnection],
            retried_on: smallvec![["short".into(), "gpu0".into()], ["long".into(), "gpu1".into()]],
            continued: 1,
            prefilled_again: 900,
            ..completed(ms(50), ms(7))
        },
        Record { arm: Some("int8".into()), slo_met: Some(false), ..completed(ms(20), ms(5)) },
        Record { outcome: Outcome::ClientGone, slo_met: None, ..completed(ms(25), ms(6)) },
        record(Outcome::Shed(ShedReason::QueueFull)),
        Record { not_continued: Some(NotContinued::Seed), ..failed(Outcome::UpstreamError(UpstreamFault::Broken)) },
        failed(Outcome::Timeout(Stage::FirstByte)),
        Record { route: None, home: None, model: None, key: None, estimate: None, ..record(Outcome::Refused) },
        Record { route: Some(Route::Tokenize), stream: false, stats: None, slo_met: None, ..completed(ms(2), ms(1)) },
        without_usage(completed(ms(40), ms(8))),
    ]
}

/// The record of a stream whose engine was not asked for usage.
fn without_usage(mut record: Record) -> Record {
    if let Some(stats) = &mut record.stats {
        (stats.usage, stats.tpot, stats.token_events) = (TokenUsage::default(), None, 49);
    }
    record
}

/// The page without values that differ from run to run.
fn stable(page: &str) -> String {
    let varies = |name: &str| name.starts_with("process_") || name.starts_with("sluice_slo_attainment");
    let line = |line: &str| match line.rsplit_once(' ') {
        Some((name, _)) if varies(name) => format!("{name} (varies)\n"),
        _ => format!("{line}\n"),
    };
    page.lines().map(line).collect()
}

fn value(page: &str, series: &str) -> f64 {
    let found = page.lines().find_map(|line| line.strip_prefix(series)?.strip_prefix(' '));
    found.map_or(0.0, |text| text.parse().unwrap())
}

#[test]
fn the_page_after_a_mixed_handful_of_requests() {
    let telemetry = telemetry();
    mixed().iter().for_each(|record| telemetry.record(record));
    telemetry.reloaded(true);
    // Histograms have hundreds of lines; counts and sums show that values came.
    let page: String =
        stable(&telemetry.page()).lines().filter(|line| !line.contains("_bucket{")).map(|l| format!("{l}\n")).collect();
    insta::assert_snapshot!(page);
}

/// An experiment with a control, an arm that is 30 % slower and refuses, and a shadow arm.
fn experiment() -> ExperimentReport {
    let text = "[[model]]\nname = \"m\"\n[[pool]]\nname = \"p\"\n[[pool.backend]]\nname = \"a\"\nurl = \"http://127.0.0.1:9\"\n\
                [[experiment]]\nname = \"x\"\n[[experiment.arm]]\nname = \"base\"\nweight = 50\n[[experiment.arm]]\n\
                name = \"new\"\nweight = 50\n[[experiment.arm]]\nname = \"shade\"\nshadow = { share = 0.5 }\n";
    let around = Surroundings { env: &|_| None, folder: "/".into(), machine: Machine::with_cores(1) };
    let config = Config::parse(text, "test", &[], &around).unwrap_or_else(|problems| panic!("{problems}")).config;
    let experiments = Experiments::default();
    experiments.configure(&config);
    let x = experiments.find("x").unwrap();
    for number in 0..4_000_usize {
        let arm = number % 2;
        let seconds = 0.1 * (1.0 + 0.3 * arm as f64) * (1.0 + (number % 7) as f64 / 100.0);
        let observation = Observation {
            origin: Origin::default(),
            blamed: true,
            stratum: 0,
            cell: (number / 2 % 64) as u16,
            values: [Some(seconds); Quantity::ALL.len()],
            ending: Ending::Completed,
            missed: None,
            fell_back: false,
            cached: None,
            answer: Answer { finish: Some(FinishReason::Stop), refused: arm == 1 && number % 10 == 1 },
        };
        x.state.observe(&x.plan, arm, &observation);
    }
    ExperimentReport::new(&x, true)
}

#[test]
fn an_experiment_is_on_the_page_with_its_intervals_and_absent_when_it_is_removed() {
    let shown = Arc::new(AtomicBool::new(true));
    let (telemetry, flag) = (telemetry(), Arc::clone(&shown));
    telemetry.show_experiments(move || flag.load(Ordering::Relaxed).then(experiment).into_iter().collect());
    let page = telemetry.page();
    for (series, wanted) in [
        ("sluice_experiment_state{experiment=\"x\",state=\"running\"}", 1.0),
        ("sluice_experiment_exposure{experiment=\"x\"}", 1.0),
        ("sluice_arm_requests_total{arm=\"x/base\"}", 2_000.0),
        ("sluice_arm_requests_total{arm=\"x/new\"}", 2_000.0),
        ("sluice_arm_answers_total{arm=\"x/new\",finish=\"stop\"}", 2_000.0),
        ("sluice_arm_refusals_total{arm=\"x/new\"}", 400.0),
        ("sluice_arm_conclusion{arm=\"x/new\",conclusion=\"worse\"}", 1.0),
    ] {
        assert_eq!(value(&page, series), wanted, "{series}");
    }
    let change =
        |bound: &str| value(&page, &format!("sluice_arm_change{{arm=\"x/new\",bound=\"{bound}\",quantity=\"ttft\"}}"));
    assert!(0.25 < change("low") && change("low") < 0.3 && 0.3 < change("high") && change("high") < 0.35, "{page}");
    assert!((change("value") - 0.3).abs() < 1e-3);
    assert!(page.contains("sluice_copies_in_flight{arm=\"x/shade\"} 0"), "{page}");
    assert!(!page.contains("sluice_copies_in_flight{arm=\"x/base\"}"), "it has units");
    shown.store(false, Ordering::Relaxed);
    assert!(!telemetry.page().contains("sluice_arm_"));
}

#[test]
fn the_tuner_gets_every_record_that_is_counted_and_is_on_the_page() {
    let (telemetry, seen, copies) = (telemetry(), Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
    let view =
        TunerView { mode: "apply".to_owned(), frozen: true, proposals: 2, events: vec![("kept", 3), ("undone", 0)] };
    let counters = [Arc::clone(&seen), Arc::clone(&copies)];
    telemetry.show_tuner(
        move || view.clone(),
        move |record| {
            counters[usize::from(record.copy.is_some())].fetch_add(1, Ordering::Relaxed);
        },
    );
    let record = completed(Duration::from_millis(30), Duration::from_millis(6));
    telemetry.record(&record);
    telemetry.record(&Record { copy: Some(CopyOutcome::Completed), ..record });
    // The tuner judges a changed engine by copies, before clients use it.
    assert_eq!((seen.load(Ordering::Relaxed), copies.load(Ordering::Relaxed)), (1, 1));
    let page = telemetry.page();
    for (series, wanted) in [
        ("sluice_tuner_events_total{event=\"kept\"}", 3.0),
        ("sluice_tuner_events_total{event=\"undone\"}", 0.0),
        ("sluice_tuner_mode{mode=\"apply\"}", 1.0),
        ("sluice_tuner_mode{mode=\"advise\"}", 0.0),
        ("sluice_tuner_frozen", 1.0),
        ("sluice_tuner_proposals", 2.0),
    ] {
        assert_eq!(value(&page, series), wanted, "{series}");
    }
}

fn engine() -> EngineMetrics {
    let (pool, backend, phase) = ("short".to_owned(), "a".to_owned(), "serve".to_owned());
    EngineMetrics { pool, backend, phase, restarts: 2, crashes: 1, wakes: 3, wake_seconds: None, started: None }
}

#[test]
fn an_engine_shows_its_phase_among_all_and_no_start_while_none_runs() {
    let telemetry = telemetry();
    telemetry.show_engines(vec!["start", "serve"], || vec![engine()]);
    let page = telemetry.page();
    for (series, wanted) in [
        ("sluice_engine_restarts_total{backend=\"a\",pool=\"short\"}", 2.0),
        ("sluice_engine_crashes_total{backend=\"a\",pool=\"short\"}", 1.0),
        ("sluice_engine_wakes_total{backend=\"a\",pool=\"short\"}", 3.0),
        ("sluice_engine_phase{backend=\"a\",phase=\"serve\",pool=\"short\"}", 1.0),
        ("sluice_engine_phase{backend=\"a\",phase=\"start\",pool=\"short\"}", 0.0),
    ] {
        assert_eq!(value(&page, series), wanted, "{series}");
    }
    assert!(!page.contains("sluice_engine_start_seconds"), "{page}");
}

#[test]
fn a_copy_is_counted_as_no_request_and_is_marked_in_its_line() {
    let telemetry = telemetry();
    let before = stable(&telemetry.page());
    let copy =
        Record { copy: Some(CopyOutcome::Completed), ..completed(Duration::from_millis(30), Duration::from_millis(6)) };
    telemetry.record(&copy);
    assert_eq!(stable(&telemetry.page()), before);
    let line = String::from_utf8(line(&copy, Timestamp::UNIX_EPOCH, &Shown::default())).unwrap();
    assert!(line.contains("\"copy\":\"completed\""), "{line}");
}

#[test]
fn every_family_of_the_table_is_on_the_page_with_its_labels() {
    let admission = admission(Instant::now());
    admission.divide();
    let measured = move || {
        let mut view = admission.view();
        view[0].backends[0].prefill_seen = Some(Instant::now());
        view
    };
    let telemetry = Telemetry::with(Box::new(measured), None);
    telemetry.show_clients(ClientView::default);
    telemetry.show_cluster(|| ClusterMetrics {
        standing: "holding",
        standings: vec!["joining", "holding"],
        gateways: 3,
        renewed_seconds: Some(0.5),
        writes: [("written", 7), ("refused", 2), ("unknown", 1)],
        leader: Some((true, 2)),
    });
    let (minute, day) = (Some((7_000, 6_000)), Some((9, 500)));
    telemetry.show_keys(move || vec![KeyTokens { name: "team-a".into(), minute, day }]);
    let (requests, tokens) = ((1, Some(8)), (900, None));
    telemetry.show_keys_in_flight(move || {
        vec![KeyInFlight { name: "team-a".into(), requests, sequences: (1, None), tokens }]
    });
    telemetry.show_findings(|| vec![["burst", "short", ""].map(str::to_owned)]);
    let [pool, backend] = ["short", "gpu0"].map(str::to_owned);
    telemetry.show_engine_pages(move || {
        vec![EnginePage { pool: pool.clone(), backend: backend.clone(), running: 3.0, ..EnginePage::default() }]
    });
    telemetry.show_pool_engines(|| vec![PoolEngines { pool: "short".to_owned(), wanted: 2, start_seconds: 90.0 }]);
    let work = KeyWork { pool: "short".to_owned(), key: "team-a".to_owned(), seconds: 1.5, waiting: 2 };
    telemetry.show_key_work(move || vec![work.clone()]);
    telemetry.configured(&with_objectives());
    mixed().iter().for_each(|record| telemetry.record(record));
    telemetry.certificate(std::path::Path::new("tls/server.pem"), 2_208_988_800);
    telemetry.show_experiments(|| vec![experiment()]);
    telemetry.tunnel_bytes("short").to_client.inc_by(2);
    telemetry.show_tuner(|| TunerView { events: vec![("kept", 3)], ..TunerView::default() }, |_| ());
    telemetry.show_engines(vec!["serve"], || {
        vec![EngineMetrics { started: Some(1.0), wake_seconds: Some(0.5), ..engine() }]
    });
    let page = telemetry.page();
    // These families are absent without a collector (see `otlp/tests.rs`) and without records.
    let absent = ["sluice_trace", "sluice_metrics_exports", "sluice_records"];
    let is_absent = |name: &str| absent.iter().any(|prefix| name.starts_with(prefix));
    for family in families::ALL.iter().filter(|family| !is_absent(family.name)) {
        let kind = match family.kind {
            MetricKind::Counter => "counter",
            MetricKind::Gauge => "gauge",
            MetricKind::Histogram(_) => "histogram",
        };
        assert!(page.contains(&format!("# TYPE {} {kind}\n", family.name)), "{} is missing", family.name);
        let suffix = if kind == "histogram" { "_count" } else { "" };
        let start = format!("{}{suffix}", family.name);
        let shown =
            page.lines().find(|line| line.strip_prefix(&start).is_some_and(|rest| rest.starts_with(['{', ' '])));
        let shown = shown.unwrap_or_else(|| panic!("{} has no value", family.name));
        let labels: Vec<&str> =
            shown.split(['{', ',', '}']).filter_map(|part| Some(part.split_once("=\"")?.0)).collect();
        let mut wanted = family.labels.to_vec();
        wanted.sort_unstable();
        assert_eq!(labels, wanted, "{}", family.name);
    }
}

#[test]
fn what_is_shown_of_a_ledger_is_absent_without_one() {
    assert!(!telemetry().page().contains("sluice_cluster"));
    let admission = admission(Instant::now());
    admission.divide();
    let half = |_: &str, _: &str, limits: &BackendLimits, _: Share| Share { slots: limits.slots / 2, ..Share::ALL };
    admission.set_ledger_shares(None, half);
    let page = telemetry_of(admission).page();
    let at = |unit: &str| format!("sluice_cluster_share{{backend=\"gpu0\",pool=\"short\",unit=\"{unit}\"}}");
    assert_eq!(value(&page, &at("slots")), 32.0);
    assert!(page.contains(&at("permits")) && !page.contains(&at("prefill_tokens")), "only what is limited");
}

#[test]
fn a_record_of_each_outcome_counts_exactly_once() {
    let outcomes = [
        Outcome::Completed,
        Outcome::ClientGone,
        Outcome::Shed(ShedReason::NoBackend),
        Outcome::UpstreamError(UpstreamFault::Connect),
        Outcome::Timeout(Stage::Idle),
        Outcome::Refused,
    ];
    let telemetry = telemetry();
    for outcome in outcomes {
        telemetry.record(&record(outcome));
        let page = telemetry.page();
        let counts: f64 = outcomes
            .iter()
            .map(|outcome| {
                let labels = "arm=\"\",class=\"short\",model=\"llama\",outcome=\"";
                let rest = "\",pool=\"short\",route=\"chat_completions\"";
                value(&page, &format!("sluice_requests_total{{{labels}{}{rest}}}", outcome.label()))
            })
            .sum();
        let position = outcomes.iter().position(|one| *one == outcome).unwrap();
        assert_eq!(counts, position as f64 + 1.0, "after {outcome:?}");
    }
}

#[test]
fn a_spilled_request_counts_where_it_ran_and_by_the_class_it_is_of() {
    let telemetry = telemetry();
    telemetry.record(&mixed()[1]);
    let page = telemetry.page();
    let request = "{arm=\"\",class=\"long\",model=\"llama\",pool=\"short\"}";
    assert_eq!(value(&page, &format!("sluice_time_to_first_token_seconds_count{request}")), 1.0);
    assert_eq!(value(&page, &format!("sluice_inter_token_latency_seconds_count{request}")), 49.0);
    assert_eq!(value(&page, "sluice_spill_total{from=\"long\",to=\"short\"}"), 1.0);
    assert_eq!(value(&page, "sluice_queue_wait_seconds_count{class=\"long\",pool=\"long\"}"), 1.0);
    let minute = |pool: &str| telemetry.minute(pool);
    assert_eq!((minute("long").completed, minute("long").spilled, minute("short").completed), (1, 1, 0));
}

#[test]
fn calls_that_generate_nothing_do_not_count_as_generating_ones() {
    let telemetry = telemetry();
    for route in Route::ALL {
        let quick = Record { route: Some(route), ..completed(Duration::from_millis(1), Duration::from_millis(1)) };
        telemetry.record(&quick);
    }
    let page = telemetry.page();
    let generating = Route::ALL.into_iter().filter(|route| route.generates()).count() as f64;
    let request = "{arm=\"\",class=\"short\",model=\"llama\",pool=\"short\"}";
    for family in ["request_duration", "time_to_first_token", "time_per_output_token"] {
        assert_eq!(value(&page, &format!("sluice_{family}_seconds_count{request}")), generating, "{family}");
    }
    let other = "sluice_other_request_duration_seconds_count{model=\"llama\",pool=\"short\",route=\"tokenize\"}";
    assert_eq!(value(&page, other), 1.0);
}

fn with_objectives() -> Config {
    let text = "[slo]\nttft = \"1s\"\nattainment = 0.95\n[[model]]\nname = \"llama\"\n[[pool]]\nname = \"short\"\n\
                [[pool.backend]]\nname = \"a\"\nurl = \"http://127.0.0.1:9\"\n";
    let around = Surroundings { env: &|_| None, folder: "/".into(), machine: Machine::with_cores(1) };
    Config::parse(text, "test", &[], &around).unwrap_or_else(|problems| panic!("{problems}")).config
}

#[test]
fn a_pool_that_was_away_begins_a_new_window() {
    let telemetry = telemetry();
    let mut config = with_objectives();
    telemetry.configured(&config);
    telemetry.record(&completed(Duration::from_millis(20), Duration::from_millis(5)));
    telemetry.configured(&config);
    assert_eq!(telemetry.five_minutes("short").completed, 1, "it stayed");
    config.pools[0].name = "other".to_owned();
    telemetry.configured(&config);
    telemetry.configured(&with_objectives());
    assert_eq!(telemetry.five_minutes("short").completed, 0);
}

#[test]
fn a_failed_attempt_counts_at_its_backend_and_a_continued_stream_says_nothing_of_a_pace() {
    let telemetry = Arc::new(telemetry());
    let on: [Arc<str>; 2] = ["short".into(), "gpu0".into()];
    let of_backend = || {
        let found = telemetry.totals().backends.into_iter().find(|(name, _)| *name == on);
        found.map(|(_, totals)| totals).unwrap_or_default()
    };
    crate::flow::Recorder::attempt_failed(&telemetry, &on);
    assert_eq!((of_backend().failed, of_backend().ended), (1.0, 0.0));
    let timed = |continued| Record {
        pool: Some("short".into()),
        backend: Some("gpu0".into()),
        backend_ttft: Some(Duration::from_millis(30)),
        continued,
        ..completed(Duration::from_millis(30), Duration::from_millis(6))
    };
    let seen = [1, 0].map(|continued| {
        telemetry.record(&timed(continued));
        (of_backend().ended, of_backend().engine_ttft.1, of_backend().tpot.count())
    });
    assert_eq!(seen, [(1.0, 0.0, 0.0), (2.0, 1.0, 1.0)]);
}

#[test]
fn requests_are_counted_by_whether_they_met_their_objectives() {
    let telemetry = telemetry();
    telemetry.record(&record(Outcome::Shed(ShedReason::QueueFull)));
    let met = "sluice_class_slo_requests_total{class=\"short\",model=\"llama\",pool=\"short\",result=\"met\"}";
    let missed = "sluice_class_slo_requests_total{class=\"short\",model=\"llama\",pool=\"short\",result=\"missed\"}";
    let page = telemetry.page();
    // Without objectives nothing can be missed.
    assert_eq!([value(&page, met), value(&page, missed)], [0.0, 0.0]);
    assert!(!page.contains("sluice_slo_attainment_target"));
    telemetry.configured(&with_objectives());
    for record in mixed() {
        let mut record = Record { has_objectives: record.home.as_deref() == Some("short"), ..record };
        record.judge();
        telemetry.record(&record);
    }
    let page = telemetry.page();
    // Of the missed ones, one was judged so, one was shed, and two failed. The client that left,
    // the refused request and the call to tokenize do not count, nor does the long one, whose home
    // is another pool.
    assert_eq!([value(&page, met), value(&page, missed)], [3.0, 4.0]);
    let of_pool =
        |result: &str| value(&page, &format!("sluice_slo_requests_total{{pool=\"short\",result=\"{result}\"}}"));
    assert_eq!(["met", "missed"].map(of_pool), [3.0, 4.0]);
    assert_eq!(value(&page, "sluice_slo_attainment_target{class=\"short\",pool=\"short\"}"), 0.95);
    assert!(!page.contains("sluice_slo_requests_total{pool=\"\""));
}

#[test]
fn a_stream_without_usage_counts_its_events_as_tokens() {
    let telemetry = telemetry();
    telemetry.record(&without_usage(completed(Duration::from_millis(40), Duration::from_millis(8))));
    let page = telemetry.page();
    let labels = "{arm=\"\",class=\"short\",model=\"llama\",pool=\"short\"}";
    assert_eq!(value(&page, &format!("sluice_generation_tokens_total{labels}")), 49.0);
    assert_eq!(value(&page, &format!("sluice_prompt_tokens_total{labels}")), 110.0);
}

#[test]
fn a_removed_backend_is_gone_with_the_next_scrape() {
    let now = Instant::now();
    let admission = admission(now);
    let pools = Arc::clone(&admission);
    let telemetry = Telemetry::with(Box::new(move || pools.view()), None);
    assert!(telemetry.page().contains("sluice_in_flight{backend=\"gpu1\""));
    let rules = HealthRules {
        probe_failures: 1,
        request_failures: 3,
        eject_base: now.elapsed(),
        eject_max: now.elapsed(),
        max_ejected: 0.5,
    };
    admission.apply(&[spec("short", "gpu0", 8000)], rules, now);
    let page = telemetry.page();
    assert!(!page.contains("backend=\"gpu1\""));
    assert!(page.contains("sluice_in_flight{backend=\"gpu0\""));
}

#[test]
fn a_backend_that_moved_is_shown_once_while_its_old_place_drains() {
    let now = Instant::now();
    let admission = admission(now);
    let rules = HealthRules {
        probe_failures: 1,
        request_failures: 3,
        eject_base: now.elapsed(),
        eject_max: now.elapsed(),
        max_ejected: 0.5,
    };
    let ask = crate::pool::AdmissionRequest::new(
        1,
        sluice_core::base::PoolId::new(0),
        crate::pool::Need { slots: 1, prompt_tokens: 10, output_tokens: 10 },
        now,
    );
    let lease = admission.enter(ask);
    admission.apply(&[spec("short", "gpu0", 9000)], rules, now);
    let pools = Arc::clone(&admission);
    let page = Telemetry::with(Box::new(move || pools.view()), None).page();
    assert_eq!(page.matches("sluice_in_flight{backend=\"gpu0\"").count(), 1);
    assert_eq!(value(&page, "sluice_in_flight{backend=\"gpu0\",pool=\"short\"}"), 0.0);
    drop(lease);
}

#[test]
fn the_access_log_line_of_a_completed_stream() {
    let time: Timestamp = "2026-01-02T03:04:05.678901Z".parse().unwrap();
    let retried = Record {
        retries: smallvec![RetryReason::Connect],
        ..completed(Duration::from_micros(30_123), Duration::from_micros(6_500))
    };
    let mixed = mixed();
    let lines =
        [&retried, &mixed[5], &mixed[8], &mixed[10]].map(|record| line(record, time, &Shown::default())).concat();
    insta::assert_snapshot!(String::from_utf8(lines).unwrap());
}
