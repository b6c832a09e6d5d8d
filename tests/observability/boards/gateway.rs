//! The dashboard of the gateways themselves.
//!
//! It shows whether a replica is short of CPU, memory, connections or files, whether its logs and
//! traces arrive, and how the replicas share the engines.

use crate::panel::{Panel, adds, apart, between, lines, row, stat};

pub(super) fn panels() -> Vec<Panel> {
    [gateway(), limits(), cluster()].concat()
}

const NO_TRACES: &str = "no traces are sent";

fn gateway() -> Vec<Panel> {
    let increase = |by: &str, family: &str| format!("sum{by} (increase({family}{{@gw}}[$__rate_interval]))");
    let left = "min by (job, path) (sluice_tls_certificate_expiry_timestamp_seconds{@gw}) - time()";
    vec![
        row("Gateway"),
        stat("Replicas", "none", vec![adds("count by (version) (sluice_build_info{@gw})", "{{version}}")])
            .about("Gateways by version"),
        stat("Running for", "s", vec![apart("time() - process_start_time_seconds{@gw}", "{{instance}}")])
            .wide(8)
            .live("overview")
            .about("Time since each replica started"),
        stat("Certificates end in", "s", vec![between(left, "{{path}}").or_empty("no TLS towards clients")])
            .wide(12)
            .colors(&[(None, "red"), (Some(172_800.0), "orange"), (Some(1_209_600.0), "green")])
            .about("Time until the earliest certificate of each file ends"),
        lines("Memory", "bytes", vec![apart("process_resident_memory_bytes{@gw}", "{{instance}}")])
            .wide(12)
            .about("Resident memory of each replica"),
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
        .wide(12)
        .about("Counts within the interval of the panel; a lost line or record means a disk that is full or too slow"),
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
        lines("Open file descriptors", "percentunit", vec![used("process_open_fds", "process_max_fds")])
            .wide(24)
            .about("Share of the limit of open files; at 100 % connections fail"),
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
        .wide(6)
        .about("Gateways in the ledger, and the results of writes; many refused writes mean that gateways write at the same time"),
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
