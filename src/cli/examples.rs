//! The examples at the end of every `--help`.
//!
//! One table holds them, so that a test can parse each with the definitions of the command line: an
//! example that does not work is worse than none. `sluice sim` has a separate text, because it
//! takes the flags of `vllm serve`.

use clap::Command;

/// The words that name a subcommand, and examples.
type Examples = (&'static [&'static str], &'static [&'static str]);

const EXAMPLES: &[Examples] = &[
    (
        &["serve"],
        &[
            "sluice serve sluice.toml",
            "sluice serve --upgrade sluice.toml",
            "sluice serve --backend http://gpu0:8000 --backend http://gpu1:8000",
            "sluice serve --backend http://gpu0:8000 --long http://gpu1:8000 --threshold 5k",
        ],
    ),
    (&["demo"], &["sluice demo", "sluice demo --once --seconds 30 --json"]),
    (
        &["bench"],
        &[
            "sluice bench --base-url http://gpu0:8000 --request-rate 8 --num-prompts 2000 --goodput ttft:300 tpot:50",
            "sluice bench --base-url http://127.0.0.1:8080 --class short:weight=15,in=200,out=128 --class long:in=16000,out=64 --request-rate 32",
            "sluice bench --base-url http://127.0.0.1:8080 --dataset-name records --dataset-path records.jsonl",
            "sluice bench --base-url http://127.0.0.1:8080 --sweep-max-concurrency 1,4,16,64 --save-result --html sweep.html",
            "sluice bench --base-url http://127.0.0.1:8080 --find-rate --goodput ttft:300",
        ],
    ),
    (
        &["bench", "report"],
        &["sluice bench report a.json b.json --html report.html", "sluice bench report sweep.json --svg plots"],
    ),
    (
        &["bench", "compare"],
        &["sluice bench compare a.json b.json", "sluice bench compare a.json b.json --margin 2 --json"],
    ),
    (&["lab"], &["sluice lab run config/lab/mixed.toml --seeds 10"]),
    (
        &["lab", "run"],
        &[
            "sluice lab run config/lab/mixed.toml --seeds 10 --html mixed.html",
            "sluice lab run config/lab/mixed.toml --sweep vllm.long-prefill-token-threshold=0,256,512",
        ],
    ),
    (&["lab", "plan"], &["sluice lab plan config/lab/plan.toml --prices config/lab/prices.toml"]),
    (&["lab", "rate"], &["sluice lab rate config/lab/plan.toml --sweep engines=1,2,4"]),
    (
        &["tune"],
        &[
            "sluice tune config/tune/auto_tune.toml --budget 45",
            "sluice tune config/tune/scheduling.toml --real --budget 2h --patch winner.toml",
            "sluice tune config/tune/scheduling.toml --gateway http://127.0.0.1:8081 --backend gpu0",
        ],
    ),
    (
        &["report"],
        &[
            "sluice report records.jsonl records.jsonl.1 -o report.html",
            "sluice report records.jsonl --gpu h200 --model llama-3.1-8b --config sluice.toml",
            "sluice report records.jsonl --lab config/lab/mixed.toml",
        ],
    ),
    (
        &["check"],
        &[
            "sluice check sluice.toml",
            "sluice check --quiet sluice.toml",
            "sluice check --probe sluice.toml",
            "sluice check sluice.toml --set server.listen=0.0.0.0:80",
        ],
    ),
    (&["status"], &["sluice status", "sluice status --admin http://gw1:8081 --watch", "sluice status --json"]),
    (&["top"], &["sluice top", "sluice top --admin http://gw1:8081 --once"]),
    (&["experiment"], &["sluice experiment list", "sluice experiment show lora-v2"]),
    (&["experiment", "list"], &["sluice experiment list", "sluice experiment list --json"]),
    (&["experiment", "show"], &["sluice experiment show lora-v2"]),
    (
        &["experiment", "create"],
        &["sluice experiment create lora-v2.toml", "sluice experiment create - < lora-v2.json"],
    ),
    (&["experiment", "remove"], &["sluice experiment remove lora-v2"]),
    (&["experiment", "start"], &["sluice experiment start lora-v2"]),
    (&["experiment", "stop"], &["sluice experiment stop lora-v2"]),
    (&["experiment", "promote"], &["sluice experiment promote lora-v2 new"]),
    (&["experiment", "report"], &["sluice experiment report lora-v2 --format html -o report.html"]),
    (&["tuner"], &["sluice tuner show", "sluice tuner approve 3"]),
    (&["tuner", "show"], &["sluice tuner show"]),
    (&["tuner", "approve"], &["sluice tuner approve 3"]),
    (&["tuner", "freeze"], &["sluice tuner freeze"]),
    (&["tuner", "resume"], &["sluice tuner resume"]),
    (&["tuner", "reset"], &["sluice tuner reset"]),
    (&["backend"], &["sluice backend list", "sluice backend restart gpu1 --set max-num-seqs=128 --wait"]),
    (&["backend", "list"], &["sluice backend list --wide", "sluice backend list --json"]),
    (&["backend", "drain"], &["sluice backend drain short/gpu0 --wait"]),
    (
        &["backend", "restart"],
        &["sluice backend restart gpu1 --set --max-num-seqs=128 --wait", "sluice backend restart gpu1 --reset"],
    ),
    (&["backend", "logs"], &["sluice backend logs gpu1", "sluice backend logs short/gpu1 -f -n 20"]),
    (&["backend", "enable"], &["sluice backend enable gpu1 --wait"]),
    (&["reload"], &["sluice reload", "sluice reload --admin http://gw1:8081"]),
    (&["explain"], &["sluice explain", "sluice explain queue_full", "sluice explain config-pools config-tls"]),
    (&["version"], &["sluice version"]),
    (
        &["completions"],
        &["sluice completions bash > /etc/bash_completion.d/sluice", "sluice completions fish | source"],
    ),
    (&["man"], &["sluice man /usr/local/share/man/man1"]),
];

/// Adds the examples to the end of the help of each subcommand.
pub(super) fn add(mut command: Command) -> Command {
    for (path, examples) in EXAMPLES {
        let text = format!("Examples:\n  {}", examples.join("\n  "));
        command = at(command, path, &|found| {
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

    /// Every subcommand, by the words that name it.
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
            let (_, examples) = EXAMPLES.iter().find(|(other, _)| *other == path).unwrap_or_else(|| panic!("{path:?}"));
            for example in *examples {
                // The words before a redirection or pipe, which the shell would take away.
                let words = example.split_whitespace().take_while(|word| !["<", ">", "|"].contains(word));
                let words: Vec<&str> = words.collect();
                assert!(words[1..].starts_with(&path), "{example} is not of {path:?}");
                command().try_get_matches_from(&words).unwrap_or_else(|error| panic!("{example}: {error}"));
            }
            let mut help = command();
            let found = path.iter().fold(&mut help, |found, name| found.find_subcommand_mut(name).unwrap());
            assert!(found.render_help().to_string().contains("Examples:\n  sluice "), "{path:?}");
        }
        assert!(EXAMPLES.iter().all(|(path, _)| all.iter().any(|known| known == path)), "one is of no subcommand");
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
