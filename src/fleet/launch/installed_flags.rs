//! The flags of the installed program, read from the output of `--help` (vLLM: `--help=all`).
//!
//! `--help=all` takes vLLM 5 to 30 s, since it imports everything first. So flags are cached in
//! memory and in a file. The file's name depends on the program's path, size and modification time,
//! on the vLLM packages installed next to it, and on the words before the flags: an upgrade, even
//! in place, makes a new file. Without usable help (a wrapper script, fewer than [`FLAGS_MIN`]
//! flags, no end within [`HELP_TIMEOUT`]), this process does not run the unchanged program again,
//! and checks only types and values. After [`HELP_NOTICE`] the log names the program, because a
//! start, a check or a tuner waits for it.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::LazyLock;
use std::time::{Duration, UNIX_EPOCH};

use tokio::process::Command;
use tokio::sync::Mutex;
use tokio::time::timeout;
use twox_hash::XxHash3_64;

use super::program::{program_of, subcommand};
use crate::state_folder;
use sluice_config::Launch;
use sluice_core::engines::EngineKind;

/// Allowed values by flag of a program; an empty list allows any. Names have no leading dashes, and
/// include `no-` forms.
pub(crate) type InstalledFlags = BTreeMap<String, Vec<String>>;

/// Longest wait for the help. It took over 120 s with ten busy threads per core.
const HELP_TIMEOUT: Duration = Duration::from_secs(300);
/// After this wait for the help, the log names the program.
const HELP_NOTICE: Duration = Duration::from_secs(20);
/// The argument with which vLLM lists all flags.
const HELP_OF_VLLM: &str = "--help=all";
/// The argument with which other engines list their flags.
const HELP: &str = "--help";
/// A text with fewer flags is not the help of an engine.
const FLAGS_MIN: usize = 30;

/// Results by program identity, for all engines of this process. The lock is held while a program
/// runs, so that it runs once. Bound: [`PROGRAMS_MAX`].
static KNOWN: LazyLock<Mutex<BTreeMap<u64, Option<InstalledFlags>>>> = LazyLock::new(Mutex::default);
/// The most programs and versions that are remembered. A further one makes the process forget all.
const PROGRAMS_MAX: usize = 64;

#[derive(Debug)]
pub(crate) struct InstalledFlagsCache {
    folder: PathBuf,
    /// Whether results are written to the folder.
    keeps: bool,
}

impl InstalledFlagsCache {
    pub(crate) fn new(folder: &Path) -> Self {
        Self { folder: folder.to_owned(), keeps: true }
    }

    /// A cache that reads from `folder` and writes nothing.
    pub(crate) fn without_writing(folder: &Path) -> Self {
        Self { folder: folder.to_owned(), keeps: false }
    }

    /// The flags of the program of `launch`; `None` if they cannot be read.
    pub(crate) async fn read(&self, engine: EngineKind, launch: &Launch) -> Option<InstalledFlags> {
        let (words, help) = match engine.rules().flags {
            None => (subcommand(&launch.command)?, HELP_OF_VLLM),
            Some(table) => (&launch.command[1..table.flags_begin(&launch.command)?], HELP),
        };
        // The argument is part of the identity, so another argument makes another file.
        let words = &[words, &[help.to_owned()]].concat()[..];
        let program = program_of(launch).ok()?;
        let identity = identity(&program, words)?;
        let mut known = KNOWN.lock().await;
        if let Some(flags) = known.get(&identity) {
            return flags.clone();
        }
        let found = self.load(&program, words, identity, launch).await;
        if known.len() >= PROGRAMS_MAX {
            known.clear();
        }
        known.insert(identity, found.clone());
        found
    }

    async fn load(&self, program: &Path, words: &[String], identity: u64, launch: &Launch) -> Option<InstalledFlags> {
        let file = self.folder.join(format!("flags-{identity:016x}.txt"));
        if let Ok(text) = fs::read_to_string(&file) {
            let known: InstalledFlags = text.lines().map(from_line).collect();
            if known.len() >= FLAGS_MIN {
                return Some(known);
            }
        }
        let known = run_help(program, words, launch).await?;
        if !self.keeps {
            return Some(known);
        }
        let text: String = known.iter().map(|(name, choices)| format!("{name} {}\n", choices.join(","))).collect();
        let kept = state_folder::open(&self.folder).and_then(|()| state_folder::write(&file, text.as_bytes()));
        if let Err(error) = kept {
            tracing::warn!(file = %file.display(), %error, "cannot save the engine's list of flags; it is read again next time");
        }
        Some(known)
    }
}

/// A line of the file: a name, a space, choices separated by commas.
fn from_line(line: &str) -> (String, Vec<String>) {
    let (name, choices) = line.split_once(' ').unwrap_or((line, ""));
    (name.to_owned(), choices.split(',').filter(|choice| !choice.is_empty()).map(str::to_owned).collect())
}

fn identity(program: &Path, words: &[String]) -> Option<u64> {
    let path = program.canonicalize().ok()?;
    let file = path.metadata().ok()?;
    let changed = file.modified().ok()?.duration_since(UNIX_EPOCH).unwrap_or_default().as_nanos();
    let installed = installed_beside(program);
    Some(XxHash3_64::oneshot(
        format!("{}\n{}\n{changed}\n{installed:?}\n{words:?}", program.display(), file.len()).as_bytes(),
    ))
}

/// The names of the `vllm-*.dist-info` and `sglang-*.dist-info` folders in the Python environment
/// of a program (`ENV/bin/vllm`, `ENV/bin/python`). These names change with an upgrade in place,
/// which need not change the program.
fn installed_beside(program: &Path) -> Vec<String> {
    let Some(environment) = program.parent().and_then(Path::parent) else { return Vec::new() };
    let within = |folder: &Path| fs::read_dir(folder).into_iter().flatten().flatten();
    let pythons = ["lib", "lib64"].into_iter().flat_map(|lib| within(&environment.join(lib)));
    let packages = pythons.filter(|python| python.file_name().to_string_lossy().starts_with("python"));
    let names = packages.flat_map(|python| within(&python.path().join("site-packages")));
    let names = names.map(|entry| entry.file_name().to_string_lossy().into_owned());
    let mut found: Vec<String> = names
        .filter(|name| ["vllm-", "sglang-"].iter().any(|begin| name.starts_with(begin)) && name.ends_with(".dist-info"))
        .collect();
    found.sort_unstable();
    found.dedup();
    found
}

async fn run_help(program: &Path, words: &[String], launch: &Launch) -> Option<InstalledFlags> {
    let mut command = Command::new(program);
    command.args(words).envs(launch.env.iter().map(|(name, value)| (name, value.expose())));
    // The terminal is wide, so that lists of names are not wrapped.
    command.env("COLUMNS", "4000").env("NO_COLOR", "1");
    command.stdin(Stdio::null()).kill_on_drop(true);
    let notice = || {
        let program = program.display();
        let waits = (HELP_TIMEOUT - HELP_NOTICE).as_secs();
        tracing::warn!(
            "{program} has not answered --help for {} s. It is waited for {waits} s more, and then its flags are checked by type \
             and value only. A script has to pass its arguments on to the engine (\"$@\")",
            HELP_NOTICE.as_secs()
        );
    };
    let output = noticed(command.output(), HELP_NOTICE, notice);
    let output = timeout(HELP_TIMEOUT, output).await.ok()?.ok()?;
    let mut known = parse(&String::from_utf8_lossy(&output.stdout));
    // Triton prints its help to stderr, and reports a failure.
    let is_lenient = words.last().is_some_and(|word| word == HELP);
    if is_lenient {
        known.extend(parse(&String::from_utf8_lossy(&output.stderr)));
    }
    let understood = (output.status.success() || is_lenient) && known.len() >= FLAGS_MIN;
    if !understood {
        tracing::info!(program = %program.display(), flags = known.len(), "cannot read the program's flags from --help; flags are checked by type and value only");
    }
    understood.then_some(known)
}

/// Waits for `work`, and calls `notice` if it takes longer than `expected`.
async fn noticed<T>(work: impl Future<Output = T>, expected: Duration, notice: impl FnOnce()) -> T {
    let mut work = std::pin::pin!(work);
    match timeout(expected, &mut work).await {
        Ok(done) => done,
        Err(_) => {
            notice();
            work.await
        }
    }
}

/// The long flags at the head of each entry: `  --model MODEL, -m MODEL   Description`.
fn parse(help: &str) -> InstalledFlags {
    let mut known = InstalledFlags::new();
    for line in help.lines() {
        let head = line.trim_start();
        let indent = line.len() - head.len();
        if indent > 8 || !head.starts_with('-') {
            continue;
        }
        // Two spaces separate the long names from the description; llama.cpp also has them after
        // the short name.
        let long = head.find("--").unwrap_or(0);
        let end = head[long..].find("  ").map_or(head.len(), |end| long + end);
        let names = &head[..end];
        let words = names.split([' ', ',', '=']).filter_map(|word| word.strip_prefix("--"));
        for name in words.filter(|name| name.starts_with(|c: char| c.is_ascii_alphanumeric())) {
            known.insert(name.replace('_', "-"), choices(names, name));
        }
    }
    known
}

/// The choices in `--name {a,b,c}`; none if other values are allowed, too: `{a,b} or a registered
/// name`.
fn choices(names: &str, name: &str) -> Vec<String> {
    let list = || {
        let (_, after) = names.split_once(&format!("--{name} {{"))?;
        let (list, rest) = after.split_once('}')?;
        (rest.is_empty() || rest.starts_with(',')).then_some(list)
    };
    list().map(|list| list.split(',').map(str::to_owned).collect()).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::test_programs::write_program;

    #[test]
    fn names_are_read_from_a_help_text() {
        let help = "usage: vllm serve [options]\n\noptions:\n  --api-server-count API_SERVER_COUNT, -asc API_SERVER_COUNT\n\
                    \x20                       How many --processes to run.\n\
                    \x20 --enable-lora, --no-enable-lora  Handle adapters.\n  --dtype {auto,half}   Type\n  -h, --help   show\n\
                    \x20 --parser {a,b} or name registered elsewhere\n";
        let known = parse(help);
        let wanted = ["api-server-count", "dtype", "enable-lora", "help", "no-enable-lora", "parser"];
        assert_eq!(known.keys().collect::<Vec<_>>(), wanted);
        assert_eq!(known["dtype"], ["auto", "half"]);
        assert!(known["parser"].is_empty() && known["help"].is_empty());
        for (name, choices) in known {
            assert_eq!(from_line(&format!("{name} {}", choices.join(","))), (name, choices));
        }
    }

    #[test]
    fn names_are_read_from_the_help_of_other_engines() {
        let help = "----- common params -----\n\n-t,    --threads N                      number of --cpu threads\n\
                    -n,    --predict, --n-predict N         tokens\n                                        --not-one\n\
                    --perf, --no-perf                       timings\n  --id <string>\n\tIdentifier\n";
        let names = ["id", "n-predict", "no-perf", "perf", "predict", "threads"];
        assert_eq!(parse(help).into_keys().collect::<Vec<_>>(), names);
    }

    #[tokio::test(start_paused = true)]
    async fn a_program_that_is_silent_is_named_once_and_waited_for() {
        for (seconds, named) in [(19, 0), (21, 1), (200, 1)] {
            let mut notices = 0;
            let work = async {
                tokio::time::sleep(Duration::from_secs(seconds)).await;
                "help"
            };
            assert_eq!(noticed(work, HELP_NOTICE, || notices += 1).await, "help");
            assert_eq!(notices, named, "after {seconds} s");
        }
    }

    #[tokio::test]
    async fn the_help_is_read_once_and_again_after_an_upgrade_in_place() {
        let folder = tempfile::tempdir().unwrap();
        let (bin, packages) = (folder.path().join("bin"), folder.path().join("lib/python3.12/site-packages"));
        fs::create_dir_all(&bin).unwrap();
        fs::create_dir_all(packages.join("vllm-0.32.0.dist-info")).unwrap();
        let (program, calls) = (bin.join("vllm"), folder.path().join("asked"));
        let flags: String = (0..FLAGS_MIN).map(|number| format!("echo '  --flag-{number} N   text'\n")).collect();
        let script = format!("#!/bin/sh\necho >>{}\n{flags}", calls.display());
        write_program(&program, &script);
        let command = vec![program.display().to_string(), "serve".to_owned(), "m".to_owned()].into();
        let launch = Launch::of(command, 1);
        let times = || fs::read_to_string(&calls).unwrap().len();
        let state = folder.path().join("state");
        let (flags, others) = (InstalledFlagsCache::new(&state), InstalledFlagsCache::new(&state));
        for known in [
            flags.read(EngineKind::Vllm, &launch).await,
            flags.read(EngineKind::Vllm, &launch).await,
            others.read(EngineKind::Vllm, &launch).await,
        ] {
            assert_eq!((known.map(|known| known.len()), times()), (Some(FLAGS_MIN), 1));
        }
        fs::rename(packages.join("vllm-0.32.0.dist-info"), packages.join("vllm-0.33.0.dist-info")).unwrap();
        flags.read(EngineKind::Vllm, &launch).await.unwrap();
        assert_eq!(times(), 2);
    }
}
