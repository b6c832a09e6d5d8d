//! The screen and the story of one request.

use super::*;

fn args(key: Option<&str>, class: Option<&str>) -> DiagnoseArgs {
    use clap::Parser as _;
    #[derive(clap::Parser)]
    struct Line {
        #[command(flatten)]
        args: DiagnoseArgs,
    }
    let flags = key.map(|key| ["--key", key]).into_iter().chain(class.map(|class| ["--class", class])).flatten();
    Line::parse_from(std::iter::once("diagnose").chain(flags)).args
}

fn minute(pool: &str, name: &str) -> LastMinute {
    let (pool, name) = (pool.to_owned(), name.to_owned());
    LastMinute { pool, name, requests: 110, tokens: 60_000, tpot_s: Some(0.0061), ..LastMinute::default() }
}

#[test]
fn the_screen_begins_with_findings_and_shows_class_key_and_engine() {
    let finding = Finding {
        is_change: false,
        cause: sluice_online::findings::Cause::SlowEngine,
        pool: "all".to_owned(),
        subject: "gpu1".to_owned(),
        sentence: "Engine gpu1 of pool all is 9.8 times as slow as the others.".to_owned(),
        evidence: "61.0 ms per output token, 6.2 ms at the others".to_owned(),
        advice: "Drain it.".to_owned(),
        since_seconds: 150.0,
    };
    let diagnosis = Diagnosis {
        findings: vec![finding],
        keys: vec![minute("", "team-a")],
        engines: vec![minute("all", "gpu1")],
        ..Diagnosis::default()
    };
    let row = |class: &str| HistoryRow { class: Some(class.into()), completed: 42, ..HistoryRow::default() };
    let history =
        HistoryReport { classes: vec![row("short"), row("long")], covered_seconds: 300.0, ..HistoryReport::default() };
    let text = render(&Status::default(), &diagnosis, &history, &args(None, None));
    let places = ["9.8 times as slow", "Seen: 61.0 ms", "Do: Drain it.", "short", "long", "team-a", "all/gpu1"];
    let found: Vec<Option<usize>> = places.iter().map(|part| text.find(part)).collect();
    assert!(found.iter().all(Option::is_some) && found.is_sorted(), "{found:?} in\n{text}");
    assert!(text.contains("(for 2 min)") || text.contains("(for 3 min)"), "{text}");
    let filtered = render(&Status::default(), &diagnosis, &history, &args(Some("team-b"), Some("long")));
    assert!(
        !filtered.contains("team-a") && !filtered.contains("short") && filtered.contains("No finding"),
        "{filtered}"
    );
}

#[test]
fn the_story_of_a_request_names_the_largest_part_of_the_time() {
    let request = RequestView {
        request_id: "abc".into(),
        outcome: "completed".to_owned(),
        queue_ms: 2_100.0,
        ttft_ms: Some(2_400.0),
        backend_ttft_ms: Some(290.0),
        e2el_ms: Some(3_200.0),
        total_ms: 3_200.0,
        retries: vec!["connect".to_owned()],
        ..RequestView::default()
    };
    let text = story(&request);
    assert!(text.contains("Most of the time went in the queue of the gateway (2100 ms)"), "{text}");
    assert!(text.contains("2100 ms  66 %") && text.contains("Attempts were repeated: connect"), "{text}");
    assert!(text.contains("290 ms   9 %  until the engine's first token"), "{text}");
}

#[test]
fn the_engines_own_times_divide_the_time_to_its_first_token() {
    let request = RequestView {
        ttft_ms: Some(500.0),
        backend_ttft_ms: Some(500.0),
        engine_queue_ms: Some(380.0),
        engine_prefill_ms: Some(100.0),
        e2el_ms: Some(600.0),
        total_ms: 600.0,
        ..RequestView::default()
    };
    let text = story(&request);
    for line in [
        "380 ms  63 %  in the queue of the engine",
        "100 ms  17 %  in the engine's prefill, until the first token",
        " 20 ms   3 %  between gateway and engine, before the first token",
        "Most of the time went in the queue of the engine (380 ms)",
    ] {
        assert!(text.contains(line), "{line}\n{text}");
    }
    let beyond = story(&RequestView { engine_queue_ms: Some(9e9), ..request });
    assert!(
        beyond.contains("500 ms  83 %  in the queue of the engine") && !beyond.contains("between gateway"),
        "{beyond}"
    );
}
