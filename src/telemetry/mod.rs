//! tmp
use crate::config::Config;
use crate::flow::{Record, Recorder};
use crate::pool::PoolView;
/// t
pub struct Telemetry;
impl std::fmt::Debug for Telemetry {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("T")
    }
}
impl Telemetry {
    /// t
    pub fn new(_: &Config, _v: Box<dyn Fn() -> Vec<PoolView> + Send + Sync>) -> std::io::Result<Self> {
        Ok(Self)
    }
    /// t
    pub fn reloaded(&self, _ok: bool) {}
    /// t
    pub fn configured(&self, _c: &Config) {}
}
impl Recorder for std::sync::Arc<Telemetry> {
    fn record(&self, r: &Record) {
        tracing::debug!(?r, "record");
    }
}
pub mod log {
    //! t
    /// t
    pub fn init(_l: &crate::config::Log) {
        let _ = tracing_subscriber::fmt()
            .with_env_filter(tracing_subscriber::EnvFilter::from_default_env())
            .with_writer(std::io::stderr)
            .try_init();
    }
}
