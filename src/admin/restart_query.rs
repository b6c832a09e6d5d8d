//! The options of a restart as a URL query: written by the CLI, read by the admin port.
//!
//! `set=FLAG=VALUE` changes one flag; [`flags::value`](crate::vllm::flags::value) reads the value.
//! An unknown key is an error, because a misspelt `hold` must not be ignored.

use std::fmt::Write as _;

use crate::fleet::RestartRequest;
use crate::vllm::flags::table::dashed;
use sluice_config::ArgValue;

/// Why a query is refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RestartQueryError {
    /// The key is unknown.
    #[error("'{0}' is not an option of a restart; use set=FLAG=VALUE, reset, hold or cut")]
    Unknown(String),
    /// The text is not `FLAG=VALUE`.
    #[error("'{0}' is not FLAG=VALUE, such as max-num-seqs=32")]
    NotAFlag(String),
    /// The percent encoding is broken.
    #[error("'{0}' is not valid in a query; percent-encode it")]
    Encoding(String),
}

/// Reads `FLAG=VALUE`, with or without dashes before the flag.
///
/// # Errors
/// There is no `=`, or the flag is not a name.
pub fn flag(text: &str) -> Result<(String, ArgValue), RestartQueryError> {
    let wrong = || RestartQueryError::NotAFlag(text.to_owned());
    let (name, value) = text.split_once('=').ok_or_else(wrong)?;
    let name = dashed(name.trim().trim_start_matches("--"));
    if name.is_empty() || !name.chars().all(|letter| letter.is_ascii_alphanumeric() || "-._".contains(letter)) {
        return Err(wrong());
    }
    let value = ArgValue::read(&name, value.trim());
    Ok((name, value))
}

/// Parses a query.
pub(super) fn parse(query: &str) -> Result<RestartRequest, RestartQueryError> {
    let mut request = RestartRequest::default();
    for part in query.split('&').filter(|part| !part.is_empty()) {
        let (key, value) = part.split_once('=').unwrap_or((part, ""));
        let switch = match (key, value) {
            ("set", _) => {
                let text = decode(value).ok_or_else(|| RestartQueryError::Encoding(part.to_owned()))?;
                let (name, value) = flag(&text)?;
                request.set.insert(name, value);
                continue;
            }
            ("reset", "" | "1" | "true") => &mut request.reset,
            ("hold", "" | "1" | "true") => &mut request.hold,
            ("cut", "" | "1" | "true") => &mut request.cut,
            _ => return Err(RestartQueryError::Unknown(part.to_owned())),
        };
        *switch = true;
    }
    Ok(request)
}

/// Writes a query with the question mark, from `FLAG=VALUE` texts and switches such as `hold`;
/// empty if there are none.
pub fn query(sets: &[String], switches: &[&str]) -> String {
    let sets = sets.iter().map(|set| format!("set={}", encode(set)));
    let parts: Vec<String> = sets.chain(switches.iter().map(|&switch| switch.to_owned())).collect();
    if parts.is_empty() { String::new() } else { format!("?{}", parts.join("&")) }
}

/// Percent-encodes all but the unreserved characters.
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

/// Decodes percent encoding; `None` if it is broken, empty or not UTF-8.
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
    fn a_query_survives_writing_and_parsing() {
        let sets =
            ["--max_num_seqs=32", "speculative-config={\"a\": \"b&c=d%\"}", "enforce-eager=true", "watermark=0.5"];
        let query = query(&sets.map(str::to_owned), &["hold"]);
        let request = parse(query.strip_prefix('?').unwrap()).unwrap();
        let value = |name: &str| request.set[name].clone();
        assert_eq!(value("max-num-seqs"), ArgValue::Int(32));
        assert_eq!(value("speculative-config"), ArgValue::Text("{\"a\": \"b&c=d%\"}".to_owned()));
        assert_eq!((value("enforce-eager"), value("watermark")), (ArgValue::Flag(true), ArgValue::Float(0.5)));
        let (name, _) = flag("compilation_config.cudagraph_mode=FULL").unwrap();
        assert_eq!(name, "compilation-config.cudagraph_mode", "JSON keys after the dot keep their underscores");
        assert!(request.hold && !request.cut && !request.reset && request.set.len() == 4);
        assert_eq!(parse("").unwrap(), RestartRequest::default());
    }

    #[test]
    fn an_unknown_key_is_an_error() {
        assert_eq!(parse("hodl"), Err(RestartQueryError::Unknown("hodl".to_owned())));
        assert_eq!(parse("hold=0"), Err(RestartQueryError::Unknown("hold=0".to_owned())));
        assert!(matches!(parse("set=max-num-seqs"), Err(RestartQueryError::NotAFlag(_))));
        assert!(matches!(parse("set=a%3"), Err(RestartQueryError::Encoding(_))));
        assert!(matches!(flag("=3"), Err(RestartQueryError::NotAFlag(_))));
        assert!(matches!(flag("max num=3"), Err(RestartQueryError::NotAFlag(_))));
    }
}
