//! Notices for an operator: changes of the member's state, and signs of a wrong configuration.
//!
//! A member reports each sign once; the message gives the remedy. Bounds: at most [`NOTICES_MAX`]
//! notices wait until the caller takes them.

use std::fmt;

use crate::ledger::Unreadable;

pub(crate) const NOTICES_MAX: usize = 64;

sluice_core::labels! {
    /// State of a member.
    pub enum Standing {
        /// The member has no share yet.
        Joining = "joining",
        /// The member's shares are confirmed.
        Holding = "holding",
        /// The lease is over; the last shares stay in use (mode `keep`).
        Keeping = "keeping",
        /// The lease is over; nothing new is admitted (mode `strict`).
        Stopped = "stopped",
        /// The member must not write the object.
        StandingBack = "standing_back",
    }
}

/// An event that an operator should know. A variant's text is the identity of another gateway,
/// unless the variant says otherwise.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Notice {
    /// The standing changed from the first to the second.
    Stands(Standing, Standing),
    /// This member took the shares of a gateway that no longer renews.
    TookBack(String),
    /// This member did not renew in time, and other gateways took the shares.
    WasTakenBack,
    /// This member made an object, because there was none.
    Began,
    /// Another process with the same name renews shares.
    NameTwice(String),
    /// Another process writes under the same identity.
    SameIdentity,
    /// For a backend, another gateway (second field) has a different limit.
    LimitDiffers(String, String),
    /// Another gateway has a different mode.
    ModeDiffers(String),
    /// The ledger is full, so the member cannot join.
    Crowded,
    /// The object cannot be used.
    Unreadable(Unreadable),
}

impl fmt::Display for Notice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Stands(_, Standing::Holding) => f.write_str("this gateway's shares are confirmed"),
            Self::Stands(_, Standing::Keeping) => f.write_str(
                "no renewal was confirmed within the lease: this gateway goes on with its last shares (mode keep)",
            ),
            Self::Stands(_, Standing::Stopped) => f.write_str(
                "no renewal was confirmed within the lease: this gateway admits nothing new until one is (mode strict)",
            ),
            Self::Stands(_, Standing::StandingBack) => f.write_str("this gateway stands back and writes nothing"),
            Self::Stands(_, Standing::Joining) => f.write_str("this gateway has no shares yet"),
            Self::TookBack(id) => write!(f, "the shares of {} were taken back: it no longer renews them", name(id)),
            Self::WasTakenBack => {
                f.write_str("this gateway's shares were taken back by others, because it did not renew them")
            }
            Self::Began => f.write_str(
                "there was no ledger, so this gateway made one; what earlier gateways may hold is free after their lease",
            ),
            Self::NameTwice(id) => write!(
                f,
                "another process renews shares under the same name ({id}): both count, but status and metrics mix them up; \
                 give each gateway its own cluster.name"
            ),
            Self::SameIdentity => f.write_str(
                "another process writes under this gateway's identity, so this one admits nothing: was a running machine \
                 copied? Restart one of them",
            ),
            Self::LimitDiffers(backend, id) => write!(
                f,
                "{} has another limit for backend {backend}: the smaller one is in force; use the same configuration",
                name(id)
            ),
            Self::ModeDiffers(id) => {
                write!(f, "{} has another cluster.mode: the limit is only as strict as the weaker one", name(id))
            }
            Self::Crowded => write!(
                f,
                "the ledger has {} gateways, and no more are possible: this one gets no share",
                crate::ledger::GATEWAYS_MAX
            ),
            Self::Unreadable(why) => why.fmt(f),
        }
    }
}

/// The name within an identity.
pub fn name(id: &str) -> &str {
    id.rsplit_once('#').map_or(id, |(name, _)| if name.is_empty() { "an earlier gateway" } else { name })
}
