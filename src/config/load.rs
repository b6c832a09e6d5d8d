//! The ways to a [`Config`]: a file, a text, or the flags of `sluice serve`.
//!
//! All of them become a document and pass the same checks. Flags are first written as the text of a
//! small document. `--set` then changes the document, whatever the source. Relative paths in a file
//! start at the folder of the file, so that the gateway does not depend on the folder where it was
//! started.

use std::fmt::Write as _;
use std::io::Read as _;
use std::path::Path;

use super::added::{self, AddedExperiment};
use super::copies;
use super::coverage;
use super::experiment_rules;
use super::file::{Document, Entry, Value};
use super::key::KeySpec;
use super::limits;
use super::origin::{Origin, Origins};
use super::problem::{Problem, Problems, Situation};
use super::report::{Place, Report, Surroundings};
use super::root::Config;
use super::rules;
use super::setting::{Setting, quote};
use sluice_core::base::Tokens;

/// The default of `--threshold`. Prompts of more tokens need a permit; if there is a long pool,
/// prompts of this many tokens or more belong to it.
const FLAG_THRESHOLD: Tokens = Tokens(5_000);
/// Long prompts in prefill at once on a backend of the only pool, or of the short pool: one, so
/// that short prompts keep moving.
const FLAG_SHORT_LONG_SLOTS: u32 = 1;
/// Long prompts in prefill at once on a backend of the long pool.
const FLAG_LONG_LONG_SLOTS: u32 = 2;
/// Requests in flight on a backend of the short pool, as in `config/short-long.toml`. The only pool
/// has the default.
const FLAG_SHORT_SLOTS: u32 = 64;
/// Requests in flight on a backend of the long pool, as in `config/short-long.toml`: each takes
/// much of the KV cache.
const FLAG_LONG_SLOTS: u32 = 16;

/// A configuration that was read, with the origins of the values and the warnings.
#[derive(Clone, Debug, PartialEq)]
pub struct Loaded {
    /// The configuration.
    pub config: Config,
    /// The name of the file, or "command line".
    pub source: String,
    /// The origin of each value.
    pub origins: Origins,
    /// Warnings, in order of lines.
    pub warnings: Vec<Problem>,
}

/// The flags of `sluice serve` that replace a file.
#[derive(Clone, Debug, Default)]
pub struct Flags {
    /// `--backend URL`, at least one.
    pub backends: Vec<String>,
    /// `--long URL`: backends for long prompts; none: one pool for all prompts.
    pub long: Vec<String>,
    /// `--threshold`: the prompt length from which a prompt is long; `None`: the default.
    pub threshold: Option<Tokens>,
    /// `--listen ADDRESS`; `None`: the default.
    pub listen: Option<String>,
    /// `--admin ADDRESS`; `None`: the default.
    pub admin: Option<String>,
}

impl Config {
    /// Reads a file, applies `--set` texts and checks the result.
    ///
    /// # Errors
    /// Every problem at once. The caller exits with 78, or keeps the present configuration.
    pub fn load(path: &Path, sets: &[String]) -> Result<Loaded, Problems> {
        Self::load_with(path, sets, &[])
    }

    /// Like [`Config::load`], with experiments of the admin API.
    ///
    /// # Errors
    /// Every problem at once; problems of the added experiments have [`Origin::Api`].
    pub fn load_with(path: &Path, sets: &[String], added: &[AddedExperiment]) -> Result<Loaded, Problems> {
        let source = path.display().to_string();
        let failed = |reason: String| {
            let situation = Situation::Unreadable { reason };
            Problems::sorted(&source, vec![Problem::new(String::new(), Origin::Default, situation)])
        };
        let mut text = String::new();
        let file = std::fs::File::open(path).map_err(|error| failed(error.to_string()))?;
        let read = file.take(limits::MAX_FILE_BYTES + 1).read_to_string(&mut text);
        let bytes = read.map_err(|error| failed(error.to_string()))?;
        if bytes as u64 > limits::MAX_FILE_BYTES {
            return Err(failed(format!("it is larger than {} bytes", limits::MAX_FILE_BYTES)));
        }
        let file = std::path::absolute(path).map_err(|error| failed(error.to_string()))?;
        let folder = file.parent().unwrap_or(Path::new("/"));
        parse_with(&text, &source, (sets, added), &Surroundings::of_process(folder))
    }

    /// Reads a text, called `source` in messages. For tests and for configurations that are not
    /// files.
    ///
    /// # Errors
    /// Every problem at once.
    pub fn parse(
        text: &str,
        source: &str,
        sets: &[String],
        surroundings: &Surroundings<'_>,
    ) -> Result<Loaded, Problems> {
        parse_with(text, source, (sets, &[]), surroundings)
    }

    /// Makes a configuration of flags. It has one pool, as in `config/one-pool.toml`, or with long
    /// backends a short pool, and a long pool that spills into the short one. Long prefills are
    /// bounded on every backend.
    ///
    /// # Errors
    /// Every problem at once, such as a malformed URL.
    pub fn from_flags(flags: &Flags, sets: &[String], surroundings: &Surroundings<'_>) -> Result<Loaded, Problems> {
        let source = "command line";
        let document = Document::parse(&written(flags)).map_err(|problems| Problems::sorted(source, problems))?;
        finish(document.attributed_to(Origin::Flag), source, (sets, &[]), surroundings)
    }
}

fn parse_with(
    text: &str,
    source: &str,
    changes: (&[String], &[AddedExperiment]),
    surroundings: &Surroundings<'_>,
) -> Result<Loaded, Problems> {
    match Document::parse(text) {
        Ok(document) => finish(document, source, changes, surroundings),
        Err(problems) => Err(Problems::sorted(source, problems)),
    }
}

fn finish(
    mut document: Document,
    source: &str,
    (sets, added): (&[String], &[AddedExperiment]),
    surroundings: &Surroundings<'_>,
) -> Result<Loaded, Problems> {
    let mut problems = document.set_all(sets);
    added::add(&mut document, added);
    let further = copies::expand(&mut document, &mut problems);
    let mut report = Report::new(&document, surroundings);
    report.keys = Config::FIELDS;
    let root = Entry { value: Value::Table(document.root.clone()), origin: Origin::Default };
    let place = Place { path: String::new(), origin: Origin::Default };
    let mut config = Config::read(&root, &place, &KeySpec::ROOT, &mut report);
    if let Some(config) = &mut config {
        rules::apply(config, &mut report);
        coverage::check(config, &mut report);
        experiment_rules::check(config, &mut report);
    }
    let Report { origins, problems: found, .. } = report;
    problems.extend(found);
    copies::once(&mut problems, &further);
    let sorted = Problems::sorted(source, problems);
    match config {
        Some(config) if sorted.errors.is_empty() => {
            Ok(Loaded { config, source: source.to_owned(), origins, warnings: sorted.warnings })
        }
        _ => Err(sorted),
    }
}

fn written(flags: &Flags) -> String {
    let mut out = String::new();
    out.push_str("[server]\n");
    for (key, value) in [("listen", &flags.listen), ("admin", &flags.admin)] {
        if let Some(value) = value {
            put(&mut out, format_args!("{key} = {}", quote(value)));
        }
    }
    let threshold = flags.threshold.unwrap_or(FLAG_THRESHOLD);
    let mut pool = |name: &str, keys: &str, slots: u32, urls: &[String]| {
        put(&mut out, format_args!("[[pool]]\nname = \"{name}\"\npolicy = \"least_work\"\n{keys}"));
        put(&mut out, format_args!("long_prefix = {{ threshold = \"{threshold}\", slots = {slots} }}"));
        backends(&mut out, urls);
    };
    if flags.long.is_empty() {
        pool("default", "", FLAG_SHORT_LONG_SLOTS, &flags.backends);
        return out;
    }
    let short = format!("prompt_tokens = {{ max = \"{threshold}\" }}\nslots = {FLAG_SHORT_SLOTS}");
    let long = format!("prompt_tokens = {{ min = \"{threshold}\" }}\nslots = {FLAG_LONG_SLOTS}\nspill = [\"short\"]");
    pool("short", &short, FLAG_SHORT_LONG_SLOTS, &flags.backends);
    pool("long", &long, FLAG_LONG_LONG_SLOTS, &flags.long);
    out
}

/// Writes backends. A backend is named by host and port, which an operator recognises. If that is
/// no valid name, or is taken, the name is a number.
fn backends(out: &mut String, urls: &[String]) {
    let mut names: Vec<String> = Vec::new();
    for (index, url) in urls.iter().enumerate() {
        let place = url.split("://").last().unwrap_or("").split('/').next().unwrap_or("");
        let fine =
            !place.is_empty() && place.len() <= limits::MAX_NAME_BYTES && !names.iter().any(|name| name == place);
        let letters = place.chars().all(|letter| letter.is_ascii_alphanumeric() || ".:_-".contains(letter));
        let name = if fine && letters { place.to_owned() } else { format!("backend-{index}") };
        put(out, format_args!("[[pool.backend]]\nname = {}\nurl = {}", quote(&name), quote(url)));
        names.push(name);
    }
}

fn put(out: &mut String, line: std::fmt::Arguments<'_>) {
    // Writing to a String cannot fail.
    let _ = writeln!(out, "{line}");
}
