//! Decides whether a change of engines begins, and which one.
//!
//! The tuner simulates every value near the present ones, and begins the change with the largest
//! certain gain if that gain pays for the restarts. Without a simulation it follows the diagnosis.

use std::time::Duration;

use super::EngineTuner;
use super::change::EngineChange;
use super::flags::{EngineFlag, Flags};
use super::forecast::{EngineAnswer, EngineCandidate, EngineQuestion};
use super::look::{EngineLook, EngineState, Need, PoolNeed, TunerOrder};
use super::phase::{EngineTrial, Phase, Restart, Step};
use super::pooled::Subject;
use super::proof::Load;
use super::trial::COPIES;
use super::verdict::{ENGINE_GAIN, ENGINE_GAIN_MIN};
use crate::event::{Acting, Event, EventKind, Proposal};
use crate::limits::PoolLimits;

/// Shortest and longest time between two simulations.
pub(super) const ASK_INTERVAL: Duration = Duration::from_secs(300);
const ASK_INTERVAL_MAX: Duration = Duration::from_secs(900);
/// Multiple of the cost that a change must gain while the load should last.
pub(super) const PAYS: f64 = 3.0;
/// Bounds of the time for which a load should last.
pub(super) const DWELL: (Duration, Duration) = (Duration::from_secs(7_200), Duration::from_secs(24 * 3_600));
/// Assumed gain of a change without a simulation, as a share of the loss.
const ASSUMED: f64 = 0.25;
/// Assumed duration of a restart while no restart or start was measured.
const RESTART: Duration = Duration::from_secs(120);
/// Minimum loss at which a full engine is restarted when no forecast exists.
const CROWDED_LOSS: f64 = 0.5;
const SUGGESTED: Duration = Duration::from_secs(6 * 3_600);

struct Best {
    candidate: EngineCandidate,
    certain: f64,
    /// How far the flag alone lowers the loss, under the same limits.
    forecast: Option<f64>,
    why: String,
}

impl EngineTuner {
    pub(super) fn watch(&mut self, look: &EngineLook<'_>, orders: &mut Vec<TunerOrder>) {
        if let Some(why) = &self.frozen {
            self.belief = why.clone();
            return;
        }
        self.proposals.withdraw_if(|change| is_outdated(look, change));
        if let Some((proposal, change)) = self.proposals.approved() {
            let change = change.clone();
            self.belief.clone_from(&proposal.why);
            if look.acting != Acting::Proposes && self.may_begin(look, &change) {
                self.begin(look, change);
            }
            return;
        }
        let waits = |need: &&Need| need.since.is_some_and(|since| look.now >= since + self.rules.missed_for);
        let needs: Vec<&Need> = look.needs.iter().filter(waits).collect();
        if needs.is_empty() {
            "objectives are met, or limits of the gateway may still help".clone_into(&mut self.belief);
            return self.proposals.withdraw();
        }
        self.proposals.withdraw_if(|change| !needs.iter().any(|need| need.of(&change.pool).is_some()));
        let mut pools: Vec<_> =
            needs.into_iter().flat_map(|need| need.pools.iter().map(move |pool| (need, pool))).collect();
        // Pools take turns.
        let last = pools.iter().position(|(_, pool)| self.asked_last.as_ref() == Some(&pool.name));
        pools.rotate_left(last.map_or(0, |last| last + 1));
        let mut why_not = String::new();
        for (need, pool) in pools {
            match self.question(look, need, pool) {
                Ok(question) => {
                    self.asked_last = Some(pool.name.clone());
                    self.phase.enter(Phase::Simulating { since: look.now, question: Some(question.clone()) });
                    orders.push(TunerOrder::Simulate(question));
                    return;
                }
                Err(why) => why_not = format!("{}: {why}", pool.name),
            }
        }
        self.belief = why_not;
    }

    /// The question to simulate, or the reason to leave the engines alone.
    fn question(
        &mut self,
        look: &EngineLook<'_>,
        need: &Need,
        PoolNeed { name: pool, beside, .. }: &PoolNeed,
    ) -> Result<EngineQuestion, String> {
        let engines: Vec<&EngineState> = look.engines_of(pool).collect();
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
        // With more sequences, an engine with a full KV cache would preempt some.
        let is_full = need.advice.as_ref().is_some_and(|(flag, up, _)| *flag == EngineFlag::MaxNumSeqs && !up);
        let starts = engines.iter().filter_map(|engine| engine.started_in).max();
        let absent = self.lasts.or(starts).unwrap_or(RESTART) + COPIES.0;
        let (limits, load_since) = (need.limits.clone(), need.load_since);
        let pooled = self.pooled.entry(pool.clone()).or_default();
        pooled.begin(Subject { flags: flags.clone(), absent, limits, load_since });
        let limits_of_pool = std::iter::once(None).chain(beside.iter().copied().map(Some));
        let mut candidates = Vec::new();
        for flag in self.rules.flags.iter().copied() {
            let Some(value) = flags.get(&flag).copied() else { continue };
            let open = |to: &f64| {
                let too_many = flag == EngineFlag::MaxNumSeqs && is_full && *to > value;
                !too_many && self.closed.is_open(&(pool.clone(), flag, *to), look.now)
            };
            let near = flag.near_used(value, need.running_peak).into_iter().filter(open);
            let with = |to| limits_of_pool.clone().map(move |limits| EngineCandidate { flag, to, limits });
            candidates.extend(near.flat_map(with).filter(|candidate| !pooled.is_beaten(*candidate)));
        }
        if candidates.is_empty() {
            return Err("what may help was tried and did not".to_owned());
        }
        let limits = need.pools.iter().map(|pool| (pool.name.clone(), pool.in_force)).collect();
        Ok(EngineQuestion { pool: pool.clone(), flags, limits, candidates, absent, requests: Vec::new() })
    }

    /// Takes the answer of the simulation.
    pub fn answered(&mut self, answer: &EngineAnswer, look: &EngineLook<'_>) {
        let Phase::Simulating { question, .. } = &mut self.phase else { return };
        let question = question.take();
        self.phase.enter(Phase::Watching { from: look.now });
        let Some(question) = question else { return };
        let (key, before) = (format!("pool.{}.engine", question.pool), self.events.len());
        self.decide(question, answer, look);
        if self.events.len() == before {
            let (at, why) = (look.now.as_secs_f64(), self.belief.clone());
            self.events.push(Event { at, kind: EventKind::Forecast, key, values: Default::default(), why });
        }
    }

    fn decide(&mut self, question: EngineQuestion, answer: &EngineAnswer, look: &EngineLook<'_>) {
        let Some((need, pool)) = look.need_of(&question.pool).and_then(|need| Some((need, need.of(&question.pool)?)))
        else {
            return self.phase.enter(Phase::Watching { from: look.now + ASK_INTERVAL });
        };
        if !still_applies(&question, need) {
            "objectives are met or limits have changed since the simulation began".clone_into(&mut self.belief);
            return self.drop_proposal(&question.pool);
        }
        let lasted = look.now.saturating_sub(need.load_since);
        // The next simulation needs new requests, so it waits for the span of the last. A change
        // that does not pay yet needs a load that has lasted distinctly longer.
        let wait = (lasted / 8).clamp(ASK_INTERVAL, ASK_INTERVAL_MAX).max(answer.span);
        self.phase.enter(Phase::Watching { from: look.now + wait });
        let answer = &self.pooled.entry(question.pool.clone()).or_default().add(&question, answer);
        let best = self.best(&question, answer, need, pool);
        let certain = best.as_ref().map_or(0.0, |best| best.certain);
        self.suggestions.retain(|(.., until)| look.now < *until);
        let is_new = |(limits, _): &(PoolLimits, String)| {
            !self.suggestions.iter().any(|(pool, known, _)| *pool == question.pool && known == limits)
        };
        let free = free_gain(&question, answer, certain).filter(is_new);
        if let Some((limits, why)) = free.filter(|_| answer.unexplained(need.score.loss).is_none()) {
            self.suggestions.push((question.pool.clone(), limits, look.now + SUGGESTED));
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
            return self.drop_proposal(&question.pool);
        };
        self.weigh(question, answer, (need, pool), best, look);
    }

    /// Begins or proposes a change that pays; otherwise keeps the reason.
    fn weigh(
        &mut self,
        question: EngineQuestion,
        answer: &EngineAnswer,
        (need, pool): (&Need, &PoolNeed),
        best: Best,
        look: &EngineLook<'_>,
    ) {
        let Best { candidate, certain, forecast, why } = best;
        let EngineCandidate { flag, to, limits: with } = candidate;
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
        let matters = certain >= (ENGINE_GAIN * loss).max(ENGINE_GAIN_MIN);
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
            return self.drop_proposal(&question.pool);
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
            loss_before: pool.loss,
            forecast,
            // A forecast includes the cost of waiting during a restart. Without a forecast,
            // requests must already be so late that this wait hardly matters.
            crowded: forecast.is_some() || need.score.loss >= CROWDED_LOSS,
            changed: Vec::new(),
            proved: Load::default(),
        };
        if look.acting == Acting::Acts && self.may_begin(look, &change) {
            self.begin(look, change);
        } else {
            self.propose(look.now, change);
        }
    }

    fn best(&self, question: &EngineQuestion, answer: &EngineAnswer, need: &Need, pool: &PoolNeed) -> Option<Best> {
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
            let candidate = EngineCandidate { flag: *flag, to: *fits.first()?, limits: None };
            return Some(Best { candidate, certain, forecast: None, why });
        };
        let each = question.candidates.iter().zip(&answer.candidates).filter_map(|(one, found)| {
            let forecast = found.forecast?;
            let gain = now.loss - forecast.loss;
            let with = one.limits.map(|limits| format!(" with {}", limits.differences(&pool.in_force)));
            let why = format!(
                "simulated{}: loss {:.3} after {:.3}, attainment {:.1} % after {:.1} %",
                with.unwrap_or_default(),
                forecast.loss,
                now.loss,
                100.0 * forecast.attainment,
                100.0 * now.attainment
            );
            let certain = self.trust.certain(gain, forecast.error);
            // The restarts must pay by the flag's gain alone.
            let measured = found.unchanged.map_or(gain, |unchanged| unchanged.loss - forecast.loss);
            let certain = certain.min(self.trust.certain(measured, forecast.error));
            Some(Best { candidate: *one, certain, forecast: Some(measured), why })
        });
        each.filter(|best| best.certain > 0.0).max_by(|one, other| one.certain.total_cmp(&other.certain))
    }

    fn drop_proposal(&mut self, pool: &str) {
        self.proposals.withdraw_if(|change| change.pool == pool);
    }

    fn propose(&mut self, now: Duration, change: EngineChange) {
        let is_known = |known: &EngineChange| {
            let of = |one: &EngineChange| (one.flag, one.from, one.to, one.limits);
            // A proposal for another pool is not replaced by this change.
            known.pool != change.pool || of(known) == of(&change)
        };
        if self.proposals.change().is_some_and(is_known) {
            return;
        }
        let values = (change.flag.show(change.from), change.flag.show(change.to));
        let proposal = Proposal { id: change.number, key: change.key(), values, why: self.belief.clone() };
        self.events.push(self.proposals.propose(now, proposal, change));
    }

    fn begin(&mut self, look: &EngineLook<'_>, change: EngineChange) {
        let own = look.need_of(&change.pool);
        let waited = look.engines_of(&change.pool).map(|engine| engine.waiting).max();
        let mut trial = EngineTrial::new(change, Step::Canary(Restart::at(look.now)));
        trial.before = own.map(|need| need.totals);
        trial.missed_before = own.map_or(0.0, |need| 1.0 - need.score.attainment);
        trial.waited = waited.unwrap_or_default();
        self.proposals.withdraw();
        self.pooled.clear();
        self.phase.enter(Phase::Changing(Box::new(trial)));
        self.note(look.now, EventKind::Tried, self.belief.clone());
    }

    /// Whether a change may begin. If not, writes the reason into the belief.
    fn may_begin(&mut self, look: &EngineLook<'_>, change: &EngineChange) -> bool {
        // Two restarts must be left, so that the canary can return.
        let why = if let Some(why) = look.stands_back.or(look.waits) {
            Some(why.to_owned())
        } else if self.restarts_left(look.now) < 2 {
            Some("the restarts of this hour are used up".to_owned())
        } else if self.overspent(look) {
            Some("changes have used up their part of the error budget".to_owned())
        } else {
            let serves = |backend: &String| look.engine(&change.pool, backend).is_some_and(|engine| engine.serves);
            change.backends.iter().find(|backend| !serves(backend)).map(|backend| format!("{backend} does not serve"))
        };
        why.is_none_or(|why| {
            self.belief += &format!("; it waits: {why}");
            false
        })
    }
}

/// Whether an engine of the change is gone, or no longer has the old value.
fn is_outdated(look: &EngineLook<'_>, change: &EngineChange) -> bool {
    let is_other = |engine: &EngineState| {
        let is_known = engine.flags.as_ref().is_some_and(|flags| !flags.is_empty());
        is_known && engine.flag(change.flag) != Some(change.from)
    };
    look.engines_of(&change.pool).any(is_other)
        || change.backends.iter().any(|backend| look.engine(&change.pool, backend).is_none())
}

/// The backends of a pool, rotated by `number`, so that canaries take turns.
fn backends(look: &EngineLook<'_>, pool: &str, number: usize) -> Vec<String> {
    let mut backends: Vec<String> = look.engines_of(pool).map(|engine| engine.backend.clone()).collect();
    let first = number % backends.len().max(1);
    backends.rotate_left(first);
    backends
}

fn still_applies(question: &EngineQuestion, need: &Need) -> bool {
    let is_in_force =
        |(pool, limits): &(String, PoolLimits)| need.of(pool).is_some_and(|pool| pool.in_force == *limits);
    need.since.is_some() && question.limits.iter().all(is_in_force)
}

/// The best limits without a change of flags, and the reason. `None`: they gain less than
/// `certain`, the certain gain of the best change of flags.
fn free_gain(question: &EngineQuestion, answer: &EngineAnswer, certain: f64) -> Option<(PoolLimits, String)> {
    let now = answer.now?;
    let each = question.candidates.iter().zip(&answer.candidates);
    let gains = each.filter_map(|(one, found)| Some((one.limits?, now.loss - found.unchanged?.loss)));
    let (limits, gain) = gains.max_by(|one, other| one.1.total_cmp(&other.1))?;
    let matters = gain >= certain.max(ENGINE_GAIN * now.loss).max(ENGINE_GAIN_MIN);
    let why = format!("simulated: loss {:.3} after {:.3} under the limits of the file", now.loss - gain, now.loss);
    matters.then_some((limits, why))
}

/// Cost of a change of `count` engines, in loss of a request times seconds. `absent`: how long the
/// canary serves no clients (the restart, then only copies). The absence of one engine raises the
/// mean loss by `absence` if the others have the old value, and by `changed` if they have the new
/// one.
fn cost(absent: Duration, count: f64, absence: f64, changed: f64) -> f64 {
    let lasts = absent.saturating_sub(COPIES.0).as_secs_f64();
    let share = if count > 1.0 { count / (2.0 * (count - 1.0)) } else { 0.0 };
    let others = absence + (changed - absence) * share;
    absence * absent.as_secs_f64() + others * lasts * (count - 1.0)
}
