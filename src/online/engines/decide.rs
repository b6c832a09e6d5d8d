//! Decides whether a change of engines begins, and which one.
//!
//! The tuner simulates every value near the present ones, takes the change with the largest certain
//! gain, and begins it if the gain pays for the restarts. Without a simulation it follows the
//! diagnosis. It keeps the reason for doing nothing in words.

use std::time::Duration;

use crate::engines::change::{EngineChange, Stage};
use crate::engines::flags::{EngineFlag, Flags};
use crate::engines::forecast::{Answer, Candidate, Question};
use crate::engines::look::{EngineState, Look, Need, Order};
use crate::engines::pooled::Subject;
use crate::engines::proof::Load;
use crate::engines::saved::Closed;
use crate::engines::{
    ASK_INTERVAL, ASK_INTERVAL_MAX, ASSUMED, CLOSED, COPIES, DWELL, EngineTuner, GAIN, GAIN_MIN, PAYS, RESTART, State,
};
use crate::event::{Acting, Event, EventKind, Proposal};
use crate::limits::PoolLimits;

/// Minimum loss at which a full engine is restarted when no forecast exists.
const GROSS_LOSS: f64 = 0.5;

struct Best {
    candidate: Candidate,
    certain: f64,
    /// By how much engines with the change lose less than engines without it, under the same
    /// limits.
    forecast: Option<f64>,
    why: String,
}

impl EngineTuner {
    pub(crate) fn watch(&mut self, look: &Look<'_>, orders: &mut Vec<Order>) {
        if let Some(why) = &self.frozen {
            self.belief = why.clone();
            return;
        }
        if self.proposal.as_ref().is_some_and(|(_, change)| is_outdated(look, change)) {
            (self.proposal, self.approved) = (None, None);
        }
        let is_approved = |(proposal, _): &&(Proposal, EngineChange)| self.approved == Some(proposal.id);
        if let Some((proposal, change)) = self.proposal.as_ref().filter(is_approved).cloned() {
            self.belief.clone_from(&proposal.why);
            // An approval stays valid until the change may begin.
            if look.acting != Acting::Proposes && self.may_begin(look, &change) {
                self.begin(look, change);
            }
            return;
        }
        let waits = |need: &&Need| need.since.is_some_and(|since| look.now >= since + self.rules.missed_for);
        let needs: Vec<&Need> = look.needs.iter().filter(waits).collect();
        if needs.is_empty() {
            "objectives are met, or limits of the gateway may still help".clone_into(&mut self.belief);
            self.proposal = None;
            return;
        }
        self.proposal.take_if(|(_, change)| !needs.iter().any(|need| need.pools.contains(&change.pool)));
        let mut pools: Vec<_> =
            needs.into_iter().flat_map(|need| need.pools.iter().map(move |pool| (need, pool))).collect();
        // Pools take turns, also if no change helps one of them.
        let last = pools.iter().position(|(_, pool)| self.asked_last.as_ref() == Some(pool));
        pools.rotate_left(last.map_or(0, |last| last + 1));
        let mut why_not = String::new();
        for (need, pool) in pools {
            match self.question(look, need, pool) {
                Ok(question) => {
                    self.asked_last = Some(pool.clone());
                    self.asked = Some(question.clone());
                    self.state = State::Simulating(look.now);
                    orders.push(Order::Simulate(question));
                    return;
                }
                Err(why) => why_not = format!("{pool}: {why}"),
            }
        }
        self.belief = why_not;
    }

    /// The question to simulate for a pool, or the reason to leave the engines alone.
    fn question(&mut self, look: &Look<'_>, need: &Need, pool: &str) -> Result<Question, String> {
        let engines: Vec<&EngineState> = look.engines.iter().filter(|engine| engine.pool == pool).collect();
        if engines.len() < 2 {
            return Err("with one engine, no other serves while it restarts".to_owned());
        }
        let unknown = engines.iter().find(|engine| engine.flags.as_ref().is_none_or(Flags::is_empty));
        if let Some(engine) = unknown {
            return Err(format!("the flags of {} are not known, or the gateway does not run it", engine.backend));
        }
        if let Some(engine) = engines.iter().find(|engine| !engine.serves) {
            return Err(format!("{} does not serve", engine.backend));
        }
        let flags = engines[0].flags.clone().unwrap_or_default();
        if engines.iter().any(|engine| engine.flags.as_ref() != Some(&flags)) {
            return Err("its engines have different flags".to_owned());
        }
        // More sequences in a full KV cache would be preempted.
        let is_full = need.advice.as_ref().is_some_and(|(flag, up, _)| *flag == EngineFlag::MaxNumSeqs && !up);
        let starts = engines.iter().filter_map(|engine| engine.started_in).max();
        let absent = self.lasts.or(starts).unwrap_or(RESTART) + COPIES.0;
        let (limits, load_since) = (need.limits.clone(), need.load_since);
        self.pooled.entry(pool.to_owned()).or_default().begin(Subject {
            flags: flags.clone(),
            absent,
            limits,
            load_since,
        });
        let beside = need.pools.iter().position(|own| own == pool).and_then(|at| need.beside.get(at));
        let limits_of_pool = std::iter::once(None).chain(beside.into_iter().flatten().copied().map(Some));
        let pooled = &self.pooled[pool];
        let mut candidates = Vec::new();
        for flag in self.rules.flags.iter().copied() {
            let Some(value) = flags.get(&flag).copied() else { continue };
            let open = |to: &f64| {
                let too_many = flag == EngineFlag::MaxNumSeqs && is_full && *to > value;
                !too_many && !self.is_closed(pool, flag, *to, look.now)
            };
            let near = flag.near_used(value, need.running_peak).into_iter().filter(open);
            let with = |to| limits_of_pool.clone().map(move |limits| Candidate { flag, to, limits });
            candidates.extend(near.flat_map(with).filter(|candidate| !pooled.is_beaten(*candidate)));
        }
        if candidates.is_empty() {
            return Err("what may help was tried and did not".to_owned());
        }
        let limits = need.pools.iter().cloned().zip(need.in_force.iter().copied()).collect();
        Ok(Question { pool: pool.to_owned(), flags, limits, candidates, absent, requests: Vec::new() })
    }

    fn is_closed(&self, pool: &str, flag: EngineFlag, to: f64, now: Duration) -> bool {
        let is = |one: &&Closed| one.pool == pool && one.flag == flag && one.to == to && now < one.until;
        self.closed.iter().any(|one| is(&one))
    }

    /// Takes the answer of the simulation.
    pub fn answered(&mut self, answer: &Answer, look: &Look<'_>) {
        if !matches!(self.state, State::Simulating(_)) {
            return;
        }
        let Some(question) = self.asked.take() else {
            // The question was for another configuration.
            self.state = State::Watching(look.now);
            return;
        };
        let (key, before) = (format!("pool.{}.engine", question.pool), self.events.len());
        self.decide(question, answer, look);
        if self.events.len() == before {
            let (at, why) = (look.now.as_secs_f64(), self.belief.clone());
            self.events.push(Event { at, kind: EventKind::Forecast, key, values: Default::default(), why });
        }
    }

    fn decide(&mut self, question: Question, answer: &Answer, look: &Look<'_>) {
        self.state = State::Watching(look.now + ASK_INTERVAL);
        let Some(need) = look.needs.iter().find(|need| need.pools.contains(&question.pool)) else { return };
        if !still_applies(&question, need) {
            "objectives are met or limits have changed since the simulation began".clone_into(&mut self.belief);
            self.state = State::Watching(look.now);
            self.drop_proposal(&question.pool);
            return;
        }
        let lasted = look.now.saturating_sub(need.load_since);
        // Each simulation uses new requests, and a change that does not pay yet can only pay once
        // the load has lasted distinctly longer.
        let wait = (lasted / 8).clamp(ASK_INTERVAL, ASK_INTERVAL_MAX).max(answer.span);
        self.state = State::Watching(look.now + wait);
        let answer = &self.pooled.entry(question.pool.clone()).or_default().add(&question, answer);
        let best = self.best(&question, answer, need);
        let certain = best.as_ref().map_or(0.0, |best| best.certain);
        self.suggestions.retain(|(.., until)| look.now < *until);
        let is_new = |(limits, _): &(PoolLimits, String)| {
            !self.suggestions.iter().any(|(pool, known, _)| *pool == question.pool && known == limits)
        };
        let free = free_gain(&question, answer, certain).filter(is_new);
        if let Some((limits, why)) = free.filter(|_| answer.unexplained(need.score.loss).is_none()) {
            self.suggestions.push((question.pool.clone(), limits, look.now + CLOSED));
            self.belief = format!("{why}: tried without a change of engines");
            self.drop_proposal(&question.pool);
            self.suggested = Some((question.pool, limits, why));
            return;
        }
        let Some(best) = best else {
            self.belief = match answer.unexplained(need.score.loss) {
                Some(why) => format!("{why}, and the engines show no reason for it"),
                None => "no change of a flag is expected to help".to_owned(),
            };
            self.drop_proposal(&question.pool);
            return;
        };
        self.weigh(question, answer, need, best, look);
    }

    /// Begins or proposes a change if the gain matters and pays; otherwise keeps the reason.
    fn weigh(&mut self, question: Question, answer: &Answer, need: &Need, best: Best, look: &Look<'_>) {
        let Best { candidate, certain, forecast, why } = best;
        let Candidate { flag, to, limits: with } = candidate;
        let place = need.pools.iter().position(|pool| *pool == question.pool);
        let loss = answer.now.filter(|_| forecast.is_some()).map_or(need.score.loss, |now| now.loss);
        let from = question.flags[&flag];
        self.numbers += 1;
        let backends = backends(look, &question.pool, self.numbers as usize);
        let count = backends.len() as f64;
        let dwell = look.now.saturating_sub(need.load_since).clamp(DWELL.0, DWELL.1);
        let absence = answer.absence.unwrap_or(1.0 / count);
        let pooled = self.pooled.entry(question.pool.clone()).or_default();
        let under = pooled.limits_save(candidate).filter(|saved| *saved > 0.0).map(|saved| (absence - saved).max(0.0));
        let absent = under.unwrap_or(absence);
        let changed = pooled.absence_with(candidate).unwrap_or(absent);
        let cost = cost(question.absent, count, absent, changed);
        let pays = certain * dwell.as_secs_f64() > PAYS * cost;
        let matters = certain >= (GAIN * loss).max(GAIN_MIN);
        self.belief = format!("{why}; {certain:.3} of a loss of {loss:.3} is a certain gain");
        if let Some(under) = under {
            self.belief +=
                &format!("; with the same limits, loss rises by {under:.3} while an engine restarts, not {absence:.3}");
        }
        if !matters || !pays {
            let less = match matters {
                true => format!(
                    "less than restarts cost, unless this load stays for {:.1} h; expected are {:.1} h",
                    PAYS * cost / certain / 3_600.0,
                    dwell.as_secs_f64() / 3_600.0
                ),
                false => "too little".to_owned(),
            };
            let (to, from) = (flag.show(to), flag.show(from));
            self.belief = format!("{} = {to} (was {from}): {}: {less}", flag.name(), self.belief);
            self.drop_proposal(&question.pool);
            return;
        }
        let change = EngineChange {
            number: self.numbers,
            pool: question.pool,
            backends,
            flag,
            from,
            to,
            limits: with,
            limits_first: under.is_some(),
            loss_before: place.and_then(|at| need.losses.get(at)).copied().unwrap_or(need.score.loss),
            forecast,
            // A forecast includes the cost of waiting. Without one, requests must be so late that
            // waiting hardly matters.
            crowded: forecast.is_some() || need.score.loss >= GROSS_LOSS,
            changed: Vec::new(),
            stage: Stage::Canary,
            proved: Load::default(),
        };
        if look.acting == Acting::Acts && self.may_begin(look, &change) {
            self.begin(look, change);
        } else {
            self.propose(look.now, change);
        }
    }

    fn best(&self, question: &Question, answer: &Answer, need: &Need) -> Option<Best> {
        let unexplained = answer.unexplained(need.score.loss);
        let Some(now) = answer.now.filter(|_| unexplained.is_none()) else {
            let (flag, up, why) = need.advice.as_ref()?;
            let value = *question.flags.get(flag)?;
            let mut fits: Vec<f64> = question
                .candidates
                .iter()
                .filter(|one| one.flag == *flag && one.limits.is_none())
                .map(|one| one.to)
                .filter(|to| (*to > value || (*to == 0.0 && value > 0.0)) == *up)
                .collect();
            fits.sort_by(|one, other| (one - value).abs().total_cmp(&(other - value).abs()));
            let certain = ASSUMED * need.score.loss;
            let why = format!("{}; {why}", unexplained.as_deref().unwrap_or("not simulated"));
            let candidate = Candidate { flag: *flag, to: *fits.first()?, limits: None };
            return Some(Best { candidate, certain, forecast: None, why });
        };
        let limits = need.pools.iter().position(|pool| *pool == question.pool).and_then(|at| need.in_force.get(at));
        let each =
            question.candidates.iter().zip(&answer.candidates).enumerate().filter_map(|(at, (one, forecast))| {
                let forecast = (*forecast)?;
                let gain = now.loss - forecast.loss;
                let unchanged = answer.unchanged.get(at).copied().flatten().filter(|_| one.limits.is_some());
                let with = match one.limits.zip(limits) {
                    Some((limits, now)) => format!(" with {}", limits.differences(now)),
                    None => String::new(),
                };
                let why = format!(
                    "simulated{with}: loss {:.3} after {:.3}, attainment {:.1} % after {:.1} %",
                    forecast.loss,
                    now.loss,
                    100.0 * forecast.attainment,
                    100.0 * now.attainment
                );
                let certain = self.trust.certain(gain, forecast.error);
                // A restart must pay by the flag's gain, without the gain of the limits alone.
                let measured = unchanged.map_or(gain, |unchanged| unchanged.loss - forecast.loss);
                let certain = certain.min(self.trust.certain(measured, forecast.error));
                Some(Best { candidate: *one, certain, forecast: Some(measured), why })
            });
        each.filter(|best| best.certain > 0.0).max_by(|one, other| one.certain.total_cmp(&other.certain))
    }

    fn drop_proposal(&mut self, pool: &str) {
        self.proposal.take_if(|(_, change)| change.pool == pool);
    }

    fn propose(&mut self, now: Duration, change: EngineChange) {
        let is_known = |(_, known): &(Proposal, EngineChange)| {
            let same_engines = known.pool == change.pool && known.from == change.from;
            same_engines && (known.flag, known.to, known.limits) == (change.flag, change.to, change.limits)
        };
        // A proposal for another pool stays until it is approved or not needed.
        let is_others = |(_, known): &(Proposal, EngineChange)| known.pool != change.pool;
        if self.proposal.as_ref().is_some_and(|known| is_known(known) || is_others(known)) {
            return;
        }
        let values = (change.flag.show(change.from), change.flag.show(change.to));
        let proposal = Proposal { id: change.number, key: change.key(), values, why: self.belief.clone() };
        self.events.push(Event {
            at: now.as_secs_f64(),
            kind: EventKind::Proposed,
            key: proposal.key.clone(),
            values: proposal.values.clone(),
            why: proposal.why.clone(),
        });
        self.proposal = Some((proposal, change));
    }

    /// Whether a change may begin now; adds the reason to the belief if not.
    fn may_begin(&mut self, look: &Look<'_>, change: &EngineChange) -> bool {
        // Two restarts: the canary must be able to return.
        let why = if let Some(why) = look.stands_back.or(look.waits) {
            Some(why.to_owned())
        } else if self.restarts_left(look.now) < 2 {
            Some("the restarts of this hour are used up".to_owned())
        } else if self.overspent(look) {
            Some("changes have used up their part of the error budget".to_owned())
        } else {
            let serves = |backend: &String| {
                look.engines.iter().any(|e| e.pool == change.pool && e.backend == *backend && e.serves)
            };
            change.backends.iter().find(|backend| !serves(backend)).map(|backend| format!("{backend} does not serve"))
        };
        why.is_none_or(|why| {
            self.belief += &format!("; it waits: {why}");
            false
        })
    }
}

/// Whether an engine of the change is gone, or no longer has the flag's old value.
fn is_outdated(look: &Look<'_>, change: &EngineChange) -> bool {
    let own = || look.engines.iter().filter(|engine| engine.pool == change.pool);
    let is_other = |engine: &EngineState| {
        let flags = engine.flags.as_ref().filter(|flags| !flags.is_empty());
        flags.is_some_and(|flags| flags.get(&change.flag) != Some(&change.from))
    };
    own().any(is_other) || !change.backends.iter().all(|backend| own().any(|engine| engine.backend == *backend))
}

/// The backends of a pool, rotated by `number` so that canaries take turns.
fn backends(look: &Look<'_>, pool: &str, number: usize) -> Vec<String> {
    let names = |engine: &&EngineState| engine.pool == pool;
    let mut backends: Vec<String> = look.engines.iter().filter(names).map(|engine| engine.backend.clone()).collect();
    let first = number % backends.len().max(1);
    backends.rotate_left(first);
    backends
}

/// Whether objectives are still missed, under the limits that were simulated.
fn still_applies(question: &Question, need: &Need) -> bool {
    let of = |pool: &String| need.pools.iter().position(|own| own == pool).and_then(|at| need.in_force.get(at));
    need.since.is_some() && question.limits.iter().all(|(pool, limits)| of(pool) == Some(limits))
}

/// Limits that alone gain at least as much as the best change is certain to gain, and why.
fn free_gain(question: &Question, answer: &Answer, certain: f64) -> Option<(PoolLimits, String)> {
    let now = answer.now?;
    let each = question.candidates.iter().zip(&answer.unchanged);
    let gains = each.filter_map(|(one, unchanged)| Some((one.limits?, now.loss - (*unchanged)?.loss)));
    let (limits, gain) = gains.max_by(|one, other| one.1.total_cmp(&other.1))?;
    let matters = gain >= certain.max(GAIN * now.loss).max(GAIN_MIN);
    let why = format!("simulated: loss {:.3} after {:.3} under the limits of the file", now.loss - gain, now.loss);
    matters.then_some((limits, why))
}

/// Cost of a change of `count` engines, in loss of a request times seconds. `absent`: how long the
/// canary restarts and gets copies. `absence`: rise of the mean loss while one engine is gone;
/// `changed`: the same if the others have the change. The cost moves from `absence` to `changed` as
/// engines restart in turn.
fn cost(absent: Duration, count: f64, absence: f64, changed: f64) -> f64 {
    let lasts = absent.saturating_sub(COPIES.0).as_secs_f64();
    let share = if count > 1.0 { count / (2.0 * (count - 1.0)) } else { 0.0 };
    let others = absence + (changed - absence) * share;
    absence * absent.as_secs_f64() + others * lasts * (count - 1.0)
}
