//! From flags to a workload: which requests are sent.
//!
//! Made-up prompts of one class or several, or those of a file; with adapters, conversations, and the fields around them. What
//! is wrong here is wrong usage, and said with the flag that puts it right.

use std::sync::Arc;

use anyhow::{Context as _, bail};
use serde_json::{Map, Value, json};

use super::args::{Backend, BenchArgs, DatasetName, LoraAssignment};
use crate::bench::load::dataset::{self, Counter, Format, Items, Labels, Reading};
use crate::bench::{
    Adapters, Api, Choice, Class, Fields, Length, Prefix, PrefixKind, Sessions, Slo, Source, Tokens, Workload,
};

/// The workload that the flags ask for, with `model` as the model's name; and what to know of its dataset.
pub(super) fn workload(args: &BenchArgs, model: &str) -> anyhow::Result<(Workload, Vec<String>)> {
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
    Ok((workload, notes))
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
            if !(per_second.is_finite() && per_second > 0.0) {
                bail!(
                    "--timed-trace-sec-multiplier {}: give a number above 0: 1 for seconds, 0.001 for milliseconds",
                    asked.timed_trace_sec_multiplier
                );
            }
            Format::Timed(Labels {
                timestamp: asked.timed_trace_label_timestamp.clone(),
                input: asked.timed_trace_label_input_length.clone(),
                output: asked.timed_trace_label_output_length.clone(),
                hashes: asked.timed_trace_label_hash_ids.clone(),
                block: asked.timed_trace_chunk_hash_size,
                per_second,
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

pub(super) fn sessions(args: &BenchArgs) -> anyhow::Result<Option<Sessions>> {
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
