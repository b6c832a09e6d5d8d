//! The rules by which causes are seen. A rule compares the last minute with the other engines of
//! the pool, or with the hour before, and asks for certainty and for a symptom, because a change
//! without a symptom needs no action.
//!
//! | symptom | bound |
//! |---|---|
//! | requests wait | the queue had requests in half of the looks, or requests were shed |
//! | first tokens are late | mean time at the engines at least [`LATER`] times the time before |

use super::facts::{BackendFacts, EngineFacts, Facts, PoolFacts};
use super::{Cause, Finding};
use sluice_gateway::telemetry::totals::Totals;

/// An engine is slow from this factor on, with certainty.
const SLOWER: f64 = 1.5;
/// Values that a comparison needs at least.
const VALUES_MIN: f64 = 8.0;
/// First tokens are late from this factor on.
const LATER: f64 = 1.5;
/// A silence is a cause from this many seconds on.
const SILENT_S: f64 = 10.0;
/// The way to an engine is slow if the gateway sees first tokens this much later than the engine:
/// seconds, and relative to the engine's own time.
const WAY: (f64, f64) = (0.03, 0.5);
/// Preemptions of an engine in a minute.
const PREEMPTIONS_MIN: f64 = 5.0;
/// Share of a pool's work above which a key is busy.
const BUSY_SHARE: f64 = 0.5;
/// The load has risen from this factor on, and prompts have become longer.
const RISEN: f64 = 1.6;
const LONGER: f64 = 1.4;
/// Use of the KV cache up to which an engine has room.
const ROOM: f64 = 0.7;
/// Estimates are off from this factor on, in either direction.
const OFF: f64 = 1.3;
/// Requests of a minute below which a pool says nothing about its load.
const REQUESTS_MIN: f64 = 20.0;
/// Seconds of earlier facts that a comparison with the past needs.
const PAST_MIN_S: f64 = 60.0;

/// The facts that are compared.
pub(super) struct Compared<'a> {
    pub(super) now: &'a Facts,
    /// The facts a minute ago.
    pub(super) before: &'a Facts,
    /// Seconds between `before` and `now`.
    pub(super) span: f64,
    /// The looks of the last minute.
    pub(super) looks: &'a [&'a Facts],
    /// The earliest facts, and the seconds from there to `before`.
    pub(super) earlier: Option<(&'a Facts, f64)>,
}

/// One pool in the last minute.
struct Minute<'a> {
    pool: &'a PoolFacts,
    before: &'a PoolFacts,
    recent: Totals,
    /// The requests of the hour before, and the seconds that they took.
    past: Option<(Totals, f64)>,
    span: f64,
    /// Share of the looks in which requests waited.
    waiting: f64,
}

impl Minute<'_> {
    fn waits(&self) -> bool {
        self.waiting >= 0.5 || self.recent.shed > 0.0
    }

    fn is_late(&self) -> bool {
        let past = self.past.map_or(f64::NAN, |(past, _)| past.mean_engine_ttft());
        self.recent.mean_engine_ttft() >= LATER * past
    }

    fn finding(&self, cause: Cause, subject: &str, sentence: String, evidence: String, advice: &str) -> Finding {
        Finding {
            cause,
            pool: self.pool.name.to_string(),
            subject: subject.to_owned(),
            sentence,
            evidence,
            advice: advice.to_owned(),
            since_seconds: 0.0,
        }
    }

    fn of_backend(&self, backend: &BackendFacts) -> Totals {
        let before = self.before.backend(&backend.name).map(|before| before.totals).unwrap_or_default();
        backend.totals.since(&before)
    }
}

/// Every cause that is seen now.
pub(super) fn of(compared: &Compared<'_>) -> Vec<Finding> {
    let mut found = Vec::new();
    for pool in &compared.now.pools {
        let Some(before) = compared.before.pool(&pool.name) else { continue };
        let past = compared
            .earlier
            .filter(|(_, seconds)| *seconds >= PAST_MIN_S)
            .and_then(|(first, seconds)| Some((before.totals.since(&first.pool(&pool.name)?.totals), seconds)));
        let queues = || compared.looks.iter().filter_map(|facts| facts.pool(&pool.name)).map(|pool| pool.queue);
        let waiting = queues().chain([pool.queue]).filter(|queue| *queue > 0.0).count() as f64;
        let minute = Minute {
            pool,
            before,
            recent: pool.totals.since(&before.totals),
            past,
            span: compared.span,
            waiting: waiting / (queues().count() + 1) as f64,
        };
        engines(&minute, &mut found);
        flags(&minute, compared, &mut found);
        let is_busy = busy_key(&minute, compared, &mut found);
        load(&minute, is_busy, &mut found);
        estimates(&minute, &mut found);
    }
    found
}

fn engines(minute: &Minute<'_>, found: &mut Vec<Finding>) {
    for backend in &minute.pool.backends {
        if let Some(cause) = of_engine(minute, backend) {
            found.push(cause);
        }
    }
}

/// The most specific cause at one backend.
fn of_engine(minute: &Minute<'_>, backend: &BackendFacts) -> Option<Finding> {
    let (pool, name) = (&minute.pool.name, &*backend.name);
    if let Some(silent) = backend.silent.map(|silent| silent.as_secs_f64()).filter(|silent| *silent >= SILENT_S) {
        let sentence =
            format!("Engine {name} of pool {pool} has sent nothing for {silent:.0} s, with requests in flight.");
        let evidence = format!("{} requests in flight", backend.in_flight);
        let advice = "Look at the engine's log (sluice backend logs); restart it if it hangs.";
        return Some(minute.finding(Cause::SilentEngine, name, sentence, evidence, advice));
    }
    if !backend.serves {
        if backend.is_put_aside {
            return None;
        }
        let sentence = format!("Engine {name} of pool {pool} is {} and gets no requests.", backend.state);
        let failed = minute.of_backend(backend).failed;
        let evidence = format!("{failed:.0} requests failed there in the last minute");
        let advice = "sluice status has the reason; look at the engine's log.";
        return Some(minute.finding(Cause::EngineDown, name, sentence, evidence, advice));
    }
    memory(minute, backend)
        .or_else(|| adapters(minute, backend))
        .or_else(|| pace(minute, backend))
        .or_else(|| way(minute, backend))
}

fn engine_pair<'a>(minute: &Minute<'a>, backend: &BackendFacts) -> Option<(EngineFacts, EngineFacts)> {
    let before = minute.before.backend(&backend.name)?.engine?;
    // Sums that fell belong to an engine that has started again.
    backend.engine.filter(|now| now.ttft.1 >= before.ttft.1).map(|now| (before, now))
}

fn memory(minute: &Minute<'_>, backend: &BackendFacts) -> Option<Finding> {
    let (before, now) = engine_pair(minute, backend)?;
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
    let advice = "Set tokens of the pool to the size of the KV cache, or lower slots.";
    Some(minute.finding(Cause::KvCacheFull, name, sentence, evidence, advice))
}

fn adapters(minute: &Minute<'_>, backend: &BackendFacts) -> Option<Finding> {
    let (before, now) = engine_pair(minute, backend)?;
    let (used, slots) = now.adapters?;
    if used <= slots || now.waiting.max(now.deferred) <= 0.0 || before.waiting.max(before.deferred) <= 0.0 {
        return None;
    }
    let name = &*backend.name;
    let sentence = format!(
        "Requests of engine {name} in pool {} wait for an adapter slot: {used} adapters share {slots} slots.",
        minute.pool.name
    );
    let evidence = format!("{:.0} requests run, {:.0} wait", now.running, now.waiting.max(now.deferred));
    let advice = "Raise --max-loras, or spread the adapters over pools.";
    Some(minute.finding(Cause::AdaptersWait, name, sentence, evidence, advice))
}

fn pace(minute: &Minute<'_>, backend: &BackendFacts) -> Option<Finding> {
    let own = minute.of_backend(backend).tpot;
    let others = minute.pool.backends.iter().filter(|other| other.name != backend.name && other.serves);
    let others = others.fold(Totals::default(), |sum, other| sum.and(&minute.of_backend(other))).tpot;
    let enough = own.count() >= VALUES_MIN && others.count() >= VALUES_MIN;
    if !enough || own.surely_above(&others) < SLOWER {
        return None;
    }
    let name = &*backend.name;
    let factor = own.mean() / others.mean();
    let sentence = format!("Engine {name} of pool {} is {factor:.1} times as slow as the others.", minute.pool.name);
    let (own_ms, others_ms) = (own.mean() * 1e3, others.mean() * 1e3);
    let evidence = format!(
        "{own_ms:.1} ms per output token, {others_ms:.1} ms at the others; {:.0} requests in a minute",
        own.count()
    );
    let advice = "Compare clock, temperature and neighbours of its GPU (nvidia-smi); drain it (sluice backend drain) until it is mended.";
    Some(minute.finding(Cause::SlowEngine, name, sentence, evidence, advice))
}

fn way(minute: &Minute<'_>, backend: &BackendFacts) -> Option<Finding> {
    let (before, now) = engine_pair(minute, backend)?;
    let (sum, count) = (now.ttft.0 - before.ttft.0, now.ttft.1 - before.ttft.1);
    let recent = minute.of_backend(backend);
    if count < VALUES_MIN || recent.engine_ttft.1 < VALUES_MIN {
        return None;
    }
    let (engine, seen) = (sum / count, recent.mean_engine_ttft());
    let connect = recent.connect / recent.sent.max(1.0);
    let late = seen + connect - engine;
    if late < WAY.0 || late < WAY.1 * engine {
        return None;
    }
    let name = &*backend.name;
    let sentence =
        format!("First tokens of engine {name} in pool {} are delayed on the way to the gateway.", minute.pool.name);
    let evidence = format!(
        "first token after {:.0} ms at the gateway, {:.0} ms at the engine; {:.1} ms to connect",
        seen * 1e3,
        engine * 1e3,
        connect * 1e3
    );
    let advice =
        "Check the network between gateway and engine, proxies in between, and the CPU of the engine's API server.";
    Some(minute.finding(Cause::SlowNetwork, name, sentence, evidence, advice))
}

/// Settings that differ within a pool: as reported, as started, or as the engines behave.
fn flags(minute: &Minute<'_>, compared: &Compared<'_>, found: &mut Vec<Finding>) {
    let pool = minute.pool;
    let difference = pool
        .differences
        .clone()
        .or_else(|| started(pool))
        .or_else(|| caches(pool))
        .or_else(|| sequences(pool, compared));
    if let Some(difference) = difference {
        let sentence = format!("The engines of pool {} have different settings.", pool.name);
        let advice = "Start them with the same flags, or give them to different pools.";
        found.push(minute.finding(Cause::FlagsDiffer, "", sentence, difference, advice));
    }
}

fn started(pool: &PoolFacts) -> Option<String> {
    let mut known = pool.backends.iter().filter(|backend| !backend.flags.is_empty());
    let first = known.next()?;
    let other = known.find(|other| other.flags != first.flags)?;
    let only = |own: &BackendFacts, other: &BackendFacts| {
        let own: Vec<&str> = own.flags.iter().filter(|flag| !other.flags.contains(flag)).map(String::as_str).collect();
        if own.is_empty() { "nothing else".to_owned() } else { own.join(" ") }
    };
    Some(format!("{} has {}; {} has {}", first.name, only(first, other), other.name, only(other, first)))
}

/// Sizes of the KV cache that differ by more than a tenth.
fn caches(pool: &PoolFacts) -> Option<String> {
    let sizes = pool.backends.iter().filter_map(|backend| Some((&backend.name, backend.engine?.cache_tokens?)));
    let (least, most) = (sizes.clone().min_by_key(|(_, size)| *size)?, sizes.max_by_key(|(_, size)| *size)?);
    let differ = most.1 as f64 > 1.1 * least.1 as f64;
    differ.then(|| format!("the KV cache of {} holds {} tokens, of {} {}", least.0, least.1, most.0, most.1))
}

/// An engine that lets requests wait in every look while it runs far fewer than another one.
fn sequences(pool: &PoolFacts, compared: &Compared<'_>) -> Option<String> {
    let looks: Vec<&PoolFacts> =
        compared.looks.iter().filter_map(|facts| facts.pool(&pool.name)).chain([pool]).collect();
    let most_of = |name: &str| {
        let engines = looks.iter().filter_map(|look| look.backend(name)?.engine);
        engines.fold(0.0, |most: f64, engine| most.max(engine.running))
    };
    let (widest, most) = pool
        .backends
        .iter()
        .map(|backend| (&backend.name, most_of(&backend.name)))
        .max_by(|a, b| a.1.total_cmp(&b.1))?;
    pool.backends.iter().find_map(|backend| {
        let engines: Vec<EngineFacts> = looks.iter().filter_map(|look| look.backend(&backend.name)?.engine).collect();
        let queues = engines.len() > 3 && engines.iter().all(|engine| engine.waiting > 0.0 && engine.kv_usage < ROOM);
        let own = most_of(&backend.name);
        let differs = queues && own < 0.6 * most;
        differs.then(|| {
            format!(
                "{} runs at most {own} requests at once while others wait in it; {widest} runs {most}",
                backend.name
            )
        })
    })
}

/// A key with most of the pool's work, while requests wait.
fn busy_key(minute: &Minute<'_>, compared: &Compared<'_>, found: &mut Vec<Finding>) -> bool {
    if !minute.waits() {
        return false;
    }
    let pool = minute.pool;
    let by_work: Vec<(&str, f64)> = pool
        .keys
        .iter()
        .map(|(key, seconds, _)| {
            let before =
                minute.before.keys.iter().find(|(other, ..)| other == key).map_or(0.0, |(_, seconds, _)| *seconds);
            // A key that was idle for a while begins at zero.
            (&**key, if *seconds >= before { seconds - before } else { *seconds })
        })
        .collect();
    let by_tokens = || {
        compared.now.keys.iter().map(|(key, totals)| (&**key, totals.since(&compared.before.key(key)).tokens)).collect()
    };
    let (work, unit): (Vec<(&str, f64)>, _) =
        if by_work.is_empty() { (by_tokens(), "tokens") } else { (by_work, "engine time") };
    let all: f64 = work.iter().map(|(_, work)| work).sum();
    let active = work.iter().filter(|(_, work)| *work > 0.0).count();
    let Some((key, most)) = work.into_iter().max_by(|a, b| a.1.total_cmp(&b.1)) else { return false };
    if active < 2 || most <= BUSY_SHARE * all {
        return false;
    }
    let share = most / all * 100.0;
    let sentence = format!("Key {key} has {share:.0} % of the work of pool {} while requests wait.", pool.name);
    let recent = compared.now.key(key).since(&compared.before.key(key));
    let evidence = format!(
        "{share:.0} % of the {unit} of the last minute, {:.0} requests of {active} keys' {:.0}",
        recent.ended, minute.recent.ended
    );
    let advice =
        "Ask its owner, limit it (auth.keys: in_flight, tokens_per_minute), or let keys take turns (queue.fair).";
    found.push(minute.finding(Cause::BusyKey, key, sentence, evidence, advice));
    true
}

/// Why requests wait, unless one key explains it.
fn load(minute: &Minute<'_>, is_busy: bool, found: &mut Vec<Finding>) {
    if is_busy || !(minute.waits() || minute.is_late()) || minute.recent.ended + minute.pool.queue < REQUESTS_MIN {
        return;
    }
    let pool = minute.pool;
    let open = |pool: &PoolFacts| pool.queue + pool.backends.iter().map(|backend| backend.in_flight).sum::<f64>();
    let rate = (minute.recent.ended + open(pool) - open(minute.before)) / minute.span;
    let wait = minute.recent.mean_wait();
    let symptom = format!("{:.0} requests wait, {wait:.1} s in the mean", pool.queue);
    if let Some((past, _)) = minute.past.filter(|(past, _)| past.prompts.count() >= VALUES_MIN)
        && minute.recent.prompts.surely_above(&past.prompts) >= LONGER
    {
        let (now, then) = (minute.recent.prompts.mean(), past.prompts.mean());
        let sentence = format!("Prompts of pool {} are {:.1} times as long as before.", pool.name, now / then);
        let evidence = format!("typically {now:.0} tokens, before {then:.0}; {symptom}");
        let advice = "Find the client that sends them (sluice diagnose, By key); give long prompts permits (long_prefix) or a pool.";
        found.push(minute.finding(Cause::LongerPrompts, "", sentence, evidence, advice));
        return;
    }
    let past_rate = minute.past.map_or(f64::NAN, |(past, seconds)| past.ended / seconds);
    if rate >= RISEN * past_rate {
        let sentence = format!("Pool {} gets {:.1} times as many requests as before.", pool.name, rate / past_rate);
        let evidence = format!("{rate:.1} requests a second, before {past_rate:.1}; {symptom}");
        let advice =
            "If it stays, add engines (pool.autoscale computes how many); shed early with a shorter queue.timeout.";
        found.push(minute.finding(Cause::Burst, "", sentence, evidence, advice));
        return;
    }
    if !minute.waits() {
        return;
    }
    let serving: Vec<&BackendFacts> = pool.backends.iter().filter(|backend| backend.serves).collect();
    let are_full = !serving.is_empty() && serving.iter().all(|backend| backend.in_flight >= backend.slots);
    let engines: Vec<EngineFacts> = serving.iter().filter_map(|backend| backend.engine).collect();
    let have_room = !engines.is_empty() && engines.iter().all(|engine| engine.waiting <= 0.0 && engine.kv_usage < ROOM);
    let slots: f64 = serving.iter().map(|backend| backend.slots).sum();
    if are_full && have_room {
        let kv = engines.iter().map(|engine| engine.kv_usage).fold(0.0, f64::max) * 100.0;
        let sentence = format!("Requests of pool {} wait for slots, while its engines have room.", pool.name);
        let evidence = format!("all {slots:.0} slots in use, at most {kv:.0} % of a KV cache; {symptom}");
        let advice = "Raise slots of the pool, or let the tuner find it (tuner.mode).";
        found.push(minute.finding(Cause::SlotsTooSmall, "", sentence, evidence, advice));
        return;
    }
    let used: f64 = serving.iter().map(|backend| backend.in_flight).sum();
    let sentence = format!("Pool {} is at its limit: requests wait for its engines.", pool.name);
    let evidence = format!("{used:.0} of {slots:.0} slots in use at {rate:.1} requests a second; {symptom}");
    let advice = "Add engines, or tune their flags (sluice tune) for this load.";
    found.push(minute.finding(Cause::NearLimit, "", sentence, evidence, advice));
}

fn estimates(minute: &Minute<'_>, found: &mut Vec<Finding>) {
    let estimates = minute.recent.estimates;
    let factor = estimates.mean();
    if estimates.count() < REQUESTS_MIN || !(factor >= OFF || factor <= 1.0 / OFF) {
        return;
    }
    let sentence =
        format!("Estimated lengths of prompts in pool {} are {factor:.2} times the engine's counts.", minute.pool.name);
    let evidence = format!("{:.0} requests in a minute", estimates.count());
    let advice = "Set tokenizer of the model, so that prompts near a limit are counted exactly.";
    found.push(minute.finding(Cause::EstimatesOff, "", sentence, evidence, advice));
}
