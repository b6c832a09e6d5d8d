//! The definition of a key: all properties besides the type, in one place.
//!
//! A table of the configuration is a struct declared with `table!` (see `table.rs`). Each field has
//! a sentence of documentation, a type, and a [`KeySpec`]: default, bounds, example. From this one
//! definition come reading and checking, `sluice check`, the list of changes of a reload, and the
//! reference file `config/sluice.toml`.
//!
//! Defaults and bounds are written as on the command line with `--set`: TOML, or plain text if the
//! text is not TOML. So `default("5m")` is the text `"5m"` and `default("256")` a number. A test
//! reads every default, bound and example.

use super::file::{Document, Entry, Table, Value};
use super::limits;
use super::machine::Machine;
use super::origin::Origin;
use super::problem::Situation;

pub(super) type Check = fn(&str) -> Result<(), Situation>;

#[derive(Clone, Copy, Debug)]
pub(super) struct KeySpec {
    pub(super) name: &'static str,
    pub(super) doc: &'static [&'static str],
    /// The effect of an absent key.
    pub(super) fallback: Fallback,
    pub(super) bounds: Option<(&'static str, &'static str)>,
    /// A rule for the value if it is a text, or for each text of a list.
    pub(super) check: Option<Check>,
    pub(super) max_entries: usize,
    /// A value for the reference file. A key with a default may have one too.
    pub(super) example: Option<&'static str>,
    /// Whether the reference file shows the key in force although it is optional.
    pub(super) in_force: bool,
    /// When a reload applies a changed value.
    pub(super) applied: Applied,
}

/// When a reload applies a changed value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Applied {
    /// At once.
    AtOnce,
    /// Never: the running value stays until the gateway is restarted.
    AfterRestart,
    /// When it is the engine's turn to be restarted.
    ByEngineRestart,
}

/// The effect of an absent key.
#[derive(Clone, Copy, Debug)]
pub(super) enum Fallback {
    /// The key has this value.
    Default(&'static str),
    /// The key has a value that depends on this machine.
    OfMachine(OfMachine),
    /// The key has no value; the text describes the effect.
    Nothing(&'static str),
    /// The absence is a problem; the text is a hint.
    Required(&'static str),
    /// A table with the defaults of all keys.
    Table,
    Elements,
}

#[derive(Clone, Copy, Debug)]
pub(super) enum OfMachine {
    Cores,
    BodyMemory,
    Connections,
}

impl OfMachine {
    fn value(self, machine: &Machine) -> Value {
        let number = |count: u64| Value::Int(i64::try_from(count).unwrap_or(i64::MAX));
        match self {
            Self::Cores => number(machine.cores as u64),
            // A quarter of the memory, in whole MiB because they are easier to read.
            Self::BodyMemory => Value::Text(format!("{}MiB", (machine.memory >> 22).max(1))),
            // Half of the files, because most connections of clients also need a connection to an
            // engine.
            Self::Connections => {
                let files = machine.files.saturating_sub(limits::RESERVED_FILES) / 2;
                number(files.clamp(limits::FEWEST_CONNECTIONS, limits::DEFAULT_CONNECTIONS))
            }
        }
    }

    pub(super) const fn meaning(self) -> &'static str {
        match self {
            Self::Cores => "one per core",
            Self::BodyMemory => {
                "a quarter of the memory of the machine, or of the control group (container) that the gateway runs in"
            }
            Self::Connections => "65536, or half of the files that the process may open, if that is less",
        }
    }
}

/// The bounds of a duration. 30 days keep arithmetic on instants far from overflow.
const DURATION: (&str, &str) = ("1us", "30d");
/// Bounds that only keep arithmetic safe; the reference file does not mention them.
pub(super) const TECHNICAL_MAXIMA: &[&str] = &[DURATION.1, limits::TOKENS, limits::COUNT];
/// The most entries of a list whose key sets no other bound.
const MAX_WORDS: usize = 256;

const fn key(fallback: Fallback) -> KeySpec {
    KeySpec {
        name: "",
        doc: &[],
        fallback,
        bounds: None,
        check: None,
        max_entries: MAX_WORDS,
        example: None,
        in_force: false,
        applied: Applied::AtOnce,
    }
}

pub(super) const fn default(value: &'static str) -> KeySpec {
    key(Fallback::Default(value))
}

/// A duration above zero, with a default.
pub(super) const fn duration(value: &'static str) -> KeySpec {
    default(value).within(DURATION.0, DURATION.1)
}

/// A duration that may be zero, with a default.
pub(super) const fn duration_or_zero(value: &'static str) -> KeySpec {
    default(value).within("0s", DURATION.1)
}

/// A duration above zero that may be absent, with the meaning of absence.
pub(super) const fn optional_duration(meaning: &'static str) -> KeySpec {
    optional(meaning).within(DURATION.0, DURATION.1)
}

pub(super) const fn of_machine(default: OfMachine) -> KeySpec {
    key(Fallback::OfMachine(default))
}

/// A key that may be absent, with the meaning of absence.
pub(super) const fn optional(meaning: &'static str) -> KeySpec {
    key(Fallback::Nothing(meaning))
}

/// A key that must be written, with a hint for users who forgot it.
pub(super) const fn required(hint: &'static str) -> KeySpec {
    key(Fallback::Required(hint))
}

/// A table. Without it, all keys in it have their defaults.
pub(super) const fn table() -> KeySpec {
    key(Fallback::Table)
}

pub(super) const fn tables(max_entries: usize) -> KeySpec {
    key(Fallback::Elements).at_most(max_entries)
}

impl KeySpec {
    pub(super) const ROOT: Self = table();

    pub(super) const fn within(mut self, min: &'static str, max: &'static str) -> Self {
        self.bounds = Some((min, max));
        self
    }

    pub(super) const fn check(mut self, rule: Check) -> Self {
        self.check = Some(rule);
        self
    }

    pub(super) const fn at_most(mut self, max_entries: usize) -> Self {
        self.max_entries = max_entries;
        self
    }

    pub(super) const fn example(mut self, value: &'static str) -> Self {
        self.example = Some(value);
        self
    }

    pub(super) const fn in_force(mut self) -> Self {
        self.in_force = true;
        self
    }

    /// Makes a reload keep the running value.
    pub(super) const fn needs_restart(mut self) -> Self {
        self.applied = Applied::AfterRestart;
        self
    }

    /// Makes a reload restart the engine in turn.
    pub(super) const fn restarts_engine(mut self) -> Self {
        self.applied = Applied::ByEngineRestart;
        self
    }

    /// Sets the field to which the key belongs; for `table!`.
    pub(super) const fn of_field(mut self, name: &'static str, doc: &'static [&'static str]) -> Self {
        (self.name, self.doc) = (name, doc);
        self
    }

    /// The entry that is read when the key is absent; `None`: no value.
    pub(super) fn written_default(&self, machine: &Machine) -> Option<Entry> {
        match self.fallback {
            Fallback::Default(text) => Some(Document::value_or_text(text, Origin::Default)),
            Fallback::OfMachine(default) => Some(default.value(machine)),
            Fallback::Table => Some(Value::Table(Table::new())),
            Fallback::Elements => Some(Value::List(Vec::new())),
            Fallback::Nothing(_) | Fallback::Required(_) => None,
        }
        .map(|value| Entry { value, origin: Origin::Default })
    }
}

/// The kind of value that a key holds.
#[derive(Clone, Copy, Debug)]
pub(super) enum Shape {
    Value,
    /// One of these words.
    Word(&'static [&'static str]),
    Table(&'static [Field]),
    Tables(&'static [Field]),
    /// A table whose keys the operator chooses.
    Free,
}

/// A key of a table, with the kind of value.
#[derive(Clone, Copy, Debug)]
pub(super) struct Field {
    pub(super) key: KeySpec,
    pub(super) shape: Shape,
}
