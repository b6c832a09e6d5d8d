//! Whole numbers with a unit, as vLLM reads sizes: `32768`, `32k`, `32K`, `1.5m`.
//!
//! Lower case counts in thousands, upper case in powers of 1,024. A fraction of a power of two is refused, because it is
//! rarely a whole number.

/// A fraction of a power of two.
pub(super) struct BinaryFraction {
    /// The number before the unit.
    pub(super) number: String,
    /// The unit.
    pub(super) unit: char,
}

/// The number that `text` says; nothing if it is no number.
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
