//! The shape that a request demands of its output: JSON of a schema, one of several texts, or a
//! tool call.
//!
//! vLLM lets the model write only text that fits. Here the output is made from the schema. A tool
//! is called if `tool_choice` is `required` or names a tool. With `auto` the simulated model
//! answers in words. It also answers in words if no value is found for a schema, and for `regex`
//! and grammars. Bounds: see [`instance`](crate::text::instance).

use std::sync::Arc;

use serde_json::{Map, Value, json};

use super::pydantic::FieldReader;
use crate::text::instance;
use sluice_core::base::Rng;

/// The shape of an output.
#[derive(Clone, Debug, PartialEq)]
pub enum Shape {
    /// JSON that fits a schema.
    Json(Value),
    /// One of these texts.
    OneOf(Vec<String>),
    /// A call of one of these tools.
    Call {
        /// Name and schema of the arguments of each tool.
        tools: Vec<(Arc<str>, Value)>,
        /// Whether the request named the tool.
        named: bool,
    },
}

/// An output that has the demanded shape.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ShapedText {
    /// The text that the model writes; for a call, the arguments.
    pub(crate) text: String,
    /// The tool that is called, if any.
    pub(crate) call: Option<CalledTool>,
}

/// A tool that is called.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CalledTool {
    /// Name of the tool.
    pub name: Arc<str>,
    /// Whether the request named the tool. If so, the finish reason is `stop`, as in OpenAI's API;
    /// otherwise it is `tool_calls`.
    pub named: bool,
}

impl Shape {
    /// The shape that a valid request demands, if any.
    pub(super) fn of(fields: &Map<String, Value>) -> Option<Self> {
        Self::call(fields).or_else(|| Self::structured(fields)).or_else(|| Self::format(fields.get("response_format")?))
    }

    fn call(fields: &Map<String, Value>) -> Option<Self> {
        let choice = fields.get("tool_choice").filter(|choice| *choice == "required" || choice.is_object())?;
        let named = choice.is_object().then(|| choice["function"]["name"].as_str().unwrap_or_default());
        let tools = fields.get("tools")?.as_array()?.iter().filter_map(|tool| {
            let function = &tool["function"];
            let name = function["name"].as_str().filter(|name| named.is_none_or(|named| named == *name))?;
            // A tool without parameters takes no arguments.
            let parameters = function.get("parameters").filter(|parameters| parameters.is_object());
            Some((Arc::from(name), parameters.cloned().unwrap_or_else(|| json!({"type": "object"}))))
        });
        let tools: Vec<_> = tools.collect();
        (!tools.is_empty()).then_some(Self::Call { tools, named: named.is_some() })
    }

    fn structured(fields: &Map<String, Value>) -> Option<Self> {
        let wanted = fields.get("structured_outputs")?;
        if let Some(texts) = wanted["choice"].as_array() {
            return Some(Self::OneOf(texts.iter().filter_map(Value::as_str).map(str::to_owned).collect()));
        }
        match &wanted["json"] {
            Value::Null if wanted.as_object()?.truth("json_object") => Some(Self::any_object()),
            Value::Null => None,
            Value::String(text) => serde_json::from_str(text).ok().map(Self::Json),
            schema => Some(Self::Json(schema.clone())),
        }
    }

    fn format(format: &Value) -> Option<Self> {
        match format["type"].as_str()? {
            "json_object" => Some(Self::any_object()),
            // Without a schema, any object is allowed.
            "json_schema" => Some(match &format["json_schema"]["schema"] {
                Value::Null => Self::any_object(),
                schema => Self::Json(schema.clone()),
            }),
            _ => None,
        }
    }

    fn any_object() -> Self {
        Self::Json(json!({"type": "object", "required": ["answer"], "properties": {"answer": {"type": "string"}}}))
    }

    /// The output of a choice; `None` if no text was found that fits.
    pub(crate) fn text(&self, seed: u64) -> Option<ShapedText> {
        match self {
            Self::Json(schema) => Some(ShapedText { text: instance::of_schema(schema, seed)?.to_string(), call: None }),
            Self::OneOf(texts) => {
                let text = texts.get(Rng::new(seed).below(texts.len().max(1)))?.clone();
                Some(ShapedText { text, call: None })
            }
            Self::Call { tools, named } => {
                let (name, parameters) = tools.get(Rng::new(seed).below(tools.len()))?;
                let text = instance::of_schema(parameters, seed)?.to_string();
                Some(ShapedText { text, call: Some(CalledTool { name: Arc::clone(name), named: *named }) })
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shape(body: Value) -> Option<Shape> {
        Shape::of(body.as_object().unwrap())
    }

    fn tools() -> Value {
        let tool = |name: &str, field: &str| {
            json!({"type": "function", "function": {"name": name, "parameters": {
                "type": "object", "properties": {field: {"type": "integer"}}, "required": [field]}}})
        };
        json!([tool("one", "a"), tool("two", "b"), {"type": "function", "function": {"name": "none"}}])
    }

    #[test]
    fn a_required_call_is_of_any_tool_and_a_named_one_of_its_own() {
        let required = shape(json!({"tools": tools(), "tool_choice": "required"})).unwrap();
        let mut called = std::collections::BTreeSet::new();
        for seed in 0..40 {
            let ShapedText { text, call } = required.text(seed).unwrap();
            let (arguments, call): (Value, _) = (serde_json::from_str(&text).unwrap(), call.unwrap());
            let field = match &*call.name {
                "one" => Some("a"),
                "two" => Some("b"),
                _ => None,
            };
            assert!(field.map_or(arguments == json!({}), |field| arguments[field].is_i64()), "{} {text}", call.name);
            assert!(!call.named);
            called.insert(call.name);
        }
        assert_eq!(called.len(), 3);
        let choice = json!({"type": "function", "function": {"name": "two"}});
        let named = shape(json!({"tools": tools(), "tool_choice": choice})).unwrap();
        let call = named.text(1).unwrap().call.unwrap();
        assert_eq!((&*call.name, call.named), ("two", true));
        assert_eq!(shape(json!({"tools": tools(), "tool_choice": "auto"})), None);
    }

    #[test]
    fn formats_and_structured_outputs_are_json_or_a_choice() {
        let schema = json!({"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]});
        for body in [
            json!({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}}),
            json!({"structured_outputs": {"json": schema}}),
            json!({"structured_outputs": {"json": schema.to_string()}}),
        ] {
            let text = shape(body).unwrap().text(3).unwrap().text;
            assert!(serde_json::from_str::<Value>(&text).unwrap()["n"].is_i64(), "{text}");
        }
        let any = shape(json!({"response_format": {"type": "json_object"}})).unwrap().text(3).unwrap().text;
        assert!(serde_json::from_str::<Value>(&any).unwrap().is_object(), "{any}");
        let chosen = shape(json!({"structured_outputs": {"choice": ["yes", "no"]}})).unwrap().text(3).unwrap().text;
        assert!(["yes", "no"].contains(&chosen.as_str()));
        assert_eq!(shape(json!({"response_format": {"type": "text"}})), None);
    }
}
