//! `sluice backend list`: the backends of a running gateway as a table.
//!
//! On a terminal the table fits the width. If a column of addresses does not fit, each address
//! stands below the backend's name. Below the table is a line for each engine that does not serve,
//! with the cause and the remedy. Past failures appear only with `--wide`.

use comfy_table::presets::{NOTHING, UTF8_HORIZONTAL_ONLY};
use comfy_table::{ColumnConstraint, ContentArrangement, Table, Width};
use serde_json::{Value, json};

use sluice_admin::status::{BackendStatus, Status};
use sluice_fleet::{EngineView, LastChange};

/// Blanks around a cell, in columns.
const PADDING: usize = 2;
/// Most columns of a name below the table, and of a name that is never broken.
const NAME_WIDTH: u16 = 40;

pub(super) fn json(status: &Status) -> String {
    let backends = all(status).map(|(pool, backend)| json!({ "pool": pool, "backend": backend }));
    Value::Array(backends.collect()).to_string()
}

pub(super) fn table(status: &Status, wide: bool, width: Option<usize>) -> String {
    if wide { wide_table(status) } else { narrow_table(status, width) }
}

fn all(status: &Status) -> impl Iterator<Item = (&str, &BackendStatus)> {
    status.pools.iter().flat_map(|pool| pool.backends.iter().map(|backend| (pool.name.as_str(), backend)))
}

fn narrow_table(status: &Status, width: Option<usize>) -> String {
    let unlimited = backends(status, None, true);
    let needed = unlimited.lines().map(|line| line.chars().count()).max().unwrap_or(0);
    let table = match width {
        Some(width) if needed > width => backends(status, Some(width), false),
        _ => unlimited,
    };
    let notes = notes(status, width);
    if notes.is_empty() { table.to_string() } else { format!("{table}\n\n{notes}") }
}

/// The table of backends. Without `address_column`, addresses stand below the names.
fn backends(status: &Status, width: Option<usize>, address_column: bool) -> Table {
    let mut table = fitted(UTF8_HORIZONTAL_ONLY, width);
    let mut header = vec!["backend", "state", "in flight", "engine", "restarts", "last change"];
    if address_column {
        header.insert(1, "url");
    }
    table.set_header(header);
    for (pool, backend) in all(status) {
        let (name, url) = (format!("{pool}/{}", backend.name), backend.url.clone());
        let engine = backend.engine.as_ref();
        let change = engine.and_then(|engine| engine.last_change.as_ref());
        let mut row = if address_column { vec![name, url] } else { vec![format!("{name}\n{url}")] };
        row.extend([
            backend.shown_state().to_owned(),
            in_flight(backend),
            engine.map_or_else(|| "external".to_owned(), doing),
            engine.map_or_else(|| "-".to_owned(), |engine| engine.restarts.to_string()),
            change.map_or_else(|| "-".to_owned(), outcome),
        ]);
        table.add_row(row);
    }
    if let (false, Some(names)) = (address_column, table.column_mut(0)) {
        names.set_constraint(ColumnConstraint::LowerBoundary(Width::Fixed(name_column(status))));
    }
    table
}

/// Width of the column of names in which no address is broken, and no name of up to [`NAME_WIDTH`]
/// characters.
fn name_column(status: &Status) -> u16 {
    let needed = all(status).map(|(pool, backend)| {
        let name = pool.chars().count() + 1 + backend.name.chars().count();
        name.min(usize::from(NAME_WIDTH)).max(backend.url.chars().count()) + PADDING
    });
    needed.max().and_then(|needed| u16::try_from(needed).ok()).unwrap_or(NAME_WIDTH)
}

fn notes(status: &Status, width: Option<usize>) -> Table {
    let mut notes = fitted(NOTHING, width);
    for (pool, backend) in all(status) {
        let engine = backend.engine.as_ref();
        let said = [
            engine.and_then(note).or_else(|| backend.reason.clone()),
            engine.and_then(|engine| engine.taken_back.as_ref()).map(|text| format!("taken back: {text}")),
        ];
        for note in said.into_iter().flatten() {
            notes.add_row([format!("{pool}/{}", backend.name), note]);
        }
    }
    if let (Some(_), Some(names)) = (width, notes.column_mut(0)) {
        names.set_constraint(ColumnConstraint::UpperBoundary(Width::Fixed(NAME_WIDTH)));
    }
    notes
}

fn wide_table(status: &Status) -> String {
    let mut table = fitted(UTF8_HORIZONTAL_ONLY, None);
    table.set_header(["backend", "url", "state", "in flight", "engine", "restarts", "last change", "flags"]);
    for (pool, backend) in all(status) {
        let engine = backend.engine.clone().unwrap_or_default();
        let managed = |text: String| if backend.engine.is_some() { text } else { "-".to_owned() };
        let change = engine.last_change.as_ref().map(|last| match (&engine.taken_back, &last.why) {
            (Some(why), _) | (None, Some(why)) => format!("{}: {why}", outcome(last)),
            (None, None) => outcome(last),
        });
        let mut now = activity_and_failure(&engine);
        if let Some(why) = engine.why.as_ref().filter(|_| is_over(&engine)) {
            now += &format!(" for {}, after {why}", age(engine.seconds));
        }
        table.add_row([
            format!("{pool}/{}", backend.name),
            backend.url.clone(),
            backend.shown_state().to_owned(),
            in_flight(backend),
            if backend.engine.is_some() { now } else { "external".to_owned() },
            managed(engine.restarts.to_string()),
            managed(change.unwrap_or_else(|| "-".to_owned())),
            managed(engine.settings.clone()),
        ]);
    }
    table.to_string()
}

/// A table that fits `width` columns; `None`: any width.
pub(super) fn fitted(preset: &str, width: Option<usize>) -> Table {
    let mut table = Table::new();
    table.load_preset(preset);
    if let Some(width) = width {
        table.set_content_arrangement(ContentArrangement::Dynamic);
        table.set_width(u16::try_from(width).unwrap_or(u16::MAX));
    }
    table
}

fn in_flight(backend: &BackendStatus) -> String {
    match backend.slots.limit {
        Some(limit) => format!("{}/{limit}", backend.in_flight),
        None => backend.in_flight.to_string(),
    }
}

fn outcome(change: &LastChange) -> String {
    format!("#{} {}", change.id, change.outcome.replace('_', " "))
}

/// Whether the engine serves again after its last failure.
fn is_over(engine: &EngineView) -> bool {
    matches!(engine.step.as_str(), "ramp" | "serve")
}

/// The step of an engine, with progress while it does not serve.
fn doing(engine: &EngineView) -> String {
    match engine.detail.as_str() {
        detail if !detail.is_empty() && !is_over(engine) => format!("{}: {detail}", engine.step),
        _ => engine.step.clone(),
    }
}

fn note(engine: &EngineView) -> Option<String> {
    match (engine.step.as_str(), engine.detail.as_str(), &engine.why, &engine.waits) {
        // The command is on a separate line, so that it can be copied.
        ("hold", ..) => Some(format!("hold: {}\nwhen the cause is fixed: {}", why(engine), enable(engine))),
        ("ramp" | "serve", "", _, None) => None,
        ("ramp" | "serve", "", _, Some(_)) => Some(activity(engine)),
        ("ramp" | "serve", detail, ..) => Some(detail.to_owned()),
        (_, _, Some(why), _) => Some(why.clone()),
        (_, _, None, Some(waits)) => Some(waits.clone()),
        _ => None,
    }
}

/// The activity of an engine, such as `start: loading weights, 12 s (20 s in all)`.
pub(super) fn activity(engine: &EngineView) -> String {
    let step = &engine.step;
    match (engine.detail.as_str(), &engine.why, &engine.waits) {
        _ if step == "hold" => format!("hold: {}; when the cause is fixed, run {}", why(engine), enable(engine)),
        ("", Some(why), _) if !is_over(engine) => format!("{step}: {why}"),
        ("", _, Some(waits)) => format!("{step}; its new configuration waits: {waits}"),
        ("", ..) => step.clone(),
        (detail, ..) => format!("{step}: {detail}"),
    }
}

/// The activity of an engine, and the failure after which it does not serve yet.
pub(super) fn activity_and_failure(engine: &EngineView) -> String {
    let activity = activity(engine);
    match &engine.why {
        Some(why) if !is_over(engine) && !activity.contains(why) => format!("{activity}; last failure: {why}"),
        _ => activity,
    }
}

fn why(engine: &EngineView) -> &str {
    engine.why.as_deref().unwrap_or("the engine does not run")
}

fn enable(engine: &EngineView) -> String {
    format!("sluice backend enable {}", engine.backend)
}

/// A time span in its largest unit.
fn age(seconds: f64) -> String {
    match seconds as u64 {
        whole @ 0..60 => format!("{whole} s"),
        whole @ 60..3_600 => format!("{} min", whole / 60),
        whole => format!("{} h", whole / 3_600),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use sluice_admin::status::{PoolStatus, Used};

    const DIED: &str = "engine_died: EngineCore encountered an issue. See stack trace above for the root cause; \
                        the log has the cause: /var/lib/sluice/short.gpu1.log";

    fn engine(name: &str, step: &str, why: Option<&str>) -> BackendStatus {
        let flags = "gpu-memory-utilization=0.92 max-model-len=131072 max-num-batched-tokens=8192 max-num-seqs=256";
        BackendStatus {
            name: name.to_owned(),
            url: "http://127.0.0.1:8001".to_owned(),
            state: if step == "serve" { "ready" } else { "down" }.to_owned(),
            in_flight: 12,
            slots: Used { used: 12, limit: Some(256) },
            engine: Some(EngineView {
                backend: format!("short/{name}"),
                step: step.to_owned(),
                seconds: 250.0,
                settings: flags.to_owned(),
                last_change: Some(LastChange {
                    id: 4,
                    outcome: "rolled_back".to_owned(),
                    why: Some("kv_too_small: To serve at least one request with the model's max seq len".to_owned()),
                }),
                restarts: 1,
                why: why.map(str::to_owned),
                ..EngineView::default()
            }),
            ..BackendStatus::default()
        }
    }

    fn status(backends: Vec<BackendStatus>) -> Status {
        let pool = PoolStatus { name: "short".to_owned(), backends, ..PoolStatus::default() };
        Status { pools: vec![pool], ..Status::default() }
    }

    #[test]
    fn the_table_and_its_notes_fit_the_terminal() {
        let long = "a".repeat(64);
        let mut backends = vec![engine(&long, "serve", Some(DIED))];
        for step in ["serve", "ramp", "start", "backoff", "stop", "hold"] {
            backends.push(engine(step, step, Some(DIED)));
        }
        let text = table(&status(backends), false, Some(100));
        let longest = text.lines().map(|line| line.chars().count()).max().unwrap();
        assert!(longest <= 100, "{longest} columns:\n{text}");
    }

    #[test]
    fn addresses_and_names_are_shown_whole_in_every_width() {
        let named = |pool: &str, name: &str, width| {
            let backend = engine(name, "serve", None);
            let pool = PoolStatus { name: pool.to_owned(), backends: vec![backend], ..PoolStatus::default() };
            table(&Status { pools: vec![pool], ..Status::default() }, false, width)
        };
        let (name, url) = ("default/127.0.0.1:8000", "http://127.0.0.1:8001");
        for width in [None, Some(110), Some(80), Some(70)] {
            let text = named("default", "127.0.0.1:8000", width);
            assert!(text.contains(name) && text.contains(url), "{width:?}: {text}");
            let in_one_line = text.lines().any(|line| line.contains(name) && line.contains(url));
            assert_eq!(in_one_line, width.is_none_or(|width| width > 100), "{width:?}: {text}");
        }
        let long = named("all", &"a".repeat(90), None);
        assert!(long.lines().any(|line| line.contains(&"a".repeat(90)) && line.contains(url)), "{long}");
    }

    #[test]
    fn a_failure_that_is_over_is_shown_with_its_age_in_the_wide_table_only() {
        let served = status(vec![engine("gpu1", "serve", Some(DIED))]);
        assert!(!table(&served, false, None).contains("engine_died"), "{}", table(&served, false, None));
        let wide = table(&served, true, None);
        assert!(wide.contains("serve for 4 min, after engine_died"), "{wide}");
        assert_eq!(activity_and_failure(served.pools[0].backends[0].engine.as_ref().unwrap()), "serve");
        let waiting = table(&status(vec![engine("gpu1", "backoff", Some(DIED))]), false, None);
        assert!(waiting.contains("engine_died"), "{waiting}");
    }

    #[test]
    fn the_reason_of_an_external_backend_is_below_the_table() {
        let reason = "the engine refuses the gateway's credentials";
        let backend = BackendStatus { engine: None, reason: Some(reason.to_owned()), ..engine("gpu1", "serve", None) };
        let text = table(&status(vec![backend]), false, None);
        assert!(text.contains(reason), "{text}");
    }

    #[test]
    fn an_engine_on_hold_says_which_command_starts_it() {
        let text = activity(engine("gpu1", "hold", Some("killed: signal 9")).engine.as_ref().unwrap());
        assert_eq!(text, "hold: killed: signal 9; when the cause is fixed, run sluice backend enable short/gpu1");
        let table = table(&status(vec![engine("gpu1", "hold", None)]), false, None);
        assert!(table.contains("sluice backend enable short/gpu1"), "{table}");
    }
}
