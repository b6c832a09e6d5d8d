//! The flags of vLLM that have an effect in the simulator, and functions that read single values.
//!
//! The simulator warns about every flag that is not in this list. A value out of range is refused
//! with vLLM's message.

use super::compilation;
use crate::process::refusal::Refusal;
use sluice_core::vllm::args::ServeArgs;
use sluice_core::vllm::version::Version;

/// Flags of vLLM that have an effect in the simulator, in alphabetical order. Other flags are
/// accepted without effect.
const SIMULATED: &str = "api-key api-server-count async-scheduling compilation-config convert cudagraph-capture-sizes \
    data-parallel-size disable-log-stats disable-uvicorn-access-log enable-auto-tool-choice enable-chunked-prefill \
    enable-force-include-usage enable-log-requests enable-lora enable-per-request-metrics enable-prefix-caching \
    enable-prompt-tokens-details enable-request-id-headers enable-scale-out enable-server-load-tracking \
    enable-sleep-mode enforce-eager gpu-memory-utilization host kv-cache-dtype kv-cache-memory-bytes kv-events-config \
    long-prefill-token-threshold long-prefill-token-threshold-adaptive lora-modules max-cpu-loras \
    max-cudagraph-capture-size max-logprobs max-lora-rank max-loras max-model-len max-num-active-seqs \
    max-num-batched-tokens max-num-queued-reqs max-num-queued-tokens max-num-seqs model \
    num-gpu-blocks-override optimization-level performance-mode port prefill-schedule-interval \
    profiler-config quantization runner \
    scheduler-reserve-full-isl scheduling-policy served-model-name show-hidden-metrics-for-version \
    shutdown-timeout spec-method spec-tokens speculative-config sse-keep-alive-interval stream-interval tensor-parallel-size tool-call-parser \
    uvicorn-log-level watermark";

/// A flag that vLLM obeys only since 0.33, except with data parallelism of mixture-of-experts
/// models.
const SINCE_33: &str = "prefill-schedule-interval";

/// The given flags, and keys of the compilation config, that have no effect in a simulator of
/// `version`, for a warning.
pub fn without_effect(args: &ServeArgs, version: Version) -> Vec<String> {
    let acts = |flag: &str| SIMULATED.split(' ').any(|known| known == flag) && (flag != SINCE_33 || version.since(33));
    let flags = args.flags().filter(|flag| !acts(flag)).map(str::to_owned);
    flags.chain(compilation::without_effect(args)).collect()
}

/// Whether an environment variable of vLLM is switched on.
pub(super) fn allowed(name: &str) -> bool {
    std::env::var(name).is_ok_and(|value| ["1", "true"].contains(&value.trim().to_lowercase().as_str()))
}

/// The value of a whole number with a lower bound. The flag has the name of the field, with dashes.
pub(super) fn at_least(
    args: &ServeArgs,
    class: &'static str,
    field: &'static str,
    least: i64,
    default: u32,
) -> Result<u32, Refusal> {
    let value = args.int(&field.replace('_', "-")).unwrap_or(i64::from(default));
    if value < least {
        return Err(Refusal::below(class, field, least, value));
    }
    Ok(u32::try_from(value).unwrap_or(u32::MAX))
}
