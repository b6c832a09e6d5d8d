//! `[[pool.backend]]`: one vLLM server, and who runs the engine.
//!
//! The keys distinguish three kinds: `url` alone is an engine that runs without the gateway;
//! `launch` is an engine that the gateway runs on this machine; `url` with `control` is an engine
//! that commands start and stop elsewhere. In the file all three are keys of one table
//! ([`BackendTable`]); the rest of the gateway sees a [`Target`]. A pool with a `kubernetes` table
//! lists no backends: see `pods.rs`.

use std::collections::BTreeMap;
use std::time::Duration;

use super::certificates::UpstreamTls;
use super::file::{Entry, Value};
use super::gpu::Gpu;
use super::key::{KeySpec, Shape};
use super::limits;
use super::problem::Situation;
use super::report::{Names, Place, Report};
use super::secret::{Secret, Words, is_reference};
use super::setting::{FreeValue, Setting, Shown, list, quote};
use super::table::table;
use super::value::{Endpoint, check_name};
use crate::tls::ClientTls;
use sluice_core::engines::EngineKind;
use sluice_core::vllm::flags::value::FlagValue;
use sluice_core::vllm::secrets::{is_secret_flag, is_secret_key};

table! {
    /// A backend as it is written.
    pub(super) struct BackendTable {
        /// Name of the backend: a label of metrics and a response header. Unique in the pool.
        pub(super) name: String = required("name the backend, such as \"gpu0\"").check(check_name).example("gpu0");
        /// Address of the engine. A path in it is put before the path of every request. Write
        /// either `url` or `launch`.
        pub(super) url: Option<Endpoint> = optional("see launch").example("http://127.0.0.1:8000").in_force();
        /// Share of new work relative to the other backends of the pool. Lower it for a smaller
        /// GPU.
        pub(super) weight: f64 = default("1.0").within("0.001", "1000");
        /// Bearer token that the gateway sends to the engine, if the engine was started with
        /// --api-key: "env:NAME" or "file:PATH".
        pub(super) api_key: Option<Secret> = optional("none").example("env:GPU0_API_KEY");
        /// Port of the engine's metrics page, if it is not the port of requests.
        pub(super) metrics_port: Option<u16> =
            optional("8002 with engine = \"triton\", otherwise the port of requests").example("8002");
        /// Port of the engine's KV events (the endpoint in --kv-events-config) with prefix =
        /// "events". Rank i of a server with several ranks publishes on this port plus i.
        pub(super) events_port: Option<u16> = optional("5557, as vLLM").example("5558");
        /// Data-parallel ranks of the vLLM server (--data-parallel-size), each with a queue and a
        /// KV cache of its own. Each rank counts as a backend (NAME-0, NAME-1, ...) with the limits
        /// of the pool, and gets requests by X-Data-Parallel-Rank. Health, drain and restart
        /// concern the server, with all ranks.
        pub(super) ranks: Option<u16> =
            optional("as the pool; without it vLLM spreads the requests over its ranks, which count as one backend")
                .within("1", limits::RANKS).example("4");
        /// One of the ranks, where the file lists ranks separately, such as in different pools.
        pub(super) rank: Option<u16> = optional("as `ranks` sets it").within("0", limits::RANK).example("0");
        /// TLS to this engine, in place of the table of the pool.
        pub(super) tls: Option<UpstreamTls> = optional("as the pool");
        /// How the gateway runs the engine on this machine, in place of `url`.
        pub(super) launch: Option<Launch> = optional("the gateway does not run the engine").restarts_engine();
        /// Commands with which the gateway starts and stops the engine at `url`, wherever the
        /// engine runs: programs with arguments, without a shell. Each command must return.
        pub(super) control: Option<Control> =
            optional("the gateway does not start or stop the engine at url").restarts_engine();
    }
}

table! {
    /// How an engine that the gateway runs is started.
    pub struct Launch {
        /// The program that runs the engine, with the first arguments. With an engine other than
        /// vLLM, {port} stands for the port; without it, flags for host and port are added.
        pub command: Words = required("write the program and its arguments, such as [\"vllm\", \"serve\", \"MODEL\"]")
            .example("[\"vllm\", \"serve\", \"meta-llama/Llama-3.1-8B-Instruct\"]");
        /// Port on loopback on which the engine listens. 0: a free port of `fleet.ports`, which the
        /// engine keeps.
        pub port: u16 = default("0").example("8001");
        /// Starts this many equal processes. Each is a backend of its own, named by the backend's
        /// name and a number: worker-0, worker-1. Each has its own log, restarts by itself, and
        /// sees one of the devices in `gpu`, which are given out in turn. With `port` they get
        /// consecutive ports.
        pub copies: Option<u32> = optional("one process, with the name of the backend").within("1", limits::COPIES).example("4");
        /// GPUs that the engine may see: indexes as in nvidia-smi, or names as in nvidia-smi -L, of
        /// GPUs ("GPU-...") or of MIG slices ("MIG-..."). Empty: as CUDA_VISIBLE_DEVICES says in
        /// `env` or in the gateway's environment.
        pub gpu: Vec<Gpu> = default("[]").example("[1]");
        /// Largest share of the compute units of a GPU that the engine may use, in percent, for
        /// engines that run on one GPU at the same time through NVIDIA's MPS. Sets
        /// CUDA_MPS_ACTIVE_THREAD_PERCENTAGE, and works only while nvidia-cuda-mps-control runs.
        pub mps_percent: Option<u32> = optional("not limited").within("1", "100").example("25");
        /// Name of a device on which engines take turns, such as "gpu0". Of all backends with this
        /// name one engine is awake. The others sleep (vLLM) or are stopped, and their requests
        /// wait, see fleet.share_stay and fleet.share_hold.
        pub share: Option<String> = optional("the engine always runs").check(check_name).example("gpu0");
        /// Variables added to the environment of the engine. "env:NAME" and "file:PATH" stand for
        /// the value of a variable of the gateway and for the content of a file. Values are never
        /// shown.
        pub env: BTreeMap<String, Secret> = table().example("VLLM_CACHE_ROOT = \"cache/vllm\"");
        /// Flags of the engine, without leading dashes. "env:NAME" and "file:PATH" are read as in
        /// `env`. Values read in this way and values of secret flags such as api-key are never
        /// shown.
        pub args: BTreeMap<String, ArgValue> = table().example("max-num-seqs = 256");
    }
}

table! {
    /// Commands that start and stop an engine: programs with arguments, without a shell.
    pub struct Control {
        /// Command that starts the engine and returns. The flags of the engine replace {args}, and
        /// are in SLUICE_ARGS and SLUICE_ARGS_JSON.
        pub start: Words = required("write the command that starts it, such as [\"systemctl\", \"start\", \"vllm\"]")
            .example("[\"ssh\", \"10.0.0.7\", \"vllm-up {args}\"]");
        /// Command that stops the engine and returns.
        pub stop: Words = required("write the command that stops it, such as [\"systemctl\", \"stop\", \"vllm\"]")
            .example("[\"ssh\", \"10.0.0.7\", \"vllm-down\"]");
        /// Command that ends with status 0 while the engine runs. Empty: unknown, and probes alone
        /// decide.
        pub status: Words = default("[]").example("[\"ssh\", \"10.0.0.7\", \"vllm-runs\"]");
        /// Longest time that one of the commands may take. An image may have to be fetched.
        pub timeout: Duration = duration("2m");
        /// Flags of the engine, without leading dashes; see `launch.args`.
        pub args: BTreeMap<String, ArgValue> = table().example("max-num-seqs = 256");
    }
}

/// One vLLM server. To a reload, a backend with the same pool name, name and address is the same.
#[derive(Clone, Debug, PartialEq)]
pub struct Backend {
    /// The name, unique within the pool; a label of metrics and a response header.
    pub name: String,
    /// The address, and who runs the engine.
    pub target: Target,
    /// Share of new work relative to the other backends of the pool, above 0.
    pub weight: f64,
    /// The token that is sent upstream as `Authorization: Bearer`; `None`: no such header.
    pub api_key: Option<Secret>,
    /// The `tls` table of this backend, if it has one.
    pub tls: Option<UpstreamTls>,
    /// The TLS settings that result from all tables; `None`: no TLS.
    pub connection: Option<ClientTls>,
    /// Whether the backend gets no new requests, because the pod is being deleted or is not ready.
    pub cordoned: bool,
    /// The kind of engine, which the pool names.
    pub engine: EngineKind,
    /// The port of the metrics page, if the backend names one.
    pub metrics_port: Option<u16>,
    /// The data-parallel rank that gets the requests; `None`: the engine chooses.
    pub rank: Option<u16>,
    /// The port of the engine's KV events, if the backend names one.
    pub events_port: Option<u16>,
    /// The port on which the KV events of this rank come, if the pool uses events.
    pub events: Option<u16>,
}

/// The address of a backend, and who runs the engine.
#[derive(Clone, Debug, PartialEq)]
pub enum Target {
    /// An engine that runs without the gateway.
    Url(Endpoint),
    /// An engine that the gateway runs, on loopback.
    Launch(Launch),
    /// An engine that commands start and stop, wherever it runs.
    Control(Endpoint, Control),
    /// An engine in a pod, which the gateway restarts with other arguments.
    Pod(Endpoint, PodEngine),
}

/// The data that the gateway needs to start a pod's engine with other arguments.
#[derive(Clone, Debug, PartialEq)]
pub struct PodEngine {
    /// The pod.
    pub pod: String,
    /// The pod's namespace; `None`: the gateway's.
    pub namespace: Option<String>,
    /// The StatefulSet to which the pod belongs.
    pub statefulset: String,
    /// The container of the engine.
    pub container: String,
    /// Flags of vLLM that the gateway sets.
    pub args: BTreeMap<String, ArgValue>,
}

/// Keys of [`Launch`] that earlier versions of the gateway lack. If such a key is absent, it does
/// not enter the digest, so an upgrade of the gateway restarts no engine.
const ADDED_KEYS: [&str; 3] = ["copies", "mps_percent", "share"];

impl Launch {
    /// A start of `command`, with the defaults of all other keys.
    pub fn of(command: Words, port: u16) -> Self {
        let (gpu, env, args) = (Vec::new(), BTreeMap::new(), BTreeMap::new());
        Self { command, port, copies: None, gpu, mps_percent: None, share: None, env, args }
    }

    fn compared(&self, names: &Names) -> Shown {
        let mut shown = self.show(names);
        if let Shown::Table(table) = &mut shown {
            table.items.retain(|(field, shown)| *shown != Shown::Nothing || !ADDED_KEYS.contains(&field.key.name));
        }
        shown
    }
}

impl PodEngine {
    /// All data that distinguishes the engine from others, secrets in clear, for a digest. The
    /// address is left out, because each start of the pod changes it.
    fn compared(&self) -> Vec<u8> {
        let args: Vec<_> = self.args.iter().map(|(name, value)| (name, value.expose())).collect();
        let place = (&self.pod, &self.namespace, &self.statefulset, &self.container);
        // Cannot fail: all keys are strings.
        serde_json::to_vec(&(place, args)).unwrap_or_default()
    }
}

impl Target {
    /// All data that distinguishes the target from others, secrets in clear. The bytes are for a
    /// digest, and must not be stored or shown.
    pub fn compared(&self) -> Vec<u8> {
        let names = Names::default();
        let mut bytes = Vec::new();
        match self {
            Self::Url(_) => {}
            Self::Launch(launch) => launch.compared(&names).write_compared(&mut bytes),
            Self::Control(_, control) => control.show(&names).write_compared(&mut bytes),
            Self::Pod(_, engine) => bytes = engine.compared(),
        }
        if matches!(self, Self::Url(_) | Self::Control(..)) {
            Shown::Value(self.endpoint().to_string()).write_compared(&mut bytes);
        }
        bytes
    }

    /// The configured flags of the engine; `None` for an external backend.
    pub fn args(&self) -> Option<&BTreeMap<String, ArgValue>> {
        match self {
            Self::Url(_) => None,
            Self::Launch(launch) => Some(&launch.args),
            Self::Control(_, control) => Some(&control.args),
            Self::Pod(_, engine) => Some(&engine.args),
        }
    }

    /// The target with only the flags that are secret, and separately the other flags. `None` for
    /// an external backend.
    pub fn without_settings(&self) -> Option<(Self, BTreeMap<String, ArgValue>)> {
        let mut target = self.clone();
        let args = match &mut target {
            Self::Url(_) => return None,
            Self::Launch(launch) => &mut launch.args,
            Self::Control(_, control) => &mut control.args,
            Self::Pod(_, engine) => &mut engine.args,
        };
        let (secret, settings) = std::mem::take(args).into_iter().partition(|(name, value)| is_secret_arg(name, value));
        *args = secret;
        Some((target, settings))
    }

    /// The address to which requests go.
    pub fn endpoint(&self) -> Endpoint {
        match self {
            Self::Url(endpoint) | Self::Control(endpoint, _) | Self::Pod(endpoint, _) => endpoint.clone(),
            Self::Launch(launch) => Endpoint {
                https: ["ssl-certfile", "ssl_certfile"].iter().any(|flag| launch.args.contains_key(*flag)),
                host: "127.0.0.1".to_owned(),
                port: launch.port,
                prefix: String::new(),
            },
        }
    }
}

impl Setting for Backend {
    const SHAPE: Shape = BackendTable::SHAPE;

    fn read(written: &Entry, place: &Place, key: &KeySpec, report: &mut Report<'_>) -> Option<Self> {
        let BackendTable {
            name,
            url,
            weight,
            api_key,
            metrics_port,
            events_port,
            ranks: _,
            rank,
            tls,
            launch,
            control,
        } = BackendTable::read(written, place, key, report)?;
        let is_written = |key: &str| report.is_written(&format!("{}.{key}", place.path));
        let problem = match (is_written("url"), is_written("launch")) {
            (true, true) => Some((place.path.clone(), Situation::UrlAndLaunch)),
            (false, false) => Some((place.path.clone(), Situation::NeitherUrlNorLaunch)),
            (false, true) if control.is_some() => {
                Some((format!("{}.control", place.path), Situation::ControlWithoutUrl))
            }
            _ => None,
        };
        if let Some((path, situation)) = problem {
            report.add_at(&path, situation);
        }
        // If there is no usable address, a problem was reported. Rules that compare targets skip
        // port 0.
        let nowhere = || Endpoint { https: false, host: String::new(), port: 0, prefix: String::new() };
        let target = match (launch, control, url.unwrap_or_else(nowhere)) {
            (Some(launch), _, _) => Target::Launch(launch),
            (None, Some(control), url) => Target::Control(url, control),
            (None, None, url) => Target::Url(url),
        };
        let engine = EngineKind::default();
        let (connection, cordoned, events) = (None, false, None);
        Some(Self {
            name,
            target,
            weight,
            api_key,
            tls,
            connection,
            cordoned,
            engine,
            metrics_port,
            rank,
            events_port,
            events,
        })
    }

    fn show(&self, names: &Names) -> Shown {
        let Self { name, target, weight, api_key, metrics_port, rank, events_port, tls, .. } = self.clone();
        let identity = format!("{name} {}", target.endpoint());
        let (url, launch, control) = match target {
            Target::Url(url) | Target::Pod(url, _) => (Some(url), None, None),
            Target::Launch(launch) => (None, Some(launch), None),
            Target::Control(url, control) => (Some(url), None, Some(control)),
        };
        let ranks = None;
        let table =
            BackendTable { name, url, weight, api_key, metrics_port, events_port, ranks, rank, tls, launch, control };
        let mut shown = table.show(names);
        if let Shown::Table(table) = &mut shown {
            table.identity = identity;
        }
        shown
    }
}

/// The value of a flag of an engine.
pub type ArgValue = FlagValue<Secret>;

/// Whether the value of the flag `name` is secret.
pub fn is_secret_arg(name: &str, value: &ArgValue) -> bool {
    let holds = |text: &String| is_reference(text) || has_secret_key(text);
    match value {
        ArgValue::Secret(_) => true,
        ArgValue::Flag(_) => false,
        ArgValue::Text(text) => is_secret_flag(name) || holds(text),
        ArgValue::List(texts) => is_secret_flag(name) || texts.iter().any(holds),
        ArgValue::Int(_) | ArgValue::Float(_) => is_secret_flag(name),
    }
}

/// Whether a text is JSON that has a key for a secret.
fn has_secret_key(text: &str) -> bool {
    fn within(value: &serde_json::Value) -> bool {
        match value {
            serde_json::Value::Object(entries) => entries.iter().any(|(key, value)| {
                within(value) || (is_secret_key(key) && matches!(value, serde_json::Value::String(_)))
            }),
            serde_json::Value::Array(values) => values.iter().any(within),
            _ => false,
        }
    }
    text.starts_with('{') && serde_json::from_str(text).is_ok_and(|value| within(&value))
}

impl FreeValue for ArgValue {
    fn read_free(name: &str, written: &Entry, place: &Place, report: &mut Report<'_>) -> Result<Self, Situation> {
        if name.starts_with('-') {
            return Err(Situation::FlagName { found: name.to_owned() });
        }
        let value = parse(written)?;
        if !is_secret_arg(name, &value) {
            return Ok(value);
        }
        let texts = match value {
            Self::Text(text) => vec![text],
            Self::List(texts) => texts,
            Self::Int(number) => vec![number.to_string()],
            Self::Float(number) => vec![number.to_string()],
            other => return Ok(other),
        };
        let mut secrets = Vec::new();
        for text in texts {
            let secret =
                if is_reference(&text) { Secret::resolve(&text, report.surroundings)? } else { Secret::from(text) };
            if secret.expose().is_empty() {
                return Err(Situation::SecretEmpty);
            }
            secrets.push(secret);
        }
        if secrets.iter().any(|secret| !secret.is_reference()) && is_secret_flag(name) {
            report.add(place, Situation::PlainSecret);
        }
        Ok(Self::Secret(secrets))
    }

    fn show_free(&self) -> Shown {
        match self {
            Self::Secret(secrets) => {
                let shown: Vec<String> = secrets.iter().map(|secret| quote(&secret.to_string())).collect();
                let compared: Vec<String> = secrets.iter().map(|secret| quote(secret.expose())).collect();
                let shown = if let [one] = shown.as_slice() { one.clone() } else { list(&shown) };
                Shown::Secret { shown, compared: list(&compared).into_bytes() }
            }
            Self::Flag(flag) => Shown::Value(flag.to_string()),
            Self::Int(number) => Shown::Value(number.to_string()),
            Self::Float(number) => Shown::Value(format!("{number:?}")),
            Self::Text(text) => Shown::Value(quote(text)),
            Self::List(texts) => Shown::Value(list(&texts.iter().map(|text| quote(text)).collect::<Vec<_>>())),
        }
    }
}

fn parse(written: &Entry) -> Result<ArgValue, Situation> {
    let wrong = |found: String| {
        Err(Situation::WrongType { wanted: "a text, number, true, false or a list of texts".to_owned(), found })
    };
    match &written.value {
        Value::Bool(flag) => Ok(ArgValue::Flag(*flag)),
        Value::Int(number) => Ok(ArgValue::Int(*number)),
        Value::Float(number) if number.is_finite() => Ok(ArgValue::Float(*number)),
        Value::Text(text) => Ok(ArgValue::Text(text.clone())),
        Value::List(elements) => {
            let text = |element: &Entry| match &element.value {
                Value::Text(text) => Ok(text.clone()),
                other => Err(Situation::WrongType { wanted: "a text".to_owned(), found: other.kind() }),
            };
            elements.iter().map(text).collect::<Result<_, _>>().map(ArgValue::List)
        }
        Value::Table(_) => wrong("a table (write JSON arguments as a text)".to_owned()),
        Value::Float(_) => wrong("a number that is not finite".to_owned()),
    }
}
