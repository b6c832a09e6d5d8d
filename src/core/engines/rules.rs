//! The rules of an engine: the facts by which one kind of server differs from another.
//!
//! A kind has one constant of [`EngineRules`] in a file of this folder. Requests, probes and starts
//! read the rules of a backend's kind, and never ask which kind it is. Pure: statuses, pages and
//! routes in, values out.

use crate::openai::Route;
use crate::vllm::metrics::MetricsSnapshot;

/// The facts of one kind of engine.
#[derive(Debug)]
pub struct EngineRules {
    /// The page that says whether the engine serves requests.
    pub health: &'static str,
    /// The meaning of an answer to `health`, by status and body.
    pub judge: fn(u16, &[u8]) -> Health,
    /// Whether `/v1/models` lists the models.
    pub lists_models: bool,
    /// `owned_by` in the list of models; `None`: any server may have the name.
    pub owner: Option<&'static str>,
    /// Whether `/openapi.json` describes the routes.
    pub describes_routes: bool,
    /// The page with the engine's version, if the gateway checks the version.
    pub version: Option<&'static str>,
    /// How the metrics page is read; `None`: there is none.
    pub metrics: Option<MetricsPage>,
    /// How the number of sequences that the engine runs at once is read; `None`: it does not say.
    pub slots_page: Option<SlotsPage>,
    /// The default of a pool's `slots`.
    pub slots: u32,
    /// Whether the engine has a route. A route that some engines of the kind lack counts as
    /// present: the engine's answer decides.
    pub serves: fn(Route) -> bool,
    /// Whether every request is a job: work that is not counted in tokens.
    pub does_jobs: bool,
    /// Whether the engine can continue an answer that another engine began.
    pub continues: bool,
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
    /// The port of the page, unless a backend names another one; `None`: the port of requests.
    pub port: Option<u16>,
    /// Reads the page. The values have vLLM's names.
    pub read: fn(&str) -> MetricsSnapshot,
    /// Whether the counters move with every step, so that an engine whose counters stand still is
    /// hung.
    pub shows_steps: bool,
    /// Whether generated tokens are counted while a response runs, and not at the end.
    pub counts_tokens: bool,
}

/// The page with the number of sequences that an engine runs at once.
#[derive(Debug)]
pub struct SlotsPage {
    /// The path.
    pub path: &'static str,
    /// Reads the number from the body.
    pub read: fn(&[u8]) -> Option<u32>,
}

/// Reads a page of metrics whose names have a prefix, by a table of names without the prefix and
/// the names of vLLM.
pub(super) fn translated(page: &str, prefix: &str, names: &'static [(&'static str, &'static str)]) -> MetricsSnapshot {
    MetricsSnapshot::read(page, |written| {
        let own = written.strip_prefix(prefix)?;
        names.iter().find(|(name, _)| *name == own).map(|(_, translated)| *translated)
    })
}

/// The default of `slots` where the engine batches.
pub(super) const BATCH_SLOTS: u32 = 256;
