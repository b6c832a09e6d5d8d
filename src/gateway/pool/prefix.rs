//! Which engines are likely to have the beginning of a prompt in their prefix cache.
//!
//! When a request is granted a backend, the beginnings of the prompt ([`PromptPrefix`]) are noted
//! for that engine. A later request that shares them should find them cached, until the engine has
//! written as many tokens as the KV cache holds (vLLM evicts the least recently used blocks). A
//! beginning that more than [`HOLDERS`] engines have, or that continues in more than that many
//! ways, such as a system prompt, counts as cached on every engine of the pool. A conversation
//! still goes to its engine, because of the part of the prompt that no other conversation shares.
//! Wrong predictions are forgotten: see [`EngineCache::observe`]. Where an engine publishes events
//! about the cache, a beginning may be *linked*: it is kept until an event says that the block is
//! gone (`cache_events.rs`).
//!
//! Bounds: two generations of [`GENERATION`] beginnings for each pool, 17 MB, allocated with the
//! first request. A beginning that is not used while the younger generation fills is forgotten.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};

use smallvec::SmallVec;

use super::policy::Candidate;
use super::request::AdmissionRequest;
use sluice_core::base::{BackendId, hash_two};
use sluice_core::openai::PromptPrefix;

const GENERATION: usize = 65_536;
/// Engines that are remembered for a beginning. If more engines have the beginning, it counts as
/// cached on all.
const HOLDERS: usize = 4;
/// Tokens that an engine is assumed to keep before it reports the size of its KV cache.
const KV_TOKENS: u64 = 262_144;
/// Tokens of a block, the unit in which an engine's writes are counted.
const BLOCK: u64 = 16;
/// The most blocks that an engine may have.
const BLOCKS_MAX: u32 = 1 << 28;
/// Weight of one prediction in the share of predicted tokens that engines had: about the last 20
/// count.
const WEIGHT: f64 = 0.05;

/// The predicted state of one engine's prefix cache.
#[derive(Clone, Copy, Debug)]
pub(super) struct EngineCache {
    /// The layout with which the backend appeared, and how often the cache was emptied since.
    emptied: (u64, u64),
    /// A hash of `emptied`, which identifies the cache. Two caches of one backend id, such as the
    /// caches before and after a restart, have the same hash once in 32,768 times.
    cache: u16,
    /// Blocks written into this cache; wraps around.
    written: u32,
    /// Blocks that the cache holds; 0 where it is off.
    blocks: u32,
    /// The share of predicted tokens that the engine had.
    trust: f64,
    /// The engine has reported cached tokens, so a response without a number means 0, which vLLM
    /// leaves out (`--enable-prompt-tokens-details`).
    reports: bool,
    /// Events say which blocks the engine writes and removes.
    followed: bool,
    /// `written` when the gateway subscribed to the events, until the first event comes.
    subscribed: Option<u32>,
}

/// When an engine last took a beginning: the cache, and the blocks that had been written into it by
/// then.
#[derive(Clone, Copy, Debug)]
struct Taken {
    engine: BackendId,
    /// The hash of the cache, and [`LINKED`].
    cache: u16,
    written: u32,
}

/// Set in [`Taken::cache`] if an event will say when the engine no longer has the beginning.
const LINKED: u16 = 1 << 15;

impl EngineCache {
    /// `layout`: the number of the layout with which the backend appears. It keeps apart caches of
    /// reused backend ids.
    pub(super) fn new(layout: u64) -> Self {
        let (cache, blocks) = (hash_of(layout, 0), (KV_TOKENS / BLOCK) as u32);
        Self {
            emptied: (layout, 0),
            cache,
            written: 0,
            blocks,
            trust: 1.0,
            reports: false,
            followed: false,
            subscribed: None,
        }
    }

    /// Sets the size of the KV cache in tokens; 0 without prefix caching.
    pub(super) fn set_size(&mut self, tokens: u64) {
        self.blocks = u32::try_from(tokens / BLOCK).unwrap_or(u32::MAX).min(BLOCKS_MAX - 1);
    }

    /// Forgets the cache of an engine that has started again. The engine may now cache less, or
    /// report nothing.
    pub(super) fn clear(&mut self) {
        self.emptied.1 += 1;
        (self.cache, self.written) = (hash_of(self.emptied.0, self.emptied.1), 0);
        (self.trust, self.reports) = (1.0, false);
        self.subscribed = self.subscribed.map(|_| 0);
    }

    /// Sets whether events report the writes of the engine. Without them, linked beginnings are
    /// kept like others.
    pub(super) fn set_followed(&mut self, followed: bool) {
        self.followed = followed;
    }

    /// The gateway has subscribed to the events: all later writes come as events.
    pub(super) fn subscribe(&mut self) {
        self.subscribed = Some(self.written);
    }

    /// An event has come. The events count the writes since the subscription, so the estimate of
    /// these writes is taken back.
    pub(super) fn first_event(&mut self) {
        if let Some(written) = self.subscribed.take() {
            self.written = written;
        }
    }

    /// A request will write `tokens` tokens, as estimated; events count better.
    pub(super) fn write(&mut self, tokens: u64) {
        if !self.followed {
            self.wrote(tokens);
        }
    }

    pub(super) fn wrote(&mut self, tokens: u64) {
        let blocks = u32::try_from(tokens.div_ceil(BLOCK)).unwrap_or(BLOCKS_MAX);
        self.written = self.written.wrapping_add(blocks);
    }

    /// The engine takes a beginning now.
    fn take(&self, engine: BackendId) -> Taken {
        Taken { engine, cache: self.cache, written: self.written }
    }

    /// Whether the engine still has a beginning.
    fn keeps(&self, taken: &Taken) -> bool {
        let is_linked = self.followed && taken.cache & LINKED != 0;
        // Below 0 if the estimate was taken back.
        let since = self.written.wrapping_sub(taken.written).cast_signed().max(0).cast_unsigned();
        self.has(taken) && (is_linked || since < self.blocks)
    }

    /// Whether the cache was not emptied since the engine took the beginning.
    fn has(&self, taken: &Taken) -> bool {
        self.cache == taken.cache & !LINKED
    }

    /// The cached tokens of a response: a missing number is 0 if the engine reports numbers.
    pub(super) fn reported(&self, cached: Option<u64>) -> Option<u64> {
        cached.or(self.reports.then_some(0))
    }

    pub(super) fn trust(&self) -> f64 {
        self.trust
    }

    /// The tokens of a prompt that the engine should have, if it has the first `bytes`.
    pub(super) fn expect(&self, prefix: &PromptPrefix, bytes: u32, prompt_tokens: u64) -> u64 {
        expected_tokens(prefix, bytes, prompt_tokens, self.trust)
    }

    /// Learns from reported cached tokens: scales later predictions by the share that came true.
    /// Returns the tokens that the engine had, if fewer than half of `expected`: then
    /// [`PrefixTable::forget`] drops the rest.
    pub(super) fn observe(&mut self, expected: u64, reported: Option<u64>) -> Option<u64> {
        self.reports |= reported.is_some();
        if expected == 0 || !self.reports {
            return None;
        }
        let had = reported.unwrap_or(0);
        let unscaled = expected as f64 / self.trust;
        self.trust += WEIGHT * ((had as f64 / unscaled).min(1.0) - self.trust);
        self.trust = self.trust.max(WEIGHT);
        (had < expected / 2).then_some(had)
    }
}

fn hash_of(layout: u64, emptied: u64) -> u16 {
    hash_two(layout, emptied) as u16 & !LINKED
}

/// The tokens of a prompt that an engine of this trust should have, if it has the first `bytes`.
pub(super) fn expected_tokens(prefix: &PromptPrefix, bytes: u32, prompt_tokens: u64, trust: f64) -> u64 {
    let tokens = (prompt_tokens as f64 * prefix.share(bytes) * trust) as u64;
    // The last token is always computed.
    tokens.min(prompt_tokens.saturating_sub(1))
}

#[derive(Clone, Copy, Debug, Default)]
struct AsIs(u64);

impl Hasher for AsIs {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        bytes.iter().for_each(|byte| self.0 = (self.0 << 8) | u64::from(*byte));
    }

    fn write_u64(&mut self, hash: u64) {
        self.0 = hash;
    }
}

#[derive(Clone, Debug, Default)]
struct Holders {
    /// Engines that have the beginning.
    few: SmallVec<[Taken; HOLDERS]>,
    /// All engines have the beginning, or soon will.
    everywhere: bool,
    /// Different beginnings that were seen to continue this one.
    continued: u8,
}

impl Holders {
    /// Another beginning continues this one. A beginning that many prompts share is worth a copy on
    /// each engine, which costs one prefill. Otherwise it would draw all these prompts to one
    /// engine.
    fn continue_differently(&mut self) {
        self.continued = self.continued.saturating_add(1);
        if usize::from(self.continued) > HOLDERS {
            (self.few, self.everywhere) = (SmallVec::new(), true);
        }
    }

    fn put(&mut self, taken: Taken) {
        if let Some(known) = self.few.iter_mut().find(|known| known.engine == taken.engine) {
            let linked = if known.cache & !LINKED == taken.cache { known.cache & LINKED } else { 0 };
            *known = Taken { cache: taken.cache | linked, ..taken };
        } else if self.few.len() == HOLDERS {
            (self.few, self.everywhere) = (SmallVec::new(), true);
        } else if !self.everywhere {
            self.few.push(taken);
        }
    }
}

type Generation = HashMap<u64, Holders, BuildHasherDefault<AsIs>>;

/// Bytes of one prompt that engines are likely to have.
#[derive(Clone, Debug, Default)]
pub(super) struct CachedBytes {
    of: SmallVec<[(BackendId, u32); 8]>,
    everywhere: u32,
}

impl CachedBytes {
    pub(super) fn on(&self, backend: BackendId) -> u32 {
        let own = self.of.iter().find(|(id, _)| *id == backend);
        own.map_or(self.everywhere, |(_, bytes)| self.everywhere.max(*bytes))
    }

    pub(super) fn is_empty(&self) -> bool {
        self.of.is_empty() && self.everywhere == 0
    }

    /// The tokens of that prompt that are expected in a backend's cache.
    pub(super) fn tokens_on(&self, candidate: &Candidate, request: &AdmissionRequest) -> u64 {
        if self.is_empty() {
            return 0;
        }
        expected_tokens(&request.prefix, self.on(candidate.id), request.need.prompt_tokens, candidate.trust)
    }

    /// The engines that have more of the prompt than `everywhere`, the part that all engines have.
    pub(super) fn owners(&self) -> impl Iterator<Item = BackendId> + '_ {
        self.of.iter().filter(|(_, bytes)| *bytes > self.everywhere).map(|(id, _)| *id)
    }
}

/// The beginnings of the prompts that went to the backends of one pool.
#[derive(Clone, Debug, Default)]
pub(super) struct PrefixTable {
    young: Generation,
    old: Generation,
}

impl PrefixTable {
    /// How much of a prompt each engine is likely to have. `cache` finds the cache of a backend.
    pub(super) fn find<'c>(
        &self,
        prefix: &PromptPrefix,
        cache: impl Fn(BackendId) -> Option<&'c EngineCache>,
    ) -> CachedBytes {
        let mut found = CachedBytes::default();
        for beginning in &prefix.beginnings {
            let Some(holders) = self.young.get(&beginning.hash).or_else(|| self.old.get(&beginning.hash)) else {
                break;
            };
            if holders.everywhere {
                found.everywhere = beginning.end;
            }
            for taken in &holders.few {
                if !cache(taken.engine).is_some_and(|cache| cache.keeps(taken)) {
                    continue;
                }
                match found.of.iter_mut().find(|(known, _)| *known == taken.engine) {
                    Some((_, bytes)) => *bytes = beginning.end,
                    None => found.of.push((taken.engine, beginning.end)),
                }
            }
        }
        found
    }

    /// Notes that a prompt goes to `backend`. Returns how many bytes of it the engine is likely to
    /// have already.
    pub(super) fn put<'c>(
        &mut self,
        prefix: &PromptPrefix,
        backend: BackendId,
        cache: impl Fn(BackendId) -> Option<&'c EngineCache>,
    ) -> u32 {
        let Some(taken) = cache(backend).map(|cache| cache.take(backend)) else { return 0 };
        let (mut had, mut whole, mut before) = (0, true, None);
        for beginning in &prefix.beginnings {
            if self.young.len() >= GENERATION {
                self.old.clear();
                std::mem::swap(&mut self.young, &mut self.old);
            }
            if self.young.capacity() == 0 {
                self.young.reserve(GENERATION);
            }
            let old = &mut self.old;
            let mut is_new = false;
            let holders = self.young.entry(beginning.hash).or_insert_with(|| {
                // A beginning that moves to the younger generation leaves the older one.
                let known = old.remove(&beginning.hash);
                is_new = known.is_none();
                known.unwrap_or_default()
            });
            holders.few.retain(|taken| cache(taken.engine).is_some_and(|cache| cache.keeps(taken)));
            whole &= holders.everywhere || holders.few.iter().any(|taken| taken.engine == backend);
            if whole {
                had = beginning.end;
            }
            holders.put(taken);
            if let Some(common) = before.filter(|_| is_new).and_then(|hash| self.young.get_mut(&hash)) {
                common.continue_differently();
            }
            before = Some(beginning.hash);
        }
        had
    }

    /// `backend` has these beginnings, and an event will say when it no longer has them.
    pub(super) fn link(&mut self, beginnings: &[u64], backend: BackendId, cache: &EngineCache) {
        let taken = cache.take(backend);
        for beginning in beginnings {
            if let Some(holders) = self.known(*beginning) {
                holders.put(Taken { cache: taken.cache | LINKED, ..taken });
            }
        }
    }

    /// No event will say when `backend` no longer has these beginnings.
    pub(super) fn unlink(&mut self, beginnings: &[u64], backend: BackendId) {
        for beginning in beginnings {
            let of_backend = |taken: &&mut Taken| taken.engine == backend;
            if let Some(taken) = self.known(*beginning).and_then(|found| found.few.iter_mut().find(of_backend)) {
                taken.cache &= !LINKED;
            }
        }
    }

    /// `backend` no longer has these beginnings, except where it got them again since.
    pub(super) fn remove(&mut self, beginnings: &[u64], backend: BackendId) {
        for beginning in beginnings {
            let Some(holders) = self.known(*beginning) else { continue };
            holders.few.retain(|taken| taken.engine != backend || taken.cache & LINKED == 0);
            if holders.everywhere {
                (holders.everywhere, holders.continued) = (false, 0);
            }
        }
    }

    fn known(&mut self, beginning: u64) -> Option<&mut Holders> {
        self.young.get_mut(&beginning).or_else(|| self.old.get_mut(&beginning))
    }

    /// `backend` had only the first `bytes` of a prompt.
    pub(super) fn forget(&mut self, prefix: &PromptPrefix, backend: BackendId, bytes: u32) {
        for beginning in prefix.beginnings.iter().filter(|beginning| beginning.end > bytes) {
            for generation in [&mut self.young, &mut self.old] {
                if let Some(holders) = generation.get_mut(&beginning.hash) {
                    holders.few.retain(|taken| taken.engine != backend);
                    (holders.everywhere, holders.continued) = (false, 0);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use sluice_core::openai::Beginning;

    #[test]
    fn the_table_is_bounded_and_keeps_what_is_used() {
        let (mut table, cache) = (PrefixTable::default(), EngineCache::new(1));
        let prompt = |hash: u64| {
            let begin = |part: u64| Beginning { hash: (hash * 4 + part).wrapping_mul(0x9E37_79B9_7F4A_7C15), end: 512 };
            PromptPrefix { beginnings: (0..4).map(begin).collect(), bytes: 2_048 }
        };
        let (kept, dropped, home) = (prompt(0), prompt(1), BackendId::new(3));
        table.put(&dropped, home, |_| Some(&cache));
        for other in 2..100_000 {
            table.put(&prompt(other), home, |_| Some(&cache));
            if other % 1_000 == 0 {
                table.put(&kept, home, |_| Some(&cache));
            }
        }
        assert!(table.young.len() <= GENERATION && table.old.len() <= GENERATION);
        assert!(table.young.capacity() < 2 * GENERATION, "never allocated again");
        let find = |prompt: &PromptPrefix| table.find(prompt, |_| Some(&cache)).on(home);
        assert_eq!((find(&kept), find(&dropped)), (512, 0));
    }

    #[test]
    fn caches_of_one_backend_id_are_kept_apart_after_many_reloads_and_restarts() {
        let caches = (1..=64).flat_map(|layout| {
            let mut cache = EngineCache::new(layout);
            std::iter::repeat_with(move || {
                let found = cache;
                cache.clear();
                found
            })
            .take(20)
        });
        let mut first = EngineCache::new(1);
        first.write(160);
        let taken = first.take(BackendId::new(0));
        assert!(first.keeps(&taken));
        for mut other in caches.skip(1) {
            other.write(320);
            assert!(!other.keeps(&taken), "{other:?}");
        }
        assert_eq!(size_of::<Taken>(), 8, "the header names the memory of a pool");
    }
}
