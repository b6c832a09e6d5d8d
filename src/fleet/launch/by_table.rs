//! Starts of engines that are not vLLM. Each kind has a table of flags (`core/engines`).
//!
//! Checks, as for vLLM: does the program have the flag (by `--help`, if readable), is the value of
//! the right type, do two settings contradict each other, is the file of the model there? The rules
//! of vLLM do not apply. A word `{port}` in the command stands for the port; without one, flags for
//! host and port are added.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use super::checks::distinct_devices;
use super::installed_flags::InstalledFlags;
use super::program::program_of;
use super::settings_rules::closest;
use crate::driver::{EngineFailure, EngineSettings, exposed};
use sluice_config::{ArgValue, Launch};
use sluice_core::engines::{EngineKind, FlagTable};
use sluice_core::vllm::failure::FailureClass;
use sluice_core::vllm::logs::StartPhase;

/// The word of a command that stands for the port.
const PORT: &str = "{port}";

type Args = BTreeMap<String, ArgValue>;

/// Failures in the words of one kind of engine.
struct Checks<'a> {
    engine: EngineKind,
    table: &'a FlagTable,
    wrong: Vec<EngineFailure>,
}

impl Checks<'_> {
    fn add(&mut self, class: FailureClass, cause: String) {
        let diagnosis = self.engine.rules().log.plain(class, Some(cause));
        self.wrong.push(EngineFailure::of(diagnosis, None, StartPhase::Launching));
    }

    fn bad(&mut self, cause: String) {
        self.add(FailureClass::BadArguments, cause);
    }

    /// Types of values, and names if the program's flags are known.
    fn flags(&mut self, args: &Args, known: Option<&InstalledFlags>) {
        for (name, value) in args {
            if name.is_empty() || name.starts_with('-') || name.contains(|c: char| c.is_whitespace() || c == '=') {
                self.bad(format!("{name:?} is not the name of a flag (without its dashes)"));
                continue;
            }
            let full = self.table.full_name(name).unwrap_or(name);
            let Some(known) = known.filter(|known| !known.contains_key(name) && !known.contains_key(full)) else {
                if let Err(cause) = self.table.check(name, value) {
                    self.bad(cause);
                }
                continue;
            };
            let hint = closest(name, known.keys().map(String::as_str)).map(|close| format!("; did you mean {close}?"));
            let cause = format!("this {} has no flag --{name}{}", self.table.engine, hint.unwrap_or_default());
            self.add(FailureClass::UnknownFlag, cause);
        }
    }

    /// The port, TLS and the files of the model.
    fn start(&mut self, launch: &Launch, flags: &BTreeMap<String, String>) {
        if let Some(name) = self.table.tls.iter().find(|name| flags.contains_key(**name)) {
            self.bad(format!(
                "the gateway connects to 127.0.0.1:{} with plain HTTP; remove {name} (TLS is for the gateway's own \
                 listener)",
                launch.port
            ));
        }
        let port = self.table.address.1;
        if let Some(written) = flags.get(port).filter(|written| **written != launch.port.to_string()) {
            self.bad(format!(
                "--{port} {written} contradicts launch.port = {}; set the port in launch.port only",
                launch.port
            ));
        }
        if let Err(failure) = distinct_devices(launch) {
            self.wrong.push(failure);
        }
        let sizes: Vec<(&str, usize)> = self
            .table
            .devices
            .iter()
            .filter_map(|name| Some((*name, flags.get(*name)?.parse().ok()?)))
            .filter(|(_, size)| *size > 1)
            .collect();
        let wanted = sizes.iter().fold(1usize, |product, (_, size)| product.saturating_mul(*size));
        if !launch.gpu.is_empty() && wanted > launch.gpu.len() {
            let sizes: Vec<String> = sizes.iter().map(|(name, size)| format!("{name} {size}")).collect();
            self.bad(format!("{} needs {wanted} devices, gpu lists {}", sizes.join(" x "), launch.gpu.len()));
        }
        for name in self.table.model {
            let Some(path) = flags.get(*name).filter(|path| path.starts_with(['/', '.'])) else { continue };
            if !Path::new(path).exists() {
                self.add(FailureClass::ModelNotFound, format!("{name}: there is no {path}"));
            }
        }
    }
}

/// The flags of a start by full name, from the command and from the settings, which override the
/// command.
pub(super) fn given(table: &FlagTable, launch: &Launch, args: &Args) -> BTreeMap<String, String> {
    let begin = table.flags_begin(&launch.command);
    let mut flags = begin.map(|begin| table.read(&launch.command[begin..])).unwrap_or_default();
    for (name, value) in args {
        let dashed = name.replace('_', "-");
        let name = table.full_name(&dashed).map_or(dashed, str::to_owned);
        flags.insert(name, value.texts().join(" "));
    }
    flags
}

/// The number of sequences that run at once, if a flag sets it.
pub(super) fn sequences(table: &FlagTable, launch: &Launch, settings: &EngineSettings) -> Option<i64> {
    let flags = given(table, launch, &exposed(&launch.args, settings).args);
    flags.get(table.sequences?)?.parse().ok().filter(|number| *number > 0)
}

/// The errors in settings alone.
pub(super) fn values(engine: EngineKind, table: &FlagTable, args: &Args) -> Vec<EngineFailure> {
    let mut checks = Checks { engine, table, wrong: Vec::new() };
    checks.flags(args, None);
    checks.wrong
}

/// Program and arguments for starting `launch` with `settings`.
pub(super) fn argv(
    engine: EngineKind,
    table: &FlagTable,
    (launch, settings): (&Launch, &EngineSettings),
    known: Option<&InstalledFlags>,
) -> Result<Vec<String>, EngineFailure> {
    let (program, wrong) = match program_of(launch) {
        Ok(program) => (program, Vec::new()),
        Err(failure) => (PathBuf::new(), vec![failure]),
    };
    let args = exposed(&launch.args, settings).args;
    let flags = given(table, launch, &args);
    let mut checks = Checks { engine, table, wrong };
    checks.flags(&args, known);
    checks.start(launch, &flags);
    if let Some(failure) = EngineFailure::joined(checks.wrong) {
        return Err(failure);
    }
    let port = launch.port.to_string();
    let mut argv = vec![program.display().to_string()];
    argv.extend(launch.command[1..].iter().map(|word| word.replace(PORT, &port)));
    args.iter().for_each(|(name, value)| table.write(name, value, &mut argv));
    if !launch.command.iter().any(|word| word.contains(PORT)) {
        let (host, of_port) = table.address;
        for (name, value) in [(host, "127.0.0.1".to_owned()), (of_port, port)] {
            if !flags.contains_key(name) {
                table.write(name, &ArgValue::Text(value), &mut argv);
            }
        }
    }
    Ok(argv)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn launch(command: &str, gpu: &[u16]) -> Launch {
        let command: Vec<String> = command.split(' ').map(str::to_owned).collect();
        let gpu = gpu.iter().copied().map(sluice_config::Gpu::Index).collect();
        Launch { gpu, ..Launch::of(command.into(), 8_001) }
    }

    fn planned(engine: EngineKind, launch: &Launch, json: &str) -> Result<String, String> {
        let settings = EngineSettings { args: serde_json::from_str(json).unwrap() };
        let table = engine.rules().flags.unwrap();
        let argv = argv(engine, table, (launch, &settings), None).map_err(|failure| failure.to_string())?;
        Ok(argv[1..].join(" "))
    }

    #[test]
    fn each_kind_gets_its_own_words_and_its_own_flags_of_the_address() {
        let sglang = launch("sh -m sglang.launch_server --model-path m", &[]);
        let words = planned(EngineKind::Sglang, &sglang, r#"{"max_running_requests": 32, "enable-metrics": true}"#);
        let wanted = "-m sglang.launch_server --model-path m --enable-metrics --max-running-requests=32 --host=127.0.0.1 --port=8001";
        assert_eq!(words.as_deref(), Ok(wanted));
        let triton = planned(EngineKind::Triton, &launch("sh", &[]), r#"{"allow-grpc": false, "http-address": "::1"}"#);
        assert_eq!(triton.as_deref(), Ok("--allow-grpc=false --http-address=::1 --http-port=8001"));
        let flask =
            planned(EngineKind::Serial, &launch("sh run -b 127.0.0.1:{port} app:app", &[]), r#"{"workers": 1}"#);
        assert_eq!(flask.as_deref(), Ok("run -b 127.0.0.1:8001 app:app --workers 1"));
        // vLLM has the first flag with another type, and the rules of vLLM would refuse the other
        // two together.
        let own = r#"{"max-num-seqs": "x", "max-num-batched-tokens": 1, "tensor-parallel-size": 8}"#;
        assert!(planned(EngineKind::OpenAi, &launch("sh run", &[0]), own).is_ok());
    }

    #[test]
    fn errors_are_those_of_the_kind() {
        let llama = |words: &str, json: &str| planned(EngineKind::LlamaCpp, &launch(words, &[]), json).unwrap_err();
        assert!(llama("sh", r#"{"parallel": "many"}"#).contains("parallel = many: the flag takes a whole number"));
        assert!(llama("sh", r#"{"port": 9000}"#).contains("contradicts launch.port = 8001"));
        assert!(llama("sh", r#"{"ssl-key-file": "k.pem"}"#).contains("plain HTTP; remove ssl-key-file"));
        let missing = llama("sh", r#"{"model": "/nonexistent/m.gguf"}"#);
        assert!(missing.contains("there is no /nonexistent/m.gguf") && missing.contains("a GGUF file"), "{missing}");
        let sglang = launch("sh -m sglang.launch_server --tp 2", &[0, 1]);
        let wide = planned(EngineKind::Sglang, &sglang, r#"{"pipeline-parallel-size": 2}"#).unwrap_err();
        assert!(wide.contains("tp-size 2 x pp-size 2 needs 4 devices, gpu lists 2"), "{wide}");
        let twice = planned(EngineKind::Triton, &launch("sh", &[1, 1]), "{}").unwrap_err();
        assert!(twice.contains("gpu lists device 1 twice"), "{twice}");
        let known = ["max-running-requests", "tp-size"].map(|name| (name.to_owned(), Vec::new()));
        let settings = EngineSettings { args: serde_json::from_str(r#"{"max-runing-requests": 1, "tp": 1}"#).unwrap() };
        let table = EngineKind::Sglang.rules().flags.unwrap();
        let refused = argv(EngineKind::Sglang, table, (&sglang, &settings), Some(&known.into())).unwrap_err();
        assert_eq!(refused.class, FailureClass::UnknownFlag);
        let text = refused.to_string();
        assert!(
            text.contains("this SGLang has no flag --max-runing-requests; did you mean max-running-requests?"),
            "{text}"
        );
    }

    #[test]
    fn sequences_are_read_from_the_command_and_from_settings() {
        let sequences = |engine: EngineKind, words: &str, json: &str| {
            let settings = EngineSettings { args: serde_json::from_str(json).unwrap() };
            super::sequences(engine.rules().flags.unwrap(), &launch(words, &[]), &settings)
        };
        assert_eq!(sequences(EngineKind::LlamaCpp, "/x/llama-server -m m.gguf -np 4", "{}"), Some(4));
        assert_eq!(sequences(EngineKind::LlamaCpp, "llama-server -np 4", r#"{"parallel": 2}"#), Some(2));
        assert_eq!(sequences(EngineKind::LlamaCpp, "llama-server -np -1", "{}"), None, "the program decides");
        assert_eq!(sequences(EngineKind::Sglang, "sglang serve --max-running-requests=9", "{}"), Some(9));
        assert_eq!(sequences(EngineKind::Triton, "tritonserver", "{}"), None);
    }
}
