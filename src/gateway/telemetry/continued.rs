//! Counts of broken streams: whether another engine continued the stream, and if not, why.
//!
//! A broken stream is rare, so the series are looked up by label. Bound: the pools of the
//! configuration times the labels of two closed sets.

use prometheus::{IntCounterVec, Registry};

use super::families;
use super::series::counters;
use crate::flow::Record;
use sluice_core::openai::NotContinued;

pub(super) struct ContinuedCounters {
    continued: IntCounterVec,
    not_continued: IntCounterVec,
    prefilled: IntCounterVec,
}

impl ContinuedCounters {
    pub(super) fn new(registry: &Registry) -> Self {
        Self {
            continued: counters(registry, &families::CONTINUED),
            not_continued: counters(registry, &families::NOT_CONTINUED),
            prefilled: counters(registry, &families::PREFILLED_AGAIN),
        }
    }

    #[inline]
    pub(super) fn count(&self, record: &Record) {
        if record.continued > 0 || record.not_continued.is_some() {
            self.count_broken(record);
        }
    }

    #[cold]
    fn count_broken(&self, record: &Record) {
        let pool = record.pool.as_deref().unwrap_or_default();
        if record.continued > 0 {
            self.continued.with_label_values(&[pool, record.outcome.label()]).inc();
            self.prefilled.with_label_values(&[pool]).inc_by(record.prefilled_again);
        }
        if let Some(reason) = record.not_continued.map(NotContinued::label) {
            self.not_continued.with_label_values(&[pool, reason]).inc();
        }
    }
}
