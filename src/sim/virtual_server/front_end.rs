//! The API server in front of the engine: one thread that accepts requests and sends tokens.
//!
//! ```text
//! client -> in_us -> tokenizer (texts only, one by one) -> thread (shared by requests) -> engine
//! engine -> step end -> out_us -> thread (tokens) -> client
//! ```
//!
//! The event loop is modelled as processor sharing, so a burst of n requests reaches the engine
//! together, after n times the work of one. (Of 100 simultaneous requests to a real server, the
//! first tenth reached the engine after 38 ms and the last tenth after 52 ms.) Tokens have priority
//! over requests, so requests are accepted slowly while many streams decode. The tokens of a step
//! become visible together, when most of them are sent. A first token costs more, in proportion to
//! the prompt: 13 ms for 16,000 tokens, during which no other token is sent. If there are several
//! API servers, they share requests and tokens. The caller bounds the requests.

use std::collections::VecDeque;
use std::time::Duration;

use crate::engine::{Request, SequenceId};
use crate::machine::FrontEndRates;
use sluice_core::base::Rng;

const MAX_SERVERS: u32 = 64;
/// The tokens of a step count as visible after this share of the work to send them. Half of the
/// work serves the median client; the rest is for the time in which the engine passes tokens on (8
/// us each).
const SENT: f64 = 0.75;

/// The API servers in front of an engine (`--api-server-count`), one thread each.
#[derive(Clone, Debug)]
pub struct FrontEnd {
    rates: FrontEndRates,
    threads: Vec<Thread>,
}

/// The thread of one API server. With n requests inside, each advances at 1/n of the thread.
///
/// Let V be the work done per request since time zero (dV/dt = 1/n). A request with work S that
/// enters at V leaves at V + S.
#[derive(Clone, Debug, Default)]
struct Thread {
    busy_until: Duration,
    /// Work done per request until `at`, seconds.
    done: f64,
    at: Duration,
    /// The values of `done` at which requests leave, with the requests; in order.
    inside: VecDeque<(f64, Vec<Request>)>,
    /// The requests whose prompts are being tokenized, with the times at which they enter the
    /// thread; in order.
    texts: VecDeque<(Duration, Vec<Request>)>,
}

impl FrontEnd {
    /// An idle API server.
    pub fn new(rates: &FrontEndRates) -> Self {
        Self::with_servers(rates, 1)
    }

    /// Idle API servers, at least 1 and at most 64. The id of a request chooses the server, as the
    /// kernel chooses by connection.
    pub fn with_servers(rates: &FrontEndRates, servers: u32) -> Self {
        let servers = servers.clamp(1, MAX_SERVERS) as usize;
        Self { rates: rates.clone(), threads: vec![Thread::default(); servers] }
    }

    fn thread_of(&self, id: SequenceId) -> usize {
        if self.threads.len() == 1 { 0 } else { Rng::new(id).below(self.threads.len()) }
    }

    /// Lets one HTTP request enter at `now`. Times never decrease from call to call.
    pub(crate) fn enter(&mut self, now: Duration, requests: Vec<Request>) {
        let Some(first) = requests.first() else { return };
        let at = self.thread_of(first.id);
        if first.text {
            let tokenizing = micros(self.rates.text_token_us * prompt_tokens(&requests));
            let texts = &mut self.threads[at].texts;
            let begins = now + micros(self.rates.text_us);
            let begins = texts.back().map_or(begins, |(free, _)| begins.max(*free));
            texts.push_back((begins + tokenizing, requests));
        } else {
            self.enter_thread(at, now, requests);
        }
    }

    fn enter_thread(&mut self, at: usize, now: Duration, requests: Vec<Request>) {
        let work = self.rates.request_us + self.rates.request_token_us * prompt_tokens(&requests);
        self.threads[at].enter(now, work.max(0.0) * 1e-6, requests);
    }

    /// Moves requests whose prompts are tokenized by `now` into their threads, up to the next time
    /// at which a request leaves a thread.
    fn enter_texts(&mut self, now: Duration) {
        loop {
            let tokenized =
                self.threads.iter().enumerate().filter_map(|(at, thread)| Some((thread.texts.front()?.0, at)));
            let Some((ready, at)) = tokenized.min().filter(|(ready, _)| *ready <= now) else { return };
            if self.threads.iter().filter_map(Thread::next_leave).any(|leaves| leaves < ready) {
                return;
            }
            if let Some((_, requests)) = self.threads[at].texts.pop_front() {
                self.enter_thread(at, ready, requests);
            }
        }
    }

    /// The time at which the next request reaches the engine if no other enters. [`Self::leave`]
    /// must be called by then.
    pub(crate) fn next_leave(&self) -> Option<Duration> {
        let latency = micros(self.rates.in_us);
        let tokenized = self.threads.iter().filter_map(|thread| Some(thread.texts.front()?.0));
        self.threads.iter().filter_map(Thread::next_leave).chain(tokenized).min().map(|at| at + latency)
    }

    /// Removes the first request if it has left its thread by `now`. Returns it with the time at
    /// which it reaches the engine.
    pub(crate) fn leave(&mut self, now: Duration) -> Option<(Duration, Vec<Request>)> {
        self.enter_texts(now);
        let thread = self.threads.iter_mut().filter_map(|thread| Some((thread.next_leave()?, thread)));
        let (at, thread) = thread.min_by_key(|(at, _)| *at).filter(|(at, _)| *at <= now)?;
        let (tag, requests) = thread.inside.pop_front()?;
        (thread.done, thread.at) = (tag, at);
        Some((at + micros(self.rates.in_us), requests))
    }

    /// Sends the tokens of a step whose results were taken at `now`. Each token has its sequence
    /// and, if it is a first token, the length of the prompt. Returns the time at which clients see
    /// the tokens.
    pub(crate) fn send(
        &mut self,
        now: Duration,
        tokens: impl IntoIterator<Item = (SequenceId, Option<u32>)>,
    ) -> Duration {
        let mut work = vec![(0.0, 0.0); self.threads.len()];
        for (id, first_of) in tokens {
            let (firsts, others) = &mut work[self.thread_of(id)];
            *others += self.rates.token_us;
            *firsts +=
                first_of.map_or(0.0, |prompt| self.rates.first_us + self.rates.first_token_us * f64::from(prompt));
        }
        let out = micros(self.rates.out_us);
        let sent = self.threads.iter_mut().zip(work).map(|(thread, (firsts, others))| {
            thread.advance(now);
            let start = thread.busy_until.max(now);
            thread.busy_until = start + micros(firsts + others);
            // The thread reads the engine's outputs at once, including prompts of first tokens, and
            // then sends the tokens one by one.
            start + micros(firsts + others * SENT)
        });
        sent.max().unwrap_or(now) + out
    }

    /// Removes a sequence; returns whether it was in the front end. The thread still does the work
    /// for it.
    pub(crate) fn abort(&mut self, id: SequenceId) -> bool {
        let before = self.sequences();
        for thread in &mut self.threads {
            let texts = thread.texts.iter_mut().map(|(_, requests)| requests);
            let waiting = thread.inside.iter_mut().map(|(_, requests)| requests).chain(texts);
            waiting.for_each(|requests| requests.retain(|request| request.id != id));
        }
        self.sequences() < before
    }

    pub(crate) fn sequences(&self) -> usize {
        let waiting = |thread: &Thread| {
            let texts: usize = thread.texts.iter().map(|(_, requests)| requests.len()).sum();
            texts + thread.inside.iter().map(|(_, requests)| requests.len()).sum::<usize>()
        };
        self.threads.iter().map(waiting).sum()
    }
}

impl Thread {
    fn enter(&mut self, now: Duration, work: f64, requests: Vec<Request>) {
        self.advance(now);
        let leaves = self.done + work;
        let place = self.inside.partition_point(|(other, _)| *other <= leaves);
        self.inside.insert(place, (leaves, requests));
    }

    fn next_leave(&self) -> Option<Duration> {
        let (tag, _) = self.inside.front()?;
        let left = (tag - self.done).max(0.0) * self.inside.len() as f64;
        Some(self.at.max(self.busy_until) + Duration::from_secs_f64(left))
    }

    /// Advances the clock within an interval in which no request leaves.
    fn advance(&mut self, now: Duration) {
        let passed = now.saturating_sub(self.at.max(self.busy_until));
        if !self.inside.is_empty() {
            self.done += passed.as_secs_f64() / self.inside.len() as f64;
        }
        self.at = self.at.max(now);
    }
}

/// Tokens of the prompts of one HTTP request. A prompt counts once, because its choices share it.
fn prompt_tokens(requests: &[Request]) -> f64 {
    requests.iter().filter(|request| request.choice == 0).map(|request| f64::from(request.prompt_tokens)).sum()
}

fn micros(us: f64) -> Duration {
    Duration::from_secs_f64(us.max(0.0) * 1e-6)
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOTHING: FrontEndRates = FrontEndRates {
        request_us: 0.0,
        request_token_us: 0.0,
        token_us: 0.0,
        first_us: 0.0,
        first_token_us: 0.0,
        text_us: 0.0,
        text_token_us: 0.0,
        in_us: 0.0,
        out_us: 0.0,
    };

    fn request(id: u64, prompt_tokens: u32) -> Vec<Request> {
        vec![Request { id, prompt_tokens, output_tokens: 3, ..Request::default() }]
    }

    #[test]
    fn a_burst_leaves_together_and_a_lone_request_alone() {
        let mut front_end = FrontEnd::new(&FrontEndRates { request_us: 1000.0, in_us: 5000.0, ..NOTHING });
        for id in 0..10 {
            front_end.enter(Duration::ZERO, request(id, 100));
        }
        assert!(front_end.leave(Duration::from_millis(9)).is_none());
        let late = Duration::from_secs(1);
        let left: Vec<_> = std::iter::from_fn(|| front_end.leave(late)).map(|(at, _)| at.as_millis()).collect();
        assert_eq!(left, [15; 10]);
        front_end.enter(late, request(1, 100));
        assert_eq!(front_end.leave(late * 2).unwrap().0, late + Duration::from_millis(6));
    }

    #[test]
    fn texts_are_tokenized_one_after_the_other_and_ids_pass_them() {
        let rates = FrontEndRates { text_us: 3000.0, text_token_us: 1.0, request_us: 1000.0, in_us: 2000.0, ..NOTHING };
        let mut front_end = FrontEnd::new(&rates);
        let text = |id, prompt| vec![Request { text: true, ..request(id, prompt).remove(0) }];
        front_end.enter(Duration::ZERO, text(1, 10_000));
        front_end.enter(Duration::ZERO, text(2, 2_000));
        front_end.enter(Duration::ZERO, request(3, 2_000));
        assert_eq!(front_end.sequences(), 3);
        // Like the server, wakes up at the returned time and takes the requests that have left.
        let mut left = Vec::new();
        while let Some(at) = front_end.next_leave() {
            left.extend(std::iter::from_fn(|| front_end.leave(at)).map(|(at, one)| (one[0].id, at.as_millis())));
        }
        assert_eq!(left, [(3, 3), (1, 16), (2, 18)]);
        front_end.enter(Duration::from_secs(1), text(4, 10));
        assert!(front_end.abort(4) && front_end.sequences() == 0);
        // Late calls must give the same times.
        front_end.enter(Duration::from_secs(2), text(5, 10_000));
        front_end.enter(Duration::from_secs(2), text(6, 2_000));
        let late: Vec<_> =
            std::iter::from_fn(|| front_end.leave(Duration::from_secs(3))).map(|(at, _)| at.as_millis()).collect();
        assert_eq!(late.last(), Some(&2018));
        // All prompts of a request count, each once.
        for prompts in [[10_000, 1], [1, 10_000]] {
            let mut front_end = FrontEnd::new(&rates);
            let one = |prompt, choice| Request { choice, ..text(7, prompt).remove(0) };
            let prompts = prompts.into_iter().flat_map(|prompt| [one(prompt, 0), one(prompt, 1)]);
            front_end.enter(Duration::ZERO, prompts.collect());
            assert_eq!(front_end.leave(Duration::from_secs(1)).unwrap().0.as_micros(), 3000 + 10_001 + 1000 + 2000);
        }
    }

    #[test]
    fn a_short_prompt_overtakes_a_long_one() {
        let mut front_end = FrontEnd::new(&FrontEndRates { request_token_us: 1.0, ..NOTHING });
        front_end.enter(Duration::ZERO, request(1, 100_000));
        front_end.enter(Duration::ZERO, request(2, 1000));
        let (at, first) = front_end.leave(Duration::from_secs(1)).unwrap();
        assert_eq!((at.as_millis(), first[0].id), (2, 2));
        assert_eq!(front_end.leave(Duration::from_secs(1)).unwrap().0.as_millis(), 101);
    }

    #[test]
    fn tokens_hold_requests_up_and_are_seen_when_most_are_sent() {
        let rates = FrontEndRates { request_us: 1000.0, token_us: 100.0, out_us: 2000.0, ..NOTHING };
        let mut front_end = FrontEnd::new(&rates);
        let seen = front_end.send(Duration::ZERO, (0..100).map(|id| (id, None)));
        assert_eq!(seen, Duration::from_micros(2000 + 7500));
        front_end.enter(Duration::ZERO, request(1, 1));
        assert_eq!(front_end.next_leave().unwrap().as_millis(), 10 + 1);
        assert_eq!(front_end.send(Duration::from_millis(1), []).as_millis(), 12);
    }

    #[test]
    fn the_first_token_of_a_long_prompt_is_seen_later() {
        let mut front_end = FrontEnd::new(&FrontEndRates { first_us: 100.0, first_token_us: 0.5, ..NOTHING });
        let seen = front_end.send(Duration::ZERO, [(1, Some(32_000))]);
        assert_eq!(seen, Duration::from_micros(16_100));
    }

    #[test]
    fn several_api_servers_share_the_work() {
        let rates = FrontEndRates { request_us: 1000.0, token_us: 100.0, ..NOTHING };
        let busy = |servers| {
            let mut front_end = FrontEnd::with_servers(&rates, servers);
            (0..64).for_each(|id| front_end.enter(Duration::ZERO, request(id, 1)));
            let last = std::iter::from_fn(|| front_end.leave(Duration::from_secs(1))).last().unwrap().0;
            (last, front_end.send(Duration::from_secs(1), (0..64).map(|id| (id, None))) - Duration::from_secs(1))
        };
        let ((alone, sent_alone), (shared, sent_shared)) = (busy(1), busy(4));
        assert_eq!((alone.as_millis(), sent_alone.as_micros()), (64, 4800));
        assert!(shared < alone / 2 && sent_shared < sent_alone / 2, "{shared:?} {sent_shared:?}");
    }
}
