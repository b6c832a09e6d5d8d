//! Settings as words of a command line.
//!
//! `true` becomes `--name`, `false` `--no-name`, a list `--name a b`, any other value
//! `--name=value`. A key of a flag that takes JSON (`compilation-config.mode`) always becomes
//! `--name=value`, with the value as JSON. `config` becomes two words, because vLLM searches for
//! the word `--config` before it parses the rest.

use crate::driver::{EngineSettings, dashed};
use sluice_gateway::config::ArgValue;

pub(crate) fn words_of(settings: &EngineSettings) -> Vec<String> {
    let mut words = Vec::new();
    settings.args.iter().for_each(|(name, value)| write(&dashed(name), value, &mut words));
    words
}

/// Appends the words of one setting to `argv`.
pub(super) fn write(name: &str, value: &ArgValue, argv: &mut Vec<String>) {
    let is_key = name.contains('.');
    match value {
        ArgValue::Flag(on) if is_key => argv.push(format!("--{name}={on}")),
        ArgValue::List(texts) if is_key => argv.push(format!("--{name}={}", json(texts))),
        ArgValue::Text(text) if name == "config" => argv.extend(["--config".to_owned(), text.clone()]),
        ArgValue::Flag(true) => argv.push(format!("--{name}")),
        ArgValue::Flag(false) => argv.push(format!("--no-{name}")),
        ArgValue::Int(number) => argv.push(format!("--{name}={number}")),
        ArgValue::Float(number) => argv.push(format!("--{name}={number}")),
        ArgValue::Text(text) => argv.push(format!("--{name}={text}")),
        secret @ ArgValue::Secret(_) => write(name, &secret.expose(), argv),
        ArgValue::List(texts) => {
            argv.push(format!("--{name}"));
            argv.extend(texts.iter().cloned());
        }
    }
}

/// A JSON list of the texts, in which numbers and booleans have no quotes.
fn json(texts: &[String]) -> serde_json::Value {
    let plain =
        |text: &String| serde_json::from_str(text).ok().filter(|v: &serde_json::Value| v.is_number() || v.is_boolean());
    texts.iter().map(|text| plain(text).unwrap_or_else(|| text.as_str().into())).collect()
}
