//! Compressed request bodies.
//!
//! The engine gets the bodies uncompressed. The gateway refuses a body that is not in the declared
//! coding, and a decompression bomb.

use std::io::Write;

use flate2::Compression;
use flate2::write::{GzEncoder, ZlibEncoder};

use crate::client::{CHAT, post};
use crate::engine::{Engine, completion};
use crate::test_gateway::{TestGateway, eventually};

fn gzip(plain: &[u8]) -> Vec<u8> {
    let mut encoder = GzEncoder::new(Vec::new(), Compression::default());
    encoder.write_all(plain).unwrap();
    encoder.finish().unwrap()
}

fn zlib(plain: &[u8]) -> Vec<u8> {
    let mut encoder = ZlibEncoder::new(Vec::new(), Compression::default());
    encoder.write_all(plain).unwrap();
    encoder.finish().unwrap()
}

fn zstd(plain: &[u8]) -> Vec<u8> {
    zstd::stream::encode_all(plain, 3).unwrap()
}

fn encoded(coding: &str, body: &[u8]) -> Vec<u8> {
    post("/v1/chat/completions", &format!("content-encoding: {coding}\r\n"), body)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_engine_gets_the_plain_body_with_its_length() {
    let engine = Engine::always(completion()).await;
    let gateway = TestGateway::over(&[engine.url()], &[]).await;
    let words: String = (0..200_000).map(|number: u32| format!("{} ", number.wrapping_mul(2_654_435_761))).collect();
    let long = format!(r#"{{"model":"m","messages":[{{"role":"user","content":"{words}"}}]}}"#);
    let mut client = gateway.client().await;
    for plain in [CHAT, &long] {
        let (front, back) = plain.as_bytes().split_at(plain.len() / 2);
        for (coding, body) in [
            ("gzip", gzip(plain.as_bytes())),
            ("x-gzip", [gzip(front), gzip(back)].concat()),
            ("deflate", zlib(plain.as_bytes())),
            ("zstd", zstd(plain.as_bytes())),
            ("identity", plain.as_bytes().to_vec()),
        ] {
            assert_eq!(client.request(encoded(coding, &body)).await.status(), 200, "{coding}");
            let seen = engine.seen().pop().unwrap();
            assert!(seen.body == plain.as_bytes(), "{coding}: {} bytes", seen.body.len());
            assert_eq!(seen.header("content-encoding"), None);
            assert_eq!(seen.header("content-length"), Some(plain.len().to_string().as_str()));
        }
    }
    gateway.settled().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_body_that_lies_about_its_coding_or_is_cut_is_400() {
    let engine = Engine::always(completion()).await;
    let gateway = TestGateway::over(&[engine.url()], &[]).await;
    let cut = |body: Vec<u8>| body[..body.len() - 3].to_vec();
    for (coding, body, part) in [
        ("gzip", CHAT.as_bytes().to_vec(), "not valid gzip"),
        ("zstd", CHAT.as_bytes().to_vec(), "not valid zstd"),
        ("gzip", zstd(CHAT.as_bytes()), "not valid gzip"),
        ("zstd", gzip(CHAT.as_bytes()), "not valid zstd"),
        ("gzip", cut(gzip(CHAT.as_bytes())), "ends inside its gzip"),
        ("zstd", cut(zstd(CHAT.as_bytes())), "ends inside its zstd"),
        ("gzip", gzip(b"{\"model\":"), "JSON"),
    ] {
        let response = gateway.request(encoded(coding, &body)).await;
        let error = response.is(400, "invalid_request").json()["error"]["message"].clone();
        assert!(error.as_str().unwrap().contains(part) || part == "JSON", "{coding}: {error}");
    }
    let plain_coding = gateway.request(encoded("br", CHAT.as_bytes())).await;
    assert_eq!(
        plain_coding.is(415, "content_encoding_not_supported").head.header("accept-encoding"),
        Some("gzip, zstd, deflate")
    );
    assert_eq!(engine.count(), 0);
    gateway.settled().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_bomb_is_413_and_takes_no_memory_that_is_not_returned() {
    let engine = Engine::always(completion()).await;
    let gateway = TestGateway::over(&[engine.url()], &["server.max_body=16MiB"]).await;
    let zeros = vec![b' '; 100 << 20];
    let digits: Vec<u8> =
        (0..17_u32 << 20).map(|at| b'0' + (at.wrapping_mul(2_654_435_761) >> 20) as u8 % 10).collect();
    for (coding, body, code) in [
        ("gzip", gzip(&zeros), "body_expands"),
        ("zstd", zstd(&zeros), "body_expands"),
        ("gzip", gzip(&digits), "body_too_large"),
        ("zstd", zstd(&digits), "body_too_large"),
    ] {
        assert!(body.len() < 16 << 20);
        gateway.request(encoded(coding, &body)).await.is(413, code);
    }
    assert_eq!(engine.count(), 0);
    eventually("no bytes are held", async || gateway.metric("sluice_body_bytes", &[]).await == 0.0).await;
    gateway.settled().await;
}
