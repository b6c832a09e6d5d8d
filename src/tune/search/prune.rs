//! Settings that earlier trials exclude.
//!
//! The report names each exclusion by these rules of thumb. At the end one excluded setting is
//! tried.
//!
//! | observation | excluded, with all other values the same |
//! |---|---|
//! | the KV cache was full with `max-num-seqs` N | more sequences |
//! | single requests miss TPOT with `max-num-batched-tokens` N | more tokens in a step |
//! | an engine did not start, or ended under load | a larger value of a key of [`MEMORY`] |

use super::ask::Known;
use crate::setting::Setting;
use crate::trial::{Outcome, Trial};

const SEQS: &str = "vllm.max-num-seqs";
const TOKENS: &str = "vllm.max-num-batched-tokens";
/// Keys whose larger values need more memory.
const MEMORY: [&str; 4] = [SEQS, "vllm.max-model-len", "vllm.max-loras", "vllm.max-lora-rank"];

pub(super) fn reason(setting: &Setting, known: &Known<'_>) -> Option<String> {
    known.trials.iter().find_map(|trial| excludes(trial, setting))
}

fn excludes(trial: &Trial, setting: &Setting) -> Option<String> {
    let larger = |key: &str| {
        let (had, has) = (trial.setting.get(key)?, setting.get(key)?);
        let more = has.number()? > had.number()? && same_but(key, &trial.setting, setting);
        more.then(|| format!("{} {had}", key.trim_start_matches("vllm.")))
    };
    match &trial.outcome {
        Outcome::Measured { .. } | Outcome::Worse { .. } if trial.kv_full => {
            Some(format!("the KV cache was full with {}", larger(SEQS)?))
        }
        Outcome::Unmet { objective, .. } if objective == "TPOT" => {
            Some(format!("even single requests miss TPOT with {}", larger(TOKENS)?))
        }
        Outcome::Refused { foreseen: false, .. } => {
            let larger = MEMORY.iter().find_map(|key| larger(key))?;
            Some(format!("no engine ran with {larger}, and more needs more memory"))
        }
        _ => None,
    }
}

fn same_but(key: &str, one: &Setting, other: &Setting) -> bool {
    let rest = |setting: &Setting| {
        setting.iter().filter(|(own, _)| *own != key).map(|(k, v)| (k.clone(), v.clone())).collect::<Vec<_>>()
    };
    rest(one) == rest(other)
}
