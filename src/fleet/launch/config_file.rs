//! The flags that the YAML file of `--config` sets, by full name.
//!
//! vLLM turns each key into a flag. If the value is an object, only the key is read, to know that
//! the flag is set. vLLM reads YAML 1.1, where `yes` and `no` are also booleans. Bound:
//! [`FILE_MAX`].

use std::fs;
use std::path::Path;

use serde_yaml_ng::Value;

use sluice_core::vllm::flags::parse::FlagValues;
use sluice_core::vllm::flags::table::setting;

const FILE_MAX: u64 = 1 << 20;

/// The flags in the file at `path`; `None` if it is too large, unreadable or not a YAML mapping.
pub(super) fn read(path: &str) -> Option<FlagValues> {
    let path = Path::new(path);
    if path.metadata().ok()?.len() > FILE_MAX {
        return None;
    }
    parse(&fs::read_to_string(path).ok()?)
}

fn parse(text: &str) -> Option<FlagValues> {
    let entries = match serde_yaml_ng::from_str(text).ok()? {
        Value::Mapping(entries) => entries,
        Value::Null => return Some(FlagValues::new()),
        _ => return None,
    };
    let mut values = FlagValues::new();
    for (key, value) in entries {
        let (name, on) = setting(&scalar(&key)?);
        let texts = match &value {
            Value::Sequence(items) => items.iter().filter_map(scalar).collect(),
            // A key such as `no-enable-lora: true` turns the flag off.
            value if boolean(value).is_some_and(|value| value != on) => vec!["false".to_owned()],
            value => scalar(value).into_iter().collect(),
        };
        values.insert(name, texts);
    }
    Some(values)
}

/// A boolean as YAML 1.1 reads it.
fn boolean(value: &Value) -> Option<bool> {
    match value {
        Value::Bool(value) => Some(*value),
        Value::String(text) => match text.to_ascii_lowercase().as_str() {
            "true" | "yes" | "on" => Some(true),
            "false" | "no" | "off" => Some(false),
            _ => None,
        },
        _ => None,
    }
}

fn scalar(value: &Value) -> Option<String> {
    if let Some(value) = boolean(value) {
        return Some(value.to_string());
    }
    match value {
        Value::String(text) => Some(text.clone()),
        Value::Number(number) => Some(number.to_string()),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_sets_flags_by_their_full_names() {
        let text = "# all\nmodel: org/m\nenable_lora: true  # adapters\nmax-lora-rank: 64\nlora-modules:\n  - a=/x\n  - b=/y\n\
                    served-model-name: [a, 'b']\ncompilation-config:\n  mode: 3\nenable-prefix-caching: no\ntensor-parallel-size: 2\n\
                    gpu-memory-utilization: 0.9\n";
        let values = parse(text).unwrap();
        let wanted = [
            ("model", "org/m"),
            ("enable-lora", "true"),
            ("max-lora-rank", "64"),
            ("lora-modules", "a=/x b=/y"),
            ("served-model-name", "a b"),
            ("compilation-config", ""),
            ("enable-prefix-caching", "false"),
            ("tensor-parallel-size", "2"),
            ("gpu-memory-utilization", "0.9"),
        ];
        for (name, wanted) in wanted {
            assert_eq!(values.get(name).map(|values| values.join(" ")).as_deref(), Some(wanted), "{name}");
        }
        assert_eq!(values.len(), wanted.len());
        assert_eq!(parse("no-enable-lora: true\n").unwrap()["enable-lora"], ["false"]);
        assert_eq!(parse("# empty\n"), Some(FlagValues::new()));
        assert!(parse("a: [b\n").is_none() && read("/nonexistent/settings.yaml").is_none());
    }
}
