//! Speed of the simulator on virtual time, as the CPU time of simulated hours of one server.
//!
//! `cargo bench --bench simulator [HOURS]`. The load is an open loop of Poisson arrivals from a
//! seed; the server is an H200 with an 8B model. Nothing is asserted.
//!
//! | load | requests |
//! |---|---|
//! | chat | 50 a second, 512 prompt and 128 output tokens: near the limit of this server |
//! | chat, one prefix | the same, with a prefix of 400 tokens that all prompts share |
//! | mixed | 15 a second of 200 and 128 tokens, 1 a second of 16,000 and 64 |
//! | crowded | 50 a second of 512 and 128, 2,000 cache blocks: preemptions and a growing queue |

use std::time::Duration;

use sluice_core::base::Rng;
use sluice_sim::Profile;
use sluice_sim::{Content, Request, SimConfig};

/// Requests per second, prompt tokens, output tokens, tokens of the prefix that all prompts share.
type Kind = (f64, u32, u32, u32);

#[derive(Default)]
struct Run {
    requests: u64,
    steps: u64,
    tokens: u64,
    rows: u64,
    preempted: u64,
    first: Vec<f32>,
}

/// User and system time of this process.
fn cpu() -> Duration {
    let usage = nix::sys::resource::getrusage(nix::sys::resource::UsageWho::RUSAGE_SELF).expect("Linux has it");
    let time = |value: nix::sys::time::TimeVal| {
        Duration::from_secs(value.tv_sec() as u64) + Duration::from_micros(value.tv_usec() as u64)
    };
    time(usage.user_time()) + time(usage.system_time())
}

fn run(kinds: &[Kind], blocks: Option<u32>, until: f64) -> Run {
    let mut config = SimConfig::new("m", Profile::named("h200-llama-8b").expect("built in"));
    config.engine.num_blocks = blocks.unwrap_or(config.engine.num_blocks);
    let mut server = config.virtual_server();
    let mut rng = Rng::new(3);
    let mut next: Vec<f64> = kinds.iter().map(|kind| rng.exponential() / kind.0).collect();
    let mut run = Run::default();
    let mut sent = Vec::new();
    loop {
        let step = server.next_at().map_or(f64::INFINITY, |at| at.as_secs_f64());
        let soonest = (0..kinds.len()).min_by(|a, b| next[*a].total_cmp(&next[*b])).expect("a load has kinds");
        let at = next[soonest];
        if at <= until && at <= step {
            let (rate, prompt, output, shared) = kinds[soonest];
            let content = Content::shared(1, shared, run.requests);
            server.submit(
                Duration::from_secs_f64(at),
                [Request { content, ..Request::new(run.requests, prompt, output) }],
            );
            sent.push(at);
            run.requests += 1;
            next[soonest] += rng.exponential() / rate;
        } else if step > until {
            return run;
        } else if let Some(end) = server.poll(Duration::from_secs_f64(step)) {
            run.steps += 1;
            run.tokens += end.emitted.len() as u64;
            run.rows += u64::from(end.load.sequences);
            run.preempted += u64::from(end.preempted);
            for token in end.emitted.iter().filter(|token| token.first) {
                run.first.push((end.ended.as_secs_f64() - sent[token.id as usize]) as f32);
            }
        }
    }
}

fn main() {
    // `cargo bench` passes additional flags, which the program skips.
    let hours: f64 = std::env::args().skip(1).find_map(|word| word.parse().ok()).unwrap_or(1.0);
    let chat: &[Kind] = &[(50.0, 512, 128, 0)];
    let shared: &[Kind] = &[(50.0, 512, 128, 400)];
    let mixed: &[Kind] = &[(15.0, 200, 128, 0), (1.0, 16_000, 64, 0)];
    let loads = [("chat", chat, None), ("chat, one prefix", shared, None), ("mixed", mixed, None)];
    println!("{hours} simulated hour(s) of one server");
    println!("| load | CPU s | requests | steps | tokens | ns a scheduled row | TTFT p50 / p99 ms | preempted |");
    println!("|---|--:|--:|--:|--:|--:|--:|--:|");
    for (name, kinds, blocks) in loads.into_iter().chain([("crowded", chat, Some(2_000))]) {
        let before = cpu();
        let mut run = run(kinds, blocks, hours * 3600.0);
        let spent = cpu() - before;
        run.first.sort_by(f32::total_cmp);
        let quantile = |q: f64| run.first[(q * (run.first.len() - 1) as f64) as usize] * 1e3;
        println!(
            "| {name} | {:.2} | {} | {} | {} | {:.1} | {:.0} / {:.0} | {} |",
            spent.as_secs_f64(),
            run.requests,
            run.steps,
            run.tokens,
            spent.as_nanos() as f64 / run.rows as f64,
            quantile(0.5),
            quantile(0.99),
            run.preempted,
        );
    }
}
