//! Forecasts for the online tuner: simulates the requests of the last minutes with the present
//! settings and with each candidate.
//!
//! Shared beginnings of prompts are not simulated, because the gateway keeps no prompts. Requests
//! that are in service when the simulated minutes begin or end are not simulated either. All runs
//! have the same requests at the same times, so the error of a difference is computed from the
//! differences of batches.

use std::sync::Arc;
use std::time::Duration;

use crate::run::run;
use crate::setup::Lab;
use sluice_bench::load::dataset::{Item, ItemPrompt, Items};
use sluice_bench::{Adapters, Api, Arrival, BodyFields, Extent, PromptTokens, RequestSource, RunPlan, Workload};
use sluice_config::{Config, TunerMode};
use sluice_online::engines::forecast::{CandidateForecast, EngineAnswer, EngineCandidate, EngineQuestion};
use sluice_online::limits::forecast::{Forecast, LimitsAnswer, LimitsQuestion};
use sluice_online::limits::{Limits, PoolLimits};
use sluice_online::observe::recent::RecentRequest;
use sluice_online::observe::window::{BATCH, Batch};

const REQUESTS_MIN: usize = 100;
/// Requests that have not ended this long after the last arrival are late.
const GIVE_UP: Duration = Duration::from_secs(60);
const LOSS_UNFINISHED: f64 = 3.0;

/// Answers `question` with the configuration and the engines of `lab`; empty if they cannot be
/// simulated.
pub fn forecast(lab: &Lab, question: &EngineQuestion, seed: u64) -> EngineAnswer {
    let lab = &question.limits.iter().fold(lab.clone(), |lab, (pool, limits)| with_limits(&lab, pool, Some(*limits)));
    let Some(base) = replay(lab, &question.requests) else { return EngineAnswer::default() };
    let Some(now) = batches(&base, seed) else { return EngineAnswer::default() };
    let with = |candidate: &EngineCandidate, lab: &Lab| {
        let mut lab = with_limits(lab, &question.pool, candidate.limits);
        for engine in lab.engines.iter_mut().filter(|engine| is_of(&base.config, &question.pool, &engine.backend)) {
            *engine = engine.with_flag(candidate.flag, candidate.to).ok()?;
        }
        Some(lab)
    };
    let forecast = |candidate: &EngineCandidate| Some(beside(&now, &batches(&with(candidate, &base)?, seed)?));
    let mut known: Vec<(PoolLimits, Option<Forecast>)> = Vec::new();
    let mut unchanged = |limits: Option<PoolLimits>| {
        let limits = limits?;
        if !known.iter().any(|(of, _)| *of == limits) {
            let found = batches(&with_limits(&base, &question.pool, Some(limits)), seed);
            known.push((limits, found.map(|found| beside(&now, &found))));
        }
        known.iter().find(|(of, _)| *of == limits)?.1
    };
    let candidate = |one: &EngineCandidate| CandidateForecast {
        forecast: forecast(one),
        unchanged: unchanged(one.limits),
        ..CandidateForecast::default()
    };
    let mut candidates: Vec<CandidateForecast> = question.candidates.iter().map(candidate).collect();
    let short = replay(lab, latest(&question.requests, question.absent));
    let before = short.as_ref().and_then(|lab| batches(lab, seed));
    let absence = |change: &dyn Fn(&Lab) -> Option<Lab>| {
        let (before, less) = (before.as_ref()?, one_less(short.as_ref()?, &question.pool)?);
        let less = change(&less)?;
        Some((beside(before, &batches(&less, seed)?).loss - beside(before, before).loss).max(0.0))
    };
    let each = question.candidates.iter().zip(&mut candidates);
    let known = each.filter_map(|(one, found)| Some((found.forecast?.loss, one, found)));
    // Of equal candidates the last one counts, as in the tuner.
    if let Some((_, best, found)) = known.max_by(|one, other| other.0.total_cmp(&one.0)) {
        let under = |limits| absence(&|lab| Some(with_limits(lab, &question.pool, Some(limits))));
        found.absence_with = absence(&|lab| with(best, lab));
        found.absence_under = best.limits.and_then(under);
    }
    let span = question.requests.last().map_or(Duration::ZERO, |last| last.at.saturating_sub(question.requests[0].at));
    let absence = absence(&|lab| Some(lab.clone()));
    EngineAnswer { now: Some(beside(&now, &now)), absence, candidates, span }
}

/// Answers `question` with the configuration and the engines of `lab`; empty if they cannot be
/// simulated.
pub fn forecast_limits(lab: &Lab, question: &LimitsQuestion, seed: u64) -> LimitsAnswer {
    let Some(base) = replay(lab, &question.requests) else { return LimitsAnswer::default() };
    let with = |limits: &Limits| {
        let pools = question.pools.iter().zip(&limits.0);
        let lab = pools.fold(base.clone(), |lab, (pool, limits)| with_limits(&lab, pool, Some(*limits)));
        // The waiting requests arrive in the first batch, which does not count.
        batches(&lab, seed).map(|found| found.into_iter().skip(usize::from(question.waiting > 0)).collect::<Vec<_>>())
    };
    let Some(now) = with(&question.now) else { return LimitsAnswer::default() };
    let candidates = question.candidates.iter().map(|limits| Some(beside(&now, &with(limits)?))).collect();
    LimitsAnswer { now: Some(beside(&now, &now)), candidates }
}

fn with_limits(lab: &Lab, pool: &str, limits: Option<PoolLimits>) -> Lab {
    let Some(limits) = limits else { return lab.clone() };
    let mut config = Config::clone(&lab.config);
    config.pools.iter_mut().filter(|own| own.name == pool).for_each(|own| limits.put(own));
    Lab { config: Arc::new(config), ..lab.clone() }
}

fn is_of(config: &Config, pool: &str, backend: &str) -> bool {
    config.pools.iter().filter(|own| own.name == pool).flat_map(|own| &own.backends).any(|own| own.name == backend)
}

/// The requests of the last `period`, or the last [`REQUESTS_MIN`] if these are more.
fn latest(requests: &[RecentRequest], period: Duration) -> &[RecentRequest] {
    let Some(last) = requests.last() else { return requests };
    let from = requests.partition_point(|request| request.at + period < last.at);
    &requests[from.min(requests.len().saturating_sub(REQUESTS_MIN))..]
}

/// The same engines and limits with these requests as traffic.
fn replay(lab: &Lab, requests: &[RecentRequest]) -> Option<Lab> {
    let first = requests.first().filter(|_| requests.len() >= REQUESTS_MIN)?.at;
    let own: Vec<&String> = lab.engines.iter().flat_map(|engine| &engine.sim.names).collect();
    let mut names: Vec<String> = Vec::new();
    let mut list = Vec::new();
    for request in requests {
        let adapter = request.model.as_deref().filter(|name| !own.iter().any(|own| own == name));
        let adapter = adapter.filter(|_| lab.engines.iter().all(|engine| engine.sim.lora)).map(|name| {
            names.iter().position(|known| known == name).unwrap_or_else(|| {
                names.push(name.to_owned());
                names.len() - 1
            }) as u32
        });
        list.push(Item {
            at: Some(request.at.saturating_sub(first).as_secs_f64()),
            class: 0,
            adapter,
            output: request.output.max(1),
            prompt: ItemPrompt::Made { tokens: request.prompt.max(1), blocks: Arc::default(), block: 16 },
        });
    }
    let times: Vec<f64> = list.iter().filter_map(|item| item.at).collect();
    let count = list.len() as u64;
    let classes = vec![sluice_bench::result::record::ClassConfig::default()];
    let items = Items { list, classes, adapters: names.clone(), notes: Vec::new() };
    let workload = Workload {
        model: (*own.first()?).clone(),
        api: Api::Completions,
        source: RequestSource::Items(Arc::new(items)),
        adapters: Adapters { names, choice: sluice_bench::AdapterChoice::Named },
        tokens: PromptTokens::Ids(1_000..8_000),
        users: 0,
        fields: BodyFields { ignore_eos: true, ..BodyFields::default() },
        leaving: 0.0,
        seed: 0,
    };
    let mut config = Config::clone(&lab.config);
    config.tuner.mode = TunerMode::Off;
    config.experiments.clear();
    let traffic = vec![RunPlan::new(workload, Arrival::Recorded(times.into()), Extent::Requests(count))];
    let mut engines = lab.engines.clone();
    engines.iter_mut().for_each(|engine| engine.changes.clear());
    Some(Lab { give_up_after: GIVE_UP, launched: lab.launched, ..Lab::new(config, engines, traffic) })
}

/// The setup without the last backend of a pool; `None` if it is the only one.
fn one_less(lab: &Lab, pool: &str) -> Option<Lab> {
    let mut config = Config::clone(&lab.config);
    let gone =
        config.pools.iter_mut().find(|own| own.name == pool).filter(|own| own.backends.len() > 1)?.backends.pop()?;
    let mut engines = lab.engines.clone();
    if !config.pools.iter().flat_map(|pool| &pool.backends).any(|backend| backend.name == gone.name) {
        engines.retain(|engine| engine.backend != gone.name);
    }
    Some(Lab { config: Arc::new(config), engines, ..lab.clone() })
}

/// Losses of all requests, in batches by time of arrival.
fn batches(lab: &Lab, seed: u64) -> Option<Vec<Batch>> {
    let run = run(lab, seed).ok()?;
    let mut sums: Vec<Batch> = Vec::new();
    let at = |sums: &mut Vec<Batch>, number: usize| {
        if sums.len() <= number {
            sums.resize(number + 1, Batch::default());
        }
    };
    for pool in &run.window.pools {
        for (number, batch) in pool.batches.iter().enumerate() {
            at(&mut sums, number);
            sums[number].requests += batch.requests;
            sums[number].loss += batch.loss;
            sums[number].missed += batch.missed;
        }
    }
    for record in run.result.requests.iter().filter(|record| !record.is_completed() && !record.is_failed()) {
        let number = (record.sent / BATCH.as_secs_f64()) as usize;
        at(&mut sums, number);
        sums[number].requests += 1.0;
        sums[number].loss += LOSS_UNFINISHED;
        sums[number].missed += 1.0;
    }
    Some(sums)
}

/// The means of `found`, with the standard error of the difference to `now`.
fn beside(now: &[Batch], found: &[Batch]) -> Forecast {
    let total = |batches: &[Batch], of: fn(&Batch) -> f64| batches.iter().map(of).sum::<f64>();
    let requests = total(found, |batch| batch.requests).max(1.0);
    let (loss, missed) = (total(found, |batch| batch.loss) / requests, total(found, |batch| batch.missed));
    let before = total(now, |batch| batch.loss) / total(now, |batch| batch.requests).max(1.0);
    let count = now.len().min(found.len()) as f64;
    let residual = |(one, other): (&Batch, &Batch)| {
        (other.loss - loss * other.requests - one.loss + before * one.requests).powi(2)
    };
    let squares: f64 = now.iter().zip(found).map(residual).sum();
    let error = if count > 1.0 { (squares * count / (count - 1.0)).sqrt() / requests } else { f64::INFINITY };
    Forecast { loss, error, attainment: 1.0 - missed / requests }
}
