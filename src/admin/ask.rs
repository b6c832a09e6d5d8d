//! The wishes of a restart, as they stand in the query of its address: written by the CLI, read by the admin port.
//!
//! A query and not a body, because nothing on the admin port reads bodies. `set=FLAG=VALUE` changes one flag; `true`,
//! `false`, whole numbers and numbers are taken as such, everything else is text. Keys that nobody knows are errors: a
//! misspelt `hold` must not become a restart without it.

use std::fmt::Write as _;

use crate::config::ArgValue;
use crate::fleet::RestartRequest;
use crate::fleet::driver::dashed;

/// What is wrong with a query.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum AskError {
    /// A key that nobody knows.
    #[error("'{0}' is no wish for a restart; there are set=FLAG=VALUE, reset, hold and cut")]
    Unknown(String),
    /// Not `FLAG=VALUE`.
    #[error("'{0}' is not FLAG=VALUE, such as max-num-seqs=32")]
    NotAFlag(String),
    /// Percent signs that mean nothing.
    #[error("'{0}' is not encoded as a query should be")]
    Encoding(String),
}

/// Reads `FLAG=VALUE`, dashes before the flag or not.
///
/// # Errors
/// There is no `=`, or no flag.
pub fn flag(text: &str) -> Result<(String, ArgValue), AskError> {
    let wrong = || AskError::NotAFlag(text.to_owned());
    let (name, value) = text.split_once('=').ok_or_else(wrong)?;
    let name = dashed(name.trim().trim_start_matches("--"));
    if name.is_empty() || !name.chars().all(|letter| letter.is_ascii_alphanumeric() || "-._".contains(letter)) {
        return Err(wrong());
    }
    let value = value.trim();
    let value = match value {
        "true" => ArgValue::Flag(true),
        "false" => ArgValue::Flag(false),
        _ => match (value.parse::<i64>(), value.parse::<f64>()) {
            (Ok(whole), _) => ArgValue::Int(whole),
            (_, Ok(number)) if number.is_finite() => ArgValue::Float(number),
            _ => ArgValue::Text(value.to_owned()),
        },
    };
    Ok((name, value))
}

/// Reads a query.
pub(super) fn read(query: &str) -> Result<RestartRequest, AskError> {
    let mut ask = RestartRequest::default();
    for part in query.split('&').filter(|part| !part.is_empty()) {
        let (key, value) = part.split_once('=').unwrap_or((part, ""));
        let switch = match (key, value) {
            ("set", _) => {
                let text = decode(value).ok_or_else(|| AskError::Encoding(part.to_owned()))?;
                let (name, value) = flag(&text)?;
                ask.set.insert(name, value);
                continue;
            }
            ("reset", "" | "1" | "true") => &mut ask.reset,
            ("hold", "" | "1" | "true") => &mut ask.hold,
            ("cut", "" | "1" | "true") => &mut ask.cut,
            _ => return Err(AskError::Unknown(part.to_owned())),
        };
        *switch = true;
    }
    Ok(ask)
}

/// Writes a query of `FLAG=VALUE` texts and switches; empty, or with its question mark.
pub fn query(sets: &[String], switches: &[&str]) -> String {
    let sets = sets.iter().map(|set| format!("set={}", encode(set)));
    let parts: Vec<String> = sets.chain(switches.iter().map(|&switch| switch.to_owned())).collect();
    if parts.is_empty() { String::new() } else { format!("?{}", parts.join("&")) }
}

/// Percent encoding of everything that is not plain in a path or a query.
pub(crate) fn encode(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for byte in text.bytes() {
        match byte {
            b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'-' | b'_' | b'.' | b'~' => out.push(char::from(byte)),
            // Writing to a String cannot fail.
            _ => drop(write!(out, "%{byte:02X}")),
        }
    }
    out
}

/// Percent decoding; `None` when it is broken, empty or not UTF-8.
pub(super) fn decode(part: &str) -> Option<String> {
    let mut bytes = part.bytes();
    let mut decoded = Vec::with_capacity(part.len());
    while let Some(byte) = bytes.next() {
        decoded.push(if byte == b'%' {
            let mut digit = || char::from(bytes.next()?).to_digit(16);
            u8::try_from(digit()? * 16 + digit()?).ok()?
        } else {
            byte
        });
    }
    String::from_utf8(decoded).ok().filter(|text| !text.is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_the_client_writes_the_port_reads() {
        let sets =
            ["--max_num_seqs=32", "speculative-config={\"a\": \"b&c=d%\"}", "enforce-eager=true", "watermark=0.5"];
        let query = query(&sets.map(str::to_owned), &["hold"]);
        let ask = read(query.strip_prefix('?').unwrap()).unwrap();
        let value = |name: &str| ask.set[name].clone();
        assert_eq!(value("max-num-seqs"), ArgValue::Int(32));
        assert_eq!(value("speculative-config"), ArgValue::Text("{\"a\": \"b&c=d%\"}".to_owned()));
        assert_eq!((value("enforce-eager"), value("watermark")), (ArgValue::Flag(true), ArgValue::Float(0.5)));
        let (name, _) = flag("compilation_config.cudagraph_mode=FULL").unwrap();
        assert_eq!(name, "compilation-config.cudagraph_mode", "behind the dot stand keys of JSON");
        assert!(ask.hold && !ask.cut && !ask.reset && ask.set.len() == 4);
        assert_eq!(read("").unwrap(), RestartRequest::default());
    }

    #[test]
    fn what_nobody_knows_is_an_error_and_not_a_restart() {
        assert_eq!(read("hodl"), Err(AskError::Unknown("hodl".to_owned())));
        assert_eq!(read("hold=0"), Err(AskError::Unknown("hold=0".to_owned())));
        assert!(matches!(read("set=max-num-seqs"), Err(AskError::NotAFlag(_))));
        assert!(matches!(read("set=a%3"), Err(AskError::Encoding(_))));
        assert!(matches!(flag("=3"), Err(AskError::NotAFlag(_))));
        assert!(matches!(flag("max num=3"), Err(AskError::NotAFlag(_))));
    }
}
