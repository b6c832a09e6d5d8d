//! The section about errors to which a problem of a configuration belongs.
//!
//! The last line of a report names the topics of all problems, for `sluice explain TOPIC`;
//! `.github/docs/errors.md` has a section for each topic, with all messages. There are few topics,
//! because a message itself says how to correct the fault. `situation_topic.rs` maps situations to
//! topics.

/// A section of `errors.md` about configurations.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Topic {
    /// The file as text, and the keys.
    Syntax,
    /// Values of the wrong kind or size.
    Values,
    /// Names, and references to them.
    Names,
    /// Pools, their models and their ranges of prompt lengths.
    Pools,
    /// Addresses of engines, and who starts them.
    Backends,
    /// Addresses of the gateway, and who reaches them.
    Addresses,
    /// Keys and tokens, and the places from which they are read.
    Secrets,
    /// Files and folders that the configuration names.
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

    /// The argument of `sluice explain`, and the anchor in `errors.md`.
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
