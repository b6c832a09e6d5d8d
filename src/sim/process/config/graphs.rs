//! CUDA graphs from flags: the steps with graphs, the sizes, and vLLM's errors about them.
//!
//! `--cudagraph-capture-sizes` lists the sizes. `--max-cudagraph-capture-size` bounds vLLM's own
//! list, which depends on `--performance-mode`. If both are given, they must agree. Each can
//! instead be a key of `--compilation-config`, but the flag and the key together are an error.
//! Without graphs (`--enforce-eager`, `-O0`) both are ignored.

use super::SimConfig;
use super::compilation::{Compilation, CompilationConfig, optimization_level, pooling};
use crate::machine::{GraphMode, Graphs};
use crate::process::refusal::{Refusal, Stage};
use sluice_core::vllm::args::ServeArgs;

impl SimConfig {
    /// Sets the compilation and the graphs. The limits of the scheduler must be read before.
    pub(super) fn read_graphs(&mut self, args: &ServeArgs, asked: &CompilationConfig) -> Result<(), Refusal> {
        let given = args.texts("cudagraph-capture-sizes");
        let given: Option<Vec<i64>> =
            (!given.is_empty()).then(|| given.iter().filter_map(|size| size.trim().parse().ok()).collect());
        let given = one_of("cudagraph_capture_sizes", given, asked.sizes.clone())?;
        let largest = one_of("max_cudagraph_capture_size", args.int("max-cudagraph-capture-size"), asked.largest)?;
        self.eager = args.switch("enforce-eager") == Some(true);
        let (compilation, mode) = asked.resolve(optimization_level(args)?, &self.profile.gpu, pooling(args));
        let off = (Compilation::None, GraphMode::None);
        let (compilation, mode) = if self.eager { off } else { (compilation, mode) };
        self.compilation = compilation;
        self.graphs = Graphs::none();
        if mode == GraphMode::None {
            return Ok(());
        }
        if largest.is_some_and(|largest| largest < 1) {
            return Err(assertion(
                "Maximum cudagraph size should be greater than or equal to 1 when using cuda graph.",
            ));
        }
        // A decode is computed together with its drafts.
        let query = 1 + self.engine.speculation.as_ref().map_or(0, |own| own.tokens);
        let seqs = self.engine.max_num_seqs.saturating_mul(query);
        let tokens = self.engine.max_num_batched_tokens;
        let whole = |size: i64| u32::try_from(size).unwrap_or(if size < 0 { 0 } else { u32::MAX });
        let Some(given) = given else {
            let interactive = args.text("performance-mode") == Some("interactivity");
            let choose = if interactive { Graphs::interactive } else { Graphs::chosen };
            self.graphs = choose(seqs, tokens, largest.map(whole)).with_mode(mode).with_query(query);
            return self.check_compilation(mode);
        };
        if given.is_empty() {
            let text = "cudagraph_capture_sizes should contain at least one element when using cuda graph.";
            return Err(assertion(text));
        }
        self.graphs = Graphs::of_sizes(given.into_iter().map(whole).collect(), seqs, tokens).with_mode(mode);
        self.graphs = std::mem::replace(&mut self.graphs, Graphs::none()).with_query(query);
        let captured = self.graphs.largest();
        match largest.filter(|largest| *largest != i64::from(captured)) {
            Some(largest) => Err(Refusal::Together {
                class: "VllmConfig",
                text: format!(
                    "customized max_cudagraph_capture_size(={largest}) should be consistent with the max value of \
                     cudagraph_capture_sizes(={captured})"
                ),
            }),
            None => self.check_compilation(mode),
        }
    }

    /// Refuses piecewise graphs without vLLM's own compilation. Only a pooling model can get this
    /// combination.
    fn check_compilation(&self, mode: GraphMode) -> Result<(), Refusal> {
        if mode == GraphMode::Piecewise && self.compilation != Compilation::Vllm {
            return Err(assertion(
                "Compilation mode should be CompilationMode.VLLM_COMPILE when cudagraph_mode piecewise cudagraphs is used, \
                 cudagraph_mode=PIECEWISE",
            ));
        }
        Ok(())
    }
}

/// The value of a flag, or of the key with the same name. Both together are an error.
fn one_of<T>(name: &str, flag: Option<T>, key: Option<T>) -> Result<Option<T>, Refusal> {
    if flag.is_some() && key.is_some() {
        let text = format!("{name} and compilation_config.{name} are mutually exclusive");
        return Err(Refusal::Other { kind: "ValueError", text, stage: Stage::Settings });
    }
    Ok(flag.or(key))
}

/// A failed assertion of vLLM about the whole configuration.
fn assertion(text: &str) -> Refusal {
    let text = format!(
        "1 validation error for VllmConfig\n  Assertion failed, {text} [type=assertion_error, \
         input_value=ArgsKwargs((), {{...}}), input_type=ArgsKwargs]\n    For further information visit \
         https://errors.pydantic.dev/2.14/v/assertion_error"
    );
    Refusal::Other { kind: "pydantic_core._pydantic_core.ValidationError", text, stage: Stage::Settings }
}
