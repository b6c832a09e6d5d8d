//! TOML files of GPUs, models and constants: built in, or at a path that the user gives.
//!
//! A name with `/` or ending in `.toml` is a path. Any other name is a built-in preset. All missing
//! keys are reported at once. An invalid value is reported with its key. Each call reads at most
//! one file.

use serde::de::DeserializeOwned;

/// Why a profile cannot be used. Each message says how to mend it.
#[expect(missing_docs, reason = "the messages say it")]
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ProfileError {
    #[error("unknown {what} '{name}'; built in: {known}; or give the path of a TOML file")]
    Unknown { what: &'static str, name: String, known: String },
    #[error("cannot read the {what} profile {path}: {error}")]
    Unreadable { what: &'static str, path: String, error: String },
    #[error("the {what} profile {name} lacks {keys}; give each as a number")]
    Missing { what: &'static str, name: String, keys: String },
    #[error("the {what} profile {name}: {error}")]
    Wrong { what: &'static str, name: String, error: String },
}

pub(super) fn find(what: &'static str, name: &str, built_in: &[(&str, &'static str)]) -> Result<String, ProfileError> {
    if let Some((_, text)) = built_in.iter().find(|(known, _)| *known == name) {
        return Ok((*text).to_owned());
    }
    if name.contains('/') || name.ends_with(".toml") {
        return std::fs::read_to_string(name).map_err(|error| ProfileError::Unreadable {
            what,
            path: name.to_owned(),
            error: error.to_string(),
        });
    }
    // "RTX-3080" and "H100" match too, because only letters and digits are compared, and an
    // unambiguous prefix is enough.
    let plain = |name: &str| name.to_lowercase().replace(|c: char| !c.is_ascii_alphanumeric(), "");
    let matches = |known: &str| plain(known).starts_with(&plain(name)) && !plain(name).is_empty();
    let mut matching = built_in.iter().filter(|(known, _)| matches(known));
    if let (Some((_, text)), None) = (matching.next(), matching.next()) {
        return Ok((*text).to_owned());
    }
    let known = built_in.iter().map(|(known, _)| *known).collect::<Vec<_>>().join(", ");
    Err(ProfileError::Unknown { what, name: name.to_owned(), known })
}

/// Parses the text of a preset. `needed`: the keys without a default.
pub(super) fn parse<T: DeserializeOwned>(
    what: &'static str,
    name: &str,
    text: &str,
    needed: &[&str],
) -> Result<T, ProfileError> {
    let wrong = |error: String| ProfileError::Wrong { what, name: name.to_owned(), error };
    let table: toml::Table = toml::from_str(text).map_err(|error| wrong(error.to_string()))?;
    let missing: Vec<&str> = needed.iter().copied().filter(|key| !table.contains_key(*key)).collect();
    if !missing.is_empty() {
        return Err(ProfileError::Missing { what, name: name.to_owned(), keys: missing.join(", ") });
    }
    serde_path_to_error::deserialize(table).map_err(|error| wrong(error.to_string().trim_end().to_owned()))
}
