//! Synthetic log probabilities in vLLM's two shapes.
//!
//! They are a function of token and rank, so streamed and complete responses agree. Only the shape,
//! the order and the sign are vLLM's; sums have no meaning.

use std::fmt::Write;

use serde_json::Value;
use twox_hash::XxHash3_64;

use crate::text::planned_output::PlannedOutput;
use crate::text::vocabulary::Vocabulary;

pub(crate) fn quoted(text: &str) -> String {
    Value::from(text).to_string()
}

/// The log probability of the token at a rank. It falls with the rank and differs a little between
/// tokens.
fn value(token: u32, rank: u32) -> f64 {
    let noise = (XxHash3_64::oneshot(&token.to_le_bytes()) % 1000) as f64 / 4000.0;
    -(0.05 + f64::from(rank) * 1.5 + noise)
}

fn bytes(text: &str) -> String {
    let list: Vec<String> = text.bytes().map(|byte| byte.to_string()).collect();
    format!("[{}]", list.join(","))
}

/// The token drawn at a position, then other likely tokens by rank: at most `alternatives` tokens
/// together, and at least one.
fn ranked(output: &PlannedOutput, position: u32, alternatives: u32) -> Vec<u32> {
    let mut tokens = vec![output.token(position)];
    let mut rank = 1;
    while (tokens.len() as u32) < alternatives && rank < 4 * alternatives {
        let other = output.alternative(position, rank);
        if !tokens.contains(&other) {
            tokens.push(other);
        }
        rank += 1;
    }
    tokens
}

/// Log probabilities of a chat:
/// `{"content":[{"token":..,"logprob":..,"bytes":[..],"top_logprobs":[..]}]}` for some positions.
pub(crate) fn chat(output: &PlannedOutput, positions: std::ops::Range<u32>, alternatives: u32) -> String {
    let mut out = "{\"content\":[".to_owned();
    for (index, position) in positions.enumerate() {
        let ranked = ranked(output, position, alternatives);
        let one = |token: u32, rank: u32| {
            let text = output.text_of(token);
            format!("\"token\":{},\"logprob\":{:?},\"bytes\":{}", quoted(&text), value(token, rank), bytes(&text))
        };
        let _ = write!(out, "{}{{{},\"top_logprobs\":[", if index > 0 { "," } else { "" }, one(ranked[0], 0));
        if alternatives > 0 {
            let all: Vec<String> =
                ranked.iter().zip(0..).map(|(token, rank)| format!("{{{}}}", one(*token, rank))).collect();
            out.push_str(&all.join(","));
        }
        out.push_str("]}");
    }
    out + "]}"
}

struct Row {
    text: String,
    /// `None` for the first token of an echoed prompt.
    logprob: Option<f64>,
    top: Vec<(String, f64)>,
}

/// Log probabilities of a completion: four parallel lists. `echoed`: prompt tokens before the
/// output. `offset`: characters before the text. Returns the JSON and the offset at which the text
/// ends.
pub(crate) fn completion(
    output: &PlannedOutput,
    positions: std::ops::Range<u32>,
    alternatives: u32,
    echoed: Option<(&Vocabulary, &[u32])>,
    offset: usize,
) -> (String, usize) {
    let mut rows = Vec::new();
    if let Some((vocabulary, ids)) = echoed {
        for (index, id) in ids.iter().enumerate() {
            let text = vocabulary.piece(*id).into_owned();
            let logprob = (index > 0).then(|| value(*id, 0));
            let top = logprob.map(|logprob| (text.clone(), logprob)).into_iter().collect();
            rows.push(Row { text, logprob, top });
        }
    }
    for position in positions {
        let ranked = ranked(output, position, alternatives);
        let named = |(token, rank): (&u32, u32)| (output.text_of(*token).into_owned(), value(*token, rank));
        let text = output.text_of(ranked[0]).into_owned();
        rows.push(Row { logprob: Some(value(ranked[0], 0)), text, top: ranked.iter().zip(0..).map(named).collect() });
    }
    let mut at = offset;
    let (mut offsets, mut logprobs, mut tokens, mut tops) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
    for row in rows {
        offsets.push(at.to_string());
        at += row.text.chars().count();
        logprobs.push(row.logprob.map_or("null".to_owned(), |value| format!("{value:?}")));
        tokens.push(quoted(&row.text));
        let top: Vec<String> = row.top.iter().map(|(text, value)| format!("{}:{value:?}", quoted(text))).collect();
        tops.push(if row.logprob.is_some() { format!("{{{}}}", top.join(",")) } else { "null".to_owned() });
    }
    let list = |items: Vec<String>| items.join(",");
    let text = format!(
        "{{\"text_offset\":[{}],\"token_logprobs\":[{}],\"tokens\":[{}],\"top_logprobs\":[{}]}}",
        list(offsets),
        list(logprobs),
        list(tokens),
        list(tops)
    );
    (text, at)
}

/// Log probabilities of a prompt: `null` for the first token, then for each token
/// `{"id":{"logprob":..,"rank":..,"decoded_token":..}}`.
pub(crate) fn prompt(vocabulary: &Vocabulary, ids: &[u32], alternatives: u32) -> String {
    let entry = |id: u32, rank: u32| {
        let text = quoted(&vocabulary.piece(id));
        format!("\"{id}\":{{\"logprob\":{:?},\"rank\":{},\"decoded_token\":{text}}}", value(id, rank), rank + 1)
    };
    let mut rows = vec!["null".to_owned()];
    for (position, id) in (1..).zip(ids.iter().skip(1)) {
        // The alternatives rank before the token of the prompt.
        let mut entries = vec![entry(*id, alternatives)];
        for rank in 0..alternatives {
            let other = vocabulary.draw(u64::from(rank) + 1, position);
            if other != *id {
                entries.push(entry(other, rank));
            }
        }
        rows.push(format!("{{{}}}", entries.join(",")));
    }
    format!("[{}]", rows.join(","))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn probabilities_fall_with_the_rank() {
        assert!(value(7, 0) > value(7, 1) && value(7, 0) < 0.0);
    }

    #[test]
    fn the_first_token_of_a_prompt_has_no_log_probability() {
        let vocabulary = Vocabulary::made_up();
        let rows: Value = serde_json::from_str(&prompt(&vocabulary, &[5, 6, 7], 1)).unwrap();
        assert!(rows[0].is_null() && rows[1]["6"]["rank"] == 2 && rows.as_array().unwrap().len() == 3);
    }
}
