//! The value of a flag.
//!
//! Every text is read by [`FlagValue::read`], wherever it comes from: a restart, the arguments of a
//! pod, a sweep or a setting.
//!
//! | text | value |
//! |---|---|
//! | `true`, `false` | [`FlagValue::Flag`]; a text if the flag takes a value |
//! | `32`, `-1` | [`FlagValue::Int`] |
//! | `0.5`, `1e3` | [`FlagValue::Float`] |
//! | anything else: `8k`, `nan`, `inf`, JSON | [`FlagValue::Text`] |

use std::convert::Infallible;
use std::fmt;

use serde::{Deserialize, Deserializer, Serialize, de};

use super::super::whole_number;
use super::table::{Arity, lookup, takes_size};

/// A text that is never shown.
pub trait SecretText {
    /// The text, for the code that compares or sends it.
    fn expose(&self) -> &str;
}

impl SecretText for Infallible {
    fn expose(&self) -> &str {
        match *self {}
    }
}

/// The value of a flag of an engine. In JSON it is the plain value.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum FlagValue<S = Infallible> {
    /// `true`: the flag alone; `false`: the `no-` form.
    Flag(bool),
    /// A whole number.
    Int(i64),
    /// A finite number.
    #[serde(deserialize_with = "deserialize_finite")]
    Float(f64),
    /// Any other text, also JSON.
    Text(String),
    /// A flag that takes several values.
    List(Vec<String>),
    /// Values that are never shown. Only the configuration has them; JSON has no such value.
    #[serde(skip)]
    Secret(Vec<S>),
}

fn deserialize_finite<'de, D: Deserializer<'de>>(from: D) -> Result<f64, D::Error> {
    let number = f64::deserialize(from)?;
    if number.is_finite() { Ok(number) } else { Err(de::Error::custom("a number that is not finite")) }
}

/// A number that is neither infinite nor NaN.
pub fn finite(text: &str) -> Option<f64> {
    text.parse().ok().filter(|number: &f64| number.is_finite())
}

impl<S> FlagValue<S> {
    /// Reads the value of the flag `name`; see the table above.
    pub fn read(name: &str, text: &str) -> Self {
        if let Ok(on) = text.parse() {
            let arity = lookup(&format!("--{name}")).map(|flag| flag.arity);
            // Without a value, `--hf-token` uses the token stored on the host.
            let takes_value =
                matches!(arity, Some(Arity::One | Arity::Many)) && !name.contains('.') && name != "hf-token";
            return if takes_value { Self::Text(text.to_owned()) } else { Self::Flag(on) };
        }
        match (text.parse(), finite(text)) {
            (Ok(number), _) => Self::Int(number),
            (_, Some(number)) => Self::Float(number),
            _ => Self::Text(text.to_owned()),
        }
    }

    /// The value as a number.
    pub fn number(&self) -> Option<f64> {
        match self {
            Self::Int(number) => Some(*number as f64),
            Self::Float(number) => Some(*number),
            _ => None,
        }
    }

    /// The value of the flag `name` as a number. A text is a number with a unit (`8k`) if the flag
    /// takes one.
    pub fn number_of(&self, name: &str) -> Option<f64> {
        match self {
            Self::Text(text) if takes_size(name) => whole_number::parse(text).ok()?.map(|number| number as f64),
            value => value.number(),
        }
    }
}

impl<S: SecretText> FlagValue<S> {
    /// The value with secrets in clear, for the code that starts an engine with it.
    pub fn expose(&self) -> Self {
        match self {
            Self::Flag(on) => Self::Flag(*on),
            Self::Int(number) => Self::Int(*number),
            Self::Float(number) => Self::Float(*number),
            Self::Text(text) => Self::Text(text.clone()),
            Self::List(texts) => Self::List(texts.clone()),
            Self::Secret(secrets) => match secrets.as_slice() {
                [secret] => Self::Text(secret.expose().to_owned()),
                secrets => Self::List(secrets.iter().map(|secret| secret.expose().to_owned()).collect()),
            },
        }
    }

    /// The values as texts, secrets in clear.
    pub fn texts(&self) -> Vec<String> {
        match self.expose() {
            Self::List(texts) => texts,
            value => vec![value.to_string()],
        }
    }
}

impl<S> fmt::Display for FlagValue<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Flag(on) => on.fmt(f),
            Self::Int(number) => number.fmt(f),
            Self::Float(number) => number.fmt(f),
            Self::Text(text) => f.write_str(text),
            Self::List(texts) => f.write_str(&texts.join(" ")),
            Self::Secret(_) => f.write_str("(secret)"),
        }
    }
}

#[cfg(test)]
mod tests {
    use serde::de::IntoDeserializer as _;
    use serde::de::value::F64Deserializer;

    use super::*;

    #[test]
    fn a_text_is_a_number_only_if_it_is_finite() {
        let read = |text| FlagValue::<Infallible>::read("gpu-memory-utilization", text);
        for text in ["nan", "NaN", "inf", "-inf", "infinity", "1e999", "8k", "1_000", ""] {
            assert_eq!(read(text), FlagValue::Text(text.to_owned()));
        }
        assert_eq!(
            (read("1e3"), read("-1"), read("0.50")),
            (FlagValue::Float(1e3), FlagValue::Int(-1), FlagValue::Float(0.5))
        );
        for number in [f64::NAN, f64::INFINITY] {
            let number: F64Deserializer<de::value::Error> = number.into_deserializer();
            assert!(FlagValue::<Infallible>::deserialize(number).is_err());
        }
    }

    #[test]
    fn a_boolean_is_a_text_for_a_flag_that_takes_a_value() {
        let read = |name, text| FlagValue::<Infallible>::read(name, text);
        let text = |text: &str| FlagValue::Text(text.to_owned());
        assert_eq!(
            (read("enforce_eager", "true"), read("unknown", "false")),
            (FlagValue::Flag(true), FlagValue::Flag(false))
        );
        assert_eq!((read("tokenizer", "true"), read("served-model-name", "false")), (text("true"), text("false")));
        assert_eq!(read("compilation-config.x", "true"), FlagValue::Flag(true));
    }

    #[test]
    fn a_unit_counts_where_the_flag_takes_one() {
        let number = |name, text| FlagValue::<Infallible>::read(name, text).number_of(name);
        assert_eq!(number("max-num-batched-tokens", "8k"), Some(8_000.0));
        assert_eq!((number("max_model_len", "2K"), number("max-num-seqs", "8k")), (Some(2_048.0), None));
        assert_eq!((number("max-num-seqs", "16"), number("gpu-memory-utilization", "nan")), (Some(16.0), None));
    }
}
