//! The cost of recording one finished request, and of writing the metrics page.
//!
//! The page of a large deployment (50 models, 8 classes, 100 keys) should take less than 50 ms.
//! `tests/observability/scale.rs` bounds its series, and `metrics_page.py` measures a whole scrape.
//!
//! Recording a request should take about a microsecond. The program measures it without an access
//! log, with an access log, and from four threads at once.

use std::sync::Arc;
use std::time::{Duration, Instant};

use criterion::{Criterion, criterion_group, criterion_main};
use http::StatusCode;
use sluice_config::{AccessLog, LogTarget};
use sluice_core::meter::{ItlHistogram, StreamStats};
use sluice_core::openai::Route;
use sluice_core::openai::response::TokenUsage;
use sluice_gateway::flow::{Outcome, Record};
use sluice_gateway::telemetry::{AccessLogWriter, Telemetry, testing};

/// A completed stream of 64 tokens.
fn record() -> Record {
    let mut itl = ItlHistogram::default();
    (0..63).for_each(|gap| itl.record(Duration::from_micros(5_000 + 100 * gap), 1));
    let stats = StreamStats {
        ttft: Some(Duration::from_millis(30)),
        tpot: Some(Duration::from_millis(6)),
        e2el: Some(Duration::from_millis(408)),
        itl,
        usage: TokenUsage { prompt: Some(1_000), completion: Some(64), cached: None },
        ..StreamStats::default()
    };
    Record {
        upstream_id: "req-0".into(),
        request_id: "7f2c1c1e5f0d4c0a".into(),
        trace: None,
        route: Some(Route::ChatCompletions),
        key: Some("team-a".into()),
        path: None,
        refused_model: None,
        model: Some("llama-3.1-8b".into()),
        home: Some("short".into()),
        class: Some("short".into()),
        pool: Some("short".into()),
        backend: Some("gpu0".into()),
        arm: None,
        assigned: None,
        copy: None,
        stream: true,
        estimate: None,
        status: Some(StatusCode::OK),
        outcome: Outcome::Completed,
        refused: None,
        client: None,
        retries: Default::default(),
        retried_on: Default::default(),
        estimate_time: Duration::from_micros(20),
        queue_wait: Duration::from_micros(2),
        connect_time: Duration::from_micros(10),
        client_wait: Duration::ZERO,
        origin: Default::default(),
        held_up: false,
        total: Duration::from_millis(410),
        stats: Some(stats),
        backend_ttft: Some(Duration::from_millis(29)),
        expected_cached: 0,
        prefix: None,
        sequences: 1,
        has_objectives: true,
        slo_met: Some(true),
        continued: 0,
        not_continued: None,
        prefilled_again: 0,
    }
}

/// The time until each of `threads` threads, all at once, has recorded `rounds` requests.
fn together(telemetry: &Telemetry, record: &Record, threads: usize, rounds: u64) -> Duration {
    let begun = Instant::now();
    std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| (0..rounds).for_each(|_| telemetry.record(record)));
        }
    });
    begun.elapsed()
}

fn recording(c: &mut Criterion) {
    let record = record();
    let plain = Telemetry::with(Box::new(Vec::new), None);
    c.bench_function("record", |b| b.iter(|| plain.record(&record)));
    c.bench_function("record, 4 threads", |b| b.iter_custom(|rounds| together(&plain, &record, 4, rounds)));
    let log = AccessLog { path: LogTarget::File("/dev/null".into()), sample: 1.0, client_address: false };
    let logging = Telemetry::with(Box::new(Vec::new), AccessLogWriter::open(&log).ok());
    c.bench_function("record with access log", |b| b.iter(|| logging.record(&record)));
}

fn page(c: &mut Criterion) {
    let telemetry = Telemetry::with(Box::new(Vec::new), None);
    let mut record = record();
    for model in 0..20 {
        record.model = Some(Arc::from(format!("model-{model}")));
        telemetry.record(&record);
    }
    c.bench_function("page of 20 models", |b| b.iter(|| telemetry.page()));
    for (pools, shape) in [("many", testing::MANY_POOLS), ("few", testing::FEW_POOLS)] {
        let admission = shape.admission(tokio::time::Instant::now());
        let large = Telemetry::with(Box::new(move || admission.view()), None);
        large.configured(&shape.config());
        shape.traffic().iter().for_each(|record| large.record(record));
        c.bench_function(&format!("page of 200 backends in {pools} pools"), |b| b.iter(|| large.page()));
        c.bench_function("the same in OpenMetrics", |b| b.iter(|| large.open_metrics()));
        let page = large.page();
        eprintln!("{} series, {} bytes", page.lines().filter(|line| !line.starts_with('#')).count(), page.len());
    }
}

/// A separate module for the macro, because the function that it makes has no documentation.
mod group {
    use super::*;
    criterion_group!(benches, recording, page);
}
criterion_main!(group::benches);
