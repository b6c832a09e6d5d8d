//! The address of a backend in the form in which requests and probes use it.
//!
//! The authority and the IP address are computed once, when a configuration is read, so that no
//! request has to format or parse them. The endpoint is part of a backend's identity.

use std::borrow::Cow;
use std::net::IpAddr;
use std::sync::Arc;

use super::backend::Backend;
use super::secret::Secret;
use super::value::Endpoint;
use crate::tls::ClientTls;
use sluice_core::engines::EngineKind;

/// The address of a backend, in the form that the path of a request needs.
#[derive(Clone, Debug, PartialEq)]
pub struct Address {
    /// Host, port and path prefix.
    pub endpoint: Endpoint,
    /// `host:port`, as sent in a `Host` header.
    pub authority: Arc<str>,
    /// The host, if it is an IP address, so that no name must be resolved.
    pub ip: Option<IpAddr>,
    /// How to connect with TLS; `None`: without TLS.
    pub tls: Option<ClientTls>,
    /// The bearer token that the gateway sends to the engine, instead of the client's token.
    pub api_key: Option<Secret>,
    /// The kind of engine that listens there.
    pub engine: EngineKind,
    /// The data-parallel rank that gets the requests; `None`: the engine chooses.
    pub rank: Option<u16>,
    /// The port of the engine's metrics page, if it differs from the port of the endpoint.
    pub metrics_port: Option<u16>,
    /// The port of the engine's KV events, if the pool uses them.
    pub events: Option<u16>,
}

impl Address {
    /// The address of the vLLM server at `endpoint`.
    pub fn new(endpoint: Endpoint, tls: Option<ClientTls>, api_key: Option<Secret>) -> Self {
        let (authority, ip) = (endpoint.authority().into(), endpoint.host.parse().ok());
        let (engine, rank, metrics_port, events) = (EngineKind::Vllm, None, None, None);
        Self { endpoint, authority, ip, tls, api_key, engine, rank, metrics_port, events }
    }

    /// The address of a configured backend and the means of connecting to it.
    pub fn of(backend: &Backend) -> Self {
        let address = Self::new(backend.target.endpoint(), backend.connection.clone(), backend.api_key.clone());
        let Backend { engine, rank, metrics_port, events, .. } = *backend;
        Self { engine, rank, metrics_port, events, ..address }
    }

    /// Whether `other` is another rank of the same server, or the same rank.
    pub fn is_same_server(&self, other: &Self) -> bool {
        self.rank.is_some() && other.rank.is_some() && self.endpoint == other.endpoint
    }

    /// The address of the metrics page, on a separate port or on the port of requests. `None` if
    /// the engine has no such page.
    pub fn of_metrics(&self) -> Option<Cow<'_, Self>> {
        let port = self.metrics_port.or(self.engine.rules().metrics.as_ref()?.port);
        let Some(port) = port.filter(|port| *port != self.endpoint.port) else { return Some(Cow::Borrowed(self)) };
        let endpoint = Endpoint { port, prefix: String::new(), ..self.endpoint.clone() };
        let page = Self::new(endpoint, self.tls.clone(), self.api_key.clone());
        Some(Cow::Owned(Self { engine: self.engine, rank: self.rank, ..page }))
    }
}
