//! The gateway's own log, on stderr: text for people, with colours on a terminal, or one JSON
//! object per line.
//!
//! Lines of libraries are written from `warn` on, or from the configured level if that is higher,
//! because pingora logs every step of its start at `info`. The Kubernetes client logs each failed
//! call as an error, several a second while the API server is away. The gateway reports each
//! failure once, so these lines appear only from `debug` down.
//!
//! `RUST_LOG` replaces all of this, in the usual syntax, also for libraries that use the `log`
//! facade. This log has no line per request (the access log has), and no rotation (stderr belongs
//! to the parent process).

use std::io::IsTerminal;

use tracing_subscriber::EnvFilter;
use tracing_subscriber::filter::ParseError;
use tracing_subscriber::fmt;
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::util::{SubscriberInitExt, TryInitError};

use sluice_config::{Log, LogFormat, LogLevel};

/// The variable that overrides the configured level.
pub const VARIABLE: &str = "RUST_LOG";

/// The reason why the log could not be set up.
#[derive(Debug, thiserror::Error)]
pub enum LogError {
    /// The value of `RUST_LOG` is malformed.
    #[error("RUST_LOG is not understood: {0}; write for example RUST_LOG=info,sluice_gateway::flow=debug")]
    Filter(#[from] ParseError),
    /// A log was set up before in this process.
    #[error("the log is set up already: {0}; call this once, at start")]
    Twice(#[from] TryInitError),
}

/// Sets up the log, once per process.
pub fn init(log: &Log) -> Result<(), LogError> {
    let filter = filter(log.level, std::env::var(VARIABLE).ok().as_deref())?;
    let colours = std::io::stderr().is_terminal() && std::env::var_os("NO_COLOR").is_none();
    let lines = fmt::layer().with_writer(std::io::stderr);
    let registry = tracing_subscriber::registry().with(filter);
    match log.format {
        LogFormat::Text => registry.with(lines.with_ansi(colours)).try_init()?,
        LogFormat::Json => registry.with(lines.json().flatten_event(true).with_ansi(false)).try_init()?,
    }
    Ok(())
}

/// Sets up warnings of the modules `of` as lines on stderr, once per process, for a command that
/// prints progress there.
pub fn init_warnings(of: &str) -> Result<(), LogError> {
    let filter = match std::env::var(VARIABLE) {
        Ok(directives) if !directives.trim().is_empty() => EnvFilter::try_new(directives)?,
        _ => EnvFilter::try_new(format!("off,{of}=warn"))?,
    };
    let lines = fmt::layer().with_writer(std::io::stderr).without_time().with_target(false).with_ansi(false);
    tracing_subscriber::registry().with(filter).with(lines).try_init()?;
    Ok(())
}

/// The filter in force: `RUST_LOG` if it is not empty, otherwise the filter for `level`.
fn filter(level: LogLevel, variable: Option<&str>) -> Result<EnvFilter, ParseError> {
    match variable {
        Some(directives) if !directives.trim().is_empty() => EnvFilter::try_new(directives),
        _ => EnvFilter::try_new(directives(level)),
    }
}

fn directives(level: LogLevel) -> &'static str {
    match level {
        LogLevel::Error => "error,kube_client=off",
        LogLevel::Warn => "warn,kube_client=off",
        LogLevel::Info => "warn,sluice=info,kube_client=off",
        LogLevel::Debug => "warn,sluice=debug",
        LogLevel::Trace => "warn,sluice=trace",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn libraries_log_from_warn_on_and_never_above_the_configured_level() {
        let text = |level| filter(level, None).unwrap().to_string();
        assert_eq!(text(LogLevel::Error), "kube_client=off,error");
        let info = text(LogLevel::Info);
        assert!(info.contains("sluice=info") && info.contains("warn"), "{info}");
    }

    #[test]
    fn each_failed_call_of_the_kubernetes_client_is_logged_from_debug_on_alone() {
        let is_off = |level| filter(level, None).unwrap().to_string().contains("kube_client=off");
        assert!([LogLevel::Error, LogLevel::Warn, LogLevel::Info].into_iter().all(is_off));
        assert!(![LogLevel::Debug, LogLevel::Trace].into_iter().any(is_off));
    }

    #[test]
    fn the_variable_overrides_unless_it_is_empty() {
        let text = |variable| filter(LogLevel::Info, Some(variable)).unwrap().to_string();
        assert_eq!(text("sluice::flow=debug"), "sluice::flow=debug");
        assert!(text(" ").contains("sluice=info"));
        let error = LogError::from(filter(LogLevel::Info, Some("a=b=c")).unwrap_err()).to_string();
        assert!(error.starts_with("RUST_LOG is not understood"), "{error}");
    }
}
