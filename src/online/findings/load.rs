//! The rules about the load of a pool: a busy key, a burst, longer prompts, few slots, a pool at
//! its limit, all engines slower than before, and wrong estimates.
//!
//! Rates are requests a second, lengths tokens, times seconds. Except for estimates, a rule needs
//! requests that wait or late first tokens. The first rule that holds, in the order of [`of`],
//! gives the finding.

use super::facts::{BackendFacts, PoolFacts};
use super::finding::{Cause, Finding};
use super::minute::{Compared, Minute, ROOM, VALUES_MIN};
use sluice_gateway::telemetry::totals::{Moments, Totals};

/// Share of a pool's work above which a key is busy.
const BUSY_SHARE: f64 = 0.5;
/// Growth of a key's share from which it explains a burst.
const BUSIER: f64 = 1.2;
/// From this share on, a key whose share has not grown is busy if other keys' requests wait.
const USUAL_SHARE: f64 = 0.7;
/// From this mean time in the queue on, requests of other keys wait.
const OTHERS_WAIT_S: f64 = 0.05;
/// Factor from which the rate of requests has risen.
const RISEN: f64 = 1.6;
/// Factor from which prompts have become longer.
const LONGER: f64 = 1.3;
/// Factor from which all engines of a pool are certainly slow.
const ALL_SLOWER: f64 = 2.5;
/// An engine is full from this share of its KV cache or of its slots on.
const FULL: f64 = 0.9;
/// Ratio of estimated to real lengths, or its inverse, from which estimates are off.
const OFF: f64 = 1.3;
/// With fewer requests in a minute, no rule about the load of a pool is applied.
const REQUESTS_MIN: f64 = 20.0;

/// Finds the cause in a pool's load, and wrong estimates. `is_explained`: a cause at an engine
/// explains why requests wait, but not a change of the load.
pub(super) fn of(minute: &Minute<'_>, compared: &Compared<'_>, is_explained: bool, found: &mut Vec<Finding>) {
    found.extend(estimates(minute));
    // Without an engine, requests wait for one to start, wake or come back.
    let has_engine = serving(minute.pool).next().is_some();
    if !has_engine || minute.recent.ended + minute.pool.queue < REQUESTS_MIN {
        return;
    }
    let has_symptom = minute.waits() || minute.is_late();
    let busy = busy_key(minute, compared).filter(|_| has_symptom);
    let (grown, usual) = if busy.as_ref().is_some_and(|(_, grown)| *grown) { (busy, None) } else { (None, busy) };
    let change = grown.map(|(finding, _)| finding).or_else(|| longer(minute)).or_else(|| burst(minute));
    let state = || {
        let usual = || usual.filter(|_| minute.waits()).map(|(finding, _)| finding);
        slower(minute).or_else(|| slots(minute)).or_else(usual).or_else(|| limit(minute))
    };
    found.extend(change.or_else(|| if is_explained || !has_symptom { None } else { state() }));
}

/// A key with most of the tokens of the last minute, and whether it explains a change of the load.
/// If not, it counts only if requests of other keys wait.
fn busy_key(minute: &Minute<'_>, compared: &Compared<'_>) -> Option<(Finding, bool)> {
    let (pool, now, before) = (minute.pool, compared.now, compared.before);
    // Only a fair pool knows which keys use it. Elsewhere all keys count.
    let is_of_pool = |key: &str| pool.keys.is_empty() || pool.keys.iter().any(|(own, ..)| **own == *key);
    let names: Vec<&str> = now.keys.iter().map(|(key, _)| &**key).filter(|key| is_of_pool(key)).collect();
    let recent: Vec<(f64, f64)> = names.iter().map(|key| now.arrived(before, key)).collect();
    let share_of = |all: &[(f64, f64)], index: usize| all[index].1 / all.iter().map(|(_, tokens)| tokens).sum::<f64>();
    let index = (0..names.len()).max_by(|a, b| recent[*a].1.total_cmp(&recent[*b].1))?;
    let (key, requests, share) = (names[index], recent[index].0, share_of(&recent, index));
    let active = recent.iter().filter(|(_, tokens)| *tokens > 0.0).count();
    if active < 2 || share <= BUSY_SHARE {
        return None;
    }
    // If the key does not send more, longer prompts or answers explain more than the key.
    let has_grown = minute.past.is_some_and(|past| {
        let keys: Vec<(f64, f64)> = names.iter().map(|key| past.last.arrived(past.first, key)).collect();
        let sends_more = surely(requests) / minute.span >= BUSIER * keys[index].0 / past.seconds;
        // If the other keys send more as well, this key is part of a burst.
        let others = |all: &[(f64, f64)]| all.iter().map(|(requests, _)| requests).sum::<f64>() - all[index].0;
        let is_burst = surely(others(&recent)) / minute.span >= RISEN * others(&keys) / past.seconds;
        share >= BUSIER * share_of(&keys, index) && sends_more && !is_burst
    });
    let others = names.iter().filter(|other| **other != key).map(|other| now.key(other).since(&before.key(other)));
    let wait = others.fold(Totals::default(), |sum, other| sum.and(&other)).mean_wait();
    if !has_grown && (wait < OTHERS_WAIT_S || share < USUAL_SHARE) {
        return None;
    }
    let percent = share * 100.0;
    let sentence = format!("Key {key} has {percent:.0} % of the work of pool {} while requests wait.", pool.name);
    let evidence = format!(
        "{percent:.0} % of the tokens of the last minute, {requests:.0} new requests; {active} keys are active, others wait {wait:.1} s",
    );
    let advice =
        "Ask its owner, limit it (auth.keys: in_flight, tokens_per_minute), or let keys take turns (queue.fair).";
    let finding = minute.finding(Cause::BusyKey, key, sentence, evidence, advice);
    Some((Finding { is_change: has_grown, ..finding }, has_grown))
}

fn symptom(minute: &Minute<'_>) -> String {
    let in_engines = minute.pool.backends.iter().filter_map(|backend| backend.engine).map(|engine| engine.waiting);
    format!(
        "{:.0} requests wait ({:.1} s in the mean) and {:.0} in engines; first tokens after {:.1} s",
        minute.pool.queue,
        minute.recent.mean_wait(),
        in_engines.sum::<f64>(),
        minute.recent.mean_engine_ttft(),
    )
}

fn longer(minute: &Minute<'_>) -> Option<Finding> {
    if !minute.waits() && !minute.is_late() && !minute.is_late_for_long() {
        return None;
    }
    let past = minute.past?.totals;
    // Long prompts also count separately, because few can have most of the tokens.
    let pairs = [(minute.recent.prompts, past.prompts), (minute.recent.long_prompts, past.long_prompts)];
    let is_longer = |(now, then): &(Moments, Moments)| {
        now.count().min(then.count()) >= VALUES_MIN && now.surely_above(then) >= LONGER
    };
    let (now, then) = pairs.into_iter().find(is_longer).map(|(now, then)| (now.mean(), then.mean()))?;
    let sentence = format!("Prompts of pool {} are {:.1} times as long as before.", minute.pool.name, now / then);
    let evidence = format!("typically {now:.0} tokens, before {then:.0}; {}", symptom(minute));
    let advice =
        "Find the client that sends them (sluice diagnose, By key); give long prompts permits (long_prefix) or a pool.";
    Some(minute.finding(Cause::LongerPrompts, "", sentence, evidence, advice))
}

/// A number that the expected arrivals certainly exceed: the seen arrivals less four standard
/// deviations.
fn surely(arrivals: f64) -> f64 {
    arrivals - 4.0 * arrivals.max(0.0).sqrt()
}

/// The rates of requests in the last minute and before, if the rate has certainly risen.
fn rise(minute: &Minute<'_>) -> Option<(f64, f64)> {
    let past = minute.past?;
    let open = |pool: &PoolFacts| pool.queue + pool.backends.iter().map(|backend| backend.in_flight).sum::<f64>();
    let requests = minute.recent.ended + open(minute.pool) - open(minute.before);
    let past_rate = past.totals.ended / past.seconds;
    (surely(requests) / minute.span >= RISEN * past_rate).then_some((requests / minute.span, past_rate))
}

fn burst(minute: &Minute<'_>) -> Option<Finding> {
    if !minute.waits() && !minute.is_late() {
        return None;
    }
    let (rate, past) = rise(minute)?;
    let name = &minute.pool.name;
    let sentence = match past > 0.0 {
        true => format!("Pool {name} gets {:.1} times as many requests as before.", rate / past),
        false => format!("Pool {name} gets requests, and got none before."),
    };
    let evidence = format!("{rate:.1} requests a second, before {past:.1}; {}", symptom(minute));
    let advice =
        "If it stays, add engines (pool.autoscale computes how many); shed early with a shorter queue.timeout.";
    Some(minute.finding(Cause::Burst, "", sentence, evidence, advice))
}

fn slower(minute: &Minute<'_>) -> Option<Finding> {
    let (now, then) = (minute.recent.tpot, minute.past?.totals.tpot);
    if now.count().min(then.count()) < VALUES_MIN || now.surely_above(&then) < ALL_SLOWER {
        return None;
    }
    let (name, factor) = (&minute.pool.name, now.mean() / then.mean());
    let sentence = format!("The engines of pool {name} are {factor:.1} times as slow as before.");
    let (now, then) = (now.mean() * 1e3, then.mean() * 1e3);
    let evidence = format!("{now:.1} ms per output token, before {then:.1} ms; {}", symptom(minute));
    let advice = "Look for a change of all engines: flags, version, driver, power, other programs on the GPUs.";
    Some(minute.finding(Cause::SlowEngine, "", sentence, evidence, advice))
}

fn serving(pool: &PoolFacts) -> impl Iterator<Item = &BackendFacts> + Clone {
    pool.backends.iter().filter(|backend| backend.serves)
}

fn slots_are_full(pool: &PoolFacts) -> bool {
    let mut serving = serving(pool).peekable();
    serving.peek().is_some() && serving.all(|backend| backend.in_flight >= FULL * backend.slots)
}

fn slots(minute: &Minute<'_>) -> Option<Finding> {
    let pool = minute.pool;
    let have_room = |pool: &PoolFacts| pool.all_engines(|engine| engine.waiting <= 0.0 && engine.kv_usage < ROOM);
    let waits = |pool: &PoolFacts| pool.queue > 0.0 && slots_are_full(pool) && have_room(pool);
    if !waits(pool) || minute.share(waits) < 0.5 {
        return None;
    }
    let slots: f64 = serving(pool).map(|backend| backend.slots).sum();
    let kv =
        serving(pool).filter_map(|backend| backend.engine).fold(0.0, |most: f64, engine| most.max(engine.kv_usage));
    let sentence = format!("Requests of pool {} wait for slots, while its engines have room.", pool.name);
    let evidence = format!("{slots:.0} slots in use, at most {:.0} % of a KV cache; {}", kv * 100.0, symptom(minute));
    let advice = "Raise slots of the pool, or let the tuner find it (tuner.mode).";
    Some(minute.finding(Cause::SlotsTooSmall, "", sentence, evidence, advice))
}

fn limit(minute: &Minute<'_>) -> Option<Finding> {
    let pool = minute.pool;
    let is_full = |pool: &PoolFacts| {
        slots_are_full(pool) || pool.all_engines(|engine| engine.waiting > 0.0 || engine.kv_usage >= FULL)
    };
    if !minute.waits() || !is_full(pool) || minute.share(is_full) < 0.5 {
        return None;
    }
    let used: f64 = serving(pool).map(|backend| backend.in_flight).sum();
    let slots: f64 = serving(pool).map(|backend| backend.slots).sum();
    let sentence = format!("Pool {} is at its limit: requests wait for its engines.", pool.name);
    let rate = minute.recent.ended / minute.span;
    let evidence = format!("{used:.0} of {slots:.0} slots in use at {rate:.1} requests a second; {}", symptom(minute));
    let advice = "Add engines, or tune their flags (sluice tune) for this load.";
    Some(minute.finding(Cause::NearLimit, "", sentence, evidence, advice))
}

fn estimates(minute: &Minute<'_>) -> Option<Finding> {
    let estimates = minute.recent.estimates;
    let factor = estimates.mean();
    if estimates.count() < REQUESTS_MIN || !(factor >= OFF || factor <= 1.0 / OFF) {
        return None;
    }
    let sentence =
        format!("Estimated lengths of prompts in pool {} are {factor:.2} times the engine's counts.", minute.pool.name);
    let evidence = format!("as {:.0} equal requests in a minute show", estimates.count());
    let advice = "Set tokenizer of the model, so that prompts near a limit are counted exactly.";
    Some(minute.finding(Cause::EstimatesOff, "", sentence, evidence, advice))
}
