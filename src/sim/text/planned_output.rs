//! The output of one choice, decided when the request arrives: tokens, length and end.
//!
//! The length is exactly the limit with `ignore_eos`. Otherwise it is drawn from a log-normal
//! distribution with median [`MEDIAN_TOKENS`] and shape [`SHAPE`] (as in public traces of chats),
//! between `min_tokens` and the limit. The finish reason is `stop` at a drawn length, and `length`
//! at the limit. A stop string or stop token in the text ends the output there. The same prompt
//! gets the same output on every server with the same seed.
//!
//! If the request demands a shape (JSON of a schema, a tool call), the output is a text of that
//! shape and an end-of-sequence token. With `ignore_eos`, or below `min_tokens`, more such tokens
//! follow. A limit cuts the text, as in vLLM.
//!
//! If a prompt ends with the beginning of an output that this server would have given to the prompt
//! before it, the output continues after that beginning ([`begun`]). So an answer that another
//! server continues is the same as without a break.

use std::hash::Hasher;
use std::sync::Arc;

use twox_hash::XxHash3_64;

use super::vocabulary::Vocabulary;
use super::words;
use crate::http::wire::Finish;
use crate::validate::{CalledTool, GenerateRequest, Prompt, ShapedText, TextModel};
use sluice_core::base::Rng;

/// Median of drawn output lengths, tokens.
const MEDIAN_TOKENS: f64 = 180.0;
/// Standard deviation of the logarithm of drawn output lengths.
const SHAPE: f64 = 0.8;

#[derive(Clone, Debug, PartialEq, Eq)]
enum End {
    Length,
    /// With an end-of-sequence token, which has no text.
    Eos,
    /// With a token of `stop_token_ids`, whose text is not shown.
    Token(u32),
    /// With a stop string. Only this many bytes of the text are shown.
    Text(String, usize),
}

/// A given text, token by token.
#[derive(Debug)]
struct Script {
    ids: Vec<u32>,
    pieces: Vec<Box<str>>,
    call: Option<CalledTool>,
}

#[derive(Clone, Debug)]
pub(crate) struct PlannedOutput {
    texts: Arc<TextModel>,
    seed: u64,
    /// The only tokens that the output may have; empty means any token.
    forced: Arc<[u32]>,
    /// The text that replaces the words, if the request demands a shape.
    script: Option<Arc<Script>>,
    /// Number of tokens to generate, without tokens of the output that the prompt already has.
    pub(crate) tokens: u32,
    /// Number of the output's tokens that the prompt has, and the bytes that it has of the next
    /// token.
    begun: (u32, usize),
    end: End,
    /// Trailing characters that are held back until the end, because a stop string may begin in
    /// them.
    pub(crate) held_back: usize,
}

impl PlannedOutput {
    /// Plans an output of at most `limit` tokens. `seed`: the seed of the choice, from [`seed`].
    pub(crate) fn new(texts: &Arc<TextModel>, request: &GenerateRequest, limit: u32, seed: u64) -> Self {
        let eos = texts.vocabulary.eos;
        let limit = limit.max(1);
        let forced: Vec<u32> = request.forced.clone();
        let shaped = request.shape.as_ref().and_then(|shape| shape.text(seed));
        let script = shaped.map(|ShapedText { text, call }| {
            let (ids, pieces) = texts.vocabulary.tokens(&text);
            Arc::new(Script { ids, pieces, call })
        });
        let scripted = script.as_ref().map(|script| script.ids.len() as u32).filter(|_| !request.ignore_eos);
        let (tokens, end) = match scripted {
            Some(tokens) => {
                let tokens = tokens.max(request.min_tokens).saturating_add(1);
                if tokens <= limit { (tokens, End::Eos) } else { (limit, End::Length) }
            }
            None if request.ignore_eos || request.only_echo => (limit, End::Length),
            None if forced.contains(&eos) => ((request.min_tokens.saturating_add(1)).min(limit), End::Eos),
            None if !forced.is_empty() => (limit, End::Length),
            None => drawn(seed, request.min_tokens, limit),
        };
        let held_back = match request.include_stop {
            true => 0,
            false => request.stop.iter().map(|stop| stop.chars().count()).max().unwrap_or(0).saturating_sub(1),
        };
        let (texts, forced, begun) = (Arc::clone(texts), forced.into(), (0, 0));
        let mut output = Self { texts, seed, forced, script, tokens, begun, end, held_back };
        if !request.stop.is_empty() || !request.stop_token_ids.is_empty() {
            output.end_at_stop(request);
        }
        output
    }

    /// Plans the rest of an output of which the prompt has `begun`. `None` if no such output
    /// continues there.
    pub(crate) fn rest(
        texts: &Arc<TextModel>,
        request: &GenerateRequest,
        (limit, seed): (u32, u64),
        begun: &BegunOutput,
    ) -> Option<Self> {
        if request.shape.is_some() || !request.forced.is_empty() {
            return None;
        }
        let least = request.min_tokens.saturating_add(begun.tokens);
        let whole = GenerateRequest { min_tokens: least, ..request.clone() };
        let mut output = Self::new(texts, &whole, limit.saturating_add(begun.tokens), seed);
        output.tokens = output.tokens.checked_sub(begun.tokens).filter(|tokens| *tokens > 0)?;
        output.begun = (begun.tokens, begun.part);
        if let End::Text(_, shown) = &mut output.end {
            *shown = shown.checked_sub(begun.bytes)?;
        }
        Some(output)
    }

    fn end_at_stop(&mut self, request: &GenerateRequest) {
        let mut text = String::new();
        for position in 0..self.tokens {
            let token = self.token(position);
            let before = text.len();
            text.push_str(&self.piece(position));
            if position < request.min_tokens {
                continue;
            }
            if request.stop_token_ids.contains(&token) {
                (self.tokens, self.end) = (position + 1, End::Token(token));
                return;
            }
            // A stop string may have begun before this token.
            let found = request.stop.iter().filter_map(|stop| {
                let longest = text.floor_char_boundary(before.saturating_sub(stop.len()));
                text[longest..].find(stop.as_str()).map(|at| (longest + at, stop))
            });
            if let Some((at, stop)) = found.min_by_key(|(at, _)| *at) {
                let shown = if request.include_stop { at + stop.len() } else { at };
                (self.tokens, self.end) = (position + 1, End::Text(stop.clone(), shown));
                return;
            }
        }
    }

    pub(crate) fn token(&self, position: u32) -> u32 {
        let (position, tokens) = (position + self.begun.0, self.tokens + self.begun.0);
        if let Some(script) = &self.script {
            return script.ids.get(position as usize).copied().unwrap_or(self.texts.vocabulary.eos);
        }
        match (&self.end, self.forced.as_ref()) {
            (End::Eos, _) if position + 1 == tokens => self.texts.vocabulary.eos,
            (_, []) => self.texts.vocabulary.draw(self.seed, position),
            (_, forced) => forced[position as usize % forced.len()],
        }
    }

    pub(crate) fn piece(&self, position: u32) -> std::borrow::Cow<'_, str> {
        let last = position + 1 == self.tokens;
        if let Some(script) = &self.script {
            return script.pieces.get(position as usize).map_or("", |piece| &**piece).into();
        }
        match &self.end {
            End::Eos | End::Token(_) if last => "".into(),
            _ if position == 0 && self.begun.1 > 0 => {
                self.texts.vocabulary.piece(self.token(0))[self.begun.1..].to_owned().into()
            }
            _ => self.texts.vocabulary.piece(self.token(position)),
        }
    }

    /// An alternative token for a position, for log probabilities.
    pub(crate) fn alternative(&self, position: u32, rank: u32) -> u32 {
        self.texts.vocabulary.draw(self.seed ^ u64::from(rank).rotate_left(33), position + self.begun.0)
    }

    pub(crate) fn text_of(&self, token: u32) -> std::borrow::Cow<'_, str> {
        self.texts.vocabulary.piece(token)
    }

    pub(crate) fn call(&self) -> Option<&CalledTool> {
        self.script.as_ref()?.call.as_ref()
    }

    /// If a stop string ended the output: the number of bytes of the text that are shown.
    pub(crate) fn shown(&self) -> Option<usize> {
        if let End::Text(_, shown) = &self.end { Some(*shown) } else { None }
    }

    pub(crate) fn finish(&self) -> Finish {
        if self.end == End::Length { Finish::Length } else { Finish::Stop }
    }

    pub(crate) fn stop_reason(&self) -> String {
        match &self.end {
            End::Length | End::Eos => "null".to_owned(),
            End::Token(token) => token.to_string(),
            End::Text(stop, _) => serde_json::Value::from(stop.as_str()).to_string(),
        }
    }
}

/// The beginning of an output, with which a prompt ends.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct BegunOutput {
    pub(crate) tokens: u32,
    /// Bytes of the next token that the prompt has too.
    pub(crate) part: usize,
    bytes: usize,
}

/// Reads `text` as the beginning of the output with this seed; `None` if the output begins
/// differently.
pub(crate) fn begun(vocabulary: &Vocabulary, seed: u64, text: &str) -> Option<BegunOutput> {
    let (mut rest, mut tokens) = (text, 0);
    while !rest.is_empty() {
        let piece = vocabulary.piece(vocabulary.draw(seed, tokens));
        match rest.strip_prefix(&*piece) {
            Some(behind) if !piece.is_empty() => (rest, tokens) = (behind, tokens + 1),
            _ if piece.starts_with(rest) => break,
            _ => return None,
        }
    }
    Some(BegunOutput { tokens, part: rest.len(), bytes: text.len() })
}

/// The most words at the end of a text that may belong to an output.
const BEGUN_MAX: usize = 4_096;
/// The fewest tokens that count as the beginning of an output, because one word may be there by
/// chance.
const BEGUN_MIN: u32 = 2;

/// Finds the beginning of an output at the end of a completion's prompt, and the offset at which it
/// begins. `seed_of`: the seed of the output for the hash of a prompt. Only synthetic words are
/// recognised.
pub(crate) fn begun_within(
    vocabulary: &Vocabulary,
    text: &str,
    seed_of: impl Fn(u64) -> u64,
) -> Option<(usize, BegunOutput)> {
    if vocabulary.is_real() {
        return None;
    }
    let (mut starts, mut end) = (Vec::new(), text.len());
    while let Some(start) = text[..end].rfind(' ').filter(|_| starts.len() < BEGUN_MAX) {
        let is_word =
            |word: &&str| if end == text.len() { word.starts_with(&text[start..]) } else { **word == text[start..end] };
        if !words::WORDS.iter().any(is_word) {
            break;
        }
        starts.push(start);
        end = start;
    }
    let (mut hasher, mut hashed) = (XxHash3_64::with_seed(0), 0);
    starts.into_iter().rev().find_map(|start| {
        hasher.write(&text.as_bytes()[hashed..start]);
        hashed = start;
        let begun = begun(vocabulary, seed_of(hasher.finish()), &text[start..])?;
        (begun.tokens >= BEGUN_MIN).then_some((start, begun))
    })
}

fn drawn(seed: u64, least: u32, most: u32) -> (u32, End) {
    let mut rng = Rng::new(seed);
    let radius = (-2.0 * (1.0 - rng.unit()).ln()).sqrt();
    let normal = radius * (std::f64::consts::TAU * rng.unit()).cos();
    let drawn = (MEDIAN_TOKENS * (SHAPE * normal).exp()).round().max(1.0);
    let drawn = (drawn as u32).max(least.max(1));
    if drawn < most { (drawn, End::Eos) } else { (most, End::Length) }
}

/// Seed of a choice, from the seeds of server and prompt and the number of the choice.
pub(crate) fn seed(server: u64, prompt: &Prompt, choice: u32) -> u64 {
    prompt.seed ^ server.rotate_left(17) ^ u64::from(choice).rotate_left(40)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::validate::{RequestBody, RequestKind, ServerLimits};

    fn request(texts: &TextModel, body: &str) -> GenerateRequest {
        let body = RequestBody::read(RequestKind::Completion, body.as_bytes()).unwrap();
        let limits = ServerLimits { max_model_len: 8192, max_logprobs: 20, auto_tools: false, name: "m" };
        GenerateRequest::new(RequestKind::Completion, &body, texts, limits).unwrap()
    }

    fn outputs(body: &str) -> Vec<PlannedOutput> {
        let texts = Arc::new(TextModel::made_up());
        let request = request(&texts, body);
        (0..2000).map(|seed| PlannedOutput::new(&texts, &request, request.limits[0], seed)).collect()
    }

    fn text(output: &PlannedOutput) -> String {
        (0..output.tokens).map(|position| output.piece(position).into_owned()).collect()
    }

    #[test]
    fn ignore_eos_generates_exactly_max_tokens() {
        let all = outputs(r#"{"prompt":"x","max_tokens":77,"ignore_eos":true}"#);
        assert!(all.iter().all(|output| (output.tokens, output.finish()) == (77, Finish::Length)));
    }

    #[test]
    fn drawn_lengths_have_the_documented_median_and_respect_the_limits() {
        let mut drawn: Vec<u32> = outputs(r#"{"prompt":"x","max_tokens":8000}"#).iter().map(|s| s.tokens).collect();
        drawn.sort_unstable();
        assert!((160..200).contains(&drawn[1000]), "{}", drawn[1000]);
        let clamped = outputs(r#"{"prompt":"x","max_tokens":50,"min_tokens":40}"#);
        assert!(clamped.iter().all(|output| (40..=50).contains(&output.tokens)));
    }

    #[test]
    fn an_output_goes_on_where_a_prompt_ends_within_it() {
        let body = r#"{"prompt":"x","max_tokens":60,"stop":["ater"],"min_tokens":9}"#;
        for whole in outputs(body).into_iter().take(300) {
            let vocabulary = &whole.texts.vocabulary;
            let all = text(&whole);
            let shown = &all[..whole.shown().unwrap_or(all.len())];
            for cut in [0, 1, 7, shown.len() / 2, shown.len() - 1].map(|cut| cut.min(shown.len() - 1)) {
                let begun = begun(vocabulary, whole.seed, &shown[..cut]).unwrap();
                let tokens = begun.tokens;
                let body = format!(
                    r#"{{"prompt":"x","max_tokens":60,"stop":["ater"],"min_tokens":{}}}"#,
                    9_u32.saturating_sub(tokens)
                );
                let request = request(&whole.texts, &body);
                let rest = PlannedOutput::rest(&whole.texts, &request, (60 - tokens, whole.seed), &begun).unwrap();
                let said = text(&rest);
                assert_eq!(&said[..rest.shown().unwrap_or(said.len())], &shown[cut..]);
                assert_eq!((rest.finish(), rest.tokens + tokens), (whole.finish(), whole.tokens));
                let ids = |output: &PlannedOutput| (0..output.tokens).map(|at| output.token(at)).collect::<Vec<_>>();
                assert_eq!(ids(&rest), ids(&whole)[tokens as usize..]);
            }
        }
        let vocabulary = Vocabulary::made_up();
        assert_eq!(begun(&vocabulary, 7, "something else"), None);
    }

    #[test]
    fn the_beginning_of_an_output_is_found_at_the_end_of_a_prompt() {
        let vocabulary = Vocabulary::made_up();
        let seed_of = |hash: u64| hash ^ 99;
        for prompt in ["", "Say", "the river of", "x the"] {
            let seed = seed_of(XxHash3_64::oneshot_with_seed(0, prompt.as_bytes()));
            let said: String = (0..40).map(|at| vocabulary.piece(vocabulary.draw(seed, at)).into_owned()).collect();
            for cut in [said.len(), said.len() - 1, 40] {
                let found = begun_within(&vocabulary, &format!("{prompt}{}", &said[..cut]), seed_of);
                let (at, begun) = found.unwrap_or_else(|| panic!("{prompt}{}", &said[..cut]));
                assert_eq!((at, begun.bytes), (prompt.len(), cut), "{prompt}{}", &said[..cut]);
            }
        }
        assert_eq!(begun_within(&vocabulary, "the river runs over the stone", seed_of), None);
    }

    #[test]
    fn a_stop_string_ends_the_output() {
        for output in outputs(r#"{"prompt":"x","max_tokens":300,"ignore_eos":true,"stop":["ater"]}"#) {
            let text = text(&output);
            match output.shown() {
                Some(shown) => {
                    assert!(text[shown..].starts_with("ater") && !text[..shown].contains("ater"), "{text}");
                    assert_eq!((output.finish(), output.stop_reason().as_str()), (Finish::Stop, "\"ater\""));
                }
                None => assert!(!text.contains("ater")),
            }
        }
    }

    #[test]
    fn an_output_of_a_shape_is_its_text_and_an_end() {
        let format = r#""response_format":{"type":"json_schema","json_schema":{"name":"x","schema":{"type":"object",
            "properties":{"n":{"type":"integer"},"word":{"enum":["h\u00e9llo","水門"]}},"required":["n","word"]}}}"#;
        for output in outputs(&format!(r#"{{"prompt":"x","max_tokens":300,{format}}}"#)) {
            let value: serde_json::Value = serde_json::from_str(&text(&output)).unwrap();
            assert!(value["n"].is_i64(), "{value}");
            assert_eq!(output.finish(), Finish::Stop);
            assert_eq!(output.token(output.tokens - 1), output.texts.vocabulary.eos);
        }
        let long = &outputs(&format!(r#"{{"prompt":"x","max_tokens":64,"ignore_eos":true,{format}}}"#))[0];
        assert_eq!((long.tokens, long.finish()), (64, Finish::Length));
        assert!(serde_json::from_str::<serde_json::Value>(&text(long)).is_ok(), "what follows has no text");
        let cut = &outputs(&format!(r#"{{"prompt":"x","max_tokens":3,{format}}}"#))[0];
        assert_eq!((cut.tokens, cut.finish()), (3, Finish::Length));
        assert!(serde_json::from_str::<serde_json::Value>(&text(cut)).is_err());
    }

    #[test]
    fn a_forced_token_is_the_whole_output() {
        let all =
            outputs(r#"{"prompt":"x","max_tokens":5,"logit_bias":{"19":100},"stop_token_ids":[19],"min_tokens":2}"#);
        assert_eq!((all[0].tokens, all[0].stop_reason()), (3, "19".to_owned()));
        let eos = outputs(r#"{"prompt":"x","max_tokens":5,"logit_bias":{"128001":100}}"#);
        assert_eq!((eos[0].tokens, eos[0].finish()), (1, Finish::Stop));
    }
}
