//! An experiment that the admin API adds to the experiments of the file: a JSON object with the
//! keys of `[[experiment]]`.
//!
//! The experiment becomes one more element of the document's list before the document is read, so
//! the same definitions and rules apply to it.
//!
//! Bounds: at most `MAX_EXPERIMENTS` experiments of the API and of the file together.

use serde::{Deserialize, Serialize};
use serde_json::Value as Json;

use super::file::{Document, Entry, Table, Value};
use super::origin::Origin;

const LIST: &str = "experiment";

/// An experiment as a client of the admin API sent it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct AddedExperiment {
    /// The name, unique among all experiments.
    pub name: String,
    /// All other keys.
    pub keys: serde_json::Map<String, Json>,
}

pub(super) fn add(document: &mut Document, added: &[AddedExperiment]) {
    if added.is_empty() {
        return;
    }
    let empty = || Entry { value: Value::List(Vec::new()), origin: Origin::Api };
    let list = document.root.entry(LIST.to_owned()).or_insert_with(empty);
    // If the value is not a list, the reader of the document reports the problem.
    if let Value::List(elements) = &mut list.value {
        elements.extend(added.iter().map(|experiment| {
            let mut table = table(&experiment.keys);
            table.insert("name".to_owned(), entry(Value::Text(experiment.name.clone())));
            entry(Value::Table(table))
        }));
    }
}

fn entry(value: Value) -> Entry {
    Entry { value, origin: Origin::Api }
}

/// A key that is null counts as absent.
fn table(object: &serde_json::Map<String, Json>) -> Table {
    object.iter().filter_map(|(key, json)| Some((key.clone(), entry(value(json)?)))).collect()
}

fn value(json: &Json) -> Option<Value> {
    Some(match json {
        Json::Null => return None,
        Json::Bool(flag) => Value::Bool(*flag),
        Json::Number(number) => match number.as_i64() {
            Some(number) => Value::Int(number),
            None => Value::Float(number.as_f64()?),
        },
        Json::String(text) => Value::Text(text.clone()),
        Json::Array(elements) => Value::List(elements.iter().filter_map(value).map(entry).collect()),
        Json::Object(object) => Value::Table(table(object)),
    })
}
