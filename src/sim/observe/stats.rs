//! The numbers behind `/metrics`, and vLLM's buckets.
//!
//! Values change only when a step ends, so during a long step gauges are stale, as in vLLM. Times
//! are virtual: `--sim-speed` does not change them. `model_name` is the served base name. The label
//! sets are fixed, except for the gauge that lists combinations of adapters, at most
//! [`MAX_ADAPTER_SETS`].

use std::collections::BTreeMap;
use std::time::Duration;

use crate::engine::DraftStats;

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
const PREEMPTIONS: &[f64] = &[1.0, 2.0, 3.0, 4.0, 5.0, 10.0, 20.0];
const CHOICES: &[f64] = &[1.0, 2.0, 5.0, 10.0, 20.0];
const LENGTHS: &[f64] =
    &[1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1e3, 2e3, 5e3, 1e4, 2e4, 5e4, 1e5, 2e5, 5e5, 1e6];

const MAX_ADAPTER_SETS: usize = 256;

#[derive(Clone, Debug)]
pub(crate) struct Cumulative {
    /// Upper bounds, and the number of values up to each.
    pub(crate) buckets: Vec<(f64, u64)>,
    pub(crate) sum: f64,
    pub(crate) count: u64,
}

#[derive(Clone, Debug)]
pub(crate) struct Histogram {
    bounds: &'static [f64],
    counts: Vec<u64>,
    sum: f64,
}

impl Histogram {
    pub(crate) fn new(bounds: &'static [f64]) -> Self {
        Self { bounds, counts: vec![0; bounds.len() + 1], sum: 0.0 }
    }

    pub(crate) fn observe(&mut self, value: f64) {
        self.counts[self.bounds.partition_point(|bound| *bound < value)] += 1;
        self.sum += value;
    }

    /// The histogram as Prometheus shows it, without the buckets above `largest`.
    pub(crate) fn cumulative(&self, largest: f64) -> Cumulative {
        let mut total = 0;
        let mut buckets = Vec::with_capacity(self.bounds.len());
        for (bound, count) in self.bounds.iter().zip(&self.counts) {
            total += count;
            if *bound <= largest {
                buckets.push((*bound, total));
            }
        }
        Cumulative { buckets, sum: self.sum, count: self.counts.iter().sum() }
    }
}

/// How a sequence ended: vLLM's `finished_reason`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Ended {
    Stop = 0,
    Length = 1,
    Abort = 2,
    Error = 3,
}

pub(crate) const REASONS: [&str; 5] = ["stop", "length", "abort", "error", "repetition"];

/// A sequence that ended. Times are virtual. A time is `None` if the sequence ended before it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Finished {
    pub(crate) ended: Ended,
    pub(crate) prompt: u32,
    pub(crate) generated: u32,
    pub(crate) max_tokens: u32,
    pub(crate) n: u32,
    /// Prompt tokens found in the prefix cache.
    pub(crate) cached: u32,
    pub(crate) preempted: u32,
    pub(crate) arrived: Duration,
    pub(crate) scheduled: Option<Duration>,
    pub(crate) first: Option<Duration>,
    pub(crate) now: Duration,
}

/// Gauges, taken from the engine after each step.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Gauges {
    pub(crate) running: usize,
    pub(crate) waiting: usize,
    /// Waiting for an adapter slot.
    pub(crate) deferred: usize,
    pub(crate) kv_usage: f64,
}

#[derive(Clone, Debug)]
pub(crate) struct Stats {
    pub(crate) gauges: Gauges,
    /// Combinations of adapters with requests (comma-separated names), with the Unix time at which
    /// each was last seen.
    pub(crate) adapters: BTreeMap<String, f64>,
    /// Tokens looked up in the prefix cache, and tokens found there.
    pub(crate) prefix: (u64, u64),
    /// Blocks in the prefix cache.
    pub(crate) prefix_blocks: usize,
    /// Speculative decoding; `None` without it.
    pub(crate) drafts: Option<DraftStats>,
    pub(crate) sleep: Option<u8>,
    /// Prompt tokens found in the prefix cache, of requests with a first token.
    pub(crate) cached_tokens: u64,
    /// Prompt tokens of requests with a first token.
    pub(crate) prompt_tokens: u64,
    pub(crate) generation_tokens: u64,
    pub(crate) preemptions: u64,
    /// Most sequences at once, waiting or running.
    pub(crate) most: u64,
    /// Requests refused by `--max-num-queued-reqs` and by `--max-num-queued-tokens`.
    pub(crate) rejections: [u64; 2],
    pub(crate) ended: [u64; 5],
    pub(crate) ttft: Histogram,
    pub(crate) itl: Histogram,
    pub(crate) tpot: Histogram,
    pub(crate) e2e: Histogram,
    pub(crate) queue: Histogram,
    pub(crate) prefill: Histogram,
    pub(crate) decode: Histogram,
    pub(crate) inference: Histogram,
    pub(crate) iteration: Histogram,
    pub(crate) prompts: Histogram,
    pub(crate) generations: Histogram,
    pub(crate) limits: Histogram,
    pub(crate) choices: Histogram,
    pub(crate) preempted: Histogram,
    pub(crate) computed: Histogram,
}

impl Default for Stats {
    fn default() -> Self {
        Self {
            gauges: Gauges::default(),
            adapters: BTreeMap::new(),
            prefix: (0, 0),
            prefix_blocks: 0,
            drafts: None,
            sleep: None,
            cached_tokens: 0,
            prompt_tokens: 0,
            generation_tokens: 0,
            preemptions: 0,
            most: 0,
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
            preempted: Histogram::new(PREEMPTIONS),
            computed: Histogram::new(LENGTHS),
        }
    }
}

impl Stats {
    pub(crate) fn step(&mut self, tokens: u32) {
        self.iteration.observe(f64::from(tokens));
    }

    /// Counts tokens that came together with another token, such as accepted drafts.
    pub(crate) fn more_tokens(&mut self, tokens: u32) {
        self.generation_tokens += u64::from(tokens);
    }

    /// Counts a first token, this long after the arrival of the request.
    pub(crate) fn first_token(&mut self, prompt: u32, cached: u32, after: Duration) {
        self.prompt_tokens += u64::from(prompt);
        self.cached_tokens += u64::from(cached);
        self.generation_tokens += 1;
        self.ttft.observe(after.as_secs_f64());
    }

    /// Counts another token, this long after the token before.
    pub(crate) fn next_token(&mut self, after: Duration) {
        self.generation_tokens += 1;
        self.itl.observe(after.as_secs_f64());
    }

    /// Records which adapters have requests. vLLM keeps all combinations; the simulator keeps the
    /// latest [`MAX_ADAPTER_SETS`].
    pub(crate) fn record_adapters(&mut self, names: String, now: f64) {
        self.adapters.insert(names, now);
        while self.adapters.len() > MAX_ADAPTER_SETS {
            let oldest = self.adapters.iter().min_by(|a, b| a.1.total_cmp(b.1)).map(|(names, _)| names.clone());
            oldest.map(|names| self.adapters.remove(&names));
        }
    }

    pub(crate) fn finish(&mut self, sequence: &Finished) {
        self.ended[sequence.ended as usize] += 1;
        let since = |from: Duration| sequence.now.saturating_sub(from).as_secs_f64();
        self.e2e.observe(since(sequence.arrived));
        self.prompts.observe(f64::from(sequence.prompt));
        self.generations.observe(f64::from(sequence.generated));
        self.limits.observe(f64::from(sequence.max_tokens));
        self.choices.observe(f64::from(sequence.n));
        self.preempted.observe(f64::from(sequence.preempted));
        if let Some(scheduled) = sequence.scheduled {
            self.queue.observe(scheduled.saturating_sub(sequence.arrived).as_secs_f64());
            self.inference.observe(since(scheduled));
            if let Some(first) = sequence.first {
                self.prefill.observe(first.saturating_sub(scheduled).as_secs_f64());
                self.decode.observe(since(first));
                self.computed.observe(f64::from(sequence.prompt - sequence.cached.min(sequence.prompt)));
                if sequence.generated > 1 {
                    self.tpot.observe(since(first) / f64::from(sequence.generated - 1));
                }
            }
        }
    }

    pub(crate) fn ended(&self, how: Ended) -> u64 {
        self.ended[how as usize]
    }
}
