//! The table of engines that are configured, managed or being stopped. It decides which engines
//! block the start of another.
//!
//! Two engines must not share a device, port or name, but engines that are configured to share a
//! device do not wait for each other. An engine that is being stopped blocks others until its end
//! is confirmed, however long that takes. A running engine whose place is now configured for
//! another engine blocks that engine until it has moved.

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::driver::AdapterRank;
use crate::driver::process::is_running;
use crate::engine::context::EngineContext;
use crate::engine::engine_task::ManagedEngine;
use crate::engine::lifecycle::{RestartBlocked, Step};
use crate::engine::spec::EngineSpec;
use crate::engine::view::{self, EngineView};
use sluice_config::Endpoint;
use sluice_core::base::BackendId;

/// A backend whose engine the gateway does not run: only its URL is known.
#[derive(Clone, Debug)]
pub struct ExternalBackend {
    /// The index in admission.
    pub backend: BackendId,
    /// The address.
    pub endpoint: Endpoint,
    /// Whether the backend gets no new requests, because it is going away.
    pub cordoned: bool,
}

/// The configuration in force.
#[derive(Debug, Default)]
pub(super) struct Wanted {
    /// Grows with each configuration.
    pub(super) generation: u64,
    /// The engines, in the order of the configuration.
    pub(super) engines: Vec<EngineSpec>,
    pub(super) external: Vec<ExternalBackend>,
}

impl Wanted {
    pub(super) fn engine(&self, name: &str) -> Option<&EngineSpec> {
        self.engines.iter().find(|spec| *spec.name == *name)
    }
}

/// An engine that is being stopped and may still run.
#[derive(Debug)]
pub(super) struct StoppingEngine {
    name: String,
    /// `None` for an engine of an earlier gateway, of which only the name is known.
    context: Option<Arc<EngineContext>>,
}

impl StoppingEngine {
    pub(super) fn managed(context: &Arc<EngineContext>) -> Self {
        Self { name: context.spec().name.to_string(), context: Some(Arc::clone(context)) }
    }

    pub(super) fn name(&self) -> &str {
        &self.name
    }

    pub(super) fn leftover(name: &str) -> Self {
        Self { name: name.to_owned(), context: None }
    }

    /// Whether this is the same engine task, or the same leftover.
    pub(super) fn is_same(&self, other: &Self) -> bool {
        match (&self.context, &other.context) {
            (Some(one), Some(two)) => Arc::ptr_eq(one, two),
            (None, None) => self.name == other.name,
            _ => false,
        }
    }

    /// Whether `spec` must wait for the end of this engine. The device of a leftover is unknown, so
    /// it excludes every engine that does not already run.
    fn excludes(&self, spec: &EngineSpec) -> bool {
        match &self.context {
            Some(context) => context.spec().excludes(spec),
            None => self.name == *spec.name || !is_running(&spec.rules.state, &spec.name),
        }
    }

    fn as_blocker(&self) -> RestartBlocked {
        let backend = self.name.clone();
        match &self.context {
            Some(context) if context.step() == Step::Hold => RestartBlocked::CannotStop { backend, why: context.why() },
            _ => RestartBlocked::Stopping(backend),
        }
    }
}

/// All engines, under one lock (see [`Registry`](super::registry::Registry)).
#[derive(Debug, Default)]
pub(super) struct EngineTable {
    pub(super) wanted: Wanted,
    /// Engines with a task, by `pool/backend`.
    pub(super) managed: BTreeMap<String, ManagedEngine>,
    pub(super) stopping: Vec<StoppingEngine>,
}

impl EngineTable {
    pub(super) fn blocker(&self, spec: &EngineSpec) -> Option<RestartBlocked> {
        if let Some(other) = self.stopping.iter().find(|other| other.excludes(spec)) {
            return Some(other.as_blocker());
        }
        let mut managed = self.managed.iter();
        let (name, _) = managed.find(|(name, engine)| self.must_move_for(name, &engine.handle.context, spec))?;
        Some(RestartBlocked::MustMove(name.clone()))
    }

    /// Whether a managed engine occupies the place of `spec` but is itself configured for another
    /// place now.
    fn must_move_for(&self, name: &str, context: &EngineContext, spec: &EngineSpec) -> bool {
        let Some(next) = self.wanted.engine(name) else { return false };
        let moves = next.identity != context.identity && *spec.name != *name;
        moves && context.spec().shares_place_with(spec) && !next.shares_place_with(spec)
    }

    /// Whether a configured engine waits until this one has moved.
    pub(super) fn is_awaited(&self, context: &EngineContext) -> bool {
        let name = &context.spec().name;
        self.missing().any(|spec| self.must_move_for(name, context, spec))
    }

    /// Configured engines without a task.
    fn missing(&self) -> impl Iterator<Item = &EngineSpec> {
        self.wanted.engines.iter().filter(|spec| !self.managed.contains_key(&*spec.name))
    }

    /// Whether an engine that is being stopped has this address.
    pub(super) fn is_occupied(&self, endpoint: &Endpoint) -> bool {
        let contexts = self.stopping.iter().filter_map(|stopping| stopping.context.as_ref());
        contexts.into_iter().any(|context| context.spec().address.endpoint == *endpoint)
    }

    /// The engines that may run, with their process ids if known.
    pub(super) fn running(&self) -> Vec<String> {
        let stopping = self.stopping.iter().filter_map(|stopping| stopping.context.as_deref());
        let managed = self.managed.values().map(|engine| &*engine.handle.context);
        managed.chain(stopping).filter_map(EngineContext::describe_running).collect()
    }

    pub(super) fn adapter_limits(&self, name: &str) -> Option<(Option<u64>, Option<u32>)> {
        let context = &self.managed.get(name)?.handle.context;
        let state = context.state.lock();
        let settings = &state.lifecycle.wanted.settings;
        let host = settings.int("max-cpu-loras").and_then(|host| u64::try_from(host).ok());
        let rank = match context.driver().adapter_rank(settings) {
            AdapterRank::UpTo(rank) => u32::try_from(rank).ok(),
            AdapterRank::None(_) | AdapterRank::Unknown => None,
        };
        Some((host, rank))
    }

    /// Every engine by name, whether it is managed, being stopped, or waiting for another engine.
    pub(super) fn views(&self) -> Vec<EngineView> {
        let waiting = self.missing().filter_map(|spec| {
            let waits = Some(self.blocker(spec)?.to_string());
            Some(EngineView { backend: spec.name.to_string(), step: "off".to_owned(), waits, ..EngineView::default() })
        });
        let stopping = self.stopping.iter().filter_map(|stopping| stopping.context.as_deref()).map(view::of);
        let managed = self.managed.values().map(|engine| view::of(&engine.handle.context));
        // A later view replaces an earlier one of the same name.
        let views: BTreeMap<String, EngineView> =
            waiting.chain(stopping).chain(managed).map(|view| (view.backend.clone(), view)).collect();
        views.into_values().collect()
    }
}
