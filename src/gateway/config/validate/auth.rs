//! Reads `[auth]`, and says what an open gateway or an open admin port means.
//!
//! Keys are digests, never the keys themselves; two keys with one name or one digest are a mistake, because a log line or
//! a limit could then mean either.

use super::super::problem::Situation;
use super::super::secret::Secret;
use super::super::{Auth, Key, KeyLimit, Model, Server, defaults};
use super::model::{Names, scope};
use super::section::{Report, Section};
use super::text::{check_name, digest, secret};

pub(super) fn auth(root: &mut Section<'_>, models: &[Model], server: &Server, report: &mut Report<'_>) -> Auth {
    let mut at = root.section_or_empty("auth", report);
    let sections = at.sections("keys", defaults::MAX_KEYS, report);
    let written = sections.len();
    let mut names = Names::new();
    let mut keys: Vec<Key> = Vec::new();
    for section in sections {
        let place = section.place_of("sha256");
        let Some(key) = key(section, models, &mut names, report) else { continue };
        if let Some(first) = keys.iter().find(|other| other.sha256.bytes() == key.sha256.bytes()) {
            report.add(&place, Situation::SameKey { first: first.name.clone() });
        }
        keys.push(key);
    }
    if written == 0 {
        report.add(&at.place_of("keys"), Situation::Open { listen: server.listen.to_string() });
    }
    let admin_token = secret_at(&mut at, "admin_token", report);
    if !at.has("admin_token") && !server.admin.ip().is_loopback() {
        report.add(&at.place_of("admin_token"), Situation::AdminOpen { admin: server.admin.to_string() });
    }
    at.finish(report);
    Auth { keys, admin_token }
}

/// A secret by reference, or in plain text with a warning.
pub(super) fn secret_at(at: &mut Section<'_>, key: &'static str, report: &mut Report<'_>) -> Option<Secret> {
    let text: String = at.optional(key, report)?;
    match secret(&text, report.around) {
        Ok(secret) => {
            if !secret.is_reference() {
                report.add(&at.place_of(key), Situation::PlainSecret);
            }
            Some(secret)
        }
        Err(situation) => {
            report.add(&at.place_of(key), situation);
            None
        }
    }
}

fn key(mut at: Section<'_>, models: &[Model], names: &mut Names, report: &mut Report<'_>) -> Option<Key> {
    let name: Option<String> = at.required("name", "name the key for logs", report);
    if let Some(name) = &name {
        match check_name(name) {
            Ok(()) => names.claim(name, &at.place_of("name"), report),
            Err(situation) => report.add(&at.place_of("name"), situation),
        }
    }
    let text: Option<String> = at.required("sha256", "write 64 hex digits, or env:NAME or file:PATH", report);
    let sha256 = text.and_then(|text| {
        digest(&text, report.around).map_err(|situation| report.add(&at.place_of("sha256"), situation)).ok()
    });
    let (models, _) = scope(&mut at, "models", models, report);
    let priority = at.value("priority", 0, report);
    let mut limit = at.section_or_empty("limit", report);
    let limits = KeyLimit {
        in_flight: limit.optional_within("in_flight", 1..=u32::MAX, report),
        requests_per_minute: limit.optional_within("requests_per_minute", 1..=u32::MAX, report),
    };
    limit.finish(report);
    at.finish(report);
    Some(Key { name: name?, sha256: sha256?, models, priority, limit: limits })
}
