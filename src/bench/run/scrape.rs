//! Reads the `/metrics` of the servers before, during and after a run.
//!
//! Differences of counters over the run give the hit rate of the prefix cache and the preemptions.
//! Samples give the usage of the KV cache and the running and waiting requests. The true peaks may
//! be higher. A server whose first page cannot be read, or is not vLLM's, is not sampled.
//!
//! Bounds: at most [`MAX_SAMPLES`] samples are kept; later samples count only for the peaks.

use std::sync::Arc;
use std::time::Duration;

use http::HeaderMap;
use parking_lot::Mutex;
use tokio::task::JoinSet;
use tokio::time::Instant;

use crate::client::load_client::LoadClient;
use crate::client::target::Target;
use crate::error::BenchError;
use crate::result::record::{ServerSample, ServerSide};
use sluice_core::vllm::metrics::{MAX_PAGE, MetricsSnapshot};

/// Time between two samples.
pub const PERIOD: Duration = Duration::from_secs(1);
/// Time until the first sample. The following pauses double up to [`PERIOD`].
pub const FIRST: Duration = Duration::from_millis(100);
/// Timeout of one sample; a busy vLLM responds late.
pub const LIMIT: Duration = Duration::from_secs(5);
/// Samples kept for each server: one day.
pub const MAX_SAMPLES: usize = 86_400;

#[derive(Debug, Default)]
pub(crate) struct Scraper {
    tasks: JoinSet<()>,
    servers: Vec<Arc<ScrapedServer>>,
}

#[derive(Debug)]
struct ScrapedServer {
    target: Target,
    headers: HeaderMap,
    history: Mutex<ServerHistory>,
}

#[derive(Debug)]
struct ServerHistory {
    before: MetricsSnapshot,
    last: MetricsSnapshot,
    side: ServerSide,
}

impl Scraper {
    pub(crate) async fn start(urls: &[String], client: &LoadClient, start: Instant) -> Result<Self, BenchError> {
        let mut scraper = Self::default();
        let headers = client.headers();
        for url in urls {
            let target = Target::new(url, client.tls())?;
            let Some(before) = scrape(&target, headers).await else { continue };
            let side = ServerSide { url: target.url.clone(), ..ServerSide::default() };
            let history = Mutex::new(ServerHistory { last: before.clone(), before, side });
            let server = Arc::new(ScrapedServer { target, headers: headers.clone(), history });
            scraper.servers.push(server.clone());
            scraper.tasks.spawn(scrape_periodically(server, start));
        }
        Ok(scraper)
    }

    /// Takes a last sample and returns the differences and peaks.
    pub(crate) async fn finish(mut self) -> Vec<ServerSide> {
        self.tasks.abort_all();
        let mut sides = Vec::new();
        for server in &self.servers {
            let last = scrape(&server.target, &server.headers).await;
            let mut history = server.history.lock();
            if let Some(last) = last {
                // No request runs any more, so only the counters of this sample count.
                history.last = last;
            }
            sides.push(history.side());
        }
        sides
    }
}

async fn scrape_periodically(server: Arc<ScrapedServer>, start: Instant) {
    // The start may be in the future, because prompts are still being built.
    tokio::time::sleep_until(start).await;
    let mut pause = FIRST;
    loop {
        tokio::time::sleep(pause).await;
        pause = PERIOD.min(pause * 2);
        if let Some(snapshot) = scrape(&server.target, &server.headers).await {
            server.history.lock().record(snapshot, start.elapsed().as_secs_f64());
        }
    }
}

async fn scrape(target: &Target, headers: &HeaderMap) -> Option<MetricsSnapshot> {
    let response = tokio::time::timeout(LIMIT, target.get("/metrics", headers, MAX_PAGE)).await;
    let (200, page) = response.ok()?.ok()? else { return None };
    Some(MetricsSnapshot::parse(&String::from_utf8_lossy(&page))).filter(|snapshot| snapshot.samples > 0)
}

impl ServerHistory {
    fn record(&mut self, now: MetricsSnapshot, at: f64) {
        let sample = ServerSample { at, running: now.running, waiting: now.waiting, kv_usage: now.kv_usage };
        let side = &mut self.side;
        side.kv_peak = side.kv_peak.max(sample.kv_usage);
        side.running_peak = side.running_peak.max(sample.running);
        side.waiting_peak = side.waiting_peak.max(sample.waiting);
        if side.samples.len() < MAX_SAMPLES {
            side.samples.push(sample);
        }
        self.last = now;
    }

    fn side(&self) -> ServerSide {
        let (before, after) = (&self.before, &self.last);
        // A counter went down only if the server restarted, and then began at 0.
        let grown = |before: f64, after: f64| if after < before { after } else { after - before };
        ServerSide {
            prefix_queries: grown(before.prefix_queries, after.prefix_queries),
            prefix_hits: grown(before.prefix_hits, after.prefix_hits),
            preemptions: grown(before.preemptions, after.preemptions),
            prompt_tokens: grown(before.prompt_tokens, after.prompt_tokens),
            generation_tokens: grown(before.generation_tokens, after.generation_tokens),
            ..self.side.clone()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::load::body::Api;
    use crate::testing::{MockEngine, MockResponse};

    fn page(queries: u64, hits: u64, running: u64) -> MockResponse {
        let page = format!(
            "vllm:prefix_cache_queries_total{{}} {queries}\nvllm:prefix_cache_hits_total{{}} {hits}\n\
             vllm:num_requests_running{{}} {running}\nvllm:kv_cache_usage_perc{{}} 0.{running}\n"
        );
        MockResponse::stream(vec![page], Duration::ZERO)
    }

    async fn sides(engine: &MockEngine, samples: u64) -> Vec<ServerSide> {
        let client = LoadClient::new(&[engine.url()], Api::Completions, LIMIT).unwrap();
        let scraper = Scraper::start(&[engine.url()], &client, Instant::now()).await.unwrap();
        let deadline = Instant::now() + 4 * LIMIT;
        let taken =
            || scraper.servers.iter().map(|server| server.history.lock().side.samples.len() as u64).sum::<u64>();
        while taken() < samples {
            assert!(Instant::now() < deadline);
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        scraper.finish().await
    }

    #[tokio::test]
    async fn differences_and_peaks_over_the_run() {
        let engine = MockEngine::start(|number| match number {
            0 => page(100, 40, 5),
            1 => page(200, 40, 3),
            _ => page(300, 140, 2),
        });
        let engine = engine.await;
        let sides = sides(&engine, 1).await;
        assert_eq!(sides.len(), 1);
        assert_eq!((sides[0].prefix_queries, sides[0].prefix_hits), (200.0, 100.0));
        assert_eq!((sides[0].running_peak, sides[0].kv_peak), (3.0, 0.3));
        assert!(!sides[0].samples.is_empty());
    }

    #[tokio::test]
    async fn the_page_after_a_short_run_is_no_sample_of_it() {
        let engine = MockEngine::start(|number| page(100 * number, 0, 0)).await;
        let sides = sides(&engine, 0).await;
        assert_eq!((sides[0].prefix_queries, sides[0].samples.len()), (100.0, 0));
    }

    #[tokio::test]
    async fn a_page_that_is_not_vllms_gives_nothing() {
        let engine = MockEngine::start(|_| MockResponse::stream(vec!["hello".into()], Duration::ZERO)).await;
        assert_eq!(sides(&engine, 0).await, []);
    }

    #[test]
    fn a_restarted_server_counts_from_its_start() {
        let snapshot =
            |preemptions: u32| MetricsSnapshot::parse(&format!("vllm:num_preemptions_total{{}} {preemptions}\n"));
        let history = ServerHistory { before: snapshot(50), last: snapshot(3), side: ServerSide::default() };
        assert_eq!(history.side().preemptions, 3.0);
    }
}
