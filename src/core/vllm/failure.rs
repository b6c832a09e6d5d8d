//! Why an engine failed: a class, the line that says so, and what to do about it.
//!
//! vLLM prints the root cause early, from another process than the one that ends last, and the last line only says "see root
//! cause above". So all kept lines are searched, the telling ones first:
//! 1. that a process of the engine was killed, where no error stands before it: what breaks after it is its consequence;
//! 2. texts of vLLM and CUDA that name one situation ([`MARKS`]), in order of how much they say;
//! 3. else the first exception that is not a mere consequence of another;
//! 4. else that a process of the engine ended, for whatever reason;
//! 5. else a text of the second kind in a line that vLLM calls information or a warning: such a line may be about something
//!    that it then went around, so it counts only where no error says more;
//! 6. else the exit status.
//!
//! When the engine had been serving, old errors of single requests are in the log too: then only what follows the last sign
//! of health is searched. Texts are those of vLLM 0.22 to 0.33 (and two of 0.6); nothing here reads a clock or a file.

mod class;
mod fold;

pub use class::{FailureClass, Retryable};

use serde::{Deserialize, Serialize};

use self::fold::FOLDED;
use super::logs::{StartPhase, is_remark, message};

/// How a process ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Exit {
    /// By itself, with this status.
    Code(i32),
    /// By this signal.
    Signal(i32),
    /// It is gone and nobody could see how: it was not our child.
    Unseen,
}

impl std::fmt::Display for Exit {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Code(code) => write!(f, "exit status {code}"),
            Self::Signal(signal) => write!(f, "signal {signal}"),
            Self::Unseen => f.write_str("gone, exit status unknown"),
        }
    }
}

/// A flag whose value would have worked, in the engine's own estimate.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FlagSuggestion {
    /// The flag, without dashes.
    pub flag: String,
    /// The value.
    pub value: i64,
}

/// What is known about a failure.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Diagnosis {
    /// Its class.
    pub class: FailureClass,
    /// The line that says so, without the logger's prefix, at most [`CAUSE_MAX`] characters.
    pub cause: Option<String>,
    /// What to do.
    pub advice: String,
    /// A value that would do, when the engine named one.
    pub suggestion: Option<FlagSuggestion>,
}

/// Longest cause that is kept, characters.
pub const CAUSE_MAX: usize = 600;

impl Diagnosis {
    /// A diagnosis that no log is needed for.
    pub fn plain(class: FailureClass, cause: Option<String>) -> Self {
        let suggestion = cause.as_deref().and_then(|cause| suggested(class, cause));
        let advice = class.advice(suggestion.as_ref(), cause.as_deref());
        Self { class, cause, advice, suggestion }
    }
}

/// A text, and the class that a line with it shows. The earlier in the list, the more a text says.
const MARKS: &[(&str, FailureClass)] = &[
    ("To serve at least one request with the model's max seq len", FailureClass::KvTooSmall),
    ("larger than the maximum number of tokens that can be stored in KV cache", FailureClass::KvTooSmall),
    ("larger than the available KV cache memory", FailureClass::KvTooSmall),
    ("No available memory for the cache blocks", FailureClass::NoKvMemory),
    ("Cannot auto-fit max_model_len", FailureClass::NoKvMemory),
    ("less than desired GPU memory utilization", FailureClass::MemoryTaken),
    ("less than desired CPU memory utilization", FailureClass::MemoryTaken),
    ("Error in memory profiling", FailureClass::MemoryMoved),
    ("not enough GPU memory", FailureClass::OutOfMemoryLoading),
    ("out of memory occurred when warming up", FailureClass::OutOfMemoryWarmUp),
    ("greater than or equal to max_num_seqs", FailureClass::BadArguments),
    ("is smaller than max_model_len", FailureClass::BadArguments),
    ("is greater than the derived max_model_len", FailureClass::BadArguments),
    ("exceeds available Mamba cache blocks", FailureClass::BadArguments),
    ("No valid attention backend found for", FailureClass::BadArguments),
    ("Bfloat16 is only supported on GPUs", FailureClass::BadArguments),
    ("is greater than max_lora_rank", FailureClass::LoraRank),
    ("Address already in use", FailureClass::PortInUse),
    ("address already in use", FailureClass::PortInUse),
    ("EADDRINUSE", FailureClass::PortInUse),
    ("error: unrecognized arguments:", FailureClass::UnknownFlag),
    ("error: unexpected argument", FailureClass::UnknownFlag),
    ("error: argument ", FailureClass::BadArguments),
    ("error: the following arguments are required", FailureClass::BadArguments),
    ("Repository Not Found", FailureClass::ModelNotFound),
    ("Repo id must be", FailureClass::ModelNotFound),
    ("Repo id must use", FailureClass::ModelNotFound),
    ("is not a local folder and is not a valid model identifier", FailureClass::ModelNotFound),
    ("Invalid repository ID or local directory", FailureClass::ModelNotFound),
    ("does not appear to have a file named", FailureClass::ModelNotFound),
    ("outgoing traffic has been disabled", FailureClass::ModelNotFound),
    ("OfflineModeIsEnabled", FailureClass::ModelNotFound),
    ("We couldn't connect to", FailureClass::Network),
    ("Can't load the configuration of", FailureClass::ModelNotFound),
    ("Cannot find any model weights", FailureClass::ModelNotFound),
    ("GatedRepoError", FailureClass::ModelNotFound),
    ("LocalEntryNotFoundError", FailureClass::Network),
    ("No module named 'vllm", FailureClass::ProgramMissing),
    ("Timed out waiting for engine core", FailureClass::Timeout),
    ("OutOfMemoryError", FailureClass::OutOfMemory),
    ("CUDA out of memory", FailureClass::OutOfMemory),
    ("HIP out of memory", FailureClass::OutOfMemory),
    ("CUBLAS_STATUS_ALLOC_FAILED", FailureClass::OutOfMemory),
    ("DefaultCPUAllocator: can't allocate memory", FailureClass::OutOfMemory),
    ("CUDA error: out of memory", FailureClass::OutOfMemory),
    // Of vLLM's own allocator, of Triton, and of NCCL (`Cuda failure 2 'out of memory'`).
    ("CUDA Error: out of memory", FailureClass::OutOfMemory),
    ("Triton Error [CUDA]: out of memory", FailureClass::OutOfMemory),
    ("'out of memory'", FailureClass::OutOfMemory),
    ("CUDA error:", FailureClass::DeviceError),
    ("Failed to infer device type", FailureClass::DeviceError),
    ("Found no NVIDIA driver", FailureClass::DeviceError),
    ("NCCL error", FailureClass::DeviceError),
    ("No CUDA GPUs are available", FailureClass::DeviceError),
    ("invalid device ordinal", FailureClass::DeviceError),
    ("Unexpected error from cudaGetDeviceCount()", FailureClass::DeviceError),
    ("system not yet initialized", FailureClass::DeviceError),
    ("NVMLError", FailureClass::DeviceError),
    ("Max retries exceeded with url", FailureClass::Network),
    ("Temporary failure in name resolution", FailureClass::Network),
    // What pydantic refuses for a reason that no other text here is about.
    (FOLDED, FailureClass::BadArguments),
];

/// Texts that say that the host is not to reach any hub: then one that is not reached is no outage.
const OFFLINE: &[&str] = &["outgoing traffic has been disabled", "HF_HUB_OFFLINE", "OfflineModeIsEnabled"];

/// Exceptions that only pass on another one.
const CONSEQUENCES: &[&str] = &[
    "Engine core initialization failed",
    "EngineDeadError",
    "EngineCore encountered an issue",
    "Worker failed with error",
    "WorkerProc initialization failed",
    "Executor failed.",
    "See root cause above",
    "check the stack trace above",
    "CancelledError",
    "KeyboardInterrupt",
    "BrokenPipeError",
    "ConnectionResetError",
    "EOFError",
];

/// What an API server says when a signal told it to end, or its engine core where it says nothing (0.22).
const TOLD_TO_END: &[&str] = &["API server: shutdown triggered", "Shutdown initiated (timeout="];

/// Lines that a living engine prints: what stands before the last one is history.
const HEALTHY: &[&str] = &["Avg prompt throughput:", "HTTP/1.1\" 200", "Application startup complete"];

/// Diagnoses an end from the log's last lines (oldest first), the exit and the phase the start had reached.
///
/// `phase` is [`StartPhase::Serving`] for an engine that had been ready.
pub fn diagnose<S: AsRef<str>>(lines: &[S], exit: Option<Exit>, phase: StartPhase) -> Diagnosis {
    let lines = &fold::folded(lines)[..];
    let served = phase == StartPhase::Serving;
    if served && let Some(line) = told_to_end(lines) {
        return Diagnosis::plain(FailureClass::Killed, Some(clipped(line)));
    }
    let from = if served { after_health(lines) } else { 0 };
    // The error itself may have come just before the last line of health: another request's answer, or a probe's.
    let killed = killed(lines, served).map(|line| (FailureClass::Killed, line));
    let found = killed.or_else(|| telling(&lines[from..])).or_else(|| match served && crashed(lines) {
        true => marked_last(lines)
            .or_else(|| exception_last(lines).or_else(|| died(lines)).map(|line| (FailureClass::EngineFailed, line))),
        false => None,
    });
    let class = match (&found, exit) {
        (Some((FailureClass::OutOfMemory, _)), _) => out_of_memory_in(phase),
        (Some((FailureClass::Network, _)), _) if is_offline(lines) => FailureClass::ModelNotFound,
        // What keeps an engine from starting is not what one that had started died of, but a request that was refused.
        (Some((class, _)), _)
            if served && (*class == FailureClass::EngineFailed || class.retry() == Retryable::Never) =>
        {
            FailureClass::EngineDied
        }
        // argparse ends with 2 and says what is wrong in a line of its own.
        (Some((FailureClass::EngineFailed, _)) | None, Some(Exit::Code(2))) if !served => FailureClass::BadArguments,
        (Some((class, _)), _) => *class,
        // Nobody but the system sends this one unasked; our own stops are not diagnosed.
        (None, Some(Exit::Signal(9) | Exit::Code(137))) => FailureClass::Killed,
        (None, Some(Exit::Code(126 | 127))) => FailureClass::ProgramMissing,
        (None, Some(_)) if served => FailureClass::EngineDied,
        (None, _) => FailureClass::EngineFailed,
    };
    // Read from the whole line: what is kept of it may end before the number.
    let suggestion = found.and_then(|(_, line)| suggested(class, line));
    let cause = found.map(|(_, line)| clipped(line)).or_else(|| last_words(lines));
    Diagnosis { class, advice: class.advice(suggestion.as_ref(), cause.as_deref()), cause, suggestion }
}

/// Where the lines begin that follow the last sign of health.
fn after_health<S: AsRef<str>>(lines: &[S]) -> usize {
    let healthy = |line: &S| HEALTHY.iter().any(|mark| line.as_ref().contains(mark));
    lines.iter().rposition(healthy).map_or(0, |at| at + 1)
}

fn is_offline<S: AsRef<str>>(lines: &[S]) -> bool {
    lines.iter().any(|line| OFFLINE.iter().any(|mark| line.as_ref().contains(mark)))
}

/// The line that says that a process of the engine got SIGKILL, unless an error before it says more.
fn killed<S: AsRef<str>>(lines: &[S], served: bool) -> Option<&str> {
    let at = lines.iter().rposition(|line| is_kill(message(line.as_ref())))?;
    let before = &lines[if served { after_health(&lines[..at]) } else { 0 }..at];
    (errors(before).is_none() && exception(before).is_none()).then(|| message(lines[at].as_ref()))
}

/// `Worker proc VllmWorker-1 died unexpectedly (exit code: -9)`, `Process ApiServer_1 (PID: 7) died with exit code -9`,
/// `Failed core proc(s): {'EngineCore': -9}`.
fn is_kill(text: &str) -> bool {
    let died = text.contains("died ") && (text.contains("exit code: -9)") || text.ends_with("exit code -9"));
    died || text.contains("Failed ") && text.contains(" proc(s): {") && text.contains("': -9")
}

/// The line that says that a signal ended a healthy server, if one did: what breaks after it is its consequence.
fn told_to_end<S: AsRef<str>>(lines: &[S]) -> Option<&str> {
    let at = lines.iter().position(|line| TOLD_TO_END.iter().any(|mark| line.as_ref().contains(mark)))?;
    (!crashed(&lines[..at])).then(|| message(lines[at].as_ref()))
}

/// The line that says most, and its class.
fn telling<S: AsRef<str>>(lines: &[S]) -> Option<(FailureClass, &str)> {
    let unnamed = || exception(lines).or_else(|| died(lines)).map(|line| (FailureClass::EngineFailed, line));
    errors(lines).or_else(unnamed).or_else(|| marked(lines.iter().map(AsRef::as_ref)))
}

/// The most telling line of those that are no remarks.
fn errors<S: AsRef<str>>(lines: &[S]) -> Option<(FailureClass, &str)> {
    marked(lines.iter().map(AsRef::as_ref).filter(|line| !is_remark(line)))
}

/// The first line that says that a process of the engine ended.
fn died<S: AsRef<str>>(lines: &[S]) -> Option<&str> {
    lines.iter().map(|line| message(line.as_ref())).find(|text| text.contains("died unexpectedly"))
}

/// The most telling line, and its class; of equally telling ones the first.
fn marked<'l>(lines: impl Iterator<Item = &'l str> + Clone) -> Option<(FailureClass, &'l str)> {
    MARKS.iter().find_map(|(mark, class)| {
        let line = lines.clone().map(message).find(|text| is_said(text, mark));
        line.map(|line| (*class, line))
    })
}

/// The last line that a mark is on.
fn marked_last<S: AsRef<str>>(lines: &[S]) -> Option<(FailureClass, &str)> {
    let errors = lines.iter().rev().map(AsRef::as_ref).filter(|line| !is_remark(line));
    errors.map(message).find_map(|text| {
        let (_, class) = MARKS.iter().find(|(mark, _)| is_said(text, mark))?;
        Some((*class, text))
    })
}

/// Whether a line says it, and does not quote source code, warn of it or try again.
fn is_said(text: &str, mark: &str) -> bool {
    let passing = ["This can cause", "thrown while requesting", "Retrying in"];
    text.contains(mark) && !text.starts_with("    ") && !passing.iter().any(|words| text.contains(words))
}

fn exceptions<S: AsRef<str>>(lines: &[S]) -> impl DoubleEndedIterator<Item = &str> {
    let texts = lines.iter().map(AsRef::as_ref).filter(|line| !is_remark(line)).map(message);
    texts.filter(|text| is_exception(text) && !CONSEQUENCES.iter().any(|mark| text.contains(mark)))
}

fn exception<S: AsRef<str>>(lines: &[S]) -> Option<&str> {
    exceptions(lines).next()
}

fn exception_last<S: AsRef<str>>(lines: &[S]) -> Option<&str> {
    exceptions(lines).next_back()
}

/// Whether the log says that the engine itself broke.
fn crashed<S: AsRef<str>>(lines: &[S]) -> bool {
    lines.iter().any(|line| {
        let line = line.as_ref();
        line.contains("EngineDeadError")
            || line.contains("EngineCore encountered")
            || line.contains("died unexpectedly")
    })
}

/// The last line of a traceback: a dotted name that ends in Error or Exception (or is one of the few that do not), then a
/// colon or nothing.
fn is_exception(text: &str) -> bool {
    let name = text.split(':').next().unwrap_or_default();
    let last = name.rsplit('.').next().unwrap_or_default();
    let named = last.ends_with("Error") || last.ends_with("Exception") || last.ends_with("Interrupt");
    let named = named || last == "OutOfResources" || last.contains("Error_");
    named && !name.is_empty() && name.chars().all(|letter| letter.is_alphanumeric() || matches!(letter, '.' | '_'))
}

fn out_of_memory_in(phase: StartPhase) -> FailureClass {
    match phase {
        StartPhase::Launching | StartPhase::Configuring | StartPhase::EngineStarting | StartPhase::LoadingWeights => {
            FailureClass::OutOfMemoryLoading
        }
        StartPhase::Compiling | StartPhase::SizingKvCache => FailureClass::OutOfMemoryWarmUp,
        StartPhase::CapturingGraphs | StartPhase::OpeningHttp => FailureClass::OutOfMemoryGraphs,
        StartPhase::Serving => FailureClass::OutOfMemoryServing,
    }
}

fn clipped(line: &str) -> String {
    let line = line.trim();
    let line = line.strip_prefix(FOLDED).unwrap_or(line);
    match line.char_indices().nth(CAUSE_MAX) {
        Some((at, _)) => format!("{}…", &line[..at]),
        None => line.to_owned(),
    }
}

/// The first exception of any kind, else the last line that is not empty: better than nothing.
fn last_words<S: AsRef<str>>(lines: &[S]) -> Option<String> {
    let mut texts = lines.iter().map(|line| message(line.as_ref()));
    let passed_on = texts.clone().find(|text| is_exception(text));
    passed_on.or_else(|| texts.rfind(|text| !text.trim().is_empty())).map(clipped)
}

/// The value that the engine says would fit: a text that stands before it, and the flag that it is of.
fn suggested(class: FailureClass, cause: &str) -> Option<FlagSuggestion> {
    let texts: &[(&str, &str)] = match class {
        // 0.33: "the estimated maximum model length is 80272."; 0.6: "stored in KV cache (17072)."
        FailureClass::KvTooSmall => {
            &[("estimated maximum model length is ", "max-model-len"), ("stored in KV cache (", "max-model-len")]
        }
        // "(max_position_embeddings=131072.0 or ..."; the name of the key differs.
        FailureClass::BadArguments => &[
            ("Mamba cache blocks (", "max-num-seqs"),
            ("derived max_model_len (max_position_embeddings=", "max-model-len"),
        ],
        _ => return None,
    };
    let found = texts.iter().find_map(|(text, flag)| Some((cause.split_once(text)?.1, flag)));
    let (rest, flag) = found?;
    let digits: String = rest.chars().take_while(|c| c.is_ascii_digit() || *c == ',').filter(|c| *c != ',').collect();
    let value = digits.parse().ok().filter(|value| *value > 0)?;
    Some(FlagSuggestion { flag: (*flag).to_owned(), value })
}

#[cfg(test)]
mod tests;
