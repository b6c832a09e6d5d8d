//! Panels and dashboards as tables, and the JSON that Grafana imports: schema 39 (Grafana 10 and
//! later).
//!
//! Selectors are written with a placeholder, so that no expression can miss a filter: `{@gw}`
//! selects gateways by `$job` and `$instance`, `{@pool}` also by `$pool`, `{@model}` also by
//! `$model`, `{@req}` by all four. Positions and ids follow from the order of the panels.

use serde_json::{Value, json};

/// Width of a dashboard in Grafana's grid.
pub(crate) const GRID: u32 = 24;
const FILTERS: [(&str, &str); 4] = [
    ("@req", "@pool,model=~\"$model\""),
    ("@model", "@gw,model=~\"$model\""),
    ("@pool", "@gw,pool=~\"$pool\""),
    ("@gw", "job=~\"$job\",instance=~\"$instance\""),
];

/// The relation between the value for several replicas and the value of each replica.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Replicas {
    /// The sum over replicas: requests, tokens, work in flight.
    Add,
    /// A value between the minimum and the maximum: shares, quantiles, and shared objects such as
    /// backends.
    Between,
    /// Each replica has its own series.
    Apart,
}

/// One expression of a panel.
#[derive(Clone, Debug)]
pub(crate) struct Target {
    pub(crate) expr: String,
    pub(crate) legend: String,
    pub(crate) replicas: Replicas,
    /// The reason why the expression may have no data: all is well, or a feature is not in use.
    pub(crate) may_be_empty: Option<&'static str>,
}

pub(crate) fn target(replicas: Replicas, expr: impl Into<String>, legend: impl Into<String>) -> Target {
    let mut expr = expr.into();
    for (name, filter) in FILTERS {
        expr = expr.replace(name, filter);
    }
    Target { expr, legend: legend.into(), replicas, may_be_empty: None }
}

pub(crate) fn adds(expr: impl Into<String>, legend: impl Into<String>) -> Target {
    target(Replicas::Add, expr, legend)
}

pub(crate) fn between(expr: impl Into<String>, legend: impl Into<String>) -> Target {
    target(Replicas::Between, expr, legend)
}

pub(crate) fn apart(expr: impl Into<String>, legend: impl Into<String>) -> Target {
    target(Replicas::Apart, expr, legend)
}

impl Target {
    pub(crate) fn or_empty(self, why: &'static str) -> Self {
        Self { may_be_empty: Some(why), ..self }
    }
}

/// P50, P90 and P99 of a histogram of requests, by a label.
pub(crate) fn quantiles(family: &str, filter: &str, by: &str) -> Vec<Target> {
    let one = |q: f64, name: &str| {
        let rate = format!("rate({family}_bucket{{{filter}}}[$__rate_interval])");
        between(format!("histogram_quantile({q}, sum by (le, {by}) ({rate}))"), format!("{{{{{by}}}}} {name}"))
    };
    vec![one(0.5, "P50"), one(0.9, "P90"), one(0.99, "P99")]
}

/// A panel, or the title of a row.
#[derive(Clone, Debug)]
pub(crate) struct Panel {
    kind: &'static str,
    pub(crate) title: &'static str,
    about: &'static str,
    size: (u32, u32),
    pub(crate) targets: Vec<Target>,
    /// `fieldConfig.defaults` and `options`.
    field: Value,
    options: Value,
}

pub(crate) fn row(title: &'static str) -> Panel {
    let size = (GRID, 1);
    Panel { kind: "row", title, about: "", size, targets: Vec::new(), field: Value::Null, options: Value::Null }
}

pub(crate) fn stat(title: &'static str, unit: &str, targets: Vec<Target>) -> Panel {
    let steps = json!([{ "color": "text", "value": null }]);
    let thresholds = json!({ "mode": "absolute", "steps": steps });
    let field = json!({ "unit": unit, "color": { "mode": "thresholds" }, "thresholds": thresholds });
    let reduce = json!({ "calcs": ["lastNotNull"], "fields": "", "values": false });
    let options = json!({
        "colorMode": "value", "graphMode": "area", "justifyMode": "auto", "textMode": "auto", "reduceOptions": reduce,
    });
    Panel { kind: "stat", title, about: "", size: (4, 4), targets, field, options }
}

pub(crate) fn lines(title: &'static str, unit: &str, targets: Vec<Target>) -> Panel {
    let custom = json!({
        "drawStyle": "line", "lineWidth": 1, "fillOpacity": 8, "showPoints": "never", "spanNulls": false,
        "stacking": { "mode": "none", "group": "A" },
    });
    let field = json!({ "unit": unit, "min": 0, "color": { "mode": "palette-classic" }, "custom": custom });
    let options = json!({
        "legend": { "displayMode": "list", "placement": "bottom", "showLegend": true, "calcs": [] },
        "tooltip": { "mode": "multi", "sort": "desc" },
    });
    Panel { kind: "timeseries", title, about: "", size: (8, 8), targets, field, options }
}

/// A distribution over time. Grafana reads the buckets from the label `le`.
pub(crate) fn heatmap(title: &'static str, unit: &str, bucket: Target) -> Panel {
    let options = json!({
        "calculate": false, "cellGap": 1, "showValue": "never", "yAxis": { "unit": unit, "axisPlacement": "left" },
        "color": {
            "mode": "scheme", "scheme": "Turbo", "steps": 64, "exponent": 0.5, "fill": "dark-orange", "reverse": false,
        },
        "legend": { "show": true }, "tooltip": { "mode": "single", "yHistogram": true },
        "rowsFrame": { "layout": "auto" }, "exemplars": { "color": "rgba(255,0,255,0.7)" },
        "filterValues": { "le": 1e-9 },
    });
    let field = json!({ "unit": unit });
    Panel { kind: "heatmap", title, about: "", size: (12, 9), targets: vec![bucket], field, options }
}

/// States over time: each value has a name and a colour.
pub(crate) fn timeline(title: &'static str, words: &[(u32, &str, &str)], targets: Vec<Target>) -> Panel {
    let shown = words
        .iter()
        .map(|(value, text, color)| (value.to_string(), json!({ "text": text, "color": color, "index": value })));
    let mappings = json!([{ "type": "value", "options": shown.collect::<serde_json::Map<_, _>>() }]);
    let custom = json!({ "lineWidth": 0, "fillOpacity": 80 });
    let field = json!({ "unit": "none", "color": { "mode": "thresholds" }, "custom": custom, "mappings": mappings });
    let options = json!({
        "mergeValues": true, "showValue": "auto", "alignValue": "center", "rowHeight": 0.8,
        "legend": { "displayMode": "list", "placement": "bottom", "showLegend": true, "calcs": [] },
        "tooltip": { "mode": "single", "sort": "none" },
    });
    Panel { kind: "state-timeline", title, about: "", size: (GRID, 8), targets, field, options }
}

impl Panel {
    pub(crate) fn about(self, about: &'static str) -> Self {
        Self { about, ..self }
    }

    pub(crate) fn wide(self, width: u32) -> Self {
        Self { size: (width, self.size.1), ..self }
    }

    /// Stacks the areas, for parts of a whole.
    pub(crate) fn stacked(mut self) -> Self {
        self.field["custom"]["stacking"]["mode"] = json!("normal");
        self.field["custom"]["fillOpacity"] = json!(25);
        self
    }

    pub(crate) fn decimals(mut self, decimals: u32) -> Self {
        self.field["decimals"] = json!(decimals);
        self
    }

    /// Removes the axis's minimum, for values that may be negative.
    pub(crate) fn signed(mut self) -> Self {
        if let Some(field) = self.field.as_object_mut() {
            field.remove("min");
        }
        self
    }

    /// Colours of a panel of kind `stat`, each with the value from which it applies. The first
    /// colour has no lower bound.
    pub(crate) fn colors(mut self, steps: &[(Option<f64>, &str)]) -> Self {
        let steps = steps.iter().map(|(from, color)| json!({ "color": color, "value": from }));
        self.field["thresholds"]["steps"] = steps.collect();
        self
    }

    fn json(&self, id: usize, x: u32, y: u32) -> Value {
        let position = json!({ "h": self.size.1, "w": self.size.0, "x": x, "y": y });
        if self.kind == "row" {
            return json!({
                "type": "row", "id": id, "title": self.title, "collapsed": false, "panels": [], "gridPos": position,
            });
        }
        let format = if self.kind == "heatmap" { "heatmap" } else { "time_series" };
        let targets = self.targets.iter().zip('A'..).map(|(target, name)| {
            json!({
                "datasource": datasource(), "refId": name, "expr": target.expr, "legendFormat": target.legend,
                "range": true, "editorMode": "code", "format": format,
            })
        });
        json!({
            "type": self.kind, "id": id, "title": self.title, "description": self.about, "datasource": datasource(),
            "gridPos": position, "fieldConfig": { "defaults": self.field, "overrides": [] }, "options": self.options,
            "targets": targets.collect::<Vec<_>>(),
        })
    }
}

pub(crate) fn datasource() -> Value {
    json!({ "type": "prometheus", "uid": "${datasource}" })
}

/// Places panels from left to right, with a new row where the next panel does not fit.
pub(crate) fn placed(panels: &[Panel]) -> Vec<Value> {
    let (mut x, mut y, mut height) = (0, 0, 0);
    let each = panels.iter().enumerate().map(|(index, panel)| {
        if x + panel.size.0 > GRID {
            (x, y, height) = (0, y + height, 0);
        }
        let json = panel.json(index + 1, x, y);
        (x, height) = (x + panel.size.0, height.max(panel.size.1));
        json
    });
    each.collect()
}
