//! The slow layer of the online tuner, which changes flags of engines, on simulated engines.
//!
//! Restarts change wrong flags, a change that brings a fault is undone, and no request is lost.

use crate::setup::{Forecaster, Plant, PlantedFault};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use crate::client::LastRecord;
use crate::cluster::Cluster;
use crate::forecast::{forecast, forecast_limits};
use crate::tuning::{LabDeployment, LabTuner};
use crate::upstream::LabUpstream;
use crate::{Lab, LabFile, LabRun, Scenario, run};
use sluice_config::DailyWindow;
use sluice_gateway::flow::{Flow, LearnedState, RoutingTable, specs};
use sluice_gateway::pool::{Admission, AdmissionDecision, AdmissionRequest, Bound, Irreplaceable, Need};
use sluice_online::engines::flags::EngineFlag;
use sluice_online::engines::forecast::{CandidateForecast, EngineAnswer, EngineCandidate, EngineQuestion};
use sluice_online::engines::look::Restarted;
use sluice_online::event::EventKind;
use sluice_online::limits::forecast::{Forecast, LimitsAnswer, LimitsQuestion};
use sluice_online::limits::{Limits, PoolLimits};
use sluice_online::observe::recent::RecentRequest;
use tokio::time::Instant;

/// `load`: chats and documents per second. `bound`: objective for TTFT, and again for each 1,000
/// prompt tokens, in ms.
fn lab(args: &str, flags: &str, duration: &str, load: (f64, f64), bound: u32) -> Lab {
    let (chats, documents) = load;
    let text = format!(
        "duration = \"{duration}\"\nset = ['tuner.mode=\"apply\"', 'tuner.missed_for=\"30s\"', 'tuner.flags={flags}', \
         'slo.ttft=\"{bound}ms\"', 'slo.ttft_per_1k_prompt_tokens=\"{bound}ms\"', 'pool.all.queue={{timeout=\"10m\", length=4096}}']\n\
         [[engine]]\ncount = 2\ngpu = \"l4\"\nmodel = \"llama-3.2-1b\"\nargs = {args}\n\
         [[traffic]]\nclass = [{{ name = \"chat\", rate = {chats}, in = 500, out = 150 }}, {{ name = \"document\", rate = {documents}, in = 4000, out = 50 }}]\n"
    );
    let file = LabFile::parse(&text, "test").unwrap();
    let scenario = Scenario { file, folder: "/".into() };
    scenario.lab(&scenario.file.variants()[0]).unwrap()
}

#[tokio::test(start_paused = true)]
async fn an_engine_restarts_only_if_the_other_engines_can_carry_its_own_load_too() {
    let mut lab = lab("{ max-num-seqs = 4 }", "[\"max-num-seqs\"]", "1m", (1.0, 1.0), 400);
    let (start, rules) = (Instant::now(), specs::health_rules(&lab.config.health));
    let admission = Admission::new(start, rules, 1);
    let layout = admission.apply(&specs::pools(&lab.config), rules, start);
    let backends: Vec<_> = layout.backends.iter().flatten().copied().zip(0..).collect();
    for (backend, _) in &backends {
        admission.set_bounds([(*backend, Bound::Ceiling(Some(4)))]);
        admission.record_probe(*backend, true, start);
    }
    let cluster = Cluster::new(Vec::new(), lab.addresses().unwrap(), Vec::new());
    let mut leases = Vec::new();
    for _ in 0..4 {
        let request = AdmissionRequest::new(
            layout.number,
            layout.pools[0],
            Need { slots: 1, prompt_tokens: 1, output_tokens: 1 },
            start,
        );
        let AdmissionDecision::Granted(lease) = admission.enter(request) else { panic!("there is room") };
        leases.push(lease);
    }
    let view = admission.view();
    assert!(view[0].backends.iter().all(|backend| backend.used.slots == 2), "half of each engine");
    let (counters, learned) = (vec![None; lab.config.models.len()], LearnedState::default());
    let table = RoutingTable::new(Arc::clone(&lab.config), &layout, &lab.model_names(), &counters, &learned);
    let recorder = LastRecord::new(start);
    let mut own = LabTuner::new(&lab, recorder.observer()).expect("it acts");
    let mut deployment = LabDeployment {
        own: &mut own,
        now: Duration::ZERO,
        start,
        lab: &mut lab,
        flow: &Flow::new(admission, LabUpstream(Arc::clone(&cluster)), recorder, table),
        learned: &learned,
        cluster: &cluster,
        backends: &backends,
    };
    let name = format!("{}/{}", view[0].name, view[0].backends[0].name);
    let mut begin = |crowded| deployment.begin((&name, crowded), (EngineFlag::MaxNumSeqs, 8.0));
    let full = Irreplaceable::NoRoom { used: 4, room: 4, headroom_percent: 80 };
    assert_eq!(begin(false), Err(Restarted::Blocked(full.to_string())));
    assert_eq!(begin(true), Ok(()), "requests may wait");
}

fn kinds(run: &LabRun) -> Vec<EventKind> {
    run.tuning.iter().filter(|event| event.key.contains(".engine.")).map(|event| event.kind).collect()
}

fn lost(run: &LabRun) -> usize {
    run.result.requests.iter().filter(|record| !record.is_completed()).count()
}

#[test]
fn engines_with_too_few_sequences_get_more_one_after_the_other() {
    let run = run(&lab("{ max-num-seqs = 4 }", "[\"max-num-seqs\"]", "20m", (4.8, 0.1), 400), 1).unwrap();
    let wanted = [EventKind::Tried, EventKind::Compared, EventKind::Promoted, EventKind::Kept];
    assert_eq!(kinds(&run), wanted, "{:#?}\n{:#?}", run.tuning, run.tuner);
    let lost_requests = lost(&run);
    let report = run.tuner.unwrap();
    let change = &report.engines.changes[0];
    assert_eq!((change.flag, change.values.0, &*change.verdict), (EngineFlag::MaxNumSeqs, 4.0, "promoted"));
    assert!(change.realised > 0.0 && change.forecast.is_some_and(|gain| gain > 0.0), "{change:?}");
    let observed: Vec<_> = run.tuning.iter().filter(|event| event.kind == EventKind::Observed).collect();
    assert!(observed.iter().any(|event| event.key == "pool.all" && event.why.contains("requests/s")), "{observed:?}");
    assert!(report.groups[0].attainment.unwrap() > 0.99, "{report:?}");
    assert_eq!(lost_requests, 0);
}

/// Forecasts that every change is a large gain.
fn promises(_: &Lab, question: &EngineQuestion, _: u64) -> EngineAnswer {
    let of = |loss: f64| Forecast { loss, error: 0.0, attainment: 1.0 - loss };
    let found = CandidateForecast { forecast: Some(of(0.01)), ..CandidateForecast::default() };
    let candidates = vec![found; question.candidates.len()];
    EngineAnswer { now: Some(of(1.0)), absence: Some(0.0), candidates, ..EngineAnswer::default() }
}

#[test]
fn a_change_that_brings_a_fault_is_taken_back_and_no_request_is_lost() {
    for fault in [PlantedFault::FailsAbove(2_000), PlantedFault::RefusesToStart, PlantedFault::CrashesAt(3)] {
        let mut lab = lab("{ max-num-seqs = 4 }", "[\"gpu-memory-utilization\"]", "12m", (1.5, 0.3), 5);
        lab.forecaster = Some(Forecaster { flags: promises, limits: None });
        let plant = |value| Plant { flag: EngineFlag::GpuMemoryUtilization, value, fault };
        lab.plants = vec![plant(0.87)];
        let run = run(&lab, 1).unwrap();
        assert_eq!(
            kinds(&run),
            [EventKind::Tried, EventKind::Undone],
            "{fault:?}: {:#?}\n{:#?}",
            run.tuning,
            run.tuner
        );
        assert_eq!(lost(&run), 0, "{fault:?}");
        assert!(run.tuner.unwrap().engines.doing.contains("watching"), "{fault:?}");
    }
}

#[test]
fn an_engine_restarts_only_in_the_windows_of_the_configuration() {
    for (from, restarts) in [(0, true), (12 * 60, false)] {
        let mut lab = lab("{ max-num-seqs = 4 }", "[\"gpu-memory-utilization\"]", "4m", (1.5, 0.3), 5);
        lab.forecaster = Some(Forecaster { flags: promises, limits: None });
        Arc::make_mut(&mut lab.config).tuner.windows = vec![DailyWindow { from, to: from + 60 }];
        let run = run(&lab, 1).unwrap();
        assert_eq!(kinds(&run).contains(&EventKind::Tried), restarts, "{from}: {:#?}", run.tuner);
    }
}

fn requests(count: u64) -> impl Iterator<Item = RecentRequest> {
    let at = |number| Duration::from_millis(200 * number);
    let request = |at| RecentRequest { at, waited: Duration::ZERO, prompt: 500, output: 150, model: None };
    (0..count).map(at).map(request)
}

#[test]
fn a_forecast_is_made_under_the_limits_of_its_question() {
    let lab = lab("{ max-num-seqs = 64 }", "[\"max-num-seqs\"]", "1m", (4.8, 0.1), 400);
    let loss = |slots| {
        let limits = PoolLimits { slots, ..Limits::of(&lab.config).0[0] };
        let question = EngineQuestion {
            pool: "all".to_owned(),
            flags: lab.engines[0].flags(),
            limits: vec![("all".to_owned(), limits)],
            candidates: Vec::new(),
            absent: Duration::from_secs(120),
            requests: requests(300).collect(),
        };
        forecast(&lab, &question, 1).now.unwrap().loss
    };
    assert!(loss(1) > loss(64) + 0.5, "{} {}", loss(1), loss(64));
}

#[test]
fn the_absence_of_an_engine_is_also_forecast_under_the_limits_of_the_best_change() {
    let lab = lab("{ max-num-seqs = 64 }", "[\"max-num-seqs\"]", "1m", (4.8, 0.1), 400);
    let with = |slots| PoolLimits { slots, ..Limits::of(&lab.config).0[0] };
    let absence = |limits: Option<PoolLimits>| {
        let question = EngineQuestion {
            pool: "all".to_owned(),
            flags: lab.engines[0].flags(),
            limits: vec![("all".to_owned(), with(4))],
            candidates: vec![EngineCandidate { flag: EngineFlag::MaxNumSeqs, to: 32.0, limits }],
            absent: Duration::from_secs(120),
            requests: requests(300).collect(),
        };
        let answer = forecast(&lab, &question, 1);
        (answer.absence.unwrap(), answer.candidates[0].absence_under)
    };
    let (now, under) = absence(Some(with(64)));
    let under = under.unwrap();
    assert!(now > under + 0.5, "{now} {under}");
    assert_eq!(absence(Some(with(4))), (now, Some(now)), "the limits that are in force");
    assert_eq!(absence(None), (now, None));
}

#[test]
fn limits_that_hold_requests_up_are_forecast_to_lose_more() {
    let lab = lab("{ max-num-seqs = 64 }", "[\"max-num-seqs\"]", "1m", (4.8, 0.1), 400);
    let with = |slots| Limits(vec![PoolLimits { slots, ..Limits::of(&lab.config).0[0] }]);
    let question = LimitsQuestion {
        pools: vec!["all".to_owned()],
        now: with(64),
        candidates: vec![with(64), with(1)],
        requests: requests(300).collect(),
        waiting: 0,
    };
    let answer = forecast_limits(&lab, &question, 1);
    let [Some(same), Some(fewer)] = answer.candidates[..] else { panic!("{answer:?}") };
    let now = answer.now.unwrap();
    assert_eq!(same.loss, now.loss, "the same requests and limits");
    assert!(fewer.loss > now.loss + 0.5, "{fewer:?}, {now:?}");
    let few = LimitsQuestion { requests: question.requests[..50].to_vec(), ..question };
    assert_eq!(forecast_limits(&lab, &few, 1), LimitsAnswer::default(), "too few to say");
}

fn set_slots(lab: &mut Lab, slots: u32) {
    let config = Arc::make_mut(&mut lab.config);
    let mut limits = Limits::of(config);
    limits.0[0].slots = slots;
    limits.put(config);
}

/// The most requests that waited at the beginning of a simulation.
static WAITED: AtomicUsize = AtomicUsize::new(0);

fn notes_what_waits(_: &Lab, question: &LimitsQuestion, _: u64) -> LimitsAnswer {
    WAITED.fetch_max(question.waiting, Ordering::Relaxed);
    LimitsAnswer::default()
}

#[test]
fn limits_are_simulated_with_what_waited_then() {
    let mut lab = lab("{ max-num-seqs = 4 }", "[]", "6m", (5.4, 0.1), 400);
    set_slots(&mut lab, 4);
    lab.forecaster = Some(Forecaster { flags: promises, limits: Some(notes_what_waits) });
    run(&lab, 1).unwrap();
    let waited = WAITED.load(Ordering::Relaxed);
    assert!(waited > 10, "{waited}");
}

/// The most requests in a question about flags that had not started when it was asked.
static WAITED_STILL: AtomicUsize = AtomicUsize::new(0);

fn notes_what_waits_still(lab: &Lab, question: &EngineQuestion, seed: u64) -> EngineAnswer {
    let until = |request: &RecentRequest| request.at + request.waited;
    let asked = question.requests.iter().map(until).max();
    let waits = question.requests.iter().filter(|request| !request.waited.is_zero() && Some(until(request)) == asked);
    WAITED_STILL.fetch_max(waits.count(), Ordering::Relaxed);
    promises(lab, question, seed)
}

#[test]
fn flags_are_simulated_with_what_waits_still() {
    let mut lab = lab("{ max-num-seqs = 4 }", "[\"gpu-memory-utilization\"]", "4m", (4.8, 0.1), 400);
    set_slots(&mut lab, 4);
    lab.forecaster = Some(Forecaster { flags: notes_what_waits_still, limits: None });
    run(&lab, 1).unwrap();
    let waited = WAITED_STILL.load(Ordering::Relaxed);
    assert!(waited > 10, "{waited}");
}

#[test]
fn what_waits_holds_up_the_others_and_does_not_count_itself() {
    let lab = lab("{ max-num-seqs = 64 }", "[\"max-num-seqs\"]", "1m", (4.8, 0.1), 400);
    let with = |slots| Limits(vec![PoolLimits { slots, ..Limits::of(&lab.config).0[0] }]);
    let answer = |waiting: usize, is_known: bool| {
        let queue = requests(waiting as u64).map(|request| RecentRequest { at: Duration::ZERO, ..request });
        let requests = queue.chain(requests(300)).collect();
        let question = LimitsQuestion {
            pools: vec!["all".to_owned()],
            now: with(8),
            candidates: vec![with(64)],
            requests,
            waiting: if is_known { waiting } else { 0 },
        };
        let answer = forecast_limits(&lab, &question, 1);
        (answer.now.unwrap(), answer.candidates[0].unwrap())
    };
    let (now, more) = answer(0, true);
    assert!(now.loss < 0.01 && more.loss < 0.01, "{now:?} {more:?}");
    // Whatever the slots, both engines together need a while for the waiting requests. Only with
    // few slots do all later requests wait for them.
    let (now, more) = answer(200, true);
    assert!(now.loss > 0.1 && more.loss < 0.7 * now.loss, "{now:?} {more:?}");
    assert!(now.loss - more.loss > 2.0 * more.error, "{now:?} {more:?}");
    let (counted, _) = answer(200, false);
    assert!(counted.loss > now.loss + 0.1, "{now:?} {counted:?}");
}

#[test]
fn a_change_of_engines_ends_the_trial_of_limits_that_is_under_way() {
    let mut lab = lab("{ max-num-seqs = 8 }", "[\"gpu-memory-utilization\"]", "4m", (4.8, 0.1), 5);
    lab.forecaster = Some(Forecaster { flags: promises, limits: None });
    let run = run(&lab, 1).unwrap();
    let of = |kind, key: &str| {
        run.tuning.iter().find(|event| event.kind == kind && event.key.contains(key)).map(|event| event.at)
    };
    let begun = of(EventKind::Tried, ".engine.");
    let ended = run.tuning.iter().find(|event| event.kind == EventKind::StoodBack).expect("a trial was under way");
    assert_eq!((Some(ended.at), &*ended.why), (begun, "a change of its engines has begun"), "{:#?}", run.tuning);
    let report = run.tuner.unwrap();
    assert_eq!(report.groups[0].limits, Vec::new(), "no other limit was kept");
}

#[test]
fn requests_that_wait_while_an_engine_restarts_are_not_lost_when_it_fails_with_them() {
    for fault in [PlantedFault::CrashesAt(4), PlantedFault::HangsAt(4)] {
        let mut lab = lab("{ max-num-seqs = 64 }", "[\"gpu-memory-utilization\"]", "12m", (5.0, 0.01), 5);
        // One engine alone has too few slots, so that requests wait for the other. With few prefill
        // tokens the requests start one by one. They have their first tokens before the request
        // arrives that triggers the fault.
        let config = Arc::make_mut(&mut lab.config);
        let mut limits = Limits::of(config);
        (limits.0[0].slots, limits.0[0].prefill_tokens) = (6, Some(600));
        limits.put(config);
        lab.forecaster = Some(Forecaster { flags: promises, limits: None });
        lab.plants = vec![Plant { flag: EngineFlag::GpuMemoryUtilization, value: 0.87, fault }];
        let run = run(&lab, 1).unwrap();
        assert_eq!(kinds(&run), [EventKind::Tried, EventKind::Undone], "{fault:?}: {:#?}", run.tuning);
        assert_eq!(lost(&run), 0, "{fault:?}: {:#?}", run.tuning);
    }
}

#[tokio::test(start_paused = true)]
async fn an_old_engine_that_is_kept_asleep_returns_sooner() {
    let lab = lab("{ max-num-seqs = 4 }", "[\"max-num-seqs\"]", "1m", (1.0, 1.0), 400);
    let recorder = LastRecord::new(Instant::now());
    let mut own = LabTuner::new(&lab, recorder.observer()).expect("it acts");
    let old = &lab.engines[0];
    let new = old.with_flag(EngineFlag::MaxNumSeqs, 8.0).unwrap();
    let start = own.restart_takes(0, Some(&new));
    assert_eq!(own.restart_takes(1, Some(old)), start, "another engine");
    let wake = own.restart_takes(0, Some(old));
    assert!(wake < start / 4, "{wake:?} and {start:?}");
    assert_eq!(own.restart_takes(0, Some(old)), start, "none is kept any more");
}
