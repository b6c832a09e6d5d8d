//! Joins the errors that pydantic prints over several lines.
//!
//! vLLM checks its configuration with pydantic, which prints `...ValidationError: 1 validation
//! error for SchedulerConfig` and gives the cause in later lines:
//! `  Value error, max_num_batched_tokens (64) must be ... [type=value_error, ...]`. A wrong field
//! is named in a line before the cause. The first line does not give the cause, so it is replaced
//! by [`FOLDED`] and the cause; the other lines become empty.
//!
//! Bound: a cause is searched in the next [`LINES_MAX`] lines of the log, among lines of the same
//! process. If pydantic prints several errors, only the first is used.

use std::borrow::Cow;

use crate::vllm::logs::{message, process};

/// The beginning of a folded line.
pub(super) const FOLDED: &str = "ValidationError: ";
/// Number of lines in which the end of a cause is searched.
const LINES_MAX: usize = 16;

/// The lines of the log, with each such error folded into one line.
pub(super) fn folded<S: AsRef<str>>(lines: &[S]) -> Vec<Cow<'_, str>> {
    let mut folded: Vec<Cow<'_, str>> = lines.iter().map(|line| Cow::Borrowed(line.as_ref())).collect();
    for (at, line) in lines.iter().enumerate() {
        let line = line.as_ref().trim_end();
        if !is_head(message(line)) {
            continue;
        }
        let Some((cause, used)) = cause(&lines[at + 1..], process(line)) else { continue };
        let before = &line[..line.len() - message(line).len()];
        folded[at] = Cow::Owned(format!("{before}{FOLDED}{cause}"));
        for offset in used {
            folded[at + 1 + offset] = Cow::Borrowed("");
        }
    }
    folded
}

fn is_head(text: &str) -> bool {
    text.contains("ValidationError: ")
        && (text.contains(" validation error for ") || text.contains(" validation errors for "))
}

/// The cause, and the offsets of the lines that the cause consists of.
fn cause<S: AsRef<str>>(lines: &[S], of: Option<&str>) -> Option<(String, Vec<usize>)> {
    let (mut parts, mut used) = (Vec::new(), Vec::new());
    for (offset, line) in lines.iter().take(LINES_MAX).enumerate() {
        let line = line.as_ref();
        if process(line) != of {
            continue;
        }
        let text = message(line);
        used.push(offset);
        // The name of a field is in a separate line before the error.
        let field = parts.is_empty() && !text.starts_with(' ');
        let text = text.trim();
        let text =
            text.strip_prefix("Value error, ").or_else(|| text.strip_prefix("Assertion failed, ")).unwrap_or(text);
        match text.split_once("[type=") {
            Some((last, _)) => {
                parts.push(last.trim_end().to_owned());
                return Some((parts.join(" ").trim().to_owned(), used)).filter(|(cause, _)| !cause.is_empty());
            }
            None => parts.push(if field { format!("{text}:") } else { text.to_owned() }),
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    const HEAD: &str =
        "(APIServer pid=7) pydantic_core._pydantic_core.ValidationError: 1 validation error for ModelConfig";

    #[test]
    fn what_is_wrong_takes_the_place_of_the_line_that_says_nothing() {
        let lines = [
            HEAD,
            "(APIServer pid=7)   Value error, World size (4) is larger than 1:",
            "(EngineCore pid=9) INFO 11-21 03:55:19 [core.py:1] meanwhile",
            "(APIServer pid=7) - ray. [type=value_error, input_value=1]",
            "(APIServer pid=7)     For further information visit https://errors.pydantic.dev/2.14/v/value_error",
        ];
        let folded = folded(&lines);
        assert_eq!(folded[0], "(APIServer pid=7) ValidationError: World size (4) is larger than 1: - ray.");
        assert_eq!((folded[1].as_ref(), folded[2].as_ref(), folded[3].as_ref()), ("", lines[2], ""));
        assert_eq!(folded[4], lines[4]);
    }

    #[test]
    fn a_field_is_named_and_an_error_without_an_end_stays() {
        let field = [
            "pydantic_core._pydantic_core.ValidationError: 2 validation errors for CacheConfig",
            "block_size",
            "  Input should be greater than 0 [type=greater_than, input_value=0]",
        ];
        assert_eq!(folded(&field)[0], "ValidationError: block_size: Input should be greater than 0");
        assert_eq!(folded(&[HEAD, "(APIServer pid=7)   Value error, cut"])[0], HEAD);
    }
}
