//! The flags that the installed program has, asked once with `--help=all`.
//!
//! vLLM takes 5 to 30 s to print its help, since it imports everything first. The answer is kept in memory and in a file that
//! is named after the program's path, size and time of change, the vLLM installed beside it and the words before the flags,
//! so another version is asked anew, also one that was installed in place. A program that cannot be asked (a wrapper script,
//! an answer with fewer than [`ENOUGH`] flags, none within [`ASK_WITHIN`]) is not asked again until it changes; its flags are
//! then checked by type and value only.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::{Duration, UNIX_EPOCH};

use tokio::process::Command;
use tokio::sync::Mutex;
use tokio::time::timeout;
use xxhash_rust::xxh3::xxh3_64;

use sluice_gateway::config::Launch;

/// The flags that a program has, by name without dashes in front (`no-` forms are names too), each with the values that it
/// chooses from; none: any value.
pub(crate) type Known = BTreeMap<String, Vec<String>>;

/// Longest wait for the help text: it has been seen to take over 120 s on a machine with ten times the load it has cores for.
const ASK_WITHIN: Duration = Duration::from_secs(300);
/// A help text with fewer flags is not vLLM's.
const ENOUGH: usize = 30;

/// Knows, or finds out, the flags of one backend's program.
#[derive(Debug)]
pub(crate) struct Flags {
    folder: PathBuf,
    /// What was found out, and of which program. Taken while it is asked, so that it is asked once.
    known: Mutex<Option<(u64, Option<Known>)>>,
}

impl Flags {
    /// Keeps what is found out in `folder`.
    pub(crate) fn new(folder: &Path) -> Self {
        Self { folder: folder.to_owned(), known: Mutex::default() }
    }

    /// The flags of the program of `launch`; `None` where it cannot be asked.
    pub(crate) async fn of(&self, launch: &Launch) -> Option<Known> {
        let words = before_flags(&launch.command)?;
        let program = super::program_of(launch).ok()?;
        let identity = identity(&program, words)?;
        let mut known = self.known.lock().await;
        if let Some((of, known)) = &*known
            && *of == identity
        {
            return known.clone();
        }
        let found = self.find_out(&program, words, identity, launch).await;
        *known = Some((identity, found.clone()));
        found
    }

    async fn find_out(&self, program: &Path, words: &[String], identity: u64, launch: &Launch) -> Option<Known> {
        let file = self.folder.join(format!("flags-{identity:016x}.txt"));
        if let Ok(text) = fs::read_to_string(&file) {
            let known: Known = text.lines().map(from_line).collect();
            if known.len() >= ENOUGH {
                return Some(known);
            }
        }
        let known = ask(program, words, launch).await?;
        let text: String = known.iter().map(|(name, choices)| format!("{name} {}\n", choices.join(","))).collect();
        let kept = fs::create_dir_all(&self.folder).and_then(|()| fs::write(&file, text));
        if let Err(error) = kept {
            tracing::warn!(file = %file.display(), %error, "cannot keep the engine's list of flags; it is asked again next time");
        }
        Some(known)
    }
}

/// A line of the file: a name, a space, choices between commas.
fn from_line(line: &str) -> (String, Vec<String>) {
    let (name, choices) = line.split_once(' ').unwrap_or((line, ""));
    (name.to_owned(), choices.split(',').filter(|choice| !choice.is_empty()).map(str::to_owned).collect())
}

/// The words between the program and what it serves: `serve` of `vllm serve MODEL`, `sim` of `sluice sim`, `-m MODULE` of
/// `python -m MODULE`. `None`: a command that is not understood, which is not asked.
pub(super) fn before_flags(command: &[String]) -> Option<&[String]> {
    let words = command.get(1..)?;
    let is_module = |at: usize| at > 0 && words[at - 1] == "-m" && words[at].contains("vllm");
    let verb = |(at, word): (usize, &String)| word == "serve" || (at == 0 && word == "sim") || is_module(at);
    let last = words.iter().enumerate().take(8).position(verb)?;
    Some(&words[..=last])
}

fn identity(program: &Path, words: &[String]) -> Option<u64> {
    let path = program.canonicalize().ok()?;
    let file = path.metadata().ok()?;
    let changed = file.modified().ok()?.duration_since(UNIX_EPOCH).unwrap_or_default().as_nanos();
    let installed = installed_beside(program);
    Some(xxh3_64(format!("{}\n{}\n{changed}\n{installed:?}\n{words:?}", program.display(), file.len()).as_bytes()))
}

/// The versions of vLLM in the Python environment that a program belongs to (`ENV/bin/vllm`, `ENV/bin/python`), as the names
/// of their `vllm-*.dist-info` folders: an upgrade in place need not touch the program.
fn installed_beside(program: &Path) -> Vec<String> {
    let Some(environment) = program.parent().and_then(Path::parent) else { return Vec::new() };
    let within = |folder: &Path| fs::read_dir(folder).into_iter().flatten().flatten();
    let pythons = ["lib", "lib64"].into_iter().flat_map(|lib| within(&environment.join(lib)));
    let packages = pythons.filter(|python| python.file_name().to_string_lossy().starts_with("python"));
    let names = packages.flat_map(|python| within(&python.path().join("site-packages")));
    let names = names.map(|entry| entry.file_name().to_string_lossy().into_owned());
    let mut found: Vec<String> =
        names.filter(|name| name.starts_with("vllm-") && name.ends_with(".dist-info")).collect();
    found.sort_unstable();
    found.dedup();
    found
}

async fn ask(program: &Path, words: &[String], launch: &Launch) -> Option<Known> {
    let mut command = Command::new(program);
    command.args(words).arg("--help=all").envs(&launch.env);
    // Wide, so that no list of names is broken over lines.
    command.env("COLUMNS", "4000").env("NO_COLOR", "1");
    command.stdin(Stdio::null()).stderr(Stdio::null()).kill_on_drop(true);
    let answer = timeout(ASK_WITHIN, command.output()).await.ok()?.ok()?;
    let known = parse(&String::from_utf8_lossy(&answer.stdout));
    let understood = answer.status.success() && known.len() >= ENOUGH;
    if !understood {
        tracing::info!(program = %program.display(), flags = known.len(), "cannot be asked for its flags with --help=all");
    }
    understood.then_some(known)
}

/// The long flags at the head of each entry: `  --model MODEL, -m MODEL   What it is`.
fn parse(help: &str) -> Known {
    let mut known = Known::new();
    for line in help.lines() {
        let head = line.trim_start();
        let indent = line.len() - head.len();
        if !(1..=8).contains(&indent) || !head.starts_with('-') {
            continue;
        }
        // Two spaces end the names and begin the description.
        let names = head.split("  ").next().unwrap_or(head);
        let words = names.split([' ', ',', '=']).filter_map(|word| word.strip_prefix("--"));
        for name in words.filter(|name| !name.is_empty()) {
            known.insert(name.replace('_', "-"), choices(names, name));
        }
    }
    known
}

/// The choices in `--name {a,b,c}`. None where more than they is allowed: `{a,b} or a name that is registered`.
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

    fn words(text: &str) -> Vec<String> {
        text.split(' ').map(str::to_owned).collect()
    }

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
    fn the_words_before_the_flags_are_found() {
        let before = |text: &str| before_flags(&words(text)).map(|words| words.join(" "));
        assert_eq!(before("vllm serve m --port 1"), Some("serve".into()));
        assert_eq!(
            before("python3 -m vllm.entrypoints.openai.api_server --model m"),
            Some("-m vllm.entrypoints.openai.api_server".into())
        );
        assert_eq!(before("nice -n 10 vllm serve m"), Some("-n 10 vllm serve".into()));
        assert_eq!(before("sluice sim m"), Some("sim".into()));
        assert_eq!(before("./start.sh m"), None);
    }

    #[tokio::test]
    async fn a_program_is_asked_once_and_again_when_another_vllm_stands_beside_it() {
        let folder = tempfile::tempdir().unwrap();
        let (bin, packages) = (folder.path().join("bin"), folder.path().join("lib/python3.12/site-packages"));
        fs::create_dir_all(&bin).unwrap();
        fs::create_dir_all(packages.join("vllm-0.32.0.dist-info")).unwrap();
        let (program, asked) = (bin.join("vllm"), folder.path().join("asked"));
        let flags: String = (0..ENOUGH).map(|number| format!("echo '  --flag-{number} N   text'\n")).collect();
        let script = format!("#!/bin/sh\necho >>{}\n{flags}", asked.display());
        fs::write(&program, script).unwrap();
        fs::set_permissions(&program, std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
        let command = vec![program.display().to_string(), "serve".to_owned(), "m".to_owned()];
        let launch = Launch { command, port: 1, gpu: Vec::new(), env: BTreeMap::new(), args: BTreeMap::new() };
        let times = || fs::read_to_string(&asked).unwrap().len();
        let state = folder.path().join("state");
        let (flags, others) = (Flags::new(&state), Flags::new(&state));
        for known in [flags.of(&launch).await, flags.of(&launch).await, others.of(&launch).await] {
            assert_eq!((known.map(|known| known.len()), times()), (Some(ENOUGH), 1));
        }
        fs::rename(packages.join("vllm-0.32.0.dist-info"), packages.join("vllm-0.33.0.dist-info")).unwrap();
        flags.of(&launch).await.unwrap();
        assert_eq!(times(), 2);
    }
}
