//! A setting in an operator's form: flags of `vllm serve`, keys of `sluice.toml`.
//!
//! Keys of the gateway are given as `--set` of `sluice serve`, which is exact, and as lines for the
//! file.

use crate::setting::{Setting, flags};
use sluice_config::ArgValue;
use sluice_lab::sweep::flag_of;

/// Lines that say how to use a setting; none for the defaults.
pub fn lines(setting: &Setting) -> Vec<String> {
    let mut lines = Vec::new();
    let flags = flags(setting);
    let of = |backend: Option<&str>| {
        let own = flags.iter().filter(|(own, _)| own.as_deref() == backend).map(|(_, flag)| flag.as_str());
        own.collect::<Vec<_>>().join(" ")
    };
    let mut backends: Vec<Option<&str>> = flags.iter().map(|(backend, _)| backend.as_deref()).collect();
    backends.dedup();
    for backend in backends {
        let to = backend.map_or(String::new(), |backend| format!(" of {backend}"));
        lines.push(format!("vllm serve{to}: {}", of(backend)));
    }
    let keys: Vec<(&String, &ArgValue)> = setting.iter().filter(|(key, _)| flag_of(key).is_none()).collect();
    if !keys.is_empty() {
        let sets: Vec<String> = keys.iter().map(|(key, value)| format!("--set {key}={value}")).collect();
        lines.push(format!("sluice serve: {}", sets.join(" ")));
    }
    lines
}

/// The setting as lines of `sluice.toml`, each below a comment that names the place.
pub fn patch(setting: &Setting) -> String {
    let mut patch = String::new();
    let mut place = String::new();
    let mut line = |at: String, key: &str, value: &ArgValue| {
        if at != place {
            patch += &format!("# {at}\n");
            place = at;
        }
        patch += &format!("{key} = {}\n", toml_value(value));
    };
    for (key, value) in setting {
        match flag_of(key) {
            Some((None, flag)) => line("launch.args of every [[pool.backend]]".to_owned(), flag, value),
            Some((Some(backend), flag)) => line(format!("launch.args of [[pool.backend]] \"{backend}\""), flag, value),
            None => match key.split('.').collect::<Vec<_>>()[..] {
                ["pool", pool, ref rest @ ..] if !rest.is_empty() => {
                    line(format!("[[pool]] \"{pool}\""), &rest.join("."), value);
                }
                _ => line("at the top".to_owned(), key, value),
            },
        }
    }
    patch
}

fn toml_value(value: &ArgValue) -> String {
    match value {
        ArgValue::Text(text) => toml::Value::String(text.clone()).to_string(),
        ArgValue::List(values) => format!("{values:?}"),
        value => value.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::setting::value;

    #[test]
    fn a_setting_is_put_to_use_by_flags_and_keys() {
        let pairs = [
            ("vllm.max-num-seqs", "64"),
            ("vllm@gpu1.kv-cache-dtype", "fp8"),
            ("pool.all.policy", "least_work"),
            ("pool.all.long_prefix.slots", "2"),
        ];
        let setting: Setting = pairs.iter().map(|(key, text)| ((*key).to_owned(), value(text))).collect();
        assert_eq!(
            lines(&setting),
            [
                "vllm serve: --max-num-seqs=64",
                "vllm serve of gpu1: --kv-cache-dtype=fp8",
                "sluice serve: --set pool.all.long_prefix.slots=2 --set pool.all.policy=least_work",
            ]
        );
        let patch = patch(&setting);
        assert!(patch.starts_with("# [[pool]] \"all\"\nlong_prefix.slots = 2\npolicy = \"least_work\"\n"), "{patch}");
        assert!(patch.contains("# launch.args of every [[pool.backend]]\nmax-num-seqs = 64\n"), "{patch}");
        assert!(lines(&Setting::new()).is_empty());
    }
}
