//! The files of the dashboards.
//!
//! They are up to date and well formed, and name only metrics that exist.

use std::collections::BTreeSet;
use std::fs;

use serde_json::Value;
use sluice_gateway::telemetry::families;

use crate::boards;
use crate::metrics::{complaints, named};
use crate::panel::GRID;
use crate::promtool::promtool;
use crate::{golden, path, read};

/// Units of Grafana that the dashboards use.
const UNITS: [&str; 5] = ["none", "s", "bytes", "percentunit", "reqps"];
const DATASOURCE: &str = "${datasource}";

fn files() -> Vec<(String, Value)> {
    let names =
        fs::read_dir(path("dashboards")).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
    let files: Vec<_> =
        names.map(|name| (name.clone(), serde_json::from_str(&read(&format!("dashboards/{name}"))).unwrap())).collect();
    assert_eq!(files.len(), boards::all().len(), "a file without a definition");
    files
}

fn list<'a>(value: &'a Value, key: &str) -> &'a [Value] {
    value[key].as_array().map_or(&[], Vec::as_slice)
}

fn text<'a>(value: &'a Value, key: &str) -> &'a str {
    value[key].as_str().unwrap_or_else(|| panic!("no {key} in {value}"))
}

fn expressions(board: &Value) -> Vec<&str> {
    let targets = list(board, "panels").iter().flat_map(|panel| list(panel, "targets"));
    targets.chain(list(&board["annotations"], "list")).map(|target| text(target, "expr")).collect()
}

#[test]
fn the_files_are_those_that_the_tables_describe() {
    for board in boards::all() {
        golden(&format!("dashboards/{}.json", board.name), &board.json());
    }
}

#[test]
fn panels_have_ids_titles_units_and_a_place_of_their_own() {
    let mut uids = BTreeSet::new();
    for (name, board) in files() {
        assert!(uids.insert(text(&board, "uid").to_owned()), "{name}: uid twice");
        assert!(board["schemaVersion"].as_u64() >= Some(36), "{name}: older than Grafana 10");
        let (mut ids, mut titles, mut cells) = (BTreeSet::new(), BTreeSet::new(), BTreeSet::new());
        for panel in list(&board, "panels") {
            let title = text(panel, "title");
            assert!(ids.insert(panel["id"].as_u64().unwrap()), "{name}: id of {title} twice");
            assert!(titles.insert(title), "{name}: {title} twice");
            let at = |key: &str| panel["gridPos"][key].as_u64().unwrap();
            assert!(at("w") > 0 && at("h") > 0 && at("x") + at("w") <= u64::from(GRID), "{name}: {title} is too wide");
            for cell in (at("x")..at("x") + at("w")).flat_map(|x| (at("y")..at("y") + at("h")).map(move |y| (x, y))) {
                assert!(cells.insert(cell), "{name}: {title} covers another panel at {cell:?}");
            }
            if text(panel, "type") != "row" {
                let unit = text(&panel["fieldConfig"]["defaults"], "unit");
                assert!(UNITS.contains(&unit), "{name}: {title} has the unit {unit}");
                assert!(!list(panel, "targets").is_empty(), "{name}: {title} shows nothing");
                assert!(!text(panel, "description").is_empty(), "{name}: {title} has no description");
            }
        }
    }
}

#[test]
fn all_data_comes_from_the_data_source_variable() {
    for (name, board) in files() {
        let variables = list(&board["templating"], "list");
        let names: Vec<&str> = variables.iter().map(|variable| text(variable, "name")).collect();
        assert_eq!(names, ["datasource", "job", "instance", "class", "pool", "model", "key"], "{name}");
        let panels = list(&board, "panels").iter().filter(|panel| text(panel, "type") != "row");
        let targets = list(&board, "panels").iter().flat_map(|panel| list(panel, "targets"));
        for part in panels.chain(targets).chain(&variables[1..]).chain(list(&board["annotations"], "list")) {
            assert_eq!(part["datasource"]["uid"], DATASOURCE, "{name}: {part}");
        }
        for variable in &variables[1..3] {
            // Other programs have a metric such as process_open_fds, too. So "All" must mean the
            // listed values, not every value.
            assert!(variable["allValue"].is_null(), "{name}: All of {} goes beyond the list", variable["name"]);
        }
    }
}

#[test]
fn every_selector_follows_the_job_and_the_replica() {
    for (name, board) in files() {
        for expr in expressions(&board) {
            assert!(expr.contains("job=~\"$job\""), "{name}: {expr}");
            for (metric, labels) in named(expr) {
                let filtered = ["job", "instance"].iter().all(|label| labels.iter().any(|one| one == label));
                assert!(filtered, "{name}: {metric} is not filtered: {expr}");
            }
            for word in expr.split('$').skip(1) {
                let variables = ["job", "instance", "class", "pool", "model", "key", "__rate_interval"];
                let known = variables.iter().any(|name| word.starts_with(name));
                assert!(known, "{name}: unknown variable ${word}");
            }
        }
    }
}

#[test]
fn expressions_name_only_metrics_and_labels_that_exist() {
    for (name, board) in files() {
        for expr in expressions(&board) {
            assert_eq!(complaints(expr), [""; 0], "{name}");
            assert!(!named(expr).is_empty() || expr.starts_with("ALERTS"), "{name}: no metric in {expr}");
        }
        for variable in &list(&board["templating"], "list")[1..] {
            assert_eq!(complaints(text(variable, "definition")), [""; 0], "{name}");
        }
    }
}

#[test]
fn every_expression_parses() {
    let mut rules = String::from("groups:\n- name: dashboards\n  rules:\n");
    let files = files();
    let all = files.iter().flat_map(|(_, board)| expressions(board));
    for (index, expr) in all.enumerate() {
        let expr = serde_json::to_string(&expr.replace("$__rate_interval", "1m")).unwrap();
        rules.push_str(&format!("  - record: dashboard:{index}\n    expr: {expr}\n"));
    }
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("rules.yml");
    fs::write(&path, rules).unwrap();
    let Some((ok, said)) = promtool(&["check", "rules", path.to_str().unwrap()], "") else { return };
    assert!(ok, "{said}");
}

#[test]
fn every_family_is_on_a_panel() {
    let files = files();
    let shown: Vec<String> =
        files.iter().flat_map(|(_, board)| expressions(board)).flat_map(named).map(|(metric, _)| metric).collect();
    for family in families::ALL {
        assert!(shown.iter().any(|metric| metric.starts_with(family.name)), "{} is on no panel", family.name);
    }
}
