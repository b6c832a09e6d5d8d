//! `[tracing]`: the collector for traces and metrics, and the share of traced requests.
//!
//! The protocol is OTLP over HTTP with protobuf, which every OpenTelemetry collector accepts.
//! Sending is a cargo feature (`otel`). In a gateway without it, the table is an error whose
//! message says how to get a gateway with tracing. The request path applies the share of sampled
//! traces (`flow/trace.rs`), `telemetry/otlp` the rest.

use std::collections::BTreeMap;
use std::time::Duration;

use http::header::{HeaderName, HeaderValue};

use super::certificates::PemFile;
use super::problem::Situation;
use super::report::Report;
use super::secret::Secret;
use super::table::table;
use super::value::{Endpoint, not_empty};
use crate::tls::{Certificates, ClientSettings, ClientTls, Roots, TlsError};

/// The path for traces, below the address of a collector.
pub const TRACES_PATH: &str = "/v1/traces";
/// The path for metrics.
pub const METRICS_PATH: &str = "/v1/metrics";
/// The usual port of OTLP over gRPC.
const GRPC_PORT: u16 = 4317;
/// The shortest interval, because a page of metrics takes some milliseconds to write and may have
/// megabytes.
const METRICS_INTERVAL_MIN: Duration = Duration::from_secs(1);
/// Whether this gateway can send traces.
const IS_BUILT: bool = cfg!(feature = "otel");

table! {
    /// Traces of requests and metrics, for an OpenTelemetry collector.
    pub struct Tracing {
        /// Address of the collector. It gets OTLP over HTTP with protobuf at /v1/traces below the
        /// address. If the collector is slow or gone, traces are dropped and counted; requests do
        /// not wait.
        pub endpoint: Endpoint = required("write the address of the collector, such as \"http://127.0.0.1:4318\"")
            .check(check_collector)
            .example("http://127.0.0.1:4318");
        /// Share of requests that are traced if the client sends no traceparent header; a client
        /// that sends one decides. Lower it for more than about a thousand requests per second.
        pub sample: f64 = default("1.0").within("0", "1");
        /// The name of the gateway in traces (service.name).
        pub service_name: String = default("sluice").check(not_empty);
        /// Headers that the gateway sends to the collector, such as credentials. "env:NAME" and
        /// "file:PATH" stand for the value of a variable of the gateway and for the content of a
        /// file. Values are never shown.
        pub headers: BTreeMap<String, Secret> = table().example("authorization = \"env:OTLP_AUTHORIZATION\"");
        /// Interval at which the collector also gets all metrics, at /v1/metrics; 0s: never, else
        /// at least 1s. They are the metrics of the metrics page, which Prometheus scrapes without
        /// this setting.
        pub metrics_interval: Duration = duration_or_zero("0s").example("30s");
        /// Longest time that the collector may take to accept traces or metrics.
        pub timeout: Duration = duration("10s");
        /// Traces that may wait to be sent. When the queue is full, further traces are dropped.
        pub queue: usize = default("2048").within("1", "65536");
        /// PEM file with the CAs that sign the certificate of a collector with https.
        pub ca: Option<PemFile<Certificates>> = optional("the CAs that this machine trusts").example("tls/collector.pem");
    }
}

impl Tracing {
    /// The TLS settings for the collector; `None`: without TLS.
    ///
    /// # Errors
    /// A certificate cannot be used, this machine has no CA certificates, or the host cannot be a
    /// name in a certificate.
    pub fn connection(&self) -> Result<Option<ClientTls>, TlsError> {
        let Endpoint { https, host, .. } = &self.endpoint;
        if !https {
            return Ok(None);
        }
        let roots = self.ca.as_ref().map_or(Roots::System, |file| Roots::File(&file.content));
        let settings = ClientSettings::new(roots, None)?.to(host);
        settings.map(Some).ok_or_else(|| TlsError::Unusable(format!("'{host}' is not a DNS name or an IP address")))
    }

    pub(super) fn check(&self, report: &mut Report<'_>) {
        if !IS_BUILT {
            return report.add_at("tracing", Situation::WithoutTracing);
        }
        for (name, value) in &self.headers {
            let path = format!("tracing.headers.{name}");
            if name.eq_ignore_ascii_case("authorization") && !value.is_reference() {
                report.add_at(&path, Situation::PlainSecret);
            }
            if HeaderName::try_from(name).is_err() {
                report.add_at(&path, Situation::Header { found: name.clone() });
            } else if HeaderValue::try_from(value.expose()).is_err() {
                report.add_at(&path, Situation::SecretLetters);
            }
        }
        let interval = self.metrics_interval;
        if !interval.is_zero() && interval < METRICS_INTERVAL_MIN {
            let (found, min, max) = (format!("{interval:?}"), "1s".to_owned(), "30d".to_owned());
            report.add_at("tracing.metrics_interval", Situation::OutOfRange { found, min, max });
        }
        if !report.is_sound("tracing.endpoint") {
            return;
        }
        if self.endpoint.port == GRPC_PORT {
            report.add_at("tracing.endpoint", Situation::GrpcPort);
        }
        if self.ca.is_some() && !self.endpoint.https {
            report.add_at("tracing.ca", Situation::TlsWithoutHttps);
        } else if let Err(error) = self.connection() {
            report.add_at("tracing.endpoint", Situation::Tls { reason: error.to_string() });
        }
    }
}

/// Checks that an address does not end in one of the paths that the gateway adds to it.
fn check_collector(url: &str) -> Result<(), Situation> {
    let ends = [TRACES_PATH, METRICS_PATH].into_iter().find(|path| url.trim_end_matches('/').ends_with(path));
    ends.map_or(Ok(()), |path| Err(Situation::CollectorPath { found: url.to_owned(), path }))
}
