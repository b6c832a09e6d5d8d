//! Validates the fields of a body as pydantic does: lax coercions, and pydantic's error messages.
//!
//! A schema is a table of fields with types. All fields are checked in the order of the table, and
//! all errors are reported at once. Unknown fields are allowed. Messages show values in the
//! notation of Python's `repr`.

use serde_json::{Map, Value};

use crate::http::error_body::ErrorBody;

#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Type {
    Text,
    /// A whole number between two bounds.
    Int(i64, i64),
    Float,
    Bool,
    /// A list of whole numbers, each at least this.
    Ints(i64),
    Texts,
    Dict,
    /// An object whose values are numbers.
    Weights,
    Literal(&'static [&'static str]),
    /// A string, or a list of at most four strings.
    Stop,
    /// Checked elsewhere.
    Any,
}

pub(crate) const INT: Type = Type::Int(i64::MIN, i64::MAX);

#[derive(Clone, Copy, Debug)]
pub(crate) struct Field {
    pub(crate) name: &'static str,
    pub(crate) takes: Type,
    /// Whether `null` is accepted.
    pub(crate) nullable: bool,
    pub(crate) required: bool,
}

/// Number of errors that are listed; further errors are only counted.
const MAX_LISTED: usize = 10;

/// The errors found so far: the location of the first error, and all errors as lines.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct ValidationErrors {
    first: Option<String>,
    lines: Vec<String>,
}

impl ValidationErrors {
    /// Adds an error at a location such as `body.n`.
    pub(crate) fn add(&mut self, kind: &str, at: &str, text: &str, input: &str, context: &str) {
        self.first.get_or_insert_with(|| at.to_owned());
        let context = if context.is_empty() { String::new() } else { format!(", 'ctx': {{{context}}}") };
        self.lines.push(format!(
            "{{'type': '{kind}', 'loc': {}, 'msg': {}, 'input': {}{context}}}",
            repr(at),
            repr(text),
            repr(input)
        ));
    }

    /// Adds the error for a missing field in an object with `fields` fields.
    pub(crate) fn missing(&mut self, at: &str, fields: usize) {
        self.add("missing", at, "Field required", &format!("<dict of {fields} items>"), "");
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.lines.is_empty()
    }

    pub(crate) fn refusal(self) -> ErrorBody {
        let count = self.lines.len();
        let plural = if count == 1 { "" } else { "s" };
        let mut message = format!("{count} validation error{plural}:");
        for line in self.lines.iter().take(MAX_LISTED) {
            message.push_str("\n  ");
            message.push_str(line);
        }
        if count > MAX_LISTED {
            message.push_str(&format!("\n  ...and {} more errors", count - MAX_LISTED));
        }
        ErrorBody { status: 400, kind: "Bad Request", param: self.first, message }
    }
}

pub(crate) fn repr(text: &str) -> String {
    let quote = if text.contains('\'') && !text.contains('"') { '"' } else { '\'' };
    let mut out = String::with_capacity(text.len() + 2);
    out.push(quote);
    for c in text.chars() {
        match c {
            '\\' => out.push_str("\\\\"),
            '\n' => out.push_str("\\n"),
            '\r' => out.push_str("\\r"),
            '\t' => out.push_str("\\t"),
            c if c == quote => {
                out.push('\\');
                out.push(c);
            }
            c => out.push(c),
        }
    }
    out.push(quote);
    out
}

pub(crate) fn shown(value: &Value) -> String {
    match value {
        Value::Null => "None".to_owned(),
        Value::Bool(true) => "True".to_owned(),
        Value::Bool(false) => "False".to_owned(),
        Value::String(text) => text.clone(),
        Value::Array(items) => format!("<list of {} items>", items.len()),
        Value::Object(fields) => format!("<dict of {} items>", fields.len()),
        // A whole number beyond 64 bits is parsed as a float, but shown as it was written.
        Value::Number(number) => match number.as_f64() {
            Some(float) if number.is_f64() && float.fract() == 0.0 && float.abs() > 1e16 => format!("{float:.0}"),
            _ => number.to_string(),
        },
    }
}

pub(crate) fn check(schema: &[Field], body: &Map<String, Value>, problems: &mut ValidationErrors) {
    for field in schema {
        let at = format!("body.{}", field.name);
        match body.get(field.name) {
            None if field.required => problems.missing(&at, body.len()),
            None => {}
            Some(Value::Null) if field.nullable => {}
            Some(value) => check_value(field.takes, value, &at, problems),
        }
    }
}

fn check_value(takes: Type, value: &Value, at: &str, problems: &mut ValidationErrors) {
    let mut wrong = |kind: &str, text: &str| problems.add(kind, at, text, &shown(value), "");
    match takes {
        Type::Any => {}
        Type::Text if value.is_string() => {}
        Type::Text => wrong("string_type", "Input should be a valid string"),
        Type::Int(least, most) => check_int(value, least, most, at, problems),
        Type::Float if float(value).is_some() => {}
        Type::Float if value.is_string() => {
            wrong("float_parsing", "Input should be a valid number, unable to parse string as a number");
        }
        Type::Float => wrong("float_type", "Input should be a valid number"),
        Type::Bool if truth(value).is_some() => {}
        Type::Bool if value.is_string() || value.is_number() => {
            wrong("bool_parsing", "Input should be a valid boolean, unable to interpret input");
        }
        Type::Bool => wrong("bool_type", "Input should be a valid boolean"),
        Type::Dict | Type::Weights => match value {
            Value::Object(fields) if takes == Type::Weights => {
                for (key, weight) in fields {
                    check_value(Type::Float, weight, &format!("{at}.{key}"), problems);
                }
            }
            Value::Object(_) => {}
            _ => wrong("dict_type", "Input should be a valid dictionary"),
        },
        Type::Literal(texts) if value.as_str().is_some_and(|text| texts.contains(&text)) => {}
        Type::Literal(texts) => {
            let expected = one_of(texts);
            let context = format!("'expected': {}", repr(&expected));
            problems.add("literal_error", at, &format!("Input should be {expected}"), &shown(value), &context);
        }
        Type::Ints(_) | Type::Texts => match value {
            Value::Array(items) => {
                let each = if let Type::Ints(least) = takes { Type::Int(least, i64::MAX) } else { Type::Text };
                for (index, item) in items.iter().enumerate() {
                    check_value(each, item, &format!("{at}.{index}"), problems);
                }
            }
            _ => wrong("list_type", "Input should be a valid list"),
        },
        Type::Stop => check_stop(value, at, problems),
    }
}

fn one_of(texts: &[&str]) -> String {
    let quoted: Vec<String> = texts.iter().map(|text| format!("'{text}'")).collect();
    match quoted.split_last() {
        Some((last, rest)) if !rest.is_empty() => format!("{} or {last}", rest.join(", ")),
        Some((last, _)) => last.clone(),
        None => String::new(),
    }
}

/// Checks a string or a list of at most four strings. Both branches of the union report errors.
fn check_stop(value: &Value, at: &str, problems: &mut ValidationErrors) {
    const MOST: usize = 4;
    let items = match value {
        Value::String(_) => return,
        Value::Array(items) => items,
        _ => {
            problems.add("string_type", at, "Input should be a valid string", &shown(value), "");
            problems.add("list_type", at, "Input should be a valid list", &shown(value), "");
            return;
        }
    };
    if items.len() <= MOST && items.iter().all(Value::is_string) {
        return;
    }
    problems.add("string_type", at, "Input should be a valid string", &shown(value), "");
    if items.len() > MOST {
        let text = format!("List should have at most {MOST} items after validation, not {}", items.len());
        let context = format!("'field_type': 'List', 'max_length': {MOST}, 'actual_length': {}", items.len());
        problems.add("too_long", at, &text, &shown(value), &context);
    }
    for (index, item) in items.iter().enumerate() {
        check_value(Type::Text, item, &format!("{at}.{index}"), problems);
    }
}

fn check_int(value: &Value, least: i64, most: i64, at: &str, problems: &mut ValidationErrors) {
    let over = |problems: &mut ValidationErrors, kind: &str, word: &str, bound: i64, key: &str| {
        let text = format!("Input should be {word} than or equal to {bound}");
        problems.add(kind, at, &text, &shown(value), &format!("'{key}': {bound}"));
    };
    match int(value) {
        Ok(number) if number < i128::from(least) => over(problems, "greater_than_equal", "greater", least, "ge"),
        Ok(number) if number > i128::from(most) => over(problems, "less_than_equal", "less", most, "le"),
        Ok(_) => {}
        Err((kind, text)) => problems.add(kind, at, text, &shown(value), ""),
    }
}

/// A whole number as pydantic coerces it: from `8`, `8.0`, `"8"` or `true`.
fn int(value: &Value) -> Result<i128, (&'static str, &'static str)> {
    match value {
        Value::Bool(truth) => Ok(i128::from(*truth)),
        Value::Number(number) => {
            // A whole number beyond 64 bits is parsed as a float, which only the check of the
            // bounds uses.
            let float = number.as_f64().unwrap_or(f64::NAN);
            match number.as_i64() {
                Some(whole) => Ok(i128::from(whole)),
                None if float.fract() == 0.0 => Ok(float as i128),
                None => Err(("int_from_float", "Input should be a valid integer, got a number with a fractional part")),
            }
        }
        Value::String(text) => text
            .trim()
            .parse()
            .map_err(|_| ("int_parsing", "Input should be a valid integer, unable to parse string as an integer")),
        _ => Err(("int_type", "Input should be a valid integer")),
    }
}

pub(crate) fn float(value: &Value) -> Option<f64> {
    match value {
        Value::Bool(truth) => Some(f64::from(u8::from(*truth))),
        Value::Number(number) => number.as_f64(),
        Value::String(text) => text.trim().parse().ok(),
        _ => None,
    }
}

pub(crate) fn truth(value: &Value) -> Option<bool> {
    match value {
        Value::Bool(truth) => Some(*truth),
        Value::Number(number) => match number.as_f64() {
            Some(1.0) => Some(true),
            Some(0.0) => Some(false),
            _ => None,
        },
        Value::String(text) => match text.to_lowercase().as_str() {
            "true" | "1" | "yes" | "on" | "t" | "y" => Some(true),
            "false" | "0" | "no" | "off" | "f" | "n" => Some(false),
            _ => None,
        },
        _ => None,
    }
}

/// Typed access to a body that passed [`check`].
pub(crate) trait FieldReader {
    fn int(&self, name: &str) -> Option<i64>;
    fn float(&self, name: &str) -> Option<f64>;
    /// A boolean; false if absent.
    fn truth(&self, name: &str) -> bool;
    fn text(&self, name: &str) -> Option<&str>;
}

impl FieldReader for Map<String, Value> {
    fn int(&self, name: &str) -> Option<i64> {
        i64::try_from(int(self.get(name)?).ok()?).ok()
    }

    fn float(&self, name: &str) -> Option<f64> {
        float(self.get(name)?)
    }

    fn truth(&self, name: &str) -> bool {
        self.get(name).and_then(truth).unwrap_or(false)
    }

    fn text(&self, name: &str) -> Option<&str> {
        self.get(name)?.as_str()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn message(takes: Type, value: Value) -> String {
        let mut problems = ValidationErrors::default();
        check_value(takes, &value, "body.x", &mut problems);
        if problems.is_empty() { String::new() } else { problems.refusal().message }
    }

    #[test]
    fn errors_have_pydantics_form() {
        assert_eq!(
            message(INT, json!("abc")),
            "1 validation error:\n  {'type': 'int_parsing', 'loc': 'body.x', 'msg': 'Input should be a valid integer, \
             unable to parse string as an integer', 'input': 'abc'}"
        );
        assert!(message(INT, json!(1.5)).contains("'int_from_float'"));
        assert!(message(Type::Int(-5, 5), json!(9)).ends_with("'input': '9', 'ctx': {'le': 5}}"));
        assert!(message(Type::Literal(&["a", "b", "c"]), json!("z")).contains(
            "'msg': \"Input should be 'a', 'b' or 'c'\", 'input': 'z', 'ctx': {'expected': \"'a', 'b' or 'c'\"}"
        ));
        assert!(message(Type::Stop, json!(["a", "b", "c", "d", "e"])).starts_with("2 validation errors:\n"));
        assert!(message(Type::Bool, json!(2)).contains("bool_parsing"));
    }

    #[test]
    fn values_are_coerced() {
        for (takes, value) in [(INT, json!("8")), (INT, json!(8.0)), (INT, json!(true)), (Type::Bool, json!("yes"))] {
            assert_eq!(message(takes, value), "");
        }
    }

    #[test]
    fn strings_are_quoted_as_python_quotes_them() {
        assert_eq!(["a'b", "a\"b", "a'\"\n"].map(repr), ["\"a'b\"", "'a\"b'", "'a\\'\"\\n'"].map(String::from));
    }
}
