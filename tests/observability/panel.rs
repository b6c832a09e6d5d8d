//! Definitions of panels and dashboards, and the JSON that Grafana imports from them, with schema
//! 39 (Grafana 10 and later).
//!
//! Every selector is a placeholder, so that no expression can miss a filter. `{@gw}` selects
//! gateways by `$job` and `$instance`, and all others do so too. In addition, `{@pool}` selects by
//! `$pool`, `{@model}` by `$model`, `{@req}` by both, `{@class}` by `$class` and both, `{@engine}`
//! by `$pool` and `$class`, `{@key}` by `$key`, and `{@tenant}` by `$key` and `$class`. Positions
//! and ids of panels follow from their order.

use serde_json::{Value, json};

/// Width of a dashboard in Grafana's grid.
pub(crate) const GRID: u32 = 24;
const FILTERS: [(&str, &str); 8] = [
    ("@class", "@req,class=~\"$class\""),
    ("@engine", "@pool,class=~\"$class\""),
    ("@tenant", "@key,class=~\"$class\""),
    ("@key", "@gw,key=~\"$key\""),
    ("@req", "@pool,model=~\"$model\""),
    ("@model", "@gw,model=~\"$model\""),
    ("@pool", "@gw,pool=~\"$pool\""),
    ("@gw", "job=~\"$job\",instance=~\"$instance\""),
];

/// How the value for several replicas follows from the value of each replica.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Replicas {
    /// The sum of the values: requests, tokens, work in flight.
    Add,
    /// A value between the minimum and the maximum: shares, quantiles, and shared objects such as
    /// backends.
    Between,
    Apart,
}

#[derive(Clone, Debug)]
pub(crate) struct Target {
    pub(crate) expr: String,
    pub(crate) legend: String,
    pub(crate) replicas: Replicas,
    /// The reason why the expression may have no data, for example that all is well, or that a
    /// feature is not in use.
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

/// The legend for series with the labels in `by`, such as "pool, backend".
pub(crate) fn legend(by: &str) -> String {
    by.split(", ").map(|label| format!("{{{{{label}}}}}")).collect::<Vec<_>>().join(" ")
}

pub(crate) fn quantile(q: f64, family: &str, filter: &str, by: &str) -> Target {
    let rate = format!("rate({family}_bucket{{{filter}}}[$__rate_interval])");
    let expr = format!("histogram_quantile({q}, sum by (le, {by}) ({rate}))");
    between(expr, format!("{} P{}", legend(by), q * 100.0))
}

pub(crate) fn median_and_tail(family: &str, filter: &str, by: &str) -> Vec<Target> {
    [0.5, 0.99].map(|q| quantile(q, family, filter, by)).into()
}

pub(crate) fn quantiles(family: &str, filter: &str, by: &str) -> Vec<Target> {
    [0.5, 0.9, 0.99].map(|q| quantile(q, family, filter, by)).into()
}

#[derive(Clone, Debug)]
pub(crate) struct Panel {
    kind: &'static str,
    pub(crate) title: &'static str,
    about: &'static str,
    /// Name of the dashboard to which the panel links for more detail.
    more: Option<&'static str>,
    size: (u32, u32),
    pub(crate) targets: Vec<Target>,
    field: Value,
    options: Value,
}

pub(crate) fn row(title: &'static str) -> Panel {
    let size = (GRID, 1);
    let (field, options) = (Value::Null, Value::Null);
    Panel { kind: "row", title, about: "", more: None, size, targets: Vec::new(), field, options }
}

pub(crate) fn stat(title: &'static str, unit: &str, targets: Vec<Target>) -> Panel {
    let steps = json!([{ "color": "text", "value": null }]);
    let thresholds = json!({ "mode": "absolute", "steps": steps });
    let field = json!({ "unit": unit, "color": { "mode": "thresholds" }, "thresholds": thresholds });
    let reduce = json!({ "calcs": ["lastNotNull"], "fields": "", "values": false });
    let options = json!({
        "colorMode": "value", "graphMode": "area", "justifyMode": "auto", "textMode": "auto", "reduceOptions": reduce,
    });
    Panel { kind: "stat", title, about: "", more: None, size: (4, 4), targets, field, options }
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
    Panel { kind: "timeseries", title, about: "", more: None, size: (8, 8), targets, field, options }
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
    Panel { kind: "heatmap", title, about: "", more: None, size: (12, 9), targets: vec![bucket], field, options }
}

/// A timeline of states. Each value has a name and a colour.
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
    Panel { kind: "state-timeline", title, about: "", more: None, size: (GRID, 8), targets, field, options }
}

/// A table with a row for each series that exists now. The row has the labels without the value.
pub(crate) fn table(title: &'static str, columns: &[(&str, &str)], series: Target) -> Panel {
    let names: serde_json::Map<_, _> = columns.iter().map(|(label, name)| ((*label).to_owned(), json!(name))).collect();
    let order: serde_json::Map<_, _> =
        columns.iter().enumerate().map(|(at, (label, _))| ((*label).to_owned(), json!(at))).collect();
    let field = json!({ "unit": "none", "custom": { "align": "left", "inspect": false } });
    let options = json!({
        "showHeader": true, "cellHeight": "sm",
        "rows": { "excludeByName": { "Time": true, "Value": true }, "renameByName": names, "indexByName": order },
    });
    Panel { kind: "table", title, about: "", more: None, size: (GRID, 5), targets: vec![series], field, options }
}

impl Panel {
    pub(crate) fn about(self, about: &'static str) -> Self {
        Self { about, ..self }
    }

    /// Links to the dashboard that shows more, with the same variables and time.
    pub(crate) fn more(self, board: &'static str) -> Self {
        Self { more: Some(board), ..self }
    }

    /// Links each value to a view of the live page of the replica from which the value comes.
    pub(crate) fn live(mut self, view: &str) -> Self {
        let instance = if self.kind == "table" { "${__data.fields.Replica}" } else { "${__field.labels.instance}" };
        let url = format!("http://{instance}/#{view}");
        self.field["links"] = json!([{ "title": "Live page of this replica", "url": url, "targetBlank": true }]);
        self
    }

    pub(crate) fn wide(self, width: u32) -> Self {
        Self { size: (width, self.size.1), ..self }
    }

    /// Stacks the areas of the series, which are parts of a whole.
    pub(crate) fn stacked(mut self) -> Self {
        self.field["custom"]["stacking"]["mode"] = json!("normal");
        self.field["custom"]["fillOpacity"] = json!(25);
        self
    }

    pub(crate) fn decimals(mut self, decimals: u32) -> Self {
        self.field["decimals"] = json!(decimals);
        self
    }

    /// Removes the minimum of the axis, because values may be negative.
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
        let format = match self.kind {
            "heatmap" | "table" => self.kind,
            _ => "time_series",
        };
        let is_table = self.kind == "table";
        let targets = self.targets.iter().zip('A'..).map(|(target, name)| {
            json!({
                "datasource": datasource(), "refId": name, "expr": target.expr, "legendFormat": target.legend,
                "range": !is_table, "instant": is_table, "editorMode": "code", "format": format,
            })
        });
        let links = self.more.iter().map(|board| {
            let url = format!("/d/sluice-{board}?${{__url_time_range}}&${{__all_variables}}");
            json!({ "title": format!("More: {board}"), "url": url, "targetBlank": false })
        });
        let mut options = self.options.clone();
        let rows = options.as_object_mut().and_then(|options| options.remove("rows"));
        let changes = rows.map(|rows| json!({ "id": "organize", "options": rows }));
        json!({
            "type": self.kind, "id": id, "title": self.title, "description": self.about, "datasource": datasource(),
            "gridPos": position, "fieldConfig": { "defaults": self.field, "overrides": [] }, "options": options,
            "targets": targets.collect::<Vec<_>>(), "links": links.collect::<Vec<_>>(),
            "transformations": changes.into_iter().collect::<Vec<_>>(),
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
