//! An engine that counts the requests that it runs at once. The tests check the highest count.
//!
//! A gateway sees the same pages and streams as from `vllm serve`: `/health`, `/v1/models`,
//! `/metrics` and streams at `/v1/completions`. The engine has no limit of its own. A request
//! counts from the arrival of its head until the engine has sent the last token, or until the
//! engine finds the connection closed.

use std::convert::Infallible;
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering::SeqCst};
use std::time::Duration;

use bytes::Bytes;
use http_body_util::combinators::BoxBody;
use http_body_util::{BodyExt as _, Full};
use hyper::body::{Body, Frame, Incoming};
use hyper::service::service_fn;
use hyper::{Request, Response};
use hyper_util::rt::TokioIo;
use tokio::net::TcpListener;
use tokio::sync::mpsc;
use tokio::time::sleep;

/// Pause between two tokens.
const TOKEN: Duration = Duration::from_millis(50);

#[derive(Debug, Default)]
pub(crate) struct Engine {
    pub(crate) port: u16,
    running: AtomicI64,
    peak: AtomicI64,
}

struct Running(Arc<Engine>);

impl Drop for Running {
    fn drop(&mut self) {
        self.0.running.fetch_sub(1, SeqCst);
    }
}

struct Tokens(mpsc::Receiver<Bytes>);

impl Body for Tokens {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        mut self: std::pin::Pin<&mut Self>,
        cx: &mut std::task::Context<'_>,
    ) -> std::task::Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        self.0.poll_recv(cx).map(|bytes| bytes.map(|bytes| Ok(Frame::data(bytes))))
    }
}

impl Engine {
    pub(crate) async fn start() -> Arc<Self> {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let engine = Arc::new(Self { port: listener.local_addr().unwrap().port(), ..Self::default() });
        let served = Arc::clone(&engine);
        tokio::spawn(async move {
            loop {
                let Ok((socket, _)) = listener.accept().await else { continue };
                let engine = Arc::clone(&served);
                let answer = service_fn(move |request| answer(Arc::clone(&engine), request));
                tokio::spawn(async move {
                    let _ =
                        hyper::server::conn::http1::Builder::new().serve_connection(TokioIo::new(socket), answer).await;
                });
            }
        });
        engine
    }

    pub(crate) fn running(&self) -> i64 {
        self.running.load(SeqCst)
    }

    pub(crate) fn peak(&self) -> i64 {
        self.peak.swap(self.running(), SeqCst)
    }
}

async fn answer(
    engine: Arc<Engine>,
    request: Request<Incoming>,
) -> Result<Response<BoxBody<Bytes, Infallible>>, hyper::Error> {
    let text = |text: String| Response::new(Full::new(Bytes::from(text)).boxed());
    Ok(match request.uri().path() {
        "/health" => text(String::new()),
        "/v1/models" => {
            text(r#"{"object":"list","data":[{"id":"m","object":"model","max_model_len":8192}]}"#.to_owned())
        }
        "/metrics" => text(format!(
            "vllm:num_requests_running{{engine=\"0\"}} {}\nvllm:num_requests_waiting{{engine=\"0\"}} 0\n",
            engine.running()
        )),
        _ => {
            let now = engine.running.fetch_add(1, SeqCst) + 1;
            engine.peak.fetch_max(now, SeqCst);
            let running = Running(engine);
            let body = request.into_body().collect().await?.to_bytes();
            let body: serde_json::Value = serde_json::from_slice(&body).unwrap_or_default();
            let tokens = body["max_tokens"].as_u64().unwrap_or(1);
            let (sender, receiver) = mpsc::channel(1);
            tokio::spawn(generate(running, tokens, sender));
            let mut response = Response::new(Tokens(receiver).boxed());
            response.headers_mut().insert("content-type", "text/event-stream".parse().unwrap());
            response
        }
    })
}

async fn generate(running: Running, tokens: u64, sender: mpsc::Sender<Bytes>) {
    for _ in 0..tokens {
        sleep(TOKEN).await;
        let event = r#"data: {"id":"c","object":"text_completion","model":"m","choices":[{"index":0,"text":"a","finish_reason":null}]}"#;
        // A full channel means a slow reader; a closed channel means that the reader has left.
        if sender.send(Bytes::from(format!("{event}\n\n"))).await.is_err() {
            return;
        }
    }
    drop(running);
    let end = r#"data: {"id":"c","object":"text_completion","model":"m","choices":[{"index":0,"text":"","finish_reason":"length"}]}"#;
    let _ = sender.send(Bytes::from(format!("{end}\n\ndata: [DONE]\n\n"))).await;
}
