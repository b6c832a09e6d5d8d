//! Rules on whole bodies that vLLM checks before the types of the fields, in vLLM's order (the rule
//! declared last goes first).
//!
//! The rules see raw JSON, in which a number may still be a string. Python's rules decide which
//! values are true. Only the first broken rule is reported, as an error of the request.

use serde_json::{Map, Value};

use super::pydantic::{FieldReader, repr, shown};
use super::request_kind::RequestKind;
use crate::http::error_body::ErrorBody;

/// vLLM's `VLLM_MAX_COMPLETION_PROMPTS`.
const MAX_PROMPTS: usize = 1024;
const MAX_SALT: usize = 128;

fn refuse(param: &str, text: &str) -> Result<(), ErrorBody> {
    let message = if param.is_empty() { text.to_owned() } else { format!("{text} (parameter={param})") };
    Err(ErrorBody::bad_request(Some(param).filter(|param| !param.is_empty()), message))
}

fn refuse_value(param: &str, text: &str, value: impl std::fmt::Display) -> Result<(), ErrorBody> {
    Err(ErrorBody::bad_request(Some(param), format!("{text} (parameter={param}, value={value})")))
}

/// Whether Python treats the value as true.
fn truthy(value: Option<&Value>) -> bool {
    match value {
        None | Some(Value::Null | Value::Bool(false)) => false,
        Some(Value::Bool(true)) => true,
        Some(Value::Number(number)) => number.as_f64() != Some(0.0),
        Some(Value::String(text)) => !text.is_empty(),
        Some(Value::Array(items)) => !items.is_empty(),
        Some(Value::Object(fields)) => !fields.is_empty(),
    }
}

/// Checks all rules of a route. `ids`: the prompt of a completion, if it is one list of token ids.
pub(super) fn check(kind: RequestKind, fields: &Map<String, Value>, ids: Option<&[u32]>) -> Result<(), ErrorBody> {
    match kind {
        RequestKind::Chat => {
            messages_iterate(fields)?;
            if truthy(fields.get("continue_final_message")) && truthy(fields.get("add_generation_prompt")) {
                refuse("", "Cannot set both `continue_final_message` and `add_generation_prompt` to True.")?;
            }
            tools(fields)?;
            one_constraint(fields, "")?;
            logprobs(fields, "top_logprobs")?;
            stream_options(fields)?;
        }
        RequestKind::Completion => {
            if ids.is_none() {
                prompts(fields)?;
            }
            stream_options(fields)?;
            logprobs(fields, "logprobs")?;
            one_constraint(fields, "structured_outputs")?;
        }
    }
    let format = fields.get("response_format").filter(|format| format.is_object());
    if format.is_some_and(|format| format["type"] == "json_schema" && format["json_schema"].is_null()) {
        let text = "When response_format type is 'json_schema', the 'json_schema' field must be provided.";
        refuse("response_format", text)?;
    }
    cache_salt(fields)
}

/// vLLM iterates over `messages` before it checks the type.
fn messages_iterate(fields: &Map<String, Value>) -> Result<(), ErrorBody> {
    let kind = match fields.get("messages") {
        Some(Value::Null) => "NoneType",
        Some(Value::Bool(_)) => "bool",
        Some(Value::Number(number)) if number.is_f64() => "float",
        Some(Value::Number(_)) => "int",
        _ => return Ok(()),
    };
    refuse("", &format!("'{kind}' object is not iterable"))
}

fn tools(fields: &Map<String, Value>) -> Result<(), ErrorBody> {
    let tools = fields.get("tools");
    if tools.is_some_and(|tools| tools.as_array().is_some_and(Vec::is_empty)) {
        let text = "`tools` must not be an empty array. Either provide at least one tool or omit the field entirely.";
        return refuse("tools", text);
    }
    let choice = match fields.get("tool_choice") {
        None | Some(Value::Null) => return Ok(()),
        Some(choice) if choice == "none" => return Ok(()),
        Some(choice) => choice,
    };
    let Some(tools) = tools.filter(|tools| !tools.is_null()) else {
        return refuse("tool_choice", "When using `tool_choice`, `tools` must be set.");
    };
    if choice == "auto" || choice == "required" {
        return Ok(());
    }
    if !choice.is_object() {
        let text = format!(
            "Invalid value for `tool_choice`: {}! Only named tools, \"none\", \"auto\" or \"required\" are supported.",
            shown(choice)
        );
        return refuse("tool_choice", &text);
    }
    let name = &choice["function"]["name"];
    let known = |tool: &Value| tool["function"]["name"] == *name;
    match tools.as_array().is_some_and(|tools| tools.iter().any(known)) {
        true => Ok(()),
        false => {
            refuse("tool_choice", "The tool specified in `tool_choice` does not match any of the specified `tools`")
        }
    }
}

fn one_constraint(fields: &Map<String, Value>, param: &str) -> Result<(), ErrorBody> {
    let constraints = fields.get("structured_outputs").and_then(Value::as_object);
    let given = |key: &&str| constraints.is_some_and(|all| all.get(*key).is_some_and(|value| !value.is_null()));
    if ["json", "regex", "choice"].iter().filter(|key| given(key)).count() > 1 {
        let text = "You can only use one kind of constraints for structured outputs ('json', 'regex' or 'choice').";
        return refuse(param, text);
    }
    Ok(())
}

fn logprobs(fields: &Map<String, Value>, sampled: &str) -> Result<(), ErrorBody> {
    let number = |name: &str| -> Result<Option<f64>, ErrorBody> {
        match fields.get(name) {
            None | Some(Value::Null) => Ok(None),
            Some(Value::Bool(truth)) => Ok(Some(f64::from(u8::from(*truth)))),
            Some(Value::Number(number)) => Ok(number.as_f64()),
            Some(other) => {
                refuse_value(name, &format!("`{name}` must be an integer."), shown(other))?;
                Ok(None)
            }
        }
    };
    let (prompt, sample) = (number("prompt_logprobs")?, number(sampled)?);
    if let Some(count) = prompt {
        if truthy(fields.get("stream")) && (count > 0.0 || count == -1.0) {
            refuse("prompt_logprobs", "`prompt_logprobs` are not available when `stream=True`.")?;
        }
        if count < 0.0 && count != -1.0 {
            refuse_value("prompt_logprobs", "`prompt_logprobs` must be a positive value or -1.", count)?;
        }
    }
    if let Some(count) = sample {
        if count < 0.0 && count != -1.0 {
            refuse_value(sampled, &format!("`{sampled}` must be a positive value or -1."), count)?;
        }
        if sampled == "top_logprobs" && (count > 0.0 || count == -1.0) && !truthy(fields.get("logprobs")) {
            refuse("top_logprobs", "when using `top_logprobs`, `logprobs` must be set to true.")?;
        }
    }
    Ok(())
}

fn stream_options(fields: &Map<String, Value>) -> Result<(), ErrorBody> {
    match truthy(fields.get("stream_options")) && !truthy(fields.get("stream")) {
        true => refuse("stream_options", "Stream options can only be defined when `stream=True`."),
        false => Ok(()),
    }
}

fn prompts(fields: &Map<String, Value>) -> Result<(), ErrorBody> {
    let prompt = fields.get("prompt");
    if let Some(Value::Array(prompts)) = prompt
        && prompts.len() > MAX_PROMPTS
        && !prompts.iter().all(Value::is_i64)
    {
        let text = format!(
            "prompt list length {} exceeds the maximum allowed count of {MAX_PROMPTS}. To increase this limit, set the \
             VLLM_MAX_COMPLETION_PROMPTS environment variable.",
            prompts.len()
        );
        return refuse("prompt", &text);
    }
    let empty = prompt.is_none_or(|prompt| prompt.is_null() || prompt == "");
    let embeds = fields.get("prompt_embeds");
    let no_embeds = embeds.is_none_or(|embeds| embeds.is_null() || embeds.as_array().is_some_and(Vec::is_empty));
    match empty && no_embeds {
        true => refuse("prompt", "Either prompt or prompt_embeds must be provided and non-empty."),
        false => Ok(()),
    }
}

fn cache_salt(fields: &Map<String, Value>) -> Result<(), ErrorBody> {
    match fields.get("cache_salt") {
        None | Some(Value::Null) => Ok(()),
        Some(Value::String(salt)) if !salt.is_empty() => {
            let allowed = salt.chars().count() <= MAX_SALT && !salt.contains(['@', '/', '\\', '\0']);
            let text = format!(
                "Parameter 'cache_salt' must be at most {MAX_SALT} characters and must not contain '@', '/', {}, or NUL.",
                repr("\\")
            );
            if allowed { Ok(()) } else { refuse("cache_salt", &text) }
        }
        Some(_) => refuse("cache_salt", "Parameter 'cache_salt' must be a non-empty string if provided."),
    }
}

/// Checks the rules on chats that vLLM's renderer applies after the model was found.
pub(super) fn check_rendering(fields: &Map<String, Value>, auto_tools: bool) -> Result<(), ErrorBody> {
    let auto = match fields.get("tool_choice") {
        None | Some(Value::Null) => truthy(fields.get("tools")),
        Some(choice) => choice == "auto",
    };
    if auto && !auto_tools {
        let text = "\"auto\" tool choice requires --enable-auto-tool-choice and --tool-call-parser to be set";
        return refuse("", text);
    }
    if fields.text("chat_template").is_some() {
        let text = "Chat template is passed with request, but --trust-request-chat-template is not set. Refused request \
                    with untrusted chat template.";
        return refuse("", text);
    }
    if fields.truth("continue_final_message") && fields.get("add_generation_prompt").is_none() {
        let text = "continue_final_message and add_generation_prompt are not compatible. Use continue_final_message when \
                    you want the model to continue the final message, and add_generation_prompt when you want to add a \
                    header that will prompt it to start a new assistant message instead.";
        return refuse("", text);
    }
    Ok(())
}
