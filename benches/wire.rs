//! The cost of parsing bodies of several sizes, and a stream of 64 events in few and in many
//! chunks.
//!
//! The whole proxy may take 72 us for an unpaced stream of 64 events, and 180 us for a prompt of
//! 400 KB. Parsing should take about 10 us and 60 us of these. The command is `cargo bench --bench
//! wire`.

use std::hint::black_box;

use bytes::Bytes;
use criterion::{BatchSize, Criterion, criterion_main};
use sluice_core::meter::{StreamMeter, Strip};
use sluice_core::openai::{Dialect, EditedBody, Edits, Route, UsageEdit, request};
use tokio::time::Instant;

fn chat(bytes: usize, unit: &str) -> Bytes {
    let text = serde_json::Value::from(unit.repeat(bytes / unit.len())).to_string();
    let head = r#"{"model":"llama","stream":true,"max_tokens":256,"messages":[{"role":"user","content":"#;
    format!("{head}{text}}}],\"temperature\":0.7}}").into()
}

fn stream(usage: bool) -> Vec<String> {
    let event = |index: usize| {
        let usage = if usage {
            format!(r#","usage":{{"prompt_tokens":99,"total_tokens":{},"completion_tokens":{index}}}"#, 99 + index)
        } else {
            String::new()
        };
        format!(
            "data: {{\"id\":\"chatcmpl-0123456789abcdef0123456789abcdef\",\"object\":\"chat.completion.chunk\",\"created\":1780000000,\"model\":\"meta-llama/Llama-3.1-8B-Instruct\",\"choices\":[{{\"index\":0,\"delta\":{{\"content\":\" word{index}\"}},\"logprobs\":null,\"finish_reason\":null,\"token_ids\":null}}]{usage}}}\n\n"
        )
    };
    (0..64).map(event).collect()
}

fn read(c: &mut Criterion) {
    let prose = "The quick brown fox jumps over the lazy dog, again and again. ";
    for (name, bytes) in [("1KB", 1_000), ("32KB", 32_000), ("400KB", 400_000)] {
        let body = chat(bytes, prose);
        c.bench_function(&format!("read/{name}"), |b| {
            b.iter(|| request::read(Route::ChatCompletions, black_box(&body)).is_ok())
        });
    }
    for (name, unit) in [
        ("code", "    let x = f(\"a\", 1);\n\treturn x;\n"),
        ("cjk", "\u{6f22}\u{5b57}\u{3068}\u{304b}\u{306a}\u{3002}"),
        // A client can send a text in which every character is escaped.
        ("line breaks", "\n"),
        ("code units", "\u{1}"),
    ] {
        let escaped = serde_json::to_string(unit).expect("a string").len() - 2;
        let body = chat(400_000 * unit.len() / escaped, unit);
        c.bench_function(&format!("read/400KB {name}"), |b| {
            b.iter(|| request::read(Route::ChatCompletions, black_box(&body)).is_ok())
        });
    }
    let ids = format!("{{\"model\":\"m\",\"prompt\":{:?}}}", (0..70_000).collect::<Vec<u32>>());
    c.bench_function("read/70k token ids", |b| {
        b.iter(|| request::read(Route::Completions, black_box(ids.as_bytes())).is_ok())
    });
    let body = chat(400_000, prose);
    let points = request::read(Route::ChatCompletions, &body).expect("a valid body").edits;
    let edits = Edits { model: Some("other"), usage: UsageEdit::AtEnd };
    c.bench_function("edit/400KB", |b| b.iter(|| EditedBody::new(black_box(&body), &points, edits).len()));
}

fn meter(c: &mut Criterion) {
    let cases = [
        ("", false, Strip::Nothing),
        (" strip usage event", false, Strip::InjectedUsage),
        (" strip continuous", true, Strip::Continuous { keep_final: false }),
    ];
    for (name, usage, strip) in cases {
        let events = stream(usage);
        for chunks in [1, 8, 64] {
            let chunks: Vec<Bytes> = events.chunks(64 / chunks).map(|part| Bytes::from(part.concat())).collect();
            let now = Instant::now();
            c.bench_function(&format!("meter/64 events in {}{name}", chunks.len()), |b| {
                b.iter_batched(
                    || (StreamMeter::new(Dialect::Choices, now, strip), chunks.clone()),
                    |(mut meter, chunks)| {
                        for chunk in chunks {
                            black_box(meter.feed(chunk, now));
                        }
                        meter
                    },
                    BatchSize::SmallInput,
                );
            });
        }
    }
}

/// A separate module for the macro, because the public function that it makes has no documentation.
mod group {
    use super::{meter, read};
    criterion::criterion_group!(benches, read, meter);
}
criterion_main!(group::benches);
