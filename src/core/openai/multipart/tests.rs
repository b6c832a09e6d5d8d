//! Tests of the reading of forms: by example, against recorded readings of starlette, and against
//! `multer`.
//!
//! `tests/fixtures/forms.jsonl`, written by `tests/real/forms.py`, holds hostile forms and the
//! readings of starlette 1.10 with python-multipart 0.0.34. The property: if this reader accepts a
//! form, the other parsers read the same from it.

use super::*;
use crate::openai::{EditedBody, Edits};
use bytes::Bytes;
use proptest::prelude::*;

const TYPE: &str = "multipart/form-data; charset=utf-8; boundary=\"XyZ\"";

fn form(file: &[u8]) -> Vec<u8> {
    let head = "--XyZ\r\nContent-Disposition: form-data; name=\"model\"\r\n\r\nwhisper\r\n\
                --XyZ\r\ncontent-disposition: form-data; name=\"file\"; filename=\"a.wav\"\r\nContent-Type: audio/wav\r\n\r\n";
    let tail = "\r\n--XyZ\r\nContent-Disposition: form-data; name=\"stream\"\r\n\r\nTrue\r\n\
                --XyZ\r\nContent-Disposition: form-data; name=\"prompt\"\r\n\r\n\r\n--XyZ--\r\n";
    [head.as_bytes(), file, tail.as_bytes()].concat()
}

/// A form of parts, given as headers and content.
fn of_parts(parts: &[(&str, &str)]) -> Vec<u8> {
    let parts = parts.iter().map(|(headers, value)| format!("--XyZ\r\n{headers}\r\n\r\n{value}\r\n"));
    (parts.collect::<String>() + "--XyZ--\r\n").into_bytes()
}

const MODEL: &str = "Content-Disposition: form-data; name=\"model\"";

fn why(content_type: &str, body: &[u8]) -> &'static str {
    match read(Route::Transcriptions, content_type, body) {
        Err(RequestError::NotAForm { why }) => why,
        other => panic!("{other:?}"),
    }
}

#[test]
fn model_stream_and_file_are_found() {
    let body = form(b"RIFF\r\n--Xy\r\n\r\n\x00\xff name=\"model\"");
    let view = read(Route::Transcriptions, TYPE, &body).unwrap();
    assert_eq!(view.model.as_deref(), Some("whisper"));
    assert!(view.stream);
    assert_eq!(view.shape.media_parts, 1);
}

#[test]
fn a_long_prompt_in_a_form_counts_as_text() {
    let hidden = r"\u0061".repeat(1_000);
    for name in ["prompt", "hotwords", "of_a_later_version"] {
        let body = of_parts(&[(MODEL, "m"), (&format!("Content-Disposition: form-data; name={name}"), &hidden)]);
        let characters = read(Route::Transcriptions, TYPE, &body).unwrap().shape.text.characters();
        assert_eq!(characters, hidden.len() as u64, "{name}");
    }
}

#[test]
fn what_bounds_the_output_is_found() {
    let field = |name: &str| format!("Content-Disposition: form-data; name={name}");
    let body = of_parts(&[(&field("n"), "4"), (&field("max_completion_tokens"), "99")]);
    let view = read(Route::Transcriptions, TYPE, &body).unwrap();
    assert_eq!((view.n, view.max_output, view.model), (4, Some(99), None));
}

#[test]
fn the_model_can_be_renamed_in_place_and_put_in() {
    let rename = |body: Vec<u8>| {
        let body = Bytes::from(body);
        let view = read(Route::Transcriptions, TYPE, &body).unwrap();
        let renamed = EditedBody::new(&body, &view.edits, Edits { model: Some("w2"), ..Edits::default() }).to_bytes();
        assert_eq!(read(Route::Transcriptions, TYPE, &renamed).unwrap().model.as_deref(), Some("w2"));
        (body.len(), renamed.len())
    };
    let (before, after) = rename(form(b"xyz"));
    assert_eq!(after, before - "whisper".len() + 2);
    rename(of_parts(&[(MODEL, "")]));
    rename(of_parts(&[("Content-Disposition: form-data; name=\"prompt\"", "x")]));
    rename([b"\r\n", &*of_parts(&[("Content-Disposition: form-data; name=\"prompt\"", "x")])].concat());
    rename(b"--XyZ--".to_vec());
}

#[test]
fn forms_of_common_clients_are_read() {
    let file = "Content-Disposition: form-data; name=\"file\"; filename=\"a b.wav\"\r\nContent-Type: audio/wav";
    let names = [
        MODEL,
        "Content-Disposition: form-data; name=model",
        "Content-Type: text/plain; charset=utf-8\r\nContent-Disposition: form-data; name=model",
        "Content-Disposition: form-data; name=\"model\"\r\nContent-Type: text/plain;charset=UTF-8\r\nContent-Length: 7",
        "Content-Disposition: form-data; name=\"model\"\r\nContent-Type: text/plain; charset=US-ASCII\r\n\
         Content-Transfer-Encoding: 8bit",
    ];
    for name in names {
        for file in [file, "Content-Disposition: form-data; name=file; filename=a.wav; filename*=utf-8''a.wav"] {
            let list = "Content-Disposition: form-data; name=\"timestamp_granularities[]\"";
            let body = of_parts(&[(file, "RIFF"), (name, "whisper"), (list, "word"), (list, "segment")]);
            let view = read(Route::Transcriptions, TYPE, &body).unwrap_or_else(|error| panic!("{name}: {error}"));
            assert_eq!((view.model.as_deref(), view.shape.media_parts), (Some("whisper"), 1), "{name}");
        }
    }
    for kind in ["multipart/form-data; boundary=XyZ", "Multipart/Form-Data;boundary=\"XyZ\""] {
        assert_eq!(read(Route::Transcriptions, kind, &form(b"x")).unwrap().model.as_deref(), Some("whisper"), "{kind}");
    }
}

#[test]
fn a_second_model_that_only_some_parsers_see_is_refused() {
    let second = [
        "Content-Disposition: form-data; NAME=\"model\"",
        "Content-Disposition: form-data; name =\"model\"",
        "Content-Disposition: form-data; name=\"x\"; name=\"model\"",
        "Content-Disposition: form-data; name=\"model\"; name=\"x\"",
        "Content-Disposition: form-data; name=\"x\"; NAME=\"model\"",
        "Content-Disposition: form-data; name=\"x\"; name =\"model\"",
        "Content-Disposition: form-data; name=\"x\"\r\nContent-Disposition: form-data; name=\"model\"",
        "Content-Disposition: form-data; name=\"model\"\r\nContent-Disposition: form-data; name=\"x\"",
        "Content-Disposition: form-data; name=\"x\"\r\n\r\na\r\n--XyZ \r\nContent-Disposition: form-data; name=\"model\"",
        "Content-Disposition: form-data; name=\"model\"; filename*=utf-8''x",
        "Content-Disposition: form-data; name=\"x\"\r\n\tContent-Disposition: form-data; name=\"model\"",
        "Content-Disposition: form-data; name=\"mod\\el\"",
        "Content-Disposition: form-data; name=\"MODEL\"",
        "Content-Disposition: form-data; name=\"model\"",
        "Content-Disposition: form-data; name=\"model\"; filename=\"\"",
        "Content-Disposition: form-data; name=\"_charset_\"",
    ];
    for second in second {
        let body = of_parts(&[(MODEL, "good"), (second, "evil")]);
        assert!(read(Route::Transcriptions, TYPE, &body).is_err(), "{second}");
        let body = of_parts(&[(second, "evil"), (MODEL, "good")]);
        assert!(read(Route::Transcriptions, TYPE, &body).is_err(), "{second}");
    }
    // Decoded as UTF-7, this name is `model`.
    let hidden = of_parts(&[(MODEL, "good"), ("Content-Disposition: form-data; name=\"+AG0-odel\"", "evil")]);
    assert_eq!(why(TYPE, &hidden), "the name of a part has characters other than letters, digits and _.-[]");
    let utf_7 = "multipart/form-data; boundary=XyZ; charset=utf-7";
    assert_eq!(why(utf_7, &form(b"x")), "the content type has a character set other than utf-8");
}

#[test]
fn broken_forms_are_refused() {
    let body = form(b"xyz");
    let refused = |kind: &str, body: &[u8]| read(Route::Transcriptions, kind, body).is_err();
    assert!(refused("application/json", &body));
    assert!(refused("application/x-www-form-urlencoded", b"model=m"));
    assert!(refused("multipart/form-data", &body));
    assert!(refused("multipart/form-data; boundary=other", &body));
    assert!(refused("multipart/form-data; boundary=XyZ; boundary=other", &body));
    assert!(refused(TYPE, b""));
    for end in 0..body.len() - 4 {
        assert!(refused(TYPE, &body[..end]), "{end}");
    }
    let part = |count: usize| {
        let parts = (0..count).map(|n| format!("--XyZ\r\nContent-Disposition: form-data; name=\"x{n}\"\r\n\r\n1\r\n"));
        parts.collect::<String>() + "--XyZ--"
    };
    assert_eq!(why(TYPE, part(65).as_bytes()), "it has more than 64 parts");
    assert!(!refused(TYPE, part(64).as_bytes()));
}

/// A recorded form, and starlette's reading of it.
#[derive(serde::Deserialize)]
struct Recorded {
    content_type: String,
    /// The body, with each byte written as one character.
    body: String,
    /// The last `model` that starlette reads; absent if it reads none or refuses the form.
    model: Option<String>,
}

#[test]
fn recorded_hostile_forms_are_refused_or_read_as_starlette_reads_them() {
    let recorded = include_str!("../../../../tests/fixtures/forms.jsonl");
    let (mut accepted, mut hostile) = (0, 0);
    for (number, line) in recorded.lines().enumerate() {
        let one: Recorded = serde_json::from_str(line).unwrap();
        let body: Vec<u8> = one.body.chars().map(|byte| u8::try_from(u32::from(byte)).unwrap()).collect();
        match read(Route::Transcriptions, &one.content_type, &body) {
            Err(_) => hostile += 1,
            Ok(view) => {
                let theirs = one.model.as_deref().filter(|model| !model.is_empty());
                assert_eq!(view.model.as_deref(), theirs, "line {}: {}", number + 1, one.body);
                accepted += 1;
            }
        }
    }
    assert!(accepted >= 20 && hostile >= 200, "{accepted} accepted, {hostile} refused");
}

/// The last `model` that `multer` reads; an error if it refuses the form.
fn by_multer(body: &[u8]) -> Result<Option<String>, multer::Error> {
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    runtime.block_on(async {
        let mut form = multer::Multipart::with_reader(body, "XyZ");
        let mut model = None;
        while let Some(field) = form.next_field().await? {
            let is_model = field.name() == Some("model");
            let text = field.bytes().await?;
            if is_model {
                model = Some(String::from_utf8_lossy(&text).into_owned());
            }
        }
        Ok(model)
    })
}

fn piece() -> impl Strategy<Value = String> {
    prop_oneof![
        4 => Just("\r\n".to_owned()),
        3 => Just("--XyZ\r\n".to_owned()),
        1 => Just("--XyZ--".to_owned()),
        1 => Just("--XyZ".to_owned()),
        4 => Just(format!("{MODEL}\r\n\r\n")),
        2 => Just("Content-Disposition: form-data; name=\"file\"; filename=\"name=model; name=model\"\r\n\r\n".to_owned()),
        1 => Just("content-disposition:form-data;name=prompt\r\n\r\n".to_owned()),
        1 => Just("Content-Type: text/plain\r\n".to_owned()),
        1 => "[a-z]{1,5}",
        1 => "[ -~\r\n]{1,4}",
    ]
}

proptest! {
    #[test]
    fn what_is_accepted_multer_reads_alike(pieces in prop::collection::vec(piece(), 0..16)) {
        let body = format!("--XyZ\r\n{}--XyZ--\r\n", pieces.concat());
        let Ok(view) = read(Route::Transcriptions, TYPE, body.as_bytes()) else { return Ok(()) };
        let theirs = by_multer(body.as_bytes()).map_err(|error| TestCaseError::fail(format!("{error}: {body}")))?;
        prop_assert_eq!(view.model.as_deref(), theirs.as_deref().filter(|model| !model.is_empty()), "{}", body);
    }

    #[test]
    fn no_bytes_make_it_panic(kind in "[ -~]{0,60}", bytes in prop::collection::vec(any::<u8>(), 0..200)) {
        let _ = read(Route::Transcriptions, &kind, &bytes);
        let _ = read(Route::Transcriptions, TYPE, &[b"--XyZ\r\n", &*bytes, b"--XyZ--"].concat());
    }
}
