//! One sentence of advice for the operator after a failure.
//!
//! The table of classes has one advice for each class. If the log shows a value that would have
//! worked, or which port of the engine is in use, the advice names it.

use super::class::FailureClass;
use super::suggestion::FlagSuggestion;

/// The advice for a failure. `cause` is the log line that shows it.
pub(super) fn advice(class: FailureClass, suggestion: Option<&FlagSuggestion>, cause: Option<&str>) -> String {
    let cause_contains = |texts: &[&str]| cause.is_some_and(|cause| texts.iter().any(|text| cause.contains(text)));
    let advice = match (class, suggestion) {
        (FailureClass::KvTooSmall, Some(FlagSuggestion { flag, value })) => {
            return format!(
                "set {flag} to {value} or less, or give the engine more KV cache memory (raise gpu-memory-utilization; \
                 on a CPU raise VLLM_CPU_KVCACHE_SPACE)"
            );
        }
        (FailureClass::BadArguments, Some(FlagSuggestion { flag, value })) => {
            return format!("set {flag} to {value} or less");
        }
        // Engines open more ports than the one for HTTP.
        (FailureClass::PortInUse, _) if cause_contains(&["ZMQError", "tcp://"]) => {
            "the port is not the engine's HTTP port but an internal one; set a different endpoint in kv-events-config (each \
             engine on a host needs its own) or a different data-parallel-rpc-port, or stop the process that holds the port"
        }
        (FailureClass::PortInUse, _)
            if cause_contains(&["EADDRINUSE", "DistNetworkError", "server socket has failed"]) =>
        {
            "the port is one that the engine's processes use among themselves; set a different master-port, or VLLM_PORT in \
             the engine's environment, or stop the process that holds the port"
        }
        _ => class.general_advice(),
    };
    advice.to_owned()
}
