//! The front door of the project: pages that a new user reads first.
//!
//! The README is short, its pictures exist and show the figures of their file, pages of
//! measurements are short, and the changelog has the form of keepachangelog.com.

use std::fs;
use std::path::Path;

use crate::page::Page;
use crate::{clean, one_complaint, read, root};

/// Maximum number of words in the README, with code and tables.
const README_WORDS: usize = 1_100;
/// Maximum number of words in the README before its first command.
const FIRST_COMMAND_WORDS: usize = 120;
/// Maximum number of words in a paragraph, a list item or a cell of a table.
const PARAGRAPH_WORDS: usize = 80;
/// Maximum number of words on a page of measurements, with code and tables.
const MEASUREMENT_WORDS: usize = 1_000;
/// Maximum number of words in an entry of the changelog, about two lines.
const ENTRY_WORDS: usize = 45;
/// Maximum size of a picture in bytes, so that the README loads at once.
const PICTURE_BYTES: u64 = 200 << 10;
/// Headings that a version in the changelog may have.
const CHANGES: [&str; 6] = ["Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"];

fn words(text: &str) -> usize {
    text.split_whitespace().count()
}

/// Paragraphs, list items and table cells of a page, without code, each with the number of its
/// first line.
fn paragraphs(text: &str) -> Vec<(usize, String)> {
    let (mut found, mut code): (Vec<(usize, String)>, bool) = (Vec::new(), false);
    let mut begun = false;
    for (number, line) in (1..).zip(text.lines().map(str::trim_start)) {
        if line.starts_with("```") {
            code = !code;
        }
        let item =
            line.starts_with("- ") || line.split_once(". ").is_some_and(|(number, _)| number.parse::<u8>().is_ok());
        if code || line.is_empty() || line.starts_with("```") || line.starts_with('#') {
            begun = false;
        } else if line.starts_with('|') {
            found.extend(line.split('|').map(|cell| (number, cell.to_owned())));
            begun = false;
        } else if let Some((_, last)) = found.last_mut().filter(|_| begun && !item) {
            *last = format!("{last} {line}");
        } else {
            found.push((number, line.to_owned()));
            begun = true;
        }
    }
    found
}

fn too_long(path: &str, text: &str, most: usize) -> Vec<String> {
    let long = paragraphs(text).into_iter().filter(|(_, text)| words(text) > PARAGRAPH_WORDS);
    let mut complaints: Vec<String> =
        long.map(|(line, text)| format!("{path}:{line}: a paragraph of {} words", words(&text))).collect();
    if words(text) > most {
        complaints.push(format!("{path}: {} words, more than {most}", words(text)));
    }
    complaints
}

fn late_command(text: &str) -> Vec<String> {
    let before = text.split_once("```sh").map_or(text, |(before, _)| before);
    let late = words(before) > FIRST_COMMAND_WORDS;
    late.then(|| format!("README.md: {} words before the first command", words(before))).into_iter().collect()
}

#[test]
fn the_readme_is_short_and_its_first_command_stands_near_its_top() {
    let text = read("README.md");
    assert!(text.contains("cargo run --release -- demo") && text.contains("\ncargo test\n"));
    clean(&[too_long("README.md", &text, README_WORDS), late_command(&text)].concat());
}

#[test]
fn no_page_has_a_long_paragraph() {
    let pages = crate::pages();
    clean(&pages.iter().flat_map(|page| too_long(&page.path, &read(&page.path), usize::MAX)).collect::<Vec<_>>());
}

#[test]
fn a_long_readme_is_caught() {
    let words = |count| "word ".repeat(count);
    clean(&too_long("a", &format!("{}\n\n{}\n- {}", words(70), words(70), words(70)), 1_000));
    one_complaint(
        &too_long("a", &format!("# x\n\n{}\n{}", words(70), words(11)), 1_000),
        "a:3: a paragraph of 81 words",
    );
    one_complaint(&too_long("a", &format!("| a | {} |", words(81)), 1_000), "81 words");
    one_complaint(&too_long("a", &format!("```sh\n{}\n```", words(200)), 100), "more than 100");
    clean(&late_command(&format!("{}\n```sh\n{}\n```", words(120), words(200))));
    one_complaint(&late_command(&format!("{}\n```sh\n```", words(121))), "121 words before");
}

fn pictures(text: &str) -> Vec<&str> {
    let parts = ["srcset=\"", " src=\""].into_iter().flat_map(|key| text.split(key).skip(1));
    parts.filter_map(|rest| rest.split_once('"')).map(|(address, _)| address).collect()
}

#[test]
fn pictures_of_the_readme_exist_for_light_and_dark_pages_and_load_at_once() {
    let text = read("README.md");
    let found = pictures(&text);
    let [light, dark] = ["light", "dark"].map(|theme| found.iter().filter(|address| address.contains(theme)).count());
    assert!(light > 0 && light == dark && light + dark == found.len(), "{found:?}");
    for address in found {
        let bytes = fs::metadata(root().join(address)).unwrap_or_else(|error| panic!("{address}: {error}")).len();
        assert!(bytes < PICTURE_BYTES, "{address} has {bytes} bytes");
    }
}

fn shown(ms: f64) -> String {
    match ms {
        ms if ms < 999.5 => format!("{ms:.0} ms"),
        ms if ms < 9_995.0 => format!("{:.2} s", ms / 1e3),
        ms => format!("{:.1} s", ms / 1e3),
    }
}

#[test]
fn the_picture_of_tails_shows_the_figures_of_its_file() {
    let table = read("benches/pictures/tails.csv");
    let rows = table.lines().filter(|line| !line.starts_with('#')).skip(1);
    let values: Vec<f64> = rows.flat_map(|row| row.rsplit(',').take(4).map(|cell| cell.parse().unwrap())).collect();
    assert!(values.len() >= 16);
    for theme in ["light", "dark"] {
        let picture = read(format!(".github/pictures/tails-{theme}.svg"));
        for value in &values {
            let text = format!(">{}</text>", shown(*value));
            assert!(picture.contains(&text), "{theme}: no {text}; run benches/pictures/draw");
        }
    }
}

#[test]
fn a_page_of_measurements_is_short_and_has_question_answer_command_and_limits() {
    let folder = ".github/docs/measurements";
    let names = fs::read_dir(root().join(folder)).unwrap().map(|file| file.unwrap().file_name().into_string().unwrap());
    let pages: Vec<String> = names.map(|name| format!("{folder}/{name}")).collect();
    assert!(pages.len() >= 10, "{pages:?}");
    let mut complaints = too_long("benches/README.md", &read("benches/README.md"), MEASUREMENT_WORDS);
    for path in &pages {
        let text = read(path);
        complaints.extend(too_long(path, &text, MEASUREMENT_WORDS));
        let parts = ["**Question.** ", "**Answer.** ", "## Limits\n"];
        let missing = parts.into_iter().filter(|part| !path.ends_with("/README.md") && !text.contains(part));
        complaints.extend(missing.map(|part| format!("{path} has no {part}")));
    }
    clean(&complaints);
}

/// Faults of the changelog's form: versions, dates, kinds of changes, entries that are too long.
fn unkempt(text: &str) -> Vec<String> {
    let (mut complaints, mut versions, mut kinds) = (Vec::new(), Vec::new(), 0);
    for (number, line) in (1..).zip(text.lines()) {
        let mut complain = |fault: String| complaints.push(format!("CHANGELOG.md:{number}: {fault}"));
        if let Some(version) = line.strip_prefix("## ") {
            let dated =
                version.split_once("] - ").is_some_and(|(_, date)| date.len() == 10 && date.matches('-').count() == 2);
            if version != "[Unreleased]" && !(version.starts_with('[') && dated) {
                complain(format!("'{version}' is neither [Unreleased] nor [VERSION] - YYYY-MM-DD"));
            }
            versions.push(version.to_owned());
        } else if let Some(kind) = line.strip_prefix("### ") {
            kinds += 1;
            if !CHANGES.contains(&kind) {
                complain(format!("'{kind}' is no kind of change"));
            }
        } else if line.starts_with("- ") && words(line) > ENTRY_WORDS {
            complain(format!("an entry of {} words", words(line)));
        }
    }
    if versions.first().is_none_or(|first| first != "[Unreleased]") || versions.len() < 2 || kinds == 0 {
        complaints.push("CHANGELOG.md: it needs [Unreleased] and a version, with kinds of changes".to_owned());
    }
    complaints
}

#[test]
fn the_changelog_has_the_form_of_keepachangelog() {
    let text = read(".github/CHANGELOG.md");
    clean(&unkempt(&text));
    let version = format!("## [{}] - ", env!("CARGO_PKG_VERSION"));
    assert!(text.contains(&version), "there is no section {version}");
}

#[test]
fn a_changelog_of_another_form_is_caught() {
    let good = "## [Unreleased]\n### Added\n- a\n## [0.1.0] - 2026-11-28\n### Fixed\n- b\n";
    clean(&unkempt(good));
    one_complaint(&unkempt(&good.replace(" - 2026-11-28", "")), "neither");
    one_complaint(&unkempt(&good.replace("### Fixed", "### Mended")), "no kind");
    one_complaint(&unkempt(&good.replace("- b", &format!("- {}", "b ".repeat(50)))), "an entry of 51 words");
    one_complaint(&unkempt(&good.replace("## [Unreleased]\n", "")), "needs [Unreleased]");
}

#[test]
fn pages_of_folders_below_are_read() {
    let pages = crate::pages();
    let has = |path: &str| pages.iter().any(|page: &Page| Path::new(&page.path) == Path::new(path));
    assert!(has(".github/docs/measurements/tails.md") && has(".github/docs/recipes.md"));
}
