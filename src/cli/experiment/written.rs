//! An experiment as a user writes it, in TOML or JSON.
//!
//! TOML has one `[[experiment]]`, as in the configuration. JSON, which begins with `{`, is an
//! object with the same keys.

use serde_json::{Map, Value};

const LIST: &str = "experiment";

pub(super) fn experiment(text: &str) -> Result<Map<String, Value>, String> {
    if text.trim_start().starts_with('{') {
        return serde_json::from_str(text).map_err(|error| format!("it is not a JSON object: {error}"));
    }
    let mut table: toml::Table = toml::from_str(text).map_err(|error| format!("it is not TOML: {error}"))?;
    // The keys may also stand without `[[experiment]]`.
    let Some(list) = table.remove(LIST) else { return keys(table) };
    if let Some(other) = table.keys().next() {
        return Err(format!("'{other}' is not part of an experiment; leave only [[{LIST}]] in the file"));
    }
    let toml::Value::Array(mut list) = list else { return Err(format!("'{LIST}' is a list; write [[{LIST}]]")) };
    match (list.pop(), list.len()) {
        (Some(toml::Value::Table(one)), 0) => keys(one),
        (None, _) => Err(format!("it has no [[{LIST}]]")),
        (Some(_), more) => Err(format!("it has {} of [[{LIST}]]; write one to a file", more + 1)),
    }
}

fn keys(table: toml::Table) -> Result<Map<String, Value>, String> {
    table.into_iter().map(|(key, value)| json(value).map(|value| (key, value))).collect()
}

fn json(value: toml::Value) -> Result<Value, String> {
    Ok(match value {
        toml::Value::String(text) => Value::String(text),
        toml::Value::Integer(number) => number.into(),
        toml::Value::Float(number) if number.is_finite() => number.into(),
        toml::Value::Float(number) => return Err(format!("{number} is not a finite number")),
        toml::Value::Boolean(flag) => Value::Bool(flag),
        // The configuration takes a time as a text, so a time of TOML is refused.
        toml::Value::Datetime(time) => return Err(format!("write the time {time} in quotes")),
        toml::Value::Array(values) => Value::Array(values.into_iter().map(json).collect::<Result<_, _>>()?),
        toml::Value::Table(table) => Value::Object(keys(table)?),
    })
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn the_table_of_the_configuration_and_json_are_the_same_experiment() {
        let wanted = json!({
            "name": "a", "sticky": "header", "arm": [{ "name": "x", "weight": 90, "model": "m" }, { "name": "y", "weight": 10.5 }],
            "traffic": { "from": 0, "to": 0.5 }, "restart": false,
        });
        let keys = "name = \"a\"\nsticky = \"header\"\nrestart = false\ntraffic = { from = 0, to = 0.5 }\n";
        let arms = |head: &str| {
            format!(
                "[[{head}arm]]\nname = \"x\"\nweight = 90\nmodel = \"m\"\n[[{head}arm]]\nname = \"y\"\nweight = 10.5\n"
            )
        };
        let list = format!("# mine\n[[experiment]]\n{keys}{}", arms("experiment."));
        for text in [wanted.to_string(), format!("\n {wanted}"), list, format!("{keys}{}", arms(""))] {
            assert_eq!(experiment(&text).map(Value::Object), Ok(wanted.clone()), "{text}");
        }
    }

    #[test]
    fn what_is_not_one_experiment_is_refused_with_what_to_write() {
        for (text, said) in [
            ("{\"name\": ", "not a JSON object"),
            ("name = ", "not TOML"),
            ("[[experiment]]\nname = \"a\"\n[[experiment]]\nname = \"b\"\n", "it has 2 of [[experiment]]"),
            ("experiment = []\n", "it has no [[experiment]]"),
            ("[experiment]\nname = \"a\"\n", "write [[experiment]]"),
            ("[[pool]]\nname = \"p\"\n[[experiment]]\nname = \"a\"\n", "'pool' is not part of an experiment"),
            ("name = \"a\"\nuntil = 2026-01-31T12:00:00Z\n", "in quotes"),
            ("name = \"a\"\nweight = inf\n", "not a finite number"),
        ] {
            let error = experiment(text).unwrap_err();
            assert!(error.contains(said), "{text}: {error}");
        }
    }
}
