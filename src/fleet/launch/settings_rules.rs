//! Checks settings against the flags of the installed vLLM: obsolete flags are dropped, unknown
//! ones refused.
//!
//! A flag is obsolete when its behaviour became vLLM's default. It is dropped with a notice. A flag
//! that was replaced is refused with the name of the new one, because the old value may not fit.

use std::collections::BTreeMap;

use super::effective::EffectiveFlags;
use super::installed_flags::InstalledFlags;
use crate::driver::{EngineFailure, Notice};
use sluice_config::ArgValue;
use sluice_core::vllm::args::{ArgsError, ServeArgs};
use sluice_core::vllm::failure::FailureClass;
use sluice_core::vllm::flags::write;

/// Flags that vLLM removed because they are not needed.
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

/// Flags that vLLM replaced.
const REPLACED: &[(&str, &str)] = &[
    ("cuda-graph-sizes", "cudagraph-capture-sizes"),
    ("device", "the environment (vLLM detects the platform)"),
    ("guided-decoding-backend", "structured-outputs-config"),
    ("num-speculative-tokens", "speculative-config"),
    ("rope-scaling", "hf-overrides"),
    ("rope-theta", "hf-overrides"),
    ("speculative-model", "speculative-config"),
    ("task", "runner and convert"),
];

/// The settings to pass on, by dashed name. `known`: the flags of the program, if readable. Unknown
/// flags and values of the wrong type are added to `wrong` instead.
pub(super) fn flags(
    args: BTreeMap<String, ArgValue>,
    known: Option<&InstalledFlags>,
    notices: &mut Vec<Notice>,
    wrong: &mut Vec<EngineFailure>,
) -> BTreeMap<String, ArgValue> {
    let mut kept = BTreeMap::new();
    for (name, value) in args {
        let written = match value {
            ArgValue::Flag(false) if !name.contains('.') => format!("no-{name}"),
            _ => name.clone(),
        };
        let checked = match known {
            Some(known) if !has(known, &written) => unknown(&name, &value, known).map(Some),
            _ => check_type(&name, &value).and_then(|()| check_choice(&name, &value, known)).map(|()| None),
        };
        match checked {
            Ok(None) => drop(kept.insert(name, value)),
            Ok(Some(notice)) => notices.push(notice),
            Err(failure) => wrong.push(failure),
        }
    }
    kept
}

/// Refuses flags in `launch.command` that the program lacks. The operator's command is not edited.
pub(super) fn command(flags: &EffectiveFlags, known: Option<&InstalledFlags>) -> Result<(), EngineFailure> {
    let Some(known) = known else { return Ok(()) };
    match flags.written().find(|name| !has(known, name)) {
        Some(name) => Err(EngineFailure::new(
            FailureClass::UnknownFlag,
            format!("this version of vLLM has no flag --{name}, which launch.command contains"),
        )),
        None => Ok(()),
    }
}

/// Whether argparse accepts a name: in full, as the beginning of exactly one flag, or with a dot
/// and a key of JSON.
fn has(known: &InstalledFlags, name: &str) -> bool {
    let name = name.split('.').next().unwrap_or(name);
    let beginning = known.range(name.to_owned()..).take_while(|(other, _)| other.starts_with(name));
    known.contains_key(name) || beginning.count() == 1
}

/// Drops an unknown flag with a notice, or refuses it.
fn unknown(name: &str, value: &ArgValue, known: &InstalledFlags) -> Result<Notice, EngineFailure> {
    if OBSOLETE.contains(&name) {
        return Ok(Notice(format!(
            "{name} is dropped: this version of vLLM no longer has the flag and does not need it"
        )));
    }
    if matches!(value, ArgValue::Flag(false)) && known.contains_key(name) {
        return Err(EngineFailure::new(
            FailureClass::BadArguments,
            format!("{name} = false: --{name} has no --no- form; remove the setting"),
        ));
    }
    let replaced = REPLACED.iter().find(|(old, _)| *old == name);
    let cause = match (replaced, closest(name, known.keys().map(String::as_str))) {
        (Some((_, new)), _) => format!("--{name} was replaced by {new}"),
        (None, Some(close)) => format!("this version of vLLM has no flag --{name}; did you mean {close}?"),
        (None, None) => format!("this version of vLLM has no flag --{name}"),
    };
    Err(EngineFailure::new(FailureClass::UnknownFlag, cause))
}

/// Checks the type of a value by the table of vLLM's flags; unknown flags pass.
fn check_type(name: &str, value: &ArgValue) -> Result<(), EngineFailure> {
    if name.is_empty() || name.starts_with('-') || name.contains(|c: char| c.is_whitespace() || c == '=') {
        return Err(EngineFailure::new(
            FailureClass::BadArguments,
            format!("{name:?} is not the name of a flag (without its dashes)"),
        ));
    }
    // Without a value, `--hf-token` uses the token stored on this host.
    if name == "hf-token" && *value == ArgValue::Flag(true) {
        return Ok(());
    }
    let wrong = |cause: String| Err(EngineFailure::new(FailureClass::BadArguments, cause));
    let parsed = |value: &ArgValue| {
        let mut argv = vec!["model".to_owned()];
        write::write(name, value, &mut argv);
        ServeArgs::parse(&argv)
    };
    match (parsed(value), value) {
        // Versions of vLLM differ in flags and choices, but not in types, so types can be checked.
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

/// The JSON without the units of numbers (`{"cpu_bytes_to_use": 80m}`): only vLLM accepts units.
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

/// Checks the value against the program's choices for the flag, if it lists any.
fn check_choice(name: &str, value: &ArgValue, known: Option<&InstalledFlags>) -> Result<(), EngineFailure> {
    let Some(choices) = known.and_then(|known| known.get(name)).filter(|choices| !choices.is_empty()) else {
        return Ok(());
    };
    if matches!(value, ArgValue::Flag(_) | ArgValue::Float(_) | ArgValue::Secret(_)) {
        return Ok(());
    }
    match value.texts().iter().find(|value| !choices.contains(value)) {
        Some(wrong) => Err(EngineFailure::new(
            FailureClass::BadArguments,
            format!("{name} = {wrong} must be one of {}", choices.join(", ")),
        )),
        None => Ok(()),
    }
}

/// The known name with the smallest edit distance, at most a third of the length of the name.
pub(super) fn closest<'a>(name: &str, known: impl Iterator<Item = &'a str>) -> Option<&'a str> {
    let scored = known.map(|other| (distance(name, other), other));
    let (changes, other) = scored.min()?;
    (changes * 3 <= name.len()).then_some(other)
}

/// The edit distance: letters to insert, delete or replace.
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
