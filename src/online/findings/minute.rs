//! One pool in the last minute and in the hour before, with the symptoms. A change without a
//! symptom needs no action.
//!
//! | symptom | bound |
//! |---|---|
//! | requests wait | now and in half of the looks, here or in all engines; or [`SHED_MIN`] shed |
//! | first tokens are late | the mean is [`LATER`] times and [`LATER_S`] above the past mean |

use super::facts::{BackendFacts, Facts, PageFacts, PoolFacts};
use super::finding::{Cause, Finding};
use sluice_gateway::pool::DecodeSums;
use sluice_gateway::telemetry::totals::Totals;

/// Values that a comparison needs.
pub(super) const VALUES_MIN: f64 = 8.0;
const SHED_MIN: f64 = 3.0;
/// First tokens are late if the mean is at least this multiple of the past mean.
const LATER: f64 = 1.5;
/// The mean must also be this many seconds above the past mean.
const LATER_S: f64 = 0.03;
/// KV use up to which an engine has room.
pub(super) const ROOM: f64 = 0.7;
/// Seconds of earlier facts that a comparison with the past needs.
const PAST_MIN_S: f64 = 60.0;

pub(super) struct Compared<'a> {
    pub(super) now: &'a Facts,
    /// The facts a minute ago.
    pub(super) before: &'a Facts,
    pub(super) span: f64,
    /// The looks of the last five minutes, the latest last.
    pub(super) looks: &'a [&'a Facts],
    /// How many of `looks` are of the last minute.
    pub(super) recent: usize,
    /// The facts to compare with: the earliest, the last before the first present change of the
    /// load, and the seconds in between.
    pub(super) past: Option<(&'a Facts, &'a Facts, f64)>,
}

#[derive(Clone, Copy)]
pub(super) struct Past<'a> {
    pub(super) first: &'a Facts,
    pub(super) last: &'a Facts,
    pub(super) seconds: f64,
    pub(super) totals: Totals,
}

pub(super) struct Minute<'a> {
    pub(super) pool: &'a PoolFacts,
    pub(super) before: &'a PoolFacts,
    pub(super) recent: Totals,
    pub(super) past: Option<Past<'a>>,
    pub(super) span: f64,
    /// The pool in the looks of the last five minutes, the latest first.
    pub(super) looks: Vec<&'a PoolFacts>,
    pub(super) of_minute: usize,
}

impl<'a> Minute<'a> {
    /// `None`: the pool is new.
    pub(super) fn new(compared: &Compared<'a>, pool: &'a PoolFacts) -> Option<Self> {
        let before = compared.before.pool(&pool.name)?;
        let past = compared.past.filter(|(.., seconds)| *seconds >= PAST_MIN_S).and_then(|(first, last, seconds)| {
            let totals = last.pool(&pool.name)?.totals.since(&first.pool(&pool.name)?.totals);
            Some(Past { first, last, seconds, totals })
        });
        let earlier = compared.looks.iter().rev().map_while(|facts| facts.pool(&pool.name));
        Some(Self {
            pool,
            before,
            recent: pool.totals.since(&before.totals),
            past,
            span: compared.span,
            looks: std::iter::once(pool).chain(earlier).collect(),
            of_minute: compared.recent + 1,
        })
    }

    /// The share of the last minute's looks for which `is` holds.
    pub(super) fn share(&self, is: impl Fn(&PoolFacts) -> bool) -> f64 {
        let looks = self.looks.iter().take(self.of_minute);
        looks.clone().filter(|pool| is(pool)).count() as f64 / looks.count() as f64
    }

    pub(super) fn waits(&self) -> bool {
        let in_engines = |pool: &PoolFacts| pool.all_engines(|engine| engine.waiting > 0.0);
        (self.pool.queue > 0.0 && self.share(|pool| pool.queue > 0.0) >= 0.5)
            || (in_engines(self.pool) && self.share(in_engines) >= 0.5)
            || self.recent.shed >= SHED_MIN
    }

    pub(super) fn is_late(&self) -> bool {
        self.is_later(Totals::mean_engine_ttft)
    }

    /// [`is_late`](Self::is_late) for the prompts with most of the tokens.
    pub(super) fn is_late_for_long(&self) -> bool {
        self.is_later(Totals::mean_token_ttft)
    }

    fn is_later(&self, mean: impl Fn(&Totals) -> f64) -> bool {
        let past = self.past.map_or(f64::NAN, |past| mean(&past.totals));
        mean(&self.recent) >= (LATER * past).max(past + LATER_S)
    }

    pub(super) fn finding(
        &self,
        cause: Cause,
        subject: &str,
        sentence: String,
        evidence: String,
        advice: &str,
    ) -> Finding {
        Finding {
            is_change: cause.is_change(),
            cause,
            pool: self.pool.name.to_string(),
            subject: subject.to_owned(),
            sentence,
            evidence,
            advice: advice.to_owned(),
            since_seconds: 0.0,
        }
    }

    pub(super) fn of_backend(&self, backend: &BackendFacts) -> Totals {
        let before = self.before.backend(&backend.name).map(|before| before.totals).unwrap_or_default();
        backend.totals.since(&before)
    }

    /// How long streams of the backend generated in the last minute, and their tokens.
    pub(super) fn decoding(&self, backend: &BackendFacts) -> Option<DecodeSums> {
        let (now, before) = (backend.decoding, self.before.backend(&backend.name)?.decoding);
        Some(DecodeSums { seconds: now.seconds - before.seconds, tokens: now.tokens - before.tokens })
    }

    /// The engine's page a minute ago (or the first after a restart) and now.
    pub(super) fn engine_pair(&self, backend: &BackendFacts) -> Option<(PageFacts, PageFacts)> {
        let looks = self.looks.iter().take(self.of_minute);
        let pages: Vec<PageFacts> = looks.map_while(|look| look.backend(&backend.name)?.engine).collect();
        // A sum that fell shows a restart.
        let started = pages.windows(2).position(|pair| pair[1].progress > pair[0].progress);
        Some((pages[started.unwrap_or(pages.len().checked_sub(1)?)], *pages.first()?))
    }
}
