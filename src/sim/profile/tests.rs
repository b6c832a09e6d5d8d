//! Tests of profiles: what is built in reads, what is wrong is named.

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
    assert!(error.contains("lacks bandwidth_gb_per_s, bf16_tflops"), "{error}");
    let whole =
        "memory_gib = 178\ncontext_gib = 0.5\nreserved_gib = 0.04\nbandwidth_gb_per_s = 8000\nbf16_tflops = 2250\n";
    assert_eq!(load(whole).unwrap().bandwidth_gb_per_s, 8000.0);
    assert!(load(&format!("{whole}cores = 3")).unwrap_err().to_string().contains("cores"));
    assert!(load(&whole.replace("178", "'much'")).unwrap_err().to_string().contains("memory_gib"));
    let error = load(&format!("{whole}[efficiency]\nspeed = 0.5")).unwrap_err().to_string();
    assert!(error.contains("speed"), "{error}");
    let gpu = load(&format!("{whole}[efficiency]\nlinear = 0.5")).unwrap();
    assert_eq!(Constants::fitted().on(&gpu, "b200").unwrap().efficiency.linear, 0.5);
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
