//! The house rules that a compiler does not check, read from the text of `src/`.
//!
//! A single crate has no enforced layers, so this file enforces them: `lib.rs` declares the modules bottom-up and a file
//! may name only modules declared above its own. The other rules keep what is replaceable in one place (pingora,
//! prometheus, spawning), keep clocks and chance out of the modules that are tested on paused time, and keep files small
//! enough to read.
//!
//! Every rule is a function from sources to complaints. It is run twice: on `src/`, where it must find nothing, and on a
//! bad snippet, where it must find something, because a check that cannot fail is worth nothing.
//!
//! It reads text, not syntax: comments are removed first. What stands after `#[cfg(test)]` at the start of a line, and every
//! file declared behind it, is test code, which may use clocks and unwrap but must keep to the layers.

use std::fs;
use std::path::{Path, PathBuf};

/// The modules from the bottom up. A new one gets its place here and in `lib.rs`.
const LAYERS: &[&str] = &[
    "base",
    "stats",
    "config",
    "openai",
    "vllm",
    "meter",
    "estimate",
    "pool",
    "experiment",
    "flow",
    "telemetry",
    "proxy",
    "fleet",
    "bench",
    "sim",
    "tuner",
    "admin",
    "serve",
    "cli",
];

/// The load generator and the simulator are witnesses: they must not share the gateway's state code.
const WITNESSES: &[&str] = &["bench", "sim"];
/// All that a witness may import besides itself.
const WITNESS_IMPORTS: &[&str] = &["base", "stats", "openai", "vllm", "meter"];

/// Where time and chance are parameters and nothing is read or sent. A path covers a folder or `path.rs`.
const PURE: &[&str] = &[
    "base",
    "stats",
    "openai",
    "vllm",
    "meter",
    "pool",
    "experiment",
    "flow/classify",
    "sim/machine",
    "sim/engine",
    "sim/virtual_server",
];
/// What a pure module must not name.
const IMPURE: &[&str] = &[
    "Instant::now",
    "SystemTime",
    "Timestamp::now",
    "Zoned::now",
    "rand::rng",
    "rand::random",
    "thread_rng",
    "from_os_rng",
    "OsRng",
    "std::fs",
    "std::net",
    "tokio::fs",
    "tokio::net",
    "thread::sleep",
];

/// A library and the only modules that may name it, so that it can be replaced without a hunt.
const CONFINED: &[(&str, &[&str])] = &[("pingora", &["proxy", "serve", "admin"]), ("prometheus", &["telemetry"])];

/// Where processes may be started.
const SPAWNERS: &[&str] = &["fleet", "cli/demo", "cli/sim"];

/// Lines of `//!` that open a file: what it is, why, the rule, the bounds.
const HEADER_LINES: usize = 3;
/// A file longer than this holds two ideas.
const FILE_LINES: usize = 500;
/// Files that may be longer, each with the reason. Meant to stay empty.
const LONG_FILES: &[(&str, &str)] = &[];
/// `main.rs` only hands over to the library.
const MAIN_LINES: usize = 60;

/// One file: its path below `src/` with `/` between the parts, its text, and whether it is compiled for tests only.
struct Source {
    path: String,
    text: String,
    test: bool,
}

impl Source {
    fn new(path: &str, text: &str) -> Self {
        Self { path: path.to_owned(), text: text.to_owned(), test: false }
    }

    /// The top-level module that the file belongs to; none for `lib.rs` and `main.rs`.
    fn module(&self) -> Option<&str> {
        let first = self.path.split('/').next()?.trim_end_matches(".rs");
        (first != "lib" && first != "main").then_some(first)
    }

    /// Whether the file is `place.rs` or lies in the folder `place`.
    fn is_in(&self, place: &str) -> bool {
        self.path.strip_prefix(place).is_some_and(|rest| rest == ".rs" || rest.starts_with('/'))
    }

    /// The text without comments.
    fn code(&self) -> String {
        without_comments(&self.text)
    }

    /// The folder that this file's child modules lie in, with a `/` at its end unless it is `src/` itself.
    fn children(&self) -> String {
        let stem = self.path.trim_end_matches(".rs");
        let folder = stem.strip_suffix("mod").filter(|rest| rest.is_empty() || rest.ends_with('/'));
        match folder {
            _ if stem == "lib" || stem == "main" => String::new(),
            Some(folder) => folder.to_owned(),
            None => format!("{stem}/"),
        }
    }

    /// The code before the first `#[cfg(test)]` that begins a line and is not about a file of its own.
    fn product_code(&self) -> String {
        if self.test {
            return String::new();
        }
        let code = self.code();
        let end = test_items(&code).find(|(_, item)| declared_file(item).is_none()).map(|(at, _)| at);
        code[..end.unwrap_or(code.len())].to_owned()
    }
}

/// Where `#[cfg(test)]` begins a line, and what follows it.
fn test_items(code: &str) -> impl Iterator<Item = (usize, &str)> {
    let marks = code.match_indices("#[cfg(test)]");
    marks.filter(|(at, _)| *at == 0 || code[..*at].ends_with('\n')).map(|(at, mark)| (at, &code[at + mark.len()..]))
}

/// The name in `mod name;`, for a module that has a file of its own.
fn declared_file(item: &str) -> Option<&str> {
    let item = item.trim_start().trim_start_matches("pub(crate) ").trim_start_matches("pub(super) ");
    let name = leading_word(item.trim_start_matches("pub ").strip_prefix("mod ")?);
    item.lines().next()?.trim_end().ends_with(';').then_some(name)
}

/// Marks the files that are declared behind `#[cfg(test)]`, and what lies below them.
fn mark_tests(sources: &mut [Source]) {
    let mut places = Vec::new();
    for source in sources.iter() {
        let code = source.code();
        let files = test_items(&code).filter_map(|(_, item)| declared_file(item));
        places.extend(files.map(|name| source.children() + name));
    }
    for source in sources {
        source.test = places.iter().any(|place| source.is_in(place));
    }
}

/// Blanks line and block comments. String literals are kept, and `//` inside one (a URL) is not a comment.
fn without_comments(text: &str) -> String {
    let bytes = text.as_bytes();
    let (mut out, mut at, mut quoted, mut depth) = (Vec::with_capacity(bytes.len()), 0, false, 0usize);
    while at < bytes.len() {
        let pair = (bytes[at], bytes.get(at + 1).copied().unwrap_or(0));
        let step = match (quoted, depth, pair) {
            (false, _, (b'/', b'*')) => {
                depth += 1;
                2
            }
            (false, 1.., (b'*', b'/')) => {
                depth -= 1;
                2
            }
            (false, 1.., _) => 1,
            (false, 0, (b'/', b'/')) => bytes[at..].iter().position(|&b| b == b'\n').unwrap_or(bytes.len() - at),
            (false, 0, (b'r', b'"' | b'#')) if raw_string(&bytes[at..]) > 0 => {
                let length = raw_string(&bytes[at..]);
                out.extend(&bytes[at..at + length]);
                length
            }
            // A quote that is a character literal does not open a string.
            (false, 0, (b'\'', b'"')) if bytes.get(at + 2) == Some(&b'\'') => 3,
            (true, _, (b'\\', _)) => {
                out.extend(&bytes[at..(at + 2).min(bytes.len())]);
                2
            }
            (_, _, (byte, _)) => {
                quoted ^= byte == b'"';
                out.push(byte);
                1
            }
        };
        at += step;
    }
    String::from_utf8_lossy(&out).into_owned()
}

/// The length of the raw string that `bytes` begin with; 0 when they begin with none.
fn raw_string(bytes: &[u8]) -> usize {
    let hashes = bytes[1..].iter().take_while(|&&b| b == b'#').count();
    if bytes.get(1 + hashes) != Some(&b'"') {
        return 0;
    }
    let end: Vec<u8> = std::iter::once(b'"').chain(std::iter::repeat_n(b'#', hashes)).collect();
    let open = hashes + 2;
    bytes[open..].windows(end.len()).position(|window| window == end).map_or(0, |at| open + at + end.len())
}

fn is_word(c: char) -> bool {
    c.is_alphanumeric() || c == '_'
}

fn leading_word(text: &str) -> &str {
    let text = text.trim_start();
    &text[..text.find(|c| !is_word(c)).unwrap_or(text.len())]
}

/// What follows each occurrence of `needle` that does not continue a longer word.
fn after<'a>(code: &'a str, needle: &'a str) -> impl Iterator<Item = &'a str> {
    code.match_indices(needle)
        .filter(|(at, _)| !code[..*at].ends_with(is_word))
        .map(move |(at, found)| &code[at + found.len()..])
}

/// The top-level modules that code names as `crate::x`, in plain paths and in groups `crate::{x::.., y}`.
fn imports(code: &str) -> Vec<String> {
    let mut found = Vec::new();
    for rest in after(code, "crate::") {
        let Some(group) = rest.trim_start().strip_prefix('{') else {
            found.push(leading_word(rest).to_owned());
            continue;
        };
        let (mut depth, mut item) = (0, 0);
        for (at, c) in group.char_indices() {
            match c {
                '{' => depth += 1,
                '}' if depth > 0 => depth -= 1,
                ',' | '}' if depth == 0 => {
                    found.push(leading_word(&group[item..at]).to_owned());
                    item = at + 1;
                    if c == '}' {
                        break;
                    }
                }
                _ => {}
            }
        }
    }
    // Types and macros at the root, and the empty item after a trailing comma, are not modules.
    found.retain(|name| name.starts_with(|c: char| c.is_ascii_lowercase()) && name != "self");
    found
}

// The rules. Each returns one line per complaint, which says where, what, and how to put it right.

fn declaration_order(lib: &str) -> Vec<String> {
    let code = without_comments(lib);
    let mut complaints = Vec::new();
    let mut highest = 0;
    for line in code.lines() {
        let line = line.trim().trim_start_matches("pub ").trim_start_matches("pub(crate) ");
        let Some(name) = line.strip_prefix("mod ").and_then(|rest| rest.strip_suffix(';')) else { continue };
        match LAYERS.iter().position(|layer| *layer == name) {
            None => {
                complaints.push(format!("lib.rs: `{name}` has no layer; give it a place in LAYERS of tests/tidy.rs"))
            }
            Some(place) if place < highest => {
                complaints.push(format!("lib.rs: `{name}` must be declared above `{}`", LAYERS[highest]));
            }
            Some(place) => highest = place,
        }
    }
    complaints
}

fn layering(sources: &[Source]) -> Vec<String> {
    let mut complaints = Vec::new();
    for source in sources {
        let Some(own) = source.module() else { continue };
        let Some(place) = LAYERS.iter().position(|layer| *layer == own) else {
            complaints
                .push(format!("{}: `{own}` has no layer; give it a place in LAYERS of tests/tidy.rs", source.path));
            continue;
        };
        for name in imports(&source.code()) {
            if name != own && !LAYERS[..place].contains(&name.as_str()) {
                complaints.push(format!(
                    "{}: `{own}` may not use `crate::{name}`, which lies above it; move what is shared down, or pass it in",
                    source.path
                ));
            }
        }
    }
    complaints
}

fn witnesses_apart(sources: &[Source]) -> Vec<String> {
    let mut complaints = Vec::new();
    for source in sources {
        let Some(own) = source.module().filter(|own| WITNESSES.contains(own)) else { continue };
        for name in imports(&source.code()) {
            if name != own && !WITNESS_IMPORTS.contains(&name.as_str()) {
                complaints.push(format!(
                    "{}: `{own}` is a witness and may not use `crate::{name}`; it may use {WITNESS_IMPORTS:?}",
                    source.path
                ));
            }
        }
    }
    complaints
}

fn purity(sources: &[Source]) -> Vec<String> {
    let mut complaints = Vec::new();
    for source in sources.iter().filter(|source| PURE.iter().any(|place| source.is_in(place))) {
        let code = source.product_code();
        for name in IMPURE.iter().filter(|name| after(&code, name).next().is_some()) {
            complaints
                .push(format!("{}: `{name}` in a pure module; take time, chance or bytes as a parameter", source.path));
        }
    }
    complaints
}

fn confinement(sources: &[Source]) -> Vec<String> {
    let mut complaints = Vec::new();
    for source in sources {
        let code = source.code();
        for (library, homes) in CONFINED {
            // `pingora::` and `pingora_core::`, not a word in a string or a field called so.
            let named = after(&code, library).any(|rest| rest.trim_start_matches(is_word).starts_with("::"));
            if named && !homes.iter().any(|home| source.is_in(home)) {
                complaints.push(format!("{}: `{library}` may be named only in {homes:?}; wrap it there", source.path));
            }
        }
    }
    complaints
}

fn spawning(sources: &[Source]) -> Vec<String> {
    let mut complaints = Vec::new();
    for source in sources.iter().filter(|source| !SPAWNERS.iter().any(|place| source.is_in(place))) {
        let code = source.product_code();
        let starts = ["process::Command", "Command::new(", "tokio::process"];
        if let Some(what) = starts.iter().find(|what| code.contains(**what)) {
            complaints.push(format!("{}: `{what}` starts processes; only {SPAWNERS:?} may", source.path));
        }
    }
    complaints
}

fn headers(sources: &[Source]) -> Vec<String> {
    // A file of tests needs only to say what it tests.
    let enough = |source: &Source| if source.test { 1 } else { HEADER_LINES };
    let header = |source: &Source| source.text.lines().take_while(|line| line.starts_with("//!")).count();
    let short = |source: &&Source| header(source) < enough(source);
    let complain = |source: &Source| {
        let wanted = enough(source);
        format!("{}: opens with fewer than {wanted} lines of `//!`; say what it is, why, and its bounds", source.path)
    };
    sources.iter().filter(short).map(complain).collect()
}

fn length(sources: &[Source], excused: &[(&str, &str)]) -> Vec<String> {
    let mut complaints = Vec::new();
    for source in sources {
        let lines = source.text.lines().count();
        let excuse = excused.iter().any(|(path, reason)| *path == source.path && !reason.is_empty());
        if lines > FILE_LINES && !excuse {
            complaints.push(format!("{}: {lines} lines; split it at a seam (limit {FILE_LINES})", source.path));
        }
        if source.path == "main.rs" && lines > MAIN_LINES {
            complaints.push(format!("main.rs: {lines} lines; move work into cli/ (limit {MAIN_LINES})"));
        }
    }
    for (path, _) in excused {
        if !sources.iter().any(|source| source.path == *path && source.text.lines().count() > FILE_LINES) {
            complaints.push(format!("{path}: listed as long but is not; take it off LONG_FILES"));
        }
    }
    complaints
}

fn unwraps(sources: &[Source]) -> Vec<String> {
    let bad = |source: &&Source| source.product_code().contains(".unwrap()");
    let complain = |source: &Source| {
        format!("{}: `.unwrap()` outside tests; return an error, or `.expect(\"the invariant\")`", source.path)
    };
    sources.iter().filter(bad).map(complain).collect()
}

// On the real tree.

fn crate_root() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR"))
}

fn collect(folder: &Path, root: &Path, into: &mut Vec<Source>) {
    let mut entries: Vec<_> = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    entries.sort();
    for path in entries {
        if path.is_dir() {
            collect(&path, root, into);
        } else if path.extension().is_some_and(|kind| kind == "rs") {
            let name = path.strip_prefix(root).unwrap().to_str().unwrap().replace('\\', "/");
            into.push(Source::new(&name, &fs::read_to_string(&path).unwrap()));
        }
    }
}

fn tree() -> Vec<Source> {
    let root = crate_root().join("src");
    let mut sources = Vec::new();
    collect(&root, &root, &mut sources);
    mark_tests(&mut sources);
    assert!(sources.len() > 3, "found only {} files below {}", sources.len(), root.display());
    sources
}

#[track_caller]
fn clean(complaints: &[String]) {
    assert!(complaints.is_empty(), "\n{}\n", complaints.join("\n"));
}

#[test]
fn modules_are_declared_bottom_up() {
    clean(&declaration_order(&fs::read_to_string(crate_root().join("src/lib.rs")).unwrap()));
}

#[test]
fn files_import_only_from_below() {
    clean(&layering(&tree()));
}

#[test]
fn witnesses_share_no_state_code() {
    clean(&witnesses_apart(&tree()));
}

#[test]
fn pure_modules_take_time_and_chance_as_parameters() {
    clean(&purity(&tree()));
}

#[test]
fn replaceable_libraries_stay_in_their_modules() {
    clean(&confinement(&tree()));
}

#[test]
fn only_the_fleet_and_the_demo_start_processes() {
    clean(&spawning(&tree()));
}

#[test]
fn every_file_says_what_it_is() {
    clean(&headers(&tree()));
}

#[test]
fn no_file_is_too_long_to_read() {
    clean(&length(&tree(), LONG_FILES));
}

#[test]
fn product_code_does_not_unwrap() {
    clean(&unwraps(&tree()));
}

#[test]
fn sample_configurations_exist() {
    let folder = crate_root().join("config");
    let entries = fs::read_dir(&folder).unwrap_or_else(|error| panic!("{}: {error}; add samples", folder.display()));
    let names: Vec<_> = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    assert!(names.iter().any(|name| name == "sluice.toml"), "config/sluice.toml is the commented reference; add it");
    let samples = names.iter().filter(|name| name.ends_with(".toml")).count();
    assert!(samples >= 2, "config/ has {samples} file(s); keep at least one small sample beside the reference");
}

// On bad snippets: every rule must be able to fail.

#[track_caller]
fn one_complaint(complaints: &[String], about: &str) {
    assert_eq!(complaints.len(), 1, "{complaints:?}");
    assert!(complaints[0].contains(about), "{complaints:?}");
}

#[test]
fn a_module_declared_out_of_order_is_caught() {
    one_complaint(
        &declaration_order("pub mod base;\npub mod pool;\npub mod meter;\n"),
        "`meter` must be declared above",
    );
    one_complaint(&declaration_order("pub mod base;\npub mod extras;\n"), "`extras` has no layer");
    clean(&declaration_order("//! mod cli;\npub mod base;\npub mod meter;\npub mod cli;\n"));
}

#[test]
fn an_upward_import_is_caught_however_it_is_written() {
    for bad in [
        "use crate::flow::Flow;",
        "use crate::{base::Tokens, flow::{self, Flow}};",
        "use crate::{\n    base,\n    flow,\n};",
        "fn f() { crate::flow::run() }",
        "#[cfg(test)]\nmod tests { use crate::flow::Flow; }",
    ] {
        one_complaint(&layering(&[Source::new("pool/queue.rs", bad)]), "`crate::flow`");
    }
    let fine = "//! crate::flow\n// use crate::flow::x;\nuse crate::{base::{Tokens, rng}, pool::Lease, Root};\npub(crate) fn f() {}";
    clean(&layering(&[
        Source::new("pool/queue.rs", fine),
        Source::new("pool.rs", fine),
        Source::new("lib.rs", "use crate::cli;"),
    ]));
    one_complaint(&layering(&[Source::new("extras.rs", "")]), "`extras` has no layer");
}

#[test]
fn a_witness_that_uses_the_gateway_is_caught() {
    let source = |text| [Source::new("sim/server.rs", text)];
    one_complaint(&witnesses_apart(&source("use crate::pool::Lease;")), "`crate::pool`");
    clean(&witnesses_apart(&source("use crate::{meter::StreamMeter, sim::engine, vllm};")));
}

#[test]
fn a_clock_in_a_pure_module_is_caught() {
    let source = |path, text| [Source::new(path, text)];
    one_complaint(&purity(&source("pool/queue.rs", "let t = Instant::now();")), "`Instant::now`");
    one_complaint(&purity(&source("flow/classify.rs", "let r = rand::rng();")), "`rand::rng`");
    one_complaint(&purity(&source("sim/engine/step.rs", "use std::fs;")), "`std::fs`");
    clean(&purity(&source("flow/forward.rs", "let t = Instant::now();")));
    clean(&purity(&source("pool/queue.rs", "// Instant::now\n#[cfg(test)]\nmod tests { fn f() { Instant::now(); } }")));
}

#[test]
fn a_library_outside_its_home_is_caught() {
    let source = |path, text| [Source::new(path, text)];
    one_complaint(&confinement(&source("flow/forward.rs", "use pingora::http::Foo;")), "`pingora`");
    one_complaint(&confinement(&source("flow/forward.rs", "use pingora_core::Foo;")), "`pingora`");
    one_complaint(&confinement(&source("pool/mod.rs", "prometheus::Counter")), "`prometheus`");
    clean(&confinement(&source("proxy/mod.rs", "use pingora::http::Foo;")));
    clean(&confinement(&source("cli/mod.rs", "let filter = \"pingora=warn\"; // pingora::x")));
}

#[test]
fn a_process_started_elsewhere_is_caught() {
    let source = |path| [Source::new(path, "let c = std::process::Command::new(\"vllm\");")];
    one_complaint(&spawning(&source("tuner/trial.rs")), "starts processes");
    one_complaint(&spawning(&source("cli/serve.rs")), "starts processes");
    clean(&spawning(&source("fleet/launch.rs")));
    clean(&spawning(&source("cli/demo.rs")));
}

#[test]
fn a_file_without_a_header_is_caught() {
    one_complaint(
        &headers(&[Source::new("base/rng.rs", "//! Rng.\n//! Seeded.\nfn f() {}\n//! late\n")]),
        "base/rng.rs",
    );
    clean(&headers(&[Source::new("base/rng.rs", "//! Rng.\n//!\n//! Seeded.\n")]));
}

#[test]
fn a_long_file_is_caught_and_a_stale_excuse_too() {
    let long = [Source::new("pool/queue.rs", &"\n".repeat(FILE_LINES + 1))];
    one_complaint(&length(&long, &[]), "501 lines");
    one_complaint(&length(&long, &[("pool/queue.rs", "")]), "501 lines");
    clean(&length(&long, &[("pool/queue.rs", "a table")]));
    one_complaint(&length(&[Source::new("a.rs", "")], &[("a.rs", "a table")]), "take it off");
    one_complaint(&length(&[Source::new("main.rs", &"\n".repeat(MAIN_LINES + 1))], &[]), "main.rs");
}

#[test]
fn an_unwrap_in_product_code_is_caught() {
    one_complaint(&unwraps(&[Source::new("pool/queue.rs", "x.unwrap();")]), ".unwrap()");
    clean(&unwraps(&[Source::new(
        "pool/queue.rs",
        "x.unwrap_or(1);\n#[cfg(test)]\nmod tests { fn f() { x.unwrap(); } }",
    )]));
}

#[test]
fn files_behind_cfg_test_count_as_tests() {
    let mut sources = [
        Source::new("pool/mod.rs", "mod queue;\n#[cfg(test)]\nmod tests;\npub fn f() { x.unwrap() }\n"),
        Source::new("pool/tests.rs", "//! Tests.\nfn f() { x.unwrap(); Instant::now(); }"),
        Source::new("pool/queue.rs", "//! A.\n//! B.\n//! C.\n#[cfg(test)]\npub(crate) mod fake;"),
        Source::new("pool/queue/fake.rs", "x.unwrap()"),
        Source::new("lib.rs", "#[cfg(test)]\nmod rig;\n"),
        Source::new("rig/deep.rs", ""),
    ];
    mark_tests(&mut sources);
    assert_eq!(sources.each_ref().map(|source| source.test), [false, true, false, true, false, true]);
    one_complaint(&unwraps(&sources), "pool/mod.rs");
    clean(&purity(&sources));
    clean(&headers(&sources[1..3]));
    one_complaint(&headers(&sources[3..4]), "fewer than 1 lines");
}

#[test]
fn comments_are_removed_and_strings_are_not() {
    let text = "a /* b /* c */ d */ e // f\n\"http://g\" '\"' h \"\\\"// i\" // j";
    assert_eq!(without_comments(text), "a  e \n\"http://g\"  h \"\\\"// i\" ");
    let raw = "r#\"one \" // kept \"# // gone\nr\"\\\" // gone";
    assert_eq!(without_comments(raw), "r#\"one \" // kept \"# \nr\"\\\" ");
}
