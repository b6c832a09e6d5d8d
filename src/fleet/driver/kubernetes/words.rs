//! The arguments of a container as settings: in the form of `words_of`, and in forms that people
//! write.
//!
//! Another gateway or manager may have chosen a pod's arguments, and the running ones count.

use std::collections::BTreeMap;

use crate::driver::{EngineSettings, dashed};
use sluice_gateway::config::ArgValue;

/// Reads `--flag=value`, `--flag value`, `--flag a b`, `--flag` and `--no-flag`. Words before the
/// first flag are skipped.
pub(super) fn settings_of(words: &[String]) -> EngineSettings {
    let mut args = BTreeMap::new();
    let mut words = words.iter().skip_while(|word| !word.starts_with("--")).peekable();
    while let Some(word) = words.next() {
        let flag = word.trim_start_matches('-');
        if let Some((name, text)) = flag.split_once('=') {
            args.insert(dashed(name), value(text));
            continue;
        }
        let mut values = Vec::new();
        while let Some(text) = words.next_if(|next| !next.starts_with("--")) {
            values.push(text.clone());
        }
        let (name, value) = match (&values[..], flag.strip_prefix("no-")) {
            ([], Some(name)) => (name, ArgValue::Flag(false)),
            ([], None) => (flag, ArgValue::Flag(true)),
            ([text], _) => (flag, value(text)),
            (_, _) => (flag, ArgValue::List(values)),
        };
        args.insert(dashed(name), value);
    }
    EngineSettings { args }
}

fn value(text: &str) -> ArgValue {
    match (text.parse::<i64>(), text.parse::<f64>()) {
        (Ok(number), _) => ArgValue::Int(number),
        (_, Ok(number)) if number.is_finite() => ArgValue::Float(number),
        _ => ArgValue::Text(text.to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::launch::words_of;

    #[test]
    fn words_that_were_written_read_back_as_the_same_settings() {
        let words =
            ["--enable-lora", "--gpu-memory-utilization=0.9", "--lora-modules", "a=b", "c=d", "--max-num-seqs=64"];
        let mut words: Vec<String> = words.map(str::to_owned).to_vec();
        words.push("--no-enable-prefix-caching".to_owned());
        let mut again = words_of(&settings_of(&words));
        assert_eq!(settings_of(&again), settings_of(&words));
        again.sort();
        words.sort();
        assert_eq!(again, words);
        let spaced: Vec<String> = ["m", "--max_num_seqs", "64"].map(str::to_owned).to_vec();
        assert_eq!(settings_of(&spaced).int("max-num-seqs"), Some(64));
    }
}
