//! The definition of a key: everything about it besides its type, in one place.
//!
//! A table of the configuration is a struct declared with `table!` (see `table.rs`). Each field has a sentence of
//! documentation, a type, and a [`KeySpec`]: its default, its bounds, an example. From this one definition come reading and
//! checking, `sluice check`, the list of changes of a reload, and the reference file `config/sluice.toml`.
//!
//! Values are written here as they are on the command line with `--set`: TOML, or plain text where the text is not TOML. So
//! `default("5m")` is the text `"5m"` and `default("256")` a number. A test reads every default, bound and example.

use super::file::{Document, Entry, Table, Value};
use super::limits;
use super::machine::Machine;
use super::origin::Origin;
use super::problem::Situation;

/// A rule for a text.
pub(super) type Check = fn(&str) -> Result<(), Situation>;

/// What is known about one key.
#[derive(Clone, Copy, Debug)]
pub(super) struct KeySpec {
    /// The key as it is written in the file.
    pub(super) name: &'static str,
    /// Its documentation, line by line.
    pub(super) doc: &'static [&'static str],
    /// What applies when the key is absent.
    pub(super) fallback: Fallback,
    /// The smallest and the largest value.
    pub(super) bounds: Option<(&'static str, &'static str)>,
    /// A rule for each text: of the value, or of the elements of a list.
    pub(super) check: Option<Check>,
    /// Most elements of a list.
    pub(super) max_entries: usize,
    /// A value for the reference file, where there is no default.
    pub(super) example: Option<&'static str>,
    /// The reference file shows the key in force although it is optional.
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
    /// When it is the turn of the engine to be restarted.
    ByEngineRestart,
}

/// What applies when a key is absent.
#[derive(Clone, Copy, Debug)]
pub(super) enum Fallback {
    /// This value.
    Default(&'static str),
    /// What is right for this machine.
    OfMachine(OfMachine),
    /// No value; the text says what that means.
    Nothing(&'static str),
    /// Nothing: it is a problem; the text says what to write.
    Required(&'static str),
    /// A table with the defaults of its keys.
    Table,
    /// No elements.
    Elements,
}

/// A default that depends on the machine.
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
            // Whole MiB, which read better.
            Self::BodyMemory => Value::Text(format!("{}MiB", (machine.memory >> 22).max(1))),
            // Most connections of clients need one to an engine too.
            Self::Connections => {
                let files = machine.files.saturating_sub(limits::RESERVED_FILES) / 2;
                number(files.clamp(limits::FEWEST_CONNECTIONS, limits::DEFAULT_CONNECTIONS))
            }
        }
    }

    /// The sentence for the reference file.
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

/// The bounds of a duration: 30 days keep arithmetic on instants far from overflow.
const DURATION: (&str, &str) = ("1us", "30d");
/// Bounds that only keep arithmetic safe; they are not worth a sentence in the reference file.
pub(super) const TECHNICAL_MAXIMA: &[&str] = &[DURATION.1, limits::TOKENS, limits::COUNT];
/// Enough for any list of words.
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

/// A key with a default.
pub(super) const fn default(value: &'static str) -> KeySpec {
    key(Fallback::Default(value))
}

/// A duration above zero, with its default.
pub(super) const fn duration(value: &'static str) -> KeySpec {
    default(value).within(DURATION.0, DURATION.1)
}

/// A duration that may be zero, with its default.
pub(super) const fn duration_or_zero(value: &'static str) -> KeySpec {
    default(value).within("0s", DURATION.1)
}

/// A duration above zero that may be absent, with what its absence means.
pub(super) const fn optional_duration(meaning: &'static str) -> KeySpec {
    optional(meaning).within(DURATION.0, DURATION.1)
}

/// A key whose default depends on the machine.
pub(super) const fn of_machine(default: OfMachine) -> KeySpec {
    key(Fallback::OfMachine(default))
}

/// A key that may be absent, with what its absence means.
pub(super) const fn optional(meaning: &'static str) -> KeySpec {
    key(Fallback::Nothing(meaning))
}

/// A key that must be written, with a hint for those who forgot it.
pub(super) const fn required(hint: &'static str) -> KeySpec {
    key(Fallback::Required(hint))
}

/// A table; without it its keys have their defaults.
pub(super) const fn table() -> KeySpec {
    key(Fallback::Table)
}

/// A list of tables, at most `max_entries`.
pub(super) const fn tables(max_entries: usize) -> KeySpec {
    key(Fallback::Elements).at_most(max_entries)
}

impl KeySpec {
    /// The configuration as a whole.
    pub(super) const ROOT: Self = table();

    /// Sets the smallest and the largest value.
    pub(super) const fn within(mut self, min: &'static str, max: &'static str) -> Self {
        self.bounds = Some((min, max));
        self
    }

    /// Sets a rule for each text.
    pub(super) const fn check(mut self, rule: Check) -> Self {
        self.check = Some(rule);
        self
    }

    /// Bounds the number of elements of a list.
    pub(super) const fn at_most(mut self, max_entries: usize) -> Self {
        self.max_entries = max_entries;
        self
    }

    /// Sets the value that the reference file shows.
    pub(super) const fn example(mut self, value: &'static str) -> Self {
        self.example = Some(value);
        self
    }

    /// Shows the key in force in the reference file.
    pub(super) const fn in_force(mut self) -> Self {
        self.in_force = true;
        self
    }

    /// A reload leaves the running value.
    pub(super) const fn needs_restart(mut self) -> Self {
        self.applied = Applied::AfterRestart;
        self
    }

    /// A reload restarts the engine in its turn.
    pub(super) const fn restarts_engine(mut self) -> Self {
        self.applied = Applied::ByEngineRestart;
        self
    }

    /// For `table!`: the field that the key belongs to.
    pub(super) const fn of_field(mut self, name: &'static str, doc: &'static [&'static str]) -> Self {
        (self.name, self.doc) = (name, doc);
        self
    }

    /// What is read when the key is absent; `None`: it has no value then.
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

/// What a key holds.
#[derive(Clone, Copy, Debug)]
pub(super) enum Shape {
    /// A value or a list of values.
    Value,
    /// One of these words.
    Word(&'static [&'static str]),
    /// A table with these keys.
    Table(&'static [Field]),
    /// A list of tables with these keys.
    Tables(&'static [Field]),
    /// A table whose keys the operator chooses.
    Free,
}

/// A key of a table with what it holds.
#[derive(Clone, Copy, Debug)]
pub(super) struct Field {
    pub(super) key: KeySpec,
    pub(super) shape: Shape,
}
