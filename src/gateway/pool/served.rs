//! The facts of engines, and the facts that a request needs.
//!
//! Facts are the names that an engine serves (models, aliases, LoRA adapters), the context limit,
//! and the routes. They are read from the engine; a refusal corrects them until the next reading.
//! An unknown fact excludes nothing.
//!
//! A request [wants](Wants) only facts that some engine of its pools has, until an engine refuses
//! the request. A name that no engine lists may be new, so any engine may be asked, and the client
//! gets the engine's answer. Estimated lengths are no reason to refuse: if no engine surely takes
//! the prompt, the one with the highest limit is asked.
//!
//! If all engines that a pool's requests may use have the same facts ([`Facts::same`]), admission
//! skips all this. Bounds: [`DENIED_MAX`] denied names of an engine without a list; the prober
//! bounds the length of lists.

use std::num::NonZeroU32;
use std::sync::Arc;

use smallvec::SmallVec;

use sluice_core::openai::Route;

/// The most denied names that are remembered for an engine without a list. The oldest are
/// forgotten.
const DENIED_MAX: usize = 64;

/// Percentage of an engine's context limit up to which an estimated prompt surely fits.
const SURE_PERCENT: u64 = 90;

/// The hash of a model's name: comparisons need no text, and every routing table has the same hash.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct ModelKey(NonZeroU32);

impl ModelKey {
    /// The key of a name.
    pub fn of(name: &str) -> Self {
        Self(NonZeroU32::MIN.saturating_add(twox_hash::XxHash3_64::oneshot(name.as_bytes()) as u32))
    }
}

/// A set of routes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RouteSet(u64);

const _: () = assert!(Route::ALL.len() <= u64::BITS as usize);

impl RouteSet {
    /// Every route.
    pub const ALL: Self = Self(u64::MAX);
    /// No route.
    pub const NONE: Self = Self(0);

    fn bit(route: Route) -> u64 {
        1 << route as u32
    }

    /// Adds a route.
    pub fn insert(&mut self, route: Route) {
        self.0 |= Self::bit(route);
    }

    /// Whether the set has a route.
    pub fn has(self, route: Route) -> bool {
        self.0 & Self::bit(route) != 0
    }

    pub(super) fn without(self, route: Route) -> Self {
        Self(self.0 & !Self::bit(route))
    }
}

/// The names that an engine serves.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Served {
    /// The list was not read yet.
    #[default]
    Unknown,
    /// The engine has no readable list. It counts as serving every name except the denied ones.
    Unreadable {
        /// Names that the engine denied since the last attempt to read the list.
        denied: SmallVec<[ModelKey; 4]>,
    },
    /// The hashes of the listed names, sorted.
    List(Arc<[ModelKey]>),
}

impl Served {
    /// The names of a list.
    pub fn list<'a>(names: impl IntoIterator<Item = &'a str>) -> Self {
        let mut keys: Vec<ModelKey> = names.into_iter().map(ModelKey::of).collect();
        keys.sort_unstable();
        keys.dedup();
        Self::List(keys.into())
    }

    /// An engine without a readable list.
    pub fn unreadable() -> Self {
        Self::Unreadable { denied: SmallVec::new() }
    }

    pub(super) fn lists(&self, key: ModelKey) -> bool {
        matches!(self, Self::List(keys) if keys.binary_search(&key).is_ok())
    }

    /// Whether the engine may serve the name: neither the list nor a refusal excludes it.
    pub(super) fn has(&self, key: ModelKey) -> bool {
        match self {
            Self::Unknown => true,
            Self::Unreadable { denied } => !denied.contains(&key),
            Self::List(_) => self.lists(key),
        }
    }

    /// The engine has denied the name. Returns whether that corrects the facts.
    fn deny(&mut self, key: ModelKey) -> bool {
        if !self.has(key) {
            return false;
        }
        match self {
            Self::Unknown => return false,
            Self::Unreadable { denied } => {
                if denied.len() >= DENIED_MAX {
                    denied.remove(0);
                }
                denied.push(key);
            }
            Self::List(keys) => *keys = keys.iter().copied().filter(|known| *known != key).collect(),
        }
        true
    }
}

/// The facts that are known of one engine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Facts {
    /// The names that it serves.
    pub served: Served,
    /// The context limit in tokens, if the engine has reported it.
    pub max_model_len: Option<u64>,
    /// The routes of the engine, as far as known.
    pub routes: RouteSet,
}

impl Default for Facts {
    fn default() -> Self {
        Self { served: Served::Unknown, max_model_len: None, routes: RouteSet::ALL }
    }
}

impl Facts {
    /// Whether engines with these facts serve the same requests. An engine that was not read yet
    /// differs from none.
    pub(super) fn same(&self, other: &Self) -> bool {
        let unread = |facts: &Self| facts.served == Served::Unknown;
        unread(self) || unread(other) || self == other
    }

    /// The longest prompt in tokens.
    fn length(&self) -> u64 {
        self.max_model_len.unwrap_or(u64::MAX)
    }

    /// Whether the engine can serve a request with these wants.
    pub(super) fn meets(&self, wants: &Wants) -> bool {
        self.length() >= wants.length
            && wants.model.is_none_or(|key| self.served.has(key))
            && wants.route.is_none_or(|route| self.routes.has(route))
    }

    /// Whether the engine would serve a request with these requirements, as far as it has said.
    /// False for an engine that was never read.
    pub(super) fn would_serve(&self, asks: &Asks) -> bool {
        self.served != Served::Unknown
            && asks.model.is_none_or(|key| self.served.has(key))
            && asks.route.map_or(!asks.needs_route, |route| self.routes.has(route))
            && asks.longer_than.is_none_or(|limit| self.length() > limit && self.length() >= asks.prompt_tokens)
    }

    /// Notes a refusal of the engine. Returns whether it corrects the facts.
    pub(super) fn correct(&mut self, lack: Lack) -> bool {
        match lack {
            Lack::Model(key) => self.served.deny(key),
            Lack::Route(route) => {
                let had = self.routes.has(route);
                self.routes = self.routes.without(route);
                had
            }
            Lack::Length(None) | Lack::Rank => false,
            Lack::Length(limit) => std::mem::replace(&mut self.max_model_len, limit) != limit,
        }
    }
}

/// Why an engine refused a request that another one may serve.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Lack {
    /// The engine does not serve the model.
    Model(ModelKey),
    /// The engine does not have the route.
    Route(Route),
    /// The prompt is longer than the context limit; the limit, if the engine has named it.
    Length(Option<u64>),
    /// The engine does not have the data-parallel rank.
    Rank,
}

/// The requirements of a request on an engine.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Asks {
    /// The model, by the name that is sent.
    pub model: Option<ModelKey>,
    /// The route; `None` if the request's path is not spelled exactly as [`Route::path`], because
    /// an engine's answer to one spelling says nothing about another.
    pub route: Option<Route>,
    /// Estimated tokens of the longest prompt.
    pub prompt_tokens: u64,
    /// Output tokens that the client permits.
    pub output_tokens: u64,
    /// An engine with this context limit has refused the request as too long, so only an engine
    /// with a higher limit can serve it.
    pub longer_than: Option<u64>,
    /// An engine without the route or path has refused the request, so only an engine that has the
    /// route can serve it.
    pub needs_route: bool,
}

impl Asks {
    /// The context limit to want, given the highest limit `longest`: one that surely takes the
    /// prompt and does not refuse `max_tokens`; otherwise one that surely takes the prompt;
    /// otherwise `longest`. vLLM shortens an output that does not fit behind the prompt, so their
    /// sum does not matter.
    fn length(&self, longest: u64) -> u64 {
        let prompt = self.prompt_tokens.saturating_mul(100) / SURE_PERCENT;
        [prompt.max(self.output_tokens), prompt].into_iter().find(|length| *length <= longest).unwrap_or(longest)
    }

    /// Whether a refusal of this kind may change the wants of the request; `None`: there was no
    /// refusal.
    pub(super) fn concerns(&self, lack: Option<Lack>) -> bool {
        match lack {
            Some(Lack::Model(key)) => self.model == Some(key),
            Some(Lack::Route(route)) => self.route == Some(route),
            Some(Lack::Length(_) | Lack::Rank) | None => true,
        }
    }

    /// Whether an engine has refused the request for a reason that other engines may share.
    pub(super) fn was_refused(&self) -> bool {
        self.longer_than.is_some() || self.needs_route
    }
}

/// The facts that an engine must have to be chosen for a request; by default none.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Wants {
    model: Option<ModelKey>,
    route: Option<Route>,
    length: u64,
}

impl Wants {
    /// Whether any engine will do.
    pub(super) fn is_anything(&self) -> bool {
        *self == Self::default()
    }

    /// The wants of a request, given the facts of its engines and whether each may be chosen now.
    /// Before a refusal, these are only facts that one of the engines has.
    pub(super) fn of<'a, I>(asks: &Asks, engines: impl Fn() -> I) -> Self
    where
        I: Iterator<Item = (&'a Facts, bool)>,
    {
        let facts = || engines().map(|(facts, _)| facts);
        let mut wants = Self::default();
        if let Some(key) = asks.model {
            let unlisted = |facts: &Facts| matches!(facts.served, Served::Unreadable { .. }) && facts.served.has(key);
            let is_served =
                facts().any(|facts| facts.served.lists(key)) || engines().any(|(facts, open)| open && unlisted(facts));
            wants.model = asks.model.filter(|_| is_served && !facts().all(|facts| facts.served.has(key)));
        }
        if let Some(route) = asks.route {
            let is_served = facts().any(|facts| facts.meets(&wants) && facts.routes.has(route));
            let by_all = || facts().all(|facts| facts.routes.has(route));
            wants.route = asks.route.filter(|_| asks.needs_route || (is_served && !by_all()));
        }
        let able = engines().filter(|(facts, open)| *open && facts.meets(&wants));
        let longest = able.map(|(facts, _)| facts.length()).max();
        let least = asks.longer_than.map_or(0, |limit| limit.saturating_add(1));
        let length = longest.map_or(0, |longest| asks.length(longest)).max(least);
        let by_all = facts().all(|facts| facts.length() >= length);
        wants.length = if by_all { 0 } else { length };
        wants
    }
}

#[cfg(test)]
mod tests;
