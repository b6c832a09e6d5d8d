//! The log of `vllm serve`, line by line, on stdout: `(APIServer pid=1) INFO 11-21 10:55:59
//! [file.py:1] text`.
//!
//! A server inside a test writes nothing. The parent writes the lines of the engine's process,
//! under the child's pid. Line numbers are from 0.32.0. Write errors are ignored. A simulator that
//! plays SGLang writes SGLang's lines at the same points.

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
        /// Whether lines have the form and the texts of SGLang.
        sglang: bool,
    },
}

impl Log {
    /// Writes a text with a prefix for each line. `source`: `file.py:line`.
    pub fn line(self, source_process: LogSource, level: Level, source: &str, text: &str) {
        let Self::On { api, engine, sglang, .. } = self else { return };
        if sglang {
            return in_words_of_sglang(source_process, level, text);
        }
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

    /// The line with which SGLang says that it serves. vLLM has no such line.
    pub fn ready(self) {
        if matches!(self, Self::On { sglang: true, .. }) {
            let now = jiff::Zoned::now().strftime("%Y-%m-%d %H:%M:%S").to_string();
            write(&format!("[{now}] The server is fired up and ready to roll!\n"));
        }
    }

    /// A line of uvicorn itself, which goes to stderr.
    pub fn uvicorn(self, text: &str) {
        if self != Self::Off {
            let _ = writeln!(std::io::stderr(), "INFO:     {text}");
        }
    }
}

/// A text in a line of vLLM, and the beginning of the line that SGLang writes at that point.
const SGLANG: &[(&str, &str)] = &[
    ("non-default args: ", "server_args=ServerArgs("),
    ("Initializing a V1 LLM engine", "Init torch distributed begin."),
    ("Starting to load model", "Load weight begin. avail mem="),
    ("Model loading took", "Load weight end. elapsed="),
    ("GPU KV cache size: ", "KV Cache is allocated. #tokens: "),
    ("Graph capturing finished", "Capture decode CUDA graph end. Time elapsed: "),
    ("Capturing CUDA graphs", "Capture decode CUDA graph begin. "),
    (
        "No available memory for the cache blocks",
        "RuntimeError: Not enough memory. Please try to increase --mem-fraction-static. ",
    ),
];

/// Writes SGLang's line in place of a line of vLLM. Lines that SGLang does not have are left out,
/// except errors.
fn in_words_of_sglang(source_process: LogSource, level: Level, text: &str) {
    let found = SGLANG.iter().find_map(|(vllm, own)| Some(format!("{own}{}", text.split_once(vllm)?.1)));
    let Some(text) = found.or_else(|| (level == Level::Error).then(|| text.to_owned())) else { return };
    let now = jiff::Zoned::now().strftime("%Y-%m-%d %H:%M:%S").to_string();
    let rank = if source_process == LogSource::EngineCore { " TP0" } else { "" };
    write(&format!("[{now}{rank}] {text}\n"));
}

fn write(text: &str) {
    let mut out = std::io::stdout().lock();
    let _ = out.write_all(text.as_bytes()).and_then(|()| out.flush());
}
