//! Sizes of CUDA graphs from flags, and vLLM's errors about them.
//!
//! `--cudagraph-capture-sizes` lists them, `--max-cudagraph-capture-size` bounds vLLM's own list; together they must agree.
//! Without graphs (`--enforce-eager`, `-O0`) both are ignored. `--compilation-config` is not looked into.

use super::SimConfig;
use crate::machine::Graphs;
use crate::process::refusal::{Refusal, Stage};
use sluice_core::vllm::args::ServeArgs;

impl SimConfig {
    /// Reads `--cudagraph-capture-sizes` and `--max-cudagraph-capture-size`. Needs the limits of the scheduler.
    pub(super) fn read_graphs(&mut self, args: &ServeArgs) -> Result<(), Refusal> {
        let (seqs, tokens) = (self.engine.max_num_seqs, self.engine.max_num_batched_tokens);
        let largest = args.int("max-cudagraph-capture-size").map(|size| u32::try_from(size).unwrap_or(0));
        let given: Vec<u32> =
            args.texts("cudagraph-capture-sizes").iter().filter_map(|size| size.trim().parse().ok()).collect();
        self.graphs = match (self.compiled, given.is_empty()) {
            (false, _) => Graphs::none(),
            (true, true) => Graphs::chosen(seqs, tokens, largest),
            (true, false) => Graphs::of_sizes(given, seqs, tokens),
        };
        let captured = self.graphs.largest();
        match largest {
            Some(0) if self.compiled => {
                let text =
                    "Maximum cudagraph size should be greater than or equal to 1 when using cuda graph.".to_owned();
                Err(Refusal::Other { kind: "AssertionError", text, stage: Stage::Settings })
            }
            Some(largest)
                if self.compiled && !args.texts("cudagraph-capture-sizes").is_empty() && largest != captured =>
            {
                let text = format!(
                    "customized max_cudagraph_capture_size(={largest}) should be consistent with the max value of \
                     cudagraph_capture_sizes(={captured})"
                );
                Err(Refusal::Other { kind: "ValueError", text, stage: Stage::Settings })
            }
            _ => Ok(()),
        }
    }
}
