//! Lines of JSON with their numbers, for error messages.
//!
//! Blank lines are skipped. Every other line must hold a JSON object. The caller limits the size of
//! the file.

use serde_json::Value;

use super::error::{DatasetError, bad_row};

fn lines(text: &str) -> impl Iterator<Item = (usize, &str)> {
    (1..).zip(text.lines()).map(|(number, line)| (number, line.trim())).filter(|(_, line)| !line.is_empty())
}

pub(super) fn objects(text: &str, file: &str) -> Result<Vec<(usize, Value)>, DatasetError> {
    let mut objects = Vec::new();
    for (line, text) in lines(text) {
        let value: Value =
            serde_json::from_str(text).map_err(|error| bad_row(file, line, format!("not JSON: {error}")))?;
        if !value.is_object() {
            return Err(bad_row(file, line, "not a JSON object"));
        }
        objects.push((line, value));
    }
    Ok(objects)
}

pub(super) fn keys(value: Option<&Value>) -> String {
    match value.and_then(Value::as_object) {
        Some(map) => map.keys().cloned().collect::<Vec<_>>().join(", "),
        None => "no keys".into(),
    }
}
