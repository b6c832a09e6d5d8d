//! Frames of a WebSocket (RFC 6455) as they pass: where one ends, and whether one closes.
//!
//! When the gateway ends a tunnel, it sends the client a closing frame with a reason, but only
//! between two frames of the engine. Payloads are not read. An engine must not mask frames. A
//! masked frame is passed on, and after it the gateway sends no closing frame.

/// Code 1012, "service restart": the gateway stops, or the engine has ended.
pub(super) const RESTART: u16 = 1012;
/// Code 1001, "going away": the tunnel was open or silent for too long.
pub(super) const GOING_AWAY: u16 = 1001;

/// The longest head of a frame: two bytes, and a length of eight.
const HEAD_MAX: usize = 10;

/// Follows frames in a sequence of bytes, however it is split.
#[derive(Clone, Debug, Default)]
pub(super) struct FrameTracker {
    head: [u8; HEAD_MAX],
    have: usize,
    /// Bytes of the payload that are still to come.
    payload: u64,
    closes: bool,
    is_lost: bool,
}

impl FrameTracker {
    /// Follows the next bytes.
    pub(super) fn pass(&mut self, mut bytes: &[u8]) {
        while !bytes.is_empty() && !self.is_lost {
            if self.payload > 0 {
                let skipped = self.payload.min(bytes.len() as u64);
                self.payload -= skipped;
                bytes = &bytes[skipped as usize..];
                continue;
            }
            self.head[self.have] = bytes[0];
            self.have += 1;
            bytes = &bytes[1..];
            if self.have < 2 {
                continue;
            }
            let length = u64::from(self.head[1] & 0x7f);
            let extended = match length {
                126 => 2,
                127 => 8,
                _ => 0,
            };
            if self.have < 2 + extended {
                continue;
            }
            let long = self.head[2..2 + extended].iter().fold(0, |sum, byte| sum << 8 | u64::from(*byte));
            self.is_lost = self.head[1] & 0x80 != 0;
            self.closes |= self.head[0] & 0x0f == 8;
            (self.payload, self.have) = (if extended == 0 { length } else { long }, 0);
        }
    }

    /// The frame that closes the socket with this code, if one can be sent now.
    pub(super) fn closing(&self, code: u16) -> Option<[u8; 4]> {
        let between = self.have == 0 && self.payload == 0 && !self.closes && !self.is_lost;
        let [high, low] = code.to_be_bytes();
        between.then_some([0x88, 2, high, low])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn frame(first: u8, payload: usize) -> Vec<u8> {
        let mut bytes = vec![first];
        match payload {
            0..=125 => bytes.push(payload as u8),
            126..=65_535 => {
                bytes.push(126);
                bytes.extend((payload as u16).to_be_bytes());
            }
            _ => {
                bytes.push(127);
                bytes.extend((payload as u64).to_be_bytes());
            }
        }
        // The payload looks like heads of frames.
        bytes.extend(std::iter::repeat_n(0x88, payload));
        bytes
    }

    #[test]
    fn a_frame_can_be_sent_only_between_frames_however_the_bytes_are_split() {
        for payload in [0, 1, 125, 126, 300, 65_535, 65_536] {
            let bytes = [frame(0x82, payload), frame(0x81, 5)].concat();
            let ends = [frame(0x82, payload).len(), bytes.len()];
            for split in [1, 2, 3, 7, 4_096] {
                let (mut tracker, mut at) = (FrameTracker::default(), 0);
                for piece in bytes.chunks(split) {
                    tracker.pass(piece);
                    at += piece.len();
                    assert_eq!(tracker.closing(RESTART).is_some(), ends.contains(&at), "{payload} at {at} by {split}");
                }
            }
        }
    }

    #[test]
    fn after_the_engine_has_closed_or_sends_no_frames_nothing_is_sent() {
        let mut closed = FrameTracker::default();
        assert_eq!(closed.closing(GOING_AWAY), Some([0x88, 2, 0x03, 0xe9]));
        closed.pass(&frame(0x88, 2));
        assert_eq!(closed.closing(RESTART), None);
        let mut masked = FrameTracker::default();
        masked.pass(&[0x82, 0x81, 1, 2, 3, 4, 5]);
        assert_eq!(masked.closing(RESTART), None);
    }
}
