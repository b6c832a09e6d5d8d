//! The start of vLLM as a list of events: phases with their log lines and durations on a GPU.
//!
//! The list depends on its arguments alone. The caller writes the lines and waits. Durations are
//! measured for an 8B model on an H200 (71-107 s cold, 54 s with a warm compile cache). For other
//! models they scale with weights and layers. A warm cache skips the compilation, `--enforce-eager`
//! and `-O0` skip compilation and graphs, `--compilation-config` can skip either. A compilation
//! without vLLM's own backend (`mode` 1 or 2) is assumed to take as long as a cold one. It logs and
//! caches nothing.
//!
//! | phase | 8B on an H200, seconds |
//! |---|---|
//! | imports and arguments | 13 |
//! | engine process | 12 |
//! | weights | 5 + weights / 4 GiB/s |
//! | compilation | Dynamo 4.6 + 14.8 for the graph, or + 4.2 to load it from the cache |
//! | profiling run | 2 |
//! | graphs | 0.003 for each graph and layer, piecewise or full; twice that with LoRA |

use std::time::Duration;

use crate::machine::{GIB, GraphMode};
use crate::observe::log::{Level, LogSource};
use crate::process::config::{Compilation, SimConfig};
use crate::process::refusal::{Refusal, Stage};

const READ_GIB_PER_S: f64 = 4.0;
const PROFILING: f64 = 2.0;
/// Layers of the model whose compilation was measured.
const LAYERS: f64 = 32.0;

/// One event of a start.
#[derive(Clone, Debug, PartialEq)]
pub enum Event {
    /// Time passes.
    Wait(Duration),
    /// A log line.
    Line(LogSource, Level, &'static str, String),
    /// The port is bound, but the server does not listen yet.
    Bind,
    /// The engine's process starts.
    Spawn,
    /// The graph is compiled and can be cached for the next start.
    Compiled,
}

/// Inputs of the start that are not settings.
#[derive(Clone, Debug)]
pub struct Surroundings<'a> {
    /// Whether the compile cache contains the graph.
    pub cached: bool,
    /// Folder of compiled graphs.
    pub cache: &'a str,
    /// The given arguments, for the log.
    pub arguments: &'a str,
    /// Address of the server.
    pub address: &'a str,
}

fn info(source_process: LogSource, source: &'static str, text: impl Into<String>) -> Event {
    Event::Line(source_process, Level::Info, source, text.into())
}

fn api(source: &'static str, text: impl Into<String>) -> Event {
    info(LogSource::ApiServer, source, text)
}

fn core(source: &'static str, text: impl Into<String>) -> Event {
    info(LogSource::EngineCore, source, text)
}

fn seconds(seconds: f64) -> Event {
    Event::Wait(Duration::from_secs_f64(seconds))
}

/// A number with commas, as Python's `:,` prints it.
fn commas(number: u64) -> String {
    let digits = number.to_string();
    let mut out = String::new();
    for (at, digit) in digits.chars().enumerate() {
        if at > 0 && (digits.len() - at).is_multiple_of(3) {
            out.push(',');
        }
        out.push(digit);
    }
    out
}

/// The start of this server, until it listens.
pub fn plan(config: &SimConfig, around: &Surroundings<'_>) -> Vec<Event> {
    let mut events = beginning(config, around);
    events.extend(loading(config));
    let compilation = compiling(config, around, &mut events);
    events.push(seconds(PROFILING));
    let logged = config.compilation == Compilation::Vllm;
    if logged {
        events.push(core("monitor.py:81", "Initial profiling/warmup run took 2.00 s"));
    }
    events.extend(sizing(config));
    let graphs = if config.eager { 0.0 } else { capturing(config, &mut events) };
    let compiled = if logged { format!(" (compilation: {compilation:.2} s)") } else { String::new() };
    let took = compilation + graphs + PROFILING;
    events.push(core(
        "core.py:402",
        format!("init engine (profile, create kv cache, warmup model) took {took:.2} s{compiled}"),
    ));
    events.extend(serving(config, around));
    events
}

/// Adds the compilation of the graph, if there is one; returns the seconds.
fn compiling(config: &SimConfig, around: &Surroundings<'_>, events: &mut Vec<Event>) -> f64 {
    let layers = f64::from(config.profile.shape.layers) / LAYERS;
    let range = format!("compile range (1, {})", config.engine.max_num_batched_tokens);
    let dynamo = 4.6 * layers;
    let cold = 14.77 * layers;
    match config.compilation {
        Compilation::None => return 0.0,
        Compilation::PyTorch => {
            events.push(seconds(dynamo + cold));
            return dynamo + cold;
        }
        Compilation::Vllm => {}
    }
    let graph = if around.cached { 4.19 * layers } else { cold };
    let compiled = match around.cached {
        true => core(
            "backends.py:354",
            format!("Directly load the compiled graph(s) for {range} from the cache, took {graph:.3} s"),
        ),
        false => core("backends.py:370", format!("Compiling a graph for {range} takes {graph:.2} s")),
    };
    events.extend([
        seconds(dynamo),
        core("backends.py:1090", format!("Using cache directory: {} for vLLM's torch.compile", around.cache)),
        core("backends.py:1110", format!("Dynamo bytecode transform time: {dynamo:.2} s")),
        seconds(graph),
        compiled,
        core("monitor.py:53", format!("torch.compile took {:.2} s in total", dynamo + graph)),
        Event::Compiled,
    ]);
    dynamo + graph
}

fn sizing(config: &SimConfig) -> Vec<Event> {
    let tokens = u64::from(config.engine.num_blocks) * u64::from(crate::engine::BLOCK_TOKENS);
    let mut events = Vec::new();
    if let Some(budget) = config.budget {
        events.push(core("gpu_worker.py:529", format!("Available KV cache memory: {:.2} GiB", budget.available / GIB)));
    }
    events.push(core(
        "kv_cache_utils.py:2327",
        format!(
            "GPU KV cache size: {} tokens, Maximum concurrency for {} tokens per request: {:.2}x",
            commas(tokens),
            commas(u64::from(config.max_model_len)),
            tokens as f64 / f64::from(config.max_model_len)
        ),
    ));
    events
}

/// Adds the capture of CUDA graphs; returns the seconds.
fn capturing(config: &SimConfig, events: &mut Vec<Event>) -> f64 {
    let (piecewise, full) = config.graphs.counts();
    if piecewise + full == 0 {
        // 0.22 has the second text, 0.32 the first.
        let (source, text) = if config.version.since(23) {
            let text = "Skipping encoder and decoder CUDA graph capture. To enable encoder capture, ensure \
                        `cudagraph_mm_encoder` is enabled; to enable decoder capture, ensure `cudagraph_mode` is not \
                        `NONE`.";
            ("model_runner.py:1062", text)
        } else {
            let text = "Skipping CUDA graph capture. To turn on CUDA graph capture, ensure `cudagraph_mode` was not \
                        manually set to `NONE`";
            ("gpu_model_runner.py:6375", text)
        };
        events.push(Event::Line(LogSource::EngineCore, Level::Warning, source, text.to_owned()));
        return 0.0;
    }
    let sets = if config.lora { 2.0 } else { 1.0 };
    let each = sets * 0.003 * f64::from(config.profile.shape.layers);
    let full_steps = if config.graphs.mode() == GraphMode::Full { "mixed prefill-decode" } else { "decode" };
    let mut took = 0.0;
    for (count, steps, kind) in [(piecewise, "mixed prefill-decode", "PIECEWISE"), (full, full_steps, "FULL")] {
        if count > 0 {
            let line = format!("Capturing CUDA graphs ({steps}, {kind})");
            let time = each * count as f64;
            events.extend([core("gpu_model_runner.py:6420", line), seconds(time)]);
            took += time;
        }
    }
    let gib = config.budget.map_or(0.0, |budget| budget.graphs) / GIB;
    events.push(core(
        "gpu_model_runner.py:6512",
        format!("Graph capturing finished in {took:.0} secs, took {gib:.2} GiB"),
    ));
    took
}

fn beginning(config: &SimConfig, around: &Surroundings<'_>) -> Vec<Event> {
    let (version, model) = (config.version, &config.root);
    let length = config.max_model_len;
    let banner = format!(
        "\n       █     █     █▄   ▄█\n ▄▄ ▄█ █     █     █ ▀▄▀ █  version {version}\n  █▄█▀ █     █     █     █  model   {model}\n   ▀▀  \
         ▀▀▀▀▀ ▀▀▀▀▀ ▀     ▀\n"
    );
    let mut events = vec![
        seconds(13.0),
        api("api_utils.py:347", banner),
        api("api_utils.py:286", format!("non-default args: {{{}}}", around.arguments)),
        Event::Bind,
        seconds(1.0),
        api("model.py:733", "Resolved architecture: LlamaForCausalLM"),
        api("model.py:2152", format!("Using max model len {length}")),
    ];
    if config.engine.chunked_prefill {
        let budget = config.engine.max_num_batched_tokens;
        events
            .push(api("scheduler.py:312", format!("Chunked prefill is enabled with max_num_batched_tokens={budget}.")));
    }
    if config.eager {
        let text = "Enforce eager set, disabling torch.compile, CUDAGraphs, and JIT kernel warmup. This is equivalent to \
                    setting -cc.mode=none -cc.cudagraph_mode=none and --kernel_config.enable_jit_warmup=False";
        events.push(Event::Line(LogSource::ApiServer, Level::Warning, "vllm.py:1703", text.to_owned()));
    }
    events.extend([
        Event::Spawn,
        seconds(12.0),
        core(
            "core.py:133",
            format!(
                "Initializing a V1 LLM engine (v{version}) with config: model='{model}', tokenizer='{model}', \
                 dtype=torch.bfloat16, max_seq_len={length}, tensor_parallel_size={}, enforce_eager={}, \
                 served_model_name={}, enable_prefix_caching={}, enable_chunked_prefill={}",
                config.profile.layout.tensor_parallel,
                python(config.eager),
                config.names.first().map_or("", String::as_str),
                python(config.engine.prefix_caching),
                python(config.engine.chunked_prefill)
            ),
        ),
    ]);
    events
}

fn python(truth: bool) -> &'static str {
    if truth { "True" } else { "False" }
}

fn loading(config: &SimConfig) -> Vec<Event> {
    let gib = config.weights_gib();
    let reading = gib / READ_GIB_PER_S;
    vec![
        core("gpu_model_runner.py:5120", format!("Starting to load model {}...", config.root)),
        seconds(reading),
        core("default_loader.py:430", format!("Loading weights took {reading:.2} seconds")),
        seconds(5.0),
        core(
            "gpu_model_runner.py:5180",
            format!("Model loading took {gib:.2} GiB memory and {:.2} seconds", reading + 5.0),
        ),
    ]
}

fn serving(config: &SimConfig, around: &Surroundings<'_>) -> Vec<Event> {
    let mut events = vec![seconds(1.0), api("entry.py:136", "Supported tasks: ['generate']")];
    let warning = |source, text: &str| Event::Line(LogSource::ApiServer, Level::Warning, source, text.to_owned());
    if config.runtime_lora && config.lora {
        let text = "LoRA dynamic loading & unloading is enabled in the API server. This should ONLY be used for local \
                    development!";
        events.push(warning("api_router.py:33", text));
    }
    if config.dev_mode {
        let text = "SECURITY WARNING: Development endpoints are enabled! This should NOT be used in production!";
        events.push(warning("__init__.py:44", text));
    }
    for (name, path) in &config.adapters {
        events.push(api("serving.py:226", format!("Loaded new LoRA adapter: name '{name}', path '{path}'")));
    }
    let verb = if config.version.since(17) { "vLLM server" } else { "vLLM API server 0" };
    events.push(api("entry.py:140", format!("Starting {verb} on http://{}", around.address)));
    events.push(api("launcher.py:186", "Available routes are:"));
    for (path, methods) in crate::http::routes::listed(config) {
        events.push(api("launcher.py:195", format!("Route: {path}, Methods: {}", methods.join(", "))));
    }
    events
}

/// The start of a server that is refused. `events`: the start with the nearest valid settings,
/// which is cut off at the stage at which vLLM reports the error.
pub fn refused(events: Vec<Event>, refusal: &Refusal) -> Vec<Event> {
    let ends = |event: &Event| match (refusal.stage(), event) {
        (Stage::Arguments, Event::Line(..)) | (Stage::Settings, Event::Bind) => true,
        (Stage::Memory, Event::Line(LogSource::EngineCore, _, source, _)) => *source == "gpu_model_runner.py:5120",
        (Stage::Weights, Event::Line(_, _, source, _)) => *source == "default_loader.py:430",
        (Stage::Cache, Event::Line(_, _, source, _)) => *source == "kv_cache_utils.py:2327",
        (Stage::WarmUp, Event::Line(_, _, source, _)) => *source == "core.py:402",
        (Stage::Adapters, Event::Line(_, _, source, _)) => *source == "serving.py:226" || *source == "entry.py:140",
        _ => false,
    };
    let end = events.iter().position(ends).unwrap_or(events.len());
    let mut events: Vec<Event> = events.into_iter().take(end).collect();
    if refusal.is_engine() {
        let error = |text: String| Event::Line(LogSource::EngineCore, Level::Error, "core.py:1510", text);
        if let Some(line) = refusal.log_line() {
            events.push(Event::Line(LogSource::EngineCore, Level::Error, "gpu_model_runner.py:5201", line.to_owned()));
        }
        events.push(error("EngineCore failed to start.".to_owned()));
        events.push(error(format!("Traceback (most recent call last):\n{refusal}")));
    }
    events
}

/// Duration of a start.
pub fn length(events: &[Event]) -> Duration {
    events.iter().map(|event| if let Event::Wait(time) = event { *time } else { Duration::ZERO }).sum()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Profile;
    use sluice_core::vllm::args::ServeArgs;
    use sluice_core::vllm::version::Version;

    fn start(flags: &[&str], cached: bool) -> Vec<Event> {
        let args = ServeArgs::parse(flags).unwrap();
        let config = SimConfig::from_args(&args, Profile::named("h200-llama-8b").unwrap()).unwrap();
        plan(&config, &Surroundings { cached, cache: "/cache", arguments: "", address: "0.0.0.0:8000" })
    }

    #[test]
    fn starts_take_as_long_as_measured() {
        let took = |flags: &[&str], cached| length(&start(flags, cached)).as_secs_f64();
        let seqs = &["m", "--max-num-seqs", "256"];
        let (cold, warm) = (took(seqs, false), took(seqs, true));
        assert!((65.0..107.0).contains(&cold), "{cold}");
        assert!((50.0..60.0).contains(&warm), "{warm}");
        assert!(took(&["m", "--enforce-eager"], false) < warm - 10.0);
        assert!(took(&["m", "--enable-lora"], true) > warm);
    }

    #[test]
    fn phases_come_in_vllms_order() {
        let text: Vec<String> = start(&["m"], false)
            .into_iter()
            .filter_map(|event| if let Event::Line(_, _, _, text) = event { Some(text) } else { None })
            .collect();
        let text = text.join("\n");
        let mut at = 0;
        for line in [
            "version 0.32.0",
            "non-default args: ",
            "Chunked prefill is enabled with max_num_batched_tokens=8192.",
            "Initializing a V1 LLM engine (v0.32.0) with config: model='m'",
            "Starting to load model m...",
            "Model loading took 1",
            "Dynamo bytecode transform time: 4.60 s",
            "Compiling a graph for compile range (1, 8192) takes 14.77 s",
            "torch.compile took 19.37 s in total",
            "Available KV cache memory: ",
            "GPU KV cache size: ",
            "Graph capturing finished in ",
            "init engine (profile, create kv cache, warmup model) took ",
            "Supported tasks: ['generate']",
            "Starting vLLM server on http://0.0.0.0:8000",
            "Route: /v1/chat/completions, Methods: POST",
        ] {
            let found = text[at..].find(line);
            assert!(found.is_some(), "{line} after {}", &text[at..(at + 80).min(text.len())]);
            at += found.unwrap();
        }
    }

    #[test]
    fn what_is_not_captured_is_not_logged() {
        let texts = |flags: &[&str]| -> Vec<String> {
            let lines = start(&[&["m", "--max-num-seqs", "256"], flags].concat(), true).into_iter();
            let texts = lines.filter_map(|event| if let Event::Line(.., text) = event { Some(text) } else { None });
            texts.filter(|text| text.contains("aptur") || text.contains("nforce") || text.contains("Dynamo")).collect()
        };
        let dynamo = "Dynamo bytecode transform time: 4.60 s";
        for (flags, expected) in [
            (&["-O1"][..], &[dynamo, "Capturing CUDA graphs (mixed prefill-decode, PIECEWISE)", "in 5 secs"][..]),
            (&["-cc.cudagraph_mode=FULL"], &[dynamo, "graphs (mixed prefill-decode, FULL)", "in 5 secs"]),
            (&["-cc.cudagraph_mode=FULL_DECODE_ONLY"], &[dynamo, "graphs (decode, FULL)", "in 3 secs"]),
            (&["-cc.cudagraph_mode=NONE"], &[dynamo, "Skipping encoder and decoder CUDA graph capture."]),
            (&["-cc.mode=0"], &["graphs (decode, FULL)", "in 3 secs"]),
            (&["-cc.mode=2"], &["graphs (decode, FULL)", "in 3 secs"]),
            (&[], &[dynamo, "graphs (mixed prefill-decode, PIECEWISE)", "graphs (decode, FULL)", "in 8 secs"]),
            (&["-O0"], &["Skipping encoder and decoder CUDA graph capture."]),
        ] {
            let found = texts(flags);
            let found: Vec<&String> = found.iter().filter(|text| !text.contains("enforce_eager=False")).collect();
            assert_eq!(found.len(), expected.len(), "{flags:?}: {found:?}");
            assert!(found.iter().zip(expected).all(|(text, part)| text.contains(part)), "{flags:?}: {found:?}");
        }
        let eager = texts(&["--enforce-eager"]);
        assert!(
            eager.len() == 2 && eager[0].starts_with("Enforce eager set") && eager[1].contains("enforce_eager=True")
        );
    }

    #[test]
    fn only_vllms_own_compilation_is_logged_and_cached() {
        for (mode, own) in [("0", false), ("1", false), ("2", false), ("3", true)] {
            let events = start(&["m", &format!("-cc.mode={mode}")], false);
            let about =
                ["cache directory", "compile range", "torch.compile took", "Initial profiling", "(compilation: "];
            for part in about {
                let logged = events.iter().any(|event| matches!(event, Event::Line(.., text) if text.contains(part)));
                assert_eq!(logged, own, "{mode}: {part}");
            }
            assert_eq!(events.contains(&Event::Compiled), own, "{mode}");
            let warm = length(&start(&["m", &format!("-cc.mode={mode}")], true));
            assert_eq!(warm < length(&events), own, "{mode}");
        }
    }

    #[test]
    fn the_line_about_no_graphs_is_that_of_the_version() {
        let args = ServeArgs::parse(&["m", "-O0"]).unwrap();
        let mut config = SimConfig::from_args(&args, Profile::named("h200-llama-8b").unwrap()).unwrap();
        config.version = Version::new(0, 22, 1);
        let events = plan(&config, &Surroundings { cached: true, cache: "", arguments: "", address: "" });
        let skipped =
            |event: &Event| matches!(event, Event::Line(.., text) if text.starts_with("Skipping CUDA graph c"));
        assert!(events.iter().any(skipped));
    }

    #[test]
    fn a_refused_start_ends_where_it_is_noticed() {
        let refusal = Refusal::too_long(4096, 16, 1e6, 1e6);
        let events = refused(start(&["m"], false), &refusal);
        let last: Vec<_> = events.iter().rev().take(2).collect();
        assert!(
            matches!(last[0], Event::Line(LogSource::EngineCore, Level::Error, _, text) if text.contains("max seq len (4096)"))
        );
        assert!(events.iter().any(|event| matches!(event, Event::Compiled)));
        assert!(!events.iter().any(|event| matches!(event, Event::Line(_, _, "core.py:402", _))));
    }

    #[test]
    fn numbers_are_grouped() {
        assert_eq!([7, 1234, 2_097_152].map(commas), ["7", "1,234", "2,097,152"]);
    }
}
