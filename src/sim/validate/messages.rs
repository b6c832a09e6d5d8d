//! Checks the types of `messages` and `prompt`, which are unions in vLLM's schema.
//!
//! pydantic reports the errors of every branch, in order and under the branch's name. A value that
//! fits one branch is accepted.

use serde_json::Value;

use super::pydantic::{ValidationErrors, shown};

/// The branches of a message, with the role and the fields that each requires.
const MESSAGES: &[(&str, &str, &[&str])] = &[
    ("ChatCompletionDeveloperMessageParam", "developer", &["content", "role"]),
    ("ChatCompletionSystemMessageParam", "system", &["content", "role"]),
    ("ChatCompletionUserMessageParam", "user", &["content", "role"]),
    ("ChatCompletionAssistantMessageParam", "assistant", &["content", "role"]),
    ("ChatCompletionToolMessageParam", "tool", &["content", "role", "tool_call_id"]),
    ("ChatCompletionFunctionMessageParam", "function", &["content", "name", "role"]),
    ("CustomChatCompletionMessageParam", "", &["content", "role"]),
    ("Message", "", &["author", "content"]),
];

/// Checks a list of messages. Any role is accepted, because vLLM has a branch for custom roles.
pub(super) fn check(messages: Option<&Value>, at: &str, problems: &mut ValidationErrors) {
    // If the field is missing, the schema reports it.
    let Some(messages) = messages else { return };
    let Some(items) = messages.as_array() else {
        return problems.add("list_type", at, "Input should be a valid list", &shown(messages), "");
    };
    for (index, item) in items.iter().enumerate() {
        check_message(item, &format!("{at}.{index}"), problems);
    }
}

fn check_message(item: &Value, at: &str, problems: &mut ValidationErrors) {
    let Some(fields) = item.as_object() else {
        for (branch, ..) in MESSAGES {
            let (kind, text) = match *branch {
                "Message" => {
                    ("model_attributes_type", "Input should be a valid dictionary or object to extract fields from")
                }
                _ => ("dict_type", "Input should be a valid dictionary"),
            };
            problems.add(kind, &format!("{at}.{branch}"), text, &shown(item), "");
        }
        return;
    };
    let role = fields.get("role").and_then(Value::as_str);
    let content_fits = match fields.get("content") {
        None | Some(Value::String(_) | Value::Array(_)) => true,
        Some(Value::Null) => matches!(role, Some("assistant" | "function")),
        Some(_) => false,
    };
    if role.is_some() && content_fits {
        return;
    }
    for (branch, wanted, required) in MESSAGES {
        let at = |field: &str| format!("{at}.{branch}.{field}");
        for field in *required {
            match fields.get(*field) {
                // Content is optional in these branches.
                None if *field == "content"
                    && ["CustomChatCompletionMessageParam", "ChatCompletionAssistantMessageParam"].contains(branch) => {
                }
                None => {
                    problems.missing(&at(field), fields.len());
                }
                Some(value) if *field == "content" => check_content(branch, value, &at(field), problems),
                Some(value) if *field == "role" && !wanted.is_empty() && role != Some(wanted) => {
                    let text = format!("Input should be '{wanted}'");
                    let context = format!("'expected': \"'{wanted}'\"");
                    problems.add("literal_error", &at(field), &text, &shown(value), &context);
                }
                _ => {}
            }
        }
    }
}

fn check_content(branch: &str, value: &Value, at: &str, problems: &mut ValidationErrors) {
    let mut add = |kind: &str, text: &str| problems.add(kind, at, text, &shown(value), "");
    match (branch, value) {
        ("Message", value) if !value.is_array() => add("list_type", "Input should be a valid list"),
        ("Message", _) | (_, Value::String(_) | Value::Array(_)) => {}
        ("ChatCompletionAssistantMessageParam" | "ChatCompletionFunctionMessageParam", Value::Null) => {}
        ("ChatCompletionFunctionMessageParam", _) => add("string_type", "Input should be a valid string"),
        _ => {
            add("string_type", "Input should be a valid string");
            add("iterable_type", "Input should be iterable");
        }
    }
}

pub(super) fn check_prompt(prompt: Option<&Value>, problems: &mut ValidationErrors) {
    let at = "body.prompt";
    let items = match prompt {
        None | Some(Value::Null | Value::String(_)) => return,
        Some(Value::Array(items)) => items,
        Some(other) => {
            let mut add = |kind: &str, text: &str| problems.add(kind, at, text, &shown(other), "");
            add("list_type", "Input should be a valid list");
            add("list_type", "Input should be a valid list");
            add("string_type", "Input should be a valid string");
            add("list_type", "Input should be a valid list");
            return;
        }
    };
    let lists = |item: &Value| item.as_array().is_some_and(|ids| ids.iter().all(is_id));
    if items.iter().all(is_id) || items.iter().all(Value::is_string) || items.iter().all(lists) {
        return;
    }
    for (index, item) in items.iter().enumerate() {
        check_id(item, &format!("{at}.{index}"), problems);
    }
    for (index, item) in items.iter().enumerate().filter(|(_, item)| !item.is_array()) {
        problems.add("list_type", &format!("{at}.{index}"), "Input should be a valid list", &shown(item), "");
    }
    let whole = format!("<list of {} items>", items.len());
    problems.add("string_type", at, "Input should be a valid string", &whole, "");
    for (index, item) in items.iter().enumerate().filter(|(_, item)| !item.is_string()) {
        problems.add("string_type", &format!("{at}.{index}"), "Input should be a valid string", &shown(item), "");
    }
}

fn is_id(item: &Value) -> bool {
    item.as_u64().is_some() || item.as_f64().is_some_and(|float| float >= 0.0 && float.fract() == 0.0)
}

fn check_id(item: &Value, at: &str, problems: &mut ValidationErrors) {
    let (kind, text, context) = match item {
        _ if is_id(item) => return,
        Value::String(text) if text.trim().parse::<u64>().is_ok() => return,
        Value::String(_) => {
            ("int_parsing", "Input should be a valid integer, unable to parse string as an integer", "")
        }
        Value::Number(number) if number.as_f64().is_some_and(|float| float.fract() != 0.0) => {
            ("int_from_float", "Input should be a valid integer, got a number with a fractional part", "")
        }
        Value::Number(_) => ("greater_than_equal", "Input should be greater than or equal to 0", "'ge': 0"),
        _ => ("int_type", "Input should be a valid integer", ""),
    };
    problems.add(kind, at, text, &shown(item), context);
}
