//! A command line of vLLM as flags and values.
//!
//! The table of vLLM's flags has the number of values of each flag, and short forms such as `-tp`.
//! The first word that belongs to no flag is the model. An unknown flag takes the next word as the
//! value, unless that is a flag. A negative number is a value.

use std::collections::BTreeMap;

use crate::driver::dashed;
use sluice_core::vllm::flags::{Arity, lookup};

/// The values of each flag, by full name, as text; a switch is `true` or `false`.
pub(super) type FlagValues = BTreeMap<String, Vec<String>>;

/// A parsed command line.
#[derive(Debug, Default)]
pub(super) struct CommandLine {
    pub(super) values: FlagValues,
    /// The long names as written, without dashes.
    pub(super) written: Vec<String>,
    /// The first word that is neither a flag nor a value.
    pub(super) positional: Option<String>,
}

/// Whether a word is a flag, not a negative number.
fn is_flag(word: &str) -> bool {
    word.starts_with('-') && word.len() > 1 && word.parse::<f64>().is_err()
}

/// The full name and arity of a written flag; `None`: unknown. `--flag.key` sets one key of a JSON
/// value.
fn resolve(written: &str) -> (String, Option<Arity>) {
    let bare = dashed(written.trim_start_matches('-'));
    if written.contains('.') {
        return (bare, Some(Arity::One));
    }
    match lookup(written) {
        Some(flag) => (flag.name.to_owned(), Some(flag.arity)),
        None => (bare, None),
    }
}

/// The full name of a setting. For a switch also whether the given name turns it on.
pub(super) fn setting(name: &str) -> (String, bool) {
    match resolve(&format!("--{name}")) {
        (full, Some(Arity::Switch { on })) => (full, on),
        _ => (dashed(name), true),
    }
}

impl CommandLine {
    /// Parses the words after `vllm serve`.
    pub(super) fn parse(words: &[String]) -> Self {
        let mut line = Self::default();
        let mut at = 0;
        while let Some(word) = words.get(at) {
            at += 1;
            if word == "--" {
                continue;
            }
            if !is_flag(word) {
                line.positional.get_or_insert_with(|| word.clone());
                continue;
            }
            let (written, attached) = split(word);
            if let Some(long) = written.strip_prefix("--") {
                line.written.push(dashed(long));
            }
            let (name, arity) = resolve(written);
            let values_max = match arity {
                Some(Arity::Switch { .. }) => 0,
                Some(Arity::One) | None => 1,
                Some(Arity::Many) => usize::MAX,
            };
            let mut values: Vec<String> = attached.map(str::to_owned).into_iter().collect();
            if values.is_empty() {
                let following = words[at..].iter().take(values_max).take_while(|word| !is_flag(word));
                values.extend(following.cloned());
                at += values.len();
            }
            if values.is_empty() {
                values.push((arity != Some(Arity::Switch { on: false })).to_string());
            }
            // An unknown short flag has no full name.
            if written.starts_with("--") || arity.is_some() {
                line.values.insert(name, values);
            }
        }
        line
    }
}

/// A flag and the value attached to it: `--a=b`, `-O3`, `-qawq`.
fn split(word: &str) -> (&str, Option<&str>) {
    if let Some((name, value)) = word.split_once('=') {
        return match name {
            "-O" => ("--optimization-level", Some(value)),
            _ => (name, Some(value)),
        };
    }
    if let Some(level) = word.strip_prefix("-O") {
        return ("--optimization-level", (!level.is_empty()).then_some(level));
    }
    let short = word.char_indices().nth(2).map_or(word, |(end, _)| &word[..end]);
    let may_attach = !word.starts_with("--") && short.len() < word.len() && resolve(word).1.is_none();
    match may_attach && resolve(short).1 == Some(Arity::One) {
        true => (short, Some(&word[short.len()..])),
        false => (word, None),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(line: &str) -> CommandLine {
        CommandLine::parse(&line.split(' ').map(str::to_owned).collect::<Vec<_>>())
    }

    #[test]
    fn short_flags_switches_and_the_model_are_distinguished_from_values() {
        let line = parse(
            "--enable-lora -tp 2 m -q awq -O3 --seed -1 -n2 --max-num-seq=4 -asc 3 --no-enable-prefix-caching -ep",
        );
        let value = |name: &str| line.values.get(name).map(|values| values.join(" "));
        let wanted = [
            ("enable-lora", "true"),
            ("tensor-parallel-size", "2"),
            ("quantization", "awq"),
            ("optimization-level", "3"),
            ("seed", "-1"),
            ("nnodes", "2"),
            ("max-num-seqs", "4"),
            ("api-server-count", "3"),
            ("enable-prefix-caching", "false"),
            ("enable-expert-parallel", "true"),
        ];
        for (name, wanted) in wanted {
            assert_eq!(value(name).as_deref(), Some(wanted), "{name}");
        }
        assert_eq!((line.positional.as_deref(), line.values.len()), (Some("m"), wanted.len()));
        let names = ["enable-lora", "seed", "max-num-seq", "no-enable-prefix-caching"];
        assert!(names.iter().all(|name| line.written.iter().any(|written| written == name)), "{:?}", line.written);
    }

    #[test]
    fn an_unknown_flag_takes_one_word_and_one_with_many_values_takes_all() {
        let line = parse("--new-flag x m --served-model-name a b --other --lora-modules p=/x q=/y");
        assert_eq!(
            (&line.values["new-flag"][..], &line.values["other"][..]),
            (&["x".to_owned()][..], &["true".to_owned()][..])
        );
        assert_eq!((line.values["served-model-name"].len(), line.values["lora-modules"].len()), (2, 2));
        assert_eq!(line.positional.as_deref(), Some("m"));
        assert_eq!(parse("--compilation-config.use_x false m").values["compilation-config.use_x"], ["false"]);
    }
}
