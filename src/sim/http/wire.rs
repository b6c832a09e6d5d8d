//! The bytes of OpenAI responses, chunks and bodies, exactly as vLLM writes them.
//!
//! Key order and null fields follow captures of a real server. The role chunk has
//! `prompt_token_ids` and `prompt_text`. The last content chunk has `finish_reason` and
//! `stop_reason`. `system_fingerprint` is on the usage chunk or, without one, on every chunk with a
//! `finish_reason`. Events are `data: <compact JSON>\n\n`, the last one `data: [DONE]\n\n`. An
//! end-of-sequence token is counted, but has no text.

use std::fmt::Write;
use std::sync::Arc;
use std::time::Duration;

use serde_json::json;

use crate::engine::Timing;
use crate::validate::{CalledTool, RequestKind};

/// Why a sequence ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Finish {
    /// An end-of-sequence token or a stop string.
    Stop,
    /// The token limit.
    Length,
    /// The server ended the sequence, because it is paused, asleep or shutting down.
    Abort,
}

impl Finish {
    /// The value on the wire and in metrics.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Stop => "stop",
            Self::Length => "length",
            Self::Abort => "abort",
        }
    }
}

/// Writes the chunks of one response.
#[derive(Clone, Debug)]
pub struct ChunkWriter {
    kind: RequestKind,
    /// Start of a stream chunk: `{"id":..,"object":..,"created":..,"model":..,"choices":[`, after
    /// `data: `.
    head: String,
    id: String,
    created: u64,
    model: String,
    fingerprint: Arc<str>,
    usage_chunk: bool,
    continuous: bool,
    role: String,
}

/// The chunks of a stream that contain usage.
#[derive(Clone, Copy, Debug, Default)]
pub struct UsageOptions {
    /// A usage chunk at the end.
    pub at_end: bool,
    /// Usage on every chunk too; only with `at_end`.
    pub continuous: bool,
}

/// Token counts of a response.
#[derive(Clone, Copy, Debug, Default)]
pub struct UsageCounts {
    /// Tokens of the prompts.
    pub prompt: u64,
    /// Tokens of the completions.
    pub completion: u64,
    /// Tokens of the prompts that were in the prefix cache; `None` if not reported.
    pub cached: Option<u64>,
    /// The engine's times; `None` without `--enable-per-request-metrics`.
    pub timing: Option<Timing>,
}

/// A part of a response: some tokens of one choice. JSON fields are already rendered.
#[derive(Clone, Debug, Default)]
pub struct Piece {
    /// The text.
    pub text: String,
    /// `logprobs`, JSON.
    pub logprobs: Option<String>,
    /// `token_ids`, JSON.
    pub token_ids: Option<String>,
    /// `prompt_token_ids`, JSON: on the first piece of a completion.
    pub prompt_ids: Option<String>,
    /// Set on the last piece of the choice.
    pub finish: Option<Finish>,
    /// `stop_reason`, JSON; used with `finish`.
    pub stop_reason: String,
    /// The tool, if `text` is the arguments of a call.
    pub call: Option<CalledTool>,
    /// Whether it is the first piece of the choice.
    pub first: bool,
}

impl Piece {
    /// The finish reason on the wire: `tool_calls` for a call that is complete, unless the request
    /// named the tool.
    fn reason(&self, finish: Finish) -> &'static str {
        match (&self.call, finish) {
            (Some(call), Finish::Stop) if !call.named => "tool_calls",
            _ => finish.as_str(),
        }
    }
}

pub(crate) fn call_id(response: &str, choice: usize) -> String {
    format!("chatcmpl-tool-{:016x}", twox_hash::XxHash3_64::oneshot_with_seed(choice as u64, response.as_bytes()))
}

/// A choice of a response that is not streamed.
#[derive(Clone, Debug, Default)]
pub struct CompleteChoice {
    /// The whole output as one piece.
    pub piece: Piece,
    /// `prompt_logprobs`, JSON.
    pub prompt_logprobs: Option<String>,
}

const NULL: &str = "null";

fn or_null(json: &Option<String>) -> &str {
    json.as_deref().unwrap_or(NULL)
}

/// Appends a string as JSON without the quotes.
fn push_text(out: &mut String, text: &str) {
    if text.bytes().all(|byte| byte >= 0x20 && byte != b'"' && byte != b'\\') {
        out.push_str(text);
    } else {
        let quoted = json!(text).to_string();
        out.push_str(&quoted[1..quoted.len() - 1]);
    }
}

impl ChunkWriter {
    /// A writer for the response `id` (with prefix); `created` in Unix seconds.
    pub fn new(
        kind: RequestKind,
        id: String,
        created: u64,
        model: &str,
        fingerprint: &Arc<str>,
        shown: UsageOptions,
    ) -> Self {
        let object = match kind {
            RequestKind::Chat => "chat.completion.chunk",
            RequestKind::Completion => "text_completion",
        };
        let head = format!(
            "data: {{\"id\":{},\"object\":\"{object}\",\"created\":{created},\"model\":{},\"choices\":[",
            json!(id),
            json!(model)
        );
        let (usage_chunk, continuous) = (shown.at_end, shown.at_end && shown.continuous);
        let (model, fingerprint) = (model.to_owned(), Arc::clone(fingerprint));
        let role = "\"assistant\"".to_owned();
        Self { kind, head, id, created, model, fingerprint, usage_chunk, continuous, role }
    }

    /// Replaces the role `assistant`: a chat that continues the last message keeps that message's
    /// role.
    pub fn with_role(mut self, role: &str) -> Self {
        self.role = json!(role).to_string();
        self
    }

    /// Writes the chunk that opens a choice of a chat. A completion has none.
    pub fn role(&self, out: &mut String, choice: usize, prompt_ids: Option<&str>, usage: UsageCounts) {
        if self.kind == RequestKind::Completion {
            return;
        }
        out.push_str(&self.head);
        let _ = write!(
            out,
            "{{\"index\":{choice},\"delta\":{{\"role\":{},\"content\":\"\"}},\"logprobs\":null,\"finish_reason\":null}}]",
            self.role
        );
        self.running_usage(out, usage);
        let _ = write!(out, ",\"prompt_token_ids\":{},\"prompt_text\":null}}\n\n", prompt_ids.unwrap_or(NULL));
    }

    /// Writes a chunk with text or with arguments of a call. The first arguments follow a chunk
    /// with the name of the tool.
    pub fn content(&self, out: &mut String, choice: usize, piece: &Piece, usage: UsageCounts) {
        if let Some(call) = piece.call.as_ref().filter(|_| piece.first) {
            out.push_str(&self.head);
            let _ = write!(
                out,
                "{{\"index\":{choice},\"delta\":{{\"content\":null,\"tool_calls\":[{{\"id\":\"{}\",\"type\":\"function\",\"index\":0,\
                 \"function\":{{\"name\":{}}}}}]}},\"logprobs\":null,\"finish_reason\":null,\"token_ids\":null}}]",
                call_id(&self.id, choice),
                json!(call.name)
            );
            self.running_usage(out, usage);
            out.push_str("}\n\n");
        }
        out.push_str(&self.head);
        let _ = write!(out, "{{\"index\":{choice},");
        match (self.kind, &piece.call) {
            (RequestKind::Chat, Some(_)) if piece.text.is_empty() => out.push_str("\"delta\":{"),
            (RequestKind::Chat, Some(_)) => {
                out.push_str("\"delta\":{\"content\":null,\"tool_calls\":[{\"index\":0,\"function\":{\"arguments\":\"");
                push_text(out, &piece.text);
                out.push_str("\"}}]");
            }
            (RequestKind::Chat, None) => {
                out.push_str("\"delta\":{\"content\":\"");
                push_text(out, &piece.text);
                out.push('"');
            }
            (RequestKind::Completion, _) => {
                out.push_str("\"text\":\"");
                push_text(out, &piece.text);
                out.push('"');
            }
        }
        let logprobs = or_null(&piece.logprobs);
        let _ = match self.kind {
            RequestKind::Chat => write!(out, "}},\"logprobs\":{logprobs},"),
            RequestKind::Completion => write!(out, ",\"logprobs\":{logprobs},"),
        };
        let _ = match piece.finish {
            Some(finish) => write!(out, "\"finish_reason\":\"{}\",", piece.reason(finish)),
            None => write!(out, "\"finish_reason\":null,"),
        };
        let reason = if piece.finish.is_some() { piece.stop_reason.as_str() } else { NULL };
        let ids = or_null(&piece.token_ids);
        let _ = match (self.kind, piece.finish) {
            (RequestKind::Chat, Some(_)) => write!(out, "\"stop_reason\":{reason},\"token_ids\":{ids}}}]"),
            (RequestKind::Chat, None) => write!(out, "\"token_ids\":{ids}}}]"),
            (RequestKind::Completion, _) => {
                let prompt = or_null(&piece.prompt_ids);
                write!(out, "\"stop_reason\":{reason},\"prompt_token_ids\":{prompt},\"token_ids\":{ids}}}]")
            }
        };
        self.running_usage(out, usage);
        if piece.finish.is_some() && !self.usage_chunk {
            let _ = write!(out, ",\"system_fingerprint\":\"{}\"", self.fingerprint);
        }
        out.push_str("}\n\n");
    }

    /// Writes the end of a stream: the usage chunk if requested, and `[DONE]`.
    pub fn end(&self, out: &mut String, usage: UsageCounts) {
        if self.usage_chunk {
            out.push_str(&self.head);
            out.push(']');
            write_usage(out, usage);
            if let Some(cached) = usage.cached {
                let _ = write!(out, ",\"prompt_tokens_details\":{{\"cached_tokens\":{cached}}}");
            }
            let _ = write!(out, "}},\"system_fingerprint\":\"{}\"", self.fingerprint);
            if let Some(timing) = usage.timing {
                let _ = write!(out, ",\"metrics\":{}", metrics(timing, false));
            }
            out.push_str("}\n\n");
        }
        out.push_str("data: [DONE]\n\n");
    }

    /// `tool_calls` of a complete message, with a comma in front; empty without a call.
    fn calls(&self, choice: usize, piece: &Piece) -> String {
        let Some(call) = &piece.call else { return String::new() };
        format!(
            ",\"tool_calls\":[{{\"id\":\"{}\",\"type\":\"function\",\"function\":{{\"name\":{},\"arguments\":{}}}}}]",
            call_id(&self.id, choice),
            json!(call.name),
            json!(piece.text)
        )
    }

    fn running_usage(&self, out: &mut String, usage: UsageCounts) {
        if self.continuous {
            write_usage(out, usage);
            out.push_str(match self.kind {
                RequestKind::Chat => ",\"completion_tokens_details\":null}",
                RequestKind::Completion => "}",
            });
        }
    }

    /// The complete body of a response that is not streamed.
    pub fn body(&self, choices: &[CompleteChoice], usage: UsageCounts) -> String {
        let mut out =
            String::with_capacity(600 + choices.iter().map(|whole| whole.piece.text.len() + 300).sum::<usize>());
        let object = match self.kind {
            RequestKind::Chat => "chat.completion",
            RequestKind::Completion => "text_completion",
        };
        let _ = write!(
            out,
            "{{\"id\":{},\"object\":\"{object}\",\"created\":{},\"model\":{},\"choices\":[",
            json!(self.id),
            self.created,
            json!(self.model)
        );
        for (index, CompleteChoice { piece, prompt_logprobs }) in choices.iter().enumerate() {
            let comma = if index > 0 { "," } else { "" };
            let finish = piece.finish.map_or("length", |finish| piece.reason(finish));
            let reason = piece.stop_reason.as_str();
            let (logprobs, ids) = (or_null(&piece.logprobs), or_null(&piece.token_ids));
            let _ = match self.kind {
                RequestKind::Chat => {
                    let _ =
                        write!(out, "{comma}{{\"index\":{index},\"message\":{{\"role\":{},\"content\":\"", self.role);
                    let calls = self.calls(index, piece);
                    push_text(&mut out, if calls.is_empty() { &piece.text } else { "" });
                    write!(
                        out,
                        "\",\"refusal\":null,\"annotations\":null,\"audio\":null,\"function_call\":null{calls},\"reasoning\":\
                         null}},\"logprobs\":{logprobs},\"finish_reason\":\"{finish}\",\"stop_reason\":{reason},\
                         \"token_ids\":{ids},\"routed_experts\":null}}"
                    )
                }
                RequestKind::Completion => {
                    let _ = write!(out, "{comma}{{\"index\":{index},\"text\":\"");
                    push_text(&mut out, &piece.text);
                    let (prompt, prompt_ids) = (or_null(prompt_logprobs), or_null(&piece.prompt_ids));
                    write!(
                        out,
                        "\",\"logprobs\":{logprobs},\"finish_reason\":\"{finish}\",\"stop_reason\":{reason},\
                         \"token_ids\":{ids},\"prompt_logprobs\":{prompt},\"prompt_token_ids\":{prompt_ids},\
                         \"routed_experts\":null}}"
                    )
                }
            };
        }
        let _ = write!(out, "],\"service_tier\":null,\"system_fingerprint\":\"{}\"", self.fingerprint);
        write_usage(&mut out, usage);
        let details = usage.cached.map_or(NULL.to_owned(), |cached| format!("{{\"cached_tokens\":{cached}}}"));
        let _ = write!(out, ",\"prompt_tokens_details\":{details},\"completion_tokens_details\":null}}");
        if let (RequestKind::Chat, Some(first)) = (self.kind, choices.first()) {
            let (logprobs, ids) = (or_null(&first.prompt_logprobs), or_null(&first.piece.prompt_ids));
            let _ = write!(out, ",\"prompt_logprobs\":{logprobs},\"prompt_token_ids\":{ids},\"prompt_text\":null");
        }
        let metrics = usage.timing.map_or(NULL.to_owned(), |timing| metrics(timing, true));
        let _ = write!(out, ",\"kv_transfer_params\":null,\"ec_transfer_params\":null,\"metrics\":{metrics}}}");
        out
    }
}

fn write_usage(out: &mut String, usage: UsageCounts) {
    let UsageCounts { prompt, completion, .. } = usage;
    let total = prompt + completion;
    let _ = write!(
        out,
        ",\"usage\":{{\"prompt_tokens\":{prompt},\"total_tokens\":{total},\"completion_tokens\":{completion}"
    );
}

/// The engine's times in milliseconds. `nulls`: fields without a value are shown, too.
pub(crate) fn metrics(timing: Timing, nulls: bool) -> String {
    let ms = |time: Duration| time.as_secs_f64() * 1e3;
    let inference = ms(timing.prefill + timing.decode);
    let mean_itl = (timing.tokens > 1).then(|| ms(timing.decode) / f64::from(timing.tokens - 1));
    let rate = (inference > 0.0).then(|| f64::from(timing.tokens) / inference * 1e3);
    let fields = [
        ("time_to_first_token_ms", Some(ms(timing.prefill))),
        ("generation_time_ms", Some(ms(timing.decode))),
        ("queue_time_ms", Some(ms(timing.queue))),
        ("mean_itl_ms", mean_itl),
        ("tokens_per_second", rate),
        ("speculative_decoding", None),
    ];
    let shown = fields.into_iter().filter(|(_, value)| nulls || value.is_some());
    let shown = shown.map(|(name, value)| match value {
        Some(value) => format!("\"{name}\":{value:?}"),
        None => format!("\"{name}\":null"),
    });
    format!("{{{}}}", shown.collect::<Vec<_>>().join(","))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn render(kind: RequestKind, usage_chunk: bool, continuous: bool) -> String {
        let (prefix, mut out) = (if kind == RequestKind::Chat { "chatcmpl-" } else { "cmpl-" }, String::new());
        let shown = UsageOptions { at_end: usage_chunk, continuous };
        let envelope = ChunkWriter::new(kind, format!("{prefix}1"), 2, "m", &"vllm-0.33.0-51ca51ca".into(), shown);
        let usage = |completion| UsageCounts { prompt: 5, completion, ..UsageCounts::default() };
        let piece =
            |text: &str, finish| Piece { text: text.into(), finish, stop_reason: "null".into(), ..Piece::default() };
        envelope.role(&mut out, 0, None, usage(0));
        envelope.content(&mut out, 0, &piece(" a", None), usage(1));
        envelope.content(&mut out, 0, &piece(" b", Some(Finish::Length)), usage(2));
        envelope.end(&mut out, usage(2));
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
        assert_eq!(render(RequestKind::Chat, false, false), expected);
    }

    #[test]
    fn the_fingerprint_moves_to_the_usage_chunk() {
        let out = render(RequestKind::Completion, true, false);
        assert_eq!(out.matches("system_fingerprint").count(), 1);
        assert!(out.ends_with(
            "\"choices\":[],\"usage\":{\"prompt_tokens\":5,\"total_tokens\":7,\"completion_tokens\":2},\
             \"system_fingerprint\":\"vllm-0.33.0-51ca51ca\"}\n\ndata: [DONE]\n\n"
        ));
        assert!(!out.contains("role"));
    }

    #[test]
    fn continuous_usage_rides_on_every_chunk_and_needs_include_usage() {
        assert_eq!(render(RequestKind::Chat, true, true).matches("\"usage\"").count(), 4);
        assert_eq!(render(RequestKind::Chat, false, true).matches("\"usage\"").count(), 0);
    }

    #[test]
    fn every_chunk_and_body_is_json() {
        for event in render(RequestKind::Chat, true, true).split("\n\n").filter(|event| event.contains('{')) {
            serde_json::from_str::<serde_json::Value>(event.strip_prefix("data: ").unwrap()).unwrap();
        }
        for kind in [RequestKind::Chat, RequestKind::Completion] {
            let envelope = ChunkWriter::new(kind, "x".into(), 1, "a \"b\"", &"f".into(), UsageOptions::default());
            let whole = |text: &str, finish| CompleteChoice {
                piece: Piece {
                    text: text.into(),
                    finish: Some(finish),
                    stop_reason: "null".into(),
                    ..Piece::default()
                },
                prompt_logprobs: None,
            };
            let choices = [whole("one \"two\"\n", Finish::Stop), whole("two", Finish::Length)];
            serde_json::from_str::<serde_json::Value>(&envelope.body(&choices, UsageCounts::default())).unwrap();
        }
    }
}
