//! From flags to a plan: the workload, the arrivals, the client.
//!
//! Everything that can be wrong without a server is found here, before anything is sent, and is wrong usage (exit code 2):
//! flags that contradict each other, a dataset that cannot be read. [`Setup::runs`] turns a sweep into one plan for each run.

use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, bail};
use http::HeaderMap;
use http::header::{AUTHORIZATION, HeaderName, HeaderValue};
use serde_json::{Map, Value, json};

use super::args::{Backend, BenchArgs, DatasetName, LoraAssignment, RampStrategy};
use super::values::{Goodput, Rate};
use crate::bench::dataset::{self, Counter, Format, Items, Labels, Reading};
use crate::bench::{
    Adapters, Api, Arrival, Choice, Class, Client, Extent, Fields, Length, Plan, Prefix, PrefixKind, RunResult,
    Sessions, Slo, Source, Tokens, Workload,
};

/// All that a run needs, and what its result is to say.
#[derive(Debug)]
pub(super) struct Setup {
    pub(super) plan: Plan,
    pub(super) client: Arc<Client>,
    /// What a reader should know of the dataset.
    pub(super) notes: Vec<String>,
    args: BenchArgs,
}

/// The client for the servers that the flags name.
pub(super) fn client(args: &BenchArgs) -> anyhow::Result<Client> {
    let server = &args.server;
    let urls = match server.base_url.is_empty() {
        true => vec![format!("http://{}:{}", server.host, server.port)],
        false => server.base_url.clone(),
    };
    let limit = Duration::try_from_secs_f64(server.request_timeout).context("--request-timeout")?;
    let client = Client::new(&urls, api(args), limit)?.with_headers(headers(args)?);
    Ok(match &server.endpoint {
        Some(path) => client.with_path(path)?,
        None => client,
    })
}

fn api(args: &BenchArgs) -> Api {
    match args.server.backend {
        Backend::OpenaiChat => Api::Chat,
        Backend::Vllm | Backend::Openai => Api::Completions,
    }
}

fn headers(args: &BenchArgs) -> anyhow::Result<HeaderMap> {
    let mut headers = HeaderMap::new();
    if let Ok(key) = std::env::var("OPENAI_API_KEY") {
        let mut value = HeaderValue::from_str(&format!("Bearer {key}")).context("OPENAI_API_KEY is no header value")?;
        value.set_sensitive(true);
        headers.insert(AUTHORIZATION, value);
    }
    for (key, value) in &args.server.header {
        let name = HeaderName::from_bytes(key.as_bytes()).with_context(|| format!("--header: '{key}' is no header"))?;
        headers.insert(name, HeaderValue::from_str(value).with_context(|| format!("--header {key}: bad value"))?);
    }
    Ok(headers)
}

impl Setup {
    /// What the flags ask for, with `model` as the model's name.
    pub(super) fn of(args: &BenchArgs, client: Client, model: &str) -> anyhow::Result<Self> {
        let counter = args.dataset.tokenizer.as_deref().map_or(Ok(Counter::Bytes), Counter::exact)?;
        let (source, notes, found) = source(args, &counter, model)?;
        let workload = Workload {
            model: args.server.served_model_name.clone().unwrap_or_else(|| model.to_owned()),
            api: api(args),
            source,
            adapters: adapters(args, found)?,
            tokens: tokens(args, &counter)?,
            fields: fields(args)?,
            leaving: args.dataset.leave_share,
            seed: args.load.seed,
        };
        let (arrival, extent) = arrival(args, &workload)?;
        let closed = matches!(arrival, Arrival::ClosedLoop { .. });
        let metrics = match args.server.metrics_url.is_empty() {
            true => client.urls(),
            false => args.server.metrics_url.clone(),
        };
        let plan = Plan {
            max_concurrency: args.load.max_concurrency.filter(|_| !closed),
            sessions: sessions(args)?,
            scrape: metrics,
            ..Plan::new(workload, arrival, extent)
        };
        plan.workload.check()?;
        plan.arrival.check()?;
        Ok(Self { plan, client: Arc::new(client), notes, args: args.clone() })
    }

    /// The plan of each run, and what is varied: one, or those of a sweep.
    pub(super) fn runs(&self) -> Vec<(String, Plan)> {
        let load = &self.args.load;
        if !load.sweep_max_concurrency.is_empty() {
            return load.sweep_max_concurrency.iter().map(|streams| self.at_concurrency(*streams)).collect();
        }
        let at = |rate: &Rate| {
            let arrival = match rate.finite() {
                Some(rate) => paced(rate, load.burstiness.0, load.burst_size),
                None => Arrival::AtOnce,
            };
            let name = rate.finite().map_or_else(|| "inf".to_owned(), |rate| rate.to_string());
            (name, Plan { arrival, ..self.plan.clone() })
        };
        match load.sweep_request_rate.is_empty() {
            true => vec![(String::new(), self.plan.clone())],
            false => load.sweep_request_rate.iter().map(at).collect(),
        }
    }

    fn at_concurrency(&self, streams: u32) -> (String, Plan) {
        let extent = match (self.args.load.sweep_num_prompts_factor, self.plan.extent) {
            (Some(factor), Extent::Requests(_)) => Extent::Requests(factor * u64::from(streams)),
            (_, extent) => extent,
        };
        let plan = match self.args.load.request_rate.finite() {
            None => Plan { arrival: Arrival::ClosedLoop { streams }, extent, ..self.plan.clone() },
            Some(_) => Plan { max_concurrency: Some(streams), extent, ..self.plan.clone() },
        };
        (streams.to_string(), plan)
    }

    /// What is varied in a sweep.
    pub(super) fn varied(&self) -> &'static str {
        if self.args.load.sweep_request_rate.is_empty() { "concurrency" } else { "rate" }
    }

    /// Puts the user's own words into a result.
    pub(super) fn dress(&self, result: &mut RunResult) {
        let (args, config) = (&self.args, &mut result.config);
        config.label = args.output.label.clone();
        config.backend = args.server.backend.name().to_owned();
        config.dataset = dataset_name(args.dataset.dataset_name);
        config.slo = Goodput::all(&args.output.goodput);
        config.percentiles = args.output.metric_percentiles.clone();
        config.percentile_metrics = args.output.percentile_metrics.clone();
        config.metadata = args.output.metadata.iter().cloned().collect();
        if config.num_prompts == 0 {
            config.num_prompts = result.requests.len() as u64;
        }
        result.warnings.extend(cached_less(&self.plan, result));
    }
}

/// A target hit rate that the server did not reach.
fn cached_less(plan: &Plan, result: &RunResult) -> Option<String> {
    let Source::Classes(classes) = &plan.workload.source else { return None };
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
            "the prefix cache found {:.1} % of the prompt tokens, {:.1} % were to be found: prefixes seen for the first \
             time, a cache too small, or requests spread over servers",
            measured * 100.0,
            target * 100.0
        )
    })
}

fn dataset_name(name: DatasetName) -> String {
    use clap::ValueEnum as _;
    name.to_possible_value().map(|value| value.get_name().to_owned()).unwrap_or_default()
}

/// Where requests come from, what to know of it, and the adapters that a file names.
fn source(args: &BenchArgs, counter: &Counter, model: &str) -> anyhow::Result<(Source, Vec<String>, Vec<String>)> {
    let asked = &args.dataset;
    let Some(format) = format(args)? else {
        if asked.dataset_path.is_some() {
            bail!("--dataset-path needs a dataset that is a file; name it with --dataset-name (sharegpt, custom, ..)");
        }
        return Ok((Source::Classes(classes(args)), Vec::new(), Vec::new()));
    };
    if asked.multi_turn {
        bail!("--multi-turn makes its own prompts; use it with --dataset-name random");
    }
    let Some(path) = &asked.dataset_path else {
        bail!("--dataset-name {} needs a file; give --dataset-path", dataset_name(asked.dataset_name));
    };
    let output = match asked.dataset_name {
        DatasetName::Sharegpt => asked.sharegpt_output_len,
        DatasetName::Custom => u32::try_from(asked.custom_output_len).ok(),
        _ => None,
    };
    let reading = Reading {
        counter,
        output: asked.output_len.or(output),
        limit: if args.load.duration.is_some() { 0 } else { args.load.num_prompts as usize },
        shuffle: (!asked.disable_shuffle).then_some(args.load.seed),
        model,
    };
    let mut items: Items = dataset::load(path, &format, &reading)?;
    let (notes, found) = (std::mem::take(&mut items.notes), std::mem::take(&mut items.adapters));
    Ok((Source::Items(Arc::new(items)), notes, found))
}

fn format(args: &BenchArgs) -> anyhow::Result<Option<Format>> {
    let asked = &args.dataset;
    Ok(Some(match asked.dataset_name {
        DatasetName::Random | DatasetName::PrefixRepetition => return Ok(None),
        DatasetName::Sharegpt => Format::ShareGpt,
        DatasetName::Custom => Format::Custom,
        DatasetName::Burstgpt => Format::BurstGpt,
        DatasetName::Azure => Format::Azure,
        DatasetName::Mooncake => Format::Timed(Labels::mooncake()),
        DatasetName::AccessLog => Format::AccessLog,
        DatasetName::TimedTrace => {
            let per_second = 1.0 / asked.timed_trace_sec_multiplier;
            if !(per_second.is_finite() && per_second >= 0.5) {
                bail!(
                    "--timed-trace-sec-multiplier {}: give 1 for seconds, 0.001 for milliseconds",
                    asked.timed_trace_sec_multiplier
                );
            }
            Format::Timed(Labels {
                timestamp: asked.timed_trace_label_timestamp.clone(),
                input: asked.timed_trace_label_input_length.clone(),
                output: asked.timed_trace_label_output_length.clone(),
                hashes: asked.timed_trace_label_hash_ids.clone(),
                block: asked.timed_trace_chunk_hash_size,
                per_second: per_second.round() as u32,
            })
        }
    }))
}

fn classes(args: &BenchArgs) -> Vec<Class> {
    let asked = &args.dataset;
    if !asked.class.is_empty() {
        return asked.class.iter().map(|class| class.0.clone()).collect();
    }
    let around = |length: Length, ratio: f64| match length {
        Length::Exactly(tokens) => Length::around(tokens, ratio),
        other => other,
    };
    let class = |prompt, output, prefix| Class {
        name: "all".to_owned(),
        prompt,
        output,
        weight: 1.0,
        prefix,
        slo: Slo::default(),
    };
    if asked.dataset_name == DatasetName::PrefixRepetition {
        let prefix = Prefix {
            kind: PrefixKind::Extra(asked.prefix_repetition_prefix_len),
            groups: asked.prefix_repetition_num_prefixes,
            warm: 1.0,
        };
        let output = asked.output_len.unwrap_or(asked.prefix_repetition_output_len);
        return vec![class(Length::Exactly(asked.prefix_repetition_suffix_len), Length::Exactly(output), prefix)];
    }
    let kind = match (asked.prefix_hit_rate, asked.random_cache_ratio, asked.random_prefix_len) {
        (Some(rate), ..) => PrefixKind::Share(rate),
        (None, Some(ratio), _) => PrefixKind::Share(ratio),
        (None, None, 0) => PrefixKind::None,
        (None, None, tokens) => PrefixKind::Extra(tokens),
    };
    let prefix = Prefix { kind, groups: asked.num_prefixes, warm: asked.random_cache_hit_fraction.unwrap_or(1.0) };
    let output = asked.output_len.map_or(asked.random_output_len, Length::Exactly);
    let ratio = asked.random_range_ratio;
    vec![class(around(asked.random_input_len, ratio.input), around(output, ratio.output), prefix)]
}

fn adapters(args: &BenchArgs, found: Vec<String>) -> anyhow::Result<Adapters> {
    let asked = &args.dataset;
    if !found.is_empty() {
        if !asked.lora_modules.is_empty() {
            bail!("the access log names its own adapters ({}); leave --lora-modules out", found.join(", "));
        }
        // Each request has its own; none is drawn.
        return Ok(Adapters { names: found, choice: Choice::Named });
    }
    let choice = match asked.lora_assignment {
        LoraAssignment::Random if asked.lora_weights.is_empty() => Choice::Even,
        LoraAssignment::Random => Choice::Weights(asked.lora_weights.clone()),
        LoraAssignment::RoundRobin => Choice::RoundRobin,
        LoraAssignment::Zipf => Choice::Zipf(asked.lora_zipf),
    };
    Ok(Adapters { names: asked.lora_modules.clone(), choice })
}

fn tokens(args: &BenchArgs, counter: &Counter) -> anyhow::Result<Tokens> {
    let asked = &args.dataset;
    if api(args) == Api::Chat || asked.prompt_text || asked.multi_turn {
        if asked.prompt_token_ids {
            bail!("--prompt-token-ids: only completions take token ids, and conversations are text");
        }
        return Ok(Tokens::Words);
    }
    let Length::Between { min, max } = asked.vocabulary else {
        bail!("--vocabulary: give FIRST-LAST, such as 1000-7999")
    };
    if let Some(size) = counter.vocabulary().filter(|size| *size <= max) {
        bail!(
            "--vocabulary {}: the tokenizer has only {size} ids; give FIRST-{}",
            asked.vocabulary,
            size.saturating_sub(1)
        );
    }
    Ok(Tokens::Ids(min..max + 1))
}

fn fields(args: &BenchArgs) -> anyhow::Result<Fields> {
    let sampling = &args.sampling;
    let mut extra = Map::new();
    for (key, value) in [
        ("temperature", json!(sampling.temperature)),
        ("top_p", json!(sampling.top_p)),
        ("top_k", json!(sampling.top_k)),
        ("min_p", json!(sampling.min_p)),
        ("frequency_penalty", json!(sampling.frequency_penalty)),
        ("presence_penalty", json!(sampling.presence_penalty)),
        ("repetition_penalty", json!(sampling.repetition_penalty)),
    ] {
        if !value.is_null() {
            extra.insert(key.to_owned(), value);
        }
    }
    if let Some(count) = sampling.logprobs {
        match api(args) {
            Api::Completions => extra.insert("logprobs".to_owned(), json!(count)),
            Api::Chat => {
                extra.insert("logprobs".to_owned(), json!(true));
                extra.insert("top_logprobs".to_owned(), json!(count))
            }
        };
    }
    if let Some(text) = &sampling.extra_body {
        let object: Map<String, Value> = serde_json::from_str(text).context("--extra-body is not a JSON object")?;
        extra.extend(object);
    }
    // Conversations and prompts of one's own end where the model wants, unless they are told not to.
    let own = matches!(args.dataset.dataset_name, DatasetName::Sharegpt | DatasetName::Custom);
    Ok(Fields { ignore_eos: sampling.ignore_eos || !own, extra })
}

fn sessions(args: &BenchArgs) -> anyhow::Result<Option<Sessions>> {
    let asked = &args.dataset;
    if !asked.multi_turn {
        return Ok(None);
    }
    let sessions = Sessions {
        turns: asked.multi_turn_num_turns,
        later: asked.per_turn_input_len,
        think: asked.multi_turn_delay_ms / 1e3,
    };
    sessions.check()?;
    Ok(Some(sessions))
}

fn arrival(args: &BenchArgs, workload: &Workload) -> anyhow::Result<(Arrival, Extent)> {
    let load = &args.load;
    let mut extent = match load.duration {
        None => Extent::Requests(load.num_prompts),
        Some(seconds) if seconds > 0.0 => Extent::Lasting(Duration::try_from_secs_f64(seconds).context("--duration")?),
        Some(seconds) => bail!("--duration {seconds}: give a number of seconds above 0"),
    };
    let moments = match &workload.source {
        Source::Items(items) => items.moments(),
        Source::Classes(_) => None,
    };
    if load.self_timed && moments.is_none() {
        bail!("--self-timed: this dataset has no moments of its own; use a trace, or --request-rate");
    }
    let own_rate = load.request_rate.finite().is_some() || load.rate_steps.is_some() || load.ramp_up_strategy.is_some();
    // A rate asks for other moments than the trace's, unless those are asked for as well.
    let replays = !load.no_self_timed && (load.self_timed || !own_rate);
    let arrival = if let Some(moments) = moments.filter(|_| replays) {
        if !(load.trace_speed.is_finite() && load.trace_speed > 0.0) {
            bail!("--trace-speed {}: give a number above 0", load.trace_speed);
        }
        if let Extent::Requests(count) = &mut extent {
            *count = (*count).min(moments.len() as u64);
        }
        Arrival::Recorded(moments.iter().map(|at| at / load.trace_speed).collect())
    } else if let Some(steps) = &load.rate_steps {
        extent = Extent::Lasting(Duration::from_secs_f64(steps.0.iter().map(|(_, time)| time).sum()));
        Arrival::Steps(steps.0.clone())
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
    } else if let Some(streams) = load.max_concurrency {
        Arrival::ClosedLoop { streams }
    } else if load.duration.is_some() && load.sweep_max_concurrency.is_empty() && load.sweep_request_rate.is_empty() {
        bail!("--duration needs a --request-rate or a --max-concurrency: everything at once would never end");
    } else {
        Arrival::AtOnce
    };
    Ok((arrival, extent))
}

fn paced(rate: f64, burstiness: f64, burst: Option<u32>) -> Arrival {
    match burst {
        Some(size) => Arrival::Burst { rate, size },
        None if burstiness.is_infinite() => Arrival::Constant { rate },
        None if burstiness == 1.0 => Arrival::Poisson { rate },
        None => Arrival::Gamma { rate, burstiness },
    }
}
