//! Turns flags into a workload: the requests to send.
//!
//! Prompts are generated, for one or several classes, or come from a file. Errors name the flag
//! that fixes them.

use std::fs::File;
use std::io::{BufRead as _, BufReader};
use std::sync::Arc;

use anyhow::{Context as _, bail};
use serde_json::{Map, Value, json};

use super::args::{Backend, BenchArgs, DatasetName, LoraAssignment};
use sluice_bench::load::dataset::{self, DatasetFormat, ItemPrompt, Items, ReadOptions, TokenCounter, TraceKeys};
use sluice_bench::{
    AdapterChoice, Adapters, Api, BodyFields, Class, ExactText, Length, Prefix, PrefixKind, PromptTokens,
    RequestSource, Sessions, Slo, Workload,
};

pub(super) struct Built {
    pub(super) workload: Workload,
    pub(super) counter: TokenCounter,
    pub(super) notes: Vec<String>,
}

pub(super) fn workload(args: &BenchArgs, model: &str) -> anyhow::Result<Built> {
    let counter = args.dataset.tokenizer.as_deref().map_or(Ok(TokenCounter::Bytes), TokenCounter::exact)?;
    let LoadedSource { source, notes, adapters: found } = load_source(args, &counter, model)?;
    let workload = Workload {
        model: args.server.served_model_name.clone().unwrap_or_else(|| model.to_owned()),
        api: api(args),
        tokens: tokens(args, &counter, &source)?,
        source,
        adapters: adapters(args, found)?,
        fields: fields(args)?,
        leaving: args.dataset.leave_share,
        users: args.dataset.users,
        seed: args.load.seed,
    };
    Ok(Built { workload, counter, notes })
}

pub(super) fn recorded_model(args: &BenchArgs) -> Option<String> {
    let path = args.dataset.dataset_path.as_ref().filter(|_| args.dataset.dataset_name == DatasetName::AccessLog)?;
    let lines = BufReader::new(File::open(path).ok()?).lines().map_while(Result::ok);
    let mut records = lines.filter_map(|line| serde_json::from_str::<Value>(&line).ok());
    records.find_map(|record| record.get("model")?.as_str().map(str::to_owned))
}

pub(super) fn api(args: &BenchArgs) -> Api {
    match args.server.backend {
        Backend::OpenaiChat => Api::Chat,
        Backend::Vllm | Backend::Openai => Api::Completions,
    }
}

pub(super) fn dataset_name(name: DatasetName) -> String {
    use clap::ValueEnum as _;
    name.to_possible_value().map(|value| value.get_name().to_owned()).unwrap_or_default()
}

/// A source of requests, notes about it, and the adapters that the file names.
struct LoadedSource {
    source: RequestSource,
    notes: Vec<String>,
    adapters: Vec<String>,
}

fn load_source(args: &BenchArgs, counter: &TokenCounter, model: &str) -> anyhow::Result<LoadedSource> {
    let flags = &args.dataset;
    let Some(format) = format(args)? else {
        if flags.dataset_path.is_some() {
            bail!("--dataset-path needs the format of the file; give --dataset-name (sharegpt, custom, ..)");
        }
        return Ok(LoadedSource {
            source: RequestSource::Classes(classes(args)),
            notes: Vec::new(),
            adapters: Vec::new(),
        });
    };
    if flags.multi_turn {
        bail!("--multi-turn generates its own prompts; use it with --dataset-name random");
    }
    let Some(path) = &flags.dataset_path else {
        bail!("--dataset-name {} needs a file; give --dataset-path", dataset_name(flags.dataset_name));
    };
    let output = match flags.dataset_name {
        DatasetName::Sharegpt => flags.sharegpt_output_len,
        DatasetName::Custom => u32::try_from(flags.custom_output_len).ok(),
        _ => None,
    };
    let options = ReadOptions {
        counter,
        output: flags.output_len.or(output),
        limit: if args.load.duration.is_some() { 0 } else { args.load.num_prompts as usize },
        shuffle: (!flags.disable_shuffle).then_some(args.load.seed),
        model,
    };
    let mut items: Items = dataset::load(path, &format, &options)?;
    let (notes, adapters) = (std::mem::take(&mut items.notes), std::mem::take(&mut items.adapters));
    Ok(LoadedSource { source: RequestSource::Items(Arc::new(items)), notes, adapters })
}

fn format(args: &BenchArgs) -> anyhow::Result<Option<DatasetFormat>> {
    let flags = &args.dataset;
    Ok(Some(match flags.dataset_name {
        DatasetName::Random | DatasetName::PrefixRepetition => return Ok(None),
        DatasetName::Sharegpt => DatasetFormat::ShareGpt,
        DatasetName::Custom => DatasetFormat::Custom,
        DatasetName::Burstgpt => DatasetFormat::BurstGpt,
        DatasetName::Azure => DatasetFormat::Azure,
        DatasetName::Mooncake => DatasetFormat::Timed(TraceKeys::mooncake()),
        DatasetName::AccessLog => DatasetFormat::AccessLog,
        DatasetName::TimedTrace => {
            let per_second = 1.0 / flags.timed_trace_sec_multiplier;
            if !(per_second.is_finite() && per_second > 0.0) {
                bail!(
                    "--timed-trace-sec-multiplier {}: give a number above 0: 1 for seconds, 0.001 for milliseconds",
                    flags.timed_trace_sec_multiplier
                );
            }
            DatasetFormat::Timed(TraceKeys {
                timestamp: flags.timed_trace_label_timestamp.clone(),
                input: flags.timed_trace_label_input_length.clone(),
                output: flags.timed_trace_label_output_length.clone(),
                hashes: flags.timed_trace_label_hash_ids.clone(),
                block: flags.timed_trace_chunk_hash_size,
                per_second,
            })
        }
    }))
}

fn classes(args: &BenchArgs) -> Vec<Class> {
    let flags = &args.dataset;
    if !flags.class.is_empty() {
        return flags.class.iter().map(|class| class.0.clone()).collect();
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
    if flags.dataset_name == DatasetName::PrefixRepetition {
        let prefix = Prefix {
            kind: PrefixKind::Extra(flags.prefix_repetition_prefix_len),
            groups: flags.prefix_repetition_num_prefixes,
            warm: 1.0,
        };
        let output = flags.output_len.unwrap_or(flags.prefix_repetition_output_len);
        return vec![class(Length::Exactly(flags.prefix_repetition_suffix_len), Length::Exactly(output), prefix)];
    }
    let kind = match (flags.prefix_hit_rate, flags.random_cache_ratio, flags.random_prefix_len) {
        (Some(rate), ..) => PrefixKind::Share(rate),
        (None, Some(ratio), _) => PrefixKind::Share(ratio),
        (None, None, 0) => PrefixKind::None,
        (None, None, tokens) => PrefixKind::Extra(tokens),
    };
    let prefix = Prefix { kind, groups: flags.num_prefixes, warm: flags.random_cache_hit_fraction.unwrap_or(1.0) };
    let output = flags.output_len.map_or(flags.random_output_len, Length::Exactly);
    let ratio = flags.random_range_ratio;
    vec![class(around(flags.random_input_len, ratio.input), around(output, ratio.output), prefix)]
}

fn adapters(args: &BenchArgs, found: Vec<String>) -> anyhow::Result<Adapters> {
    let flags = &args.dataset;
    if !found.is_empty() {
        if !flags.lora_modules.is_empty() {
            bail!("the access log names its own adapters ({}); leave --lora-modules out", found.join(", "));
        }
        // The requests of an access log name their adapters themselves.
        return Ok(Adapters { names: found, choice: AdapterChoice::Named });
    }
    let choice = match flags.lora_assignment {
        LoraAssignment::Random if flags.lora_weights.is_empty() => AdapterChoice::Even,
        LoraAssignment::Random => AdapterChoice::Weights(flags.lora_weights.clone()),
        LoraAssignment::RoundRobin => AdapterChoice::RoundRobin,
        LoraAssignment::Zipf => AdapterChoice::Zipf(flags.lora_zipf),
    };
    Ok(Adapters { names: flags.lora_modules.clone(), choice })
}

fn tokens(args: &BenchArgs, counter: &TokenCounter, source: &RequestSource) -> anyhow::Result<PromptTokens> {
    let flags = &args.dataset;
    if api(args) == Api::Chat || flags.prompt_text || flags.multi_turn {
        if flags.prompt_token_ids {
            bail!("--prompt-token-ids: only completions take token ids, and conversations are text");
        }
        let made = match source {
            RequestSource::Classes(_) => true,
            RequestSource::Items(items) => items.list.iter().any(|item| matches!(item.prompt, ItemPrompt::Made { .. })),
        };
        return Ok(match counter.tokenizer().filter(|_| made) {
            None => PromptTokens::Words,
            // The special tokens of a completion prompt count, until a probe shows how many tokens
            // the server adds.
            Some(tokenizer) => PromptTokens::Exact(ExactText::new(tokenizer).adding(match api(args) {
                Api::Completions => counter.special(),
                Api::Chat => 0,
            })),
        });
    }
    let Length::Between { min, max } = flags.vocabulary else {
        bail!("--vocabulary: give FIRST-LAST, such as 1000-7999")
    };
    if let Some(size) = counter.vocabulary().filter(|size| *size <= max) {
        bail!(
            "--vocabulary {}: the tokenizer has only {size} ids; give FIRST-{}",
            flags.vocabulary,
            size.saturating_sub(1)
        );
    }
    Ok(PromptTokens::Ids(min..max + 1))
}

fn fields(args: &BenchArgs) -> anyhow::Result<BodyFields> {
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
    // Conversations and custom prompts end where the model ends them, unless --ignore-eos is given.
    let own = matches!(args.dataset.dataset_name, DatasetName::Sharegpt | DatasetName::Custom);
    Ok(BodyFields { ignore_eos: sampling.ignore_eos || !own, extra })
}

pub(super) fn sessions(args: &BenchArgs) -> anyhow::Result<Option<Sessions>> {
    let flags = &args.dataset;
    if !flags.multi_turn {
        return Ok(None);
    }
    let sessions = Sessions {
        turns: flags.multi_turn_num_turns,
        later: flags.per_turn_input_len,
        think: flags.multi_turn_delay_ms / 1e3,
    };
    sessions.check()?;
    Ok(Some(sessions))
}
