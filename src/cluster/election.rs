//! One of several gateways leads: it alone changes engines, limits and experiments.
//!
//! Who leads is in one object of the store, a [`Record`] with the fields of a `coordination.k8s.io` Lease. The rules, and why no two
//! candidates lead at the same time:
//!
//! - A candidate leads only after the store has confirmed its write of a record with its own identity, which was written only over the
//!   state that it had read. It leads for [`TERM`] of the lease, counted on its own clock from when that write was *sent*.
//! - Another one takes the lead only after it has seen the same version of the object for longer than the lease, on its own clock
//!   from when it first saw it. Times of day in the record are for people: none is compared.
//! - So between the end of one term and the next leader is a tenth of the lease at least, also if one clock runs a tenth too slow and the
//!   other a tenth too fast. In it the one that led ends what it had begun.
//! - An object that is not there may have been lost, and absence has no version. So a candidate first makes a record without a holder,
//!   and waits for a lease as with any other. Only a record that its leader has given up in order ([`RELEASED`]) is taken at once.
//! - The one that leads and finds another one's record stops at once.
//!
//! Pure: no clock, no I/O, no randomness. Times are durations on the candidate's own monotonic clock.
//! Bounds: one version is remembered. Errors: an object that is not such a record.

use std::time::Duration;

use serde::{Deserialize, Serialize};

/// Of the lease, for which a confirmed renewal lets a candidate lead: numerator and denominator.
pub const TERM: (u32, u32) = (2, 3);
/// The duration, in seconds, of a record that its leader has given up, without a holder. Other programs write the same.
pub const RELEASED: u32 = 1;

/// Who leads. Names and forms are those of the `spec` of a Lease, so that kubectl and other tools understand it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Record {
    /// The identity of the one that leads; absent: no gateway does.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub holder_identity: Option<String>,
    /// How long others wait without a renewal, s.
    pub lease_duration_seconds: u32,
    /// Since when it leads, RFC 3339.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub acquire_time: Option<String>,
    /// When it renewed last, RFC 3339.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub renew_time: Option<String>,
    /// How often the lead has gone to another one.
    #[serde(default)]
    pub lease_transitions: u32,
}

/// Why an object cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the object is no record of who leads ({0}): remove it, or give the gateways another key (cluster.key)")]
pub struct NotARecord(String);

impl Record {
    /// Reads an object.
    pub fn parse(bytes: &[u8]) -> Result<Self, NotARecord> {
        serde_json::from_slice(bytes).map_err(|error| NotARecord(error.to_string()))
    }

    /// The object.
    pub fn to_bytes(&self) -> Vec<u8> {
        serde_json::to_vec(self).expect("numbers and text have a JSON form")
    }

    /// Its leader, if it has one.
    pub fn holder(&self) -> Option<&str> {
        self.holder_identity.as_deref().filter(|holder| !holder.is_empty())
    }

    fn is_released(&self) -> bool {
        self.holder().is_none() && self.lease_duration_seconds <= RELEASED
    }
}

/// What a candidate has seen of the object.
#[derive(Clone, Debug)]
struct Seen {
    /// `None`: there was no object.
    version: Option<String>,
    since: Duration,
}

/// A gateway that leads, or would.
#[derive(Debug)]
pub struct Candidate {
    id: String,
    lease: Duration,
    seen: Option<Seen>,
    /// When the write was sent whose outcome is not known yet.
    sent: Option<Duration>,
    /// It leads until then.
    until: Option<Duration>,
    resigned: bool,
}

impl Candidate {
    /// `id`: no other process has, or had, the same.
    pub fn new(id: String, lease: Duration) -> Self {
        Self { id, lease, seen: None, sent: None, until: None, resigned: false }
    }

    /// Its identity in the record.
    pub fn id(&self) -> &str {
        &self.id
    }

    /// The object was read with this version, and the answer arrived at `now`; `None`: there is none. Returns what to write over that
    /// version, if anything. `time`: the time of day.
    pub fn found(&mut self, now: Duration, found: Option<(&Record, &str)>, time: &str) -> Option<Record> {
        let version = found.map(|(_, version)| version.to_owned());
        let since = match &self.seen {
            Some(seen) if seen.version == version => seen.since,
            _ => now,
        };
        self.seen = Some(Seen { version, since });
        let Some((record, _)) = found else {
            // The one that leads has lost its record.
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

    /// The write of what [`Candidate::found`] returned is sent at `now`. One of the next three follows.
    pub fn sends(&mut self, now: Duration) {
        self.sent = Some(now);
    }

    /// The store has confirmed it: `written` is the record now.
    pub fn confirmed(&mut self, written: &Record) {
        let leads = !self.resigned && written.holder() == Some(&*self.id);
        self.until = self.sent.take().filter(|_| leads).map(|sent| sent + self.lease * TERM.0 / TERM.1);
    }

    /// Another candidate wrote first, or it is not known what became of it.
    pub fn failed(&mut self) {
        self.sent = None;
    }

    /// It no longer leads, nor will it; the next write says so.
    pub fn resign(&mut self) {
        (self.resigned, self.until) = (true, None);
    }

    /// Whether it leads.
    pub fn leads(&self, now: Duration) -> bool {
        self.until.is_some_and(|until| now < until)
    }

    /// Until when it leads, if it does.
    pub fn until(&self) -> Option<Duration> {
        self.until
    }

    /// The first record, of this or of no candidate.
    fn new_record(&self, holder: Option<String>, time: &str) -> Record {
        Record {
            acquire_time: holder.is_some().then(|| time.to_owned()),
            holder_identity: holder,
            lease_duration_seconds: self.seconds(),
            renew_time: Some(time.to_owned()),
            lease_transitions: 0,
        }
    }

    /// A record in which this one leads.
    fn own(&self, before: &Record, time: &str) -> Record {
        let (new, stays) = (self.new_record(Some(self.id.clone()), time), before.holder() == Some(&*self.id));
        // No candidate had the one that was made without a holder.
        let is_first = before.acquire_time.is_none() && before.holder().is_none();
        Record {
            acquire_time: if stays { before.acquire_time.clone() } else { new.acquire_time },
            lease_transitions: before.lease_transitions.saturating_add(u32::from(!stays && !is_first)),
            ..new
        }
    }

    fn released(&self, before: &Record, time: &str) -> Record {
        Record {
            holder_identity: None,
            lease_duration_seconds: RELEASED,
            renew_time: Some(time.to_owned()),
            ..before.clone()
        }
    }

    /// The lease in whole seconds, at least as long. More than a released record has.
    fn seconds(&self) -> u32 {
        let whole = self.lease.as_secs() + u64::from(self.lease.subsec_nanos() > 0);
        u32::try_from(whole).unwrap_or(u32::MAX).max(RELEASED + 1)
    }
}
