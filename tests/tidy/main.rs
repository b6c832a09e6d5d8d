//! The rules of this project that the compiler does not check.
//!
//! The compiler enforces the layers between crates, if their manifests are right. This test checks
//! the manifests, and the layers inside a crate: `lib.rs` declares the modules lowest layer first,
//! and a file uses only modules declared above its own. Other rules are about import cycles,
//! replaceable libraries, starting processes, clocks and randomness in modules that are tested on
//! paused time, and the length of files and functions.
//!
//! Every rule is a function from sources to complaints. It runs twice. On the repository it must
//! find nothing that `excuses.toml` does not list, and on a bad snippet it must find something. An
//! excuse that is no longer needed is a complaint too, so that the lists only get shorter.

#[path = "../common/complaints.rs"]
mod complaints;
mod graph;
mod rules;
mod source;

use std::collections::BTreeMap;
use std::fs;
use std::sync::LazyLock;

use complaints::{clean, one_complaint};
use source::{Source, parse, root, rust_files};

/// Exceptions to the rules, mapped to their reasons.
#[derive(serde::Deserialize)]
#[serde(deny_unknown_fields)]
struct Excuses {
    /// Folders of crates whose `lib.rs` does not declare its modules lowest layer first.
    unordered: BTreeMap<String, String>,
    cycles: BTreeMap<String, String>,
    functions: BTreeMap<String, String>,
    words: Words,
}

#[derive(serde::Deserialize)]
#[serde(deny_unknown_fields)]
struct Words {
    banned: Vec<String>,
    /// Number of banned words that each file may still have.
    files: BTreeMap<String, usize>,
}

static SOURCES: LazyLock<Vec<Source>> = LazyLock::new(|| {
    let files = rust_files("src", "src");
    assert!(files.len() > 300, "found only {} files", files.len());
    parse(files.iter().map(|(path, text)| (&**path, &**text)))
});

static EXCUSES: LazyLock<Excuses> = LazyLock::new(|| toml::from_str(include_str!("excuses.toml")).unwrap());

/// Every Rust file of the repository: path from the root, and text.
fn files() -> Vec<(String, String)> {
    ["src", "tests", "benches"].iter().flat_map(|folder| rust_files(folder, "")).collect()
}

/// buildah reads the ignore file in the root of the repository, and docker the one next to the
/// Containerfile.
#[test]
fn an_image_is_built_from_the_same_files_by_docker_and_buildah() {
    let read = |path: &str| fs::read_to_string(root().join(path)).unwrap();
    assert_eq!(read(".containerignore"), read("config/package/Containerfile.dockerignore"));
}

#[test]
fn crates_use_only_crates_below() {
    let top: toml::Table = fs::read_to_string(root().join("Cargo.toml")).unwrap().parse().unwrap();
    let members = top["workspace"]["members"].as_array().unwrap().iter().map(|member| member.as_str().unwrap());
    let manifest = |member| fs::read_to_string(root().join(member).join("Cargo.toml")).unwrap().parse().unwrap();
    let manifests: Vec<toml::Table> = members.map(manifest).chain([top.clone()]).collect();
    clean(&rules::crates(&manifests));
}

#[test]
fn modules_use_only_modules_declared_above() {
    clean(&graph::layers(&SOURCES, &EXCUSES.unordered));
}

#[test]
fn no_files_use_each_other() {
    clean(&graph::cycles(&SOURCES, &EXCUSES.cycles));
}

#[test]
fn pure_modules_take_time_and_chance_as_parameters() {
    clean(&rules::purity(&SOURCES));
}

#[test]
fn replaceable_libraries_stay_in_their_modules() {
    clean(&rules::confinement(&SOURCES));
}

#[test]
fn only_the_fleet_the_demo_and_the_simulator_start_processes() {
    clean(&rules::spawning(&SOURCES));
}

#[test]
fn product_code_does_not_unwrap() {
    clean(&rules::unwraps(&SOURCES));
}

#[test]
fn every_file_says_what_it_is() {
    clean(&rules::headers(&SOURCES));
}

#[test]
fn no_file_is_too_long_to_read() {
    clean(&rules::lengths(files().iter().map(|(path, text)| (&**path, &**text))));
}

#[test]
fn comments_are_narrow_and_name_the_noun() {
    let files = files();
    let files = || files.iter().map(|(path, text)| (&**path, &**text));
    clean(&rules::widths(files()));
    clean(&rules::pronouns(files()));
}

#[test]
fn no_function_is_too_long_to_read() {
    clean(&rules::functions(&SOURCES, &EXCUSES.functions));
}

#[test]
fn words_are_plain() {
    let files = files();
    let files = files.iter().map(|(path, text)| (&**path, &**text));
    clean(&rules::words(files, &EXCUSES.words.banned, &EXCUSES.words.files));
}

#[test]
fn sample_configurations_exist() {
    let folder = root().join("config");
    let entries = fs::read_dir(&folder).unwrap_or_else(|error| panic!("{}: {error}; add samples", folder.display()));
    let names: Vec<_> = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    assert!(names.iter().any(|name| name == "sluice.toml"), "config/sluice.toml is the commented reference; add it");
    let samples = names.iter().filter(|name| name.ends_with(".toml")).count();
    assert!(samples >= 2, "config/ has {samples} file(s); keep at least one small sample beside the reference");
}
