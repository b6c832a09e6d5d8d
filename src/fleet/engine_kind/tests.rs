//! Servers on loopback that answer with the pages of one kind.
//!
//! Every other page is a 404, so a test shows if a page is asked for without need.

use std::sync::Arc;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpListener;

use super::*;
use sluice_config::Endpoint;

const LIMIT: Duration = Duration::from_secs(5);
const SGLANG: &str = r#"{"model_path":"m","is_generation":true}"#;
const LLAMA: &str = r#"{"default_generation_settings":{},"total_slots":2}"#;
const TRITON: &str = r#"{"name":"triton","version":"2.60.0"}"#;
const VLLM: &str = "vllm:num_requests_running 0\n";

struct Server {
    port: u16,
    asked: Arc<Mutex<Vec<String>>>,
}

impl Server {
    async fn with(pages: &'static [(&'static str, &'static str)]) -> Self {
        let socket = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let (port, asked) = (socket.local_addr().unwrap().port(), Arc::<Mutex<Vec<String>>>::default());
        let log = Arc::clone(&asked);
        tokio::spawn(async move {
            while let Ok((mut connection, _)) = socket.accept().await {
                let mut request = [0; 2048];
                let length = connection.read(&mut request).await.unwrap_or(0);
                let text = String::from_utf8_lossy(&request[..length]).into_owned();
                let path = text.split(' ').nth(1).unwrap_or_default().to_owned();
                let page = pages.iter().find(|(own, _)| *own == path);
                let (status, body) = page.map_or(("404 Not Found", ""), |(_, body)| ("200 OK", *body));
                log.lock().push(path);
                let response = format!("HTTP/1.1 {status}\r\ncontent-length: {}\r\n\r\n{body}", body.len());
                let _ = connection.write_all(response.as_bytes()).await;
            }
        });
        Self { port, asked }
    }

    async fn identified_for(&self, engine: EngineKind) -> Option<EngineKind> {
        self.asked.lock().clear();
        let endpoint = Endpoint { https: false, host: "127.0.0.1".to_owned(), port: self.port, prefix: String::new() };
        let address = Address { engine, ..Address::new(endpoint, None, None) };
        identify(&address, None, LIMIT).await.unwrap()
    }

    fn asked(&self) -> Vec<String> {
        self.asked.lock().clone()
    }
}

#[tokio::test]
async fn a_server_is_recognised_whatever_kind_its_pool_has() {
    use EngineKind::{LlamaCpp, OpenAi, Serial, Sglang, Triton, Vllm};
    let servers: [(&[_], EngineKind); 6] = [
        (&[("/metrics", VLLM), ("/health", "")], Vllm),
        (&[("/v1/models", r#"{"data":[{"id":"m","owned_by":"vllm"}]}"#), ("/health", "")], Vllm),
        (&[("/get_model_info", SGLANG), ("/health_generate", "")], Sglang),
        (&[("/v1/models", r#"{"data":[{"id":"m","owned_by":"sglang"}]}"#), ("/health_generate", "")], Sglang),
        (&[("/props", LLAMA), ("/health", "")], LlamaCpp),
        (&[("/v2", TRITON), ("/v2/health/ready", "")], Triton),
    ];
    for (pages, kind) in servers {
        let server = Server::with(pages).await;
        for pool in [Vllm, Sglang, LlamaCpp, Triton] {
            assert_eq!(server.identified_for(pool).await, Some(kind), "{pool:?} {pages:?}");
        }
        for pool in [OpenAi, Serial] {
            let certain = (kind == Triton).then_some(Triton);
            assert_eq!(server.identified_for(pool).await, certain, "any server may be a {pool:?}, except a Triton");
            assert!(server.asked().iter().all(|path| path.starts_with("/v2")), "no other page would change that");
        }
    }
    let models: &[_] =
        &[("/v1/models", r#"{"data":[{"id":"m","owned_by":"acme"}]}"#), ("/metrics", "tgi_queue_size 0\n")];
    let no_health: &[_] = &[("/v1/models", r#"{"data":[{"id":"m","owned_by":"sglang"}]}"#), ("/health", "")];
    for pages in [&[][..], models, no_health] {
        assert_eq!(Server::with(pages).await.identified_for(Vllm).await, None);
    }
}

#[tokio::test]
async fn a_list_of_models_that_names_the_kind_costs_no_further_request() {
    let server = Server::with(&[("/v1/models", r#"{"data":[{"id":"m","owned_by":"vllm"}]}"#)]).await;
    let endpoint = Endpoint { https: false, host: "127.0.0.1".to_owned(), port: server.port, prefix: String::new() };
    let address = Address::new(endpoint, None, None);
    let list = read_models(&address, LIMIT).await.unwrap();
    assert_eq!(identify(&address, Some(&list.cards), LIMIT).await.unwrap(), Some(EngineKind::Vllm));
    assert_eq!(server.asked(), ["/v1/models"]);
}

#[tokio::test]
async fn a_server_that_does_not_answer_is_given_up_and_asked_again_later() {
    let socket = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = socket.local_addr().unwrap().port();
    let endpoint = Endpoint { https: false, host: "127.0.0.1".to_owned(), port, prefix: String::new() };
    let address = Address::new(endpoint, None, None);
    assert!(identify(&address, None, Duration::from_millis(50)).await.is_err());
}

#[test]
fn a_kind_is_remembered_until_an_engine_in_service_is_not_certain_any_more() {
    let (kinds, id) = (FoundKinds::default(), BackendId::new(0));
    assert!(kinds.note(id, Some(EngineKind::Triton), false));
    assert!(!kinds.note(id, Some(EngineKind::Triton), true));
    assert!(!kinds.note(id, None, false));
    assert_eq!(kinds.of(id), Some(EngineKind::Triton));
    assert!(kinds.note(id, None, true));
    assert!(!kinds.note(id, None, true));
    assert_eq!(kinds.of(id), None);
}
