//! Decompresses event streams that arrive with gzip.
//!
//! Engines are asked for uncompressed responses, but a proxy in front of one may compress them, and
//! a compressed stream can be neither metered nor edited. All other responses are forwarded as they
//! are.
//!
//! Bounds: the caller limits the output per call. The undecoded input is at most one read.

use bytes::{Buf, BytesMut};
use flate2::{Decompress, FlushDecompress, Status};

use super::wire::WireError;

const STEP: usize = 8 << 10;
/// The base-two logarithm of the largest window that gzip uses.
const WINDOW_BITS: u8 = 15;

pub(super) struct Gunzip {
    inflate: Decompress,
    pub(super) coded: BytesMut,
    /// Whether the last step filled the buffer, so that there may be more output without more
    /// input.
    full: bool,
}

impl Gunzip {
    pub(super) fn new() -> Self {
        Self { inflate: Decompress::new_gzip(WINDOW_BITS), coded: BytesMut::new(), full: false }
    }

    /// Whether all received bytes have been decoded.
    pub(super) fn is_drained(&self) -> bool {
        self.coded.is_empty() && !self.full
    }

    /// Decodes into `out`, until it has about `most` bytes (at most one step more).
    pub(super) fn decode(&mut self, out: &mut BytesMut, most: usize) -> Result<(), WireError> {
        let mut step = [0; STEP];
        while !self.is_drained() && out.len() < most {
            let (taken, made) = (self.inflate.total_in(), self.inflate.total_out());
            let status = self.inflate.decompress(&self.coded, &mut step, FlushDecompress::Sync);
            let status = status.map_err(|_| WireError::Gzip)?;
            let taken = usize::try_from(self.inflate.total_in() - taken).unwrap_or(usize::MAX);
            let made = usize::try_from(self.inflate.total_out() - made).unwrap_or(usize::MAX);
            self.coded.advance(taken);
            out.extend_from_slice(&step[..made]);
            self.full = made == STEP;
            if status == Status::StreamEnd {
                // Bytes after the end of the gzip stream are ignored.
                self.full = false;
                self.coded.clear();
            } else if taken == 0 && made == 0 && !self.coded.is_empty() {
                return Err(WireError::Gzip);
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use flate2::Compression;
    use flate2::write::GzEncoder;

    use super::*;

    #[test]
    fn each_event_comes_out_as_soon_as_its_bytes_are_there() {
        let mut encoder = GzEncoder::new(Vec::new(), Compression::default());
        let (mut gunzip, mut out) = (Gunzip::new(), BytesMut::new());
        for event in ["data: one\n\n", "data: two\n\n"] {
            encoder.write_all(event.as_bytes()).unwrap();
            encoder.flush().unwrap();
            for byte in std::mem::take(encoder.get_mut()) {
                gunzip.coded.extend_from_slice(&[byte]);
                gunzip.decode(&mut out, usize::MAX).unwrap();
            }
            assert_eq!(out.split(), event.as_bytes());
        }
        gunzip.coded.extend_from_slice(&encoder.finish().unwrap());
        gunzip.coded.extend_from_slice(b"behind the end");
        gunzip.decode(&mut out, usize::MAX).unwrap();
        assert!(out.is_empty() && gunzip.is_drained());
    }

    #[test]
    fn a_few_bytes_do_not_become_many_at_once() {
        const LARGE: usize = 20 << 20;
        let mut encoder = GzEncoder::new(Vec::new(), Compression::best());
        encoder.write_all(&vec![b'x'; LARGE]).unwrap();
        let (mut gunzip, mut total) = (Gunzip::new(), 0);
        gunzip.coded.extend_from_slice(&encoder.finish().unwrap());
        while !gunzip.is_drained() {
            let mut out = BytesMut::new();
            gunzip.decode(&mut out, 64 << 10).unwrap();
            assert!(out.len() <= (64 << 10) + STEP);
            total += out.len();
        }
        assert_eq!(total, LARGE);
    }

    #[test]
    fn garbage_is_an_error() {
        let mut gunzip = Gunzip::new();
        gunzip.coded.extend_from_slice(b"data: not compressed\n\n");
        assert_eq!(gunzip.decode(&mut BytesMut::new(), usize::MAX), Err(WireError::Gzip));
    }
}
