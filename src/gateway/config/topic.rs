//! Which page about errors a problem of a configuration belongs to.
//!
//! The last line of a report names the topics of its problems, for `sluice explain TOPIC`; `.github/docs/errors.md` has a section
//! about each, with every message of it. There are few topics, since a message itself says what to do.
//! Which topic a situation belongs to is in `problem.rs`.

/// A section of `errors.md` about configurations.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Topic {
    /// The file as text, and its keys.
    Syntax,
    /// Values of the wrong kind or size.
    Values,
    /// Names, and references to them.
    Names,
    /// Pools, their models and their ranges of prompt lengths.
    Pools,
    /// Where engines are, and who starts them.
    Backends,
    /// Addresses of the gateway, and who reaches them.
    Addresses,
    /// Keys, tokens and where they come from.
    Secrets,
    /// Files and folders that are named.
    Files,
    /// Certificates.
    Tls,
    /// Experiments and their arms.
    Experiments,
    /// The online tuner.
    Tuner,
    /// Several gateways.
    Cluster,
    /// Traces.
    Tracing,
}

impl Topic {
    /// Every topic, in the order in which a report names them.
    pub const ALL: [Self; 13] = [
        Self::Syntax,
        Self::Values,
        Self::Names,
        Self::Pools,
        Self::Backends,
        Self::Addresses,
        Self::Secrets,
        Self::Files,
        Self::Tls,
        Self::Experiments,
        Self::Tuner,
        Self::Cluster,
        Self::Tracing,
    ];

    /// What `sluice explain` takes, and the anchor in `errors.md`.
    pub const fn label(self) -> &'static str {
        match self {
            Self::Syntax => "config-syntax",
            Self::Values => "config-values",
            Self::Names => "config-names",
            Self::Pools => "config-pools",
            Self::Backends => "config-backends",
            Self::Addresses => "config-addresses",
            Self::Secrets => "config-secrets",
            Self::Files => "config-files",
            Self::Tls => "config-tls",
            Self::Experiments => "config-experiments",
            Self::Tuner => "config-tuner",
            Self::Cluster => "config-cluster",
            Self::Tracing => "config-tracing",
        }
    }
}
