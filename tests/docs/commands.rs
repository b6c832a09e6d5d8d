//! Commands that pages show, parsed with the definitions of the command line.
//!
//! In a block (`sh`, `console`) a command must be complete. In a line of text a command may have
//! placeholders, as in `sluice backend logs NAME [-f]`, but its subcommand and its flags must
//! exist. The flags of `sluice sim` are parsed as flags of `vllm serve`, apart from the simulator's
//! own flags, which `--help` lists.

use std::process::Command;

use clap::CommandFactory as _;
use clap::error::ErrorKind;
use sluice::cli::Cli;
use sluice_core::vllm::args::ServeArgs;
use sluice_core::vllm::version::Version;

use crate::page::Page;
use crate::{clean, one_complaint, pages};

/// The words of the first command in a line, without the parts that the shell takes: prompt,
/// redirections, further commands.
fn words(line: &str) -> Vec<String> {
    let (mut words, mut word, mut quote, mut begun) = (Vec::new(), String::new(), None, false);
    for letter in line.trim_start().trim_start_matches("$ ").chars().chain([' ']) {
        match quote {
            Some(mark) if letter == mark => quote = None,
            Some(_) => word.push(letter),
            None if letter == '\'' || letter == '"' => (quote, begun) = (Some(letter), true),
            None if "|;<>&()".contains(letter) || (letter == '#' && !begun) => {
                // The number of a stream before `>` is not a word of the command.
                if begun && !(letter == '>' && word == "2") {
                    words.push(word);
                }
                break;
            }
            None if letter.is_whitespace() && begun => {
                words.push(std::mem::take(&mut word));
                begun = false;
            }
            None if letter.is_whitespace() => {}
            None => {
                word.push(letter);
                begun = true;
            }
        }
    }
    words
}

/// The words from `sluice` on, if the line is such a command.
fn command(line: &str) -> Option<Vec<String>> {
    let all = words(line);
    let at = all.iter().position(|word| word == "sluice" || word.ends_with("/sluice"))?;
    // Before `sluice` there may be only assignments, and programs that start another program.
    let before = |word: &String| word.contains('=') || ["sudo", "exec", "nohup"].contains(&word.as_str());
    all[..at].iter().all(before).then(|| all[at..].to_vec())
}

fn fault_of_sim(args: &[String], help: &str) -> Option<String> {
    if args.first().is_some_and(|first| first == "fit" || first.starts_with("--help")) {
        return None;
    }
    let mut rest = Vec::new();
    let mut words = args.iter();
    while let Some(word) = words.next() {
        let Some(flag) = word.strip_prefix("--sim-") else {
            rest.push(word.clone());
            continue;
        };
        let (flag, value) = flag.split_once('=').map_or((flag, None), |(flag, value)| (flag, Some(value)));
        if !help.contains(&format!("--sim-{flag} ")) {
            return Some(format!("sluice sim has no --sim-{flag}"));
        }
        if value.is_none() && words.next().is_none() {
            return Some(format!("--sim-{flag} needs a value"));
        }
    }
    ServeArgs::parse_as(Version::COMPARED, &rest).err().map(|error| error.to_string())
}

fn fault(words: &[String], sim_help: &str) -> Option<String> {
    if words.get(1).is_some_and(|name| name == "sim") {
        return fault_of_sim(&words[2..], sim_help);
    }
    let words = ["sluice"].into_iter().chain(words[1..].iter().map(String::as_str));
    let error = Cli::command().try_get_matches_from(words).err()?;
    let fine = matches!(error.kind(), ErrorKind::DisplayHelp | ErrorKind::DisplayVersion);
    (!fine).then(|| error.to_string().lines().next().unwrap_or_default().to_owned())
}

/// The fault of a command in a line of text: a subcommand or a flag that does not exist.
fn fault_of_mention(words: &[String], sim_help: &str) -> Option<String> {
    let mut command = Cli::command();
    // `build` adds the global flags and `help`, which the code below looks up.
    command.build();
    let (mut command, mut is_path) = (&command, words.get(1).is_none_or(|name| name != "help"));
    for word in words[1..].iter().take_while(|word| !word.starts_with('[')) {
        if is_path && let Some(found) = command.find_subcommand(word) {
            command = found;
        } else if let Some(flag) = word.strip_prefix("--") {
            let flag = flag.split('=').next().unwrap_or(flag);
            let is_own = command.get_arguments().any(|known| known.get_long() == Some(flag));
            let is_of_sim = command.get_name() == "sim" && sim_help.contains(&format!("--{flag} "));
            if !is_own && !is_of_sim {
                return Some(format!("it has no --{flag}"));
            }
            is_path = false;
        } else if is_path && !word.starts_with('-') && command.has_subcommands() {
            return Some(format!("it has no subcommand {word}"));
        } else {
            is_path = false;
        }
    }
    None
}

fn faults(pages: &[Page], sim_help: &str) -> (usize, Vec<String>) {
    let (mut count, mut complaints) = (0, Vec::new());
    let mut check = |page: &Page, line: usize, text: &str, whole: bool| {
        let Some(words) = command(text) else { return };
        count += 1;
        let fault = if whole { fault(&words, sim_help) } else { fault_of_mention(&words, sim_help) };
        if let Some(fault) = fault {
            complaints.push(format!("{}:{line}: {}: {fault}", page.path, words.join(" ")));
        }
    };
    for page in pages {
        let shown = |info: &str| ["sh", "console"].contains(&info.split_whitespace().next().unwrap_or(""));
        for block in page.blocks.iter().filter(|block| shown(&block.info)) {
            let text = block.text.replace("\\\n", " ");
            // In a console, other lines are output.
            let is_input = |line: &&str| !block.info.starts_with("console") || line.starts_with("$ ");
            for line in text.lines().filter(is_input) {
                check(page, block.line, line, true);
            }
        }
        for (line, span) in &page.spans {
            check(page, *line, span, false);
        }
    }
    (count, complaints)
}

fn sim_help() -> String {
    let output = Command::new(env!("CARGO_BIN_EXE_sluice")).args(["sim", "--help"]).output().unwrap();
    String::from_utf8(output.stdout).unwrap()
}

#[test]
fn every_command_that_is_shown_exists() {
    let (count, complaints) = faults(&pages(), &sim_help());
    clean(&complaints);
    assert!(count > 100, "only {count} commands were found");
}

#[test]
fn a_command_that_does_not_exist_is_caught() {
    let check = |text: &str| faults(&[Page::parse("a.md", text)], "--sim-gpu NAME").1;
    clean(&check(
        "```sh\n$ A=1 sluice status --json | head # so\nsluice sim m --sim-gpu h200 --port 1 &\n```\n`sluice backend`",
    ));
    clean(&check("```sh\nsluice experiment create - < a.json\n```\n```text\nsluice nonsense\n```\n"));
    one_complaint(&check("```sh\nsluice statsu\n```\n"), "statsu");
    one_complaint(&check("```sh\nsluice status \\\n  --jsn\n```\n"), "--jsn");
    one_complaint(&check("```sh\nsluice backend\n```\n"), "sluice backend");
    one_complaint(&check("see `sluice tuner shwo`"), "shwo");
    clean(&check(
        "`sluice backend logs NAME [-f]`, `sluice help COMMAND`, `sluice sim --sim-gpu`, `sluice backend --token`",
    ));
    one_complaint(&check("`sluice status --jsn`"), "it has no --jsn");
    one_complaint(&check("`sluice sim m --sim-gpux h200`"), "--sim-gpux");
    one_complaint(&check("```sh\nsluice sim m --sim-gpux h200\n```\n"), "--sim-gpux");
    one_complaint(&check("```sh\nsluice sim m --max-num-sequences 3\n```\n"), "max-num-sequences");
}
