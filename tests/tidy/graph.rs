//! The graph of files that use other files: layers between modules, and import cycles among files.
//!
//! An import is followed through re-exports to the file that defines the name. So the import of a
//! type that `mod.rs` only re-exports does not count as a use of `mod.rs`. If a macro or another
//! crate defines the name, the last file on the way counts as its place.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use petgraph::algo::tarjan_scc;
use petgraph::graphmap::DiGraphMap;

use crate::source::{Code, Source};

/// The code of a file that counts: all of it, or only the code without tests.
#[derive(Clone, Copy)]
enum Part {
    All,
    Product,
}

struct Files<'a> {
    sources: &'a [Source],
    by_module: HashMap<(&'a str, &'a [String]), usize>,
    part: Part,
}

impl<'a> Files<'a> {
    fn new(sources: &'a [Source], part: Part) -> Self {
        let modules = sources.iter().enumerate().filter(|(_, source)| source.path != "main.rs");
        let by_module = modules.map(|(at, source)| ((&*source.crate_folder, &*source.module), at)).collect();
        Self { sources, by_module, part }
    }

    fn code(&self, file: usize) -> &'a Code {
        match self.part {
            Part::All => &self.sources[file].all,
            Part::Product => &self.sources[file].product,
        }
    }

    /// Turns a path in a file into a path from the root of the crate. `None` for another crate, and
    /// for a name of the file itself.
    fn absolute(&self, file: usize, path: &[String], aliases: bool) -> Option<Vec<String>> {
        let source = &self.sources[file];
        let first = path.first()?;
        let supers = path.iter().take_while(|part| *part == "super").count();
        let child = [&source.module[..], std::slice::from_ref(first)].concat();
        if first == "crate" {
            return Some(path[1..].to_vec());
        } else if first == "self" {
            return Some([&source.module[..], &path[1..]].concat());
        } else if supers > 0 {
            let above = source.module.len().checked_sub(supers)?;
            return Some([&source.module[..above], &path[supers..]].concat());
        } else if self.by_module.contains_key(&(&*source.crate_folder, &*child)) {
            return Some([&source.module[..], path].concat());
        }
        let alias = self.code(file).imports.iter().find(|import| aliases && import.name == *first)?;
        Some([&self.absolute(file, &alias.path, false)?[..], &path[1..]].concat())
    }

    /// The file that defines the item at a path from the root of the crate.
    fn resolve(&self, folder: &str, path: &[String], seen: &mut BTreeSet<(usize, String)>) -> Option<usize> {
        let deepest = (0..=path.len()).rev().find(|&depth| self.by_module.contains_key(&(folder, &path[..depth])))?;
        let file = self.by_module[&(folder, &path[..deepest])];
        let Some(name) = path.get(deepest) else { return Some(file) };
        if self.code(file).items.contains(name) || !seen.insert((file, name.clone())) {
            return Some(file);
        }
        let imports = &self.code(file).imports;
        if let Some(import) = imports.iter().find(|import| import.name == *name) {
            return self.resolve(folder, &self.absolute(file, &import.path, false)?, seen);
        }
        let globs = imports.iter().filter(|import| import.public && import.name == "*");
        let mut globs = globs.filter_map(|import| self.absolute(file, &import.path, false));
        let defined = globs.find_map(|module| {
            let at = *self.by_module.get(&(folder, &*module))?;
            self.code(at).items.contains(name).then_some(at)
        });
        Some(defined.unwrap_or(file))
    }

    /// The files that a file uses, each with one of the paths that refer to it.
    fn uses(&self, file: usize) -> BTreeMap<usize, String> {
        let (source, code) = (&self.sources[file], self.code(file));
        let named: BTreeSet<&str> = code.paths.iter().filter_map(|path| path.first().map(String::as_str)).collect();
        // Two kinds of import do not count. One is a re-export that the file does not use itself.
        // The other is the import of a module, because the items of the module count where the code
        // names them.
        let imports = code.imports.iter().filter(|import| !import.public || named.contains(&*import.name));
        let imports = imports.filter(|import| {
            let module = self.absolute(file, &import.path, false);
            import.name == "*"
                || !module.is_some_and(|path| self.by_module.contains_key(&(&*source.crate_folder, &*path)))
        });
        let paths = code.paths.iter().filter(|path| path.len() > 1);
        let mut uses = BTreeMap::new();
        for path in imports.map(|import| &import.path).chain(paths) {
            let Some(whole) = self.absolute(file, path, true) else { continue };
            let Some(used) = self.resolve(&source.crate_folder, &whole, &mut BTreeSet::new()) else { continue };
            if used != file {
                uses.entry(used).or_insert_with(|| path.join("::"));
            }
        }
        uses
    }
}

/// Modules are declared lowest layer first in `lib.rs`; a file uses only modules that are declared
/// above its own.
///
/// `exempt` maps folders of crates with another order to the reason.
pub(crate) fn layers(sources: &[Source], exempt: &BTreeMap<String, String>) -> Vec<String> {
    let files = Files::new(sources, Part::All);
    let mut complaints = Vec::new();
    for (at, source) in sources.iter().enumerate() {
        let (Some(own), false) = (source.module.first(), exempt.contains_key(&source.crate_folder)) else { continue };
        let root = files.by_module.get(&(&*source.crate_folder, &[][..]));
        let declared = root.map_or(&[][..], |root| &sources[*root].all.modules);
        let place = |name: &String| declared.iter().position(|module| module == name);
        if place(own).is_none() {
            complaints.push(format!("{}: `{own}` is not declared in the crate's lib.rs", source.path));
        }
        for (used, path) in files.uses(at) {
            let other = sources[used].module.first().filter(|other| *other != own);
            if other.is_some_and(|other| place(other) >= place(own)) {
                complaints.push(format!(
                    "{}: `{path}` is declared below `{own}` in lib.rs; move what is shared down, or pass it in",
                    source.path
                ));
            }
        }
    }
    complaints
}

/// No file uses, directly or through other files, a file that uses it.
pub(crate) fn cycles(sources: &[Source], excused: &BTreeMap<String, String>) -> Vec<String> {
    let files = Files::new(sources, Part::Product);
    let uses: Vec<BTreeMap<usize, String>> = (0..sources.len()).map(|file| files.uses(file)).collect();
    let mut graph = DiGraphMap::<usize, ()>::new();
    for (file, used) in uses.iter().enumerate() {
        for used in used.keys() {
            graph.add_edge(file, *used, ());
        }
    }
    let mut found: Vec<Vec<usize>> = tarjan_scc(&graph).into_iter().filter(|files| files.len() > 1).collect();
    found.iter_mut().for_each(|files| files.sort_unstable());
    found.sort();
    let mut complaints = Vec::new();
    for cycle in &found {
        if cycle.iter().all(|file| excused.contains_key(&sources[*file].path)) {
            continue;
        }
        let edge = |file: usize| {
            let used = uses[file].iter().filter(|(used, _)| cycle.contains(used));
            let used: Vec<String> = used.map(|(used, path)| format!("{} ({path})", sources[*used].path)).collect();
            format!("\n    {} uses {}", sources[file].path, used.join(", "))
        };
        let edges: String = cycle.iter().map(|file| edge(*file)).collect();
        complaints.push(format!("import cycle; move what they share into a file of its own:{edges}"));
    }
    let in_cycles: BTreeSet<&str> = found.iter().flatten().map(|file| &*sources[*file].path).collect();
    let stale = excused.keys().filter(|path| !in_cycles.contains(path.as_str()));
    complaints
        .extend(stale.map(|path| format!("{path}: excused as part of a cycle but is in none; remove the excuse")));
    complaints
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::source::parse;
    use crate::{clean, one_complaint};

    #[test]
    fn an_upward_import_is_caught_however_it_is_written() {
        let lib = "pub mod base;\npub mod pool;\npub mod flow;";
        for bad in [
            "use crate::flow::Flow;",
            "use crate::{base::Tokens, flow::{self, Flow}};",
            "use super::super::flow::Flow;",
            "fn f() { crate::flow::run() }",
            "fn f() { assert!(crate::flow::run()) }",
            "#[cfg(test)]\nmod tests { use crate::flow::Flow; }",
        ] {
            let files = [("lib.rs", lib), ("flow/mod.rs", ""), ("base/mod.rs", ""), ("pool/queue.rs", bad)];
            one_complaint(&layers(&parse(files), &BTreeMap::new()), "is declared below `pool` in lib.rs");
        }
        let fine = "//! crate::flow\n// use crate::flow::x;\nuse crate::{base::{Tokens, rng}, pool::Lease, Root};";
        let files = [("lib.rs", lib), ("flow/mod.rs", ""), ("base/mod.rs", ""), ("pool/queue.rs", fine)];
        clean(&layers(&parse(files), &BTreeMap::new()));
        let files = [("lib.rs", lib), ("extras.rs", "")];
        one_complaint(&layers(&parse(files), &BTreeMap::new()), "`extras` is not declared");
        clean(&layers(&parse(files), &BTreeMap::from([(String::new(), "why".to_owned())])));
    }

    #[test]
    fn a_cycle_is_caught_through_re_exports_and_a_stale_excuse_too() {
        let files = [
            ("core/lib.rs", "pub mod pool;"),
            ("core/pool/mod.rs", "mod lease; mod state;\npub use lease::Lease;\npub struct Config;"),
            ("core/pool/lease.rs", "use super::state;\nfn f() { state::step() }\npub struct Lease;"),
            ("core/pool/state.rs", "pub fn step(_: super::Lease) {}"),
        ];
        let sources = parse(files);
        one_complaint(&cycles(&sources, &BTreeMap::new()), "core/pool/lease.rs uses core/pool/state.rs");
        let excuse = |path: &str| (path.to_owned(), "why".to_owned());
        let two = [excuse("core/pool/lease.rs"), excuse("core/pool/state.rs")];
        clean(&cycles(&sources, &BTreeMap::from(two.clone())));
        let three = [&two[..], &[excuse("core/pool/mod.rs")]].concat();
        one_complaint(&cycles(&sources, &BTreeMap::from_iter(three)), "core/pool/mod.rs: excused");
    }

    #[test]
    fn a_parent_that_re_exports_and_a_test_that_looks_up_are_no_cycle() {
        clean(&cycles(
            &parse([
                ("lib.rs", "pub mod pool;"),
                ("pool/mod.rs", "mod lease; pub use lease::Lease;"),
                ("pool/lease.rs", "pub struct Lease;\n#[cfg(test)]\nmod tests { use crate::pool::queue::Queue; }"),
                ("pool/queue.rs", "use super::Lease;\nstruct Queue(Lease);"),
            ]),
            &BTreeMap::new(),
        ));
        let files = [
            ("pool/mod.rs", "mod lease; use lease::Lease; pub struct Pool(Lease);"),
            ("pool/lease.rs", "struct Lease(super::Pool);"),
        ];
        one_complaint(&cycles(&parse(files), &BTreeMap::new()), "pool/mod.rs uses pool/lease.rs (lease::Lease)");
    }
}
