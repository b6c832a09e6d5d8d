//! Turns flags into a plan: the arrivals, the client, the runs of a sweep.
//!
//! Everything that needs no server is checked before a request is sent. Flags that contradict each
//! other and data sets that cannot be read are wrong usage. `requests` builds the workload.

use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, bail};
use http::HeaderMap;
use http::header::{AUTHORIZATION, HeaderName, HeaderValue};

use super::args::{BenchArgs, RampStrategy};
use super::classes::divide;
use super::requests::{Built, api, dataset_name, sessions, workload};
use super::values::{Goodput, Rate};
use sluice_bench::{
    Arrival, Extent, LoadClient, MAX_SECONDS, PrefixKind, RequestSource, RunPlan, RunResult, Trust, Workload,
};
use sluice_config::{Class, MASK};

/// The parts that a run needs, and the flags that its result records.
#[derive(Debug)]
pub(super) struct Setup {
    pub(super) plan: RunPlan,
    pub(super) client: Arc<LoadClient>,
    pub(super) notes: Vec<String>,
    pub(super) server_versions: Vec<String>,
    /// The gateway's classes; empty if results are shown by the classes of the load.
    pub(super) classes: Vec<Class>,
    args: BenchArgs,
}

pub(super) fn client(args: &BenchArgs) -> anyhow::Result<LoadClient> {
    let server = &args.server;
    let urls = match server.base_url.is_empty() {
        true => vec![format!("http://{}:{}", server.host, server.port)],
        // OpenAI's clients include /v1 in the address, but the API paths here already begin with
        // it.
        false => {
            server.base_url.iter().map(|url| url.trim_end_matches('/').trim_end_matches("/v1").to_owned()).collect()
        }
    };
    let limit = Duration::try_from_secs_f64(server.request_timeout).context("--request-timeout")?;
    let trust = if server.insecure { Trust::Anyone } else { Trust::System };
    let client = LoadClient::trusting(trust, &urls, api(args), limit)?.with_headers(headers(args)?);
    Ok(match &server.endpoint {
        Some(path) => client.with_path(path)?,
        None => client,
    })
}

fn headers(args: &BenchArgs) -> anyhow::Result<HeaderMap> {
    let mut headers = HeaderMap::new();
    if let Ok(key) = std::env::var("OPENAI_API_KEY") {
        let mut value =
            HeaderValue::from_str(&format!("Bearer {key}")).context("OPENAI_API_KEY is not a valid header value")?;
        value.set_sensitive(true);
        headers.insert(AUTHORIZATION, value);
    }
    for (key, value) in &args.server.header {
        let name = HeaderName::from_bytes(key.as_bytes())
            .with_context(|| format!("--header: '{key}' is not a header name"))?;
        headers.insert(name, HeaderValue::from_str(value).with_context(|| format!("--header {key}: bad value"))?);
    }
    Ok(headers)
}

impl Setup {
    pub(super) fn of(args: &BenchArgs, client: LoadClient, model: &str) -> anyhow::Result<Self> {
        let Built { workload, counter, notes } = workload(args, model)?;
        let (arrival, extent) = arrival(args, &workload)?;
        let closed = matches!(arrival, Arrival::ClosedLoop { .. });
        let metrics = match args.server.metrics_url.is_empty() {
            true => client.urls(),
            false => args.server.metrics_url.clone(),
        };
        let plan = RunPlan {
            max_concurrency: args.load.max_concurrency.filter(|_| !closed),
            sessions: sessions(args)?,
            scrape: metrics,
            keep_texts: args.output.save_detailed,
            counter: counter.tokenizer().is_some().then(|| Arc::new(counter)),
            ..RunPlan::new(workload, arrival, extent)
        };
        plan.workload.check()?;
        plan.arrival.check()?;
        Ok(Self {
            plan,
            client: Arc::new(client),
            notes,
            server_versions: Vec::new(),
            classes: Vec::new(),
            args: args.clone(),
        })
    }

    /// Name and plan of each run. The name is the value that a sweep varies.
    pub(super) fn runs(&self) -> Vec<(String, RunPlan)> {
        let load = &self.args.load;
        if !load.sweep_max_concurrency.is_empty() {
            return load.sweep_max_concurrency.iter().map(|concurrency| self.at_concurrency(*concurrency)).collect();
        }
        let at = |rate: &Rate| {
            let arrival = match rate.finite() {
                Some(rate) => paced(rate, load.burstiness.0, load.burst_size),
                None => Arrival::AtOnce,
            };
            let name = rate.finite().map_or_else(|| "inf".to_owned(), |rate| rate.to_string());
            (name, RunPlan { arrival, ..self.plan.clone() })
        };
        match load.sweep_request_rate.is_empty() {
            true => vec![(String::new(), self.plan.clone())],
            false => load.sweep_request_rate.iter().map(at).collect(),
        }
    }

    fn at_concurrency(&self, concurrency: u32) -> (String, RunPlan) {
        let extent = match (self.args.load.sweep_num_prompts_factor, self.plan.extent) {
            (Some(factor), Extent::Requests(_)) => Extent::Requests(factor * u64::from(concurrency)),
            (_, extent) => extent,
        };
        let plan = match self.args.load.request_rate.finite() {
            None => RunPlan { arrival: Arrival::ClosedLoop { concurrency }, extent, ..self.plan.clone() },
            Some(_) => RunPlan { max_concurrency: Some(concurrency), extent, ..self.plan.clone() },
        };
        (concurrency.to_string(), plan)
    }

    pub(super) fn varied(&self) -> &'static str {
        if self.args.load.sweep_request_rate.is_empty() { "concurrency" } else { "rate" }
    }

    pub(super) fn annotate(&self, result: &mut RunResult) {
        let (args, config) = (&self.args, &mut result.config);
        config.label = args.output.label.clone();
        config.backend = args.server.backend.name().to_owned();
        config.dataset = dataset_name(args.dataset.dataset_name);
        config.tokenizer = tokenizer(args, args.server.model.as_ref().unwrap_or(&config.model));
        config.slo = Goodput::all(&args.output.goodput);
        config.percentiles = args.output.metric_percentiles.clone();
        config.percentile_metrics = args.output.percentile_metrics.clone();
        config.version = env!("CARGO_PKG_VERSION").to_owned();
        config.server_versions.clone_from(&self.server_versions);
        config.arguments = arguments(std::env::args().skip_while(|argument| argument != "bench").skip(1));
        config.metadata = args.output.metadata.iter().cloned().collect();
        if config.num_prompts == 0 {
            config.num_prompts = result.requests.len() as u64;
        }
        result.warnings.extend(cached_less(&self.plan, result));
        divide(&self.classes, result);
    }
}

/// The arguments, with header values and passwords in addresses masked.
fn arguments(given: impl Iterator<Item = String>) -> Vec<String> {
    let masked = |text: &str| format!("{}={MASK}", text.split('=').next().unwrap_or_default());
    let mut header = false;
    let mut arguments = Vec::new();
    for argument in given {
        if let Some(value) = argument.strip_prefix("--header=") {
            arguments.push(format!("--header={}", masked(value)));
            continue;
        }
        if argument.starts_with("--") {
            header = argument == "--header";
        } else if header {
            arguments.push(masked(&argument));
            continue;
        }
        let parts: Vec<String> = argument.split(',').map(without_password).collect();
        arguments.push(parts.join(","));
    }
    arguments
}

fn without_password(text: &str) -> String {
    let Some((scheme, rest)) = text.split_once("://") else { return text.to_owned() };
    let end = rest.find('/').unwrap_or(rest.len());
    match rest[..end].rfind('@') {
        Some(at) => format!("{scheme}://{MASK}{}", &rest[at..]),
        None => text.to_owned(),
    }
}

/// `--tokenizer`, otherwise the model, as `vllm bench serve` names it. `None` with
/// `--skip-tokenizer-init`.
fn tokenizer(args: &BenchArgs, model: &str) -> Option<String> {
    let named = args.dataset.tokenizer.as_ref().map_or_else(|| model.to_owned(), |path| path.display().to_string());
    (!args.ignored.skip_tokenizer_init).then_some(named)
}

/// A warning if the server's prefix cache did not reach the target hit rate.
fn cached_less(plan: &RunPlan, result: &RunResult) -> Option<String> {
    let RequestSource::Classes(classes) = &plan.workload.source else { return None };
    let [class] = classes.as_slice() else { return None };
    let PrefixKind::Share(share) = class.prefix.kind else { return None };
    let target = share * class.prefix.warm;
    let (queries, hits) = result
        .servers
        .iter()
        .fold((0.0, 0.0), |(queries, hits), side| (queries + side.prefix_queries, hits + side.prefix_hits));
    let measured = hits / queries;
    (queries > 0.0 && measured < target - 0.02).then(|| {
        format!(
            "the prefix cache found {:.1} % of the prompt tokens, the target was {:.1} %: prefixes used for the \
             first time, a cache that is too small, or requests spread over servers",
            measured * 100.0,
            target * 100.0
        )
    })
}

fn arrival(args: &BenchArgs, workload: &Workload) -> anyhow::Result<(Arrival, Extent)> {
    let load = &args.load;
    let mut extent = match load.duration {
        None => Extent::Requests(load.num_prompts),
        Some(seconds) if seconds > 0.0 => Extent::Lasting(Duration::try_from_secs_f64(seconds).context("--duration")?),
        Some(seconds) => bail!("--duration {seconds}: give a number of seconds above 0"),
    };
    let recorded = match &workload.source {
        RequestSource::Items(items) => items.times(),
        RequestSource::Classes(_) => None,
    };
    if load.self_timed && recorded.is_none() {
        bail!("--self-timed: this data set has no times of its own; use a trace, or --request-rate");
    }
    let own_rate = load.request_rate.finite().is_some() || load.rate_steps.is_some() || load.ramp_up_strategy.is_some();
    // A configured rate replaces the times of a trace, unless --self-timed keeps them.
    let replays = !load.no_self_timed && (load.self_timed || !own_rate);
    let arrival = if let Some(recorded) = recorded.filter(|_| replays) {
        if !(load.trace_speed.is_finite() && load.trace_speed > 0.0) {
            bail!("--trace-speed {}: give a number above 0", load.trace_speed);
        }
        if let Extent::Requests(count) = &mut extent {
            *count = (*count).min(recorded.len() as u64);
        }
        Arrival::Recorded(recorded.iter().map(|at| at / load.trace_speed).collect())
    } else if let Some(steps) = &load.rate_steps {
        let length: f64 = steps.0.iter().map(|(_, time)| time).sum();
        let length = Duration::try_from_secs_f64(length).ok().filter(|length| length.as_secs_f64() <= MAX_SECONDS);
        extent = Extent::Lasting(length.with_context(|| format!("--rate-steps: longer than {MAX_SECONDS:.0e} s"))?);
        Arrival::Steps { steps: steps.0.clone(), burstiness: 1.0 }
    } else if let Some(strategy) = load.ramp_up_strategy {
        if load.request_rate.finite().is_some() {
            bail!("--ramp-up-strategy sets the rate; leave --request-rate out");
        }
        let (Some(start), Some(end)) = (load.ramp_up_start_rps, load.ramp_up_end_rps) else {
            bail!("--ramp-up-strategy needs --ramp-up-start-rps and --ramp-up-end-rps");
        };
        if start > end {
            bail!("--ramp-up-start-rps {start} is above --ramp-up-end-rps {end}; a ramp goes up");
        }
        let geometric = strategy == RampStrategy::Exponential;
        Arrival::Ramp { start, end, geometric, burstiness: load.burstiness.0 }
    } else if let Some(rate) = load.request_rate.finite() {
        paced(rate, load.burstiness.0, load.burst_size)
    } else if let Some(concurrency) = load.max_concurrency {
        Arrival::ClosedLoop { concurrency }
    } else if load.duration.is_some() && load.sweep_max_concurrency.is_empty() && load.sweep_request_rate.is_empty() {
        bail!("--duration needs a --request-rate or a --max-concurrency: everything at once would never end");
    } else {
        Arrival::AtOnce
    };
    Ok((arrival, extent))
}

pub(super) fn paced(rate: f64, burstiness: f64, burst: Option<u32>) -> Arrival {
    match burst {
        Some(size) => Arrival::Burst { rate, size },
        None if burstiness.is_infinite() => Arrival::Constant { rate },
        None if burstiness == 1.0 => Arrival::Poisson { rate },
        None => Arrival::Gamma { rate, burstiness },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn saved_arguments_hold_no_secret() {
        let given = [
            "--base-url=http://me:secret@gpu0:8000/x,http://gpu1:8000",
            "--header",
            "Authorization=Bearer secret",
            "x-key=secret",
            "--class",
            "short:in=200,out=128",
            "--header=Cookie=secret",
            "--metrics-url",
            "http://secret@gpu0:8001",
        ];
        let kept = arguments(given.iter().map(|text| (*text).to_owned()));
        assert!(kept.iter().all(|text| !text.contains("secret")), "{kept:?}");
        assert_eq!(kept[0], format!("--base-url=http://{MASK}@gpu0:8000/x,http://gpu1:8000"));
        assert_eq!(kept[2..4], [format!("Authorization={MASK}"), format!("x-key={MASK}")]);
        assert_eq!(kept[5], "short:in=200,out=128");
        assert_eq!(kept.len(), given.len());
    }
}
