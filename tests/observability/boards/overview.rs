//! The dashboard to look at first.
//!
//! Is traffic served, are objectives met, which requests wait, and is the gateway itself healthy?

use crate::panel::{Panel, adds, apart, between, lines, quantiles, row, stat};

pub(super) fn panels() -> Vec<Panel> {
    [now(), objectives(), traffic(), queue(), gateway(), limits(), cluster(), keys()].concat()
}

fn now() -> Vec<Panel> {
    let requests = "sum(rate(sluice_requests_total{@req}[$__rate_interval]))";
    let completed = "sum(rate(sluice_requests_total{@req,outcome=\"completed\"}[$__rate_interval]))";
    let shares = [(None, "green"), (Some(0.01), "orange"), (Some(0.05), "red")];
    vec![
        row("Now"),
        stat("Requests", "reqps", vec![adds(requests, "")]).wide(3).decimals(1),
        stat("In flight", "none", vec![adds("sum(sluice_in_flight{@pool})", "")])
            .wide(3)
            .about("Requests that hold a lease on a backend, on all replicas"),
        stat("Waiting", "none", vec![adds("sum(sluice_queue_length{@pool})", "")]).wide(3).colors(&[
            (None, "green"),
            (Some(10.0), "orange"),
            (Some(100.0), "red"),
        ]),
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
            .decimals(1)
            .colors(&[(None, "red"), (Some(0.95), "orange"), (Some(0.99), "green")])
            .about("The lowest value of all pools and replicas, over the last 5 minutes"),
        stat("Not completed", "percentunit", vec![between(format!("1 - ({completed} or vector(0)) / {requests}"), "")])
            .decimals(2)
            .colors(&shares)
            .about(
                "Share of requests with an outcome other than completed; requests of clients that left are included",
            ),
    ]
}

fn objectives() -> Vec<Panel> {
    let share = |window: &str| {
        let of =
            |result: &str| format!("sum by (job, pool) (rate(sluice_slo_requests_total{{@pool{result}}}[{window}]))");
        (of(",result=\"missed\""), of(""))
    };
    let burn = |window: &str| {
        let (missed, all) = share(window);
        format!("{missed} / {all} / (1 - max by (job, pool) (sluice_slo_attainment_target{{@pool}}))")
    };
    let (missed, all) = share("$__rate_interval");
    vec![
        row("Objectives"),
        lines(
            "Objectives met",
            "percentunit",
            vec![
                between(format!("1 - {missed} / {all}"), "{{pool}}"),
                between("max by (job, pool) (sluice_slo_attainment_target{@pool})", "{{pool}} target"),
            ],
        )
        .wide(12)
        .about("Share of generating requests that met all objectives of their pool; refused requests and clients that left do not count"),
        lines(
            "Burn rate of the error budget",
            "none",
            vec![between(burn("1h"), "{{pool}} 1 h"), between(burn("5m"), "{{pool}} 5 min")],
        )
        .wide(12)
        .about("1 uses exactly the budget that the target allows; an alert fires at 14.4 in both windows, which uses 2 % of a month's budget in an hour"),
    ]
}

fn traffic() -> Vec<Panel> {
    let rate = |by: &str, family: &str| format!("sum by ({by}) (rate({family}{{@req}}[$__rate_interval]))");
    vec![
        row("Traffic and outcomes"),
        lines("Requests by outcome", "reqps", vec![adds(rate("outcome", "sluice_requests_total"), "{{outcome}}")])
            .stacked()
            .wide(6),
        lines("Requests by pool", "reqps", vec![adds(rate("pool", "sluice_requests_total"), "{{pool}}")])
            .stacked()
            .wide(6)
            .about("By the pool where a request ran, or by the home pool if it never ran"),
        lines("Requests by route", "reqps", vec![adds(rate("route", "sluice_requests_total"), "{{route}}")])
            .stacked()
            .wide(6),
        lines(
            "Tokens per second",
            "none",
            vec![
                adds(rate("pool", "sluice_prompt_tokens_total"), "prompt {{pool}}"),
                adds(rate("pool", "sluice_generation_tokens_total"), "generated {{pool}}"),
            ],
        )
        .wide(6)
        .about("As the engines counted them"),
    ]
}

fn queue() -> Vec<Panel> {
    let rate = |by: &str, family: &str| format!("sum by ({by}) (rate({family}{{@pool}}[$__rate_interval])) > 0");
    let used = "sum by (pool) (sluice_queue_length{@pool}) / sum by (pool) (sluice_queue_length_max{@pool})";
    let spill = "sum by (from, to) (rate(sluice_spill_total{@gw,from=~\"$pool\"}[$__rate_interval])) > 0";
    vec![
        row("Queue, shed, spill, retries"),
        lines("Queue length", "none", vec![adds("sum by (pool) (sluice_queue_length{@pool})", "{{pool}}")]).wide(6),
        lines("Queue in use", "percentunit", vec![between(used, "{{pool}}")]).wide(6).about("Share of queue.length"),
        lines("Queue wait", "s", quantiles("sluice_queue_wait_seconds", "@pool", "pool")).wide(6).about("By home pool"),
        lines(
            "Shed, spill, retries per second",
            "reqps",
            vec![
                adds(rate("pool, reason", "sluice_shed_total"), "shed {{pool}} {{reason}}")
                    .or_empty("nothing was shed"),
                adds(spill, "spill {{from}} to {{to}}").or_empty("nothing spilled"),
                adds(rate("pool, reason", "sluice_retries_total"), "retry {{pool}} {{reason}}").or_empty("no retries"),
            ],
        )
        .wide(6),
    ]
}

const NO_TRACES: &str = "no traces are sent";

fn gateway() -> Vec<Panel> {
    let increase = |by: &str, family: &str| format!("sum{by} (increase({family}{{@gw}}[$__rate_interval]))");
    let overhead =
        "histogram_quantile(0.99, sum by (le, stage) (rate(sluice_overhead_seconds_bucket{@gw}[$__rate_interval])))";
    let left = "min by (job, path) (sluice_tls_certificate_expiry_timestamp_seconds{@gw}) - time()";
    vec![
        row("Gateway"),
        stat("Replicas", "none", vec![adds("count by (version) (sluice_build_info{@gw})", "{{version}}")])
            .about("Gateways by version"),
        stat("Running for", "s", vec![apart("time() - process_start_time_seconds{@gw}", "{{instance}}")]).wide(8),
        stat("Certificates end in", "s", vec![between(left, "{{path}}").or_empty("no TLS towards clients")])
            .wide(12)
            .colors(&[(None, "red"), (Some(172_800.0), "orange"), (Some(1_209_600.0), "green")]),
        lines("CPU", "none", vec![apart("rate(process_cpu_seconds_total{@gw}[$__rate_interval])", "{{instance}}")])
            .wide(6)
            .about("1 is one core"),
        lines("Memory", "bytes", vec![apart("process_resident_memory_bytes{@gw}", "{{instance}}")]).wide(6),
        lines("Time added by the gateway, P99", "s", vec![between(overhead, "{{stage}}")]).wide(6),
        lines(
            "Reloads, traces, lost log lines",
            "none",
            vec![
                adds(increase(" by (result)", "sluice_config_reloads_total"), "reload {{result}}"),
                adds(increase("", "sluice_access_log_dropped_total"), "access log lines lost"),
                adds(increase("", "sluice_records_dropped_total"), "records lost").or_empty("no records are written"),
                adds(increase(" by (result)", "sluice_traces_total"), "traces {{result}}").or_empty(NO_TRACES),
                adds(increase("", "sluice_trace_spans_rejected_total"), "spans rejected").or_empty(NO_TRACES),
                adds(increase(" by (result)", "sluice_metrics_exports_total"), "metrics {{result}}")
                    .or_empty(NO_TRACES),
            ],
        )
        .wide(6),
    ]
}

fn limits() -> Vec<Panel> {
    let used = |used: &str, limit: &str| apart(format!("{used}{{@gw}} / {limit}{{@gw}}"), "{{instance}}");
    let dropped = "sum(increase(sluice_client_connections_dropped_total{@gw}[$__rate_interval]))";
    vec![
        lines(
            "Client connections in use",
            "percentunit",
            vec![used("sluice_client_connections", "sluice_client_connections_max")],
        )
        .wide(6)
        .about("Share of server.max_connections; at 100 % a new connection gets 503"),
        lines(
            "Connections dropped, and holdings that gave way",
            "none",
            vec![
                adds(dropped, "dropped"),
                apart("increase(sluice_shares_gave_way_total{@gw}[$__rate_interval])", "{{instance}} {{resource}} gave way"),
                apart(
                    "increase(sluice_proxy_headers_refused_total{@gw}[$__rate_interval])",
                    "{{instance}} proxy header {{reason}}",
                ),
                apart("sluice_tls_handshakes{@gw}", "{{instance}} handshakes"),
            ],
        )
            .wide(6)
            .about("Dropped connections were closed without a response, because too many were being refused already"),
        lines("Bodies and waiting responses in memory", "percentunit", vec![used("sluice_body_bytes", "sluice_body_bytes_max"), used("sluice_response_bytes", "sluice_response_bytes_max")])
            .wide(6)
            .about("Shares of server.max_body_memory, where a request gets 503 at 100 %, and of server.max_response_memory"),
        lines(
            "Time that clients take to read, P99",
            "s",
            vec![apart(
                "histogram_quantile(0.99, sum by (le, instance) (rate(sluice_client_wait_seconds_bucket{@gw}[$__rate_interval])))",
                "{{instance}}",
            )
            .or_empty("no client has kept bytes waiting")],
        )
        .wide(6)
        .about("Requests whose clients kept bytes waiting; this time is no part of an engine's latency"),
        lines("Open file descriptors", "percentunit", vec![used("process_open_fds", "process_max_fds")]).wide(6),
    ]
}

const NO_LEDGER: &str = "no [cluster]";
const NO_LEADER: &str = "no cluster.leader";

fn cluster() -> Vec<Panel> {
    let writes = "sum by (result) (increase(sluice_cluster_writes_total{@gw}[$__rate_interval]))";
    let changes = "increase(sluice_cluster_leader_changes_total{@gw}[$__rate_interval])";
    let shares = "sluice_cluster_share{@pool,unit=\"slots\"}";
    vec![
        row("Several gateways"),
        lines(
            "How gateways stand in the ledger",
            "none",
            vec![apart("sluice_cluster_standing{@gw} == 1", "{{instance}} {{standing}}").or_empty(NO_LEDGER)],
        )
        .wide(6)
        .about(
            "holding is normal; keeping and stopped: the gateway cannot renew its shares; standing_back: see the log",
        ),
        lines("Shares of slots", "none", vec![apart(shares, "{{instance}} {{pool}}/{{backend}}").or_empty(NO_LEDGER)])
            .wide(6)
            .about("Slots that each gateway may use; the sum is within the limit"),
        lines(
            "Age of the last renewal",
            "s",
            vec![apart("sluice_cluster_renewal_age_seconds{@gw}", "{{instance}}").or_empty(NO_LEDGER)],
        )
        .wide(6)
        .about("If the age exceeds cluster.lease, the shares have ended"),
        lines(
            "Gateways, and writes of the ledger",
            "none",
            vec![
                between("max by (job) (sluice_cluster_gateways{@gw})", "gateways").or_empty(NO_LEDGER),
                adds(writes, "{{result}}").or_empty(NO_LEDGER),
            ],
        )
        .wide(6),
        lines(
            "Which gateway leads",
            "none",
            vec![
                apart("sluice_cluster_leads{@gw} == 1", "{{instance}}").or_empty(NO_LEADER),
                apart(changes, "{{instance}} saw changes").or_empty(NO_LEADER),
            ],
        )
        .wide(24)
        .about("One gateway of each cluster leads; while none does, engines, limits and experiments stay as they are"),
    ]
}

fn keys() -> Vec<Panel> {
    let used = "sluice_key_tokens{@gw} / sluice_key_tokens_limit{@gw}";
    vec![
        row("API keys"),
        lines(
            "Limits on tokens in use",
            "percentunit",
            vec![apart(used, "{{instance}} {{key}} {{window}}").or_empty("no key has a limit on tokens")],
        )
        .wide(12)
        .about(
            "Share of tokens_per_minute and tokens_per_day; above 100 % a key owes tokens, and its requests get 429",
        ),
        lines(
            "Engine time by key",
            "none",
            vec![
                apart(
                    "sum by (pool, key) (rate(sluice_key_work_seconds_total{@gw}[$__rate_interval]))",
                    "{{pool}} {{key}}",
                )
                .or_empty("no pool has a fair queue"),
                apart("sum by (pool, key) (sluice_key_waiting{@gw})", "{{pool}} {{key}} waiting")
                    .or_empty("no pool has a fair queue"),
            ],
        )
        .wide(12)
        .about("Number of engines that each key keeps busy, and number of waiting requests of the key"),
    ]
}
