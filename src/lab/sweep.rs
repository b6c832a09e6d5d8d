//! `--sweep KEY=VALUE,VALUE`: makes a variant for each combination of values.
//!
//! | key | it varies |
//! |---|---|
//! | `vllm.FLAG` | a flag of all engines |
//! | `vllm@BACKEND.FLAG` | a flag of one engine |
//! | `load` | the factor for rates and concurrency |
//! | `engines` | the number of engines, if there is one pool |
//! | `gpu` | the GPU of all engines; a path is relative to the folder of the scenario |
//! | anything else | a key of the gateway's configuration, like `--set` |
//!
//! Values are separated by commas, or by `|` if one of them contains a comma. Bounds:
//! [`MAX_VARIANTS`].

use crate::error::LabError;
use crate::file::{AS_WRITTEN, Variant};
use sluice_config::ArgValue;

/// Maximum number of variants of one sweep.
pub const MAX_VARIANTS: usize = 1_000;

/// Combines every variant of `base` with every combination of values, one from each sweep. The last
/// sweep varies fastest.
pub fn vary(base: &[Variant], sweeps: &[String]) -> Result<Vec<Variant>, LabError> {
    let mut variants = base.to_vec();
    for sweep in sweeps {
        let bad =
            || LabError::Sweep(format!("'{sweep}' is not KEY=VALUE,VALUE; write for example pool.all.slots=64,128"));
        let (key, values) =
            sweep.split_once('=').filter(|(key, values)| !key.is_empty() && !values.is_empty()).ok_or_else(bad)?;
        let separator = if values.contains('|') { '|' } else { ',' };
        let values: Vec<&str> = values.split(separator).map(str::trim).collect();
        if variants.len().saturating_mul(values.len()) > MAX_VARIANTS {
            return Err(LabError::Sweep(format!("more than {MAX_VARIANTS} variants; give fewer values")));
        }
        let mut varied = Vec::with_capacity(variants.len() * values.len());
        for variant in &variants {
            for value in &values {
                varied.push(with(variant, key, value)?);
            }
        }
        variants = varied;
    }
    Ok(variants)
}

fn with(variant: &Variant, key: &str, value: &str) -> Result<Variant, LabError> {
    let mut variant = variant.clone();
    let name = format!("{}={value}", key.rsplit('.').next().unwrap_or(key));
    let is_plain = variant == Variant { name: AS_WRITTEN.to_owned(), ..Variant::default() };
    variant.name = if is_plain { name } else { format!("{}, {name}", variant.name) };
    let flag = flag_of(key).map_or("", |(_, flag)| flag);
    change(&mut variant, key, &ArgValue::read(flag, value))?;
    Ok(variant)
}

/// Sets a key of a variant.
pub fn change(variant: &mut Variant, key: &str, value: &ArgValue) -> Result<(), LabError> {
    let text = value.to_string();
    let number = |what: &str| LabError::Sweep(format!("{key}: '{text}' is not {what}"));
    match key {
        "load" => variant.load = Some(text.parse().map_err(|_| number("a number"))?),
        "engines" => variant.count = Some(text.parse().map_err(|_| number("a whole number"))?),
        "gpu" => variant.gpu = Some(text),
        _ => match flag_of(key) {
            Some((None, flag)) => _ = variant.args.insert(flag.to_owned(), value.clone()),
            Some((Some(backend), flag)) => {
                variant.engine.entry(backend.to_owned()).or_default().insert(flag.to_owned(), value.clone());
            }
            None => variant.set.push(format!("{key}={text}")),
        },
    }
    Ok(())
}

/// The flag of vLLM that a key names, and the backend if the key is for a single engine.
pub fn flag_of(key: &str) -> Option<(Option<&str>, &str)> {
    let (at, flag) = key.strip_prefix("vllm")?.split_once('.')?;
    match at {
        "" => Some((None, flag)),
        _ => Some((Some(at.strip_prefix('@')?), flag)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plain() -> [Variant; 1] {
        [Variant { name: AS_WRITTEN.to_owned(), ..Variant::default() }]
    }

    #[test]
    fn every_value_is_combined_with_every_other_and_named() {
        let sweeps =
            ["pool.all.policy=round_robin,least_work", "vllm.max-num-seqs=64,128", "vllm@gpu1.eager=true", "load=2"];
        let variants = vary(&plain(), &sweeps.map(str::to_owned)).unwrap();
        let names: Vec<&str> = variants.iter().map(|variant| variant.name.as_str()).collect();
        assert_eq!(names[1], "policy=round_robin, max-num-seqs=128, eager=true, load=2");
        assert_eq!((names.len(), variants[2].set.join(" ")), (4, "pool.all.policy=least_work".to_owned()));
        assert_eq!(variants[2].args["max-num-seqs"], ArgValue::Int(64));
        assert_eq!((&variants[0].engine["gpu1"]["eager"], variants[0].load), (&ArgValue::Flag(true), Some(2.0)));
        for bad in ["slots", "=3", "slots=", "load=much"] {
            assert!(vary(&plain(), &[bad.to_owned()]).is_err(), "{bad}");
        }
        let many = vec!["a=1,2,3,4,5,6,7,8,9,10".to_owned(); 4];
        assert!(vary(&plain(), &many).is_err());
        let [variant] = &vary(&plain(), &["vllm.gpu-memory-utilization=nan".to_owned()]).unwrap()[..] else { panic!() };
        assert_eq!(variant.args["gpu-memory-utilization"], ArgValue::Text("nan".to_owned()), "no number");
        assert_eq!(vary(&plain(), &["a={b=1,c=2}|{b=2}".to_owned()]).unwrap().len(), 2);
    }
}
