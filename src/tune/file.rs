//! The file `tune.toml`: the tables of a scenario of `sluice lab` (`config` or `gateway`, `engine`,
//! `traffic`), and `[tune]`:
//!
//! ```toml
//! [tune]
//! objective = "rate"                 # or a measure of `sluice lab`, such as "short.e2el.p99"
//! attainment = 99                    # for "rate": per cent of each class and adapter
//! beside = ["long.e2el.p99"]         # more measures in the table
//! against = "long.e2el.p99"          # a second measure: all settings that none beats in both
//! complete = true                    # measures every setting in full, also a worse one
//! subject_to = ["long.e2el.p99 <= 3.3s"]   # bounds that the winner must keep
//! hit_rate = 60                      # minimum per cent of prompt tokens from the prefix cache
//! constraints = ["vllm.max-num-seqs <= vllm.max-num-batched-tokens"]
//!
//! [[tune.dimension]]
//! key = "vllm.max-num-seqs"          # as in `sluice lab run --sweep`
//! values = [128, 256]
//!
//! [[tune.dimension]]
//! key = "vllm.max-num-batched-tokens"
//! from = 512
//! to = 8192
//! factor = 2                         # or step = 512
//! when = "vllm.max-num-seqs >= 128"  # otherwise the key is left alone
//!
//! [tune.memory]                      # first, the most memory with which engines survive the
//! from = 0.8                         # worst load: gpu-memory-utilization of all settings but
//! to = 0.98                          # the default
//! step = 0.01
//!
//! [[tune.setting]]                   # single settings besides the grid
//! "vllm.enforce-eager" = true
//! ```
//!
//! A measure is optimised with the traffic as configured, over several seeds. In percentiles,
//! requests without a complete response are infinitely slow. Without `config` and `gateway` only
//! the engines are tuned. With `--real` the engines are the configured backends that have `launch`,
//! and `[[engine]]` is not used.

use std::path::Path;

use serde::Deserialize;

use crate::error::TuneError;
use crate::setting::Setting;
use sluice_config::ArgValue;
use sluice_lab::{LabFile, Scenario};

/// Changes with which the gateway admits every request, for a file without a configuration of the
/// gateway.
const UNLIMITED: [&str; 2] = ["pool.all.slots=8192", "pool.all.queue.length=8192"];

/// A parsed file.
#[derive(Clone, Debug)]
pub struct TuneFile {
    /// Configuration, engines and traffic.
    pub scenario: Scenario,
    /// The table `[tune]`.
    pub tune: TuneTable,
    /// A hash of the file's text.
    pub fingerprint: String,
}

/// The table `[tune]`.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct TuneTable {
    /// `rate`, or a measure.
    pub objective: String,
    /// A second measure, for the front of both.
    pub against: Option<String>,
    /// Bounds on measures that a setting must keep, if the objective is a measure.
    pub subject_to: Vec<String>,
    /// Per cent of requests that must meet their objectives.
    pub attainment: f64,
    /// The least share of prompt tokens in the prefix caches, per cent.
    pub hit_rate: Option<f64>,
    /// More measures to show, if the objective is a measure.
    pub beside: Vec<String>,
    /// Number of requests of the shortest trial, if the objective is a rate.
    pub requests: usize,
    /// Runs of each setting, if the objective is a measure. A confirmation takes twice as many.
    pub runs: usize,
    /// Runs with new loads that prove the winner.
    pub repeats: usize,
    /// Gain below which a setting counts as no better, per cent.
    pub margin: f64,
    /// Whether every setting is measured in full, even a certainly worse one.
    pub complete: bool,
    /// Conditions between dimensions.
    pub constraints: Vec<String>,
    /// The dimensions.
    pub dimension: Vec<DimensionTable>,
    /// Single settings besides the grid.
    pub setting: Vec<Setting>,
    /// The range of the engines' memory, which is searched first; `None`: it is not searched.
    pub memory: Option<MemoryTable>,
}

impl Default for TuneTable {
    fn default() -> Self {
        Self {
            objective: "rate".to_owned(),
            against: None,
            subject_to: Vec::new(),
            attainment: 99.0,
            hit_rate: None,
            beside: Vec::new(),
            requests: 1500,
            runs: 8,
            repeats: 3,
            margin: 3.0,
            complete: false,
            constraints: Vec::new(),
            dimension: Vec::new(),
            setting: Vec::new(),
            memory: None,
        }
    }
}

/// The range of `gpu-memory-utilization`.
#[derive(Clone, Copy, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MemoryTable {
    /// The smallest value, above 0.
    pub from: f64,
    /// The largest value, at most 1.
    pub to: f64,
    /// The difference between neighbouring values.
    pub step: f64,
}

/// A dimension of the space.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DimensionTable {
    /// The key.
    pub key: String,
    /// The values; the text "default" leaves the key alone.
    #[serde(default)]
    pub values: Vec<ArgValue>,
    /// The first value of a range.
    pub from: Option<Number>,
    /// The last value of a range.
    pub to: Option<Number>,
    /// The difference between neighbours of a range.
    pub step: Option<Number>,
    /// The ratio of neighbours of a range.
    pub factor: Option<f64>,
    /// The condition under which the dimension applies.
    pub when: Option<String>,
}

/// A number, and whether it was written with a point.
#[derive(Clone, Copy, Debug, PartialEq, Deserialize)]
#[serde(untagged)]
pub enum Number {
    /// Without a point.
    Whole(i64),
    /// With a point.
    Real(f64),
}

impl Number {
    /// The number.
    pub fn value(self) -> f64 {
        match self {
            Self::Whole(number) => number as f64,
            Self::Real(number) => number,
        }
    }

    /// Whether it is a whole number.
    pub fn is_whole(self) -> bool {
        matches!(self, Self::Whole(_))
    }
}

impl TuneFile {
    /// Adds bounds of the command line to `subject_to`. They change the fingerprint.
    pub fn add_bounds(&mut self, bounds: &[String]) {
        if !bounds.is_empty() {
            self.tune.subject_to.extend_from_slice(bounds);
            let text = format!("{} {}", self.fingerprint, bounds.join("\n"));
            self.fingerprint = fingerprint(&text);
        }
    }

    /// Reads a file.
    pub fn load(path: &Path) -> Result<Self, TuneError> {
        let name = path.display().to_string();
        let text = std::fs::read_to_string(path)
            .map_err(|error| TuneError::File { path: name.clone(), reason: error.to_string() })?;
        Self::parse(&text, &name, path.parent().unwrap_or(Path::new(".")))
    }

    /// Reads the text of a file called `name`, with paths relative to `folder`.
    pub fn parse(text: &str, name: &str, folder: &Path) -> Result<Self, TuneError> {
        let wrong = |reason: String| TuneError::File { path: name.to_owned(), reason };
        let mut table: toml::Table = text.parse().map_err(|error: toml::de::Error| wrong(error.to_string()))?;
        let own = table
            .remove("tune")
            .ok_or_else(|| wrong("a table [tune] is missing; config/tune/scheduling.toml is a sample".to_owned()))?;
        let tune: TuneTable = serde_path_to_error::deserialize(own).map_err(|error| {
            let (path, inner) = (error.path().to_string(), error.into_inner());
            wrong(format!("tune.{path}: {}", inner.message()))
        })?;
        let is_share = tune.attainment > 0.0 && tune.attainment < 100.0 && (0.0..100.0).contains(&tune.margin);
        if !is_share {
            return Err(wrong(
                "tune.attainment is above 0 and below 100, tune.margin at least 0 and below 100".to_owned(),
            ));
        }
        if tune.hit_rate.is_some_and(|share| !(0.0..=100.0).contains(&share)) {
            return Err(wrong("tune.hit_rate is from 0 to 100".to_owned()));
        }
        if tune.requests < 30 || tune.runs < 2 || tune.repeats < 1 {
            return Err(wrong("tune.requests is at least 30, tune.runs 2, tune.repeats 1".to_owned()));
        }
        let mut file = LabFile::of_table(table, name)?;
        if file.config.is_none() && file.gateway.is_none() {
            file.set.splice(0..0, UNLIMITED.map(str::to_owned));
        }
        Ok(Self { scenario: Scenario { file, folder: folder.to_owned() }, tune, fingerprint: fingerprint(text) })
    }
}

fn fingerprint(text: &str) -> String {
    format!("{:016x}", twox_hash::XxHash3_64::oneshot(text.as_bytes()))
}
