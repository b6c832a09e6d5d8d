//! Masks the secrets of an engine in its output.
//!
//! A program may print arguments or environment variables, and failures, the journal and the admin
//! API quote the last lines. The mask covers secrets in `args` and commands, and variables that are
//! references or have the name of a secret. Secrets shorter than [`LENGTH_MIN`] bytes are not
//! masked, because they could match parts of ordinary words.

use std::borrow::Cow;

use sluice_config::{ArgValue, Control, Launch, MASK};
use sluice_core::vllm::secrets::is_secret_variable;

/// Bytes of the shortest secret that is masked.
const LENGTH_MIN: usize = 6;

/// The secrets of one engine. Never shown.
#[derive(Clone, Default)]
pub(crate) struct Redactor(Vec<String>);

impl std::fmt::Debug for Redactor {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Redactor({})", self.0.len())
    }
}

fn of_args<'a>(args: impl IntoIterator<Item = &'a ArgValue>) -> Vec<String> {
    let secrets = args.into_iter().filter_map(|value| match value {
        ArgValue::Secret(secrets) => Some(secrets.iter().map(|secret| secret.expose().to_owned())),
        _ => None,
    });
    secrets.flatten().collect()
}

impl Redactor {
    pub(crate) fn of_launch(launch: &Launch) -> Self {
        let variables = launch.env.iter().filter(|(name, value)| value.is_reference() || is_secret_variable(name));
        let variables = variables.map(|(_, value)| value.expose().to_owned());
        Self::new(of_args(launch.args.values()).into_iter().chain(variables).chain(launch.command.secrets()))
    }

    pub(crate) fn of_commands(control: &Control) -> Self {
        let words = [&control.start, &control.stop, &control.status].into_iter().flat_map(|words| words.secrets());
        Self::new(of_args(control.args.values()).into_iter().chain(words))
    }

    fn new(secrets: impl Iterator<Item = String>) -> Self {
        let mut secrets: Vec<String> = secrets.filter(|secret| secret.len() >= LENGTH_MIN).collect();
        // A secret that contains another one is masked first.
        secrets.sort_by_key(|secret| std::cmp::Reverse(secret.len()));
        secrets.dedup();
        Self(secrets)
    }

    /// The text with a mask in place of each secret.
    pub(crate) fn apply<'t>(&self, text: impl Into<Cow<'t, str>>) -> Cow<'t, str> {
        let mut text = text.into();
        for secret in self.0.iter() {
            if text.contains(&**secret) {
                text = Cow::Owned(text.replace(&**secret, MASK));
            }
        }
        text
    }
}
