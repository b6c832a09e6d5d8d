//! Reads the flags of `vllm serve` into typed values and writes them again: argv -> [`ServeArgs`]
//! -> argv.
//!
//! Grammar as argparse reads it: `--flag value`, `--flag=value`, `_` and `-` alike in names, unique
//! abbreviations, switches with a `--no-` form, short forms such as `-tp`, one positional model (or
//! `--model`), `-O2`, and parts of a JSON flag as `--flag.key value`. Where vLLM takes sizes, they
//! may have the units k (1,000), K (1,024), and likewise m, g and t. If a flag is repeated, the
//! last value counts.
//!
//! An unknown or removed flag is an error for which the caller exits with code 2, as vLLM does.
//! Values are checked while parsing, so reading from a `ServeArgs` cannot fail.

use std::collections::BTreeMap;

use super::flags::parse::is_flag;
use super::flags::table::{self, Flag, LookupError, Takes};
use super::flags::value::{FlagValue as Value, finite};
use super::flags::write;
use super::json_parts::{self, JsonParts};
use super::version::Version;
use super::whole_number::{self, BinaryFraction};

/// The reason why vLLM would refuse an argv. A process that prints it exits with code 2.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ArgsError {
    /// Flags that vLLM does not have, or no longer has.
    #[error("unrecognized arguments: {0}")]
    Unrecognized(String),
    /// An abbreviation of several flags.
    #[error("ambiguous option: {0} could match {1}")]
    Ambiguous(String, String),
    /// A flag without a value.
    #[error("argument {0}: expected {1}")]
    Missing(String, &'static str),
    /// A value of the wrong type.
    #[error("argument {flag}: invalid {wanted} value: '{value}'")]
    Invalid {
        /// The flag as argparse names it.
        flag: String,
        /// The type that the flag takes.
        wanted: &'static str,
        /// The value that was given.
        value: String,
    },
    /// A value of the wrong type for a flag that also takes `None`.
    #[error("argument {0}: Value {1} cannot be converted to {2}.")]
    Convert(String, String, &'static str),
    /// A value that is not among the choices.
    #[error("argument {0}: invalid choice: {1} (choose from {2})")]
    Choice(String, String, String),
    /// A number with a fraction before an upper-case unit, such as `1.5K`.
    #[error(
        "argument {flag}: Decimals are not allowed with binary suffixes like {unit}. Did you mean to use {number}{} \
         instead?", unit.to_ascii_lowercase()
    )]
    Decimal {
        /// The flag.
        flag: String,
        /// The number before the unit.
        number: String,
        /// The unit.
        unit: char,
    },
    /// A value that is not valid JSON.
    #[error("argument {0}: {1} is not valid JSON")]
    Json(String, String),
    /// An adapter that is neither `name=path` nor JSON.
    #[error("Invalid JSON format for --lora-modules: {0}")]
    Lora(String),
    /// An adapter whose JSON lacks a field.
    #[error(
        "Invalid fields for --lora-modules: {0} - LoRAModulePath.__init__() missing 1 required positional argument: '{1}'"
    )]
    LoraField(String, &'static str),
    /// A switch with a value.
    #[error("argument {0}: ignored explicit argument '{1}'")]
    SwitchWithValue(String, String),
}

impl ArgsError {
    /// Whether the parser of `vllm`, not that of `vllm serve`, reports the error.
    pub fn is_from_main_parser(&self) -> bool {
        matches!(self, Self::Unrecognized(_))
    }
}

/// A parsed argv of `vllm serve`.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ServeArgs {
    model: Option<String>,
    values: BTreeMap<&'static str, Value>,
}

/// The flags whose names contain `word`, one per line as in vLLM's help; all flags for "". Some
/// programs read this list before they use a flag.
pub fn help(version: Version, word: &str) -> String {
    let word = word.replace('_', "-");
    let entries = table::table().iter().map(|flag| flag.entry(version)).filter(|entry| entry.contains(&word));
    entries.map(|entry| format!("  {entry}\n")).collect()
}

impl ServeArgs {
    /// Parses the words after `vllm serve` as [`Version::COMPARED`] reads them.
    ///
    /// # Errors
    /// See [`ArgsError`]. One error names all unrecognized arguments.
    pub fn parse<S: AsRef<str>>(argv: &[S]) -> Result<Self, ArgsError> {
        Self::parse_as(Version::COMPARED, argv)
    }

    /// Parses the words after `vllm serve` as this version reads them.
    ///
    /// # Errors
    /// See [`ArgsError`]. One error names all unrecognized arguments.
    pub fn parse_as<S: AsRef<str>>(version: Version, argv: &[S]) -> Result<Self, ArgsError> {
        let argv = model_first(argv);
        let mut args = Self::default();
        let mut parts = JsonParts::default();
        let mut unrecognized = Vec::new();
        let mut rest = argv.iter().map(String::as_str).peekable();
        while let Some(word) = rest.next() {
            if word == "--" {
                continue;
            }
            if !is_flag(word) {
                match args.model {
                    None => args.model = Some(word.to_owned()),
                    Some(_) => unrecognized.push(word.to_owned()),
                }
                continue;
            }
            if word == "-O" && rest.peek().is_some_and(|next| ["0", "1", "2", "3"].contains(next)) {
                args.values.insert("optimization-level", Value::Text(rest.next().unwrap_or_default().to_owned()));
                continue;
            }
            if let Some(level) = optimization_level(word) {
                args.values.insert("optimization-level", Value::Text(level.to_owned()));
                continue;
            }
            let (name, attached) = match word.split_once('=') {
                Some((name, value)) => (name, Some(value.to_owned())),
                None => (word, None),
            };
            let (name, key) = name.split_once('.').map_or((name, None), |(name, key)| (name, Some(key)));
            let (flag, on) = match table::find(name, version) {
                Ok(found) => found,
                Err(LookupError::Ambiguous(names)) => {
                    return Err(ArgsError::Ambiguous(name.to_owned(), names.join(", ")));
                }
                Err(LookupError::Unknown) => {
                    unrecognized.push(word.to_owned());
                    if attached.is_none() && rest.peek().is_some_and(|next| !is_flag(next)) {
                        unrecognized.extend(rest.next().map(str::to_owned));
                    }
                    continue;
                }
            };
            let mut values: Vec<String> = attached.into_iter().collect();
            if let Some(key) = key.filter(|_| flag.takes == Takes::Json) {
                // The next word is the value even if it looks like a flag: `-cc.custom_ops+ -silu`
                let text = values.pop().or_else(|| rest.next().map(str::to_owned));
                let text = text.ok_or_else(|| ArgsError::Missing(name.to_owned(), "one argument"))?;
                parts.add(name, flag.name, key, &text);
                continue;
            }
            if !matches!(flag.takes, Takes::Switch | Takes::Flag) && values.is_empty() {
                let most = if flag.many { usize::MAX } else { 1 };
                while values.len() < most && rest.peek().is_some_and(|next| !is_flag(next)) {
                    values.extend(rest.next().map(str::to_owned));
                }
            }
            let value = value(flag, version, on, values)?;
            args.values.insert(flag.name, value);
        }
        args.values.extend(parts.into_texts().map(|(flag, text)| (flag, Value::Text(text))));
        if let Some(Value::Text(model)) = args.values.remove("model") {
            args.model = Some(model);
        }
        if unrecognized.is_empty() { Ok(args) } else { Err(ArgsError::Unrecognized(unrecognized.join(" "))) }
    }

    /// The argv that parses to the same arguments: the model, then flags in alphabetical order.
    pub fn to_argv(&self) -> Vec<String> {
        self.model.iter().cloned().chain(write::words(&self.values)).collect()
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

    /// Texts that were given; empty if the flag was not given.
    pub fn texts(&self, flag: &str) -> &[String] {
        match self.values.get(flag) {
            Some(Value::List(values)) => values,
            _ => &[],
        }
    }

    /// Adapters of `--lora-modules`: name and path.
    pub fn adapters(&self) -> Vec<(String, String)> {
        self.texts("lora-modules").iter().filter_map(|text| lora(text).ok()).collect()
    }

    /// A switch: `Some(false)` for the `--no-` form, `None` if it was not given.
    pub fn switch(&self, flag: &str) -> Option<bool> {
        match self.values.get(flag) {
            Some(Value::Flag(value)) => Some(*value),
            _ => None,
        }
    }
}

/// Moves `--model X` to the front as the positional model, as `vllm serve` does. Another positional
/// model is then an unrecognized argument.
fn model_first<S: AsRef<str>>(argv: &[S]) -> Vec<String> {
    let mut argv: Vec<String> = argv.iter().map(|word| word.as_ref().to_owned()).collect();
    let Some(at) = argv.iter().position(|word| word == "--model" || word.starts_with("--model=")) else { return argv };
    let word = argv.remove(at);
    match word.strip_prefix("--model=") {
        Some(model) => argv.insert(0, model.to_owned()),
        None if at < argv.len() => {
            let model = argv.remove(at);
            argv.insert(0, model);
        }
        None => argv.push(word),
    }
    argv
}

/// The optimization level in `-O3` or `-O=3`.
fn optimization_level(word: &str) -> Option<&str> {
    let level = word.strip_prefix("-O").filter(|level| !level.is_empty())?;
    Some(level.strip_prefix('=').unwrap_or(level))
}

fn value(flag: &Flag, version: Version, on: bool, mut values: Vec<String>) -> Result<Value, ArgsError> {
    let name = || flag.shown(version);
    match flag.takes {
        Takes::Switch | Takes::Flag => match values.pop() {
            None => Ok(Value::Flag(on)),
            Some(value) => Err(ArgsError::SwitchWithValue(name(), value)),
        },
        _ if flag.many && values.is_empty() => Err(ArgsError::Missing(name(), "at least one argument")),
        _ if flag.many => {
            for value in &values {
                check(flag, version, value)?;
            }
            Ok(Value::List(values))
        }
        _ => {
            let text = values.pop().ok_or_else(|| ArgsError::Missing(name(), "one argument"))?;
            check(flag, version, &text)
        }
    }
}

fn check(flag: &Flag, version: Version, text: &str) -> Result<Value, ArgsError> {
    let name = || flag.shown(version);
    let wrong = |wanted: &'static str, class: &'static str| match flag.optional {
        true => ArgsError::Convert(name(), text.to_owned(), class),
        false => ArgsError::Invalid { flag: name(), wanted, value: text.to_owned() },
    };
    // Every flag of an optional type also takes `None`.
    if flag.optional && text == "None" {
        return Ok(Value::Text(text.to_owned()));
    }
    let value = match flag.takes {
        Takes::Int => Value::Int(text.trim().replace('_', "").parse().map_err(|_| wrong("int", "<class 'int'>"))?),
        Takes::Float => Value::Float(finite(text.trim()).ok_or_else(|| wrong("float", "<class 'float'>"))?),
        Takes::Size | Takes::SizeAuto => Value::Int(size(flag, version, text)?.ok_or_else(|| {
            let auto = flag.takes == Takes::SizeAuto;
            let wanted = if auto { "human_readable_int_or_auto" } else { "human_readable_int" };
            wrong(wanted, "<function human_readable_int>")
        })?),
        // Only the syntax is checked here; vLLM checks the content of the object.
        Takes::Json => {
            let text = json_parts::whole(flag.name, text).map_err(|fraction| decimal(flag, version, fraction))?;
            Value::Text(text.map_err(|text| ArgsError::Json(name(), text))?)
        }
        Takes::Lora => {
            lora(text)?;
            Value::Text(text.to_owned())
        }
        _ => Value::Text(text.to_owned()),
    };
    if flag.choices.is_empty() || flag.choices.contains(&text) {
        return Ok(value);
    }
    let number = matches!(value, Value::Int(_));
    let quote = |text: &&str| if number || *text == "None" { (*text).to_owned() } else { format!("'{text}'") };
    let choices: Vec<String> = flag.choices.iter().map(quote).collect();
    Err(ArgsError::Choice(name(), quote(&text), choices.join(", ")))
}

/// Parses one adapter: name and path.
fn lora(text: &str) -> Result<(String, String), ArgsError> {
    if let Some((name, path)) = text.split_once('=').filter(|_| !text.contains(',')) {
        return Ok((name.to_owned(), path.to_owned()));
    }
    let object: serde_json::Value = serde_json::from_str(text).map_err(|_| ArgsError::Lora(text.to_owned()))?;
    let field = |name: &'static str| {
        let value = object[name].as_str().map(str::to_owned);
        value.ok_or_else(|| ArgsError::LoraField(text.to_owned(), name))
    };
    Ok((field("name")?, field("path")?))
}

/// A whole number with an optional unit. For flags that take `auto`, it is -1.
fn size(flag: &Flag, version: Version, text: &str) -> Result<Option<i64>, ArgsError> {
    let text = text.trim();
    if flag.takes == Takes::SizeAuto && (text.eq_ignore_ascii_case("auto") || text == "-1") {
        return Ok(Some(-1));
    }
    whole_number::parse(text).map_err(|fraction| decimal(flag, version, fraction))
}

fn decimal(flag: &Flag, version: Version, BinaryFraction { number, unit }: BinaryFraction) -> ArgsError {
    ArgsError::Decimal { flag: flag.shown(version), number, unit }
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
        for word in ["nan", "inf", "-Infinity", "1e999"] {
            let text = text(&[&format!("--gpu-memory-utilization={word}")]);
            assert!(text.ends_with(&format!("invalid float value: '{word}'")), "{text}");
        }
        assert_eq!(
            text(&["--enforce-eager=yes"]),
            "argument --enforce-eager/--no-enforce-eager: ignored explicit argument 'yes'"
        );
    }

    #[test]
    fn sizes_count_in_thousands_or_in_powers_of_two() {
        let length =
            |text: &str| ServeArgs::parse(&["m", "--max-model-len", text]).map(|args| args.int("max-model-len"));
        for (text, value) in [("1k", 1000), ("1K", 1024), ("1.5m", 1_500_000), ("auto", -1), ("-1", -1)] {
            assert_eq!(length(text), Ok(Some(value)), "{text}");
        }
        assert_eq!(
            length("1.5K").unwrap_err().to_string(),
            "argument --max-model-len: Decimals are not allowed with binary suffixes like K. Did you mean to use 1.5k \
             instead?"
        );
        assert!(length("abc").unwrap_err().to_string().contains("invalid human_readable_int_or_auto value: 'abc'"));
        assert!(ServeArgs::parse(&["m", "--max-num-seqs", "1k"]).is_err(), "only sizes take units");
    }

    #[test]
    fn choices_are_those_of_the_flag() {
        let text = |argv: &[&str]| ServeArgs::parse(argv).unwrap_err().to_string();
        assert_eq!(
            text(&["m", "--scheduling-policy", "lifo"]),
            "argument --scheduling-policy: invalid choice: 'lifo' (choose from 'fcfs', 'priority')"
        );
        assert_eq!(
            text(&["m", "--max-lora-rank", "7"]),
            "argument --max-lora-rank: invalid choice: 7 (choose from 1, 8, 16, 32, 64, 128, 256, 320, 512)"
        );
        assert!(text(&["m", "--max-num-queued-reqs", "x"]).ends_with("Value x cannot be converted to <class 'int'>."));
    }

    #[test]
    fn adapters_are_written_in_two_ways() {
        let args =
            ServeArgs::parse(&["m", "--lora-modules", "a=/x", r#"{"name":"b","path":"/y","base_model_name":"m"}"#]);
        assert_eq!(args.unwrap().adapters(), [("a".into(), "/x".into()), ("b".into(), "/y".into())]);
        assert_eq!(
            ServeArgs::parse(&["m", "--lora-modules", "a"]).unwrap_err().to_string(),
            "Invalid JSON format for --lora-modules: a"
        );
    }

    #[test]
    fn the_model_may_be_a_flag_and_parts_of_json_too() {
        let args = ServeArgs::parse(&["--port", "1", "--model", "x", "-O3", "-cc.mode", "0"]).unwrap();
        assert_eq!(args.text("compilation-config"), Some(r#"{"mode":0}"#));
        assert_eq!(ServeArgs::parse(&args.to_argv()).as_ref(), Ok(&args));
        let dashed =
            ServeArgs::parse(&["m", "-cc.custom_ops+", "-silu,+gelu", "-cc.mode", "-1", "--port", "1"]).unwrap();
        assert_eq!(dashed.text("compilation-config"), Some(r#"{"custom_ops":["-silu","+gelu"],"mode":-1}"#));
        assert_eq!(dashed.int("port"), Some(1));
        assert_eq!(
            ServeArgs::parse(&["m", "-cc.mode"]).unwrap_err().to_string(),
            "argument -cc: expected one argument"
        );
        let units = ServeArgs::parse(&["m", "-cc", r#"{"max_cudagraph_capture_size": 1k}"#]).unwrap();
        assert_eq!(units.text("compilation-config"), Some(r#"{"max_cudagraph_capture_size": 1000}"#));
        let spaced = ServeArgs::parse(&["m", "-O", "1"]).unwrap();
        assert_eq!(spaced.text("optimization-level"), Some("1"));
        assert_eq!((args.model(), args.int("port")), (Some("x"), Some(1)));
        assert_eq!(args.text("optimization-level"), Some("3"));
        assert!(ServeArgs::parse(&["m", "--model", "x"]).is_err());
    }

    proptest! {
        #[test]
        fn what_is_written_parses_back(
            seqs in proptest::option::of(1i64..5000), eager in proptest::option::of(any::<bool>()),
            util in proptest::option::of(0.1f64..1.0), names in proptest::collection::vec("[a-z/]{1,8}", 0..3),
        ) {
            let mut args = ServeArgs { model: Some("m".into()), ..ServeArgs::default() };
            args.values.extend(seqs.map(|value| ("max-num-seqs", Value::Int(value))));
            args.values.extend(eager.map(|value| ("enforce-eager", Value::Flag(value))));
            args.values.extend(util.map(|value| ("gpu-memory-utilization", Value::Float(value))));
            if !names.is_empty() {
                args.values.insert("served-model-name", Value::List(names));
            }
            prop_assert_eq!(ServeArgs::parse(&args.to_argv()), Ok(args));
        }
    }
}
