//! The rules about one engine: it is silent, down, failing, slow, short of memory or of adapter
//! slots, or behind a slow network. The most specific cause counts.
//!
//! An engine is compared with the other engines of its pool. The values of a metrics page are sums
//! since the engine's start, in seconds or as counts.

use super::facts::{BackendFacts, PageFacts, PoolFacts};
use super::finding::{Cause, Finding};
use super::minute::{Minute, VALUES_MIN};
use sluice_gateway::telemetry::totals::Totals;

/// An engine whose TPOT is certainly this multiple of the others' is slow.
const SLOWER: f64 = 1.5;
/// [`SLOWER`] for an engine of which few requests end, and for the gaps between tokens on the
/// metrics pages, which are compared with the slowest other engine.
const MUCH_SLOWER: f64 = 3.0;
/// Fewest gaps of an engine for this comparison.
const GAPS_MIN: f64 = 100.0;
/// [`SLOWER`] for the pace of running streams.
const SLOWER_RUNNING: f64 = 4.0;
/// Fewest seconds of the streams in all.
const STREAMS_MIN_S: f64 = 15.0;
/// Fewest tokens of the streams.
const TOKENS_MIN: f64 = 16.0;
/// An engine with this many times the others' requests is slow because of them.
const BUSIER: f64 = 1.3;
/// Fewest ended requests that can prove an engine much slower.
const VALUES_FEW: f64 = 4.0;
/// Seconds after which silence is a cause: if the engine's page shows no work, and if there is no
/// page.
const SILENT_S: (f64, f64) = (10.0, 40.0);
/// A network is slow if its delay of first tokens exceeds the delay of other engines or of the past
/// by these seconds, and by this share of the engine's own time.
const WAY: (f64, f64) = (0.03, 0.4);
/// Fewest first tokens in a minute for this comparison.
const WAY_MIN: f64 = 20.0;
const PREEMPTIONS_MIN: f64 = 5.0;
/// An engine fails if this many requests fail in a minute, as this share of all and in this many
/// looks. One look is not enough, because a restart fails requests once.
const FAILS: (f64, f64, usize) = (5.0, 0.3, 3);

pub(super) fn of(minute: &Minute<'_>, backend: &BackendFacts) -> Option<Finding> {
    silence(minute, backend).or_else(|| failures(minute, backend)).or_else(|| {
        let rules = [memory, adapters, pace, gaps, running, way];
        rules.iter().filter(|_| backend.serves).find_map(|rule| rule(minute, backend))
    })
}

fn silence(minute: &Minute<'_>, backend: &BackendFacts) -> Option<Finding> {
    let silent = backend.silent?.as_secs_f64();
    let (pool, name) = (&minute.pool.name, &*backend.name);
    // During a long prompt or a response that is not a stream, an engine sends nothing either.
    let page_before = minute.looks.get(1).and_then(|look| look.backend(name)?.engine);
    let bound = match (page_before, backend.engine) {
        (Some(before), Some(now)) if now.progress != before.progress => return None,
        (Some(_), Some(_)) => SILENT_S.0,
        _ => SILENT_S.1,
    };
    if silent < bound {
        return None;
    }
    let sentence = format!("Engine {name} of pool {pool} has sent nothing for {silent:.0} s, with requests in flight.");
    let evidence = format!("{} requests in flight", backend.in_flight);
    let advice = "Look at the engine's log (sluice backend logs); restart it if it hangs.";
    Some(minute.finding(Cause::SilentEngine, name, sentence, evidence, advice))
}

fn failures(minute: &Minute<'_>, backend: &BackendFacts) -> Option<Finding> {
    if backend.is_put_aside {
        return None;
    }
    let (pool, name) = (&minute.pool.name, &*backend.name);
    let own = minute.of_backend(backend);
    let share = own.failed / own.ended.max(own.failed);
    let others = others(minute, backend);
    let in_look = |looks: &&[&PoolFacts]| {
        let failed = |look: &PoolFacts| look.backend(name).map(|own| own.totals.failed);
        looks.iter().map(|look| failed(look)).reduce(|to, from| Some(to? - from?)).flatten() > Some(0.0)
    };
    let persists = minute.looks.windows(2).take(minute.of_minute - 1).filter(in_look).count() >= FAILS.2;
    let fails =
        persists && own.failed >= FAILS.0 && share >= FAILS.1 && others.failed < 0.5 * share * others.ended.max(1.0);
    let sentence = if !backend.serves {
        format!("Engine {name} of pool {pool} is {} and gets no requests.", backend.state)
    } else if fails {
        format!("Engine {name} of pool {pool} fails requests.")
    } else {
        return None;
    };
    let evidence = format!("{:.0} requests failed there in the last minute", own.failed);
    let advice = "sluice status has the reason; look at the engine's log.";
    Some(minute.finding(Cause::EngineDown, name, sentence, evidence, advice))
}

fn others(minute: &Minute<'_>, backend: &BackendFacts) -> Totals {
    let others = minute.pool.backends.iter().filter(|other| other.name != backend.name && other.serves);
    others.fold(Totals::default(), |sum, other| sum.and(&minute.of_backend(other)))
}

fn memory(minute: &Minute<'_>, backend: &BackendFacts) -> Option<Finding> {
    let (before, now) = minute.engine_pair(backend)?;
    let preemptions = now.preemptions - before.preemptions;
    if preemptions < PREEMPTIONS_MIN {
        return None;
    }
    let name = &*backend.name;
    let sentence = format!(
        "Engine {name} of pool {} interrupts requests, because its KV cache is full, and computes them again later.",
        minute.pool.name
    );
    let evidence =
        format!("{preemptions:.0} preemptions in a minute, {:.0} % of the KV cache in use", now.kv_usage * 100.0);
    let advice = "Give the engine more KV cache or lower slots; with tokens = \"auto\" the gateway admits less.";
    Some(minute.finding(Cause::KvCacheFull, name, sentence, evidence, advice))
}

/// Whether requests wait for an adapter slot.
fn defers(engine: &PageFacts) -> bool {
    let exceeds = |(used, slots)| used > slots && engine.waiting > 0.0;
    engine.adapters.is_some_and(|adapters| engine.deferred > 0.0 || exceeds(adapters))
}

fn adapters(minute: &Minute<'_>, backend: &BackendFacts) -> Option<Finding> {
    let name = &*backend.name;
    let now = backend.engine.filter(defers)?;
    let (_, slots) = now.adapters?;
    if minute.share(|pool| pool.backend(name).and_then(|own| own.engine).is_some_and(|own| defers(&own))) < 0.5 {
        return None;
    }
    let sentence = format!(
        "Requests of engine {name} in pool {} wait for an adapter slot: a step has {slots} (--max-loras).",
        minute.pool.name
    );
    let evidence = format!("{:.0} requests run, {:.0} wait", now.running, now.waiting.max(now.deferred));
    let advice = "Raise --max-loras, or spread the adapters over pools.";
    Some(minute.finding(Cause::AdaptersWait, name, sentence, evidence, advice))
}

fn pace(minute: &Minute<'_>, backend: &BackendFacts) -> Option<Finding> {
    let (own, others) = (minute.of_backend(backend), others(minute, backend));
    let serving = minute.pool.backends.iter().filter(|own| own.serves).count();
    let is_busier = own.ended * serving.saturating_sub(1) as f64 > BUSIER * others.ended;
    let (own, others) = (own.tpot, others.tpot);
    let bound = if own.count() >= VALUES_MIN { SLOWER } else { MUCH_SLOWER };
    let enough = own.count() >= VALUES_FEW && others.count() >= VALUES_MIN;
    // Requests that waited for an adapter end minutes later.
    let deferred =
        minute.looks.iter().filter_map(|look| look.backend(&backend.name)?.engine).any(|engine| defers(&engine));
    if !enough || deferred || is_busier || own.surely_above(&others) < bound {
        return None;
    }
    let requests = format!("{:.0} requests in a minute", own.count());
    Some(slow(minute, backend, (own.mean(), others.mean()), &requests))
}

/// Compares the gaps between tokens of running requests, because few requests of a very slow engine
/// end.
fn gaps(minute: &Minute<'_>, backend: &BackendFacts) -> Option<Finding> {
    let mean = |backend: &BackendFacts| {
        let (before, now) = minute.engine_pair(backend)?;
        let (seconds, number) = (now.itl.0 - before.itl.0, now.itl.1 - before.itl.1);
        (number >= GAPS_MIN).then(|| seconds / number)
    };
    let others = minute.pool.backends.iter().filter(|other| other.name != backend.name && other.serves);
    let (own, others) = (mean(backend)?, others.filter_map(mean).reduce(f64::max)?);
    let basis = format!("{:.0} requests run", backend.in_flight);
    (own >= MUCH_SLOWER * others).then(|| slow(minute, backend, (own, others), &basis))
}

/// Compares the pace of running streams by the gateway's clock, because an engine may misjudge its
/// own time.
fn running(minute: &Minute<'_>, backend: &BackendFacts) -> Option<Finding> {
    let ended = others(minute, backend).tpot;
    let own = minute.decoding(backend)?;
    if ended.count() < VALUES_MIN || own.tokens < TOKENS_MIN || own.seconds < STREAMS_MIN_S {
        return None;
    }
    let others = minute.pool.backends.iter().filter(|other| other.name != backend.name && other.serves);
    let others = others.filter_map(|other| minute.decoding(other)).filter(|other| other.tokens >= TOKENS_MIN);
    let others = others.map(|other| other.seconds / other.tokens).fold(ended.mean(), f64::max);
    // Streams get no tokens while the engine computes prompts.
    let prompts = |own: &BackendFacts| minute.engine_pair(own).map(|(before, now)| now.tokens[0] - before.tokens[0]);
    let most = minute.pool.backends.iter().filter(|other| other.name != backend.name).filter_map(prompts);
    let computes_more = prompts(backend).zip(most.reduce(f64::max)).is_some_and(|(own, most)| own > most);
    let pace = own.seconds / own.tokens;
    let basis = format!("streams of {:.0} s in all", own.seconds);
    (!computes_more && pace >= SLOWER_RUNNING * others).then(|| slow(minute, backend, (pace, others), &basis))
}

fn slow(minute: &Minute<'_>, backend: &BackendFacts, (own, others): (f64, f64), basis: &str) -> Finding {
    let (name, factor) = (&*backend.name, own / others);
    let sentence = format!("Engine {name} of pool {} is {factor:.1} times as slow as the others.", minute.pool.name);
    let evidence = format!("{:.1} ms per output token, {:.1} ms at the others; {basis}", own * 1e3, others * 1e3);
    let advice = "Compare clock, temperature and neighbours of its GPU (nvidia-smi); drain it (sluice backend drain) until it is mended.";
    minute.finding(Cause::SlowEngine, name, sentence, evidence, advice)
}

/// Mean seconds to first tokens between two moments, and their number: as the gateway sees them,
/// and as the engine does.
fn ways(from: &PoolFacts, to: &PoolFacts, name: &str) -> Option<[(f64, f64); 2]> {
    let (from, to) = (from.backend(name)?, to.backend(name)?);
    let (before, now) = (from.engine?, to.engine?);
    let recent = to.totals.since(&from.totals);
    let (sum, count) = (now.ttft.0 - before.ttft.0, now.ttft.1 - before.ttft.1);
    let seen = (recent.mean_engine_ttft() + recent.connect / recent.sent.max(1.0), recent.engine_ttft.1);
    (now.progress >= before.progress && count > 0.0).then(|| [seen, (sum / count, count)])
}

fn ways_of_many(from: &PoolFacts, to: &PoolFacts, name: &str) -> Option<(f64, f64)> {
    let [seen, engine] = ways(from, to, name)?;
    (seen.1.min(engine.1) >= WAY_MIN).then_some((seen.0, engine.0))
}

fn way(minute: &Minute<'_>, backend: &BackendFacts) -> Option<Finding> {
    let name = &*backend.name;
    // Requests of an engine that was silent or down end minutes later.
    let was_well = |own: &BackendFacts| own.serves && own.silent.is_none_or(|silent| silent.as_secs_f64() < SILENT_S.0);
    if !minute.looks.iter().filter_map(|look| look.backend(name)).all(was_well) {
        return None;
    }
    let (seen, own) = ways_of_many(minute.before, minute.pool, name)?;
    // The first token of a request that ends now may be minutes old.
    let minutes = || minute.looks.iter().step_by((minute.of_minute - 1).max(1));
    let earlier = minutes().zip(minutes().skip(1)).filter_map(|(to, from)| ways(from, to, name));
    let engine = earlier.fold(own, |most, [_, (engine, _)]| most.max(engine));
    // A network that is equally slow to all engines is no incident.
    let others = minute.pool.backends.iter().filter(|other| *other.name != *name && other.serves);
    let others = others.filter_map(|other| ways_of_many(minute.before, minute.pool, &other.name));
    let usual = others.map(|(seen, engine)| seen - engine).min_by(f64::total_cmp);
    let past = || {
        let past = minute.past?;
        ways_of_many(past.first.pool(&minute.pool.name)?, past.last.pool(&minute.pool.name)?, name)
    };
    let past = || past().map(|(seen, engine)| seen - engine);
    let late = seen - engine - usual.or_else(past)?.max(0.0);
    if late < WAY.0 || late < WAY.1 * engine {
        return None;
    }
    let sentence =
        format!("First tokens of engine {name} in pool {} are delayed on the way to the gateway.", minute.pool.name);
    let evidence = format!("first token after {:.0} ms at the gateway, {:.0} ms at the engine", seen * 1e3, own * 1e3);
    let advice =
        "Check the network between gateway and engine, proxies in between, and the CPU of the engine's API server.";
    Some(minute.finding(Cause::SlowNetwork, name, sentence, evidence, advice))
}
