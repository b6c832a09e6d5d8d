//! The section of `errors.md` about each situation.
//!
//! Every situation has exactly one section, so the match has no default: a new situation does not
//! compile without one. The documentation's tests compare the sections with the messages.

use super::problem::Situation;
use super::topic::Topic;

impl Situation {
    /// The section of `errors.md` about the situation.
    pub fn topic(&self) -> Topic {
        match self {
            Self::Unreadable { .. } | Self::Syntax { .. } | Self::Number { .. } | Self::SetMalformed { .. } => {
                Topic::Syntax
            }
            Self::SetNoSuchElement { .. }
            | Self::SetInsideValue { .. }
            | Self::UnknownKey { .. }
            | Self::Missing { .. } => Topic::Syntax,
            Self::WrongType { .. } | Self::Unit { .. } | Self::UnknownChoice { .. } | Self::OutOfRange { .. } => {
                Topic::Values
            }
            Self::TooMany { .. }
            | Self::AboveMaximum { .. }
            | Self::PriorityOrder { .. }
            | Self::Empty
            | Self::Time { .. }
            | Self::CorsOrigin { .. }
            | Self::StarAndOrigins
            | Self::Header { .. } => Topic::Values,
            Self::NameTooLong { .. }
            | Self::NameLetters { .. }
            | Self::ModelNameLetters { .. }
            | Self::ReservedClass
            | Self::Duplicate { .. } => Topic::Names,
            Self::UnknownModel { .. } | Self::UnknownPool { .. } | Self::UnknownBackend { .. } => Topic::Names,
            Self::UnknownKeyName { .. } | Self::NoModelDeclared { .. } | Self::FlagName { .. } => Topic::Names,
            Self::RoutePath { .. } => Topic::Names,
            Self::NoPool | Self::NoBackend | Self::WithoutKubernetes | Self::PodsAndBackends => Topic::Pools,
            Self::ArgsWithoutStatefulset | Self::SecretInPodArgs | Self::LongNeverRuns { .. } => Topic::Pools,
            Self::AutoscaleWithoutEngines | Self::AutoscaleWithShare | Self::NoEngineForOthers | Self::RoutesOfPool => {
                Topic::Pools
            }
            Self::NoModels | Self::StarAndNames | Self::UnreachableModel { .. } => Topic::Pools,
            Self::EmptyRange { .. } | Self::Gap { .. } | Self::Overlap { .. } => Topic::Pools,
            Self::SpillToSelf | Self::SpillWithoutModel { .. } | Self::FairWithoutKeys => Topic::Pools,
            Self::UrlAndLaunch | Self::NeitherUrlNorLaunch | Self::ControlWithoutUrl | Self::Url { .. } => {
                Topic::Backends
            }
            Self::SameEndpoint { .. } | Self::OwnAddress { .. } | Self::EmptyCommand => Topic::Backends,
            Self::PortsOfCopies { .. } | Self::SamePort { .. } | Self::GpuName { .. } => Topic::Backends,
            Self::RanksOfOtherKind | Self::RanksOfPods | Self::RankAndRanks | Self::RankAlone => Topic::Backends,
            Self::RanksOnDemand => Topic::Backends,
            Self::EventsOfPool | Self::EventsOfLaunch { .. } | Self::SameEvents { .. } => Topic::Backends,
            Self::Address { .. } | Self::AdminIsListen { .. } | Self::HostName { .. } => Topic::Addresses,
            Self::ProxyWithoutTrust => Topic::Addresses,
            Self::AdminOpen { .. } | Self::Open { .. } => Topic::Addresses,
            Self::SecretEnvMissing { .. } | Self::SecretFile { .. } | Self::SecretEmpty | Self::SecretLetters => {
                Topic::Secrets
            }
            Self::Digest | Self::SameKey { .. } | Self::PlainSecret | Self::PlainSecretInCommand => Topic::Secrets,
            Self::FileMissing { .. } | Self::FolderMissing { .. } | Self::IsFolder { .. } => Topic::Files,
            Self::Unusable { .. } => Topic::Files,
            Self::EngineUnfit { .. } => Topic::Backends,
            Self::PemFile { .. } | Self::Tls { .. } | Self::TlsName { .. } | Self::VerifyWithoutCa => Topic::Tls,
            Self::CertificateWithoutKey
            | Self::KeyWithoutCertificate
            | Self::CaWithoutVerify
            | Self::TlsWithoutHttps => Topic::Tls,
            Self::NotVerified | Self::KeyForAllUsers { .. } => Topic::Tls,
            Self::FewArms | Self::WeightsSum { .. } | Self::NoWeight | Self::ShadowWeight | Self::ShadowControl => {
                Topic::Experiments
            }
            Self::BackendsWithoutPool | Self::ArmPoolWithoutModel { .. } | Self::SameTraffic { .. } => {
                Topic::Experiments
            }
            Self::OtherLayer { .. } | Self::EmptyTraffic | Self::RampOrder | Self::Ramp { .. } => Topic::Experiments,
            Self::Window { .. } | Self::TunerFlag { .. } => Topic::Tuner,
            Self::NoStore | Self::TwoStores | Self::ObjectName { .. } | Self::PortOfLeader => Topic::Cluster,
            Self::WithoutTracing | Self::CollectorPath { .. } | Self::GrpcPort => Topic::Tracing,
        }
    }
}
