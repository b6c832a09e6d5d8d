//! The request that continues an answer, made from the request that began it.
//!
//! A chat gets one more message, which the engine continues; for a completion, the text is appended
//! to the prompt. Limits on output tokens shrink by the tokens so far. All other bytes stay. If a
//! member is given twice, the last one counts, as in Python.
//!
//! If the text has reached `max_tokens`, nothing is sent: the gateway ends the answer itself.

use bytes::Bytes;
use smallvec::SmallVec;

use super::answer::{Answer, Identity};
use super::messages;
use sluice_core::openai::patch::{self, Patches};
use sluice_core::openai::request::{self, COMPLETIONS_DEFAULT_OUTPUT};
use sluice_core::openai::scan::{JsonKind, ScanError, Scanner, Span};
use sluice_core::openai::{EditedBody, Edits, NotContinued, Route};

/// The step after an engine has failed.
#[derive(Debug, PartialEq)]
pub(in crate::flow) enum Next {
    /// Another engine gets this body.
    Send(EditedBody),
    /// The text has reached `max_tokens`; the field is that limit.
    AtLimit(u64),
}

/// Positions of the members that change.
#[derive(Debug, Default)]
struct Members {
    /// The offset after the opening brace.
    open: usize,
    /// The offset of the bracket that closes the list of messages, and whether the list has any.
    messages: Option<(usize, bool)>,
    /// The value of a prompt that is one string.
    prompt: Option<Span>,
    /// Limits on output tokens, by name.
    limits: SmallVec<[(Limit, Span, u64); 2]>,
    stops: Vec<String>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Limit {
    Tokens,
    CompletionTokens,
    Least,
}

/// The step that continues `answer`, the answer to the request `body`. A message of Anthropic's
/// form is continued as a chat.
pub(in crate::flow) fn next(route: Route, body: &Bytes, answer: &Answer) -> Result<Next, NotContinued> {
    if route == Route::Messages {
        return next(Route::ChatCompletions, &messages::as_chat(body)?, answer);
    }
    let members = members(body).map_err(|_| NotContinued::Unreadable)?;
    if members.stops.iter().any(|stop| answer.ends_within(stop)) {
        return Err(NotContinued::StopPrefix);
    }
    let is_chat = route == Route::ChatCompletions;
    let limit = |kind: Limit| members.limits.iter().rfind(|(found, ..)| *found == kind).map(|(.., value)| *value);
    let most = match is_chat {
        true => limit(Limit::CompletionTokens).or(limit(Limit::Tokens)),
        false => limit(Limit::Tokens).or(Some(COMPLETIONS_DEFAULT_OUTPUT)),
    };
    // With stop strings, the engine holds text back. The tokens of the held text are counted, but
    // the client does not have the text, so the answer is not at the limit yet.
    let spent = match most {
        Some(most) if members.stops.is_empty() && most <= answer.tokens => return Ok(Next::AtLimit(most)),
        Some(most) => answer.tokens.min(most.saturating_sub(1)),
        None => answer.tokens,
    };
    let mut patches = Patches::new();
    let at = |at: usize| Span { start: at, end: at };
    let mut front = String::new();
    let quoted = serde_json::Value::from(answer.text.as_str()).to_string();
    match (is_chat, members.messages, members.prompt) {
        // Without text there is nothing to continue: the engine begins again.
        _ if answer.text.is_empty() => {}
        (true, Some((end, has_messages)), _) => {
            let comma = if has_messages { "," } else { "" };
            patches.push((at(end), format!("{comma}{{\"role\":\"assistant\",\"content\":{quoted}}}")));
            front.push_str("\"continue_final_message\":true,\"add_generation_prompt\":false,");
        }
        (false, _, Some(prompt)) => {
            patches.push((at(prompt.end - 1), quoted[1..quoted.len() - 1].to_owned()));
        }
        _ => return Err(NotContinued::Unreadable),
    }
    for (_, span, value) in &members.limits {
        patches.push((*span, value.saturating_sub(spent).to_string()));
    }
    if !is_chat && limit(Limit::Tokens).is_none() {
        front.push_str(&format!("\"max_tokens\":{},", COMPLETIONS_DEFAULT_OUTPUT - spent));
    }
    patches.push((at(members.open), front));
    let body = Bytes::from(patch::applied(body, patches));
    let view = request::read(route, &body).map_err(|_| NotContinued::Unreadable)?;
    Ok(Next::Send(EditedBody::new(&body, &view.edits, Edits::default())))
}

pub(in crate::flow) fn has_stop(route: Route, body: &Bytes) -> bool {
    match route {
        Route::Messages => messages::as_chat(body).is_ok_and(|chat| has_stop(Route::ChatCompletions, &chat)),
        _ => members(body).is_ok_and(|members| !members.stops.is_empty()),
    }
}

fn members(body: &[u8]) -> Result<Members, ScanError> {
    let mut members = Members::default();
    let mut scanner = Scanner::new(body);
    scanner.kind()?;
    members.open = scanner.position() + 1;
    scanner.object(|scanner, key| {
        let kind = scanner.kind()?;
        let start = scanner.position();
        let limit = match &*key.bytes() {
            b"messages" if kind == JsonKind::Array => {
                let mut has_messages = false;
                let span = scanner.array(|scanner| {
                    has_messages = true;
                    scanner.skip().map(drop)
                })?;
                members.messages = Some((span.end - 1, has_messages));
                return Ok::<_, ScanError>(());
            }
            b"prompt" => {
                let end = scanner.skip()?.end;
                members.prompt = (kind == JsonKind::String).then_some(Span { start, end });
                return Ok(());
            }
            b"stop" => {
                members.stops = stops(scanner, kind)?;
                return Ok(());
            }
            b"max_tokens" => Limit::Tokens,
            b"max_completion_tokens" => Limit::CompletionTokens,
            b"min_tokens" => Limit::Least,
            _ => return scanner.skip().map(drop),
        };
        // A later member of the same name replaces an earlier one, also with null.
        let end = scanner.skip()?.end;
        members.limits.retain(|(found, ..)| *found != limit);
        let text = std::str::from_utf8(&body[start..end]).unwrap_or_default().trim_matches('"').trim();
        let value = text.parse::<u64>().ok().or_else(|| text.parse::<f64>().ok().map(|value| value as u64));
        members.limits.extend(value.map(|value| (limit, Span { start, end }, value)));
        Ok(())
    })?;
    Ok(members)
}

fn stops(scanner: &mut Scanner<'_>, kind: JsonKind) -> Result<Vec<String>, ScanError> {
    let mut stops = Vec::new();
    match kind {
        JsonKind::String => stops.push(scanner.text()?.decode().into_owned()),
        JsonKind::Array => {
            scanner.array(|scanner| {
                match scanner.kind()? {
                    JsonKind::String => stops.push(scanner.text()?.decode().into_owned()),
                    _ => drop(scanner.skip()?),
                }
                Ok::<_, ScanError>(())
            })?;
        }
        _ => drop(scanner.skip()?),
    }
    Ok(stops)
}

/// The events with which the gateway itself ends an answer.
#[derive(Clone, Copy, Debug)]
pub(in crate::flow) struct Ended {
    /// The text has reached `max_tokens`, but the engine has not given a finish reason.
    pub(in crate::flow) at_limit: bool,
    /// Prompt and completion tokens, if the client wants them.
    pub(in crate::flow) usage: Option<(u64, u64)>,
}

impl Ended {
    /// The events for the client.
    pub(in crate::flow) fn events(self, route: Route, identity: &Identity) -> Bytes {
        let Identity { id, object, created, model, message } = identity;
        if let Some(message) = message {
            let end = |usage| message.end("max_tokens", &serde_json::Value::Null, usage);
            let end = self.usage.filter(|_| self.at_limit).map(end);
            return Bytes::from(end.unwrap_or_default() + &messages::stop());
        }
        let head =
            format!("data: {{\"id\":{id},\"object\":{object},\"created\":{created},\"model\":{model},\"choices\":[");
        let mut events = String::new();
        if self.at_limit {
            let output = if route == Route::ChatCompletions { "\"delta\":{}" } else { "\"text\":\"\"" };
            events += &format!("{head}{{\"index\":0,{output},\"logprobs\":null,\"finish_reason\":\"length\"}}]}}\n\n");
        }
        if let Some((prompt, completion)) = self.usage {
            let total = prompt + completion;
            events += &format!(
                "{head}],\"usage\":{{\"prompt_tokens\":{prompt},\"total_tokens\":{total},\
                 \"completion_tokens\":{completion}}}}}\n\n"
            );
        }
        Bytes::from(events + "data: [DONE]\n\n")
    }
}

#[cfg(test)]
mod tests {
    use super::super::answer::tests::kept;
    use super::*;
    use serde_json::{Value, json};
    use sluice_core::meter::{StreamMeter, Strip};
    use sluice_core::openai::{Dialect, FinishReason};

    fn answer(text: &str, tokens: u64) -> Answer {
        Answer { text: text.to_owned(), blanks: String::new(), tokens, has_part: false }
    }

    fn sent(route: Route, body: Value, answer: &Answer) -> Value {
        match next(route, &Bytes::from(body.to_string()), answer).unwrap() {
            Next::Send(body) => serde_json::from_slice(&body.to_bytes()).unwrap(),
            Next::AtLimit(_) => Value::Null,
        }
    }

    #[test]
    fn a_chat_gets_the_text_as_the_message_to_continue() {
        let user = json!({"role": "user", "content": "hi"});
        let text = "it said \"水\"\n\t😀 and";
        let body =
            json!({"model": "m", "messages": [user], "max_tokens": 9, "min_tokens": 2, "max_completion_tokens": 8});
        let want = json!({
            "model": "m", "messages": [user, {"role": "assistant", "content": text}], "max_tokens": 4, "min_tokens": 0,
            "max_completion_tokens": 3, "continue_final_message": true, "add_generation_prompt": false,
        });
        assert_eq!(sent(Route::ChatCompletions, body, &answer(text, 5)), want);
        let unlimited = json!({"messages": []});
        let want = json!({"messages": [{"role": "assistant", "content": "x"}], "continue_final_message": true,
            "add_generation_prompt": false});
        assert_eq!(sent(Route::ChatCompletions, unlimited, &answer("x", 5)), want);
    }

    #[test]
    fn a_completion_gets_the_text_behind_its_prompt() {
        let body = json!({"prompt": "say \"é\": ", "max_tokens": 20});
        let want = json!({"prompt": "say \"é\": \"😀\\ ", "max_tokens": 18});
        assert_eq!(sent(Route::Completions, body, &answer("\"😀\\ ", 2)), want);
        let short = json!({"prompt": "p"});
        assert_eq!(
            sent(Route::Completions, short, &answer("x", 3)),
            json!({"prompt": "px", "max_tokens": COMPLETIONS_DEFAULT_OUTPUT - 3})
        );
    }

    #[test]
    fn without_text_the_request_is_sent_again() {
        let body = json!({"messages": [{"role": "user", "content": "hi"}], "max_tokens": 7});
        assert_eq!(sent(Route::ChatCompletions, body.clone(), &answer("", 0)), body);
    }

    #[test]
    fn nothing_is_sent_at_the_limit() {
        for (route, body, tokens, limit) in [
            (Route::ChatCompletions, json!({"messages": [], "max_tokens": 5}), 5, 5),
            (Route::ChatCompletions, json!({"messages": [], "max_tokens": 50, "max_completion_tokens": 4}), 5, 4),
            (Route::Completions, json!({"prompt": "p"}), COMPLETIONS_DEFAULT_OUTPUT, COMPLETIONS_DEFAULT_OUTPUT),
        ] {
            assert_eq!(
                next(route, &Bytes::from(body.to_string()), &answer("x", tokens)),
                Ok(Next::AtLimit(limit)),
                "{body}"
            );
        }
    }

    #[test]
    fn a_text_at_the_limit_goes_on_if_a_stop_string_held_text_back() {
        let body = json!({"messages": [], "max_tokens": 5, "stop": "END"});
        assert_eq!(sent(Route::ChatCompletions, body.clone(), &answer("x", 5))["max_tokens"], 1);
        assert_eq!(sent(Route::ChatCompletions, body.clone(), &answer("x", 3))["max_tokens"], 2);
        let of = |route, body: Value| has_stop(route, &Bytes::from(body.to_string()));
        assert!(of(Route::ChatCompletions, body) && !of(Route::Completions, json!({"prompt": "p", "stop": []})));
        assert!(of(Route::Messages, json!({"messages": [], "stop_sequences": ["END"]})));
        assert!(!of(Route::Messages, json!({"messages": []})));
    }

    #[test]
    fn the_last_of_two_members_counts_and_words_are_numbers_as_in_python() {
        let body = r#"{"messages":[1],"max_tokens":1,"messages":[],"max_tokens":"9","min_tokens":null}"#;
        let Next::Send(sent) = next(Route::ChatCompletions, &Bytes::from(body), &answer("x", 2)).unwrap() else {
            panic!("there is room")
        };
        let text = String::from_utf8(sent.to_bytes().to_vec()).unwrap();
        assert!(
            text.ends_with(
                r#""messages":[1],"max_tokens":1,"messages":[{"role":"assistant","content":"x"}],"max_tokens":7,"min_tokens":null}"#
            ),
            "{text}"
        );
    }

    #[test]
    fn a_text_that_ends_within_a_stop_string_is_not_continued() {
        for stop in [json!("END"), json!(["x", "END"])] {
            let body = Bytes::from(json!({"messages": [], "stop": stop}).to_string());
            assert_eq!(next(Route::ChatCompletions, &body, &answer("the E", 1)), Err(NotContinued::StopPrefix));
            assert!(next(Route::ChatCompletions, &body, &answer("the e", 1)).is_ok());
        }
    }

    #[test]
    fn the_gateway_ends_an_answer_with_finish_reason_usage_and_end() {
        let identity = Identity::of(&kept(&["a"]), Route::ChatCompletions, true).unwrap();
        let ended = Ended { at_limit: true, usage: Some((9, 5)) };
        let mut meter = StreamMeter::new(Dialect::Choices, tokio::time::Instant::now(), Strip::Nothing);
        meter.feed(ended.events(Route::ChatCompletions, &identity), tokio::time::Instant::now());
        let stats = meter.stats();
        assert_eq!((stats.answer.finish, stats.done), (Some(FinishReason::Length), true));
        assert_eq!((stats.usage.prompt, stats.usage.completion), (Some(9), Some(5)));
        let only_end = Ended { at_limit: false, usage: None }.events(Route::Completions, &identity);
        assert_eq!(only_end, "data: [DONE]\n\n");
    }
}
