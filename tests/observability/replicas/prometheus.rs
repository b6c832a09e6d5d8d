//! A Prometheus that the test starts.
//!
//! Its configuration scrapes the gateways; its HTTP API answers the queries of the test.

use std::collections::BTreeMap;
use std::fs;
use std::process::{Command, Stdio};

use serde_json::Value;
use tempfile::TempDir;

use super::deployment::{Process, eventually};
use super::http::http;
use crate::path;
use crate::ports::free_port;

/// Values of an expression by labels. All labels of a value are one text.
pub(crate) type Vector = BTreeMap<String, f64>;

pub(crate) struct Prometheus {
    port: u16,
    _process: Process,
    _folder: TempDir,
}

fn escaped(text: &str) -> String {
    text.bytes()
        .map(|b| if b.is_ascii_alphanumeric() { char::from(b).to_string() } else { format!("%{b:02X}") })
        .collect()
}

impl Prometheus {
    /// Scrapes these ports each second, as one job, and evaluates the rules of `grafana`.
    pub(crate) fn start(ports: &[u16]) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let targets: Vec<String> = ports.iter().map(|port| format!("'127.0.0.1:{port}'")).collect();
        let config = format!(
            "global: {{scrape_interval: 1s, evaluation_interval: 1s}}\nrule_files: ['{}', '{}']\nscrape_configs:\n\
             - job_name: gw\n  static_configs: [{{targets: [{}]}}]\n",
            path("prometheus/rules.yml").display(),
            path("prometheus/alerts.yml").display(),
            targets.join(", "),
        );
        let file = folder.path().join("prometheus.yml");
        fs::write(&file, config).unwrap();
        let port = free_port();
        let log = fs::File::create(folder.path().join("log")).unwrap();
        let mut command = Command::new("prometheus");
        command
            .arg(format!("--config.file={}", file.display()))
            .arg(format!("--storage.tsdb.path={}", folder.path().join("data").display()))
            .arg(format!("--web.listen-address=127.0.0.1:{port}"))
            .arg("--enable-feature=exemplar-storage")
            .stdout(Stdio::null())
            .stderr(log);
        let process = Process::spawn(&mut command, "apt-get install prometheus");
        let prometheus = Self { port, _process: process, _folder: folder };
        eventually("prometheus is ready", || matches!(http(port, "GET /-/ready", "", ""), Some((200, _))));
        prometheus
    }

    fn get(&self, request: &str, body: &str) -> Value {
        let form = "content-type: application/x-www-form-urlencoded\r\n";
        let (status, text) = http(self.port, request, form, body).expect("an answer of Prometheus");
        let answer: Value = serde_json::from_str(&text).unwrap_or_else(|error| panic!("{error}: {text}"));
        assert!(status == 200 && answer["status"] == "success", "{body}: {text}");
        answer["data"].clone()
    }

    pub(crate) fn exemplars(&self, histogram: &str) -> Vec<String> {
        let range = "start=0&end=4102444800";
        let data = self.get("POST /api/v1/query_exemplars", &format!("query={}&{range}", escaped(histogram)));
        let all = data.as_array().unwrap().iter().flat_map(|one| one["exemplars"].as_array().unwrap());
        all.map(|one| one["labels"]["trace_id"].as_str().unwrap().to_owned()).collect()
    }

    /// The value of an expression at a time (seconds since 1970), or now. NaN values are left out.
    pub(crate) fn query(&self, expr: &str, at: Option<f64>) -> Vector {
        let time = at.map_or(String::new(), |at| format!("&time={at}"));
        let data = self.get("POST /api/v1/query", &format!("query={}{time}", escaped(expr)));
        let number = |value: &Value| value.as_str().unwrap().parse::<f64>().unwrap();
        let mut vector = Vector::new();
        for one in data["result"].as_array().unwrap() {
            let value = number(&one["value"][1]);
            if !value.is_nan() {
                vector.insert(one["metric"].to_string(), value);
            }
        }
        vector
    }

    /// Name, expression and kind (`recording`, `alerting`) of every rule. Each must have been
    /// evaluated without an error.
    pub(crate) fn rules(&self) -> Vec<(String, String, String)> {
        let data = self.get("GET /api/v1/rules", "");
        let groups = data["groups"].as_array().unwrap().iter();
        let rules = groups.flat_map(|group| group["rules"].as_array().unwrap().clone());
        let text = |rule: &Value, key: &str| rule[key].as_str().unwrap().to_owned();
        rules
            .map(|rule| {
                assert_eq!(text(&rule, "health"), "ok", "{rule}");
                (text(&rule, "name"), text(&rule, "query"), text(&rule, "type"))
            })
            .collect()
    }
}
