//! Tests of the scanner: against serde_json on arbitrary documents, and on documents that it
//! refuses.
//!
//! A regression test is named by the symptom.

use super::string::ClosingQuote;
use super::*;
use proptest::prelude::*;
use serde_json::Value;

fn check(text: &[u8]) -> Result<(), ScanError> {
    let mut scanner = Scanner::new(text);
    scanner.skip()?;
    scanner.end()
}

#[test]
fn escapes_are_decoded() {
    let mut scanner = Scanner::new(br#""a\u0065\n\"\\\/\ud83d\ude00\ud83dx\u00e9""#);
    assert_eq!(scanner.text().unwrap().decode(), "ae\n\"\\/\u{1f600}\u{fffd}x\u{e9}");
}

#[test]
fn a_quote_is_found_at_every_distance_and_behind_bytes_like_it() {
    for other in [0x00, 0x21, 0x23, 0x5b, 0x5d, 0x80, 0xa2, 0xdc, 0xff] {
        for length in 0..80 {
            for behind in [&b""[..], b"\"\\\"", b",1234567890"] {
                let text = [b"\"", &vec![other; length][..], b"\"", behind].concat();
                let mut scanner = Scanner::new(&text);
                assert_eq!(scanner.text().unwrap().raw.len(), length, "{other:#x}");
                assert_eq!(scanner.position(), length + 2);
            }
        }
    }
}

#[test]
fn nesting_is_bounded() {
    let deep = |levels: usize| [vec![b'['; levels], vec![b']'; levels]].concat();
    assert_eq!(check(&deep(1_000)), Ok(()));
    assert_eq!(check(&deep(1_001)), Err(ScanError::TooDeep { at: 1_000 }));
    assert_eq!(check(&deep(1_000_000)), Err(ScanError::TooDeep { at: 1_000 }));
    assert_eq!(check(&vec![b'['; 1 << 20]), Err(ScanError::TooDeep { at: 1_000 }));
}

#[test]
fn a_byte_order_mark_is_skipped_at_the_start_only() {
    assert_eq!(check(b"\xEF\xBB\xBF {}"), Ok(()));
    assert!(matches!(check(b" \xEF\xBB\xBF{}"), Err(ScanError::Broken { at: 1, .. })));
}

#[test]
fn every_prefix_of_a_document_is_truncated() {
    let text = br#"{"a":[1,-2.5e+3,true,null,"x\u00e9\n"],"b":{"c":false}}"#;
    assert_eq!(check(text), Ok(()));
    for end in 0..text.len() {
        assert!(matches!(check(&text[..end]), Err(ScanError::Truncated { .. })), "{end}: {:?}", check(&text[..end]));
    }
}

#[test]
fn broken_structure_is_found() {
    for text in
        ["{a:1}", "[1 2]", "[1,]", "{\"a\" 1}", "{\"a\":1,}", "01", "1.", "+1", "tru e", "\"\\x\"", "\"\\u12G4\"", "]"]
    {
        assert!(
            matches!(
                check(text.as_bytes()),
                Err(ScanError::Broken { .. } | ScanError::Trailing { .. } | ScanError::Truncated { .. })
            ),
            "{text}"
        );
    }
    assert_eq!(check(b"{} x"), Err(ScanError::Trailing { at: 3 }));
    assert_eq!(check(b"{}{}"), Err(ScanError::Trailing { at: 2 }));
}

#[test]
fn numbers_that_only_python_writes_pass() {
    assert_eq!(check(b"[NaN,Infinity,-Infinity]"), Ok(()));
    assert!(check(b"-NaN").is_err());
}

#[test]
fn integers_are_counted_and_anything_else_is_left_alone() {
    let count = |text: &'static [u8]| Scanner::new(text).integers();
    assert_eq!(count(b" [1, 22,\n333 ]"), Ok(Some(3)));
    assert_eq!(count(b"[]"), Ok(Some(0)));
    assert_eq!(count(b"[1.5]"), Ok(None));
    assert_eq!(count(b"[[1]]"), Ok(None));
    assert_eq!(count(b"7"), Ok(None));
    assert_eq!(count(b"[1,2"), Ok(None));
    let many = format!("{:?}", (0..5_000).collect::<Vec<u32>>());
    assert_eq!(Scanner::new(many.as_bytes()).integers(), Ok(Some(5_000)));
}

fn json() -> impl Strategy<Value = Value> {
    let leaf = prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        any::<i64>().prop_map(Value::from),
        any::<f64>().prop_filter("finite", |x| x.is_finite()).prop_map(Value::from),
        ".{0,20}".prop_map(Value::from),
    ];
    leaf.prop_recursive(5, 60, 6, |inner| {
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..6).prop_map(Value::from),
            prop::collection::btree_map(".{0,8}", inner, 0..6).prop_map(|map| Value::Object(map.into_iter().collect())),
        ]
    })
}

/// Rebuilds a tree with the scanner alone.
fn rebuild(scanner: &mut Scanner<'_>) -> Value {
    match scanner.kind().unwrap() {
        JsonKind::Object => {
            let mut map = serde_json::Map::new();
            let member = |scanner: &mut Scanner<'_>, key: Text<'_>| {
                map.insert(key.decode().into_owned(), rebuild(scanner));
                Ok::<_, ScanError>(())
            };
            scanner.object(member).unwrap();
            Value::Object(map)
        }
        JsonKind::Array => {
            let mut list = Vec::new();
            let element = |scanner: &mut Scanner<'_>| {
                list.push(rebuild(scanner));
                Ok::<_, ScanError>(())
            };
            scanner.array(element).unwrap();
            Value::Array(list)
        }
        JsonKind::String => Value::from(scanner.text().unwrap().decode().into_owned()),
        JsonKind::Number => serde_json::from_slice(scanner.number().unwrap()).unwrap(),
        JsonKind::Bool => Value::from(scanner.boolean().unwrap()),
        JsonKind::Null => scanner.skip().map(|_| Value::Null).unwrap(),
    }
}

proptest! {
    #[test]
    fn a_tree_rebuilt_by_scanning_is_the_tree_serde_reads(value in json(), pretty in any::<bool>()) {
        let text = if pretty { serde_json::to_string_pretty(&value) } else { serde_json::to_string(&value) }.unwrap();
        prop_assert_eq!(check(text.as_bytes()), Ok(()));
        let again: Value = serde_json::from_str(&text).unwrap();
        prop_assert_eq!(rebuild(&mut Scanner::new(text.as_bytes())), again);
    }

    #[test]
    fn what_serde_accepts_after_damage_is_accepted_here(value in json(), at in any::<prop::sample::Index>(), byte in any::<u8>()) {
        let mut text = serde_json::to_vec(&value).unwrap();
        let at = at.index(text.len());
        text[at] = byte;
        if serde_json::from_slice::<Value>(&text).is_ok() {
            prop_assert_eq!(check(&text), Ok(()));
        }
    }

    #[test]
    fn arbitrary_bytes_never_panic(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
        let _ = check(&bytes);
    }
}

proptest! {
    #[test]
    fn a_long_string_ends_where_stepping_over_its_escapes_ends_it(
        text in proptest::collection::vec(prop_oneof![6 => Just(b'a'), 3 => Just(b'\\'), 1 => Just(b'"')], 0..700)
    ) {
        let mut at = 0;
        let stepped = loop {
            match text.get(at) {
                None => break None,
                Some(b'"') => break Some(at),
                Some(b'\\') => at += 2,
                Some(_) => at += 1,
            }
        };
        let want = stepped.map(|at| ClosingQuote { at, behind_escapes: text[..at].contains(&b'\\') });
        prop_assert_eq!(closing_quote(&text), want);
    }
}
