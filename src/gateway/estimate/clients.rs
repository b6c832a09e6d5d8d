//! Bounds how much one client can change estimates: limited learning, and a factor for clients
//! whose prompts were underestimated.
//!
//! Without a tokenizer, text that is unlike other clients' text (base64, emoji, random letters) has
//! up to four times as many tokens as estimated. With such text, a client could have long prompts
//! placed as short ones, without a permit. So when the engine reports that a prompt was above the
//! boundary below which it was placed, later estimates of this client are multiplied by the ratio
//! of reported to estimated tokens (at most [`MAX_FACTOR`]). The excess over 1 halves every
//! [`HALF_LIFE`].
//!
//! Learning is limited for the same reason: each client has [`LEARN_BURST`] samples at once, then
//! one per [`LEARN_INTERVAL`]. Without keys, each network has an allowance for learning but no
//! factor, because many clients may share the network. Bound: [`MAX_CLIENTS`] clients of each
//! model; then the client that was idle longest is forgotten.

use std::collections::HashMap;
use std::time::Duration;

use foldhash::quality::RandomState;
use tokio::time::Instant;
use twox_hash::XxHash3_64;

use super::output::OutputEstimator;
use crate::origin::Origin;

/// Clients remembered for each model.
pub const MAX_CLIENTS: usize = 1_024;
/// The largest factor. With a larger one, text would have more tokens than bytes.
pub const MAX_FACTOR: f64 = 8.0;
/// Time in which the excess of a factor over 1 halves.
pub const HALF_LIFE: Duration = Duration::from_secs(600);
/// Underestimates up to this factor are usual and do not count.
pub const USUAL_ERROR: f64 = 1.1;
/// Samples of a client that may be learned at once.
pub const LEARN_BURST: u32 = 64;
/// Time between samples of a client after the burst.
pub const LEARN_INTERVAL: Duration = Duration::from_secs(1);

/// An API key; without keys a network, if it is known; otherwise the default, for all unknown
/// clients.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct ClientId {
    id: Option<u64>,
    is_key: bool,
}

impl ClientId {
    /// The client that uses the key of this name.
    pub fn of_key(name: &str) -> Self {
        Self { id: Some(XxHash3_64::oneshot(name.as_bytes())), is_key: true }
    }

    /// The clients of one network, which use no keys.
    pub fn of_network(origin: Origin) -> Self {
        Self { id: Some(origin.bits()).filter(|_| origin.is_known()), is_key: false }
    }
}

/// The clients of one model.
#[derive(Debug, Default)]
pub struct Clients(HashMap<ClientId, Client, RandomState>);

#[derive(Clone, Copy, Debug)]
struct Client {
    /// When the next sample may be learned, apart from the burst.
    due: Instant,
    /// The factor at `since`.
    factor: f64,
    since: Instant,
    output: OutputEstimator,
}

impl Client {
    fn factor(&self, now: Instant) -> f64 {
        let halves = now.saturating_duration_since(self.since).as_secs_f64() / HALF_LIFE.as_secs_f64();
        1.0 + (self.factor - 1.0) * (-halves).exp2()
    }
}

impl Clients {
    /// The factor for estimates of this client's prompts; at least 1.
    pub fn factor(&self, client: ClientId, now: Instant) -> f64 {
        self.0.get(&client).map_or(1.0, |known| known.factor(now))
    }

    /// Notes that a prompt of this client had `ratio` times as many tokens as estimated, and was
    /// placed wrongly.
    pub fn underestimated(&mut self, client: ClientId, ratio: f64, now: Instant) {
        if !client.is_key || ratio <= USUAL_ERROR {
            return;
        }
        let known = self.known(client, now);
        known.factor = known.factor(now).max(ratio).min(MAX_FACTOR);
        known.since = now;
    }

    /// The lengths of this client's completions, once enough are known.
    pub fn output(&self, client: ClientId) -> Option<&OutputEstimator> {
        self.0.get(&client).map(|known| &known.output).filter(|output| output.is_known())
    }

    /// Learns that one sequence of a response to this client had `tokens` tokens.
    pub fn learn_output(&mut self, client: ClientId, tokens: u64, now: Instant) {
        self.known(client, now).output.learn(tokens);
    }

    /// Whether one more sample of this client may be learned, and counts it.
    pub fn may_teach(&mut self, client: ClientId, now: Instant) -> bool {
        let known = self.known(client, now);
        let due = known.due.max(now);
        let allowed = due.saturating_duration_since(now) < LEARN_INTERVAL * LEARN_BURST;
        if allowed {
            known.due = due + LEARN_INTERVAL;
        }
        allowed
    }

    fn known(&mut self, client: ClientId, now: Instant) -> &mut Client {
        if self.0.len() >= MAX_CLIENTS && !self.0.contains_key(&client) {
            let idle = self.0.iter().min_by_key(|(_, known)| known.due.max(known.since)).map(|(client, _)| *client);
            idle.map(|client| self.0.remove(&client));
        }
        self.0.entry(client).or_insert(Client { due: now, factor: 1.0, since: now, output: OutputEstimator::default() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn underestimated_prompts_raise_the_estimates_of_their_client_for_a_while() {
        let (mut clients, now) = (Clients::default(), Instant::now());
        let (one, other) = (ClientId::of_key("one"), ClientId::of_key("other"));
        clients.underestimated(one, 1.05, now);
        assert_eq!(clients.factor(one, now), 1.0);
        clients.underestimated(one, 3.0, now);
        clients.underestimated(one, 2.0, now);
        assert_eq!((clients.factor(one, now), clients.factor(other, now)), (3.0, 1.0));
        assert_eq!(clients.factor(one, now + HALF_LIFE), 2.0);
        clients.underestimated(one, 1e9, now);
        assert_eq!(clients.factor(one, now), MAX_FACTOR);
        clients.underestimated(ClientId::default(), 3.0, now);
        assert_eq!(clients.factor(ClientId::default(), now), 1.0, "clients without keys cannot be distinguished");
    }

    #[test]
    fn samples_of_each_client_are_learned_at_a_limited_rate() {
        let (mut clients, now) = (Clients::default(), Instant::now());
        let mut at = |client, now| (0..1_000).filter(|_| clients.may_teach(client, now)).count();
        let one = ClientId::of_key("one");
        assert_eq!(at(one, now), LEARN_BURST as usize);
        assert_eq!(at(one, now + 10 * LEARN_INTERVAL), 10);
        assert_eq!(at(ClientId::default(), now), LEARN_BURST as usize);
    }

    #[test]
    fn the_client_longest_idle_is_forgotten() {
        let (mut clients, start) = (Clients::default(), Instant::now());
        for number in 0..3 * MAX_CLIENTS {
            let now = start + Duration::from_millis(number as u64);
            clients.underestimated(ClientId::of_key(&number.to_string()), 2.0, now);
            assert!(clients.0.len() <= MAX_CLIENTS);
        }
        assert_eq!(clients.factor(ClientId::of_key("0"), start), 1.0);
        let last = (3 * MAX_CLIENTS - 1).to_string();
        assert!(clients.factor(ClientId::of_key(&last), start) > 1.9);
    }
}
