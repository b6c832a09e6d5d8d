//! Settings that are passed on, refused or dropped before a start.
//!
//! All errors of a start are reported at once.

use std::fs;

use std::collections::BTreeMap;
use std::path::Path;

use super::installed_flags::InstalledFlags;
use super::*;
use crate::driver::{AdapterRank, EngineFailure, EngineSettings};
use sluice_config::{Gpu, Launch};
use sluice_core::engines::EngineKind;
use sluice_core::vllm::failure::{FailureClass, Retryable};

fn launch(command: &[&str]) -> Launch {
    Launch::of(command.iter().map(|word| (*word).to_owned()).collect(), 8001)
}

fn settings(json: &str) -> EngineSettings {
    EngineSettings { args: serde_json::from_str(json).unwrap() }
}

fn known() -> InstalledFlags {
    let names = "dtype enable-lora max-lora-rank max-num-seqs max-num-batched-tokens no-enable-prefix-caching \
                 enable-prefix-caching disable-log-stats lora-modules tensor-parallel-size max-model-len served-model-name \
                 gpu-memory-utilization cudagraph-capture-sizes max-loras max-cpu-loras port host model";
    let mut known: InstalledFlags = names.split_whitespace().map(|name| (name.to_owned(), Vec::new())).collect();
    known.insert("max-lora-rank".to_owned(), ["1", "8", "32"].map(str::to_owned).to_vec());
    known
}

fn plan(json: &str) -> Result<LaunchPlan, EngineFailure> {
    LaunchPlan::new(EngineKind::Vllm, &launch(&["sh", "serve", "org/model"]), &settings(json), Some(&known()))
}

#[track_caller]
fn refused(json: &str, class: FailureClass, words: &str) {
    let failure = plan(json).unwrap_err();
    assert_eq!((failure.class, failure.retry()), (class, Retryable::Never), "{failure}");
    assert!(failure.to_string().contains(words), "{failure}");
}

#[test]
fn settings_become_flags_after_the_command() {
    let json = r#"{"max_num_seqs": 32, "enable-prefix-caching": false, "dtype": "half", "enable-lora": true,
                   "gpu-memory-utilization": 0.9, "served-model-name": ["a", "b"]}"#;
    let plan = plan(json).unwrap();
    assert!(Path::new(&plan.argv[0]).is_absolute());
    let wanted = "serve org/model --dtype=half --enable-lora --no-enable-prefix-caching --gpu-memory-utilization=0.9 \
                  --max-num-seqs=32 --served-model-name a b --host 127.0.0.1 --port 8001";
    assert_eq!(plan.argv[1..].join(" "), wanted);
    assert_eq!(plan.env["VLLM_ALLOW_RUNTIME_LORA_UPDATING"], "1");
}

#[test]
fn a_json_key_keeps_its_name_and_a_config_file_is_two_words() {
    let json = r#"{"compilation_config.cudagraph_mode": "FULL", "compilation-config.use_inductor": false,
                   "speculative_config.num_speculative_tokens": 3, "compilation-config.compile_sizes": ["1", "a"],
                   "config": "x.yaml"}"#;
    let plan = LaunchPlan::new(EngineKind::Vllm, &launch(&["sh", "serve", "m"]), &settings(json), None).unwrap();
    let wanted = [
        "serve",
        "m",
        "--compilation-config.compile_sizes=[1,\"a\"]",
        "--compilation-config.cudagraph_mode=FULL",
        "--compilation-config.use_inductor=false",
        "--config",
        "x.yaml",
        "--speculative-config.num_speculative_tokens=3",
    ];
    assert_eq!(plan.argv[1..9], wanted);
    assert_eq!(settings(r#"{"compilation_config.max_num": 1}"#).words(), ["--compilation-config.max_num=1"]);
    let mut known = known();
    known.insert("compilation-config".to_owned(), Vec::new());
    let off = settings(r#"{"compilation-config.use_inductor": false}"#);
    assert!(LaunchPlan::new(EngineKind::Vllm, &launch(&["sh", "serve", "m"]), &off, Some(&known)).is_ok());
}

#[test]
fn devices_and_the_cache_reach_the_environment() {
    let mut launch = launch(&["sh", "serve", "m"]);
    launch.gpu = vec![Gpu::Index(2), Gpu::Index(3)];
    launch.env = BTreeMap::from([("VLLM_CACHE_ROOT".to_owned(), "cache/vllm".to_owned().into())]);
    let plan = LaunchPlan::new(EngineKind::Vllm, &launch, &EngineSettings::default(), None).unwrap();
    assert_eq!(
        (plan.env["CUDA_VISIBLE_DEVICES"].as_str(), plan.env["CUDA_DEVICE_ORDER"].as_str()),
        ("2,3", "PCI_BUS_ID")
    );
    let root = Path::new(&plan.env["VLLM_CACHE_ROOT"]);
    assert!(root.is_absolute() && root.ends_with("cache/vllm"), "{}", root.display());
    launch.env.insert("CUDA_VISIBLE_DEVICES".to_owned(), "GPU-1".to_owned().into());
    assert_eq!(
        LaunchPlan::new(EngineKind::Vllm, &launch, &EngineSettings::default(), None).unwrap().env["CUDA_VISIBLE_DEVICES"],
        "GPU-1"
    );
}

#[test]
fn unknown_flags_are_refused_and_obsolete_ones_dropped() {
    refused(r#"{"max-num-sequences": 3}"#, FailureClass::UnknownFlag, "did you mean max-num-seqs?");
    refused(r#"{"banana": 3}"#, FailureClass::UnknownFlag, "no flag --banana");
    refused(r#"{"cuda-graph-sizes": 3}"#, FailureClass::UnknownFlag, "replaced by cudagraph-capture-sizes");
    refused(r#"{"disable-log-stats": false}"#, FailureClass::BadArguments, "remove the setting");
    let plan = plan(r#"{"disable-log-requests": true, "swap_space": 4}"#).unwrap();
    assert_eq!(plan.argv[1..].join(" "), "serve org/model --host 127.0.0.1 --port 8001");
    assert_eq!(plan.notices.len(), 2);
    assert!(plan.notices[0].to_string().contains("disable-log-requests is dropped"));
}

#[test]
fn an_unknown_flag_in_the_command_is_refused_too() {
    let command = ["sh", "serve", "m", "--max-num-seqs", "4", "--disable-log-requests"];
    let failure =
        LaunchPlan::new(EngineKind::Vllm, &launch(&command), &EngineSettings::default(), Some(&known())).unwrap_err();
    assert_eq!(failure.class, FailureClass::UnknownFlag);
    assert!(failure.to_string().contains("no flag --disable-log-requests, which launch.command"), "{failure}");
}

#[test]
fn settings_are_passed_unchecked_where_the_flags_are_unknown() {
    let plan = LaunchPlan::new(
        EngineKind::Vllm,
        &launch(&["sh", "serve", "m"]),
        &settings(r#"{"new-flag-of-2027": 1}"#),
        None,
    )
    .unwrap();
    assert!(plan.argv.contains(&"--new-flag-of-2027=1".to_owned()));
}

#[test]
fn wrong_values_are_refused_with_the_name_of_the_flag() {
    refused(r#"{"max-num-seqs": "banana"}"#, FailureClass::BadArguments, "--max-num-seqs: invalid int value: 'banana'");
    refused(r#"{"max-num-seqs": 0}"#, FailureClass::BadArguments, "at least 1");
    refused(r#"{"max-num-seqs": 1.5}"#, FailureClass::BadArguments, "--max-num-seqs");
    refused(r#"{"gpu-memory-utilization": 92}"#, FailureClass::BadArguments, "at most 1");
    refused(r#"{"max-lora-rank": 12}"#, FailureClass::BadArguments, "must be one of 1, 8, 32");
    refused(
        r#"{"max-num-batched-tokens": 64, "max-num-seqs": 128}"#,
        FailureClass::BadArguments,
        "(64) must be greater",
    );
    refused(r#"{"max-loras": 8, "max-cpu-loras": 4}"#, FailureClass::BadArguments, "max-cpu-loras (4)");
    refused(r#"{"port": 9}"#, FailureClass::BadArguments, "launch.port only");
    refused(r#"{"-x y": 9}"#, FailureClass::UnknownFlag, "-x y");
}

#[test]
fn settings_are_checked_against_the_flags_of_the_command() {
    let command = launch(&["sh", "serve", "m", "--max-num-batched-tokens", "64"]);
    let failure =
        LaunchPlan::new(EngineKind::Vllm, &command, &settings(r#"{"max-num-seqs": 128}"#), Some(&known())).unwrap_err();
    assert!(failure.to_string().contains("max_num_batched_tokens (64)"), "{failure}");
}

#[test]
fn more_devices_than_are_listed_are_refused() {
    let mut launch = launch(&["sh", "serve", "m"]);
    launch.gpu = vec![Gpu::Index(0)];
    let failure =
        LaunchPlan::new(EngineKind::Vllm, &launch, &settings(r#"{"tensor-parallel-size": 2}"#), Some(&known()))
            .unwrap_err();
    assert!(failure.to_string().contains("needs 2 devices, gpu lists 1"), "{failure}");
    launch.gpu = vec![Gpu::Index(0), Gpu::Index(1)];
    let mut of = |words: &[&str], json: &str| {
        launch.command = ["sh", "serve", "m"].iter().chain(words).map(|word| (*word).to_owned()).collect();
        LaunchPlan::new(EngineKind::Vllm, &launch, &settings(json), None)
    };
    assert!(of(&["-tp", "4"], "{}").unwrap_err().to_string().contains("tensor-parallel-size 4 needs 4 devices"));
    let data = r#"{"data-parallel-size": 2, "tensor-parallel-size": 2}"#;
    assert!(of(&[], data).unwrap_err().to_string().contains("needs 4 devices, gpu lists 2"));
    for words in [
        ["--nnodes", "2"],
        ["--distributed-executor-backend", "ray"],
        ["--data-parallel-size-local", "1"],
        ["--data-parallel-backend", "ray"],
        ["--data-parallel-rank", "1"],
    ] {
        assert!(of(&words, data).is_ok(), "{words:?}");
    }
}

#[test]
fn a_missing_model_folder_is_refused() {
    let at = |model: &str| {
        LaunchPlan::new(EngineKind::Vllm, &launch(&["sh", "serve", model]), &EngineSettings::default(), Some(&known()))
    };
    let failure = at("/nonexistent/model").unwrap_err();
    assert_eq!((failure.class, failure.retry()), (FailureClass::ModelNotFound, Retryable::Never));
    let folder = tempfile::tempdir().unwrap();
    assert!(at(folder.path().to_str().unwrap()).unwrap_err().to_string().contains("no config.json"));
    let described = settings(r#"{"hf-config-path": "org/m"}"#);
    let weights = launch(&["sh", "serve", folder.path().to_str().unwrap()]);
    assert!(LaunchPlan::new(EngineKind::Vllm, &weights, &described, None).is_ok());
    fs::write(folder.path().join("config.json"), "{}").unwrap();
    assert!(at(folder.path().to_str().unwrap()).is_ok());
    assert!(at("org/model-on-a-hub").is_ok());
}

#[test]
fn an_adapter_of_a_larger_rank_is_refused_with_the_rank_that_fits() {
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("adapter_config.json"), r#"{"r": 24}"#).unwrap();
    let path = folder.path().display();
    for module in [format!("ad={path}"), format!(r#"{{\"name\": \"ad\", \"path\": \"{path}\"}}"#)] {
        let json = format!(r#"{{"enable-lora": true, "max-lora-rank": 8, "lora-modules": ["{module}"]}}"#);
        let failure = plan(&json).unwrap_err();
        assert_eq!(failure.class, FailureClass::LoraRank, "{failure}");
        assert_eq!(failure.suggestion.map(|suggestion| suggestion.value), Some(32));
    }
    let json = format!(r#"{{"enable-lora": true, "max-lora-rank": 32, "lora-modules": ["ad={path}"]}}"#);
    assert!(plan(&json).is_ok());
    refused(&format!(r#"{{"lora-modules": ["ad={path}"]}}"#), FailureClass::BadArguments, "enable-lora = true");
    refused(
        r#"{"enable-lora": true, "lora-modules": ["ad=/nonexistent/ad"]}"#,
        FailureClass::ModelNotFound,
        "/nonexistent/ad",
    );
}

#[test]
fn the_adapter_rank_is_found_wherever_it_is_set() {
    let rank = |command: &[&str], json: &str| max_adapter_rank(EngineKind::Vllm, &launch(command), &settings(json));
    let bare = &["sh", "serve", "m"];
    let none = |rank: AdapterRank| match rank {
        AdapterRank::None(why) => why,
        other => panic!("{other:?}"),
    };
    assert!(none(rank(bare, "{}")).contains("set args.enable-lora = true"));
    assert_eq!(rank(bare, r#"{"enable-lora": true}"#), AdapterRank::UpTo(16));
    assert_eq!(rank(bare, r#"{"enable_lora": true, "max_lora_rank": 64}"#), AdapterRank::UpTo(64));
    let command = &["sh", "serve", "--enable-lora", "m", "--max-lora-rank=32"];
    assert_eq!(rank(command, "{}"), AdapterRank::UpTo(32));
    assert_eq!(rank(command, r#"{"max-lora-rank": 8}"#), AdapterRank::UpTo(8), "settings win");
    let short = &["sh", "serve", "m", "--enable-lora", "-tp", "2"];
    assert_eq!(rank(short, "{}"), AdapterRank::UpTo(16));
    let unseen = &["sh", "serve", "m", "--config", "/nonexistent/settings.yaml"];
    assert_eq!(rank(unseen, "{}"), AdapterRank::Unknown);
    assert!(none(rank(command, r#"{"data-parallel-size": 2}"#)).contains("set args.api-server-count = 1"));
    assert_eq!(rank(command, r#"{"data-parallel-size": 2, "api-server-count": 1}"#), AdapterRank::UpTo(32));
    assert_eq!(rank(command, r#"{"data-parallel-size": 2, "data-parallel-external-lb": true}"#), AdapterRank::UpTo(32));
}

#[test]
fn adapters_are_loaded_at_run_time_only_where_vllm_starts_with_it() {
    let env = |json: &str| {
        LaunchPlan::new(EngineKind::Vllm, &launch(&["sh", "serve", "m", "--enable-lora"]), &settings(json), None)
            .unwrap()
            .env
    };
    assert!(env("{}").contains_key("VLLM_ALLOW_RUNTIME_LORA_UPDATING"));
    assert!(!env(r#"{"data-parallel-size": 2}"#).contains_key("VLLM_ALLOW_RUNTIME_LORA_UPDATING"));
    assert!(!env(r#"{"api-server-count": 2}"#).contains_key("VLLM_ALLOW_RUNTIME_LORA_UPDATING"));
}

#[test]
fn a_config_file_counts_where_it_can_be_read() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("settings.yaml");
    fs::write(&file, "enable-lora: true\nmax-lora-rank: 8\nmax-num-seqs: 128\n").unwrap();
    fs::write(folder.path().join("adapter_config.json"), r#"{"r": 16}"#).unwrap();
    let path = folder.path().display().to_string();
    let command = launch(&["sh", "serve", "m", "--config", &file.display().to_string()]);
    let of = |command: &Launch, json: &str| LaunchPlan::new(EngineKind::Vllm, command, &settings(json), None);
    let module = format!(r#"{{"lora-modules": ["ad={path}"]}}"#);
    assert_eq!(of(&command, &module).unwrap_err().class, FailureClass::LoraRank);
    assert_eq!(of(&command, r#"{"max-num-batched-tokens": 64}"#).unwrap_err().class, FailureClass::BadArguments);
    let unseen = launch(&["sh", "serve", "m", "--config", "/nonexistent/settings.yaml"]);
    assert!(of(&unseen, &module).is_ok(), "the unreadable file may set it");
    let glued = launch(&["sh", "serve", "m", "--config=x.yaml"]);
    assert!(of(&glued, "{}").unwrap_err().to_string().contains("two words"));
}

#[test]
fn ignored_settings_and_unreachable_servers_are_refused() {
    let of = |command: &[&str], json: &str| LaunchPlan::new(EngineKind::Vllm, &launch(command), &settings(json), None);
    let twice = of(&["sh", "serve", "m"], r#"{"model": "other"}"#).unwrap_err().to_string();
    assert!(twice.contains("names m already"), "{twice}");
    assert!(of(&["sh", "-m", "vllm.entrypoints.openai.api_server", "--model", "a"], r#"{"model": "b"}"#).is_ok());
    for json in [r#"{"ssl-keyfile": "/k"}"#, r#"{"ssl_certfile": "/c"}"#, r#"{"uds": "/s"}"#] {
        assert!(of(&["sh", "serve", "m"], json).unwrap_err().to_string().contains("plain HTTP"), "{json}");
    }
    assert!(of(&["sh", "serve", "m", "--uds", "/s"], "{}").is_err());
    let list = of(&["sh", "serve", "m"], r#"{"max-num-seqs": ["1", "2"]}"#).unwrap_err().to_string();
    assert!(list.contains("max-num-seqs takes one value"), "{list}");
    assert!(of(&["sh", "serve", "m"], r#"{"new-flag": ["1", "2"], "hf-token": true}"#).is_ok());
    let units = r#"{"kv-transfer-config": "{\"kv_connector\": \"x1k\", \"kv_buffer_size\": 80m}"}"#;
    assert!(of(&["sh", "serve", "m"], units).is_ok());
    assert!(of(&["sh", "serve", "m"], r#"{"kv-transfer-config": "{\"a\": b}"}"#).is_err());
}

#[test]
fn the_flags_of_a_script_are_unknown() {
    let script = launch(&["sh", "start.sh", "m"]);
    assert_eq!(max_adapter_rank(EngineKind::Vllm, &script, &settings("{}")), AdapterRank::Unknown);
    assert_eq!(
        max_adapter_rank(EngineKind::Vllm, &script, &settings(r#"{"enable-lora": true, "max-lora-rank": 8}"#)),
        AdapterRank::UpTo(8)
    );
}

#[test]
fn engines_that_schedule_by_priority_are_known_by_their_flags_wherever_they_are_set() {
    let by_priority =
        |command: &[&str], json: &str| schedules_by_priority(EngineKind::Vllm, &launch(command), &settings(json));
    assert!(!by_priority(&["vllm", "serve", "m"], "{}"), "vLLM's default is fcfs");
    assert!(by_priority(&["vllm", "serve", "m", "--scheduling-policy", "priority"], "{}"));
    assert!(by_priority(&["vllm", "serve", "m", "--scheduling_policy=priority"], "{}"));
    assert!(by_priority(&["vllm", "serve", "m"], r#"{"scheduling-policy": "priority"}"#));
    let set_back = r#"{"scheduling-policy": "fcfs"}"#;
    assert!(!by_priority(&["vllm", "serve", "m", "--scheduling-policy", "priority"], set_back));
    assert!(by_priority(&["./start.sh", "--scheduling-policy", "priority"], "{}"), "a script passes it on");
    assert!(!by_priority(&["./start.sh", "priority"], "{}"));
}

#[test]
fn the_sequences_of_an_engine_are_found_wherever_they_are_set() {
    let command = launch(&["sh", "serve", "m", "--max-num-seqs", "64", "-dp", "2"]);
    assert_eq!(sequences(EngineKind::Vllm, &command, &settings("{}")), Some(128));
    assert_eq!(sequences(EngineKind::Vllm, &command, &settings(r#"{"max-num-seqs": 32}"#)), Some(64));
    assert_eq!(sequences(EngineKind::Vllm, &launch(&["sh", "serve", "m"]), &settings("{}")), None);
}

#[test]
fn an_engine_runs_next_to_another_one_unless_its_flags_fix_a_port_and_its_weights_are_on_all_its_gpus() {
    let twice = |command: &[&str], json| can_run_twice(&launch(command), &settings(json));
    let serve = ["vllm", "serve", "m"];
    assert!(twice(&serve, r#"{"max-num-seqs": 8, "data-parallel-size": 1}"#));
    assert!(!twice(&["vllm", "serve", "m", "--port", "8001"], "{}"));
    assert!(!twice(&serve, r#"{"port": 8001}"#));
    assert!(!twice(&serve, r#"{"data_parallel_size": 2}"#));
    let of = |json| gpus(&launch(&["vllm", "serve", "m", "-tp", "2"]), &settings(json));
    assert_eq!((of("{}"), of(r#"{"pipeline-parallel-size": 3}"#), of(r#"{"tensor-parallel-size": 4}"#)), (2, 6, 4));
}
