//! Limits the rate of costly HTTP/2 frames on a connection.
//!
//! Some frames cost the server far more than the client, and honest clients rarely send them:
//! resets of requests just sent (CVE-2023-44487), pings, settings, priorities, empty data, endless
//! continuations (CVE-2019-9512 to 9518, CVE-2024-27316). The h2 library limits several of these
//! one by one. Here all of them share a token bucket of [`BURST`] frames, which is refilled by
//! [`PER_SECOND`]. A client that cancels a hundred streams at once stays far below this limit.
//!
//! Not counted: headers (each opens a request, which has other limits), data with content, and
//! window updates, which every reader sends.

use std::time::Duration;

use tokio::time::Instant;

/// Counted frames that may arrive at once.
const BURST: u32 = 1_000;
/// Counted frames per second, in the long run.
const PER_SECOND: u32 = 100;

/// Bytes of a frame header (RFC 9113, 4.1).
const HEAD: usize = 9;
const PREFACE: usize = 24;
const DATA: u8 = 0x0;
const PRIORITY: u8 = 0x2;
const RST_STREAM: u8 = 0x3;
const SETTINGS: u8 = 0x4;
const PING: u8 = 0x6;
const CONTINUATION: u8 = 0x9;

#[derive(Debug)]
pub(super) struct FrameMeter {
    /// Bytes left of the preface or of a frame.
    skip: usize,
    head: [u8; HEAD],
    have: usize,
    left: u32,
    filled: Instant,
}

impl FrameMeter {
    pub(super) fn new(now: Instant) -> Self {
        Self { skip: PREFACE, head: [0; HEAD], have: 0, left: BURST, filled: now }
    }

    /// Parses received bytes; `false`: too many costly frames.
    pub(super) fn pass(&mut self, mut bytes: &[u8], now: impl Fn() -> Instant) -> bool {
        while !bytes.is_empty() {
            let skipped = self.skip.min(bytes.len());
            (self.skip, bytes) = (self.skip - skipped, &bytes[skipped..]);
            let taken = (HEAD - self.have).min(bytes.len());
            self.head[self.have..self.have + taken].copy_from_slice(&bytes[..taken]);
            (self.have, bytes) = (self.have + taken, &bytes[taken..]);
            if self.have < HEAD {
                return true;
            }
            self.have = 0;
            let [a, b, c, kind, ..] = self.head;
            self.skip = u32::from_be_bytes([0, a, b, c]) as usize;
            let counted = match kind {
                PRIORITY | RST_STREAM | SETTINGS | PING | CONTINUATION => true,
                DATA => self.skip == 0 && self.head[4] & 1 == 0,
                _ => false,
            };
            if counted && !self.take(now()) {
                return false;
            }
        }
        true
    }

    fn take(&mut self, now: Instant) -> bool {
        let whole = now.saturating_duration_since(self.filled).as_secs();
        if whole > 0 {
            let more = u32::try_from(whole).unwrap_or(u32::MAX).saturating_mul(PER_SECOND);
            self.left = self.left.saturating_add(more).min(BURST);
            self.filled += Duration::from_secs(whole);
        }
        self.left = match self.left.checked_sub(1) {
            Some(left) => left,
            None => return false,
        };
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn frame(kind: u8, flags: u8, payload: usize) -> Vec<u8> {
        let length = u32::try_from(payload).unwrap().to_be_bytes();
        [&length[1..], &[kind, flags, 0, 0, 0, 1], &vec![0xAB; payload]].concat()
    }

    /// Passes a connection's bytes in pieces of `size`. Returns whether all were accepted.
    fn pass(frames: &[u8], size: usize) -> bool {
        let now = Instant::now();
        let mut meter = FrameMeter::new(now);
        let bytes = [b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", frames].concat();
        bytes.chunks(size).all(|piece| meter.pass(piece, || now))
    }

    #[tokio::test]
    async fn a_flood_of_each_costly_frame_is_noticed_however_it_is_cut() {
        for flood in [
            frame(RST_STREAM, 0, 4),
            frame(PING, 0, 8),
            frame(SETTINGS, 0, 0),
            frame(PRIORITY, 0, 5),
            frame(CONTINUATION, 0, 0),
            frame(DATA, 0, 0),
        ] {
            for size in [1, 7, 4_096] {
                assert!(pass(&flood.repeat(BURST as usize), size));
                assert!(!pass(&flood.repeat(BURST as usize + 1), size));
            }
        }
    }

    #[tokio::test]
    async fn what_honest_clients_send_is_not_counted() {
        for frame in [frame(DATA, 0, 1), frame(DATA, 1, 0), frame(1, 4, 30), frame(8, 0, 4)] {
            assert!(pass(&frame.repeat(5 * BURST as usize), 4_096));
        }
    }

    #[tokio::test]
    async fn the_budget_comes_back_with_time() {
        let begun = Instant::now();
        let mut meter = FrameMeter::new(begun);
        let pings = |count: usize| frame(PING, 0, 8).repeat(count);
        assert!(meter.pass(&[&[0; PREFACE][..], &pings(BURST as usize)].concat(), || begun));
        assert!(meter.pass(&pings(100), || begun + Duration::from_millis(1_500)));
        assert!(meter.pass(&pings(100), || begun + Duration::from_millis(2_000)));
        assert!(!meter.pass(&pings(1), || begun + Duration::from_millis(2_900)));
    }
}
