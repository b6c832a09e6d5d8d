//! The bytes of answers: chunks, bodies, error objects, exactly as vLLM frames them.
//!
//! Key order and null fields follow captures of a real server: role chunk with `prompt_token_ids` and
//! `prompt_text`, last content chunk with `finish_reason` and `stop_reason`, `system_fingerprint` on every chunk with a
//! `finish_reason` when no usage chunk follows, otherwise on the usage chunk. Events are `data: <compact JSON>\n\n`,
//! the last one is `data: [DONE]\n\n`; only errors inside a stream have blanks in their JSON, there as here. An
//! end-of-sequence token counts and has no text.

use std::fmt::Write;

use serde_json::json;

use super::protocol::Kind;

/// What `system_fingerprint` says.
const FINGERPRINT: &str = "vllm-0.33.0-51ca51ca";

/// Why a sequence ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Finish {
    /// It drew an end-of-sequence token.
    Stop,
    /// It reached its limit.
    Length,
}

impl Finish {
    /// The word on the wire and in metrics.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Stop => "stop",
            Self::Length => "length",
        }
    }
}

/// What all chunks of one answer share.
#[derive(Clone, Debug)]
pub struct Envelope {
    kind: Kind,
    /// `{"id":..,"object":..,"created":..,"model":..` up to `"choices":[`, for stream chunks.
    head: String,
    id: String,
    created: u64,
    model: String,
    usage_chunk: bool,
    continuous: bool,
}

/// Token counts of an answer.
#[derive(Clone, Copy, Debug, Default)]
pub struct Usage {
    /// Tokens of the prompts.
    pub prompt: u64,
    /// Tokens of the answers.
    pub completion: u64,
}

impl Envelope {
    /// An answer with this id (already prefixed); `created` in Unix seconds.
    pub fn new(kind: Kind, id: String, created: u64, model: &str, usage_chunk: bool, continuous: bool) -> Self {
        let object = match kind {
            Kind::Chat => "chat.completion.chunk",
            Kind::Completion => "text_completion",
        };
        let head = format!(
            "data: {{\"id\":{},\"object\":\"{object}\",\"created\":{created},\"model\":{},\"choices\":[",
            json!(id),
            json!(model)
        );
        Self { kind, head, id, created, model: model.to_owned(), usage_chunk, continuous: continuous && usage_chunk }
    }

    /// The chunk that opens a choice of a chat; completions have none.
    pub fn role(&self, out: &mut String, choice: usize, usage: Usage) {
        if self.kind == Kind::Completion {
            return;
        }
        out.push_str(&self.head);
        let _ = write!(
            out,
            "{{\"index\":{choice},\"delta\":{{\"role\":\"assistant\",\"content\":\"\"}},\"logprobs\":null,\
             \"finish_reason\":null}}]"
        );
        self.running_usage(out, usage);
        out.push_str(",\"prompt_token_ids\":null,\"prompt_text\":null}\n\n");
    }

    /// A chunk with text.
    pub fn content(&self, out: &mut String, choice: usize, text: &str, finish: Option<Finish>, usage: Usage) {
        out.push_str(&self.head);
        // The words of `text.rs` need no escaping.
        let _ = match self.kind {
            Kind::Chat => write!(out, "{{\"index\":{choice},\"delta\":{{\"content\":\"{text}\"}},\"logprobs\":null,"),
            Kind::Completion => write!(out, "{{\"index\":{choice},\"text\":\"{text}\",\"logprobs\":null,"),
        };
        let _ = match finish {
            Some(finish) => write!(out, "\"finish_reason\":\"{}\",", finish.as_str()),
            None => write!(out, "\"finish_reason\":null,"),
        };
        out.push_str(match (self.kind, finish) {
            (Kind::Chat, Some(_)) => "\"stop_reason\":null,\"token_ids\":null}]",
            (Kind::Chat, None) => "\"token_ids\":null}]",
            (Kind::Completion, _) => "\"stop_reason\":null,\"prompt_token_ids\":null,\"token_ids\":null}]",
        });
        self.running_usage(out, usage);
        if finish.is_some() && !self.usage_chunk {
            let _ = write!(out, ",\"system_fingerprint\":\"{FINGERPRINT}\"");
        }
        out.push_str("}\n\n");
    }

    /// What follows the last content: the usage chunk where asked for, and `[DONE]`.
    pub fn end(&self, out: &mut String, usage: Usage) {
        if self.usage_chunk {
            out.push_str(&self.head);
            out.push(']');
            self.write_usage(out, usage);
            let _ = write!(out, "}},\"system_fingerprint\":\"{FINGERPRINT}\"}}\n\n");
        }
        out.push_str("data: [DONE]\n\n");
    }

    fn running_usage(&self, out: &mut String, usage: Usage) {
        if self.continuous {
            self.write_usage(out, usage);
            out.push_str(match self.kind {
                Kind::Chat => ",\"completion_tokens_details\":null}",
                Kind::Completion => "}",
            });
        }
    }

    fn write_usage(&self, out: &mut String, usage: Usage) {
        let Usage { prompt, completion } = usage;
        let total = prompt + completion;
        let _ = write!(
            out,
            ",\"usage\":{{\"prompt_tokens\":{prompt},\"total_tokens\":{total},\"completion_tokens\":{completion}"
        );
    }

    /// The whole body of an answer that was not streamed.
    pub fn body(&self, choices: &[(String, Finish)], usage: Usage) -> String {
        let mut out = String::with_capacity(600 + choices.iter().map(|(text, _)| text.len() + 300).sum::<usize>());
        let object = match self.kind {
            Kind::Chat => "chat.completion",
            Kind::Completion => "text_completion",
        };
        let _ = write!(
            out,
            "{{\"id\":{},\"object\":\"{object}\",\"created\":{},\"model\":{},\"choices\":[",
            json!(self.id),
            self.created,
            json!(self.model)
        );
        for (index, (text, finish)) in choices.iter().enumerate() {
            let comma = if index > 0 { "," } else { "" };
            let finish = finish.as_str();
            let _ = match self.kind {
                Kind::Chat => write!(
                    out,
                    "{comma}{{\"index\":{index},\"message\":{{\"role\":\"assistant\",\"content\":\"{text}\",\
                     \"refusal\":null,\"annotations\":null,\"audio\":null,\"function_call\":null,\"reasoning\":null}},\
                     \"logprobs\":null,\"finish_reason\":\"{finish}\",\"stop_reason\":null,\"token_ids\":null,\
                     \"routed_experts\":null}}"
                ),
                Kind::Completion => write!(
                    out,
                    "{comma}{{\"index\":{index},\"text\":\"{text}\",\"logprobs\":null,\"finish_reason\":\"{finish}\",\
                     \"stop_reason\":null,\"token_ids\":null,\"prompt_logprobs\":null,\"prompt_token_ids\":null,\
                     \"routed_experts\":null}}"
                ),
            };
        }
        let _ = write!(out, "],\"service_tier\":null,\"system_fingerprint\":\"{FINGERPRINT}\"");
        self.write_usage(&mut out, usage);
        out.push_str(",\"prompt_tokens_details\":null,\"completion_tokens_details\":null}");
        if self.kind == Kind::Chat {
            out.push_str(",\"prompt_logprobs\":null,\"prompt_token_ids\":null,\"prompt_text\":null");
        }
        out.push_str(",\"kv_transfer_params\":null,\"ec_transfer_params\":null,\"metrics\":null}");
        out
    }
}

/// An error object and its status.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ErrorBody {
    /// HTTP status and `code`.
    pub status: u16,
    /// `type`.
    pub kind: &'static str,
    /// `param`.
    pub param: Option<String>,
    /// `message`.
    pub message: String,
}

impl ErrorBody {
    /// A request that cannot be served as it is (400, `BadRequestError`).
    pub fn bad_request(param: Option<&str>, message: String) -> Self {
        Self { status: 400, kind: "BadRequestError", param: param.map(str::to_owned), message }
    }

    /// A body that fails validation (400, `Bad Request`); `problems` are pydantic-like.
    pub fn invalid(problems: &[(String, String)]) -> Self {
        let plural = if problems.len() == 1 { "" } else { "s" };
        let mut message = format!("{} validation error{plural}:", problems.len());
        for (_, text) in problems {
            let _ = write!(message, "\n  {text}");
        }
        Self { status: 400, kind: "Bad Request", param: problems.first().map(|(at, _)| at.clone()), message }
    }

    /// An engine that died.
    pub fn dead() -> Self {
        let message = "EngineCore encountered an issue. See stack trace (above) for the root cause.".to_owned();
        Self { status: 500, kind: "InternalServerError", param: None, message }
    }

    /// The object as JSON.
    pub fn json(&self) -> String {
        let param = json!(self.param);
        let (message, kind) = (json!(self.message), json!(self.kind));
        format!("{{\"error\":{{\"message\":{message},\"type\":{kind},\"param\":{param},\"code\":{}}}}}", self.status)
    }

    /// The object as the event of a stream that already began, with the end of the stream.
    pub fn event(&self) -> String {
        let param = json!(self.param);
        let (message, kind) = (json!(self.message), json!(self.kind));
        format!(
            "data: {{\"error\": {{\"message\": {message}, \"type\": {kind}, \"param\": {param}, \"code\": {}}}}}\n\n\
             data: [DONE]\n\n",
            self.status
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn render(kind: Kind, usage_chunk: bool, continuous: bool) -> String {
        let (prefix, mut out) = (if kind == Kind::Chat { "chatcmpl-" } else { "cmpl-" }, String::new());
        let envelope = Envelope::new(kind, format!("{prefix}1"), 2, "m", usage_chunk, continuous);
        envelope.role(&mut out, 0, Usage { prompt: 5, completion: 0 });
        envelope.content(&mut out, 0, " a", None, Usage { prompt: 5, completion: 1 });
        envelope.content(&mut out, 0, " b", Some(Finish::Length), Usage { prompt: 5, completion: 2 });
        envelope.end(&mut out, Usage { prompt: 5, completion: 2 });
        out
    }

    #[test]
    fn a_chat_stream_has_vllms_bytes() {
        let chunk = r#"data: {"id":"chatcmpl-1","object":"chat.completion.chunk","created":2,"model":"m","choices":["#;
        let expected = [
            r#"{"index":0,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}],"prompt_token_ids":null,"prompt_text":null}"#,
            r#"{"index":0,"delta":{"content":" a"},"logprobs":null,"finish_reason":null,"token_ids":null}]}"#,
            r#"{"index":0,"delta":{"content":" b"},"logprobs":null,"finish_reason":"length","stop_reason":null,"token_ids":null}],"system_fingerprint":"vllm-0.33.0-51ca51ca"}"#,
        ];
        let expected = expected.map(|tail| format!("{chunk}{tail}\n\n")).concat() + "data: [DONE]\n\n";
        assert_eq!(render(Kind::Chat, false, false), expected);
    }

    #[test]
    fn the_fingerprint_moves_to_the_usage_chunk() {
        let out = render(Kind::Completion, true, false);
        assert_eq!(out.matches("system_fingerprint").count(), 1);
        assert!(out.ends_with(
            "\"choices\":[],\"usage\":{\"prompt_tokens\":5,\"total_tokens\":7,\"completion_tokens\":2},\
             \"system_fingerprint\":\"vllm-0.33.0-51ca51ca\"}\n\ndata: [DONE]\n\n"
        ));
        assert!(!out.contains("role"));
    }

    #[test]
    fn continuous_usage_rides_on_every_chunk_and_needs_include_usage() {
        assert_eq!(render(Kind::Chat, true, true).matches("\"usage\"").count(), 4);
        assert_eq!(render(Kind::Chat, false, true).matches("\"usage\"").count(), 0);
    }

    #[test]
    fn every_chunk_and_body_is_json() {
        for event in render(Kind::Chat, true, true).split("\n\n").filter(|event| event.contains('{')) {
            serde_json::from_str::<serde_json::Value>(event.strip_prefix("data: ").unwrap()).unwrap();
        }
        for kind in [Kind::Chat, Kind::Completion] {
            let envelope = Envelope::new(kind, "x".into(), 1, "a \"b\"", false, false);
            let choices = [("one".into(), Finish::Stop), ("two".into(), Finish::Length)];
            serde_json::from_str::<serde_json::Value>(&envelope.body(&choices, Usage::default())).unwrap();
        }
    }

    #[test]
    fn errors_have_vllms_shape() {
        let error = ErrorBody::bad_request(Some("max_tokens"), "no".into());
        assert_eq!(
            error.json(),
            r#"{"error":{"message":"no","type":"BadRequestError","param":"max_tokens","code":400}}"#
        );
    }
}
