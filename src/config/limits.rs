//! Every bound that is not a key of the configuration, once: value, unit, reason.
//!
//! The first half bounds the content of a configuration, the second half the request path (headers,
//! reuse of connections). The bounds of a single key are part of the key's definition.

use std::time::Duration;

use sluice_core::base::Tokens;
use sluice_core::vllm::rank_page;

// ---- Contents of a configuration --------------------------------------------------------------

/// Pools: each has a queue and metric labels.
pub const MAX_POOLS: usize = 64;
/// Backends over all pools: the number of label values of the per-backend metrics.
pub const MAX_BACKENDS: usize = 1_024;
/// Processes of one backend (`launch.copies`): enough for one on each of the seven MIG slices of
/// eight GPUs.
pub(super) const MAX_COPIES: usize = 64;
/// [`MAX_COPIES`] as written in a configuration.
pub(super) const COPIES: &str = "64";
/// Data-parallel ranks of one backend: one rank on each GPU of 32 hosts.
pub(super) const MAX_RANKS: i64 = rank_page::MAX_RANKS as i64;
/// [`MAX_RANKS`] and the highest rank as written in a configuration.
pub(super) const RANKS: &str = "256";
pub(super) const RANK: &str = "255";
/// Model names (aliases not counted): label values, and one token estimator each.
pub const MAX_MODELS: usize = 512;
/// Classes: each is a label value of the metrics with latencies.
pub const MAX_CLASSES: usize = 8;
/// Aliases over all models: they only cost a map entry.
pub const MAX_ALIASES: usize = 4_096;
/// API keys: one lookup per request, one small counter block each.
pub const MAX_KEYS: usize = 10_000;
/// Experiments: each request is compared with all of them until one wants it.
pub const MAX_EXPERIMENTS: usize = 16;
/// Arms of an experiment: each is measured separately, and more of them take longer to tell apart.
pub const MAX_ARMS: usize = 8;
/// Steps of a ramp.
pub const MAX_RAMP_STEPS: usize = 32;
/// Flags of engines that the online tuner can change.
pub const MAX_TUNER_FLAGS: usize = 6;
/// Times of day at which the online tuner may restart engines.
pub const MAX_WINDOWS: usize = 16;
/// Names of the admin port: each is compared with the host of every admin request.
pub const MAX_ADMIN_HOSTS: usize = 64;
/// Further flags that the admin API may change: vLLM has about 320.
pub const MAX_ADMIN_FLAGS: usize = 512;
/// Golden prompts of one model: each delays every restart.
pub const MAX_GOLDEN: usize = 64;
/// Ranges of trusted proxies: each is compared with the address of a connection. A content delivery
/// network publishes about 25.
pub const MAX_TRUSTED_PROXIES: usize = 256;
/// Threads of the data plane.
pub const MAX_THREADS: usize = 1_024;
/// Client connections at once. Each costs about 10 KiB while it is served, so this is 10 GiB.
pub(super) const MAX_CONNECTIONS: &str = "1000000";
/// Client connections at once, unless configured otherwise: nginx and HAProxy have defaults of this
/// order.
pub(super) const DEFAULT_CONNECTIONS: u64 = 65_536;
/// The fewest client connections that follow from a low limit of open files.
pub(super) const FEWEST_CONNECTIONS: u64 = 64;
/// Files that are reserved for logs, engines' logs, probes and the admin port.
pub(super) const RESERVED_FILES: u64 = 256;
/// The largest number of tokens that any key accepts: keeps sums far from overflow.
pub const MAX_TOKENS: Tokens = Tokens(1_000_000_000_000);
/// [`MAX_TOKENS`] as written in a configuration.
pub(super) const TOKENS: &str = "1000000M";
/// The largest count that a key without another bound accepts.
pub(super) const COUNT: &str = "4294967295";
/// Bytes of a name (pool, backend, key): they become metric labels and response headers.
pub const MAX_NAME_BYTES: usize = 64;
/// Fields whose product is the cost of a job.
pub const MAX_COST_FIELDS: usize = 8;
/// Paths that a pool names.
pub const MAX_ROUTES: usize = 32;
/// Bytes of a model name: repository paths are longer than other names.
pub const MAX_MODEL_NAME_BYTES: usize = 256;
/// Bytes of a configuration file, and of a file that a `file:` reference names.
pub const MAX_FILE_BYTES: u64 = 4 << 20;
/// Problems listed in one report; further problems are only counted.
pub const MAX_PROBLEMS: usize = 200;

// ---- The request path
// -----------------------------------------------------------------------------

/// Prompt tokens assumed per media part of a model that is not declared; equals the default of
/// `media_part_tokens`.
pub const MEDIA_PART_TOKENS: Tokens = Tokens(1_000);
/// Bytes of a request's headers together; 431 above it.
pub const MAX_HEADER_BYTES: usize = 64 << 10;
/// Number of request headers; 431 above it.
pub const MAX_HEADERS: usize = 128;
/// Bytes of a client's `x-request-id` that are accepted; longer ones are replaced.
pub const MAX_REQUEST_ID_BYTES: usize = 128;
/// Longest reuse of an idle upstream connection. The engine closes it after 5 s, and a request sent
/// at that moment would fail.
pub const UPSTREAM_IDLE: Duration = Duration::from_secs(4);
/// The shortest `Retry-After`: HTTP counts in seconds.
pub const RETRY_AFTER_MIN: Duration = Duration::from_secs(1);
/// The longest `Retry-After`: a client should not stay away for minutes after a burst.
pub const RETRY_AFTER_MAX: Duration = Duration::from_secs(60);

const _: () = assert!(UPSTREAM_IDLE.as_secs() < 5, "the engine closes idle connections at 5 s");

/// Members of etcd that a gateway knows.
pub const MAX_STORE_ENDPOINTS: usize = 9;
