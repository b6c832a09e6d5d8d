//! The five dashboards, and the parts that they have in common.
//!
//! `SLUICE_UPDATE=1 cargo test --test observability` writes `grafana/dashboards`.
//!
//! Replicas of one configuration have one `job`. They share their backends, so each backend counts
//! once per job, and is ready if every replica finds it ready. Requests are added, and so are the
//! slots that each replica may use.
//!
//! For `$job` and `$instance`, "All" means the values in the list, because other programs, too,
//! have a metric such as `process_open_fds`. For the other variables, "All" is `.*`, which also
//! matches an absent label, because a request that was refused early lacks these labels.

mod engines;
mod experiments;
mod gateway;
mod latency;
mod overview;

use serde_json::{Value, json};

use crate::panel::{Panel, Replicas, Target, datasource, placed, target};

pub(crate) struct Board {
    pub(crate) name: &'static str,
    title: &'static str,
    about: &'static str,
    pub(crate) panels: Vec<Panel>,
}

/// All dashboards, in the order in which an incident needs them.
pub(crate) fn all() -> Vec<Board> {
    let board = |name, title, about, panels| Board { name, title, about, panels };
    vec![
        board("overview", "sluice: overview", "Is it us, the engines, or a tenant?", overview::panels()),
        board("latency", "sluice: latency by class", "Which tail is long, and which part of it?", latency::panels()),
        board("engines", "sluice: engines", "Which backend is it, and what does it do?", engines::panels()),
        board("gateway", "sluice: gateway", "Does a replica lack something, and do replicas agree?", gateway::panels()),
        board(
            "experiments",
            "sluice: experiments and tuner",
            "Which arms are compared, with which results, and what did the tuner change?",
            experiments::panels(),
        ),
    ]
}

/// Events that Grafana marks on every panel of every dashboard. Each has a name, a colour and an
/// expression.
pub(crate) fn marks() -> Vec<(&'static str, &'static str, Target)> {
    let mark = |expr| target(Replicas::Apart, expr, "").or_empty("nothing happened");
    vec![
        ("Alerts", "red", mark("ALERTS{alertname=~\"Sluice.+\",alertstate=\"firing\",job=~\"$job\"}")),
        ("Starts", "blue", mark("resets(process_cpu_seconds_total{@gw}[2m]) > 0")),
        ("Reloads", "purple", mark("increase(sluice_config_reloads_total{@gw}[2m]) > 0")),
    ]
}

fn variable(name: &str, label: &str, query: &str, all: Option<&str>) -> Value {
    let mut variable = json!({
        "name": name, "label": label, "type": "query", "datasource": datasource(), "definition": query,
        "query": { "query": query, "refId": "var" }, "refresh": 2, "sort": 1, "multi": true, "includeAll": true,
        "current": { "selected": true, "text": ["All"], "value": ["$__all"] },
        "options": [], "hide": 0, "regex": "", "skipUrlSync": false,
    });
    if let Some(all) = all {
        variable["allValue"] = json!(all);
    }
    variable
}

fn variables() -> Value {
    let values =
        |metric: &str, label: &str| format!("label_values({metric}{{job=~\"$job\",instance=~\"$instance\"}}, {label})");
    json!([
        {
            "name": "datasource", "label": "Data source", "type": "datasource", "query": "prometheus", "refresh": 1,
            "regex": "", "current": {}, "options": [], "hide": 0, "includeAll": false, "multi": false,
            "skipUrlSync": false,
        },
        variable("job", "Job", "label_values(sluice_build_info, job)", None),
        variable("instance", "Replica", "label_values(sluice_build_info{job=~\"$job\"}, instance)", None),
        variable("class", "Class", &values("sluice_requests_total", "class"), Some(".*")),
        variable("pool", "Pool", &values("sluice_queue_length", "pool"), Some(".*")),
        variable("model", "Model", &values("sluice_requests_total", "model"), Some(".*")),
        variable("key", "Key", &values("sluice_key_requests_total", "key"), Some(".*")),
    ])
}

impl Board {
    pub(crate) fn json(&self) -> String {
        let marks = marks().into_iter().map(|(name, color, target)| {
            json!({
                "name": name, "iconColor": color, "enable": true, "hide": false, "datasource": datasource(),
                "expr": target.expr, "step": "60s", "titleFormat": name,
                "textFormat": "{{alertname}} {{instance}} {{pool}} {{backend}} {{result}}",
            })
        });
        let board = json!({
            "title": self.title, "uid": format!("sluice-{}", self.name), "description": self.about,
            "tags": ["sluice", "vllm"], "schemaVersion": 39, "version": 1, "editable": true, "graphTooltip": 1,
            "timezone": "", "time": { "from": "now-30m", "to": "now" }, "refresh": "10s", "fiscalYearStartMonth": 0,
            "links": [{
                "type": "dashboards", "title": "sluice", "tags": ["sluice"], "asDropdown": false, "includeVars": true,
                "keepTime": true, "targetBlank": false, "icon": "external link", "tooltip": "", "url": "",
            }],
            "annotations": { "list": marks.collect::<Vec<_>>() },
            "templating": { "list": variables() },
            "panels": placed(&self.panels),
        });
        serde_json::to_string_pretty(&board).unwrap() + "\n"
    }
}
