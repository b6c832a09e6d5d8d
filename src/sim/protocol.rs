//! Requests as clients write them: chat and completions bodies -> what to generate, or vLLM's refusal.
//!
//! Defaults and limits are vLLM's: `max_tokens` is 16 for completions and the rest of the context for chats;
//! `max_completion_tokens` wins; what does not fit the context is clamped; a prompt that fills the context is
//! refused; a list of prompts fans out. Numbers may be written as `8`, `8.0` or `"8"` (pydantic coerces).
//!
//! Prompt tokens: token ids are counted, text by `text::count` plus one token for the beginning of the sequence;
//! a chat costs [`TOKENS_PER_MESSAGE`] more per message and [`TOKENS_PER_CHAT`] more per chat for its template,
//! and [`TOKENS_PER_IMAGE`] for each part that is not text.

use serde::Deserialize;
use serde_json::Value;
use serde_json::value::RawValue;
use xxhash_rust::xxh3::xxh3_64_with_seed;

use super::text;
use super::wire::ErrorBody;

/// Template tokens around each message.
pub const TOKENS_PER_MESSAGE: u64 = 4;
/// Template tokens of a chat: begin of text and the header of the answer.
pub const TOKENS_PER_CHAT: u64 = 5;
/// Tokens of a part that is not text.
pub const TOKENS_PER_IMAGE: u64 = 576;
/// vLLM's `VLLM_MAX_N_SEQUENCES`.
const MAX_CHOICES: u64 = 16_384;
/// vLLM's `VLLM_MAX_COMPLETION_PROMPTS`.
const MAX_PROMPTS: usize = 1024;
/// Default of `max_tokens` for completions.
const COMPLETION_TOKENS: u64 = 16;
/// More characters per token of context than this cannot fit, whatever the tokenizer; vLLM checks it first.
const CHARS_BOUND: usize = 70;

/// Which of the two generating routes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// `/v1/chat/completions`
    Chat,
    /// `/v1/completions`
    Completion,
}

/// One prompt of a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Prompt {
    /// Its length, tokens.
    pub tokens: u32,
    /// Hash of its content: the same prompt draws the same answer.
    pub seed: u64,
}

/// A request that can be served.
#[derive(Clone, Debug)]
pub struct Generate {
    /// Route.
    pub kind: Kind,
    /// Name of the model, if given.
    pub model: Option<String>,
    /// Prompts, at least one.
    pub prompts: Vec<Prompt>,
    /// Choices per prompt.
    pub n: u32,
    /// Limit on output tokens as asked for.
    pub max_tokens: Option<u64>,
    /// Fewest output tokens.
    pub min_tokens: u64,
    /// Generate exactly `max_tokens`.
    pub ignore_eos: bool,
    /// Answer as a stream.
    pub stream: bool,
    /// End the stream with a usage chunk.
    pub include_usage: bool,
    /// Usage on every chunk.
    pub continuous_usage: bool,
    /// Id chosen in the body.
    pub request_id: Option<String>,
}

#[derive(Deserialize)]
struct Body<'a> {
    model: Option<String>,
    #[serde(borrow)]
    messages: Option<&'a RawValue>,
    #[serde(borrow)]
    prompt: Option<&'a RawValue>,
    n: Option<Value>,
    max_tokens: Option<Value>,
    max_completion_tokens: Option<Value>,
    min_tokens: Option<Value>,
    ignore_eos: Option<Value>,
    stream: Option<Value>,
    stream_options: Option<StreamOptions>,
    request_id: Option<String>,
}

#[derive(Deserialize)]
struct StreamOptions {
    include_usage: Option<bool>,
    continuous_usage_stats: Option<bool>,
}

#[derive(Deserialize)]
struct Message {
    content: Option<Value>,
}

impl Generate {
    /// Reads a body.
    ///
    /// # Errors
    /// What vLLM answers: validation (400), context overflow (400).
    pub fn parse(kind: Kind, bytes: &[u8], max_model_len: u32) -> Result<Self, ErrorBody> {
        let body = read_body(bytes)?;
        let mut problems = Vec::new();
        let mut numbers = |field: &str, value: &Option<Value>| whole(field, value, &mut problems);
        let n = numbers("n", &body.n);
        let asked = numbers("max_tokens", &body.max_tokens);
        let asked_chat = numbers("max_completion_tokens", &body.max_completion_tokens);
        let min_tokens = numbers("min_tokens", &body.min_tokens);
        let ignore_eos = truth("ignore_eos", &body.ignore_eos, &mut problems);
        let stream = truth("stream", &body.stream, &mut problems);
        let prompts = match kind {
            Kind::Chat => chat(body.messages, max_model_len, &mut problems),
            Kind::Completion => prompts(body.prompt, max_model_len, &mut problems),
        };
        if !problems.is_empty() {
            return Err(ErrorBody::invalid(&problems));
        }
        let prompts = prompts?;
        if body.stream_options.is_some() && !stream {
            return Err(ErrorBody::bad_request(
                Some("stream_options"),
                "Stream options can only be defined when `stream=True`. (parameter=stream_options)".into(),
            ));
        }
        let max_tokens = match kind {
            Kind::Chat => asked_chat.or(asked),
            Kind::Completion => Some(asked.unwrap_or(COMPLETION_TOKENS as i64)),
        };
        let max_tokens = limit(max_tokens, max_model_len)?;
        let n = n.unwrap_or(1);
        if n < 1 {
            return Err(ErrorBody::bad_request(None, format!("n must be at least 1, got {n}.")));
        }
        if n as u64 > MAX_CHOICES {
            let message = format!(
                "n must be at most {MAX_CHOICES}, got {n}. To increase this limit, set the VLLM_MAX_N_SEQUENCES \
                 environment variable."
            );
            return Err(ErrorBody::bad_request(None, message));
        }
        let options = body.stream_options;
        Ok(Self {
            kind,
            model: body.model.filter(|model| !model.is_empty()),
            prompts,
            n: n as u32,
            max_tokens,
            min_tokens: min_tokens.unwrap_or(0).max(0) as u64,
            ignore_eos,
            stream,
            include_usage: options.as_ref().and_then(|options| options.include_usage).unwrap_or(false),
            continuous_usage: options.as_ref().and_then(|options| options.continuous_usage_stats).unwrap_or(false),
            request_id: body.request_id,
        })
    }

    /// Output limit for a prompt: what was asked for, clamped to the rest of the context.
    pub fn output_limit(&self, prompt: &Prompt, max_model_len: u32) -> u32 {
        let room = max_model_len.saturating_sub(prompt.tokens).max(1);
        self.max_tokens.map_or(room, |asked| u32::try_from(asked).unwrap_or(u32::MAX).min(room))
    }
}

fn read_body(bytes: &[u8]) -> Result<Body<'_>, ErrorBody> {
    let invalid = |at: String, kind: &str, text: &str, input: &str| {
        ErrorBody::invalid(&[(at.clone(), problem(kind, &at, text, input))])
    };
    if bytes.is_empty() {
        return Err(invalid("body".into(), "missing", "Field required", "None"));
    }
    match serde_json::from_slice::<Body<'_>>(bytes) {
        Ok(body) => Ok(body),
        Err(error) if error.is_data() => {
            let shaped = bytes.iter().find(|byte| !byte.is_ascii_whitespace()) == Some(&b'{');
            let text = if shaped {
                "Input should have the type that the field takes"
            } else {
                "Input should be a valid dictionary or object to extract fields from"
            };
            Err(invalid("body".into(), "model_attributes_type", text, &error.to_string().replace('\'', "`")))
        }
        Err(error) => {
            let line_start = match error.line() {
                0 | 1 => 0,
                line => {
                    bytes.iter().enumerate().filter(|(_, b)| **b == b'\n').nth(line - 2).map_or(0, |(at, _)| at + 1)
                }
            };
            let at = format!("body.{}", line_start + error.column().saturating_sub(1));
            let text = format!(
                "{{'type': 'json_invalid', 'loc': '{at}', 'msg': 'JSON decode error', 'input': '<dict of 0 items>', \
                 'ctx': {{'error': '{}'}}}}",
                error.to_string().replace('\'', "`")
            );
            Err(ErrorBody::invalid(&[(at, text)]))
        }
    }
}

fn problem(kind: &str, at: &str, text: &str, input: &str) -> String {
    format!("{{'type': '{kind}', 'loc': '{at}', 'msg': '{text}', 'input': '{input}'}}")
}

type Problems = Vec<(String, String)>;

fn report(problems: &mut Problems, field: &str, kind: &str, text: &str, input: &str) {
    let at = format!("body.{field}");
    let text = problem(kind, &at, text, input);
    problems.push((at, text));
}

fn whole(field: &str, value: &Option<Value>, problems: &mut Problems) -> Option<i64> {
    let value = value.as_ref()?;
    let number = match value {
        Value::Null => return None,
        Value::Number(number) => {
            number.as_i64().or_else(|| number.as_f64().filter(|float| float.fract() == 0.0).map(|float| float as i64))
        }
        Value::String(text) => text.trim().parse().ok(),
        _ => None,
    };
    if number.is_none() {
        let (kind, text) = match value {
            Value::String(_) => {
                ("int_parsing", "Input should be a valid integer, unable to parse string as an integer")
            }
            _ => ("int_type", "Input should be a valid integer"),
        };
        report(problems, field, kind, text, &shown(value));
    }
    number
}

fn truth(field: &str, value: &Option<Value>, problems: &mut Problems) -> bool {
    match value {
        None | Some(Value::Null) => false,
        Some(Value::Bool(value)) => *value,
        Some(Value::String(text)) if ["true", "1", "yes", "on"].contains(&text.to_lowercase().as_str()) => true,
        Some(Value::String(text)) if ["false", "0", "no", "off"].contains(&text.to_lowercase().as_str()) => false,
        Some(Value::Number(number)) if number.as_i64() == Some(1) => true,
        Some(Value::Number(number)) if number.as_i64() == Some(0) => false,
        Some(value) => {
            let text = "Input should be a valid boolean, unable to interpret input";
            report(problems, field, "bool_parsing", text, &shown(value));
            false
        }
    }
}

fn shown(value: &Value) -> String {
    match value {
        Value::String(text) => text.chars().take(40).collect(),
        Value::Array(items) => format!("<list of {} items>", items.len()),
        Value::Object(fields) => format!("<dict of {} items>", fields.len()),
        other => other.to_string(),
    }
}

fn limit(asked: Option<i64>, max_model_len: u32) -> Result<Option<u64>, ErrorBody> {
    let Some(asked) = asked else { return Ok(None) };
    let message = if asked < 1 {
        format!("max_tokens must be at least 1, got {asked}. (parameter=max_tokens, value={asked})")
    } else if asked > i64::from(max_model_len) {
        format!(
            "max_tokens={asked} cannot be greater than max_model_len={max_model_len}. Please request fewer output \
             tokens. (parameter=max_tokens, value={asked})"
        )
    } else {
        return Ok(Some(asked as u64));
    };
    Err(ErrorBody::bad_request(Some("max_tokens"), message))
}

fn chat(raw: Option<&RawValue>, max_model_len: u32, problems: &mut Problems) -> Result<Vec<Prompt>, ErrorBody> {
    let Some(raw) = raw else {
        report(problems, "messages", "missing", "Field required", "<dict>");
        return Ok(Vec::new());
    };
    let Ok(messages) = serde_json::from_str::<Vec<Message>>(raw.get()) else {
        report(problems, "messages", "list_type", "Input should be a valid list", "...");
        return Ok(Vec::new());
    };
    let (mut tokens, mut chars) = (TOKENS_PER_CHAT, 0);
    for message in &messages {
        tokens += TOKENS_PER_MESSAGE;
        match &message.content {
            Some(Value::String(text)) => {
                tokens += text::count(text) as u64;
                chars += text.len();
            }
            Some(Value::Array(parts)) => {
                for part in parts {
                    match part.get("text").and_then(Value::as_str) {
                        Some(text) => {
                            tokens += text::count(text) as u64;
                            chars += text.len();
                        }
                        None => tokens += TOKENS_PER_IMAGE,
                    }
                }
            }
            _ => {}
        }
    }
    let seed = xxh3_64_with_seed(raw.get().as_bytes(), 0);
    Ok(vec![fits(tokens, chars, seed, max_model_len, true)?])
}

fn prompts(raw: Option<&RawValue>, max_model_len: u32, problems: &mut Problems) -> Result<Vec<Prompt>, ErrorBody> {
    let json = raw.map_or("", RawValue::get);
    let of_text = |text: &String| {
        let seed = xxh3_64_with_seed(text.as_bytes(), 0);
        fits(text::count(text) as u64 + 1, text.len(), seed, max_model_len, true)
    };
    let of_ids = |ids: &Vec<u32>| {
        let bytes: Vec<u8> = ids.iter().flat_map(|id| id.to_le_bytes()).collect();
        fits(ids.len() as u64, 0, xxh3_64_with_seed(&bytes, 0), max_model_len, false)
    };
    let prompts = if let Ok(ids) = serde_json::from_str::<Vec<u32>>(json)
        && !ids.is_empty()
    {
        vec![of_ids(&ids)?]
    } else if let Ok(text) = serde_json::from_str::<String>(json) {
        vec![of_text(&text)?]
    } else if let Ok(texts) = serde_json::from_str::<Vec<String>>(json)
        && !texts.is_empty()
    {
        texts.iter().map(of_text).collect::<Result<_, _>>()?
    } else if let Ok(lists) = serde_json::from_str::<Vec<Vec<u32>>>(json)
        && !lists.is_empty()
    {
        lists.iter().map(of_ids).collect::<Result<_, _>>()?
    } else {
        match raw {
            None => report(problems, "prompt", "missing", "Field required", "<dict>"),
            Some(_) => report(problems, "prompt", "string_type", "Input should be a valid string", json_head(json)),
        }
        return Ok(Vec::new());
    };
    if prompts.len() > MAX_PROMPTS {
        let message = format!("prompt must have at most {MAX_PROMPTS} entries, got {}.", prompts.len());
        return Err(ErrorBody::bad_request(Some("prompt"), message));
    }
    Ok(prompts)
}

fn json_head(json: &str) -> &str {
    let end = json.char_indices().nth(40).map_or(json.len(), |(at, _)| at);
    &json[..end]
}

/// Refuses what leaves no room for a single output token.
fn fits(tokens: u64, chars: usize, seed: u64, max_model_len: u32, text: bool) -> Result<Prompt, ErrorBody> {
    let length = u64::from(max_model_len);
    if tokens < length {
        return Ok(Prompt { tokens: u32::try_from(tokens.max(1)).unwrap_or(u32::MAX), seed });
    }
    let bound = max_model_len as usize * CHARS_BOUND;
    if chars > bound {
        let message = format!(
            "This model's maximum context length is {length} tokens. However, your prompt contains {chars} characters \
             (more than {bound} characters, which is the upper bound for {length} input tokens). Please reduce the \
             length of the input prompt. (parameter=input_text, value={chars})"
        );
        return Err(ErrorBody::bad_request(Some("input_text"), message));
    }
    // Text is cut off by the tokenizer one token behind the limit, ids are counted.
    let (at_least, seen) = if text { ("at least ", length + 1) } else { ("", tokens) };
    let message = format!(
        "This model's maximum context length is {length} tokens. However, your prompt contains {at_least}{seen} input \
         tokens, which exceeds this limit even without any output tokens. Please reduce the length of the input \
         prompt. (parameter=input_tokens, value={seen})"
    );
    Err(ErrorBody::bad_request(Some("input_tokens"), message))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn completion(body: &str) -> Result<Generate, ErrorBody> {
        Generate::parse(Kind::Completion, body.as_bytes(), 8192)
    }

    #[test]
    fn prompts_may_be_text_ids_or_lists() {
        let tokens = |prompt: &str| {
            let request = completion(&format!(r#"{{"prompt":{prompt}}}"#)).unwrap();
            request.prompts.iter().map(|prompt| prompt.tokens).collect::<Vec<_>>()
        };
        assert_eq!(tokens(r#""abcdefgh""#), [3]);
        assert_eq!(tokens("[1,2,3,4]"), [4]);
        assert_eq!(tokens(r#"["abcd","a"]"#), [2, 2]);
        assert_eq!(tokens("[[1],[2,3]]"), [1, 2]);
    }

    #[test]
    fn defaults_are_vllms() {
        let request = completion(r#"{"prompt":"x"}"#).unwrap();
        assert_eq!((request.max_tokens, request.n, request.stream), (Some(16), 1, false));
        let body = br#"{"messages":[{"role":"user","content":"hello"}],"max_tokens":5,"max_completion_tokens":"7"}"#;
        let chat = Generate::parse(Kind::Chat, body, 8192).unwrap();
        assert_eq!((chat.max_tokens, chat.prompts[0].tokens), (Some(7), 11));
        let open = Generate::parse(Kind::Chat, br#"{"messages":[]}"#, 100).unwrap();
        assert_eq!(open.output_limit(&open.prompts[0], 100), 95);
    }

    #[test]
    fn overflow_is_refused_in_vllms_words() {
        let ids = format!(r#"{{"prompt":[{}1]}}"#, "1,".repeat(8999));
        assert_eq!(
            completion(&ids).unwrap_err().message,
            "This model's maximum context length is 8192 tokens. However, your prompt contains 9000 input tokens, \
             which exceeds this limit even without any output tokens. Please reduce the length of the input prompt. \
             (parameter=input_tokens, value=9000)"
        );
        let text = format!(r#"{{"prompt":"{}"}}"#, "a".repeat(2_000_000));
        assert!(completion(&text).unwrap_err().message.contains("2000000 characters (more than 573440 characters"));
    }

    #[test]
    fn what_does_not_fit_the_rest_of_the_context_is_clamped() {
        let request = completion(r#"{"prompt":[1,2,3],"max_tokens":8192}"#).unwrap();
        assert_eq!(request.output_limit(&request.prompts[0], 8192), 8189);
        let error = completion(r#"{"prompt":"x","max_tokens":100000}"#).unwrap_err();
        assert!(error.message.starts_with("max_tokens=100000 cannot be greater than max_model_len=8192."));
    }

    #[test]
    fn wrong_types_are_all_named() {
        let error = completion(r#"{"prompt":5,"max_tokens":"many","stream":3}"#).unwrap_err();
        assert!(error.message.starts_with("3 validation errors:\n  {'type': 'int_parsing'"), "{}", error.message);
        assert_eq!((error.kind, error.param.as_deref()), ("Bad Request", Some("body.max_tokens")));
        for body in ["", "[]", "{", "nonsense", "{\"prompt\":}"] {
            assert_eq!(completion(body).unwrap_err().status, 400, "{body}");
        }
    }
}
