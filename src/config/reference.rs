//! The reference file `config/sluice.toml`, generated from the definitions of the keys.
//!
//! A key with a default is written with it. A key without a default is commented out, with an
//! example. A required key, such as a name, is written with an example, so that the whole file is a
//! valid configuration. A test compares the file with the generated text.

use super::file::{Document, Value};
use super::key::{Applied, Fallback, Field, KeySpec, Shape, TECHNICAL_MAXIMA};
use super::origin::Origin;
use super::root::Config;
use super::setting::{join, list, quote};

/// Column at which comments are wrapped.
const WIDTH: usize = 110;

const HEADER: &str = "\
# The reference: every key, what it means, its default and its bounds.
#
# This file is generated from the definitions in src/config; change them, not this file. Keys in force show their
# defaults (except names, addresses and the like). A key behind \"#\" is optional: remove the \"#\" to use it.
#
# Units: prompt lengths take k and M (5k = 5,000 tokens), sizes take KiB, MiB and GiB, durations take ms, s, m, h and d.
# Relative paths start at the folder of the configuration file.
#
#   sluice check FILE               report every problem, or print the resolved configuration
#   sluice serve FILE               run the gateway; SIGHUP or POST /admin/reload reads the file again
#   --set KEY=VALUE                 change one value: --set pool.short.slots=32, --set server.listen=0.0.0.0:8080
";

/// The text of the reference file.
pub fn reference() -> String {
    let mut out = HEADER.to_owned();
    tables(&mut out, Config::FIELDS, "", false);
    out
}

/// Writes the keys of a table: first the values, then the tables in it.
fn keys(out: &mut String, fields: &[Field], header: &str, commented_out: bool) {
    for (index, field) in fields.iter().filter(|field| value(field).is_some()).enumerate() {
        let key = &field.key;
        let optional = matches!(key.fallback, Fallback::Nothing(_) | Fallback::OfMachine(_)) && !key.in_force;
        if index > 0 {
            out.push('\n');
        }
        comment(out, &[documentation(key), facts(field)].join(" "));
        let hash = if commented_out || optional { "#" } else { "" };
        *out += &format!("{hash}{} = {}\n", key.name, value(field).unwrap_or_default());
    }
    tables(out, fields, header, commented_out);
}

fn tables(out: &mut String, fields: &[Field], parent: &str, commented_out: bool) {
    for Field { key, shape } in fields {
        let header = join(parent, key.name);
        let (line, fields) = match shape {
            Shape::Table(fields) => (format!("[{header}]"), fields),
            Shape::Tables(fields) => (format!("[[{header}]]"), fields),
            Shape::Value | Shape::Word(_) | Shape::Free => continue,
        };
        let optional = matches!(key.fallback, Fallback::Nothing(_) | Fallback::Elements) && !key.in_force;
        let commented_out = commented_out || optional;
        out.push('\n');
        comment(out, &documentation(key));
        *out += &format!("{}{line}\n", if commented_out { "#" } else { "" });
        keys(out, fields, &header, commented_out);
    }
}

/// The text on the right of `=`: the example, or the default. `None` for a table, whose keys
/// follow.
fn value(field: &Field) -> Option<String> {
    let text = match (field.key.example, field.key.fallback) {
        (Some(example), _) => example,
        (None, Fallback::Default(default)) => default,
        _ => "",
    };
    match field.shape {
        Shape::Value | Shape::Word(_) => Some(toml(&Document::value_or_text(text, Origin::Default))),
        Shape::Free => Some(format!("{{ {text} }}")),
        Shape::Table(_) | Shape::Tables(_) => None,
    }
}

fn toml(value: &Value) -> String {
    match value {
        Value::Text(text) => quote(text),
        Value::Int(number) => number.to_string(),
        Value::Float(number) => format!("{number:?}"),
        Value::Bool(flag) => flag.to_string(),
        Value::List(elements) => list(&elements.iter().map(|element| toml(&element.value)).collect::<Vec<_>>()),
        // No default is a table that has keys, because an absent table has the defaults of all keys
        // in it.
        Value::Table(_) => "{}".to_owned(),
    }
}

fn documentation(key: &KeySpec) -> String {
    key.doc.iter().map(|line| line.trim()).collect::<Vec<_>>().join(" ")
}

fn facts(field: &Field) -> String {
    let key = &field.key;
    let mut facts = Vec::new();
    if let Shape::Word(words) = field.shape {
        facts.push(format!("One of {}.", words.join(", ")));
    }
    if let Some((min, max)) = key.bounds.filter(|(_, max)| !TECHNICAL_MAXIMA.contains(max)) {
        facts.push(format!("From {min} to {max}."));
    }
    match key.fallback {
        Fallback::OfMachine(default) => facts.push(format!("Default: {}.", default.meaning())),
        Fallback::Nothing(meaning) if !key.in_force => facts.push(format!("Default: {meaning}.")),
        Fallback::Default(default) if key.example.is_some() => facts.push(format!("Default: {default}.")),
        _ => {}
    }
    if key.applied == Applied::AfterRestart {
        facts.push("Needs a restart to change.".to_owned());
    }
    facts.join(" ")
}

fn comment(out: &mut String, text: &str) {
    let mut line = String::from("#");
    for word in text.split_whitespace() {
        if line.len() + 1 + word.len() > WIDTH {
            *out += &std::mem::replace(&mut line, "#".to_owned());
            out.push('\n');
        }
        line.push(' ');
        line += word;
    }
    *out += &line;
    out.push('\n');
}
