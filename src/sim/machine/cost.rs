//! What one engine step costs: a roofline with named terms.
//!
//! ```text
//! step = max(weight bytes / bandwidth, linear FLOPs / rate)   read all weights, or multiply by them
//!      + KV bytes of decoding sequences / bandwidth           grows with context: long chats decode slower
//!      + attention FLOPs of prompt chunks / rate              grows with the square of a long prompt
//!      + layers x (gap + gap with a prompt + gap with an adapter + adapter x tokens)
//!      + sequences x cost
//!      + all-reduces                                          in a group of GPUs
//!      at least layers x launch                               when no graph is large enough: the CPU launches kernels
//!      + adapters read from disk and copied into a slot       every sequence waits
//! ```
//!
//! Units: seconds, bytes, FLOPs, tokens. A sequence that advances by one token reads its whole context from memory (KV
//! term); a chunk of more tokens is compute bound (attention term: 4 x hidden x layers FLOPs for each pair of query and
//! key, causal, so half of the square inside the chunk). Steps that fit a CUDA graph are padded to the next captured
//! size, which costs linear FLOPs. `max` and not a sum, because the weights are read while the tensor cores multiply.
//!
//! Where it comes from: 37,000 steps that vLLM 0.22.1 timed on an H200, each with its tokens and contexts. On the
//! 21,600 of them without a prompt the formula is within 1.3 % on average and 7 % at worst (long contexts of a few
//! sequences); on those with a prompt the median is 2.5 %. With an adapter a step takes 1.5 ms more, whatever its size,
//! and 5 us more per token: kernels beside the base model's, not a factor on them.
//!
//! The constants are in `constants.toml`, see [`Profile`]. Pure: jitter is applied by the engine, which
//! owns the random generator.

use std::time::Duration;

use super::profile::{Profile, Rates, Shape};

/// What one step has to do; the engine fills it while it schedules.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct StepLoad {
    /// Tokens pushed through the model.
    pub tokens: u32,
    /// Sequences scheduled.
    pub sequences: u32,
    /// Context tokens read by the sequences that advance by one token.
    pub context_read: u64,
    /// Pairs of query and key in chunks of more than one token (causal).
    pub attention_pairs: f64,
    /// Sequences that advance by more than one token.
    pub prompts: u32,
    /// Whether a sequence in the step uses a LoRA adapter.
    pub adapter: bool,
    /// Adapters that were not in a GPU slot and are put into one by this step, from the host's cache. The engine
    /// counts them when it admits the first sequence of such an adapter.
    pub adapter_activations: u32,
    /// Those of them that were not in the host's cache (`--max-cpu-loras`) either and are read from disk first.
    pub adapter_loads: u32,
}

impl StepLoad {
    /// Adds a sequence that has `computed` tokens behind it and advances by `chunk` tokens.
    pub fn add(&mut self, computed: u32, chunk: u32, adapter: bool) {
        self.tokens += chunk;
        self.sequences += 1;
        self.adapter |= adapter;
        if chunk == 1 {
            self.context_read += u64::from(computed) + 1;
        } else {
            self.prompts += 1;
            let (computed, chunk) = (f64::from(computed), f64::from(chunk));
            self.attention_pairs += chunk * (computed + chunk / 2.0);
        }
    }
}

/// Rank of adapters unless the server sets another.
const RANK: f64 = 16.0;

/// Turns a [`StepLoad`] into a duration.
#[derive(Clone, Debug)]
pub struct CostModel {
    shape: Shape,
    rates: Rates,
    /// Largest number of tokens for which a graph was captured; 0 without graphs.
    largest_graph: u32,
    /// Bytes of one adapter.
    adapter_bytes: f64,
}

impl CostModel {
    /// The model for `profile` when at most `max_num_seqs` sequences and `max_num_batched_tokens` tokens make a step:
    /// graphs are captured up to `min(2 x max_num_seqs, 512, max_num_batched_tokens)` tokens.
    pub fn new(profile: &Profile, max_num_seqs: u32, max_num_batched_tokens: u32) -> Self {
        let largest_graph = max_num_seqs.saturating_mul(2).min(512).min(max_num_batched_tokens);
        let (shape, rates) = (profile.shape.clone(), profile.cost.clone());
        let adapter_bytes = RANK * rates.adapter_bytes_per_rank;
        Self { shape, rates, largest_graph, adapter_bytes }
    }

    /// The same without graphs (`--enforce-eager`).
    #[must_use]
    pub fn eager(self) -> Self {
        Self { largest_graph: 0, ..self }
    }

    /// The same for adapters of this rank.
    #[must_use]
    pub fn with_rank(self, rank: u32) -> Self {
        let adapter_bytes = f64::from(rank) * self.rates.adapter_bytes_per_rank;
        Self { adapter_bytes, ..self }
    }

    /// Standard deviation of the logarithm of a step's length.
    pub fn jitter(&self) -> f64 {
        self.rates.step.jitter
    }

    /// How long a step with this load takes, without jitter.
    pub fn duration(&self, load: &StepLoad) -> Duration {
        let step = &self.rates.step;
        let (padded, layers) = (f64::from(self.padded(load.tokens)), f64::from(self.shape.layers));
        let mut gap = step.layer_us;
        if load.prompts > 0 {
            gap += step.prompt_layer_us;
        }
        if load.adapter {
            gap += step.lora_layer_us + step.lora_token_layer_us * f64::from(load.tokens);
        }
        let gpu = self.arithmetic(load, padded)
            + (layers * gap + f64::from(load.sequences) * step.sequence_us) * 1e-6
            + self.rates.reduce_s_per_step
            + self.rates.reduce_s_per_token * padded;
        let moved = self.adapter_bytes * 1e-9;
        let stall = moved * f64::from(load.adapter_loads) / step.adapter_read_gb_per_s
            + moved * f64::from(load.adapter_activations) / step.adapter_copy_gb_per_s;
        Duration::from_secs_f64(gpu + stall).max(self.launch(load))
    }

    /// CPU time to launch a step: kernel by kernel without a graph, less with one.
    pub fn launch(&self, load: &StepLoad) -> Duration {
        let step = &self.rates.step;
        let share = match load {
            _ if load.tokens > self.largest_graph => 1.0,
            _ if load.prompts > 0 => step.piecewise_launch_share,
            _ => step.graph_launch_share,
        };
        let layer = step.launch_layer_us + if load.adapter { step.lora_launch_layer_us } else { 0.0 };
        Duration::from_secs_f64(f64::from(self.shape.layers) * share * layer * 1e-6)
    }

    /// The share of steps with this load whose launch waits for the GPU.
    pub fn stall_share(&self, load: &StepLoad) -> f64 {
        match (load.tokens > self.largest_graph && load.prompts > 1, load.adapter) {
            (false, _) => 0.0,
            (true, false) => self.rates.step.stall_share,
            (true, true) => self.rates.step.lora_stall_share,
        }
    }

    /// Seconds that follow from sizes: weights and linear layers, KV cache, attention of prompts.
    fn arithmetic(&self, load: &StepLoad, padded: f64) -> f64 {
        let rates = &self.rates;
        let weights = self.shape.weight_bytes / rates.bytes_per_s;
        let products = self.shape.linear_parameters * padded + self.shape.head_parameters * f64::from(load.sequences);
        let linear = 2.0 * products / rates.linear_flops_per_s;
        let kv = load.context_read as f64 * self.shape.kv_bytes_per_token / rates.bytes_per_s;
        let flops_per_pair = 4.0 * f64::from(self.shape.hidden) * f64::from(self.shape.layers);
        weights.max(linear) + kv + load.attention_pairs * flops_per_pair / rates.attention_flops_per_s
    }

    /// Tokens after padding to the next captured graph size (1, 2, 4, then by 8 to 256, then by 16).
    fn padded(&self, tokens: u32) -> u32 {
        if tokens > self.largest_graph {
            return tokens;
        }
        let size = match tokens {
            0..=2 => tokens,
            3..=4 => 4,
            5..=256 => tokens.next_multiple_of(8),
            _ => tokens.next_multiple_of(16),
        };
        size.min(self.largest_graph)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn model() -> CostModel {
        CostModel::new(&Profile::named("h200-llama-8b").unwrap(), 256, 8192)
    }

    fn load(sequences: &[(u32, u32)], adapter: bool) -> f64 {
        let mut load = StepLoad::default();
        for &(computed, chunk) in sequences {
            load.add(computed, chunk, adapter);
        }
        model().duration(&load).as_secs_f64() * 1e3
    }

    #[test]
    fn a_lone_decode_takes_what_the_gpu_took() {
        assert!((load(&[(600, 1)], false) - 4.80).abs() < 0.15, "{}", load(&[(600, 1)], false));
    }

    #[test]
    fn decoding_slows_with_context() {
        assert!(load(&[(32_000, 1); 8], false) > load(&[(100, 1); 8], false) + 5.0);
    }

    #[test]
    fn the_second_half_of_a_long_prompt_costs_more_than_the_first() {
        assert!(load(&[(8192, 8192)], false) > 1.25 * load(&[(0, 8192)], false));
    }

    #[test]
    fn an_adapter_costs_only_the_steps_it_is_in_and_more_to_one_stream_than_to_many() {
        let ratio = |streams: usize| load(&vec![(300, 1); streams], true) / load(&vec![(300, 1); streams], false);
        assert!((1.29..1.37).contains(&ratio(1)), "{}", ratio(1));
        assert!((1.25..1.31).contains(&ratio(100)), "{}", ratio(100));
    }

    #[test]
    fn an_adapter_that_is_read_from_disk_stalls_its_step() {
        let base = StepLoad { tokens: 1, sequences: 1, context_read: 100, adapter: true, ..StepLoad::default() };
        let stall = |load| (model().duration(&load) - model().duration(&base)).as_secs_f64() * 1e3;
        let (copied, read) = (StepLoad { adapter_activations: 1, ..base }, StepLoad { adapter_loads: 1, ..base });
        assert!((28.0..36.0).contains(&stall(read)), "{}", stall(read));
        assert!((1.0..6.0).contains(&stall(copied)), "{}", stall(copied));
        let rank_64 = model().with_rank(64).duration(&read) - model().with_rank(64).duration(&base);
        assert!((rank_64.as_secs_f64() * 1e3 / stall(read) - 4.0).abs() < 1e-6);
    }

    #[test]
    fn without_a_graph_a_small_model_waits_for_the_cpu() {
        let small = Profile::new(
            crate::Gpu::load("h200").unwrap(),
            crate::Model::load("llama-3.2-1b").unwrap(),
            crate::Layout::default(),
            &crate::Constants::fitted(),
        );
        let graphs = CostModel::new(&small.unwrap(), 256, 8192);
        let load = StepLoad { tokens: 1, sequences: 1, context_read: 100, ..StepLoad::default() };
        assert!(graphs.clone().eager().duration(&load) > graphs.duration(&load).mul_f64(2.0));
    }

    #[test]
    fn small_steps_are_padded_to_the_captured_graph() {
        let model = model();
        assert_eq!([1, 3, 17, 250, 257, 512, 513].map(|n| model.padded(n)), [1, 4, 24, 256, 272, 512, 513]);
    }
}
