//! Decodes compressed request bodies (`Content-Encoding`), because the gateway must read the
//! prompt, and vLLM does not decode bodies.
//!
//! It reads gzip (also with several members), deflate (in zlib's format, or raw as some clients
//! send it) and zstd. No client library compresses requests with brotli. Any other coding gets 415
//! with `Accept-Encoding`, before the body is read.
//!
//! Bounds: a decoded body is at most `server.max_body`, and above [`EXPANDS_FREE`] at most
//! [`EXPANDS_MAX`] times as large as the sent one. The decoded body, the compressed body and the
//! decoder's memory all count towards `max_body_memory`.

use std::sync::Arc;

use bytes::{Bytes, BytesMut};
use flate2::{Decompress, FlushDecompress, Status};
use http::HeaderMap;
use http::header::CONTENT_ENCODING;
use tokio::task::yield_now;
use zstd::stream::raw::{DParameter, Decoder as Zstd, Operation};

use super::clients::ClientLimits;
use crate::shares::Owner;
use sluice_config::limits::RETRY_AFTER_MIN;
use sluice_core::openai::{Refusal, ShedReason};

/// The factor by which a body may grow, as in Envoy (`max_inflate_ratio`). JSON grows by 3 to 10.
const EXPANDS_MAX: u64 = 100;
/// Bytes up to which a body may grow by any factor, because repeated text compresses well.
const EXPANDS_FREE: u64 = 1 << 20;
/// The most members of a gzip body, or frames of a zstd body. Each costs time, even without
/// content.
const MEMBERS_MAX: usize = 4_096;
const STEP: usize = 32 << 10;
/// Decoded bytes after which the task yields.
const YIELD_AFTER: usize = 512 << 10;
/// The base-two logarithm of gzip's largest window.
const GZIP_WINDOW: u8 = 15;
/// The base-two logarithm of zstd's largest window that the content coding allows (RFC 9659).
const ZSTD_WINDOW: u32 = 23;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Coding {
    Gzip,
    Deflate,
    Zstd,
}

impl Coding {
    /// The coding of a body; `None`: not encoded.
    pub(super) fn of(headers: &HeaderMap) -> Result<Option<Self>, Refusal> {
        let values = headers.get_all(CONTENT_ENCODING).iter();
        let codings = values.flat_map(|value| value.as_bytes().split(|byte| *byte == b',')).map(<[u8]>::trim_ascii);
        let mut found = None;
        for coding in codings.filter(|coding| !coding.is_empty() && !coding.eq_ignore_ascii_case(b"identity")) {
            let known =
                [("gzip", Self::Gzip), ("x-gzip", Self::Gzip), ("deflate", Self::Deflate), ("zstd", Self::Zstd)];
            let known = known.into_iter().find(|(name, _)| coding.eq_ignore_ascii_case(name.as_bytes()));
            // Two codings together would multiply the growth of a few bytes.
            if found.replace(known.ok_or(Refusal::EncodingNotSupported)?.1).is_some() {
                return Err(Refusal::EncodingNotSupported);
            }
        }
        Ok(found)
    }

    const fn name(self) -> &'static str {
        match self {
            Self::Gzip => "gzip",
            Self::Deflate => "deflate",
            Self::Zstd => "zstd",
        }
    }

    /// Bytes that the decoder takes, for bodies of up to `limit` bytes.
    fn memory(self, limit: u64) -> usize {
        match self {
            Self::Gzip | Self::Deflate => 1 << (GZIP_WINDOW + 1),
            Self::Zstd => usize::try_from(limit).map_or(1 << ZSTD_WINDOW, |limit| limit.min(1 << ZSTD_WINDOW)),
        }
    }

    fn malformed(self) -> Refusal {
        let name = self.name();
        let message =
            format!("the body is not valid {name}, as Content-Encoding says; compress it, or leave out the header");
        Refusal::BadRequest { message, param: None }
    }

    fn truncated(self) -> Refusal {
        let message = format!("the body ends inside its {} stream; send all of it", self.name());
        Refusal::BadRequest { message, param: None }
    }
}

enum Decoder {
    Inflate(Decompress),
    Zstd(Box<Zstd<'static>>),
}

struct Progress {
    taken: usize,
    made: usize,
    ended: bool,
}

impl Decoder {
    fn new(coding: Coding, body: &[u8]) -> std::io::Result<Self> {
        Ok(match coding {
            Coding::Gzip => Self::Inflate(Decompress::new_gzip(GZIP_WINDOW)),
            // In zlib's format, the first two bytes are a multiple of 31 (RFC 1950).
            Coding::Deflate => Self::Inflate(Decompress::new(
                matches!(body, [first, second, ..] if first & 15 == 8 && u16::from_be_bytes([*first, *second]) % 31 == 0),
            )),
            Coding::Zstd => {
                let mut decoder = Zstd::new()?;
                decoder.set_parameter(DParameter::WindowLogMax(ZSTD_WINDOW))?;
                Self::Zstd(Box::new(decoder))
            }
        })
    }

    fn step(&mut self, input: &[u8], out: &mut [u8]) -> Option<Progress> {
        match self {
            Self::Inflate(inflate) => {
                let before = (inflate.total_in(), inflate.total_out());
                let status = match inflate.decompress(input, out, FlushDecompress::None).ok()? {
                    Status::StreamEnd => true,
                    Status::Ok | Status::BufError => false,
                };
                let taken = usize::try_from(inflate.total_in() - before.0).ok()?;
                let made = usize::try_from(inflate.total_out() - before.1).ok()?;
                Some(Progress { taken, made, ended: status })
            }
            Self::Zstd(decoder) => {
                let status = decoder.run_on_buffers(input, out).ok()?;
                let (taken, made) = (status.bytes_read, status.bytes_written);
                Some(Progress { taken, made, ended: status.remaining == 0 })
            }
        }
    }
}

/// Decodes a whole body to at most `limit` bytes.
pub(super) async fn decode(
    coding: Coding,
    body: Bytes,
    limit: u64,
    clients: &Arc<ClientLimits>,
    owner: Owner,
) -> Result<Bytes, Refusal> {
    if body.is_empty() {
        return Ok(body);
    }
    let no_memory = || Refusal::Shed { reason: ShedReason::BodyMemory, retry_after: RETRY_AFTER_MIN.as_secs() };
    let (mut of_decoder, mut counted) = (clients.body(owner.clone()), clients.body(owner));
    if !of_decoder.grow(coding.memory(limit)) {
        return Err(no_memory());
    }
    let mut decoder = Decoder::new(coding, &body).map_err(|_| Refusal::Internal)?;
    let (mut step, mut rest, mut decoded, mut members) = (vec![0; STEP], &body[..], BytesMut::new(), 1);
    let mut yield_at = YIELD_AFTER;
    loop {
        let Progress { taken, made, ended } = decoder.step(rest, &mut step).ok_or_else(|| coding.malformed())?;
        rest = &rest[taken..];
        let size = (decoded.len() + made) as u64;
        if size > limit {
            return Err(Refusal::BodyTooLarge { limit });
        }
        if size > EXPANDS_FREE && size / EXPANDS_MAX > body.len() as u64 {
            return Err(Refusal::BodyExpands { times: EXPANDS_MAX });
        }
        if !counted.grow(made) {
            return Err(no_memory());
        }
        decoded.extend_from_slice(&step[..made]);
        if ended {
            // Some programs pad gzip with zeros.
            if rest.iter().all(|byte| *byte == 0) {
                return if counted.complete() { Ok(counted.keep_buffer(decoded)) } else { Err(no_memory()) };
            }
            members += 1;
            if members > MEMBERS_MAX || coding == Coding::Deflate {
                return Err(coding.malformed());
            }
            decoder = Decoder::new(coding, rest).map_err(|_| Refusal::Internal)?;
        } else if taken == 0 && made == 0 {
            return Err(coding.truncated());
        }
        if decoded.len() + members * STEP >= yield_at {
            yield_at = decoded.len() + members * STEP + YIELD_AFTER;
            yield_now().await;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use flate2::Compression;
    use flate2::write::{DeflateEncoder, GzEncoder, ZlibEncoder};
    use http::HeaderValue;

    use super::*;

    const LIMIT: u64 = 8 << 20;

    fn gzip(plain: &[u8]) -> Vec<u8> {
        let mut encoder = GzEncoder::new(Vec::new(), Compression::default());
        encoder.write_all(plain).unwrap();
        encoder.finish().unwrap()
    }

    fn zlib(plain: &[u8]) -> Vec<u8> {
        let mut encoder = ZlibEncoder::new(Vec::new(), Compression::default());
        encoder.write_all(plain).unwrap();
        encoder.finish().unwrap()
    }

    fn raw(plain: &[u8]) -> Vec<u8> {
        let mut encoder = DeflateEncoder::new(Vec::new(), Compression::default());
        encoder.write_all(plain).unwrap();
        encoder.finish().unwrap()
    }

    fn zstd(plain: &[u8]) -> Vec<u8> {
        zstd::stream::encode_all(plain, 3).unwrap()
    }

    /// Text that compresses, but not to almost nothing.
    fn text(length: usize) -> Vec<u8> {
        (0..length).map(|at| b' ' + (at.wrapping_mul(2_654_435_761) >> 13) as u8 % 64).collect()
    }

    fn client() -> Owner {
        Owner::network([127, 0, 0, 1].into())
    }

    async fn decoded(coding: Coding, body: Vec<u8>) -> Result<Bytes, Refusal> {
        let clients = ClientLimits::of_bodies(1 << 30);
        let decoded = decode(coding, body.into(), LIMIT, &clients, client()).await;
        assert_eq!(
            clients.view().body_bytes,
            decoded.as_ref().map_or(0, |body| body.len() as u64),
            "only the result counts"
        );
        decoded
    }

    #[tokio::test]
    async fn what_was_compressed_comes_out_again() {
        for length in [1, 100, STEP, STEP + 1, 3 << 20] {
            let plain = text(length);
            for (coding, body) in [
                (Coding::Gzip, gzip(&plain)),
                (Coding::Deflate, zlib(&plain)),
                (Coding::Deflate, raw(&plain)),
                (Coding::Zstd, zstd(&plain)),
            ] {
                assert!(decoded(coding, body).await.unwrap() == plain, "{coding:?} {length}");
            }
        }
        assert!(decoded(Coding::Gzip, Vec::new()).await.unwrap().is_empty());
    }

    #[tokio::test]
    async fn members_follow_each_other_and_zeros_may_follow_them() {
        let two = [&text(70_000)[..], b"more"];
        for (coding, parts) in [(Coding::Gzip, two.map(gzip)), (Coding::Zstd, two.map(zstd))] {
            assert!(decoded(coding, parts.concat()).await.unwrap() == two.concat(), "{coding:?}");
            let garbage = [&parts.concat()[..], b"{}"].concat();
            assert_eq!(decoded(coding, garbage).await.unwrap_err().status(), 400);
        }
        assert_eq!(decoded(Coding::Gzip, [gzip(b"x"), vec![0; 512]].concat()).await.unwrap(), "x");
        let many = gzip(b"").repeat(MEMBERS_MAX + 1);
        assert_eq!(decoded(Coding::Gzip, many).await.unwrap_err().status(), 400);
    }

    #[tokio::test]
    async fn a_body_that_is_cut_or_lies_is_an_error_of_the_client() {
        let plain = text(100_000);
        for (coding, body) in
            [(Coding::Gzip, gzip(&plain)), (Coding::Deflate, zlib(&plain)), (Coding::Zstd, zstd(&plain))]
        {
            for kept in [1, 2, 9, body.len() / 2, body.len() - 1] {
                let refusal = decoded(coding, body[..kept].to_vec()).await.unwrap_err();
                assert!(refusal.status() == 400, "{coding:?} {kept}: {refusal:?}");
            }
            let refusal = decoded(coding, b"{\"model\":\"m\"}".to_vec()).await.unwrap_err();
            assert!(refusal.status() == 400, "{coding:?}: {refusal:?}");
            let mut changed = body.clone();
            *changed.last_mut().unwrap() ^= 1;
            assert!(coding == Coding::Zstd || decoded(coding, changed).await.is_err(), "the checksum is checked");
        }
    }

    #[tokio::test]
    async fn size_and_ratio_are_bounded() {
        let large = vec![b'x'; LIMIT as usize + 1];
        for (coding, bomb) in
            [(Coding::Gzip, gzip(&large)), (Coding::Deflate, zlib(&large)), (Coding::Zstd, zstd(&large))]
        {
            assert_eq!(decoded(coding, bomb).await.unwrap_err(), Refusal::BodyExpands { times: EXPANDS_MAX });
        }
        assert_eq!(
            decoded(Coding::Gzip, gzip(&text(LIMIT as usize + 1))).await.unwrap_err(),
            Refusal::BodyTooLarge { limit: LIMIT }
        );
        let free = vec![b'x'; EXPANDS_FREE as usize];
        assert!(decoded(Coding::Zstd, zstd(&free)).await.unwrap() == free);
    }

    #[tokio::test]
    async fn a_window_above_that_of_the_content_coding_is_refused() {
        let mut encoder = zstd::stream::Encoder::new(Vec::new(), 1).unwrap();
        encoder.window_log(ZSTD_WINDOW + 1).unwrap();
        encoder.write_all(&text(20 << 20)).unwrap();
        assert_eq!(decoded(Coding::Zstd, encoder.finish().unwrap()).await.unwrap_err().status(), 400);
    }

    #[tokio::test]
    async fn memory_is_counted() {
        let (plain, clients) = (text(900_000), ClientLimits::of_bodies(500_000));
        let refused = decode(Coding::Gzip, gzip(&plain).into(), LIMIT, &clients, client()).await.unwrap_err();
        assert!(matches!(refused, Refusal::Shed { reason: ShedReason::BodyMemory, .. }), "{refused:?}");
        assert_eq!(clients.view().body_bytes, 0);
    }

    #[test]
    fn one_known_coding_is_read() {
        let of = |values: &[&'static str]| {
            let mut headers = HeaderMap::new();
            for value in values {
                headers.append(CONTENT_ENCODING, HeaderValue::from_static(value));
            }
            Coding::of(&headers)
        };
        assert_eq!(of(&[]), Ok(None));
        assert_eq!(of(&["identity", ""]), Ok(None));
        assert_eq!(of(&["GZip"]), Ok(Some(Coding::Gzip)));
        assert_eq!(of(&["identity, zstd"]), Ok(Some(Coding::Zstd)));
        for values in [&["br"][..], &["gzip, gzip"], &["gzip", "zstd"], &["gzip;q=1"]] {
            assert_eq!(of(values), Err(Refusal::EncodingNotSupported), "{values:?}");
        }
    }
}
