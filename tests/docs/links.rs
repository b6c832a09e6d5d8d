//! Links between pages and to files of the repository.
//!
//! Addresses of other sites are not checked: a test must work without a network.

use std::path::{Component, Path, PathBuf};

use crate::page::Page;
use crate::{clean, one_complaint, pages, root};

/// The target of a page's link as a path from the root of the repository.
fn resolved(page: &str, target: &str) -> PathBuf {
    let whole = Path::new(page).parent().unwrap_or(Path::new("")).join(target);
    let mut path = PathBuf::new();
    for part in whole.components() {
        match part {
            Component::ParentDir => drop(path.pop()),
            part => path.push(part),
        }
    }
    path
}

fn broken(pages: &[Page], exists: impl Fn(&Path) -> bool) -> Vec<String> {
    let mut complaints = Vec::new();
    for page in pages {
        for (line, link) in page.links.iter().filter(|(_, link)| !link.contains("://") && !link.starts_with("mailto:"))
        {
            let (target, anchor) = link.split_once('#').unwrap_or((link, ""));
            let path = if target.is_empty() { PathBuf::from(&page.path) } else { resolved(&page.path, target) };
            let known = pages.iter().find(|other| Path::new(&other.path) == path);
            let missing = |anchor: &str| known.is_none_or(|known| !known.anchors.iter().any(|has| has == anchor));
            if known.is_none() && !exists(&path) {
                complaints.push(format!("{}:{line}: {link}: there is no {}", page.path, path.display()));
            } else if !anchor.is_empty() && missing(anchor) {
                complaints.push(format!("{}:{line}: {link}: {} has no such heading", page.path, path.display()));
            }
        }
    }
    complaints
}

#[test]
fn every_link_leads_to_a_file_or_a_heading() {
    clean(&broken(&pages(), |path| root().join(path).exists()));
}

#[test]
fn a_broken_link_is_caught() {
    let check = |text: &str| broken(&[Page::parse("docs/a.md", text), Page::parse("b.md", "# B b\n")], |_| false);
    clean(&check("# Top\n[x](#top) [y](../b.md#b-b) [z](https://example.com/#q)"));
    one_complaint(&check("[x](c.md)"), "there is no docs/c.md");
    one_complaint(&check("[x](../b.md#b)"), "b.md has no such heading");
    one_complaint(&check("# Top\n\n[x](#tip)"), "docs/a.md:3: #tip");
}

#[test]
fn the_index_and_the_readme_name_every_page() {
    let pages = pages();
    let named = |from: &str, to: &str| {
        let from = pages.iter().find(|page| page.path == from).unwrap();
        from.links.iter().any(|(_, link)| resolved(&from.path, link) == Path::new(to))
    };
    let docs = || pages.iter().filter(|page| page.path.starts_with(".github/docs/"));
    for page in docs().filter(|page| !page.path.ends_with("/README.md")) {
        assert!(named(".github/docs/README.md", &page.path), "the index does not name {}", page.path);
    }
    assert!(named("README.md", ".github/docs/README.md") && docs().count() >= 11);
}
