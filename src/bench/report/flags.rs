//! Compares the flags of two command lines, and finds flags that changed the load.
//!
//! A flag is covered if a field of the result states the value, or if the flag only chooses the
//! output. Some other flags are known to leave the requests and the arrivals unchanged. Every
//! remaining flag counts as part of the load, even if it is unknown here.
//!
//! Flags are compared by meaning: an alias counts as the flag, a missing flag as the default, `1.0`
//! as `1`. A test of the command line checks [`ALIASES`] and [`defaults`].

use std::collections::{BTreeMap, BTreeSet};

use crate::result::record::RunConfig;

const COVERED: &str = "--append-result --backend --base-url --burstiness --by-class --class --csv --dataset-name --disable-tqdm --duration \
    --endpoint --goodput --html --json --label --lora-modules --max-concurrency --metadata \
    --metric-percentiles --metrics-url --model --no-self-timed --num-prompts --percentile-metrics \
    --ramp-up-end-rps --ramp-up-start-rps --ramp-up-strategy --request-rate --result-dir --result-filename \
    --save-detailed --save-result --seed --self-timed --tokenizer";

/// Flags without a field that leave the requests and the arrivals unchanged. The flags of
/// tokenizers and templates have no effect; `--prompt-token-ids` asks for the default.
const BESIDE_LOAD: &str = "--dry-run --header --host --insecure --num-warmups --port --profile --prompt-token-ids \
    --ready-check-timeout-sec --request-timeout --reset-prefix-cache --served-model-name --skip-chat-template \
    --skip-tokenizer-init --sweep-max-concurrency --sweep-num-prompts-factor --sweep-request-rate \
    --tokenizer-mode --trust-remote-code";

const GENERATED: &str = "--num-prefixes --output-len --prefix-hit-rate --prefix-repetition-num-prefixes \
    --prefix-repetition-output-len --prefix-repetition-prefix-len --prefix-repetition-suffix-len \
    --random-cache-hit-fraction --random-cache-ratio --random-input-len --random-output-len \
    --random-prefix-len --random-range-ratio";

/// Aliases and their flags.
pub const ALIASES: [(&str, &str); 2] =
    [("--input-len", "--random-input-len"), ("--multi-turn-concurrency", "--max-concurrency")];

/// Defaults of the flags that no field covers.
const DEFAULTS: &str = "--custom-output-len=256 --host=127.0.0.1 --leave-share=0 --lora-assignment=random --lora-zipf=1 \
    --multi-turn-delay-ms=0 --multi-turn-num-turns=3 --num-prefixes=1 --num-warmups=0 --port=8000 \
    --prefix-repetition-num-prefixes=10 --prefix-repetition-output-len=128 --prefix-repetition-prefix-len=256 \
    --prefix-repetition-suffix-len=256 --random-input-len=1024 --random-output-len=128 --random-prefix-len=0 \
    --random-range-ratio=0 --ready-check-timeout-sec=0 --request-timeout=21600 \
    --timed-trace-chunk-hash-size=16 --timed-trace-label-hash-ids=hash_ids \
    --timed-trace-label-input-length=input_length --timed-trace-label-output-length=output_length \
    --timed-trace-label-timestamp=timestamp --timed-trace-sec-multiplier=1 --trace-speed=1 --users=0 \
    --vocabulary=1000-7999";

/// Data sets with which the model decides the ends of responses, unless `--ignore-eos` is given.
const OWN_LENGTHS: [&str; 2] = ["sharegpt", "custom"];

/// Flag and value of each default.
pub fn defaults() -> impl Iterator<Item = (&'static str, &'static str)> {
    DEFAULTS.split(' ').filter_map(|default| default.split_once('='))
}

fn lists(list: &str, name: &str) -> bool {
    list.split(' ').any(|flag| flag == name)
}

/// Whether every result has a field for the flag, or the flag does not concern the requests.
pub fn is_covered(name: &str) -> bool {
    lists(COVERED, name)
}

pub(super) struct FlagDifference {
    pub(super) is_load: bool,
    pub(super) name: String,
    pub(super) was: String,
    pub(super) is: String,
}

/// Flags that differ and that no field of both results covers; none if a command line is missing.
pub(super) fn flags(a: &RunConfig, b: &RunConfig) -> Vec<FlagDifference> {
    if a.arguments.is_empty() || b.arguments.is_empty() {
        return Vec::new();
    }
    let (was, is) = (by_flag(&a.arguments), by_flag(&b.arguments));
    let names: BTreeSet<&String> = was.keys().chain(is.keys()).collect();
    let differs = |name: &&String| was.get(*name) != is.get(*name);
    let names = names.into_iter().filter(differs).filter(|name| !has_field(name, a, b));
    names
        .map(|name| FlagDifference {
            is_load: !lists(BESIDE_LOAD, name),
            name: name.clone(),
            was: shown(was.get(name), name),
            is: shown(is.get(name), name),
        })
        .collect()
}

fn has_field(name: &str, a: &RunConfig, b: &RunConfig) -> bool {
    let says_lengths =
        |config: &RunConfig| !config.classes.is_empty() && config.classes.iter().all(|class| !class.prompt.is_empty());
    let is_generated = |config: &RunConfig| matches!(&*config.dataset, "" | "random" | "prefix_repetition");
    match name {
        "--output-len" => says_lengths(a) && says_lengths(b),
        "--ignore-eos" => {
            [a, b].iter().all(|config| !config.dataset.is_empty() && !OWN_LENGTHS.contains(&&*config.dataset))
        }
        _ if lists(GENERATED, name) => [a, b].iter().all(|config| says_lengths(config) || !is_generated(config)),
        _ => is_covered(name),
    }
}

/// The values of a flag as text. `None`: not given, or the default.
fn shown(values: Option<&Vec<String>>, name: &str) -> String {
    match values {
        None => default_of(name).map_or_else(|| "not given".to_owned(), |default| format!("{default}, the default")),
        Some(values) if values.is_empty() => "given".to_owned(),
        Some(values) => values.join(" "),
    }
}

fn default_of(name: &str) -> Option<&'static str> {
    defaults().find(|(flag, _)| *flag == name).map(|(_, default)| default)
}

/// The values of each flag in one spelling, without defaults. Values of a repeated flag are
/// together.
fn by_flag(arguments: &[String]) -> BTreeMap<String, Vec<String>> {
    let (mut flags, mut last) = (BTreeMap::<String, Vec<String>>::new(), None);
    for argument in arguments {
        if argument.starts_with("--") {
            let (name, value) =
                argument.split_once('=').map_or((&**argument, None), |(name, value)| (name, Some(value)));
            let name = own_name(name);
            flags.entry(name.to_owned()).or_default().extend(value.map(one_spelling));
            last = Some(name);
        } else if let Some(name) = last {
            flags.entry(name.to_owned()).or_default().push(one_spelling(argument));
        }
    }
    let is_default =
        |name: &str, values: &[String]| default_of(name).is_some_and(|default| values == [one_spelling(default)]);
    flags.retain(|name, values| !is_default(name, values));
    flags
}

fn own_name(name: &str) -> &str {
    ALIASES.iter().find(|(alias, _)| *alias == name).map_or(name, |(_, flag)| *flag)
}

fn one_spelling(value: &str) -> String {
    let number = |part: &str| part.parse::<f64>().map_or_else(|_| part.to_owned(), |number| number.to_string());
    value.split(',').map(number).collect::<Vec<_>>().join(",")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::result::record::ClassConfig;

    fn found(dataset: &str, a: &str, b: &str) -> Vec<String> {
        let class = |name: &str| ClassConfig {
            name: name.to_owned(),
            prompt: if dataset == "random" { "1024".to_owned() } else { String::new() },
            ..ClassConfig::default()
        };
        let config = |flags: &str| RunConfig {
            dataset: dataset.to_owned(),
            classes: vec![class("all")],
            arguments: flags.split(' ').map(str::to_owned).collect(),
            ..RunConfig::default()
        };
        let named = |flag: FlagDifference| {
            let mark = if flag.is_load { "load" } else { "beside" };
            format!("{mark}: {} {} -> {}", flag.name, flag.was, flag.is)
        };
        flags(&config(a), &config(b)).into_iter().map(named).collect()
    }

    const NONE: [&str; 0] = [];

    #[test]
    fn the_same_load_in_other_words_is_no_difference() {
        for (a, b) in [
            ("--duration 60", "--num-prompts 600"),
            ("--input-len 200", "--random-input-len 200"),
            ("--multi-turn-concurrency 4", "--max-concurrency=4"),
            ("--leave-share 0.0 --json", "--csv x.csv"),
            ("--users=0 --json", "--json"),
            ("--temperature 0", "--temperature=0.0"),
            ("--ignore-eos --json", "--json"),
            ("--trace-speed 1.0 --json", "--num-prefixes 1"),
        ] {
            assert_eq!(found("random", a, b), NONE, "{a} and {b}");
        }
    }

    #[test]
    fn lengths_that_the_classes_have_are_not_named_twice() {
        assert_eq!(found("random", "--random-input-len 200", "--input-len 400"), NONE);
        assert_eq!(found("random", "--random-prefix-len 64", "--prefix-hit-rate 0.5"), NONE);
        assert_eq!(
            found("", "--input-len 200", "--json"),
            ["load: --random-input-len 200 -> 1024, the default"],
            "the file of an earlier version has no lengths"
        );
        assert_eq!(found("sharegpt", "--random-input-len 200", "--json"), NONE, "it has no effect there");
        assert_eq!(found("sharegpt", "--output-len 200", "--json"), ["load: --output-len 200 -> not given"]);
    }

    #[test]
    fn a_flag_that_changes_requests_is_one_of_the_load_and_the_others_stand_beside_it() {
        assert_eq!(found("random", "--json", "--leave-share 0.5"), ["load: --leave-share 0, the default -> 0.5"]);
        assert_eq!(found("sharegpt", "--json", "--ignore-eos"), ["load: --ignore-eos not given -> given"]);
        assert_eq!(found("random", "--json", "--of-tomorrow 1"), ["load: --of-tomorrow not given -> 1"]);
        assert_eq!(
            found("random", "--json", "--skip-chat-template --port 9000 --prompt-token-ids"),
            [
                "beside: --port 8000, the default -> 9000",
                "beside: --prompt-token-ids not given -> given",
                "beside: --skip-chat-template not given -> given"
            ]
        );
    }
}
