//! The classes of failure, what to do about each, and whether trying again can help.
//!
//! A class is an answer to "what do I change?", so two texts with the same remedy share one. The names are stable: they
//! stand in journals, in the admin API and on metrics.

use serde::{Deserialize, Serialize};

use super::FlagSuggestion;

/// What kind of failure it was.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FailureClass {
    /// The KV cache cannot hold one request of the longest length.
    KvTooSmall,
    /// After weights and activations nothing is left for the KV cache.
    NoKvMemory,
    /// The device has less free memory than asked for: something else holds it.
    MemoryTaken,
    /// Free memory changed while it was measured: something else started or ended.
    MemoryMoved,
    /// Out of memory while weights were loaded.
    OutOfMemoryLoading,
    /// Out of memory while memory was measured or the sampler warmed up.
    OutOfMemoryWarmUp,
    /// Out of memory while graphs were captured.
    OutOfMemoryGraphs,
    /// Out of memory while requests were served.
    OutOfMemoryServing,
    /// Out of memory; the log does not say when.
    OutOfMemory,
    /// The device or its driver failed, or is not there.
    DeviceError,
    /// Somebody else listens on the port.
    PortInUse,
    /// A flag that this vLLM does not have (any more).
    UnknownFlag,
    /// Flags or values that it refuses.
    BadArguments,
    /// The model's folder or name leads nowhere.
    ModelNotFound,
    /// The model's hub could not be reached.
    Network,
    /// An adapter's rank is above `--max-lora-rank`.
    LoraRank,
    /// The engine did not start, for the reason in the cause.
    EngineFailed,
    /// The engine ended while it was serving.
    EngineDied,
    /// No progress for longer than the phase allows.
    Timeout,
    /// Killed from outside, most likely by the system for want of host memory.
    Killed,
    /// The program cannot be run.
    ProgramMissing,
    /// Somebody else's server answers on the port.
    WrongEngine,
    /// It serves, but not the models or adapters that are expected of it.
    WrongModels,
    /// A process of the engine outlived SIGKILL, or could not be signalled.
    WontDie,
    /// The processes are gone but the device's memory did not come back.
    MemoryKept,
    /// A command of the user's failed.
    CommandFailed,
    /// The engine is not ours to start or stop.
    NotOurs,
}

/// Whether the same settings may succeed later.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Retryable {
    /// No: it fails again until something is changed.
    Never,
    /// Perhaps: wait, and try again within the budget.
    Later,
}

impl FailureClass {
    /// All of them.
    pub const ALL: [Self; 27] = [
        Self::KvTooSmall,
        Self::NoKvMemory,
        Self::MemoryTaken,
        Self::MemoryMoved,
        Self::OutOfMemoryLoading,
        Self::OutOfMemoryWarmUp,
        Self::OutOfMemoryGraphs,
        Self::OutOfMemoryServing,
        Self::OutOfMemory,
        Self::DeviceError,
        Self::PortInUse,
        Self::UnknownFlag,
        Self::BadArguments,
        Self::ModelNotFound,
        Self::Network,
        Self::LoraRank,
        Self::EngineFailed,
        Self::EngineDied,
        Self::Timeout,
        Self::Killed,
        Self::ProgramMissing,
        Self::WrongEngine,
        Self::WrongModels,
        Self::WontDie,
        Self::MemoryKept,
        Self::CommandFailed,
        Self::NotOurs,
    ];

    /// For journals, metrics and the admin API: the name in snake_case.
    pub fn label(self) -> &'static str {
        match self {
            Self::KvTooSmall => "kv_too_small",
            Self::NoKvMemory => "no_kv_memory",
            Self::MemoryTaken => "memory_taken",
            Self::MemoryMoved => "memory_moved",
            Self::OutOfMemoryLoading => "out_of_memory_loading",
            Self::OutOfMemoryWarmUp => "out_of_memory_warm_up",
            Self::OutOfMemoryGraphs => "out_of_memory_graphs",
            Self::OutOfMemoryServing => "out_of_memory_serving",
            Self::OutOfMemory => "out_of_memory",
            Self::DeviceError => "device_error",
            Self::PortInUse => "port_in_use",
            Self::UnknownFlag => "unknown_flag",
            Self::BadArguments => "bad_arguments",
            Self::ModelNotFound => "model_not_found",
            Self::Network => "network",
            Self::LoraRank => "lora_rank",
            Self::EngineFailed => "engine_failed",
            Self::EngineDied => "engine_died",
            Self::Timeout => "timeout",
            Self::Killed => "killed",
            Self::ProgramMissing => "program_missing",
            Self::WrongEngine => "wrong_engine",
            Self::WrongModels => "wrong_models",
            Self::WontDie => "wont_die",
            Self::MemoryKept => "memory_kept",
            Self::CommandFailed => "command_failed",
            Self::NotOurs => "not_ours",
        }
    }

    /// Whether the same settings may succeed later.
    pub fn retry(self) -> Retryable {
        match self {
            Self::KvTooSmall
            | Self::NoKvMemory
            | Self::OutOfMemoryLoading
            | Self::OutOfMemoryWarmUp
            | Self::OutOfMemoryGraphs
            | Self::UnknownFlag
            | Self::BadArguments
            | Self::ModelNotFound
            | Self::LoraRank
            | Self::ProgramMissing
            | Self::WrongModels
            | Self::NotOurs => Retryable::Never,
            Self::MemoryTaken
            | Self::MemoryMoved
            | Self::OutOfMemoryServing
            | Self::OutOfMemory
            | Self::DeviceError
            | Self::PortInUse
            | Self::Network
            | Self::EngineFailed
            | Self::EngineDied
            | Self::Timeout
            | Self::Killed
            | Self::WrongEngine
            | Self::WontDie
            | Self::MemoryKept
            | Self::CommandFailed => Retryable::Later,
        }
    }

    /// What to do, in one sentence; `cause`: the line that says what happened.
    pub(super) fn advice(self, suggestion: Option<&FlagSuggestion>, cause: Option<&str>) -> String {
        let says = |text: &str| cause.is_some_and(|cause| cause.contains(text));
        let advice = match self {
            Self::KvTooSmall => match suggestion {
                Some(FlagSuggestion { flag, value }) => {
                    return format!(
                        "set {flag} to {value} or less, or give the engine more memory (gpu-memory-utilization; \
                         on a CPU VLLM_CPU_KVCACHE_SPACE)"
                    );
                }
                None => "lower max-model-len, or raise gpu-memory-utilization",
            },
            Self::NoKvMemory => {
                "raise gpu-memory-utilization, lower max-num-batched-tokens or max-num-seqs, or use more devices \
                 (tensor-parallel-size)"
            }
            Self::MemoryTaken => {
                "something else holds memory of this device: end it (nvidia-smi lists it), choose another gpu, or lower \
                 gpu-memory-utilization"
            }
            Self::MemoryMoved => {
                "another process on this device started or ended meanwhile: start engines of one device one after the other"
            }
            Self::OutOfMemoryLoading => {
                "the weights do not fit: use more devices (tensor-parallel-size), quantization, or a larger device"
            }
            Self::OutOfMemoryWarmUp => "lower max-num-seqs or max-num-batched-tokens, or gpu-memory-utilization",
            Self::OutOfMemoryGraphs => {
                "lower gpu-memory-utilization or max-num-seqs, or capture fewer graphs (cudagraph-capture-sizes)"
            }
            Self::OutOfMemoryServing => {
                "lower gpu-memory-utilization by 0.02 to 0.05, or max-num-batched-tokens; it is restarted meanwhile"
            }
            Self::OutOfMemory => "lower gpu-memory-utilization, max-num-seqs or max-num-batched-tokens",
            Self::DeviceError => "look at the device (nvidia-smi, dmesg) and at `gpu` of this backend",
            // Engines open more ports than the one that they serve on.
            Self::PortInUse if says("ZMQError") || says("tcp://") => {
                "the port is one that the engine opens besides its own: give kv-events-config another endpoint (each \
                 engine of a host needs one), or data-parallel-rpc-port another port, or end what holds it"
            }
            Self::PortInUse if says("EADDRINUSE") || says("DistNetworkError") || says("server socket has failed") => {
                "the port is one that the engine's processes talk over: give master-port another port, or VLLM_PORT in \
                 the engine's environment, or end what holds it"
            }
            Self::PortInUse => "end what listens on the port, or give the backend another one",
            Self::UnknownFlag => "remove the flag: this vLLM does not have it (see `vllm serve --help=all`)",
            Self::BadArguments => match suggestion {
                Some(FlagSuggestion { flag, value }) => return format!("set {flag} to {value} or less"),
                None => "correct the arguments that the cause names",
            },
            Self::ModelNotFound => {
                "check the model's path or name, and that this host may read or download it (HF_TOKEN, HF_HUB_OFFLINE)"
            }
            Self::Network => {
                "see whether this host reaches the model's hub (proxy, DNS, HF_ENDPOINT), or download the model and give \
                 its folder; it is tried again meanwhile"
            }
            Self::LoraRank => "raise max-lora-rank to the adapter's rank and restart, or do not load the adapter",
            Self::EngineFailed => "see the cause and the engine's log",
            Self::EngineDied => "see the cause and the engine's log; it is restarted within its budget",
            Self::Timeout => "see what the log last said; give the start more time if it was working",
            Self::Killed => "look for the OOM killer (dmesg) and give the host more memory, or find who killed it",
            Self::ProgramMissing => "install the program or correct launch.command; PATH is that of the gateway",
            Self::WrongEngine => "end the server that holds the port, or give the backend another one",
            Self::WrongModels => "make served-model-name and lora-modules agree with the pool's models",
            Self::WontDie => {
                "a process is stuck in the driver: nothing new is started on its device; a reboot may be needed"
            }
            Self::MemoryKept => {
                "see nvidia-smi for who holds it; nothing new is started on this device until it is back"
            }
            Self::CommandFailed => "run the command by hand and correct it",
            Self::NotOurs => {
                "restart it where it runs, or give the backend `launch` or `control` instead of a bare url"
            }
        };
        advice.to_owned()
    }
}

impl std::fmt::Display for FailureClass {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.label())
    }
}
