//! Reads `[[pool.backend]]`: engines that somebody else runs (`url`) or that we run (`launch`).
//!
//! Exactly one of the two. A URL is taken apart here, so that nobody later meets one that cannot be connected to; an
//! engine to launch is checked as far as that is possible without starting it.

use std::collections::BTreeMap;

use super::super::file::{Entry, Value};
use super::super::problem::Situation;
use super::super::{ArgValue, Backend, Control, Launch, Target, defaults};
use super::auth::secret_at;
use super::model::Names;
use super::section::{Place, Read, Report, Section};
use super::server::duration;
use super::text::{check_name, endpoint};

/// Words of a command, GPUs of an engine, values of a flag.
const MAX_LAUNCH_ITEMS: usize = 256;
/// Weights are shares; a millionfold difference is as good as none and keeps sums exact enough.
const WEIGHTS: std::ops::RangeInclusive<f64> = 0.001..=1_000.0;

/// The backends of a pool, and where the target of each was written.
pub(super) fn backends(pool: &mut Section<'_>, report: &mut Report<'_>) -> (Vec<Backend>, Vec<Place>) {
    let written = pool.sections("backend", defaults::MAX_BACKENDS, report);
    let place = pool.place_of("backend");
    if written.is_empty() && report.problems.iter().all(|problem| problem.path() != place.path) {
        report.add(&place, Situation::NoBackend);
    }
    let mut names = Names::new();
    written.into_iter().filter_map(|section| backend(section, &mut names, report)).unzip()
}

fn backend(mut at: Section<'_>, names: &mut Names, report: &mut Report<'_>) -> Option<(Backend, Place)> {
    let name: Option<String> = at.required("name", "name the backend, such as \"gpu0\"", report);
    if let Some(name) = &name {
        match check_name(name) {
            Ok(()) => names.claim(name, &at.place_of("name"), report),
            Err(situation) => report.add(&at.place_of("name"), situation),
        }
    }
    let (target, place) = target(&mut at, report);
    let weight = at.within("weight", defaults::WEIGHT, WEIGHTS, report);
    let api_key = secret_at(&mut at, "api_key", report);
    at.finish(report);
    Some((Backend { name: name?, target: target?, weight, api_key }, place))
}

fn target(at: &mut Section<'_>, report: &mut Report<'_>) -> (Option<Target>, Place) {
    let own = at.place.clone();
    let (url_written, launch_written) = (at.has("url"), at.has("launch"));
    let url: Option<String> = at.optional("url", report);
    let launched = at.section("launch", report).and_then(|section| launch(section, report));
    let control_at = at.place_of("control");
    let controlled = at.section("control", report).map(|section| control(section, report));
    if controlled.is_some() && !url_written {
        report.add(&control_at, Situation::ControlWithoutUrl);
    }
    if url_written && launch_written {
        report.add(&own, Situation::UrlAndLaunch);
    } else if !url_written && !launch_written {
        report.add(&own, Situation::NeitherUrlNorLaunch);
    }
    let place = at.place_of(if launch_written { "launch" } else { "url" });
    if let Some(launch) = launched {
        return (Some(Target::Launch(launch)), place);
    }
    let place_of_url = at.place_of("url");
    let endpoint = url.and_then(|url| endpoint(&url).map_err(|wrong| report.add(&place_of_url, wrong)).ok());
    let target = match (endpoint, controlled) {
        (Some(endpoint), None) => Some(Target::Url(endpoint)),
        (Some(endpoint), Some(Some(control))) => Some(Target::Control(endpoint, control)),
        (None, _) | (_, Some(None)) => None,
    };
    (target, place)
}

/// The words of a command; none when it is missing or empty, which is told.
fn command(at: &mut Section<'_>, key: &'static str, hint: &'static str, report: &mut Report<'_>) -> Vec<String> {
    let written = at.has(key);
    let words: Vec<String> =
        at.texts(key, MAX_LAUNCH_ITEMS, report).unwrap_or_default().into_iter().map(|(_, word)| word).collect();
    if words.first().is_none_or(String::is_empty) {
        let found = if written { Situation::NameEmpty } else { Situation::Missing { hint } };
        report.add(&at.place_of(key), found);
        return Vec::new();
    }
    words
}

fn control(mut at: Section<'_>, report: &mut Report<'_>) -> Option<Control> {
    let start = command(
        &mut at,
        "start",
        "write the command that starts it, such as [\"systemctl\", \"start\", \"vllm\"]",
        report,
    );
    let stop = command(
        &mut at,
        "stop",
        "write the command that stops it, such as [\"systemctl\", \"stop\", \"vllm\"]",
        report,
    );
    let status = at.texts("status", MAX_LAUNCH_ITEMS, report).unwrap_or_default();
    let timeout = duration(&mut at, "timeout", defaults::CONTROL_TIMEOUT, report);
    let args = free_table(&mut at, "args", report, arg);
    at.finish(report);
    let status = status.into_iter().map(|(_, word)| word).collect();
    (!start.is_empty() && !stop.is_empty()).then_some(Control { start, stop, status, timeout, args })
}

fn launch(mut at: Section<'_>, report: &mut Report<'_>) -> Option<Launch> {
    let hint = "write the program and its arguments, such as [\"vllm\", \"serve\", \"MODEL\"]";
    let command = command(&mut at, "command", hint, report);
    // 0: it is chosen later.
    let port = at.value("port", 0, report);
    let mut gpu = Vec::new();
    for (place, entry) in at.list("gpu", MAX_LAUNCH_ITEMS, report).unwrap_or_default() {
        match u16::read(entry) {
            Ok(index) => gpu.push(index),
            Err(situation) => report.add(&place, situation),
        }
    }
    let env = free_table(&mut at, "env", report, |entry| match &entry.value {
        Value::Int(number) => Ok(number.to_string()),
        _ => String::read(entry),
    });
    let args = free_table(&mut at, "args", report, arg);
    at.finish(report);
    Some(Launch { command, port, gpu, env, args })
}

/// A table whose keys are not ours.
fn free_table<T>(
    at: &mut Section<'_>,
    key: &'static str,
    report: &mut Report<'_>,
    read: impl Fn(&Entry) -> Result<T, Situation>,
) -> BTreeMap<String, T> {
    let Some(section) = at.section(key, report) else { return BTreeMap::new() };
    let mut table = BTreeMap::new();
    for (key, entry) in section.all() {
        let place = section.place_of(key);
        report.origins.note(place.path.clone(), entry.origin);
        match read(entry) {
            Ok(value) => {
                table.insert(key.to_owned(), value);
            }
            Err(situation) => report.add(&place, situation),
        }
    }
    table
}

fn arg(entry: &Entry) -> Result<ArgValue, Situation> {
    let wrong =
        |found: String| Situation::WrongType { wanted: "a text, number, true, false or a list of texts", found };
    match &entry.value {
        Value::Bool(flag) => Ok(ArgValue::Flag(*flag)),
        Value::Int(number) => Ok(ArgValue::Int(*number)),
        Value::Float(number) if number.is_finite() => Ok(ArgValue::Float(*number)),
        Value::Text(text) => Ok(ArgValue::Text(text.clone())),
        Value::List(entries) => entries.iter().map(String::read).collect::<Result<_, _>>().map(ArgValue::List),
        Value::Table(_) => Err(wrong("a table (write JSON arguments as a text)".to_owned())),
        Value::Float(_) => Err(wrong("a number that is not finite".to_owned())),
    }
}
