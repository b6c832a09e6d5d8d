//! The common parts of spans and metrics: this process as their origin, and attributes.
//!
//! Replicas with one service name differ in `service.instance.id`, which has host and process id.
//! So a collector does not mix the counters of replicas.

use opentelemetry_proto::tonic::common::v1::any_value::Value;
use opentelemetry_proto::tonic::common::v1::{AnyValue, InstrumentationScope, KeyValue};
use opentelemetry_proto::tonic::resource::v1::Resource;

/// This process under the configured name.
pub(super) fn resource(service_name: &str) -> Resource {
    let version = text("service.version", env!("CARGO_PKG_VERSION"));
    let pid = number("process.pid", std::process::id());
    let mut attributes = vec![text("service.name", service_name), version, pid];
    // The second file is needed because a systemd unit with ProcSubset=pid hides the first.
    let host =
        ["/proc/sys/kernel/hostname", "/etc/hostname"].iter().find_map(|path| std::fs::read_to_string(path).ok());
    let host = host.as_deref().unwrap_or_default().trim_end();
    attributes.push(text("service.instance.id", &format!("{host}:{}", std::process::id())));
    if !host.is_empty() {
        attributes.push(text("host.name", host));
    }
    Resource { attributes, ..Resource::default() }
}

pub(super) fn scope() -> InstrumentationScope {
    let version = env!("CARGO_PKG_VERSION").to_owned();
    InstrumentationScope { name: "sluice".to_owned(), version, ..InstrumentationScope::default() }
}

pub(super) fn attribute(key: &str, value: Value) -> KeyValue {
    KeyValue { key: key.to_owned(), value: Some(AnyValue { value: Some(value) }), ..KeyValue::default() }
}

pub(super) fn text(key: &str, value: &str) -> KeyValue {
    attribute(key, Value::StringValue(value.to_owned()))
}

pub(super) fn number(key: &str, value: impl Into<i64>) -> KeyValue {
    attribute(key, Value::IntValue(value.into()))
}
