//! The examples at the end of every `--help`.
//!
//! A test parses each example in `examples.txt` with the definitions of the command line. `sluice
//! sim` has a separate text, because it takes the flags of `vllm serve`.

use clap::Command;

fn examples() -> impl Iterator<Item = (Vec<&'static str>, &'static str)> {
    let blocks = include_str!("examples.txt").trim_end().split("\n\n");
    blocks.filter_map(|block| block.split_once('\n')).map(|(path, lines)| (path.split(' ').collect(), lines))
}

pub(super) fn add(mut command: Command) -> Command {
    for (path, lines) in examples() {
        let text = format!("Examples:\n{lines}");
        command = at(command, &path, &|found| {
            // A subcommand's own text, such as the signals of `serve`, comes first.
            let text = found.get_after_help().map_or(text.clone(), |own| format!("{own}\n\n{text}"));
            found.after_help(text)
        });
    }
    command
}

fn at(command: Command, path: &[&'static str], change: &dyn Fn(Command) -> Command) -> Command {
    match path {
        [] => change(command),
        [name, rest @ ..] => command.mut_subcommand(name, |found| at(found, rest, change)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::command;

    fn paths(command: &Command, path: &[String], all: &mut Vec<Vec<String>>) {
        for found in command.get_subcommands().filter(|found| found.get_name() != "help") {
            let path = [path, &[found.get_name().to_owned()]].concat();
            all.push(path.clone());
            paths(found, &path, all);
        }
    }

    #[test]
    fn every_subcommand_has_examples_and_each_of_them_works() {
        let mut all = Vec::new();
        paths(&command(), &[], &mut all);
        assert!(all.len() > 30, "{all:?}");
        for path in all.iter().filter(|path| path[0] != "sim") {
            let path: Vec<&str> = path.iter().map(String::as_str).collect();
            let (_, lines) = examples().find(|(other, _)| *other == path).unwrap_or_else(|| panic!("{path:?}"));
            for example in lines.lines() {
                // A redirection or a pipe is left out, as the shell does not pass it to the
                // program.
                let words = example.split_whitespace().take_while(|word| !["<", ">", "|"].contains(word));
                let words: Vec<&str> = words.collect();
                assert!(words[1..].starts_with(&path), "{example} is not of {path:?}");
                command().try_get_matches_from(&words).unwrap_or_else(|error| panic!("{example}: {error}"));
            }
            let mut help = command();
            let found = path.iter().fold(&mut help, |found, name| found.find_subcommand_mut(name).unwrap());
            assert!(found.render_help().to_string().contains("Examples:\n  sluice "), "{path:?}");
        }
        assert!(examples().all(|(path, _)| all.iter().any(|known| *known == path)), "one is of no subcommand");
    }

    #[test]
    fn what_a_subcommand_says_itself_stands_before_its_examples() {
        let mut whole = command();
        let help = whole.find_subcommand_mut("serve").unwrap().render_help().to_string();
        let at = |text: &str| help.find(text).unwrap_or_else(|| panic!("{text}: {help}"));
        assert!(at("GET /ready") < at("Examples:\n  sluice serve"));
        let check = whole.find_subcommand_mut("check").unwrap().render_help().to_string();
        assert!(check.contains("Exit status: 0 valid, 2 wrong usage, 78 not valid"), "{check}");
    }

    #[test]
    fn the_short_help_of_bench_fits_a_few_screens_and_the_long_one_is_grouped() {
        let mut whole = command();
        let bench = whole.find_subcommand_mut("bench").unwrap();
        let (short, long) = (bench.render_help().to_string(), bench.render_long_help().to_string());
        assert!(short.lines().count() <= 90, "{} lines:\n{short}", short.lines().count());
        for flag in ["--request-rate", "--num-prompts", "--class", "--goodput", "--save-result", "--find-rate "] {
            assert!(short.contains(flag), "{flag}: {short}");
        }
        for flag in ["--timed-trace-label-hash-ids", "--top-k", "--find-rate-runs"] {
            assert!(!short.contains(flag) && long.contains(flag), "{flag}");
        }
        for heading in [
            "Server:",
            "Requests:",
            "Generated prompts:",
            "Data sets and traces:",
            "LoRA adapters:",
            "Load:",
            "Sweeps:",
        ] {
            assert!(long.contains(&format!("\n{heading}\n")), "{heading}");
        }
        let mut group = 0;
        for line in long.lines() {
            let is_heading = line.ends_with(':') && !line.starts_with(' ');
            group = if is_heading { 0 } else { group + usize::from(line.trim_start().starts_with("--")) };
            assert!(group <= 16, "a group of more than 16 flags is hard to read: {line}");
        }
    }
}
