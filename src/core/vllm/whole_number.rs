//! Whole numbers with a unit, as vLLM reads sizes: `32768`, `32k`, `32K`, `1.5m`.
//!
//! Units in lower case are powers of 1,000, in upper case of 1,024. A fraction of a power of 1,024
//! is refused, as in vLLM. [`expand`] writes out such numbers inside JSON, as vLLM does before it
//! reads the object.

/// A number with a fraction before an upper-case unit.
pub(super) struct BinaryFraction {
    /// The number before the unit.
    pub(super) number: String,
    /// The unit.
    pub(super) unit: char,
}

/// The number in `text`; `None` if it is no number.
pub(super) fn parse(text: &str) -> Result<Option<i64>, BinaryFraction> {
    if let Ok(number) = text.parse() {
        return Ok(Some(number));
    }
    let Some((at, unit)) = text.char_indices().next_back() else { return Ok(None) };
    let power = match unit.to_ascii_lowercase() {
        'k' => 1,
        'm' => 2,
        'g' => 3,
        't' => 4,
        _ => return Ok(None),
    };
    let number = &text[..at];
    if !number.starts_with(|c: char| c.is_ascii_digit()) || !number.ends_with(|c: char| c.is_ascii_digit()) {
        return Ok(None);
    }
    let base: f64 = if unit.is_ascii_lowercase() { 1000.0 } else { 1024.0 };
    if base > 1000.0 && number.contains('.') {
        return Err(BinaryFraction { number: number.to_owned(), unit });
    }
    let value = number.parse::<f64>().ok().map(|number| (number * base.powi(power)).trunc());
    Ok(value.filter(|value| value.abs() < 9e15).map(|value| value as i64))
}

/// The JSON, with all numbers outside strings written without units. A number that is too large
/// becomes the largest `i64`.
pub(super) fn expand(json: &str) -> Result<String, BinaryFraction> {
    let (mut out, mut rest) = (String::new(), json);
    while let Some(first) = rest.chars().next() {
        let word = |c: char| c.is_alphanumeric() || c == '_';
        let length = match first {
            '"' => string_length(rest),
            _ if word(first) => rest.find(|c| !word(c) && c != '.').unwrap_or(rest.len()),
            _ => first.len_utf8(),
        };
        let (token, after) = rest.split_at(length);
        let unit = token.ends_with(|c: char| c.is_ascii_alphabetic());
        match parse(token)? {
            Some(number) if unit => out.push_str(&number.to_string()),
            None if has_unit(token) => out.push_str(&i64::MAX.to_string()),
            _ => out.push_str(token),
        }
        rest = after;
    }
    Ok(out)
}

/// Whether the token consists of digits, an optional fraction, and a unit.
fn has_unit(token: &str) -> bool {
    let Some(number) = token.strip_suffix(|c: char| "kmgt".contains(c.to_ascii_lowercase())) else { return false };
    let digits = |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    number.split_once('.').map_or(digits(number), |(whole, fraction)| digits(whole) && digits(fraction))
}

/// The length of the string at the start of `json`, with quotes; the length of all of `json` if no
/// quote closes the string.
fn string_length(json: &str) -> usize {
    let mut escaped = false;
    for (at, c) in json.char_indices().skip(1) {
        match c {
            '"' if !escaped => return at + 1,
            _ => escaped = c == '\\' && !escaped,
        }
    }
    json.len()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn units_are_expanded_outside_of_strings() {
        let expanded = |json| expand(json).ok();
        let json = r#"{"a": 1k, "2k": [1.5m,2K], "b\"3k": "4k", "c": 1e3, "d": 7, "e": -1k, "f": 99999999t}"#;
        let plain = r#"{"a": 1000, "2k": [1500000,2048], "b\"3k": "4k", "c": 1e3, "d": 7, "e": -1000, "f": 9223372036854775807}"#;
        assert_eq!(expanded(json).as_deref(), Some(plain));
        assert_eq!(expanded("\"1k").as_deref(), Some("\"1k"));
        assert_eq!(expanded("{\"a\": 1.5K}"), None);
    }
}
