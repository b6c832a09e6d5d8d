//! Diagnoses the end of an engine from its log.
//!
//! [`LogRules`] has the texts of one kind of engine. This file has the texts of vLLM, and the texts
//! of libraries that other engines use too.
//!
//! vLLM prints the root cause early, from another process than the one that ends last; the last
//! line only says "see root cause above". So all kept lines are searched, in this order:
//! 1. a line which shows that a signal ended a healthy server, or that a process of the engine was
//!    killed, unless an error precedes it: later errors are consequences;
//! 2. messages of vLLM and CUDA that name one situation ([`PATTERNS`]), the most specific first;
//! 3. the first exception that is not a mere consequence of another one;
//! 4. a line which shows that a process of the engine ended, for any reason;
//! 5. a message of kind 2 at level information or warning, which comes late because vLLM may have
//!    worked around the problem;
//! 6. the exit status.

use serde::{Deserialize, Serialize};

use super::advice::advice;
use super::class::{FailureClass, Retryable};
use super::fold::{self, FOLDED};
use super::suggestion::FlagSuggestion;
use crate::vllm::logs::{FORM, LogForm, StartPhase};

/// How a process ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Exit {
    /// By itself, with this status.
    Code(i32),
    /// By this signal.
    Signal(i32),
    /// The process is gone. Its status could not be read because it was not a child of this
    /// process.
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

/// The diagnosis of a failure.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Diagnosis {
    /// The class of the failure.
    pub class: FailureClass,
    /// The line that shows the failure, without the logger's prefix, at most [`CAUSE_MAX`]
    /// characters.
    pub cause: Option<String>,
    /// Advice for the operator.
    pub advice: String,
    /// A flag value that would work, if the engine named one.
    pub suggestion: Option<FlagSuggestion>,
}

/// Longest cause that is kept, characters.
pub const CAUSE_MAX: usize = 600;

impl Diagnosis {
    /// A diagnosis that does not need a log.
    pub fn plain(class: FailureClass, cause: Option<String>) -> Self {
        LOG.plain(class, cause)
    }
}

/// How the log of one kind of engine shows failures.
#[derive(Debug)]
pub struct LogRules {
    /// The form of the lines.
    pub form: LogForm,
    /// Texts, each with the class of a line that contains it, searched before [`PATTERNS`]. The
    /// most specific texts come first.
    pub failures: &'static [(&'static str, FailureClass)],
    /// Texts of lines that a healthy engine prints. An error before the last such line did not end
    /// the engine, unless the log shows a crash.
    pub healthy: &'static [&'static str],
    /// Texts of lines that the engine prints when a signal ends it.
    pub shutdown: &'static [&'static str],
    /// Texts of lines which show that the engine failed, not only a request.
    pub crashes: &'static [&'static str],
    /// Advice in the words of the engine's flags, in place of the advice for vLLM.
    pub advice: &'static [(FailureClass, &'static str)],
}

/// The rules of vLLM's log.
pub const LOG: LogRules = LogRules {
    form: FORM,
    failures: &[],
    healthy: &["Avg prompt throughput:", "HTTP/1.1\" 200", "Application startup complete"],
    // The API server (in 0.22 the engine core) prints them.
    shutdown: &["API server: shutdown triggered", "Shutdown initiated (timeout="],
    crashes: &["EngineDeadError", "EngineCore encountered", "died unexpectedly"],
    advice: &[],
};

impl LogRules {
    /// The patterns in the order in which they are searched.
    fn patterns(&self) -> impl Iterator<Item = &'static (&'static str, FailureClass)> + Clone {
        self.failures.iter().chain(PATTERNS)
    }

    /// A diagnosis that does not need a log.
    pub fn plain(&self, class: FailureClass, cause: Option<String>) -> Diagnosis {
        let suggestion = cause.as_deref().and_then(|cause| FlagSuggestion::read(class, cause));
        let advice = self.advice(class, suggestion.as_ref(), cause.as_deref());
        Diagnosis { class, cause, advice, suggestion }
    }

    fn advice(&self, class: FailureClass, suggestion: Option<&FlagSuggestion>, cause: Option<&str>) -> String {
        let own = self.advice.iter().find(|(of, _)| *of == class).map(|(_, advice)| (*advice).to_owned());
        own.unwrap_or_else(|| advice(class, suggestion, cause))
    }

    fn message<'l>(&self, line: &'l str) -> &'l str {
        (self.form.message)(line)
    }

    fn is_remark(&self, line: &str) -> bool {
        (self.form.is_remark)(line)
    }
}

/// Texts, each with the class of a line that contains it; the most specific come first. They are
/// messages of vLLM 0.22 to 0.33, two of 0.6, and messages of PyTorch, CUDA and the model hub.
const PATTERNS: &[(&str, FailureClass)] = &[
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
    // Texts of vLLM's allocator, of Triton, and of NCCL (`Cuda failure 2 'out of memory'`).
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
    // A refusal of pydantic that matches no text above.
    (FOLDED, FailureClass::BadArguments),
];

/// Texts which show that the host must not use a model hub. An unreachable hub is then not an
/// outage of the network.
const OFFLINE: &[&str] = &["outgoing traffic has been disabled", "HF_HUB_OFFLINE", "OfflineModeIsEnabled"];

/// The beginning of the message with which an API server answers requests after the engine core has
/// died.
pub const CORE_DIED: &str = "EngineCore encountered an issue";

/// Texts of exceptions that only pass on another exception.
const CONSEQUENCES: &[&str] = &[
    "Engine core initialization failed",
    "EngineDeadError",
    CORE_DIED,
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

/// Diagnoses an end from the last lines of the log (oldest first), the exit and the phase that the
/// start had reached.
///
/// `phase` is [`StartPhase::Serving`] for an engine that had been ready. Its log also contains
/// errors of single requests, so lines after the last sign of health are searched first.
pub fn diagnose<S: AsRef<str>>(lines: &[S], exit: Option<Exit>, phase: StartPhase) -> Diagnosis {
    diagnose_by(&LOG, lines, exit, phase)
}

/// [`diagnose`] for an engine with these rules.
pub fn diagnose_by<S: AsRef<str>>(rules: &LogRules, lines: &[S], exit: Option<Exit>, phase: StartPhase) -> Diagnosis {
    let lines = &fold::folded(lines)[..];
    let served = phase == StartPhase::Serving;
    if served && let Some(line) = shutdown_line(rules, lines) {
        return rules.plain(FailureClass::Killed, Some(clipped(line)));
    }
    let from = if served { after_health(rules, lines) } else { 0 };
    // A healthy line may follow the fatal error: the engine may still answer a request or a probe.
    // So if the log shows a crash, all lines are searched, from the last.
    let killed = killed(rules, lines, served).map(|line| (FailureClass::Killed, line));
    let found =
        killed.or_else(|| most_specific(rules, &lines[from..])).or_else(|| match served && crashed(rules, lines) {
            true => last_match(rules, lines).or_else(|| {
                exception_last(rules, lines)
                    .or_else(|| died(rules, lines))
                    .map(|line| (FailureClass::EngineFailed, line))
            }),
            false => None,
        });
    let class = match (&found, exit) {
        (Some((FailureClass::OutOfMemory, _)), _) => out_of_memory_in(phase),
        (Some((FailureClass::Network, _)), _) if is_offline(lines) => FailureClass::ModelNotFound,
        // An error of a kind that prevents a start cannot have ended an engine that had started. It
        // belongs to a refused request.
        (Some((class, _)), _)
            if served && (*class == FailureClass::EngineFailed || class.retry() == Retryable::Never) =>
        {
            FailureClass::EngineDied
        }
        // argparse exits with status 2 and prints the reason in a separate line.
        (Some((FailureClass::EngineFailed, _)) | None, Some(Exit::Code(2))) if !served => FailureClass::BadArguments,
        (Some((class, _)), _) => *class,
        // This is usually the OOM killer, because the gateway does not diagnose ends that it caused
        // itself.
        (None, Some(Exit::Signal(9) | Exit::Code(137))) => FailureClass::Killed,
        (None, Some(Exit::Code(126 | 127))) => FailureClass::ProgramMissing,
        (None, Some(_)) if served => FailureClass::EngineDied,
        (None, _) => FailureClass::EngineFailed,
    };
    // The suggestion is read from the whole line, because the clipped cause may end before the
    // number.
    let suggestion = found.and_then(|(_, line)| FlagSuggestion::read(class, line));
    let cause = found.map(|(_, line)| clipped(line)).or_else(|| match (class, exit) {
        // The last log line has nothing to do with a signal from outside.
        (FailureClass::Killed, Some(exit)) => Some(exit.to_string()),
        _ => fallback_cause(rules, lines),
    });
    Diagnosis { class, advice: rules.advice(class, suggestion.as_ref(), cause.as_deref()), cause, suggestion }
}

/// The index of the first line after the last sign of health.
fn after_health<S: AsRef<str>>(rules: &LogRules, lines: &[S]) -> usize {
    let healthy = |line: &S| rules.healthy.iter().any(|mark| line.as_ref().contains(mark));
    lines.iter().rposition(healthy).map_or(0, |at| at + 1)
}

fn is_offline<S: AsRef<str>>(lines: &[S]) -> bool {
    lines.iter().any(|line| OFFLINE.iter().any(|mark| line.as_ref().contains(mark)))
}

/// The line which shows that a process of the engine got SIGKILL, unless an error precedes it.
fn killed<'l, S: AsRef<str>>(rules: &LogRules, lines: &'l [S], served: bool) -> Option<&'l str> {
    let at = lines.iter().rposition(|line| is_kill(rules.message(line.as_ref())))?;
    let before = &lines[if served { after_health(rules, &lines[..at]) } else { 0 }..at];
    (errors(rules, before).is_none() && exception(rules, before).is_none()).then(|| rules.message(lines[at].as_ref()))
}

/// Whether a line shows the death of a process by SIGKILL: `Worker proc VllmWorker-1 died
/// unexpectedly (exit code: -9)`, `Process ApiServer_1 (PID: 7) died with exit code -9`, and
/// `Failed core proc(s): {'EngineCore': -9}`.
fn is_kill(text: &str) -> bool {
    let died = text.contains("died ") && (text.contains("exit code: -9)") || text.ends_with("exit code -9"));
    died || text.contains("Failed ") && text.contains(" proc(s): {") && text.contains("': -9")
}

/// The line which shows that a signal ended a healthy server, if one did. Later errors are
/// consequences of the signal.
fn shutdown_line<'l, S: AsRef<str>>(rules: &LogRules, lines: &'l [S]) -> Option<&'l str> {
    let at = lines.iter().position(|line| rules.shutdown.iter().any(|mark| line.as_ref().contains(mark)))?;
    (!crashed(rules, &lines[..at])).then(|| rules.message(lines[at].as_ref()))
}

/// The line that shows the failure most specifically, with its class.
fn most_specific<'l, S: AsRef<str>>(rules: &LogRules, lines: &'l [S]) -> Option<(FailureClass, &'l str)> {
    let unclassified =
        || exception(rules, lines).or_else(|| died(rules, lines)).map(|line| (FailureClass::EngineFailed, line));
    errors(rules, lines).or_else(unclassified).or_else(|| best_match(rules, lines.iter().map(AsRef::as_ref)))
}

/// The most specific line at a level above warning.
fn errors<'l, S: AsRef<str>>(rules: &LogRules, lines: &'l [S]) -> Option<(FailureClass, &'l str)> {
    best_match(rules, lines.iter().map(AsRef::as_ref).filter(|line| !rules.is_remark(line)))
}

/// The first line which shows that a process of the engine ended.
fn died<'l, S: AsRef<str>>(rules: &LogRules, lines: &'l [S]) -> Option<&'l str> {
    lines.iter().map(|line| rules.message(line.as_ref())).find(|text| text.contains("died unexpectedly"))
}

/// The most specific line that contains a known text, and its class. Of equally specific lines, the
/// first.
fn best_match<'l>(rules: &LogRules, lines: impl Iterator<Item = &'l str> + Clone) -> Option<(FailureClass, &'l str)> {
    rules.patterns().find_map(|(mark, class)| {
        let line = lines.clone().map(|line| rules.message(line)).find(|text| reports(text, mark));
        line.map(|line| (*class, line))
    })
}

/// The last line that contains a known text, and the class of the text.
fn last_match<'l, S: AsRef<str>>(rules: &LogRules, lines: &'l [S]) -> Option<(FailureClass, &'l str)> {
    let errors = lines.iter().rev().map(AsRef::as_ref).filter(|line| !rules.is_remark(line));
    errors.map(|line| rules.message(line)).find_map(|text| {
        let (_, class) = rules.patterns().find(|(mark, _)| reports(text, mark))?;
        Some((*class, text))
    })
}

/// Whether a line reports the text as a failure. A quote of source code, a warning and the
/// announcement of a retry do not.
fn reports(text: &str, mark: &str) -> bool {
    let passing = ["This can cause", "thrown while requesting", "Retrying in"];
    text.contains(mark) && !text.starts_with("    ") && !passing.iter().any(|words| text.contains(words))
}

fn exceptions<'l, S: AsRef<str>>(rules: &LogRules, lines: &'l [S]) -> impl DoubleEndedIterator<Item = &'l str> {
    let texts = lines.iter().map(AsRef::as_ref).filter(|line| !rules.is_remark(line)).map(|line| rules.message(line));
    texts.filter(|text| is_exception(text) && !CONSEQUENCES.iter().any(|mark| text.contains(mark)))
}

fn exception<'l, S: AsRef<str>>(rules: &LogRules, lines: &'l [S]) -> Option<&'l str> {
    exceptions(rules, lines).next()
}

fn exception_last<'l, S: AsRef<str>>(rules: &LogRules, lines: &'l [S]) -> Option<&'l str> {
    exceptions(rules, lines).next_back()
}

/// Whether the log shows that the engine failed, not only a request.
fn crashed<S: AsRef<str>>(rules: &LogRules, lines: &[S]) -> bool {
    lines.iter().any(|line| rules.crashes.iter().any(|mark| line.as_ref().contains(mark)))
}

/// Whether the text is the last line of a traceback: a dotted name that ends in Error, Exception or
/// Interrupt (or one of the few other names), then a colon or nothing.
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
    if line.chars().nth(CAUSE_MAX).is_none() {
        return line.to_owned();
    }
    // The ellipsis is one of the characters.
    line.chars().take(CAUSE_MAX - 1).chain(['…']).collect()
}

/// The first exception of any kind, else the last line that is not empty.
fn fallback_cause<S: AsRef<str>>(rules: &LogRules, lines: &[S]) -> Option<String> {
    let mut texts = lines.iter().map(|line| rules.message(line.as_ref()));
    let passed_on = texts.clone().find(|text| is_exception(text));
    passed_on.or_else(|| texts.rfind(|text| !text.trim().is_empty())).map(clipped)
}
