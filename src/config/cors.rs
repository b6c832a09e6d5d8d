//! `server.cors`: the web pages that may use the gateway from a browser.
//!
//! An origin is written exactly as browsers send it in `Origin`: scheme, host and port, in lower
//! case, without the default port and without a path (RFC 6454, 6.2). Any other spelling would
//! match no page, so the spelling is refused, and the message shows the right one.
//!
//! There is no setting for credentials. Keys travel in headers that a page sets itself, never in
//! cookies, so the gateway never sends `Access-Control-Allow-Credentials`, which browsers refuse
//! together with `"*"`.

use std::collections::BTreeMap;

use super::file::{Entry, Value};
use super::key::KeySpec;
use super::problem::Situation;
use super::report::{Names, Place, Report};
use super::setting::{Setting, Shown, elements, list, quote, wrong_type};

/// The pages that may use the gateway from a browser.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Cors {
    /// `"*"`: pages of every origin.
    Any,
    /// Pages of these origins, sorted; of no origin if the list is empty.
    Only(Vec<String>),
}

impl Setting for Cors {
    fn read(written: &Entry, place: &Place, key: &KeySpec, report: &mut Report<'_>) -> Option<Self> {
        let origins = match &written.value {
            Value::Text(_) => vec![(place.clone(), written)],
            Value::List(_) => elements(written, place, key, report)?,
            _ => {
                report.add(place, wrong_type("\"*\" or a list of origins", written));
                return None;
            }
        };
        let mut found = BTreeMap::new();
        for (place, element) in origins {
            match origin(element).map(|origin| (found.insert(origin.clone(), place.path.clone()), origin)) {
                Ok((Some(first), name)) => report.add(&place, Situation::Duplicate { name, first }),
                Ok((None, _)) => {}
                Err(situation) => report.add(&place, situation),
            }
        }
        if found.remove("*").is_none() {
            return Some(Self::Only(found.into_keys().collect()));
        }
        if !found.is_empty() {
            report.add(place, Situation::StarAndOrigins);
        }
        Some(Self::Any)
    }

    fn show(&self, _: &Names) -> Shown {
        Shown::Value(match self {
            Self::Any => quote("*"),
            Self::Only(origins) => list(&origins.iter().map(|origin| quote(origin)).collect::<Vec<_>>()),
        })
    }
}

fn origin(written: &Entry) -> Result<String, Situation> {
    let Value::Text(text) = &written.value else { return Err(wrong_type("a text", written)) };
    if text == "*" {
        return Ok(text.clone());
    }
    let advice = match as_browsers_send(text) {
        Some(origin) if origin == *text => return Ok(origin),
        Some(origin) => format!("write \"{origin}\""),
        None if text == "null" => "pages of any site can send it; write \"*\" if every page may use the gateway".into(),
        None if text.contains('*') => "list each origin, or write \"*\" for all".into(),
        None if !text.is_ascii() => "write its host in punycode (xn--...), as browsers do".into(),
        None => "write one such as \"https://chat.example.com\"".into(),
    };
    Err(Situation::CorsOrigin { found: text.clone(), advice })
}

/// The origin of a page at this address, as browsers send it.
fn as_browsers_send(text: &str) -> Option<String> {
    let text = text.trim().to_ascii_lowercase();
    let (scheme, rest) = match text.split_once("://") {
        Some(parts) => parts,
        None if text == "null" => return None,
        None if text.starts_with("localhost") || text.starts_with("127.") => ("http", &*text),
        None => ("https", &*text),
    };
    let authority = rest.split(['/', '?', '#']).next()?;
    let standard = match scheme {
        "http" => ":80",
        "https" => ":443",
        _ => "",
    };
    let authority = authority.strip_suffix(standard).unwrap_or(authority);
    let (host, port) = match authority.rsplit_once(':') {
        Some((host, port)) if !port.ends_with(']') => (host, Some(port)),
        _ => (authority, None),
    };
    let is_scheme = scheme.starts_with(|letter: char| letter.is_ascii_alphabetic())
        && scheme.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"+-.".contains(&byte));
    let is_name = |host: &str| host.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"-._".contains(&byte));
    let is_host = match host.strip_prefix('[').and_then(|host| host.strip_suffix(']')) {
        Some(address) => address.parse::<std::net::Ipv6Addr>().is_ok(),
        None => !host.is_empty() && is_name(host),
    };
    let is_port = port.is_none_or(|port| port.parse::<u16>().is_ok_and(|number| number.to_string() == port));
    (is_scheme && is_host && is_port).then(|| format!("{scheme}://{authority}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_origin_is_what_a_browser_sends() {
        for origin in [
            "https://chat.example.com",
            "http://localhost:3000",
            "http://127.0.0.1:8000",
            "https://[2001:db8::1]:8443",
            "chrome-extension://abcdefghijklmnop",
            "tauri://localhost",
            "app://.",
        ] {
            assert_eq!(as_browsers_send(origin).as_deref(), Some(origin));
        }
    }

    #[test]
    fn other_spellings_are_understood_for_the_advice() {
        for (written, origin) in [
            ("https://chat.example.com/", "https://chat.example.com"),
            ("https://chat.example.com/app?x#y", "https://chat.example.com"),
            ("chat.example.com", "https://chat.example.com"),
            ("localhost:3000", "http://localhost:3000"),
            ("HTTPS://Chat.Example.com", "https://chat.example.com"),
            ("https://chat.example.com:443", "https://chat.example.com"),
            ("http://chat.example.com:80/", "http://chat.example.com"),
            (" https://chat.example.com ", "https://chat.example.com"),
        ] {
            assert_eq!(as_browsers_send(written).as_deref(), Some(origin), "{written}");
        }
    }

    #[test]
    fn what_no_browser_sends_is_no_origin() {
        for text in [
            "",
            "null",
            "https://",
            "https://*.example.com",
            "https://a:b@c",
            "https://a:99999",
            "https://bücher.de",
            "/",
        ] {
            assert_eq!(as_browsers_send(text), None, "{text}");
        }
    }
}
