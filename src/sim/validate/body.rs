//! The body of a generating request, parsed once: the fields, and separately a prompt that is a
//! list of token ids.
//!
//! A prompt of a hundred thousand ids is slow to parse as JSON values, so ids are parsed from the
//! bytes. The server limits the size of the body.

use std::borrow::Cow;
use std::collections::BTreeMap;

use serde_json::value::RawValue;
use serde_json::{Map, Value};

use super::pydantic::{self, ValidationErrors};
use super::request_kind::RequestKind;
use super::{json, messages, rules, schema};
use crate::http::error_body::ErrorBody;

#[derive(Clone, Debug)]
pub(crate) struct RequestBody {
    pub(super) fields: Map<String, Value>,
    /// The prompt of a completion, if it is one list of token ids.
    pub(super) ids: Option<Vec<u32>>,
}

impl RequestBody {
    /// # Errors
    /// The errors that vLLM finds before it looks for the model.
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

    /// The fast path, for a completion with a list of ids as prompt.
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

    /// A chat converted from another API's request. The conversion has already checked the fields.
    pub(crate) fn of_chat(fields: Map<String, Value>) -> Self {
        Self { fields, ids: None }
    }

    pub(crate) fn fields(&self) -> &Map<String, Value> {
        &self.fields
    }

    /// The requested model; `None` if the name is missing or empty.
    pub(crate) fn model(&self) -> Option<&str> {
        self.fields.get("model").and_then(Value::as_str).filter(|name| !name.is_empty())
    }
}
