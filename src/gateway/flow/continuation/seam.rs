//! The seam of an answer: makes the events of an engine that continues a text a part of the answer
//! that another engine began.
//!
//! - `id` and `created` become the first answer's; `model` must be equal.
//! - The role is left out, because the client has it.
//! - Blanks that the request left out (`answer.rs`) are taken off the beginning.
//! - `usage` counts the whole: the prompt as the client sent it, and the tokens of both engines.
//!
//! The meter reads the events after this, so the answer is measured as one. All other bytes pass
//! unchanged. Bound: the scanner's longest event.

use bytes::Bytes;
use smallvec::SmallVec;

use super::answer::{Answer, Identity};
use sluice_core::openai::NotContinued;
use sluice_core::openai::scan::{JsonKind, ScanError, Scanner, Span};
use sluice_core::openai::sse::{Fields, RawEvent, Scanned, SseScanner};

/// The state of one seam, from the first event of the continuation on.
#[derive(Debug)]
pub(in crate::flow) struct Seam {
    identity: Identity,
    sse: SseScanner,
    /// Blanks that the engine is still expected to generate, and the client already has.
    expected: String,
    /// Tokens of the text that the request had, and how many of the prompt's tokens these are.
    spent: u64,
    in_prompt: u64,
    /// Prompt tokens of the request as the client sent it, if the first engine has reported them.
    prompt: Option<u64>,
    has_token: bool,
}

/// An event behind the seam.
enum Event {
    /// The client must not get it.
    LeftOut,
    Unchanged,
    Changed(Vec<u8>),
}

type Patches = SmallVec<[(Span, Vec<u8>); 6]>;

/// Facts of the choice of an event.
#[derive(Default)]
struct Choice {
    has_text: bool,
    /// The event has a role, or blanks that were taken off.
    lost_text: bool,
    has_more: bool,
    /// The role with the comma before it, and whether it is the first member, without a comma.
    role: Option<(Span, bool)>,
}

impl Choice {
    /// The bytes to remove so that the rest is valid.
    fn role_in(&self, data: &[u8]) -> Option<Span> {
        let (span, is_first) = self.role?;
        let blanks = data[span.end..].iter().take_while(|byte| byte.is_ascii_whitespace()).count();
        match is_first && data.get(span.end + blanks) == Some(&b',') {
            true => Some(Span { end: span.end + blanks + 1, ..span }),
            false => Some(span),
        }
    }
}

impl Seam {
    /// A seam behind `answer`. `prompt`: the prompt tokens, if they are known.
    pub(in crate::flow) fn new(identity: Identity, answer: Answer, prompt: Option<u64>) -> Self {
        let Answer { blanks, tokens, has_part, .. } = answer;
        let in_prompt = tokens + u64::from(has_part);
        Self { identity, sse: SseScanner::new(), expected: blanks, spent: tokens, in_prompt, prompt, has_token: false }
    }

    /// Whether the engine has generated a token.
    pub(in crate::flow) fn has_token(&self) -> bool {
        self.has_token
    }

    /// Takes a chunk of the continuation, and returns the whole events for the client. An error
    /// says why the continuation does not fit; the client has nothing of it that is wrong.
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
        match changed? {
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
        let mut patches = Patches::new();
        let (mut choice, mut has_usage, mut has_choices, mut fault) = (Choice::default(), false, false, None);
        let read = Scanner::new(data).object(|scanner, key| {
            let kind = scanner.kind()?;
            let start = scanner.position();
            match (&*key.bytes(), kind) {
                (b"id", JsonKind::String) => patches.push((scanner.skip()?, self.identity.id.clone())),
                (b"created", JsonKind::Number) => patches.push((scanner.skip()?, self.identity.created.clone())),
                (b"model", JsonKind::String) => {
                    if scanner.skip_raw()? != self.identity.model {
                        fault = Some(NotContinued::OtherModel);
                    }
                }
                (b"usage", JsonKind::Object) => {
                    has_usage = true;
                    let raw = scanner.skip_raw()?;
                    patches.push((Span { start, end: start + raw.len() }, self.usage(raw)?));
                }
                (b"choices", JsonKind::Array) => {
                    scanner.array(|scanner| {
                        has_choices = true;
                        self.choice(scanner, &mut choice, &mut patches, &mut fault)
                    })?;
                }
                _ => drop(scanner.skip()?),
            }
            Ok::<_, ScanError>(())
        });
        if read.is_err() {
            // An event that the gateway cannot read passes as it is, as in any stream.
            return Ok(Event::Unchanged);
        }
        if let Some(why) = fault {
            return Err(why);
        }
        self.has_token |= choice.has_text || choice.has_more;
        if has_choices && choice.lost_text && !choice.has_text && !choice.has_more && !has_usage {
            return Ok(Event::LeftOut);
        }
        patches.extend(choice.role_in(data).map(|span| (span, Vec::new())));
        patches.sort_by_key(|(span, _)| span.start);
        let (mut out, mut at) = (Vec::with_capacity(data.len() + 64), 0);
        for (span, value) in &patches {
            out.extend_from_slice(&data[at..span.start]);
            out.extend_from_slice(value);
            at = span.end;
        }
        out.extend_from_slice(&data[at..]);
        Ok(Event::Changed(out))
    }

    fn choice(
        &mut self,
        scanner: &mut Scanner<'_>,
        choice: &mut Choice,
        patches: &mut Patches,
        fault: &mut Option<NotContinued>,
    ) -> Result<(), ScanError> {
        scanner.object(|scanner, key| {
            let kind = scanner.kind()?;
            match (&*key.bytes(), kind) {
                (b"text", JsonKind::String) => self.text(scanner, choice, patches, fault)?,
                (b"finish_reason", JsonKind::String) => {
                    choice.has_more = true;
                    scanner.skip()?;
                }
                (b"delta", JsonKind::Object) => {
                    let (mut before, mut is_first) = (scanner.position() + 1, true);
                    scanner.object(|scanner, key| {
                        let kind = scanner.kind()?;
                        match &*key.bytes() {
                            b"content" if kind == JsonKind::String => self.text(scanner, choice, patches, fault)?,
                            b"content" => drop(scanner.skip()?),
                            b"role" => {
                                let end = scanner.skip()?.end;
                                choice.role = Some((Span { start: before, end }, is_first));
                                choice.lost_text = true;
                            }
                            _ => choice.has_more |= scanner.skip_raw()?.len() > 2 && kind != JsonKind::Null,
                        }
                        (before, is_first) = (scanner.position(), false);
                        Ok::<_, ScanError>(())
                    })?;
                }
                _ => drop(scanner.skip()?),
            }
            Ok::<_, ScanError>(())
        })?;
        Ok(())
    }

    /// Takes the text of an event, without blanks that the client has.
    fn text(
        &mut self,
        scanner: &mut Scanner<'_>,
        choice: &mut Choice,
        patches: &mut Patches,
        fault: &mut Option<NotContinued>,
    ) -> Result<(), ScanError> {
        scanner.kind()?;
        let start = scanner.position();
        let text = scanner.text()?;
        if text.raw.is_empty() {
            return Ok(());
        }
        self.has_token = true;
        if self.expected.is_empty() {
            choice.has_text = true;
            return Ok(());
        }
        let decoded = text.decode();
        let known = decoded.chars().zip(self.expected.chars()).take_while(|(one, other)| one == other);
        let known: usize = known.map(|(one, _)| one.len_utf8()).sum();
        let rest = &decoded[known..];
        if !rest.is_empty() && known < self.expected.len() {
            *fault = Some(NotContinued::Differs);
            return Ok(());
        }
        self.expected.drain(..known);
        choice.lost_text = true;
        choice.has_text = !rest.is_empty();
        let value = serde_json::Value::from(rest).to_string().into_bytes();
        patches.push((Span { start, end: scanner.position() }, value));
        Ok(())
    }

    /// The usage of the whole answer, for the usage of the continuation.
    fn usage(&mut self, raw: &[u8]) -> Result<Vec<u8>, ScanError> {
        let (mut prompt, mut completion) = (0, 0);
        let mut spans: SmallVec<[(Span, usize); 4]> = SmallVec::new();
        Scanner::new(raw).object(|scanner, key| {
            let which = [&b"prompt_tokens"[..], b"completion_tokens", b"total_tokens"];
            let which = which.iter().position(|name| *name == &*key.bytes());
            let kind = scanner.kind()?;
            let span = scanner.skip()?;
            let number = || std::str::from_utf8(span.of(raw)).ok()?.parse::<u64>().ok();
            if let (Some(which), JsonKind::Number, Some(number)) = (which, kind, number()) {
                spans.push((span, which));
                match which {
                    0 => prompt = number,
                    1 => completion = number,
                    _ => {}
                }
            }
            Ok::<_, ScanError>(())
        })?;
        let prompt = *self.prompt.get_or_insert(prompt.saturating_sub(self.in_prompt));
        let whole = [prompt, completion + self.spent, prompt + completion + self.spent];
        let (mut out, mut at) = (Vec::with_capacity(raw.len() + 8), 0);
        for (span, which) in spans {
            out.extend_from_slice(&raw[at..span.start]);
            out.extend_from_slice(whole[which].to_string().as_bytes());
            at = span.end;
        }
        out.extend_from_slice(&raw[at..]);
        Ok(out)
    }
}

#[cfg(test)]
mod tests {
    use super::super::answer::tests::kept;
    use super::*;
    use proptest::prelude::*;
    use serde_json::{Value, json};

    fn seam(blanks: &str) -> Seam {
        let answer = Answer { text: "a".to_owned(), blanks: blanks.to_owned(), tokens: 5, has_part: false };
        Seam::new(Identity::of(&kept(&["a"])).unwrap(), answer, None)
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
