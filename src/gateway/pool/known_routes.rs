//! The routes that an engine has, as far as known.
//!
//! After a refusal, the gateway reads the engine's page of routes. The refusal itself shows that
//! the engine lacks one route: a *denial*. Page and denial expire, because a proxy may have refused
//! the request, or another version may run by now. A denial counts for [`DENIED_FOR`], a page for
//! [`READ_FOR`]. After that one request may be refused again, and moves to another engine. Bound:
//! one denial for each route.

use std::time::Duration;

use smallvec::SmallVec;
use tokio::time::Instant;

use super::served::RouteSet;
use sluice_core::openai::Route;

pub(super) const DENIED_FOR: Duration = Duration::from_secs(15);
pub(super) const READ_FOR: Duration = Duration::from_secs(5 * 60);

#[derive(Clone, Debug, Default)]
pub(super) struct KnownRoutes {
    /// The routes on the engine's page, and when the reading began.
    read: Option<(RouteSet, Instant)>,
    /// Routes that the engine has refused since the reading began, and when.
    denied: SmallVec<[(Route, Instant); 2]>,
}

impl KnownRoutes {
    /// The routes that the engine is believed to have.
    pub(super) fn set(&self) -> RouteSet {
        let read = self.read.map_or(RouteSet::ALL, |(routes, _)| routes);
        self.denied.iter().fold(read, |routes, (route, _)| routes.without(*route))
    }

    pub(super) fn is_any(&self) -> bool {
        self.read.is_some() || !self.denied.is_empty()
    }

    /// The engine refused a request at `now` because it does not have the route.
    pub(super) fn deny(&mut self, route: Route, now: Instant) {
        self.denied.retain(|(known, _)| *known != route);
        self.denied.push((route, now));
    }

    /// Takes over a page whose reading began at `begun`; `None`: there is no page. Returns whether
    /// the engine has refused a route since then.
    pub(super) fn read(&mut self, routes: Option<RouteSet>, begun: Instant) -> bool {
        if let Some(routes) = routes {
            self.denied.retain(|(_, at)| *at > begun);
            self.read = Some((routes, begun));
        }
        self.denied.iter().any(|(_, at)| *at > begun)
    }

    pub(super) fn expire(&mut self, now: Instant) {
        self.denied.retain(|(_, at)| now.saturating_duration_since(*at) < DENIED_FOR);
        self.read = self.read.filter(|(_, at)| now.saturating_duration_since(*at) < READ_FOR);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn only(route: Route) -> RouteSet {
        let mut routes = RouteSet::NONE;
        routes.insert(route);
        routes
    }

    #[test]
    fn a_denial_and_a_page_count_for_a_while() {
        let (mut known, start) = (KnownRoutes::default(), Instant::now());
        known.deny(Route::Embeddings, start);
        known.deny(Route::Embeddings, start + DENIED_FOR / 2);
        known.expire(start + DENIED_FOR);
        assert!(!known.set().has(Route::Embeddings), "the last refusal counts");
        known.expire(start + DENIED_FOR * 2);
        assert!(known.set() == RouteSet::ALL && !known.is_any());
        assert!(!known.read(Some(only(Route::Score)), start));
        assert_eq!(known.set(), only(Route::Score));
        known.expire(start + READ_FOR);
        assert_eq!(known.set(), RouteSet::ALL);
    }

    #[test]
    fn a_page_ends_earlier_denials_and_no_later_one() {
        let (mut known, start) = (KnownRoutes::default(), Instant::now());
        let at = |seconds| start + Duration::from_secs(seconds);
        known.deny(Route::Embeddings, at(0));
        known.deny(Route::Score, at(2));
        assert!(known.read(Some(RouteSet::ALL), at(1)), "one refusal is later");
        assert!(known.set().has(Route::Embeddings) && !known.set().has(Route::Score));
        assert!(!known.read(None, at(3)));
        assert!(!known.set().has(Route::Score), "an engine without a page still refuses");
    }
}
