//! What a reload changes: the difference between the running configuration and a new one.
//!
//! Pools and models are the same when their names are; a backend is the same when its pool, its name
//! and where it is are, so that a backend which moved is one removed and one added and no counter of
//! the old place is carried to the new. Limits, queues, thresholds and weights change without touching
//! requests in flight; sockets and threads need a restart, and the log and the admin API say so.
//!
//! The list is for people (Display) and for whoever applies it: what is not listed did not change.

use std::fmt;

use super::{Backend, Config, Pool, PromptRange};

/// One thing that a reload changes. Names, not ids: ids differ between the two configurations.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Change {
    /// A pool that did not exist.
    PoolAdded(String),
    /// A pool that is no longer there; its backends drain.
    PoolRemoved(String),
    /// Slots, tokens, prefill tokens or permits for long prompts of a pool.
    Limits {
        /// The pool.
        pool: String,
        /// Each limit as `name: old -> new`.
        what: Vec<String>,
    },
    /// Length, timeout or order of a pool's queue. Those who wait already stay.
    Queue(String),
    /// Prompt lengths that a pool is home to.
    Range {
        /// The pool.
        pool: String,
        /// Before.
        from: PromptRange,
        /// After.
        to: PromptRange,
    },
    /// Models, policy, spill, usage or objectives of a pool.
    PoolSettings {
        /// The pool.
        pool: String,
        /// The keys that changed.
        keys: Vec<&'static str>,
    },
    /// A backend that did not exist.
    BackendAdded {
        /// Its pool.
        pool: String,
        /// Its name.
        backend: String,
    },
    /// A backend that is no longer there (or moved); it drains.
    BackendRemoved {
        /// Its pool.
        pool: String,
        /// Its name.
        backend: String,
    },
    /// Weight or API key of a backend.
    BackendSettings {
        /// Its pool.
        pool: String,
        /// Its name.
        backend: String,
    },
    /// How the engine of a backend is run: its flags, program, devices or commands, or who runs it.
    Engine {
        /// Its pool.
        pool: String,
        /// Its name.
        backend: String,
    },
    /// A model that did not exist.
    ModelAdded(String),
    /// A model that is no longer served.
    ModelRemoved(String),
    /// Aliases, tokenizer, media tokens, adapter or golden prompts of a model.
    ModelSettings(String),
    /// Keys, their limits or the admin token.
    Auth,
    /// A section that is taken over as a whole.
    Section(&'static str),
    /// A value that only a restart takes over; the running value stays.
    NeedsRestart(&'static str),
}

/// Everything that going from `old` to `new` changes, in the order of the configuration.
pub fn changes(old: &Config, new: &Config) -> Vec<Change> {
    let mut list = Vec::new();
    sections(old, new, &mut list);
    models(old, new, &mut list);
    for pool in &old.pools {
        match new.pool_named(&pool.name) {
            Some(id) => pool_changes((old, pool), (new, &new.pools[id.index()]), &mut list),
            None => list.push(Change::PoolRemoved(pool.name.clone())),
        }
    }
    let added = new.pools.iter().filter(|pool| old.pool_named(&pool.name).is_none());
    list.extend(added.map(|pool| Change::PoolAdded(pool.name.clone())));
    list
}

fn sections(old: &Config, new: &Config, list: &mut Vec<Change>) {
    let restart = [
        ("server.listen", old.server.listen != new.server.listen),
        ("server.admin", old.server.admin != new.server.admin),
        ("server.threads", old.server.threads != new.server.threads),
        ("access_log", old.access_log != new.access_log),
        ("log", old.log != new.log),
        ("fleet.state", old.fleet.state != new.fleet.state),
    ];
    list.extend(restart.into_iter().filter(|(_, differs)| *differs).map(|(key, _)| Change::NeedsRestart(key)));
    let mut server = new.server.clone();
    (server.listen, server.admin, server.threads) = (old.server.listen, old.server.admin, old.server.threads);
    let fleet = super::Fleet { state: old.fleet.state.clone(), ..new.fleet.clone() };
    let taken_over = [
        ("server", old.server != server),
        ("timeouts", old.timeouts != new.timeouts),
        ("retry", old.retry != new.retry),
        ("slo", old.slo != new.slo),
        ("health", old.health != new.health),
        ("fleet", old.fleet != fleet),
    ];
    list.extend(taken_over.into_iter().filter(|(_, differs)| *differs).map(|(key, _)| Change::Section(key)));
    // Keys name models by id, which means something else in the other configuration.
    let scopes = |config: &Config| -> Vec<Option<Vec<String>>> {
        config.auth.keys.iter().map(|key| model_names(config, &key.models)).collect()
    };
    let mut auth = new.auth.clone();
    for (key, old_key) in auth.keys.iter_mut().zip(&old.auth.keys) {
        key.models = old_key.models.clone();
    }
    if auth != old.auth || scopes(old) != scopes(new) {
        list.push(Change::Auth);
    }
}

fn models(old: &Config, new: &Config, list: &mut Vec<Change>) {
    for model in &old.models {
        match new.models.iter().find(|other| other.name == model.name) {
            Some(other) if other == model => {}
            Some(_) => list.push(Change::ModelSettings(model.name.clone())),
            None => list.push(Change::ModelRemoved(model.name.clone())),
        }
    }
    let is_new = |name: &str| old.models.iter().all(|model| model.name != name);
    let added = new.models.iter().filter(|model| is_new(&model.name));
    list.extend(added.map(|model| Change::ModelAdded(model.name.clone())));
}

/// Models by name; `None` for all.
fn model_names(config: &Config, scope: &super::ModelScope) -> Option<Vec<String>> {
    match scope {
        super::ModelScope::All => None,
        super::ModelScope::Only(ids) => Some(ids.iter().map(|id| config.models[id.index()].name.clone()).collect()),
    }
}

fn pool_changes((old_config, old): (&Config, &Pool), (new_config, new): (&Config, &Pool), list: &mut Vec<Change>) {
    let pool = || old.name.clone();
    if old.prompt_tokens != new.prompt_tokens {
        list.push(Change::Range { pool: pool(), from: old.prompt_tokens, to: new.prompt_tokens });
    }
    let what = limits(old, new);
    if !what.is_empty() {
        list.push(Change::Limits { pool: pool(), what });
    }
    if old.queue != new.queue {
        list.push(Change::Queue(pool()));
    }
    let spill = |config: &Config, pool: &Pool| -> Vec<String> {
        pool.spill.iter().map(|id| config.pools[id.index()].name.clone()).collect()
    };
    let settings = [
        ("models", model_names(old_config, &old.models) != model_names(new_config, &new.models)),
        ("policy", old.policy != new.policy),
        ("spill", spill(old_config, old) != spill(new_config, new)),
        ("usage", old.usage != new.usage),
        ("slo", old.slo != new.slo),
    ];
    let keys: Vec<&str> = settings.into_iter().filter(|(_, differs)| *differs).map(|(key, _)| key).collect();
    if !keys.is_empty() {
        list.push(Change::PoolSettings { pool: pool(), keys });
    }
    backend_changes(old, new, list);
}

fn limits(old: &Pool, new: &Pool) -> Vec<String> {
    fn shown<T: fmt::Display>(value: Option<T>) -> String {
        value.map_or_else(|| "none".to_owned(), |value| value.to_string())
    }
    let of = |pool: &Pool| {
        [
            ("slots", pool.slots.to_string()),
            ("tokens", shown(pool.tokens)),
            ("prefill_tokens", shown(pool.prefill_tokens)),
            ("long_prefix.threshold", shown(pool.long_prefix.map(|long| long.threshold))),
            ("long_prefix.slots", shown(pool.long_prefix.map(|long| long.slots))),
        ]
    };
    let pairs = of(old).into_iter().zip(of(new)).filter(|((_, before), (_, after))| before != after);
    pairs.map(|((name, before), (_, after))| format!("{name}: {before} -> {after}")).collect()
}

/// Whoever runs its engine.
fn same(one: &Backend, other: &Backend) -> bool {
    one.name == other.name && one.target.endpoint() == other.target.endpoint()
}

fn backend_changes(old: &Pool, new: &Pool, list: &mut Vec<Change>) {
    let named = |backend: &Backend| (old.name.clone(), backend.name.clone());
    for backend in &old.backends {
        let (pool, name) = named(backend);
        match new.backends.iter().find(|other| same(backend, other)) {
            Some(other) => {
                if (other.weight, &other.api_key) != (backend.weight, &backend.api_key) {
                    list.push(Change::BackendSettings { pool: pool.clone(), backend: name.clone() });
                }
                if other.target != backend.target {
                    list.push(Change::Engine { pool, backend: name });
                }
            }
            None => list.push(Change::BackendRemoved { pool, backend: name }),
        }
    }
    for backend in new.backends.iter().filter(|backend| !old.backends.iter().any(|other| same(backend, other))) {
        let (pool, backend) = named(backend);
        list.push(Change::BackendAdded { pool, backend });
    }
}

impl fmt::Display for Change {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::PoolAdded(pool) => write!(f, "pool {pool}: added"),
            Self::PoolRemoved(pool) => write!(f, "pool {pool}: removed, its backends drain"),
            Self::Limits { pool, what } => write!(f, "pool {pool}: {}", what.join(", ")),
            Self::Queue(pool) => write!(f, "pool {pool}: queue changed"),
            Self::Range { pool, from, to } => write!(f, "pool {pool}: prompt_tokens: {from} -> {to}"),
            Self::PoolSettings { pool, keys } => write!(f, "pool {pool}: {} changed", keys.join(", ")),
            Self::BackendAdded { pool, backend } => write!(f, "backend {pool}/{backend}: added"),
            Self::BackendRemoved { pool, backend } => write!(f, "backend {pool}/{backend}: removed, it drains"),
            Self::BackendSettings { pool, backend } => write!(f, "backend {pool}/{backend}: weight or api_key changed"),
            Self::Engine { pool, backend } => {
                write!(f, "backend {pool}/{backend}: how its engine is run changed; it follows in its turn")
            }
            Self::ModelAdded(model) => write!(f, "model {model}: added"),
            Self::ModelRemoved(model) => write!(f, "model {model}: removed"),
            Self::ModelSettings(model) => write!(f, "model {model}: its settings changed"),
            Self::Auth => f.write_str("auth: keys or admin_token changed"),
            Self::Section(section) => write!(f, "{section}: changed"),
            Self::NeedsRestart(key) => write!(f, "{key}: changed, needs a restart; the running value stays"),
        }
    }
}
