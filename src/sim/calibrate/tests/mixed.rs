//! Compares mixed traffic, measured through the gateway on two H200s, with two simulated engines at
//! the same arrivals.
//!
//! [`Gateway`] is a simple model of the measured gateway: it chooses the backend with the least
//! work by tokens and pace, gives permits for long prefills until the first token, and spills. (The
//! laboratory places requests as the current gateway does.) A request is placed when the whole body
//! has arrived, which takes [`BODY`] for a long prompt. Arrivals and classes are those of `sluice
//! bench` with the same seed. Only the jitter and the delay of bodies differ between draws.
//!
//! The constants of the host, but not of the GPU, were fitted to these rows.
//! [`fit_without_each_row`] predicts each row from the others. `cargo test -p sluice-sim
//! calibrate::tests::mixed -- --nocapture` prints the table.

use std::cmp::Reverse;
use std::time::Duration;

use super::super::play::{Life, mean, quantile};
use crate::engine::{Engine, EngineConfig, Request};
use crate::machine::{Constants, CostModel, Gpu, Graphs, Layout, Model, Profile};
use crate::virtual_server::{FrontEnd, StepEnd, VirtualServer};
use sluice_core::base::Rng;

const MEASURED: &str = include_str!("../../../../tests/fixtures/h200/mixed.csv");

/// Prompt and output tokens of short and long requests.
const LENGTHS: [(u32, u32); 2] = [(200, 128), (16_000, 64)];
/// Range of the time to receive a long body, seconds; spread evenly over the draws.
const BODY: (f64, f64) = (1e-3, 3e-3);
const REQUESTS: u64 = 1440;
const RATE: f64 = 32.0;
const SEED: u64 = 11;
/// Simulations of each arrangement, each with another jitter and another delay of bodies.
const DRAWS: u64 = 7;
/// Assumed graph sizes above 256 for the runs with graphs up to 1,280 tokens. Only their number,
/// six, is known.
const WIDE: [u32; 6] = [384, 512, 768, 896, 1024, 1280];
/// TTFT P50 and P99, mean TPOT, ITL P99, E2EL P50 and P99, each for short and for long requests.
const CELLS: [&str; 6] = ["TTFT50", "TTFT99", "TPOT", "ITL99", "E2EL50", "E2EL99"];
type Cells = [[f64; 6]; 2];
/// All cells but the ITL and the median TTFT, which lies between requests that meet a long prefill
/// and requests that do not.
const JUDGED: [usize; 4] = [1, 2, 4, 5];
/// The cells of a fit. Without the ITL, a fit would choose a CPU whose times vary more than the
/// measured times did.
const FITTED: [usize; 5] = [1, 2, 3, 4, 5];

#[derive(Clone, Copy, Debug, PartialEq)]
enum Policy {
    Robin,
    Pool,
    Sides,
}

#[derive(Clone, Debug)]
struct Arrangement {
    name: String,
    policy: Policy,
    thresholds: [u32; 2],
    budgets: [u32; 2],
    permits: [usize; 2],
    graphs: u32,
    measured: Cells,
}

fn arrangements() -> Vec<Arrangement> {
    let lines: Vec<Vec<&str>> =
        MEASURED.lines().filter(|line| !line.starts_with('#')).skip(1).map(|line| line.split(',').collect()).collect();
    let arrangement = |pair: &[Vec<&str>]| {
        let [short, long] = pair else { panic!("a short and a long line each") };
        assert_eq!((short[..8].concat(), short[8], long[8]), (long[..8].concat(), "short", "long"));
        let number = |at: usize| short[at].parse::<u32>().unwrap();
        let policy = match short[1] {
            "robin" => Policy::Robin,
            "pool" => Policy::Pool,
            _ => Policy::Sides,
        };
        // 0 in the file means no limit, which is as many permits as requests.
        let permits = [5, 6].map(|at| if number(at) == 0 { REQUESTS as usize } else { number(at) as usize });
        let cells = |line: &[&str]| std::array::from_fn(|cell| line[9 + cell].parse().unwrap());
        Arrangement {
            name: short[0].to_owned(),
            policy,
            thresholds: [number(2), number(3)],
            budgets: [8192, number(4)],
            permits,
            graphs: number(7),
            measured: [cells(short), cells(long)],
        }
    };
    lines.chunks(2).map(arrangement).collect()
}

/// The random generator that `sluice bench` has for one purpose (1: arrivals, 2: classes) and one
/// request.
fn draw(purpose: u64, ordinal: u64) -> Rng {
    let first = Rng::new(SEED + purpose).next_u64();
    Rng::new(Rng::new(first ^ ordinal).next_u64())
}

/// For each request: the time at which it can be placed, the time at which it was sent in seconds,
/// and whether it is long. Latest first.
fn arrivals(seed: u64) -> Vec<(Duration, f64, bool)> {
    let body = BODY.0 + (BODY.1 - BODY.0) * seed as f64 / (DRAWS - 1) as f64;
    let (mut rng, mut at) = (draw(1, 0), 0.0);
    let mut sent = Vec::new();
    for ordinal in 0..REQUESTS {
        at += rng.exponential() / RATE;
        sent.push((at, draw(2, ordinal).unit() >= 30.0 / 32.0));
    }
    let stretch = REQUESTS as f64 / RATE / at;
    let placed = |(at, long): (f64, bool)| {
        let sent = at * stretch;
        (Duration::from_secs_f64(sent + if long { body } else { 0.0 }), sent, long)
    };
    let mut arrivals: Vec<_> = sent.into_iter().map(placed).collect();
    arrivals.sort_by_key(|(placed, ..)| Reverse(*placed));
    arrivals
}

struct Backend {
    server: VirtualServer,
    tokens: u64,
    requests: usize,
    permits: usize,
    prefills: usize,
    seconds_per_token: Option<f64>,
}

struct Gateway {
    policy: Policy,
    backends: Vec<Backend>,
    lives: Vec<Life>,
    gaps: [Vec<f64>; 2],
    queue: Vec<u64>,
}

impl Gateway {
    fn new(profile: &Profile, arrangement: &Arrangement, seed: u64) -> Self {
        let backend = |at: usize| {
            let (max_num_seqs, budget) = (256, arrangement.budgets[at]);
            let config = EngineConfig {
                max_num_seqs,
                max_num_batched_tokens: budget,
                long_prefill_token_threshold: arrangement.thresholds[at],
                num_blocks: profile.memory.kv_tokens / 16,
                seed: 2 * seed + at as u64,
                ..EngineConfig::default()
            };
            let graphs = match arrangement.graphs {
                512 => Graphs::chosen(max_num_seqs, budget, None),
                _ => Graphs::of_sizes(
                    [1, 2, 4].into_iter().chain((8..=256).step_by(8)).chain(WIDE).collect(),
                    max_num_seqs,
                    budget,
                ),
            };
            let cost = CostModel::new(profile, max_num_seqs, budget).with_graphs(graphs);
            let server = VirtualServer::new(Engine::new(config, cost), FrontEnd::new(&profile.front_end));
            let permits = arrangement.permits[at];
            Backend { server, tokens: 0, requests: 0, permits, prefills: 0, seconds_per_token: None }
        };
        let backends = vec![backend(0), backend(1)];
        Self {
            policy: arrangement.policy,
            backends,
            lives: Vec::new(),
            gaps: [Vec::new(), Vec::new()],
            queue: Vec::new(),
        }
    }

    /// The backend for a request; `None` if it must wait for a permit.
    fn choose(&self, id: u64, long: bool) -> Option<usize> {
        let fits = |at: &usize| !long || self.backends[*at].prefills < self.backends[*at].permits;
        let tokens = |at: usize| {
            self.backends[at].tokens + u64::from(LENGTHS[usize::from(long)].0 + LENGTHS[usize::from(long)].1)
        };
        let paces = self.backends.iter().filter_map(|backend| backend.seconds_per_token);
        let fastest = paces.fold(f64::INFINITY, f64::min);
        let work =
            |at: usize| tokens(at) as f64 * self.backends[at].seconds_per_token.unwrap_or(fastest).min(8.0 * fastest);
        match self.policy {
            Policy::Robin => Some(id as usize % 2),
            Policy::Sides if !long => Some(0),
            Policy::Sides => [1, 0].into_iter().filter(fits).min_by_key(|at| self.backends[*at].prefills),
            Policy::Pool if fastest.is_infinite() => {
                (0..2).filter(fits).min_by_key(|at| (tokens(*at), self.backends[*at].requests))
            }
            Policy::Pool => (0..2).filter(fits).min_by(|a, b| work(*a).total_cmp(&work(*b))),
        }
    }

    fn send(&mut self, now: Duration, id: u64, to: usize) {
        let long = !self.lives[id as usize].counts;
        let (prompt_tokens, output_tokens) = LENGTHS[usize::from(long)];
        let backend = &mut self.backends[to];
        backend.prefills += usize::from(long);
        backend.tokens += u64::from(prompt_tokens + output_tokens);
        backend.requests += 1;
        backend.server.submit(now, [Request { id, prompt_tokens, output_tokens, ..Request::default() }]);
    }

    fn receive(&mut self, now: Duration, from: usize, end: StepEnd) {
        for token in end.emitted {
            let life = &mut self.lives[token.id as usize];
            let long = !life.counts;
            let (backend, seen) = (&mut self.backends[from], now.as_secs_f64());
            life.tokens += 1;
            if token.first {
                life.first = seen;
                backend.prefills -= usize::from(long);
            } else {
                self.gaps[usize::from(long)].push((seen - life.last) * 1e3);
            }
            life.last = seen;
            if token.last {
                let tpot = life.tpot();
                backend.seconds_per_token =
                    Some(backend.seconds_per_token.map_or(tpot, |mean| mean + 0.1 * (tpot - mean)));
                backend.tokens -= u64::from(LENGTHS[usize::from(long)].0 + LENGTHS[usize::from(long)].1);
                backend.requests -= 1;
            }
        }
        while let Some(id) = self.queue.first().copied()
            && let Some(to) = self.choose(id, true)
        {
            self.queue.remove(0);
            self.send(now, id, to);
        }
    }

    fn run(mut self, seed: u64) -> Cells {
        let mut arrivals = arrivals(seed);
        let mut sent = 0;
        loop {
            let event = (0..2).filter_map(|at| Some((self.backends[at].server.next_at()?, at))).min();
            match (event, arrivals.last().copied()) {
                (None, None) => break,
                (event, Some((at, began, long))) if event.is_none_or(|(event, _)| at < event) => {
                    arrivals.pop();
                    self.lives.push(Life { sent: began, counts: !long, ..Life::default() });
                    match self.choose(sent, long) {
                        Some(to) => self.send(at, sent, to),
                        None => self.queue.push(sent),
                    }
                    sent += 1;
                }
                (Some((at, from)), _) => {
                    if let Some(end) = self.backends[from].server.poll(at) {
                        self.receive(at, from, end);
                    }
                }
                (None, Some(_)) => unreachable!("an arrival without an event before it is taken"),
            }
        }
        let cells = |long: bool| {
            let lives: Vec<&Life> = self.lives.iter().filter(|life| life.counts != long).collect();
            let column = |of: fn(&Life) -> f64, q: f64| quantile(lives.iter().map(|life| of(life)).collect(), q);
            let tpot = mean(lives.iter().map(|life| life.tpot()));
            let gap = quantile(self.gaps[usize::from(long)].clone(), 0.99);
            let (ttft, e2el) = (Life::ttft as fn(&Life) -> f64, Life::e2el as fn(&Life) -> f64);
            [column(ttft, 0.5), column(ttft, 0.99), tpot, gap, column(e2el, 0.5), column(e2el, 0.99)]
        };
        [cells(false), cells(true)]
    }
}

/// The cells of every draw of every arrangement with these constants.
fn play_all(constants: &Constants, arrangements: &[Arrangement]) -> Vec<Vec<Cells>> {
    let (gpu, model) = (Gpu::load("h200").unwrap(), Model::load("llama-3.1-8b").unwrap());
    let profile = Profile::new(gpu, model, Layout::default(), constants).unwrap();
    let play = |arrangement: &Arrangement| {
        (0..DRAWS).map(|seed| Gateway::new(&profile, arrangement, seed).run(seed)).collect()
    };
    arrangements.iter().map(play).collect()
}

fn cell(draws: &[Cells], kind: usize, cell: usize) -> f64 {
    quantile(draws.iter().map(|draw| draw[kind][cell]).collect(), 0.5)
}

/// Relative errors of these cells: short requests, then long ones.
fn errors(arrangement: &Arrangement, draws: &[Cells], cells: &[usize]) -> Vec<f64> {
    let error = |kind: usize, at: usize| cell(draws, kind, at) / arrangement.measured[kind][at] - 1.0;
    (0..2).flat_map(|kind| cells.iter().map(move |at| error(kind, *at))).collect()
}

fn show(arrangement: &Arrangement, draws: &[Cells]) {
    for (kind, name) in ["short", "long"].iter().enumerate() {
        let shown = |at: usize| {
            let (measured, simulated) = (arrangement.measured[kind][at], cell(draws, kind, at));
            format!("{measured:7.1} {simulated:7.1} {:+5.1}%", 100.0 * (simulated / measured - 1.0))
        };
        let row: Vec<String> = (0..CELLS.len()).map(shown).collect();
        println!("{:21} {name:5} {}", arrangement.name, row.join(" | "));
    }
}

/// Relative differences between the judged cells of single draws and their median.
fn scatter(draws: &[Cells]) -> Vec<f64> {
    let of = |kind: usize, at: usize| {
        let median = cell(draws, kind, at);
        draws.iter().map(move |draw| draw[kind][at] / median - 1.0)
    };
    (0..2).flat_map(|kind| JUDGED.into_iter().flat_map(move |at| of(kind, at))).collect()
}

fn spread(errors: impl Iterator<Item = f64>) -> (f64, f64) {
    let errors: Vec<f64> = errors.map(f64::abs).collect();
    (quantile(errors.clone(), 0.5), quantile(errors, 1.0))
}

#[test]
fn the_load_is_the_one_that_was_sent() {
    let arrivals = arrivals(0);
    assert_eq!(arrivals.iter().filter(|(.., long)| *long).count(), 91);
    assert!((arrivals.iter().map(|(_, sent, _)| *sent).fold(0.0, f64::max) - 45.0).abs() < 1e-9);
}

#[test]
fn mixed_traffic_through_the_gateway_comes_out_as_measured() {
    let arrangements = arrangements();
    let played = play_all(&Constants::on_host("busy").unwrap(), &arrangements);
    println!("measured, simulated, error: {}", CELLS.join(", "));
    arrangements.iter().zip(&played).for_each(|(arrangement, draws)| show(arrangement, draws));
    let all: Vec<f64> = arrangements.iter().zip(&played).flat_map(|(row, draws)| errors(row, draws, &JUDGED)).collect();
    let beyond = all.iter().filter(|error| error.abs() > 0.125).count();
    let (median, largest) = spread(all.into_iter());
    println!("judged cells: median error {:.1} %, largest {:.1} %", 100.0 * median, 100.0 * largest);
    let (usual, most) = spread(played.iter().flat_map(|draws| scatter(draws)));
    println!(
        "single draws differ from their median by {:.1} % (median), {:.1} % (largest)",
        100.0 * usual,
        100.0 * most
    );
    // The cell beyond 12.5 % is the second-worst of 91 long requests where prefills are not cut. A
    // single placement decides its value.
    assert!(median <= 0.04 && beyond <= 1 && largest <= 0.18, "{median:.3} {beyond} {largest:.3}");
}

/// The constants of the host that are fitted to the rows, with the range that is searched: from
/// below the fastest measured host (`quiet`) to beyond the slowest.
const HOST: [(&str, &str, [f64; 2]); 4] = [
    ("host", "jitter", [0.03, 0.4]),
    ("front_end", "first_token_us", [0.5, 1.5]),
    ("front_end", "token_us", [25.0, 60.0]),
    ("front_end", "in_us", [1800.0, 5000.0]),
];

/// Constants that are not fitted, because each affects a single row, which a fit to the other rows
/// cannot predict. `launch_layer_us`: timed on another machine (traffic_steps.csv: 23.5 ms from the
/// plan of a step to its launch, of which 2 ms prepare the step, for 32 layers). `piecewise_share`:
/// timed on the machine of grid/.
const LAUNCH: [(&str, f64); 2] = [("launch_layer_us", 670.0), ("piecewise_share", 0.34)];

fn host(values: [f64; 4]) -> Constants {
    let mut table = Constants::on_host("busy").unwrap().table();
    for (key, value) in LAUNCH {
        table["host"][key] = toml::Value::Float(value);
    }
    for ((part, key, _), value) in HOST.iter().zip(values) {
        table[*part][*key] = toml::Value::Float(value);
    }
    Constants::parse("fit", &table.to_string()).unwrap()
}

/// The distance of each row from the measurement: the sum over cells of |log(simulated /
/// measured)|, in which the part beyond 0.1 counts four times.
fn distances(values: [f64; 4], rows: &[Arrangement]) -> Vec<f64> {
    let cells = play_all(&host(values), rows);
    let error = |error: f64| error.ln_1p().abs() + 3.0 * (error.ln_1p().abs() - 0.1).max(0.0);
    rows.iter().zip(&cells).map(|(row, cells)| errors(row, cells, &FITTED).into_iter().map(error).sum()).collect()
}

/// Random starting points; the fit continues from the best. A single point can lead to twice the
/// distance.
const POINTS: usize = 200;
/// The most passes over all constants with one size of move.
const PASSES: usize = 6;

/// Random points, uniform in the logarithms of the ranges of [`HOST`].
fn points() -> Vec<[f64; 4]> {
    let mut rng = Rng::new(1);
    let mut between = |[low, high]: [f64; 2]| low * (high / low).powf(rng.unit());
    (0..POINTS).map(|_| HOST.map(|(.., range)| between(range))).collect()
}

/// Searches for the constants with the least distance to `rows`, and returns the distance and the
/// constants. Moves one constant at a time, by less once no move helps.
fn fit(rows: &[Arrangement], start: [f64; 4]) -> (f64, [f64; 4]) {
    let of = |values: [f64; 4]| distances(values, rows).iter().sum::<f64>();
    let mut best = (of(start), start);
    for share in [0.15, 0.07, 0.03] {
        let moves = [1.0 + share, 1.0 / (1.0 + share)];
        for _ in 0..PASSES {
            let before = best.0;
            for (at, factor) in (0..HOST.len()).flat_map(|at| moves.map(|factor| (at, factor))) {
                let mut tried = best.1;
                tried[at] *= factor;
                let distance = of(tried);
                if distance < best.0 {
                    best = (distance, tried);
                }
            }
            if best.0 == before {
                break;
            }
        }
    }
    best
}

/// Applies `work` to each of `items` on all cores. The results are in the order of the items.
fn on_all_cores<T: Sync, R: Send>(items: &[T], work: impl Fn(&T) -> R + Sync) -> Vec<R> {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let share = items.len().div_ceil(cores);
    let work = &work;
    std::thread::scope(|scope| {
        let threads: Vec<_> =
            items.chunks(share).map(|items| scope.spawn(move || items.iter().map(work).collect::<Vec<R>>())).collect();
        threads.into_iter().flat_map(|thread| thread.join().unwrap()).collect()
    })
}

#[test]
#[ignore = "slow: 200 points and nine fits; each row predicted by a fit to the others"]
fn fit_without_each_row() {
    let rows = arrangements();
    let points = points();
    let known = on_all_cores(&points, |point| distances(*point, &rows));
    let best =
        |distance: &dyn Fn(usize) -> f64| (0..POINTS).min_by(|a, b| distance(*a).total_cmp(&distance(*b))).unwrap();
    let of_all = |at: usize| known[at].iter().sum::<f64>();
    let without = |out: &usize| {
        let others: Vec<Arrangement> =
            rows.iter().enumerate().filter(|(at, _)| at != out).map(|(_, row)| row.clone()).collect();
        let (distance, fitted) = fit(&others, points[best(&|at| of_all(at) - known[at][*out])]);
        (distance, fitted, play_all(&host(fitted), &rows[*out..=*out]).remove(0))
    };
    println!("fit to all rows: {:.3?}", fit(&rows, points[best(&of_all)]));
    let found = on_all_cores(&(0..rows.len()).collect::<Vec<_>>(), without);
    for (row, (distance, fitted, played)) in rows.iter().zip(&found) {
        let constants: Vec<String> =
            HOST.iter().zip(fitted).map(|((_, key, _), value)| format!("{key} {value:.3}")).collect();
        println!("without {}: distance {distance:.3}, {}", row.name, constants.join(", "));
        show(row, played);
    }
    let (median, largest) =
        spread(rows.iter().zip(&found).flat_map(|(row, (.., played))| errors(row, played, &JUDGED)));
    println!("rows that the fit has not seen: median error {:.1} %, largest {:.1} %", 100.0 * median, 100.0 * largest);
}
