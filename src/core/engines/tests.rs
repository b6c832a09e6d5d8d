//! The rules of each kind, on pages as the servers write them.
//!
//! The pages are of SGLang 0.5.23 and of llama.cpp b10434. The rules of every kind read each page;
//! only the rules of the page's own kind may find values in it.

use super::{EngineKind, Health};
use crate::openai::Route;
use crate::vllm::failure::{Exit, FailureClass, diagnose_by};
use crate::vllm::logs::{Movement, StartFollower, StartPhase};

const SGLANG: &str = "# TYPE sglang:num_running_reqs gauge\n\
    sglang:num_running_reqs{engine_type=\"unified\",model_name=\"m\",tp_rank=\"0\"} 3.0\n\
    sglang:num_queue_reqs{model_name=\"m\"} 2.0\nsglang:token_usage{model_name=\"m\"} 0.25\n\
    sglang:max_total_num_tokens{model_name=\"m\"} 40960.0\n\
    sglang:realtime_tokens_total{mode=\"decode\",model_name=\"m\"} 70.0\n\
    sglang:realtime_tokens_total{mode=\"prefill_compute\",model_name=\"m\"} 30.0\n\
    sglang:gen_throughput{model_name=\"m\"} 812.5\n";
const LLAMA: &str = "# HELP llamacpp:n_decode_total Total number of llama_decode() calls\n\
    llamacpp:n_decode_total 41\nllamacpp:requests_processing 2\nllamacpp:requests_deferred 5\n";
const TRITON: &str = "# TYPE nv_inference_exec_count counter\n\
    nv_inference_exec_count{model=\"a\",version=\"1\"} 7\nnv_inference_exec_count{model=\"b\",version=\"1\"} 2\n\
    nv_inference_pending_request_count{model=\"a\",version=\"1\"} 4\nnv_gpu_utilization{gpu_uuid=\"G\"} 0.5\n";

#[test]
fn load_and_progress_are_read_by_the_names_of_the_kind() {
    let read = |kind: EngineKind, page: &str| (kind.rules().metrics.as_ref().unwrap().read)(page);
    let sglang = read(EngineKind::Sglang, SGLANG);
    assert_eq!((sglang.running, sglang.waiting, sglang.kv_usage), (3.0, 2.0, 0.25));
    assert_eq!((sglang.progress(), sglang.cache_tokens), (100.0, Some(40_960)));
    let llama = read(EngineKind::LlamaCpp, LLAMA);
    assert_eq!((llama.running, llama.waiting, llama.progress()), (2.0, 5.0, 41.0));
    assert_eq!(read(EngineKind::Vllm, SGLANG).samples, 0);
    assert_eq!(read(EngineKind::Sglang, LLAMA).samples, 0);
    let triton = read(EngineKind::Triton, TRITON);
    assert_eq!((triton.waiting, triton.progress(), triton.running), (4.0, 9.0, 0.0));
    assert!(EngineKind::OpenAi.rules().metrics.is_none() && EngineKind::Serial.rules().metrics.is_none());
}

#[test]
fn a_server_that_loads_is_not_down() {
    let judge = |kind: EngineKind, status, body: &str| (kind.rules().judge)(status, body.as_bytes());
    let loading = r#"{"error":{"message":"Loading model","type":"unavailable_error","code":503}}"#;
    assert_eq!(judge(EngineKind::LlamaCpp, 503, loading), Health::Loading);
    assert_eq!(judge(EngineKind::LlamaCpp, 503, "busy"), Health::Down);
    assert_eq!(judge(EngineKind::Sglang, 503, ""), Health::Loading);
    for kind in EngineKind::ALL {
        assert_eq!((judge(kind, 200, ""), judge(kind, 500, "")), (Health::Up, Health::Down), "{kind:?}");
    }
    assert_eq!(judge(EngineKind::Vllm, 503, loading), Health::Down);
    assert_eq!(judge(EngineKind::Serial, 404, ""), Health::Up, "it has no health page, and answers");
}

#[test]
fn the_number_of_slots_is_read_from_the_page_of_the_kind() {
    let slots = |kind: EngineKind, body: &str| (kind.rules().slots_page.as_ref().unwrap().read)(body.as_bytes());
    let loads = r#"{"version":"0.5.23","loads":[{"dp_rank":0,"max_running_requests":48},{"max_running_requests":48}]}"#;
    assert_eq!(slots(EngineKind::Sglang, loads), Some(96));
    assert_eq!(slots(EngineKind::Sglang, r#"{"loads":[{"dp_rank":0}]}"#), None);
    let tokens = EngineKind::Sglang.rules().slots_page.as_ref().unwrap().tokens;
    assert_eq!(tokens(br#"{"loads":[{"max_total_num_tokens":4096},{"max_total_num_tokens":4096}]}"#), Some(8_192));
    assert_eq!(tokens(loads.as_bytes()), None);
    assert_eq!(slots(EngineKind::LlamaCpp, r#"{"total_slots":4,"model_path":"m.gguf"}"#), Some(4));
    for body in [r#"{"total_slots":0}"#, "{}", "<html>", ""] {
        assert_eq!(slots(EngineKind::LlamaCpp, body), None, "{body}");
    }
}

#[test]
fn a_kind_is_recognised_by_the_owner_of_its_models_and_by_its_own_page() {
    assert_eq!(EngineKind::of_owner("sglang"), Some(EngineKind::Sglang));
    // vLLM's frontend in Rust.
    assert_eq!(EngineKind::of_owner("vllm-frontend-rs"), Some(EngineKind::Vllm));
    assert_eq!(EngineKind::of_owner("acme"), None);
    let pages = [
        (EngineKind::Vllm, "vllm:num_requests_running{engine=\"0\"} 1.0\n"),
        (EngineKind::Sglang, r#"{"model_path":"m","tokenizer_path":"m","is_generation":true,"weight_version":"x"}"#),
        (EngineKind::LlamaCpp, r#"{"default_generation_settings":{"n_ctx":512},"total_slots":2,"model_path":"m"}"#),
        (EngineKind::Triton, r#"{"name":"triton","version":"2.60.0","extensions":["statistics"]}"#),
    ];
    let others = [
        "",
        "{}",
        "<html>",
        SGLANG,
        LLAMA,
        r#"{"name":"mlserver"}"#,
        r#"{"model_path":"m"}"#,
        r#"[["name","triton"]]"#,
    ];
    for kind in EngineKind::ALL {
        let Some(page) = &kind.rules().identity else { continue };
        for (other, body) in pages {
            assert_eq!((page.is_own)(body.as_bytes()), kind == other, "{kind:?} {other:?}");
        }
        assert!(!others.iter().any(|body| (page.is_own)(body.as_bytes())), "{kind:?}");
    }
}

#[test]
fn a_kind_that_any_server_may_have_excludes_only_servers_without_its_routes() {
    use EngineKind::{LlamaCpp, OpenAi, Serial, Sglang, Triton, Vllm};
    for (kind, other) in [(Vllm, Sglang), (LlamaCpp, Vllm), (Triton, Vllm), (OpenAi, Triton), (Serial, Triton)] {
        assert!(kind.excludes(other), "{kind:?} {other:?}");
    }
    for (kind, other) in [(Vllm, Vllm), (OpenAi, Vllm), (OpenAi, LlamaCpp), (Serial, Vllm)] {
        assert!(!kind.excludes(other), "{kind:?} {other:?}");
    }
    // The configuration is checked before the kind of a server is recognised, so all kinds that can
    // be recognised must have the same default of `slots`.
    for kind in EngineKind::ALL.into_iter().filter(|kind| kind.rules().identity.is_some()) {
        assert_eq!(kind.rules().slots, EngineKind::default().rules().slots, "{kind:?}");
    }
}

#[test]
fn each_kind_serves_completions_and_the_routes_that_it_has() {
    let serves = |kind: EngineKind, route| (kind.rules().serves)(route);
    for kind in EngineKind::ALL {
        let is_other = matches!(kind, EngineKind::Triton | EngineKind::Serial);
        assert_eq!(serves(kind, Route::Completions), !is_other, "{kind:?}");
        assert_eq!(serves(kind, Route::Infer), kind == EngineKind::Triton);
        assert_eq!(serves(kind, Route::Custom), kind == EngineKind::Serial);
        assert_eq!(serves(kind, Route::Speech), matches!(kind, EngineKind::OpenAi | EngineKind::Serial));
    }
    assert!(!serves(EngineKind::LlamaCpp, Route::Score) && serves(EngineKind::Sglang, Route::Score));
}

#[test]
fn a_start_goes_through_its_phases_by_the_log_of_the_kind() {
    use StartPhase::{CapturingGraphs, Configuring, LoadingWeights, OpeningHttp, Serving, SizingKvCache};
    let sglang = "[2026-11-30 09:17:33] server_args=ServerArgs(model_path='m')\n\
        [2026-11-30 09:17:40 TP0] Load weight begin. avail mem=78.50 GB\n\
        [2026-11-30 09:17:44 TP0] Load weight end. elapsed=3.2 s, type=LlamaForCausalLM\n\
        [2026-11-30 09:17:45 TP0] Memory pool end. avail mem=10.20 GB\n\
        [2026-11-30 09:17:46 TP0] Capture decode CUDA graph begin. This can take up to several minutes.\n\
        [2026-11-30 09:17:52 TP0] Capture decode CUDA graph end. Time elapsed: 6.1 s.\n\
        [2026-11-30 09:17:52 TP0] max_total_num_tokens=440912, chunked_prefill_size=8192\n\
        INFO:     Uvicorn running on http://127.0.0.1:30000 (Press CTRL+C to quit)\n\
        [2026-11-30 09:17:54] The server is fired up and ready to roll!\n";
    let llama = "0.00.014.973 I srv    load_model: loading model 'tiny.gguf'\n\
        0.00.026.714 I srv    load_model: initializing, n_slots = 2, n_ctx_slot = 1024, kv_unified = 'false'\n\
        0.00.034.219 I srv  llama_server: model loaded\n\
        0.00.034.244 I srv  llama_server: listening on http://127.0.0.1:18090\n";
    let triton = "I1130 09:28:57.962160 2073 cuda_memory_manager.cc:117] \"CUDA memory pool disabled\"\n\
        I1130 09:28:57.964188 2073 model_lifecycle.cc:472] \"loading: serial1:1\"\n\
        | Option                           | Value\n\
        I1130 09:26:50.651700 31106 http_server.cc:4713] \"Started HTTPService at 0.0.0.0:18199\"\n";
    for (kind, log, phases) in [
        (
            EngineKind::Sglang,
            sglang,
            &[Configuring, LoadingWeights, SizingKvCache, CapturingGraphs, OpeningHttp, Serving][..],
        ),
        (EngineKind::LlamaCpp, llama, &[LoadingWeights, SizingKvCache, OpeningHttp, Serving]),
        (EngineKind::Triton, triton, &[Configuring, LoadingWeights, OpeningHttp, Serving]),
        (EngineKind::Serial, llama, &[]),
    ] {
        let mut follower = StartFollower::new(&kind.rules().log.form);
        let moved = log.lines().filter_map(|line| match follower.add_line(line) {
            Movement::Phase(phase) => Some(phase),
            _ => None,
        });
        assert_eq!(moved.collect::<Vec<_>>(), phases, "{kind:?}");
    }
}

/// An end of an engine: kind, last lines of the log, phase, exit status, expected class.
type End = (EngineKind, &'static str, StartPhase, i32, FailureClass);

#[test]
fn an_end_is_diagnosed_by_the_texts_of_the_kind() {
    use EngineKind::{LlamaCpp, Serial, Sglang, Triton};
    use StartPhase::{CapturingGraphs, Launching, LoadingWeights, Serving};
    let ends: &[End] = &[
        (
            Sglang,
            "[2026-11-30 09:17:40 TP0] Scheduler hit an exception: Traceback (most recent call last):\n\
            RuntimeError: Not enough memory. Please try to increase --mem-fraction-static. Current value: \
            mem_fraction_static=0.3",
            LoadingWeights,
            131,
            FailureClass::NoKvMemory,
        ),
        (
            Sglang,
            "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB",
            CapturingGraphs,
            131,
            FailureClass::OutOfMemoryGraphs,
        ),
        (
            Sglang,
            "launch_server.py: error: unrecognized arguments: --max-num-seqs 4",
            Launching,
            2,
            FailureClass::UnknownFlag,
        ),
        (
            Sglang,
            "ValueError: server port at 30000 is not available in 30 seconds. server port at 30000 is not available",
            Launching,
            1,
            FailureClass::PortInUse,
        ),
        (
            Sglang,
            "OSError: nope/nope is not a local folder and is not a valid model identifier listed on \
            'https://huggingface.co/models'",
            Launching,
            1,
            FailureClass::ModelNotFound,
        ),
        (Sglang, "RuntimeError: No CUDA GPUs are available", Launching, 1, FailureClass::DeviceError),
        (
            Sglang,
            "[2026-11-30 10:00:00 TP0] Decode batch, #running-req: 3\n[2026-11-30 10:00:01] SIGQUIT received. \
            signum=3\ntorch.OutOfMemoryError: CUDA out of memory.",
            Serving,
            131,
            FailureClass::OutOfMemoryServing,
        ),
        (LlamaCpp, "error: invalid argument: --bogus", Launching, 1, FailureClass::UnknownFlag),
        (
            LlamaCpp,
            "error while handling argument \"--parallel\": stoi\n\nusage:",
            Launching,
            1,
            FailureClass::BadArguments,
        ),
        (
            LlamaCpp,
            "0.00.011.107 E srv         start: couldn't bind HTTP server socket, hostname: 127.0.0.1, port: 18199\n\
            0.00.011.214 E srv  llama_server: exiting due to HTTP server error",
            Launching,
            1,
            FailureClass::PortInUse,
        ),
        (
            LlamaCpp,
            "0.00.006.718 E gguf_init_from_file: failed to open GGUF file 'nope.gguf' (No such file or directory)\n\
            0.00.006.771 E srv    load_model: failed to load model, 'nope.gguf'",
            LoadingWeights,
            1,
            FailureClass::ModelNotFound,
        ),
        (
            LlamaCpp,
            "0.00.1 E ggml_backend_cuda_buffer_type_alloc_buffer: allocating 9000.00 MiB on device 0: cudaMalloc \
            failed: out of memory\nsrv    load_model: failed to load model, 'm.gguf'",
            LoadingWeights,
            1,
            FailureClass::OutOfMemoryLoading,
        ),
        (
            Triton,
            "/opt/tritonserver: unrecognized option '--bogus'\nUsage: tritonserver [options]",
            Launching,
            1,
            FailureClass::UnknownFlag,
        ),
        (
            Triton,
            "error: creating server: Internal - failed to stat file /nope",
            Launching,
            1,
            FailureClass::ModelNotFound,
        ),
        (
            Triton,
            "I1130 09:26:50.651700 31106 http_server.cc:4713] \"Started HTTPService at 0.0.0.0:18199\"\n\
            E1130 09:26:50.703333 31106 main.cc:257] \"failed to start HTTP service: Unavailable - Socket '0.0.0.0:18199' \
            already in use \"",
            Launching,
            1,
            FailureClass::PortInUse,
        ),
        (
            Triton,
            "E1130 09:28:57.964305 2073 model_lifecycle.cc:642] \"failed to load 'a' version 1: Invalid argument: no\"\n\
            error: creating server: Internal - failed to load all models",
            LoadingWeights,
            1,
            FailureClass::BadArguments,
        ),
        (Serial, "ModuleNotFoundError: No module named 'flask'", Launching, 1, FailureClass::ProgramMissing),
        (Serial, "OSError: [Errno 98] Address already in use", Launching, 1, FailureClass::PortInUse),
    ];
    for (kind, log, phase, status, class) in ends {
        let lines: Vec<&str> = log.lines().collect();
        let found = diagnose_by(kind.rules().log, &lines, Some(Exit::Code(*status)), *phase);
        assert_eq!(found.class, *class, "{kind:?}: {log}");
        assert!(!found.advice.contains("gpu-memory-utilization") && !found.advice.contains("vllm"), "{}", found.advice);
    }
    for kind in EngineKind::ALL {
        let killed = diagnose_by(kind.rules().log, &["listening"], Some(Exit::Signal(9)), Serving);
        assert_eq!(killed.class, FailureClass::Killed, "{kind:?}");
    }
}
