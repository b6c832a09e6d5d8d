//! Counts the bytes of output in a whole response, from which the number of tokens is bounded.
//!
//! In every dialect, output is text, reasoning, refusals, and names and arguments of tool calls.
//! Logprobs, token ids and a repeated request are not output. Bytes count as written, escapes
//! included. Bound: output below [`DEPTH`] nested containers does not count.

use super::scan::{JsonKind, ScanError, Scanner};

/// Depth of containers that the walk enters. Items of `output` whose parts have a summary need a
/// depth of six.
const DEPTH: u32 = 8;

/// Members whose values are output, or contain output.
const OUTPUT: &[&[u8]] = &[
    b"arguments",
    b"content",
    b"function",
    b"function_call",
    b"input",
    b"message",
    b"name",
    b"output",
    b"reasoning",
    b"reasoning_content",
    b"refusal",
    b"summary",
    b"text",
    b"thinking",
    b"tool_calls",
    b"tool_plan",
];

/// Whether the value of this member is output, or contains output.
pub(super) fn is_output(key: &[u8]) -> bool {
    OUTPUT.contains(&key)
}

/// Takes the value of a member that [`is_output`]; returns the bytes of output in the value.
pub(super) fn bytes(scanner: &mut Scanner<'_>) -> Result<u64, ScanError> {
    within(scanner, DEPTH)
}

fn within(scanner: &mut Scanner<'_>, depth: u32) -> Result<u64, ScanError> {
    let mut found = 0;
    match scanner.kind()? {
        JsonKind::String => found = scanner.text()?.raw.len() as u64,
        JsonKind::Array if depth > 0 => {
            scanner.array(|scanner| {
                found += within(scanner, depth - 1)?;
                Ok::<_, ScanError>(())
            })?;
        }
        JsonKind::Object if depth > 0 => {
            scanner.object(|scanner, key| {
                match &*key.bytes() {
                    // The arguments of a tool call as JSON. All bytes count, because the model
                    // generated all of them.
                    b"arguments" | b"input" if scanner.kind()? == JsonKind::Object => {
                        found += scanner.skip_raw()?.len() as u64;
                    }
                    key if is_output(key) => found += within(scanner, depth - 1)?,
                    _ => drop(scanner.skip()?),
                }
                Ok::<_, ScanError>(())
            })?;
        }
        _ => drop(scanner.skip()?),
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use crate::openai::response;

    #[test]
    fn output_is_counted_in_every_dialect_and_nothing_else_is() {
        for (body, bytes) in [
            (r#"{"choices":[{"message":{"role":"assistant","content":"1234567"}}]}"#, 7),
            (r#"{"choices":[{"message":{"content":null,"reasoning":"123"}},{"text":"4567"}]}"#, 7),
            (r#"{"choices":[{"text":"1","logprobs":{"content":[{"token":"x"}]},"token_ids":[5]}]}"#, 1),
            (
                r#"{"choices":[{"message":{"tool_calls":[{"id":"call","type":"function","function":{"name":"ab","arguments":"{}"}}]}}]}"#,
                4,
            ),
            (r#"{"content":[{"type":"text","text":"12"},{"type":"thinking","thinking":"345"}]}"#, 5),
            (r#"{"content":[{"type":"tool_use","id":"x","name":"f","input":{"a":1}}]}"#, 8),
            (
                r#"{"instructions":"a long one","output":[{"type":"reasoning","summary":[{"text":"1"}]},{"content":[{"type":"output_text","text":"234","logprobs":[{"token":"x"}]}]}]}"#,
                4,
            ),
            (r#"{"message":{"content":[{"text":"12"}]}}"#, 2),
            (r#"{"text":"a transcript"}"#, 12),
            (r#"{"object":"error","message":"no"}"#, 0),
            (r#"{"data":[{"embedding":[0.5]}],"usage":{"prompt_tokens":2}}"#, 0),
        ] {
            assert_eq!(response::read(body.as_bytes()).text, bytes, "{body}");
        }
        let deep = format!(r#"{{"content":{}1{}}}"#, "[".repeat(60), "]".repeat(60));
        assert_eq!(response::read(deep.as_bytes()).text, 0);
    }
}
