//! The cost of a job, in the unit that the pool configures: characters of a text, pixels times
//! steps, seconds of a recording, or 1 for each job.
//!
//! A rule names fields of the JSON body whose values are multiplied. A number counts as its value,
//! a text such as `1024x768` as the product of its numbers, any other text as its number of
//! characters, and a list as its number of entries. Without fields, the bytes of the body count,
//! because the size of an upload grows with the length of the recording. The amount is divided by
//! `per`. The body is read in one pass, and only the named fields are parsed into values. Bound:
//! [`MAX_COST`].

use super::request_error::RequestError;
use super::scan::Scanner;

/// The highest cost.
pub const MAX_COST: u64 = 1_000_000_000;

/// How the cost of a job is computed.
#[derive(Clone, Debug, PartialEq)]
pub struct CostRule {
    /// Fields of the JSON body whose values are multiplied. If there are none, the bytes of the
    /// body count.
    pub fields: Vec<String>,
    /// The amount that makes one unit.
    pub per: f64,
    /// The cost of a job that lacks a field.
    pub otherwise: u64,
}

impl CostRule {
    /// The cost of the job with this body, at least 1. An error is the first field that is missing
    /// or has no amount.
    pub fn of(&self, body: &[u8]) -> Result<u64, &str> {
        if self.fields.is_empty() {
            return Ok(self.units(body.len() as f64));
        }
        let mut amounts: Vec<Option<f64>> = vec![None; self.fields.len()];
        // A body that is not JSON lacks the fields.
        let _ = Scanner::new(body).object(|scanner, key| {
            let key = key.bytes();
            let raw = scanner.skip_raw()?;
            for (field, found) in self.fields.iter().zip(&mut amounts) {
                if field.as_bytes() == &*key {
                    *found = amount(raw);
                }
            }
            Ok::<_, RequestError>(())
        });
        match amounts.iter().position(Option::is_none) {
            Some(missing) => Err(&self.fields[missing]),
            None => Ok(self.units(amounts.into_iter().flatten().product())),
        }
    }

    fn units(&self, amount: f64) -> u64 {
        ((amount / self.per).ceil() as u64).clamp(1, MAX_COST)
    }
}

/// The amount of a value; `None` if it has none.
fn amount(raw: &[u8]) -> Option<f64> {
    let amount = match serde_json::from_slice(raw).ok()? {
        serde_json::Value::Number(number) => number.as_f64()?,
        serde_json::Value::String(text) => numbers(&text).unwrap_or(text.chars().count() as f64),
        serde_json::Value::Array(entries) => entries.len() as f64,
        _ => return None,
    };
    (amount.is_finite() && amount > 0.0).then_some(amount)
}

/// The product of the numbers in a text such as `1024x768` or `12`.
fn numbers(text: &str) -> Option<f64> {
    text.split('x').map(|part| part.parse::<u32>().ok().map(f64::from)).product()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rule(fields: &[&str], per: f64) -> CostRule {
        CostRule { fields: fields.iter().map(|field| (*field).to_owned()).collect(), per, otherwise: 7 }
    }

    #[test]
    fn characters_products_and_bytes_are_costs() {
        let speech = rule(&["input"], 1.0);
        assert_eq!(speech.of(r#"{"model":"m","input":"h\u00e9llo"}"#.as_bytes()), Ok(5));
        let image = rule(&["size", "steps", "n"], 1e6);
        assert_eq!(image.of(br#"{"size":"1024x1024","steps":20,"n":2}"#), Ok(42));
        assert_eq!(image.of(br#"{"n":"1","steps":1,"size":"8x8"}"#), Ok(1), "at least 1");
        assert_eq!(rule(&[], 32_000.0).of(&[0; 64_001]), Ok(3));
        assert_eq!(rule(&["list"], 1.0).of(br#"{"list":[1,"b",{}]}"#), Ok(3));
        assert_eq!(rule(&["n"], 1.0).of(br#"{"n":1e300}"#), Ok(MAX_COST));
    }

    #[test]
    fn a_job_without_an_amount_names_the_field() {
        let image = rule(&["size", "steps"], 1.0);
        for body in
            [&b"{\"size\":\"8x8\"}"[..], b"{\"size\":\"8x8\",\"steps\":null}", b"{\"size\":\"8x8\",\"steps\":-3}"]
        {
            assert_eq!(image.of(body), Err("steps"));
        }
        for body in [&b""[..], b"RIFF\xff", b"[1]", b"{\"size\":", b"{\"size\":0,\"steps\":1}"] {
            assert_eq!(image.of(body), Err("size"));
        }
    }
}
