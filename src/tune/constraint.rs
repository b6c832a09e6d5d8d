//! A condition on the values of a setting: `vllm.max-num-seqs <= vllm.max-num-batched-tokens`.
//!
//! ```text
//! condition = side OPERATOR side          OPERATOR: <= < >= > = !=
//! side      = KEY | VALUE | NUMBER * KEY
//! ```
//!
//! A side is a key if the space has a dimension of that name. A condition on a key that the setting
//! leaves alone has no result: only vLLM knows the default.

use crate::error::TuneError;
use crate::setting::Setting;
use sluice_config::ArgValue;

const OPERATORS: [(&str, Operator); 6] = [
    ("<=", Operator::AtMost),
    (">=", Operator::AtLeast),
    ("!=", Operator::Differs),
    ("<", Operator::Below),
    (">", Operator::Above),
    ("=", Operator::Is),
];

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Operator {
    AtMost,
    AtLeast,
    Differs,
    Below,
    Above,
    Is,
}

#[derive(Clone, Debug, PartialEq)]
enum Side {
    Key { times: f64, key: String },
    Value(ArgValue),
}

/// A condition on the values of a setting.
#[derive(Clone, Debug, PartialEq)]
pub struct Condition {
    text: String,
    left: Side,
    operator: Operator,
    right: Side,
}

impl Condition {
    /// Reads a condition about the dimensions `keys`.
    pub fn parse(text: &str, keys: &[&str]) -> Result<Self, TuneError> {
        let bad = |why: &str| TuneError::Condition { text: text.to_owned(), why: why.to_owned() };
        let found = text.char_indices().find_map(|(at, _)| {
            let operator = OPERATORS.iter().find(|(sign, _)| text[at..].starts_with(sign))?;
            Some((at, operator))
        });
        let (at, (sign, operator)) = found.ok_or_else(|| bad("it has no operator; write one of <= < >= > = !="))?;
        let side = |text: &str| {
            let (times, key) = match text.split_once('*') {
                Some((times, key)) => (times.trim().parse().unwrap_or(f64::NAN), key.trim()),
                None => (1.0, text),
            };
            if keys.contains(&key) {
                Side::Key { times, key: key.to_owned() }
            } else {
                Side::Value(ArgValue::read("", text))
            }
        };
        let (left, right) = (side(text[..at].trim()), side(text[at + sign.len()..].trim()));
        let keys_in = [&left, &right].into_iter().filter(|side| matches!(side, Side::Key { .. })).count();
        if keys_in == 0 {
            return Err(bad(&format!("no side is a dimension; the dimensions are {}", keys.join(", "))));
        }
        if [&left, &right].into_iter().any(|side| matches!(side, Side::Key { times, .. } if !times.is_finite())) {
            return Err(bad("what stands before * is not a number"));
        }
        Ok(Self { text: text.to_owned(), left, operator: *operator, right })
    }

    /// Whether the condition holds; `None`: a key is not in the setting, or two values cannot be
    /// compared.
    pub fn holds(&self, setting: &Setting) -> Option<bool> {
        let (left, right) = (self.left.of(setting)?, self.right.of(setting)?);
        let numbers = left.number().zip(right.number());
        Some(match (self.operator, numbers) {
            (Operator::Is, Some((left, right))) => left == right,
            (Operator::Differs, Some((left, right))) => left != right,
            (Operator::Is, None) => left.to_string() == right.to_string(),
            (Operator::Differs, None) => left.to_string() != right.to_string(),
            (_, None) => return None,
            (Operator::AtMost, Some((left, right))) => left <= right,
            (Operator::AtLeast, Some((left, right))) => left >= right,
            (Operator::Below, Some((left, right))) => left < right,
            (Operator::Above, Some((left, right))) => left > right,
        })
    }

    /// The text of the condition.
    pub fn text(&self) -> &str {
        &self.text
    }
}

impl Side {
    fn of(&self, setting: &Setting) -> Option<ArgValue> {
        match self {
            Self::Value(value) => Some(value.clone()),
            Self::Key { times, key } => {
                let value = setting.get(key)?;
                match value.number() {
                    Some(number) if *times != 1.0 => Some(ArgValue::Float(times * number)),
                    _ => Some(value.clone()),
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::setting::value;

    const KEYS: [&str; 3] = ["vllm.max-num-seqs", "vllm.max-num-batched-tokens", "pool.all.policy"];

    fn setting(pairs: &[(&str, &str)]) -> Setting {
        pairs.iter().map(|(key, text)| ((*key).to_owned(), value(text))).collect()
    }

    #[test]
    fn keys_numbers_texts_and_multiples_are_compared() {
        let seqs = setting(&[(KEYS[0], "256"), (KEYS[1], "512"), (KEYS[2], "least_work")]);
        for (text, holds) in [
            ("vllm.max-num-seqs <= vllm.max-num-batched-tokens", Some(true)),
            ("2*vllm.max-num-seqs < vllm.max-num-batched-tokens", Some(false)),
            ("2 * vllm.max-num-seqs = vllm.max-num-batched-tokens", Some(true)),
            ("vllm.max-num-seqs>=256", Some(true)),
            ("300 > vllm.max-num-seqs", Some(true)),
            ("pool.all.policy = least_work", Some(true)),
            ("pool.all.policy != least_work", Some(false)),
            ("pool.all.policy < 3", None),
        ] {
            assert_eq!(Condition::parse(text, &KEYS).unwrap().holds(&seqs), holds, "{text}");
        }
        let open = Condition::parse("vllm.max-num-seqs <= vllm.max-num-batched-tokens", &KEYS).unwrap();
        assert_eq!(open.holds(&setting(&[(KEYS[0], "256")])), None);
    }

    #[test]
    fn what_cannot_be_read_is_refused_with_the_reason() {
        for (text, reason) in [
            ("max-num-seqs", "no operator"),
            ("seqs < 3", "no side is a dimension"),
            ("x * pool.all.policy < 1", "before *"),
        ] {
            let error = Condition::parse(text, &KEYS).unwrap_err().to_string();
            assert!(error.contains(reason), "{error}");
        }
    }
}
