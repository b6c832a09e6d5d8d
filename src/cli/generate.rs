//! `sluice completions SHELL`, `sluice man DIR` and `sluice version`: output for packages.
//!
//! They come from the definitions of `--help`, without hidden subcommands. Exit codes: 0 written; 1
//! a page could not be written; 2 wrong usage.

use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::Context as _;
use clap_complete::Shell;

use super::admin_command::exit_code;

/// Print a completion script for a shell.
#[derive(Clone, Debug, clap::Args)]
pub struct CompletionsArgs {
    /// The shell, for example: sluice completions bash > /etc/bash_completion.d/sluice
    pub shell: Shell,
}

/// Write the manual pages, one for each subcommand.
#[derive(Clone, Debug, clap::Args)]
pub struct ManArgs {
    /// The folder; it is created if it does not exist
    #[arg(value_name = "DIR")]
    pub folder: PathBuf,
}

/// Runs `sluice version`.
pub fn version(version: &str) -> ExitCode {
    let _ = writeln!(std::io::stdout(), "sluice {version}");
    ExitCode::SUCCESS
}

/// Runs `sluice completions` for the command line `command`.
pub fn completions(args: &CompletionsArgs, command: clap::Command) -> ExitCode {
    // A reader that leaves early (`| head`) is no failure.
    let _ = std::io::stdout().write_all(&script(command, args.shell));
    ExitCode::SUCCESS
}

/// Runs `sluice man` for the command line `command`.
pub fn man(args: &ManArgs, command: clap::Command) -> ExitCode {
    exit_code(write_pages(command, &args.folder).map_err(|error| format!("man: {error:#}")))
}

fn script(command: clap::Command, shell: Shell) -> Vec<u8> {
    let mut script = Vec::new();
    clap_complete::generate(shell, &mut command.disable_help_subcommand(true), "sluice", &mut script);
    script
}

fn write_pages(command: clap::Command, folder: &Path) -> anyhow::Result<()> {
    let cannot = || format!("cannot write to {}; give a folder that you may write to", folder.display());
    std::fs::create_dir_all(folder).with_context(cannot)?;
    clap_mangen::generate_to(command, folder).with_context(cannot)
}

#[cfg(test)]
mod tests {
    use std::process::{Command, Stdio};

    use clap::{CommandFactory as _, ValueEnum as _};

    use super::*;
    use crate::cli::Cli;

    /// `sluice`, `sluice-backend`, `sluice-backend-list` and so on.
    fn names(command: &clap::Command, name: &str, into: &mut Vec<String>) {
        into.push(name.to_owned());
        for child in command.get_subcommands().filter(|child| !child.is_hide_set()) {
            names(child, &format!("{name}-{}", child.get_name()), into);
        }
    }

    #[test]
    fn every_subcommand_has_a_page_and_no_other_has() {
        let folder = tempfile::tempdir().unwrap();
        write_pages(Cli::command(), &folder.path().join("man1")).unwrap();
        let mut expected = Vec::new();
        names(&Cli::command(), "sluice", &mut expected);
        expected.iter_mut().for_each(|name| name.push_str(".1"));
        expected.sort();
        let entries = std::fs::read_dir(folder.path().join("man1")).unwrap();
        let mut written: Vec<String> = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
        written.sort();
        assert_eq!(written, expected);
        assert!(written.len() > 10, "{written:?}");
        let page = std::fs::read_to_string(folder.path().join("man1/sluice-backend-restart.1")).unwrap();
        assert!(page.contains("max\\-num\\-seqs=32"), "{page}");
    }

    #[test]
    fn a_folder_that_cannot_be_written_to_is_an_error() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let error = write_pages(Cli::command(), file.path()).unwrap_err();
        assert!(error.to_string().contains("give a folder"), "{error}");
    }

    #[test]
    fn the_script_for_bash_is_valid() {
        let mut bash = Command::new("bash").arg("-n").stdin(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        bash.stdin.take().unwrap().write_all(&script(Cli::command(), Shell::Bash)).unwrap();
        let output = bash.wait_with_output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    }

    #[test]
    fn every_shell_gets_every_subcommand() {
        for shell in Shell::value_variants() {
            let script = String::from_utf8(script(Cli::command(), *shell)).unwrap();
            for name in Cli::command().get_subcommands().map(clap::Command::get_name) {
                assert!(script.contains(name), "{shell}: {name}");
            }
        }
    }
}
