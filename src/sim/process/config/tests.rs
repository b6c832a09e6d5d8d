//! Tests of the settings: defaults, refusals with vLLM's messages, and a server under load.
//!
//! The load runs on virtual time.

use super::*;
use crate::machine::{Constants, Gpu, Layout, Model};
use crate::process::refusal::{Refusal, Stage};
use sluice_core::vllm::args::ServeArgs;

fn config(flags: &[&str]) -> Result<SimConfig, Refusal> {
    SimConfig::from_args(&ServeArgs::parse(flags).unwrap(), Profile::named("h200-llama-8b").unwrap())
}

fn on(gpu: &str, flags: &[&str]) -> Result<SimConfig, Refusal> {
    let model = Model::load("llama-3.1-8b").unwrap();
    let profile = Profile::new(Gpu::load(gpu).unwrap(), model, Layout::default(), &Constants::fitted()).unwrap();
    SimConfig::from_args(&ServeArgs::parse(flags).unwrap(), profile)
}

#[test]
fn defaults_are_vllms_for_the_gpu() {
    let seqs_and_tokens = |config: SimConfig| (config.engine.max_num_seqs, config.engine.max_num_batched_tokens);
    assert_eq!(seqs_and_tokens(config(&["m"]).unwrap()), (1024, 8192));
    let small = &["m", "--max-model-len", "2048"];
    assert_eq!(seqs_and_tokens(on("l4", small).unwrap()), (256, 2048));
    assert_eq!(seqs_and_tokens(on("a100-80", small).unwrap()), (256, 2048));
    let double = config(&["m", "--performance-mode", "throughput"]).unwrap();
    assert_eq!(seqs_and_tokens(double), (2048, 16_384));
    // A default adapts to a given flag.
    let tight = config(&["m", "--max-num-batched-tokens", "512"]).unwrap();
    assert_eq!(seqs_and_tokens(tight), (512, 512));
    let few = config(&["m", "--max-num-seqs", "4", "--max-model-len", "1024"]).unwrap();
    assert_eq!(seqs_and_tokens(few), (4, 4096));
}

#[test]
fn the_measured_server_has_its_cache() {
    let config = config(&["m", "--max-num-seqs", "256"]).unwrap();
    assert_eq!((config.engine.num_blocks, config.max_model_len), (57_301, 131_072));
}

#[test]
fn graphs_are_captured_as_the_flags_say() {
    let graphs = |flags: &[&str]| {
        let config = config(&[&["m", "--max-num-seqs", "256"], flags].concat()).unwrap();
        (config.graphs.counts(), config.graphs.largest(), config.budget.unwrap().graphs > 10.0 * GIB)
    };
    assert_eq!(graphs(&[]), ((51, 35), 512, false));
    assert_eq!(graphs(&["--max-cudagraph-capture-size", "1280"]), ((99, 35), 1280, false));
    assert_eq!(graphs(&["--cudagraph-capture-sizes", "1", "8", "64"]), ((3, 3), 64, false));
    let sparse =
        ["--cudagraph-capture-sizes", "1", "2", "4", "8", "16", "32", "64", "128", "256", "512", "768", "1024", "1280"];
    assert_eq!(graphs(&sparse), ((13, 9), 1280, false));
    let dense: Vec<String> = (1..=40).chain([1280]).map(|size| size.to_string()).collect();
    let dense: Vec<&str> =
        std::iter::once("--cudagraph-capture-sizes").chain(dense.iter().map(String::as_str)).collect();
    assert_eq!(graphs(&dense), ((41, 40), 1280, true), "what vLLM sets aside grows with every size");
    assert_eq!(graphs(&["--enforce-eager"]), ((0, 0), 0, false));
    assert_eq!(graphs(&["-O1"]), ((51, 0), 512, false));
    assert_eq!(graphs(&["--performance-mode", "interactivity"]), ((76, 60), 512, false));
    assert_eq!(graphs(&["-cc.cudagraph_mode=FULL"]), ((0, 51), 512, false));
    assert_eq!(graphs(&["-cc.cudagraph_mode=FULL_DECODE_ONLY", "-O1"]), ((0, 35), 512, false));
    assert_eq!(graphs(&["-cc.cudagraph_mode=FULL", "--enforce-eager"]), ((0, 0), 0, false));
    assert_eq!(graphs(&["-cc.cudagraph_capture_sizes=[1,8,300]"]), ((3, 2), 300, false));
    assert_eq!(graphs(&["--compilation-config", r#"{"max_cudagraph_capture_size": 1280}"#]), ((99, 35), 1280, false));
    let both = ["m", "--cudagraph-capture-sizes", "8", "16", "--max-cudagraph-capture-size", "32"];
    let error = config(&both).unwrap_err().to_string();
    assert!(
        error.contains("customized max_cudagraph_capture_size(=32) should be consistent with the max value of"),
        "{error}"
    );
    let text = |flags: &[&str]| config(flags).unwrap_err().to_string();
    assert!(
        text(&["m", "--max-cudagraph-capture-size", "0"]).contains("VllmConfig\n  Assertion failed, Maximum cudagraph")
    );
    assert!(
        text(&["m", "-cc.cudagraph_capture_sizes=[]"]).contains("should contain at least one element when using cuda")
    );
    assert!(config(&["m", "-cc.cudagraph_capture_sizes=[]", "-O0"]).is_ok(), "without graphs no size is looked at");
    let pooling = ["m", "--runner", "pooling", "-cc.mode=0"];
    assert!(text(&pooling).contains("piecewise cudagraphs is used, cudagraph_mode=PIECEWISE [type=assertion_error"));
    assert!(config(&[&pooling[..], &["--enforce-eager"]].concat()).is_ok());
    for (flag, key) in [("cudagraph-capture-sizes", "[8]"), ("max-cudagraph-capture-size", "8")] {
        let name = flag.replace('-', "_");
        let both = text(&["m", &format!("--{flag}"), "8", &format!("-cc.{name}={key}")]);
        assert_eq!(both, format!("ValueError: {name} and compilation_config.{name} are mutually exclusive"));
    }
    assert_eq!(config(&["m", "--api-server-count", "4"]).unwrap().api_servers, 4);
}

#[test]
fn what_vllm_refuses_is_refused_with_its_message() {
    let text = |flags: &[&str]| config(flags).unwrap_err().to_string();
    assert!(text(&["m", "--max-num-batched-tokens", "512", "--max-num-seqs", "1024"]).contains(
        "1 validation error for SchedulerConfig\n  Value error, max_num_batched_tokens (512) must be greater than or \
             equal to max_num_seqs (1024). [type=value_error"
    ));
    assert!(text(&["m", "--stream-interval", "0"]).contains(
        "SchedulerConfig\nstream_interval\n  Input should be greater than or equal to 1 [type=greater_than_equal, \
         input_value=0, input_type=int]"
    ));
    assert!(text(&["m", "--gpu-memory-utilization", "1.5"]).contains("less than or equal to 1 [type=less_than_equal"));
    assert!(text(&["m", "--watermark", "2"]).contains("Input should be less than 1"));
    assert!(text(&["m", "--max-model-len", "999999"]).contains("greater than the derived max_model_len"));
    assert!(
        text(&["m", "--long-prefill-token-threshold", "10000", "--max-model-len", "8192"]).contains("(10000) cannot")
    );
    assert!(
        text(&["m", "--enable-lora", "--max-loras", "4", "--max-cpu-loras", "2"]).contains("max_cpu_loras (2) must")
    );
    assert!(
        text(&["m", "--enable-auto-tool-choice"]).starts_with("TypeError: Error: --enable-auto-tool-choice requires")
    );
    assert!(
        text(&["m", "--num-gpu-blocks-override", "1001"]).contains("the estimated maximum model length is 16000. Try")
    );
    assert!(text(&["/nowhere/model"]).contains("Repo id must be in the form"));
    assert!(matches!(config(&[] as &[&str]), Err(Refusal::NoModel)));
}

#[test]
fn a_small_card_refuses_a_large_model_and_takes_it_in_fp8() {
    let refused = on("rtx3080-10", &["m", "--max-model-len", "30576"]).unwrap_err();
    assert_eq!(refused.stage(), Stage::Weights);
    assert!(refused.log_line().unwrap().contains("not enough GPU memory"));
    assert!(refused.to_string().contains("the estimated maximum model length is"), "{refused}");
    let fp8 = [
        "m",
        "--quantization",
        "fp8",
        "--kv-cache-dtype",
        "fp8",
        "--max-num-seqs",
        "16",
        "--gpu-memory-utilization",
        "0.97",
    ];
    let long = on("rtx3080-10", &[&fp8[..], &["--max-model-len", "30576"]].concat()).unwrap_err().to_string();
    assert!(long.contains("max seq len (30576)") && long.contains("the estimated maximum model length is"), "{long}");
    assert!(on("rtx3080-10", &[&fp8[..], &["--max-model-len", "1024"]].concat()).is_ok());
}

#[test]
fn flags_that_change_nothing_are_named() {
    let args = ServeArgs::parse(&["m", "--port", "1", "--load-format", "dummy", "--stream-interval", "4"]).unwrap();
    assert_eq!(without_effect(&args, Version::COMPARED), ["load-format"]);
    let config = r#"{"cudagraph_mode": "FULL", "mode": 3, "pass_config": {"fuse_norm_quant": false}}"#;
    let args = ServeArgs::parse(&["m", "-O1", "--compilation-config", config]).unwrap();
    assert_eq!(without_effect(&args, Version::COMPARED), ["compilation-config.pass_config"]);
}

#[test]
fn prefills_are_held_by_the_interval_since_vllm_0_33() {
    let flags = ["m", "--prefill-schedule-interval", "3"];
    let args = ServeArgs::parse(&flags).unwrap();
    for (version, interval, idle) in
        [(Version::COMPARED, 1, vec!["prefill-schedule-interval"]), (Version::new(0, 33, 0), 3, vec![])]
    {
        assert_eq!(config(&flags).unwrap().imitating(version).engine.prefill_schedule_interval, interval);
        assert_eq!(without_effect(&args, version), idle);
    }
    assert!(config(&["m", "--prefill-schedule-interval", "0"]).is_err());
}

#[test]
fn auto_length_fits_the_cache() {
    let config = config(&["m", "--num-gpu-blocks-override", "1001", "--max-model-len", "auto"]).unwrap();
    assert_eq!(config.max_model_len, 16_000);
}

#[test]
fn memory_of_another_process_is_checked_first() {
    let args = ServeArgs::parse(&["m"]).unwrap();
    let refused = SimConfig::with_occupied(&args, Profile::named("h200-llama-8b").unwrap(), 100.0 * GIB).unwrap_err();
    assert!(refused.to_string().starts_with("ValueError: Free memory on device cuda:0 ("), "{refused}");
}

/// A closed loop of `streams` streams on virtual time: tokens per second, and the median time to
/// first token in seconds.
fn loaded(config: &SimConfig, streams: u64) -> (f64, f64) {
    const ROUNDS: u64 = 6;
    let mut server = config.virtual_server();
    let request = |id| crate::Request::new(id, 512, 128);
    let mut sent: std::collections::HashMap<u64, Duration> = (0..streams).map(|id| (id, Duration::ZERO)).collect();
    for id in 0..streams {
        server.submit(Duration::ZERO, [request(id)]);
    }
    let (mut waits, mut tokens, mut next, mut now) = (Vec::new(), 0u64, streams, Duration::ZERO);
    while let Some(at) = server.next_at() {
        now = at;
        let Some(end) = server.poll(at) else { continue };
        for token in end.emitted {
            tokens += 1;
            if token.first {
                waits.push((end.ended - sent[&token.id]).as_secs_f64());
            }
            if token.last && next < ROUNDS * streams {
                sent.insert(next, end.ended);
                server.submit(end.ended, [request(next)]);
                next += 1;
            }
        }
    }
    waits.sort_by(f64::total_cmp);
    (tokens as f64 / now.as_secs_f64(), waits[waits.len() / 2])
}

#[test]
fn adapters_of_the_start_are_loaded_before_the_first_request() {
    let first_token = |flags: &[&str], adapter| {
        let lora = ["m", "--enable-lora", "--max-loras", "2", "--max-cpu-loras", "3"];
        let mut server = config(&[&lora, flags].concat()).unwrap().virtual_server();
        server.submit(Duration::ZERO, [crate::Request { adapter: Some(adapter), ..crate::Request::new(1, 16, 1) }]);
        let mut loads = None;
        while let Some(at) = server.next_at() {
            if let Some(end) = server.poll(at) {
                loads = loads.or(Some((end.load.adapter_loads, end.load.adapter_activations)));
            }
        }
        loads.unwrap()
    };
    assert_eq!(first_token(&[], 0), (1, 1));
    let modules = ["--lora-modules", "a=/a", "b=/b", "c=/c", "d=/d"];
    assert_eq!([0, 1, 2, 3].map(|adapter| first_token(&modules, adapter)), [(1, 1), (0, 1), (0, 0), (0, 0)]);
    assert_eq!(first_token(&modules[..2], 0), (0, 0));
}

#[test]
fn beyond_max_num_seqs_only_the_wait_grows() {
    // On this host, launches of prompts above the graph sizes are as fast as the GPU. On a slower
    // host, they would bound the throughput.
    let (gpu, model) = (Gpu::load("h200").unwrap(), Model::load("llama-3.1-8b").unwrap());
    let quiet = Constants::on_host("quiet").unwrap();
    let profile = Profile::new(gpu, model, Layout::default(), &quiet).unwrap();
    let args = ServeArgs::parse(&["m", "--max-num-seqs", "50"]).unwrap();
    let config = SimConfig::from_args(&args, profile).unwrap();
    let [(few, _), (some, _), (full, wait), (over, long_wait)] =
        [10, 25, 50, 150].map(|streams| loaded(&config, streams));
    assert!(some > 1.5 * few && full > 1.2 * some, "throughput grows up to the limit: {few} {some} {full}");
    assert!((over / full - 1.0).abs() < 0.15, "and is flat behind it: {full} {over}");
    assert!(long_wait > 4.0 * wait, "while the wait grows: {wait} {long_wait}");
}
