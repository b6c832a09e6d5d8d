//! One line of CSV for each request, for spreadsheets and scripts.
//!
//! Times are in seconds. A field is empty if it does not apply to the request. Of the gaps between
//! tokens, only the longest is written. Quotes follow RFC 4180.

use std::io::{self, Write};

use crate::result::record::{Outcome, Record, RunResult};
use crate::result::slices::SliceBy;

const COLUMNS: &str = "run,index,class,adapter,session,turn,due,queued,sent,ended,outcome,error,prompt_tokens,\
    cached_tokens,output_tokens,ttft,tpot,latency,max_itl,pool,backend,arm,queue_wait";

/// Writes the requests of several runs to one CSV file.
#[derive(Debug)]
pub struct RequestCsv<W: Write>(csv::Writer<W>);

impl<W: Write> RequestCsv<W> {
    /// Writes the column names to `out`.
    pub fn new(out: W) -> io::Result<Self> {
        let mut writer = csv::Writer::from_writer(out);
        writer.write_record(COLUMNS.split(','))?;
        writer.flush()?;
        Ok(Self(writer))
    }

    /// Writes the requests of a run called `name`.
    pub fn write_run(&mut self, name: &str, result: &RunResult) -> io::Result<()> {
        for record in &result.requests {
            self.0.write_record(row(name, result, record))?;
        }
        self.0.flush()
    }
}

fn row(run: &str, result: &RunResult, record: &Record) -> [String; 23] {
    let number = |value: Option<f64>| value.map(|value| value.to_string()).unwrap_or_default();
    let count = |value: Option<u64>| value.map(|value| value.to_string()).unwrap_or_default();
    let text = |value: Option<&str>| value.unwrap_or_default().to_owned();
    let if_completed = |value: f64| number(record.is_completed().then_some(value));
    let config = &result.config;
    let has_classes = !config.classes.is_empty() || !config.gateway_classes.is_empty();
    let (outcome, error) = match &record.outcome {
        Outcome::Completed => ("completed", ""),
        Outcome::Failed(reason) => ("failed", &**reason),
        Outcome::Left => ("left", ""),
        Outcome::Unfinished => ("unfinished", ""),
    };
    [
        run.to_owned(),
        record.index.to_string(),
        text(SliceBy::Class.name_of(record, result).filter(|_| has_classes)),
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
        count(record.output_tokens),
        if_completed(record.ttft),
        number(record.tpot()),
        if_completed(record.latency),
        number(record.itls.iter().copied().max_by(f64::total_cmp)),
        text(record.pool.as_deref()),
        text(record.backend.as_deref()),
        text(record.arm.as_deref()),
        number(record.queue_wait),
    ]
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
            output_tokens: Some(3),
            pool: Some("a,\"b\"".into()),
            ..Record::default()
        };
        let failed = Record { index: 1, outcome: Outcome::Failed("status 503".into()), ..Record::default() };
        let result = RunResult { requests: vec![completed, failed], ..RunResult::default() };
        let mut text = Vec::new();
        RequestCsv::new(&mut text).unwrap().write_run("7", &result).unwrap();
        let text = String::from_utf8(text).unwrap();
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(lines.len(), 3);
        assert_eq!(lines[0].split(',').count(), COLUMNS.split(',').count());
        assert_eq!(lines[1], "7,0,,,,,0.5,0,0,0,completed,,0,,3,0.25,0.25,0.75,0.25,\"a,\"\"b\"\"\",,,");
        assert_eq!(lines[2], "7,1,,,,,,0,0,0,failed,status 503,0,,,,,,,,,,");
    }
}
