//! The seam of an answer: makes the events of an engine that continues a text a part of the answer
//! that another engine began.
//!
//! - `id` and `created` are replaced by the first answer's; `model` must be equal.
//! - The role is left out, because the client has it.
//! - Blanks that the request left out (`answer.rs`) are taken off the beginning.
//! - A message of Anthropic's form gets events of its own form (`messages.rs`).
//! - `usage` counts the whole: the prompt as the client sent it, and the tokens of both engines.
//!
//! The meter reads the changed events, so it measures one answer. All other bytes pass
//! unchanged. Bound: the scanner's longest event.

use bytes::Bytes;

use super::answer::{Answer, Identity};
use super::messages;
use sluice_core::openai::NotContinued;
use sluice_core::openai::patch::{self, MemberSpan, Patches};
use sluice_core::openai::scan::{JsonKind, ScanError, Scanner, Span};
use sluice_core::openai::sse::{Fields, RawEvent, Scanned, SseScanner};

/// The state of one seam, from the first event of the continuation on.
#[derive(Debug)]
pub(in crate::flow) struct Seam {
    identity: Identity,
    sse: SseScanner,
    /// Blanks that the engine is still expected to generate, and the client already has.
    expected: String,
    /// Tokens of the text in the request, counted as output of the first engine.
    spent: u64,
    /// Tokens of the text in the request, counted as part of the prompt.
    in_prompt: u64,
    /// Prompt tokens of the request as the client sent it, if an engine has counted them.
    prompt: Option<u64>,
    has_token: bool,
    /// The client gets the events of a message of Anthropic's form.
    messages: Option<messages::Events>,
}

/// An event of the continuation.
enum Event {
    /// The client must not get it.
    LeftOut,
    Unchanged,
    Changed(Vec<u8>),
}

/// Facts about the choice in an event.
#[derive(Default)]
struct Choice {
    has_text: bool,
    /// The event has a role, or blanks that were taken off.
    lost_text: bool,
    has_more: bool,
    role: Option<MemberSpan>,
}

/// Facts of an event that the client may get.
#[derive(Default)]
struct Reading {
    patches: Patches,
    choice: Choice,
    has_choices: bool,
    has_usage: bool,
    fault: Option<NotContinued>,
}

impl Seam {
    /// A seam after `answer`. `prompt`: the prompt tokens, if they are known.
    pub(in crate::flow) fn new(identity: Identity, answer: Answer, prompt: Option<u64>) -> Self {
        let Answer { blanks, tokens, has_part, .. } = answer;
        let in_prompt = tokens + u64::from(has_part);
        let messages = identity.message.clone().map(messages::Events::new);
        Self {
            identity,
            sse: SseScanner::new(),
            expected: blanks,
            spent: tokens,
            in_prompt,
            prompt,
            has_token: false,
            messages,
        }
    }

    pub(in crate::flow) fn prompt(&self) -> Option<u64> {
        self.prompt
    }

    /// Sets the prompt tokens of the request as the client sent it.
    pub(in crate::flow) fn set_prompt(&mut self, tokens: u64) {
        self.prompt = Some(tokens);
    }

    pub(in crate::flow) fn set_spent(&mut self, answer: &Answer) {
        (self.spent, self.in_prompt) = (answer.tokens, answer.tokens + u64::from(answer.has_part));
    }

    pub(in crate::flow) fn has_token(&self) -> bool {
        self.has_token
    }

    /// Takes a chunk of the continuation, and returns the whole events for the client. An error
    /// says why the continuation does not fit; the client has received no part that does not fit.
    pub(in crate::flow) fn feed(&mut self, chunk: &[u8]) -> Result<Bytes, NotContinued> {
        let mut sse = std::mem::take(&mut self.sse);
        let (mut out, mut failed) = (Vec::with_capacity(chunk.len()), None);
        sse.feed(chunk, |found| {
            if failed.is_none() {
                failed = match found {
                    Scanned::Event(raw) if !raw.oversize => self.event(&raw, &mut out).err(),
                    _ => Some(NotContinued::Unreadable),
                };
            }
        });
        sse.release();
        self.sse = sse;
        failed.map_or(Ok(out.into()), Err)
    }

    fn event(&mut self, raw: &RawEvent<'_>, out: &mut Vec<u8>) -> Result<(), NotContinued> {
        let fields = Fields::of(raw.bytes);
        let data = fields.data.as_deref().unwrap_or_default();
        let changed = match data.trim_ascii().first() {
            Some(b'{') => self.rewritten(data),
            _ => Ok(Event::Unchanged),
        };
        let changed = changed?;
        if let Some(messages) = self.messages.as_mut().filter(|_| fields.data.is_some()) {
            match &changed {
                Event::LeftOut => {}
                Event::Unchanged => out.extend_from_slice(messages.of(data)?.as_bytes()),
                Event::Changed(data) => out.extend_from_slice(messages.of(data)?.as_bytes()),
            }
            return Ok(());
        }
        match changed {
            Event::LeftOut => {}
            Event::Unchanged => out.extend_from_slice(raw.bytes),
            Event::Changed(data) => {
                if let Some(name) = fields.name {
                    out.extend_from_slice(&[b"event: ", name, b"\n"].concat());
                }
                out.extend_from_slice(b"data: ");
                out.extend_from_slice(&data);
                out.extend_from_slice(b"\n\n");
            }
        }
        Ok(())
    }

    fn rewritten(&mut self, data: &[u8]) -> Result<Event, NotContinued> {
        let mut reading = Reading::default();
        if self.read(data, &mut reading).is_err() {
            // An event that the gateway cannot read passes as it is, as in any stream.
            return Ok(Event::Unchanged);
        }
        let Reading { mut patches, choice, has_choices, has_usage, fault } = reading;
        if let Some(why) = fault {
            return Err(why);
        }
        self.has_token |= choice.has_text || choice.has_more;
        if has_choices && choice.lost_text && !choice.has_text && !choice.has_more && !has_usage {
            return Ok(Event::LeftOut);
        }
        patches.extend(choice.role.map(|role| (role.removal(data), String::new())));
        Ok(Event::Changed(patch::applied(data, patches)))
    }

    fn read(&mut self, data: &[u8], reading: &mut Reading) -> Result<(), ScanError> {
        Scanner::new(data).object(|scanner, key| {
            let kind = scanner.kind()?;
            match (&*key.bytes(), kind) {
                (b"id", JsonKind::String) if self.messages.is_none() => {
                    reading.patches.push((scanner.skip()?, self.identity.id.clone()))
                }
                (b"created", JsonKind::Number) if self.messages.is_none() => {
                    reading.patches.push((scanner.skip()?, self.identity.created.clone()));
                }
                (b"model", JsonKind::String) => {
                    if scanner.skip_raw()? != self.identity.model.as_bytes() {
                        reading.fault = Some(NotContinued::OtherModel);
                    }
                }
                (b"usage", JsonKind::Object) => {
                    reading.has_usage = true;
                    self.usage(scanner, &mut reading.patches)?;
                }
                (b"choices", JsonKind::Array) => {
                    scanner.array(|scanner| {
                        reading.has_choices = true;
                        self.choice(scanner, reading)
                    })?;
                }
                _ => drop(scanner.skip()?),
            }
            Ok::<_, ScanError>(())
        })?;
        Ok(())
    }

    fn choice(&mut self, scanner: &mut Scanner<'_>, reading: &mut Reading) -> Result<(), ScanError> {
        scanner.object(|scanner, key| {
            let kind = scanner.kind()?;
            match (&*key.bytes(), kind) {
                (b"text", JsonKind::String) => self.text(scanner, reading)?,
                (b"finish_reason", JsonKind::String) => {
                    reading.choice.has_more = true;
                    scanner.skip()?;
                }
                (b"delta", JsonKind::Object) => self.delta(scanner, reading)?,
                _ => drop(scanner.skip()?),
            }
            Ok::<_, ScanError>(())
        })?;
        Ok(())
    }

    fn delta(&mut self, scanner: &mut Scanner<'_>, reading: &mut Reading) -> Result<(), ScanError> {
        let (mut before, mut is_first) = (scanner.position() + 1, true);
        scanner.object(|scanner, key| {
            let kind = scanner.kind()?;
            match &*key.bytes() {
                b"content" if kind == JsonKind::String => self.text(scanner, reading)?,
                b"content" => drop(scanner.skip()?),
                b"role" => {
                    let span = Span { start: before, end: scanner.skip()?.end };
                    reading.choice.role = Some(MemberSpan { span, is_first });
                    reading.choice.lost_text = true;
                }
                _ => reading.choice.has_more |= scanner.skip_raw()?.len() > 2 && kind != JsonKind::Null,
            }
            (before, is_first) = (scanner.position(), false);
            Ok::<_, ScanError>(())
        })?;
        Ok(())
    }

    /// Takes the text of an event, without blanks that the client has.
    fn text(&mut self, scanner: &mut Scanner<'_>, reading: &mut Reading) -> Result<(), ScanError> {
        scanner.kind()?;
        let start = scanner.position();
        let text = scanner.text()?;
        if text.raw.is_empty() {
            return Ok(());
        }
        self.has_token = true;
        if self.expected.is_empty() {
            reading.choice.has_text = true;
            return Ok(());
        }
        let decoded = text.decode();
        let known = decoded.chars().zip(self.expected.chars()).take_while(|(one, other)| one == other);
        let known: usize = known.map(|(one, _)| one.len_utf8()).sum();
        let rest = &decoded[known..];
        if !rest.is_empty() && known < self.expected.len() {
            reading.fault = Some(NotContinued::Differs);
            return Ok(());
        }
        self.expected.drain(..known);
        reading.choice.lost_text = true;
        reading.choice.has_text = !rest.is_empty();
        let value = serde_json::Value::from(rest).to_string();
        reading.patches.push((Span { start, end: scanner.position() }, value));
        Ok(())
    }

    /// Replaces the numbers of a usage by the numbers of the whole answer.
    fn usage(&mut self, scanner: &mut Scanner<'_>, patches: &mut Patches) -> Result<(), ScanError> {
        let mut counts = [(0, None); 3];
        scanner.object(|scanner, key| {
            let which = [&b"prompt_tokens"[..], b"completion_tokens", b"total_tokens"];
            match which.iter().position(|name| *name == &*key.bytes()) {
                Some(which) if scanner.kind()? == JsonKind::Number => {
                    let start = scanner.position();
                    let number = std::str::from_utf8(scanner.number()?).ok().and_then(|number| number.parse().ok());
                    if let Some(number) = number {
                        counts[which] = (number, Some(Span { start, end: scanner.position() }));
                    }
                }
                _ => drop(scanner.skip()?),
            }
            Ok::<_, ScanError>(())
        })?;
        let [(prompt, _), (completion, _), _]: [(u64, _); 3] = counts;
        let prompt = *self.prompt.get_or_insert(prompt.saturating_sub(self.in_prompt));
        let whole = [prompt, completion + self.spent, prompt + completion + self.spent];
        for ((_, span), whole) in counts.into_iter().zip(whole) {
            patches.extend(span.map(|span| (span, whole.to_string())));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::super::answer::tests::kept;
    use super::*;
    use proptest::prelude::*;
    use serde_json::{Value, json};
    use sluice_core::openai::Route;

    fn seam(blanks: &str) -> Seam {
        let answer = Answer { text: "a".to_owned(), blanks: blanks.to_owned(), tokens: 5, has_part: false };
        Seam::new(Identity::of(&kept(&["a"]), Route::ChatCompletions, true).unwrap(), answer, None)
    }

    fn event(delta: &Value, finish: &Value) -> Vec<u8> {
        let event = json!({"id": "chatcmpl-r2", "object": "chat.completion.chunk", "created": 99, "model": "m",
            "choices": [{"index": 0, "delta": delta, "finish_reason": finish}]});
        format!("data: {event}\n\n").into_bytes()
    }

    fn usage() -> Vec<u8> {
        let usage = r#"{"prompt_tokens":25,"total_tokens":32,"completion_tokens":7,"prompt_tokens_details":{"cached_tokens":16}}"#;
        format!("data: {{\"id\":\"x\",\"created\":9,\"model\":\"m\",\"choices\":[],\"usage\":{usage}}}\n\n")
            .into_bytes()
    }

    /// The data of the events that pass, and the texts that they have together.
    fn passed(seam: &mut Seam, chunks: &[&[u8]]) -> Result<(Vec<Value>, String), NotContinued> {
        let mut bytes = Vec::new();
        for chunk in chunks {
            bytes.extend_from_slice(&seam.feed(chunk)?);
        }
        let text = String::from_utf8(bytes).unwrap();
        let data = text.split("\n\n").filter_map(|event| event.strip_prefix("data: "));
        let events: Vec<Value> = data.filter_map(|data| serde_json::from_str(data).ok()).collect();
        let texts = events.iter().filter_map(|event| event["choices"][0]["delta"]["content"].as_str());
        let whole = texts.collect();
        Ok((events, whole))
    }

    #[test]
    fn events_get_the_identity_of_the_answer_and_no_second_role() {
        let role = event(&json!({"role": "assistant", "content": ""}), &Value::Null);
        let mut seam = seam("");
        assert!(seam.feed(&role).unwrap().is_empty() && !seam.has_token());
        let (events, text) = passed(&mut seam, &[&event(&json!({"content": " b"}), &Value::Null)]).unwrap();
        assert!(seam.has_token());
        assert_eq!((text.as_str(), &events[0]["id"], &events[0]["created"]), (" b", &json!("c-1"), &json!(7)));
        for delta in [
            r#"{"role":"assistant","content":"x"}"#,
            r#"{"content":"x","role":"assistant"}"#,
            r#"{ "content" : "x" , "role" : "assistant" , "y" : null }"#,
            r#"{"role":"assistant" ,"content":"x"}"#,
        ] {
            let raw =
                format!("data: {{\"id\":\"i\",\"model\":\"m\",\"choices\":[{{\"index\":0,\"delta\":{delta}}}]}}\n\n");
            let (events, text) = passed(&mut seam, &[raw.as_bytes()]).unwrap();
            assert_eq!((text.as_str(), events[0]["choices"][0]["delta"].get("role")), ("x", None), "{delta}");
        }
        let last = event(&json!({"role": "assistant"}), &json!("stop"));
        let (events, _) = passed(&mut seam, &[&last, b"data: [DONE]\n\n"]).unwrap();
        assert_eq!(events[0]["choices"][0], json!({"index": 0, "delta": {}, "finish_reason": "stop"}));
    }

    #[test]
    fn usage_is_the_prompt_as_first_sent_and_the_sum_of_the_tokens() {
        for (known, prompt) in [(None, 20), (Some(21), 21)] {
            let mut seam = seam("");
            seam.prompt = known;
            let (events, _) = passed(&mut seam, &[&usage()]).unwrap();
            let want = json!({"prompt_tokens": prompt, "total_tokens": prompt + 12, "completion_tokens": 12,
                "prompt_tokens_details": {"cached_tokens": 16}});
            assert_eq!(events[0]["usage"], want);
        }
    }

    #[test]
    fn blanks_that_the_client_has_are_taken_off_the_beginning() {
        for (blanks, pieces, rest) in [
            ("\n\n", &["\n", "\n", "b"][..], "b"),
            ("\n\n", &["\n\nb", "c"], "bc"),
            (" \u{3000}", &[" ", "\u{3000}\n"], "\n"),
            ("", &["\n"], "\n"),
        ] {
            let events: Vec<Vec<u8>> =
                pieces.iter().map(|text| event(&json!({"content": text}), &Value::Null)).collect();
            let chunks: Vec<&[u8]> = events.iter().map(Vec::as_slice).collect();
            assert_eq!(passed(&mut seam(blanks), &chunks).unwrap().1, rest, "{blanks:?} {pieces:?}");
        }
        for pieces in [&["b"][..], &["\n", "b"], &["\n b"]] {
            let events: Vec<Vec<u8>> =
                pieces.iter().map(|text| event(&json!({"content": text}), &Value::Null)).collect();
            let chunks: Vec<&[u8]> = events.iter().map(Vec::as_slice).collect();
            assert_eq!(passed(&mut seam("\n\n"), &chunks), Err(NotContinued::Differs), "{pieces:?}");
        }
    }

    #[test]
    fn an_answer_under_another_model_name_does_not_fit() {
        let other = String::from_utf8(event(&json!({"content": "x"}), &Value::Null)).unwrap().replace("\"m\"", "\"n\"");
        assert_eq!(seam("").feed(other.as_bytes()), Err(NotContinued::OtherModel));
    }

    proptest! {
        #[test]
        fn chunks_may_split_anywhere(cuts in prop::collection::vec(0..700_usize, 0..6)) {
            let parts = [
                event(&json!({"role": "assistant", "content": ""}), &Value::Null),
                b": ping\n\n".to_vec(),
                event(&json!({"content": "\n水"}), &Value::Null),
                event(&json!({"content": "😀\"\\"}), &json!("stop")),
                usage(),
                b"data: [DONE]\n\n".to_vec(),
            ];
            let whole = parts.concat();
            let mut cuts: Vec<usize> = cuts.into_iter().map(|cut| cut.min(whole.len())).collect();
            cuts.extend([0, whole.len()]);
            cuts.sort_unstable();
            let chunks: Vec<&[u8]> = cuts.windows(2).map(|pair| &whole[pair[0]..pair[1]]).collect();
            let once = passed(&mut seam("\n"), &[&whole]).unwrap();
            prop_assert_eq!(&once.1, "水😀\"\\");
            prop_assert_eq!(passed(&mut seam("\n"), &chunks).unwrap(), once);
        }
    }
}
