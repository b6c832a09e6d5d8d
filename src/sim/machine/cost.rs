//! The time of one engine step: a roofline model of the GPU, and the CPU time to prepare and launch
//! the step.
//!
//! ```text
//! step = exposed + max(GPU, preparation + launch)     with asynchronous scheduling
//!      = exposed + preparation + max(GPU, launch)     without
//!
//! GPU  = max(weight bytes / bandwidth, linear FLOPs / rate)
//!      + KV bytes of decoding sequences / bandwidth
//!      + attention FLOPs of prompt chunks / rate x (time of waves / time in proportion to tiles)
//!      + layers x (gap + gap with a prompt + gap with an adapter + adapter x tokens)
//!      + sequences x cost + verified drafts x cost
//!      + drafts of a head x (a layer and the output head)
//!      + all-reduces                              in a tensor-parallel group
//!      + adapters read from disk and copied into a slot
//!
//! preparation = step x (1 + verification of drafts + sequences x lookup + admitted x cost)
//!      + sequences x cost                         scheduler, inputs, results
//! exposed     = 0 without a prompt, otherwise a constant of the host
//!      + masks of tokens copied                   where the batch changed
//! launch      = layers x launch x (1 without a graph, a third with a piecewise graph,
//!               0 with a full graph)
//! ```
//!
//! Units: seconds, bytes, FLOPs, tokens. The functions are pure; the engine applies jitter. The
//! constants are in `constants.toml` and `host/*.toml`, see [`Profile`].
//!
//! Fitted to 37,000 steps that vLLM 0.22.1 timed on an H200 (`steps.csv`: median error of groups
//! 1.3 %, nine of ten within 6 %) and to a grid of 13,700 single steps on another H200 (`grid/`: 4
//! % for decodes, 3 % with piecewise graphs, 2 % without graphs; in cross-validation by chunk size
//! 3.3, 2.6 and 1.9 %). Not modelled: sizes for which the library of linear layers picks a slow
//! kernel (448 tokens: 24 % longer; 832: 8 %). Other GPUs were not measured.

use std::time::Duration;

use super::constants::TILE;
use super::graphs::{Coverage, Graphs};
use super::profile::{Profile, Rates, Shape};
use crate::engine::{Drafter, Speculation};

/// The work of one step. The engine fills it when it carries out the plan.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct StepLoad {
    /// Tokens that the model computes.
    pub tokens: u32,
    /// Scheduled sequences.
    pub sequences: u32,
    /// Context tokens read by the sequences that advance by one token.
    pub context_read: u64,
    /// Pairs of query and key in chunks of more than one token (causal).
    pub attention_pairs: f64,
    /// The longest context among chunks of more than one token, in tokens. A chunk's context is the
    /// tokens before it and half of its own.
    pub longest_context: f64,
    /// Sequences that advance by more than one token, drafts aside.
    pub prompts: u32,
    /// Drafts that the step verifies.
    pub verified: u32,
    /// Sequences that get drafts after the step.
    pub proposed: u32,
    /// The most drafts that each of the `proposed` sequences gets.
    pub drafting: u32,
    /// Sequences that the step admits.
    pub admitted: u32,
    /// Whether the step has other sequences than the step before.
    pub is_changed: bool,
    /// Whether a sequence in the step uses a LoRA adapter.
    pub adapter: bool,
    /// Adapters that this step copies from host memory into a GPU slot.
    pub adapter_activations: u32,
    /// Of the `adapter_activations` adapters, the number that is not in host memory
    /// (`--max-cpu-loras`) and must be read from disk first.
    pub adapter_loads: u32,
}

impl StepLoad {
    /// Adds a sequence that has `computed` computed tokens and advances by `chunk` tokens.
    pub fn add(&mut self, computed: u32, chunk: u32, adapter: bool) {
        self.tokens += chunk;
        self.sequences += 1;
        self.adapter |= adapter;
        if chunk == 1 {
            self.context_read += u64::from(computed) + 1;
        } else {
            self.prompts += 1;
            let (context, chunk) = (f64::from(computed) + f64::from(chunk) / 2.0, f64::from(chunk));
            self.attention_pairs += chunk * context;
            self.longest_context = self.longest_context.max(context);
        }
    }

    /// Adds a sequence with `computed` computed tokens that advances by a token and verifies
    /// `drafts` drafts. All of them read the context once.
    pub fn verify(&mut self, computed: u32, drafts: u32, adapter: bool) {
        self.tokens += 1 + drafts;
        self.sequences += 1;
        self.verified += drafts;
        self.adapter |= adapter;
        self.context_read += u64::from(computed) + 1 + u64::from(drafts);
    }

    /// Whether all sequences advance by `query` tokens, drafts included.
    fn is_uniform(&self, query: u32) -> bool {
        self.prompts == 0 && self.verified == (query - 1) * self.sequences
    }
}

const RANK: f64 = 16.0;

/// Turns a [`StepLoad`] into a duration.
#[derive(Clone, Debug)]
pub struct CostModel {
    shape: Shape,
    rates: Rates,
    graphs: Graphs,
    adapter_bytes: f64,
    /// Whether a head proposes drafts.
    has_head: bool,
    /// Whether drafts are looked up on the CPU.
    looks_up: bool,
    is_greedy: bool,
    masks: bool,
}

impl CostModel {
    /// The model for `profile` with vLLM's default graphs for these limits of a step.
    pub fn new(profile: &Profile, max_num_seqs: u32, max_num_batched_tokens: u32) -> Self {
        let graphs = Graphs::chosen(max_num_seqs, max_num_batched_tokens, None);
        let (shape, rates) = (profile.shape.clone(), profile.cost.clone());
        let adapter_bytes = RANK * rates.adapter_bytes_per_rank;
        Self { shape, rates, graphs, adapter_bytes, has_head: false, looks_up: false, is_greedy: false, masks: false }
    }

    /// Replaces the graphs.
    #[must_use]
    pub fn with_graphs(self, graphs: Graphs) -> Self {
        Self { graphs, ..self }
    }

    /// Sets how drafts are proposed.
    #[must_use]
    pub fn with_speculation(self, speculation: Option<&Speculation>) -> Self {
        let has_head = speculation.is_some_and(|own| own.drafter == Drafter::Model);
        let looks_up = speculation.is_some_and(|own| own.drafter == Drafter::Lookup);
        let is_greedy = speculation.is_some_and(|own| own.is_greedy);
        Self { has_head, looks_up, is_greedy, ..self }
    }

    /// Sets whether requests have `allowed_token_ids`.
    #[must_use]
    pub fn with_masks(self, masks: bool) -> Self {
        Self { masks, ..self }
    }

    /// Sets the rank of adapters.
    #[must_use]
    pub fn with_rank(self, rank: u32) -> Self {
        let adapter_bytes = f64::from(rank) * self.rates.adapter_bytes_per_rank;
        Self { adapter_bytes, ..self }
    }

    /// Standard deviations of the logarithms of a step's GPU time and CPU time.
    pub fn jitter(&self) -> (f64, f64) {
        (self.rates.step.jitter.max(0.0), self.rates.host.jitter.max(0.0))
    }

    /// The time of a step in a busy engine with asynchronous scheduling, without jitter.
    pub fn duration(&self, load: &StepLoad) -> Duration {
        self.gpu(load).max(self.host(load)) + self.exposed(load)
    }

    /// GPU time of a step.
    pub fn gpu(&self, load: &StepLoad) -> Duration {
        let step = &self.rates.step;
        let (padded, coverage) = self.padded(load);
        let (padded, layers) = (f64::from(padded), f64::from(self.shape.layers));
        let mut gap = step.layer_us;
        // Decodes with unequal numbers of drafts replay piecewise graphs, as prompts do.
        if load.prompts > 0 || coverage == Coverage::Piecewise {
            gap += step.prompt_layer_us;
        }
        if load.adapter {
            gap += step.lora_layer_us + step.lora_token_layer_us * f64::from(load.tokens);
        }
        let sampler = f64::from(load.sequences) * step.sequence_us + f64::from(load.verified) * step.draft_us;
        let computed = self.linear(load, padded)
            + self.attention(load)
            + (layers * gap + sampler) * 1e-6
            + self.heads(load)
            + self.rates.reduce_s_per_step
            + self.rates.reduce_s_per_token * padded;
        Duration::from_secs_f64(computed + self.adapter_seconds(load))
    }

    /// Seconds in which a head proposes drafts one after the other. Each draft takes a layer of the
    /// model and the output head, whose weights are read each time. This was not measured.
    fn heads(&self, load: &StepLoad) -> f64 {
        if load.proposed == 0 || !self.has_head {
            return 0.0;
        }
        let layers = f64::from(self.shape.layers).max(1.0);
        let bytes = (self.shape.weight_bytes - 2.0 * self.shape.head_parameters).max(0.0) / layers
            + 2.0 * self.shape.head_parameters;
        let flops = 2.0
            * f64::from(load.proposed)
            * (self.shape.linear_parameters / layers / self.rates.linear_flops_per_s
                + self.shape.head_parameters / self.rates.head_flops_per_s);
        f64::from(load.drafting) * ((bytes / self.rates.weights_per_s).max(flops) + self.rates.step.layer_us * 1e-6)
    }

    /// Time in which the adapters of `load` are read and copied while nothing else runs.
    pub fn adapter_loading(&self, load: &StepLoad) -> Duration {
        Duration::from_secs_f64(self.adapter_seconds(load))
    }

    fn adapter_seconds(&self, load: &StepLoad) -> f64 {
        let (step, moved) = (&self.rates.step, self.adapter_bytes * 1e-9);
        moved * f64::from(load.adapter_loads) / step.adapter_read_gb_per_s
            + moved * f64::from(load.adapter_activations) / step.adapter_copy_gb_per_s
    }

    /// CPU time of the engine process for a step.
    pub fn host(&self, load: &StepLoad) -> Duration {
        self.preparation(load) + self.launch(load)
    }

    /// CPU time before the first kernel of a step and after the last one.
    pub fn preparation(&self, load: &StepLoad) -> Duration {
        let host = &self.rates.host;
        let mut steps = 1.0;
        if load.verified > 0 {
            steps += if self.is_greedy { host.greedy_verify_share } else { host.verify_share };
        }
        if self.looks_up {
            steps += host.draft_sequence_share * f64::from(load.proposed);
            steps += host.admit_share * f64::from(load.admitted);
        }
        Duration::from_secs_f64((host.step_us * steps + host.sequence_us * f64::from(load.sequences)) * 1e-6)
    }

    /// The part of a step that overlaps with neither CPU nor GPU work. Only steps with a prompt and
    /// steps that copy masks have it. A copy from memory that is not pinned waits for the GPU, so
    /// the CPU does not run ahead in that step.
    pub fn exposed(&self, load: &StepLoad) -> Duration {
        let host = &self.rates.host;
        let mut exposed = if load.prompts > 0 { host.prompt_step_us * 1e-6 } else { 0.0 };
        if self.masks && load.is_changed {
            let vocabulary = self.shape.head_parameters / f64::from(self.shape.hidden.max(1));
            exposed += vocabulary * f64::from(load.sequences) / (host.unpinned_gb_per_s * 1e9);
            if !self.looks_up {
                exposed += self.preparation(load).as_secs_f64();
            }
        }
        Duration::from_secs_f64(exposed)
    }

    /// CPU time to launch the kernels of a step.
    pub fn launch(&self, load: &StepLoad) -> Duration {
        let host = &self.rates.host;
        let share = match self.padded(load).1 {
            Coverage::Full => 0.0,
            Coverage::Piecewise => host.piecewise_share,
            Coverage::None => 1.0,
        };
        let layer = host.launch_layer_us + if load.adapter { host.lora_launch_layer_us } else { 0.0 };
        Duration::from_secs_f64(f64::from(self.shape.layers) * share * layer * 1e-6)
    }

    /// The share of steps with this load whose launch blocks until the GPU has finished.
    pub fn stall_share(&self, load: &StepLoad) -> f64 {
        match (self.padded(load).1 == Coverage::None && load.prompts > 1, load.adapter) {
            (false, _) => 0.0,
            (true, false) => self.rates.host.stall_share,
            (true, true) => self.rates.host.lora_stall_share,
        }
    }

    /// The number of tokens after padding, and the coverage of the graph.
    fn padded(&self, load: &StepLoad) -> (u32, Coverage) {
        self.graphs.pad(load.tokens, load.is_uniform(self.graphs.query()))
    }

    /// Seconds in linear layers: the larger of two times, because the weights are read while the
    /// tensor cores multiply.
    ///
    /// A step that fits a graph is padded to the graph's size, and a share of the time grows in
    /// whole tiles of 128 tokens. With fp8 weights a decode is faster (3.3 ms instead of 4.7 ms),
    /// and so is a chunk of 8,192 tokens. A chunk of 256 tokens is not, because the tiles do not
    /// fill the GPU: it took 8.4 ms (7.9 ms in this model), as long as 670 tokens at the rate of
    /// large chunks. Other kernels are used for up to 128 tokens. Between one tile and two, which
    /// was not measured, the time rises evenly.
    fn linear(&self, load: &StepLoad, padded: f64) -> f64 {
        let rates = &self.rates;
        let tiled = rates.kernel.tile_share * (padded / TILE).ceil() * TILE + (1.0 - rates.kernel.tile_share) * padded;
        let idle = rates.idle_tokens * (padded / TILE - 1.0).clamp(0.0, 1.0);
        let layers = self.shape.linear_parameters * (tiled + idle) / rates.linear_flops_per_s;
        let sampled = f64::from(load.sequences + load.verified);
        let head = self.shape.head_parameters * sampled / rates.head_flops_per_s;
        (self.shape.weight_bytes / rates.weights_per_s).max(2.0 * (layers + head))
    }

    /// Seconds in attention, of decodes and of prompt chunks.
    ///
    /// Prompts: 4 x hidden x layers FLOPs for each causal pair of query and key, in tokens x heads
    /// / 128 tiles. A wave has as many tiles as there are multiprocessors. A partly filled wave
    /// takes longer than in proportion to its tiles: a chunk of 640 tokens takes nearly as long as
    /// one of 1,024. Decodes: each sequence reads its context, more slowly in a step that also
    /// prefills, where one kernel does both.
    fn attention(&self, load: &StepLoad) -> f64 {
        let Rates { kernel, tiles_at_once, attention_flops_per_s, .. } = &self.rates;
        let bytes = load.context_read as f64 * self.shape.kv_bytes_per_token;
        if load.prompts == 0 {
            return bytes / self.rates.kv_cache_per_s;
        }
        // All chunks, in tokens of the prompt with the longest context, because tiles of shorter
        // prompts end earlier.
        let chunks = load.attention_pairs / load.longest_context;
        let waves = chunks.max(1.0) * f64::from(self.shape.heads) / TILE / tiles_at_once;
        // The time of all tiles, in units of a full wave.
        let taken = (waves + kernel.idle_share * (waves.ceil() - waves)).min(kernel.split_penalty * waves);
        let flops = 4.0 * f64::from(self.shape.hidden) * f64::from(self.shape.layers) * load.attention_pairs;
        bytes / self.rates.mixed_kv_cache_per_s + flops * taken / waves / attention_flops_per_s
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::machine::graphs::GraphMode;
    use crate::machine::{Constants, Gpu, Layout, Model};

    fn of(profile: &Profile) -> CostModel {
        CostModel::new(profile, 256, 8192)
    }

    fn model() -> CostModel {
        of(&Profile::named("h200-llama-8b").unwrap())
    }

    /// Milliseconds in fp8 and in bf16.
    fn in_fp8(computed: u32, chunk: u32) -> [f64; 2] {
        [true, false].map(|fp8_weights| {
            let (gpu, model) = (Gpu::load("h200").unwrap(), Model::load("llama-3.1-8b").unwrap());
            let layout = Layout { fp8_weights, ..Layout::default() };
            let profile = Profile::new(gpu, model, layout, &Constants::fitted()).unwrap();
            let mut load = StepLoad::default();
            load.add(computed, chunk, false);
            CostModel::new(&profile, 256, 8192).gpu(&load).as_secs_f64() * 1e3
        })
    }

    #[test]
    fn fp8_is_faster_for_one_token_and_for_thousands_and_not_between() {
        let [[one, one_bf16], [piece, piece_bf16], [chunk, chunk_bf16]] =
            [in_fp8(200, 1), in_fp8(0, 256), in_fp8(0, 8192)];
        assert!(one < 0.75 * one_bf16, "{one} {one_bf16}");
        assert!(piece > 1.1 * piece_bf16 && piece < 1.5 * piece_bf16, "{piece} {piece_bf16}");
        assert!(chunk < 0.75 * chunk_bf16, "{chunk} {chunk_bf16}");
    }

    #[test]
    fn constants_from_before_fp8_was_measured_are_still_read() {
        let mut table = Constants::fitted().table();
        for (part, key) in [("efficiency", "fp8_linear"), ("kernel", "fp8_idle_tokens")] {
            assert!(table[part].as_table_mut().unwrap().remove(key).is_some());
        }
        assert_eq!(Constants::parse("old", &table.to_string()).unwrap(), Constants::fitted());
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

    /// Short prompts only add their own work: the attention of the long chunk takes as many waves
    /// with them as without.
    #[test]
    fn short_prompts_beside_a_long_piece_add_time() {
        let gpu = |context: u32, short: usize| {
            let mut load = StepLoad::default();
            load.add(context, 256, false);
            (0..short).for_each(|_| load.add(0, 200, false));
            let cost = model().with_graphs(Graphs::none());
            cost.attention(&load)
        };
        for context in [1_000, 8_000, 15_700] {
            for short in 0..4 {
                let (fewer, more) = (gpu(context, short), gpu(context, short + 1));
                assert!(more >= fewer, "{context} {short}: {fewer} {more}");
            }
        }
    }

    fn drafting(drafts: [u32; 2]) -> StepLoad {
        let mut load = StepLoad::default();
        drafts.into_iter().for_each(|drafts| load.verify(300, drafts, false));
        load
    }

    #[test]
    fn drafts_cost_the_cpu_and_unequal_ones_the_full_graph() {
        let cost = model().with_graphs(Graphs::chosen(768, 8192, None).with_query(3));
        let [none, equal, unequal] = [[0, 0], [2, 2], [2, 1]].map(drafting);
        assert!(cost.preparation(&equal) > cost.preparation(&none).mul_f64(1.5));
        assert_eq!((cost.launch(&equal), cost.padded(&equal).1), (Duration::ZERO, Coverage::Full));
        assert_eq!(cost.padded(&unequal).1, Coverage::Piecewise);
        assert!(cost.gpu(&unequal) > cost.gpu(&equal), "fewer tokens take longer");
        let greedy = CostModel { is_greedy: true, ..cost.clone() };
        assert!(greedy.preparation(&equal) < cost.preparation(&equal));
    }

    #[test]
    fn masks_are_copied_for_all_sequences_when_the_batch_changes() {
        let (same, changed) = (drafting([0, 0]), StepLoad { is_changed: true, ..drafting([0, 0]) });
        let cost = CostModel { looks_up: true, ..model().with_masks(true) };
        assert_eq!((cost.exposed(&same), model().exposed(&changed)), (model().exposed(&same), Duration::ZERO));
        let copied = cost.exposed(&changed).as_secs_f64();
        assert!((copied - 2.0 * 128_256.0 / 1.4e9).abs() < 1e-9, "{copied}");
        assert!(model().with_masks(true).exposed(&changed) > cost.exposed(&changed), "it is not ahead");
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

    /// The two measured rows with full graphs (`permits.csv`) are 0 to 5 % slower than the rows
    /// without.
    #[test]
    fn a_full_graph_of_a_step_that_prefills_saves_its_launch_alone() {
        let mut load = StepLoad::default();
        load.add(4000, 192, false);
        (0..64).for_each(|_| load.add(500, 1, false));
        let decode = StepLoad { tokens: 1, sequences: 1, context_read: 100, ..StepLoad::default() };
        for host in ["quiet", "pair"] {
            let (gpu, model) = (crate::Gpu::load("h200").unwrap(), crate::Model::load("llama-3.1-8b").unwrap());
            let constants = crate::Constants::on_host(host).unwrap();
            let profile = Profile::new(gpu, model, crate::Layout::default(), &constants).unwrap();
            let [default, full, piecewise, decodes] =
                [GraphMode::default(), GraphMode::Full, GraphMode::Piecewise, GraphMode::FullDecodeOnly]
                    .map(|mode| CostModel { graphs: Graphs::chosen(256, 8192, None).with_mode(mode), ..of(&profile) });
            assert_eq!((full.launch(&load), full.gpu(&load)), (Duration::ZERO, default.gpu(&load)));
            let ratio = full.duration(&load).as_secs_f64() / default.duration(&load).as_secs_f64();
            assert!((0.98..=1.0).contains(&ratio), "{host}: {ratio}");
            assert_eq!(piecewise.launch(&load), default.launch(&load));
            assert!(decodes.launch(&load) > default.launch(&load), "its kernels are launched one by one");
            let launches = [&default, &full, &decodes, &piecewise].map(|cost| cost.launch(&decode));
            assert_eq!(launches, [Duration::ZERO, Duration::ZERO, Duration::ZERO, default.launch(&load)]);
        }
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
        assert!(graphs.clone().with_graphs(Graphs::none()).duration(&load) > graphs.duration(&load).mul_f64(2.0));
    }
}
