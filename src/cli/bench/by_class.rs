//! `--by-class`: a class of requests by which results are shown, written like `short:max=5k`, or
//! the path of a gateway's configuration. Lengths are tokens of the prompt; the keys are
//! the keys of `[[class]]`.

use std::path::PathBuf;
use std::str::FromStr;

use sluice_config::{Class, PromptRange};
use sluice_core::base::Tokens;

#[derive(Clone, Debug, PartialEq)]
pub(super) enum ByClass {
    Class(Class),
    Config(PathBuf),
}

impl FromStr for ByClass {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let Some((name, rest)) = text.split_once(':') else {
            return match text.ends_with(".toml") {
                true => Ok(Self::Config(text.into())),
                false => Err("write it like short:max=5k, or the path of a configuration, sluice.toml".to_owned()),
            };
        };
        let mut class = Class::of_lengths(name, PromptRange { min: Tokens(0), max: None });
        if name.is_empty() {
            return Err("a class needs a name: short:max=5k".into());
        }
        for part in rest.split(',').filter(|part| !part.is_empty()) {
            let (key, value) = part.split_once('=').ok_or_else(|| format!("'{part}' is not KEY=VALUE"))?;
            let tokens = || value.parse::<Tokens>().map_err(|error| error.to_string());
            match key {
                "min" => class.prompt_tokens.min = tokens()?,
                "max" => class.prompt_tokens.max = Some(tokens()?),
                "adapter" => {
                    class.adapter =
                        Some(value.parse().map_err(|_| format!("'{value}' of {key} is not true or false"))?);
                }
                _ => return Err(format!("a class has no key '{key}'; its keys are min, max, adapter")),
            }
        }
        Ok(Self::Class(class))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_class_is_written_as_in_a_configuration() {
        let written = |text: &str| match text.parse::<ByClass>() {
            Ok(ByClass::Class(class)) => format!("{}: {}", class.name, class.requests()),
            Ok(ByClass::Config(path)) => path.display().to_string(),
            Err(error) => error,
        };
        assert_eq!(written("short:max=5k"), "short: 0 to 5k");
        assert_eq!(written("long:min=5000,adapter=false"), "long: 5k and more, without adapter");
        assert_eq!(written("etc/sluice.toml"), "etc/sluice.toml");
        for (text, says) in [
            ("short", "write it like short:max=5k"),
            (":max=5k", "a class needs a name"),
            ("short:max", "'max' is not KEY=VALUE"),
            ("short:max=few", "few"),
            ("short:adapter=1", "'1' of adapter is not true or false"),
            ("short:out=4", "its keys are min, max, adapter"),
        ] {
            assert!(written(text).contains(says), "{text}: {}", written(text));
        }
    }
}
