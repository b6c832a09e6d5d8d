//! Results on disk: the keys of `vllm bench serve --save-result`, and everything else under
//! `sluice`.
//!
//! A file is one JSON object, or several in a row (a sweep, or `--append-result`). The top level
//! has the keys and the arithmetic of `vllm bench serve`, so that the same scripts work; `sluice`
//! holds the whole [`RunResult`]. The gaps between tokens (most of the space) are left out there if
//! the top level has them, or if there are more than [`MAX_GAPS`]. Texts are not read back.
//!
//! Files of `vllm bench serve` and `vllm-rs bench serve` can be read, too. Their requests are
//! reconstructed from the arrays of `--save-detailed`. Without these arrays, the result has only
//! [`RunResult::reported`], the keys of the file. Bounds: [`MAX_FILE`].

use std::io::Write;
use std::path::Path;
use std::sync::Arc;

use serde::Deserialize as _;
use serde_json::{Map, Value, json};

use crate::result::metrics::Metrics;
use crate::result::record::{Outcome, Ramp, Record, RunConfig, RunResult};
use crate::result::slices::{self, SliceBy};
use crate::result::steady::{self, Steady};
use crate::result::validity::Delivered;
use crate::result::vllm_keys::{metric_keys, statistics, vllm_keys};

/// The most gaps in a file without `--save-detailed`: about 20 MB of text.
pub const MAX_GAPS: usize = 1_000_000;
/// The longest file that is read, bytes.
pub const MAX_FILE: u64 = 2 << 30;
/// Version of the `sluice` object.
pub const VERSION: u64 = 1;

/// Why a result cannot be read or written.
#[expect(missing_docs, reason = "the messages say it")]
#[derive(Debug, thiserror::Error)]
pub enum FileError {
    #[error("{0}: {1}")]
    Io(String, std::io::Error),
    #[error("{0}: larger than {MAX_FILE} bytes; a result file is not that large")]
    TooLarge(String),
    #[error("{0}: not a result file ({1}); give a JSON file written by --save-result")]
    NotJson(String, serde_json::Error),
    #[error("{0}: not a result: {1}; give a JSON file written by --save-result")]
    NotAResult(String, &'static str),
    #[error("{0}: its `sluice` part cannot be read ({1}); was it written by a newer version?")]
    Foreign(String, String),
    #[error("{0}: holds no result; give a JSON file written by --save-result")]
    Empty(String),
}

/// The results in the file at `path`, in order, at least one.
pub fn load(path: &Path) -> Result<Vec<RunResult>, FileError> {
    let name = path.display().to_string();
    let io = |error| FileError::Io(name.clone(), error);
    let size = std::fs::metadata(path).map_err(io)?.len();
    if size > MAX_FILE {
        return Err(FileError::TooLarge(name));
    }
    let mut results = parse(&std::fs::read(path).map_err(io)?, &name)?;
    results.iter_mut().for_each(|result| result.file.clone_from(&name));
    Ok(results)
}

/// The results in `text`, the content of a file called `name`.
pub fn parse(text: &[u8], name: &str) -> Result<Vec<RunResult>, FileError> {
    let mut results = Vec::new();
    for value in serde_json::Deserializer::from_slice(text).into_iter::<Value>() {
        match value.map_err(|error| FileError::NotJson(name.to_owned(), error))? {
            Value::Array(several) => {
                for value in several {
                    results.push(read(value, name)?);
                }
            }
            value => results.push(read(value, name)?),
        }
    }
    if results.is_empty() { Err(FileError::Empty(name.to_owned())) } else { Ok(results) }
}

/// Replaces the file in one step, or appends to it; creates missing folders.
pub fn save(result: &RunResult, path: &Path, detailed: bool, append: bool) -> Result<(), FileError> {
    let io = |error| FileError::Io(path.display().to_string(), error);
    if let Some(folder) = path.parent().filter(|folder| !folder.as_os_str().is_empty()) {
        std::fs::create_dir_all(folder).map_err(io)?;
    }
    let mut text = to_json(result, detailed).to_string();
    text.push('\n');
    if append {
        let mut file = std::fs::OpenOptions::new().append(true).create(true).open(path).map_err(io)?;
        return file.write_all(text.as_bytes()).map_err(io);
    }
    let mut unfinished = path.as_os_str().to_owned();
    unfinished.push(".part");
    std::fs::write(&unfinished, text).map_err(io)?;
    std::fs::rename(&unfinished, path).map_err(io)
}

/// Number of gaps between tokens.
pub fn gaps(result: &RunResult) -> usize {
    result.requests.iter().map(|record| record.itls.len()).sum()
}

/// The JSON object of a result; with the arrays of `--save-detailed` if `detailed`.
///
/// Each array has an entry for each request, even if it failed; times are in seconds. As in vLLM
/// 0.32, `latencies` and `queue_times` are always written; `input_lens`, `output_lens`, `ttfts`,
/// `itls`, `start_times`, `generated_texts` (of the first choice) and `errors` need `detailed`.
/// Intended differences from vLLM:
///
/// - A failed request has zeros, no gaps and no text. vLLM may keep the part received before the
///   failure.
/// - `start_times` count from the start of the run. In vLLM, their origin is arbitrary.
/// - `queue_times` are the waits for `--max-concurrency` alone: 0 without a limit, and 0 in a
///   closed loop, where a request is due when the previous one has ended. vLLM also counts its own
///   delays, and in a closed loop the time since the start of the run.
///
/// `tokenizer_id` is `--tokenizer`, otherwise the model, with whose tokenizer the server counts. It
/// is null with `--skip-tokenizer-init`, as in vLLM.
pub fn to_json(result: &RunResult, detailed: bool) -> Value {
    let mut top = vllm_keys(result, &Metrics::of(result));
    top.append(&mut brief_arrays(result));
    if detailed {
        top.append(&mut detailed_arrays(result));
    }
    let mut own = json!(result);
    if detailed || gaps(result) > MAX_GAPS {
        let records = own.get_mut("requests").and_then(Value::as_array_mut);
        for record in records.into_iter().flatten().filter_map(Value::as_object_mut) {
            record.remove("itls");
        }
    }
    if let Some(own) = own.as_object_mut() {
        own.insert("version".into(), json!(VERSION));
        own.insert("summary".into(), summary(result));
    }
    if let Some(steady) = steady::steady(result) {
        top.insert("steady_state".into(), steady_json(&steady, &result.config));
    }
    top.insert("sluice".into(), own);
    Value::Object(top)
}

/// Statistics that `vllm bench serve` does not have. They are only written, not read back.
pub fn summary(result: &RunResult) -> Value {
    let whole = Metrics::of(result);
    let mut map = slices::slice_json(&whole, result);
    for by in SliceBy::shown(result) {
        let parts = slices::json(result, by);
        if parts.as_object().is_some_and(|parts| !parts.is_empty()) {
            map.insert(format!("by_{}", by.name().replace(' ', "_")), parts);
        }
    }
    map.insert("failures".into(), json!(slices::failures(result)));
    map.insert("delivered".into(), json!(Delivered::of(result)));
    map.insert("p99_lag_ms".into(), json!(whole.lag.percentile(99.0) * 1e3));
    map.insert("max_lag_ms".into(), json!(whole.lag.max() * 1e3));
    if result.requests.iter().any(|record| record.due.is_some()) {
        let from_due = result.from_due();
        map.insert("from_due".into(), Value::Object(metric_keys(&Metrics::of(&from_due), &result.config)));
    }
    Value::Object(map)
}

fn steady_json(steady: &Steady, config: &RunConfig) -> Value {
    let mut map = Map::new();
    let mut window = json!(steady.window);
    if let (Some(window), Some(target)) = (window.as_object_mut(), steady.window.target_concurrency) {
        window.insert("threshold".into(), json!(steady::THRESHOLD));
        window.insert("threshold_abs".into(), json!((steady::THRESHOLD * f64::from(target)).ceil()));
    }
    map.insert("window".into(), window);
    map.insert("request_throughput".into(), json!(steady.request_throughput));
    map.insert("input_throughput".into(), json!(steady.input_throughput));
    map.insert("output_throughput".into(), json!(steady.output_throughput));
    map.insert(
        "total_token_throughput".into(),
        json!(steady.output_throughput.map(|output| steady.input_throughput + output)),
    );
    for name in &config.percentile_metrics {
        if let Some(distribution) = steady.metrics.measure(name) {
            statistics(&mut map, name, distribution, &config.percentiles);
        }
    }
    Value::Object(map)
}

fn list(result: &RunResult, of: impl Fn(&Record) -> Value) -> Value {
    Value::Array(result.requests.iter().map(of).collect())
}

/// The arrays that every file has, even without `--save-detailed`.
pub fn brief_arrays(result: &RunResult) -> Map<String, Value> {
    [
        ("latencies", list(result, |record| json!(record.latency))),
        ("queue_times", list(result, |record| json!(record.queued))),
    ]
    .map(|(key, value)| (key.to_owned(), value))
    .into_iter()
    .collect()
}

fn detailed_arrays(result: &RunResult) -> Map<String, Value> {
    let error = |record: &Record| match &record.outcome {
        Outcome::Completed => json!(""),
        Outcome::Failed(reason) => json!(reason),
        Outcome::Left => json!("left on purpose"),
        Outcome::Unfinished => json!("unfinished"),
    };
    [
        ("input_lens", list(result, |record| json!(record.prompt_tokens))),
        (
            "output_lens",
            list(result, |record| json!(if record.is_completed() { record.output_tokens } else { Some(0) })),
        ),
        ("ttfts", list(result, |record| json!(record.ttft))),
        ("itls", list(result, |record| json!(record.itls))),
        ("start_times", list(result, |record| json!(record.sent))),
        ("generated_texts", list(result, |record| json!(record.text.as_deref().unwrap_or_default()))),
        ("errors", list(result, error)),
    ]
    .map(|(key, value)| (key.to_owned(), value))
    .into_iter()
    .collect()
}

fn read(value: Value, name: &str) -> Result<RunResult, FileError> {
    let Value::Object(mut top) = value else {
        return Err(FileError::NotAResult(name.to_owned(), "not a JSON object"));
    };
    if !top.contains_key("duration") || !top.contains_key("completed") {
        return Err(FileError::NotAResult(name.to_owned(), "no `duration` and `completed` at its top level"));
    }
    let mut result = match top.remove("sluice") {
        Some(own) => own_part(own, &top, name)?,
        None => foreign(&top),
    };
    result.reported = top;
    Ok(result)
}

fn own_part(own: Value, top: &Map<String, Value>, name: &str) -> Result<RunResult, FileError> {
    let foreign = |why: String| FileError::Foreign(name.to_owned(), why);
    let version = own.get("version").and_then(Value::as_u64).unwrap_or(0);
    if version != VERSION {
        return Err(foreign(format!("version {version}, this program reads version {VERSION}")));
    }
    let mut result = RunResult::deserialize(own).map_err(|error| foreign(error.to_string()))?;
    let gaps = top.get("itls").and_then(Value::as_array);
    for (record, gaps) in result.requests.iter_mut().zip(gaps.into_iter().flatten()) {
        record.itls = seconds(gaps);
    }
    Ok(result)
}

fn seconds(array: &Value) -> Vec<f64> {
    array.as_array().into_iter().flatten().filter_map(Value::as_f64).collect()
}

fn foreign(top: &Map<String, Value>) -> RunResult {
    let number = |key: &str| top.get(key).and_then(Value::as_f64);
    let text = |key: &str| top.get(key).and_then(Value::as_str).map(str::to_owned);
    let config = RunConfig {
        label: text("label"),
        backend: text("backend").unwrap_or_default(),
        model: text("model_id").unwrap_or_default(),
        tokenizer: text("tokenizer_id"),
        num_prompts: number("num_prompts").unwrap_or(0.0) as u64,
        request_rate: number("request_rate"),
        burstiness: number("burstiness"),
        max_concurrency: number("max_concurrency").map(|limit| limit as u32),
        ramp: text("ramp_up_strategy").map(|strategy| Ramp {
            strategy,
            start: number("ramp_up_start_rps").unwrap_or(0.0),
            end: number("ramp_up_end_rps").unwrap_or(0.0),
        }),
        ..RunConfig::default()
    };
    let requests = requests_of_arrays(top);
    RunResult { config, requests, duration: number("duration").unwrap_or(0.0), ..RunResult::default() }
}

/// Requests from the arrays of `--save-detailed`; empty if one is missing.
fn requests_of_arrays(top: &Map<String, Value>) -> Vec<Record> {
    let list = |key: &str| top.get(key).and_then(Value::as_array);
    let (Some(ttfts), Some(itls), Some(inputs), Some(outputs)) =
        (list("ttfts"), list("itls"), list("input_lens"), list("output_lens"))
    else {
        return Vec::new();
    };
    let at = |key: &str, index: usize| list(key).and_then(|list| list.get(index)).and_then(Value::as_f64);
    let starts = list("start_times").into_iter().flatten().filter_map(Value::as_f64);
    let origin = starts.min_by(f64::total_cmp).unwrap_or(0.0);
    let mut requests = Vec::with_capacity(ttfts.len());
    for (index, ((ttft, gaps), (input, output))) in ttfts.iter().zip(itls).zip(inputs.iter().zip(outputs)).enumerate() {
        let itls = seconds(gaps);
        let ttft = ttft.as_f64().unwrap_or(0.0);
        let latency = at("latencies", index).unwrap_or_else(|| ttft + itls.iter().sum::<f64>());
        let sent = at("start_times", index).map_or(0.0, |start| start - origin);
        let error = list("errors").and_then(|list| list.get(index)).and_then(Value::as_str).unwrap_or("");
        let completed = error.is_empty() && ttft > 0.0;
        requests.push(Record {
            index: index as u64,
            sent,
            ended: sent + latency,
            queued: at("queue_times", index).unwrap_or(0.0),
            outcome: if completed { Outcome::Completed } else { Outcome::Failed(Arc::from(error)) },
            prompt_tokens: input.as_u64().unwrap_or(0),
            output_tokens: output.as_u64(),
            ttft,
            latency,
            itls,
            ..Record::default()
        });
    }
    requests
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    fn result() -> RunResult {
        let record = |index, outcome, ttft: f64| Record {
            index,
            outcome,
            sent: 0.25 * index as f64,
            ended: 0.25 * index as f64 + ttft + 0.2,
            ttft,
            itls: vec![0.1, 0.1],
            latency: ttft + 0.2,
            prompt_tokens: 7,
            output_tokens: Some(3),
            pool: Some("short".into()),
            queue_wait: Some(0.001),
            ..Record::default()
        };
        let failed =
            Record { output_tokens: None, ttft: 0.0, itls: vec![], ..record(1, Outcome::Failed("cut".into()), 0.0) };
        let config = RunConfig {
            backend: "openai".into(),
            tokenizer: Some("org/model".into()),
            num_prompts: 2,
            request_rate: Some(4.0),
            percentiles: vec![50.0, 99.9],
            percentile_metrics: vec!["ttft".into()],
            metadata: [("gpu".to_owned(), "none".to_owned())].into(),
            ..RunConfig::default()
        };
        RunResult {
            started_at: "2026-01-02T03:04:05Z".into(),
            config,
            duration: 2.0,
            requests: vec![record(0, Outcome::Completed, 0.05), failed],
            ..RunResult::default()
        }
    }

    #[test]
    fn a_saved_result_is_read_back_with_and_without_the_arrays() {
        for detailed in [false, true] {
            let text = to_json(&result(), detailed).to_string();
            let mut read = parse(text.as_bytes(), "x").unwrap();
            assert_eq!(read.len(), 1);
            assert_eq!(std::mem::take(&mut read[0].reported).contains_key("ttfts"), detailed);
            assert_eq!(read[0], result(), "detailed: {detailed}");
        }
    }

    #[test]
    fn the_top_level_has_the_keys_of_vllm() {
        let json = to_json(&result(), true);
        assert_eq!(json["date"], "20260102-030405");
        assert_eq!((&json["completed"], &json["failed"]), (&json!(1), &json!(1)));
        assert_eq!(json["request_throughput"], 0.5);
        assert_eq!(json["p99.9_ttft_ms"], 50.0);
        assert_eq!(json["p50_ttft_ms"], 50.0);
        assert_eq!(json["gpu"], "none");
        assert_eq!(json["request_goodput"], Value::Null);
        assert_eq!(json["errors"], json!(["", "cut"]));
        assert!(json.get("mean_e2el_ms").is_none());
    }

    /// The expected keys are the arrays that vLLM 0.32 removes without `--save-detailed`, and the
    /// arrays that it keeps.
    #[test]
    fn arrays_of_single_requests_are_those_of_vllm() {
        let mut result = result();
        result.requests[0].queued = 0.5;
        result.requests[0].text = Some("hello".into());
        let keys = |detailed| {
            let Value::Object(top) = to_json(&result, detailed) else { unreachable!() };
            top.into_iter().filter(|(_, value)| value.is_array()).map(|(key, _)| key).collect::<BTreeSet<_>>()
        };
        assert_eq!(keys(false), ["latencies", "queue_times"].map(str::to_owned).into());
        let removed = ["input_lens", "output_lens", "start_times", "ttfts", "itls", "generated_texts", "errors"];
        let found: BTreeSet<String> = keys(true).difference(&keys(false)).cloned().collect();
        assert_eq!(found, removed.map(str::to_owned).into());
        let json = to_json(&result, true);
        assert_eq!(json["latencies"], json!([0.25, 0.2]));
        assert_eq!(json["queue_times"], json!([0.5, 0.0]));
        assert_eq!(json["generated_texts"], json!(["hello", ""]));
        assert_eq!(json["tokenizer_id"], "org/model");
    }

    #[test]
    fn several_results_may_follow_each_other_in_a_file() {
        let one = to_json(&result(), false).to_string();
        assert_eq!(parse(format!("{one}\n{one}\n").as_bytes(), "x").unwrap().len(), 2);
        assert_eq!(parse(format!("[{one},{one}]").as_bytes(), "x").unwrap().len(), 2);
    }

    #[test]
    fn saving_appends_or_replaces_and_makes_the_folder() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a/b.json");
        save(&result(), &path, false, false).unwrap();
        save(&result(), &path, false, true).unwrap();
        assert_eq!(load(&path).unwrap().len(), 2);
        save(&result(), &path, true, false).unwrap();
        assert_eq!(load(&path).unwrap().len(), 1);
        assert_eq!(std::fs::read_dir(path.parent().unwrap()).unwrap().count(), 1, "nothing unfinished is left");
    }

    #[test]
    fn a_detailed_file_of_vllm_gives_requests() {
        let text = br#"{"duration": 2.5, "completed": 1, "failed": 1, "backend": "openai", "request_rate": "inf",
            "max_concurrency": 8, "ramp_up_strategy": "linear", "ramp_up_start_rps": 1, "ramp_up_end_rps": 9,
            "input_lens": [4, 4], "output_lens": [3, 0], "ttfts": [0.5, 0.0],
            "itls": [[0.25, 0.25], []], "start_times": [100.5, 100.25], "errors": ["", "boom"]}"#;
        let result = parse(text, "x").unwrap().remove(0);
        assert_eq!(result.config.max_concurrency, Some(8));
        assert_eq!((result.config.request_rate, result.config.ramp.as_ref().map(|ramp| ramp.end)), (None, Some(9.0)));
        let metrics = Metrics::of(&result);
        assert_eq!((metrics.completed, metrics.failed, metrics.e2el.mean()), (1, 1, 1.0));
        assert_eq!(result.requests[0].sent, 0.25);
        let brief = parse(br#"{"duration": 2.5, "completed": 1, "mean_ttft_ms": 3.5}"#, "x").unwrap().remove(0);
        assert!(brief.requests.is_empty());
        assert_eq!(brief.reported["mean_ttft_ms"], 3.5);
    }

    #[test]
    fn a_file_without_results_is_an_error() {
        let error = |text: &str| parse(text.as_bytes(), "file.json").unwrap_err().to_string();
        assert!(error("{\"a\":1}").contains("no `duration`"));
        assert!(error("[1]").contains("not a JSON object"));
        assert!(error("").contains("holds no result"));
        assert!(error("<html>").contains("--save-result"));
        assert!(error("{\"duration\":1,\"completed\":1,\"sluice\":{\"version\":99}}").contains("version 99"));
    }
}
