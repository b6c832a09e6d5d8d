//! Every bound that an operator cannot configure, each in one place with value, unit and reason.
//!
//! The first section bounds the content of a configuration, the second the request path (headers,
//! reuse of connections) and the ledger's store. The bounds of a single key are part of the key's
//! definition.

use std::time::Duration;

use sluice_core::base::Tokens;
use sluice_core::vllm::rank_page;

// ---- Contents of a configuration --------------------------------------------------------------

/// Most pools. Each has a queue and metric labels.
pub const MAX_POOLS: usize = 64;
/// Most backends of all pools together. Each is a label value of the metrics by backend.
pub const MAX_BACKENDS: usize = 1_024;
/// Processes of one backend (`launch.copies`): enough for one on each of the seven MIG slices of
/// eight GPUs.
pub(super) const MAX_COPIES: usize = 64;
/// [`MAX_COPIES`] as written in a configuration.
pub(super) const COPIES: &str = "64";
/// Data-parallel ranks of one backend: one rank on each GPU of 32 hosts.
pub(super) const MAX_RANKS: i64 = rank_page::MAX_RANKS as i64;
/// [`MAX_RANKS`] as written in a configuration.
pub(super) const RANKS: &str = "256";
/// The highest rank as written in a configuration.
pub(super) const RANK: &str = "255";
/// Most model names, without aliases. Each is a label value and has a token estimator.
pub const MAX_MODELS: usize = 512;
/// Most classes. Each is a label value of the metrics with latencies.
pub const MAX_CLASSES: usize = 8;
/// Most aliases of all models together. Each costs only a map entry.
pub const MAX_ALIASES: usize = 4_096;
/// Most API keys. Each has a small block of counters; a request looks up one key.
pub const MAX_KEYS: usize = 10_000;
/// Most experiments. Each request is compared with one experiment after the other until one wants
/// it.
pub const MAX_EXPERIMENTS: usize = 16;
/// Most arms of an experiment. Each is measured separately, and more arms take longer to
/// distinguish.
pub const MAX_ARMS: usize = 8;
/// Most steps of a ramp.
pub const MAX_RAMP_STEPS: usize = 32;
/// Flags of engines that the online tuner can change.
pub const MAX_TUNER_FLAGS: usize = 6;
/// Most times of day at which the online tuner may restart engines.
pub const MAX_WINDOWS: usize = 16;
/// Most names of the admin port. Each is compared with the host of every admin request.
pub const MAX_ADMIN_HOSTS: usize = 64;
/// Most further flags that the admin API may change. vLLM has about 320 flags.
pub const MAX_ADMIN_FLAGS: usize = 512;
/// Most golden prompts of one model. Each delays every restart.
pub const MAX_GOLDEN: usize = 64;
/// Most ranges of trusted proxies. Each is compared with the address of a connection. A content
/// delivery network publishes about 25 ranges.
pub const MAX_TRUSTED_PROXIES: usize = 256;
/// Threads of the data plane.
pub const MAX_THREADS: usize = 1_024;
/// Client connections at once. Each costs about 10 KiB while it is served, so this is 10 GiB.
pub(super) const MAX_CONNECTIONS: &str = "1000000";
/// Default of the client connections at once. The defaults of nginx and HAProxy are of this order.
pub(super) const DEFAULT_CONNECTIONS: u64 = 65_536;
/// The smallest default of the client connections at once, however low the limit of open files is.
pub(super) const FEWEST_CONNECTIONS: u64 = 64;
/// Open files that are reserved for logs, engines' logs, probes and the admin port.
pub(super) const RESERVED_FILES: u64 = 256;
/// The largest number of tokens that any key accepts. It keeps sums far from overflow.
pub const MAX_TOKENS: Tokens = Tokens(1_000_000_000_000);
/// [`MAX_TOKENS`] as written in a configuration.
pub(super) const TOKENS: &str = "1000000M";
/// The largest count that a key without another bound accepts.
pub(super) const COUNT: &str = "4294967295";
/// Most bytes of a name (pool, backend, key), which becomes a metric label and a response header.
pub const MAX_NAME_BYTES: usize = 64;
/// Most fields whose product is the cost of a job.
pub const MAX_COST_FIELDS: usize = 8;
/// Most paths that a pool names.
pub const MAX_ROUTES: usize = 32;
/// Most bytes of a model name, which may be a long repository path.
pub const MAX_MODEL_NAME_BYTES: usize = 256;
/// Most bytes of a configuration file, and of a file that a `file:` reference names.
pub const MAX_FILE_BYTES: u64 = 4 << 20;
/// Most problems that a report lists; further problems are only counted.
pub const MAX_PROBLEMS: usize = 200;

// ---- The request path
// -----------------------------------------------------------------------------

/// Prompt tokens assumed per media part of a model that is not declared; equals the default of
/// `media_part_tokens`.
pub const MEDIA_PART_TOKENS: Tokens = Tokens(1_000);
/// Most bytes of all headers of a request together. A request with more gets 431.
pub const MAX_HEADER_BYTES: usize = 64 << 10;
/// Most headers of a request. A request with more gets 431.
pub const MAX_HEADERS: usize = 128;
/// Longest `x-request-id` of a client that is kept, bytes. A longer one is replaced.
pub const MAX_REQUEST_ID_BYTES: usize = 128;
/// Longest idle time after which an upstream connection is reused. The engine closes it after 5 s,
/// and a request sent at that moment would fail.
pub const UPSTREAM_IDLE: Duration = Duration::from_secs(4);
/// The shortest `Retry-After`, because the header counts in whole seconds.
pub const RETRY_AFTER_MIN: Duration = Duration::from_secs(1);
/// The longest `Retry-After`, because a client should not stay away for minutes after a burst.
pub const RETRY_AFTER_MAX: Duration = Duration::from_secs(60);

const _: () = assert!(UPSTREAM_IDLE.as_secs() < 5, "the engine closes idle connections at 5 s");

/// Most members of etcd in the configuration.
pub const MAX_STORE_ENDPOINTS: usize = 9;
