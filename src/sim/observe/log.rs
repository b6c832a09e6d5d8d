//! The log of `vllm serve`, line by line, on stdout: `(APIServer pid=1) INFO 11-21 10:55:59
//! [file.py:1] text`.
//!
//! A server inside a test writes nothing. The parent writes the lines of the engine's process,
//! under the child's pid. Line numbers are from 0.32.0. Write errors are ignored.

use std::io::Write;

/// The process to which a line belongs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LogSource {
    /// The parent.
    ApiServer,
    /// The child.
    EngineCore,
}

/// Severity of a line.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Level {
    /// Normal operation.
    Info,
    /// A possible problem.
    Warning,
    /// A failure.
    Error,
}

/// The destination of log lines.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Log {
    /// Nowhere.
    #[default]
    Off,
    /// To stdout, for these processes.
    On {
        /// Pid of the API server.
        api: u32,
        /// Pid of the engine.
        engine: u32,
        /// Whether requests are logged as uvicorn does.
        access: bool,
    },
}

impl Log {
    /// Writes a text with a prefix for each line. `source`: `file.py:line`.
    pub fn line(self, source_process: LogSource, level: Level, source: &str, text: &str) {
        let Self::On { api, engine, .. } = self else { return };
        let (name, pid) = match source_process {
            LogSource::ApiServer => ("APIServer", api),
            LogSource::EngineCore => ("EngineCore", engine),
        };
        let level = match level {
            Level::Info => "INFO",
            Level::Warning => "WARNING",
            Level::Error => "ERROR",
        };
        let now = jiff::Zoned::now().strftime("%m-%d %H:%M:%S").to_string();
        let lines = text.split('\n').map(|line| format!("({name} pid={pid}) {level} {now} [{source}] {line}\n"));
        write(&lines.collect::<String>());
    }

    /// An informative line of the API server.
    pub fn api(self, source: &str, text: &str) {
        self.line(LogSource::ApiServer, Level::Info, source, text);
    }

    /// An informative line of the engine.
    pub fn engine(self, source: &str, text: &str) {
        self.line(LogSource::EngineCore, Level::Info, source, text);
    }

    /// uvicorn's access log line of one request.
    pub fn access(self, peer: std::net::SocketAddr, method: &str, path: &str, status: http::StatusCode) {
        if let Self::On { access: true, .. } = self {
            let reason = status.canonical_reason().unwrap_or_default();
            write(&format!("INFO:     {peer} - \"{method} {path} HTTP/1.1\" {} {reason}\n", status.as_u16()));
        }
    }

    /// A line of uvicorn itself, which goes to stderr.
    pub fn uvicorn(self, text: &str) {
        if self != Self::Off {
            let _ = writeln!(std::io::stderr(), "INFO:     {text}");
        }
    }
}

fn write(text: &str) {
    let mut out = std::io::stdout().lock();
    let _ = out.write_all(text.as_bytes()).and_then(|()| out.flush());
}
