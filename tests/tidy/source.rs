//! The sources of the workspace as the rules see them: parsed with `syn`, with test code separated
//! from product code.
//!
//! Test code is an item behind `#[cfg(test)]` or `#[cfg(any(test, feature = "testing"))]`, and
//! every file that such an item declares. Calls of macros are not expanded. Paths are read from the
//! tokens of the call instead.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

use proc_macro2::{TokenStream, TokenTree};
use syn::spanned::Spanned;
use syn::visit::{self, Visit};
use syn::visit_mut::{self, VisitMut};

/// One imported name of a `use` item.
pub(crate) struct Import {
    pub(crate) path: Vec<String>,
    /// The name in this file; `*` for a glob.
    pub(crate) name: String,
    /// Whether the import is a re-export.
    pub(crate) public: bool,
}

/// The parts of a file's syntax that the rules need.
#[derive(Default)]
pub(crate) struct Code {
    pub(crate) imports: Vec<Import>,
    /// Paths outside `use` items, including single names.
    pub(crate) paths: BTreeSet<Vec<String>>,
    /// Names of the items at the top of the file.
    pub(crate) items: BTreeSet<String>,
    /// Modules with separate files, in the order of their declaration.
    pub(crate) modules: Vec<String>,
    pub(crate) methods: BTreeSet<String>,
    /// Names of functions, each with its number of lines.
    pub(crate) functions: Vec<(String, usize)>,
}

impl Code {
    fn read(file: &syn::File) -> Self {
        let mut code = Self::default();
        code.visit_file(file);
        code.items = file.items.iter().filter_map(item_name).collect();
        code
    }

    /// All paths that are named: imported or used.
    pub(crate) fn named(&self) -> impl Iterator<Item = &Vec<String>> {
        self.imports.iter().map(|import| &import.path).chain(&self.paths)
    }

    fn import(&mut self, tree: &syn::UseTree, prefix: &[String], public: bool) {
        let path = |name: &syn::Ident| [prefix, &[name.to_string()]].concat();
        let (path, name) = match tree {
            syn::UseTree::Path(part) => return self.import(&part.tree, &path(&part.ident), public),
            syn::UseTree::Group(group) => {
                return group.items.iter().for_each(|item| self.import(item, prefix, public));
            }
            syn::UseTree::Name(name) if name.ident == "self" => {
                (prefix.to_vec(), prefix.last().cloned().unwrap_or_default())
            }
            syn::UseTree::Name(name) => (path(&name.ident), name.ident.to_string()),
            syn::UseTree::Rename(name) if name.ident == "self" => (prefix.to_vec(), name.rename.to_string()),
            syn::UseTree::Rename(name) => (path(&name.ident), name.rename.to_string()),
            syn::UseTree::Glob(_) => (prefix.to_vec(), "*".to_owned()),
        };
        self.imports.push(Import { path, name, public });
    }

    fn function(&mut self, name: &syn::Ident, whole: &impl Spanned) {
        let span = whole.span();
        self.functions.push((name.to_string(), span.end().line + 1 - span.start().line));
    }

    /// Reads paths and method calls from the tokens of a macro call.
    fn tokens(&mut self, tokens: TokenStream) {
        let mut path: Vec<String> = Vec::new();
        let (mut colons, mut dot) = (0, false);
        for tree in tokens {
            match &tree {
                TokenTree::Punct(punct) if punct.as_char() == ':' && !path.is_empty() => colons += 1,
                TokenTree::Ident(name) if dot => drop(self.methods.insert(name.to_string())),
                TokenTree::Ident(name) => {
                    if colons != 2 {
                        self.end_path(&mut path);
                    }
                    path.push(name.to_string());
                    colons = 0;
                }
                _ => {
                    self.end_path(&mut path);
                    colons = 0;
                }
            }
            dot = matches!(&tree, TokenTree::Punct(punct) if punct.as_char() == '.');
            if let TokenTree::Group(group) = tree {
                self.tokens(group.stream());
            }
        }
        self.end_path(&mut path);
    }

    fn end_path(&mut self, path: &mut Vec<String>) {
        if !path.is_empty() {
            self.paths.insert(std::mem::take(path));
        }
    }
}

impl<'ast> Visit<'ast> for Code {
    fn visit_item_use(&mut self, item: &'ast syn::ItemUse) {
        self.import(&item.tree, &[], !matches!(item.vis, syn::Visibility::Inherited));
    }

    fn visit_path(&mut self, path: &'ast syn::Path) {
        self.paths.insert(path.segments.iter().map(|segment| segment.ident.to_string()).collect());
        visit::visit_path(self, path);
    }

    fn visit_expr_method_call(&mut self, call: &'ast syn::ExprMethodCall) {
        self.methods.insert(call.method.to_string());
        visit::visit_expr_method_call(self, call);
    }

    fn visit_macro(&mut self, call: &'ast syn::Macro) {
        self.visit_path(&call.path);
        self.tokens(call.tokens.clone());
    }

    fn visit_item_mod(&mut self, item: &'ast syn::ItemMod) {
        if item.content.is_none() {
            self.modules.push(item.ident.to_string());
        }
        visit::visit_item_mod(self, item);
    }

    fn visit_item_fn(&mut self, item: &'ast syn::ItemFn) {
        self.function(&item.sig.ident, item);
        visit::visit_item_fn(self, item);
    }

    fn visit_impl_item_fn(&mut self, item: &'ast syn::ImplItemFn) {
        self.function(&item.sig.ident, item);
        visit::visit_impl_item_fn(self, item);
    }

    // Two kinds of path are skipped because they are no uses: the path in `pub(crate)`, and the
    // arguments of attributes.
    fn visit_vis_restricted(&mut self, _: &'ast syn::VisRestricted) {}
    fn visit_attribute(&mut self, _: &'ast syn::Attribute) {}
}

fn item_name(item: &syn::Item) -> Option<String> {
    let name = match item {
        syn::Item::Const(item) => &item.ident,
        syn::Item::Enum(item) => &item.ident,
        syn::Item::Fn(item) => &item.sig.ident,
        syn::Item::Macro(item) => item.ident.as_ref()?,
        syn::Item::Mod(item) if item.content.is_some() => &item.ident,
        syn::Item::Static(item) => &item.ident,
        syn::Item::Struct(item) => &item.ident,
        syn::Item::Trait(item) => &item.ident,
        syn::Item::Type(item) => &item.ident,
        syn::Item::Union(item) => &item.ident,
        _ => return None,
    };
    Some(name.to_string())
}

fn item_attributes(item: &syn::Item) -> &[syn::Attribute] {
    match item {
        syn::Item::Const(item) => &item.attrs,
        syn::Item::Enum(item) => &item.attrs,
        syn::Item::Fn(item) => &item.attrs,
        syn::Item::Impl(item) => &item.attrs,
        syn::Item::Macro(item) => &item.attrs,
        syn::Item::Mod(item) => &item.attrs,
        syn::Item::Static(item) => &item.attrs,
        syn::Item::Struct(item) => &item.attrs,
        syn::Item::Trait(item) => &item.attrs,
        syn::Item::Type(item) => &item.attrs,
        syn::Item::Use(item) => &item.attrs,
        _ => &[],
    }
}

/// Whether the attributes restrict an item to tests.
fn is_test(attributes: &[syn::Attribute]) -> bool {
    attributes.iter().any(|attribute| {
        let syn::Meta::List(list) = &attribute.meta else { return false };
        let condition: String = list.tokens.to_string().split_whitespace().collect();
        list.path.is_ident("cfg") && (condition == "test" || condition.starts_with("any(test,"))
    })
}

/// Removes test code, and keeps the names of the modules that it declares in separate files.
#[derive(Default)]
struct WithoutTests(Vec<String>);

impl WithoutTests {
    fn retain(&mut self, items: &mut Vec<syn::Item>) {
        items.retain(|item| {
            let test = is_test(item_attributes(item));
            if let syn::Item::Mod(module) = item
                && test
                && module.content.is_none()
            {
                self.0.push(module.ident.to_string());
            }
            !test
        });
    }
}

impl VisitMut for WithoutTests {
    fn visit_file_mut(&mut self, file: &mut syn::File) {
        self.retain(&mut file.items);
        visit_mut::visit_file_mut(self, file);
    }

    fn visit_item_mod_mut(&mut self, module: &mut syn::ItemMod) {
        if let Some((_, items)) = &mut module.content {
            self.retain(items);
        }
        visit_mut::visit_item_mod_mut(self, module);
    }

    fn visit_item_impl_mut(&mut self, item: &mut syn::ItemImpl) {
        item.items.retain(|item| !matches!(item, syn::ImplItem::Fn(function) if is_test(&function.attrs)));
        visit_mut::visit_item_impl_mut(self, item);
    }
}

pub(crate) struct Source {
    /// Path below `src/`, with `/` between the parts.
    pub(crate) path: String,
    pub(crate) text: String,
    /// The folder of the crate below `src/`; empty for the root crate.
    pub(crate) crate_folder: String,
    /// The module of the file inside the crate; empty for `lib.rs`.
    pub(crate) module: Vec<String>,
    /// Whether the whole file is test code.
    pub(crate) test: bool,
    /// The code of the whole file, tests included.
    pub(crate) all: Code,
    /// The code without tests. Empty if the whole file is test code.
    pub(crate) product: Code,
}

impl Source {
    /// Whether the file is `place.rs`, lies in the folder `place`, or is in any folder when `place`
    /// is empty.
    pub(crate) fn is_in(&self, place: &str) -> bool {
        self.path.strip_prefix(place).is_some_and(|rest| place.is_empty() || rest == ".rs" || rest.starts_with('/'))
    }
}

/// Parses the files of the workspace, given as path below `src/` and text.
///
/// # Panics
/// When a file is not valid Rust.
pub(crate) fn parse<'a>(files: impl IntoIterator<Item = (&'a str, &'a str)>) -> Vec<Source> {
    let files: BTreeMap<&str, &str> = files.into_iter().collect();
    let crates: Vec<&str> = files.keys().filter_map(|path| path.strip_suffix("/lib.rs")).collect();
    let mut tests = Vec::new();
    let mut sources = Vec::new();
    for (path, text) in files {
        let mut file = syn::parse_file(text).unwrap_or_else(|error| panic!("{path}: {error}"));
        let all = Code::read(&file);
        let mut without = WithoutTests::default();
        without.visit_file_mut(&mut file);
        let first = path.split('/').next().unwrap_or_default();
        let crate_folder = if crates.contains(&first) { first } else { "" };
        let inside = path.strip_prefix(crate_folder).unwrap_or(path).trim_start_matches('/');
        let mut module: Vec<String> = inside.trim_end_matches(".rs").split('/').map(str::to_owned).collect();
        if matches!(module.last().map(String::as_str), Some("mod" | "lib" | "main")) {
            module.pop();
        }
        tests.extend(without.0.iter().map(|name| (crate_folder, [&module[..], std::slice::from_ref(name)].concat())));
        sources.push(Source {
            path: path.to_owned(),
            text: text.to_owned(),
            crate_folder: crate_folder.to_owned(),
            module,
            test: false,
            all,
            product: Code::read(&file),
        });
    }
    for source in &mut sources {
        let declared = |(folder, module): &(&str, Vec<String>)| {
            source.crate_folder == *folder && source.module.starts_with(module)
        };
        if tests.iter().any(declared) {
            source.test = true;
            source.product = Code::default();
        }
    }
    sources
}

pub(crate) fn root() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR"))
}

/// Every Rust file below the folder `of` of the repository, with its path below `base` and its
/// text.
pub(crate) fn rust_files(of: &str, base: &str) -> Vec<(String, String)> {
    fn collect(folder: &Path, base: &Path, into: &mut Vec<(String, String)>) {
        for entry in fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                collect(&path, base, into);
            } else if path.extension().is_some_and(|kind| kind == "rs") {
                let name = path.strip_prefix(base).unwrap().to_str().unwrap().replace('\\', "/");
                into.push((name, fs::read_to_string(&path).unwrap()));
            }
        }
    }
    let mut files = Vec::new();
    collect(&root().join(of), &root().join(base), &mut files);
    files.sort();
    files
}

#[test]
fn code_behind_a_test_condition_is_test_code() {
    let sources = parse([
        ("pool/mod.rs", "mod queue;\n#[cfg(test)]\nmod tests;\npub fn f() { x.unwrap() }\n"),
        ("pool/tests.rs", "//! Tests.\nfn f() { x.unwrap(); }"),
        ("pool/queue.rs", "#[cfg(any(test, feature = \"testing\"))]\npub mod fake;\nfn a() {}"),
        ("pool/queue/fake.rs", "fn f() { x.unwrap() }"),
        ("pool/lease.rs", "impl A { #[cfg(test)] fn f() { x.unwrap() } }\n#[cfg(test)]\nmod tests { fn b() {} }"),
        ("lib.rs", "#[cfg(test)]\nmod rig;\n#[cfg(unix)]\nmod pool;\n"),
        ("rig/deep.rs", ""),
    ]);
    let tests: Vec<&str> = sources.iter().filter(|source| source.test).map(|source| &*source.path).collect();
    assert_eq!(tests, ["pool/queue/fake.rs", "pool/tests.rs", "rig/deep.rs"]);
    let calls = |source: &&Source| source.product.methods.contains("unwrap");
    let unwrapping: Vec<&str> = sources.iter().filter(calls).map(|source| &*source.path).collect();
    assert_eq!(unwrapping, ["pool/mod.rs"]);
}

#[test]
fn paths_are_read_from_imports_code_and_macros() {
    let text = "use crate::{a::{self, B}, c::D as E};\npub(crate) fn f() -> g::H { vec![i::j(k.unwrap()), l] }\n\
                #[serde(default = \"m\")]\nstruct S;";
    let sources = parse([("x.rs", text)]);
    let code = &sources[0].product;
    let imports: Vec<String> = code.imports.iter().map(|import| import.path.join("::") + " " + &import.name).collect();
    assert_eq!(imports, ["crate::a a", "crate::a::B B", "crate::c::D E"]);
    let paths: Vec<String> = code.paths.iter().map(|path| path.join("::")).collect();
    assert_eq!(paths, ["g::H", "i::j", "k", "l", "vec"]);
    assert!(code.methods.contains("unwrap") && code.items.contains("S") && code.functions == [("f".to_owned(), 1)]);
}
