//! The output of one choice, decided when the request arrives: tokens, length and end.
//!
//! The length is exactly the limit with `ignore_eos`. Otherwise it is drawn from a log-normal
//! distribution with median [`MEDIAN_TOKENS`] and shape [`SHAPE`] (as in public traces of chats),
//! between `min_tokens` and the limit. A drawn end is a `stop`, the limit a `length`. A stop string
//! or stop token in the text ends the output there. The same prompt gets the same output on every
//! server with the same seed.
//!
//! If the request demands a shape (JSON of a schema, a tool call), the output is a text of that
//! shape and an end-of-sequence token. With `ignore_eos`, or below `min_tokens`, more such tokens
//! follow. A limit cuts the text, as in vLLM.

use std::sync::Arc;

use crate::http::wire::Finish;
use crate::validate::{CalledTool, GenerateRequest, Prompt, ShapedText, TextModel};
use sluice_core::base::Rng;

/// Median of drawn output lengths, tokens.
const MEDIAN_TOKENS: f64 = 180.0;
/// Standard deviation of the logarithm of drawn output lengths.
const SHAPE: f64 = 0.8;

/// The end of the output.
#[derive(Clone, Debug, PartialEq, Eq)]
enum End {
    /// At the limit.
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

/// The output of one choice, before it is generated.
#[derive(Clone, Debug)]
pub(crate) struct PlannedOutput {
    texts: Arc<TextModel>,
    seed: u64,
    /// The only tokens that the output may have; empty means any token.
    forced: Arc<[u32]>,
    /// The text that replaces the words, if the request demands a shape.
    script: Option<Arc<Script>>,
    /// Number of tokens.
    pub(crate) tokens: u32,
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
        let mut output = Self { texts: Arc::clone(texts), seed, forced: forced.into(), script, tokens, end, held_back };
        if !request.stop.is_empty() || !request.stop_token_ids.is_empty() {
            output.end_at_stop(request);
        }
        output
    }

    /// Ends the output at the first stop string or stop token.
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
        if let Some(script) = &self.script {
            return script.ids.get(position as usize).copied().unwrap_or(self.texts.vocabulary.eos);
        }
        match (&self.end, self.forced.as_ref()) {
            (End::Eos, _) if position + 1 == self.tokens => self.texts.vocabulary.eos,
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
            _ => self.texts.vocabulary.piece(self.token(position)),
        }
    }

    /// An alternative token for a position, for log probabilities.
    pub(crate) fn alternative(&self, position: u32, rank: u32) -> u32 {
        self.texts.vocabulary.draw(self.seed ^ u64::from(rank).rotate_left(33), position)
    }

    pub(crate) fn text_of(&self, token: u32) -> std::borrow::Cow<'_, str> {
        self.texts.vocabulary.piece(token)
    }

    /// The tool that the output calls; the text is the arguments.
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

    fn outputs(body: &str) -> Vec<PlannedOutput> {
        let texts = Arc::new(TextModel::made_up());
        let body = RequestBody::read(RequestKind::Completion, body.as_bytes()).unwrap();
        let limits = ServerLimits { max_model_len: 8192, max_logprobs: 20, auto_tools: false, name: "m" };
        let request = GenerateRequest::new(RequestKind::Completion, &body, &texts, limits).unwrap();
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
