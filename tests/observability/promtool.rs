//! Runs promtool, the checker of Prometheus.
//!
//! The test in this file checks the metrics page with promtool. Other files check expressions and
//! rules with it.

use std::io::Write;
use std::process::{Command, Stdio};

use sluice_gateway::telemetry::Telemetry;

/// Whether promtool accepts the input, and its output. If promtool is not installed, prints a
/// message and returns `None`.
pub(crate) fn promtool(args: &[&str], input: &str) -> Option<(bool, String)> {
    let spawned =
        Command::new("promtool").args(args).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn();
    let Ok(mut child) = spawned else {
        eprintln!("skipped: promtool is not installed (apt-get install prometheus)");
        return None;
    };
    child.stdin.take().unwrap().write_all(input.as_bytes()).unwrap();
    let output = child.wait_with_output().unwrap();
    let said = String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
    Some((output.status.success(), said))
}

#[test]
fn the_metrics_page_passes_promtool() {
    let telemetry = Telemetry::with(Box::new(Vec::new), None);
    let Some((ok, said)) = promtool(&["check", "metrics"], &telemetry.page()) else { return };
    assert!(ok && said.trim().is_empty(), "{said}");
}
