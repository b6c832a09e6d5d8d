//! An object as a key in etcd (3.4 and later). Calls go to the JSON gateway that every member has:
//! `/v3/kv/range` and `/v3/kv/txn`.
//!
//! A write is a transaction that compares the key's revision, which is 0 if the key does not exist.
//! After a failure, the next member is asked first. A call goes on to another member only if
//! nothing was sent to the first. Bounds: [`ANSWER_BYTES`]; each call has a separate connection.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use bytes::Bytes;
use http::StatusCode;
use serde::Deserialize;
use serde_json::{Value, json};

use super::store::{Found, Store, Written};
use sluice_config::{Address, Cluster};
use sluice_fleet::{FetchError, post};

/// Most bytes read of an answer: enough for the largest ledger in base64.
const ANSWER_BYTES: usize = 2 << 20;

#[derive(Debug)]
pub(super) struct Etcd {
    members: Vec<Address>,
    key: String,
    limit: Duration,
    first: AtomicUsize,
}

/// The answer to a range request, with numbers as text.
#[derive(Deserialize)]
struct Range {
    /// Required, so that an answer of another program is an error.
    header: Value,
    #[serde(default)]
    kvs: Vec<KeyValue>,
}

#[derive(Deserialize)]
struct KeyValue {
    mod_revision: String,
    #[serde(default)]
    value: String,
}

#[derive(Deserialize)]
struct Txn {
    header: Value,
    #[serde(default)]
    succeeded: bool,
}

impl Etcd {
    pub(super) fn new(cluster: &Cluster, key: &str, limit: Duration) -> Self {
        let address = |(endpoint, tls): (&sluice_config::Endpoint, _)| Address::new(endpoint.clone(), tls, None);
        let members = cluster.endpoints().map(address).collect();
        Self { members, key: STANDARD.encode(key), limit, first: AtomicUsize::new(0) }
    }

    /// Asks one member after the other until one can be reached.
    async fn ask(&self, path: &str, body: &Value) -> Result<Bytes, String> {
        let mut last = String::new();
        for _ in 0..self.members.len() {
            let first = self.first.load(Ordering::Relaxed);
            let member = &self.members[first % self.members.len()];
            let failed = match post(member, path, body, self.limit, ANSWER_BYTES).await {
                Ok((StatusCode::OK, answer)) => return Ok(answer),
                Ok((status, answer)) => format!("{status}: {}", shown(&answer)),
                Err(error) => {
                    self.first.store(first + 1, Ordering::Relaxed);
                    last = format!("etcd at {}: {error}", member.endpoint);
                    if matches!(error, FetchError::Connect(_)) {
                        continue;
                    }
                    return Err(last);
                }
            };
            self.first.store(first + 1, Ordering::Relaxed);
            return Err(format!("etcd at {}: {failed}", member.endpoint));
        }
        Err(last)
    }
}

fn shown(answer: &[u8]) -> String {
    String::from_utf8_lossy(&answer[..answer.len().min(200)]).trim().escape_debug().to_string()
}

impl Store for Etcd {
    fn name(&self) -> String {
        let members: Vec<String> = self.members.iter().map(|member| member.endpoint.to_string()).collect();
        format!("etcd {}", members.join(", "))
    }

    async fn read(&self) -> Result<Found, String> {
        let answer = self.ask("/v3/kv/range", &json!({ "key": self.key })).await?;
        let not_etcd = |what: &str| format!("the answer is not one of etcd's ({what}): {}", shown(&answer));
        let range: Range = serde_json::from_slice(&answer).map_err(|error| not_etcd(&error.to_string()))?;
        if !range.header.is_object() {
            return Err(not_etcd("no header"));
        }
        let Some(found) = range.kvs.into_iter().next() else {
            return Ok(Found { bytes: None, version: "0".to_owned() });
        };
        let bytes = STANDARD.decode(&found.value).map_err(|error| not_etcd(&error.to_string()))?;
        Ok(Found { bytes: Some(bytes), version: found.mod_revision })
    }

    async fn write(&self, bytes: Vec<u8>, over: &Found) -> Written {
        let body = json!({
            "compare": [{ "key": self.key, "target": "MOD", "result": "EQUAL", "mod_revision": over.version }],
            "success": [{ "request_put": { "key": self.key, "value": STANDARD.encode(bytes) } }],
        });
        match self.ask("/v3/kv/txn", &body).await {
            Err(why) => Written::Unknown(why),
            Ok(answer) => match serde_json::from_slice::<Txn>(&answer) {
                Ok(txn) if txn.header.is_object() && txn.succeeded => Written::Done,
                Ok(txn) if txn.header.is_object() => Written::Refused,
                _ => Written::Unknown(format!("the answer is not one of etcd's: {}", shown(&answer))),
            },
        }
    }
}
