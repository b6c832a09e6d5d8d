//! The rules of an engine: the facts by which one kind of server differs from another.
//!
//! A kind has one constant of [`EngineRules`] in a file of this folder. Requests, probes and starts
//! read the rules of a backend's kind, and never ask which kind it is. The rules are pure functions
//! of statuses, pages and routes.

use std::collections::HashMap;
use std::time::Duration;

use serde::de::IgnoredAny;

use super::flag_table::FlagTable;
use crate::openai::Route;
use crate::vllm::failure::{FailureClass, LogRules};
use crate::vllm::logs::LogForm;
use crate::vllm::metrics::MetricsSnapshot;

/// The facts of one kind of engine.
#[derive(Debug)]
pub struct EngineRules {
    /// The page that says whether the engine serves requests.
    pub health: &'static str,
    /// Shortest time limit of a health probe, because some health pages need time to answer.
    pub health_takes: Duration,
    /// Whether the engine answers probes while a request runs. If not, it is probed only when idle,
    /// and only the pool's `deadline` shows a hang.
    pub answers_while_busy: bool,
    /// The meaning of an answer to `health`, by status and body.
    pub judge: fn(u16, &[u8]) -> Health,
    /// Whether `/v1/models` lists the models.
    pub lists_models: bool,
    /// Values of `owned_by` in the list of models that only servers of this kind write.
    pub owners: &'static [&'static str],
    /// The page by which a server of the kind is recognised; `None`: no page is certain.
    pub identity: Option<IdentityPage>,
    /// Whether `/openapi.json` describes the routes.
    pub describes_routes: bool,
    /// The page with the engine's version, if the gateway checks the version.
    pub version: Option<&'static str>,
    /// How the metrics page is read; `None`: there is none.
    pub metrics: Option<MetricsPage>,
    /// The page that says how many sequences the engine can run at once; `None`: there is none.
    pub slots_page: Option<SlotsPage>,
    /// The default of a pool's `slots`.
    pub slots: u32,
    /// Whether the engine has a route. A route that some engines of the kind lack counts as
    /// present: the engine's answer decides.
    pub serves: fn(Route) -> bool,
    /// Whether the engine has a separate limit for each model, so that several pools may name one
    /// server.
    pub limits_each_model: bool,
    /// Whether every request is a job, whose work is not measured in tokens.
    pub does_jobs: bool,
    /// Whether the engine ends a request when the gateway closes the connection. Otherwise the slot
    /// stays in use until the engine answers.
    pub aborts: bool,
    /// Whether the engine can continue an answer that another engine began.
    pub continues: bool,
    /// The flags of the program, for engines that the gateway starts; `None` for vLLM.
    pub flags: Option<&'static FlagTable>,
    /// How the log shows the phases of a start, and failures.
    pub log: &'static LogRules,
}

/// A page that only servers of one kind have.
#[derive(Debug)]
pub struct IdentityPage {
    /// The path.
    pub path: &'static str,
    /// Whether a successful answer with this body can only come from a server of this kind.
    pub is_own: fn(&[u8]) -> bool,
}

/// The state of an engine by the answer to its health page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Health {
    /// It serves requests.
    Up,
    /// It loads the model.
    Loading,
    /// It does not serve requests.
    Down,
}

impl Health {
    /// Up with a 2xx status, otherwise down.
    pub fn of_status(status: u16) -> Self {
        if (200..300).contains(&status) { Self::Up } else { Self::Down }
    }
}

/// The metrics page of a kind.
#[derive(Debug)]
pub struct MetricsPage {
    /// The port of the page, unless the backend's configuration names another; `None` for the port
    /// of requests.
    pub port: Option<u16>,
    /// Reads the page into fields with vLLM's names.
    pub read: fn(&str) -> MetricsSnapshot,
    /// Whether the counters move with every step. If so, an engine that has requests while the
    /// counters stand still is hung.
    pub shows_steps: bool,
    /// Whether the counter of generated tokens moves while a response runs, not only at the end.
    pub counts_tokens: bool,
}

/// The page with the number of sequences that an engine runs at once.
#[derive(Debug)]
pub struct SlotsPage {
    /// The path.
    pub path: &'static str,
    /// Reads the number from the body.
    pub read: fn(&[u8]) -> Option<u32>,
    /// Reads the tokens that the KV cache holds, if the page has them.
    pub tokens: fn(&[u8]) -> Option<u64>,
}

/// Reads a metrics page. `names`: pairs of a name without the `prefix`, and vLLM's name.
pub(super) fn translated(page: &str, prefix: &str, names: &'static [(&'static str, &'static str)]) -> MetricsSnapshot {
    MetricsSnapshot::read(page, |written| {
        let own = written.strip_prefix(prefix)?;
        names.iter().find(|(name, _)| *name == own).map(|(_, translated)| *translated)
    })
}

/// Whether the body is a JSON object with all these members.
pub(super) fn has_members(body: &[u8], names: &[&str]) -> bool {
    let object: Result<HashMap<String, IgnoredAny>, _> = serde_json::from_slice(body);
    object.is_ok_and(|object| names.iter().all(|name| object.contains_key(*name)))
}

/// The rules for the log of an unknown program. The phases are unknown too, so only the health page
/// shows when a start is over.
pub(super) const PLAIN_LOG: LogRules = LogRules {
    form: LogForm { message: |line| line, is_remark: |_| false, phases: &[] },
    failures: PYTHON_FAILURES,
    healthy: &["HTTP/1.1\" 200"],
    shutdown: &[],
    crashes: &[],
    advice: PLAIN_ADVICE,
};

/// Texts that Python or a shell prints if it does not find a file or module.
const PYTHON_FAILURES: &[(&str, FailureClass)] = &[
    ("ModuleNotFoundError", FailureClass::ProgramMissing),
    ("can't open file", FailureClass::ProgramMissing),
    ("command not found", FailureClass::ProgramMissing),
    ("FileNotFoundError", FailureClass::ModelNotFound),
];

/// Advice that names no flag of vLLM.
const PLAIN_ADVICE: &[(FailureClass, &str)] = &[
    (FailureClass::OutOfMemory, OUT_OF_MEMORY),
    (FailureClass::OutOfMemoryLoading, OUT_OF_MEMORY),
    (FailureClass::OutOfMemoryServing, OUT_OF_MEMORY),
    (FailureClass::UnknownFlag, "remove the flag from args or launch.command; the program does not have it"),
    (FailureClass::ModelNotFound, "correct the path that the line above names"),
    (FailureClass::ProgramMissing, "correct launch.command, and install the module that the line above names"),
];
const OUT_OF_MEMORY: &str =
    "the model does not fit into the memory: use a smaller one, or fewer processes on the device";

/// The default of `slots` where the engine batches.
pub(super) const BATCH_SLOTS: u32 = 256;
