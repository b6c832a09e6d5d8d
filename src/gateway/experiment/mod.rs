//! Experiments: which arm a request is assigned to. The seat, before there are any.
//!
//! The path of a request asks here once, after its class is known and before it is admitted. An arm
//! may later rewrite the model (a LoRA adapter against its base) or name a variant; today nothing is
//! running, so every request is assigned to no arm, at no cost. Metrics and records already carry
//! the arm, so that what is measured now and what is measured in an experiment are one series.

use std::sync::Arc;

/// An arm of a running experiment: a variant or a model with a share of the traffic.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Arm {
    /// Its name, a label of metrics and a response header.
    pub name: Arc<str>,
    /// The model name to send upstream instead of the client's.
    pub model: Option<Arc<str>>,
}

/// The experiments that are running.
#[derive(Clone, Debug, Default)]
pub struct Experiments {}

impl Experiments {
    /// The arm of a request; `None` when no experiment covers it.
    pub fn assign(&self) -> Option<&Arm> {
        None
    }
}
