//! Flags of `vllm serve`, typed both ways: argv -> [`ServeArgs`] -> argv.
//!
//! Grammar as argparse reads it: `--flag value`, `--flag=value`, `_` and `-` alike in names, switches with a
//! `--no-` form, `-tp` and its kin, one positional model (or `--model`). Sizes take k (1,000), K (1,024) and the
//! same with m, M, g, G. A flag that is unknown here or was removed from vLLM is an error that ends the process
//! with code 2, because that is how a real start fails when an old script passes an old flag.
//!
//! The table holds the flags that decide capacity, queueing, names and addresses, plus those that people commonly
//! pass and that change nothing for us. Values are kept as written; typed readers check them when parsing, so a
//! `ServeArgs` that exists reads without errors. Repeating a flag: the last one wins.

use std::collections::BTreeMap;

/// What a flag takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Takes {
    /// Nothing; `--no-` negates it.
    Switch,
    /// A whole number, perhaps with a unit.
    Int,
    /// A number.
    Float,
    /// Any text.
    Text,
    /// One or more texts, up to the next flag.
    Texts,
}

use Takes::{Float, Int, Switch, Text, Texts};

const FLAGS: &[(&str, Takes)] = &[
    ("api-key", Texts),
    ("api-server-count", Int),
    ("async-scheduling", Switch),
    ("block-size", Int),
    ("chat-template", Text),
    ("compilation-config", Text),
    ("cpu-offload-gb", Float),
    ("cudagraph-capture-sizes", Texts),
    ("data-parallel-size", Int),
    ("device-ids", Text),
    ("disable-fastapi-docs", Switch),
    ("disable-log-stats", Switch),
    ("download-dir", Text),
    ("dtype", Text),
    ("enable-auto-tool-choice", Switch),
    ("enable-chunked-prefill", Switch),
    ("enable-force-include-usage", Switch),
    ("enable-log-requests", Switch),
    ("enable-lora", Switch),
    ("enable-per-request-metrics", Switch),
    ("enable-prefix-caching", Switch),
    ("enable-prompt-tokens-details", Switch),
    ("enable-request-id-headers", Switch),
    ("enable-server-load-tracking", Switch),
    ("enable-sleep-mode", Switch),
    ("enforce-eager", Switch),
    ("generation-config", Text),
    ("gpu-memory-utilization", Float),
    ("host", Text),
    ("kv-cache-dtype", Text),
    ("kv-cache-memory-bytes", Int),
    ("kv-events-config", Text),
    ("load-format", Text),
    ("long-prefill-token-threshold", Int),
    ("long-prefill-token-threshold-adaptive", Switch),
    ("lora-modules", Texts),
    ("max-cpu-loras", Int),
    ("max-cudagraph-capture-size", Int),
    ("max-logprobs", Int),
    ("max-lora-rank", Int),
    ("max-loras", Int),
    ("max-model-len", Int),
    ("max-num-active-seqs", Int),
    ("max-num-batched-tokens", Int),
    ("max-num-queued-reqs", Int),
    ("max-num-queued-tokens", Int),
    ("max-num-scheduled-tokens", Int),
    ("max-num-seqs", Int),
    ("model", Text),
    ("num-gpu-blocks-override", Int),
    ("performance-mode", Text),
    ("pipeline-parallel-size", Int),
    ("port", Int),
    ("prefill-schedule-interval", Int),
    ("prefix-caching-hash-algo", Text),
    ("quantization", Text),
    ("reasoning-parser", Text),
    ("revision", Text),
    ("root-path", Text),
    ("scheduler-reserve-full-isl", Switch),
    ("scheduling-policy", Text),
    ("seed", Int),
    ("served-model-name", Texts),
    ("shutdown-timeout", Int),
    ("speculative-config", Text),
    ("sse-keep-alive-interval", Float),
    ("stream-interval", Int),
    ("tensor-parallel-size", Int),
    ("tokenizer", Text),
    ("tool-call-parser", Text),
    ("trust-remote-code", Switch),
    ("uvicorn-log-level", Text),
    ("watermark", Float),
];

const SHORT: &[(&str, &str)] = &[
    ("-tp", "tensor-parallel-size"),
    ("-pp", "pipeline-parallel-size"),
    ("-dp", "data-parallel-size"),
    ("-asc", "api-server-count"),
    ("-q", "quantization"),
];

/// The value of a flag that was given.
#[derive(Clone, Debug, PartialEq)]
enum Value {
    Switch(bool),
    Int(i64),
    Float(f64),
    Text(String),
    Texts(Vec<String>),
}

/// Why an argv is not one that vLLM accepts. The process that shows it exits with code 2.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ArgsError {
    /// Flags that vLLM does not have (any more).
    #[error("unrecognized arguments: {0}")]
    Unrecognized(String),
    /// A flag without its value.
    #[error("argument --{0}: expected {1}")]
    Missing(String, &'static str),
    /// A value of the wrong type.
    #[error("argument --{flag}: invalid {wanted} value: '{value}'")]
    Invalid {
        /// Name of the flag.
        flag: String,
        /// Type it takes.
        wanted: &'static str,
        /// What was given.
        value: String,
    },
    /// A switch with a value.
    #[error("argument --{0}: ignored explicit argument '{1}'")]
    SwitchWithValue(String, String),
}

/// An argv of `vllm serve`, parsed.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ServeArgs {
    model: Option<String>,
    values: BTreeMap<&'static str, Value>,
}

impl ServeArgs {
    /// Parses what follows `vllm serve`.
    ///
    /// # Errors
    /// See [`ArgsError`]; all unrecognized arguments are named at once.
    pub fn parse<S: AsRef<str>>(argv: &[S]) -> Result<Self, ArgsError> {
        let mut args = Self::default();
        let mut unrecognized = Vec::new();
        let mut rest = argv.iter().map(AsRef::as_ref).peekable();
        while let Some(word) = rest.next() {
            if !word.starts_with('-') || word == "-" {
                match args.model {
                    None => args.model = Some(word.to_owned()),
                    Some(_) => unrecognized.push(word.to_owned()),
                }
                continue;
            }
            let (name, attached) = match word.split_once('=') {
                Some((name, value)) => (name, Some(value.to_owned())),
                None => (word, None),
            };
            let Some((flag, takes, on)) = find(name) else {
                unrecognized.push(word.to_owned());
                if attached.is_none() && rest.peek().is_some_and(|next| !next.starts_with('-')) {
                    unrecognized.extend(rest.next().map(str::to_owned));
                }
                continue;
            };
            let mut values: Vec<String> = attached.into_iter().collect();
            if takes != Switch && values.is_empty() {
                let most = if takes == Texts { usize::MAX } else { 1 };
                while values.len() < most && rest.peek().is_some_and(|next| !is_flag(next)) {
                    values.extend(rest.next().map(str::to_owned));
                }
            }
            args.values.insert(flag, value(flag, takes, on, values)?);
        }
        if let Some(Value::Text(model)) = args.values.remove("model") {
            args.model = Some(model);
        }
        if unrecognized.is_empty() { Ok(args) } else { Err(ArgsError::Unrecognized(unrecognized.join(" "))) }
    }

    /// The argv that parses back to the same arguments: the model, then flags in alphabetical order.
    pub fn to_argv(&self) -> Vec<String> {
        let mut argv: Vec<String> = self.model.iter().cloned().collect();
        for (flag, value) in &self.values {
            match value {
                Value::Switch(true) => argv.push(format!("--{flag}")),
                Value::Switch(false) => argv.push(format!("--no-{flag}")),
                Value::Int(number) => argv.extend([format!("--{flag}"), number.to_string()]),
                Value::Float(number) => argv.extend([format!("--{flag}"), number.to_string()]),
                Value::Text(text) => argv.push(format!("--{flag}={text}")),
                Value::Texts(texts) => {
                    argv.push(format!("--{flag}"));
                    argv.extend(texts.iter().cloned());
                }
            }
        }
        argv
    }

    /// Names of the flags that were given, in alphabetical order, without dashes.
    pub fn flags(&self) -> impl Iterator<Item = &'static str> {
        self.values.keys().copied()
    }

    /// The model, if one was named.
    pub fn model(&self) -> Option<&str> {
        self.model.as_deref()
    }

    /// A whole number that was given. `flag` is named without dashes, as in `"max-num-seqs"`.
    pub fn int(&self, flag: &str) -> Option<i64> {
        match self.values.get(flag) {
            Some(Value::Int(value)) => Some(*value),
            _ => None,
        }
    }

    /// A number that was given.
    pub fn float(&self, flag: &str) -> Option<f64> {
        match self.values.get(flag) {
            Some(Value::Float(value)) => Some(*value),
            _ => None,
        }
    }

    /// A text that was given.
    pub fn text(&self, flag: &str) -> Option<&str> {
        match self.values.get(flag) {
            Some(Value::Text(value)) => Some(value),
            _ => None,
        }
    }

    /// Texts that were given; empty when the flag was not.
    pub fn texts(&self, flag: &str) -> &[String] {
        match self.values.get(flag) {
            Some(Value::Texts(values)) => values,
            _ => &[],
        }
    }

    /// A switch: `Some(false)` for its `--no-` form, nothing when it was not given.
    pub fn switch(&self, flag: &str) -> Option<bool> {
        match self.values.get(flag) {
            Some(Value::Switch(value)) => Some(*value),
            _ => None,
        }
    }
}

/// A flag and not a negative number.
fn is_flag(word: &str) -> bool {
    word.starts_with('-') && word.parse::<f64>().is_err()
}

fn find(name: &str) -> Option<(&'static str, Takes, bool)> {
    if let Some((_, long)) = SHORT.iter().find(|(short, _)| *short == name) {
        return find(&format!("--{long}"));
    }
    let name = name.strip_prefix("--")?.replace('_', "-");
    let known = |name: &str| FLAGS.iter().find(|(flag, _)| *flag == name);
    if let Some((flag, takes)) = known(&name) {
        return Some((flag, *takes, true));
    }
    let (flag, takes) = known(name.strip_prefix("no-")?)?;
    (*takes == Switch).then_some((*flag, *takes, false))
}

fn value(flag: &str, takes: Takes, on: bool, mut values: Vec<String>) -> Result<Value, ArgsError> {
    let invalid = |wanted, value: &str| ArgsError::Invalid { flag: flag.to_owned(), wanted, value: value.to_owned() };
    let missing = |wanted| ArgsError::Missing(flag.to_owned(), wanted);
    match takes {
        Switch => match values.pop() {
            None => Ok(Value::Switch(on)),
            Some(value) => Err(ArgsError::SwitchWithValue(flag.to_owned(), value)),
        },
        Texts if values.is_empty() => Err(missing("at least one argument")),
        Texts => Ok(Value::Texts(values)),
        _ => {
            let text = values.pop().ok_or_else(|| missing("one argument"))?;
            match takes {
                Int => whole(&text).map(Value::Int).ok_or_else(|| invalid("int", &text)),
                Float => match text.parse::<f64>() {
                    Ok(number) if number.is_finite() => Ok(Value::Float(number)),
                    _ => Err(invalid("float", &text)),
                },
                _ => Ok(Value::Text(text)),
            }
        }
    }
}

/// `32768`, `32k`, `32K`, `1.5m`: lower case counts in thousands, upper case in powers of two. `auto` is -1.
fn whole(text: &str) -> Option<i64> {
    if text == "auto" {
        return Some(-1);
    }
    if let Ok(number) = text.parse() {
        return Some(number);
    }
    let (number, scale) = match text.char_indices().next_back()? {
        (at, 'k') => (&text[..at], 1e3),
        (at, 'K') => (&text[..at], 1024.0),
        (at, 'm') => (&text[..at], 1e6),
        (at, 'M') => (&text[..at], 1024.0 * 1024.0),
        (at, 'g') => (&text[..at], 1e9),
        (at, 'G') => (&text[..at], 1024.0 * 1024.0 * 1024.0),
        _ => return None,
    };
    let value = number.parse::<f64>().ok()? * scale;
    (value.fract() == 0.0 && value.abs() < 9e15).then_some(value as i64)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn flags_read_as_argparse_reads_them() {
        let args = ServeArgs::parse(&[
            "meta-llama/Llama-3.1-8B",
            "--max_num_seqs=128",
            "--max-model-len",
            "32k",
            "--no-enable-prefix-caching",
            "-tp",
            "2",
            "--served-model-name",
            "a",
            "b",
            "--watermark",
            "0.01",
        ])
        .unwrap();
        assert_eq!(args.model(), Some("meta-llama/Llama-3.1-8B"));
        assert_eq!((args.int("max-num-seqs"), args.int("max-model-len")), (Some(128), Some(32_000)));
        assert_eq!(args.switch("enable-prefix-caching"), Some(false));
        assert_eq!((args.int("tensor-parallel-size"), args.float("watermark")), (Some(2), Some(0.01)));
        assert_eq!(args.texts("served-model-name"), ["a", "b"]);
    }

    #[test]
    fn a_removed_flag_is_refused_as_vllm_refuses_it() {
        let error = ServeArgs::parse(&["m", "--disable-log-requests", "--swap-space", "4"]).unwrap_err();
        assert_eq!(error.to_string(), "unrecognized arguments: --disable-log-requests --swap-space 4");
    }

    #[test]
    fn wrong_values_name_the_flag() {
        let text = |argv: &[&str]| ServeArgs::parse(argv).unwrap_err().to_string();
        assert_eq!(text(&["--port", "http"]), "argument --port: invalid int value: 'http'");
        assert_eq!(text(&["--port"]), "argument --port: expected one argument");
        assert_eq!(text(&["--enforce-eager=yes"]), "argument --enforce-eager: ignored explicit argument 'yes'");
    }

    #[test]
    fn sizes_count_in_thousands_or_in_powers_of_two() {
        assert_eq!([whole("1k"), whole("1K"), whole("1.5m"), whole("auto")], [1000, 1024, 1_500_000, -1].map(Some));
        assert_eq!(whole("1.0001k"), None);
    }

    proptest! {
        #[test]
        fn what_is_written_parses_back(
            seqs in proptest::option::of(1i64..5000), eager in proptest::option::of(any::<bool>()),
            util in proptest::option::of(0.1f64..1.0), names in proptest::collection::vec("[a-z/]{1,8}", 0..3),
        ) {
            let mut args = ServeArgs { model: Some("m".into()), ..ServeArgs::default() };
            args.values.extend(seqs.map(|value| ("max-num-seqs", Value::Int(value))));
            args.values.extend(eager.map(|value| ("enforce-eager", Value::Switch(value))));
            args.values.extend(util.map(|value| ("gpu-memory-utilization", Value::Float(value))));
            if !names.is_empty() {
                args.values.insert("served-model-name", Value::Texts(names));
            }
            prop_assert_eq!(ServeArgs::parse(&args.to_argv()), Ok(args));
        }
    }
}
