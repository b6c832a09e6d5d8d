//! Flags and values as words of a command line.
//!
//! `true` becomes `--name`, `false` `--no-name`, a list `--name a b`, any other value
//! `--name=value`. A key of a flag that takes JSON (`compilation-config.mode`) always becomes
//! `--name=value`, with the value as JSON. The flag `config` becomes two words, because vLLM
//! searches for the word `--config` before it parses the rest.

use super::table::dashed;
use super::value::{FlagValue, SecretText};

/// The words of all flags.
pub fn words<'a, N: AsRef<str>, S: SecretText + 'a>(
    flags: impl IntoIterator<Item = (N, &'a FlagValue<S>)>,
) -> Vec<String> {
    let mut words = Vec::new();
    flags.into_iter().for_each(|(name, value)| write(name.as_ref(), value, &mut words));
    words
}

/// Appends the words of one flag to `argv`.
pub fn write<S: SecretText>(name: &str, value: &FlagValue<S>, argv: &mut Vec<String>) {
    let name = dashed(name);
    let is_key = name.contains('.');
    match value {
        FlagValue::List(texts) if is_key => argv.push(format!("--{name}={}", json(texts))),
        FlagValue::Text(text) if name == "config" => argv.extend(["--config".to_owned(), text.clone()]),
        FlagValue::Flag(true) if !is_key => argv.push(format!("--{name}")),
        FlagValue::Flag(false) if !is_key => argv.push(format!("--no-{name}")),
        FlagValue::List(texts) => {
            argv.push(format!("--{name}"));
            argv.extend(texts.iter().cloned());
        }
        FlagValue::Secret(_) => write(&name, &value.expose(), argv),
        value => argv.push(format!("--{name}={value}")),
    }
}

/// A JSON list of the texts, in which numbers and booleans have no quotes.
fn json(texts: &[String]) -> serde_json::Value {
    let plain =
        |text: &String| serde_json::from_str(text).ok().filter(|v: &serde_json::Value| v.is_number() || v.is_boolean());
    texts.iter().map(|text| plain(text).unwrap_or_else(|| text.as_str().into())).collect()
}
