//! Reads the metrics page of an engine, by the names of vLLM.
//!
//! `core/engines` says where each kind of engine has the page and how it is read. For a backend
//! with a data-parallel rank, only the lines of that rank count. Bound: [`METRICS_BYTES`] of a
//! page.

use std::time::Duration;

use super::http::fetch;
use sluice_config::Address;
use sluice_core::vllm::metrics::MetricsSnapshot;
use sluice_core::vllm::rank_page::of_rank;

const METRICS_BYTES: usize = 8 << 20;

/// The metrics of an engine, by the names of vLLM, read within `limit`; `None` if it shows none.
pub async fn scrape(address: &Address, limit: Duration) -> Option<MetricsSnapshot> {
    read_metrics(address, limit).await.ok().flatten()
}

/// `None`: the page shows no metrics; an error: no response.
pub(super) async fn read_metrics(address: &Address, limit: Duration) -> Result<Option<MetricsSnapshot>, ()> {
    let page = read_page(address, limit).await?;
    Ok(page.and_then(|page| snapshot(address, &page)))
}

/// The text of the page; `None`: there is none.
pub(super) async fn read_page(address: &Address, limit: Duration) -> Result<Option<String>, ()> {
    let Some(address) = address.of_metrics() else { return Ok(None) };
    let (status, body) = fetch(&address, "/metrics", limit, METRICS_BYTES).await.map_err(drop)?;
    Ok(String::from_utf8(body.into()).ok().filter(|_| status.is_success()))
}

/// The metrics on a page; of a backend with a data-parallel rank, the metrics of that rank.
pub(super) fn snapshot(address: &Address, page: &str) -> Option<MetricsSnapshot> {
    let rules = address.engine.rules().metrics.as_ref()?;
    let page = match address.rank {
        Some(rank) => (rules.read)(&of_rank(page, rank)),
        None => (rules.read)(page),
    };
    Some(page).filter(|page| page.samples > 0)
}
