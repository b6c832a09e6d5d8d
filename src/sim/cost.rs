//! What one engine step costs: a roofline with named terms.
//!
//! ```text
//! step = max(weights / BW, linear FLOPs / F) x lora      read all weights, or multiply by them
//!      + KV bytes of decoding sequences / BW_kv          grows with context: long chats decode slower
//!      + attention FLOPs of prefill chunks / F_attention grows with the square of a long prompt
//!      + overhead + per_sequence x sequences
//! ```
//!
//! Units: seconds, bytes, FLOPs, tokens. A sequence that advances by one token reads its whole context from
//! memory (KV term); a chunk of more tokens is compute bound (attention term: 4 x hidden x layers FLOPs for
//! each pair of query and key, causal, so half of the square inside the chunk). Steps that fit a CUDA graph
//! are padded to the next captured size, which costs linear FLOPs and per-sequence work. `max` and not a sum,
//! because the weights are read while the tensor cores multiply.
//!
//! The constants live in `profiles/`, see [`Profile`]. Nothing here knows about time or chance: jitter is applied by the
//! engine, which owns the generator.

use std::time::Duration;

pub use super::profile::{FrontEndRates, PROFILES, Profile, Rates, Shape};

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
            let (computed, chunk) = (f64::from(computed), f64::from(chunk));
            self.attention_pairs += chunk * (computed + chunk / 2.0);
        }
    }
}

/// Turns a [`StepLoad`] into a duration.
#[derive(Clone, Debug)]
pub struct CostModel {
    shape: Shape,
    rates: Rates,
    /// Largest number of tokens for which a graph was captured; 0 without graphs.
    largest_graph: u32,
}

impl CostModel {
    /// The model for `profile` when at most `max_num_seqs` sequences and `max_num_batched_tokens` tokens make a step:
    /// graphs are captured up to `min(2 x max_num_seqs, 512, max_num_batched_tokens)` tokens.
    pub fn new(profile: &Profile, max_num_seqs: u32, max_num_batched_tokens: u32) -> Self {
        let largest_graph = max_num_seqs.saturating_mul(2).min(512).min(max_num_batched_tokens);
        Self { shape: profile.shape.clone(), rates: profile.cost.clone(), largest_graph }
    }

    /// Standard deviation of the logarithm of a step's length.
    pub fn jitter(&self) -> f64 {
        self.rates.step.jitter
    }

    /// How long a step with this load takes, without jitter.
    pub fn duration(&self, load: &StepLoad) -> Duration {
        let rates = &self.rates;
        let padded = self.padded(load.tokens);
        let extra = f64::from(padded - load.tokens);
        let weights = self.shape.weight_bytes / rates.weight_bytes_per_s;
        let products =
            self.shape.linear_parameters * f64::from(padded) + self.shape.head_parameters * f64::from(load.sequences);
        let linear = 2.0 * products / rates.linear_flops_per_s;
        let lora = if load.adapter { rates.step.lora_factor } else { 1.0 };
        let kv = load.context_read as f64 * self.shape.kv_bytes_per_token / rates.kv_bytes_per_s;
        let flops_per_pair = 4.0 * f64::from(self.shape.hidden) * f64::from(self.shape.layers);
        let attention = load.attention_pairs * flops_per_pair / rates.attention_flops_per_s;
        let per_sequence = (f64::from(load.sequences) + extra) * rates.step.per_sequence_us;
        let fixed = (rates.step.overhead_us + per_sequence) * 1e-6;
        let reduce = rates.reduce.0 + rates.reduce.1 * f64::from(padded);
        Duration::from_secs_f64(weights.max(linear) * lora + kv + attention + reduce + fixed)
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
        assert!((load(&[(600, 1)], false) - 4.85).abs() < 0.15, "{}", load(&[(600, 1)], false));
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
    fn an_adapter_costs_only_the_steps_it_is_in() {
        let ratio = load(&[(600, 1)], true) / load(&[(600, 1)], false);
        assert!((1.30..1.42).contains(&ratio), "{ratio}");
    }

    #[test]
    fn small_steps_are_padded_to_the_captured_graph() {
        let model = model();
        assert_eq!([1, 3, 17, 250, 257, 512, 513].map(|n| model.padded(n)), [1, 4, 24, 256, 272, 512, 513]);
    }
}
