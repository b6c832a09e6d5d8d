//! The class of a request: a label of latencies, by the prompt's length and the kind of request.
//!
//! The class is known from the estimate when the request is placed, and is corrected once the
//! engine has counted the prompt. It selects the objectives of the request, but not the pool or the
//! engine. Bound: `limits::MAX_CLASSES` and one class for all other requests.

use std::sync::Arc;

use sluice_config::{Class, Config, OTHER_CLASS, Pool};
use sluice_core::meter::slo::Objectives;

/// The classes of one configuration.
#[derive(Debug)]
pub struct Classes {
    /// In the order of the configuration: a request is in the first class that includes it.
    classes: Vec<(Class, Arc<str>)>,
    other: Arc<str>,
}

/// The properties of a request that decide its class.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Kind {
    /// Length of the prompt.
    pub tokens: u64,
    /// Whether a LoRA adapter is asked for.
    pub adapter: bool,
    /// Whether the request generates tokens.
    pub generates: bool,
}

/// Position of a class; the number of classes is the position of [`OTHER_CLASS`].
pub type ClassIndex = usize;

impl Classes {
    pub(super) fn of(config: &Config) -> Self {
        let named = |class: &Class| (class.clone(), Arc::from(class.name.as_str()));
        Self { classes: config.classes.iter().map(named).collect(), other: OTHER_CLASS.into() }
    }

    pub(super) fn index(&self, kind: Kind) -> ClassIndex {
        let has = |(class, _): &(Class, Arc<str>)| class.has(kind.tokens, kind.adapter, kind.generates);
        self.classes.iter().position(has).unwrap_or(self.classes.len())
    }

    pub(super) fn name(&self, index: ClassIndex) -> &Arc<str> {
        self.classes.get(index).map_or(&self.other, |(_, name)| name)
    }

    /// The objectives of each class in `pool`, the objectives of other requests last.
    pub(super) fn objectives(config: &Config, pool: &Pool) -> Box<[Objectives]> {
        let of_classes = config.classes.iter().map(|class| class.objectives_in(pool));
        of_classes.chain([pool.slo.objectives()]).collect()
    }
}
