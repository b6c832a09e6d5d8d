//! Values that are read at scrape time: the pools as admission sees them, the attainment of
//! objectives, the process.
//!
//! Each scrape prints a snapshot, so a removed backend is absent from the next page, and no gauge
//! can drift.

use super::exposition::Page;
use super::families::{self, Family};
use super::process;
use crate::pool::{BackendView, EventsState, PoolView};

type BackendValue = fn(&BackendView) -> f64;
const BACKEND_GAUGES: [(Family, BackendValue); 5] = [
    (families::IN_FLIGHT, |backend| f64::from(backend.used.requests)),
    (families::SLOTS, |backend| f64::from(backend.limits.slots)),
    (families::OUTSTANDING_TOKENS, |backend| backend.used.tokens as f64),
    (families::PREFILL_TOKENS, |backend| backend.used.prefill_tokens as f64),
    (families::LONG_PREFILLS, |backend| f64::from(backend.used.long_prefills)),
];

pub(super) const FAMILIES: [Family; 25] = [
    families::METRICS_MERGED,
    families::BACKEND_PREFILL_RATE,
    families::IN_FLIGHT,
    families::SLOTS,
    families::OUTSTANDING_TOKENS,
    families::OUTSTANDING_TOKENS_MAX,
    families::PREFILL_TOKENS,
    families::LONG_PREFILLS,
    families::LONG_PREFILLS_MAX,
    families::CLUSTER_SHARE,
    families::QUEUE_LENGTH,
    families::QUEUE_LENGTH_MAX,
    families::BACKEND_STATE,
    families::KV_EVENT_BLOCKS,
    families::KV_EVENT_STATE,
    families::KV_EVENT_PROMPTS,
    families::KV_EVENT_LOSSES,
    families::SLO_ATTAINMENT,
    families::ACCESS_LOG_DROPPED,
    families::BUILD_INFO,
    families::PROCESS_CPU,
    families::PROCESS_RESIDENT,
    families::PROCESS_OPEN_FDS,
    families::PROCESS_MAX_FDS,
    families::PROCESS_START,
];

/// `attainments`: the share of requests that met the objectives, by pool.
pub(super) fn add(pools: &[PoolView], attainments: &[(String, f64)], access_log_dropped: u64, page: &mut Page) {
    for pool in pools {
        page.add(&families::QUEUE_LENGTH, &[&pool.name], pool.queue_length as f64);
        page.add(&families::QUEUE_LENGTH_MAX, &[&pool.name], pool.queue_limit as f64);
        distinct(pool).for_each(|backend| add_backend(&pool.name, backend, page));
    }
    for (pool, share) in attainments {
        page.add(&families::SLO_ATTAINMENT, &[pool], *share);
    }
    page.add(&families::ACCESS_LOG_DROPPED, &[], access_log_dropped as f64);
    page.add(&families::BUILD_INFO, &[env!("CARGO_PKG_VERSION")], 1.0);
    // Only Linux shows these.
    if let Some(now) = process::read() {
        page.add(&families::PROCESS_CPU, &[], now.cpu_seconds);
        page.add(&families::PROCESS_RESIDENT, &[], now.resident_bytes as f64);
        page.add(&families::PROCESS_OPEN_FDS, &[], now.open_fds as f64);
        page.add(&families::PROCESS_MAX_FDS, &[], now.max_fds as f64);
        page.add(&families::PROCESS_START, &[], now.start_seconds);
    }
}

fn add_backend(pool: &str, backend: &BackendView, page: &mut Page) {
    let labels = [pool, &*backend.name];
    for (family, read) in &BACKEND_GAUGES {
        page.add(family, &labels, read(backend));
    }
    if backend.prefill_seen.is_some() {
        page.add(&families::BACKEND_PREFILL_RATE, &labels, backend.prefill_rate);
    }
    if let Some(long) = backend.limits.long_prefix {
        page.add(&families::LONG_PREFILLS_MAX, &labels, f64::from(long.slots));
    }
    if let Some(limit) = backend.token_limit() {
        page.add(&families::OUTSTANDING_TOKENS_MAX, &labels, limit as f64);
    }
    for (unit, share) in backend.share_of_limits() {
        page.add(&families::CLUSTER_SHARE, &[pool, &backend.name, unit], share as f64);
    }
    if let Some(events) = backend.events {
        page.add(&families::KV_EVENT_BLOCKS, &labels, events.blocks as f64);
        page.add_states(&families::KV_EVENT_STATE, &labels, EventsState::LABELS, events.state.label());
        for (result, prompts) in [("linked", events.linked), ("unlinked", events.unlinked)] {
            page.add(&families::KV_EVENT_PROMPTS, &[pool, &backend.name, result], prompts as f64);
        }
        page.add(&families::KV_EVENT_LOSSES, &labels, events.losses as f64);
    }
    page.add_states(&families::BACKEND_STATE, &labels, BackendView::STATES, backend.state());
}

/// Backends by distinct names: while one that moved drains, only its successor is shown.
fn distinct(pool: &PoolView) -> impl Iterator<Item = &BackendView> {
    pool.backends.iter().enumerate().filter_map(|(index, backend)| {
        let same = |other: &&BackendView| other.name == backend.name;
        let hidden = if backend.removed {
            pool.backends
                .iter()
                .enumerate()
                .any(|(at, other)| at != index && same(&other) && (!other.removed || at < index))
        } else {
            false
        };
        (!hidden).then_some(backend)
    })
}
