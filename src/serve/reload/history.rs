//! The reloads of a running gateway, for `/admin/status` and the charts of the live page.
//!
//! Bound: [`APPLIED_MAX`] times at which configurations came into force, and the last outcome.

use std::collections::VecDeque;

use tokio::time::Instant;

use sluice_admin::status::{Applied, LastReload};

/// More replacements than a chart of five minutes can show.
const APPLIED_MAX: usize = 32;

#[derive(Debug, Default)]
pub(crate) struct History {
    pub(crate) last: Option<LastReload>,
    /// Times at which configurations came into force, with their titles, newest first.
    applied: VecDeque<(Instant, Option<String>)>,
}

impl History {
    pub(crate) fn note(&mut self, title: Option<String>) {
        self.applied.truncate(APPLIED_MAX - 1);
        self.applied.push_front((Instant::now(), title));
    }

    /// The replacements, oldest first.
    pub(crate) fn applied(&self, now: Instant) -> Vec<Applied> {
        let ago = |time: &Instant| now.saturating_duration_since(*time).as_secs_f64();
        self.applied
            .iter()
            .rev()
            .map(|(time, title)| Applied { seconds_ago: ago(time), title: title.clone() })
            .collect()
    }
}
