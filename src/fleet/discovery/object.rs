//! A ConfigMap and a Lease that several gateways share. A gateway replaces the whole object, and
//! only if the object has not changed since this gateway read it.
//!
//! A write gives the `resourceVersion` that it replaces. Reads give none, so that the API server
//! returns the latest stored state. Bounds: callers limit the time; a ConfigMap holds 1 MiB.

use std::collections::BTreeMap;

use k8s_openapi::api::coordination::v1::{Lease, LeaseSpec};
use k8s_openapi::api::core::v1::ConfigMap;
use kube::Api;
use kube::api::{ObjectMeta, PostParams};
use serde::Serialize;
use serde::de::DeserializeOwned;

use super::client::{MANAGER, api};

/// The key of the text in the ConfigMap.
const KEY: &str = "ledger";

/// The result of a write.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ObjectWritten {
    /// The object was written.
    Done,
    /// The object has changed since it was read.
    Refused,
    /// It is unknown whether the object was written.
    Unknown(String),
}

/// The text and version of an object; `None` if it does not exist.
///
/// # Errors
/// The failure, for the operator.
pub async fn read_object(namespace: Option<&str>, name: &str) -> Result<Option<(String, String)>, String> {
    let objects: Api<ConfigMap> = api(namespace).await?;
    let found = objects.get_opt(name).await.map_err(|error| words("ConfigMap", "get configmaps", name, &error))?;
    let Some(object) = found else { return Ok(None) };
    let version = object.metadata.resource_version.unwrap_or_default();
    let text = object.data.and_then(|mut data| data.remove(KEY)).unwrap_or_default();
    Ok(Some((text, version)))
}

/// Replaces the object if it has the version `over`. Without `over`, creates the object.
pub async fn write_object(namespace: Option<&str>, name: &str, text: String, over: Option<&str>) -> ObjectWritten {
    let objects = match api(namespace).await {
        Ok(objects) => objects,
        Err(why) => return ObjectWritten::Unknown(why),
    };
    let data = Some(BTreeMap::from([(KEY.to_owned(), text)]));
    let object = ConfigMap { metadata: metadata(name, over), data, ..ConfigMap::default() };
    put("ConfigMap", "configmaps", &objects, name, &object, over).await
}

/// The `spec` of a Lease as JSON, and the version; `None` if it does not exist.
///
/// # Errors
/// The failure, for the operator.
pub async fn read_lease(namespace: Option<&str>, name: &str) -> Result<Option<(Vec<u8>, String)>, String> {
    lease_of(&api(namespace).await?, name).await
}

async fn lease_of(leases: &Api<Lease>, name: &str) -> Result<Option<(Vec<u8>, String)>, String> {
    let found = leases.get_opt(name).await.map_err(|error| words("Lease", "get leases", name, &error))?;
    let Some(lease) = found else { return Ok(None) };
    let spec = serde_json::to_vec(&lease.spec.unwrap_or_default()).map_err(|error| error.to_string())?;
    Ok(Some((spec, lease.metadata.resource_version.unwrap_or_default())))
}

/// Replaces the `spec` of the Lease if it has the version `over`. Without `over`, creates the
/// Lease.
pub async fn write_lease(namespace: Option<&str>, name: &str, spec: &[u8], over: Option<&str>) -> ObjectWritten {
    match api(namespace).await {
        Ok(leases) => put_lease(&leases, name, spec, over).await,
        Err(why) => ObjectWritten::Unknown(why),
    }
}

async fn put_lease(leases: &Api<Lease>, name: &str, spec: &[u8], over: Option<&str>) -> ObjectWritten {
    let spec: LeaseSpec = match serde_json::from_slice(spec) {
        Ok(spec) => spec,
        Err(error) => return ObjectWritten::Unknown(format!("Lease {name}: {error}")),
    };
    let lease = Lease { metadata: metadata(name, over), spec: Some(spec) };
    put("Lease", "leases", leases, name, &lease, over).await
}

fn metadata(name: &str, over: Option<&str>) -> ObjectMeta {
    ObjectMeta {
        name: Some(name.to_owned()),
        resource_version: over.map(str::to_owned),
        labels: Some(BTreeMap::from([("app.kubernetes.io/managed-by".to_owned(), MANAGER.to_owned())])),
        ..ObjectMeta::default()
    }
}

async fn put<K>(
    kind: &str,
    resource: &str,
    objects: &Api<K>,
    name: &str,
    object: &K,
    over: Option<&str>,
) -> ObjectWritten
where
    K: Clone + std::fmt::Debug + Serialize + DeserializeOwned,
{
    let params = PostParams { field_manager: Some(MANAGER.to_owned()), ..PostParams::default() };
    let (verb, written) = match over {
        Some(_) => ("update", objects.replace(name, &params, object).await),
        None => ("create", objects.create(&params, object).await),
    };
    match written {
        Ok(_) => ObjectWritten::Done,
        // 409: changed or created meanwhile. 404: removed, so there is nothing to replace.
        Err(kube::Error::Api(status)) if status.code == 409 || (status.code == 404 && over.is_some()) => {
            ObjectWritten::Refused
        }
        Err(error) => ObjectWritten::Unknown(words(kind, &format!("{verb} {resource}"), name, &error)),
    }
}

fn words(kind: &str, what: &str, name: &str, error: &kube::Error) -> String {
    format!("{kind} {name}: {}", super::client::CallError::of(what, error))
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use kube::{Client, Config};
    use parking_lot::Mutex;
    use serde_json::{Value, json};
    use tokio::io::{AsyncBufReadExt as _, AsyncReadExt as _, AsyncWriteExt as _, BufReader};
    use tokio::net::{TcpListener, TcpStream};

    use super::*;

    /// An API server with one Lease.
    #[derive(Debug, Default)]
    struct Server {
        lease: Option<Value>,
        version: u64,
        forbids: bool,
    }

    impl Server {
        fn answer(&mut self, method: &str, path: &str, body: &[u8]) -> (u16, Value) {
            let status = |code: u16, message: &str| {
                (
                    code,
                    json!({ "kind": "Status", "status": "Failure", "code": code, "message": message, "reason": if code == 404 { "NotFound" } else { "Other" } }),
                )
            };
            let all = "/apis/coordination.k8s.io/v1/namespaces/n/leases";
            let one = format!("{all}/ledger-leader");
            let path = path.split('?').next().unwrap_or_default();
            assert_eq!(path, if method == "POST" { all } else { &one });
            if self.forbids {
                return status(403, "leases is forbidden");
            }
            let sent: Value = serde_json::from_slice(body).unwrap_or_default();
            match (method, &self.lease) {
                ("GET", None) | ("PUT", None) => return status(404, "not found"),
                ("GET", Some(lease)) => return (200, lease.clone()),
                ("POST", Some(_)) => return status(409, "already exists"),
                ("PUT", Some(lease)) if sent["metadata"]["resourceVersion"] != lease["metadata"]["resourceVersion"] => {
                    return status(409, "has been modified");
                }
                _ => {}
            }
            self.version += 1;
            let mut lease = sent;
            lease["metadata"]["resourceVersion"] = json!(self.version.to_string());
            self.lease = Some(lease.clone());
            (200, lease)
        }
    }

    async fn serve(socket: TcpStream, server: Arc<Mutex<Server>>) -> Option<()> {
        let (mut socket, mut first, mut length) = (BufReader::new(socket), String::new(), 0);
        socket.read_line(&mut first).await.ok()?;
        loop {
            let mut line = String::new();
            socket.read_line(&mut line).await.ok()?;
            match line.trim().to_ascii_lowercase().split_once(':') {
                Some(("content-length", value)) => length = value.trim().parse().ok()?,
                Some(_) => {}
                None => break,
            }
        }
        let mut body = vec![0; length];
        socket.read_exact(&mut body).await.ok()?;
        let mut words = first.split(' ');
        let (code, answer) = server.lock().answer(words.next()?, words.next()?, &body);
        let answer = answer.to_string();
        let head = format!(
            "HTTP/1.1 {code} X\r\ncontent-type: application/json\r\nconnection: close\r\ncontent-length: {}\r\n\r\n",
            answer.len()
        );
        socket.write_all((head + &answer).as_bytes()).await.ok()
    }

    async fn api_server() -> (Arc<Mutex<Server>>, Api<Lease>) {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = format!("http://{}", listener.local_addr().unwrap());
        let server = Arc::new(Mutex::new(Server::default()));
        let shared = Arc::clone(&server);
        tokio::spawn(async move {
            loop {
                let (socket, _) = listener.accept().await.unwrap();
                tokio::spawn(serve(socket, Arc::clone(&shared)));
            }
        });
        let client = Client::try_from(Config::new(address.parse().unwrap())).unwrap();
        (server, Api::namespaced(client, "n"))
    }

    const NAME: &str = "ledger-leader";
    const RECORD: &str = r#"{"holderIdentity":"one#7","leaseDurationSeconds":10,"acquireTime":"2026-01-02T03:04:05.000006Z","renewTime":"2026-01-02T03:04:06.000007Z","leaseTransitions":3}"#;

    #[tokio::test]
    async fn a_lease_is_written_only_over_the_version_that_was_read_and_has_the_fields_that_kubectl_shows() {
        let (server, leases) = api_server().await;
        assert_eq!(lease_of(&leases, NAME).await, Ok(None));
        assert_eq!(put_lease(&leases, NAME, RECORD.as_bytes(), Some("1")).await, ObjectWritten::Refused);
        assert_eq!(put_lease(&leases, NAME, RECORD.as_bytes(), None).await, ObjectWritten::Done);
        assert_eq!(put_lease(&leases, NAME, RECORD.as_bytes(), None).await, ObjectWritten::Refused, "it is there");
        let written = server.lock().lease.clone().unwrap();
        assert_eq!((&written["kind"], &written["apiVersion"]), (&json!("Lease"), &json!("coordination.k8s.io/v1")));
        assert_eq!(written["spec"], serde_json::from_str::<Value>(RECORD).unwrap());
        let (spec, version) = lease_of(&leases, NAME).await.unwrap().unwrap();
        assert_eq!(serde_json::from_slice::<Value>(&spec).unwrap(), serde_json::from_str::<Value>(RECORD).unwrap());
        let released = br#"{"leaseDurationSeconds":1,"leaseTransitions":3}"#;
        assert_eq!(put_lease(&leases, NAME, released, Some(&version)).await, ObjectWritten::Done);
        assert_eq!(put_lease(&leases, NAME, RECORD.as_bytes(), Some(&version)).await, ObjectWritten::Refused);
        assert_eq!(server.lock().lease.as_ref().unwrap()["spec"]["holderIdentity"], Value::Null);
    }

    #[tokio::test]
    async fn a_missing_permission_is_named() {
        let (server, leases) = api_server().await;
        server.lock().forbids = true;
        let words = lease_of(&leases, NAME).await.unwrap_err();
        assert!(words.contains("Lease ledger-leader: no permission to get leases"), "{words}");
        for (over, verb) in [(None, "create"), (Some("1"), "update")] {
            let ObjectWritten::Unknown(words) = put_lease(&leases, NAME, RECORD.as_bytes(), over).await else {
                panic!("it was not written")
            };
            assert!(words.contains(&format!("no permission to {verb} leases")), "{words}");
        }
    }
}
