//! `ranks`: one backend of the file stands for the data-parallel ranks of a vLLM server.
//!
//! The document is changed before it is read (`copies.rs`), so the rest of the gateway knows only
//! backends with one rank each. Rank `i` of the backend `node` is the backend `node-i` with the key
//! `rank = i`. All have the address of `node`. If the gateway runs the server, it starts, stops and
//! changes the process through the backend of rank 0, and the others follow that backend
//! ([`Backend::follows`]).
//!
//! A `ranks` that cannot be read stays in the document, and reading reports it. Bound:
//! [`MAX_RANKS`] for each backend.

use std::borrow::Cow;

use super::backend::{Backend, Target};
use super::file::{Entry, Table, Value};
use super::limits::MAX_RANKS;
use super::pool::Pool;
use super::problem::Situation;
use super::report::Report;
use sluice_core::engines::EngineKind;

/// The backends for the ranks of a backend; the backend itself, if it has no `ranks`. `pool`: the
/// table of the pool, whose `ranks` are the default.
pub(super) fn expand(backend: Entry, pool: Option<i64>) -> Vec<Entry> {
    let Some(keys) = backend.value.table() else { return vec![backend] };
    let ranks = keys.get("ranks").map_or(pool, |entry| number(&entry.value));
    match ranks.filter(|ranks| (1..=MAX_RANKS).contains(ranks) && !keys.contains_key("rank")) {
        Some(ranks) => (0..ranks).map(|number| rank(&backend, number)).collect(),
        None => vec![backend],
    }
}

/// The number of ranks of a pool's backends that name none.
pub(super) fn of_pool(pool: &Table) -> Option<i64> {
    number(&pool.get("ranks")?.value)
}

fn number(value: &Value) -> Option<i64> {
    if let Value::Int(number) = value { Some(*number) } else { None }
}

fn rank(backend: &Entry, number: i64) -> Entry {
    let mut backend = backend.clone();
    let Value::Table(keys) = &mut backend.value else { return backend };
    if let Some(Entry { value: Value::Text(name), .. }) = keys.get_mut("name")
        && !name.is_empty()
    {
        *name = format!("{name}-{number}");
    }
    let origin = keys.remove("ranks").map_or_else(|| backend.origin, |ranks| ranks.origin);
    keys.insert("rank".to_owned(), Entry { value: Value::Int(number), origin });
    backend
}

/// The name of the backend of rank 0, which stands for the process of all ranks. `name` and `rank`:
/// of any backend of the process.
pub fn engine_name(name: &str, rank: Option<u16>) -> Cow<'_, str> {
    let stem = rank.and_then(|rank| name.strip_suffix(&format!("-{rank}")));
    stem.map_or(Cow::Borrowed(name), |stem| Cow::Owned(format!("{stem}-0")))
}

impl Backend {
    /// Whether the gateway starts, stops and changes the engine of this backend through another
    /// backend, the one with rank 0.
    pub fn follows(&self) -> bool {
        !matches!(self.target, Target::Url(_)) && self.rank.is_some_and(|rank| rank > 0)
    }
}

/// Checks the ranks of the backends of a pool.
pub(super) fn check(index: usize, pool: &Pool, report: &mut Report<'_>) {
    let at = |key: &str| format!("pool[{index}].{key}");
    let has_ranks = pool.ranks.is_some() || pool.backends.iter().any(|backend| backend.rank.is_some());
    if !has_ranks {
        return;
    }
    if pool.kubernetes.is_some() {
        return report.add_at(&at("ranks"), Situation::RanksOfPods);
    }
    if *pool.engine != EngineKind::Vllm {
        return report.add_at(&at("engine"), Situation::RanksOfOtherKind);
    }
    let mut leader: Option<&Backend> = None;
    for (number, backend) in pool.backends.iter().enumerate() {
        let path = |key: &str| at(&format!("backend[{number}].{key}"));
        if backend.rank.is_some() && report.is_written(&path("ranks")) {
            report.add_at(&path("rank"), Situation::RankAndRanks);
        }
        let shares = matches!(&backend.target, Target::Launch(launch) if launch.share.is_some());
        if backend.rank == Some(0) && (shares || pool.autoscale.is_some_and(|autoscale| autoscale.apply)) {
            report.add_at(&path("rank"), Situation::RanksOnDemand);
        }
        if backend.rank == Some(0) {
            leader = Some(backend);
        }
        if backend.follows() && leader.is_none_or(|leader| leader.target != backend.target) {
            report.add_at(&path("rank"), Situation::RankAlone);
        }
    }
}
