//! What a member notices that an operator should know: changes of its own state, and things that do not fit.
//!
//! Each is reported once when it begins. The message says what it means and what to do.
//! Bounds: [`NOTICES_MAX`] are kept until they are taken.

use std::fmt;

use crate::ledger::Unreadable;

/// Notices kept at most until the caller takes them.
pub(crate) const NOTICES_MAX: usize = 64;

/// How a member stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Standing {
    /// It has no share yet.
    Joining,
    /// Its shares are confirmed.
    Holding,
    /// The lease is over, and it goes on with its last shares (`keep`).
    Keeping,
    /// The lease is over, and nothing new is admitted (`strict`).
    Stopped,
    /// The object is not one that it may write.
    StandingBack,
}

impl Standing {
    /// All of them.
    pub const ALL: [Self; 5] = [Self::Joining, Self::Holding, Self::Keeping, Self::Stopped, Self::StandingBack];

    /// Its name in labels and in the admin API.
    pub fn label(self) -> &'static str {
        match self {
            Self::Joining => "joining",
            Self::Holding => "holding",
            Self::Keeping => "keeping",
            Self::Stopped => "stopped",
            Self::StandingBack => "standing_back",
        }
    }
}

/// What was noticed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Notice {
    /// Its standing changed.
    Stands(Standing, Standing),
    /// It took back what a gateway no longer renews, all of it.
    TookBack(String),
    /// Its own share was taken back while it did not renew.
    WasTakenBack,
    /// There was no object: it made one.
    Began,
    /// Another process has this name and renews.
    NameTwice(String),
    /// Another process writes under this very identity.
    SameIdentity,
    /// Another gateway has another limit for this backend.
    LimitDiffers(String, String),
    /// Another gateway has another mode.
    ModeDiffers(String),
    /// It cannot join: there are as many gateways as a ledger may have.
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

/// The name in an identity.
pub fn name(id: &str) -> &str {
    id.rsplit_once('#').map_or(id, |(name, _)| if name.is_empty() { "an earlier gateway" } else { name })
}
