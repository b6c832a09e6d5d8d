//! Compares arrangements measured on two H200s with simulations of the same load.
//!
//! Arrivals are Poisson for 20 s. The measurement is a single draw of arrivals. The simulation has
//! [`DRAWS`] draws, of which the median, the lowest and the highest are shown. `cargo test -p
//! sluice-sim calibrate::tests::arrangements -- --nocapture` prints the table.

use std::collections::BTreeMap;
use std::time::Duration;

use super::super::play::{Life, quantile};
use crate::engine::{Engine, EngineConfig, Request};
use crate::machine::{Constants, CostModel, Gpu, Layout, Model, Profile};
use crate::virtual_server::{FrontEnd, VirtualServer};
use sluice_core::base::Rng;

#[derive(Clone, Copy)]
struct Server {
    budget: u32,
    threshold: u32,
}

const DEFAULT: Server = Server { budget: 8192, threshold: 0 };

fn virtual_server(server: Server) -> VirtualServer {
    let profile = Profile::new(
        Gpu::load("h200").unwrap(),
        Model::load("llama-3.1-8b").unwrap(),
        Layout::default(),
        &Constants::on_host("quiet").unwrap(),
    )
    .unwrap();
    let config = EngineConfig {
        max_num_seqs: 256,
        max_num_batched_tokens: server.budget,
        long_prefill_token_threshold: server.threshold,
        chunked_prefill: true,
        num_blocks: profile.memory.kv_tokens / 16,
        seed: 7,
        ..EngineConfig::default()
    };
    let cost = CostModel::new(&profile, 256, server.budget);
    VirtualServer::new(Engine::new(config, cost), FrontEnd::new(&profile.front_end))
}

#[derive(Clone, Copy)]
enum Routing {
    RoundRobin,
    /// Each request goes to the server with the fewest requests; on a tie, to the first server.
    FewestInFlight,
    Split,
    /// Short requests go to the first server. The second server has at most this many long
    /// requests, and further long requests wait.
    LongInFlight(usize),
    /// As `LongInFlight`, but a long request needs a permit, which it returns at the first token.
    /// The numbers are the permits of the second and of the first server.
    Permits(usize, usize),
}

const LONG: u32 = 16_000;

/// Poisson arrivals for 20 s on `servers`: short requests (200 prompt and 128 output tokens), whose
/// [`Life::counts`] is set, and long ones (16,000 and 64).
fn open_loop(servers: &[Server], rates: (f64, f64), routing: Routing, draw: u64) -> Vec<Life> {
    let mut running_servers: Vec<VirtualServer> = servers.iter().map(|server| virtual_server(*server)).collect();
    let mut arrivals = Vec::new();
    for (rate, prompt, output, seed) in [(rates.0, 200, 128, 2 * draw), (rates.1, LONG, 64, 2 * draw + 1)] {
        let mut rng = Rng::new(seed);
        // A rate of zero has its first arrival at infinity.
        let mut at = rng.exponential() / rate;
        while at <= 20.0 {
            arrivals.push((at, prompt, output));
            at += rng.exponential() / rate;
        }
    }
    arrivals.sort_by(|a, b| b.0.total_cmp(&a.0));
    let mut lives: BTreeMap<u64, Life> = BTreeMap::new();
    let (mut permits, queues) = match routing {
        Routing::Permits(long, short) => ([short, long], true),
        Routing::LongInFlight(most) => ([0, most], true),
        _ => ([0; 2], false),
    };
    let back_at_the_first_token = matches!(routing, Routing::Permits(..));
    let mut in_flight = vec![0u32; running_servers.len()];
    let mut queue: Vec<u64> = Vec::new();
    let mut count = 0;
    loop {
        let step = (0..running_servers.len()).filter_map(|at| Some((running_servers[at].next_at()?, at))).min();
        let arrival = arrivals.last().map(|(at, ..)| Duration::from_secs_f64(*at));
        let now = match (step, arrival) {
            (None, None) => break,
            (Some((at, _)), Some(next)) if next < at => next,
            (None, Some(next)) => next,
            (Some((at, _)), _) => at,
        };
        if arrival == Some(now) {
            let (at, prompt, output) = arrivals.pop().unwrap();
            lives.insert(count, Life { sent: at, counts: prompt != LONG, ..Life::default() });
            let home = match routing {
                _ if running_servers.len() == 1 => Some(0),
                Routing::RoundRobin => Some(count as usize % running_servers.len()),
                Routing::FewestInFlight => (0..running_servers.len()).min_by_key(|at| in_flight[*at]),
                Routing::Split => Some(usize::from(prompt == LONG)),
                Routing::Permits(..) | Routing::LongInFlight(_) => (prompt != LONG).then_some(0),
            };
            let request = Request {
                id: count,
                prompt_tokens: prompt,
                output_tokens: output,
                adapter: None,
                ..Request::default()
            };
            match home {
                Some(home) => {
                    in_flight[home] += 1;
                    running_servers[home].submit(now, [request]);
                }
                None => queue.push(count),
            }
            count += 1;
        } else if let Some((_, at)) = step
            && let Some(end) = running_servers[at].poll(now)
        {
            for token in end.emitted {
                let life = lives.get_mut(&token.id).unwrap();
                life.tokens += 1;
                if token.first {
                    life.first = now.as_secs_f64();
                }
                if token.last {
                    life.last = now.as_secs_f64();
                    in_flight[at] -= 1;
                }
                let back = if back_at_the_first_token { token.first } else { token.last };
                permits[at] += usize::from(queues && back && !life.counts);
            }
        }
        for side in [1, 0] {
            while permits[side] > 0 && !queue.is_empty() {
                permits[side] -= 1;
                in_flight[side] += 1;
                let request = Request {
                    id: queue.remove(0),
                    prompt_tokens: LONG,
                    output_tokens: 64,
                    adapter: None,
                    ..Request::default()
                };
                running_servers[side].submit(now, [request]);
            }
        }
    }
    lives.into_values().collect()
}

const DRAWS: u64 = 15;

/// Medians over the draws, in ms: TTFT p50 and p99 and E2EL p99 of short requests, then of long
/// ones.
fn tails(name: &str, servers: &[Server], rates: (f64, f64), routing: Routing, measured: [f64; 6]) -> [f64; 6] {
    let draws: Vec<[f64; 6]> = (0..DRAWS)
        .map(|draw| {
            let lives = open_loop(servers, rates, routing, draw);
            let column = |long: bool, of: fn(&Life) -> f64, q: f64| {
                let values: Vec<f64> = lives.iter().filter(|life| life.counts != long).map(of).collect();
                if values.is_empty() { f64::NAN } else { quantile(values, q) }
            };
            [
                column(false, Life::ttft, 0.5),
                column(false, Life::ttft, 0.99),
                column(false, Life::e2el, 0.99),
                column(true, Life::ttft, 0.5),
                column(true, Life::ttft, 0.99),
                column(true, Life::e2el, 0.99),
            ]
        })
        .collect();
    let at = |q: f64| std::array::from_fn::<f64, 6, _>(|at| quantile(draws.iter().map(|draw| draw[at]).collect(), q));
    let show = |values: [f64; 6]| values.map(|value| format!("{value:9.1}")).join(" ");
    println!("{name:<20} measured  {}", show(measured));
    println!("{:<20} simulated {}   (lowest  {})", "", show(at(0.5)), show(at(0.0)));
    println!("{:<20}           {:59}   (highest {})", "", "", show(at(1.0)));
    // The tails depend on 40 long requests and vary too much to be checked.
    for column in [0, 3].into_iter().filter(|column| measured[*column].is_finite()) {
        let (low, high) = (at(0.0)[column] * 0.9, at(1.0)[column] * 1.1);
        assert!((low..high).contains(&measured[column]), "{name}: {} is not in {low}..{high}", measured[column]);
    }
    at(0.5)
}

#[test]
fn the_three_arrangements_differ_as_on_two_h200s() {
    println!("{:<20} short TTFT p50, p99, E2EL p99; long TTFT p50, p99, E2EL p99; median of {DRAWS} draws", "");
    let nan = f64::NAN;
    let slow = Server { budget: 2048, threshold: 0 };
    let pieces = Server { budget: 8192, threshold: 512 };
    let (load, two, permits) = ((30.0, 2.0), [DEFAULT; 2], [pieces, slow]);
    tails("one, short only", &[DEFAULT], (15.0, 0.0), Routing::Split, [19.2, 26.4, 708.2, nan, nan, nan]);
    tails("one, mixed, bt 2048", &[slow], (15.0, 1.5), Routing::Split, [2103.6, 5427.7, 11626.5, nan, nan, nan]);
    let robin = [26.5, 959.3, 4470.9, 523.1, 1046.4, 4117.0];
    let robin = tails("round robin", &two, load, Routing::RoundRobin, robin);
    let fewest = [64.2, 1040.0, 6752.4, 545.6, 1395.3, 4667.1];
    tails("fewest in flight", &two, load, Routing::FewestInFlight, fewest);
    let split = [21.9, 30.1, 780.0, 1415.8, 2789.4, 14137.3];
    let split = tails("split", &two, load, Routing::Split, split);
    let (cut, capped) = ([DEFAULT, slow], [21.7, 42.4, 811.4, 1630.5, 4385.9, 5700.4]);
    tails("4 long in flight", &two, load, Routing::LongInFlight(4), capped);
    tails("split, long bt 2048", &cut, load, Routing::Split, [22.9, 41.1, 847.8, 2086.2, 6612.1, 10575.2]);
    tails("1 permit, no spill", &cut, load, Routing::Permits(1, 0), [23.1, 37.2, 852.6, 1426.1, 5062.1, 6081.3]);
    let both = [23.1, 88.2, 1885.3, 670.5, 1258.7, 2785.5];
    let both = tails("permits 2 and 1", &permits, load, Routing::Permits(2, 1), both);
    let fewer = [28.7, 109.4, 2960.1, 555.9, 1365.5, 2837.7];
    tails("permits 1 and 1", &permits, load, Routing::Permits(1, 1), fewer);
    assert!(robin[1] > 8.0 * both[1], "short P99 TTFT: permits beat round robin");
    assert!(split[1] < both[1], "short P99 TTFT: nothing beats the split");
    assert!(robin[2] > both[2] && split[5] > 1.5 * robin[5], "and the long ones pay for the split");
    // In the measurement the long requests gain as well (4.1 s to 2.8 s, one draw each). Over many
    // draws, long requests are equally fast in both arrangements.
    assert!(both[5] < 1.2 * robin[5], "and not for the permits");
}

/// Simulates one hour of 50 requests per second and prints the CPU time: `cargo test --release
/// --lib an_hour -- --ignored --nocapture`.
#[test]
#[ignore = "prints a speed; nothing to assert on a shared machine"]
fn an_hour_of_fifty_requests_per_second() {
    let started = std::time::Instant::now();
    let mut server = virtual_server(DEFAULT);
    let (mut rng, mut at, mut id, mut steps, mut tokens) = (Rng::new(3), 0.0, 0, 0u64, 0u64);
    loop {
        let next = server.next_at().map_or(f64::INFINITY, |next| next.as_secs_f64());
        if at > 3600.0 && next == f64::INFINITY {
            break;
        }
        if at <= 3600.0 && at <= next {
            let (prompt_tokens, output_tokens) = (1 + rng.below(400) as u32, 1 + rng.below(256) as u32);
            server.submit(
                Duration::from_secs_f64(at),
                [Request { id, prompt_tokens, output_tokens, adapter: None, ..Request::default() }],
            );
            id += 1;
            at += rng.exponential() / 50.0;
        } else if let Some(end) = server.poll(Duration::from_secs_f64(next)) {
            steps += 1;
            tokens += end.emitted.len() as u64;
        }
    }
    println!("{id} requests, {steps} steps, {tokens} tokens in {:.2} s", started.elapsed().as_secs_f64());
}
