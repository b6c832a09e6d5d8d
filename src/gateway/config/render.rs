//! A resolved configuration as TOML: every key with its value, and who decided it as a comment.
//!
//! This is what `sluice check` prints. What it prints can be used as a file: reading it gives the same
//! configuration again (plain-text secrets excepted, which are masked). Paths in it are as they were
//! resolved. Keys without a value, which mean "no limit", are shown as comments so that the reader
//! sees that they exist.

use std::collections::BTreeMap;
use std::fmt::{self, Display, Write as _};
use std::time::Duration;

use super::choice::Choice;
use super::origin::Origins;
use super::{ArgValue, Backend, Config, Control, Key, Launch, LogTarget, Model, ModelScope, Pool, Slo, Target};
use sluice_core::base::Period;

/// Column at which the comments begin, where the line is short enough.
const COMMENT_COLUMN: usize = 48;

/// A configuration that prints itself as TOML.
pub struct Resolved<'c> {
    /// What is printed.
    pub config: &'c Config,
    /// Who decided each value; `None`: print no comments.
    pub origins: Option<&'c Origins>,
}

impl Display for Config {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        Resolved { config: self, origins: None }.fmt(f)
    }
}

impl Display for Resolved<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut page = Page { f, origins: self.origins, path: String::new(), empty: true };
        single_sections(&mut page, self.config)?;
        for (index, key) in self.config.auth.keys.iter().enumerate() {
            print_key(&mut page, index, key, self.config)?;
        }
        for (index, model) in self.config.models.iter().enumerate() {
            print_model(&mut page, index, model)?;
        }
        for (index, pool) in self.config.pools.iter().enumerate() {
            print_pool(&mut page, index, pool, self.config)?;
        }
        Ok(())
    }
}

struct Page<'p, 'f> {
    f: &'p mut fmt::Formatter<'f>,
    origins: Option<&'p Origins>,
    path: String,
    empty: bool,
}

impl Page<'_, '_> {
    /// Begins a table: its header, and the path of its keys.
    fn table(&mut self, header: &str, path: String) -> fmt::Result {
        let space = if self.empty { "" } else { "\n" };
        self.empty = false;
        self.path = path;
        writeln!(self.f, "{space}{header}")
    }

    fn key(&mut self, key: &str, value: impl Display) -> fmt::Result {
        let line = format!("{} = {value}", bare(key));
        let Some(origins) = self.origins else { return writeln!(self.f, "{line}") };
        let origin = origins.of(&format!("{}.{key}", self.path));
        writeln!(self.f, "{line:COMMENT_COLUMN$} # {origin}")
    }

    fn words(&mut self, key: &str, value: impl Display) -> fmt::Result {
        self.key(key, text(&value.to_string()))
    }

    fn period(&mut self, key: &str, value: Duration) -> fmt::Result {
        self.words(key, Period(value))
    }

    /// A key that may have no value.
    fn maybe<T: Display>(&mut self, key: &str, value: Option<T>, absent: &str) -> fmt::Result {
        match value {
            Some(value) => self.key(key, value),
            None if self.origins.is_some() => writeln!(self.f, "# {key}: {absent}"),
            None => Ok(()),
        }
    }

    fn slo(&mut self, slo: &Slo) -> fmt::Result {
        for (key, value) in [("ttft", slo.ttft), ("tpot", slo.tpot), ("e2el", slo.e2el)] {
            self.maybe(key, value.map(|value| text(&Period(value).to_string())), "no target")?;
        }
        self.key("attainment", format!("{:?}", slo.attainment))
    }
}

fn single_sections(page: &mut Page<'_, '_>, config: &Config) -> fmt::Result {
    let Config { server, timeouts, retry, health, log, .. } = config;
    page.table("[server]", "server".into())?;
    page.words("listen", server.listen)?;
    page.words("admin", server.admin)?;
    page.words("max_body", server.max_body)?;
    page.period("drain_timeout", server.drain_timeout)?;
    page.key("threads", server.threads)?;
    page.period("header_timeout", server.header_timeout)?;
    page.period("body_timeout", server.body_timeout)?;
    page.period("keepalive", server.keepalive)?;

    page.table("[timeouts]", "timeouts".into())?;
    page.period("connect", timeouts.connect)?;
    page.period("idle", timeouts.idle)?;
    page.period("response", timeouts.response)?;
    page.table("[timeouts.first_byte]", "timeouts.first_byte".into())?;
    page.period("base", timeouts.first_byte.base)?;
    page.period("per_1k_prompt_tokens", timeouts.first_byte.per_1k_prompt_tokens)?;

    page.table("[retry]", "retry".into())?;
    page.key("attempts", retry.attempts)?;

    page.table("[slo]", "slo".into())?;
    page.slo(&config.slo)?;

    page.table("[health]", "health".into())?;
    page.period("probe_interval", health.probe_interval)?;
    page.period("probe_timeout", health.probe_timeout)?;
    page.key("failures", health.failures)?;
    page.period("ejection_base", health.ejection_base)?;
    page.period("ejection_max", health.ejection_max)?;
    page.period("stall", health.stall)?;

    let fleet = &config.fleet;
    page.table("[fleet]", "fleet".into())?;
    page.words("state", fleet.state.display())?;
    page.words("ports", format!("{}-{}", fleet.ports.start(), fleet.ports.end()))?;
    page.words("on_start", fleet.on_start.word())?;
    page.words("on_exit", fleet.on_exit.word())?;
    page.period("drain", fleet.drain)?;
    page.period("grace", fleet.grace)?;
    page.key("start_timeout_scale", format!("{:?}", fleet.start_timeout_scale))?;
    page.key("warm_up", fleet.warm_up)?;
    page.period("ramp", fleet.ramp)?;
    page.period("settle", fleet.settle)?;
    page.key("restarts", fleet.restarts)?;
    page.period("restart_window", fleet.restart_window)?;
    page.period("backoff", fleet.backoff)?;
    page.period("backoff_max", fleet.backoff_max)?;
    page.key("headroom", format!("{:?}", fleet.headroom))?;

    if let Some(access_log) = &config.access_log {
        page.table("[access_log]", "access_log".into())?;
        match &access_log.path {
            LogTarget::Stderr => page.words("path", "-")?,
            LogTarget::File(path) => page.words("path", path.display())?,
        }
        page.key("sample", format!("{:?}", access_log.sample))?;
    }

    page.table("[log]", "log".into())?;
    page.words("level", log.level.word())?;
    page.words("format", log.format.word())?;

    page.table("[auth]", "auth".into())?;
    page.maybe("admin_token", config.auth.admin_token.as_ref().map(|token| text(&token.to_string())), "none")
}

fn print_key(page: &mut Page<'_, '_>, index: usize, key: &Key, config: &Config) -> fmt::Result {
    let path = format!("auth.keys[{index}]");
    page.table("[[auth.keys]]", path.clone())?;
    page.words("name", &key.name)?;
    page.words("sha256", &key.sha256)?;
    page.key("models", scope(&key.models, config))?;
    page.key("priority", key.priority)?;
    page.table("[auth.keys.limit]", format!("{path}.limit"))?;
    page.maybe("in_flight", key.limit.in_flight, "no limit")?;
    page.maybe("requests_per_minute", key.limit.requests_per_minute, "no limit")
}

fn print_model(page: &mut Page<'_, '_>, index: usize, model: &Model) -> fmt::Result {
    page.table("[[model]]", format!("model[{index}]"))?;
    page.words("name", &model.name)?;
    page.key("aliases", list(&model.aliases))?;
    let tokenizer = model.tokenizer.as_ref().map(|path| text(&path.display().to_string()));
    page.maybe("tokenizer", tokenizer, "none, lengths are estimated from bytes")?;
    page.words("media_part_tokens", model.media_part_tokens)?;
    let adapter = model.adapter.as_ref().map(|path| text(&path.display().to_string()));
    page.maybe("adapter", adapter, "no adapter, or loaded by somebody else")?;
    page.key("golden", list(&model.golden))
}

fn print_pool(page: &mut Page<'_, '_>, index: usize, pool: &Pool, config: &Config) -> fmt::Result {
    let path = format!("pool[{index}]");
    page.table("[[pool]]", path.clone())?;
    page.words("name", &pool.name)?;
    page.key("models", scope(&pool.models, config))?;
    page.words("policy", pool.policy.word())?;
    page.key("slots", pool.slots)?;
    let tokens = |tokens: Option<sluice_core::base::Tokens>| tokens.map(|tokens| text(&tokens.to_string()));
    page.maybe("tokens", tokens(pool.tokens), "not limited")?;
    page.maybe("prefill_tokens", tokens(pool.prefill_tokens), "not limited")?;
    page.key("spill", list(pool.spill.iter().map(|id| &config.pools[id.index()].name)))?;
    page.words("usage", pool.usage.word())?;

    page.table("[pool.prompt_tokens]", format!("{path}.prompt_tokens"))?;
    page.words("min", pool.prompt_tokens.min)?;
    page.maybe("max", tokens(pool.prompt_tokens.max), "without end")?;
    if let Some(long) = &pool.long_prefix {
        page.table("[pool.long_prefix]", format!("{path}.long_prefix"))?;
        page.words("threshold", long.threshold)?;
        page.key("slots", long.slots)?;
    }
    page.table("[pool.queue]", format!("{path}.queue"))?;
    page.key("length", pool.queue.length)?;
    page.period("timeout", pool.queue.timeout)?;
    page.words("order", pool.queue.order.word())?;
    page.period("aging_per_1k_tokens", pool.queue.aging_per_1k_tokens)?;
    page.table("[pool.slo]", format!("{path}.slo"))?;
    page.slo(&pool.slo)?;
    pool.backends.iter().enumerate().try_for_each(|(number, backend)| print_backend(page, &path, number, backend))
}

fn print_backend(page: &mut Page<'_, '_>, pool: &str, index: usize, backend: &Backend) -> fmt::Result {
    let path = format!("{pool}.backend[{index}]");
    page.table("[[pool.backend]]", path.clone())?;
    page.words("name", &backend.name)?;
    if let Target::Url(endpoint) | Target::Control(endpoint, _) = &backend.target {
        page.words("url", endpoint)?;
    }
    page.key("weight", format!("{:?}", backend.weight))?;
    page.maybe("api_key", backend.api_key.as_ref().map(|key| text(&key.to_string())), "none")?;
    if let Target::Launch(launch) = &backend.target {
        print_launch(page, &format!("{path}.launch"), launch)?;
    }
    if let Target::Control(_, control) = &backend.target {
        print_control(page, &format!("{path}.control"), control)?;
    }
    Ok(())
}

fn print_control(page: &mut Page<'_, '_>, path: &str, control: &Control) -> fmt::Result {
    page.table("[pool.backend.control]", path.to_owned())?;
    page.key("start", list(&control.start))?;
    page.key("stop", list(&control.stop))?;
    page.key("status", list(&control.status))?;
    page.period("timeout", control.timeout)?;
    page.table("[pool.backend.control.args]", format!("{path}.args"))?;
    print_args(page, &control.args)
}

fn print_launch(page: &mut Page<'_, '_>, path: &str, launch: &Launch) -> fmt::Result {
    page.table("[pool.backend.launch]", path.to_owned())?;
    page.key("command", list(&launch.command))?;
    page.key("port", launch.port)?;
    page.key("gpu", format!("{:?}", launch.gpu))?;
    page.table("[pool.backend.launch.env]", format!("{path}.env"))?;
    launch.env.iter().try_for_each(|(name, value)| page.words(name, value))?;
    page.table("[pool.backend.launch.args]", format!("{path}.args"))?;
    print_args(page, &launch.args)
}

fn print_args(page: &mut Page<'_, '_>, args: &BTreeMap<String, ArgValue>) -> fmt::Result {
    args.iter().try_for_each(|(name, value)| match value {
        ArgValue::Flag(flag) => page.key(name, flag),
        ArgValue::Int(number) => page.key(name, number),
        ArgValue::Float(number) => page.key(name, format!("{number:?}")),
        ArgValue::Text(value) => page.words(name, value),
        ArgValue::List(values) => page.key(name, list(values)),
    })
}

fn scope(scope: &ModelScope, config: &Config) -> String {
    match scope {
        ModelScope::All => list(["*"]),
        ModelScope::Only(models) => list(models.iter().map(|model| &config.models[model.index()].name)),
    }
}

fn list(texts: impl IntoIterator<Item = impl AsRef<str>>) -> String {
    let quoted: Vec<String> = texts.into_iter().map(|item| text(item.as_ref())).collect();
    format!("[{}]", quoted.join(", "))
}

/// A key, quoted where TOML asks for it.
fn bare(key: &str) -> String {
    let plain = !key.is_empty() && key.chars().all(|letter| letter.is_ascii_alphanumeric() || "_-".contains(letter));
    if plain { key.to_owned() } else { text(key) }
}

/// A TOML basic string.
pub(super) fn text(value: &str) -> String {
    let mut out = String::with_capacity(value.len() + 2);
    out.push('"');
    for letter in value.chars() {
        match letter {
            '"' | '\\' => out.extend(['\\', letter]),
            '\n' => out.push_str("\\n"),
            // Writing to a String cannot fail.
            _ if letter.is_control() => drop(write!(out, "\\u{:04X}", u32::from(letter))),
            _ => out.push(letter),
        }
    }
    out.push('"');
    out
}
