//! Chooses the next change of limits: the most promising one, or the best one by simulation.
//!
//! A harmful trial costs requests. Where the deployment can be simulated, changes that would harm
//! or hardly help are closed without a trial, and the best change is tried first. A simulation that
//! does not reproduce the measured loss only excludes harmful changes.

use std::time::Duration;

use super::controller::{Action, Asked, ClosedBy, Controller, MEASURED, REQUESTS, State, least_gain};
use super::forecast::{BOUND, Forecast, LimitsAnswer, LimitsQuestion};
use super::moves::{Direction, Move, candidates};
use super::{Knob, Limits, PoolLimits};
use crate::event::{Acting, Event, EventKind, Proposal};
use crate::observe::recent::{RecentRequest, with_queue};
use crate::observe::window::{Score, Window};

const ANSWERED: Duration = Duration::from_secs(60);
/// The most changes in one question for a simulation.
const MOVES_MAX: usize = 6;
/// The longest period of simulated requests: under the present load and, if long enough, after the
/// last change of the engines.
const SIMULATED_SPAN: Duration = Duration::from_secs(180);

impl Controller {
    pub(crate) fn set_simulates(&mut self, simulates: bool) {
        self.simulates = simulates;
    }

    /// Makes, proposes or simulates open changes. Returns whether one was made.
    pub(crate) fn try_next(&mut self, now: Duration, window: &Window, score: Score) -> bool {
        let is_open = |step: &Move| self.closed.is_open(&step.direction, now);
        let all = candidates(window, &self.limits, &self.bounds, &self.steps);
        let suggested = self.suggested.take().and_then(|suggested| self.step_to(suggested)).filter(is_open);
        let known = suggested.is_some();
        let open: Vec<Move> = suggested.into_iter().chain(all.into_iter().filter(is_open)).collect();
        if self.simulates && !known && !open.is_empty() {
            self.ask(now, window.from, open, score);
            return false;
        }
        self.try_first(now, open, score)
    }

    /// The change to suggested limits; `None`: these limits are already in force.
    fn step_to(&self, (pool, limits, why): (usize, PoolLimits, String)) -> Option<Move> {
        let mut to = self.limits.clone();
        let now = to.0[pool];
        to.0[pool] = PoolLimits { range: now.range, ..limits };
        let knob = Knob::ALL.into_iter().find(|knob| to.0[pool].value(*knob) != now.value(*knob))?;
        let up = to.0[pool].value(knob) > now.value(knob);
        Some(Move { direction: Direction { pool, knob, up }, to, why })
    }

    /// Makes or proposes the first change. Returns whether it was made.
    fn try_first(&mut self, now: Duration, moves: Vec<Move>, score: Score) -> bool {
        let Some(step) = moves.into_iter().next() else {
            self.belief.1 += "; what may help was tried and did not";
            self.proposals.withdraw();
            self.stuck_since.get_or_insert(now);
            return false;
        };
        if self.acting != Acting::Acts {
            // Changes of engines may begin, because this approval may never come.
            self.stuck_since.get_or_insert(now);
        }
        match self.acting {
            Acting::Acts => self.make(now, step, score),
            Acting::Proposes | Acting::WaitsForApproval => self.propose(now, step, score),
        }
        self.acting == Acting::Acts
    }

    fn propose(&mut self, now: Duration, step: Move, score: Score) {
        if self.proposals.change().is_some_and(|(known, _)| known.direction == step.direction) {
            return;
        }
        self.proposed += 1;
        let Direction { pool, knob, .. } = step.direction;
        let show = |limits: &Limits| limits.0[pool].show(knob);
        let proposal = Proposal {
            id: self.proposed,
            key: self.key(step.direction),
            values: (show(&self.limits), show(&step.to)),
            why: step.why.clone(),
        };
        self.events.push(self.proposals.propose(now, proposal, (step, score)));
    }

    /// Asks for a simulation of these changes, and of the fewest permits. For long prompts one
    /// permit is often far better than two permits, while two are no better than many.
    fn ask(&mut self, now: Duration, window: Duration, mut moves: Vec<Move>, score: Score) {
        moves.truncate(MOVES_MAX);
        let fewest = |step: &Move| {
            let Direction { pool, knob, up } = step.direction;
            let (threshold, permits) = step.to.0[pool].long?;
            let least = self.bounds.permits.0;
            (knob == Knob::Permits && !up && permits > least).then(|| {
                let mut far = step.clone();
                far.to.0[pool].long = Some((threshold, least));
                far
            })
        };
        let far: Vec<Move> = moves.iter().filter_map(fewest).collect();
        moves.extend(far);
        self.state = State::Asking(Box::new(Asked { since: now, window, moves, score, is_ordered: false }));
    }

    /// The question for a simulation. Each question is returned once.
    pub(crate) fn question(&mut self, recent: impl FnOnce() -> Vec<RecentRequest>) -> Option<LimitsQuestion> {
        let State::Asking(asked) = &mut self.state else { return None };
        if std::mem::replace(&mut asked.is_ordered, true) {
            return None;
        }
        // Of requests that arrived later, only the fast ones have ended.
        let until = asked.since.saturating_sub(self.horizon);
        let recent = recent();
        // Of the time before the first known admission, no requests or only the slowest are known.
        let known = recent.iter().map(|request| request.at + request.waited).min().unwrap_or_default();
        let from = until.saturating_sub(SIMULATED_SPAN).max(self.load_since.min(asked.window)).max(known);
        // A simulation that begins earlier, with all engines, would not show the queue that an
        // absent engine left.
        let begin = from.max(self.engines_since);
        let (waiting, found) = with_queue(&recent, begin, until);
        let is_enough = (found.len() - waiting) as f64 >= REQUESTS && until >= begin + MEASURED;
        let (waiting, requests) = if is_enough { (waiting, found) } else { with_queue(&recent, from, until) };
        let candidates = asked.moves.iter().map(|step| step.to.clone()).collect();
        Some(LimitsQuestion { pools: self.names.clone(), now: self.limits.clone(), candidates, requests, waiting })
    }

    /// Takes an answer about `candidates`; ignores answers to earlier questions.
    pub(crate) fn answered(&mut self, candidates: &[Limits], answer: &LimitsAnswer, now: Duration) -> Action {
        let State::Asking(asked) = &mut self.state else { return Action::Wait };
        if !asked.moves.iter().map(|step| &step.to).eq(candidates) {
            return Action::Wait;
        }
        let (moves, score) = (std::mem::take(&mut asked.moves), asked.score);
        self.state = State::Watching;
        // Infinite errors come from a simulation with a single batch.
        let is_known = |one: &Forecast| one.loss.is_finite() && one.error.is_finite();
        let Some(before) = answer.now.filter(is_known) else {
            return self.choose(now, moves, score);
        };
        let explains = before.unexplained(score.loss).is_none();
        let (mut chosen, mut resting, mut said) =
            (Vec::new(), Vec::new(), format!("simulated: loss {:.3} now", before.loss));
        for (at, mut step) in moves.into_iter().enumerate() {
            let Some(forecast) = answer.candidates.get(at).copied().flatten().filter(is_known) else {
                chosen.push((0.0, step));
                continue;
            };
            let gain = before.loss - forecast.loss;
            let shown = self.show(&step, &self.limits);
            said += &format!("; {:.3} with {shown}", forecast.loss);
            let least = least_gain(before.loss);
            let does_harm = -gain > (BOUND * forecast.error).max(least);
            if does_harm || (explains && gain < least.max(forecast.error)) {
                resting.push(step.direction);
                continue;
            }
            step.why += &format!("; simulated: loss {:.3} after {:.3}", forecast.loss, before.loss);
            chosen.push((if explains { gain } else { 0.0 }, step));
        }
        // A direction stays open if a longer step in it helps.
        resting.retain(|direction| !chosen.iter().any(|(_, step): &(f64, Move)| step.direction == *direction));
        resting.sort_unstable();
        resting.dedup();
        for direction in resting {
            self.closed.close(direction, ClosedBy::Simulation, now);
            self.steps.refine(direction.pool, direction.knob);
        }
        // The sort is stable, so of changes with equal gains the most promising stays first.
        chosen.sort_by(|one, other| other.0.total_cmp(&one.0));
        let key = format!("pool.{}", self.names.join(","));
        let at = now.as_secs_f64();
        self.events.push(Event { at, kind: EventKind::Forecast, key, values: Default::default(), why: said });
        self.choose(now, chosen.into_iter().map(|(_, step)| step).collect(), score)
    }

    pub(crate) fn await_answer(&mut self, now: Duration, asked: Box<Asked>) -> Action {
        if now < asked.since + ANSWERED {
            self.state = State::Asking(asked);
            return Action::Wait;
        }
        self.choose(now, asked.moves, asked.score)
    }

    fn choose(&mut self, now: Duration, moves: Vec<Move>, score: Score) -> Action {
        match self.try_first(now, moves, score) {
            true => Action::Apply,
            false => Action::Wait,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::observe::loss::{Cause, Judged};
    use crate::observe::usage::Usage;
    use crate::observe::window::PoolWindow;

    const NOW: Duration = Duration::from_secs(100);

    fn limits() -> Limits {
        Limits(vec![PoolLimits { slots: 64, prefill_tokens: None, long: Some((5_000, 4)), range: (0, None) }])
    }

    /// A controller that asks for a simulation of the knobs, because requests lost 0.6 each on the
    /// engines.
    fn asks() -> (Controller, Vec<Knob>) {
        let mut controller =
            Controller::new(vec!["all".to_owned()], limits(), 0.99, Duration::from_secs(1), Acting::Acts);
        controller.set_simulates(true);
        let mut pool = PoolWindow::new(Duration::ZERO);
        for second in 0..100 {
            for number in 0..10_u64 {
                let tokens = if number == 0 { 16_000 } else { 200 };
                let judged = Judged { loss: 0.6, cause: Some(Cause::Engine), service: Some(1.0) };
                pool.add(Duration::from_secs(second), tokens, judged);
            }
        }
        pool.usage =
            Usage { moments: 100, slots_peak: 40, permits_peak: 4, prefill_peak: 40_000, in_rotation: 2, ..pool.usage };
        let window = Window { from: Duration::ZERO, pools: vec![pool] };
        assert_eq!(controller.step(NOW, &window), Action::Wait);
        let question = controller.question(Vec::new).expect("it asks");
        assert_eq!(controller.question(Vec::new), None, "once");
        assert_eq!((question.pools, question.now), (vec!["all".to_owned()], limits()));
        let now = limits().0[0];
        let knob = |to: &Limits| Knob::ALL.into_iter().find(|knob| to.0[0].show(*knob) != now.show(*knob)).unwrap();
        let knobs: Vec<Knob> = question.candidates.iter().map(knob).collect();
        assert_eq!(knobs[..2], [Knob::Permits, Knob::PrefillTokens], "the most promising first");
        assert!(knobs.contains(&Knob::Slots), "{knobs:?}");
        (controller, knobs)
    }

    fn answer(now: f64, knobs: &[Knob], loss: impl Fn(Knob) -> f64) -> LimitsAnswer {
        let of = |loss: f64| Forecast { loss, error: 0.01, attainment: 1.0 - loss };
        let candidates = knobs.iter().map(|knob| Some(of(loss(*knob)))).collect();
        LimitsAnswer { now: Some(of(now)), candidates }
    }

    fn reply(controller: &mut Controller, answer: &LimitsAnswer) -> Action {
        let asked: Vec<Limits> = match &controller.state {
            State::Asking(asked) => asked.moves.iter().map(|step| step.to.clone()).collect(),
            _ => Vec::new(),
        };
        controller.answered(&asked, answer, NOW)
    }

    fn tried(controller: &mut Controller) -> Option<Knob> {
        let event = controller.take_events().into_iter().find(|event| event.kind == EventKind::Tried)?;
        Knob::ALL.into_iter().find(|knob| event.key == format!("pool.all.{}", knob.key()))
    }

    #[test]
    fn what_helps_most_in_a_simulation_is_tried_first() {
        let (mut controller, knobs) = asks();
        let answer = answer(0.5, &knobs, |knob| if knob == Knob::Slots { 0.1 } else { 0.4 });
        assert_eq!(reply(&mut controller, &answer), Action::Apply);
        let events = controller.take_events();
        assert_eq!(events.iter().map(|event| event.kind).collect::<Vec<_>>(), [EventKind::Forecast, EventKind::Tried]);
        assert!(events[0].why.contains("0.100 with pool.all.slots"), "{}", events[0].why);
        assert!(events[1].key.ends_with(".slots") && events[1].why.ends_with("simulated: loss 0.100 after 0.500"));
        assert_eq!(reply(&mut controller, &answer), Action::Wait, "answered twice");
        assert!(controller.is_trying());
    }

    #[test]
    fn what_does_not_help_in_a_simulation_is_not_tried_and_rests() {
        let (mut controller, knobs) = asks();
        assert_eq!(reply(&mut controller, &answer(0.5, &knobs, |_| 0.49)), Action::Wait);
        assert_eq!((tried(&mut controller), controller.stuck_since()), (None, Some(NOW)));
        let blocked = controller.blocked();
        assert!(blocked.iter().all(|(.., left)| (*left - 300.0).abs() < 1e-9), "once each: {blocked:?}");
        let directions: std::collections::BTreeSet<_> = knobs.into_iter().collect();
        assert_eq!(blocked.len(), directions.len());
        assert!(!controller.is_trying());
    }

    #[test]
    fn one_permit_is_simulated_beside_a_step_towards_it() {
        let (mut controller, knobs) = asks();
        assert_eq!((knobs[0], knobs.last()), (Knob::Permits, Some(&Knob::Permits)));
        let mut answer = answer(0.5, &knobs, |_| 0.5);
        answer.candidates.last_mut().unwrap().as_mut().unwrap().loss = 0.1;
        assert_eq!(reply(&mut controller, &answer), Action::Apply);
        assert_eq!(controller.limits().0[0].long, Some((5_000, 1)));
        assert!(controller.blocked().iter().all(|(key, ..)| !key.ends_with("long_prefix.slots")));
    }

    #[test]
    fn a_simulation_that_does_not_show_the_loss_only_keeps_from_harm() {
        let (mut controller, knobs) = asks();
        let harm = |knob| if knob == Knob::Permits { 0.3 } else { 0.1 };
        assert_eq!(reply(&mut controller, &answer(0.1, &knobs, harm)), Action::Apply);
        assert_eq!(tried(&mut controller), Some(Knob::PrefillTokens), "the most promising one that does no harm");
        let blocked: Vec<_> = controller.blocked().into_iter().map(|(key, ..)| key).collect();
        assert_eq!(blocked, ["pool.all.long_prefix.slots"]);
    }

    #[test]
    fn without_an_answer_it_tries_as_without_simulations() {
        let (mut controller, _) = asks();
        assert_eq!(reply(&mut controller, &LimitsAnswer::default()), Action::Apply);
        assert_eq!(tried(&mut controller), Some(Knob::Permits));

        let (mut controller, _) = asks();
        let window = Window { from: NOW, pools: vec![PoolWindow::new(NOW)] };
        assert_eq!(controller.step(NOW + ANSWERED - Duration::from_secs(1), &window), Action::Wait);
        assert_eq!(controller.step(NOW + ANSWERED, &window), Action::Apply);
        assert_eq!(tried(&mut controller), Some(Knob::Permits));
    }

    #[test]
    fn limits_that_were_suggested_leave_those_of_other_pools_as_they_are_by_then() {
        let pools = Limits([limits().0, limits().0].concat());
        let names = vec!["one".to_owned(), "two".to_owned()];
        let mut controller = Controller::new(names, pools, 0.99, Duration::from_secs(1), Acting::Acts);
        let suggested = PoolLimits { prefill_tokens: Some(9_000), ..limits().0[0] };
        controller.suggest(1, suggested, "simulated");
        controller.limits.0[0].slots = 99;
        let step = controller.suggested.take().and_then(|suggested| controller.step_to(suggested)).unwrap();
        assert_eq!((step.to.0[0].slots, step.to.0[1]), (99, suggested));
        assert_eq!(step.direction, Direction { pool: 1, knob: Knob::PrefillTokens, up: false });
    }

    #[test]
    fn an_answer_that_comes_after_it_has_stood_back_is_not_heeded() {
        let (mut controller, knobs) = asks();
        controller.stand_back(NOW, "a change of its engines has begun");
        assert_eq!(reply(&mut controller, &answer(0.5, &knobs, |_| 0.1)), Action::Wait);
        assert_eq!((tried(&mut controller), controller.limits()), (None, &limits()));
    }

    #[test]
    fn an_answer_to_an_earlier_question_and_one_without_a_known_error_decide_nothing() {
        let (mut controller, knobs) = asks();
        assert_eq!(controller.answered(&[limits()], &answer(0.5, &knobs, |_| 0.1), NOW), Action::Wait);
        assert!(matches!(controller.state, State::Asking(_)) && tried(&mut controller).is_none());
        let mut unknown = answer(0.5, &knobs, |_| 0.6);
        unknown.candidates.iter_mut().flatten().for_each(|one| one.error = f64::INFINITY);
        assert_eq!(reply(&mut controller, &unknown), Action::Apply);
        assert_eq!((tried(&mut controller), controller.blocked()), (Some(Knob::Permits), Vec::new()));
    }

    #[test]
    fn a_simulated_gain_that_a_trial_would_keep_is_tried() {
        let (mut controller, knobs) = asks();
        let answer = answer(1.684, &knobs, |knob| if knob == Knob::Slots { 1.643 } else { 1.68 });
        assert_eq!(reply(&mut controller, &answer), Action::Apply);
        assert_eq!(tried(&mut controller), Some(Knob::Slots));
    }

    /// Ten requests a second; every tenth waits for 20 s.
    fn recent() -> Vec<RecentRequest> {
        let waited = |number: u32| Duration::from_secs(if number.is_multiple_of(10) { 20 } else { 0 });
        let request = |number| (Duration::from_millis(100) * number, waited(number));
        let of = |(at, waited)| RecentRequest { at, waited, prompt: 1, output: 1, model: None };
        (0..10_000).map(request).map(of).collect()
    }

    /// Arrival times of the requests in a question at ten times [`NOW`].
    fn simulated(controller: &mut Controller) -> Vec<Duration> {
        let State::Asking(asked) = &mut controller.state else { panic!("it asks") };
        (asked.is_ordered, asked.since) = (false, 10 * NOW);
        controller.load_since = Duration::ZERO;
        controller.question(recent).unwrap().requests.iter().map(|one| one.at).collect()
    }

    #[test]
    fn requests_of_the_last_minutes_are_simulated_without_those_that_may_not_have_ended() {
        let (mut controller, _) = asks();
        let at = simulated(&mut controller);
        let last = 10 * NOW - Duration::from_secs(1);
        assert_eq!((at[0], *at.last().unwrap()), (last - SIMULATED_SPAN, last - Duration::from_millis(100)));
    }

    #[test]
    fn a_simulation_begins_with_these_engines_and_with_what_waited_for_them() {
        let (mut controller, _) = asks();
        let last = 10 * NOW - Duration::from_secs(1);
        let mut begins = |changed: Duration| {
            controller.engines_since = changed;
            let at = simulated(&mut controller);
            (at[0], at.iter().filter(|one| **one == at[0]).count())
        };
        // One request a second waits for 20 s, so 20 wait at the beginning, and one arrives.
        assert_eq!(begins(last - Duration::from_secs(60)), (last - Duration::from_secs(60), 20 + 1));
        let too_short = last - Duration::from_secs(29);
        assert_eq!(begins(too_short), (last - SIMULATED_SPAN, 20 + 1), "30 s at least");
        assert_eq!(begins(Duration::ZERO), (last - SIMULATED_SPAN, 20 + 1));
        // The first known request arrived later.
        let first = last - Duration::from_secs(90);
        let late = move || recent().into_iter().filter(|request| request.at >= first).collect();
        let State::Asking(asked) = &mut controller.state else { panic!("it asks") };
        asked.is_ordered = false;
        let question = controller.question(late).unwrap();
        assert_eq!((question.requests[0].at, question.waiting), (first + Duration::from_millis(100), 1));
    }

    #[test]
    fn engines_are_other_ones_after_a_change_and_when_one_enters_or_leaves_rotation() {
        let (mut controller, _) = asks();
        let mut window = Window { from: NOW, pools: vec![PoolWindow::new(NOW)] };
        window.pools[0].usage = Usage { moments: 1, in_rotation: 2, ..Usage::default() };
        controller.step(2 * NOW, &window);
        assert_eq!(controller.engines_since, Duration::ZERO);
        window.pools[0].usage.in_rotation = 1;
        controller.step(3 * NOW, &window);
        assert_eq!(controller.engines_since, 3 * NOW);
        controller.adopt(0, limits().0[0], 4 * NOW);
        assert_eq!(controller.engines_since, 4 * NOW);
    }
}
