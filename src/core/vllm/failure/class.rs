//! The classes of failure: what to do about each, and whether a retry can help.
//!
//! A class answers "what must be changed?", so two error messages with the same remedy share a
//! class. The labels are stable: journals, the admin API and metrics contain them.

use serde::{Deserialize, Serialize};

/// Whether the same settings may succeed later.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Retryable {
    /// No: the start fails again until the operator changes something.
    Never,
    /// Possibly: wait, and try again within the restart budget.
    Later,
}

/// The table of classes. Each entry: doc comment, name, label, whether a retry can help, advice.
macro_rules! classes {
    ($($(#[doc = $doc:literal])+ $name:ident $label:literal $retry:ident $advice:literal)+) => {
        /// The kind of a failure.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
        #[serde(rename_all = "snake_case")]
        pub enum FailureClass {
            $($(#[doc = $doc])+ $name,)+
        }

        impl FailureClass {
            /// All classes.
            pub const ALL: &[Self] = &[$(Self::$name),+];

            /// For journals, metrics and the admin API: the name in snake_case.
            pub fn label(self) -> &'static str {
                match self { $(Self::$name => $label,)+ }
            }

            /// Whether the same settings may succeed later.
            pub fn retry(self) -> Retryable {
                match self { $(Self::$name => Retryable::$retry,)+ }
            }

            /// The advice if the log shows no more than the class.
            pub(super) fn general_advice(self) -> &'static str {
                match self { $(Self::$name => $advice,)+ }
            }
        }
    };
}

classes! {
    /// The KV cache cannot hold one request of the maximum length.
    KvTooSmall "kv_too_small" Never
        "lower max-model-len, or raise gpu-memory-utilization"
    /// No memory is left for the KV cache after weights and activations.
    NoKvMemory "no_kv_memory" Never
        "raise gpu-memory-utilization, lower max-num-batched-tokens or max-num-seqs, or use more devices \
         (tensor-parallel-size)"
    /// The device has less free memory than requested: another process uses it.
    MemoryTaken "memory_taken" Later
        "another process uses memory of this device: stop it (nvidia-smi lists it), choose another gpu, or lower \
         gpu-memory-utilization"
    /// Free memory changed while the engine measured it: another process started or ended.
    MemoryMoved "memory_moved" Later
        "another process on this device started or ended during the start: start engines on the same device one at a time"
    /// Out of memory while loading weights.
    OutOfMemoryLoading "out_of_memory_loading" Never
        "the weights do not fit: use more devices (tensor-parallel-size), quantization, or a device with more memory"
    /// Out of memory while measuring memory or warming up the sampler.
    OutOfMemoryWarmUp "out_of_memory_warm_up" Never
        "lower max-num-seqs, max-num-batched-tokens or gpu-memory-utilization"
    /// Out of memory while capturing graphs.
    OutOfMemoryGraphs "out_of_memory_graphs" Never
        "lower gpu-memory-utilization or max-num-seqs, or capture fewer graphs (cudagraph-capture-sizes)"
    /// Out of memory while serving requests.
    OutOfMemoryServing "out_of_memory_serving" Later
        "the engine is restarted with the same settings; to prevent it, lower gpu-memory-utilization by 0.02 to 0.05, or \
         lower max-num-batched-tokens"
    /// Out of memory; the log does not show in which phase.
    OutOfMemory "out_of_memory" Later
        "lower gpu-memory-utilization, max-num-seqs or max-num-batched-tokens"
    /// The device or its driver failed, or there is no such device.
    DeviceError "device_error" Later
        "check the device with nvidia-smi and dmesg, and check `gpu` of this backend"
    /// Another process listens on the port.
    PortInUse "port_in_use" Later
        "stop the process that listens on the port, or configure another port for this backend"
    /// A flag that this version of vLLM does not have.
    UnknownFlag "unknown_flag" Never
        "remove the flag; this version of vLLM does not have it (see `vllm serve --help=all`)"
    /// Flags or values that vLLM refuses.
    BadArguments "bad_arguments" Never
        "correct the settings that the message above names"
    /// The model's folder or name does not exist.
    ModelNotFound "model_not_found" Never
        "check the model's path or name, and whether this host may read or download it (HF_TOKEN, HF_HUB_OFFLINE)"
    /// The model hub could not be reached.
    Network "network" Later
        "the start is retried; check whether this host reaches the model hub (proxy, DNS, HF_ENDPOINT), or download the \
         model and configure its folder"
    /// An adapter's rank is above `--max-lora-rank`.
    LoraRank "lora_rank" Never
        "raise max-lora-rank to the adapter's rank and restart, or do not load the adapter"
    /// The engine did not start; the cause says why.
    EngineFailed "engine_failed" Later
        "look at the cause and the engine's log"
    /// The engine ended while it was serving.
    EngineDied "engine_died" Later
        "look at the cause and the engine's log; the engine is restarted while its restart budget lasts"
    /// No progress for longer than the phase allows.
    Timeout "timeout" Later
        "look at the last lines of the engine's log; if it was still working, raise fleet.start_timeout_scale"
    /// Killed from outside, most likely by the operating system because the host was out of memory.
    Killed "killed" Later
        "look for the OOM killer in dmesg and give the host more memory, or find out which process sent the signal"
    /// The program cannot be run.
    ProgramMissing "program_missing" Never
        "install the program, or correct the command of this backend (launch.command, or control)"
    /// Another server answers on the port.
    WrongEngine "wrong_engine" Later
        "stop the server that holds the port, or configure another port for this backend"
    /// The engine serves, but not the models or adapters that are configured.
    WrongModels "wrong_models" Never
        "make served-model-name and lora-modules of the engine match the models of the pool"
    /// A process of the engine outlived SIGKILL, or could not be signalled.
    WontDie "wont_die" Later
        "a process hangs in the device driver; no engine is started on its device until it is gone, which may need a reboot"
    /// The processes are gone but the device's memory is still in use.
    MemoryKept "memory_kept" Later
        "see in nvidia-smi which process uses it; no engine is started on this device until the memory is free"
    /// A command of the operator failed.
    CommandFailed "command_failed" Later
        "run the command by hand and correct it"
    /// The image of a container cannot be pulled.
    ImagePull "image_pull" Later
        "correct the image and its tag, or give the pod a pull secret; the cluster goes on trying"
    /// No node can run the pod.
    Unschedulable "unschedulable" Later
        "free or add a node with what the pod asks for (devices, memory, labels, tolerations), or ask for less"
    /// A container cannot be created from the description.
    ContainerConfig "container_config" Later
        "correct the pod's description: a ConfigMap, a Secret, a volume or the command that it names is not there"
    /// A container used more memory than allowed.
    ContainerMemory "container_memory" Later
        "raise resources.limits.memory of the container (weights pass through host memory while they load), or use less of it"
    /// The API server of the cluster refused a call or cannot be reached.
    ClusterRefused "cluster_refused" Later
        "correct what the API server says; it is tried again"
    /// Other programs or people manage the settings that must change.
    ManagedElsewhere "managed_elsewhere" Never
        "change it where it is managed, or leave args out of that manifest so that the gateway owns them"
    /// The gateway may not start or stop this engine.
    NotOurs "not_ours" Never
        "restart the engine where it runs, or configure `launch` or `control` for this backend instead of `url` alone"
}

impl std::fmt::Display for FailureClass {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.label())
    }
}
