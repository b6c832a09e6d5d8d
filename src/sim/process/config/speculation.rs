//! Speculative decoding from flags: `--speculative-config`, `--spec-method`, `--spec-tokens`.
//!
//! The simulator reads the method, the number of drafts, the drafts by batch size (vLLM 0.32), and
//! the acceptance of vLLM's own synthetic rejection. Other keys, such as the draft model, have no
//! effect: a head costs as much as one layer of the model with the output head. vLLM plans no step
//! ahead while drafts are found on the CPU.

use serde_json::Value;

use super::SimConfig;
use crate::engine::{Drafter, MAX_DRAFTS, Speculation};
use crate::process::refusal::{Refusal, Stage};
use sluice_core::vllm::args::ServeArgs;

const CLASS: &str = "SpeculativeConfig";
/// Methods that find drafts on the CPU.
const LOOKUPS: [&str; 3] = ["ngram", "[ngram]", "suffix"];
/// The most entries of `num_speculative_tokens_per_batch_size`.
const MOST_RANGES: usize = 64;

impl SimConfig {
    /// Sets speculative decoding. The flags of the scheduler must be read before.
    pub(super) fn read_speculation(&mut self, args: &ServeArgs) -> Result<(), Refusal> {
        let Some(speculation) = read(args)? else { return Ok(()) };
        if speculation.drafter == Drafter::Lookup {
            if args.switch("async-scheduling") == Some(true) {
                return wrong(
                    "Currently, async scheduling is only supported with EAGLE/MTP/Draft Model/NGram GPU kind of \
                     speculative decoding",
                );
            }
            self.engine.async_scheduling = false;
        }
        self.engine.speculation = Some(speculation);
        Ok(())
    }

    /// Sets the acceptance of drafts by position, as measured: each within 0 and 1, not rising. No
    /// effect if empty or without speculative decoding.
    ///
    /// # Errors
    /// The rates cannot be shares of the same drafts.
    pub fn set_acceptance(&mut self, acceptance: &[f64]) -> Result<(), String> {
        check(acceptance)?;
        if let Some(speculation) = self.engine.speculation.as_mut().filter(|_| !acceptance.is_empty()) {
            speculation.acceptance = acceptance.to_vec();
        }
        Ok(())
    }

    /// Whether the acceptance of drafts is a guess.
    pub fn acceptance_is_assumed(&self) -> bool {
        self.engine.speculation.as_ref().is_some_and(|own| own.acceptance.is_empty())
    }
}

fn read(args: &ServeArgs) -> Result<Option<Speculation>, Refusal> {
    let text = args.text("speculative-config");
    let mut config: Value = text.and_then(|text| serde_json::from_str(text).ok()).unwrap_or_default();
    let flags = [
        ("method", args.text("spec-method").map(Value::from)),
        ("num_speculative_tokens", args.int("spec-tokens").map(Value::from)),
    ];
    for (key, value) in flags.into_iter().filter_map(|(key, value)| Some((key, value?))) {
        if !config[key].is_null() {
            let flag = if key == "method" { "--spec-method" } else { "--spec-tokens" };
            let text = format!("{flag} and --speculative-config['{key}'] are mutually exclusive");
            return Err(Refusal::Other { kind: "ValueError", text, stage: Stage::Settings });
        }
        config[key] = value;
    }
    if config.is_null() {
        return Ok(None);
    }
    let Some(tokens) = config["num_speculative_tokens"].as_i64() else {
        return wrong(
            "num_speculative_tokens must be provided with speculative model unless the draft model config contains an \
             n_predict parameter.",
        );
    };
    if tokens < 1 {
        let (field, bound) = ("num_speculative_tokens", "greater than 0".to_owned());
        let value = tokens.to_string();
        return Err(Refusal::Bound { class: CLASS, field, bound, kind: "greater_than", value, value_type: "int" });
    }
    let method = config["method"].as_str().or(config["model"].as_str()).unwrap_or("draft_model");
    let drafter = if LOOKUPS.contains(&method) { Drafter::Lookup } else { Drafter::Model };
    let tokens = u32::try_from(tokens).unwrap_or(MAX_DRAFTS).min(MAX_DRAFTS);
    let acceptance = synthetic(&config, tokens)?;
    let by_sequences = ranges(&config["num_speculative_tokens_per_batch_size"], tokens)?;
    let (kinds, length, is_greedy) = (Vec::new(), f64::from(tokens), false);
    Ok(Some(Speculation { drafter, tokens, acceptance, kinds, proposed: 1.0, length, is_greedy, by_sequences }))
}

/// The acceptance of `rejection_sample_method` "synthetic"; empty without it.
fn synthetic(config: &Value, tokens: u32) -> Result<Vec<f64>, Refusal> {
    if config["rejection_sample_method"].as_str() != Some("synthetic") {
        return Ok(Vec::new());
    }
    let rates = config["synthetic_acceptance_rates"].as_array();
    let length = config["synthetic_acceptance_length"].as_f64();
    match (rates, length) {
        (Some(rates), None) => {
            let rates: Vec<f64> = rates.iter().map(|rate| rate.as_f64().unwrap_or(f64::NAN)).collect();
            if rates.len() != tokens as usize {
                return wrong(&format!("synthetic_acceptance_rates must have length {tokens}, got {rates:?}."));
            }
            check(&rates).map(|()| rates).or_else(|why| wrong(&why))
        }
        (None, Some(length)) if (1.0..=f64::from(tokens) + 1.0).contains(&length) => {
            Ok((0..tokens).map(|position| (length - 1.0 - f64::from(position)).clamp(0.0, 1.0)).collect())
        }
        (None, Some(length)) => {
            wrong(&format!("synthetic_acceptance_length must be in [1, {}], got {length}.", tokens + 1))
        }
        _ => wrong(
            "rejection_sample_method='synthetic' requires exactly one of synthetic_acceptance_rates or \
             synthetic_acceptance_length.",
        ),
    }
}

fn ranges(value: &Value, most: u32) -> Result<Vec<(u32, u32, u32)>, Refusal> {
    let Some(entries) = value.as_array() else { return Ok(Vec::new()) };
    let number = |value: &Value| value.as_u64().and_then(|number| u32::try_from(number).ok());
    let range = |entry: &Value| {
        let [first, last, tokens] = entry.as_array()?.as_slice() else { return None };
        let (first, last, tokens) = (number(first)?, number(last)?, number(tokens)?);
        (first >= 1 && first <= last && tokens <= most).then_some((first, last, tokens))
    };
    let read: Option<Vec<_>> = entries.iter().take(MOST_RANGES).map(range).collect();
    read.filter(|read| !read.is_empty()).map_or_else(
        || {
            wrong(&format!(
                "num_speculative_tokens_per_batch_size must be a non-empty list of [first, last, tokens] with first at \
                 least 1 and tokens at most {most}, got {value}."
            ))
        },
        Ok,
    )
}

fn check(rates: &[f64]) -> Result<(), String> {
    if rates.len() > MAX_DRAFTS as usize || rates.iter().any(|rate| !(0.0..=1.0).contains(rate)) {
        return Err(format!("acceptance has at most {MAX_DRAFTS} entries, each in [0, 1], got {rates:?}."));
    }
    match rates.windows(2).any(|pair| pair[1] > pair[0]) {
        true => {
            Err(format!("acceptance by position must not rise, got {rates:?}: entry i counts the first i + 1 drafts."))
        }
        false => Ok(()),
    }
}

fn wrong<T>(text: &str) -> Result<T, Refusal> {
    Err(Refusal::Together { class: CLASS, text: text.to_owned() })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::machine::Profile;

    fn config(flags: &[&str]) -> Result<SimConfig, Refusal> {
        let argv: Vec<&str> = ["m"].iter().chain(flags).copied().collect();
        SimConfig::from_args(&ServeArgs::parse(&argv).unwrap(), Profile::named("h200-llama-8b").unwrap())
    }

    #[test]
    fn drafts_are_read_whole_in_parts_and_from_short_flags() {
        let of = |flags: &[&str]| config(flags).unwrap().engine;
        let whole = of(&["--speculative-config", r#"{"method":"ngram","num_speculative_tokens":3}"#]);
        let own = whole.speculation.unwrap();
        assert_eq!((own.drafter, own.tokens, whole.async_scheduling), (Drafter::Lookup, 3, false));
        let parts = of(&["--speculative-config.method", "eagle3", "--speculative-config.num_speculative_tokens", "2"]);
        let own = parts.speculation.unwrap();
        assert_eq!((own.drafter, own.tokens, parts.async_scheduling), (Drafter::Model, 2, true));
        assert_eq!(of(&["--spec-method", "mtp", "--spec-tokens", "1"]).speculation.unwrap().tokens, 1);
        assert_eq!(of(&[]).speculation, None);
        let off = r#"{"method":"mtp","num_speculative_tokens":4,"num_speculative_tokens_per_batch_size":[[1,16,4],[17,256,0]]}"#;
        assert_eq!(of(&["--speculative-config", off]).speculation.unwrap().by_sequences, [(1, 16, 4), (17, 256, 0)]);
    }

    #[test]
    fn acceptance_comes_from_the_flags_or_from_a_measurement() {
        let flags = |rest: &str| {
            format!(r#"{{"method":"ngram","num_speculative_tokens":2,"rejection_sample_method":"synthetic",{rest}}}"#)
        };
        let of = |rest: &str| {
            config(&["--speculative-config", &flags(rest)]).map(|own| own.engine.speculation.unwrap().acceptance)
        };
        assert_eq!(of(r#""synthetic_acceptance_rates":[0.7,0.4]"#).unwrap(), [0.7, 0.4]);
        assert_eq!(of(r#""synthetic_acceptance_length":2.5"#).unwrap(), [1.0, 0.5]);
        for (wrong, why) in [
            (r#""synthetic_acceptance_rates":[0.7]"#, "length 2"),
            (r#""synthetic_acceptance_rates":[0.4,0.7]"#, "must not rise"),
            (r#""synthetic_acceptance_length":4"#, "[1, 3]"),
            (r#""x":1"#, "exactly one of"),
        ] {
            let error = of(wrong).unwrap_err().to_string();
            assert!(error.contains(why), "{error}");
        }
        let mut own = config(&["--spec-method", "ngram", "--spec-tokens", "2"]).unwrap();
        assert!(own.acceptance_is_assumed());
        own.set_acceptance(&[0.6, 0.3]).unwrap();
        assert!(!own.acceptance_is_assumed() && own.set_acceptance(&[1.2]).is_err());
    }

    #[test]
    fn what_vllm_refuses_is_refused() {
        for (flags, why) in [
            (vec!["--spec-method", "ngram"], "num_speculative_tokens must be provided"),
            (vec!["--spec-method", "ngram", "--spec-tokens", "0"], "greater than 0"),
            (
                vec!["--spec-tokens", "2", "--speculative-config", r#"{"num_speculative_tokens":3}"#],
                "mutually exclusive",
            ),
            (vec!["--spec-method", "ngram", "--spec-tokens", "2", "--async-scheduling"], "async scheduling"),
            (
                vec![
                    "--speculative-config",
                    r#"{"method":"mtp","num_speculative_tokens":2,"num_speculative_tokens_per_batch_size":[[0,1,2]]}"#,
                ],
                "non-empty list",
            ),
        ] {
            let error = config(&flags).unwrap_err().to_string();
            assert!(error.contains(why), "{flags:?}: {error}");
        }
    }
}
