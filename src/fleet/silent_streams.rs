//! Looks at the engines of silent streams: does the engine work, although a stream has no output?
//!
//! While a stream is silent, the `/metrics` of its engine are read every [`LOOK_INTERVAL`]; otherwise never, because a page of
//! vLLM takes its API server milliseconds. What counts as work is in `pool/engine_work.rs`.

use std::sync::Arc;
use std::time::Duration;

use tokio::task::JoinSet;
use tokio::time::{Instant, sleep};

use super::probe::scrape;
use sluice_gateway::pool::{Admission, EngineLook};

/// Time between two looks at an engine.
const LOOK_INTERVAL: Duration = Duration::from_secs(1);

/// Looks at engines for as long as the future is polled. `limit`: how long a page may take.
pub async fn watch_silent_streams(admission: Arc<Admission>, limit: impl Fn() -> Duration) {
    loop {
        let watched = admission.watched_backends();
        if watched.is_empty() {
            admission.silent_stream().await;
            continue;
        }
        let (mut looks, limit) = (JoinSet::new(), limit());
        for (backend, address) in watched {
            looks.spawn(async move { (backend, scrape(&address, limit).await, address) });
        }
        while let Some(look) = looks.join_next().await {
            if let Ok((backend, page, address)) = look {
                let look = page.map(|page| EngineLook {
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
