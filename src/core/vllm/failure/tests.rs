//! Tests of the failure classes, on captured logs and on the texts of other versions.
//!
//! A captured log is cut into lines as the gateway cuts it, and a [`StartFollower`] finds the phase
//! that the start had reached.

use super::*;
use crate::vllm::logs::{StartFollower, StartPhase};

macro_rules! captured {
    ($name:literal) => {
        include_str!(concat!("../../../../tests/fixtures/vllm-0.32/", $name)).lines().collect::<Vec<_>>()
    };
}

#[track_caller]
fn starts(lines: &[&str], code: i32, phase: StartPhase, class: FailureClass, cause: &str) -> Diagnosis {
    let found = diagnose(lines, Some(Exit::Code(code)), phase);
    assert_eq!(found.class, class, "{found:?}");
    assert!(found.cause.as_deref().is_some_and(|text| text.contains(cause)), "{found:?}");
    assert!(!found.advice.is_empty());
    found
}

#[test]
fn a_context_longer_than_the_cache_names_the_length_that_fits() {
    let log = captured!("start-refused-context-over-kv.log");
    let found = starts(&log, 1, StartPhase::SizingKvCache, FailureClass::KvTooSmall, "To serve at least one request");
    let suggestion = found.suggestion.unwrap();
    assert_eq!((suggestion.flag.as_str(), suggestion.value), ("max-model-len", 2_097_024));
    assert!(found.advice.contains("max-model-len to 2097024"), "{}", found.advice);
}

#[test]
fn captured_refusals_have_different_classes() {
    let batched = captured!("start-refused-batched-under-seqs.log");
    starts(
        &batched,
        1,
        StartPhase::Configuring,
        FailureClass::BadArguments,
        "max_num_batched_tokens (64) must be greater",
    );
    let length = captured!("start-refused-context-over-model.log");
    starts(
        &length,
        1,
        StartPhase::Configuring,
        FailureClass::BadArguments,
        "max_model_len (65536) is greater than the derived",
    );
    let flag = captured!("start-refused-unknown-flag.log");
    starts(&flag, 2, StartPhase::Launching, FailureClass::UnknownFlag, "--disable-log-requests");
}

#[test]
fn the_root_cause_of_a_dead_engine_is_found_before_its_consequences() {
    let log = captured!("death-engine.log");
    starts(&log, 0, StartPhase::Serving, FailureClass::EngineDied, "RuntimeError: CPU Generator does not use offset");
}

/// A log with `line` between the start and the usual consequences of an error.
fn log_with(line: &str) -> Vec<String> {
    let core = |text: &str| format!("(EngineCore pid=31) ERROR 11-21 03:55:19 [core.py:1512] {text}");
    vec![
        "(APIServer pid=7) WARNING 11-21 03:55:00 [x.py:1] Found ulimit of 20000. This can cause fd limit errors like `OSError: \
         [Errno 24] Too many open files`."
            .to_owned(),
        core("EngineCore failed to start."),
        core("Traceback (most recent call last):"),
        core("  File \"/x/core.py\", line 1482, in run_engine_core"),
        core("    raise ValueError("),
        core(line),
        "Traceback (most recent call last):".to_owned(),
        "    raise RuntimeError(".to_owned(),
        "RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {'EngineCore': 1}".to_owned(),
    ]
}

#[track_caller]
fn says(line: &str, phase: StartPhase, class: FailureClass) -> Diagnosis {
    let found = diagnose(&log_with(line), Some(Exit::Code(1)), phase);
    assert_eq!(found.class, class, "{found:?}");
    assert!(found.cause.as_deref().is_some_and(|cause| line.trim_end().starts_with(cause)), "{found:?}");
    found
}

#[test]
fn each_text_of_a_gpu_start_has_its_class() {
    use StartPhase::{CapturingGraphs, Compiling, EngineStarting, LoadingWeights, SizingKvCache};
    says(
        "ValueError: Free memory on device cuda:0 (36.75/79.11 GiB) on startup is less than desired GPU memory utilization \
         (0.92, 72.78 GiB). Decrease GPU memory utilization or reduce GPU memory used by other processes.",
        EngineStarting,
        FailureClass::MemoryTaken,
    );
    says(
        "Failed to load model - not enough GPU memory. Try lowering --gpu-memory-utilization",
        LoadingWeights,
        FailureClass::OutOfMemoryLoading,
    );
    let oom = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 448.00 MiB. GPU 0 has a total capacity of 79.11 GiB";
    says(oom, LoadingWeights, FailureClass::OutOfMemoryLoading);
    says(oom, Compiling, FailureClass::OutOfMemoryWarmUp);
    says(oom, CapturingGraphs, FailureClass::OutOfMemoryGraphs);
    says("RuntimeError: CUDA error: out of memory", CapturingGraphs, FailureClass::OutOfMemoryGraphs);
    says(
        "ValueError: No available memory for the cache blocks. Try increasing `gpu_memory_utilization` when initializing",
        SizingKvCache,
        FailureClass::NoKvMemory,
    );
    says(
        "RuntimeError: CUDA out of memory occurred when warming up sampler with 1024 dummy requests. Please try lowering \
         `max_num_seqs` or `gpu_memory_utilization`",
        SizingKvCache,
        FailureClass::OutOfMemoryWarmUp,
    );
    says(
        "AssertionError: Error in memory profiling. Initial free memory 1, current free memory 2.",
        SizingKvCache,
        FailureClass::MemoryMoved,
    );
    says(
        "RuntimeError: CUDA error: an illegal memory access was encountered",
        CapturingGraphs,
        FailureClass::DeviceError,
    );
    says(
        "TimeoutError: Timed out waiting for engine core processes to start. Waited 600s",
        LoadingWeights,
        FailureClass::Timeout,
    );
    says("LoRA rank 64 is greater than max_lora_rank 16.", CapturingGraphs, FailureClass::LoraRank);
    says("TypeError: no known text", LoadingWeights, FailureClass::EngineFailed);
}

#[test]
fn the_length_that_fits_is_read_from_either_wording() {
    let new = says(
        "ValueError: To serve at least one request with the model's max seq len (131072), (16.0 GiB KV cache is needed, which \
         is larger than the available KV cache memory (9.8 GiB). Based on the available memory, the estimated maximum model \
         length is 80272. Try increasing `gpu_memory_utilization`",
        StartPhase::SizingKvCache,
        FailureClass::KvTooSmall,
    );
    assert_eq!(new.suggestion.unwrap().value, 80_272);
    let old = says(
        "ValueError: The model's max seq len (131072) is larger than the maximum number of tokens that can be stored in KV \
         cache (17072). Try increasing `gpu_memory_utilization` or decreasing `max_model_len`",
        StartPhase::SizingKvCache,
        FailureClass::KvTooSmall,
    );
    assert_eq!(old.suggestion.unwrap().value, 17_072);
}

#[test]
fn without_a_known_line_the_exit_decides() {
    let of = |exit, phase| diagnose::<&str>(&[], Some(exit), phase).class;
    assert_eq!(of(Exit::Signal(9), StartPhase::LoadingWeights), FailureClass::Killed);
    assert_eq!(of(Exit::Code(137), StartPhase::Serving), FailureClass::Killed);
    assert_eq!(of(Exit::Code(127), StartPhase::Launching), FailureClass::ProgramMissing);
    assert_eq!(of(Exit::Code(2), StartPhase::Launching), FailureClass::BadArguments);
    assert_eq!(of(Exit::Code(1), StartPhase::Launching), FailureClass::EngineFailed);
    assert_eq!(of(Exit::Code(0), StartPhase::Serving), FailureClass::EngineDied);
    assert_eq!(diagnose(&["  ", "last words", ""], None, StartPhase::Launching).cause.as_deref(), Some("last words"));
}

#[test]
fn a_request_that_failed_an_hour_ago_is_not_why_the_engine_died() {
    let old = "(APIServer pid=7) ERROR 11-21 02:00:00 [serving.py:1] ValueError: LoRA rank 64 is greater than max_lora_rank 16.";
    let stats = "(APIServer pid=7) INFO 11-21 03:00:00 [loggers.py:1] Engine 000: Avg prompt throughput: 1.0 tokens/s";
    let oom =
        "(EngineCore pid=9) ERROR 11-21 03:00:05 [core.py:1] torch.OutOfMemoryError: CUDA out of memory. Tried 2 GiB";
    let dead = "(APIServer pid=7) ERROR 11-21 03:00:05 [a.py:1] vllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered an issue.";
    let probe = "INFO:     127.0.0.1:9 - \"GET /metrics HTTP/1.1\" 200 OK";
    let serving = |lines: &[&str]| diagnose(lines, Some(Exit::Code(0)), StartPhase::Serving);
    assert_eq!(serving(&[old, stats, oom, dead]).class, FailureClass::OutOfMemoryServing);
    assert_eq!(
        serving(&[old, stats, oom, dead, probe]).class,
        FailureClass::OutOfMemoryServing,
        "a probe was answered meanwhile"
    );
    let silent = diagnose(&[old, stats, probe], Some(Exit::Signal(9)), StartPhase::Serving);
    assert_eq!(silent.class, FailureClass::Killed, "{silent:?}");
}

#[test]
fn a_warning_counts_only_where_no_error_is_found() {
    let warning = "(APIServer pid=7) WARNING 11-21 03:54:00 [x.py:1] max_num_batched_tokens (8192) is smaller than max_model_len (32768).";
    let with = |line: &str| [vec![warning.to_owned()], log_with(line)].concat();
    let said = |lines: &[String]| diagnose(lines, Some(Exit::Code(1)), StartPhase::Compiling);
    assert_eq!(said(&with("ImportError: libfoo.so: cannot open shared object file")).class, FailureClass::EngineFailed);
    assert_eq!(said(&with("torch.OutOfMemoryError: CUDA out of memory.")).class, FailureClass::OutOfMemoryWarmUp);
    // A log that has only the warning.
    assert_eq!(said(&[warning.to_owned()]).class, FailureClass::BadArguments);
}

#[test]
fn a_server_that_a_signal_ended_has_not_failed() {
    let log = captured!("death-sigterm.log");
    starts(&log, 0, StartPhase::Serving, FailureClass::Killed, "shutdown triggered");
}

#[test]
fn captured_starts_with_a_wrong_model_adapter_or_port_have_different_classes() {
    let folder = captured!("start-refused-no-model-folder.log");
    starts(&folder, 1, StartPhase::Configuring, FailureClass::ModelNotFound, "'/nonexistent/model'");
    let name = captured!("start-refused-unknown-model.log");
    starts(
        &name,
        1,
        StartPhase::Configuring,
        FailureClass::ModelNotFound,
        "Cannot find an appropriate cached snapshot",
    );
    let rank = captured!("start-refused-lora-rank.log");
    starts(&rank, 1, StartPhase::OpeningHttp, FailureClass::LoraRank, "LoRA rank 8 is greater than max_lora_rank 1");
    let port = captured!("start-refused-port-in-use.log");
    starts(&port, 1, StartPhase::Configuring, FailureClass::PortInUse, "OSError: [Errno 98] Address already in use");
}

/// A log of [README](../../../tests/fixtures/vllm-0.22-h200/README.md), its exit status, and the
/// expected diagnosis: phase, class, beginning of the cause, words of the advice.
struct Captured(&'static str, i32, StartPhase, FailureClass, &'static str, &'static str);

macro_rules! on_gpu {
    ($name:literal, $code:literal, $phase:ident, $class:ident, $cause:literal, $advice:literal) => {
        Captured(
            include_str!(concat!("../../../../tests/fixtures/vllm-0.22-h200/", $name, ".log")),
            $code,
            StartPhase::$phase,
            FailureClass::$class,
            $cause,
            $advice,
        )
    };
}

/// The lines of a log as the program cuts them, and the phase that they lead to.
fn followed(log: &str) -> (Vec<&str>, StartPhase) {
    let lines: Vec<&str> = log.split(['\n', '\r']).collect();
    let mut follower = StartFollower::default();
    lines.iter().for_each(|line| _ = follower.add_line(line));
    (lines, follower.phase())
}

#[test]
fn captured_failures_on_a_gpu_have_their_class_cause_and_advice() {
    let all = [
        on_gpu!(
            "kv-too-small",
            1,
            SizingKvCache,
            KvTooSmall,
            "ValueError: To serve at least one",
            "max-model-len to 43008"
        ),
        on_gpu!("no-kv-memory", 1, SizingKvCache, NoKvMemory, "ValueError: No available memory", "raise gpu-memory"),
        on_gpu!(
            "memory-taken",
            1,
            EngineStarting,
            MemoryTaken,
            "ValueError: Free memory on device cuda:0",
            "nvidia-smi"
        ),
        on_gpu!("oom-loading", 1, LoadingWeights, OutOfMemoryLoading, "Failed to load model", "tensor-parallel-size"),
        on_gpu!(
            "oom-profile",
            1,
            Compiling,
            OutOfMemoryWarmUp,
            "torch.OutOfMemoryError: CUDA",
            "max-num-batched-tokens"
        ),
        on_gpu!(
            "oom-graphs",
            1,
            CapturingGraphs,
            OutOfMemoryWarmUp,
            "RuntimeError: CUDA out of memory",
            "max-num-seqs"
        ),
        on_gpu!("port-in-use", 1, Configuring, PortInUse, "OSError: [Errno 98] Address already", "listens on the port"),
        on_gpu!(
            "unknown-flag",
            2,
            Launching,
            UnknownFlag,
            "main.py: error: unrecognized arguments: --disable",
            "remove"
        ),
        on_gpu!("bad-argument", 2, Launching, BadArguments, "main.py serve: error: argument --max-num-seqs", "correct"),
        on_gpu!("tokens-below-seqs", 1, Configuring, BadArguments, "max_num_batched_tokens (64) must be", "correct"),
        on_gpu!(
            "too-long",
            1,
            Configuring,
            BadArguments,
            "User-specified max_model_len (9000000)",
            "max-model-len to 131072"
        ),
        on_gpu!("tensor-parallel-4", 1, Configuring, BadArguments, "World size (4) is larger", "correct"),
        on_gpu!("no-model-folder", 1, Configuring, ModelNotFound, "huggingface_hub.errors.HFValidationError", "path"),
        on_gpu!("no-such-model", 1, Configuring, ModelNotFound, "huggingface_hub.errors.LocalEntry", "HF_HUB_OFFLINE"),
        on_gpu!("no-device", 1, Configuring, DeviceError, "vllm.third_party.pynvml.NVMLError_Invalid", "`gpu` of this"),
        on_gpu!("lora-rank", 1, OpeningHttp, LoraRank, "ValueError: LoRA rank 64 is greater", "max-lora-rank"),
        on_gpu!("worker-killed", 0, Serving, EngineDied, "Worker proc VllmWorker-1 died unexpectedly", "log"),
        on_gpu!("sigterm", 0, Serving, Killed, "Shutdown initiated", "which process sent the signal"),
    ];
    for Captured(log, code, phase, class, cause, advice) in all {
        let (lines, reached) = followed(log);
        let found = diagnose(&lines, Some(Exit::Code(code)), reached);
        assert_eq!((reached, found.class), (phase, class), "{found:?}");
        let said = found.cause.as_deref().unwrap_or_default();
        assert!(said.starts_with(cause) && !said.contains("[type="), "{cause}: {found:?}");
        assert!(found.advice.contains(advice), "{advice}: {found:?}");
    }
}

#[test]
fn the_cause_of_a_pydantic_error_is_the_text_below_its_first_line() {
    let said = |below: &str| {
        let head = "pydantic_core._pydantic_core.ValidationError: 1 validation error for ModelConfig";
        let lines = [head, below, "    For further information visit https://errors.pydantic.dev/2.14/v/value_error"];
        let found = diagnose(&lines, Some(Exit::Code(1)), StartPhase::Configuring);
        (found.class, found.cause.unwrap_or_default())
    };
    let (class, cause) = said("  Value error, no known text [type=value_error, input_value=1]");
    assert_eq!((class, class.retry()), (FailureClass::BadArguments, Retryable::Never));
    assert_eq!(cause, "no known text");
    let (class, _) =
        said("  Value error, Invalid repository ID or local directory specified: 'x' [type=value_error, x]");
    assert_eq!(class, FailureClass::ModelNotFound, "a more specific text in it counts");
}

#[test]
fn other_texts_for_out_of_memory_are_classified_by_the_phase() {
    use StartPhase::{CapturingGraphs, LoadingWeights};
    says("RuntimeError: Triton Error [CUDA]: out of memory", CapturingGraphs, FailureClass::OutOfMemoryGraphs);
    says(
        "CUDA Error: out of memory at /w/csrc/cumem_allocator.cpp:145",
        LoadingWeights,
        FailureClass::OutOfMemoryLoading,
    );
    says(
        "host:1:2 [0] enqueue.cc:9 NCCL WARN Cuda failure 2 'out of memory'",
        LoadingWeights,
        FailureClass::OutOfMemoryLoading,
    );
    says(
        "ValueError: Cannot auto-fit max_model_len: not enough GPU memory available to serve even a single token.",
        LoadingWeights,
        FailureClass::NoKvMemory,
    );
    says(
        "RuntimeError: Unexpected error from cudaGetDeviceCount(). Error 802: system not yet initialized",
        LoadingWeights,
        FailureClass::DeviceError,
    );
    says(
        "ValueError: No valid attention backend found for cuda with AttentionSelectorConfig(head_size=80)",
        LoadingWeights,
        FailureClass::BadArguments,
    );
    says(
        "ValueError: Bfloat16 is only supported on GPUs with compute capability of at least 8.0.",
        LoadingWeights,
        FailureClass::BadArguments,
    );
    let shared = "triton.runtime.errors.OutOfResources: out of resource: shared memory, Required: 114688, Hardware limit: 101376.";
    says(shared, CapturingGraphs, FailureClass::EngineFailed);
    says(
        "RuntimeError: CUDA out of memory occurred when warming up pooler (task=embed)",
        CapturingGraphs,
        FailureClass::OutOfMemoryWarmUp,
    );
    let mamba = says(
        "ValueError: max_num_seqs (1024) exceeds available Mamba cache blocks (311). Each decode",
        CapturingGraphs,
        FailureClass::BadArguments,
    );
    assert_eq!(mamba.suggestion.map(|found| (found.flag, found.value)), Some(("max-num-seqs".to_owned(), 311)));
    assert!(mamba.advice.contains("max-num-seqs to 311"), "{}", mamba.advice);
}

#[test]
fn an_internal_port_that_is_in_use_has_its_own_advice() {
    let advice = |line: &str| says(line, StartPhase::EngineStarting, FailureClass::PortInUse).advice;
    assert!(advice("zmq.error.ZMQError: Address already in use (addr='tcp://*:5557')").contains("kv-events-config"));
    let rendezvous = "torch.distributed.DistNetworkError: The server socket has failed to listen on any local network address. \
                      port: 29500, useIpv6: false, code: -98, name: EADDRINUSE, message: address already in use";
    assert!(advice(rendezvous).contains("master-port"));
    assert!(advice("OSError: [Errno 98] Address already in use").contains("configure another port"));
}

#[test]
fn a_killed_process_is_the_cause_unless_an_error_precedes_it() {
    let failed = "RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {'EngineCore': -9}";
    let of = |lines: &[&str], phase| diagnose(lines, Some(Exit::Code(1)), phase);
    let found = of(&["Loading safetensors checkpoint shards", failed], StartPhase::LoadingWeights);
    assert_eq!((found.class, found.cause.as_deref()), (FailureClass::Killed, Some(failed)));
    let error = "(EngineCore pid=9) ERROR 11-21 03:00:05 [core.py:1] ImportError: libfoo.so";
    assert_eq!(of(&[error, failed], StartPhase::LoadingWeights).class, FailureClass::EngineFailed);
    let worker = "(EngineCore pid=9) ERROR 11-21 03:00:05 [m.py:1] Worker proc VllmWorker-1 died unexpectedly (exit code: -9), shutting down executor.";
    let after = "(Worker_TP0 pid=8) ERROR 11-21 03:00:06 [m.py:1] RuntimeError: NCCL error: remote process exited";
    let stats = "(APIServer pid=7) INFO 11-21 03:00:04 [loggers.py:1] Engine 000: Avg prompt throughput: 1.0 tokens/s";
    let found = of(&[error, stats, worker, after], StartPhase::Serving);
    assert_eq!(found.class, FailureClass::Killed, "{found:?}");
    assert!(found.cause.is_some_and(|cause| cause.starts_with("Worker proc VllmWorker-1 died")));
    let other = worker.replace("-9)", "-11)");
    assert_eq!(of(&[stats, &other], StartPhase::Serving).class, FailureClass::EngineDied);
}

#[test]
fn a_kill_that_left_no_line_quotes_none() {
    let stats = "(APIServer pid=7) INFO 11-21 03:00:04 [loggers.py:1] Engine 000: Avg prompt throughput: 1.0 tokens/s";
    let answered = "(APIServer pid=7) INFO:     127.0.0.1:40000 - \"POST /v1/completions HTTP/1.1\" 200 OK";
    for (exit, text) in [(Exit::Signal(9), "signal 9"), (Exit::Code(137), "exit status 137")] {
        let found = diagnose(&[stats, answered], Some(exit), StartPhase::Serving);
        assert_eq!((found.class, found.cause.as_deref()), (FailureClass::Killed, Some(text)));
    }
}

#[test]
fn an_unreachable_hub_is_retried_unless_the_host_is_offline_by_configuration() {
    let of = |lines: &[&str]| diagnose(lines, Some(Exit::Code(1)), StartPhase::Configuring).class;
    let lost = "OSError: We couldn't connect to 'https://huggingface.co' to load the files, and couldn't find them in the cached files.";
    assert_eq!((of(&[lost]), of(&[lost]).retry()), (FailureClass::Network, Retryable::Later));
    let entry =
        "huggingface_hub.errors.LocalEntryNotFoundError: An error happened while trying to locate the files on the Hub";
    assert_eq!(of(&[entry]), FailureClass::Network);
    let retried = "'(MaxRetryError(\"HTTPSConnectionPool(host='huggingface.co', port=443): Max retries exceeded with url: /m\")' \
                   thrown while requesting HEAD https://huggingface.co/m";
    assert_eq!(of(&[retried, "torch.OutOfMemoryError: CUDA out of memory."]), FailureClass::OutOfMemoryLoading);
    assert_eq!(of(&[retried, "TypeError: no known text"]), FailureClass::EngineFailed);
    let last = "requests.exceptions.ConnectionError: Max retries exceeded with url: /m";
    assert_eq!(of(&[retried, last]), FailureClass::Network);
    assert_eq!(
        of(&["INFO 11-21 03:00:05 [x.py:1] HF_HUB_OFFLINE is True, replace model_id", lost]),
        FailureClass::ModelNotFound
    );
}

#[test]
fn a_request_that_was_refused_is_not_what_a_serving_engine_died_of() {
    let refused = "ERROR 11-21 03:00:05 [serving.py:1] ValueError: LoRA rank 64 is greater than max_lora_rank 16.";
    let found = diagnose(&[refused], Some(Exit::Code(1)), StartPhase::Serving);
    assert_eq!((found.class, found.class.retry()), (FailureClass::EngineDied, Retryable::Later));
}

#[test]
fn every_class_has_advice_and_its_label_is_its_name_in_journals() {
    for class in FailureClass::ALL {
        assert!(advice::advice(*class, None, None).len() > 20, "{class}");
        assert_eq!(serde_json::to_value(class).unwrap(), class.label());
    }
}

#[test]
fn a_dead_worker_is_the_cause_although_the_server_answered_probes_after_it() {
    let log = "(EngineCore pid=4035) ERROR 11-21 19:17:47 [multiproc_executor.py:283] Worker proc VllmWorker-1 died unexpectedly, shutting down executor.\n\
               (APIServer pid=3857) INFO:     127.0.0.1:43098 - \"GET /health HTTP/1.1\" 200 OK\n\
               (EngineCore pid=4035) ERROR 11-21 19:17:50 [core.py:1167] EngineCore encountered a fatal error.\n\
               (EngineCore pid=4035) ERROR 11-21 19:17:50 [core.py:1167]     raise RuntimeError(\"Executor failed.\")\n\
               (EngineCore pid=4035) ERROR 11-21 19:17:50 [core.py:1167] RuntimeError: Executor failed.";
    let lines: Vec<&str> = log.lines().collect();
    let found = diagnose(&lines, Some(Exit::Code(0)), StartPhase::Serving);
    assert_eq!(found.class, FailureClass::EngineDied);
    assert_eq!(found.cause.as_deref(), Some("Worker proc VllmWorker-1 died unexpectedly, shutting down executor."));
}
