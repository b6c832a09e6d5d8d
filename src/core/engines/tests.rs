//! The rules of each kind, on pages as the servers write them.
//!
//! The pages are of SGLang 0.5.23 and of llama.cpp b10434. Every kind is asked
//! for the same facts, so that a page of one kind says nothing to another.

use super::{EngineKind, Health};
use crate::openai::Route;

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
    assert_eq!(slots(EngineKind::LlamaCpp, r#"{"total_slots":4,"model_path":"m.gguf"}"#), Some(4));
    for body in [r#"{"total_slots":0}"#, "{}", "<html>", ""] {
        assert_eq!(slots(EngineKind::LlamaCpp, body), None, "{body}");
    }
}

#[test]
fn a_server_that_names_another_kind_is_recognised() {
    assert_eq!(EngineKind::Vllm.contradicted_by("sglang"), Some(EngineKind::Sglang));
    assert_eq!(EngineKind::LlamaCpp.contradicted_by("vllm"), Some(EngineKind::Vllm));
    for (kind, owner) in [(EngineKind::Vllm, "vllm"), (EngineKind::Vllm, "acme"), (EngineKind::OpenAi, "vllm")] {
        assert_eq!(kind.contradicted_by(owner), None, "{owner}");
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
