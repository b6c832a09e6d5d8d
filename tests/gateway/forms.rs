//! Multipart forms.
//!
//! However an engine reads a form, it finds no model that the key may not use.

use crate::engine::{Engine, json};
use crate::test_gateway::{TestGateway, key_digest, one_pool};
use crate::{client, engine};

async fn gateway(engine: &Engine) -> TestGateway {
    let digest = key_digest("k");
    let auth = format!("[[auth.keys]]\nname = \"team\"\nsha256 = \"{digest}\"\nmodels = [\"m\"]\n");
    let text = one_pool(&[engine.url()]) + "[[model]]\nname = \"closed\"\n" + &auth;
    TestGateway::from_text(&text, &["pool.only.models=['m', 'closed']"]).await
}

fn send(content_type: &str, body: &[u8]) -> Vec<u8> {
    let length = body.len();
    let head = format!(
        "POST /v1/audio/transcriptions HTTP/1.1\r\nhost: gate\r\nauthorization: Bearer k\r\n{content_type}\
         content-length: {length}\r\n\r\n"
    );
    [head.as_bytes(), body].concat()
}

const TYPE: &str = "content-type: multipart/form-data; boundary=XyZ\r\n";

/// A form whose first part has these headers and the value `closed`, and whose second part is
/// `model` with the value `m`.
fn form(headers: &str) -> String {
    format!(
        "--XyZ\r\n{headers}\r\n\r\nclosed\r\n\
         --XyZ\r\nContent-Disposition: form-data; name=\"model\"\r\n\r\nm\r\n--XyZ--\r\n"
    )
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_form_in_which_parsers_see_different_models_reaches_no_engine() {
    let engine = Engine::always(vec![engine::Step::Send(json(b"{}"))]).await;
    let gateway = gateway(&engine).await;
    for headers in [
        "Content-Disposition: form-data; NAME=\"model\"",
        "Content-Disposition: form-data; name =\"model\"",
        "Content-Disposition: form-data; name=\"x\"; name=\"model\"",
        "Content-Disposition: form-data; name=\"x\"\r\nContent-Disposition: form-data; name=\"model\"",
        "Content-Disposition: form-data; name=\"x\"\r\n\r\n\r\n--XyZ \r\nContent-Disposition: form-data; name=\"model\"",
        "Content-Disposition: form-data; name=\"+AG0-odel\"",
        "Content-Disposition: form-data; name=\"model\"; filename*=utf-8''x",
    ] {
        let refused = gateway.request(send(TYPE, form(headers).as_bytes())).await;
        assert!(refused.is(400, "invalid_request").text().contains("curl --form"), "{}", refused.text());
    }
    // A second content type may name another boundary.
    let other = format!("{TYPE}content-type: multipart/form-data; boundary=other\r\n");
    gateway
        .request(send(&other, form("Content-Disposition: form-data; name=\"x\"").as_bytes()))
        .await
        .is(400, "invalid_request");
    // The key may not use the model `closed`. The gateway finds this name although another part
    // comes before `model`.
    let closed = form("Content-Disposition: form-data; name=\"prompt\"").replace("\r\nm\r\n", "\r\nclosed\r\n");
    gateway.request(send(TYPE, closed.as_bytes())).await.is(403, "model_forbidden");
    assert_eq!(engine.count(), 0);
    gateway.settled().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_canonical_form_passes_byte_for_byte_and_one_without_a_model_gets_it() {
    let engine = Engine::always(vec![engine::Step::Send(json(b"{}"))]).await;
    let gateway = gateway(&engine).await;
    let whole = form("Content-Disposition: form-data; name=\"file\"; filename=\"a.wav\"\r\nContent-Type: audio/wav");
    assert_eq!(gateway.request(send(TYPE, whole.as_bytes())).await.status(), 200);
    assert_eq!(engine.seen()[0].body, whole.as_bytes());
    let unnamed = "--XyZ\r\nContent-Disposition: form-data; name=\"prompt\"\r\n\r\nx\r\n--XyZ--\r\n";
    assert_eq!(gateway.request(send(TYPE, unnamed.as_bytes())).await.status(), 200);
    let named = "--XyZ\r\nContent-Disposition: form-data; name=\"model\"\r\n\r\nm\r\n".to_owned() + unnamed;
    assert_eq!(String::from_utf8_lossy(&engine.seen()[1].body), named);
    let chat = client::CHAT.as_bytes();
    gateway.request(send("content-type: application/json\r\n", chat)).await.is(400, "invalid_request");
    gateway.settled().await;
}
