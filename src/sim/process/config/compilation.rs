//! Whether steps are compiled, and which steps have CUDA graphs: `--optimization-level` and
//! `--compilation-config`.
//!
//! The level sets defaults: 0 is neither compilation nor graphs, 1 is compilation with piecewise
//! graphs, 2 and 3 add full graphs. The config overrides them (`mode`, `cudagraph_mode`). Then vLLM
//! removes combinations that do not work: piecewise graphs without vLLM's own compilation, all
//! graphs with PyTorch's (`STOCK_TORCH_COMPILE`), and full graphs of steps that prefill without
//! FlashAttention 3, which needs a Hopper GPU. A pooling model gets piecewise graphs in place of
//! full ones. If vLLM's own compilation is then missing, the server does not start.
//!
//! Other keys (except the sizes, see [`graphs`](super::graphs)) have no effect, and unknown keys
//! are not refused. As in vLLM, the config is checked before all other settings, the level after
//! the scheduler's limits, and only the first invalid value is reported.

use serde_json::Value;

use crate::machine::{Gpu, GraphMode};
use crate::process::refusal::{Refusal, Stage};
use crate::validate::pydantic::{repr, shown};
use sluice_core::vllm::args::ServeArgs;

const EFFECTIVE: [&str; 4] = ["mode", "cudagraph_mode", "cudagraph_capture_sizes", "max_cudagraph_capture_size"];
/// The values of `mode`, by number. Three of the numbers have a name below.
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

/// The compiler of steps: `mode` of the compilation config.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Compilation {
    /// No compiler.
    None,
    /// PyTorch alone: `STOCK_TORCH_COMPILE` or `DYNAMO_TRACE_ONCE`.
    PyTorch,
    /// vLLM's own backend, with its cache: `VLLM_COMPILE`.
    Vllm,
}

#[derive(Debug, Default)]
pub(super) struct CompilationConfig {
    mode: Option<usize>,
    graph_mode: Option<GraphMode>,
    pub(super) sizes: Option<Vec<i64>>,
    /// `max_cudagraph_capture_size`
    pub(super) largest: Option<i64>,
}

impl CompilationConfig {
    /// # Errors
    /// A value of the wrong type or out of range. For an unknown name of a graph mode, the
    /// exception that vLLM does not catch.
    pub(super) fn read(args: &ServeArgs) -> Result<Self, Refusal> {
        let Some(text) = args.text("compilation-config") else { return Ok(Self::default()) };
        let config: Value = serde_json::from_str(text).unwrap_or_default();
        if !config.is_object() {
            return Err(invalid(None, "Input should be an object", "dataclass_type", &config));
        }
        let given = |key| Some(&config[key]).filter(|value| !value.is_null());
        let sizes = config.get("cudagraph_capture_sizes").map(capture_sizes).transpose()?;
        Ok(Self {
            mode: given("mode").map(compilation_mode).transpose()?,
            graph_mode: given("cudagraph_mode").map(graph_mode).transpose()?,
            sizes,
            largest: given("max_cudagraph_capture_size")
                .map(|size| integer("max_cudagraph_capture_size", size))
                .transpose()?,
        })
    }

    pub(super) fn resolve(&self, level: usize, gpu: &Gpu, pooling: bool) -> (Compilation, GraphMode) {
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
            // With any other compilation the caller refuses this mode.
            GraphMode::Full | GraphMode::FullDecodeOnly | GraphMode::FullAndPiecewise if pooling => {
                GraphMode::Piecewise
            }
            _ if mode == STOCK_TORCH_COMPILE => GraphMode::None,
            GraphMode::Full if HOPPER.iter().any(|name| gpu.title.contains(name)) => GraphMode::Full,
            GraphMode::Full if own => GraphMode::FullAndPiecewise,
            GraphMode::Full => GraphMode::FullDecodeOnly,
            graphs => graphs,
        };
        let compilation = match mode {
            NONE => Compilation::None,
            VLLM_COMPILE => Compilation::Vllm,
            _ => Compilation::PyTorch,
        };
        (compilation, graphs)
    }
}

pub(super) fn optimization_level(args: &ServeArgs) -> Result<usize, Refusal> {
    let Some(text) = args.text("optimization-level") else { return Ok(2) };
    number(&Value::from(text)).filter(|level| *level <= 3).ok_or_else(|| Refusal::Bound {
        class: "VllmConfig",
        field: "optimization_level",
        bound: "0, 1, 2 or 3".to_owned(),
        kind: "enum",
        value: repr(text),
        value_type: "str",
    })
}

/// Whether the model returns vectors and generates nothing.
pub(super) fn pooling(args: &ServeArgs) -> bool {
    args.text("runner") == Some("pooling") || args.text("convert") == Some("embed")
}

/// The given keys of the config that have no effect, as `flag.key`.
pub(super) fn without_effect(args: &ServeArgs) -> Vec<String> {
    let config: Option<Value> = args.text("compilation-config").and_then(|text| serde_json::from_str(text).ok());
    let keys = config.iter().filter_map(Value::as_object).flat_map(serde_json::Map::keys);
    keys.filter(|key| !EFFECTIVE.contains(&key.as_str())).map(|key| format!("compilation-config.{key}")).collect()
}

fn compilation_mode(value: &Value) -> Result<usize, Refusal> {
    if let Value::String(name) = value {
        let found = COMPILATION_MODES.iter().position(|known| name.eq_ignore_ascii_case(known));
        return found.ok_or_else(|| {
            let known = COMPILATION_MODES.join(", ");
            let text = format!("Value error, Invalid compilation mode: {name}. Valid modes are: {known}");
            invalid(Some("mode"), &text, "value_error", value)
        });
    }
    let found = number(value).filter(|mode| *mode < COMPILATION_MODES.len());
    found.ok_or_else(|| invalid(Some("mode"), "Input should be 0, 1, 2 or 3", "enum", value))
}

fn capture_sizes(value: &Value) -> Result<Vec<i64>, Refusal> {
    const FIELD: &str = "cudagraph_capture_sizes";
    let Value::Array(sizes) = value else {
        return Err(invalid(Some(FIELD), "Input should be a valid array", "list_type", value));
    };
    sizes.iter().enumerate().map(|(at, size)| integer(&format!("{FIELD}.{at}"), size)).collect()
}

fn graph_mode(value: &Value) -> Result<GraphMode, Refusal> {
    if let Value::String(name) = value {
        let name = name.to_uppercase();
        let found = GRAPH_MODES.iter().find(|(known, _)| name == *known).map(|(_, mode)| *mode);
        return found.ok_or_else(|| Refusal::Other { kind: "KeyError", text: repr(&name), stage: Stage::Arguments });
    }
    let found = number(value).and_then(|mode| GRAPH_MODES[..3].get(mode)).map(|(_, mode)| *mode);
    let text = "Input should be 0, 1, 2, (2, 0) or (2, 1)";
    found.ok_or_else(|| invalid(Some("cudagraph_mode"), text, "enum", value))
}

fn number(value: &Value) -> Option<usize> {
    integer("", value).ok().and_then(|number| usize::try_from(number).ok())
}

fn integer(field: &str, value: &Value) -> Result<i64, Refusal> {
    // A number out of range becomes the nearest number in range.
    let whole = |number: f64| (number.fract() == 0.0).then_some(number as i64);
    let (found, text, kind) = match value {
        Value::Bool(truth) => (Some(i64::from(*truth)), "", ""),
        Value::Number(number) => {
            let found = number.as_i64().or_else(|| number.as_f64().and_then(whole));
            (found, ", got a number with a fractional part", "int_from_float")
        }
        Value::String(text) => {
            let digits = text.trim();
            // `2.0` is a whole number; `2.5` and `1e0` are not.
            let digits = digits
                .split_once('.')
                .map_or(digits, |(whole, zeros)| if zeros.bytes().all(|byte| byte == b'0') { whole } else { digits });
            (digits.parse().ok(), ", unable to parse string as an integer", "int_parsing")
        }
        _ => (None, "", "int_type"),
    };
    found.ok_or_else(|| invalid(Some(field), &format!("Input should be a valid integer{text}"), kind, value))
}

/// An error of pydantic about the config, in the form in which argparse reports it.
fn invalid(field: Option<&str>, text: &str, kind: &str, value: &Value) -> Refusal {
    let (field, input) = (field.map(|field| format!("{field}\n")).unwrap_or_default(), notation(value));
    let input_type = match value {
        Value::Null => "NoneType",
        Value::Bool(_) => "bool",
        Value::Number(number) if number.is_f64() => "float",
        Value::Number(_) => "int",
        Value::String(_) => "str",
        Value::Array(_) => "list",
        Value::Object(_) => "dict",
    };
    Refusal::Argument(format!(
        "--compilation-config/-cc: 1 validation error for CompilationConfig\n{field}  {text} [type={kind}, \
         input_value={input}, input_type={input_type}]\n    For further information visit \
         https://errors.pydantic.dev/2.14/v/{kind}"
    ))
}

fn notation(value: &Value) -> String {
    match value {
        Value::String(text) => repr(text),
        Value::Array(items) => format!("[{}]", items.iter().map(notation).collect::<Vec<_>>().join(", ")),
        Value::Object(fields) => {
            let fields = fields.iter().map(|(key, value)| format!("{}: {}", repr(key), notation(value)));
            format!("{{{}}}", fields.collect::<Vec<_>>().join(", "))
        }
        other => shown(other),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const VLLM: Compilation = Compilation::Vllm;

    fn resolved(flags: &[&str], gpu: &str) -> (Compilation, GraphMode) {
        let args = ServeArgs::parse(&[&["m"], flags].concat()).unwrap();
        let (level, gpu) = (optimization_level(&args).unwrap(), Gpu::load(gpu).unwrap());
        CompilationConfig::read(&args).unwrap().resolve(level, &gpu, pooling(&args))
    }

    #[test]
    fn the_config_overrides_the_defaults_of_the_level() {
        for (flags, expected) in [
            (&[][..], (VLLM, GraphMode::FullAndPiecewise)),
            (&["-O3"], (VLLM, GraphMode::FullAndPiecewise)),
            (&["-O1"], (VLLM, GraphMode::Piecewise)),
            (&["-O", "0"], (Compilation::None, GraphMode::None)),
            (&["-O0", "-cc.mode=3"], (VLLM, GraphMode::None)),
            (&["-O0", "-cc.cudagraph_mode=FULL"], (Compilation::None, GraphMode::Full)),
            (&["-O1", "-cc.cudagraph_mode=full_and_piecewise"], (VLLM, GraphMode::FullAndPiecewise)),
            (&["--compilation-config", r#"{"cudagraph_mode": 2}"#], (VLLM, GraphMode::Full)),
            (&["--compilation-config.cudagraph_mode=FULL_DECODE_ONLY"], (VLLM, GraphMode::FullDecodeOnly)),
            (&["-cc.cudagraph_mode", "none"], (VLLM, GraphMode::None)),
            (&["-cc.cudagraph_mode", "null"], (VLLM, GraphMode::FullAndPiecewise)),
        ] {
            assert_eq!(resolved(flags, "h200"), expected, "{flags:?}");
        }
    }

    #[test]
    fn what_does_not_work_together_is_left_out() {
        assert_eq!(resolved(&["-cc.mode=0"], "h200"), (Compilation::None, GraphMode::FullDecodeOnly));
        assert_eq!(resolved(&["-cc.mode=none", "-O1"], "h200"), (Compilation::None, GraphMode::None));
        assert_eq!(resolved(&["-cc.mode=stock_torch_compile"], "h200"), (Compilation::PyTorch, GraphMode::None));
        assert_eq!(resolved(&["-cc.mode=2"], "h200"), (Compilation::PyTorch, GraphMode::FullDecodeOnly));
        let full = "-cc.cudagraph_mode=FULL";
        assert_eq!(resolved(&[full], "h100-80"), (VLLM, GraphMode::Full));
        assert_eq!(resolved(&[full], "a100-80"), (VLLM, GraphMode::FullAndPiecewise));
        assert_eq!(resolved(&[full, "-cc.mode=0"], "l4"), (Compilation::None, GraphMode::FullDecodeOnly));
    }

    #[test]
    fn pooling_models_have_no_full_graphs() {
        for pooling in [["--runner", "pooling"], ["--convert", "embed"]] {
            for mode in ["FULL_AND_PIECEWISE", "FULL", "FULL_DECODE_ONLY", "PIECEWISE"] {
                let part = format!("-cc.cudagraph_mode={mode}");
                assert_eq!(resolved(&[&[part.as_str()], &pooling[..]].concat(), "h200"), (VLLM, GraphMode::Piecewise));
            }
            assert_eq!(resolved(&[&["-O0"], &pooling[..]].concat(), "h200"), (Compilation::None, GraphMode::None));
        }
    }

    /// The texts are from vLLM 0.32.
    #[test]
    fn invalid_values_are_refused_with_vllms_messages() {
        let read = |flags: &[&str]| {
            let args = ServeArgs::parse(&[&["m"], flags].concat()).unwrap();
            CompilationConfig::read(&args).and_then(|_| optimization_level(&args)).unwrap_err()
        };
        let key_error = read(&["-cc.cudagraph_mode=bogus"]);
        assert_eq!((key_error.to_string().as_str(), key_error.stage()), ("KeyError: 'BOGUS'", Stage::Arguments));
        let tail =
            |kind: &str| format!("\n    For further information visit https://errors.pydantic.dev/2.14/v/{kind}");
        for (part, field, text, kind) in [
            (
                "cudagraph_mode=7",
                "cudagraph_mode",
                "0, 1, 2, (2, 0) or (2, 1) [type=enum, input_value=7, input_type=int]",
                "enum",
            ),
            (
                "cudagraph_mode=[2,0]",
                "cudagraph_mode",
                "0, 1, 2, (2, 0) or (2, 1) [type=enum, input_value=[2, 0], input_type=list]",
                "enum",
            ),
            ("mode=4", "mode", "0, 1, 2 or 3 [type=enum, input_value=4, input_type=int]", "enum"),
            (
                "max_cudagraph_capture_size=a",
                "max_cudagraph_capture_size",
                "a valid integer, unable to parse string as an integer [type=int_parsing, input_value='a', \
                 input_type=str]",
                "int_parsing",
            ),
            (
                "cudagraph_capture_sizes=[8,1.5]",
                "cudagraph_capture_sizes.1",
                "a valid integer, got a number with a fractional part [type=int_from_float, input_value=1.5, \
                 input_type=float]",
                "int_from_float",
            ),
            (
                "cudagraph_capture_sizes=null",
                "cudagraph_capture_sizes",
                "a valid array [type=list_type, input_value=None, input_type=NoneType]",
                "list_type",
            ),
        ] {
            let head = "argument --compilation-config/-cc: 1 validation error for CompilationConfig";
            let expected = format!("{head}\n{field}\n  Input should be {text}{}", tail(kind));
            assert_eq!(read(&[&format!("-cc.{part}")]), Refusal::Argument(expected["argument ".len()..].to_owned()));
        }
        assert!(read(&["-cc.mode=x"]).to_string().contains(
            "\nmode\n  Value error, Invalid compilation mode: x. Valid modes are: NONE, STOCK_TORCH_COMPILE, \
             DYNAMO_TRACE_ONCE, VLLM_COMPILE [type=value_error, input_value='x', input_type=str]"
        ));
        assert!(read(&["--compilation-config", "[1]"]).to_string().contains("Config\n  Input should be an object ["));
        for level in ["4", "-1", "decode", "2.5"] {
            let expected = format!(
                "pydantic_core._pydantic_core.ValidationError: 1 validation error for VllmConfig\noptimization_level\n  \
                 Input should be 0, 1, 2 or 3 [type=enum, input_value='{level}', input_type=str]{}",
                tail("enum")
            );
            let refusal = read(&[&format!("-O{level}")]);
            assert_eq!((refusal.to_string(), refusal.stage()), (expected, Stage::Settings));
        }
        assert_eq!(
            resolved(&["-O=01", "-cc.mode=true", "-cc.cudagraph_mode=2.0"], "h200"),
            (Compilation::PyTorch, GraphMode::None)
        );
    }
}
