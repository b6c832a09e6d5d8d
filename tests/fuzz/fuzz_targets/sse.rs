//! Any bytes in any split: nothing panics, nothing is lost or changed without stripping, and the measurements do not
//! depend on the split. The first byte of the input chooses the cut.

#![no_main]

use bytes::Bytes;
use libfuzzer_sys::fuzz_target;
use sluice::meter::{StreamMeter, StreamStats, Strip};
use sluice::openai::Dialect;
use tokio::time::Instant;

fn run(dialect: Dialect, strip: Strip, chunks: &[&[u8]], now: Instant) -> (Vec<u8>, StreamStats) {
    let mut meter = StreamMeter::new(dialect, now, strip);
    let mut out = Vec::new();
    for chunk in chunks {
        meter.feed(Bytes::copy_from_slice(chunk), now).iter().for_each(|piece| out.extend_from_slice(piece));
    }
    meter.finish().iter().for_each(|piece| out.extend_from_slice(piece));
    (out, meter.stats())
}

fuzz_target!(|input: &[u8]| {
    let Some((first, stream)) = input.split_first() else { return };
    let now = Instant::now();
    let chunks: Vec<&[u8]> = stream.chunks(usize::from(*first) + 1).collect();
    for dialect in [Dialect::Choices, Dialect::Responses, Dialect::Messages] {
        for strip in [Strip::Nothing, Strip::InjectedUsage, Strip::Continuous { keep_final: true }] {
            let split = run(dialect, strip, &chunks, now);
            assert_eq!(split, run(dialect, strip, &[stream], now));
            assert!(strip != Strip::Nothing || split.0 == stream);
        }
    }
});
