//! Tests of reports on records: reading, counting and explaining.

use super::worst::{PERIOD, worst};
use super::*;
use sluice_core::openai::Route;

fn line(second: u32, rest: &str) -> String {
    let (hour, minute, second) = (3 + second / 3_600, second / 60 % 60, second % 60);
    format!(
        "{{\"version\":1,\"time\":\"2026-01-02T{hour:02}:{minute:02}:{second:02}Z\",\"route\":\"chat_completions\",\"home\":\"short\",\
         \"pool\":\"short\",\"backend\":\"gpu0\",\"total_ms\":500.0,\"stream\":true,{rest}}}\n"
    )
}

/// A stream with 10 ms in the engine and the rest of `ttft` ms in the queue.
fn good(second: u32, ttft: u32) -> String {
    line(
        second,
        &format!(
            r#""queue_ms":{},"backend_ttft_ms":10,"ttft_ms":{ttft},"e2el_ms":400,"prompt_tokens":100,"outcome":"completed","slo_met":{}"#,
            ttft - 10,
            ttft < 300
        ),
    )
}

fn shed(second: u32) -> String {
    line(second, r#""outcome":"shed","detail":"queue_full","queue_ms":20000"#)
}

fn day(texts: &[(&str, &str)]) -> Result<Day, RecordsError> {
    let mut day = Day::default();
    texts.iter().try_for_each(|(file, text)| day.read(file, text.as_bytes()))?;
    day.sort();
    Ok(day)
}

fn entries(text: &str) -> Vec<Entry> {
    day(&[("file", text)]).unwrap().entries
}

#[test]
fn copies_other_routes_and_a_line_that_was_cut_off_are_left_out_and_noted() {
    let text = good(1, 50)
        + &line(2, r#""outcome":"completed","copy":"completed""#)
        + &line(3, r#""outcome":"completed""#).replace("chat_completions", "embeddings")
        + "{\"time\":\"20";
    let day = day(&[("a", &text)]).unwrap();
    assert_eq!(day.entries.len(), 1);
    assert!((day.entries[0].at.fract() - 0.5).abs() < 1e-3, "it arrived half a second before it ended");
    assert_eq!(day.entries[0].place(), "a:1");
    let notes = [
        "The last line of a was cut off and is left out.",
        "1 copies for shadow arms are left out.",
        "1 requests that generate no text are left out.",
    ];
    assert_eq!(day.notes, notes);
}

#[test]
fn requests_count_exactly_if_the_gateway_says_that_their_route_generates() {
    for route in Route::ALL {
        let found = entries(&(good(1, 50) + &good(2, 50).replace("chat_completions", route.label())));
        assert_eq!(found.len(), if route.generates() { 2 } else { 1 }, "{route}");
    }
}

#[test]
fn what_is_no_record_or_would_count_twice_is_an_error_that_says_where() {
    let error = |texts: &[(&str, &str)]| day(texts).unwrap_err().to_string();
    let good = good(1, 50);
    let cut = format!("{}\n{good}", &good[..60]);
    for (text, begin) in [
        ("{\"time\":1}\n", "x, line 1: not a record"),
        ("<html>", "x, line 1: not a record"),
        (&*cut, "x, line 1: not a record"),
        (&good.replace("2026-01-02T", ""), "x, line 1: `time` '03:00:01Z' is not a time"),
        (&(good.clone() + &good.replace("\"version\":1", "\"version\":7")), "x, line 2: a record of version 7, and"),
    ] {
        let error = error(&[("x", text)]);
        assert!(error.starts_with(begin), "{error}");
    }
    assert!(error(&[("x", "\n{}\n")]).contains("[records]"), "it says what to give");
    let log = good.replace("\"version\":1,", "");
    let mixed = error(&[("x", &good), ("y", &log)]);
    assert!(mixed.starts_with("y is an access log, and the files before it are records"), "{mixed}");
    let binary = [b'{', 0xff, 0xfe, b'\n'];
    assert!(Day::default().read("b", &binary[..]).unwrap_err().to_string().starts_with("b, line 1: not a record"));
}

#[test]
fn the_worst_period_is_that_with_most_misses_or_the_longest_p99() {
    let calm: String = (0..30).map(|second| good(second, 50)).collect();
    let busy: String = (1_200..1_230).map(|second| good(second, 500)).collect();
    let full: String = (2_400..2_440).map(shed).collect();
    let period = worst(&entries(&(calm.clone() + &busy + &full))).unwrap();
    assert_eq!((period.requests, period.missed, period.to - period.from), (40, 40, PERIOD));
    let without_objectives = |text: &str| text.replace(",\"slo_met\":true", "").replace(",\"slo_met\":false", "");
    let period = worst(&entries(&without_objectives(&(calm + &busy)))).unwrap();
    assert_eq!((period.requests, period.p99), (30, 500.0));
    assert_eq!(worst(&[]), None);
}

#[test]
fn of_periods_with_few_requests_the_fullest_is_the_worst() {
    let sparse: String = (0..5).chain(1_200..1_215).chain(2_400..2_410).map(|second| good(second, 50)).collect();
    let period = worst(&entries(&sparse)).unwrap();
    assert_eq!((period.requests, period.from), (15, entries(&sparse)[5].at));
}

#[test]
fn years_between_two_records_cost_nothing() {
    let text = good(1, 50) + &good(2, 60).replace("2026-", "9026-");
    assert_eq!(worst(&entries(&text)).map(|period| period.requests), Some(1));
}

fn mixed() -> Vec<Entry> {
    let slow = good(102, 50)
        .replace("\"backend_ttft_ms\":10", "\"backend_ttft_ms\":700")
        .replace("\"ttft_ms\":50", "\"ttft_ms\":740");
    entries(&((0..99).map(|second| good(second, 50)).collect::<String>() + &good(100, 900) + &shed(101) + &slow))
}

#[test]
fn a_record_has_the_class_that_the_gateway_gave_it_and_one_without_has_the_home_pool() {
    let with = good(1, 50).replace("\"home\":", "\"class\":\"long\",\"home\":");
    let without = good(2, 70).replace("\"home\":\"short\"", "\"home\":\"elsewhere\"");
    let all = entries(&(with + &without));
    let classes: Vec<(&str, &str)> = all.iter().map(|entry| (&*entry.class, &*entry.pool)).collect();
    assert_eq!(classes, [("long", "short"), ("elsewhere", "short")]);
    let section = &sections(&all)[1];
    assert_eq!(section.rows[1][..3], ["elsewhere", "short", "1"]);
    assert_eq!(section.rows[2][..3], ["long", "short", "1"]);
}

#[test]
fn the_sections_say_what_was_asked_what_was_slow_and_why() {
    let all = sections(&mixed());
    let rows =
        |title: &str| &all.iter().find(|section| section.title == title).unwrap_or_else(|| panic!("{title}")).rows;
    let tiles = all[0].tiles.iter().map(|(value, name, _)| (value.as_str(), *name)).collect::<Vec<_>>();
    assert!(
        tiles.starts_with(&[("102", "requests"), ("101", "completed"), ("1", "shed"), ("0", "failed")]),
        "{tiles:?}"
    );
    assert!(tiles.contains(&("10 k", "prompt tokens")), "{tiles:?}");
    assert_eq!(rows("By class and pool")[1][..7], ["short", "short", "102", "1", "0", "50", "50"]);
    assert_eq!(rows("By length of the prompt")[1][..2], ["up to 1k", "short"]);
    assert_eq!(rows("By minute")[2][..2], ["2026-01-02 03:00", ""]);
    assert_eq!(rows("By minute")[3][..2], ["2026-01-02 03:01", "slowest"]);
    let parts = rows("Where TTFT went");
    assert_eq!(parts[2], ["short, slowest 1 %", "2", "820", "465", "355", "0.0", "queue (57 %)"]);
    assert_eq!(rows("What was shed or failed, and why")[1][..5], ["shed", "queue_full", "short", "gpu0", "1"]);
    let slowest = rows("The slowest requests");
    assert_eq!(slowest[1][1], "queue (99 %)");
    assert_eq!(slowest[2][1], "engine (95 %), 70.0 times the usual for this length");
    assert_eq!(slowest[1].last().unwrap(), "file:100");
}

#[test]
fn of_a_request_behind_a_burst_the_cause_is_what_was_before_it_in_the_engine() {
    let burst: String = (1..=50)
        .map(|place| {
            let ttft = 400 * place;
            let rest = format!(
                r#""queue_ms":0,"backend_ttft_ms":{ttft},"ttft_ms":{ttft},"e2el_ms":{ttft},"prompt_tokens":16000,"outcome":"completed""#
            );
            line(30, &rest)
        })
        .collect();
    let all = sections(&entries(&burst));
    let slowest = &all.iter().find(|section| section.title == "The slowest requests").unwrap().rows;
    assert_eq!(slowest[1][1], "engine (100 %): 49 prompts with 784000 tokens were before it there");
    assert_eq!(slowest[2][1], "engine (100 %): 48 prompts with 768000 tokens were before it there");
}

#[test]
fn times_are_by_minute_or_by_hour_as_the_records_need() {
    for (last, title) in [(100, "By minute"), (6_000, "By minute"), (6_060, "By 10 minutes"), (60_060, "By hour")] {
        let all = sections(&entries(&(good(0, 50) + &good(last, 50))));
        assert!(all.iter().any(|section| section.title == title), "{last}");
    }
    let long = good(70, 50).replace("\"prompt_tokens\":100", "\"prompt_tokens\":9000");
    let all = sections(&entries(&(good(0, 50) + &long)));
    let plots = &all.iter().find(|section| section.title == "By minute").unwrap().dots;
    assert_eq!(plots[1].x, "minute since 2026-01-02 02:59, UTC");
    assert_eq!(plots[1].series[0].1, [(2.0, 50.0)]);
    let names: Vec<_> = plots[1].series.iter().map(|(name, _)| name.as_str()).collect();
    assert_eq!(names, ["4k to 16k", "up to 1k"]);
    assert_eq!(plots.iter().map(|plot| plot.may_be_log).collect::<Vec<_>>(), [false, true, false, true]);
}

#[test]
fn the_summary_is_short_and_its_table_fits_80_columns() {
    let entries = mixed();
    let text = summary::text(&entries, &worst(&entries).unwrap());
    assert!(text.starts_with(
        "102 requests that generate text, 2026-01-02 02:59:59 to 2026-01-02 03:01:41 UTC: 101 completed, 1 shed"
    ));
    assert!(
        text.contains("short                      102         2        50       740       400       400"),
        "{text}"
    );
    assert!(text.contains("of the slowest 1 % (2 streams) queue 57 %, engine 43 %, elsewhere 0 %"), "{text}");
    assert!(text.contains("Slowest request: 900 ms at 2026-01-02 03:01:39, queue (99 %) (file:100)."), "{text}");
    assert!(text.lines().count() < 12, "{text}");
}

#[test]
fn the_lines_of_a_period_are_those_that_arrived_in_it() {
    let text = good(1, 50) + "no record\n" + &good(5, 50) + &good(9, 50);
    let at = entries(&good(5, 50))[0].at;
    let mut out = Vec::new();
    read::copy_between(text.as_bytes(), (at, at + 4.0), &mut out).unwrap();
    assert_eq!(String::from_utf8(out).unwrap(), good(5, 50));
}
