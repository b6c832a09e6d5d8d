//! Conclusions from an engine's refusal of one setting about other settings.
//!
//! If the KV cache is too small for one request of `max-model-len`, vLLM reports the largest length
//! that fits. So settings with a larger `max-model-len` and the same memory or less are not
//! started. Keys of the gateway do not matter. A setting without `max-model-len` is started: the
//! model's length is unknown here.

use crate::setting::{Setting, name};
use crate::trial::{Outcome, Trial};
use sluice_config::ArgValue;
use sluice_core::vllm::failure::{Diagnosis, FailureClass};
use sluice_lab::sweep::flag_of;

const LENGTH: &str = "max-model-len";
/// The flag that gives the KV cache more memory.
const SHARE: &str = "gpu-memory-utilization";

pub(crate) fn refusal(trials: &[Trial], setting: &Setting) -> Option<String> {
    trials.iter().find_map(|trial| {
        let Outcome::Refused { reason, foreseen: false } = &trial.outcome else { return None };
        let most = Diagnosis::plain(FailureClass::KvTooSmall, Some(reason.clone())).suggestion?.value;
        let wanted = value(setting, LENGTH).filter(|wanted| *wanted > most as f64)?;
        let same = others(setting) == others(&trial.setting);
        // Without `gpu-memory-utilization` vLLM uses about 0.9. The exact value is not known, so an
        // absent value is compared only with another absent value.
        let no_more = match (value(setting, SHARE), value(&trial.setting, SHARE)) {
            (Some(one), Some(other)) => one <= other,
            (one, other) => one == other,
        };
        (same && no_more).then(|| {
            format!(
                "{LENGTH} {wanted}: at most {most} fit into the KV cache, as the engine said with {}",
                name(&trial.setting)
            )
        })
    })
}

fn value(setting: &Setting, flag: &str) -> Option<f64> {
    setting.get(&format!("vllm.{flag}")).and_then(ArgValue::number)
}

fn others(setting: &Setting) -> Vec<(&String, String)> {
    let is_other = |(key, value): (&'_ String, &'_ ArgValue)| match flag_of(key) {
        Some((None, LENGTH | SHARE)) | None => None,
        Some(_) => Some(value.to_string()),
    };
    setting.iter().filter_map(|(key, value)| Some((key, is_other((key, value))?))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::setting::value as read;
    use crate::trial::Effort;

    fn setting(pairs: &[(&str, &str)]) -> Setting {
        pairs.iter().map(|(key, text)| ((*key).to_owned(), read(text))).collect()
    }

    #[test]
    fn a_refusal_of_the_kv_cache_teaches_the_longest_request() {
        let refused = setting(&[("vllm.max-model-len", "131072"), ("vllm.gpu-memory-utilization", "0.8")]);
        let reason = "kv_too_small: To serve at least one request with the model's max seq len (131072), 16.00 GiB KV cache is \
                      needed, which is larger than the available KV cache memory. Based on the available memory, the \
                      estimated maximum model length is 40960.";
        let trials = [Trial::refused(&refused, Effort::Race(None), reason.to_owned(), false)];
        let asked = |pairs: &[(&str, &str)]| refusal(&trials, &setting(pairs));
        let longer = asked(&[("vllm.max-model-len", "65536"), ("vllm.gpu-memory-utilization", "0.8")]);
        assert!(longer.is_some_and(|reason| reason.contains("max-model-len 65536: at most 40960 fit")));
        let with_gateway =
            [("vllm.max-model-len", "65536"), ("vllm.gpu-memory-utilization", "0.7"), ("pool.all.slots", "3")];
        assert!(asked(&with_gateway).is_some());
        for allowed in [
            &[("vllm.max-model-len", "32768"), ("vllm.gpu-memory-utilization", "0.8")][..],
            &[("vllm.max-model-len", "65536"), ("vllm.gpu-memory-utilization", "0.9")],
            &[("vllm.max-model-len", "65536")],
            &[("vllm.max-model-len", "65536"), ("vllm.gpu-memory-utilization", "0.8"), ("vllm.max-num-seqs", "8")],
            &[],
        ] {
            assert_eq!(asked(allowed), None, "{allowed:?}");
        }
    }
}
