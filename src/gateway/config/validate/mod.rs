//! From a document to a [`Config`], or to every problem it has.
//!
//! One file per section of the configuration, in the order in which they need each other: models
//! first (they become ids), then who may use them, then pools with their backends, then what can only
//! be judged over all pools (`across.rs`). No step stops at a problem; a wrong value is replaced by its
//! default so that reading goes on, and `across.rs` skips judgements that would only echo a problem
//! that is already reported.
//!
//! What the outside contributes (environment variables, files, number of cores) comes through
//! [`Surroundings`], so that the same document gives the same answer in a test.

mod across;
mod auth;
mod backend;
mod fleet;
mod model;
mod pool;
mod section;
mod server;
mod text;

use std::path::{Path, PathBuf};

use super::file::Document;
use super::origin::Origins;
use super::problem::Problem;
use super::{Config, defaults};
use section::{Report, Section};

/// What a configuration takes from outside of its file.
pub struct Surroundings<'s> {
    /// Reads an environment variable.
    pub env: &'s dyn Fn(&str) -> Option<String>,
    /// Where relative paths start: the folder of the configuration file.
    pub folder: PathBuf,
    /// Cores of this machine: the default of `server.threads`.
    pub cores: usize,
}

impl Surroundings<'_> {
    /// This process and this machine, with relative paths starting at `folder`.
    pub fn of_process(folder: &Path) -> Self {
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        // Absolute, so that what is printed means the same wherever it is saved.
        let folder = std::path::absolute(folder).unwrap_or_else(|_| folder.to_owned());
        Self { env: &|name| std::env::var(name).ok(), folder, cores: cores.min(defaults::MAX_THREADS) }
    }
}

/// Checks a document. Returns the configuration when there was no error, who decided each value, and
/// all problems, warnings among them.
pub(super) fn validate(document: &Document, around: &Surroundings<'_>) -> (Option<Config>, Origins, Vec<Problem>) {
    let mut report = Report { around, problems: Vec::new(), origins: Origins::default() };
    let mut root = Section::root(&document.root);

    let server = server::server(&mut root, &mut report);
    let timeouts = server::timeouts(&mut root, &mut report);
    let retry = server::retry(&mut root, &mut report);
    let slo = server::slo(root.section_or_empty("slo", &mut report), None, &mut report);
    let health = server::health(&mut root, &mut report);
    let fleet = fleet::fleet(&mut root, &mut report);
    let access_log = server::access_log(&mut root, &mut report);
    let log = server::log(&mut root, &mut report);
    let models = model::models(&mut root, &mut report);
    let auth = auth::auth(&mut root, &models, &server, &mut report);
    let drafts = pool::pools(&mut root, &models, &slo, &mut report);
    root.finish(&mut report);

    across::check(&models, &drafts, &server, &mut report);
    let pools = drafts.into_iter().map(|draft| draft.pool).collect();
    let failed = report.problems.iter().any(|problem| !problem.situation().is_warning());
    let config = Config { server, timeouts, retry, auth, models, pools, slo, health, fleet, access_log, log };
    ((!failed).then_some(config), report.origins, report.problems)
}
