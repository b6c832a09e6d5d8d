//! Makes a value that fits a JSON schema, for output that a request constrains.
//!
//! Supported keywords: types, `properties` and `required`, `items` and `prefixItems`, `enum` and
//! `const`, `anyOf`, `oneOf` and `allOf`, `$ref` within the schema, bounds of numbers, lengths,
//! `pattern` and common formats. Not supported: `not`, `if` and dependencies. The seed decides
//! wherever the schema leaves a choice. Bounds: [`MAX_DEPTH`] levels, [`MAX_NODES`] values,
//! [`MAX_ITEMS`] items of a list, [`MAX_TEXT`] characters of a string. From level [`SHALLOW`] on,
//! optional values are left out, so a recursive schema ends.

use regex_syntax::hir::{Class, Hir, HirKind};
use serde_json::{Map, Value, json};

use super::words;
use sluice_core::base::Rng;

const MAX_DEPTH: u32 = 24;
/// From this level on, optional values are left out.
const SHALLOW: u32 = 3;
const MAX_NODES: u32 = 4_096;
const MAX_ITEMS: u64 = 256;
const MAX_TEXT: u64 = 4_096;
const WORDS: usize = 3;
/// Width of the range from which a number without two bounds is drawn.
const NUMBERS: f64 = 100.0;

/// A value that fits `schema`; `None` if none is found within the bounds.
pub(crate) fn of_schema(schema: &Value, seed: u64) -> Option<Value> {
    Maker { root: schema, rng: Rng::new(seed), nodes: 0 }.make(schema, 0)
}

pub(crate) fn sentence(rng: &mut Rng) -> String {
    let said: Vec<&str> = (0..WORDS).map(|_| words::word_of(rng.next_u64() as u32).trim()).collect();
    said.join(" ")
}

struct Maker<'a> {
    root: &'a Value,
    rng: Rng,
    nodes: u32,
}

impl Maker<'_> {
    fn make(&mut self, schema: &Value, depth: u32) -> Option<Value> {
        self.nodes += 1;
        if depth > MAX_DEPTH || self.nodes > MAX_NODES {
            return None;
        }
        let schema = match schema {
            Value::Bool(false) => return None,
            Value::Object(schema) => schema,
            _ => return Some(json!(sentence(&mut self.rng))),
        };
        if let Some(target) = schema.get("$ref") {
            let found = self.root.pointer(target.as_str()?.strip_prefix('#')?)?.clone();
            return self.make(&merged(schema, &found, "$ref"), depth + 1);
        }
        if let Some(value) = schema.get("const") {
            return Some(value.clone());
        }
        if let Some(values) = schema.get("enum").and_then(Value::as_array) {
            return values.get(self.rng.below(values.len().max(1))).cloned();
        }
        if let Some(all) = schema.get("allOf").and_then(Value::as_array) {
            let whole = all.iter().fold(without(schema, "allOf"), |whole, part| {
                let part = self.resolved(part);
                whole.as_object().map_or(Value::Null, |whole| merged(whole, &part, ""))
            });
            return self.make(&whole, depth + 1);
        }
        for key in ["anyOf", "oneOf"] {
            if let Some(options) = schema.get(key).and_then(Value::as_array) {
                return self.one_of(schema, key, options, depth);
            }
        }
        match self.kind(schema, depth)? {
            "object" => self.object(schema, depth),
            "array" => self.list(schema, depth),
            "string" => self.string(schema),
            "integer" => self.number(schema, true),
            "number" => self.number(schema, false),
            "boolean" => Some(Value::Bool(self.rng.below(2) == 1)),
            "null" => Some(Value::Null),
            _ => None,
        }
    }

    fn resolved(&self, schema: &Value) -> Value {
        let target = schema.get("$ref").and_then(Value::as_str).and_then(|target| target.strip_prefix('#'));
        target.and_then(|target| self.root.pointer(target)).unwrap_or(schema).clone()
    }

    /// A value of the first option that has one. Before level [`SHALLOW`] the options are tried
    /// from a random one on. From that level on, the simplest option is tried first.
    fn one_of(&mut self, schema: &Map<String, Value>, key: &str, options: &[Value], depth: u32) -> Option<Value> {
        let mut order: Vec<&Value> = options.iter().collect();
        if depth < SHALLOW {
            let first = self.rng.below(order.len().max(1));
            order.rotate_left(first);
        } else {
            let nested = |option: &&Value| {
                ["$ref", "properties", "items", "anyOf", "oneOf", "allOf"]
                    .iter()
                    .filter(|key| option.get(**key).is_some())
                    .count()
            };
            order.sort_by_key(nested);
        }
        order.into_iter().find_map(|option| self.make(&merged(schema, option, key), depth + 1))
    }

    fn kind<'s>(&self, schema: &'s Map<String, Value>, depth: u32) -> Option<&'s str> {
        match schema.get("type") {
            Some(Value::String(kind)) => Some(kind),
            Some(Value::Array(kinds)) => {
                let null = kinds.iter().any(|kind| kind == "null") && depth >= SHALLOW;
                let first = kinds.iter().filter_map(Value::as_str).find(|kind| *kind != "null");
                if null { Some("null") } else { first.or(Some("null")) }
            }
            _ => {
                let has = |keys: &[&str]| keys.iter().any(|key| schema.contains_key(*key));
                Some(match () {
                    () if has(&["properties", "required", "additionalProperties", "minProperties"]) => "object",
                    () if has(&["items", "prefixItems", "minItems"]) => "array",
                    () if has(&["minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"]) => {
                        "number"
                    }
                    () => "string",
                })
            }
        }
    }

    fn object(&mut self, schema: &Map<String, Value>, depth: u32) -> Option<Value> {
        let nothing = Map::new();
        let properties = schema.get("properties").and_then(Value::as_object).unwrap_or(&nothing);
        let required: Vec<&str> =
            schema.get("required").and_then(Value::as_array).into_iter().flatten().filter_map(Value::as_str).collect();
        let any = Value::Bool(true);
        let others = schema.get("additionalProperties").unwrap_or(&any);
        let mut made = Map::new();
        for (name, property) in properties {
            let needed = required.contains(&name.as_str());
            if !needed && depth >= SHALLOW {
                continue;
            }
            match self.make(property, depth + 1) {
                Some(value) => drop(made.insert(name.clone(), value)),
                None if needed => return None,
                None => {}
            }
        }
        for name in required {
            if !made.contains_key(name) {
                made.insert(name.to_owned(), self.make(others, depth + 1)?);
            }
        }
        let least = schema.get("minProperties").and_then(Value::as_u64).unwrap_or(0).min(MAX_ITEMS);
        for number in 0..least {
            if (made.len() as u64) < least {
                made.insert(format!("key{number}"), self.make(others, depth + 1)?);
            }
        }
        Some(Value::Object(made))
    }

    fn list(&mut self, schema: &Map<String, Value>, depth: u32) -> Option<Value> {
        let count = |key: &str| schema.get(key).and_then(Value::as_u64);
        let first = schema.get("prefixItems").and_then(Value::as_array).map_or(&[][..], Vec::as_slice);
        let optional = u64::from(depth < SHALLOW && schema.get("items") != Some(&Value::Bool(false)));
        let least = count("minItems").unwrap_or(0);
        let wanted = least.max(first.len() as u64).max(optional).min(count("maxItems").unwrap_or(u64::MAX));
        if wanted > MAX_ITEMS || wanted < least {
            return None;
        }
        let unique = schema.get("uniqueItems") == Some(&Value::Bool(true));
        let any = Value::Bool(true);
        let others = schema.get("items").unwrap_or(&any);
        let mut items: Vec<Value> = Vec::new();
        let mut attempts = 0;
        while (items.len() as u64) < wanted {
            let item = self.make(first.get(items.len()).unwrap_or(others), depth + 1);
            attempts += 1;
            match item {
                Some(item) if !unique || !items.contains(&item) => items.push(item),
                _ if attempts < 16 * wanted => {}
                _ if items.len() as u64 >= least => break,
                _ => return None,
            }
        }
        Some(Value::Array(items))
    }

    fn string(&mut self, schema: &Map<String, Value>) -> Option<Value> {
        if let Some(pattern) = schema.get("pattern").and_then(Value::as_str) {
            let parsed = regex_syntax::Parser::new().parse(pattern).ok()?;
            let mut text = String::new();
            self.matching(&parsed, &mut text)?;
            return Some(json!(text));
        }
        let formatted = match schema.get("format").and_then(Value::as_str).unwrap_or_default() {
            "date-time" => "2026-07-26T09:30:00Z",
            "date" => "2026-07-26",
            "time" => "09:30:00Z",
            "duration" => "PT30M",
            "email" => "river@example.com",
            "hostname" => "gate.example.com",
            "ipv4" => "192.0.2.7",
            "ipv6" => "2001:db8::7",
            "uri" | "uri-reference" => "https://example.com/stream",
            "uuid" => "6f1c1f0e-3c7b-4f0e-9d0a-2b7d0c5e8a11",
            _ => "",
        };
        if !formatted.is_empty() {
            return Some(json!(formatted));
        }
        let count = |key: &str| schema.get(key).and_then(Value::as_u64);
        let (least, most) = (count("minLength").unwrap_or(0), count("maxLength").unwrap_or(MAX_TEXT));
        if least > MAX_TEXT.min(most) {
            return None;
        }
        let mut text = sentence(&mut self.rng);
        while (text.len() as u64) < least {
            text.push(' ');
            text.push_str(&sentence(&mut self.rng));
        }
        // The words are ASCII. A text that must be cut is cut between words if it stays long
        // enough.
        if text.len() as u64 > most {
            text.truncate(most as usize);
            if let Some(blank) = text.rfind(' ').filter(|blank| *blank as u64 >= least.max(1)) {
                text.truncate(blank);
            }
        }
        Some(json!(text))
    }

    /// Appends a text that matches `pattern`: the fewest repetitions, and one of the alternatives.
    fn matching(&mut self, pattern: &Hir, text: &mut String) -> Option<()> {
        if text.len() as u64 > MAX_TEXT {
            return None;
        }
        match pattern.kind() {
            HirKind::Empty | HirKind::Look(_) => Some(()),
            HirKind::Literal(literal) => {
                text.push_str(std::str::from_utf8(&literal.0).ok()?);
                Some(())
            }
            HirKind::Class(Class::Unicode(class)) => {
                // A letter or digit if the class begins a range with one, otherwise a printable
                // character if possible.
                let ranges = class.ranges();
                let readable = ranges.iter().find(|range| range.start().is_ascii_alphanumeric());
                let range = readable.or_else(|| ranges.iter().find(|range| range.start() >= ' ')).or(ranges.first())?;
                let span = (u32::from(range.end()) - u32::from(range.start())).min(25);
                let drawn = u32::from(range.start()) + self.rng.below(span as usize + 1) as u32;
                text.push(char::from_u32(drawn).unwrap_or(range.start()));
                Some(())
            }
            HirKind::Class(Class::Bytes(_)) => None,
            HirKind::Repetition(repetition) => {
                // A text of one character is more useful than an empty text.
                let least = repetition.min.max(u32::from(repetition.max != Some(0) && text.is_empty()));
                (0..least).try_for_each(|_| self.matching(&repetition.sub, text))
            }
            HirKind::Capture(capture) => self.matching(&capture.sub, text),
            HirKind::Concat(parts) => parts.iter().try_for_each(|part| self.matching(part, text)),
            HirKind::Alternation(options) => {
                let option = self.rng.below(options.len());
                self.matching(&options[option], text)
            }
        }
    }

    fn number(&mut self, schema: &Map<String, Value>, whole: bool) -> Option<Value> {
        let bound = |key: &str| schema.get(key).and_then(Value::as_f64);
        let step = bound("multipleOf").filter(|step| *step > 0.0).or(whole.then_some(1.0));
        let inside = |value: f64| {
            bound("minimum").is_none_or(|least| value >= least)
                && bound("exclusiveMinimum").is_none_or(|least| value > least)
                && bound("maximum").is_none_or(|most| value <= most)
                && bound("exclusiveMaximum").is_none_or(|most| value < most)
        };
        let larger = [bound("minimum"), bound("exclusiveMinimum")].into_iter().flatten().reduce(f64::max);
        let smaller = [bound("maximum"), bound("exclusiveMaximum")].into_iter().flatten().reduce(f64::min);
        let (least, most) = match (larger, smaller) {
            (Some(least), Some(most)) => (least, most.min(least + NUMBERS.max((most - least) / 2.0))),
            (Some(least), None) => (least, least + NUMBERS),
            (None, Some(most)) => (most - NUMBERS, most),
            (None, None) => (0.0, NUMBERS),
        };
        let drawn = least + self.rng.unit() * (most - least);
        let rounded = |value: f64| step.map_or(value, |step| (value / step).round() * step);
        // Rounding can lead out of the bounds. If it does, the multiples next to the bounds are
        // tried.
        let step_or = step.unwrap_or(0.0);
        let tried = [drawn, least, least + step_or, most, most - step_or, least.midpoint(most)];
        let value = tried.into_iter().map(rounded).find(|value| inside(*value))?;
        // Integers are exact up to 2^53.
        if whole || step.is_some_and(|step| step.fract() == 0.0) {
            return (value.abs() < 9e15).then(|| json!(value as i64));
        }
        Some(json!(if step.is_none() && inside((value * 100.0).round() / 100.0) {
            (value * 100.0).round() / 100.0
        } else {
            value
        }))
    }
}

fn without(schema: &Map<String, Value>, key: &str) -> Value {
    Value::Object(
        schema.iter().filter(|(name, _)| *name != key).map(|(name, value)| (name.clone(), value.clone())).collect(),
    )
}

/// `schema` without `key`, combined with `part`. `properties`, `required` and `allOf` are joined;
/// any other keyword of `part` replaces the keyword of `schema`.
fn merged(schema: &Map<String, Value>, part: &Value, key: &str) -> Value {
    let Value::Object(part) = part else { return part.clone() };
    let Value::Object(mut whole) = without(schema, key) else { return Value::Null };
    for (name, value) in part {
        match (whole.get_mut(name), value) {
            (Some(Value::Object(known)), Value::Object(more)) if name == "properties" => {
                known.extend(more.iter().map(|(name, value)| (name.clone(), value.clone())));
            }
            (Some(Value::Array(known)), Value::Array(more)) if name == "required" || name == "allOf" => {
                known.extend(more.iter().cloned());
            }
            _ => drop(whole.insert(name.clone(), value.clone())),
        }
    }
    Value::Object(whole)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn all(schema: &Value) -> Vec<Value> {
        (0..200).map(|seed| of_schema(schema, seed).unwrap_or_else(|| panic!("nothing fits {schema}"))).collect()
    }

    #[test]
    fn a_tools_arguments_have_what_is_required_in_its_type_and_bounds() {
        let schema = json!({
            "type": "object",
            "properties": {
                "city": {"type": "string", "minLength": 3, "maxLength": 10},
                "unit": {"enum": ["celsius", "fahrenheit"]},
                "days": {"type": "integer", "minimum": 1, "maximum": 7},
                "level": {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1},
                "step": {"type": "integer", "minimum": 5, "multipleOf": 4},
                "tags": {"type": "array", "items": {"type": "string"}, "minItems": 2, "maxItems": 3},
                "id": {"type": "string", "pattern": "^[A-Z]{3}-\\d{4}$"},
                "when": {"type": ["string", "null"], "format": "date"},
            },
            "required": ["city", "unit", "days", "level", "step", "tags", "id"],
            "additionalProperties": false,
        });
        for made in all(&schema) {
            let city = made["city"].as_str().unwrap();
            assert!((3..=10).contains(&city.len()), "{made}");
            assert!(["celsius", "fahrenheit"].contains(&made["unit"].as_str().unwrap()));
            assert!((1..=7).contains(&made["days"].as_i64().unwrap()));
            let level = made["level"].as_f64().unwrap();
            assert!(level > 0.0 && level < 1.0, "{made}");
            assert!(made["step"].as_i64().unwrap() >= 5 && made["step"].as_i64().unwrap() % 4 == 0, "{made}");
            assert!((2..=3).contains(&made["tags"].as_array().unwrap().len()));
            let id = made["id"].as_str().unwrap();
            assert!(
                id.len() == 8 && id[..3].bytes().all(|b| b.is_ascii_uppercase()) && id.as_bytes()[3] == b'-',
                "{id}"
            );
            assert_eq!(made["when"], "2026-07-26");
        }
    }

    #[test]
    fn references_unions_and_recursion_end() {
        let schema = json!({
            "$defs": {
                "node": {
                    "type": "object",
                    "properties": {
                        "value": {"type": "integer"},
                        "next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]},
                        "children": {"type": "array", "items": {"$ref": "#/$defs/node"}},
                    },
                    "required": ["value", "next", "children"],
                },
            },
            "$ref": "#/$defs/node",
        });
        for made in all(&schema) {
            assert!(made["value"].is_i64() && made["children"].is_array(), "{made}");
            assert!(made["next"].is_null() || made["next"]["value"].is_i64(), "{made}");
            assert!(made.to_string().len() < 4_000, "{made}");
        }
        let endless = json!({"$defs": {"a": {"type": "object", "properties": {"a": {"$ref": "#/$defs/a"}},
            "required": ["a"]}}, "$ref": "#/$defs/a"});
        assert_eq!(of_schema(&endless, 1), None);
    }

    #[test]
    fn parts_that_must_all_hold_are_joined() {
        let schema = json!({"allOf": [
            {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]},
            {"properties": {"b": {"const": 7}}, "required": ["b"]},
        ]});
        for made in all(&schema) {
            assert!(made["a"].is_boolean() && made["b"] == 7, "{made}");
        }
    }

    #[test]
    fn schemas_without_types_and_those_that_nothing_fits() {
        assert!(all(&json!({})).iter().all(Value::is_string));
        assert!(all(&json!({"required": ["x"]})).iter().all(|made| made["x"].is_string()));
        assert!(
            all(&json!({"type": "array", "items": {"enum": [1, 2, 3]}, "minItems": 3, "uniqueItems": true}))
                .iter()
                .all(|made| made.as_array().unwrap().len() == 3)
        );
        assert_eq!(of_schema(&json!(false), 1), None);
        assert_eq!(of_schema(&json!({"type": "string", "minLength": 1_000_000}), 1), None);
        assert_eq!(of_schema(&json!({"type": "integer", "minimum": 1.2, "maximum": 1.8}), 1), None);
        assert_eq!(of_schema(&json!({"$ref": "#/$defs/absent"}), 1), None);
        assert_eq!(of_schema(&json!({"type": "string", "pattern": "("}), 1), None);
    }
}
