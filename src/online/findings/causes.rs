//! All causes seen at one moment. [`engines`] has the rules about one engine, and [`load`] the
//! rules about a pool's load. Here are the rules about different settings in a pool.
//!
//! A rule compares the last minute with the other engines of the pool, or with the hour before. It
//! needs a certain difference and, where a difference can be harmless, a symptom ([`Minute`]).

use super::facts::{BackendFacts, PageFacts, PoolFacts};
use super::finding::{Cause, Finding};
use super::minute::{Compared, Minute, ROOM, VALUES_MIN};
use super::{engines, load};
use sluice_core::vllm::metrics::STEP_TOKENS;

/// Upper bound on the probability that a long prompt has a large step.
const SURE_STEP: f64 = 0.95;
/// ln of the probability below which an engine without large steps is no coincidence.
const LN_CHANCE: f64 = -12.0;

pub(super) fn of(compared: &Compared<'_>) -> Vec<Finding> {
    let mut found = Vec::new();
    for pool in &compared.now.pools {
        let Some(minute) = Minute::new(compared, pool) else { continue };
        let of_engines: Vec<Finding> =
            pool.backends.iter().filter_map(|backend| engines::of(&minute, backend)).collect();
        let is_explained = !of_engines.is_empty();
        found.extend(of_engines);
        flags(&minute, &mut found);
        load::of(&minute, compared, is_explained, &mut found);
    }
    found
}

/// Settings that differ, as reported by engines, as started by the gateway, or as seen in the
/// engines' behaviour.
fn flags(minute: &Minute<'_>, found: &mut Vec<Finding>) {
    let pool = minute.pool;
    let difference = pool
        .differences
        .clone()
        .or_else(|| started(pool))
        .or_else(|| caches(pool))
        .or_else(|| steps(minute))
        .or_else(|| sequences(minute));
    if let Some(difference) = difference {
        let sentence = format!("The engines of pool {} have different settings.", pool.name);
        let advice = "Start them with the same flags, or give them to different pools.";
        found.push(minute.finding(Cause::FlagsDiffer, "", sentence, difference, advice));
    }
}

fn started(pool: &PoolFacts) -> Option<String> {
    let mut known = pool.backends.iter().filter(|backend| !backend.flags.is_empty());
    let first = known.next()?;
    // Engines on one host have different ports.
    let is_port = |flag: &str| flag.split('=').next().is_some_and(|name| name == "port" || name.ends_with("-port"));
    let lacks = |flag: &String, other: &BackendFacts| !is_port(flag) && !other.flags.contains(flag);
    let differ = |one: &BackendFacts, other: &BackendFacts| one.flags.iter().any(|flag| lacks(flag, other));
    let other = known.find(|other| differ(first, other) || differ(other, first))?;
    let only = |own: &BackendFacts, other: &BackendFacts| {
        let own: Vec<&str> = own.flags.iter().filter(|flag| lacks(flag, other)).map(String::as_str).collect();
        if own.is_empty() { "nothing else".to_owned() } else { own.join(" ") }
    };
    Some(format!("{} has {}; {} has {}", first.name, only(first, other), other.name, only(other, first)))
}

/// KV caches whose sizes differ by more than a tenth.
fn caches(pool: &PoolFacts) -> Option<String> {
    let sizes = pool.backends.iter().filter_map(|backend| Some((&backend.name, backend.engine?.cache_tokens?)));
    let (least, most) = (sizes.clone().min_by_key(|(_, size)| *size)?, sizes.max_by_key(|(_, size)| *size)?);
    let differ = most.1 as f64 > 1.1 * least.1 as f64;
    differ.then(|| format!("the KV cache of {} holds {} tokens, of {} {}", least.0, least.1, most.0, most.1))
}

/// An engine that computes long prompts only in pieces, while another takes more in a step. Large
/// steps of the engine before that may come from many requests at once.
fn steps(minute: &Minute<'_>) -> Option<String> {
    let engines: Vec<(&str, PageFacts)> =
        minute.pool.backends.iter().filter_map(|backend| Some((&*backend.name, backend.engine?))).collect();
    STEP_TOKENS.iter().enumerate().find_map(|(index, tokens)| {
        let large = |engine: &PageFacts| engine.large_steps[index] / engine.large_prompts[index].max(1.0);
        let (widest, most) = engines.iter().max_by(|a, b| large(&a.1).total_cmp(&large(&b.1)))?;
        let chance = (1.0 - large(most).min(SURE_STEP)).ln();
        engines.iter().filter(|_| most.large_steps[index] >= VALUES_MIN).find_map(|(name, engine)| {
            let pages = minute.looks.iter().map_while(|look| look.backend(name)?.engine);
            let since = pages.filter(|page| page.large_steps[index] == engine.large_steps[index]);
            // A prompt is counted when it ends, but the steps may be earlier.
            let begun = since.map(|page| engine.large_prompts[index] - page.large_prompts[index] - page.running);
            let prompts = begun.fold(0.0, f64::max);
            // With the other engine's flags, this would be a rare coincidence.
            (prompts * chance <= LN_CHANCE).then(|| {
                format!(
                    "{name} computes at most {tokens} tokens in a step, in {prompts:.0} longer prompts; {widest} computed more in {:.0} steps",
                    most.large_steps[index]
                )
            })
        })
    })
}

/// An engine in which requests always wait, although it runs far fewer than another.
fn sequences(minute: &Minute<'_>) -> Option<String> {
    let looks = || minute.looks.iter().take(minute.of_minute);
    let most_of = |name: &str| {
        let engines = looks().filter_map(|look| look.backend(name)?.engine);
        engines.fold(0.0, |most: f64, engine| most.max(engine.running))
    };
    let backends = &minute.pool.backends;
    let is_short = |engine: &PageFacts| engine.waiting > 0.0 && engine.deferred <= 0.0 && engine.kv_usage < ROOM;
    let (widest, most) =
        backends.iter().map(|backend| (&backend.name, most_of(&backend.name))).max_by(|a, b| a.1.total_cmp(&b.1))?;
    backends.iter().find_map(|backend| {
        let engines: Vec<PageFacts> = looks().filter_map(|look| look.backend(&backend.name)?.engine).collect();
        let queues = engines.len() > 3 && engines.iter().all(is_short);
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
