//! Elects one of several gateways as leader, which alone changes engines, limits and experiments.
//!
//! One object of the store, a [`LeaseRecord`], names the leader. No two candidates lead at once:
//!
//! - A candidate leads after it has written a record over the state that it read, and the store has
//!   confirmed the write. The term lasts [`TERM`] of the lease, on the candidate's clock, from when
//!   it *sent* that write.
//! - Other candidates take the lead only after they saw the same version for longer than the lease,
//!   on their own clocks. So at least a tenth of the lease lies between two terms, even if one
//!   clock is a tenth too slow and the other a tenth too fast.
//! - A leader that reads another candidate's record stops at once.
//!
//! Pure: no clock, I/O or randomness. Times are on the candidate's monotonic clock.

use std::time::Duration;

use serde::{Deserialize, Serialize};

/// Fraction of the lease for which a confirmed write gives the lead: numerator, denominator.
pub const TERM: (u32, u32) = (2, 3);
/// Lease seconds in the record of a leader that has given up the lead. client-go writes the same
/// number.
pub const RELEASED: u32 = 1;

/// The leader, in the form of the `spec` of a `coordination.k8s.io` Lease, so that kubectl and
/// other tools understand it. Times of day are for people and never compared.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct LeaseRecord {
    /// The leader's identity; absent: no gateway leads.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub holder_identity: Option<String>,
    /// Seconds without a renewal after which another candidate may take the lead.
    pub lease_duration_seconds: u32,
    /// Start of the lead, RFC 3339.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub acquire_time: Option<String>,
    /// Last renewal, RFC 3339.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub renew_time: Option<String>,
    /// How often the lead has passed to another candidate.
    #[serde(default)]
    pub lease_transitions: u32,
}

/// The object is not a record.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the object is no record of who leads ({0}): remove it, or give the gateways another key (cluster.key)")]
pub struct NotARecord(String);

impl LeaseRecord {
    /// Parses an object.
    pub fn parse(bytes: &[u8]) -> Result<Self, NotARecord> {
        serde_json::from_slice(bytes).map_err(|error| NotARecord(error.to_string()))
    }

    /// The JSON text of the object.
    pub fn to_bytes(&self) -> Vec<u8> {
        serde_json::to_vec(self).expect("numbers and text have a JSON form")
    }

    /// The leader, if there is one.
    pub fn holder(&self) -> Option<&str> {
        self.holder_identity.as_deref().filter(|holder| !holder.is_empty())
    }

    fn is_released(&self) -> bool {
        self.holder().is_none() && self.lease_duration_seconds <= RELEASED
    }
}

#[derive(Clone, Debug)]
struct Seen {
    /// `None`: there was no object.
    version: Option<String>,
    since: Duration,
}

/// A gateway that leads or wants to lead.
#[derive(Debug)]
pub struct Candidate {
    id: String,
    lease: Duration,
    seen: Option<Seen>,
    sent: Option<Duration>,
    until: Option<Duration>,
    resigned: bool,
}

impl Candidate {
    /// `id` must be unique among all processes, earlier ones too.
    pub fn new(id: String, lease: Duration) -> Self {
        Self { id, lease, seen: None, sent: None, until: None, resigned: false }
    }

    /// The identity in the record.
    pub fn id(&self) -> &str {
        &self.id
    }

    /// Notes the record and version that were read (`None`: no object) at `now`, at the time of day
    /// `time`. Returns the record to write over that version, if any.
    ///
    /// A missing object has no version to watch. So a candidate that finds no object first writes a
    /// record without a holder, and waits for a lease. A candidate takes the lead at once only from
    /// a released record ([`RELEASED`]).
    pub fn found(&mut self, now: Duration, found: Option<(&LeaseRecord, &str)>, time: &str) -> Option<LeaseRecord> {
        let version = found.map(|(_, version)| version.to_owned());
        let since = match &self.seen {
            Some(seen) if seen.version == version => seen.since,
            _ => now,
        };
        self.seen = Some(Seen { version, since });
        let Some((record, _)) = found else {
            // A leader goes on leading, because only the record was lost.
            let holder = self.leads(now).then(|| self.id.clone());
            return (!self.resigned).then(|| self.new_record(holder, time));
        };
        let is_own = record.holder() == Some(&*self.id);
        if record.is_released() || (record.holder().is_some() && !is_own) {
            self.until = None;
        }
        if self.resigned {
            return is_own.then(|| self.released(record, time));
        }
        let wait = self.lease.max(Duration::from_secs(record.lease_duration_seconds.into()));
        let is_over = record.is_released() || now.saturating_sub(since) > wait;
        (is_own || is_over || self.leads(now)).then(|| self.own(record, time))
    }

    /// The returned record is sent at `now`. [`Candidate::confirmed`] or [`Candidate::failed`]
    /// follows.
    pub fn sends(&mut self, now: Duration) {
        self.sent = Some(now);
    }

    /// The store confirmed the write.
    pub fn confirmed(&mut self, written: &LeaseRecord) {
        let leads = !self.resigned && written.holder() == Some(&*self.id);
        self.until = self.sent.take().filter(|_| leads).map(|sent| sent + self.lease * TERM.0 / TERM.1);
    }

    /// Another candidate wrote first, or the outcome of the write is unknown.
    pub fn failed(&mut self) {
        self.sent = None;
    }

    /// Gives up the lead; the next write releases the record.
    pub fn resign(&mut self) {
        (self.resigned, self.until) = (true, None);
    }

    /// Whether the candidate leads.
    pub fn leads(&self, now: Duration) -> bool {
        self.until.is_some_and(|until| now < until)
    }

    /// End of the last confirmed term, if any; it may be over.
    pub fn until(&self) -> Option<Duration> {
        self.until
    }

    fn new_record(&self, holder: Option<String>, time: &str) -> LeaseRecord {
        LeaseRecord {
            acquire_time: holder.is_some().then(|| time.to_owned()),
            holder_identity: holder,
            lease_duration_seconds: self.seconds(),
            renew_time: Some(time.to_owned()),
            lease_transitions: 0,
        }
    }

    fn own(&self, before: &LeaseRecord, time: &str) -> LeaseRecord {
        let (new, stays) = (self.new_record(Some(self.id.clone()), time), before.holder() == Some(&*self.id));
        // A candidate that found no object wrote `before`, without a holder.
        let is_first = before.acquire_time.is_none() && before.holder().is_none();
        LeaseRecord {
            acquire_time: if stays { before.acquire_time.clone() } else { new.acquire_time },
            lease_transitions: before.lease_transitions.saturating_add(u32::from(!stays && !is_first)),
            ..new
        }
    }

    fn released(&self, before: &LeaseRecord, time: &str) -> LeaseRecord {
        LeaseRecord {
            holder_identity: None,
            lease_duration_seconds: RELEASED,
            renew_time: Some(time.to_owned()),
            ..before.clone()
        }
    }

    /// The lease in seconds, rounded up, and at least one more than in a released record.
    fn seconds(&self) -> u32 {
        let whole = self.lease.as_secs() + u64::from(self.lease.subsec_nanos() > 0);
        u32::try_from(whole).unwrap_or(u32::MAX).max(RELEASED + 1)
    }
}
