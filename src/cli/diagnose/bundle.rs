//! The file of `sluice diagnose --bundle`: one gzip of a JSON object with every response of the
//! admin port, for a bug report.
//!
//! Prompts, answers and secrets are in no response. Names of keys, ids of requests, addresses and
//! paths of files are replaced by numbered words. The same name always gets the same word.

use std::collections::BTreeMap;
use std::io::Write as _;
use std::path::Path;

use flate2::Compression;
use flate2::write::GzEncoder;
use serde_json::{Value, json};

use sluice_admin::{AdminClient, AdminClientError};

const PATHS: [&str; 4] = ["/admin/status", "/admin/findings", "/admin/history", "/admin/requests"];
/// Fields whose texts are replaced, with the word.
const HIDDEN: [(&str, &str); 8] = [
    ("key", "key"),
    ("request_id", "request"),
    ("upstream_id", "request"),
    ("url", "address"),
    ("listen", "address"),
    ("config", "file"),
    ("path", "file"),
    ("client", "address"),
];
/// The name of the lists whose elements have the name of an API key in `name`.
const KEY_LISTS: &str = "keys";

/// Reads all responses and writes `file`. Returns the text for stdout.
pub(super) async fn write(client: &AdminClient, file: &Path) -> Result<String, String> {
    let mut all = serde_json::Map::new();
    for path in PATHS {
        all.insert(path.to_owned(), client.get::<Value>(path).await.map_err(words_of)?);
    }
    all.insert("/metrics".to_owned(), client.text("/metrics").await.map_err(words_of)?.into());
    let mut bundle = Value::Object(all);
    redact(&mut bundle);
    let written = json!({ "sluice": env!("CARGO_PKG_VERSION"), "responses": bundle });
    let mut encoder = GzEncoder::new(Vec::new(), Compression::default());
    let bytes = encoder.write_all(written.to_string().as_bytes()).and_then(|()| encoder.finish());
    let saved = bytes.and_then(|bytes| std::fs::write(file, bytes));
    saved.map_err(|error| format!("cannot write {}: {error}", file.display()))?;
    Ok(format!("wrote {}; read it before you send it: gzip -dc {0} | less\n", file.display()))
}

fn words_of(error: AdminClientError) -> String {
    error.to_string()
}

fn redact(value: &mut Value) {
    let mut words: BTreeMap<String, String> = BTreeMap::new();
    collect(value, "", &mut words);
    // Longer texts are replaced first, because a text may be a part of a longer one.
    let mut words: Vec<(String, String)> = words.into_iter().collect();
    words.sort_by_key(|(text, _)| std::cmp::Reverse(text.len()));
    replace(value, &words);
}

fn collect(value: &Value, within: &str, words: &mut BTreeMap<String, String>) {
    let mut hide = |text: &str, kind: &str| {
        let number = words.len() + 1;
        if !text.is_empty() {
            words.entry(text.to_owned()).or_insert_with(|| format!("{kind}-{number}"));
        }
    };
    match value {
        Value::Object(fields) => {
            for (field, inner) in fields {
                let hidden = HIDDEN.iter().find(|(name, _)| name == field).map(|(_, kind)| *kind);
                let kind = hidden.or((within == KEY_LISTS && field == "name").then_some("key"));
                if let (Some(kind), Some(text)) = (kind, inner.as_str()) {
                    hide(text, kind);
                }
            }
            fields.iter().for_each(|(field, inner)| collect(inner, field, words));
        }
        Value::Array(all) => all.iter().for_each(|inner| collect(inner, within, words)),
        Value::String(page) if within == "/metrics" => {
            let names = page.split("key=\"").skip(1).filter_map(|rest| rest.split('"').next());
            names.for_each(|name| hide(name, "key"));
        }
        _ => {}
    }
}

fn replace(value: &mut Value, words: &[(String, String)]) {
    match value {
        Value::Object(fields) => fields.values_mut().for_each(|inner| replace(inner, words)),
        Value::Array(all) => all.iter_mut().for_each(|inner| replace(inner, words)),
        Value::String(text) => {
            for (name, word) in words {
                if text.contains(name.as_str()) {
                    *text = text.replace(name.as_str(), word);
                }
            }
        }
        _ => {}
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_keys_ids_and_addresses_are_replaced_wherever_they_occur() {
        let mut bundle = json!({
            "/admin/status": { "listen": "10.0.0.7:8080", "pools": [{ "name": "all", "backends": [{ "url": "http://10.1.2.3:8000" }] }] },
            "/admin/findings": {
                "findings": [{ "cause": "busy_key", "subject": "team-a", "sentence": "Key team-a has 90 % of the work." }],
                "keys": [{ "name": "team-a" }, { "name": "team-a-batch" }],
            },
            "/admin/requests": { "slowest": [{ "request_id": "req-123", "key": "team-a", "ttft_ms": 9.5 }] },
            "/metrics": "sluice_key_requests_total{key=\"team-a\",class=\"short\"} 7\n",
        });
        redact(&mut bundle);
        let text = bundle.to_string();
        for name in ["team-a", "req-123", "10.0.0.7", "10.1.2.3"] {
            assert!(!text.contains(name), "{name} is in {text}");
        }
        assert_eq!(bundle["/admin/findings"]["findings"][0]["subject"], bundle["/admin/findings"]["keys"][0]["name"]);
        assert_eq!(
            (&bundle["/admin/status"]["pools"][0]["name"], &bundle["/admin/requests"]["slowest"][0]["ttft_ms"]),
            (&json!("all"), &json!(9.5))
        );
        assert!(text.contains("short"), "classes stay");
    }
}
