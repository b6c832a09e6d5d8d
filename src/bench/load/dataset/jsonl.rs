//! Lines of JSON with their numbers, for error messages.
//!
//! Blank lines are skipped. Lines are read one at a time, because a value takes many times the
//! memory of the line. Bounds: [`MAX_ITEMS`]; the caller limits the size of the file.

use serde_json::Value;

use super::error::{DatasetError, bad_row};
use super::item::MAX_ITEMS;

fn lines(text: &str) -> impl Iterator<Item = (usize, &str)> {
    (1..).zip(text.lines()).map(|(number, line)| (number, line.trim())).filter(|(_, line)| !line.is_empty())
}

pub(super) fn objects(text: &str, file: &str) -> impl Iterator<Item = Result<(usize, Value), DatasetError>> {
    lines(text).take(MAX_ITEMS).map(move |(line, text)| {
        let value: Value =
            serde_json::from_str(text).map_err(|error| bad_row(file, line, format!("not JSON: {error}")))?;
        if value.is_object() { Ok((line, value)) } else { Err(bad_row(file, line, "not a JSON object")) }
    })
}

pub(super) fn keys(value: Option<&Value>) -> String {
    match value.and_then(Value::as_object) {
        Some(map) => map.keys().cloned().collect::<Vec<_>>().join(", "),
        None => "no keys".into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_is_read_when_it_is_asked_for() {
        let mut objects = objects("\n{\"a\":1}\n[]\n", "x");
        assert_eq!(objects.next().unwrap().unwrap().0, 2);
        assert!(objects.next().unwrap().unwrap_err().to_string().ends_with("x, line 3: not a JSON object"));
        assert!(objects.next().is_none());
    }
}
