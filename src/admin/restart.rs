//! `POST /admin/backends/{pool}/{backend}/restart`: the options of a restart.
//!
//! The body is a JSON object with `set` (flags and values), `reset`, `hold` and `cut`. A request
//! without a body restarts the engine with the present settings. A value that is a text is read as
//! in `--set FLAG=VALUE`; other values are taken as they are. An unknown key is an error, because a
//! misspelt `hold` must not be ignored.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use sluice_config::ArgValue;
use sluice_core::vllm::flags::table::dashed;
use sluice_fleet::RestartRequest;

/// Why the options of a restart are refused.
#[derive(Debug, thiserror::Error)]
pub enum RestartOptionsError {
    /// A key is unknown, or a value has the wrong type.
    #[error(
        "the options of a restart are not understood: {0}; send for example {{\"set\": {{\"max-num-seqs\": 32}}, \"hold\": true}}"
    )]
    Body(#[from] serde_json::Error),
    /// The options are in the query, not in the body.
    #[error("the options of a restart are a JSON body, such as {{\"set\": {{\"max-num-seqs\": 32}}}}; remove '?{0}'")]
    Query(String),
    /// The text is not `FLAG=VALUE`.
    #[error("'{0}' is not FLAG=VALUE, such as max-num-seqs=32")]
    NotAFlag(String),
    /// The key of `set` is not the name of a flag.
    #[error("'{0}' is not the name of a flag, such as max-num-seqs")]
    Name(String),
    /// A flag cannot have such a value.
    #[error("set.{0}: give true or false, a number, a text or a list of texts")]
    Value(String),
}

/// The options of a restart.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct RestartOptions {
    /// Flags to change, with or without dashes. All other flags stay.
    pub set: BTreeMap<String, Value>,
    /// Discard earlier changes of flags: start from the configuration.
    pub reset: bool,
    /// Restart even if no other backend can serve the models, so that requests wait.
    pub hold: bool,
    /// Cut requests that outlast the drain.
    pub cut: bool,
}

/// The response to a restart that has begun.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RestartBegun {
    /// The backend.
    pub backend: String,
    /// The number of the change.
    pub change: u64,
    /// Warnings about the settings.
    pub notices: Vec<String>,
    /// The pool.
    pub pool: String,
}

/// Reads `FLAG=VALUE`, with or without dashes before the flag.
///
/// # Errors
/// There is no `=`, or the flag is not a name.
pub fn flag(text: &str) -> Result<(String, ArgValue), RestartOptionsError> {
    let wrong = || RestartOptionsError::NotAFlag(text.to_owned());
    let (name, value) = text.split_once('=').ok_or_else(wrong)?;
    let name = flag_name(name).ok_or_else(wrong)?;
    let value = ArgValue::read(&name, value.trim());
    Ok((name, value))
}

/// The name of a flag with dashes in place of underscores. `None`: the text is no name.
fn flag_name(text: &str) -> Option<String> {
    let name = dashed(text.trim().trim_start_matches("--"));
    let is_name = |letter: char| letter.is_ascii_alphanumeric() || "-._".contains(letter);
    (!name.is_empty() && name.chars().all(is_name)).then_some(name)
}

impl RestartOptions {
    /// Options that set these flags.
    pub fn of_flags<'a>(flags: impl IntoIterator<Item = (&'a String, &'a ArgValue)>) -> Self {
        let json = |(name, value): (&String, &ArgValue)| (name.clone(), serde_json::json!(value));
        Self { set: flags.into_iter().map(json).collect(), ..Self::default() }
    }

    pub(super) fn read(body: Map<String, Value>, query: &str) -> Result<RestartRequest, RestartOptionsError> {
        if !query.is_empty() {
            return Err(RestartOptionsError::Query(query.to_owned()));
        }
        let Self { set, reset, hold, cut } = serde_json::from_value(Value::Object(body))?;
        let flag = |(key, value): (String, Value)| {
            let name = flag_name(&key).ok_or(RestartOptionsError::Name(key))?;
            let value = match value {
                Value::String(text) => ArgValue::read(&name, text.trim()),
                value => serde_json::from_value(value).map_err(|_| RestartOptionsError::Value(name.clone()))?,
            };
            Ok((name, value))
        };
        let set = set.into_iter().map(flag).collect::<Result<_, RestartOptionsError>>()?;
        Ok(RestartRequest { set, reset, hold, cut, trial: None })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(body: &str) -> Result<RestartRequest, RestartOptionsError> {
        RestartOptions::read(serde_json::from_str(body).unwrap(), "")
    }

    #[test]
    fn options_survive_writing_and_reading() {
        let sets = [
            "--max_num_seqs=32",
            "speculative-config={\"a\": \"b&c=d%\"}",
            "enforce-eager=true",
            "watermark=0.5",
            "max-num-batched-tokens=8k",
        ];
        let flags: Vec<_> = sets.iter().map(|set| flag(set).unwrap()).collect();
        let options = RestartOptions::of_flags(flags.iter().map(|(name, value)| (name, value)));
        let request = read(&serde_json::to_string(&RestartOptions { hold: true, ..options }).unwrap()).unwrap();
        let value = |name: &str| request.set[name].clone();
        assert_eq!(value("max-num-seqs"), ArgValue::Int(32));
        assert_eq!(value("speculative-config"), ArgValue::Text("{\"a\": \"b&c=d%\"}".to_owned()));
        assert_eq!((value("enforce-eager"), value("watermark")), (ArgValue::Flag(true), ArgValue::Float(0.5)));
        assert_eq!(value("max-num-batched-tokens"), ArgValue::Text("8k".to_owned()));
        let (name, _) = flag("compilation_config.cudagraph_mode=FULL").unwrap();
        assert_eq!(name, "compilation-config.cudagraph_mode", "JSON keys after the dot keep their underscores");
        assert!(request.hold && !request.cut && !request.reset && request.set.len() == 5);
        assert_eq!(read("{}").unwrap(), RestartRequest::default());
    }

    #[test]
    fn a_text_is_read_as_on_the_command_line_and_a_list_as_a_list() {
        let request = read(r#"{"set": {"--max_num_seqs": "32", "served-model-name": ["a", "b"]}}"#).unwrap();
        assert_eq!(request.set["max-num-seqs"], ArgValue::Int(32));
        assert_eq!(request.set["served-model-name"], ArgValue::List(vec!["a".to_owned(), "b".to_owned()]));
    }

    #[test]
    fn options_that_are_not_understood_are_refused_with_the_remedy() {
        for (body, says) in [
            (r#"{"hodl": true}"#, "unknown field `hodl`, expected one of `set`, `reset`, `hold`, `cut`"),
            (r#"{"hold": 1}"#, "expected a boolean"),
            (r#"{"set": ["max-num-seqs=32"]}"#, "send for example {\"set\": {\"max-num-seqs\": 32}"),
            (r#"{"set": {"max num": 3}}"#, "'max num' is not the name of a flag"),
            (r#"{"set": {"x": {"a": 1}}}"#, "set.x: give true or false, a number"),
            (r#"{"set": {"x": null}}"#, "set.x: give"),
        ] {
            let error = read(body).unwrap_err().to_string();
            assert!(error.contains(says), "{body}: {error}");
        }
        let query = RestartOptions::read(Map::new(), "hold").unwrap_err().to_string();
        assert!(query.contains("remove '?hold'"), "{query}");
        for text in ["max-num-seqs", "=3", "max num=3"] {
            assert!(matches!(flag(text), Err(RestartOptionsError::NotAFlag(_))), "{text}");
        }
    }
}
