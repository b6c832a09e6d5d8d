//! Flags that take JSON, whole or in parts.
//!
//! In JSON that is given whole, numbers with a unit are written out if vLLM reads the flag into
//! typed settings. Parts, `--flag.key value`, are gathered into one object for each spelling of a
//! flag. A value is JSON if it parses, otherwise a number with a unit (`1k`), otherwise text.
//! `--flag.key.inner` nests; `--flag.key+` splits the value at commas and appends to a list.
//!
//! As in vLLM, the objects count as if they were given after all other flags, so they replace JSON
//! that was given whole. If a flag has parts in two spellings (`-cc`, `--compilation-config`), the
//! object whose first part came later replaces the other.

use serde_json::{Map, Value};

use super::whole_number::{self, BinaryFraction};

/// The parts of an argv that were read so far.
#[derive(Default)]
pub(super) struct JsonParts {
    /// Spelling, flag and object, in order of first appearance.
    objects: Vec<(String, &'static str, Value)>,
}

impl JsonParts {
    /// Adds the part `--spelled.path text`.
    pub(super) fn add(&mut self, spelled: &str, flag: &'static str, path: &str, text: &str) {
        let (path, value) = match path.strip_suffix('+') {
            Some(path) => (path, text.split(',').map(Value::from).collect()),
            None => (path, value(text)),
        };
        let part = path.rsplit('.').fold(value, |inner, key| Value::Object(Map::from_iter([(key.to_owned(), inner)])));
        let spelled = if spelled.starts_with("--") { spelled.replace('_', "-") } else { spelled.to_owned() };
        match self.objects.iter_mut().find(|(known, ..)| *known == spelled) {
            Some((.., object)) => merge(object, part),
            None => self.objects.push((spelled, flag, part)),
        }
    }

    pub(super) fn into_texts(self) -> impl Iterator<Item = (&'static str, String)> {
        self.objects.into_iter().map(|(_, flag, object)| (flag, object.to_string()))
    }
}

/// The JSON that was given whole for this flag, with numbers written without units. The inner `Err`
/// is the text if it is not JSON.
pub(super) fn whole(flag: &str, text: &str) -> Result<Result<String, String>, BinaryFraction> {
    const UNTYPED: [&str; 4] =
        ["speculative-config", "watermark-config", "diffusion-config", "override-generation-config"];
    let text = match flag.ends_with("-config") && !UNTYPED.contains(&flag) {
        true => whole_number::expand(text)?,
        false => text.to_owned(),
    };
    Ok(if serde_json::from_str::<Value>(&text).is_ok() { Ok(text) } else { Err(text) })
}

fn value(text: &str) -> Value {
    let number = || whole_number::parse(text).ok().flatten().map(Value::from);
    serde_json::from_str(text).ok().or_else(number).unwrap_or_else(|| Value::from(text))
}

/// Merges objects, joins lists, and replaces any other value.
fn merge(old: &mut Value, new: Value) {
    match (old, new) {
        (Value::Object(old), Value::Object(new)) => {
            for (key, value) in new {
                match old.get_mut(&key) {
                    Some(place) => merge(place, value),
                    None => {
                        old.insert(key, value);
                    }
                }
            }
        }
        (Value::Array(old), Value::Array(new)) => old.extend(new),
        (old, new) => *old = new,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_are_merged_as_vllm_merges_them() {
        let mut parts = JsonParts::default();
        for (path, text) in [
            ("mode", "0"),
            ("cudagraph_mode", "FULL"),
            ("pass_config.fuse_norm_quant", "true"),
            ("pass_config.eliminate_noops", "false"),
            ("custom_ops+", "all,+rms_norm"),
            ("custom_ops+", "-silu"),
            ("max_cudagraph_capture_size", "1k"),
            ("mode", "3"),
        ] {
            parts.add("--compilation_config", "compilation-config", path, text);
        }
        parts.add("-cc", "compilation-config", "mode", "none");
        let texts: Vec<Value> = parts.into_texts().map(|(_, text)| serde_json::from_str(&text).unwrap()).collect();
        let merged = serde_json::json!({
            "mode": 3,
            "cudagraph_mode": "FULL",
            "pass_config": { "fuse_norm_quant": true, "eliminate_noops": false },
            "custom_ops": ["all", "+rms_norm", "-silu"],
            "max_cudagraph_capture_size": 1000,
        });
        assert_eq!(texts, [merged, serde_json::json!({ "mode": "none" })]);
    }
}
