//! Tests of profiles: built-in presets, files of the user, errors, published numbers.
//!
//! The published numbers are latencies of other GPUs and models, to which no constant was fitted.

use super::*;

#[test]
fn every_built_in_profile_reads_and_joins() {
    for gpu in Gpu::names() {
        for model in Model::names() {
            let layout = Layout { tensor_parallel: 4, ..Layout::default() };
            Profile::new(Gpu::load(gpu).unwrap(), Model::load(model).unwrap(), layout, &Constants::fitted()).unwrap();
        }
    }
    assert!(PROFILES.iter().all(|name| Profile::named(name).is_some()));
    assert!(Profile::named("abacus").is_none());
}

#[test]
fn parameters_add_up_to_the_names() {
    for (name, billions) in
        [("llama-3.2-1b", 1.236), ("llama-3.1-8b", 8.030), ("qwen2.5-7b", 7.615), ("llama-3.1-70b", 70.55)]
    {
        let model = Model::load(name).unwrap();
        let tables = if model.tied_embeddings { 1.0 } else { 2.0 };
        let sum = (model.layer_parameters() + tables * model.head_parameters()) / 1e9;
        assert!((sum - billions).abs() < 0.01, "{name}: {sum}");
    }
    assert_eq!(Model::load("llama-3.1-8b").unwrap().kv_bytes_per_token(2.0), 131_072.0);
}

#[test]
fn an_unknown_name_is_answered_with_the_known_ones() {
    assert_eq!(Gpu::load("RTX-3080").unwrap(), Gpu::load("rtx3080-10").unwrap());
    assert!(Gpu::load("h").is_err() && Gpu::load("-").is_err(), "two begin so");
    let error = Gpu::load("h300").unwrap_err().to_string();
    assert!(error.contains("'h300'") && error.contains("h200, h100-80, a100-80, rtx3080-10, l4"), "{error}");
    assert!(Model::load("gpt-5").unwrap_err().to_string().contains("llama-3.2-1b"));
    assert!(matches!(Model::load("./nowhere.toml"), Err(ProfileError::Unreadable { .. })));
}

#[test]
fn a_file_of_the_user_is_read_and_all_missing_numbers_are_named() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("b200.toml");
    let load = |text: &str| {
        std::fs::write(&path, text).unwrap();
        Gpu::load(path.to_str().unwrap())
    };
    let error = load("memory_gib = 178.0\ncontext_gib = 0.5\nreserved_gib = 0.04").unwrap_err().to_string();
    assert!(error.contains("lacks bandwidth_gb_per_s, bf16_tflops, multiprocessors"), "{error}");
    let whole = "memory_gib = 178\ncontext_gib = 0.5\nreserved_gib = 0.04\nbandwidth_gb_per_s = 8000\nbf16_tflops = 2250\nmultiprocessors = 148\n";
    assert_eq!(load(whole).unwrap().bandwidth_gb_per_s, 8000.0);
    assert!(load(&format!("{whole}cores = 3")).unwrap_err().to_string().contains("cores"));
    assert!(load(&whole.replace("178", "'much'")).unwrap_err().to_string().contains("memory_gib"));
    let error = load(&format!("{whole}[efficiency]\nspeed = 0.5")).unwrap_err().to_string();
    assert!(error.contains("speed"), "{error}");
    let gpu = load(&format!("{whole}[efficiency]\nlinear = 0.5")).unwrap();
    assert_eq!(Constants::fitted().with_overrides(gpu.overrides(), "b200").unwrap().efficiency.linear, 0.5);
}

#[test]
fn a_served_name_finds_its_model() {
    for (served, layers) in [
        ("meta-llama/Llama-3.1-8B-Instruct", 32),
        ("meta-llama/Meta-Llama-3.1-70B", 80),
        ("Qwen/Qwen2.5-7B-Instruct", 28),
        ("llama-3.2-1b", 16),
    ] {
        assert_eq!(Model::of_served(served).map(|model| model.layers), Some(layers), "{served}");
    }
    assert_eq!(Model::of_served("mistral"), None);
}

/// Duration in ms of a step in which `streams` sequences with this context decode.
fn decode_ms(gpu: Gpu, model: &str, tensor_parallel: u32, streams: u32, context: u32) -> f64 {
    let layout = Layout { tensor_parallel, ..Layout::default() };
    let profile = Profile::new(gpu, Model::load(model).unwrap(), layout, &Constants::fitted()).unwrap();
    let mut load = StepLoad::default();
    (0..streams).for_each(|_| load.add(context, 1, false));
    CostModel::new(&profile, 256, 8192).duration(&load).as_secs_f64() * 1e3
}

/// Published numbers to which nothing was fitted. The constants of an H200 predict them within 20
/// %.
#[test]
fn other_gpus_and_models_come_near_to_published_numbers() {
    let load = |name: &str| Gpu::load(name).unwrap();
    // The 40 GB A100 has less bandwidth than the 80 GB one.
    let a100_40 = Gpu { bandwidth_gb_per_s: 1555.0, ..load("a100-80") };
    for (what, simulated, published) in [
        ("H100 Llama-3.1-8B, 1 stream", decode_ms(load("h100-80"), "llama-3.1-8b", 1, 1, 300), 6.48),
        ("H100 Qwen2.5-7B, 1", decode_ms(load("h100-80"), "qwen2.5-7b", 1, 1, 128), 5.9),
        ("H100 Qwen2.5-7B, 16", decode_ms(load("h100-80"), "qwen2.5-7b", 1, 16, 128), 6.3),
        ("H100 Qwen2.5-7B, 64", decode_ms(load("h100-80"), "qwen2.5-7b", 1, 64, 128), 7.3),
        ("H100 Qwen2.5-7B, 128", decode_ms(load("h100-80"), "qwen2.5-7b", 1, 128, 128), 8.6),
        ("A100-40 Llama-3.1-8B, 1", decode_ms(a100_40, "llama-3.1-8b", 1, 1, 1024), 1000.0 / 75.0),
    ] {
        let error = simulated / published - 1.0;
        println!("{what:32} published {published:6.2} ms, simulated {simulated:6.2}, {:+.1} %", 100.0 * error);
        assert!(error.abs() < 0.20, "{what}: {simulated}");
    }
}

#[test]
fn a_group_divides_the_work_and_pays_for_communication() {
    let ms = |model: &str, group: u32| decode_ms(Gpu::load("h200").unwrap(), model, group, 8, 1000);
    let (one, two, four) = (ms("llama-3.1-70b", 1), ms("llama-3.1-70b", 2), ms("llama-3.1-70b", 4));
    assert!(two > 0.52 * one && two < 0.75 * one, "{one} {two}");
    assert!(four > 0.54 * two && four < 0.85 * two, "{two} {four}");
    let (gpu, model) = (Gpu::load("h200").unwrap(), Model::load("qwen2.5-7b").unwrap());
    let layout = Layout { tensor_parallel: 3, ..Layout::default() };
    let error = Profile::new(gpu, model, layout, &Constants::fitted()).unwrap_err().to_string();
    assert!(error.contains("28 heads cannot be divided among 3 GPUs"), "{error}");
}
