//! Answers of one engine after which the gateway lets another engine serve the request, over
//! sockets.

use crate::client::{CHAT, chat, get};
use crate::engine::{COMPLETION, Engine, Step, completion, response};
use crate::test_gateway::{TestGateway, eventually, one_pool};

fn refusing(status: u16) -> Vec<Step> {
    vec![Step::Send(response(status, "application/json", br#"{"error":{"message":"no"}}"#))]
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_engine_with_another_key_is_named_with_advice_and_the_other_one_serves_its_requests() {
    let (strict, open) = (Engine::always(refusing(401)).await, Engine::always(completion()).await);
    let text = one_pool(&[strict.url(), open.url()]).replace("url = ", "api_key = \"wrong\"\nurl = ");
    let gateway = TestGateway::from_text(&text, &[]).await;
    eventually("both are ready", async || gateway.state(0) == "ready" && gateway.state(1) == "ready").await;
    for _ in 0..6 {
        let response = gateway.request(chat(CHAT)).await;
        assert_eq!((response.status(), response.text().as_str()), (200, COMPLETION));
    }
    assert_eq!((strict.count(), gateway.state(0)), (1, "ejected"));
    let status = crate::client::TestClient::to(gateway.admin()).await.request(get("/admin/status")).await.text();
    assert!(status.contains("refuses the gateway's credentials with status 401: `api_key` of the backend"), "{status}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_429_of_one_engine_is_served_by_the_other_and_of_both_reaches_the_client_as_it_is() {
    let (limited, open) = (Engine::always(refusing(429)).await, Engine::always(completion()).await);
    let gateway = TestGateway::over(&[limited.url(), open.url()], &[]).await;
    for _ in 0..6 {
        assert_eq!(gateway.request(chat(CHAT)).await.status(), 200);
    }
    assert!(limited.count() > 0, "it was never asked");
    assert_eq!(gateway.state(0), "ready");
    let other = Engine::always(refusing(429)).await;
    let gateway = TestGateway::over(&[limited.url(), other.url()], &[]).await;
    let response = gateway.request(chat(CHAT)).await;
    assert_eq!((response.status(), response.text().as_str()), (429, r#"{"error":{"message":"no"}}"#));
}
