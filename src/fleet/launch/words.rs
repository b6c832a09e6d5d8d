//! The words of a command line as flags and values, read as vLLM 0.32 reads them.
//!
//! Our table of its flags tells which take a value, what `-tp` and its kin are short for, and where a positional model stands.
//! A flag that is not in the table takes the word behind it, unless that is a flag too; a negative number is a value. The
//! file of `--config` is read for what stands at its left edge (`key: value`, `key: [a, b]`, and lists below a key), which is
//! how such files are written; of anything else in it only the key is taken. Bound: [`FILE_MAX`] bytes of it are read.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use crate::driver::dashed;
use sluice_core::vllm::args::{ArgsError, ServeArgs};

/// The most that is read of a file of settings.
const FILE_MAX: u64 = 1 << 20;

/// Flags by name, each with its values as text; a switch is `true` or `false`.
pub(super) type Values = BTreeMap<String, Vec<String>>;

/// A command line, read.
#[derive(Debug, Default)]
pub(super) struct Words {
    pub(super) values: Values,
    /// The long names as they were written, without dashes.
    pub(super) written: Vec<String>,
    /// What stands there without a flag before it.
    pub(super) positional: Option<String>,
}

/// What a flag takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Takes {
    /// Nothing; which of the two it says.
    Nothing(bool),
    One,
    Many,
    /// The flag is not known.
    Perhaps,
}

/// Whether a word is a flag and not a negative number.
fn is_flag(word: &str) -> bool {
    word.starts_with('-') && word.len() > 1 && word.parse::<f64>().is_err()
}

/// The full name of a flag that is written `-tp`, `--no-enable-lora` or `--max_num_se`, and what it takes.
fn known(written: &str) -> (String, Takes) {
    let bare = || dashed(written.trim_start_matches('-'));
    if written.contains('.') {
        return (bare(), Takes::One);
    }
    match ServeArgs::parse(&["m", written]) {
        Ok(args) => match args.flags().next() {
            Some(name) => (name.to_owned(), Takes::Nothing(args.switch(name).unwrap_or(true))),
            None => (bare(), Takes::Perhaps),
        },
        // Named as `--tensor-parallel-size/-tp`.
        Err(ArgsError::Missing(shown, what)) => {
            let name = shown.split('/').find_map(|form| form.strip_prefix("--")).map_or_else(bare, dashed);
            (name, if what == "one argument" { Takes::One } else { Takes::Many })
        }
        Err(_) => (bare(), Takes::Perhaps),
    }
}

/// The full name of a setting, and for a switch whether its name says on.
pub(super) fn setting(name: &str) -> (String, bool) {
    match known(&format!("--{name}")) {
        (full, Takes::Nothing(on)) => (full, on),
        _ => (dashed(name), true),
    }
}

impl Words {
    pub(super) fn read(words: &[String]) -> Self {
        let mut read = Self::default();
        let mut at = 0;
        while let Some(word) = words.get(at) {
            at += 1;
            if word == "--" {
                continue;
            }
            if !is_flag(word) {
                read.positional.get_or_insert_with(|| word.clone());
                continue;
            }
            let (written, attached) = split(word);
            if let Some(long) = written.strip_prefix("--") {
                read.written.push(dashed(long));
            }
            let (name, takes) = known(written);
            let most = match takes {
                Takes::Nothing(_) => 0,
                Takes::One | Takes::Perhaps => 1,
                Takes::Many => usize::MAX,
            };
            let mut values: Vec<String> = attached.map(str::to_owned).into_iter().collect();
            if values.is_empty() {
                let follow = words[at..].iter().take(most).take_while(|word| !is_flag(word));
                values.extend(follow.cloned());
                at += values.len();
            }
            if values.is_empty() {
                values.push((takes != Takes::Nothing(false)).to_string());
            }
            // A short flag that is not known names nothing.
            if written.starts_with("--") || takes != Takes::Perhaps {
                read.values.insert(name, values);
            }
        }
        read
    }
}

/// The flag and the value that is attached to it: `--a=b`, `-O3`, `-qawq`.
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
    let one = word.char_indices().nth(2).map_or(word, |(end, _)| &word[..end]);
    let glued = !word.starts_with("--") && one.len() < word.len() && known(word).1 == Takes::Perhaps;
    match glued && known(one).1 == Takes::One {
        true => (one, Some(&word[one.len()..])),
        false => (word, None),
    }
}

/// What a file of `--config` sets; `None`: it cannot be read here.
pub(super) fn file(path: &str) -> Option<Values> {
    let path = Path::new(path);
    if path.metadata().ok()?.len() > FILE_MAX {
        return None;
    }
    Some(yaml(&fs::read_to_string(path).ok()?))
}

fn yaml(text: &str) -> Values {
    let mut values = Values::new();
    let mut open: Option<String> = None;
    for line in text.lines() {
        let content = line.split(" #").next().unwrap_or_default().trim_end();
        if content.trim().is_empty() || content.starts_with('#') || content.starts_with("---") {
            continue;
        }
        // An entry of a list may stand at the left edge too.
        if let Some(entry) = content.trim_start().strip_prefix("- ") {
            if let Some(list) = open.as_ref().and_then(|key| values.get_mut(key)) {
                list.push(scalar(entry));
            }
            continue;
        }
        if content.starts_with(' ') {
            open = None;
            continue;
        }
        let Some((key, value)) = content.split_once(':') else { continue };
        let (name, on) = setting(key.trim().trim_matches(['"', '\'']));
        let value = value.trim();
        let list = value.strip_prefix('[').and_then(|list| list.strip_suffix(']'));
        let said = match list {
            Some(list) => list.split(',').map(scalar).filter(|entry| !entry.is_empty()).collect(),
            None if value.is_empty() => Vec::new(),
            None if is_truth(value).is_some_and(|said| said != on) => vec!["false".to_owned()],
            None => vec![scalar(value)],
        };
        open = said.is_empty().then(|| name.clone());
        values.insert(name, said);
    }
    values
}

fn is_truth(value: &str) -> Option<bool> {
    match value.to_ascii_lowercase().as_str() {
        "true" | "yes" | "on" => Some(true),
        "false" | "no" | "off" => Some(false),
        _ => None,
    }
}

fn scalar(text: &str) -> String {
    let text = text.trim();
    match is_truth(text) {
        Some(said) => said.to_string(),
        None => text.trim_matches(['"', '\'']).to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(line: &str) -> Words {
        Words::read(&line.split(' ').map(str::to_owned).collect::<Vec<_>>())
    }

    #[test]
    fn short_flags_switches_and_the_model_are_told_from_values() {
        let words = read(
            "--enable-lora -tp 2 m -q awq -O3 --seed -1 -n2 --max-num-seq=4 -asc 3 --no-enable-prefix-caching -ep",
        );
        let value = |name: &str| words.values.get(name).map(|values| values.join(" "));
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
        assert_eq!((words.positional.as_deref(), words.values.len()), (Some("m"), wanted.len()));
        let names = ["enable-lora", "seed", "max-num-seq", "no-enable-prefix-caching"];
        assert!(names.iter().all(|name| words.written.iter().any(|written| written == name)), "{:?}", words.written);
    }

    #[test]
    fn a_flag_that_is_not_known_takes_one_word_and_one_that_takes_many_all() {
        let words = read("--new-flag x m --served-model-name a b --other --lora-modules p=/x q=/y");
        assert_eq!(
            (&words.values["new-flag"], &words.values["other"]),
            (&vec!["x".to_owned()], &vec!["true".to_owned()])
        );
        assert_eq!((words.values["served-model-name"].len(), words.values["lora-modules"].len()), (2, 2));
        assert_eq!(words.positional.as_deref(), Some("m"));
        assert_eq!(read("--compilation-config.use_x false m").values["compilation-config.use_x"], ["false"]);
    }

    #[test]
    fn a_file_of_settings_is_read_at_its_left_edge() {
        let text = "# all\nmodel: org/m\nenable_lora: true  # adapters\nmax-lora-rank: 64\nlora-modules:\n  - a=/x\n  - b=/y\n\
                    served-model-name: [a, 'b']\ncompilation-config:\n  mode: 3\nenable-prefix-caching: no\ntensor-parallel-size: 2\n";
        let values = yaml(text);
        let wanted = [
            ("model", "org/m"),
            ("enable-lora", "true"),
            ("max-lora-rank", "64"),
            ("lora-modules", "a=/x b=/y"),
            ("served-model-name", "a b"),
            ("compilation-config", ""),
            ("enable-prefix-caching", "false"),
            ("tensor-parallel-size", "2"),
        ];
        for (name, wanted) in wanted {
            assert_eq!(values.get(name).map(|values| values.join(" ")).as_deref(), Some(wanted), "{name}");
        }
        assert_eq!(values.len(), wanted.len());
        assert!(file("/nonexistent/settings.yaml").is_none());
    }
}
