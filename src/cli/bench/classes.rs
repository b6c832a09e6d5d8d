//! The classes by which results are shown: `[[class]]` of the gateway, so that a name means the
//! same requests here and in the gateway's metrics.
//!
//! They come from the first of these sources: `--by-class`; `/admin/status` of a gateway at
//! `--metrics-url`, with the token in `SLUICE_ADMIN_TOKEN`; the classes of the load (`--class`, or
//! the classes in records of a gateway); the classes of a gateway that treats all lengths alike.
//! Bound: [`STATUS_TIMEOUT`] for each gateway that is asked.

use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::time::Duration;

use super::args::{BenchArgs, DatasetName};
use sluice_admin::{AdminClient, Status};
use sluice_bench::RunResult;
use sluice_config::{Class, Config, PromptRange};
use sluice_core::base::Tokens;
use sluice_lab::classes;

/// Timeout of a question to a gateway; a result can do without the answer.
const STATUS_TIMEOUT: Duration = Duration::from_secs(2);

/// A value of `--by-class`.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum ByClass {
    Class(Class),
    /// The path of a gateway's configuration.
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

/// The classes of the gateway; none if the classes of the load are shown.
pub(super) async fn find(args: &BenchArgs) -> anyhow::Result<Vec<Class>> {
    let mut given = Vec::new();
    for by in &args.output.by_class {
        match by {
            ByClass::Class(class) => given.push(class.clone()),
            ByClass::Config(path) => given.extend(of_file(path)?),
        }
    }
    if !given.is_empty() {
        return Ok(given);
    }
    for url in &args.server.metrics_url {
        let found = of_gateway(url).await;
        if !found.is_empty() {
            return Ok(found);
        }
    }
    let has_own = !args.dataset.class.is_empty() || args.dataset.dataset_name == DatasetName::AccessLog;
    Ok(if has_own { Vec::new() } else { Class::usual() })
}

fn of_file(path: &Path) -> anyhow::Result<Vec<Class>> {
    let loaded = Config::load(path, &[]).map_err(|problems| anyhow::anyhow!("--by-class: {problems}"))?;
    Ok(loaded.config.classes)
}

/// The classes of the gateway with this admin port; none from another server.
async fn of_gateway(url: &str) -> Vec<Class> {
    let token = std::env::var("SLUICE_ADMIN_TOKEN").ok();
    let Ok(client) = AdminClient::new(url, token.as_deref()) else { return Vec::new() };
    let status = tokio::time::timeout(STATUS_TIMEOUT, client.get::<Status>("/admin/status")).await;
    status.ok().and_then(Result::ok).unwrap_or_default().classes.iter().map(Class::from).collect()
}

/// Divides a result by `classes`, unless there are none.
pub(super) fn divide(classes: &[Class], result: &mut RunResult) {
    if !classes.is_empty() {
        classes::divide(result, classes);
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
