//! The dashboard to look at first: is it us, the engines, or a tenant?
//!
//! Findings come first, then latency by class, by engine and by key, then the queue and the
//! gateway. Each group links to the dashboard that shows more of it.

use crate::panel::{Panel, Target, adds, apart, between, lines, median_and_tail, quantiles, row, stat, table};

pub(super) fn panels() -> Vec<Panel> {
    [findings(), now(), classes(), engines(), states_of_engines(), keys(), limits_of_keys(), traffic(), gateway()]
        .concat()
}

fn rate(by: &str, family: &str, filter: &str) -> String {
    format!("sum by ({by}) (rate({family}{{{filter}}}[$__rate_interval]))")
}

fn findings() -> Vec<Panel> {
    let series = apart("max by (instance, cause, pool, subject) (sluice_finding{@pool}) == 1", "")
        .or_empty("the gateway has found no cause of slow requests");
    let columns = [("cause", "Cause"), ("pool", "Pool"), ("subject", "Backend or key"), ("instance", "Replica")];
    vec![
        row("Findings"),
        table("Causes of slow requests", &columns, series)
            .live("overview")
            .about("Empty while the gateway finds no cause. `sluice diagnose` and the live page have the evidence and what to do"),
    ]
}

fn now() -> Vec<Panel> {
    let requests = "sum(rate(sluice_requests_total{@req}[$__rate_interval]))";
    let completed = "sum(rate(sluice_requests_total{@req,outcome=\"completed\"}[$__rate_interval]))";
    let shares = [(None, "green"), (Some(0.01), "orange"), (Some(0.05), "red")];
    vec![
        row("Now"),
        stat("Requests", "reqps", vec![adds(requests, "")]).wide(3).decimals(1).about("Finished requests per second"),
        stat("In flight", "none", vec![adds("sum(sluice_in_flight{@pool})", "")])
            .wide(3)
            .about("Requests that hold a lease on a backend, on all replicas"),
        stat("Waiting", "none", vec![adds("sum(sluice_queue_length{@pool})", "")])
            .wide(3)
            .colors(&[(None, "green"), (Some(10.0), "orange"), (Some(100.0), "red")])
            .about("Requests that wait for a backend"),
        stat(
            "Backends ready",
            "none",
            vec![
                between("sum(min by (job, pool, backend) (sluice_backend_state{@pool,state=\"ready\"}))", "ready"),
                between("count(count by (job, pool, backend) (sluice_backend_state{@pool}))", "of"),
            ],
        )
        .wide(4)
        .about(
            "A backend is ready if every replica finds it ready. Replicas share backends, so each backend counts once",
        ),
        stat(
            "Slots in use",
            "percentunit",
            vec![between("sum(sluice_in_flight{@pool}) / sum(sluice_slots{@pool})", "")],
        )
        .wide(3)
        .colors(&[(None, "green"), (Some(0.8), "orange"), (Some(0.95), "red")])
        .about("Share of the slots that all replicas give together"),
        stat("Objectives met (worst pool)", "percentunit", vec![between("min(sluice_slo_attainment{@pool})", "")])
            .wide(3)
            .decimals(1)
            .colors(&[(None, "red"), (Some(0.95), "orange"), (Some(0.99), "green")])
            .about("The lowest value of all pools and replicas, over the last 5 minutes"),
        stat("Not completed", "percentunit", vec![between(format!("1 - ({completed} or vector(0)) / {requests}"), "")])
            .wide(3)
            .decimals(2)
            .colors(&shares)
            .about(
                "Share of requests with an outcome other than completed; requests of clients that left are included",
            ),
        stat("Live pages", "none", vec![apart("sluice_build_info{@gw}", "{{instance}}")])
            .wide(2)
            .live("requests")
            .about("One value for each replica; a value links to the requests on the replica's live page"),
    ]
}

fn classes() -> Vec<Panel> {
    let latency = |title, family: &str, about| {
        lines(title, "s", median_and_tail(family, "@class", "class")).wide(8).more("latency").about(about)
    };
    let by = "job, pool, class, model";
    let judged = |result: &str, window: &str| {
        format!("sum by ({by}) (rate(sluice_class_slo_requests_total{{@class{result}}}[{window}]))")
    };
    let missed = |window: &str| format!("{} / {}", judged(",result=\"missed\"", window), judged("", window));
    let target = "max by (job, pool, class) (sluice_slo_attainment_target{@engine})";
    let burn = |window: &str| format!("{} / on (job, pool, class) group_left () (1 - {target})", missed(window));
    let met = |result: &str| {
        format!("sum by (class, model) (rate(sluice_class_slo_requests_total{{@class{result}}}[$__rate_interval]))")
    };
    vec![
        row("By class: is a kind of requests slow?"),
        latency("TTFT by class", "sluice_time_to_first_token_seconds", "Time to first token of streams, queue included"),
        latency("TPOT by class", "sluice_time_per_output_token_seconds", "Time per output token of completed streams"),
        latency("E2EL by class", "sluice_request_duration_seconds", "End-to-end latency of completed requests"),
        lines(
            "Objectives met by class and model",
            "percentunit",
            vec![
                between(format!("{} / {}", met(",result=\"met\""), met("")), "{{class}} {{model}}"),
                between(
                    "sum by (pool) (rate(sluice_slo_requests_total{@pool,result=\"met\"}[$__rate_interval])) \
                     / sum by (pool) (rate(sluice_slo_requests_total{@pool}[$__rate_interval]))",
                    "pool {{pool}}",
                ),
                between("min by (class) (sluice_slo_attainment_target{@engine})", "{{class}} target"),
            ],
        )
        .wide(12)
        .about("Share of generating requests that met all objectives; refused requests and clients that left do not count"),
        lines(
            "Burn rate of the error budget",
            "none",
            vec![between(burn("1h"), "{{pool}} {{class}} {{model}} 1 h"), between(burn("5m"), "{{pool}} {{class}} {{model}} 5 min")],
        )
        .wide(12)
        .about("1 uses exactly the budget that the target allows; an alert fires at 14.4 in both windows, which uses 2 % of a month's budget in an hour"),
    ]
}

const BACKEND: &str = "{{pool}}/{{backend}}";

fn engines() -> Vec<Panel> {
    let failed = rate("pool, backend", "sluice_backend_requests_total", "@engine,outcome=~\"upstream_error|timeout\"");
    let retried = rate("pool, backend, reason", "sluice_backend_retries_total", "@pool");
    let latency = |title, family: &str, about| {
        lines(title, "s", median_and_tail(family, "@engine", "pool, backend")).wide(6).more("engines").about(about)
    };
    vec![
        row("By engine: is it an engine?"),
        lines(
            "Requests by engine",
            "reqps",
            vec![adds(rate("pool, backend", "sluice_backend_requests_total", "@engine"), BACKEND)],
        )
        .wide(6)
        .more("engines")
        .about("Finished requests by the backend of the last attempt"),
        lines(
            "Failures and retries by engine",
            "reqps",
            vec![
                adds(failed, "{{pool}}/{{backend}} failed"),
                adds(retried, "{{pool}}/{{backend}} {{reason}}").or_empty("no retries"),
            ],
        )
        .wide(6)
        .more("engines")
        .about("Requests that a backend broke or did not answer in time, and attempts that were repeated"),
        latency(
            "Engine TTFT",
            "sluice_backend_time_to_first_token_seconds",
            "From the sending of a request to the first token, without the gateway's queue",
        ),
        latency(
            "Engine TPOT",
            "sluice_backend_time_per_output_token_seconds",
            "Time per output token of completed streams",
        ),
    ]
}

/// The panels of vLLM's own dashboard, with values that the gateway reads from the engines' pages
/// every 10 s or less often.
fn states_of_engines() -> Vec<Panel> {
    let of = |family: &str| format!("max by (job, pool, backend) ({family}{{@pool}})");
    let five_minutes = |family: &str| format!("sum by (pool, backend) (rate({family}{{@pool}}[5m]))");
    let hits = format!(
        "{} / {}",
        five_minutes("sluice_vllm_prefix_cache_hits_total"),
        five_minutes("sluice_vllm_prefix_cache_queries_total")
    );
    let preempted = "max by (job, pool, backend) (rate(sluice_vllm_num_preemptions_total{@pool}[5m]))";
    let pace = "avg by (pool, backend) (sluice_backend_prefill_tokens_per_second{@pool})";
    vec![
        lines("Prefill pace", "none", vec![between(pace, BACKEND)])
            .wide(6)
            .about("Prompt tokens that an engine computes per second, as the gateway has measured; an engine below its pool's others is slow"),
        lines(
            "Scheduler state",
            "none",
            vec![
                between(of("sluice_vllm_num_requests_running"), "{{pool}}/{{backend}} running"),
                between(of("sluice_vllm_num_requests_waiting"), "{{pool}}/{{backend}} waiting"),
            ],
        )
        .wide(6)
        .about("Requests that run and wait in each engine (vllm:num_requests_running and _waiting)"),
        lines(
            "Cache utilization",
            "percentunit",
            vec![
                between(of("sluice_vllm_kv_cache_usage_perc"), "{{pool}}/{{backend}} KV cache"),
                between(hits, "{{pool}}/{{backend}} prefix hits"),
            ],
        )
        .wide(6)
        .about("Share of each engine's KV cache in use (vllm:kv_cache_usage_perc), and share of prompt tokens found in the prefix cache over five minutes"),
        lines("Preemptions", "reqps", vec![between(preempted, BACKEND)])
            .wide(6)
            .about("Requests that an engine takes out of its batch because the KV cache is full (vllm:num_preemptions_total), over five minutes"),
    ]
}

fn keys() -> Vec<Panel> {
    let requests = |outcome: &str| rate("key", "sluice_key_requests_total", &format!("@tenant{outcome}"));
    let tokens = |family: &str| adds(rate("key", family, "@tenant"), "");
    let named = |target: Target, kind: &str| Target { legend: format!("{{{{key}}}} {kind}"), ..target };
    let no_keys = |target: Target| target.or_empty("no keys are configured");
    let wait = median_and_tail("sluice_key_queue_wait_seconds", "@key", "key");
    let ttft = median_and_tail("sluice_key_time_to_first_token_seconds", "@tenant", "key");
    vec![
        row("By key: is it a tenant?"),
        lines(
            "Requests and shed requests by key",
            "reqps",
            vec![adds(requests(""), "{{key}}"), adds(requests(",outcome=\"shed\""), "{{key}} shed")]
                .into_iter()
                .map(no_keys)
                .collect(),
        )
        .wide(6)
        .about("Finished requests of each API key, and requests refused early for lack of capacity"),
        lines(
            "Tokens per second by key",
            "none",
            vec![
                no_keys(named(tokens("sluice_key_prompt_tokens_total"), "prompt")),
                no_keys(named(tokens("sluice_key_generation_tokens_total"), "generated")),
            ],
        )
        .wide(6)
        .about("Prompt and output tokens of each API key"),
        lines("Queue wait by key", "s", wait.into_iter().map(no_keys).collect())
            .wide(6)
            .about("Time that the requests of a key waited for a backend"),
        lines("TTFT by key", "s", ttft.into_iter().map(no_keys).collect())
            .wide(6)
            .about("Time to first token of each key's streams, queue included"),
    ]
}

fn limits_of_keys() -> Vec<Panel> {
    let in_flight =
        "sum by (key, unit) (sluice_key_in_flight{@key}) / max by (key, unit) (sluice_key_in_flight_limit{@key})";
    let used = "sluice_key_tokens{@key} / sluice_key_tokens_limit{@key}";
    let fair = "no pool has a fair queue";
    vec![
        lines("In flight against the key's limits", "percentunit", vec![adds(in_flight, "{{key}} {{unit}}").or_empty("no key with a limit has a request in flight")])
            .wide(8)
            .about("Requests, sequences and tokens in flight on all replicas, as shares of the key's limits; at 100 % the key's requests get 429"),
        lines("Limits on tokens in use", "percentunit", vec![apart(used, "{{instance}} {{key}} {{window}}").or_empty("no key has a limit on tokens")])
            .wide(8)
            .about("Share of tokens_per_minute and tokens_per_day; above 100 % a key owes tokens, and its requests get 429"),
        lines(
            "Engine time by key",
            "none",
            vec![
                apart("sum by (instance, pool, key) (rate(sluice_key_work_seconds_total{@pool,key=~\"$key\"}[$__rate_interval]))", "{{instance}} {{pool}} {{key}}").or_empty(fair),
                apart("sum by (instance, pool, key) (sluice_key_waiting{@pool,key=~\"$key\"})", "{{instance}} {{pool}} {{key}} waiting").or_empty(fair),
            ],
        )
        .wide(8)
        .about("Attained work: number of engines that each key keeps busy, and number of waiting requests of the key"),
    ]
}

fn traffic() -> Vec<Panel> {
    let requests = |by: &str| rate(by, "sluice_requests_total", "@class");
    let tokens = |family: &str| rate("pool", family, "@class");
    let some = |by: &str, family: &str| format!("{} > 0", rate(by, family, "@pool"));
    let used = "sum by (pool) (sluice_queue_length{@pool}) / sum by (pool) (sluice_queue_length_max{@pool})";
    let spill = "sum by (from, to) (rate(sluice_spill_total{@gw,from=~\"$pool\"}[$__rate_interval])) > 0";
    vec![
        row("Traffic and queue"),
        lines("Requests by outcome", "reqps", vec![adds(requests("outcome"), "{{outcome}}")])
            .stacked()
            .wide(6)
            .about("Finished requests; client_gone means that the client left"),
        lines("Requests by pool", "reqps", vec![adds(requests("pool"), "{{pool}}")])
            .stacked()
            .wide(6)
            .about("By the pool where a request ran, or by the home pool if it never ran"),
        lines("Requests by route", "reqps", vec![adds(requests("route"), "{{route}}")])
            .stacked()
            .wide(6)
            .about("By the part of the API that the client called"),
        lines(
            "Tokens per second",
            "none",
            vec![
                adds(tokens("sluice_prompt_tokens_total"), "prompt {{pool}}"),
                adds(tokens("sluice_generation_tokens_total"), "generated {{pool}}"),
            ],
        )
        .wide(6)
        .about("As the engines counted them"),
        lines("Queue length", "none", vec![adds("sum by (pool) (sluice_queue_length{@pool})", "{{pool}}")])
            .wide(6)
            .about("Requests that wait for a backend"),
        lines("Queue in use", "percentunit", vec![between(used, "{{pool}}")]).wide(6).about("Share of queue.length"),
        lines("Queue wait", "s", quantiles("sluice_queue_wait_seconds", "@engine", "pool, class"))
            .wide(6)
            .about("By home pool and class"),
        lines(
            "Shed, spill, retries per second",
            "reqps",
            vec![
                adds(some("pool, reason", "sluice_shed_total"), "shed {{pool}} {{reason}}")
                    .or_empty("nothing was shed"),
                adds(spill, "spill {{from}} to {{to}}").or_empty("nothing spilled"),
                adds(some("pool, reason", "sluice_retries_total"), "retry {{pool}} {{reason}}").or_empty("no retries"),
            ],
        )
        .wide(6)
        .about("Requests refused early, requests outside their home pool, and repeated attempts"),
    ]
}

fn gateway() -> Vec<Panel> {
    let overhead =
        "histogram_quantile(0.99, sum by (le, stage) (rate(sluice_overhead_seconds_bucket{@gw}[$__rate_interval])))";
    vec![
        row("The gateway: is it us?"),
        lines("Time added by the gateway, P99", "s", vec![between(overhead, "{{stage}}")])
            .wide(8)
            .more("gateway")
            .about("estimate: read, authorize, estimate and place a request; connect: get a connection to the engine"),
        lines("CPU", "none", vec![apart("rate(process_cpu_seconds_total{@gw}[$__rate_interval])", "{{instance}}")])
            .wide(8)
            .more("gateway")
            .about("Cores that each replica uses"),
        lines(
            "Labels that count together",
            "none",
            vec![between("max by (metrics, label) (sluice_metrics_merged{@gw})", "{{metrics}} {{label}}")],
        )
        .wide(8)
        .about("1 where models count as other, or classes as all, because the configuration has too many"),
    ]
}
