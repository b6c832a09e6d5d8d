//! Turns a `[[traffic]]` table into a run plan of `sluice bench`.
//!
//! `sluice bench` runs such plans too, so real engines can get the same requests. The key `load`
//! multiplies rates and concurrency, not lengths.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use http::HeaderValue;

use crate::error::LabError;
use crate::file::{ClassTable, ConversationTable, TraceTable, TrafficTable};
use sluice_bench::load::dataset::{self, DatasetFormat, ReadOptions, TokenCounter, TraceKeys};
use sluice_bench::{
    AdapterChoice, Adapters, Api, Arrival, BodyFields, Class, Extent, Prefix, PrefixKind, PromptTokens, RequestSource,
    RunPlan, Sessions, Slo, Workload,
};
use sluice_core::base::Period;

/// Duration of traffic if neither the table nor the file gives one.
const DURATION: Duration = Duration::from_secs(60);

struct Source {
    requests: RequestSource,
    /// Recorded arrival times, seconds.
    times: Option<Vec<f64>>,
    adapters: Vec<String>,
}

pub(crate) struct TrafficDefaults<'a> {
    pub(crate) folder: &'a Path,
    pub(crate) model: String,
    /// The duration for a table that has none.
    pub(crate) duration: Option<Duration>,
    /// Factor for rates and concurrency.
    pub(crate) load: Option<f64>,
}

impl TrafficDefaults<'_> {
    pub(crate) fn plan(&self, table: &TrafficTable) -> Result<RunPlan, LabError> {
        let model = table.model.clone().unwrap_or_else(|| self.model.clone());
        let Source { requests, times, adapters: named } = self.source(table, &model)?;
        let api = match table.api.as_deref() {
            None | Some("completions") => Api::Completions,
            Some("chat") => Api::Chat,
            Some(other) => return Err(needs(format!("the api 'completions' or 'chat', not '{other}'"))),
        };
        let words = api == Api::Chat || table.conversation.is_some();
        let workload = Workload {
            model,
            api,
            source: requests,
            adapters: adapters(table, named)?,
            users: 0,
            tokens: if words { PromptTokens::Words } else { PromptTokens::Ids(1_000..8_000) },
            fields: BodyFields { ignore_eos: true, ..BodyFields::default() },
            leaving: table.leave,
            seed: 0,
        };
        let (arrival, extent) = self.arrival(table, times)?;
        let sessions = table.conversation.as_ref().map(sessions);
        Ok(RunPlan { sessions, ..RunPlan::new(workload, arrival, extent) })
    }

    fn source(&self, table: &TrafficTable, model: &str) -> Result<Source, LabError> {
        let Some(trace) = &table.trace else {
            if table.class.is_empty() {
                return Err(needs("at least one class, or a trace".to_owned()));
            }
            let requests = RequestSource::Classes(table.class.iter().map(class).collect());
            return Ok(Source { requests, times: None, adapters: Vec::new() });
        };
        if let Some(speed) = trace.speed.filter(|speed| !(speed.is_finite() && *speed > 0.0)) {
            return Err(needs(format!("a trace with a speed above 0, not {speed}")));
        }
        if !table.class.is_empty() {
            return Err(needs("classes or a trace, not both".to_owned()));
        }
        let options = ReadOptions {
            counter: &TokenCounter::Bytes,
            output: None,
            limit: trace.limit.unwrap_or(0),
            shuffle: None,
            model,
        };
        let mut items = dataset::load(&self.folder.join(&trace.path), &format(trace)?, &options)
            .map_err(|error| LabError::Traffic(error.to_string()))?;
        let (times, adapters) = (items.times(), std::mem::take(&mut items.adapters));
        Ok(Source { requests: RequestSource::Items(Arc::new(items)), times, adapters })
    }

    fn arrival(&self, table: &TrafficTable, times: Option<Vec<f64>>) -> Result<(Arrival, Extent), LabError> {
        let load = self.load.unwrap_or(1.0);
        if !(load.is_finite() && load > 0.0) {
            return Err(needs(format!("a load above 0, not {load}")));
        }
        let given = table.duration.map(|Period(time)| time).or(self.duration);
        let extent = table.requests.map_or(Extent::Lasting(given.unwrap_or(DURATION)), Extent::Requests);
        let rate = self::rates(table)?.map(|rate| rate * load);
        if let Some(times) = times.filter(|_| rate.is_none() && table.steps.is_empty() && table.concurrency.is_none()) {
            let speed = table.trace.as_ref().and_then(|trace| trace.speed).unwrap_or(1.0) * load;
            let mut times: Vec<f64> = times.iter().map(|at| at / speed).collect();
            if let Some(lasting) = given {
                times.retain(|at| *at < lasting.as_secs_f64());
            }
            let count = table.requests.unwrap_or(u64::MAX).min(times.len() as u64);
            return Ok((Arrival::Recorded(times.into()), Extent::Requests(count)));
        }
        let arrival = match (rate, table.concurrency, table.steps.is_empty()) {
            (Some(rate), None, true) => match (table.burst, table.burstiness) {
                (Some(size), None) => Arrival::Burst { rate, size },
                (None, Some(burstiness)) => Arrival::Gamma { rate, burstiness },
                (None, None) => Arrival::Poisson { rate },
                (Some(_), Some(_)) => return Err(needs("burst or burstiness, not both".to_owned())),
            },
            (None, Some(concurrency), true) => {
                let scaled = (f64::from(concurrency) * load).round().max(1.0);
                Arrival::ClosedLoop { concurrency: scaled as u32 }
            }
            (_, None, false) if table.burst.is_some() => {
                return Err(needs("steps or burst, not both".to_owned()));
            }
            (_, None, false) if table.rate.is_some() => {
                return Err(needs("steps or a rate of its own, not both".to_owned()));
            }
            (_, None, false) if table.requests.is_some() || table.duration.is_some() => {
                return Err(needs("steps or requests or a duration of its own, not both".to_owned()));
            }
            (_, None, false) => {
                let steps: Vec<(f64, f64)> = table.steps.iter().map(|(rate, time)| (rate * load, *time)).collect();
                let length = steps.iter().map(|(_, time)| time).sum::<f64>();
                let length = Duration::try_from_secs_f64(length).map_err(|error| needs(error.to_string()))?;
                let burstiness = table.burstiness.unwrap_or(1.0);
                return Ok((Arrival::Steps { steps, burstiness }, Extent::Lasting(length)));
            }
            _ => return Err(needs("one of rate (or a rate for each class), steps and concurrency".to_owned())),
        };
        Ok((arrival, extent))
    }
}

pub(crate) fn tenant(table: &TrafficTable) -> Result<Option<HeaderValue>, LabError> {
    let name = table.tenant.as_deref();
    let value = name.map(|name| HeaderValue::try_from(name).map_err(|_| format!("a tenant of letters, not {name:?}")));
    value.transpose().map_err(needs)
}

fn needs(what: String) -> LabError {
    LabError::Traffic(format!("traffic needs {what}"))
}

/// The rate of a table: one for all, or the sum of the rates of the classes.
fn rates(table: &TrafficTable) -> Result<Option<f64>, LabError> {
    let given = table.class.iter().filter_map(|class| class.rate);
    match (given.clone().count(), table.rate) {
        (0, rate) => Ok(rate),
        // With steps, the rates of classes are only weights.
        (count, None) if count == table.class.len() => Ok(table.steps.is_empty().then(|| given.sum())),
        (_, Some(_)) => Err(needs("a rate of its own or one for each class, not both".to_owned())),
        (_, None) => Err(needs("a rate for each of its classes, or for none".to_owned())),
    }
}

fn class(table: &ClassTable) -> Class {
    let kind = match (table.prefix, table.prefix_share) {
        (Some(tokens), _) => PrefixKind::Extra(tokens),
        (None, Some(share)) => PrefixKind::Share(share),
        (None, None) => PrefixKind::None,
    };
    let millis = |bound: Option<Period>| bound.map(|Period(bound)| bound.as_secs_f64() * 1e3);
    Class {
        name: table.name.clone(),
        prompt: table.prompt.0,
        output: table.output.0,
        weight: table.rate.or(table.weight).unwrap_or(1.0),
        prefix: Prefix { kind, groups: table.prefixes.unwrap_or(1), warm: 1.0 },
        slo: Slo { ttft: millis(table.ttft), tpot: millis(table.tpot), e2el: millis(table.e2el) },
    }
}

fn sessions(table: &ConversationTable) -> Sessions {
    Sessions {
        turns: table.turns.0,
        later: table.later.map(|later| later.0),
        think: table.think.map_or(0.0, |Period(think)| think.as_secs_f64()),
    }
}

fn adapters(table: &TrafficTable, named: Vec<String>) -> Result<Adapters, LabError> {
    let Some(adapters) = &table.adapters else {
        let choice = if named.is_empty() { AdapterChoice::Even } else { AdapterChoice::Named };
        return Ok(Adapters { names: named, choice });
    };
    let choice = match (adapters.zipf, adapters.weights.is_empty()) {
        (None, true) => AdapterChoice::Even,
        (Some(exponent), true) => AdapterChoice::Zipf(exponent),
        (None, false) => AdapterChoice::Weights(adapters.weights.clone()),
        (Some(_), false) => return Err(needs("zipf or weights for its adapters, not both".to_owned())),
    };
    Ok(Adapters { names: adapters.names.clone(), choice })
}

fn format(trace: &TraceTable) -> Result<DatasetFormat, LabError> {
    Ok(match trace.format.as_str() {
        "access_log" | "records" => DatasetFormat::AccessLog,
        "azure" => DatasetFormat::Azure,
        "burstgpt" => DatasetFormat::BurstGpt,
        "mooncake" => DatasetFormat::Timed(TraceKeys::mooncake()),
        "sharegpt" => DatasetFormat::ShareGpt,
        "custom" => DatasetFormat::Custom,
        other => {
            let known = "access_log, records, azure, burstgpt, mooncake, sharegpt or custom";
            return Err(needs(format!("a trace in the format {known}, not '{other}'")));
        }
    })
}
