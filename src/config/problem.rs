//! The possible problems of a configuration: one variant per situation, and the report of all of
//! them.
//!
//! A problem is a situation at a key: `pool[0].long_prefix.slots`, with the line of the key. The
//! text of a situation names the fault and the remedy; it does not repeat the key. Warnings are
//! situations too: the gateway runs with them, and reports them at start and in `sluice check`. An
//! unknown name is reported with the nearest known one ([`Suggestion`]).
//!
//! A report lists at most `MAX_PROBLEMS` problems in order of lines and counts the rest. The last
//! line names the sections of `errors.md` about these problems ([`Topic`]).

use std::collections::BTreeSet;
use std::fmt;

use super::limits::MAX_PROBLEMS;
use super::origin::{Origin, Origins};
pub use super::suggestion::Suggestion;
use super::topic::Topic;

/// One situation at one key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Problem {
    path: String,
    origin: Origin,
    situation: Situation,
}

/// A fault, or, for warnings, a noteworthy fact.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[expect(missing_docs, reason = "the message documents each situation and its fields")]
pub enum Situation {
    #[error("cannot read the file: {reason}")]
    Unreadable { reason: String },
    #[error("not TOML: {message}")]
    Syntax { message: String },
    #[error("{text} does not fit a 64-bit number")]
    Number { text: String },
    #[error("'--set {text}' is not KEY=VALUE; write for example --set pool.short.slots=32")]
    SetMalformed { text: String },
    #[error("'--set {text}': nothing in '{list}' is called '{wanted}'; {suggestion}")]
    SetNoSuchElement { text: String, list: String, wanted: String, suggestion: Suggestion },
    #[error("'--set {text}': '{key}' is {found}, not a table, and has no keys below it")]
    SetInsideValue { text: String, key: String, found: String },

    #[error("unknown key; {suggestion}")]
    UnknownKey { suggestion: Suggestion },
    #[error("missing; {hint}")]
    Missing { hint: &'static str },
    #[error("expected {wanted}, found {found}")]
    WrongType { wanted: String, found: String },
    #[error("{reason}")]
    Unit { reason: String },
    #[error("unknown value '{found}'; {suggestion}")]
    UnknownChoice { found: String, suggestion: Suggestion },
    #[error("{found} is outside {min} to {max}")]
    OutOfRange { found: String, min: String, max: String },
    #[error("{found} entries, but at most {max} are supported")]
    TooMany { found: usize, max: usize },
    #[error("'{found}' is not an address; write one such as \"127.0.0.1:8080\", or \":8080\" for all networks")]
    Address { found: String },

    #[error("the text is empty")]
    Empty,
    #[error("the command is empty; write the program and its arguments")]
    EmptyCommand,
    #[error("the name has {bytes} bytes; at most {max} are supported")]
    NameTooLong { bytes: usize, max: usize },
    #[error("'{name}' may contain only letters, digits and . _ : / -, since it becomes a metric label and a header")]
    NameLetters { name: String },
    #[error("'{name}' may not contain control characters, or blanks at its beginning or end")]
    ModelNameLetters { name: String },
    #[error("the name \"other\" is for requests that are in no class; choose another name")]
    ReservedClass,
    #[error("'{name}' is used twice; it is already at {first}")]
    Duplicate { name: String, first: String },

    #[error("there is no pool; add [[pool]] with a [[pool.backend]], or start with --backend URL")]
    NoPool,
    #[error("the pool has no backend; add [[pool.backend]] with a url")]
    NoBackend,
    #[error("this sluice was built without kubernetes; build it with --features kubernetes, or remove the table")]
    WithoutKubernetes,
    #[error("a pool has pods (kubernetes) or listed backends; make two pools of them")]
    PodsAndBackends,
    #[error("the gateway sets arguments of the pods of a StatefulSet only; name it with statefulset, or remove args")]
    ArgsWithoutStatefulset,
    #[error("a pod shows its arguments; give its container this secret as a variable, such as VLLM_API_KEY")]
    SecretInPodArgs,
    #[error(
        "the gateway cannot start and stop these engines; give every backend launch or control, or kubernetes a statefulset, or remove apply"
    )]
    AutoscaleWithoutEngines,
    #[error("engines with launch.share run in turn, so autoscaling cannot start and stop them; remove apply, or share")]
    AutoscaleWithShare,
    #[error(
        "requests at the gateways that do not lead would wait for an engine that none of them can start; set min to 1 or more, or cluster.leader to \"serves\""
    )]
    NoEngineForOthers,
    #[error("the list is empty; name at least one model, or \"*\" for all")]
    NoModels,
    #[error("\"*\" already means all models; remove it or the names beside it")]
    StarAndNames,
    #[error("no model is called '{name}'; {suggestion} (models are declared in [[model]])")]
    UnknownModel { name: String, suggestion: Suggestion },
    #[error(
        "no model is called '{name}', because there is no [[model]]; leave models out, or add a [[model]] with this name"
    )]
    NoModelDeclared { name: String },
    #[error("no pool serves model '{model}'; add it to the models of a pool, or remove it")]
    UnreachableModel { model: String },
    #[error("min {min} is not below max {max}; the range is half open, min <= prompt < max")]
    EmptyRange { min: String, max: String },
    #[error("{model}: no pool is for prompts of {gap} tokens; let prompt_tokens of one pool begin where another ends")]
    Gap { model: String, gap: String },
    #[error(
        "{model}: prompts of {overlap} tokens belong to both '{first}' and '{second}'; let one range end where the other begins"
    )]
    Overlap { model: String, overlap: String, first: String, second: String },
    #[error(
        "prompts of {threshold} tokens and more belong to this pool but could never run here; give it at least 1 slot"
    )]
    LongNeverRuns { threshold: String },
    #[error("'{found}' is no path that a pool can name; write one such as \"/synthesize\", and none of the API")]
    RoutePath { found: String },
    #[error("only a pool with engine = \"serial\" and with exactly one model can name paths")]
    RoutesOfPool,
    #[error("no pool is called '{name}'; {suggestion}")]
    UnknownPool { name: String, suggestion: Suggestion },
    #[error("a pool cannot spill to itself; remove it from the list")]
    SpillToSelf,
    #[error("pool '{to}' does not serve {model}, which this pool would spill to it")]
    SpillWithoutModel { to: String, model: String },

    #[error("an experiment compares at least two arms; add [[experiment.arm]], the control first")]
    FewArms,
    #[error("the weights of the arms add up to {sum}; they are percentages and must add up to 100")]
    WeightsSum { sum: String },
    #[error("the arm has no units; write its percentage of the units, or make it a shadow arm (shadow)")]
    NoWeight,
    #[error("a shadow arm gets copies and no units; remove its weight, or its shadow")]
    ShadowWeight,
    #[error("the first arm is the control, with whose units the others are compared; make another arm the shadow arm")]
    ShadowControl,
    #[error("no API key is called '{name}'; {suggestion} (keys are declared in [[auth.keys]])")]
    UnknownKeyName { name: String, suggestion: Suggestion },
    #[error("the pool has no backend '{name}'; {suggestion}")]
    UnknownBackend { name: String, suggestion: Suggestion },
    #[error("names of backends belong to a pool; add pool to the arm")]
    BackendsWithoutPool,
    #[error(
        "pool '{pool}' does not serve model '{model}', which requests of this arm are for; add it to the pool's models"
    )]
    ArmPoolWithoutModel { pool: String, model: String },
    #[error(
        "'{first}' already has units of this part of the layer, also when it is stopped or promoted; remove '{first}' once its winner is configured for all (sluice experiment remove {first}, or delete its table), or let traffic.from of one be traffic.to of the other"
    )]
    SameTraffic { first: String },
    #[error(
        "requests could belong to '{first}' too, and each takes part in one experiment only; use its layer '{layer}' with another part of the traffic, \
         or remove '{first}' once it is over"
    )]
    OtherLayer { first: String, layer: String },
    #[error("traffic.from must be below traffic.to")]
    EmptyTraffic,
    #[error("a later step must have a larger share, and come later (after) than the one before")]
    RampOrder,
    #[error("'{found}' is not a step of a ramp; write a percentage and a time, such as \"5%\" or \"25% after 2h\"")]
    Ramp { found: String },
    #[error("'{found}' is not a time; write one such as \"2026-01-31T12:00:00Z\"")]
    Time { found: String },
    #[error("'{found}' is not the name of a header; write one such as \"x-user-id\"")]
    Header { found: String },
    #[error("'{found}' is not an origin as browsers send it; {advice}")]
    CorsOrigin { found: String, advice: String },
    #[error("\"*\" allows every origin; leave out the others, or leave out \"*\"")]
    StarAndOrigins,
    #[error("\"{found}\" is not a time of day in UTC; write it as \"02:00-05:00\"")]
    Window { found: String },
    #[error(
        "the tuner does not change \"{found}\"; it can change max-num-seqs, max-num-batched-tokens, \
         long-prefill-token-threshold, prefill-schedule-interval, max-cudagraph-capture-size and \
         gpu-memory-utilization"
    )]
    TunerFlag { found: String },

    #[error("give either url (an engine that runs already) or launch (one that the gateway starts), not both")]
    UrlAndLaunch,
    #[error("the backend has neither url nor launch; add for example url = \"http://127.0.0.1:8000\"")]
    NeitherUrlNorLaunch,
    #[error("control is for an engine at a url; an engine that the gateway launches needs no control commands")]
    ControlWithoutUrl,
    #[error("ranks are for engine = \"vllm\"; an engine of another kind does not read X-Data-Parallel-Rank")]
    RanksOfOtherKind,
    #[error("ranks are for backends that the file lists; remove it, and vLLM balances the ranks of a pod")]
    RanksOfPods,
    #[error(
        "KV events correct the predictions of policy = \"least_work\" for vLLM engines; remove prefix, or set engine and \
         policy accordingly"
    )]
    EventsOfPool,
    #[error(
        "the engine must publish KV events: add kv-events-config to launch.args, with \"enable_kv_cache_events\": true, \
         \"publisher\": \"zmq\" and \"endpoint\": \"tcp://*:{port}\""
    )]
    EventsOfLaunch { port: u16 },
    #[error(
        "{first} has the same host and port of KV events; write another port in events_port, as in the engine's flag"
    )]
    SameEvents { first: String },
    #[error("a backend is one rank or has several; remove rank or ranks")]
    RankAndRanks,
    #[error("a rank of an engine that the gateway runs follows rank 0; write ranks = N in place of rank")]
    RankAlone,
    #[error("engines with ranks cannot start on demand; remove ranks, or autoscale.apply and launch.share")]
    RanksOnDemand,
    #[error("{copies} copies from port {first} on would need ports up to {last}; lower port, or leave it out")]
    PortsOfCopies { copies: usize, first: i64, last: i64 },
    #[error(
        "'{found}' is no GPU; write an index such as 0, or a name from nvidia-smi -L such as \"GPU-...\" or \"MIG-...\""
    )]
    GpuName { found: String },
    #[error("'{found}' is not a URL of a backend: {reason}")]
    Url { found: String, reason: &'static str },
    #[error(
        "port {port} already belongs to backend '{first}'; copies take consecutive ports from port on, so leave room for them, or leave port out"
    )]
    SamePort { port: u16, first: String },
    #[error(
        "{endpoint} is already backend '{first}', and their limits would not be shared; list a backend once, and use spill or several models per pool"
    )]
    SameEndpoint { endpoint: String, first: String },
    #[error("{endpoint} is the gateway's own address; requests would loop")]
    OwnAddress { endpoint: String },
    #[error("{default} is not between priority_min ({min}) and priority_max ({max}); lower is earlier")]
    PriorityOrder { default: i32, min: i32, max: i32 },
    #[error("the admin address may not overlap server.listen ({listen}); give it another port")]
    AdminIsListen { listen: String },
    #[error(
        "no one may send a PROXY header; list the addresses of the proxies in server.trusted_proxies, or leave it out"
    )]
    ProxyWithoutTrust,
    #[error("'{found}' is not a host name; write it without scheme, port and path, such as \"sluice.internal\"")]
    HostName { found: String },
    #[error(
        "'{found}' is not the name of a flag; write it without its leading dashes, such as \"tensor-parallel-size\""
    )]
    FlagName { found: String },
    #[error("{value} is more than {max_key} ({max}); lower it, or raise {max_key}")]
    AboveMaximum { value: String, max_key: &'static str, max: String },

    #[error("environment variable {name} is not set (or not text); set it before starting")]
    SecretEnvMissing { name: String },
    #[error("cannot read the secret in {path}: {reason}")]
    SecretFile { path: String, reason: String },
    #[error("the secret is empty")]
    SecretEmpty,
    #[error("the secret has characters that a header cannot contain; it must be one line of visible ASCII")]
    SecretLetters,
    #[error("not a SHA-256: expected 64 hex digits; make one with: printf %s \"$KEY\" | sha256sum")]
    Digest,
    #[error("this is the same key as '{first}', so requests could not be attributed; give each its own")]
    SameKey { first: String },
    #[error("there is no file {path} (relative paths start at the configuration file's folder)")]
    FileMissing { path: String },
    #[error("there is no folder {path} (relative paths start at the configuration file's folder)")]
    FolderMissing { path: String },
    #[error("{path} is a folder; write the name of a file")]
    IsFolder { path: String },
    #[error("{reason}")]
    Unusable { reason: String },
    #[error("the engine would not start: {reason}")]
    EngineUnfit { reason: String },

    #[error("cannot use {path}: {reason}")]
    PemFile { path: String, reason: String },
    #[error("{reason}")]
    Tls { reason: String },
    #[error("'{found}' is not a DNS name or an IP address")]
    TlsName { found: String },
    #[error("verify_client says which certificates of client_ca are required; add client_ca, or remove it")]
    VerifyWithoutCa,
    #[error("certificate is set without key; add key")]
    CertificateWithoutKey,
    #[error("key is set without certificate; add certificate, or remove key")]
    KeyWithoutCertificate,
    #[error("with verify = \"none\" no certificate is checked against ca; remove one of them")]
    CaWithoutVerify,
    #[error("nothing that this applies to has an https url; write https:// in url or endpoint, or remove this")]
    TlsWithoutHttps,

    #[error(
        "this sluice was built without tracing; build it with --features otel, or install a published package, or remove the table"
    )]
    WithoutTracing,
    #[error("'{found}' ends in {path}, which the gateway adds itself; leave it out")]
    CollectorPath { found: String, path: &'static str },
    #[error("4317 is usually the port of OTLP over gRPC, which is not supported; OTLP over HTTP is usually on 4318")]
    GrpcPort,

    #[error(
        "the ledger has no store; write the addresses of etcd, such as etcd = [\"http://127.0.0.1:2379\"], or a table kubernetes"
    )]
    NoStore,
    #[error("the ledger is in etcd or in Kubernetes; remove one of them")]
    TwoStores,
    #[error("'{found}' is not the name of a ConfigMap; write lower case letters, digits, - and .")]
    ObjectName { found: String },
    #[error("with cluster.leader other gateways must know where this engine is; give it a port, such as port = 8001")]
    PortOfLeader,

    #[error("engine certificates are not checked: any server that answers gets prompts and keys; set ca instead")]
    NotVerified,
    #[error("all users of this machine may read or change the private key {path} (mode {mode}); chmod 640 it")]
    KeyForAllUsers { path: String, mode: String },
    #[error("no client keys: every client that reaches {listen} may send requests; add keys to [auth]")]
    Open { listen: String },
    #[error(
        "missing, and server.admin ({admin}) is not on loopback: every machine that reaches it could change the gateway; \
         set it to \"env:NAME\" or \"file:PATH\", or let server.admin begin with 127.0.0.1"
    )]
    AdminOpen { admin: String },
    #[error("a secret in plain text; write \"env:NAME\" or \"file:PATH\" instead")]
    PlainSecret,
    #[error(
        "a secret in the words of a command, which every user of the machine can see; use launch.env, or args with \"env:NAME\""
    )]
    PlainSecretInCommand,
    #[error(
        "fair = \"key\" does nothing without auth.keys: all requests have one owner; configure keys, or write \"off\""
    )]
    FairWithoutKeys,
}

impl Situation {
    /// Whether the gateway runs in spite of the situation.
    pub fn is_warning(&self) -> bool {
        matches!(
            self,
            Self::Open { .. }
                | Self::PlainSecret
                | Self::PlainSecretInCommand
                | Self::FairWithoutKeys
                | Self::GrpcPort
                | Self::NotVerified
                | Self::KeyForAllUsers { .. }
        )
    }
}

impl Problem {
    pub(super) fn new(path: String, origin: Origin, situation: Situation) -> Self {
        Self { path, origin, situation }
    }

    /// A problem at a key, found by code outside this crate in a configuration that is valid by
    /// itself.
    pub fn at(path: String, origins: &Origins, situation: Situation) -> Self {
        Self { origin: origins.nearest(&path), path, situation }
    }

    /// The key, such as `pool[0].long_prefix.slots`; empty if the problem concerns the whole file.
    pub fn path(&self) -> &str {
        &self.path
    }

    /// The origin of the value.
    pub fn origin(&self) -> Origin {
        self.origin
    }

    /// The situation.
    pub fn situation(&self) -> &Situation {
        &self.situation
    }
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.origin {
            Origin::File { line, column } => write!(f, "{line}:{column}: ")?,
            Origin::Set(_) if self.path.is_empty() => {}
            Origin::Set(_) | Origin::Api => write!(f, "{}: ", self.origin)?,
            // The first line of the report already names the source.
            Origin::Flag | Origin::Default => {}
        }
        let name = if self.origin == Origin::Flag { flag(&self.path) } else { None };
        match name.unwrap_or(&self.path) {
            "" => {}
            name => write!(f, "{name}: ")?,
        }
        write!(f, "{}", self.situation)
    }
}

fn flag(path: &str) -> Option<&'static str> {
    match path {
        "server.listen" => Some("--listen"),
        "server.admin" => Some("--admin"),
        _ if !path.ends_with("].url") => None,
        _ if path.starts_with("pool[0].backend[") => Some("--backend"),
        _ if path.starts_with("pool[1].backend[") => Some("--long"),
        _ => None,
    }
}

/// All problems of a configuration. The program has not bound or started anything, and exits with
/// code 78.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Problems {
    /// The name of the file, or "command line".
    pub source: String,
    /// The errors, in order of lines; at least one.
    pub errors: Vec<Problem>,
    /// Warnings, in order of lines.
    pub warnings: Vec<Problem>,
}

impl Problems {
    pub(super) fn sorted(source: &str, found: Vec<Problem>) -> Self {
        let (mut warnings, mut errors): (Vec<_>, Vec<_>) = found.into_iter().partition(|p| p.situation.is_warning());
        warnings.sort_by_key(Problem::origin);
        errors.sort_by_key(Problem::origin);
        Self { source: source.to_owned(), errors, warnings }
    }

    /// One line per error, with the name of the file.
    pub fn lines(&self) -> impl Iterator<Item = String> {
        self.errors.iter().map(|problem| Located(&self.source, problem).to_string())
    }

    /// One line per warning, with the name of the file.
    pub fn write_warnings(out: &mut dyn fmt::Write, source: &str, warnings: &[Problem]) -> fmt::Result {
        warnings.iter().try_for_each(|problem| writeln!(out, "warning: {}", Located(source, problem)))
    }
}

/// A problem with the name of the file before the line.
struct Located<'a>(&'a str, &'a Problem);

impl fmt::Display for Located<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let separator = if matches!(self.1.origin, Origin::File { .. }) { ":" } else { ": " };
        write!(f, "{}{separator}{}", self.0, self.1)
    }
}

impl fmt::Display for Problems {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for line in self.lines().take(MAX_PROBLEMS) {
            writeln!(f, "error: {line}")?;
        }
        Self::write_warnings(f, &self.source, &self.warnings[..self.warnings.len().min(MAX_PROBLEMS)])?;
        let count = self.errors.len();
        write!(f, "{}: {count} error{}", self.source, if count == 1 { "" } else { "s" })?;
        if count > MAX_PROBLEMS {
            write!(f, ", the first {MAX_PROBLEMS} are shown")?;
        }
        let topics: BTreeSet<Topic> = self.errors.iter().map(|problem| problem.situation.topic()).collect();
        let topics: Vec<&str> = topics.into_iter().map(Topic::label).collect();
        write!(f, "; for more: sluice explain {}", topics.join(" "))
    }
}

impl std::error::Error for Problems {}
