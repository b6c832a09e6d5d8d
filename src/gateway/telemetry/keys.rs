//! Metrics of the tokens that API keys have used of their limits.
//!
//! They are read at scrape time from a view that `serve` passes in. Keys without such a limit have
//! none. Bounds: [`KEYS_SHOWN`](crate::flow::keys::KEYS_SHOWN) keys, the nearest to a limit.

use prometheus::core::{Collector, Desc};
use prometheus::proto::{Metric, MetricFamily, MetricType};

use super::exposition::{describe, family_of};
use super::families;
use super::gauges::gauge;
use crate::flow::keys::KeyTokens;

pub(super) struct Keys<F> {
    view: F,
    descs: Vec<Desc>,
}

impl<F: Fn() -> Vec<KeyTokens> + Send + Sync> Keys<F> {
    pub(super) fn new(view: F) -> Self {
        Self { view, descs: [families::KEY_TOKENS, families::KEY_TOKENS_LIMIT].iter().map(describe).collect() }
    }
}

impl<F: Fn() -> Vec<KeyTokens> + Send + Sync> Collector for Keys<F> {
    fn desc(&self) -> Vec<&Desc> {
        self.descs.iter().collect()
    }

    fn collect(&self) -> Vec<MetricFamily> {
        let (mut used, mut limits): (Vec<Metric>, Vec<Metric>) = (Vec::new(), Vec::new());
        for key in (self.view)() {
            for (window, counts) in [("minute", key.minute), ("day", key.day)] {
                let Some((tokens, limit)) = counts else { continue };
                used.push(gauge(&families::KEY_TOKENS, &[&key.name, window], tokens as f64));
                limits.push(gauge(&families::KEY_TOKENS_LIMIT, &[&key.name, window], limit as f64));
            }
        }
        let used = family_of(&families::KEY_TOKENS, MetricType::GAUGE, used);
        let limits = family_of(&families::KEY_TOKENS_LIMIT, MetricType::GAUGE, limits);
        used.into_iter().chain(limits).collect()
    }
}
