//! Tests of runs against a scripted server.
//!
//! They run in real time, so bounds allow for a loaded machine.

use super::*;
use crate::result::record::Outcome;
use crate::run::sender::TIMER_GRAIN;
use crate::testing::{MockEngine, MockResponse, completion_stream, small_workload};

fn plan(arrival: Arrival, extent: Extent) -> RunPlan {
    RunPlan::new(small_workload(), arrival, extent)
}

async fn run_against(engine: &MockEngine, plan: &RunPlan) -> (RunResult, Arc<Progress>) {
    let client = LoadClient::new(&[engine.url()], plan.workload.api, Duration::from_secs(20)).unwrap();
    let progress = Arc::new(Progress::default());
    let outcome = run(plan, &Arc::new(client), &progress).await.unwrap();
    (outcome, progress)
}

#[tokio::test]
async fn every_scheduled_request_is_sent_once_and_near_its_time() {
    let engine = MockEngine::start(|_| MockResponse::stream(completion_stream(2), Duration::ZERO)).await;
    let plan = plan(Arrival::Poisson { rate: 200.0 }, Extent::Requests(60));
    let schedule = plan.arrival.schedule(plan.extent, plan.workload.seed).unwrap();
    let (outcome, progress) = run_against(&engine, &plan).await;
    assert_eq!(engine.requests(), 60);
    assert_eq!(outcome.requests.len(), 60);
    assert_eq!(progress.ended.load(Ordering::Relaxed), 60);
    for (record, due) in outcome.requests.iter().zip(&schedule) {
        let due = due.as_secs_f64();
        assert!((record.due.unwrap() - due).abs() < 1e-9);
        assert!(record.sent >= due - 2.0 * TIMER_GRAIN.as_secs_f64(), "sent {} due {due}", record.sent);
        assert!(record.is_completed() && record.queued == 0.0, "{record:?}");
        assert!(record.ended >= record.sent + record.latency - 1e-9);
    }
    assert!(!outcome.partial && outcome.duration > 0.29);
}

#[tokio::test]
async fn a_request_that_is_due_at_the_start_is_not_sent_before_it() {
    let engine = MockEngine::start(|_| MockResponse::stream(completion_stream(2), Duration::ZERO)).await;
    let burst = plan(Arrival::Burst { rate: 1_000.0, size: 8 }, Extent::Requests(8));
    for _ in 0..40 {
        let (outcome, _) = run_against(&engine, &burst).await;
        for record in &outcome.requests {
            assert!(record.ended >= record.sent + record.latency, "{record:?}");
        }
    }
}

#[tokio::test]
async fn a_late_send_is_measured_and_its_lag_recorded() {
    // Each request takes 50 ms or more, and the last of three waits for the two others.
    let pause = Duration::from_millis(25);
    let engine = MockEngine::start(move |_| MockResponse::stream(completion_stream(1), pause)).await;
    let burst = plan(Arrival::Burst { rate: 1_000.0, size: 3 }, Extent::Requests(3));
    let grain = TIMER_GRAIN.as_secs_f64();
    let (outcome, _) = run_against(&engine, &RunPlan { max_in_flight: 1, ..burst.clone() }).await;
    let last = &outcome.requests[2];
    assert!(last.lag() >= 0.1 - grain, "late by {}", last.lag());
    assert!(last.ttft >= 0.025 - grain && last.due.unwrap() < grain);
    let (outcome, _) = run_against(&engine, &RunPlan { max_concurrency: Some(1), ..burst }).await;
    let last = outcome.requests.iter().max_by(|a, b| a.sent.total_cmp(&b.sent)).unwrap();
    assert!(last.queued >= 0.1 - 2.0 * grain, "queued for {}", last.queued);
    assert!((last.delay() - last.queued).abs() < 0.02, "{last:?}");
    let in_flight = crate::result::steady::changes(&outcome.requests);
    assert!(in_flight.iter().all(|(_, open)| *open <= 1), "{in_flight:?}");
}

#[tokio::test]
async fn a_closed_loop_keeps_its_streams_busy_and_counts_its_requests() {
    let engine = MockEngine::start(|_| MockResponse::stream(completion_stream(2), Duration::from_millis(2))).await;
    let plan = plan(Arrival::ClosedLoop { concurrency: 4 }, Extent::Requests(30));
    let (outcome, _) = run_against(&engine, &plan).await;
    assert_eq!(outcome.requests.len(), 30);
    assert_eq!(engine.connections(), 4);
    assert!(outcome.requests.iter().all(|record| record.due.is_none() && record.lag() == 0.0));
    let ordinals: Vec<u64> = outcome.requests.iter().map(|record| record.index).collect();
    assert_eq!(ordinals, (0..30).collect::<Vec<_>>());
    assert_eq!(outcome.config.max_concurrency, Some(4));
}

#[tokio::test]
async fn failures_and_clients_that_leave_are_counted_beside_the_rest() {
    let engine = MockEngine::start(|number| MockResponse {
        status: if number % 3 == 0 { 503 } else { 200 },
        ..MockResponse::stream(completion_stream(2), Duration::ZERO)
    })
    .await;
    let failing = plan(Arrival::Constant { rate: 500.0 }, Extent::Requests(30));
    let (outcome, progress) = run_against(&engine, &failing).await;
    assert_eq!(progress.failed.load(Ordering::Relaxed), 10);
    let failed =
        outcome.requests.iter().filter(|record| record.outcome == Outcome::Failed("status 503".into())).count();
    assert_eq!(failed, 10);
    let mut leaving = plan(Arrival::AtOnce, Extent::Requests(12));
    leaving.workload.leaving = 1.0;
    let slow = MockEngine::start(|_| MockResponse::stream(completion_stream(2), Duration::from_millis(20))).await;
    let (outcome, progress) = run_against(&slow, &leaving).await;
    assert!(outcome.requests.iter().all(|record| record.outcome == Outcome::Left), "{:?}", outcome.requests);
    assert_eq!(progress.failed.load(Ordering::Relaxed), 0);
}

#[tokio::test]
async fn a_run_that_is_stopped_keeps_what_it_has() {
    let engine = MockEngine::start(|number| {
        MockResponse::stream(completion_stream(1), Duration::from_secs(if number % 2 == 0 { 0 } else { 600 }))
    })
    .await;
    for arrival in [Arrival::ClosedLoop { concurrency: 3 }, Arrival::Constant { rate: 20.0 }] {
        let plan = plan(arrival, Extent::Requests(100_000));
        let client = Arc::new(LoadClient::new(&[engine.url()], plan.workload.api, Duration::from_secs(700)).unwrap());
        let progress = Arc::new(Progress::default());
        let running = tokio::spawn({
            let progress = progress.clone();
            async move { run(&plan, &client, &progress).await.unwrap() }
        });
        let deadline = Instant::now() + Duration::from_secs(60);
        while progress.in_flight() < 2 || progress.ended.load(Ordering::Relaxed) == 0 {
            assert!(Instant::now() < deadline, "nothing is in flight");
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        progress.stop();
        let outcome = tokio::time::timeout(Duration::from_secs(60), running).await.unwrap().unwrap();
        assert!(outcome.partial);
        let count = |outcome_is| outcome.requests.iter().filter(|record| record.outcome == outcome_is).count();
        assert!(count(Outcome::Completed) >= 1 && count(Outcome::Unfinished) >= 2, "{outcome:?}");
        assert!(outcome.warnings[0].contains("ended early"), "{:?}", outcome.warnings);
    }
}
