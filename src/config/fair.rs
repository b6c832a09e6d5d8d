//! `queue.fair`: who the owner of a request is, in a pool whose owners take turns.
//!
//! The value is a word, or a table with the name of a header. If it is absent, API keys are the
//! owners, or without API keys, all requests have one owner.

use super::file::{Entry, Value};
use super::key::KeySpec;
use super::problem::{Situation, Suggestion};
use super::report::{Names, Place, Report};
use super::setting::{Setting, Shown, quote, wrong_type};

/// The kind of owner that takes turns.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Fair {
    /// All requests have one owner.
    Off,
    /// The API key.
    Key,
    /// The end user, within the key.
    User,
    /// The value of this header, within the key. The name is in lower case.
    Header(String),
}

const WORDS: [&str; 3] = ["off", "key", "user"];
const FORMS: &str = "\"key\", \"user\", { header = \"x-tenant\" } or \"off\"";

impl Setting for Fair {
    fn read(written: &Entry, place: &Place, _: &KeySpec, report: &mut Report<'_>) -> Option<Self> {
        read(written).map_err(|situation| report.add(place, situation)).ok()
    }

    fn show(&self, _: &Names) -> Shown {
        Shown::Value(match self {
            Self::Off => quote("off"),
            Self::Key => quote("key"),
            Self::User => quote("user"),
            Self::Header(name) => format!("{{ header = {} }}", quote(name)),
        })
    }
}

fn read(written: &Entry) -> Result<Fair, Situation> {
    match &written.value {
        Value::Text(text) => match text.as_str() {
            "off" => Ok(Fair::Off),
            "key" => Ok(Fair::Key),
            "user" => Ok(Fair::User),
            _ => Err(Situation::UnknownChoice { found: text.clone(), suggestion: Suggestion::for_name(text, WORDS) }),
        },
        Value::Table(table) => match (table.get("header").map(|entry| &entry.value), table.len()) {
            (Some(Value::Text(name)), 1) => match http::HeaderName::try_from(name) {
                Ok(name) => Ok(Fair::Header(name.as_str().to_owned())),
                Err(_) => Err(Situation::Header { found: name.clone() }),
            },
            _ => Err(wrong_type(FORMS, written)),
        },
        _ => Err(wrong_type(FORMS, written)),
    }
}
