//! Every metric of the gateway, in one table: name, kind, labels, buckets, help.
//!
//! Names and labels are a contract with dashboards and alerts of operators, so they may be added
//! but never renamed or removed. Values of labels come from the configuration, from closed sets in
//! the code, or from reports of backends, never from clients, so the number of series is bounded.
//! Labels:
//!
//! - `pool`: the pool in which a request ran, or the home pool if it never ran. `class`: the class
//!   of the prompt's length and the kind of request (`[[class]]`); empty if the request was refused
//!   before the gateway knew it.
//! - `arm`: the arm of an experiment as `EXPERIMENT/ARM`, empty without one. `model`: empty if none
//!   was recognised.
//!
//! Units are seconds and tokens. Bounds of buckets are upper and inclusive. They resolve an 8B
//! model on a fast GPU (TTFT 10-100 ms, ITL 4-20 ms, P99 under mixed load up to seconds), and
//! longer times in a queue.

use sluice_core::meter::ITL_BUCKETS_SECONDS;

/// The Prometheus type of a family.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum MetricKind {
    /// Only grows.
    Counter,
    /// Goes up and down; read at scrape time.
    Gauge,
    /// Counts by upper bounds, in the family's unit.
    Histogram(&'static [f64]),
}

/// One metric family.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Family {
    /// The name.
    pub name: &'static str,
    /// The Prometheus type.
    pub kind: MetricKind,
    /// The names of the labels.
    pub labels: &'static [&'static str],
    /// The help text, one sentence.
    pub help: &'static str,
}

/// Time to first token. The steps are an eighth from 20 ms to 5 s, so that a P99 read from the
/// buckets is within a few percent.
const TTFT: &[f64] = &[
    0.001, 0.002, 0.005, 0.010, 0.015, 0.020, 0.0225, 0.025, 0.0275, 0.030, 0.033, 0.036, 0.040, 0.045, 0.050, 0.055,
    0.060, 0.065, 0.070, 0.080, 0.090, 0.100, 0.110, 0.120, 0.135, 0.150, 0.165, 0.180, 0.200, 0.225, 0.250, 0.275,
    0.300, 0.330, 0.360, 0.400, 0.450, 0.500, 0.550, 0.600, 0.650, 0.700, 0.800, 0.900, 1.0, 1.1, 1.2, 1.35, 1.5, 1.65,
    1.8, 2.0, 2.25, 2.5, 2.75, 3.0, 3.3, 3.6, 4.0, 4.5, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0,
];
/// Time per output token. It is a mean, so it has a narrower range than the gaps.
const TPOT: &[f64] = &[
    0.0005, 0.001, 0.002, 0.003, 0.004, 0.005, 0.006, 0.007, 0.008, 0.010, 0.012, 0.014, 0.016, 0.018, 0.020, 0.025,
    0.030, 0.040, 0.050, 0.075, 0.100, 0.150, 0.250, 0.500, 1.0, 2.5,
];
/// Whole requests that generate: from one token in 5 ms to a long completion of 10 min.
const DURATION: &[f64] = &[
    0.005, 0.010, 0.025, 0.050, 0.100, 0.200, 0.300, 0.500, 0.750, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0, 10.0, 13.0, 16.0,
    20.0, 30.0, 45.0, 60.0, 120.0, 300.0, 600.0,
];
/// Calls without generation: a millisecond of tokenizing to a large batch of embeddings.
const OTHER_DURATION: &[f64] =
    &[0.001, 0.002, 0.005, 0.010, 0.025, 0.050, 0.100, 0.250, 0.500, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0];
/// Waiting for a backend: mostly microseconds, at most the queue's timeout.
const QUEUE_WAIT: &[f64] =
    &[0.0001, 0.001, 0.005, 0.010, 0.025, 0.050, 0.100, 0.250, 0.500, 1.0, 2.5, 5.0, 10.0, 20.0, 30.0, 60.0];
/// Time that the gateway adds: microseconds when all is well.
const OVERHEAD: &[f64] = &[
    0.000_005, 0.000_01, 0.000_02, 0.000_05, 0.000_1, 0.000_2, 0.000_5, 0.001, 0.002, 0.005, 0.010, 0.025, 0.100,
    0.500, 1.0,
];
/// Estimated over actual tokens, of which 1 is exact. The bounds are symmetric around 1 in
/// proportion.
const RATIO: &[f64] = &[0.25, 0.5, 0.67, 0.8, 0.9, 0.95, 0.98, 1.0, 1.02, 1.05, 1.1, 1.25, 1.5, 2.0, 4.0];

/// Engine TTFT and queue wait where there are many histograms.
const FEW_TIMES: &[f64] = &[0.010, 0.025, 0.050, 0.100, 0.250, 0.500, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0];
/// TPOT where there are many histograms.
const FEW_GAPS: &[f64] = &[0.002, 0.005, 0.010, 0.015, 0.020, 0.030, 0.050, 0.100, 0.250, 1.0];

const REQUEST: &[&str] = &["pool", "model", "arm", "class"];
const BACKEND: &[&str] = &["pool", "backend"];
const ARM: &[&str] = &["arm"];

macro_rules! families {
    ($($const:ident: $name:literal $kind:expr, $labels:expr, $help:literal;)*) => {
        $(
            #[doc = $help]
            pub const $const: Family = Family { name: $name, kind: $kind, labels: $labels, help: $help };
        )*
        /// Every family, in the order of the table.
        pub const ALL: &[Family] = &[$($const),*];
    };
}

families! {
    REQUESTS: "sluice_requests_total" MetricKind::Counter, &["route", "pool", "model", "arm", "outcome", "class"],
        "Finished requests by outcome (completed, client_gone, shed, upstream_error, timeout, refused)";
    TIME_TO_FIRST_TOKEN: "sluice_time_to_first_token_seconds" MetricKind::Histogram(TTFT), REQUEST,
        "Time from the full receipt of a streamed request to the first event with output, including time in the queue";
    INTER_TOKEN_LATENCY: "sluice_inter_token_latency_seconds" MetricKind::Histogram(&ITL_BUCKETS_SECONDS), REQUEST,
        "Time between successive output events of a stream, or between tokens if the pool's usage is continuous";
    TIME_PER_OUTPUT_TOKEN: "sluice_time_per_output_token_seconds" MetricKind::Histogram(TPOT), REQUEST,
        "(E2EL - TTFT) / (completion tokens - 1) of completed streams of two tokens or more";
    REQUEST_DURATION: "sluice_request_duration_seconds" MetricKind::Histogram(DURATION), REQUEST,
        "E2EL of completed requests that generate: from the full receipt of the request to the last event with \
         choices, or to the end of the response";
    OTHER_REQUEST_DURATION: "sluice_other_request_duration_seconds" MetricKind::Histogram(OTHER_DURATION),
        &["route", "pool", "model"],
        "Duration of completed requests that generate nothing (tokenize, embeddings, rerank, ...): from the full \
         receipt of the request to the end of the response";
    QUEUE_WAIT_SECONDS: "sluice_queue_wait_seconds" MetricKind::Histogram(QUEUE_WAIT), &["pool", "class"],
        "Time that a request waited for a backend, whether it got one or not; by home pool";
    PROMPT_TOKENS: "sluice_prompt_tokens_total" MetricKind::Counter, REQUEST,
        "Prompt tokens as counted by the engines, or as estimated by the gateway for a response without usage";
    CACHED_TOKENS: "sluice_cached_prompt_tokens_total" MetricKind::Counter, &["pool", "model", "arm"],
        "Prompt tokens that engines report as found in their prefix caches (vLLM: with --enable-prompt-tokens-details)";
    EXPECTED_CACHED_TOKENS: "sluice_expected_cached_prompt_tokens_total" MetricKind::Counter, &["pool", "model", "arm"],
        "Prompt tokens that the gateway expected in the engine's prefix cache when it chose the engine";
    GENERATION_TOKENS: "sluice_generation_tokens_total" MetricKind::Counter, REQUEST,
        "Output tokens as counted by the engines; in a stream without usage, one for each event that carried tokens";
    ESTIMATE_RATIO: "sluice_prompt_estimate_ratio" MetricKind::Histogram(RATIO), &["model"],
        "Estimated prompt tokens divided by prompt tokens counted by the engine";
    IN_FLIGHT: "sluice_in_flight" MetricKind::Gauge, BACKEND,
        "Requests that hold a lease on a backend";
    SLOTS: "sluice_slots" MetricKind::Gauge, BACKEND,
        "Limit of concurrent sequences on a backend";
    OUTSTANDING_TOKENS: "sluice_outstanding_tokens" MetricKind::Gauge, BACKEND,
        "Estimated prompt and output tokens of the requests in flight on a backend";
    OUTSTANDING_TOKENS_MAX: "sluice_outstanding_tokens_max" MetricKind::Gauge, BACKEND,
        "Limit of outstanding tokens on a backend, configured or learned from preemptions; absent without a limit";
    PREFILL_TOKENS: "sluice_prefill_tokens" MetricKind::Gauge, BACKEND,
        "Estimated prompt tokens of the requests in prefill on a backend, that is, before their first token";
    LONG_PREFILLS_MAX: "sluice_long_prefills_max" MetricKind::Gauge, BACKEND,
        "Prefill permits of a backend: long_prefix.slots; absent if long prompts are not limited";
    LONG_PREFILLS: "sluice_long_prefills" MetricKind::Gauge, BACKEND,
        "Long prompts in prefill on a backend, each holding a permit";
    QUEUE_LENGTH: "sluice_queue_length" MetricKind::Gauge, &["pool"],
        "Requests waiting in the pool's queue";
    QUEUE_LENGTH_MAX: "sluice_queue_length_max" MetricKind::Gauge, &["pool"],
        "Requests that may wait in the pool's queue: queue.length";
    KEY_WORK: "sluice_key_work_seconds_total" MetricKind::Counter, &["pool", "key"],
        "Engine time in seconds that a fair pool charged to a key since the key was last idle; of 64 keys in each \
         pool: keys with waiting requests first, then keys with most work";
    KEY_WAITING: "sluice_key_waiting" MetricKind::Gauge, &["pool", "key"],
        "Requests of a key that wait in a fair pool; of the keys of sluice_key_work_seconds_total";
    SHED: "sluice_shed_total" MetricKind::Counter, &["pool", "reason"],
        "Requests refused early for lack of capacity; by home pool";
    SPILL: "sluice_spill_total" MetricKind::Counter, &["from", "to"],
        "Requests that ran outside their home pool";
    RETRIES: "sluice_retries_total" MetricKind::Counter, &["pool", "reason"],
        "Repeated attempts by reason and by the pool of the last attempt";
    CONTINUED: "sluice_continued_requests_total" MetricKind::Counter, &["pool", "outcome"],
        "Requests whose stream another engine continued after an engine had failed in the middle";
    NOT_CONTINUED: "sluice_not_continued_requests_total" MetricKind::Counter, &["pool", "reason"],
        "Requests whose stream an engine's failure ended, by the reason why no other engine continued it";
    PREFILLED_AGAIN: "sluice_prefilled_again_tokens_total" MetricKind::Counter, &["pool"],
        "Tokens of prompts and texts, as estimated, that engines prefilled again to continue streams";
    BACKEND_REQUESTS: "sluice_backend_requests_total" MetricKind::Counter, &["pool", "backend", "class", "outcome"],
        "Finished requests by the backend of the last attempt";
    BACKEND_RETRIES: "sluice_backend_retries_total" MetricKind::Counter, &["pool", "backend", "reason"],
        "Attempts on a backend that failed and were repeated, by reason";
    BACKEND_TTFT: "sluice_backend_time_to_first_token_seconds" MetricKind::Histogram(FEW_TIMES), &["pool", "backend", "class"],
        "Time from the sending of a streamed request to a backend to the first event with output";
    BACKEND_TPOT: "sluice_backend_time_per_output_token_seconds" MetricKind::Histogram(FEW_GAPS), &["pool", "backend", "class"],
        "Time per output token of completed streams by backend";
    BACKEND_PREFILL_RATE: "sluice_backend_prefill_tokens_per_second" MetricKind::Gauge, BACKEND,
        "Prompt tokens that a backend computes per second, as the gateway has measured; absent until then";
    KEY_REQUESTS: "sluice_key_requests_total" MetricKind::Counter, &["key", "class", "outcome"],
        "Finished requests by API key; keys beyond 1,024 pairs of key and class count as key other";
    KEY_PROMPT_TOKENS: "sluice_key_prompt_tokens_total" MetricKind::Counter, &["key", "class"],
        "Prompt tokens by API key";
    KEY_GENERATION_TOKENS: "sluice_key_generation_tokens_total" MetricKind::Counter, &["key", "class"],
        "Output tokens by API key";
    KEY_QUEUE_WAIT: "sluice_key_queue_wait_seconds" MetricKind::Histogram(FEW_TIMES), &["key"],
        "Time that requests of an API key waited for a backend";
    KEY_TTFT: "sluice_key_time_to_first_token_seconds" MetricKind::Histogram(FEW_TIMES), &["key", "class"],
        "Time to first token by API key, including time in the queue";
    KEY_IN_FLIGHT: "sluice_key_in_flight" MetricKind::Gauge, &["key", "unit"],
        "Requests, sequences and tokens (prompts and expected outputs) that an API key has in flight at this gateway; \
         absent for a key without a request in flight";
    KEY_IN_FLIGHT_LIMIT: "sluice_key_in_flight_limit" MetricKind::Gauge, &["key", "unit"],
        "The limit that belongs to sluice_key_in_flight, of all gateways together; absent without the limit";
    VLLM_RUNNING: "sluice_vllm_num_requests_running" MetricKind::Gauge, BACKEND,
        "Requests that an engine runs (vllm:num_requests_running), as this gateway last read it, at most 2 min ago";
    VLLM_WAITING: "sluice_vllm_num_requests_waiting" MetricKind::Gauge, BACKEND,
        "Requests that wait in an engine (vllm:num_requests_waiting)";
    VLLM_KV_USAGE: "sluice_vllm_kv_cache_usage_perc" MetricKind::Gauge, BACKEND,
        "Share of an engine's KV cache in use, 0 to 1, of the fullest rank (vllm:kv_cache_usage_perc)";
    VLLM_PREEMPTIONS: "sluice_vllm_num_preemptions_total" MetricKind::Counter, BACKEND,
        "Requests that an engine has preempted (vllm:num_preemptions_total)";
    VLLM_PREFIX_QUERIES: "sluice_vllm_prefix_cache_queries_total" MetricKind::Counter, BACKEND,
        "Tokens that an engine has looked up in the prefix cache (vllm:prefix_cache_queries_total)";
    VLLM_PREFIX_HITS: "sluice_vllm_prefix_cache_hits_total" MetricKind::Counter, BACKEND,
        "Tokens that an engine has found in the prefix cache (vllm:prefix_cache_hits_total)";
    KV_EVENT_BLOCKS: "sluice_kv_event_blocks" MetricKind::Gauge, BACKEND,
        "Blocks in an engine's prefix cache that its KV events have named; absent unless the pool has prefix = \"events\"";
    KV_EVENT_STATE: "sluice_kv_event_state" MetricKind::Gauge, &["pool", "backend", "state"],
        "1 for the current state of an engine's KV events: followed, absent (no connection or no event yet), or silent \
         (prompts are served and no event comes); 0 for the other states";
    KV_EVENT_PROMPTS: "sluice_kv_event_prompts_total" MetricKind::Counter, &["pool", "backend", "result"],
        "Finished prompts by whether KV events named their blocks (linked) or not (unlinked: expected by the estimate)";
    KV_EVENT_LOSSES: "sluice_kv_event_losses_total" MetricKind::Counter, BACKEND,
        "How often KV events of an engine were lost: a gap in their numbers, or a message that could not be read";
    METRICS_MERGED: "sluice_metrics_merged" MetricKind::Gauge, &["metrics", "label"],
        "1 where values of a label count together as other (models) or all (classes), because the configuration has too many";
    FINDING: "sluice_finding" MetricKind::Gauge, &["cause", "pool", "subject"],
        "1 for each present finding: a cause of slow requests, by pool and by the backend or key; sluice status has the sentences";
    BACKEND_STATE: "sluice_backend_state" MetricKind::Gauge, &["pool", "backend", "state"],
        "1 for the current state of a backend, 0 for every other state";
    ENGINE_RESTARTS: "sluice_engine_restarts_total" MetricKind::Counter, BACKEND,
        "Starts after the first of an engine that the gateway runs, planned or not, since the gateway started";
    ENGINE_CRASHES: "sluice_engine_crashes_total" MetricKind::Counter, BACKEND,
        "Failures of an engine that the gateway runs (it died, hung or did not come up) since the gateway started";
    ENGINE_WAKES: "sluice_engine_wakes_total" MetricKind::Counter, BACKEND,
        "How often an engine that the gateway runs woke from sleep, since the gateway started";
    ENGINE_WAKE_SECONDS: "sluice_engine_wake_seconds" MetricKind::Gauge, BACKEND,
        "Duration of the last wake of an engine that the gateway runs, until it was healthy; absent before the first";
    ENGINE_PHASE: "sluice_engine_phase" MetricKind::Gauge, &["pool", "backend", "phase"],
        "1 for the current phase of an engine that the gateway runs (start, warm_up, serve, drain, backoff, hold, \
         ...), 0 for every other phase";
    ENGINE_START: "sluice_engine_start_seconds" MetricKind::Gauge, BACKEND,
        "Start time of an engine that the gateway runs, seconds since 1970; absent while it does not run";
    CLIENT_WAIT_SECONDS: "sluice_client_wait_seconds" MetricKind::Histogram(OTHER_DURATION), &[],
        "Time for which bytes of a response waited until the client took them; requests whose client never kept a \
         byte waiting are left out";
    TUNNEL_BYTES: "sluice_tunnel_bytes_total" MetricKind::Counter, &["pool", "direction"],
        "Bytes of WebSockets (/v1/realtime), by direction: to_engine, to_client";
    OVERHEAD_SECONDS: "sluice_overhead_seconds" MetricKind::Histogram(OVERHEAD), &["stage"],
        "Time added by the gateway: estimate (read, authorize, estimate and place the request), connect (get a \
         connection); sluice_queue_wait_seconds has the time in the queue";
    SLO_ATTAINMENT: "sluice_slo_attainment" MetricKind::Gauge, &["pool"],
        "Share of the pool's generating home requests that met all objectives of the pool, over the last 5 min; \
         refused requests and requests whose client left do not count; absent without requests";
    SLO_REQUESTS: "sluice_slo_requests_total" MetricKind::Counter, &["pool", "result"],
        "Requests that count for attainment, by home pool: met all objectives of the pool, or missed one or failed";
    CLASS_SLO_REQUESTS: "sluice_class_slo_requests_total" MetricKind::Counter, &["pool", "result", "class", "model"],
        "Requests of sluice_slo_requests_total by class and model";
    SLO_TARGET: "sluice_slo_attainment_target" MetricKind::Gauge, &["pool", "class"],
        "Share of requests that should meet all objectives: slo.attainment; absent for a pool without objectives";
    EXPERIMENT_STATE: "sluice_experiment_state" MetricKind::Gauge, &["experiment", "state"],
        "1 for the current state of an experiment (running, stopped, promoted), 0 for every other state";
    EXPERIMENT_EXPOSURE: "sluice_experiment_exposure" MetricKind::Gauge, &["experiment"],
        "Share of the units of an experiment that take part";
    ARM_REQUESTS: "sluice_arm_requests_total" MetricKind::Counter, ARM,
        "Finished requests that were assigned to an arm and measured; for a shadow arm, finished copies";
    ARM_FAILURES: "sluice_arm_failures_total" MetricKind::Counter, ARM,
        "Requests of an arm that failed, or that the arm could not serve";
    ARM_SLO_MISSES: "sluice_arm_slo_misses_total" MetricKind::Counter, ARM,
        "Requests of an arm that missed an objective of their pool";
    ARM_FALLBACKS: "sluice_arm_fallbacks_total" MetricKind::Counter, ARM,
        "Requests that an arm could not serve, and that were served as without the experiment";
    ARM_ANSWERS: "sluice_arm_answers_total" MetricKind::Counter, &["arm", "finish"],
        "Complete answers of an arm by finish reason (stop, length, tool_calls, content_filter, other), if the engine \
         reports one";
    ARM_REFUSALS: "sluice_arm_refusals_total" MetricKind::Counter, ARM,
        "Complete answers of an arm that are marked as refusals";
    ARM_RATINGS: "sluice_arm_ratings" MetricKind::Gauge, &["arm", "rating"],
        "Answers of an arm that users have rated as good or bad through the admin API";
    ARM_CHANGE: "sluice_arm_change" MetricKind::Gauge, &["arm", "quantity", "bound"],
        "TTFT, TPOT and E2EL of an arm divided by the control's, minus 1, at equal prompt lengths: the value, and the \
         bounds of an interval that holds at all times; absent until the interval is bounded";
    ARM_CONCLUSION: "sluice_arm_conclusion" MetricKind::Gauge, &["arm", "conclusion"],
        "1 for the conclusion about an arm (better, worse, no_difference, not_yet), 0 for every other conclusion";
    ARM_STOPPED: "sluice_arm_stopped" MetricKind::Gauge, ARM,
        "1 for an arm that a guardrail has stopped";
    COPIES: "sluice_copies_total" MetricKind::Counter, &["arm", "outcome"],
        "Copies for a shadow arm by outcome (completed, failed, refused, no_room, cut, over_budget) since the gateway started";
    COPIES_IN_FLIGHT: "sluice_copies_in_flight" MetricKind::Gauge, ARM,
        "Copies for a shadow arm in flight; copies hold no lease";
    ENGINES_WANTED: "sluice_engines_wanted" MetricKind::Gauge, &["pool"],
        "Engines that a pool should have for the expected load; absent without pool.autoscale";
    ENGINE_START_EXPECTED: "sluice_engine_start_expected_seconds" MetricKind::Gauge, &["pool"],
        "Expected time from the order of an engine of the pool to its first request: the longest of the last starts, \
         or autoscale.cold_start; absent without pool.autoscale";
    TUNER_EVENTS: "sluice_tuner_events_total" MetricKind::Counter, &["event"],
        "Changes of limits that the online tuner proposed, tried, kept, undone, or undone without a verdict (stood_back)";
    TUNER_MODE: "sluice_tuner_mode" MetricKind::Gauge, &["mode"],
        "1 for the mode of the online tuner (off, advise, approve, apply), 0 for every other mode";
    TUNER_FROZEN: "sluice_tuner_frozen" MetricKind::Gauge, &[],
        "1 while the online tuner is frozen: it makes no changes in any mode";
    TUNER_PROPOSALS: "sluice_tuner_proposals" MetricKind::Gauge, &[],
        "Changes that the online tuner proposes now";
    CLUSTER_STANDING: "sluice_cluster_standing" MetricKind::Gauge, &["standing"],
        "1 for the standing of this gateway in the ledger of several gateways (joining, holding, keeping, stopped, \
         standing_back), 0 for every other standing; absent without [cluster]";
    CLUSTER_GATEWAYS: "sluice_cluster_gateways" MetricKind::Gauge, &[],
        "Gateways in the ledger when this gateway last read it; absent without [cluster]";
    CLUSTER_RENEWED: "sluice_cluster_renewal_age_seconds" MetricKind::Gauge, &[],
        "Time since this gateway sent the last confirmed renewal of its shares; absent before the first and without \
         [cluster]";
    CLUSTER_WRITES: "sluice_cluster_writes_total" MetricKind::Counter, &["result"],
        "Writes of the ledger by this gateway: written, refused (another gateway wrote first), or of unknown outcome; absent without \
         [cluster]";
    CLUSTER_SHARE: "sluice_cluster_share" MetricKind::Gauge, &["pool", "backend", "unit"],
        "Amount that this gateway may use of a backend (slots, tokens, prefill_tokens, permits), for each unit that \
         is limited; absent without [cluster]";
    CLUSTER_LEADS: "sluice_cluster_leads" MetricKind::Gauge, &[],
        "1 while this gateway leads: it alone changes engines, experiments and limits; absent without cluster.leader";
    CLUSTER_LEADER_CHANGES: "sluice_cluster_leader_changes_total" MetricKind::Counter, &[],
        "Changes of the leader that this gateway has seen, to another gateway or to none; absent without \
         cluster.leader";
    KEY_TOKENS: "sluice_key_tokens" MetricKind::Gauge, &["key", "window"],
        "Tokens of a limit that an API key has used at this gateway: within the last 24 hours (day), or not yet paid \
         off by the rate (minute; above the limit while the key owes)";
    KEY_TOKENS_LIMIT: "sluice_key_tokens_limit" MetricKind::Gauge, &["key", "window"],
        "The limit that belongs to sluice_key_tokens, of all gateways together: tokens_per_day or tokens_per_minute";
    RELOADS: "sluice_config_reloads_total" MetricKind::Counter, &["result"],
        "Configuration reloads by result: ok or failed";
    CERTIFICATE_EXPIRY: "sluice_tls_certificate_expiry_timestamp_seconds" MetricKind::Gauge, &["path"],
        "Expiry of a certificate that the gateway presents (the earliest in the chain), seconds since 1970; as last \
         loaded";
    ACCESS_LOG_DROPPED: "sluice_access_log_dropped_total" MetricKind::Counter, &[],
        "Access log lines dropped because they could not be written, or not fast enough";
    RECORDS_DROPPED: "sluice_records_dropped_total" MetricKind::Counter, &[],
        "Records of requests dropped because they could not be written, or not fast enough; absent without records";
    TRACES: "sluice_traces_total" MetricKind::Counter, &["result"],
        "Traces of sampled requests: sent to the collector, failed (the collector refused, or did not answer in \
         time), or dropped because tracing.queue was full; absent without tracing";
    TRACE_SPANS_REJECTED: "sluice_trace_spans_rejected_total" MetricKind::Counter, &[],
        "Spans that the collector rejected in traces that it accepted; absent without tracing";
    METRICS_EXPORTS: "sluice_metrics_exports_total" MetricKind::Counter, &["result"],
        "Exports of all metrics to the collector of tracing.endpoint: sent, or failed (the collector refused, or did \
         not answer in time); absent without tracing.metrics_interval";
    CLIENT_CONNECTIONS: "sluice_client_connections" MetricKind::Gauge, &[],
        "Open connections of clients and requests on connections with HTTP/2, including connections and requests that \
         are being refused";
    CLIENT_CONNECTIONS_MAX: "sluice_client_connections_max" MetricKind::Gauge, &[],
        "Client connections that are served at once: server.max_connections";
    CONNECTIONS_DROPPED: "sluice_client_connections_dropped_total" MetricKind::Counter, &[],
        "Client connections closed without a response, because too many were being refused at once";
    HANDSHAKES: "sluice_tls_handshakes" MetricKind::Gauge, &[],
        "TLS handshakes of clients in progress; at 2048, the oldest is ended for the next one";
    SHARES_GAVE_WAY: "sluice_shares_gave_way_total" MetricKind::Counter, &["resource"],
        "Resources taken back so that another client gets its share: connections without a request that were closed, \
         handshakes that were ended, unfinished bodies that got 503 (body_memory), stored responses that were \
         forgotten";
    PROXY_HEADERS_REFUSED: "sluice_proxy_headers_refused_total" MetricKind::Counter, &["reason"],
        "Connections refused for their PROXY header (untrusted, missing, malformed, timeout), and X-Forwarded-For \
         headers ignored from addresses outside server.trusted_proxies (forwarded_untrusted)";
    BODY_BYTES: "sluice_body_bytes" MetricKind::Gauge, &[],
        "Bytes of request bodies in memory, complete or not";
    RESPONSE_BYTES: "sluice_response_bytes" MetricKind::Gauge, &[],
        "Bytes of responses that wait for clients that read slower than engines send";
    RESPONSE_BYTES_MAX: "sluice_response_bytes_max" MetricKind::Gauge, &[],
        "Limit on sluice_response_bytes: server.max_response_memory";
    BODY_BYTES_MAX: "sluice_body_bytes_max" MetricKind::Gauge, &[],
        "Limit on sluice_body_bytes: server.max_body_memory";
    BUILD_INFO: "sluice_build_info" MetricKind::Gauge, &["version"],
        "Always 1; the label is the version of the gateway";
    PROCESS_CPU: "process_cpu_seconds_total" MetricKind::Counter, &[],
        "CPU time of the gateway, user and system";
    PROCESS_RESIDENT: "process_resident_memory_bytes" MetricKind::Gauge, &[],
        "Resident memory of the gateway";
    PROCESS_OPEN_FDS: "process_open_fds" MetricKind::Gauge, &[],
        "Open file descriptors of the gateway";
    PROCESS_MAX_FDS: "process_max_fds" MetricKind::Gauge, &[],
        "Limit of open file descriptors of the gateway";
    PROCESS_START: "process_start_time_seconds" MetricKind::Gauge, &[],
        "Start time of the gateway, seconds since 1970";
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_unique_and_say_kind_and_unit() {
        for (index, family) in ALL.iter().enumerate() {
            assert!(ALL[..index].iter().all(|other| other.name != family.name), "{} twice", family.name);
            let total = family.name.ends_with("_total");
            assert_eq!(total, family.kind == MetricKind::Counter, "{}", family.name);
            assert!(family.name.starts_with("sluice_") || family.name.starts_with("process_"));
        }
    }

    #[test]
    fn bounds_ascend() {
        for family in ALL {
            if let MetricKind::Histogram(bounds) = family.kind {
                assert!(bounds.windows(2).all(|pair| pair[0] < pair[1]), "{}", family.name);
            }
        }
    }

    #[test]
    fn itl_is_resolved_from_half_a_millisecond_and_ttft_from_one() {
        assert_eq!(ITL_BUCKETS_SECONDS[0], 0.0005);
        assert_eq!(TTFT[0], 0.001);
    }
}
