//! Parses a body as a JSON object, and reports errors as CPython's `json` does.
//!
//! `serde_json` parses valid bodies. Otherwise a small scanner finds the reason and the position in
//! characters that CPython reports, because vLLM's error includes both.

use serde_json::{Map, Value};

use super::pydantic::{ValidationErrors, repr, shown};
use crate::http::error_body::ErrorBody;

pub(crate) fn object(bytes: &[u8]) -> Result<Map<String, Value>, ErrorBody> {
    let text = std::str::from_utf8(bytes).map_err(|_| ErrorBody::detail(400, "There was an error parsing the body"))?;
    let mut problems = ValidationErrors::default();
    if bytes.is_empty() {
        problems.add("missing", "body", "Field required", "None", "");
        return Err(problems.refusal());
    }
    match serde_json::from_str::<Value>(text) {
        Ok(Value::Object(fields)) => return Ok(fields),
        Ok(Value::Null) => problems.add("missing", "body", "Field required", "None", ""),
        Ok(other) => {
            let text = "Input should be a valid dictionary or object to extract fields from";
            problems.add("model_attributes_type", "body", text, &shown(&other), "");
        }
        Err(_) => match python_error(text) {
            Some((at, reason)) => {
                let context = format!("'error': {}", repr(reason));
                problems.add("json_invalid", &format!("body.{at}"), "JSON decode error", "<dict of 0 items>", &context);
            }
            // Python accepts NaN and infinities, which JSON does not have. vLLM then refuses the
            // field.
            None => return Err(not_finite(text)),
        },
    }
    Err(problems.refusal())
}

fn not_finite(text: &str) -> ErrorBody {
    let word = ["-Infinity", "Infinity", "NaN"].into_iter().find(|word| text.contains(word)).unwrap_or("NaN");
    let value = match word {
        "NaN" => "nan",
        "Infinity" => "inf",
        _ => "-inf",
    };
    let before = text.split(word).next().unwrap_or_default();
    let field = before.rsplit('"').nth(1).unwrap_or("temperature");
    let message = format!("{field} must be a finite number, got {value}. (parameter={field}, value={value})");
    ErrorBody::bad_request(Some(field), message)
}

/// The position and reason at which Python's decoder fails; `None` if it accepts the text.
fn python_error(text: &str) -> Option<(usize, &'static str)> {
    let chars: Vec<char> = text.chars().collect();
    let mut scan = Scan { chars: &chars, depth: 0 };
    let at = scan.blanks(0);
    match scan.value(at) {
        Err(error) => Some(error),
        Ok(end) => {
            let end = scan.blanks(end);
            (end < chars.len()).then_some((end, "Extra data"))
        }
    }
}

type ScanResult = Result<usize, (usize, &'static str)>;

struct Scan<'a> {
    chars: &'a [char],
    depth: usize,
}

impl Scan<'_> {
    fn at(&self, at: usize) -> Option<char> {
        self.chars.get(at).copied()
    }

    fn blanks(&self, mut at: usize) -> usize {
        while matches!(self.at(at), Some(' ' | '\t' | '\n' | '\r')) {
            at += 1;
        }
        at
    }

    fn value(&mut self, at: usize) -> ScanResult {
        // The bound prevents a stack overflow. Deeper bodies get a plain error here, where CPython
        // raises a RecursionError.
        const DEEPEST: usize = 900;
        self.depth += 1;
        if self.depth > DEEPEST {
            return Err((at, "Expecting value"));
        }
        let end = match self.at(at) {
            Some('"') => self.string(at),
            Some('{') => self.object(at + 1),
            Some('[') => self.array(at + 1),
            Some(c) if c == '-' || c.is_ascii_digit() => self.number(at),
            _ => self.word(at, at),
        };
        self.depth -= 1;
        end
    }

    fn word(&self, at: usize, start: usize) -> ScanResult {
        let words = ["null", "true", "false", "NaN", "Infinity"];
        let fits = |word: &&str| word.chars().enumerate().all(|(i, c)| self.at(at + i) == Some(c));
        words.iter().find(|word| fits(word)).map(|word| at + word.len()).ok_or((start, "Expecting value"))
    }

    fn number(&self, start: usize) -> ScanResult {
        let mut at = start + usize::from(self.at(start) == Some('-'));
        if !self.at(at).is_some_and(|c| c.is_ascii_digit()) {
            return self.word(at, start);
        }
        let digits = |mut at: usize| {
            while self.at(at).is_some_and(|c| c.is_ascii_digit()) {
                at += 1;
            }
            at
        };
        at = if self.at(at) == Some('0') { at + 1 } else { digits(at) };
        if self.at(at) == Some('.') && self.at(at + 1).is_some_and(|c| c.is_ascii_digit()) {
            at = digits(at + 1);
        }
        if matches!(self.at(at), Some('e' | 'E')) {
            let sign = usize::from(matches!(self.at(at + 1), Some('+' | '-')));
            if self.at(at + 1 + sign).is_some_and(|c| c.is_ascii_digit()) {
                at = digits(at + 1 + sign);
            }
        }
        Ok(at)
    }

    fn string(&self, start: usize) -> ScanResult {
        let mut at = start + 1;
        loop {
            match self.at(at) {
                None => return Err((start, "Unterminated string starting at")),
                Some('"') => return Ok(at + 1),
                Some('\\') => match self.at(at + 1) {
                    None => return Err((start, "Unterminated string starting at")),
                    Some('"' | '\\' | '/' | 'b' | 'f' | 'n' | 'r' | 't') => at += 2,
                    Some('u') if (2..6).all(|i| self.at(at + i).is_some_and(|c| c.is_ascii_hexdigit())) => at += 6,
                    Some('u') => return Err((at + 1, "Invalid \\\\uXXXX escape")),
                    Some(_) => return Err((at, "Invalid \\\\escape")),
                },
                Some(c) if (c as u32) < 0x20 => return Err((at, "Invalid control character at")),
                Some(_) => at += 1,
            }
        }
    }

    fn object(&mut self, start: usize) -> ScanResult {
        const NAME: &str = "Expecting property name enclosed in double quotes";
        let mut at = self.blanks(start);
        if self.at(at) == Some('}') {
            return Ok(at + 1);
        }
        loop {
            if self.at(at) != Some('"') {
                return Err((at, NAME));
            }
            at = self.blanks(self.string(at)?);
            if self.at(at) != Some(':') {
                return Err((at, "Expecting ':' delimiter"));
            }
            at = self.blanks(at + 1);
            at = self.value(at)?;
            at = self.blanks(at);
            match self.at(at) {
                Some('}') => return Ok(at + 1),
                Some(',') => at = self.blanks(at + 1),
                _ => return Err((at, "Expecting ',' delimiter")),
            }
        }
    }

    fn array(&mut self, start: usize) -> ScanResult {
        let mut at = self.blanks(start);
        if self.at(at) == Some(']') {
            return Ok(at + 1);
        }
        loop {
            at = self.value(at)?;
            at = self.blanks(at);
            match self.at(at) {
                Some(']') => return Ok(at + 1),
                Some(',') => at = self.blanks(at + 1),
                _ => return Err((at, "Expecting ',' delimiter")),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_have_the_position_and_reason_of_pythons_decoder() {
        let name = "Expecting property name enclosed in double quotes";
        for (text, wanted) in [
            (r#"{"model": "tiny", "#, Some((18, name))),
            (r#"{"model": tiny}"#, Some((10, "Expecting value"))),
            (r#"{"a":1}}"#, Some((7, "Extra data"))),
            (r#"{"a":1,}"#, Some((7, name))),
            ("xxx", Some((0, "Expecting value"))),
            (r#"{"a": "unterminated"#, Some((6, "Unterminated string starting at"))),
            ("{'a': 1}", Some((1, name))),
            (r#"{"a" 1}"#, Some((5, "Expecting ':' delimiter"))),
            (r#"{"a": [1 2]}"#, Some((9, "Expecting ',' delimiter"))),
            (r#"{"a": NaN}"#, None),
        ] {
            assert_eq!(python_error(text), wanted, "{text}");
        }
    }

    #[test]
    fn a_body_that_is_not_an_object_is_refused() {
        let message = |bytes: &[u8]| object(bytes).unwrap_err().message;
        assert!(message(b"[]").contains("'input': '<list of 0 items>'"));
        assert!(message(b"null").contains("'missing'"));
        assert!(message(b"\xff").contains("error parsing the body"));
        assert!(message(br#"{"temperature": NaN}"#).starts_with("temperature must be a finite number, got nan."));
    }

    #[test]
    fn nesting_is_bounded() {
        let deep = "[".repeat(100_000);
        assert!(object(deep.as_bytes()).is_err());
    }
}
