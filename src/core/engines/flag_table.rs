//! The flags of the program of an engine that is not vLLM.
//!
//! A list has a line for each kind of value and each effect: `int scheduling: parallel|np ...`. `|`
//! separates the names of one flag. A flag that is not in the list is passed to the program
//! unchecked, because versions of the program differ. vLLM's flags are in
//! [`vllm::flags`](crate::vllm::flags).

use std::collections::BTreeMap;

use crate::vllm::flags::value::{FlagValue, SecretText, finite};

/// The flags of one program. The fields after `package` name the flags that the gateway itself
/// reads or writes.
#[derive(Debug)]
pub struct FlagTable {
    /// The name of the engine in messages.
    pub engine: &'static str,
    /// The flags: a line such as `int scheduling: parallel|np ...` for each kind of value and
    /// effect.
    pub list: &'static str,
    /// How the program reads flags.
    pub form: FlagForm,
    /// The beginning of the program's name, if the flags follow it directly: `llama-server`.
    pub program: Option<&'static str>,
    /// The name of the package after `python -m`, and of the program that has the subcommand
    /// `serve`.
    pub package: Option<&'static str>,
    /// Flags for the host and the port on which the engine listens.
    pub address: (&'static str, &'static str),
    /// Flags that turn on TLS. The gateway refuses them, because it reaches its own engines without
    /// TLS.
    pub tls: &'static [&'static str],
    /// Flags that name the model's files or folder.
    pub model: &'static [&'static str],
    /// The flag for the number of sequences that run at once.
    pub sequences: Option<&'static str>,
    /// Flags whose values are multiplied to get the number of devices.
    pub devices: &'static [&'static str],
    /// Flags that the online tuner changes: vLLM's name, and this program's name. Each change
    /// restarts the engine.
    pub tuned: &'static [(&'static str, &'static str)],
}

/// The table of programs whose flags are not known: scripts, and servers of any kind.
pub(super) const NO_FLAGS: FlagTable = FlagTable {
    engine: "the program",
    list: "",
    form: FlagForm::Apart,
    program: None,
    package: None,
    address: ("host", "port"),
    tls: &[],
    model: &[],
    sequences: None,
    devices: &[],
    tuned: &[],
};

/// The way in which a program reads its flags.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FlagForm {
    /// `--name=value`, or `--name` alone, which turns a switch on. No switch can be turned off.
    Joined,
    /// `--name value`, `--name` and `--no-name`.
    Apart,
    /// `--name=value`, also for a switch: `--name=true`.
    Valued,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Takes {
    Switch,
    Int,
    Float,
    Text,
}

#[derive(Clone, Copy, Debug)]
struct Listed {
    name: &'static str,
    takes: Takes,
    is_tunable: bool,
}

impl FlagTable {
    fn lines(&self) -> impl Iterator<Item = (Takes, bool, &'static str)> {
        let lines = self.list.lines().filter(|line| !line.starts_with('#'));
        lines.filter_map(|line| {
            let (head, names) = line.split_once(": ")?;
            let (kind, effect) = head.split_once(' ')?;
            let takes = match kind {
                "switch" => Takes::Switch,
                "int" => Takes::Int,
                "float" => Takes::Float,
                _ => Takes::Text,
            };
            Some((takes, matches!(effect, "scheduling" | "memory"), names))
        })
    }

    /// The flag with this name.
    fn exact(&self, written: &str) -> Option<Listed> {
        let written = written.replace('_', "-");
        self.listed().find(|(_, names)| names.split('|').any(|name| name == written)).map(|(flag, _)| flag)
    }

    /// The flag with this name. If the program abbreviates as argparse does, also the only flag
    /// that begins with `written`.
    fn find(&self, written: &str) -> Option<Listed> {
        let short = written.replace('_', "-");
        let begun = || {
            let may_abbreviate = self.form == FlagForm::Joined && short.len() > 1;
            let begins = |names: &str| names.split('|').any(|name| name.starts_with(&short));
            let mut found = self.listed().filter(|(_, names)| begins(names)).map(|(flag, _)| flag);
            found.next().filter(|_| may_abbreviate && found.next().is_none())
        };
        self.exact(written).or_else(begun)
    }

    fn listed(&self) -> impl Iterator<Item = (Listed, &'static str)> {
        self.lines().flat_map(|(takes, is_tunable, names)| {
            names.split_whitespace().map(move |names| {
                let name = names.split('|').next().unwrap_or(names);
                (Listed { name, takes, is_tunable }, names)
            })
        })
    }

    /// The name under which a flag is listed: `parallel` for `np`. `None` if it is not listed.
    pub fn full_name(&self, written: &str) -> Option<&'static str> {
        self.find(written).map(|flag| flag.name)
    }

    /// The first name of each flag.
    pub fn names(&self) -> impl Iterator<Item = &'static str> {
        self.listed().map(|(flag, _)| flag.name)
    }

    /// Whether a client of the admin API may change the flag without further configuration, because
    /// the flag changes only scheduling or the use of memory. False for an abbreviated name.
    pub fn is_tunable(&self, flag: &str) -> bool {
        self.exact(flag).is_some_and(|flag| flag.is_tunable)
    }

    /// Checks the type of a value. A flag that is not listed passes.
    ///
    /// # Errors
    /// The message says which kind of value the flag takes.
    pub fn check<S>(&self, name: &str, value: &FlagValue<S>) -> Result<(), String> {
        let Some(flag) = self.find(name) else { return Ok(()) };
        let off = matches!(value, FlagValue::Flag(false));
        let wanted = match (flag.takes, value) {
            (_, FlagValue::Secret(_)) => return Ok(()),
            (Takes::Switch, FlagValue::Flag(_)) if off && self.form == FlagForm::Joined => {
                return Err(format!("{name} = false: --{name} cannot be turned off; remove the setting"));
            }
            (Takes::Switch, FlagValue::Flag(_))
            | (Takes::Int, FlagValue::Int(_))
            | (Takes::Float, FlagValue::Int(_) | FlagValue::Float(_)) => return Ok(()),
            (Takes::Text, value) if !matches!(value, FlagValue::Flag(_)) => return Ok(()),
            (Takes::Switch, _) => "true or false",
            (Takes::Int, _) => "a whole number",
            (Takes::Float, _) => "a number",
            (Takes::Text, _) => "a value",
        };
        Err(format!("{name} = {value}: the flag takes {wanted}"))
    }

    /// Appends the words of a flag to `argv`.
    pub fn write<S: SecretText>(&self, name: &str, value: &FlagValue<S>, argv: &mut Vec<String>) {
        let name = name.replace('_', "-");
        match (value, self.form) {
            (FlagValue::Flag(on), FlagForm::Valued) => argv.push(format!("--{name}={on}")),
            (FlagValue::Flag(true), _) => argv.push(format!("--{name}")),
            (FlagValue::Flag(false), _) => argv.push(format!("--no-{name}")),
            (value, FlagForm::Apart) => {
                argv.push(format!("--{name}"));
                argv.extend(value.texts());
            }
            (value, form) => match (value.texts().as_slice(), form) {
                ([one], _) => argv.push(format!("--{name}={one}")),
                (many, FlagForm::Valued) => argv.extend(many.iter().map(|one| format!("--{name}={one}"))),
                (many, _) => {
                    argv.push(format!("--{name}"));
                    argv.extend(many.iter().cloned());
                }
            },
        }
    }

    /// The number of words of a command before the program's flags; `None` if the command does not
    /// run this program.
    pub fn flags_begin(&self, command: &[String]) -> Option<usize> {
        let named = |word: &str, begin: &str| word.rsplit('/').next().is_some_and(|name| name.starts_with(begin));
        let is_last = |(at, word): (usize, &String)| {
            let before = at.checked_sub(1).map(|at| command[at].as_str());
            let is_program = self.program.is_some_and(|program| named(word, program));
            let is_package = self.package.is_some_and(|package| match before {
                Some("-m") => word == package || word.starts_with(&format!("{package}.")),
                Some(before) => word == "serve" && named(before, package),
                None => false,
            });
            // The simulator (`sluice sim`) plays every engine that has flags.
            is_program || is_package || (!self.list.is_empty() && at == 1 && word == "sim")
        };
        command.iter().enumerate().take(PREFIX_WORDS).position(is_last).map(|at| at + 1)
    }

    /// The flags and values in the words of a command. A listed flag has its full name; a repeated
    /// flag has its last value.
    pub fn read(&self, words: &[String]) -> BTreeMap<String, String> {
        let mut found = BTreeMap::new();
        let mut rest = words.iter().peekable();
        let is_flag = |word: &str| word.len() > 1 && word.starts_with('-') && finite(word).is_none();
        while let Some(word) = rest.next() {
            if !is_flag(word) {
                continue;
            }
            let (written, joined) = match word.split_once('=') {
                Some((flag, value)) if self.form != FlagForm::Apart => (flag, Some(value.to_owned())),
                _ => (word.as_str(), None),
            };
            let name = written.trim_start_matches('-').replace('_', "-");
            let listed = self.find(&name);
            let off = name.strip_prefix("no-").and_then(|name| self.find(name)).filter(|_| listed.is_none());
            let is_switch = listed.is_some_and(|flag| flag.takes == Takes::Switch);
            let (name, value) = match (off, joined) {
                (Some(flag), _) => (flag.name.to_owned(), "false".to_owned()),
                (None, joined) => {
                    let next = || rest.next_if(|next| !is_switch && !is_flag(next)).cloned();
                    let value = joined.or_else(next).unwrap_or_else(|| "true".to_owned());
                    (listed.map_or(name, |flag| flag.name.to_owned()), value)
                }
            };
            found.insert(name, value);
        }
        found
    }
}

/// The program must be among this many first words of a command such as `nice -n 10 env A=b python
/// -m x`.
const PREFIX_WORDS: usize = 10;

#[cfg(test)]
mod tests {
    use std::convert::Infallible;

    use super::*;
    use crate::engines::EngineKind;

    type Value = FlagValue<Infallible>;

    fn table(kind: EngineKind) -> &'static FlagTable {
        kind.rules().flags.unwrap()
    }

    fn words(text: &str) -> Vec<String> {
        text.split(' ').map(str::to_owned).collect()
    }

    #[test]
    fn every_flag_is_listed_once_and_the_gateways_own_flags_are_listed() {
        for kind in EngineKind::ALL {
            let Some(table) = kind.rules().flags.filter(|table| !table.list.is_empty()) else { continue };
            let mut names: Vec<&str> = table
                .lines()
                .flat_map(|(.., names)| names.split_whitespace())
                .flat_map(|names| names.split('|'))
                .collect();
            let all = names.len();
            names.sort_unstable();
            names.dedup();
            assert_eq!(names.len(), all, "{kind:?}");
            let own = [table.address.0, table.address.1].into_iter().chain(table.tls.iter().copied());
            let own =
                own.chain(table.model.iter().copied()).chain(table.sequences).chain(table.devices.iter().copied());
            for name in own.chain(table.tuned.iter().map(|(_, name)| *name)) {
                assert_eq!(table.full_name(name), Some(name), "{kind:?}");
            }
            assert!(table.tuned.iter().all(|(_, name)| table.is_tunable(name)), "{kind:?}");
        }
    }

    #[test]
    fn values_are_judged_by_the_list_of_the_engine() {
        let check = |kind, name: &str, value: Value| table(kind).check(name, &value);
        let int = Value::Int(8);
        for (kind, name) in [
            (EngineKind::Sglang, "max_running_requests"),
            (EngineKind::Sglang, "schedule-conservativeness"),
            (EngineKind::LlamaCpp, "np"),
            (EngineKind::LlamaCpp, "flag-of-tomorrow"),
            (EngineKind::Serial, "workers"),
        ] {
            assert_eq!(check(kind, name, int.clone()), Ok(()), "{name}");
        }
        let refused = check(EngineKind::LlamaCpp, "parallel", Value::Text("8k".into())).unwrap_err();
        assert_eq!(refused, "parallel = 8k: the flag takes a whole number");
        assert!(check(EngineKind::Sglang, "enable-metrics", int).unwrap_err().ends_with("true or false"));
        assert!(check(EngineKind::Sglang, "enable-metrics", Value::Flag(false)).unwrap_err().contains("turned off"));
        assert_eq!(check(EngineKind::LlamaCpp, "mmap", Value::Flag(false)), Ok(()));
        assert!(check(EngineKind::Triton, "model-repository", Value::Flag(true)).is_err());
    }

    #[test]
    fn a_program_gets_words_as_it_reads_them() {
        let written = |kind, name: &str, value: Value| {
            let mut argv = Vec::new();
            table(kind).write(name, &value, &mut argv);
            argv.join(" ")
        };
        assert_eq!(written(EngineKind::Sglang, "mem_fraction_static", Value::Float(0.8)), "--mem-fraction-static=0.8");
        assert_eq!(
            written(EngineKind::Sglang, "lora-paths", Value::List(words("a=/x b=/y"))),
            "--lora-paths a=/x b=/y"
        );
        assert_eq!(written(EngineKind::LlamaCpp, "parallel", Value::Int(4)), "--parallel 4");
        assert_eq!(written(EngineKind::LlamaCpp, "mmap", Value::Flag(false)), "--no-mmap");
        assert_eq!(written(EngineKind::Triton, "allow-grpc", Value::Flag(false)), "--allow-grpc=false");
        let many = Value::List(words("a b"));
        assert_eq!(written(EngineKind::Triton, "load-model", many), "--load-model=a --load-model=b");
    }

    #[test]
    fn the_flags_of_a_command_are_found() {
        let begin = |kind, text: &str| table(kind).flags_begin(&words(text));
        assert_eq!(begin(EngineKind::Sglang, "python3 -m sglang.launch_server --tp 2"), Some(3));
        assert_eq!(begin(EngineKind::Sglang, "/opt/bin/sglang serve --tp 2"), Some(2));
        assert_eq!(begin(EngineKind::Sglang, "./start.sh serve"), None);
        assert_eq!(begin(EngineKind::LlamaCpp, "nice -n 10 /opt/llama-server -m x"), Some(4));
        assert_eq!(begin(EngineKind::Triton, "tritonserver"), Some(1));
        assert_eq!(begin(EngineKind::Serial, "tritonserver"), None);
        let read = |kind, text: &str| table(kind).read(&words(text));
        let found = read(EngineKind::LlamaCpp, "-m x.gguf -np 4 --no-mmap --metrics --temp -1 --new v");
        let wanted = [("metrics", "true"), ("mmap", "false"), ("model", "x.gguf"), ("new", "v"), ("parallel", "4")];
        for (name, value) in wanted {
            assert_eq!(found.get(name).map(String::as_str), Some(value), "{name}");
        }
        assert_eq!(found.get("temp").map(String::as_str), Some("-1"));
        let found = read(EngineKind::Sglang, "--tp 2 --enable_metrics --model=/m --tensor-parallel-size 4");
        assert_eq!(found.into_values().collect::<Vec<_>>(), ["true", "/m", "4"]);
    }
}
