//! The table of the flags of `vllm serve`, and how argparse finds a flag in it.
//!
//! The table is `flags.txt`: names, kinds and choices in the order of registration. A name may be
//! written with `_` for `-`, and may be abbreviated as long as only one flag begins with the
//! abbreviation. A switch is negated by `--no-NAME`. Since 0.33 it is also negated by swapping
//! `--enable-` and `--disable-`, so 0.33 accepts some flags that earlier versions had removed
//! (`--disable-log-requests`).

use std::sync::OnceLock;

use super::super::version::Version;

/// The number of values that a flag takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Arity {
    /// None: the name alone turns the flag on or off.
    Switch {
        /// Whether the written form turns the flag on.
        on: bool,
    },
    /// One value.
    One,
    /// One or more values.
    Many,
}

/// A flag of `vllm serve` that [`lookup`] found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KnownFlag {
    /// The full name without dashes: `tensor-parallel-size`.
    pub name: &'static str,
    /// The number of values that the flag takes.
    pub arity: Arity,
}

/// The flag for a written form such as `-tp`, `--no-enable-lora` or `--max_num_se`, in
/// [`Version::COMPARED`]; `None` if it is unknown or ambiguous.
pub fn lookup(written: &str) -> Option<KnownFlag> {
    let (flag, on) = find(written, Version::COMPARED).ok()?;
    let arity = match flag.takes {
        Takes::Flag | Takes::Switch => Arity::Switch { on },
        _ if flag.many => Arity::Many,
        _ => Arity::One,
    };
    Some(KnownFlag { name: flag.name, arity })
}

/// vLLM's spelling of a flag: `_` becomes `-`, except after a dot, where keys of a JSON value
/// follow.
pub fn dashed(name: &str) -> String {
    match name.split_once('.') {
        Some((flag, keys)) => format!("{}.{keys}", flag.replace('_', "-")),
        None => name.replace('_', "-"),
    }
}

/// The full name and arity of a written flag; `None`: unknown. `--flag.key` sets one key of a JSON
/// value.
pub(super) fn resolve(written: &str) -> (String, Option<Arity>) {
    let bare = dashed(written.trim_start_matches('-'));
    if written.contains('.') {
        return (bare, Some(Arity::One));
    }
    match lookup(written) {
        Some(flag) => (flag.name.to_owned(), Some(flag.arity)),
        None => (bare, None),
    }
}

/// The full name of a setting, which has no leading dashes, and whether `true` turns the flag on.
/// `no_enable-lora` is `enable-lora`, and `true` turns it off.
pub fn setting(name: &str) -> (String, bool) {
    let (full, arity) = resolve(&format!("--{name}"));
    (full, arity != Some(Arity::Switch { on: false }))
}

/// Whether a flag, named without leading dashes, takes a number with a unit.
pub(super) fn takes_size(name: &str) -> bool {
    let found = find(&format!("--{name}"), Version::COMPARED);
    found.is_ok_and(|(flag, _)| matches!(flag.takes, Takes::Size | Takes::SizeAuto))
}

/// The full name of a flag that is written in full without leading dashes: `max-num-seqs`,
/// `no-enable-lora`.
pub(in crate::vllm) fn exact(written: &str) -> Option<&'static str> {
    let long = format!("--{}", written.replace('_', "-"));
    let (flag, _) = find(&long, Version::COMPARED).ok()?;
    flag.forms(Version::COMPARED).iter().any(|form| form.text == long).then_some(flag.name)
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::vllm) enum Takes {
    /// No value, and there is no negative form.
    Flag,
    /// No value; `--no-` negates it.
    Switch,
    /// A whole number.
    Int,
    /// A number.
    Float,
    /// A whole number, optionally with a unit.
    Size,
    /// As `Size`, and also `auto`.
    SizeAuto,
    /// Any text.
    Text,
    /// JSON.
    Json,
    /// `name=path` or a JSON object.
    Lora,
}

#[derive(Clone, Debug)]
pub(in crate::vllm) struct Flag {
    /// The first long name without dashes: the key.
    pub(in crate::vllm) name: &'static str,
    /// All positive names as written.
    names: Vec<&'static str>,
    pub(in crate::vllm) takes: Takes,
    /// Whether the flag also takes `None`. vLLM's error messages for such flags have other words.
    pub(in crate::vllm) optional: bool,
    /// Whether the flag takes one or more values.
    pub(in crate::vllm) many: bool,
    /// Allowed values; empty when any value is allowed.
    pub(in crate::vllm) choices: Vec<&'static str>,
}

impl Flag {
    /// The flag as vLLM's errors name it: `--a/--no-a/-b`.
    pub(in crate::vllm) fn shown(&self, version: Version) -> String {
        let forms = self.forms(version);
        let names: Vec<&str> = forms.iter().filter(|form| form.shown).map(|form| form.text.as_str()).collect();
        names.join("/")
    }

    /// The flag as vLLM's help shows it: `--a A, -b A`, `--a, --no-a` or `--a {x,y}`.
    pub(in crate::vllm) fn entry(&self, version: Version) -> String {
        let value = match self.takes {
            Takes::Flag | Takes::Switch => String::new(),
            _ if self.choices.is_empty() => format!(" {}", self.name.to_uppercase().replace('-', "_")),
            _ => format!(" {{{}}}", self.choices.join(",")),
        };
        let more = if self.many { format!(" [{} ...]", value.trim_start()) } else { String::new() };
        let forms = self.forms(version).into_iter().filter(|form| form.shown);
        let entries: Vec<String> = forms.map(|form| format!("{}{value}{more}", form.text)).collect();
        entries.join(", ")
    }

    /// Every way to write the flag, in argparse's order.
    fn forms(&self, version: Version) -> Vec<Form> {
        let form = |text: String, on, shown| Form { text, on, shown };
        let mut forms = Vec::new();
        let inverse = |name: &str| {
            let other = name.strip_prefix("--enable-").map(|rest| format!("--disable-{rest}"));
            other.or_else(|| name.strip_prefix("--disable-").map(|rest| format!("--enable-{rest}")))
        };
        let swaps = self.takes == Takes::Switch && version.since(33) && self.names.iter().any(|n| inverse(n).is_some());
        for name in &self.names {
            forms.push(form((*name).to_owned(), true, true));
            if let Some(long) = name.strip_prefix("--").filter(|_| self.takes == Takes::Switch) {
                forms.push(form(format!("--no-{long}"), false, !swaps));
            }
        }
        if swaps {
            forms.extend(self.names.iter().filter_map(|name| inverse(name)).map(|text| form(text, false, true)));
        }
        forms
    }
}

struct Form {
    text: String,
    on: bool,
    shown: bool,
}

/// The reason why a word does not name one flag.
#[derive(Debug, PartialEq, Eq)]
pub(in crate::vllm) enum LookupError {
    /// No flag begins with the word.
    Unknown,
    /// Several flags begin with the word.
    Ambiguous(Vec<String>),
}

pub(in crate::vllm) fn table() -> &'static [Flag] {
    static TABLE: OnceLock<Vec<Flag>> = OnceLock::new();
    TABLE.get_or_init(|| include_str!("flags.txt").lines().filter(|line| !line.starts_with('#')).map(parse).collect())
}

fn parse(line: &'static str) -> Flag {
    let (left, choices) = line.split_once(" = ").unwrap_or((line, ""));
    let mut words = left.split(' ');
    let kind = words.next().unwrap_or_default();
    let names: Vec<&str> = words.filter(|word| word.starts_with('-')).collect();
    let plain = kind.trim_end_matches('+');
    let takes = match plain.trim_end_matches('?') {
        "flag" => Takes::Flag,
        "switch" => Takes::Switch,
        "int" => Takes::Int,
        "float" => Takes::Float,
        "size" => Takes::Size,
        "size-auto" => Takes::SizeAuto,
        "json" => Takes::Json,
        "lora" => Takes::Lora,
        _ => Takes::Text,
    };
    Flag {
        name: names.iter().find_map(|name| name.strip_prefix("--")).unwrap_or_default(),
        names,
        takes,
        optional: plain.ends_with('?'),
        many: kind.ends_with('+'),
        choices: choices.split_whitespace().collect(),
    }
}

/// The flag with this written form (dashes included, without a value), and whether the form turns a
/// switch on.
pub(in crate::vllm) fn find(name: &str, version: Version) -> Result<(&'static Flag, bool), LookupError> {
    let name = match name.strip_prefix("--") {
        Some(long) => format!("--{}", long.replace('_', "-")),
        None => name.to_owned(),
    };
    let mut found = Vec::new();
    for flag in table() {
        for form in flag.forms(version) {
            if form.text == name {
                return Ok((flag, form.on));
            }
            // argparse does not expand abbreviations of single-dash names here.
            if name.starts_with("--") && name.len() > 2 && form.text.starts_with(&name) {
                found.push((flag, form.on, form.text));
            }
        }
    }
    match found.as_slice() {
        [] => Err(LookupError::Unknown),
        [(flag, on, _)] => Ok((flag, *on)),
        _ => Err(LookupError::Ambiguous(found.into_iter().map(|(_, _, text)| text).collect())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const OLD: Version = Version::COMPARED;
    const NEW: Version = Version::new(0, 33, 0);

    #[test]
    fn the_table_has_every_flag_once() {
        let mut names: Vec<_> = table().iter().flat_map(|flag| flag.names.clone()).collect();
        let all = names.len();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), all);
        assert!(table().len() > 300 && table().iter().all(|flag| !flag.name.is_empty()));
    }

    #[test]
    fn a_name_may_be_abbreviated_while_it_is_unique() {
        assert_eq!(find("--enable-lor", OLD).map(|(flag, on)| (flag.name, on)), Ok(("enable-lora", true)));
        assert_eq!(
            find("--max-num-s", OLD).unwrap_err(),
            LookupError::Ambiguous(vec!["--max-num-scheduled-tokens".into(), "--max-num-seqs".into()])
        );
        assert_eq!(find("--swap-space", OLD).unwrap_err(), LookupError::Unknown);
    }

    #[test]
    fn a_written_form_has_a_full_name_and_an_arity() {
        let found = |written: &str| lookup(written).map(|flag| (flag.name, flag.arity));
        assert_eq!(found("-tp"), Some(("tensor-parallel-size", Arity::One)));
        assert_eq!(found("--no-enable_lora"), Some(("enable-lora", Arity::Switch { on: false })));
        assert_eq!(found("--served-model-name"), Some(("served-model-name", Arity::Many)));
        assert_eq!((found("--swap-space"), found("--max-num-s")), (None, None));
        let full = |name| setting(name);
        assert_eq!(
            (full("no_enable_lora"), full("max_num_seq")),
            (("enable-lora".into(), false), ("max-num-seqs".into(), true))
        );
        assert_eq!(full("new_flag.some_key"), ("new-flag.some_key".into(), true));
    }

    #[test]
    fn since_033_disable_is_the_opposite_of_enable() {
        assert_eq!(find("--disable-log-requests", OLD).unwrap_err(), LookupError::Unknown);
        assert_eq!(
            find("--disable-log-requests", NEW).map(|(flag, on)| (flag.name, on)),
            Ok(("enable-log-requests", false))
        );
        assert_eq!(find("--no-enable-lora", NEW).map(|(flag, on)| (flag.name, on)), Ok(("enable-lora", false)));
        assert_eq!(find("--disable-log-stats", NEW).map(|(flag, on)| (flag.name, on)), Ok(("disable-log-stats", true)));
    }

    impl PartialEq for Flag {
        fn eq(&self, other: &Self) -> bool {
            self.name == other.name
        }
    }
}
