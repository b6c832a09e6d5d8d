//! The task that reads and writes the record of the leader.
//!
//! A round is a read and, if this gateway leads or may take over, a write. `serve::leading` acts on
//! the result.
//!
//! Bounds: one call to the store at a time, each with a deadline.

use std::sync::Arc;
use std::time::Duration;

use jiff::Timestamp;
use sluice_cluster::{Candidate, LeaseRecord};
use tokio::sync::watch;
use tokio::time::{Instant, sleep_until, timeout};

use super::leader_view::LeaderView;
use super::store::{Found, Store, Written};
use sluice_fleet::Lead;

/// Longest deadline of a call to the store, however long the lease is.
const CALL_MAX: Duration = Duration::from_secs(2);

/// Times derived from the lease. A term is two thirds of the lease, so it has room for three
/// rounds, two of which fail.
#[derive(Clone, Copy, Debug)]
pub(super) struct Timing {
    /// Time between the beginnings of rounds.
    period: Duration,
    /// Pause after a failed round, and after each round once this gateway resigns.
    again: Duration,
    pub(super) call: Duration,
}

impl Timing {
    pub(super) fn of(lease: Duration) -> Self {
        Self { period: lease / 8, again: lease / 20, call: (lease / 8).min(CALL_MAX) }
    }
}

pub(super) struct Campaign<S> {
    pub(super) candidate: Candidate,
    pub(super) store: S,
    pub(super) timing: Timing,
    /// The moment at which the candidate's clock is 0.
    pub(super) epoch: Instant,
    pub(super) lead: Arc<Lead>,
    pub(super) view: Arc<LeaderView>,
}

impl<S: Store> Campaign<S> {
    /// Never ends. Resigns when `resigning` is true, and then only reads who leads.
    pub(super) async fn keep(mut self, mut resigning: watch::Receiver<bool>) {
        loop {
            let begun = Instant::now();
            let resigns = *resigning.borrow_and_update();
            if resigns {
                self.candidate.resign();
            }
            let done = self.round().await;
            self.lead.set(self.candidate.until().map(|until| self.epoch + until));
            match done {
                Ok(holder) => self.view.note(holder),
                Err(why) => self.view.note_trouble(why),
            }
            let is_soon = resigns || self.view.has_trouble();
            let next = if is_soon { Instant::now() + self.timing.again } else { begun + self.timing.period };
            tokio::select! {
                () = sleep_until(next) => {}
                _ = resigning.changed() => {}
            }
        }
    }

    fn now(&self) -> Duration {
        self.epoch.elapsed()
    }

    /// Runs one round. Returns the gateway that the record names as leader.
    async fn round(&mut self) -> Result<Option<String>, String> {
        let found = timeout(self.timing.call, self.store.read()).await.unwrap_or_else(|_| Err(self.no_answer()))?;
        let record = found
            .bytes
            .as_deref()
            .map(LeaseRecord::parse)
            .transpose()
            .map_err(|error| format!("{}: {error}", self.store.name()))?;
        let time = format!("{:.6}", Timestamp::now());
        let now = self.now();
        let seen = record.as_ref().map(|record| (record, &*found.version));
        let Some(next) = self.candidate.found(now, seen, &time) else {
            return Ok(record.as_ref().and_then(LeaseRecord::holder).map(str::to_owned));
        };
        self.write(&next, &found).await?;
        Ok(next.holder().map(str::to_owned))
    }

    async fn write(&mut self, record: &LeaseRecord, over: &Found) -> Result<(), String> {
        self.candidate.sends(self.now());
        let written = timeout(self.timing.call, self.store.write(record.to_bytes(), over)).await;
        match written.unwrap_or_else(|_| Written::Unknown(self.no_answer())) {
            Written::Done => {
                self.candidate.confirmed(record);
                Ok(())
            }
            Written::Refused => {
                self.candidate.failed();
                Err("another gateway wrote first".to_owned())
            }
            Written::Unknown(why) => {
                self.candidate.failed();
                Err(why)
            }
        }
    }

    fn no_answer(&self) -> String {
        format!("{} has not answered within {:?}", self.store.name(), self.timing.call)
    }
}
