//! The program of a command: the path, and the position of the flags.
//!
//! As in a shell, a word with a slash is a path, and any other word is searched for in `PATH`: the
//! one in the engine's environment, if set, else the gateway's.

use std::path::{Path, PathBuf};

use crate::driver::EngineFailure;
use sluice_config::Launch;

/// The program of `launch.command` as an absolute path.
///
/// # Errors
/// There is no such program.
pub(super) fn program_of(launch: &Launch) -> Result<PathBuf, EngineFailure> {
    let word = launch.command.first().map(String::as_str).unwrap_or_default();
    let path = launch.env.get("PATH").map(|path| path.expose());
    let found = match path {
        Some(path) => find_in(word, path),
        None => find_program(word),
    };
    found.ok_or_else(|| {
        let problem = if word.contains('/') { "not an executable file" } else { "not in PATH" };
        EngineFailure::program_missing("launch.command", word, problem)
    })
}

/// The absolute path of a program, with the gateway's `PATH`.
pub(crate) fn find_program(word: &str) -> Option<PathBuf> {
    find_in(word, &std::env::var("PATH").unwrap_or_default())
}

fn find_in(word: &str, path: &str) -> Option<PathBuf> {
    if word.is_empty() {
        return None;
    }
    if word.contains('/') {
        return std::path::absolute(word).ok().filter(|path| is_executable(path));
    }
    std::env::split_paths(path).map(|folder| folder.join(word)).find(|path| is_executable(path))
}

fn is_executable(path: &Path) -> bool {
    use std::os::unix::fs::PermissionsExt;
    path.metadata().is_ok_and(|file| file.is_file() && file.permissions().mode() & 0o111 != 0)
}

/// The words between the program and the flags: `serve` of `vllm serve MODEL`, `sim` of `sluice
/// sim`, `-m MODULE` of `python -m MODULE`. `None` for other commands, such as a script.
pub(super) fn subcommand(command: &[String]) -> Option<&[String]> {
    let words = command.get(1..)?;
    let is_module = |at: usize| at > 0 && words[at - 1] == "-m" && words[at].contains("vllm");
    let verb = |(at, word): (usize, &String)| word == "serve" || (at == 0 && word == "sim") || is_module(at);
    let last = words.iter().enumerate().take(8).position(verb)?;
    Some(&words[..=last])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_words_before_the_flags_are_found() {
        let words = |text: &str| text.split(' ').map(str::to_owned).collect::<Vec<_>>();
        let before = |text: &str| subcommand(&words(text)).map(|words| words.join(" "));
        assert_eq!(before("vllm serve m --port 1"), Some("serve".into()));
        assert_eq!(
            before("python3 -m vllm.entrypoints.openai.api_server --model m"),
            Some("-m vllm.entrypoints.openai.api_server".into())
        );
        assert_eq!(before("nice -n 10 vllm serve m"), Some("-n 10 vllm serve".into()));
        assert_eq!(before("sluice sim m"), Some("sim".into()));
        assert_eq!(before("./start.sh m"), None);
    }
}
