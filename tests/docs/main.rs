//! The documentation is correct: its links lead somewhere, its commands and configurations are
//! accepted, every error has a section, and the README is short.
//!
//! [`page`] reads as much Markdown as the rules need. Each rule is a function from pages to
//! complaints, as in `tests/tidy`. A test runs it on the pages of the repository, where it must
//! find nothing, and on a bad page, where it must find something.

mod commands;
mod continued;
#[path = "../common/complaints.rs"]
mod complaints;
mod errors;
mod front;
mod kubernetes;
mod links;
mod page;
mod settings;

use std::fs;
use std::path::{Path, PathBuf};

use complaints::{clean, one_complaint};
use page::Page;

fn root() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR"))
}

fn read(path: impl AsRef<Path>) -> String {
    let path = root().join(path);
    fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

fn pages() -> Vec<Page> {
    let mut paths: Vec<String> =
        ["README.md", "grafana/README.md", "benches/README.md", "config/lab/placement/README.md"]
            .map(str::to_owned)
            .to_vec();
    for folder in [".github", ".github/docs", ".github/docs/measurements"] {
        let files = fs::read_dir(root().join(folder)).unwrap().map(|file| file.unwrap().file_name());
        let names = files.map(|name| name.into_string().unwrap()).filter(|name| name.ends_with(".md"));
        paths.extend(names.map(|name| format!("{folder}/{name}")));
    }
    paths.sort();
    assert!(paths.len() >= 18, "found only {paths:?}");
    paths.iter().map(|path| Page::parse(path, &read(path))).collect()
}
