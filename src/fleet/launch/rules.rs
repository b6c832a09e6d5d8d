//! Which settings are flags of the installed vLLM: known ones pass, obsolete ones are dropped, others are refused.
//!
//! Dropped with a notice are flags that were removed because what they asked for became the only way, or nothing: a start
//! without them does what they meant. A flag that was replaced is refused with the new name, because its value may not fit.

use std::collections::BTreeMap;

use super::Known;
use super::check::Flat;
use crate::driver::{EngineFailure, Notice};
use sluice_core::vllm::args::{ArgsError, ServeArgs};
use sluice_core::vllm::failure::FailureClass;
use sluice_gateway::config::ArgValue;

/// Removed from vLLM; without them it does the same.
const OBSOLETE: &[&str] = &[
    "disable-async-output-proc",
    "disable-frontend-multiprocessing",
    "disable-log-requests",
    "enable-reasoning",
    "max-seq-len-to-capture",
    "multi-step-stream-outputs",
    "num-lookahead-slots",
    "num-scheduler-steps",
    "preemption-mode",
    "scheduler-delay-factor",
    "swap-space",
    "use-v2-block-manager",
];

/// Replaced by another flag.
const REPLACED: &[(&str, &str)] = &[
    ("cuda-graph-sizes", "cudagraph-capture-sizes"),
    ("device", "the environment (the platform is found by itself)"),
    ("guided-decoding-backend", "structured-outputs-config"),
    ("num-speculative-tokens", "speculative-config"),
    ("rope-scaling", "hf-overrides"),
    ("rope-theta", "hf-overrides"),
    ("speculative-model", "speculative-config"),
    ("task", "runner and convert"),
];

/// The settings that may be passed, by dashed name. `known`: the flags of the program, where it could be asked.
///
/// # Errors
/// A flag the program does not have, or a value that is not of the flag's type.
pub(super) fn flags(
    args: BTreeMap<String, ArgValue>,
    known: Option<&Known>,
    notices: &mut Vec<Notice>,
) -> Result<BTreeMap<String, ArgValue>, EngineFailure> {
    let mut kept = BTreeMap::new();
    for (name, value) in args {
        let written = match value {
            ArgValue::Flag(false) if !name.contains('.') => format!("no-{name}"),
            _ => name.clone(),
        };
        match known {
            Some(known) if !has(known, &written) => match unknown(&name, &value, known) {
                Ok(notice) => {
                    notices.push(notice);
                    continue;
                }
                Err(failure) => return Err(failure),
            },
            _ => {
                typed(&name, &value)?;
                chosen(&name, &value, known)?;
            }
        }
        kept.insert(name, value);
    }
    Ok(kept)
}

/// Refuses flags in `launch.command` that the program does not have. They are the user's own words and are not edited.
pub(super) fn command(written: &Flat, known: Option<&Known>) -> Result<(), EngineFailure> {
    let Some(known) = known else { return Ok(()) };
    match written.written().find(|name| !has(known, name)) {
        Some(name) => Err(EngineFailure::new(
            FailureClass::UnknownFlag,
            format!("this vLLM has no flag --{name} in launch.command"),
        )),
        None => Ok(()),
    }
}

/// Whether argparse takes a name: in full, cut short while only one flag begins so, or dotted, for one key of JSON.
fn has(known: &Known, name: &str) -> bool {
    let name = name.split('.').next().unwrap_or(name);
    let beginning = known.range(name.to_owned()..).take_while(|(other, _)| other.starts_with(name));
    known.contains_key(name) || beginning.count() == 1
}

/// What to do about a flag that the program does not have: dropped with a notice, or refused.
fn unknown(name: &str, value: &ArgValue, known: &Known) -> Result<Notice, EngineFailure> {
    if OBSOLETE.contains(&name) {
        return Ok(Notice(format!("{name} is dropped: this vLLM does not have it any more and does the same without")));
    }
    if matches!(value, ArgValue::Flag(false)) && known.contains_key(name) {
        return Err(EngineFailure::new(
            FailureClass::BadArguments,
            format!("{name} = false: --{name} has no --no- form; leave it out"),
        ));
    }
    let replaced = REPLACED.iter().find(|(old, _)| *old == name);
    let cause = match (replaced, closest(name, known)) {
        (Some((_, new)), _) => format!("--{name} was replaced by {new}"),
        (None, Some(close)) => format!("this vLLM has no flag --{name}; did you mean {close}?"),
        (None, None) => format!("this vLLM has no flag --{name}"),
    };
    Err(EngineFailure::new(FailureClass::UnknownFlag, cause))
}

/// Checks the value's type with what we know of the flag ourselves; a flag that we do not know passes.
fn typed(name: &str, value: &ArgValue) -> Result<(), EngineFailure> {
    if name.is_empty() || name.starts_with('-') || name.contains(|c: char| c.is_whitespace() || c == '=') {
        return Err(EngineFailure::new(
            FailureClass::BadArguments,
            format!("{name:?} is not the name of a flag (without its dashes)"),
        ));
    }
    // `--hf-token` alone is the token that was stored on this host.
    if name == "hf-token" && *value == ArgValue::Flag(true) {
        return Ok(());
    }
    let wrong = |cause: String| Err(EngineFailure::new(FailureClass::BadArguments, cause));
    let parsed = |value: &ArgValue| {
        let mut argv = vec!["model".to_owned()];
        super::write(name, value, &mut argv);
        ServeArgs::parse(&argv)
    };
    match (parsed(value), value) {
        // Versions differ in the flags and choices that they have; in types they do not.
        (Ok(_) | Err(ArgsError::Choice(..) | ArgsError::Ambiguous(..)), _) => Ok(()),
        (Err(ArgsError::Unrecognized(words)), _) => {
            match words.trim_start_matches('-').starts_with(name) || words.starts_with("--no-") {
                true => Ok(()),
                false => wrong(format!("{name} takes one value, not a list")),
            }
        }
        (Err(ArgsError::Json(..)), ArgValue::Text(text)) if parsed(&ArgValue::Text(without_units(text))).is_ok() => {
            Ok(())
        }
        (Err(error), _) => wrong(error.to_string()),
    }
}

/// JSON whose bare numbers have lost their units (`{"cpu_bytes_to_use": 80m}`), which vLLM multiplies out.
fn without_units(text: &str) -> String {
    let (mut plain, mut quoted, mut escaped) = (String::new(), false, false);
    for letter in text.chars() {
        let digit = plain.ends_with(|c: char| c.is_ascii_digit());
        if !quoted && digit && "kKmMgGtT".contains(letter) {
            continue;
        }
        quoted ^= letter == '"' && !escaped;
        escaped = quoted && letter == '\\' && !escaped;
        plain.push(letter);
    }
    plain
}

/// Whether the value is one of those that the program lists for the flag, if it lists any.
fn chosen(name: &str, value: &ArgValue, known: Option<&Known>) -> Result<(), EngineFailure> {
    let Some(choices) = known.and_then(|known| known.get(name)).filter(|choices| !choices.is_empty()) else {
        return Ok(());
    };
    let given = match value {
        ArgValue::Int(number) => vec![number.to_string()],
        ArgValue::Text(text) => vec![text.clone()],
        ArgValue::List(texts) => texts.clone(),
        ArgValue::Flag(_) | ArgValue::Float(_) => return Ok(()),
    };
    match given.iter().find(|value| !choices.contains(value)) {
        Some(wrong) => Err(EngineFailure::new(
            FailureClass::BadArguments,
            format!("{name} = {wrong} must be one of {}", choices.join(", ")),
        )),
        None => Ok(()),
    }
}

/// The known name with the fewest letters to change, at most a third of them.
fn closest<'a>(name: &str, known: &'a Known) -> Option<&'a str> {
    let scored = known.keys().map(|other| (distance(name, other), other.as_str()));
    let (changes, other) = scored.min()?;
    (changes * 3 <= name.len()).then_some(other)
}

/// Letters to insert, delete or replace.
fn distance(one: &str, other: &str) -> usize {
    let other: Vec<char> = other.chars().collect();
    let mut row: Vec<usize> = (0..=other.len()).collect();
    for (line, letter) in one.chars().enumerate() {
        let mut before = row[0];
        row[0] = line + 1;
        for (at, theirs) in other.iter().enumerate() {
            let replaced = before + usize::from(letter != *theirs);
            before = row[at + 1];
            row[at + 1] = replaced.min(before + 1).min(row[at] + 1);
        }
    }
    row[other.len()]
}
