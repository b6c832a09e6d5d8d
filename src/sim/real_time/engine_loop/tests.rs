//! The engine loop on tokio's paused clock: faults, aborts and suspensions without real waiting.

use super::*;
use crate::SimConfig;
use crate::machine::Profile;
use crate::real_time::concurrency_limit::ConcurrencyLimit;

fn start() -> (Arc<ServerState>, tokio::task::JoinHandle<()>) {
    let config = SimConfig::new("m", Profile::named("h200-llama-8b").unwrap());
    let shared = Arc::new(ServerState::new(config));
    let engine_loop = tokio::spawn(EngineLoop::new(Arc::clone(&shared), Arc::clone(&shared.ranks[0]), None).run());
    (shared, engine_loop)
}

fn submit(shared: &ServerState, output_tokens: u32) -> Arc<OutputCollector> {
    let collector = Arc::new(OutputCollector::new(1, 1));
    let request = Request { id: 1, prompt_tokens: 16, output_tokens, adapter: None, ..Request::default() };
    *shared.concurrency.lock() = ConcurrencyLimit { in_flight: 1, prefill_tokens: 16 };
    let submission = Submission { request, finish: Finish::Length, max_tokens: output_tokens, n: 1, session: None };
    shared.first().send(Command::Submit(vec![submission], Arc::clone(&collector)));
    collector
}

async fn tokens(collector: &OutputCollector, wanted: u32) {
    let (mut seen, mut news) = (0, Vec::new());
    while seen < wanted {
        std::future::poll_fn(|cx| collector.poll_take(cx, &mut news)).await.unwrap();
        seen += news[0].tokens;
    }
}

#[tokio::test(start_paused = true)]
async fn tokens_come_at_the_pace_of_the_gpu() {
    let (shared, _engine_loop) = start();
    let collector = submit(&shared, 1001);
    tokens(&collector, 1).await;
    let first = Instant::now();
    tokens(&collector, 1000).await;
    let pace = first.elapsed().as_secs_f64();
    assert!((4.7..5.0).contains(&pace), "ms per token: {pace}");
}

#[tokio::test(start_paused = true)]
async fn a_minute_of_hanging_costs_no_time_afterwards() {
    let (shared, _engine_loop) = start();
    shared.fault(Fault::Hang);
    tokio::task::yield_now().await;
    tokio::time::advance(Duration::from_secs(60)).await;
    let collector = submit(&shared, 2);
    tokio::task::yield_now().await;
    let resumed = Instant::now();
    shared.fault(Fault::None);
    tokens(&collector, 2).await;
    assert!(resumed.elapsed() < Duration::from_millis(100), "{:?}", resumed.elapsed());
    assert_eq!(shared.concurrency.lock().in_flight, 0);
}

#[tokio::test(start_paused = true)]
async fn a_pause_of_the_process_is_not_made_up_for_in_a_burst() {
    let (shared, _engine_loop) = start();
    let collector = submit(&shared, 1000);
    tokens(&collector, 1).await;
    tokio::time::advance(Duration::from_secs(3)).await;
    let after = Instant::now();
    tokens(&collector, 900).await;
    assert!(after.elapsed() > Duration::from_secs(4), "{:?}", after.elapsed());
}

#[tokio::test(start_paused = true)]
async fn aborts_during_a_hang_are_counted() {
    let (shared, _engine_loop) = start();
    let collector = submit(&shared, 1000);
    tokens(&collector, 2).await;
    shared.fault(Fault::Hang);
    shared.first().send(Command::Abort(vec![1]));
    tokio::time::sleep(Duration::from_secs(5)).await;
    assert_eq!(shared.first().stats.lock().gauges.running, 1, "no step ran, so nothing is reported");
    assert_eq!(shared.concurrency.lock().in_flight, 0, "the server still counts the abort");
}

#[tokio::test(start_paused = true)]
async fn a_stall_ends_when_all_faults_do() {
    let (shared, _engine_loop) = start();
    let collector = submit(&shared, 1000);
    tokens(&collector, 2).await;
    for _ in 0..2 {
        shared.fault(Fault::Stall(Duration::from_secs(3_600)));
    }
    tokio::time::sleep(Duration::from_secs(1)).await;
    shared.fault(Fault::None);
    let after = Instant::now();
    tokens(&collector, 100).await;
    assert!(after.elapsed() < Duration::from_secs(2), "{:?}", after.elapsed());
}
