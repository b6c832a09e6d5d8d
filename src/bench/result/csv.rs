//! One line of CSV for each request: for spreadsheets and scripts of one's own.
//!
//! Moments and spans are seconds, as in the result; an empty field is one that does not apply. Gaps between tokens are not in
//! it, only the longest. Texts hold no comma, quote or line break but in names and reasons, which are then quoted as
//! RFC 4180 says.

use std::io::{self, Write};

use crate::result::record::{Outcome, Record, RunResult};

/// The names of the columns, in order.
pub const COLUMNS: [&str; 23] = [
    "run",
    "index",
    "class",
    "adapter",
    "session",
    "turn",
    "due",
    "queued",
    "sent",
    "ended",
    "outcome",
    "error",
    "prompt_tokens",
    "cached_tokens",
    "output_tokens",
    "ttft",
    "tpot",
    "latency",
    "max_itl",
    "pool",
    "backend",
    "arm",
    "queue_wait",
];

/// Writes the names of the columns.
///
/// # Errors
/// Those of `out`.
pub fn write_header(mut out: impl Write) -> io::Result<()> {
    writeln!(out, "{}", COLUMNS.join(","))
}

/// Writes the requests of a run; `run` is its name among several.
///
/// # Errors
/// Those of `out`.
pub fn write(run: &str, result: &RunResult, mut out: impl Write) -> io::Result<()> {
    for record in &result.requests {
        writeln!(out, "{}", row(run, result, record).map(|field| quoted(&field)).join(","))?;
    }
    Ok(())
}

fn row(run: &str, result: &RunResult, record: &Record) -> [String; COLUMNS.len()] {
    let number = |value: Option<f64>| value.map(|value| value.to_string()).unwrap_or_default();
    let count = |value: Option<u64>| value.map(|value| value.to_string()).unwrap_or_default();
    let text = |value: Option<&str>| value.unwrap_or_default().to_owned();
    let done = |value: f64| number(record.is_completed().then_some(value));
    let config = &result.config;
    let (outcome, error) = match &record.outcome {
        Outcome::Completed => ("completed", ""),
        Outcome::Failed(reason) => ("failed", &**reason),
        Outcome::Left => ("left", ""),
        Outcome::Unfinished => ("unfinished", ""),
    };
    [
        run.to_owned(),
        record.index.to_string(),
        text(config.classes.get(record.class as usize).map(|class| class.name.as_str())),
        text(record.adapter.and_then(|adapter| config.adapters.get(adapter as usize)).map(String::as_str)),
        count(record.session.map(|(session, _)| session)),
        count(record.session.map(|(_, turn)| u64::from(turn))),
        number(record.due),
        record.queued.to_string(),
        record.sent.to_string(),
        record.ended.to_string(),
        outcome.to_owned(),
        error.to_owned(),
        record.prompt_tokens.to_string(),
        count(record.cached_tokens),
        record.output_tokens.to_string(),
        done(record.ttft),
        number(record.tpot()),
        done(record.latency),
        number(record.itls.iter().copied().max_by(f64::total_cmp)),
        text(record.pool.as_deref()),
        text(record.backend.as_deref()),
        text(record.arm.as_deref()),
        number(record.queue_wait),
    ]
}

fn quoted(field: &str) -> String {
    match field.contains([',', '"', '\n', '\r']) {
        true => format!("\"{}\"", field.replace('"', "\"\"")),
        false => field.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_request_is_a_line_with_every_column() {
        let completed = Record {
            outcome: Outcome::Completed,
            due: Some(0.5),
            ttft: 0.25,
            latency: 0.75,
            itls: vec![0.25, 0.125],
            output_tokens: 3,
            pool: Some("a,\"b\"".into()),
            ..Record::default()
        };
        let failed = Record { index: 1, outcome: Outcome::Failed("status 503".into()), ..Record::default() };
        let result = RunResult { requests: vec![completed, failed], ..RunResult::default() };
        let mut text = Vec::new();
        write_header(&mut text).unwrap();
        write("7", &result, &mut text).unwrap();
        let text = String::from_utf8(text).unwrap();
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(lines.len(), 3);
        assert_eq!(lines[0].split(',').count(), COLUMNS.len());
        assert_eq!(lines[1], "7,0,,,,,0.5,0,0,0,completed,,0,,3,0.25,0.25,0.75,0.25,\"a,\"\"b\"\"\",,,");
        assert_eq!(lines[2], "7,1,,,,,,0,0,0,failed,status 503,0,,0,,,,,,,,");
    }
}
