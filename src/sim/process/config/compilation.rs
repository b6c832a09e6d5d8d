//! Whether steps are compiled, and which of them have CUDA graphs: `--optimization-level` and `--compilation-config`.
//!
//! The level sets defaults: 0 is neither compilation nor graphs, 1 is compilation with piecewise graphs, 2 and 3 add full
//! graphs. The config overrides them (`mode`, `cudagraph_mode`). Then vLLM leaves out what does not work: piecewise graphs
//! without its own compilation, any graphs with PyTorch's (`STOCK_TORCH_COMPILE`), and full graphs of steps that prefill
//! without FlashAttention 3, which needs a Hopper GPU.
//!
//! The config also has the sizes of graphs; see [`graphs`](super::graphs). Its other keys have no effect here.

use serde_json::Value;

use crate::machine::{Gpu, GraphMode};
use sluice_core::vllm::args::ServeArgs;

/// The keys that have an effect.
const EFFECTIVE: [&str; 4] = ["mode", "cudagraph_mode", "cudagraph_capture_sizes", "max_cudagraph_capture_size"];
/// The values of `mode`, by number, and three of these numbers.
const COMPILATION_MODES: [&str; 4] = ["NONE", "STOCK_TORCH_COMPILE", "DYNAMO_TRACE_ONCE", "VLLM_COMPILE"];
const NONE: usize = 0;
const STOCK_TORCH_COMPILE: usize = 1;
const VLLM_COMPILE: usize = 3;
/// The values of `cudagraph_mode`. The first three can also be given as numbers.
const GRAPH_MODES: [(&str, GraphMode); 5] = [
    ("NONE", GraphMode::None),
    ("PIECEWISE", GraphMode::Piecewise),
    ("FULL", GraphMode::Full),
    ("FULL_DECODE_ONLY", GraphMode::FullDecodeOnly),
    ("FULL_AND_PIECEWISE", GraphMode::FullAndPiecewise),
];
/// Parts of the names of Hopper GPUs.
const HOPPER: [&str; 4] = ["H100", "H200", "H800", "H20"];

/// The keys of `--compilation-config` that have an effect.
#[derive(Debug, Default)]
pub(super) struct CompilationConfig {
    mode: Option<usize>,
    graph_mode: Option<GraphMode>,
    /// `cudagraph_capture_sizes`
    pub(super) sizes: Option<Vec<i64>>,
    /// `max_cudagraph_capture_size`
    pub(super) largest: Option<i64>,
}

impl CompilationConfig {
    /// Reads the config from the flags.
    pub(super) fn read(args: &ServeArgs) -> Self {
        let config = object(args);
        let graph_mode = match &config["cudagraph_mode"] {
            Value::String(name) => GRAPH_MODES.iter().find(|(known, _)| name.eq_ignore_ascii_case(known)),
            number => number.as_u64().and_then(|number| GRAPH_MODES[..3].get(usize::try_from(number).ok()?)),
        };
        let mode = match &config["mode"] {
            Value::String(name) => COMPILATION_MODES.iter().position(|known| name.eq_ignore_ascii_case(known)),
            number => number.as_u64().and_then(|number| usize::try_from(number).ok()),
        };
        let sizes = config["cudagraph_capture_sizes"].as_array();
        Self {
            mode,
            graph_mode: graph_mode.map(|(_, mode)| *mode),
            sizes: sizes.map(|sizes| sizes.iter().filter_map(Value::as_i64).collect()),
            largest: config["max_cudagraph_capture_size"].as_i64(),
        }
    }

    /// Whether steps are compiled, and which have graphs.
    pub(super) fn resolve(&self, args: &ServeArgs, gpu: &Gpu) -> (bool, GraphMode) {
        let level = args.text("optimization-level").and_then(|level| level.trim().parse().ok()).unwrap_or(2);
        let default = match level {
            0 => (NONE, GraphMode::None),
            1 => (VLLM_COMPILE, GraphMode::Piecewise),
            _ => (VLLM_COMPILE, GraphMode::FullAndPiecewise),
        };
        let mode = self.mode.unwrap_or(default.0);
        let own = mode == VLLM_COMPILE;
        let graphs = self.graph_mode.unwrap_or(default.1);
        let graphs = if own { graphs } else { graphs.without_piecewise() };
        let graphs = match graphs {
            _ if mode == STOCK_TORCH_COMPILE => GraphMode::None,
            GraphMode::Full if HOPPER.iter().any(|name| gpu.title.contains(name)) => GraphMode::Full,
            GraphMode::Full if own => GraphMode::FullAndPiecewise,
            GraphMode::Full => GraphMode::FullDecodeOnly,
            graphs => graphs,
        };
        (mode != NONE, graphs)
    }
}

/// The keys of the config that have no effect, as `flag.key`.
pub(super) fn without_effect(args: &ServeArgs) -> Vec<String> {
    let config = object(args);
    let keys = config.as_object().into_iter().flat_map(serde_json::Map::keys);
    keys.filter(|key| !EFFECTIVE.contains(&key.as_str())).map(|key| format!("compilation-config.{key}")).collect()
}

fn object(args: &ServeArgs) -> Value {
    args.text("compilation-config").and_then(|text| serde_json::from_str(text).ok()).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn resolved(flags: &[&str], gpu: &str) -> (bool, GraphMode) {
        let args = ServeArgs::parse(&[&["m"], flags].concat()).unwrap();
        CompilationConfig::read(&args).resolve(&args, &Gpu::load(gpu).unwrap())
    }

    #[test]
    fn the_config_overrides_the_defaults_of_the_level() {
        for (flags, expected) in [
            (&[][..], (true, GraphMode::FullAndPiecewise)),
            (&["-O3"], (true, GraphMode::FullAndPiecewise)),
            (&["-O1"], (true, GraphMode::Piecewise)),
            (&["-O", "0"], (false, GraphMode::None)),
            (&["-O0", "-cc.mode=3"], (true, GraphMode::None)),
            (&["-O0", "-cc.cudagraph_mode=FULL"], (false, GraphMode::Full)),
            (&["-O1", "-cc.cudagraph_mode=full_and_piecewise"], (true, GraphMode::FullAndPiecewise)),
            (&["--compilation-config", r#"{"cudagraph_mode": 2}"#], (true, GraphMode::Full)),
            (&["--compilation-config.cudagraph_mode=FULL_DECODE_ONLY"], (true, GraphMode::FullDecodeOnly)),
            (&["-cc.cudagraph_mode", "none"], (true, GraphMode::None)),
            (&["-cc.cudagraph_mode", "null"], (true, GraphMode::FullAndPiecewise)),
        ] {
            assert_eq!(resolved(flags, "h200"), expected, "{flags:?}");
        }
    }

    #[test]
    fn what_does_not_work_together_is_left_out() {
        assert_eq!(resolved(&["-cc.mode=0"], "h200"), (false, GraphMode::FullDecodeOnly));
        assert_eq!(resolved(&["-cc.mode=none", "-O1"], "h200"), (false, GraphMode::None));
        assert_eq!(resolved(&["-cc.mode=stock_torch_compile"], "h200"), (true, GraphMode::None));
        assert_eq!(resolved(&["-cc.mode=2"], "h200"), (true, GraphMode::FullDecodeOnly));
        let full = "-cc.cudagraph_mode=FULL";
        assert_eq!(resolved(&[full], "h100-80"), (true, GraphMode::Full));
        assert_eq!(resolved(&[full], "a100-80"), (true, GraphMode::FullAndPiecewise));
        assert_eq!(resolved(&[full, "-cc.mode=0"], "l4"), (false, GraphMode::FullDecodeOnly));
    }
}
