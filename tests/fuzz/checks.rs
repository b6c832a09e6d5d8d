//! Properties that must hold for any input, one function per kind of input. The fuzz targets call
//! them with generated inputs, `cargo test` with the inputs of the corpus.
//!
//! A check panics when its property does not hold.

use bytes::Bytes;
use serde_json::Value;
use sluice_config::{Config, Machine, Surroundings};
use sluice_core::meter::{StreamMeter, StreamStats, Strip};
use sluice_core::openai::{Dialect, EditedBody, Edits, Route, UsageEdit, multipart, request as reader};
use sluice_core::vllm::failure::{CAUSE_MAX, Exit, diagnose};
use sluice_core::vllm::logs::{StartFollower, message, process};
use sluice_core::vllm::metrics::MetricsSnapshot;
use tokio::time::Instant;

pub(crate) type Check = fn(&[u8]);

/// Every check, by the name of its fuzz target and of its folder in the corpus.
#[allow(dead_code, reason = "a fuzz target uses one check by name")]
pub(crate) const ALL: [(&str, Check); 6] =
    [("request", request), ("multipart", form), ("sse", sse), ("config", config), ("metrics", metrics), ("log", log)];

/// A body on any JSON route. If serde accepts the body as an object and the gateway can read it,
/// both find the same model. If the gateway then replaces the model's name, the body is still JSON
/// and has the new name.
pub(crate) fn request(body: &[u8]) {
    let tree = serde_json::from_slice::<Value>(body).ok().filter(Value::is_object);
    for route in Route::ALL {
        let Ok(view) = reader::read(route, body) else { continue };
        let Some(tree) = &tree else { continue };
        assert_eq!(view.model.as_deref().unwrap_or_default(), tree["model"].as_str().unwrap_or_default());
        let edits = Edits { model: Some("new"), usage: UsageEdit::InEveryEvent };
        let edited = EditedBody::new(&Bytes::copy_from_slice(body), &view.edits, edits).to_bytes();
        let edited: Value = serde_json::from_slice(&edited).expect("an edited body is JSON");
        assert_eq!(edited["model"], "new");
        assert_eq!(edited["stream_options"]["include_usage"], true);
    }
}

/// A form whose boundary is `x`. If it names a model, the gateway reads the new model from the
/// edited form.
pub(crate) fn form(body: &[u8]) {
    let content_type = "multipart/form-data; boundary=x";
    for route in Route::ALL {
        let Ok(view) = multipart::read(route, content_type, body) else { continue };
        if view.model.is_none() {
            continue;
        }
        let edits = Edits { model: Some("new"), usage: UsageEdit::AsSent };
        let edited = EditedBody::new(&Bytes::copy_from_slice(body), &view.edits, edits).to_bytes();
        let again = multipart::read(route, content_type, &edited).expect("an edited form is a form");
        assert_eq!(again.model.as_deref(), Some("new"));
    }
}

/// A stream in pieces, whose length the first byte sets. Without stripping the bytes do not change.
/// Neither bytes nor measurements depend on the pieces.
pub(crate) fn sse(input: &[u8]) {
    let Some((first, stream)) = input.split_first() else { return };
    let now = Instant::now();
    let pieces: Vec<&[u8]> = stream.chunks(usize::from(*first) + 1).collect();
    for dialect in [Dialect::Choices, Dialect::Responses, Dialect::Messages] {
        for strip in [Strip::Nothing, Strip::InjectedUsage, Strip::Continuous { keep_final: true }] {
            let split = metered(dialect, strip, &pieces, now);
            assert_eq!(split, metered(dialect, strip, &[stream], now));
            assert!(strip != Strip::Nothing || split.0 == stream);
        }
    }
}

fn metered(dialect: Dialect, strip: Strip, pieces: &[&[u8]], now: Instant) -> (Vec<u8>, StreamStats) {
    let mut meter = StreamMeter::new(dialect, now, strip);
    let mut out = Vec::new();
    for piece in pieces {
        meter.feed(Bytes::copy_from_slice(piece), now).iter().for_each(|part| out.extend_from_slice(part));
    }
    meter.end_of_body(now);
    meter.finish().iter().for_each(|part| out.extend_from_slice(part));
    (out, meter.stats())
}

/// A configuration file. A valid file is printed as a file that is valid too, and this file prints
/// as itself. An invalid file gets an error message.
pub(crate) fn config(text: &[u8]) {
    let Ok(text) = std::str::from_utf8(text) else { return };
    let around = Surroundings { env: &|_| None, folder: "/nonexistent".into(), machine: Machine::with_cores(2) };
    match Config::parse(text, "fuzz", &[], &around) {
        Ok(loaded) => {
            let shown = loaded.config.to_string();
            match Config::parse(&shown, "fuzz", &[], &around) {
                Ok(again) => assert_eq!(shown, again.config.to_string()),
                // A masked secret is not a valid value.
                Err(problems) => assert!(shown.contains("****"), "{problems}\n{shown}"),
            }
        }
        Err(problems) => assert!(!problems.to_string().is_empty()),
    }
}

/// A metrics page of an engine: no value is negative or not a number.
pub(crate) fn metrics(page: &[u8]) {
    let page = String::from_utf8_lossy(page);
    let seen = MetricsSnapshot::parse(&page);
    for value in [seen.running, seen.waiting, seen.kv_usage, seen.prompt_tokens, seen.iterations, seen.progress()] {
        assert!(value >= 0.0, "{seen:?}");
    }
    assert!(seen.samples <= page.lines().count());
}

/// A log of an engine. While the gateway reads it, the phase of the start never goes back, and the
/// text of a failure's cause is bounded.
pub(crate) fn log(text: &[u8]) {
    let text = String::from_utf8_lossy(text);
    let lines: Vec<&str> = text.lines().collect();
    let mut follower = StartFollower::default();
    for line in &lines {
        let before = follower.phase();
        follower.add_line(line);
        assert!(follower.phase() >= before);
        assert!(line.contains(message(line)));
        let _ = process(line);
    }
    for exit in [None, Some(Exit::Code(1)), Some(Exit::Signal(9))] {
        let diagnosis = diagnose(&lines, exit, follower.phase());
        assert!(diagnosis.cause.is_none_or(|cause| cause.chars().count() <= CAUSE_MAX));
    }
}
