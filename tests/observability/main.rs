//! The metrics page, the dashboards, the rules, and the list of metrics and alerts in `grafana`.
//!
//! [`boards`] defines the dashboards, [`dashboards`] checks their files, [`rules`] the recording
//! rules and alerts, [`reference`] the list of metrics in `grafana/README.md`, [`scale`] the size
//! of the page. [`replicas`] queries a real Prometheus that scrapes two loaded gateways.
//! `SLUICE_UPDATE=1` writes the generated files.
//!
//! `promtool` and `prometheus` come with Prometheus (`apt-get install prometheus`). Without
//! promtool, the tests that need it print a message and pass, because promtool checks only the form
//! of files and of the page. The test with Prometheus is ignored by default, because it takes half
//! a minute.

mod boards;
mod dashboards;
mod metrics;
mod panel;
#[path = "../common/ports.rs"]
mod ports;
#[path = "../common/program.rs"]
mod program;
mod promtool;
mod reference;
mod replicas;
mod rules;
mod scale;

use std::fs;
use std::path::PathBuf;

fn path(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("grafana").join(name)
}

fn read(name: &str) -> String {
    fs::read_to_string(path(name)).unwrap_or_else(|error| panic!("grafana/{name}: {error}"))
}

/// Checks that a generated text equals the file. If `SLUICE_UPDATE` is set, writes the text into
/// the file first.
fn golden(name: &str, wanted: &str) {
    if std::env::var_os("SLUICE_UPDATE").is_some() {
        fs::write(path(name), wanted).unwrap();
    }
    let same = fs::read_to_string(path(name)).is_ok_and(|there| there == wanted);
    assert!(same, "grafana/{name} is out of date; run SLUICE_UPDATE=1 cargo test --test observability");
}
