//! The numbers behind `/metrics`, under vLLM 0.33's names, labels and buckets.
//!
//! Values change when a step ends, so gauges are as stale during a long step as they are in vLLM. Times are of the
//! lane's virtual clock: with `--sim-speed` they stay what the GPU would have shown. `model_name` is the served base
//! name, never an adapter's. Bounds: the label sets are fixed; adapters appear in one gauge, at most all loaded ones.

use std::fmt::Write;
use std::time::Duration;

const TTFT: &[f64] = &[
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
    160.0, 640.0, 2560.0,
];
const ITL: &[f64] =
    &[0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0];
const E2E: &[f64] = &[
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0,
    1920.0, 7680.0,
];
const ITERATION: &[f64] = &[1.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0, 2048.0, 4096.0, 8192.0, 16384.0];
const CHOICES: &[f64] = &[1.0, 2.0, 5.0, 10.0, 20.0];
const LENGTHS: &[f64] =
    &[1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1e3, 2e3, 5e3, 1e4, 2e4, 5e4, 1e5, 2e5, 5e5, 1e6];

/// A Prometheus histogram.
#[derive(Clone, Debug)]
struct Histogram {
    bounds: &'static [f64],
    counts: Vec<u64>,
    sum: f64,
}

impl Histogram {
    fn new(bounds: &'static [f64]) -> Self {
        Self { bounds, counts: vec![0; bounds.len() + 1], sum: 0.0 }
    }

    fn observe(&mut self, value: f64) {
        self.counts[self.bounds.partition_point(|bound| *bound < value)] += 1;
        self.sum += value;
    }

    fn render(&self, out: &mut String, name: &str, labels: &str, largest: f64) {
        let _ = writeln!(out, "# HELP vllm:{name} Histogram of {name}.\n# TYPE vllm:{name} histogram");
        let mut total = 0;
        for (at, count) in self.counts.iter().enumerate() {
            total += count;
            match self.bounds.get(at) {
                Some(bound) if *bound <= largest => {
                    let _ = writeln!(out, "vllm:{name}_bucket{{{labels},le=\"{bound:?}\"}} {total}.0");
                }
                _ => {}
            }
        }
        let _ = writeln!(out, "vllm:{name}_bucket{{{labels},le=\"+Inf\"}} {total}.0");
        let _ = writeln!(out, "vllm:{name}_count{{{labels}}} {total}.0\nvllm:{name}_sum{{{labels}}} {:?}", self.sum);
    }
}

/// How a sequence ended, as `finished_reason` says it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Ended {
    /// End of sequence.
    Stop = 0,
    /// Limit reached.
    Length = 1,
    /// The client left.
    Abort = 2,
    /// The engine failed.
    Error = 3,
}

const REASONS: [&str; 5] = ["stop", "length", "abort", "error", "repetition"];

/// A sequence that ended, for the histograms. Durations are `None` where it did not get that far.
#[derive(Clone, Copy, Debug)]
pub(super) struct Finished {
    /// How.
    pub(super) ended: Ended,
    /// Prompt tokens.
    pub(super) prompt: u32,
    /// Tokens generated.
    pub(super) generated: u32,
    /// Limit on generated tokens.
    pub(super) max_tokens: u32,
    /// Choices of its request.
    pub(super) n: u32,
    /// When it arrived, was first scheduled, emitted its first token; and now.
    pub(super) arrived: Duration,
    /// First time in a step.
    pub(super) scheduled: Option<Duration>,
    /// First token.
    pub(super) first: Option<Duration>,
    /// The end.
    pub(super) now: Duration,
}

/// Gauges, taken from the engine after each step.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Gauges {
    /// Running list.
    pub(super) running: usize,
    /// Waiting for capacity.
    pub(super) waiting: usize,
    /// Waiting for an adapter slot.
    pub(super) deferred: usize,
    /// Share of KV blocks in use.
    pub(super) kv_usage: f64,
}

/// All numbers of one server.
#[derive(Clone, Debug)]
pub(super) struct Stats {
    /// Taken after each step.
    pub(super) gauges: Gauges,
    /// Names of running and waiting adapters, comma-separated.
    pub(super) adapters: (String, String),
    /// Prompt tokens of requests that got their first token.
    pub(super) prompt_tokens: u64,
    /// Tokens generated.
    pub(super) generation_tokens: u64,
    /// Preemptions.
    pub(super) preemptions: u64,
    /// Refused by `--max-num-queued-reqs` and `-tokens`.
    pub(super) rejections: [u64; 2],
    ended: [u64; 5],
    ttft: Histogram,
    itl: Histogram,
    tpot: Histogram,
    e2e: Histogram,
    queue: Histogram,
    prefill: Histogram,
    decode: Histogram,
    inference: Histogram,
    iteration: Histogram,
    prompts: Histogram,
    generations: Histogram,
    limits: Histogram,
    choices: Histogram,
}

impl Default for Stats {
    fn default() -> Self {
        Self {
            gauges: Gauges::default(),
            adapters: Default::default(),
            prompt_tokens: 0,
            generation_tokens: 0,
            preemptions: 0,
            rejections: [0; 2],
            ended: [0; 5],
            ttft: Histogram::new(TTFT),
            itl: Histogram::new(ITL),
            tpot: Histogram::new(ITL),
            e2e: Histogram::new(E2E),
            queue: Histogram::new(E2E),
            prefill: Histogram::new(E2E),
            decode: Histogram::new(E2E),
            inference: Histogram::new(E2E),
            iteration: Histogram::new(ITERATION),
            prompts: Histogram::new(LENGTHS),
            generations: Histogram::new(LENGTHS),
            limits: Histogram::new(LENGTHS),
            choices: Histogram::new(CHOICES),
        }
    }
}

impl Stats {
    /// A step with this many tokens ended.
    pub(super) fn step(&mut self, tokens: u32) {
        self.iteration.observe(f64::from(tokens));
    }

    /// A first token, this long after the arrival.
    pub(super) fn first_token(&mut self, prompt: u32, after: Duration) {
        self.prompt_tokens += u64::from(prompt);
        self.generation_tokens += 1;
        self.ttft.observe(after.as_secs_f64());
    }

    /// Another token, this long after the one before.
    pub(super) fn next_token(&mut self, after: Duration) {
        self.generation_tokens += 1;
        self.itl.observe(after.as_secs_f64());
    }

    /// A sequence ended.
    pub(super) fn finish(&mut self, sequence: &Finished) {
        self.ended[sequence.ended as usize] += 1;
        let since = |from: Duration| sequence.now.saturating_sub(from).as_secs_f64();
        self.e2e.observe(since(sequence.arrived));
        self.prompts.observe(f64::from(sequence.prompt));
        self.generations.observe(f64::from(sequence.generated));
        self.limits.observe(f64::from(sequence.max_tokens));
        self.choices.observe(f64::from(sequence.n));
        if let Some(scheduled) = sequence.scheduled {
            self.queue.observe(scheduled.saturating_sub(sequence.arrived).as_secs_f64());
            self.inference.observe(since(scheduled));
            if let Some(first) = sequence.first {
                self.prefill.observe(first.saturating_sub(scheduled).as_secs_f64());
                self.decode.observe(since(first));
                if sequence.generated > 1 {
                    self.tpot.observe(since(first) / f64::from(sequence.generated - 1));
                }
            }
        }
    }

    /// Sequences that ended this way.
    pub(super) fn ended(&self, how: Ended) -> u64 {
        self.ended[how as usize]
    }

    /// The page. `cache` is the value of `num_gpu_blocks`; `max_loras` is 0 when LoRA is off.
    pub(super) fn render(
        &self,
        model: &str,
        blocks: u32,
        max_loras: u32,
        max_model_len: u32,
        unix_time: u64,
    ) -> String {
        let mut out = String::with_capacity(24 * 1024);
        let labels = format!("engine=\"0\",model_name={}", serde_json::json!(model));
        let Gauges { running, waiting, deferred, kv_usage } = self.gauges;
        let mut gauge = |name: &str, rows: &[(&str, f64)]| {
            let _ = writeln!(out, "# HELP vllm:{name} Value of {name}.\n# TYPE vllm:{name} gauge");
            for (extra, value) in rows {
                let _ = writeln!(out, "vllm:{name}{{{labels}{extra}}} {value:?}");
            }
        };
        gauge("num_requests_running", &[("", running as f64)]);
        gauge("num_requests_waiting", &[("", (waiting + deferred) as f64)]);
        gauge(
            "num_requests_waiting_by_reason",
            &[(",reason=\"capacity\"", waiting as f64), (",reason=\"deferred\"", deferred as f64)],
        );
        gauge("kv_cache_usage_perc", &[("", kv_usage)]);
        gauge(
            "engine_sleep_state",
            &[
                (",sleep_state=\"awake\"", 1.0),
                (",sleep_state=\"weights_offloaded\"", 0.0),
                (",sleep_state=\"discard_all\"", 0.0),
            ],
        );
        let mut counter = |name: &str, rows: &[(&str, u64)]| {
            let _ = writeln!(out, "# HELP vllm:{name}_total Number of {name}.\n# TYPE vllm:{name}_total counter");
            for (extra, value) in rows {
                let _ = writeln!(out, "vllm:{name}_total{{{labels}{extra}}} {value}.0");
            }
        };
        counter("prefix_cache_queries", &[("", 0)]);
        counter("prefix_cache_hits", &[("", 0)]);
        counter("num_preemptions", &[("", self.preemptions)]);
        counter("prompt_tokens", &[("", self.prompt_tokens)]);
        counter(
            "prompt_tokens_by_source",
            &[(",source=\"local_compute\"", self.prompt_tokens), (",source=\"local_cache_hit\"", 0)],
        );
        counter("generation_tokens", &[("", self.generation_tokens)]);
        let reasons = REASONS.map(|reason| format!(",finished_reason=\"{reason}\""));
        let rows: Vec<(&str, u64)> = reasons.iter().map(String::as_str).zip(self.ended).collect();
        counter("request_success", &rows);
        counter(
            "admission_rejections",
            &[
                (",reason=\"max_num_queued_reqs\"", self.rejections[0]),
                (",reason=\"max_num_queued_tokens\"", self.rejections[1]),
            ],
        );
        let longest = f64::from(max_model_len);
        for (name, histogram, largest) in [
            ("iteration_tokens_total", &self.iteration, f64::MAX),
            ("time_to_first_token_seconds", &self.ttft, f64::MAX),
            ("inter_token_latency_seconds", &self.itl, f64::MAX),
            ("request_time_per_output_token_seconds", &self.tpot, f64::MAX),
            ("e2e_request_latency_seconds", &self.e2e, f64::MAX),
            ("request_queue_time_seconds", &self.queue, f64::MAX),
            ("request_inference_time_seconds", &self.inference, f64::MAX),
            ("request_prefill_time_seconds", &self.prefill, f64::MAX),
            ("request_decode_time_seconds", &self.decode, f64::MAX),
            ("request_prompt_tokens", &self.prompts, longest),
            ("request_generation_tokens", &self.generations, longest),
            ("request_params_max_tokens", &self.limits, longest),
            ("request_params_n", &self.choices, f64::MAX),
        ] {
            histogram.render(&mut out, name, &labels, largest);
        }
        let _ = writeln!(
            out,
            "# HELP vllm:cache_config_info Information of the LLMEngine CacheConfig\n\
             # TYPE vllm:cache_config_info gauge\n\
             vllm:cache_config_info{{block_size=\"16\",cache_dtype=\"auto\",enable_prefix_caching=\"False\",\
             engine=\"0\",kv_cache_size_tokens=\"{}\",num_gpu_blocks=\"{blocks}\"}} 1.0",
            u64::from(blocks) * 16
        );
        if max_loras > 0 {
            let (running, waiting) = &self.adapters;
            let _ = writeln!(
                out,
                "# HELP vllm:lora_requests_info Running stats on lora requests.\n\
                 # TYPE vllm:lora_requests_info gauge\n\
                 vllm:lora_requests_info{{max_lora=\"{max_loras}\",running_lora_adapters=\"{running}\",\
                 waiting_lora_adapters=\"{waiting}\"}} {unix_time}.0"
            );
        }
        out
    }
}
