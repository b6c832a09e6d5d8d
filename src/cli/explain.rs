//! `sluice explain [CODE]...`: the meaning of an error and the remedy, without a network.
//!
//! The text is `.github/docs/errors.md`, which is compiled in: a heading `### code` begins a
//! section. Without a code, every code is listed. `tests/docs` checks that exactly the codes that
//! the program uses have a section.
//!
//! Exit codes: 0 explained; 2 a code that does not exist.

use std::io::Write as _;
use std::process::ExitCode;

use super::admin_command::usage;
use sluice_config::Suggestion;

const PAGE: &str = include_str!("../../.github/docs/errors.md");

/// Explain an error code, or list all codes.
#[derive(Clone, Debug, clap::Args)]
pub struct ExplainArgs {
    /// Codes from an error body, the header x-sluice-error or a message of sluice
    #[arg(value_name = "CODE")]
    pub codes: Vec<String>,
}

/// Runs the command.
pub fn run(args: &ExplainArgs) -> ExitCode {
    match text(&args.codes) {
        Ok(text) => {
            // A reader that leaves early (`| head`) is no failure.
            let _ = std::io::stdout().write_all(text.as_bytes());
            ExitCode::SUCCESS
        }
        Err(unknown) => usage(&unknown),
    }
}

/// The codes and sections of the page, in order.
pub fn sections() -> impl Iterator<Item = (&'static str, &'static str)> {
    let parts = PAGE.split("\n### ").skip(1);
    parts.map(|part| {
        let (code, text) = part.split_once('\n').unwrap_or((part, ""));
        // The heading of the next chapter ends the last section of this chapter.
        (code.trim(), text.split("\n## ").next().unwrap_or("").trim())
    })
}

fn text(codes: &[String]) -> Result<String, String> {
    if codes.is_empty() {
        let line = |(code, text): (&str, &str)| format!("{code:<31} {}\n", text.lines().next().unwrap_or(""));
        return Ok(sections().map(line).collect());
    }
    let explained: Result<Vec<String>, String> = codes.iter().map(|code| section(code)).collect();
    Ok(explained?.join("\n"))
}

fn section(wanted: &str) -> Result<String, String> {
    match sections().find(|(code, _)| *code == wanted) {
        Some((code, text)) => Ok(format!("{code}\n\n{}\n", without_links(text))),
        None => {
            let suggestion = Suggestion::for_name(wanted, sections().map(|(code, _)| code));
            Err(format!("no error has the code '{wanted}'; {suggestion} (sluice explain lists all)"))
        }
    }
}

/// `[text](page.md#part)` becomes `text (page.md)`, and a link within this page only text.
fn without_links(text: &str) -> String {
    let mut parts = text.split("](");
    let first = parts.next().unwrap_or("").to_owned();
    parts.fold(first, |mut out, part| {
        if let Some(open) = out.rfind('[') {
            out.remove(open);
        }
        let Some((target, rest)) = part.split_once(')') else { return out + part };
        match target.split('#').next().filter(|page| !page.is_empty()) {
            Some(page) => format!("{out} ({page}){rest}"),
            None => out + rest,
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_code_is_explained_and_a_misspelt_one_finds_its_name() {
        let explained = section("queue_full").unwrap();
        assert!(explained.starts_with("queue_full\n\n") && explained.contains("503"), "{explained}");
        assert!(!explained.contains("\n#"), "{explained}");
        assert!(section("queue-ful").unwrap_err().contains("did you mean 'queue_full'?"));
        assert!(section("").is_err());
    }

    #[test]
    fn a_link_is_shown_as_its_text() {
        assert_eq!(without_links("see [a](b.md#c), `[x]` and [d](#e)."), "see a (b.md), `[x]` and d.");
        assert!(section("config-pools").unwrap().contains("See routing (routing-and-permits.md)."));
        assert!(sections().all(|(code, _)| !section(code).unwrap().contains("](")));
    }

    #[test]
    fn without_a_code_every_one_is_listed_in_a_line() {
        let all = text(&[]).unwrap();
        assert_eq!(all.lines().count(), sections().count());
        for (line, (code, _)) in all.lines().zip(sections()) {
            let said = line.strip_prefix(code).unwrap().trim();
            assert!(said.ends_with(['.', ':']) && line.chars().count() <= 160, "{line}");
        }
    }
}
