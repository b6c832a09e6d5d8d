//! Failure classes on captured logs and on the texts of other versions.

use super::*;

macro_rules! captured {
    ($name:literal) => {
        include_str!(concat!("../../../tests/fixtures/vllm-0.32/", $name)).lines().collect::<Vec<_>>()
    };
}

#[track_caller]
fn starts(lines: &[&str], code: i32, phase: StartPhase, class: Class, cause: &str) -> Diagnosis {
    let found = diagnose(lines, Some(Exit::Code(code)), phase);
    assert_eq!(found.class, class, "{found:?}");
    assert!(found.cause.as_deref().is_some_and(|text| text.contains(cause)), "{found:?}");
    assert!(!found.advice.is_empty());
    found
}

#[test]
fn a_context_longer_than_the_cache_names_the_length_that_fits() {
    let log = captured!("start-refused-context-over-kv.log");
    let found = starts(&log, 1, StartPhase::SizingKvCache, Class::KvTooSmall, "To serve at least one request");
    let suggestion = found.suggestion.unwrap();
    assert_eq!((suggestion.flag.as_str(), suggestion.value), ("max-model-len", 2_097_024));
    assert!(found.advice.contains("max-model-len to 2097024"), "{}", found.advice);
}

#[test]
fn captured_refusals_are_told_apart() {
    let batched = captured!("start-refused-batched-under-seqs.log");
    starts(&batched, 1, StartPhase::Configuring, Class::BadArguments, "max_num_batched_tokens (64) must be greater");
    let length = captured!("start-refused-context-over-model.log");
    starts(
        &length,
        1,
        StartPhase::Configuring,
        Class::BadArguments,
        "max_model_len (65536) is greater than the derived",
    );
    let flag = captured!("start-refused-unknown-flag.log");
    starts(&flag, 2, StartPhase::Launching, Class::UnknownFlag, "--disable-log-requests");
}

#[test]
fn the_root_cause_of_a_dead_engine_is_found_before_its_consequences() {
    let log = captured!("death-engine.log");
    starts(&log, 0, StartPhase::Serving, Class::EngineDied, "RuntimeError: CPU Generator does not use offset");
}

/// A log whose telling line stands between a start and the usual consequences.
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
fn says(line: &str, phase: StartPhase, class: Class) -> Diagnosis {
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
        Class::MemoryTaken,
    );
    says(
        "Failed to load model - not enough GPU memory. Try lowering --gpu-memory-utilization",
        LoadingWeights,
        Class::OutOfMemoryLoading,
    );
    let oom = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 448.00 MiB. GPU 0 has a total capacity of 79.11 GiB";
    says(oom, LoadingWeights, Class::OutOfMemoryLoading);
    says(oom, Compiling, Class::OutOfMemoryWarmUp);
    says(oom, CapturingGraphs, Class::OutOfMemoryGraphs);
    says("RuntimeError: CUDA error: out of memory", CapturingGraphs, Class::OutOfMemoryGraphs);
    says(
        "ValueError: No available memory for the cache blocks. Try increasing `gpu_memory_utilization` when initializing",
        SizingKvCache,
        Class::NoKvMemory,
    );
    says(
        "RuntimeError: CUDA out of memory occurred when warming up sampler with 1024 dummy requests. Please try lowering \
         `max_num_seqs` or `gpu_memory_utilization`",
        SizingKvCache,
        Class::OutOfMemoryWarmUp,
    );
    says(
        "AssertionError: Error in memory profiling. Initial free memory 1, current free memory 2.",
        SizingKvCache,
        Class::MemoryMoved,
    );
    says("RuntimeError: CUDA error: an illegal memory access was encountered", CapturingGraphs, Class::DeviceError);
    says(
        "TimeoutError: Timed out waiting for engine core processes to start. Waited 600s",
        LoadingWeights,
        Class::Timeout,
    );
    says("LoRA rank 64 is greater than max_lora_rank 16.", CapturingGraphs, Class::LoraRank);
    says("TypeError: nobody has seen this one before", LoadingWeights, Class::EngineFailed);
}

#[test]
fn the_length_that_fits_is_read_from_either_wording() {
    let new = says(
        "ValueError: To serve at least one request with the model's max seq len (131072), (16.0 GiB KV cache is needed, which \
         is larger than the available KV cache memory (9.8 GiB). Based on the available memory, the estimated maximum model \
         length is 80272. Try increasing `gpu_memory_utilization`",
        StartPhase::SizingKvCache,
        Class::KvTooSmall,
    );
    assert_eq!(new.suggestion.unwrap().value, 80_272);
    let old = says(
        "ValueError: The model's max seq len (131072) is larger than the maximum number of tokens that can be stored in KV \
         cache (17072). Try increasing `gpu_memory_utilization` or decreasing `max_model_len`",
        StartPhase::SizingKvCache,
        Class::KvTooSmall,
    );
    assert_eq!(old.suggestion.unwrap().value, 17_072);
}

#[test]
fn without_words_the_exit_speaks() {
    let of = |exit, phase| diagnose::<&str>(&[], Some(exit), phase).class;
    assert_eq!(of(Exit::Signal(9), StartPhase::LoadingWeights), Class::Killed);
    assert_eq!(of(Exit::Code(137), StartPhase::Serving), Class::Killed);
    assert_eq!(of(Exit::Code(127), StartPhase::Launching), Class::ProgramMissing);
    assert_eq!(of(Exit::Code(2), StartPhase::Launching), Class::BadArguments);
    assert_eq!(of(Exit::Code(1), StartPhase::Launching), Class::EngineFailed);
    assert_eq!(of(Exit::Code(0), StartPhase::Serving), Class::EngineDied);
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
    assert_eq!(serving(&[old, stats, oom, dead]).class, Class::OutOfMemoryServing);
    assert_eq!(
        serving(&[old, stats, oom, dead, probe]).class,
        Class::OutOfMemoryServing,
        "a probe was answered meanwhile"
    );
    let silent = diagnose(&[old, stats, probe], Some(Exit::Signal(9)), StartPhase::Serving);
    assert_eq!(silent.class, Class::Killed, "{silent:?}");
}

#[test]
fn what_a_start_only_warns_of_hides_neither_an_error_nor_is_it_forgotten() {
    let warning = "(APIServer pid=7) WARNING 11-21 03:54:00 [x.py:1] max_num_batched_tokens (8192) is smaller than max_model_len (32768).";
    let with = |line: &str| [vec![warning.to_owned()], log_with(line)].concat();
    let said = |lines: &[String]| diagnose(lines, Some(Exit::Code(1)), StartPhase::Compiling);
    assert_eq!(said(&with("ImportError: libfoo.so: cannot open shared object file")).class, Class::EngineFailed);
    assert_eq!(said(&with("torch.OutOfMemoryError: CUDA out of memory.")).class, Class::OutOfMemoryWarmUp);
    // Nothing else says anything.
    assert_eq!(said(&[warning.to_owned()]).class, Class::BadArguments);
}

#[test]
fn a_server_that_was_told_to_end_was_not_broken() {
    let log = captured!("death-sigterm.log");
    starts(&log, 0, StartPhase::Serving, Class::Killed, "shutdown triggered");
}

#[test]
fn captured_starts_with_a_wrong_model_adapter_or_port_are_told_apart() {
    let folder = captured!("start-refused-no-model-folder.log");
    starts(&folder, 1, StartPhase::Configuring, Class::ModelNotFound, "'/nonexistent/model'");
    let name = captured!("start-refused-unknown-model.log");
    starts(&name, 1, StartPhase::Configuring, Class::ModelNotFound, "Cannot find an appropriate cached snapshot");
    let rank = captured!("start-refused-lora-rank.log");
    starts(&rank, 1, StartPhase::OpeningHttp, Class::LoraRank, "LoRA rank 8 is greater than max_lora_rank 1");
    let port = captured!("start-refused-port-in-use.log");
    starts(&port, 1, StartPhase::Configuring, Class::PortInUse, "OSError: [Errno 98] Address already in use");
}

#[test]
fn every_class_has_advice_and_its_label_is_its_name_in_journals() {
    for class in Class::ALL {
        assert!(class.advice(None).len() > 20, "{class}");
        assert_eq!(serde_json::to_value(class).unwrap(), class.label());
    }
}
