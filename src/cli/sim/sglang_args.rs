//! `sluice sim --sim-engine sglang`: reads the command line of `sglang.launch_server` by the table
//! of SGLang's flags, and writes the flags of vLLM that have the same effect on the simulation.
//!
//! A flag without such an effect is accepted, and an unknown flag is refused as argparse does.

use std::collections::BTreeMap;

use sluice_core::engines::{EngineKind, FlagTable};

/// A flag of SGLang, and the flag of vLLM with the same value.
const SAME: &[(&str, &str)] = &[
    ("api-key", "api-key"),
    ("chunked-prefill-size", "max-num-batched-tokens"),
    ("context-length", "max-model-len"),
    ("mem-fraction-static", "gpu-memory-utilization"),
    ("max-running-requests", "max-num-seqs"),
    ("served-model-name", "served-model-name"),
    ("tp-size", "tensor-parallel-size"),
];
/// The most requests that run at once, unless a flag sets another number. SGLang computes the
/// number from the memory.
const RUNNING: i64 = 256;

/// A command line of SGLang.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct SglangArgs {
    /// The flags of vLLM, with the model first.
    pub(super) argv: Vec<String>,
    /// `--enable-metrics`
    pub(super) metrics: bool,
}

pub(super) fn table() -> Option<&'static FlagTable> {
    EngineKind::Sglang.rules().flags
}

/// The help: the names of all flags, in the form of argparse.
pub(super) fn help() -> String {
    let names = table().into_iter().flat_map(FlagTable::names);
    names.fold("usage: launch_server.py [-h] --model-path MODEL_PATH ...\n\noptions:\n".to_owned(), |text, name| {
        format!("{text}  --{name} {}\n", name.to_uppercase().replace('-', "_"))
    })
}

/// Reads the words after `sluice sim`.
pub(super) fn read(words: &[String]) -> Result<SglangArgs, String> {
    let table = table().ok_or("there is no table of flags")?;
    let flags: BTreeMap<String, String> = table.read(words);
    let unknown: Vec<String> =
        flags.keys().filter(|name| table.full_name(name).is_none()).map(|name| format!("--{name}")).collect();
    if !unknown.is_empty() {
        return Err(format!("unrecognized arguments: {}", unknown.join(" ")));
    }
    let positional = words.first().filter(|word| !word.starts_with('-'));
    let Some(model) = flags.get("model-path").or(positional) else {
        return Err("the following arguments are required: --model-path/--model".to_owned());
    };
    let number = |name: &str| -> Result<Option<i64>, String> {
        let wrong = |text: &String| format!("argument --{name}: invalid int value: '{text}'");
        flags.get(name).map(|text| text.parse().map_err(|_| wrong(text))).transpose()
    };
    let mut argv = vec![model.clone()];
    let mut add = |name: &str, value: &str| argv.push(format!("--{name}={value}"));
    add("host", flags.get("host").map_or("127.0.0.1", String::as_str));
    add("port", flags.get("port").map_or("30000", String::as_str));
    let running = number("max-running-requests")?.unwrap_or(RUNNING);
    if let Some(queued) = number("max-queued-requests")? {
        // The two numbers are added, because vLLM's limit counts running requests, too.
        add("max-num-queued-reqs", &running.saturating_add(queued).to_string());
    }
    // With -1, a prompt is one chunk.
    let chunk = number("chunked-prefill-size")?;
    for (own, vllm) in
        SAME.iter().filter(|(own, _)| *own != "chunked-prefill-size" || chunk.is_some_and(|size| size > 0))
    {
        if let Some(value) = flags.get(*own) {
            add(vllm, value);
        }
    }
    if !flags.contains_key("max-running-requests") {
        add("max-num-seqs", &RUNNING.to_string());
    }
    if flags.contains_key("enable-lora") {
        argv.push("--enable-lora".to_owned());
    }
    Ok(SglangArgs { argv, metrics: flags.contains_key("enable-metrics") })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read_line(line: &str) -> Result<SglangArgs, String> {
        read(&line.split(' ').map(str::to_owned).collect::<Vec<_>>())
    }

    #[test]
    fn flags_become_those_of_vllm_with_the_same_effect() {
        let line = "--model-path m --tp 2 --max-running-requests 8 --max-queued-requests=4 --chunked-prefill-size -1 --enable-metrics";
        let read = read_line(line).unwrap();
        let wanted =
            "m --host=127.0.0.1 --port=30000 --max-num-queued-reqs=12 --max-num-seqs=8 --tensor-parallel-size=2";
        assert_eq!((read.argv.join(" ").as_str(), read.metrics), (wanted, true));
        assert!(!read_line("m --port 1").unwrap().metrics);
    }

    #[test]
    fn wrong_lines_are_refused_in_the_words_of_argparse() {
        assert_eq!(read_line("m --max-num-seqs 4"), Err("unrecognized arguments: --max-num-seqs".to_owned()));
        assert!(read_line("--port 1").unwrap_err().contains("required: --model-path"));
        assert!(read_line("m --max-running-requests x").unwrap_err().contains("invalid int value: 'x'"));
        assert!(help().lines().any(|line| line == "  --max-running-requests MAX_RUNNING_REQUESTS"));
    }
}
