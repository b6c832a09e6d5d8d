//! Texts with rules: names, paths, secrets, URLs of backends.
//!
//! Each function says what is wrong as a `Situation`; the caller knows the key. A URL may have a path,
//! which is put before every request's own (an engine behind a prefix of another proxy); since clients'
//! paths already start with `/v1`, one that ends in it is refused as the usual mistake it is.

use std::io::Read as _;
use std::path::{Path, PathBuf};

use super::super::problem::Situation;
use super::super::secret::{KeyDigest, Secret};
use super::super::{Endpoint, defaults};
use super::Surroundings;

/// Whether a name can be a label and a header value.
pub(super) fn check_name(name: &str) -> Result<(), Situation> {
    check_length(name, defaults::MAX_NAME_BYTES)?;
    let fine = |letter: char| letter.is_ascii_alphanumeric() || "._:/-".contains(letter);
    if name.chars().all(fine) { Ok(()) } else { Err(Situation::NameLetters { name: name.to_owned() }) }
}

/// Whether a text can be the name of a model; they are freer, since others choose them.
pub(super) fn check_model_name(name: &str) -> Result<(), Situation> {
    check_length(name, defaults::MAX_MODEL_NAME_BYTES)?;
    if name == "*" || name.trim() != name || name.chars().any(char::is_control) {
        return Err(Situation::ModelNameLetters { name: name.to_owned() });
    }
    Ok(())
}

fn check_length(name: &str, max: usize) -> Result<(), Situation> {
    match name.len() {
        0 => Err(Situation::NameEmpty),
        bytes if bytes > max => Err(Situation::NameTooLong { bytes, max }),
        _ => Ok(()),
    }
}

/// A path as written, made relative to the configuration file's folder.
pub(super) fn path_in(folder: &Path, written: &str) -> PathBuf {
    folder.join(written)
}

/// The value behind a text that may be a reference, and the reference if it is one.
fn resolve(text: &str, around: &Surroundings<'_>) -> Result<(String, Option<String>), Situation> {
    if let Some(name) = text.strip_prefix("env:") {
        let value = (around.env)(name).ok_or_else(|| Situation::SecretEnvMissing { name: name.to_owned() })?;
        return Ok((value.trim_end_matches(['\r', '\n']).to_owned(), Some(text.to_owned())));
    }
    let Some(path) = text.strip_prefix("file:") else { return Ok((text.to_owned(), None)) };
    let path = path_in(&around.folder, path);
    let failed = |reason: String| Situation::SecretFile { path: path.display().to_string(), reason };
    let mut value = String::new();
    let file = std::fs::File::open(&path).map_err(|error| failed(error.to_string()))?;
    file.take(defaults::MAX_FILE_BYTES).read_to_string(&mut value).map_err(|error| failed(error.to_string()))?;
    Ok((value.trim_end_matches(['\r', '\n']).to_owned(), Some(format!("file:{}", path.display()))))
}

/// A secret that can stand in an `Authorization` header.
pub(super) fn secret(text: &str, around: &Surroundings<'_>) -> Result<Secret, Situation> {
    let (value, reference) = resolve(text, around)?;
    if value.is_empty() {
        return Err(Situation::SecretEmpty);
    }
    if !value.bytes().all(|byte| byte.is_ascii_graphic()) {
        return Err(Situation::SecretLetters);
    }
    Ok(Secret::new(value, reference))
}

/// The digest of a key.
pub(super) fn digest(text: &str, around: &Surroundings<'_>) -> Result<KeyDigest, Situation> {
    let (value, reference) = resolve(text, around)?;
    KeyDigest::from_hex(value.trim(), reference).ok_or(Situation::Digest)
}

/// The place that a URL names.
pub(super) fn endpoint(text: &str) -> Result<Endpoint, Situation> {
    let wrong = |reason| Situation::Url { found: text.to_owned(), reason };
    let lower = text.to_ascii_lowercase();
    if lower.starts_with("https://") {
        return Err(Situation::Https);
    }
    if !lower.starts_with("http://") {
        return Err(wrong("it must begin with http://"));
    }
    let rest = &text["http://".len()..];
    if rest.contains(['?', '#', '@', '\\']) || rest.chars().any(|letter| !letter.is_ascii_graphic()) {
        return Err(wrong("only host, port and path are supported, in plain ASCII"));
    }
    let (authority, path) = rest.find('/').map_or((rest, ""), |at| rest.split_at(at));
    let prefix = path.trim_end_matches('/').to_owned();
    if prefix.ends_with("/v1") {
        return Err(wrong("clients' paths already begin with /v1; leave it out"));
    }
    let (host, port) = host_and_port(authority).ok_or_else(|| wrong("host or port is missing or malformed"))?;
    Ok(Endpoint { host, port, prefix })
}

fn host_and_port(authority: &str) -> Option<(String, u16)> {
    let (host, port) = match authority.strip_prefix('[') {
        Some(rest) => {
            let (host, port) = rest.split_once(']')?;
            host.parse::<std::net::Ipv6Addr>().ok()?;
            (host, if port.is_empty() { None } else { Some(port.strip_prefix(':')?) })
        }
        None => match authority.split_once(':') {
            Some((host, port)) => (host, Some(port)),
            None => (authority, None),
        },
    };
    let port = match port {
        Some(digits) if digits.bytes().all(|byte| byte.is_ascii_digit()) => digits.parse().ok()?,
        Some(_) => return None,
        None => 80,
    };
    let plain = |letter: char| letter.is_ascii_alphanumeric() || "._-:".contains(letter);
    let fine = port != 0 && !host.is_empty() && host.len() <= 255 && host.chars().all(plain);
    fine.then(|| (host.to_ascii_lowercase(), port))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn urls_that_name_a_place_are_taken_apart() {
        for (text, shown) in [
            ("http://127.0.0.1:8000", "http://127.0.0.1:8000"),
            ("HTTP://Gpu0", "http://gpu0:80"),
            ("http://[::1]:8000/", "http://[::1]:8000"),
            ("http://edge:80/engine-a/", "http://edge:80/engine-a"),
        ] {
            assert_eq!(endpoint(text).unwrap().to_string(), shown);
        }
    }

    #[test]
    fn urls_that_cannot_be_backends_are_refused_with_a_reason() {
        assert_eq!(endpoint("https://gpu0"), Err(Situation::Https));
        for text in [
            "gpu0:8000",
            "http://",
            "http://:80",
            "http://a:0",
            "http://a:99999",
            "http://a:+80",
            "http://a b",
            "http://u@h",
            "http://h?x=1",
            "http://h:8000/v1",
            "http://h/v1/",
            "http://[::1",
            "http://[x]:1",
            "http://ä",
        ] {
            assert!(matches!(endpoint(text), Err(Situation::Url { .. })), "{text}");
        }
    }
}
