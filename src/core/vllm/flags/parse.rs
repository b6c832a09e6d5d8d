//! A command line of vLLM as flags and values.
//!
//! The table of vLLM's flags has the number of values of each flag, and short forms such as `-tp`.
//! The first word that belongs to no flag is the model. An unknown flag takes the next word as the
//! value, unless that word is a flag. An unknown `--no-NAME` without a value turns `NAME` off. A
//! negative number is a value.

use std::collections::BTreeMap;

use super::table::{Arity, dashed, resolve};
use super::value::{FlagValue, finite};

/// The values of each flag, by full name, as text; a switch is `true` or `false`.
pub type FlagValues = BTreeMap<String, Vec<String>>;

/// A parsed command line.
#[derive(Debug, Default)]
pub struct CommandLine {
    /// The values.
    pub values: FlagValues,
    /// The long names as written, without dashes.
    pub written: Vec<String>,
    /// The first word that is neither a flag nor a value.
    pub positional: Option<String>,
}

/// Whether a word is a flag, not a negative number.
pub(in crate::vllm) fn is_flag(word: &str) -> bool {
    word.starts_with('-') && word.len() > 1 && finite(word).is_none()
}

impl CommandLine {
    /// Parses the words after `vllm serve`.
    pub fn parse(words: &[String]) -> Self {
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
            let (mut name, mut arity) = resolve(written);
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
                if let (None, Some(off)) = (arity, name.strip_prefix("no-")) {
                    (name, arity) = (off.to_owned(), Some(Arity::Switch { on: false }));
                }
                values.push((arity != Some(Arity::Switch { on: false })).to_string());
            }
            // An unknown short flag is left out, because it has no full name.
            if written.starts_with("--") || arity.is_some() {
                line.values.insert(name, values);
            }
        }
        line
    }

    /// The flags as typed values.
    pub fn settings<S>(self) -> BTreeMap<String, FlagValue<S>> {
        let read = |(name, values): (String, Vec<String>)| {
            let value = match values.as_slice() {
                [text] => FlagValue::read(&name, text),
                _ => FlagValue::List(values),
            };
            (name, value)
        };
        self.values.into_iter().map(read).collect()
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
    use std::convert::Infallible;

    use super::super::write::words as flag_words;
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

    #[test]
    fn words_that_were_written_read_back_as_the_same_settings() {
        let words = |line: &str| line.split(' ').map(str::to_owned).collect::<Vec<_>>();
        let settings = |words: &[String]| CommandLine::parse(words).settings::<Infallible>();
        let written = "--enable-lora --gpu-memory-utilization=0.9 --lora-modules a=b c=d --max-num-seqs=64 --no-new";
        let mut again = flag_words(&settings(&words(written)));
        assert_eq!(settings(&again), settings(&words(written)));
        again.sort();
        let mut sorted = words(written);
        sorted.sort();
        assert_eq!(again, sorted);
    }

    #[test]
    fn each_spelling_of_a_flag_is_read_as_the_same_value() {
        let read = |line: &str| parse(line).settings::<Infallible>();
        for (one, other) in [
            ("--max-num-seqs=64", "m --max_num_seqs 64"),
            ("--tensor-parallel-size=2", "-tp 2"),
            ("--no-enable-prefix-caching", "--no_enable_prefix_caching"),
            ("--long-prefill-token-threshold=1e3", "--long_prefill_token_threshold 1e3"),
            ("--gpu-memory-utilization=nan", "--gpu_memory_utilization nan"),
            ("--max-model-len=8k", "--max_model_len 8k"),
            ("--seed=-1", "--seed -1"),
        ] {
            assert_eq!(read(one), read(other), "{one}");
            for (name, value) in read(one) {
                let text = value.to_string();
                assert_eq!(FlagValue::<Infallible>::read(&name, &text).to_string(), text, "{one}");
            }
        }
        assert_eq!(read("--no-enable-prefix-caching")["enable-prefix-caching"], FlagValue::Flag(false));
        assert_eq!(read("--gpu-memory-utilization -inf").len(), 1, "not a number, so a flag without a full name");
    }
}
