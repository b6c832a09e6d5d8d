//! Compares the cost model with single steps of real vLLM, over a grid of chunk, context and
//! decodes.
//!
//! The measured engine was synchronous: CPU and GPU worked one after the other. The CPU time is
//! modelled as 1.6 ms plus 1.64 times `schedule_ms` (fitted). A cell is the median of the steps
//! with the same chunk, context and decodes. The speed of this CPU varied by a factor of two. So
//! without graphs only steps of 1,024 tokens or more are compared, because they do not wait for the
//! CPU.

use std::collections::BTreeMap;
use std::io::Read;

use super::super::play::quantile;
use crate::machine::{Constants, CostModel, Gpu, Graphs, Layout, Model, Profile, StepLoad};

const DEFAULT: &[u8] = include_bytes!("../../../../tests/fixtures/h200/grid/grid-default.csv.gz");
const WIDE: &[u8] = include_bytes!("../../../../tests/fixtures/h200/grid/grid-graphs1280.csv.gz");
const EAGER: &[u8] = include_bytes!("../../../../tests/fixtures/h200/grid/grid-eager.csv.gz");

/// Warm-up steps at the beginning of each file.
const WARM_UP: usize = 60;
const HOST_MS: f64 = 1.6;
const HOST_PER_SCHEDULE: f64 = 1.64;
/// Without graphs, a step of this many tokens takes longer on the GPU than to launch.
const GPU_BOUND: u32 = 1024;

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Regime {
    /// Only decodes, in one graph.
    Full,
    /// A chunk of a prompt, with graphs around the attention.
    Piecewise,
    /// More tokens than the largest graph.
    Launched,
    Eager,
}

/// For each cell of a file: the regime, simulated / measured - 1, and a description.
fn cells(gz: &[u8], graphs: Option<u32>) -> Vec<(Regime, f64, String)> {
    let mut text = String::new();
    flate2::read::GzDecoder::new(gz).read_to_string(&mut text).unwrap();
    let profile = Profile::new(
        Gpu::load("h200").unwrap(),
        Model::load("llama-3.1-8b").unwrap(),
        Layout::default(),
        &Constants::on_host("quiet").unwrap(),
    );
    let graphs = graphs.map_or(Graphs::none(), |largest| Graphs::chosen(256, 8192, Some(largest)));
    let model = CostModel::new(&profile.unwrap(), 256, 8192).with_graphs(graphs.clone());
    let mut groups: BTreeMap<_, Vec<(f64, f64)>> = BTreeMap::new();
    for line in text.lines().skip(1 + WARM_UP) {
        let fields: Vec<f64> = line.split(',').skip(1).map(|field| field.parse().unwrap()).collect();
        let [chunk, chunks, context, decodes, decode_context, gpu_ms, _, schedule_ms] = fields[..] else {
            panic!("{line}")
        };
        let (chunk, context, decodes) = (chunk as u32, context as u32, decodes as u32);
        let mut load = StepLoad {
            tokens: decodes,
            sequences: decodes,
            context_read: decode_context as u64,
            ..StepLoad::default()
        };
        if chunks > 0.0 {
            load.add(context, chunk, false);
        }
        let regime = match () {
            () if graphs.largest() == 0 => Regime::Eager,
            () if load.tokens > graphs.largest() => Regime::Launched,
            () if load.prompts > 0 => Regime::Piecewise,
            () => Regime::Full,
        };
        let waits_for_the_host = graphs.largest() < load.tokens && load.tokens < GPU_BOUND;
        // A small chunk is the rest of a prompt, and in such a step the CPU also ends a request.
        // There are few such steps of each kind.
        if waits_for_the_host || (1..64).contains(&chunk) {
            continue;
        }
        let simulated = model.duration(&load).as_secs_f64() * 1e3 + HOST_MS + HOST_PER_SCHEDULE * schedule_ms;
        let context_of_one = decode_context as u32 / decodes.max(1);
        let key = (regime, chunk, context / 1024, decodes, context_of_one / 500);
        groups.entry(key).or_default().push((simulated, gpu_ms));
    }
    let cell = |(key, steps): (_, Vec<(f64, f64)>)| {
        let (regime, chunk, context, decodes, of_one): (Regime, u32, u32, u32, u32) = key;
        let median = |of: fn(&(f64, f64)) -> f64| quantile(steps.iter().map(of).collect(), 0.5);
        let error = median(|step| step.0) / median(|step| step.1) - 1.0;
        (regime, error, format!("chunk {chunk} at {context}k, {decodes} decodes at {}", 500 * of_one))
    };
    groups.into_iter().map(cell).collect()
}

#[test]
fn single_steps_of_every_regime_take_as_long_as_they_took() {
    let all: Vec<_> =
        [cells(DEFAULT, Some(512)), cells(WIDE, Some(1280)), cells(EAGER, None)].into_iter().flatten().collect();
    for (regime, bounds) in [
        (Regime::Full, (0.045, 0.08, 0.12)),
        (Regime::Piecewise, (0.035, 0.08, 0.3)),
        (Regime::Launched, (0.03, 0.06, 0.24)),
        (Regime::Eager, (0.03, 0.06, 0.24)),
    ] {
        let mut picked: Vec<_> = all.iter().filter(|cell| cell.0 == regime).collect();
        picked.sort_by(|a, b| a.1.abs().total_cmp(&b.1.abs()));
        let errors: Vec<f64> = picked.iter().map(|cell| cell.1.abs()).collect();
        let at = |q: f64| quantile(errors.clone(), q);
        let (_, worst, what) = picked.last().unwrap();
        let (median, p90) = (100.0 * at(0.5), 100.0 * at(0.9));
        println!(
            "{regime:?}: {} cells, median {median:.1} %, nine of ten within {p90:.1} %, worst {:+.1} % ({what})",
            picked.len(),
            100.0 * worst
        );
        assert!(at(0.5) <= bounds.0 && at(0.9) <= bounds.1 && at(1.0) <= bounds.2, "{regime:?}");
    }
    assert!(all.len() > 4000);
}
