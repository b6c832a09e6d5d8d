//! CUDA graphs: the sizes (tokens of a step) that are captured, and the part of a step that a graph
//! covers.
//!
//! A *full* graph replays a whole step. A *piecewise* graph replays everything but the attention. A
//! step is padded to the next captured size. A step with more tokens than the largest size has no
//! graph: the CPU launches its kernels one by one.
//!
//! | `cudagraph_mode` | steps that only decode | steps that also prefill |
//! |---|---|---|
//! | `FULL_AND_PIECEWISE` (default) | full graph | piecewise graph |
//! | `PIECEWISE` | piecewise graph | piecewise graph |
//! | `FULL` | full graph | full graph |
//! | `FULL_DECODE_ONLY` | full graph | no graph |
//! | `NONE` | no graph | no graph |
//!
//! Sizes: 1, 2, 4 (with `--performance-mode interactivity` all from 1 to 32), then by 8 up to 256,
//! then by 16 up to `min(2 x max_num_seqs, 512)` or `--max-cudagraph-capture-size`; or the sizes of
//! `--cudagraph-capture-sizes`. None is above `--max-num-batched-tokens`. Full graphs for decodes
//! alone exist up to `--max-num-seqs`. A larger step that only decodes is treated like a step that
//! also prefills.

use std::sync::Arc;

const DEFAULT_LARGEST: u32 = 512;
/// Distance between sizes above 256.
const STRIDE: u32 = 16;
/// Maximum number of sizes that flags can request.
pub const MAX_SIZES: usize = 4096;

/// vLLM's `cudagraph_mode`: the kind of graph for each kind of step.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum GraphMode {
    /// No step has a graph.
    None,
    /// All steps have piecewise graphs.
    Piecewise,
    /// All steps have full graphs.
    Full,
    /// Steps that only decode have full graphs.
    FullDecodeOnly,
    /// Steps that only decode have full graphs, the others have piecewise graphs.
    #[default]
    FullAndPiecewise,
}

impl GraphMode {
    /// The mode that remains without piecewise graphs, which need vLLM's own compilation.
    #[must_use]
    pub fn without_piecewise(self) -> Self {
        match self {
            Self::Piecewise => Self::None,
            Self::FullAndPiecewise => Self::FullDecodeOnly,
            mode => mode,
        }
    }
}

/// Sizes for which graphs were captured.
#[derive(Clone, Debug, PartialEq)]
pub struct Graphs {
    mode: GraphMode,
    /// Ascending, without duplicates, above 0. Empty if there are no graphs.
    sizes: Arc<[u32]>,
    /// Number of sizes, from the smallest on, that have a full graph for steps that only decode.
    decodes: usize,
    /// Tokens of a decode in a full graph: 1 and the most drafts.
    query: u32,
}

/// The part of a step that a graph covers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Coverage {
    /// The whole step.
    Full,
    /// Everything except the attention.
    Piecewise,
    /// Nothing: there is no graph of this size.
    None,
}

impl Graphs {
    /// No graphs, as with `--enforce-eager`.
    pub fn none() -> Self {
        Self { mode: GraphMode::None, sizes: Arc::new([]), decodes: 0, query: 1 }
    }

    /// The sizes that vLLM chooses for these limits. `largest`: `--max-cudagraph-capture-size`.
    pub fn chosen(max_num_seqs: u32, max_num_batched_tokens: u32, largest: Option<u32>) -> Self {
        Self::with_smallest(&[1, 2, 4], max_num_seqs, max_num_batched_tokens, largest)
    }

    /// As [`Graphs::chosen`], with `--performance-mode interactivity`.
    pub fn interactive(max_num_seqs: u32, max_num_batched_tokens: u32, largest: Option<u32>) -> Self {
        let smallest: Vec<u32> = (1..=32).collect();
        Self::with_smallest(&smallest, max_num_seqs, max_num_batched_tokens, largest)
    }

    fn with_smallest(smallest: &[u32], max_num_seqs: u32, max_num_batched_tokens: u32, largest: Option<u32>) -> Self {
        let largest = largest.unwrap_or_else(|| max_num_seqs.saturating_mul(2).min(DEFAULT_LARGEST));
        let largest = largest.min(max_num_batched_tokens);
        let small = smallest.iter().copied().chain((8..256).step_by(8));
        let mut sizes: Vec<u32> =
            small.chain((256..=u32::MAX - STRIDE).step_by(STRIDE as usize)).take(MAX_SIZES).collect();
        sizes.retain(|size| *size <= largest);
        if max_num_batched_tokens <= largest {
            sizes.push(max_num_batched_tokens);
        }
        Self::of_sizes(sizes, max_num_seqs, max_num_batched_tokens)
    }

    /// The given sizes (`--cudagraph-capture-sizes`), except sizes above `max_num_batched_tokens`.
    pub fn of_sizes(mut sizes: Vec<u32>, max_num_seqs: u32, max_num_batched_tokens: u32) -> Self {
        sizes.retain(|size| (1..=max_num_batched_tokens).contains(size));
        sizes.sort_unstable();
        sizes.dedup();
        sizes.truncate(MAX_SIZES);
        if sizes.is_empty() {
            return Self::none();
        }
        let decodes = sizes.partition_point(|size| *size <= max_num_seqs);
        Self { mode: GraphMode::default(), sizes: sizes.into(), decodes, query: 1 }
    }

    /// The same sizes in another mode.
    #[must_use]
    pub fn with_mode(self, mode: GraphMode) -> Self {
        if mode == GraphMode::None || self.sizes.is_empty() { Self::none() } else { Self { mode, ..self } }
    }

    /// The sizes rounded up to whole decodes of `query` tokens, as vLLM rounds them for speculative
    /// decoding. The `max_num_seqs` with which the sizes were chosen must already be multiplied by
    /// `query`, because each decode brings its draft tokens.
    #[must_use]
    pub fn with_query(self, query: u32) -> Self {
        if query <= 1 || self.sizes.is_empty() {
            return self;
        }
        let (largest, most) = (self.largest(), self.sizes[self.decodes.max(1) - 1]);
        let mut sizes: Vec<u32> = self.sizes.iter().map(|size| size.next_multiple_of(query)).collect();
        sizes.retain(|size| *size <= largest);
        sizes.dedup();
        let decodes = sizes.partition_point(|size| *size <= most.next_multiple_of(query));
        Self { sizes: sizes.into(), decodes, query, ..self }
    }

    /// Tokens of a decode in a full graph.
    pub fn query(&self) -> u32 {
        self.query
    }

    /// The kind of graph for each kind of step.
    pub fn mode(&self) -> GraphMode {
        self.mode
    }

    /// The tokens of a step after padding, and the coverage of its graph. `decodes`: whether every
    /// sequence advances by [`Graphs::query`] tokens.
    pub fn pad(&self, tokens: u32, decodes: bool) -> (u32, Coverage) {
        let at = self.sizes.partition_point(|size| *size < tokens);
        let coverage = match (self.mode, decodes && at < self.decodes) {
            (GraphMode::Full, _) | (GraphMode::FullDecodeOnly | GraphMode::FullAndPiecewise, true) => Coverage::Full,
            (GraphMode::Piecewise, _) | (GraphMode::FullAndPiecewise, false) => Coverage::Piecewise,
            (GraphMode::None, _) | (GraphMode::FullDecodeOnly, false) => Coverage::None,
        };
        match self.sizes.get(at) {
            Some(size) if coverage != Coverage::None => (*size, coverage),
            _ => (tokens, Coverage::None),
        }
    }

    /// The largest size; 0 without graphs.
    pub fn largest(&self) -> u32 {
        self.sizes.last().copied().unwrap_or(0)
    }

    /// The numbers of piecewise and of full graphs.
    pub fn counts(&self) -> (usize, usize) {
        let all = self.sizes.len();
        match self.mode {
            GraphMode::None => (0, 0),
            GraphMode::Piecewise => (all, 0),
            GraphMode::Full => (0, all),
            GraphMode::FullDecodeOnly => (0, self.decodes),
            GraphMode::FullAndPiecewise => (all, self.decodes),
        }
    }

    /// Whether the two largest sizes are further apart than in vLLM's own list. If so, capturing
    /// the smaller one does not reuse the memory of the larger one.
    pub fn is_sparse(&self) -> bool {
        matches!(*self.sizes, [.., below, largest] if largest - below > STRIDE)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_counted_as_vllm_lists_them() {
        let counts = |seqs| Graphs::chosen(seqs, 8192, None).counts();
        assert_eq!([1024, 256, 128, 64, 4, 1].map(counts), [(51, 51), (51, 35), (35, 19), (19, 11), (4, 3), (2, 1)]);
        // 1, 2, 4, 8, 16 .. 248, 256 .. 1280: 99 sizes, as vLLM 0.22.1 logged.
        let wide = Graphs::chosen(256, 8192, Some(1280));
        assert_eq!((wide.counts(), wide.largest()), ((99, 35), 1280));
        let interactive = |seqs| Graphs::interactive(seqs, 8192, None).counts();
        assert_eq!([256, 8, 1].map(interactive), [(76, 60), (16, 8), (2, 1)], "1 to 32, then by 8 and by 16");
        assert_eq!(Graphs::chosen(256, 300, None).largest(), 300, "the token budget is captured where it is in reach");
        assert!(Graphs::chosen(u32::MAX, u32::MAX, Some(u32::MAX)).counts().0 <= MAX_SIZES);
    }

    #[test]
    fn steps_are_padded_to_the_next_size_and_the_largest_are_not() {
        let graphs = Graphs::chosen(256, 8192, None);
        let padded = |tokens| graphs.pad(tokens, false);
        assert_eq!([1, 3, 17, 250, 257, 512].map(|tokens| padded(tokens).0), [1, 4, 24, 256, 272, 512]);
        assert_eq!((padded(513), padded(512).1), ((513, Coverage::None), Coverage::Piecewise));
        assert_eq!([graphs.pad(256, true).1, graphs.pad(257, true).1], [Coverage::Full, Coverage::Piecewise]);
        assert_eq!(Graphs::none().pad(1, true), (1, Coverage::None));
    }

    #[test]
    fn each_mode_covers_its_steps() {
        let of = |mode| {
            let graphs = Graphs::chosen(256, 8192, None).with_mode(mode);
            // A decode, a step that also prefills, decodes above `max_num_seqs`, and a step above
            // the largest size.
            let steps = [(17, true), (17, false), (300, true), (513, false)];
            (graphs.counts(), steps.map(|(tokens, decodes)| graphs.pad(tokens, decodes)))
        };
        let (full, piecewise, none) = (Coverage::Full, Coverage::Piecewise, Coverage::None);
        let above = (513, none);
        for (mode, counts, steps) in [
            (GraphMode::FullAndPiecewise, (51, 35), [(24, full), (24, piecewise), (304, piecewise), above]),
            (GraphMode::Piecewise, (51, 0), [(24, piecewise), (24, piecewise), (304, piecewise), above]),
            (GraphMode::Full, (0, 51), [(24, full), (24, full), (304, full), above]),
            (GraphMode::FullDecodeOnly, (0, 35), [(24, full), (17, none), (300, none), above]),
            (GraphMode::None, (0, 0), [(17, none), (17, none), (300, none), above]),
        ] {
            assert_eq!(of(mode), (counts, steps), "{mode:?}");
        }
        assert_eq!(Graphs::none().with_mode(GraphMode::Full), Graphs::none());
        assert_eq!(GraphMode::FullAndPiecewise.without_piecewise(), GraphMode::FullDecodeOnly);
        assert_eq!(GraphMode::Piecewise.without_piecewise(), GraphMode::None);
    }

    #[test]
    fn given_sizes_are_sorted_and_cut_at_the_token_budget() {
        let graphs = Graphs::of_sizes(vec![1280, 8, 8, 4096, 1, 0], 4, 2048);
        assert_eq!((graphs.counts(), graphs.largest(), graphs.is_sparse()), ((3, 1), 1280, true));
        assert!(!Graphs::chosen(256, 8192, None).is_sparse());
        assert_eq!((graphs.pad(9, true).0, Graphs::of_sizes(vec![9000], 4, 2048)), (1280, Graphs::none()));
    }
}
