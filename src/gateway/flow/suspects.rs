//! Recognises request bodies that kill engines: such a body is delivered at most once more, then
//! refused for a while.
//!
//! An engine *dies* for a request when the connection breaks or the engine is found hung while the
//! request is on it. Then the body is a *suspect* for [`SUSPECT_FOR`], or until a request with it
//! completes. Suspects are delivered in *turns*, one at a time: a turn lasts until the first token,
//! the end of the response, or [`TURN`]. A suspect that has waited for [`WAIT_MAX`] is delivered
//! without a turn. If an engine dies with only one suspect on it, that body is refused for
//! [`REFUSED_FOR`]; a suspect that has got its first token counts only if no suspect without one
//! was there. So a bystander is refused only after two deaths. A connection that breaks alone,
//! while more than [`FEW`] other requests go on, is no death.
//!
//! An engine seldom dies of a stream that it had decoded for a while, and a client waits in the
//! middle of it. So continued streams have separate turns. At first there is one turn at a time.
//! Each stream that gets a token allows one more turn at the same time, until an engine dies again.
//!
//! Bodies are recognised by a keyed hash of the length and of at most [`SAMPLES`] + 2 parts of
//! [`PART`] bytes. Bounds: [`SUSPECTS_MAX`] bodies, [`TRIALS_MAX`] suspects on engines, [`BREAKS`]
//! breaks.

use std::collections::HashMap;
use std::hash::BuildHasher;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use foldhash::quality::FixedState;
use parking_lot::Mutex;
use tokio::sync::Notify;
use tokio::time::{Instant, sleep_until};

use sluice_core::base::BackendId;

const SUSPECT_FOR: Duration = Duration::from_secs(600);
pub(super) const REFUSED_FOR: Duration = Duration::from_secs(300);
/// The longest turn: most engines that die of a request do so at once.
const TURN: Duration = Duration::from_secs(1);
/// The longest wait for a turn: the delay that an engine's death may cause to the requests that
/// were on it.
const WAIT_MAX: Duration = Duration::from_secs(3);
/// With up to this many other requests on an engine, a single broken connection counts as the
/// engine's death.
const FEW: u32 = 3;
/// Breaks on one engine within this time are one death.
const TOGETHER: Duration = Duration::from_secs(1);
/// Time to wait for other connections to the engine to break.
const CORROBORATED_IN: Duration = Duration::from_millis(50);
const SUSPECTS_MAX: usize = 1_024;
/// The most suspects on engines that are remembered as such.
const TRIALS_MAX: usize = 256;
const BREAKS: usize = 32;
/// Length of a part of a body that is hashed.
const PART: usize = 256;
/// Number of parts between the first and the last one.
const SAMPLES: usize = 4;

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct BodyHash(u64);

#[derive(Debug)]
pub(super) struct Suspects {
    /// Number of remembered bodies, so that a request takes no lock while there are none.
    known: AtomicUsize,
    state: Mutex<State>,
    /// Notified when a turn has ended.
    freed: Notify,
    seed: u64,
}

#[derive(Debug, Default)]
struct State {
    bodies: HashMap<BodyHash, Suspect>,
    trials: Vec<OnTrial>,
    turns: Vec<Turn>,
    /// Continued streams that got a token since the last death.
    survivors: usize,
    serial: u64,
    breaks: Vec<(BackendId, Instant)>,
}

/// A trial that has its turn, and when the turn ends.
#[derive(Clone, Copy, Debug)]
struct Turn {
    serial: u64,
    of: TurnOf,
    until: Instant,
}

/// The two kinds of turns: of a suspect whose engine died before the first token, and of one whose
/// stream is continued.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum TurnOf {
    Whole,
    Continued,
}

#[derive(Clone, Copy, Debug)]
struct Suspect {
    refused: bool,
    until: Instant,
}

#[derive(Clone, Copy, Debug)]
struct OnTrial {
    serial: u64,
    body: BodyHash,
    backend: Option<BackendId>,
    survived: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Fate {
    /// A suspect: the body may be delivered once more, in turn.
    Suspect,
    Refused,
}

/// A delivery of a suspect. Dropping it ends the turn.
#[derive(Debug)]
pub(super) struct SuspectTurn {
    suspects: Arc<Suspects>,
    body: BodyHash,
    serial: u64,
}

impl Default for Suspects {
    fn default() -> Self {
        let seed = std::hash::RandomState::new().hash_one("suspects");
        Self { known: AtomicUsize::new(0), state: Mutex::default(), freed: Notify::new(), seed }
    }
}

impl Suspects {
    pub(super) fn hash(&self, body: &[u8]) -> BodyHash {
        if body.len() <= PART * (SAMPLES + 2) {
            return BodyHash(FixedState::with_seed(self.seed).hash_one(body));
        }
        let gap = (body.len() - PART) / (SAMPLES + 1);
        let parts = (0..=SAMPLES).map(|number| number * gap).chain([body.len() - PART]);
        let mix = |hash, at| FixedState::with_seed(hash).hash_one(&body[at..at + PART]);
        BodyHash(parts.fold(self.seed ^ body.len() as u64, mix))
    }

    /// Whether a request with this body may be delivered. `Ok(Some)`: the body is a suspect. An
    /// error is the time for which the body is still refused.
    pub(super) fn check(self: &Arc<Self>, body: BodyHash, now: Instant) -> Result<Option<SuspectTurn>, Duration> {
        if self.known.load(Ordering::Acquire) == 0 {
            return Ok(None);
        }
        let mut state = self.state.lock();
        match state.bodies.get(&body).copied() {
            None => Ok(None),
            Some(suspect) if suspect.until <= now => {
                state.bodies.remove(&body);
                self.known.store(state.bodies.len(), Ordering::Release);
                Ok(None)
            }
            Some(suspect) if suspect.refused => Err(suspect.until - now),
            Some(_) => Ok(Some(self.begin(&mut state, body))),
        }
    }

    /// Begins a trial of a suspect that is not delivered yet.
    fn begin(self: &Arc<Self>, state: &mut State, body: BodyHash) -> SuspectTurn {
        state.serial += 1;
        let serial = state.serial;
        if state.trials.len() < TRIALS_MAX {
            state.trials.push(OnTrial { serial, body, backend: None, survived: false });
        }
        SuspectTurn { suspects: Arc::clone(self), body, serial }
    }

    /// Notes that a connection to the engine of `backend` broke while a request was on it. Returns
    /// whether the engine certainly died; otherwise [`Self::others_broke`] has the answer a moment
    /// later. `others`: requests in flight on the engine apart from this one.
    pub(super) fn breaks(&self, backend: BackendId, others: u32) -> bool {
        self.note_break(backend, Instant::now()) > 1 || others <= FEW
    }

    /// Whether another connection to the engine of `backend` breaks within [`CORROBORATED_IN`].
    pub(super) async fn others_broke(&self, backend: BackendId) -> bool {
        sleep_until(Instant::now() + CORROBORATED_IN).await;
        self.breaks_of(backend, Instant::now()) > 1
    }

    fn note_break(&self, backend: BackendId, now: Instant) -> usize {
        {
            let breaks = &mut self.state.lock().breaks;
            breaks.retain(|(_, at)| now.saturating_duration_since(*at) <= TOGETHER);
            if breaks.len() >= BREAKS {
                breaks.remove(0);
            }
            breaks.push((backend, now));
        }
        self.breaks_of(backend, now)
    }

    fn breaks_of(&self, backend: BackendId, now: Instant) -> usize {
        let is_of =
            |(broken, at): &&(BackendId, Instant)| *broken == backend && now.saturating_duration_since(*at) <= TOGETHER;
        self.state.lock().breaks.iter().filter(is_of).count()
    }

    /// Notes that the engine of `backend` died with a request of this body on it. `trial`: the body
    /// was already a suspect.
    pub(super) fn died(
        self: &Arc<Self>,
        body: BodyHash,
        trial: Option<&SuspectTurn>,
        backend: BackendId,
        now: Instant,
    ) -> Fate {
        let mut state = self.state.lock();
        state.survivors = 0;
        if trial.is_some() {
            state.judge(backend, now);
        }
        let fate = state.suspect(body, now);
        self.known.store(state.bodies.len(), Ordering::Release);
        fate
    }

    /// Begins a trial of a body that has just become a suspect.
    pub(super) fn trial(self: &Arc<Self>, body: BodyHash) -> SuspectTurn {
        self.begin(&mut self.state.lock(), body)
    }

    /// The number of remembered bodies and of trials, for tests.
    #[cfg(test)]
    pub(super) fn counts(&self) -> (usize, usize) {
        let state = self.state.lock();
        (state.bodies.len(), state.trials.len())
    }
}

impl State {
    /// Judges the suspects on a `backend` whose engine died: if only one can have been the cause,
    /// its body is refused. Called once for each suspect there; the first call decides for all.
    fn judge(&mut self, backend: BackendId, now: Instant) {
        let is_there = |trial: &OnTrial| trial.backend == Some(backend);
        let early = self.trials.iter().any(|trial| is_there(trial) && !trial.survived);
        let mut accused = self.trials.iter().filter(|trial| is_there(trial) && !(early && trial.survived));
        let body = accused.next().map(|trial| trial.body);
        let is_alone = accused.all(|trial| Some(trial.body) == body);
        if let Some(body) = body.filter(|_| is_alone) {
            self.make_room(body, now);
            self.bodies.insert(body, Suspect { refused: true, until: now + REFUSED_FOR });
        }
        self.trials.retain(|trial| !is_there(trial));
    }

    /// Makes the body a suspect, because it was on an engine that died, unless it is refused.
    fn suspect(&mut self, body: BodyHash, now: Instant) -> Fate {
        if self.bodies.get(&body).is_some_and(|known| known.refused && known.until > now) {
            return Fate::Refused;
        }
        self.make_room(body, now);
        self.bodies.insert(body, Suspect { refused: false, until: now + SUSPECT_FOR });
        Fate::Suspect
    }

    /// Makes room for one more body if there are too many: forgets the expired bodies, or else the
    /// oldest suspect, or else the refused body that expires first.
    fn make_room(&mut self, body: BodyHash, now: Instant) {
        if self.bodies.len() < SUSPECTS_MAX || self.bodies.contains_key(&body) {
            return;
        }
        self.bodies.retain(|_, known| known.until > now);
        if self.bodies.len() >= SUSPECTS_MAX {
            let first = self.bodies.iter().min_by_key(|(_, known)| (known.refused, known.until)).map(|(body, _)| *body);
            first.map(|body| self.bodies.remove(&body));
        }
    }

    /// Gives the turn to a trial. An error is the time at which the next turn may be free.
    fn take_turn(&mut self, serial: u64, of: TurnOf, now: Instant) -> Result<(), Instant> {
        self.turns.retain(|turn| turn.until > now && turn.serial != serial);
        let most = if of == TurnOf::Continued { 1 + self.survivors } else { 1 };
        let others = self.turns.iter().filter(|turn| turn.of == of).map(|turn| turn.until);
        match others.clone().min() {
            Some(until) if others.count() >= most => Err(until),
            _ => {
                self.turns.push(Turn { serial, of, until: now + TURN });
                Ok(())
            }
        }
    }

    fn trial_mut(&mut self, serial: u64) -> Option<&mut OnTrial> {
        self.trials.iter_mut().find(|trial| trial.serial == serial)
    }
}

impl SuspectTurn {
    /// Waits until it is this suspect's turn, and takes it.
    pub(super) async fn turn(&self, of: TurnOf) {
        let wait_max = Instant::now() + WAIT_MAX;
        loop {
            let freed = self.suspects.freed.notified();
            let now = Instant::now();
            let until = match self.suspects.state.lock().take_turn(self.serial, of, now) {
                Ok(()) => return,
                Err(until) => until,
            };
            if now >= wait_max {
                return;
            }
            tokio::select! {
                () = freed => {}
                () = sleep_until(until.min(wait_max)) => {}
            }
        }
    }

    /// Notes that the request is delivered to this backend now. The turn begins.
    pub(super) fn delivered(&self, backend: BackendId, now: Instant) {
        let mut state = self.suspects.state.lock();
        if let Some(turn) = state.turns.iter_mut().find(|turn| turn.serial == self.serial) {
            turn.until = now + TURN;
        }
        if let Some(trial) = state.trial_mut(self.serial) {
            (trial.backend, trial.survived) = (Some(backend), false);
        }
    }

    /// Notes that the first token was seen: the next suspect gets the turn.
    pub(super) fn survived(&self) {
        let mut state = self.suspects.state.lock();
        if let Some(trial) = state.trial_mut(self.serial) {
            trial.survived = true;
        }
        let is_continued = |turn: &Turn| turn.serial == self.serial && turn.of == TurnOf::Continued;
        state.survivors += usize::from(state.turns.iter().any(is_continued));
        self.end_turn(&mut state);
    }

    /// Notes that the request was served completely: the body is no suspect any more.
    pub(super) fn acquitted(&self) {
        let mut state = self.suspects.state.lock();
        if state.bodies.get(&self.body).is_some_and(|known| !known.refused) {
            state.bodies.remove(&self.body);
            self.suspects.known.store(state.bodies.len(), Ordering::Release);
        }
    }

    fn end_turn(&self, state: &mut State) {
        let before = state.turns.len();
        state.turns.retain(|turn| turn.serial != self.serial);
        if state.turns.len() < before {
            self.suspects.freed.notify_waiters();
        }
    }
}

impl Drop for SuspectTurn {
    fn drop(&mut self) {
        let mut state = self.suspects.state.lock();
        state.trials.retain(|trial| trial.serial != self.serial);
        self.end_turn(&mut state);
    }
}

#[cfg(test)]
mod tests;
