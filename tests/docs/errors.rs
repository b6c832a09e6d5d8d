//! The page about errors has exactly one section for every code that the program uses, and every
//! message.
//!
//! The codes come from the lists that the program has, and from the source text of the admin API,
//! where a code stands next to its status. The messages come from the source text, with the names
//! of their values in braces.

use std::collections::BTreeSet;
use std::fs;

use sluice::cli::explain::sections;
use sluice_config::Topic;
use sluice_core::openai::error_codes;
use sluice_core::vllm::failure::FailureClass;

use crate::{clean, one_complaint, read, root};

/// Sections about situations without a code.
const GENERAL: [&str; 3] = ["start", "upgrade", "admin_client"];

/// Files whose messages must all be on the page.
const MESSAGES: [&str; 15] = [
    "src/config/problem.rs",
    "src/gateway/proxy/listener.rs",
    "src/gateway/telemetry/access_log.rs",
    "src/gateway/telemetry/log.rs",
    "src/fleet/ports.rs",
    "src/fleet/engine/journal.rs",
    "src/fleet/coordinator/change.rs",
    "src/admin/access.rs",
    "src/admin/client.rs",
    "src/admin/error.rs",
    "src/admin/experiments.rs",
    "src/admin/tuner.rs",
    "src/admin/unsaved.rs",
    "src/serve/upgrade/error.rs",
    "src/serve/upgrade/door.rs",
];

/// Codes of the admin API in a source text: `(StatusCode::CONFLICT, "busy")` and `"code": "busy"`.
fn admin_codes(source: &str) -> BTreeSet<String> {
    let word = |text: &str| {
        let text = text.trim_start().strip_prefix('"')?;
        let code = text.split_once('"')?.0;
        code.bytes().all(|byte| byte.is_ascii_lowercase() || byte == b'_').then(|| code.to_owned())
    };
    let beside = source.split("StatusCode::").skip(1).filter_map(|rest| word(rest.split_once(',')?.1));
    let named = source.split("\"code\":").skip(1).filter_map(word);
    beside.chain(named).collect()
}

fn all_admin_codes() -> BTreeSet<String> {
    let files = fs::read_dir(root().join("src/admin")).unwrap().map(|file| file.unwrap().path());
    let sources = files.filter(|path| {
        let name = path.file_name().unwrap().to_str().unwrap();
        name.ends_with(".rs") && !name.ends_with("tests.rs")
    });
    sources.flat_map(|path| admin_codes(&fs::read_to_string(path).unwrap())).collect()
}

fn differences(used: &BTreeSet<String>, explained: &[&str]) -> Vec<String> {
    let missing = used.iter().filter(|code| !explained.contains(&code.as_str()));
    let missing = missing.map(|code| format!("errors.md has no section `### {code}`"));
    let twice = explained.iter().enumerate().filter(|(at, code)| explained[..*at].contains(code));
    let extra = explained.iter().filter(|code| !used.contains(**code));
    let extra = extra.map(|code| format!("errors.md: `### {code}` is no code of the program"));
    missing.chain(twice.map(|(_, code)| format!("errors.md has `### {code}` twice"))).chain(extra).collect()
}

#[test]
fn every_code_has_a_section_and_every_section_a_code() {
    let admin = all_admin_codes();
    assert!(admin.len() >= 20 && admin.contains("not_saved") && admin.contains("invalid_config"), "{admin:?}");
    let mut used: BTreeSet<String> = error_codes().map(str::to_owned).collect();
    used.extend(Topic::ALL.map(|topic| topic.label().to_owned()));
    used.extend(FailureClass::ALL.iter().map(|class| class.label().to_owned()));
    used.extend(GENERAL.map(str::to_owned));
    used.extend(admin);
    let explained: Vec<&str> = sections().map(|(code, _)| code).collect();
    clean(&differences(&used, &explained));
}

#[test]
fn a_code_without_a_section_and_a_section_without_a_code_are_caught() {
    let used = |codes: &[&str]| codes.iter().map(|code| (*code).to_owned()).collect();
    clean(&differences(&used(&["a", "b"]), &["a", "b"]));
    one_complaint(&differences(&used(&["a", "b"]), &["a"]), "no section `### b`");
    one_complaint(&differences(&used(&["a"]), &["a", "b"]), "`### b` is no code");
    one_complaint(&differences(&used(&["a"]), &["a", "a"]), "twice");
    let source = "error(StatusCode::CONFLICT,\n \"busy\", x); json!({ \"code\": \"bad\" }); StatusCode::OK, &json";
    assert_eq!(admin_codes(source), used(&["busy", "bad"]));
}

/// The messages of a source file, from its `#[error("...")]` attributes.
fn messages(source: &str) -> Vec<String> {
    let product = source.split("#[cfg(test)]\nmod ").next().unwrap_or_default();
    let texts = product.split("#[error(").skip(1).filter_map(|rest| {
        let text = rest.trim_start().strip_prefix('"')?;
        // The message ends at the first quote that is not escaped.
        let end = text.char_indices().find(|(at, letter)| *letter == '"' && !text[..*at].ends_with('\\'))?.0;
        Some(joined(&text[..end]))
    });
    // A message that only passes on another error has no text to find.
    texts.filter(|text| text.replace("{reason}", "").replace("{0}", "").contains(char::is_alphabetic)).collect()
}

fn joined(literal: &str) -> String {
    let lines: Vec<&str> =
        literal.split("\\\n").enumerate().map(|(at, line)| if at == 0 { line } else { line.trim_start() }).collect();
    lines.concat().replace("\\\"", "\"")
}

fn unknown(page: &str, messages: &[String]) -> Vec<String> {
    let missing = messages.iter().filter(|message| !page.contains(&format!("`{message}`")));
    missing.map(|message| format!("errors.md does not have: `{message}`")).collect()
}

#[test]
fn every_message_is_on_the_page() {
    let page = read(".github/docs/errors.md");
    let all: Vec<String> =
        MESSAGES.iter().flat_map(|path| messages(&read(path))).filter(|text| !text.contains('`')).collect();
    assert!(all.len() > 110, "only {} messages were found", all.len());
    clean(&unknown(&page, &all));
}

#[test]
fn a_message_that_the_page_does_not_have_is_caught() {
    let source = "#[error(\"{a} is \\\n      \\\"bad\\\"\")]\nA,\n#[error(\"{reason}\")]\nB,\n#[cfg(test)]\nmod tests { #[error(\"x\")] }";
    assert_eq!(messages(source), ["{a} is \"bad\""]);
    clean(&unknown("- `{a} is \"bad\"`", &messages(source)));
    one_complaint(&unknown("- `{a} is bad`", &messages(source)), "does not have");
}
