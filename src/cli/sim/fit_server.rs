//! `sluice sim fit --server URL`: measures the constants of a host on a running vLLM with a small
//! load.
//!
//! ```text
//! loads (below a minute) -> sluice bench -> rows -> fit of [host] and [front_end] -> --sim-host
//! ```
//!
//! Each load measures one cost. A burst of short requests measures the API server's time per
//! request. Many streams measure the time per token. Prompts above the largest CUDA graph measure
//! the engine's time to launch kernels. Long prompts measure the cost at the first token. Other
//! work on the host disturbs the measurement, so each load runs [`REPEATS`] times and the medians
//! are used. While the API server is not saturated, the loads do not separate the times per token,
//! per first token and to reach the engine. Then the sum of these times is right, but the parts may
//! be wrong.
//!
//! Bounds: [`LOADS`] x [`REPEATS`] runs, a request of at most [`LIMIT`].

use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, bail};

use sluice_bench::{Api, Arrival, Class, Extent, Length, LoadClient, Metrics, Progress, RunPlan, Workload};
use sluice_core::vllm::metrics::{MAX_PAGE, MetricsSnapshot};
use sluice_sim::calibrate::Row;
use sluice_sim::calibrate::rows::{Load, Server};

const LIMIT: Duration = Duration::from_secs(30);
const REPEATS: u64 = 3;

/// One load: name, prompt and output tokens, streams, requests.
type SmallLoad = (&'static str, u32, u32, u32, u32);

pub(super) const LOADS: [SmallLoad; 6] = [
    ("decodes of one stream", 200, 48, 1, 4),
    ("a burst of short requests", 16, 4, 32, 64),
    ("tokens of 64 streams", 32, 64, 64, 128),
    ("prompts above the graphs", 600, 2, 2, 24),
    ("prompts in a queue", 520, 8, 8, 48),
    ("long prompts", 8000, 2, 2, 8),
];

/// One row for each load, without measurements. `server`: the limits of the measured server.
pub(super) fn rows(server: Server) -> Vec<Row> {
    let row = |&(name, prompt, output, streams, requests): &SmallLoad| Row {
        name: name.to_owned(),
        prompt,
        output,
        load: Load::Closed { streams, requests },
        server,
        adapters: 0,
        half_base: false,
        drafts: 0,
        accepted: Vec::new(),
        proposed: 1.0,
        draft_tokens: None,
        is_greedy: false,
        masked: false,
        cpu: 1.0,
        measured: [None; 4],
    };
    LOADS.iter().map(row).collect()
}

pub(super) async fn measure(url: &str, model: Option<&str>, server: Server) -> anyhow::Result<Vec<Row>> {
    let client = Arc::new(LoadClient::new(&[url.to_owned()], Api::Completions, LIMIT)?);
    let model = match model {
        Some(model) => model.to_owned(),
        None => served(&client).await.with_context(|| format!("{url} names no model; give --served-model-name"))?,
    };
    let mut rows = rows(server);
    // Each load runs once without being counted, because the first requests to a new server take
    // longer.
    for row in &rows {
        run(&client, &model, row, REPEATS).await?;
    }
    for row in &mut rows {
        let mut runs = Vec::new();
        for seed in 0..REPEATS {
            runs.push(run(&client, &model, row, seed).await?);
        }
        row.measured = std::array::from_fn(|cell| {
            let mut values: Vec<f64> = runs.iter().map(|run| run[cell]).collect();
            values.sort_by(f64::total_cmp);
            Some(values[values.len() / 2])
        });
    }
    Ok(rows)
}

async fn served(client: &LoadClient) -> Option<String> {
    let (_, body) = client.get_each("/v1/models", 1 << 20, LIMIT).await.pop()?.ok()?;
    let list: serde_json::Value = serde_json::from_slice(&body).ok()?;
    Some(list.get("data")?.get(0)?.get("id")?.as_str()?.to_owned())
}

/// The acceptance of drafts that the server has counted since its start, as a line of a lab or
/// tune file; `None` without enough drafts.
pub(super) async fn acceptance(url: &str) -> Option<String> {
    let client = LoadClient::new(&[url.to_owned()], Api::Completions, LIMIT).ok()?;
    let (_, page) = client.get_each("/metrics", MAX_PAGE, LIMIT).await.pop()?.ok()?;
    let drafts = MetricsSnapshot::parse(&String::from_utf8_lossy(&page)).drafts;
    let rates: Vec<String> = drafts.acceptance()?.iter().map(|rate| format!("{rate:.3}")).collect();
    let (number, mean) = (drafts.drafts, drafts.tokens / drafts.drafts);
    Some(format!("acceptance = [{}]  # of {number} drafts with {mean:.2} tokens each", rates.join(", ")))
}

/// One run: requests per second, then median TTFT, mean TPOT and mean E2EL in milliseconds.
async fn run(client: &Arc<LoadClient>, model: &str, row: &Row, seed: u64) -> anyhow::Result<[f64; 4]> {
    let Load::Closed { streams, requests } = row.load else { bail!("{}: not a closed loop", row.name) };
    let class = Class::new(&row.name, Length::Exactly(row.prompt), Length::Exactly(row.output), 1.0);
    let workload = Workload::of_classes(model, vec![class], seed);
    let arrival = Arrival::ClosedLoop { concurrency: streams };
    let plan = RunPlan::new(workload, arrival, Extent::Requests(u64::from(requests)));
    let result = sluice_bench::run(&plan, client, &Arc::new(Progress::default())).await?;
    let metrics = Metrics::of(&result);
    if metrics.completed < u64::from(requests) {
        let reason = client.reasons().into_values().next().unwrap_or_default();
        bail!("{}: {} of {requests} requests failed: {reason}", row.name, metrics.failed);
    }
    let ms = 1e3;
    Ok([
        metrics.per_second(metrics.completed),
        metrics.ttft.median() * ms,
        metrics.tpot.mean() * ms,
        metrics.e2el.mean() * ms,
    ])
}

#[cfg(test)]
mod tests {
    use super::*;
    use sluice_core::vllm::args::ServeArgs;
    use sluice_sim::calibrate::search::HOST;
    use sluice_sim::calibrate::{FitSettings, Spread, play};
    use sluice_sim::{Constants, Gpu, Layout, Model, Profile, SimConfig};

    fn setting() -> FitSettings {
        let (gpu, model) = (Gpu::load("h200").unwrap(), Model::load("llama-3.1-8b").unwrap());
        FitSettings { draws: 1, fitted: HOST, ..FitSettings::new(gpu, model, Layout::default()) }
    }

    #[test]
    fn a_host_is_found_again_from_what_its_server_shows() {
        let known = Constants::on_host("busy").unwrap();
        let setting = setting();
        let profile = Profile::new(setting.gpu.clone(), setting.model.clone(), setting.layout, &known).unwrap();
        let measured = |row: Row| Row { measured: play(&profile, &row, 1).map(Some), ..row };
        let rows: Vec<Row> = rows(Server::default()).into_iter().map(measured).collect();
        let start = Constants::on_host("quiet").unwrap();
        let found = setting.fit(&start, &rows).unwrap();
        for (what, found, known) in [
            ("launch", found.host.launch_layer_us, known.host.launch_layer_us),
            ("request", found.front_end.request_us, known.front_end.request_us),
        ] {
            println!("{what}: {found} for {known}");
            assert!((found / known - 1.0).abs() < 0.1, "{what}: {found} for {known}");
        }
        let spread = |constants: &Constants| Spread::of(rows.iter().zip(&setting.play_all(constants, &rows).unwrap()));
        let (before, after) = (spread(&start), spread(&found));
        println!("before: {before}; after: {after}");
        assert!(after.median < before.median && after.max < before.max, "{before}; {after}");
        assert_eq!((found.efficiency, found.kernel, found.step), (start.efficiency, start.kernel, start.step));
    }

    #[tokio::test]
    async fn the_acceptance_of_drafts_is_read_from_a_server() {
        let flags = ["m", "--spec-method", "ngram", "--spec-tokens", "2"];
        let profile = Profile::named("h200-llama-8b").unwrap();
        let mut config = SimConfig::from_args(&ServeArgs::parse(&flags).unwrap(), profile).unwrap();
        config.set_acceptance(&[1.0, 0.0]).unwrap();
        config.speed = 50.0;
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let handle = sluice_sim::spawn(config, listener).unwrap();
        let url = format!("http://{}", handle.addr());
        let client = Arc::new(LoadClient::new(std::slice::from_ref(&url), Api::Completions, LIMIT).unwrap());
        let row = Row {
            prompt: 16,
            output: 200,
            load: Load::Closed { streams: 4, requests: 4 },
            ..rows(Server::default()).remove(0)
        };
        run(&client, "m", &row, 1).await.unwrap();
        let shown = acceptance(&url).await.unwrap();
        assert!(
            shown.starts_with("acceptance = [1.000]  # of ") && shown.ends_with("with 2.00 tokens each"),
            "{shown}"
        );
    }

    #[tokio::test]
    async fn every_load_is_measured_on_a_server() {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        // The speed is so high that the test takes a second. A test on virtual time judges the
        // measurements.
        let config = SimConfig { speed: 20.0, ..SimConfig::new("m", Profile::named("h200-llama-8b").unwrap()) };
        let handle = sluice_sim::spawn(config, listener).unwrap();
        let rows = measure(&format!("http://{}", handle.addr()), None, Server::default()).await.unwrap();
        for row in &rows {
            let [rate, ttft, tpot, e2el] = row.measured.map(|cell| cell.unwrap());
            // TPOT may be 0, because on a busy machine the tokens of a short response may arrive
            // together.
            assert!(rate > 0.0 && ttft > 0.0 && tpot >= 0.0 && e2el > 0.0, "{row:?}");
        }
        assert_eq!(acceptance(&format!("http://{}", handle.addr())).await, None, "it verifies no drafts");
        let refused = measure("http://127.0.0.1:1", None, Server::default()).await.unwrap_err();
        assert!(format!("{refused:#}").contains("names no model"), "{refused:#}");
    }
}
