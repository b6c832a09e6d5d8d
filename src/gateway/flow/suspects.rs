//! Request bodies that may kill engines: each is delivered once more at most, then refused for a
//! while.
//!
//! An engine *dies* for a request when its connection breaks or it is found hung while the request
//! is on it. The rule:
//!
//! 1. Every body that was on an engine when it died is a *suspect* for [`SUSPECT_FOR`]. A suspect
//!    that is then served whole is one no longer.
//! 2. A suspect is delivered again in its *turn*: one suspect at a time, until its first token, its
//!    end, or [`TURN`]. So at the next death it is known which suspect was there. A suspect that
//!    waited [`WAIT_MAX`] for its turn goes without.
//! 3. When the engine of a suspect dies and no other suspect is there, that body is refused for
//!    [`REFUSED_FOR`]. Suspects whose first token was seen are considered only if there is no
//!    other. If several remain, no body is refused, and all stay suspects. Requests that were no
//!    suspects become some.
//! 4. A connection that breaks alone, while more than [`FEW`] other requests go on, is no death.
//! 5. No request is delivered again after two deaths, whatever is known about its body.
//!
//! So a bystander is refused only if it was on two engines that died, and the second time without
//! another suspect. Bodies are recognised by a keyed hash of their length and of at most
//! [`SAMPLES`] + 2 parts of [`PART`] bytes. A client that changes its body each time is not
//! recognised. Bounds: [`SUSPECTS_MAX`] bodies, [`TRIALS_MAX`] suspects at once on engines,
//! [`BREAKS`] breaks. While there is no suspect, a request costs its hash and one load.

use std::collections::HashMap;
use std::hash::BuildHasher;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use parking_lot::Mutex;
use tokio::sync::Notify;
use tokio::time::{Instant, sleep_until};
use twox_hash::XxHash64;

use sluice_core::base::BackendId;

/// How long a body stays a suspect.
const SUSPECT_FOR: Duration = Duration::from_secs(600);
/// How long a body is refused.
pub(super) const REFUSED_FOR: Duration = Duration::from_secs(300);
/// The longest turn: most engines that die of a request do so at once.
const TURN: Duration = Duration::from_secs(1);
/// The longest wait for a turn: how much an engine's death may delay the requests that were on it.
const WAIT_MAX: Duration = Duration::from_secs(3);
/// Other requests on an engine up to which a single broken connection counts as its death.
const FEW: u32 = 3;
/// Breaks on one engine within this time are one death.
const TOGETHER: Duration = Duration::from_secs(1);
/// How long to wait for the breaks of others.
const CORROBORATED_IN: Duration = Duration::from_millis(50);
/// Bodies that are remembered.
const SUSPECTS_MAX: usize = 1_024;
/// Suspects that are on engines at once and are remembered as such.
const TRIALS_MAX: usize = 256;
/// Breaks that are remembered, of all engines.
const BREAKS: usize = 32;
/// Length of a part of a body that is hashed.
const PART: usize = 256;
/// Parts between the first and the last one.
const SAMPLES: usize = 4;

/// The hash by which a body is recognised.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct BodyHash(u64);

/// The bodies that may kill engines.
#[derive(Debug)]
pub(super) struct Suspects {
    /// How many bodies are remembered, so that a request takes no lock while there are none.
    known: AtomicUsize,
    state: Mutex<State>,
    /// A turn has ended.
    freed: Notify,
    /// The key of the hashes.
    seed: u64,
}

#[derive(Debug, Default)]
struct State {
    bodies: HashMap<BodyHash, Suspect>,
    trials: Vec<OnTrial>,
    /// The trial that has the turn, and until when.
    turn: Option<(u64, Instant)>,
    serial: u64,
    breaks: Vec<(BackendId, Instant)>,
}

#[derive(Clone, Copy, Debug)]
struct Suspect {
    refused: bool,
    until: Instant,
}

/// A request with a suspected body.
#[derive(Clone, Copy, Debug)]
struct OnTrial {
    serial: u64,
    body: BodyHash,
    /// Where it was delivered.
    backend: Option<BackendId>,
    /// Its first token was seen.
    survived: bool,
}

/// How a death changes the state of a body.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Fate {
    /// It is a suspect: it may be delivered once more, in its turn.
    Suspect,
    /// It is refused from now on.
    Refused,
}

/// A delivery of a suspect; dropping it ends its turn.
#[derive(Debug)]
pub(super) struct Trial {
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
    /// The hash by which `body` is recognised.
    pub(super) fn hash(&self, body: &[u8]) -> BodyHash {
        if body.len() <= PART * (SAMPLES + 2) {
            return BodyHash(XxHash64::oneshot(self.seed, body));
        }
        let gap = (body.len() - PART) / (SAMPLES + 1);
        let parts = (0..=SAMPLES).map(|number| number * gap).chain([body.len() - PART]);
        let mix = |hash, at| XxHash64::oneshot(hash, &body[at..at + PART]);
        BodyHash(parts.fold(self.seed ^ body.len() as u64, mix))
    }

    /// Whether a request with this body may be delivered. `Ok(Some)`: it is a suspect. An error:
    /// for how long it is refused.
    pub(super) fn check(self: &Arc<Self>, body: BodyHash, now: Instant) -> Result<Option<Trial>, Duration> {
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

    /// A request of a suspected body, not delivered yet.
    fn begin(self: &Arc<Self>, state: &mut State, body: BodyHash) -> Trial {
        state.serial += 1;
        let serial = state.serial;
        if state.trials.len() < TRIALS_MAX {
            state.trials.push(OnTrial { serial, body, backend: None, survived: false });
        }
        Trial { suspects: Arc::clone(self), body, serial }
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

    /// The engine of `backend` died with a request of this body on it. `trial`: the body was
    /// already a suspect.
    pub(super) fn died(
        self: &Arc<Self>,
        body: BodyHash,
        trial: Option<&Trial>,
        backend: BackendId,
        now: Instant,
    ) -> Fate {
        let mut state = self.state.lock();
        if trial.is_some() {
            state.judge(backend, now);
        }
        let fate = state.suspect(body, now);
        self.known.store(state.bodies.len(), Ordering::Release);
        fate
    }

    /// A new delivery of a body that has just become a suspect.
    pub(super) fn trial(self: &Arc<Self>, body: BodyHash) -> Trial {
        self.begin(&mut self.state.lock(), body)
    }

    /// Bodies that are remembered, and deliveries of suspects: for tests.
    #[cfg(test)]
    pub(super) fn counts(&self) -> (usize, usize) {
        let state = self.state.lock();
        (state.bodies.len(), state.trials.len())
    }
}

impl State {
    /// The engine of `backend` died: if one suspect must have been the cause, it is refused. Called
    /// once for each suspect there; the first call decides for all.
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

    /// The body was on an engine that died: it is a suspect from now on, unless it is refused.
    fn suspect(&mut self, body: BodyHash, now: Instant) -> Fate {
        if self.bodies.get(&body).is_some_and(|known| known.refused && known.until > now) {
            return Fate::Refused;
        }
        self.make_room(body, now);
        self.bodies.insert(body, Suspect { refused: false, until: now + SUSPECT_FOR });
        Fate::Suspect
    }

    /// Forgets bodies where there are too many for one more: the bodies whose time is over, else
    /// the oldest suspect, else the refused body whose time is over first.
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

    fn trial_mut(&mut self, serial: u64) -> Option<&mut OnTrial> {
        self.trials.iter_mut().find(|trial| trial.serial == serial)
    }
}

impl Trial {
    /// Waits until no other suspect has the turn, and takes it.
    pub(super) async fn turn(&self) {
        let wait_max = Instant::now() + WAIT_MAX;
        loop {
            let freed = self.suspects.freed.notified();
            let now = Instant::now();
            let until = {
                let mut state = self.suspects.state.lock();
                match state.turn {
                    Some((serial, until)) if until > now && serial != self.serial => until,
                    _ => {
                        state.turn = Some((self.serial, now + TURN));
                        return;
                    }
                }
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

    /// It is delivered to this backend now. Its turn begins.
    pub(super) fn delivered(&self, backend: BackendId, now: Instant) {
        let mut state = self.suspects.state.lock();
        if let Some((serial, until)) = &mut state.turn
            && *serial == self.serial
        {
            *until = now + TURN;
        }
        if let Some(trial) = state.trial_mut(self.serial) {
            (trial.backend, trial.survived) = (Some(backend), false);
        }
    }

    /// Its first token was seen: the next suspect has its turn.
    pub(super) fn survived(&self) {
        let mut state = self.suspects.state.lock();
        if let Some(trial) = state.trial_mut(self.serial) {
            trial.survived = true;
        }
        self.end_turn(&mut state);
    }

    /// It was served whole: the body is no suspect any more.
    pub(super) fn acquitted(&self) {
        let mut state = self.suspects.state.lock();
        if state.bodies.get(&self.body).is_some_and(|known| !known.refused) {
            state.bodies.remove(&self.body);
            self.suspects.known.store(state.bodies.len(), Ordering::Release);
        }
    }

    fn end_turn(&self, state: &mut State) {
        if state.turn.is_some_and(|(serial, _)| serial == self.serial) {
            state.turn = None;
            self.suspects.freed.notify_one();
        }
    }
}

impl Drop for Trial {
    fn drop(&mut self) {
        let mut state = self.suspects.state.lock();
        state.trials.retain(|trial| trial.serial != self.serial);
        self.end_turn(&mut state);
    }
}

#[cfg(test)]
mod tests;
