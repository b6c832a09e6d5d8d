//! The lower bound: a proxy of pingora's `HttpServerApp` and `Connector`, without the gateway's
//! work.
//!
//! It shows which part of the gateway's cost comes from pingora. It writes each chunk that it reads
//! on one side to the other side at once, and is the simplest correct program for the rows measured
//! here. It copies headers to the upstream, keeps connections alive on both sides, and closes them
//! when anything fails. It does not watch for a client that leaves, retry, time out, meter or log.

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use pingora::apps::{HttpPersistentSettings, HttpServerApp, ReusedHttpStream};
use pingora::connectors::http::Connector;
use pingora::http::ResponseHeader;
use pingora::protocols::http::ServerSession;
use pingora::server::configuration::ServerConf;
use pingora::server::{Server, ShutdownWatch};
use pingora::services::listening::Service;
use pingora::upstreams::peer::HttpPeer;

/// Time that an upstream connection may be idle. It is less than the 5 s after which vLLM closes
/// the connection.
const UPSTREAM_IDLE: Duration = Duration::from_secs(4);

struct Bare {
    upstream: Connector,
    peer: HttpPeer,
}

impl Bare {
    async fn forward(&self, session: &mut ServerSession) -> pingora::Result<()> {
        let (mut upstream, _) = self.upstream.get_http_session(&self.peer).await?;
        upstream.write_request_header(Box::new(session.req_header().clone())).await?;
        while let Some(part) = session.read_request_body().await? {
            upstream.write_request_body(part, false).await?;
        }
        upstream.finish_request_body().await?;
        upstream.read_response_header().await?;
        let head: ResponseHeader =
            upstream.response_header().cloned().ok_or_else(|| pingora::Error::new_str("no head"))?;
        session.write_response_header(Box::new(head)).await?;
        while let Some(part) = upstream.read_response_body().await? {
            session.write_response_body(part, false).await?;
        }
        session.write_response_body(bytes::Bytes::new(), true).await?;
        self.upstream.release_http_session(upstream, &self.peer, Some(UPSTREAM_IDLE)).await;
        Ok(())
    }
}

#[async_trait]
impl HttpServerApp for Bare {
    async fn process_new_http(
        self: &Arc<Self>,
        mut session: ServerSession,
        _shutdown: &ShutdownWatch,
    ) -> Option<ReusedHttpStream> {
        if !session.read_request().await.ok()? {
            return None;
        }
        self.forward(&mut session).await.ok()?;
        let settings = HttpPersistentSettings::for_session(&session);
        let reusable = session.finish().await.ok()??;
        Some(ReusedHttpStream::from_reusable_stream(reusable, settings))
    }
}

pub(crate) fn run(listen: &str, backend: &str, threads: usize) {
    let conf = ServerConf {
        threads,
        grace_period_seconds: Some(0),
        upstream_keepalive_pool_size: 8192,
        ..ServerConf::default()
    };
    let mut server = Server::new_with_opt_and_conf(None, conf);
    server.bootstrap();
    let app = Bare { upstream: Connector::new(None), peer: HttpPeer::new(backend, false, String::new()) };
    let mut service = Service::new("bare".to_owned(), app);
    service.add_tcp(listen);
    server.add_service(service);
    server.run_forever();
}
