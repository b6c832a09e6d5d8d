//! The rendered chart for Kubernetes fits the gateway.
//!
//! Its configuration is valid, its command exists, and its probes and times match the gateway's.

use clap::CommandFactory as _;
use serde::Deserialize as _;
use serde_yaml_ng::Value;
use sluice::cli::Cli;
use sluice_config::{Config, Machine, Surroundings};

use crate::{read, root};

fn documents() -> Vec<Value> {
    let text = read("config/kubernetes.yaml");
    serde_yaml_ng::Deserializer::from_str(&text).map(|document| Value::deserialize(document).unwrap()).collect()
}

fn of_kind(kind: &str) -> Value {
    documents().into_iter().find(|document| document["kind"] == kind).unwrap_or_else(|| panic!("no {kind}"))
}

/// The same configuration, but with a listed backend in place of pods.
fn with_a_backend(text: &str) -> String {
    let (before, _) = text.split_once("[pool.kubernetes]").expect("pods");
    format!("{before}[[pool.backend]]\nname = \"a\"\nurl = \"http://a:1\"\n")
}

#[test]
fn the_sample_for_kubernetes_fits_the_gateway() {
    let text = of_kind("ConfigMap")["data"]["sluice.toml"].as_str().expect("a configuration").to_owned();
    let around = Surroundings { env: &|_| Some("0".repeat(64)), folder: root(), machine: Machine::of_process() };
    // A build without the feature `kubernetes` rejects pods; the rest of the configuration is the
    // same.
    let text = if cfg!(feature = "kubernetes") { text } else { with_a_backend(&text) };
    let config =
        Config::parse(&text, "kubernetes.yaml", &[], &around).unwrap_or_else(|problems| panic!("{problems}")).config;

    let pod = &of_kind("Deployment")["spec"]["template"]["spec"];
    let container = &pod["containers"][0];
    let args = container["args"].as_sequence().expect("args").iter().map(|word| word.as_str().unwrap());
    Cli::command().try_get_matches_from(["sluice"].into_iter().chain(args)).expect("the command exists");

    let port = |name: &str| {
        let ports = container["ports"].as_sequence().unwrap();
        ports.iter().find(|port| port["name"] == name).and_then(|port| port["containerPort"].as_u64()).unwrap()
    };
    assert_eq!(port("http"), u64::from(config.server.listen.port()));
    assert_eq!(port("admin"), u64::from(config.server.admin.port()));
    for (probe, path) in [("livenessProbe", "/health"), ("readinessProbe", "/ready")] {
        assert_eq!(container[probe]["httpGet"]["path"], path);
        assert_eq!(container[probe]["httpGet"]["port"], "http");
    }
    // Kubernetes kills the container after the grace period. It sends requests to a pod until a few
    // probes have failed.
    let probe = |field: &str| container["readinessProbe"][field].as_u64().unwrap();
    let noticed = probe("periodSeconds") * probe("failureThreshold");
    assert!(config.server.lame_duck.as_secs() > noticed, "{:?} is too short", config.server.lame_duck);
    let grace = pod["terminationGracePeriodSeconds"].as_u64().unwrap();
    assert!(grace > (config.server.lame_duck + config.server.drain_timeout).as_secs(), "{grace} s is too short");
    let is_own = |document: &Value| document["kind"] == "Service" && document["metadata"]["name"] == "sluice";
    let service = documents().into_iter().find(is_own).expect("a Service");
    assert_eq!(service["spec"]["ports"][0]["targetPort"], "http");
    assert_eq!(service["spec"]["selector"], of_kind("Deployment")["spec"]["selector"]["matchLabels"]);
}
