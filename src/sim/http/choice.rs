//! One choice of a response: the output that was sent, and the pieces to send next.
//!
//! A choice holds text only while a stop string may begin in it. Streamed and complete responses
//! have the same text.

use std::sync::Arc;

use crate::http::wire::{CompleteChoice, Finish, Piece};
use crate::real_time::output_collector::Progress;
use crate::text::logprobs;
use crate::text::planned_output::PlannedOutput;
use crate::validate::{CalledTool, GenerateRequest, Prompt, RequestKind, TextModel};

/// The parts of each choice that a request asks for.
#[derive(Clone, Debug)]
pub(crate) struct OutputOptions {
    kind: RequestKind,
    echo: bool,
    only_echo: bool,
    logprobs: Option<u32>,
    prompt_logprobs: Option<u32>,
    token_ids: bool,
}

impl OutputOptions {
    pub(crate) fn of(request: &GenerateRequest) -> Self {
        Self {
            kind: request.kind,
            echo: request.echo && request.kind == RequestKind::Completion,
            only_echo: request.only_echo && request.kind == RequestKind::Completion,
            logprobs: request.logprobs,
            prompt_logprobs: request.prompt_logprobs,
            token_ids: request.return_token_ids,
        }
    }
}

#[derive(Clone, Debug)]
pub(crate) struct Choice {
    output: PlannedOutput,
    prompt: Prompt,
    texts: Arc<TextModel>,
    wanted: OutputOptions,
    shown: u32,
    /// Text so far. Only used if a stop string may begin in it.
    text: String,
    /// Bytes of `text` that were sent.
    sent: usize,
    /// Offset in characters at which the text of the next token begins, for log probabilities.
    offset: usize,
    cached: u32,
    opened: bool,
    finish: Option<Finish>,
}

impl Choice {
    pub(crate) fn new(output: PlannedOutput, prompt: Prompt, texts: Arc<TextModel>, wanted: OutputOptions) -> Self {
        let text = String::new();
        Self {
            output,
            prompt,
            texts,
            wanted,
            shown: 0,
            text,
            sent: 0,
            offset: 0,
            cached: 0,
            opened: false,
            finish: None,
        }
    }

    pub(crate) fn tokens(&self) -> u32 {
        self.shown
    }

    pub(crate) fn prompt_tokens(&self) -> u32 {
        self.prompt.tokens()
    }

    pub(crate) fn cached(&self) -> u32 {
        self.cached
    }

    pub(crate) fn call(&self) -> Option<&CalledTool> {
        self.output.call()
    }

    pub(crate) fn is_complete(&self) -> bool {
        self.finish.is_some()
    }

    pub(crate) fn finish(&self) -> Option<Finish> {
        self.finish
    }

    /// Marks the choice as opened; returns whether it was not opened before.
    pub(crate) fn open(&mut self) -> bool {
        !std::mem::replace(&mut self.opened, true)
    }

    /// Ids of the prompt as JSON, if the request asks for them.
    pub(crate) fn prompt_ids(&self) -> Option<String> {
        self.wanted.token_ids.then(|| list(&self.prompt.ids))
    }

    /// Records progress without building a piece.
    pub(crate) fn record(&mut self, progress: Progress) {
        if self.shown == 0 {
            self.cached = progress.cached;
        }
        self.shown += progress.tokens;
        self.finish = self.finish.or(progress.finish);
    }

    /// Records progress and returns the piece with the next `progress.tokens` tokens.
    pub(crate) fn advance(&mut self, progress: Progress, stream: bool) -> Piece {
        let from = self.shown;
        self.record(progress);
        let first = from == 0;
        let echo = first && self.wanted.echo;
        let sent_now = if self.wanted.only_echo { from..from } else { from..self.shown };
        let mut text = if echo { self.echoed() } else { String::new() };
        self.append_text(sent_now.clone(), &mut text);
        let logprobs = self.wanted.logprobs.map(|count| self.logprobs(sent_now.clone(), count, echo));
        let token_ids = self.wanted.token_ids.then(|| {
            let ids: Vec<u32> = sent_now.map(|position| self.output.token(position)).collect();
            list(&ids)
        });
        let echo_ids = echo && stream && self.wanted.kind == RequestKind::Completion;
        let prompt_ids =
            first.then(|| if echo_ids { Some(list(&self.prompt.ids)) } else { self.prompt_ids() }).flatten();
        let ended_itself = self.finish == Some(self.output.finish());
        let stop_reason = if ended_itself { self.output.stop_reason() } else { "null".to_owned() };
        let call = self.output.call().cloned();
        Piece { text, logprobs, token_ids, prompt_ids, finish: self.finish, stop_reason, call, first }
    }

    /// Appends the text of some positions, without the end in which a stop string may begin.
    fn append_text(&mut self, positions: std::ops::Range<u32>, into: &mut String) {
        if self.output.held_back == 0 && self.output.shown().is_none() {
            for position in positions {
                into.push_str(&self.output.piece(position));
            }
            return;
        }
        for position in positions {
            self.text.push_str(&self.output.piece(position));
        }
        let ready = match self.finish {
            Some(_) => self.output.shown().unwrap_or(self.text.len()).min(self.text.len()),
            None => {
                let held = self.text.char_indices().rev().nth(self.output.held_back.saturating_sub(1));
                let held = if self.output.held_back == 0 { Some(self.text.len()) } else { held.map(|(at, _)| at) };
                held.unwrap_or(0)
            }
        };
        if ready > self.sent {
            into.push_str(&self.text[self.sent..ready]);
            self.sent = ready;
        }
    }

    fn logprobs(&mut self, sent_now: std::ops::Range<u32>, count: u32, echo: bool) -> String {
        if self.wanted.kind == RequestKind::Chat {
            return logprobs::chat(&self.output, sent_now, count);
        }
        let echoed = echo.then_some((&self.texts.vocabulary, &*self.prompt.ids));
        let (json, offset) = logprobs::completion(&self.output, sent_now, count, echoed, self.offset);
        self.offset = offset;
        json
    }

    fn echoed(&self) -> String {
        match &self.prompt.text {
            Some(text) => text.to_string(),
            None => self.texts.vocabulary.decode(&self.prompt.ids, true),
        }
    }

    pub(crate) fn whole(&mut self) -> CompleteChoice {
        let all = Progress { tokens: std::mem::take(&mut self.shown), finish: self.finish, cached: self.cached };
        let piece = self.advance(all, false);
        let prompt = |count| logprobs::prompt(&self.texts.vocabulary, &self.prompt.ids, count);
        CompleteChoice { piece, prompt_logprobs: self.wanted.prompt_logprobs.map(prompt) }
    }
}

fn list(ids: &[u32]) -> String {
    let texts: Vec<String> = ids.iter().map(u32::to_string).collect();
    format!("[{}]", texts.join(","))
}
