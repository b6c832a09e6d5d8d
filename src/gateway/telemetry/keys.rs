//! Metrics of API keys: tokens used of their limits, requests in flight with their limits, and
//! engine time and waiting requests in fair pools.
//!
//! Read at scrape time from views that `serve` passes in. Keys without a token limit have no token
//! metrics. Bounds: the keys of the configuration; for tokens the
//! [`KEYS_SHOWN`](crate::flow::keys::KEYS_SHOWN) keys nearest to a limit, and for requests in
//! flight as many keys, which have most of them.

use super::exposition::Page;
use super::families::{self, Family};
use crate::flow::keys::{KeyInFlight, KeyTokens};
use crate::flow::owner::KeyWork;

pub(super) const TOKENS: [Family; 2] = [families::KEY_TOKENS, families::KEY_TOKENS_LIMIT];
pub(super) const IN_FLIGHT: [Family; 2] = [families::KEY_IN_FLIGHT, families::KEY_IN_FLIGHT_LIMIT];
pub(super) const WORK: [Family; 2] = [families::KEY_WORK, families::KEY_WAITING];

pub(super) fn add_tokens(keys: &[KeyTokens], page: &mut Page) {
    for key in keys {
        for (window, counts) in [("minute", key.minute), ("day", key.day)] {
            let Some((tokens, limit)) = counts else { continue };
            page.add(&families::KEY_TOKENS, &[&key.name, window], tokens as f64);
            page.add(&families::KEY_TOKENS_LIMIT, &[&key.name, window], limit as f64);
        }
    }
}

pub(super) fn add_in_flight(keys: &[KeyInFlight], page: &mut Page) {
    for key in keys {
        for (unit, (used, limit)) in [("requests", key.requests), ("sequences", key.sequences), ("tokens", key.tokens)]
        {
            page.add(&families::KEY_IN_FLIGHT, &[&key.name, unit], used as f64);
            if let Some(limit) = limit {
                page.add(&families::KEY_IN_FLIGHT_LIMIT, &[&key.name, unit], limit as f64);
            }
        }
    }
}

pub(super) fn add_work(keys: &[KeyWork], page: &mut Page) {
    for on in keys {
        page.add(&families::KEY_WORK, &[&on.pool, &on.key], on.seconds);
        page.add(&families::KEY_WAITING, &[&on.pool, &on.key], on.waiting as f64);
    }
}
