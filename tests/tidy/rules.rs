//! The rules about single files and about the manifests.
//!
//! Each rule returns one line for each complaint, with the place, the fault, and how to fix it.

use std::collections::BTreeMap;

use crate::source::{Code, Source};

/// The crates of this workspace from the bottom up. A crate may use only crates before it.
const CRATES: &[&str] = &[
    "sluice-core",
    "sluice-cluster",
    "sluice-config",
    "sluice-gateway",
    "sluice-fleet",
    "sluice-bench",
    "sluice-sim",
    "sluice-online",
    "sluice-lab",
    "sluice-tune",
    "sluice-admin",
    "sluice-serve",
    "sluice",
];
/// Crates that check the gateway from outside and must not share its state code. They may use only
/// `INDEPENDENT_USE`.
const INDEPENDENT: &[&str] = &["sluice-bench", "sluice-sim"];
const INDEPENDENT_USE: &str = "sluice-core";

/// Pure modules, which take time and random numbers as parameters and do no I/O. Each is the path
/// of a folder, or of a file without `.rs`.
const PURE: &[&str] = &[
    "core",
    "cluster",
    "gateway/pool",
    "gateway/experiment",
    "gateway/flow/classify",
    "sim/machine/cost",
    "sim/machine/memory",
    "sim/machine/profile",
    "sim/engine",
    "sim/virtual_server",
];
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
    "std::net::TcpStream",
    "std::net::TcpListener",
    "tokio::fs",
    "tokio::net",
    "thread::sleep",
];

/// Beginnings of the names of library crates, and the only modules that may name these crates.
const CONFINED: &[(&str, &[&str])] = &[
    ("pingora", &["gateway/proxy", "serve", "admin"]),
    ("prometheus", &["gateway/telemetry"]),
    ("opentelemetry", &["gateway/telemetry"]),
];

/// Names that start a process, and the modules that may use them.
const SPAWNING: &[&str] = &["process::Command", "Command::new", "tokio::process"];
const SPAWNERS: &[&str] = &["fleet", "cli/demo", "cli/sim"];

/// Minimum number of `//!` lines at the start of a file, which describe its content, reason, rules
/// and bounds.
const HEADER_LINES: usize = 3;
const FILE_LINES: usize = 500;
/// Maximum lines of `src/main.rs`, which only calls the library.
const MAIN_LINES: usize = 60;
const COMMENT_COLUMNS: usize = 100;
/// Words that often stand where a noun belongs, each with the maximum number of uses in 1,000 words
/// of comments.
const PRONOUNS: [(&str, f64); 3] = [("what", 1.0), ("those", 0.5), ("its", 3.0)];
const FUNCTION_LINES: usize = 80;

/// Whether a path in the code contains the parts of `what`, such as `a::b`, one after another.
fn names(code: &Code, what: &str) -> bool {
    let what: Vec<&str> = what.split("::").collect();
    code.named().any(|path| path.windows(what.len()).any(|part| part == what))
}

/// A crate uses only crates below it, and the independent crates share no state code with the
/// gateway.
pub(crate) fn crates(manifests: &[toml::Table]) -> Vec<String> {
    let mut complaints = Vec::new();
    for manifest in manifests {
        let Some(own) = manifest["package"]["name"].as_str() else { continue };
        let Some(place) = CRATES.iter().position(|name| *name == own) else {
            complaints.push(format!("{own}: give the crate its place in CRATES of tests/tidy/rules.rs"));
            continue;
        };
        let kinds = ["dependencies", "dev-dependencies", "build-dependencies"];
        let used = kinds.iter().filter_map(|kind| manifest.get(*kind)?.as_table()).flat_map(toml::Table::keys);
        for used in used.filter(|used| CRATES.contains(&used.as_str())) {
            if !CRATES[..place].contains(&used.as_str()) {
                complaints.push(format!("{own}: may not use `{used}`, which lies above it"));
            } else if INDEPENDENT.contains(&own) && used != INDEPENDENT_USE {
                complaints.push(format!("{own}: is independent of the gateway and may not use `{used}`"));
            }
        }
    }
    complaints
}

/// Pure modules take time, random numbers and bytes as parameters.
pub(crate) fn purity(sources: &[Source]) -> Vec<String> {
    let pure = sources.iter().filter(|source| PURE.iter().any(|place| source.is_in(place)));
    let complain = |source: &Source| {
        let impure = IMPURE.iter().filter(|what| names(&source.product, what));
        let lines = impure.map(|what| {
            format!("{}: `{what}` in a pure module; take time, random numbers or bytes as a parameter", source.path)
        });
        lines.collect::<Vec<_>>()
    };
    pure.flat_map(complain).collect()
}

/// Only the modules in [`CONFINED`] name the libraries there.
pub(crate) fn confinement(sources: &[Source]) -> Vec<String> {
    let mut complaints = Vec::new();
    for source in sources {
        for (library, homes) in CONFINED {
            let from = |path: &Vec<String>| path.len() > 1 && path[0].starts_with(library);
            if source.all.named().any(from) && !homes.iter().any(|home| source.is_in(home)) {
                complaints.push(format!("{}: `{library}` may be named only in {homes:?}; wrap it there", source.path));
            }
        }
    }
    complaints
}

pub(crate) fn spawning(sources: &[Source]) -> Vec<String> {
    let elsewhere = sources.iter().filter(|source| !SPAWNERS.iter().any(|place| source.is_in(place)));
    let complain = |source: &Source| {
        let what = SPAWNING.iter().find(|what| names(&source.product, what))?;
        Some(format!("{}: `{what}` starts processes; only {SPAWNERS:?} may", source.path))
    };
    elsewhere.filter_map(complain).collect()
}

/// Code outside tests handles errors, or states the invariant that rules them out.
pub(crate) fn unwraps(sources: &[Source]) -> Vec<String> {
    let bad = sources.iter().filter(|source| source.product.methods.contains("unwrap"));
    let complain = |source: &Source| {
        format!("{}: `.unwrap()` outside tests; return an error, or `.expect(\"the invariant\")`", source.path)
    };
    bad.map(complain).collect()
}

/// Every file has a header. One line is enough for a file of tests.
pub(crate) fn headers(sources: &[Source]) -> Vec<String> {
    let complain = |source: &Source| {
        let required = if source.test { 1 } else { HEADER_LINES };
        let header = source.text.lines().take_while(|line| line.starts_with("//!")).count();
        let short = header < required;
        short.then(|| format!("{}: {header} lines of `//!`, {required} required; say what it is, and why", source.path))
    };
    sources.iter().filter_map(complain).collect()
}

pub(crate) fn lengths<'a>(files: impl IntoIterator<Item = (&'a str, &'a str)>) -> Vec<String> {
    let complain = |(path, text): (&str, &str)| {
        let limit = if path == "src/main.rs" { MAIN_LINES } else { FILE_LINES };
        let lines = text.lines().count();
        (lines > limit).then(|| format!("{path}: {lines} lines; split it (limit {limit})"))
    };
    files.into_iter().filter_map(complain).collect()
}

pub(crate) fn widths<'a>(files: impl IntoIterator<Item = (&'a str, &'a str)>) -> Vec<String> {
    let of_file = |(path, text): (&'a str, &'a str)| {
        let wide = comments(text).filter(|(_, line)| line.chars().count() > COMMENT_COLUMNS);
        wide.map(move |(number, line)| format!("{path}:{number}: {} columns; wrap the comment", line.chars().count()))
    };
    files.into_iter().flat_map(of_file).collect()
}

/// Words that stand in the place of a noun are rare in all comments together.
pub(crate) fn pronouns<'a>(files: impl IntoIterator<Item = (&'a str, &'a str)>) -> Vec<String> {
    let (mut all, mut found) = (0.0, PRONOUNS.map(|_| 0.0));
    for (_, line) in files.into_iter().flat_map(|(_, text)| comments(text)) {
        for word in line.split(|letter: char| !letter.is_alphabetic()).filter(|word| !word.is_empty()) {
            all += 1.0;
            for ((pronoun, _), count) in PRONOUNS.iter().zip(&mut found) {
                *count += f64::from(u8::from(word.eq_ignore_ascii_case(pronoun)));
            }
        }
    }
    let per_thousand = PRONOUNS.iter().zip(found).map(|(known, count)| (known, 1e3 * count / f64::max(all, 1.0)));
    let many = per_thousand.filter(|((_, most), rate)| rate > most);
    many.map(|((word, most), rate)| format!("`{word}`: {rate:.2} of 1,000 words (limit {most}); name the noun"))
        .collect()
}

/// The lines of comments, with their numbers.
fn comments(text: &str) -> impl Iterator<Item = (usize, &str)> {
    let numbered = text.lines().enumerate().map(|(at, line)| (at + 1, line));
    numbered.filter(|(_, line)| line.trim_start().starts_with("//"))
}

/// No function has more than [`FUNCTION_LINES`] lines, except the excused ones, which are given as
/// `path::function`.
pub(crate) fn functions(sources: &[Source], excused: &BTreeMap<String, String>) -> Vec<String> {
    let all = sources.iter().flat_map(|source| {
        let functions = source.product.functions.iter().filter(|(_, lines)| *lines > FUNCTION_LINES);
        functions.map(|(name, lines)| (format!("{}::{name}", source.path), *lines))
    });
    let long: BTreeMap<String, usize> = all.collect();
    let new = long.iter().filter(|(name, _)| !excused.contains_key(*name));
    let new = new.map(|(name, lines)| format!("{name}: {lines} lines; split it (limit {FUNCTION_LINES})"));
    let stale = excused.keys().filter(|name| !long.contains_key(*name));
    new.chain(stale.map(|name| format!("{name}: excused as long but is not; remove the excuse"))).collect()
}

/// No file has vague and literary words, except as many as `excused` says for it. This number must
/// be exact, so it can only go down.
pub(crate) fn words<'a>(
    files: impl IntoIterator<Item = (&'a str, &'a str)>,
    banned: &[String],
    excused: &BTreeMap<String, usize>,
) -> Vec<String> {
    let mut complaints = Vec::new();
    let mut excused = excused.clone();
    for (path, text) in files {
        let allowed = excused.remove(path).unwrap_or(0);
        let mut found: Vec<String> = Vec::new();
        for (line, text) in text.lines().enumerate() {
            let text = text.to_ascii_lowercase();
            let words = text.split(|letter: char| !letter.is_ascii_alphabetic());
            let bad = words.filter(|word| banned.iter().any(|banned| banned == word));
            found.extend(bad.map(|word| format!("{}: {word}", line + 1)));
        }
        if found.len() > allowed {
            let found = found.join(", ");
            complaints.push(format!(
                "{path}: banned words at line {found} (excused: {allowed}); name the actor, in plain words"
            ));
        } else if found.len() < allowed {
            complaints
                .push(format!("{path}: excused for {allowed} banned words, has {}; lower the number", found.len()));
        }
    }
    complaints.extend(
        excused.keys().map(|path| format!("{path}: excused for banned words but does not exist; remove the excuse")),
    );
    complaints
}

mod tests {
    use super::*;
    use crate::source::parse;
    use crate::{clean, one_complaint};

    fn one(path: &str, text: &str) -> Vec<Source> {
        parse([("core/lib.rs", ""), ("gateway/lib.rs", ""), ("sim/lib.rs", ""), (path, text)])
    }

    fn none() -> BTreeMap<String, String> {
        BTreeMap::new()
    }

    #[test]
    fn a_crate_that_uses_one_above_it_is_caught() {
        let manifest = |text: &str| [text.parse::<toml::Table>().unwrap()];
        let depends = |own: &str, kind: &str, used: &str| {
            crates(&manifest(&format!("[package]\nname = \"{own}\"\n[{kind}]\n{used}.workspace = true\ntokio = \"1\"")))
        };
        one_complaint(&depends("sluice-core", "dependencies", "sluice-gateway"), "lies above it");
        one_complaint(&depends("sluice-fleet", "dev-dependencies", "sluice-sim"), "lies above it");
        one_complaint(&depends("sluice-sim", "dependencies", "sluice-gateway"), "independent");
        one_complaint(&depends("sluice-extra", "dependencies", "sluice-core"), "give the crate its place");
        clean(&depends("sluice-sim", "dependencies", "sluice-core"));
        clean(&depends("sluice", "dependencies", "sluice-sim"));
    }

    #[test]
    fn a_clock_in_a_pure_module_is_caught() {
        let now = "fn f() { let t = Instant::now(); }";
        one_complaint(&purity(&one("gateway/pool/queue.rs", now)), "`Instant::now`");
        one_complaint(&purity(&one("gateway/flow/classify.rs", "fn f() { rand::rng(); }")), "`rand::rng`");
        one_complaint(&purity(&one("sim/engine/step.rs", "use std::{fs, io};")), "`std::fs`");
        one_complaint(
            &purity(&one("core/meter/mod.rs", "fn f() { vec![std::time::Instant::now()]; }")),
            "`Instant::now`",
        );
        clean(&purity(&one("gateway/flow/forward.rs", now)));
        let tests = "// Instant::now\n#[cfg(test)]\nmod tests { fn f() { Instant::now(); } }";
        clean(&purity(&one("gateway/pool/queue.rs", tests)));
    }

    #[test]
    fn a_library_outside_its_home_is_caught() {
        one_complaint(&confinement(&one("gateway/flow/forward.rs", "use pingora::http::Foo;")), "`pingora`");
        one_complaint(&confinement(&one("gateway/flow/forward.rs", "use pingora_core::Foo;")), "`pingora`");
        one_complaint(&confinement(&one("gateway/pool/mod.rs", "type A = prometheus::Counter;")), "`prometheus`");
        clean(&confinement(&one("gateway/proxy/mod.rs", "use pingora::http::Foo;")));
        clean(&confinement(&one("cli/mod.rs", "const FILTER: &str = \"pingora::x=warn\"; // pingora::x")));
    }

    #[test]
    fn a_process_started_elsewhere_is_caught() {
        let text = "fn f() { let c = std::process::Command::new(\"vllm\"); }";
        one_complaint(&spawning(&one("tuner/trial.rs", text)), "starts processes");
        one_complaint(&spawning(&one("cli/serve.rs", "use tokio::{process, io};")), "starts processes");
        clean(&spawning(&one("fleet/launch.rs", text)));
        clean(&spawning(&one("cli/demo.rs", text)));
    }

    #[test]
    fn an_unwrap_in_product_code_is_caught() {
        one_complaint(&unwraps(&one("pool/queue.rs", "fn f() { x.unwrap(); }")), ".unwrap()");
        one_complaint(&unwraps(&one("pool/queue.rs", "fn f() { assert!(x.unwrap()); }")), ".unwrap()");
        clean(&unwraps(&one("pool/queue.rs", "fn f() { x.unwrap_or(1); }\n#[cfg(test)]\nfn g() { x.unwrap(); }")));
    }

    #[test]
    fn a_file_without_a_header_is_caught() {
        let text = "//! Rng.\n//! Seeded.\nfn f() {}\n";
        one_complaint(&headers(&parse([("base/rng.rs", text)])), "base/rng.rs: 2 lines");
        clean(&headers(&parse([("base/rng.rs", "//! Rng.\n//!\n//! Seeded.\n")])));
        let tests = "//! A.\n//! B.\n//! C.\n#[cfg(test)]\nmod tests;";
        clean(&headers(&parse([("base/mod.rs", tests), ("base/tests.rs", "//! Tests.")])));
        one_complaint(
            &headers(&parse([("base/mod.rs", tests), ("base/tests.rs", "")])),
            "0 lines of `//!`, 1 required",
        );
    }

    #[test]
    fn a_long_file_is_caught() {
        let long = "\n".repeat(FILE_LINES + 1);
        one_complaint(&lengths([("src/pool/queue.rs", &*long)]), "501 lines");
        one_complaint(&lengths([("src/main.rs", &long[..MAIN_LINES + 1])]), "61 lines");
        clean(&lengths([("src/pool/queue.rs", &long[1..])]));
    }

    #[test]
    fn a_wide_comment_is_caught_and_wide_code_is_not() {
        let line = "x".repeat(COMMENT_COLUMNS - 3);
        clean(&widths([("a.rs", &*format!("// {line}\nlet text = \"{line}{line}\";\n"))]));
        one_complaint(&widths([("a.rs", &*format!("fn f() {{}}\n// {line}x\n"))]), "a.rs:2: 101 columns");
    }

    #[test]
    fn comments_that_leave_the_noun_out_are_caught() {
        let plain = "// The engine answers before the client leaves, and the gateway keeps the slot.\n".repeat(100);
        clean(&pronouns([("a.rs", &*format!("{plain}let those = what;\n"))]));
        one_complaint(
            &pronouns([("a.rs", &*format!("{plain}// What it has.\n// And what it knows.\n"))]),
            "`what`: 1.53",
        );
    }

    #[test]
    fn a_long_function_is_caught_and_a_stale_excuse_too() {
        let body = "    a();\n".repeat(FUNCTION_LINES);
        let text = format!("impl A {{\n    async fn f() {{\n{body}    }}\n}}\n#[cfg(test)]\nfn g() {{\n{body}}}\n");
        let excuse = |name: &str| BTreeMap::from([(name.to_owned(), "a table".to_owned())]);
        one_complaint(&functions(&one("pool/queue.rs", &text), &none()), "pool/queue.rs::f: 82 lines");
        clean(&functions(&one("pool/queue.rs", &text), &excuse("pool/queue.rs::f")));
        one_complaint(&functions(&one("pool/queue.rs", "fn f() {}"), &excuse("pool/queue.rs::f")), "remove the excuse");
    }

    #[test]
    fn a_vague_word_is_caught_and_the_excuses_only_go_down() {
        let banned = ["gadget".to_owned(), "gizmo".to_owned()];
        let check = |text, excused: &[(&str, usize)]| {
            let excused = excused.iter().map(|(path, number)| ((*path).to_owned(), *number)).collect();
            words([("a.rs", text)], &banned, &excused)
        };
        one_complaint(&check("// Gadget waits.\nfn a_gizmo() {}", &[]), "at line 1: gadget, 2: gizmo (excused: 0)");
        one_complaint(&check("// Gadget waits.\nfn a_gizmo() {}", &[("a.rs", 1)]), "(excused: 1)");
        clean(&check("// Gadget waits.", &[("a.rs", 1)]));
        one_complaint(&check("// No client waits.", &[("a.rs", 1)]), "has 0; lower the number");
        one_complaint(&check("// gizmos", &[("b.rs", 1)]), "b.rs: excused for banned words but does not exist");
    }
}
