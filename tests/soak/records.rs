//! The access log of a gateway that has stopped: one line for each request, with the stage at which
//! its client left.
//!
//! The metrics do not show this stage. In the log, a client left while its request was queued (no
//! backend), before the first token (a backend but no status) or during the response. The log is
//! read line by line, and only a hash of each request id is kept.

use std::collections::{BTreeMap, HashSet};
use std::fs::File;
use std::io::{BufRead as _, BufReader};
use std::path::Path;

use anyhow::{Context as _, ensure};
use serde_json::Value;
use twox_hash::XxHash3_64;

#[derive(Default, Debug)]
pub(crate) struct Records {
    /// Number of lines by outcome. Shed requests also count by reason.
    pub(crate) outcomes: BTreeMap<String, u64>,
    pub(crate) gone_queued: u64,
    /// Clients that left after a backend was chosen and before the response began.
    pub(crate) gone_waiting: u64,
    pub(crate) gone_answered: u64,
    /// Requests that were queued for longer than a millisecond.
    pub(crate) queued: u64,
    /// Requests that ran outside their home pool.
    pub(crate) spilled: u64,
    /// Requests that were sent more than once.
    pub(crate) retried: u64,
}

impl Records {
    /// Reads the log; one result per model of [`crate::MODELS`].
    pub(crate) fn read(path: &Path) -> anyhow::Result<[Self; 2]> {
        let mut records: [Self; 2] = Default::default();
        let mut ids = HashSet::new();
        for line in BufReader::new(File::open(path)?).lines() {
            let line: Value = serde_json::from_str(&line?).context("a line of the access log")?;
            let id = line["request_id"].as_str().unwrap_or_default();
            ensure!(ids.insert(XxHash3_64::oneshot(id.as_bytes())), "request {id} has two lines");
            let model = crate::MODELS.iter().position(|model| line["model"] == **model);
            records[model.with_context(|| format!("a line without a model: {line}"))?].add(&line);
        }
        Ok(records)
    }

    pub(crate) fn lines(&self) -> u64 {
        self.outcomes.values().sum()
    }

    pub(crate) fn outcome(&self, outcome: &str) -> u64 {
        self.outcomes.iter().filter(|(key, _)| key.split(' ').next() == Some(outcome)).map(|(_, n)| n).sum()
    }

    fn add(&mut self, line: &Value) {
        let text = |key: &str| line[key].as_str().unwrap_or_default();
        let key = format!("{} {}", text("outcome"), text("detail"));
        *self.outcomes.entry(key.trim_end().to_owned()).or_default() += 1;
        let backend = line.get("backend").is_some();
        if text("outcome") == "client_gone" {
            *match (backend, line.get("status").is_some()) {
                (false, _) => &mut self.gone_queued,
                (true, false) => &mut self.gone_waiting,
                (true, true) => &mut self.gone_answered,
            } += 1;
        }
        self.queued += u64::from(line["queue_ms"].as_f64().unwrap_or(0.0) > 1.0);
        self.spilled += u64::from(backend && text("pool") != text("home"));
        self.retried += u64::from(line.get("retries").is_some());
    }
}
