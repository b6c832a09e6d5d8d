//! The compile cache: records on disk which graphs earlier starts compiled.
//!
//! There is one folder per key under `$VLLM_CACHE_ROOT/torch_compile_cache` (without that variable
//! under `~/.cache/sluice/sim`). The folder has a name that a real vLLM does not use. The key has
//! settings of vLLM's key: version, model, length, number formats, group, GPU, adapters, token
//! budget and sequences. A change of another setting costs no compilation.

use std::path::PathBuf;

use sluice_sim::SimConfig;

pub(super) fn folder(config: &SimConfig) -> PathBuf {
    let root = std::env::var_os("VLLM_CACHE_ROOT").map(PathBuf::from).unwrap_or_else(|| {
        let home = std::env::var_os("HOME").map_or_else(std::env::temp_dir, PathBuf::from);
        home.join(".cache/sluice/sim")
    });
    let lora = config.lora.then_some((config.engine.max_loras, config.max_lora_rank));
    let key = format!(
        "{} {} {} {:?} {} {:?} {} {}",
        config.version,
        config.root,
        config.max_model_len,
        config.profile.layout,
        config.profile.gpu.title,
        lora,
        config.engine.max_num_batched_tokens,
        config.engine.max_num_seqs
    );
    let hash = twox_hash::XxHash3_64::oneshot(key.as_bytes());
    root.join("torch_compile_cache").join(format!("sim-{:010x}", hash & 0xff_ffff_ffff)).join("rank_0_0/backbone")
}

pub(super) fn is_warm(folder: &std::path::Path) -> bool {
    folder.join("compiled").is_file() && !disabled()
}

/// Records that the graph was compiled. If this fails, the next start is only slower.
pub(super) fn keep(folder: &std::path::Path) {
    if !disabled() {
        let _ = std::fs::create_dir_all(folder).and_then(|()| std::fs::write(folder.join("compiled"), b""));
    }
}

fn disabled() -> bool {
    std::env::var("VLLM_DISABLE_COMPILE_CACHE").is_ok_and(|value| value == "1")
}

#[cfg(test)]
mod tests {
    use super::*;
    use sluice_core::vllm::args::ServeArgs;
    use sluice_sim::Profile;

    #[test]
    fn only_what_vllm_compiles_for_is_in_the_key() {
        let key = |flags: &[&str]| {
            let flags = [&["m"], flags].concat();
            let args = ServeArgs::parse(&flags).unwrap();
            folder(&SimConfig::from_args(&args, Profile::named("h200-llama-8b").unwrap()).unwrap())
        };
        let base = key(&[]);
        for same in [
            &["--gpu-memory-utilization", "0.8"][..],
            &["--no-enable-prefix-caching"],
            &["--scheduling-policy", "priority"],
            &["--max-num-queued-reqs", "5", "--stream-interval", "2"],
        ] {
            assert_eq!(key(same), base, "{same:?}");
        }
        for other in [
            &["--max-num-batched-tokens", "4096"][..],
            &["--max-num-seqs", "128"],
            &["--max-model-len", "8192"],
            &["--enable-lora"],
            &["--kv-cache-dtype", "fp8"],
        ] {
            assert_ne!(key(other), base, "{other:?}");
        }
    }
}
