//! Reads the counters of engines whose streams are silent: does such an engine work?
//!
//! This task reads the `/metrics` of an engine every [`LOOK_INTERVAL`], but only while the engine
//! has a silent stream, because a page takes vLLM's API server milliseconds. Nothing is read from
//! kinds of engines that count tokens only at the end of a response. `pool/engine_work.rs` defines
//! work.

use std::sync::Arc;
use std::time::Duration;

use tokio::task::JoinSet;
use tokio::time::{Instant, sleep};

use super::metrics_page::scrape;
use sluice_gateway::pool::{Admission, EngineCounters};

const LOOK_INTERVAL: Duration = Duration::from_secs(1);

/// Reads engines for as long as the future is polled. `limit`: how long a page may take.
pub async fn watch_silent_streams(admission: Arc<Admission>, limit: impl Fn() -> Duration) {
    loop {
        let watched = admission.watched_backends();
        if watched.is_empty() {
            admission.silent_stream().await;
            continue;
        }
        let (mut looks, limit) = (JoinSet::new(), limit());
        for (backend, address) in watched {
            looks.spawn(async move {
                let counts = address.engine.rules().metrics.as_ref().is_some_and(|page| page.counts_tokens);
                let page = if counts { scrape(&address, limit).await } else { None };
                (backend, page, address)
            });
        }
        while let Some(look) = looks.join_next().await {
            if let Ok((backend, page, address)) = look {
                let look = page.map(|page| EngineCounters {
                    generated: page.generation_tokens,
                    requests: (!page.lacks().any(|name| name.starts_with("num_requests")))
                        .then_some(page.running + page.waiting),
                });
                admission.record_look(backend, &address, look, Instant::now());
            }
        }
        sleep(LOOK_INTERVAL).await;
    }
}
