//! The bounds on one backend, and the limits in force that follow from them.
//!
//! | bound | set by | applies to |
//! |---|---|---|
//! | configured | the configuration | everything; alone decides whether a request is refused |
//! | ceiling | the process that runs the engine | slots of requests and copies |
//! | trial | the tuner, after it has changed flags of the engine | slots and tokens of requests |
//! | share | a gateway that divides the limits (`foreign.rs`) | all usage of this gateway |
//! | ledger | the ledger of several gateways (`divided.rs`) | all usage of this gateway |
//! | learned | preemptions, with `tokens = "auto"` | tokens of requests; refuses none |
//! | foreign | other gateways, which use this much of the backend | all usage together |
//!
//! For each unit the smallest bound applies. A share of 0 admits nothing, and requests wait.

use super::capacity::{BackendLimits, CapacityUsage, Need};
use super::share::Share;

/// One bound on a backend.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Bound {
    /// The limits of the configuration.
    Configured(BackendLimits),
    /// The most slots; `None`: as configured.
    Ceiling(Option<u32>),
    /// The most that requests may use while the engine is on trial; `None`: it is not on trial.
    Trial(Option<TrialBound>),
    /// The most that this gateway may use, where another gateway divides the limits.
    Share(Option<Share>),
    /// The most that this gateway may use by the ledger.
    Ledger(Share),
    /// The most outstanding tokens at which the engine should preempt no request; `None`: the
    /// engine preempts no request, so there is no such limit.
    Learned(Option<LearnedTokens>),
    /// The capacity that other gateways use, or may begin to use at any moment.
    Foreign(Share),
}

/// A limit of outstanding tokens that follows from preemptions. A request that exceeds the limit by
/// itself runs when no other request does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LearnedTokens {
    /// The limit.
    pub tokens: u64,
    /// Requests that the engine preempted before the limit was last lowered.
    pub preempted: u64,
    /// Outstanding tokens when the limit was last lowered.
    pub outstanding: u64,
}

/// The most that requests may use of a backend whose engine is on trial, because the flags were
/// just changed.
///
/// Such an engine gets copies of requests first. The load that it sustained with copies bounds the
/// requests that follow, so an engine that fails above some load fails with copies. While the bound
/// is closed (no slot), requests neither use the backend nor displace copies. Copies may use the
/// full limits once the requests there have ended. A request that exceeds the bound by itself goes
/// elsewhere.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TrialBound {
    /// Sequences in flight; 0: no request.
    pub slots: u32,
    /// Outstanding prompt + output tokens.
    pub tokens: u64,
}

impl TrialBound {
    fn is_closed(self) -> bool {
        self.slots == 0
    }

    fn fits_alone(self, need: &Need) -> bool {
        need.slots <= self.slots && need.tokens() <= self.tokens
    }

    fn below(self, limits: BackendLimits) -> BackendLimits {
        let tokens = limits.tokens.map_or(self.tokens, |limit| limit.min(self.tokens));
        BackendLimits { slots: limits.slots.min(self.slots), tokens: Some(tokens), ..limits }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Bounds {
    configured: BackendLimits,
    ceiling: Option<u32>,
    trial: Option<TrialBound>,
    share: Option<Share>,
    ledger: Option<Share>,
    learned: Option<LearnedTokens>,
    foreign: Share,
    /// Derived from the bounds above when one of them is set, since every request reads them.
    in_force: BackendLimits,
    withheld: Share,
}

impl Bounds {
    pub(super) fn new(configured: BackendLimits) -> Self {
        Self {
            configured,
            ceiling: None,
            trial: None,
            share: None,
            ledger: None,
            learned: None,
            foreign: Share::default(),
            in_force: configured,
            withheld: Share::default(),
        }
    }

    pub(super) fn set(&mut self, bound: Bound) {
        match bound {
            Bound::Configured(limits) => self.configured = limits,
            Bound::Ceiling(slots) => self.ceiling = slots,
            Bound::Trial(trial) => self.trial = trial,
            Bound::Share(share) => self.share = share,
            Bound::Ledger(share) => self.ledger = Some(share),
            Bound::Learned(learned) => self.learned = learned,
            Bound::Foreign(share) => self.foreign = share,
        }
        let limits = self.of_copies();
        self.in_force = self.trial.map_or(limits, |trial| trial.below(limits));
        self.withheld = self.foreign.plus(Share::of_limits(&self.in_force).minus(self.most()));
    }

    /// Takes over the bounds that belong to the engine and not to the name of the backend.
    pub(super) fn inherit(&mut self, known: &Self) {
        self.set(Bound::Ceiling(known.ceiling));
        self.set(Bound::Trial(known.trial));
    }

    /// The limits for requests: the configured ones, lowered by ceiling and trial. Shares count as
    /// usage ([`Bounds::occupied`]): a request above a share waits, and a request above a limit is
    /// refused.
    pub(super) fn in_force(&self) -> &BackendLimits {
        &self.in_force
    }

    pub(super) fn configured(&self) -> &BackendLimits {
        &self.configured
    }

    pub(super) fn learned(&self) -> Option<LearnedTokens> {
        self.learned
    }

    /// Tokens that the learned limit leaves next to the leases of this gateway. The limit was
    /// learned from such leases alone. An idle backend takes any request.
    pub(super) fn learned_room(&self, used: &CapacityUsage) -> u64 {
        let limit = self.learned.filter(|_| used.tokens > 0);
        limit.map_or(u64::MAX, |limit| limit.tokens.saturating_sub(used.tokens))
    }

    /// The limits that apply to copies: the limits in force without the trial.
    pub(super) fn of_copies(&self) -> BackendLimits {
        let slots = self.configured.slots;
        let slots = self.ceiling.map_or(slots, |ceiling| slots.min(ceiling).max(1));
        BackendLimits { slots, ..self.configured }
    }

    pub(super) fn is_for_copies_only(&self) -> bool {
        self.trial.is_some_and(TrialBound::is_closed)
    }

    pub(super) fn foreign(&self) -> Share {
        self.foreign
    }

    pub(super) fn ledger(&self) -> Option<Share> {
        self.ledger
    }

    /// The usage to which a new request's need is added before the comparison with the limits:
    /// leases, foreign use, and the part of the limits that this gateway has no share of.
    pub(super) fn occupied(&self, used: &CapacityUsage) -> CapacityUsage {
        let mut all = *used;
        all.slots = all.slots.saturating_add(self.withheld.slots);
        all.tokens = all.tokens.saturating_add(self.withheld.tokens);
        all.prefill_tokens = all.prefill_tokens.saturating_add(self.withheld.prefill_tokens);
        all.long_prefills = all.long_prefills.saturating_add(self.withheld.permits);
        all
    }

    /// Whether the bounds permit `need` on an empty backend. A closed trial is ignored, because it
    /// may open.
    pub(super) fn permit(&self, need: &Need) -> bool {
        let long = self.in_force.long_prefix;
        let barred = long.is_some_and(|long| long.slots == 0 && need.prompt_tokens > long.threshold);
        let fits = self.trial.is_none_or(|trial| trial.is_closed() || trial.fits_alone(need));
        !barred && fits && self.configured.exceeded_by(need).is_none()
    }

    /// The usage by leases here and by other gateways.
    pub(super) fn in_use(&self, used: &CapacityUsage) -> Share {
        Share::of(used).plus(self.foreign)
    }

    /// The usage and the needs of waiters, as far as the limits permit.
    pub(super) fn wanted(&self, used: &CapacityUsage, waiting: Share) -> Share {
        let in_use = self.in_use(used);
        in_use.plus(waiting).min(Share::of_limits(&self.in_force)).max(in_use)
    }

    /// Lowers the share of this gateway to `wanted`.
    pub(super) fn claim(&mut self, wanted: Share) {
        self.set(Bound::Share(Some(self.share.map_or(wanted, |share| share.min(wanted)))));
    }

    /// The capacity that the limits and the shares of this gateway leave next to leases.
    pub(super) fn left(&self, used: &CapacityUsage) -> Share {
        self.most().minus(Share::of(used))
    }

    /// The most that this gateway and other gateways may use together.
    fn most(&self) -> Share {
        let limits = Share::of_limits(&self.in_force);
        [self.share, self.ledger].into_iter().flatten().fold(limits, Share::min)
    }
}
