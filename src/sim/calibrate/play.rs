//! Plays a row's load against a simulated server on virtual time and measures latencies as a
//! client.
//!
//! The client is a program on the same host. It opens the streams one after the other. Each stream
//! sends the next request after the last token of the previous one. Deterministic: arrivals and
//! step jitter come from seeds. [`rows`](super::rows) bounds the requests.

use std::collections::BTreeMap;
use std::time::Duration;

use super::rows::{BesideLoad, Load, Row};
use crate::engine::{Drafter, Engine, EngineConfig, Request, Speculation};
use crate::machine::Graphs;
use crate::virtual_server::{FrontEnd, VirtualServer};
use crate::{CostModel, Profile};
use sluice_core::base::Rng;

/// Time that the client takes to start or continue a stream before it can do so for the next one.
const CLIENT_GAP: Duration = Duration::from_micros(50);

/// The times of one request as its client sees them, seconds of virtual time.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Life {
    pub(super) sent: f64,
    pub(super) first: f64,
    pub(super) last: f64,
    pub(super) tokens: u32,
    /// Whether the request is measured; otherwise it is background load.
    pub(super) counts: bool,
}

impl Life {
    pub(super) fn ttft(&self) -> f64 {
        (self.first - self.sent) * 1e3
    }
    pub(super) fn e2el(&self) -> f64 {
        (self.last - self.sent) * 1e3
    }
    pub(super) fn tpot(&self) -> f64 {
        (self.last - self.first) * 1e3 / f64::from(self.tokens.max(2) - 1)
    }
}

pub(super) fn mean(values: impl Iterator<Item = f64>) -> f64 {
    let (sum, n) = values.fold((0.0, 0), |(sum, n), value| (sum + value, n + 1));
    sum / f64::from(n)
}

/// Quantile with interpolation between neighbours; NaN without values.
pub(super) fn quantile(mut values: Vec<f64>, q: f64) -> f64 {
    values.sort_by(f64::total_cmp);
    let at = q * values.len().saturating_sub(1) as f64;
    let (low, part) = (at.floor() as usize, at.fract());
    match (values.get(low), values.get(low + 1)) {
        (Some(low), Some(high)) => low + part * (high - low),
        (Some(low), None) => *low,
        _ => f64::NAN,
    }
}

#[cfg(test)]
#[derive(Clone, Copy, Debug)]
pub(super) struct Arrival {
    pub(super) at: f64,
    pub(super) prompt: u32,
    pub(super) output: u32,
}

#[cfg(test)]
pub(super) fn replay(profile: &Profile, server: super::rows::Server, arrivals: &[Arrival]) -> Vec<Life> {
    let mut row = super::rows::parse("prompt,output,streams\n1,1,1").expect("a row").remove(0);
    row.server = server;
    replay_as(profile, &row, 0, arrivals)
}

/// Plays `arrivals` as [`replay`] does, with the server, the drafts and the CPU of `row`.
#[cfg(test)]
pub(super) fn replay_as(profile: &Profile, row: &Row, draw: u64, arrivals: &[Arrival]) -> Vec<Life> {
    let mut player = Player { server: virtual_server(profile, row, draw), row, lives: Vec::new(), rng: Rng::new(0) };
    let times = arrivals.iter().map(|arrival| Duration::from_secs_f64(arrival.at));
    player.run(times.zip(arrivals.iter().map(|arrival| Some((arrival.prompt, arrival.output)))).collect());
    player.lives
}

/// The columns of [`MEASURED`](super::rows::MEASURED) as a client measures them for this row (times
/// in ms), each the median over `draws` seeds.
pub fn play(profile: &Profile, row: &Row, draws: u64) -> [f64; 4] {
    let runs: Vec<[f64; 4]> = (0..draws.max(1)).map(|draw| summary(&lives(profile, row, draw))).collect();
    std::array::from_fn(|column| quantile(runs.iter().map(|run| run[column]).collect(), 0.5))
}

fn summary(lives: &[Life]) -> [f64; 4] {
    let counted: Vec<&Life> = lives.iter().filter(|life| life.counts && life.tokens > 0).collect();
    let start = lives.iter().map(|life| life.sent).fold(f64::INFINITY, f64::min);
    let end = lives.iter().map(|life| life.last).fold(0.0, f64::max);
    [
        counted.len() as f64 / (end - start),
        quantile(counted.iter().map(|life| life.ttft()).collect(), 0.5),
        mean(counted.iter().map(|life| life.tpot())),
        mean(counted.iter().map(|life| life.e2el())),
    ]
}

pub(super) fn lives(profile: &Profile, row: &Row, draw: u64) -> Vec<Life> {
    let mut player = Player { server: virtual_server(profile, row, draw), row, lives: Vec::new(), rng: Rng::new(99) };
    match row.load {
        Load::Closed { streams, requests } => player.closed_loop(streams, requests),
        Load::Open { rate, seconds, beside } => player.open_loop(rate, seconds, beside, draw),
    }
    player.lives
}

fn virtual_server(profile: &Profile, row: &Row, draw: u64) -> VirtualServer {
    let (profile, server) = (&profile.with_cpu_time(row.cpu), row.server);
    let config = EngineConfig {
        max_num_seqs: server.max_num_seqs,
        max_num_batched_tokens: server.max_num_batched_tokens,
        long_prefill_token_threshold: server.long_prefill_token_threshold,
        chunked_prefill: true,
        num_blocks: profile.memory.kv_tokens / 16,
        max_loras: server.max_loras,
        max_cpu_loras: server.max_cpu_loras,
        seed: 7 + draw,
        // vLLM plans no step ahead while drafts are found on the CPU.
        async_scheduling: row.drafts == 0,
        speculation: speculation(row),
        ..EngineConfig::default()
    };
    let (seqs, tokens, query) = (server.max_num_seqs, server.max_num_batched_tokens, 1 + row.drafts);
    let graphs = Graphs::chosen(seqs.saturating_mul(query), tokens, None).with_query(query);
    let cost = CostModel::new(profile, seqs, tokens).with_graphs(graphs).with_speculation(config.speculation.as_ref());
    let cost = cost.with_masks(row.masked);
    VirtualServer::new(Engine::new(config, cost), FrontEnd::new(&profile.front_end))
}

pub(super) fn speculation(row: &Row) -> Option<Speculation> {
    (row.drafts > 0).then(|| Speculation {
        drafter: Drafter::Lookup,
        tokens: row.drafts,
        acceptance: row.accepted.first().cloned().unwrap_or_default(),
        kinds: row.accepted.iter().skip(1).cloned().collect(),
        proposed: row.proposed,
        length: row.draft_tokens.unwrap_or(f64::from(row.drafts)),
        is_greedy: row.is_greedy,
        by_sequences: Vec::new(),
    })
}

struct Player<'a> {
    server: VirtualServer,
    row: &'a Row,
    lives: Vec<Life>,
    rng: Rng,
}

impl Player<'_> {
    /// Sends the next request at `at`. `other`: the prompt and output length of a request that is
    /// not measured.
    fn send(&mut self, at: Duration, other: Option<(u32, u32)>) {
        let id = self.lives.len() as u64;
        let (prompt_tokens, output_tokens) = other.unwrap_or((self.row.prompt, self.row.output));
        // With `half_base`, requests with even ids use the base model, and `turn` counts the
        // others.
        let turn = if self.row.half_base { id / 2 } else { id };
        let named = self.row.adapters > 0 && !(self.row.half_base && id.is_multiple_of(2));
        let adapter = named.then(|| match self.row.load {
            Load::Closed { .. } => (turn % u64::from(self.row.adapters)) as u16,
            Load::Open { .. } => self.rng.below(self.row.adapters as usize) as u16,
        });
        self.server.submit(at, [Request { id, prompt_tokens, output_tokens, adapter, ..Request::default() }]);
        self.lives.push(Life { sent: at.as_secs_f64(), counts: other.is_none(), ..Life::default() });
    }

    fn advance(&mut self, now: Duration) -> u32 {
        let Some(end) = self.server.poll(now) else { return 0 };
        let mut finished = 0;
        for token in end.emitted {
            let Some(life) = self.lives.get_mut(token.id as usize) else { continue };
            life.tokens += token.tokens;
            if token.first {
                life.first = end.ended.as_secs_f64();
            }
            if token.last {
                life.last = end.ended.as_secs_f64();
                finished += 1;
            }
        }
        finished
    }

    fn closed_loop(&mut self, streams: u32, requests: u32) {
        for stream in 0..streams.min(requests) {
            self.send(CLIENT_GAP * stream, None);
        }
        while let Some(at) = self.server.next_at() {
            let finished = self.advance(at);
            for place in 1..=finished {
                if self.lives.len() < requests as usize {
                    self.send(at + CLIENT_GAP * place, None);
                }
            }
        }
    }

    fn open_loop(&mut self, rate: f64, seconds: f64, beside: Option<BesideLoad>, draw: u64) {
        let mut arrivals: BTreeMap<Duration, Option<(u32, u32)>> = BTreeMap::new();
        let kinds =
            [(rate, None)].into_iter().chain(beside.map(|other| (other.rate, Some((other.prompt, other.output)))));
        for (kind, (rate, lengths)) in kinds.enumerate() {
            let mut rng = Rng::new(2 * draw + kind as u64);
            let mut at = rng.exponential() / rate;
            while at <= seconds {
                arrivals.insert(Duration::from_secs_f64(at), lengths);
                at += rng.exponential() / rate;
            }
        }
        self.run(arrivals);
    }

    fn run(&mut self, mut arrivals: BTreeMap<Duration, Option<(u32, u32)>>) {
        while !arrivals.is_empty() || self.server.next_at().is_some() {
            let event = self.server.next_at();
            match arrivals.first_key_value() {
                Some((at, lengths)) if event.is_none_or(|event| *at < event) => {
                    let (at, lengths) = (*at, *lengths);
                    arrivals.pop_first();
                    self.send(at, lengths);
                }
                _ => _ = event.map(|event| self.advance(event)),
            }
        }
    }
}
