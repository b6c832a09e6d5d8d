//! Follows the log of an engine while it starts: the phase, and whether there is progress.
//!
//! A fixed time limit either kills a slow compile or waits ten minutes for an engine that hangs at
//! once. So each phase in the log has its own limit, counted from the last line that shows
//! progress:
//! - a line that begins a later phase (a phase never goes back);
//! - a progress bar whose count changed;
//! - a line whose text, without digits, is new since the start. "Waiting for 1 engine core to
//!   start", printed every minute, is only one text. So are the access lines of the gateway's
//!   probes.
//!
//! A kind of engine has a [`LogForm`]; this file has vLLM's, from start-up logs of 0.22 to 0.33.
//! Bound: [`SEEN_MAX`] texts are remembered. After that, a new text or count no longer shows
//! progress, but a new phase does.

use std::collections::HashSet;
use std::fmt;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use twox_hash::XxHash3_64;

/// Number of texts that are remembered as seen.
pub const SEEN_MAX: usize = 4_096;

labels! {
    /// The phase of a start. Phases follow one another in this order; some are skipped.
    #[derive(Default, PartialOrd, Ord, Hash, Serialize, Deserialize)]
    #[serde(rename_all = "snake_case")]
    pub enum StartPhase {
        /// The process runs, but has not printed a line of a later phase. Python imports take 5 to
        /// 50 s.
        #[default]
        Launching = "launching",
        /// Arguments are read and the configuration is computed. The port is bound, but not
        /// listening.
        Configuring = "configuring",
        /// The process of the engine core starts.
        EngineStarting = "starting the engine",
        /// Weights are read.
        LoadingWeights = "loading weights",
        /// Graphs are compiled, or read from the cache.
        Compiling = "compiling",
        /// Memory is measured and the KV cache is laid out.
        SizingKvCache = "sizing the KV cache",
        /// CUDA graphs are captured.
        CapturingGraphs = "capturing graphs",
        /// The engine is ready; the HTTP server starts.
        OpeningHttp = "opening HTTP",
        /// The HTTP server accepts requests.
        Serving = "serving",
    }
}

impl StartPhase {
    /// The time without progress in this phase after which the start counts as stalled.
    ///
    /// The limit is several times the longest step without output in published starts: imports on a
    /// cold disk, a shard of weights over a network, one compile range (300 s was seen, and 2,222 s
    /// for all ranges of a start), one autotune (600 s). A start that makes progress has no limit.
    pub fn stall_limit(self) -> Duration {
        Duration::from_secs(match self {
            Self::Launching | Self::Configuring | Self::EngineStarting => 180,
            Self::LoadingWeights => 900,
            Self::Compiling | Self::CapturingGraphs => 1_200,
            Self::SizingKvCache => 900,
            Self::OpeningHttp => 120,
            Self::Serving => 60,
        })
    }

    /// The phase that a line of vLLM begins, if any.
    pub fn begun_by(line: &str) -> Option<Self> {
        FORM.phase(line)
    }
}

/// The form of the lines that one kind of engine logs.
#[derive(Debug)]
pub struct LogForm {
    /// The line without the prefix of the engine's logger.
    pub message: fn(&str) -> &str,
    /// Whether the line has a level below error.
    pub is_remark: fn(&str) -> bool,
    /// Texts, each with the phase that begins with a line that contains it. A line that ends a
    /// phase begins the next phase.
    pub phases: &'static [(&'static str, StartPhase)],
}

/// The form of vLLM's lines.
pub const FORM: LogForm = LogForm { message, is_remark, phases: PHASE_TEXTS };

impl LogForm {
    /// The phase that a line begins, if any.
    fn phase(&self, line: &str) -> Option<StartPhase> {
        let text = (self.message)(line);
        let found = self.phases.iter().find(|(mark, _)| text.contains(mark))?;
        Some(found.1)
    }
}

impl fmt::Display for StartPhase {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.label())
    }
}

const PHASE_TEXTS: &[(&str, StartPhase)] = &[
    ("non-default args:", StartPhase::Configuring),
    ("Resolved architecture:", StartPhase::Configuring),
    ("Chunked prefill is enabled with", StartPhase::Configuring),
    ("vLLM API server version", StartPhase::Configuring),
    ("Initializing a V1 LLM engine", StartPhase::EngineStarting),
    ("Starting to load model", StartPhase::LoadingWeights),
    ("Loading safetensors checkpoint shards", StartPhase::LoadingWeights),
    ("Loading weights took", StartPhase::LoadingWeights),
    ("Model loading took", StartPhase::Compiling),
    ("Starting torch.compile", StartPhase::Compiling),
    ("Dynamo bytecode transform time", StartPhase::Compiling),
    ("Compiling a graph for", StartPhase::Compiling),
    ("Directly load the compiled graph", StartPhase::Compiling),
    ("torch.compile took", StartPhase::SizingKvCache),
    ("torch.compile takes", StartPhase::SizingKvCache),
    ("Initial profiling/warmup run took", StartPhase::SizingKvCache),
    ("Available KV cache memory", StartPhase::SizingKvCache),
    ("KV cache size:", StartPhase::SizingKvCache),
    ("# GPU blocks:", StartPhase::SizingKvCache),
    ("Capturing CUDA graph", StartPhase::CapturingGraphs),
    ("Capturing cudagraphs", StartPhase::CapturingGraphs),
    ("init engine (profile", StartPhase::OpeningHttp),
    ("Supported tasks:", StartPhase::OpeningHttp),
    ("Supported_tasks:", StartPhase::OpeningHttp),
    ("Starting vLLM server on", StartPhase::OpeningHttp),
    ("Starting vLLM API server", StartPhase::OpeningHttp),
    ("Application startup complete", StartPhase::Serving),
    ("Uvicorn running on", StartPhase::Serving),
];

/// The line without the prefix of vLLM's logger:
/// `(EngineCore pid=7) ERROR 11-21 03:55:19 [core.py:1512] `.
///
/// Indentation after the prefix is kept, since it separates the frames of a traceback from the last
/// line.
pub fn message(line: &str) -> &str {
    let rest = without_process(line);
    let Some((level, after)) = rest.split_once(' ') else { return rest };
    if !matches!(level, "DEBUG" | "INFO" | "WARNING" | "ERROR" | "CRITICAL") {
        return rest;
    }
    match after.find('[').zip(after.find("] ")) {
        // The time and the place: "11-21 03:55:19 [core.py:1512] ".
        Some((open, close)) if open < close && open <= 32 => &after[close + 2..],
        _ => rest,
    }
}

/// Whether the line has a level below error. Lines without a level (tracebacks, the output of
/// argparse) are not remarks.
pub fn is_remark(line: &str) -> bool {
    let level = without_process(line).split([' ', ':']).next().unwrap_or_default();
    matches!(level, "DEBUG" | "INFO" | "WARNING")
}

/// The process that the logger names at the start of a line: `EngineCore pid=7`.
pub fn process(line: &str) -> Option<&str> {
    let (process, _) = line.strip_prefix('(')?.split_once(')')?;
    process.contains(" pid=").then_some(process)
}

/// The line without the name of the process: `(EngineCore pid=7) `.
fn without_process(line: &str) -> &str {
    let rest = line.trim_end();
    match rest.split_once(") ") {
        Some((process, after)) if rest.starts_with('(') && process.contains(" pid=") => after,
        _ => rest,
    }
}

/// Follows a start line by line. It only decides whether a line shows progress; the caller measures
/// time.
#[derive(Clone, Debug)]
pub struct StartFollower {
    form: &'static LogForm,
    phase: StartPhase,
    seen: HashSet<u64>,
}

/// The progress that a line shows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Movement {
    /// A later phase began.
    Phase(StartPhase),
    /// Progress within the same phase.
    Step,
    /// No progress.
    None,
}

impl Default for StartFollower {
    fn default() -> Self {
        Self::new(&FORM)
    }
}

impl StartFollower {
    /// A follower of a log of this form, before its first line.
    pub fn new(form: &'static LogForm) -> Self {
        Self { form, phase: StartPhase::default(), seen: HashSet::new() }
    }

    /// The phase that the start is in.
    pub fn phase(&self) -> StartPhase {
        self.phase
    }

    /// Adds a line of the log.
    pub fn add_line(&mut self, line: &str) -> Movement {
        if let Some(phase) = self.form.phase(line).filter(|phase| *phase > self.phase) {
            self.phase = phase;
            self.remember(line);
            return Movement::Phase(phase);
        }
        if self.remember(line) { Movement::Step } else { Movement::None }
    }

    /// Remembers the text of the line; `true` if it is new.
    fn remember(&mut self, line: &str) -> bool {
        let text = (self.form.message)(line);
        if text.trim().is_empty() {
            return false;
        }
        // A progress bar is compared with its numbers. Other lines are compared without numbers,
        // because times and process ids always change.
        let key = if is_bar(text) {
            text.to_owned()
        } else {
            text.chars().filter(|letter| !letter.is_ascii_digit()).collect()
        };
        self.seen.len() < SEEN_MAX && self.seen.insert(XxHash3_64::oneshot(bar_part(&key).as_bytes()))
    }
}

/// Whether this is a progress bar:
/// `Loading safetensors checkpoint shards:  25% Completed | 1/4 [00:00<00:02,  1.5it/s]`.
fn is_bar(text: &str) -> bool {
    text.contains("%|") || text.contains("% Completed |")
}

/// A progress bar without the clock; any other line unchanged.
fn bar_part(text: &str) -> &str {
    match is_bar(text) {
        true => text.split('[').next().unwrap_or(text),
        false => text,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn phases(log: &str) -> Vec<StartPhase> {
        let mut follower = StartFollower::default();
        let moved = log.lines().filter_map(|line| match follower.add_line(line) {
            Movement::Phase(phase) => Some(phase),
            _ => None,
        });
        moved.collect()
    }

    #[test]
    fn a_captured_start_goes_through_its_phases_in_order() {
        use StartPhase::{Configuring, EngineStarting, LoadingWeights, OpeningHttp, Serving, SizingKvCache};
        let log = include_str!("../../../tests/fixtures/vllm-0.32/start-up.log");
        assert_eq!(phases(log), [Configuring, EngineStarting, LoadingWeights, SizingKvCache, OpeningHttp, Serving]);
    }

    #[test]
    fn the_lines_of_a_gpu_start_begin_their_phases() {
        use StartPhase::{CapturingGraphs, Compiling, LoadingWeights, OpeningHttp, SizingKvCache};
        let of = |line: &str| StartPhase::begun_by(line);
        let core = |text: &str| format!("(EngineCore pid=9) INFO 11-21 03:55:19 [core.py:1] {text}");
        assert_eq!(of(&core("Loading weights took 3.41 seconds")), Some(LoadingWeights));
        assert_eq!(of(&core("Model loading took 14.99 GiB memory and 5.1 seconds")), Some(Compiling));
        assert_eq!(of(&core("Dynamo bytecode transform time: 4.60 s")), Some(Compiling));
        assert_eq!(of(&core("torch.compile took 19.4 s in total")), Some(SizingKvCache));
        assert_eq!(of(&core("GPU KV cache size: 451,520 tokens")), Some(SizingKvCache));
        let bar = "Capturing CUDA graphs (mixed prefill-decode, PIECEWISE):  12%|█▏  | 8/67 [00:01<00:09]";
        assert_eq!(of(bar), Some(CapturingGraphs));
        assert_eq!(of(&core("init engine (profile, create kv cache, warmup model) took 34.11 s")), Some(OpeningHttp));
        assert_eq!(of(&core("Starting vLLM API server 0 on http://0.0.0.0:8000")), Some(OpeningHttp));
    }

    #[test]
    fn repeated_lines_show_no_progress_and_a_progress_bar_does() {
        let mut follower = StartFollower::default();
        let waiting = |minute: u32| {
            format!(
                "(APIServer pid=1) DEBUG 11-21 03:{minute:02}:19 [utils.py:9] Waiting for 1 local core engine proc(s)."
            )
        };
        assert_eq!(follower.add_line(&waiting(1)), Movement::Step);
        assert_eq!(follower.add_line(&waiting(2)), Movement::None);
        let bar =
            |done: u32, second: u32| format!("Loading shards:  25% Completed | {done}/4 [00:0{second}<00:09, 1.0s/it]");
        assert_eq!(follower.add_line(&bar(1, 1)), Movement::Step);
        assert_eq!(follower.add_line(&bar(1, 2)), Movement::None);
        assert_eq!(follower.add_line(&bar(2, 3)), Movement::Step);
        let probe = |port: u32| format!("INFO:     127.0.0.1:{port} - \"GET /health HTTP/1.1\" 200 OK");
        assert_eq!(follower.add_line(&probe(1000)), Movement::Step);
        assert_eq!(follower.add_line(&probe(2001)), Movement::None);
    }

    #[test]
    fn a_phase_never_goes_back() {
        let mut follower = StartFollower::default();
        assert_eq!(follower.add_line("Application startup complete."), Movement::Phase(StartPhase::Serving));
        follower.add_line("Starting to load model x...");
        assert_eq!(follower.phase(), StartPhase::Serving);
    }

    #[test]
    fn a_prefix_is_taken_off_and_indentation_stays() {
        assert_eq!(message("(EngineCore pid=7) ERROR 11-21 03:55:19 [core.py:1]   File \"x\""), "  File \"x\"");
        assert_eq!(message("INFO 11-21 03:55:19 [core.py:1] hello"), "hello");
        assert_eq!(message("ValueError: a [b] c"), "ValueError: a [b] c");
        assert_eq!(message("INFO:     Started server process [7]"), "INFO:     Started server process [7]");
    }
}
