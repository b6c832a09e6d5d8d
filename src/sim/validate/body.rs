//! The body of a generating request, read once: its fields, with a long list of token ids kept apart.
//!
//! Ids are read straight from the text, because a prompt of a hundred thousand is common; everything else becomes JSON
//! values. Bound: the body itself, which the server limits.

use std::borrow::Cow;
use std::collections::BTreeMap;

use serde_json::value::RawValue;
use serde_json::{Map, Value};

use super::pydantic::{self, ValidationErrors};
use super::request_kind::RequestKind;
use super::{json, messages, rules, schema};
use crate::http::error_body::ErrorBody;

/// A body that passed the checks of its fields.
#[derive(Clone, Debug)]
pub(crate) struct RequestBody {
    /// Its fields. `prompt` is an empty list where `ids` are given.
    pub(super) fields: Map<String, Value>,
    /// The prompt, when it is one list of token ids: a hundred thousand of them are common, and slow as JSON values.
    pub(super) ids: Option<Vec<u32>>,
}

impl RequestBody {
    /// Reads and checks a body.
    ///
    /// # Errors
    /// What vLLM answers before it looks for the model.
    pub(crate) fn read(kind: RequestKind, bytes: &[u8]) -> Result<Self, ErrorBody> {
        let body = match Self::with_ids(kind, bytes) {
            Some(body) => body,
            None => Self { fields: json::object(bytes)?, ids: None },
        };
        rules::check(kind, &body.fields, body.ids.as_deref())?;
        let mut problems = ValidationErrors::default();
        match kind {
            RequestKind::Chat => {
                messages::check(body.fields.get("messages"), "body.messages", &mut problems);
                pydantic::check(schema::CHAT, &body.fields, &mut problems);
            }
            RequestKind::Completion => {
                if body.ids.is_none() {
                    messages::check_prompt(body.fields.get("prompt"), &mut problems);
                }
                pydantic::check(schema::COMPLETION, &body.fields, &mut problems);
            }
        }
        if problems.is_empty() { Ok(body) } else { Err(problems.refusal()) }
    }

    /// The fast way, for a completion whose prompt is a list of ids.
    fn with_ids(kind: RequestKind, bytes: &[u8]) -> Option<Self> {
        if kind != RequestKind::Completion {
            return None;
        }
        let raw: BTreeMap<Cow<'_, str>, &RawValue> = serde_json::from_slice(bytes).ok()?;
        let ids: Vec<u32> = serde_json::from_str(raw.get("prompt")?.get()).ok()?;
        if ids.is_empty() {
            return None;
        }
        let mut fields = Map::new();
        for (name, value) in raw {
            let value =
                if name == "prompt" { Value::Array(Vec::new()) } else { serde_json::from_str(value.get()).ok()? };
            fields.insert(name.into_owned(), value);
        }
        Some(Self { fields, ids: Some(ids) })
    }

    /// A chat made of another API's request; its fields were checked there.
    pub(crate) fn of_chat(fields: Map<String, Value>) -> Self {
        Self { fields, ids: None }
    }

    /// Its fields.
    pub(crate) fn fields(&self) -> &Map<String, Value> {
        &self.fields
    }

    /// The model asked for; none when the name is empty.
    pub(crate) fn model(&self) -> Option<&str> {
        self.fields.get("model").and_then(Value::as_str).filter(|name| !name.is_empty())
    }
}
