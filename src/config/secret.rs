//! Secrets: reading them, and never showing them.
//!
//! A secret is written as a reference, `env:NAME` or `file:PATH`. Line ends after the value are cut
//! off, because editors and `echo` add them. Plain text is accepted too, with a warning. Debug and
//! Display print the reference, or a mask for plain text, never the value.
//!
//! The command, environment and flags of an engine may hold secrets too ([`Words`], `launch.env`,
//! `args`): every variable, the flags that `vllm::secrets` names, and every flag whose value is a
//! reference.
//!
//! Key digests (`sha256 = ...`) are the SHA-256 of a client's key as 64 hex digits, in place or by
//! reference. They are masked too, because a weak key can be found from the digest by trying keys.

use std::fmt;
use std::io::Read as _;

use super::file::Entry;
use super::file::Value;
use super::key::KeySpec;
use super::limits;
use super::problem::Situation;
use super::report::{Names, Place, Report, Surroundings};
use super::setting::{FreeValue, Scalar, Setting, Shown, list, quote};
use sluice_core::vllm::flags::value::SecretText;
use sluice_core::vllm::secrets::{is_secret_variable, mask_command};

/// Replaces a value that is not shown.
pub const MASK: &str = "********";

/// A text that is never printed.
#[derive(Clone, PartialEq, Eq)]
pub struct Secret {
    value: String,
    reference: Option<String>,
}

impl Secret {
    /// A secret with the reference through which it was read, if any.
    pub fn new(value: String, reference: Option<String>) -> Self {
        Self { value, reference }
    }

    /// Whether the secret was written as `env:NAME` or `file:PATH`.
    pub fn is_reference(&self) -> bool {
        self.reference.is_some()
    }

    /// The value itself, for the code that compares or sends it.
    pub fn expose(&self) -> &str {
        &self.value
    }

    /// The secret behind a text: the text itself, or the value to which a reference in it leads.
    pub(super) fn resolve(text: &str, surroundings: &Surroundings<'_>) -> Result<Self, Situation> {
        resolve(text, surroundings).map(|(value, reference)| Self { value, reference })
    }
}

impl SecretText for Secret {
    fn expose(&self) -> &str {
        &self.value
    }
}

impl From<String> for Secret {
    fn from(value: String) -> Self {
        Self::new(value, None)
    }
}

/// Whether a text is read as a reference to a secret. A URL of a file is an ordinary value.
pub(super) fn is_reference(text: &str) -> bool {
    text.starts_with("env:") || (text.starts_with("file:") && !text.starts_with("file://"))
}

/// A secret as a variable of an environment or as a header. A whole number is read as text. The
/// value is never shown.
impl FreeValue for Secret {
    fn read_free(name: &str, written: &Entry, place: &Place, report: &mut Report<'_>) -> Result<Self, Situation> {
        let text = match &written.value {
            Value::Text(text) => text.clone(),
            Value::Int(number) => number.to_string(),
            other => return Err(Situation::WrongType { wanted: "a text".to_owned(), found: other.kind() }),
        };
        if is_reference(&text) {
            return Self::resolve(&text, report.surroundings);
        }
        if is_secret_variable(name) {
            report.add(place, Situation::PlainSecret);
        }
        Ok(Self::new(text, None))
    }

    fn show_free(&self) -> Shown {
        Shown::Secret { shown: quote(&self.to_string()), compared: self.value.clone().into_bytes() }
    }
}

/// The words of a command: a program and its arguments. Secrets among them are not shown.
#[derive(Clone, Default, PartialEq, Eq)]
pub struct Words(Vec<String>);

impl Words {
    /// The secrets among the words.
    pub fn secrets(&self) -> Vec<String> {
        mask_command(&self.0, MASK).1
    }
}

impl std::ops::Deref for Words {
    type Target = [String];

    fn deref(&self) -> &[String] {
        &self.0
    }
}

impl From<Vec<String>> for Words {
    fn from(words: Vec<String>) -> Self {
        Self(words)
    }
}

impl FromIterator<String> for Words {
    fn from_iter<I: IntoIterator<Item = String>>(words: I) -> Self {
        Self(words.into_iter().collect())
    }
}

impl fmt::Debug for Words {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        mask_command(&self.0, MASK).0.fmt(f)
    }
}

impl Setting for Words {
    fn read(written: &Entry, place: &Place, key: &KeySpec, report: &mut Report<'_>) -> Option<Self> {
        let words = Self(<Vec<String> as Setting>::read(written, place, key, report)?);
        if !words.secrets().is_empty() {
            report.add(place, Situation::PlainSecretInCommand);
        }
        Some(words)
    }

    fn placeholder() -> Option<Self> {
        Some(Self::default())
    }

    fn show(&self, _: &Names) -> Shown {
        let quoted = |words: &[String]| list(&words.iter().map(|word| quote(word)).collect::<Vec<_>>());
        let (masked, secrets) = mask_command(&self.0, MASK);
        match secrets.is_empty() {
            true => Shown::Value(quoted(&self.0)),
            false => Shown::Secret { shown: quoted(&masked), compared: quoted(&self.0).into_bytes() },
        }
    }
}

/// SHA-256 of a client's key.
#[derive(Clone, PartialEq, Eq)]
pub struct KeyDigest {
    bytes: [u8; 32],
    reference: Option<String>,
}

impl KeyDigest {
    /// A digest with the reference through which it was read, if any.
    pub fn new(bytes: [u8; 32], reference: Option<String>) -> Self {
        Self { bytes, reference }
    }

    /// The digest itself. Compare in constant time.
    pub fn bytes(&self) -> &[u8; 32] {
        &self.bytes
    }

    /// Reads 64 hex digits; `None` if `text` is anything else.
    pub fn from_hex(text: &str, reference: Option<String>) -> Option<Self> {
        let digits = text.as_bytes();
        if digits.len() != 64 {
            return None;
        }
        let digit = |byte: u8| char::from(byte).to_digit(16).and_then(|value| u8::try_from(value).ok());
        let mut bytes = [0; 32];
        for (byte, pair) in bytes.iter_mut().zip(digits.chunks_exact(2)) {
            *byte = digit(pair[0])? << 4 | digit(pair[1])?;
        }
        Some(Self { bytes, reference })
    }
}

/// Reads the value behind a text: the text itself, or the value to which a reference leads, with
/// the reference.
fn resolve(text: &str, surroundings: &Surroundings<'_>) -> Result<(String, Option<String>), Situation> {
    let without_line_end = |value: &str| value.trim_end_matches(['\r', '\n']).to_owned();
    if let Some(name) = text.strip_prefix("env:") {
        let value = (surroundings.env)(name).ok_or_else(|| Situation::SecretEnvMissing { name: name.to_owned() })?;
        return Ok((without_line_end(&value), Some(text.to_owned())));
    }
    let Some(path) = text.strip_prefix("file:") else { return Ok((text.to_owned(), None)) };
    let path = surroundings.folder.join(path);
    let failed =
        |error: std::io::Error| Situation::SecretFile { path: path.display().to_string(), reason: error.to_string() };
    let mut value = String::new();
    let file = std::fs::File::open(&path).map_err(failed)?;
    file.take(limits::MAX_FILE_BYTES).read_to_string(&mut value).map_err(failed)?;
    Ok((without_line_end(&value), Some(format!("file:{}", path.display()))))
}

/// A secret as a token, which must be valid in an `Authorization` header.
impl Setting for Secret {
    fn read(written: &Entry, place: &Place, _: &KeySpec, report: &mut Report<'_>) -> Option<Self> {
        let resolved = String::parse(written, report).and_then(|text| resolve(&text, report.surroundings));
        let checked = resolved.and_then(|(value, reference)| match value.as_str() {
            "" => Err(Situation::SecretEmpty),
            text if !text.bytes().all(|byte| byte.is_ascii_graphic()) => Err(Situation::SecretLetters),
            _ => Ok(Self::new(value, reference)),
        });
        let secret = checked.map_err(|situation| report.add(place, situation)).ok()?;
        if !secret.is_reference() {
            report.add(place, Situation::PlainSecret);
        }
        Some(secret)
    }

    fn show(&self, _: &Names) -> Shown {
        Shown::Secret { shown: quote(&self.to_string()), compared: self.value.clone().into_bytes() }
    }
}

impl Setting for KeyDigest {
    fn read(written: &Entry, place: &Place, _: &KeySpec, report: &mut Report<'_>) -> Option<Self> {
        let resolved = String::parse(written, report).and_then(|text| resolve(&text, report.surroundings));
        let digest =
            resolved.and_then(|(value, reference)| Self::from_hex(value.trim(), reference).ok_or(Situation::Digest));
        digest.map_err(|situation| report.add(place, situation)).ok()
    }

    fn placeholder() -> Option<Self> {
        Some(Self::new([0; 32], None))
    }

    fn show(&self, _: &Names) -> Shown {
        Shown::Secret { shown: quote(&self.to_string()), compared: self.bytes.to_vec() }
    }
}

macro_rules! never_shown {
    ($name:ident) => {
        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(self.reference.as_deref().unwrap_or(MASK))
            }
        }

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, concat!(stringify!($name), "({})"), self)
            }
        }
    };
}

never_shown!(Secret);
never_shown!(KeyDigest);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_secret_is_never_shown() {
        let plain = Secret::new("hunter2".to_owned(), None);
        let referred = Secret::new("hunter2".to_owned(), Some("env:TOKEN".to_owned()));
        assert_eq!(
            format!("{plain} {plain:?} {referred} {referred:?}"),
            "******** Secret(********) env:TOKEN Secret(env:TOKEN)"
        );
        assert_eq!(referred.expose(), "hunter2");
    }

    #[test]
    fn a_digest_is_64_hex_digits_of_either_case() {
        let digest = KeyDigest::from_hex(&"aB".repeat(32), None).unwrap();
        assert_eq!(digest.bytes(), &[0xAB; 32]);
        assert_eq!(KeyDigest::from_hex(&"ab".repeat(31), None), None);
        assert_eq!(KeyDigest::from_hex(&"zz".repeat(32), None), None);
    }
}
