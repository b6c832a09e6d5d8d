//! Reads the sections that exist once. Mirrors `config/server.rs` field by field.
//!
//! Each value gets its default from `defaults.rs` when it is absent, and a range check when it is not; the checks here are
//! those that concern one section alone.

use std::net::SocketAddr;
use std::time::Duration;

use super::super::problem::Situation;
use super::super::{AccessLog, FirstByte, Health, Log, LogTarget, Retry, Server, Slo, Timeouts, defaults};
use super::section::{Report, Section};
use super::text::path_in;
use sluice_core::base::{ByteSize, Period};

/// The shortest duration that counts as one.
const SHORTEST: Period = Period(Duration::from_micros(1));
/// The smallest share of requests that is worth an objective.
const SMALLEST_SHARE: f64 = 0.01;
const LONGEST: Period = Period(defaults::MAX_PERIOD);

/// A duration above zero.
pub(super) fn duration(
    at: &mut Section<'_>,
    key: &'static str,
    default: Duration,
    report: &mut Report<'_>,
) -> Duration {
    at.within(key, Period(default), SHORTEST..=LONGEST, report).0
}

/// A duration that may be zero.
pub(super) fn duration_or_zero(
    at: &mut Section<'_>,
    key: &'static str,
    default: Duration,
    report: &mut Report<'_>,
) -> Duration {
    at.within(key, Period(default), Period(Duration::ZERO)..=LONGEST, report).0
}

pub(super) fn server(root: &mut Section<'_>, report: &mut Report<'_>) -> Server {
    let mut at = root.section_or_empty("server", report);
    let server = Server {
        listen: address(&mut at, "listen", defaults::LISTEN, report),
        admin: address(&mut at, "admin", defaults::ADMIN, report),
        max_body: at.within("max_body", defaults::MAX_BODY, ByteSize(1)..=defaults::MAX_MAX_BODY, report),
        drain_timeout: duration(&mut at, "drain_timeout", defaults::DRAIN_TIMEOUT, report),
        threads: at.within("threads", report.around.cores, 1..=defaults::MAX_THREADS, report),
        header_timeout: duration(&mut at, "header_timeout", defaults::HEADER_TIMEOUT, report),
        body_timeout: duration(&mut at, "body_timeout", defaults::BODY_TIMEOUT, report),
        keepalive: duration(&mut at, "keepalive", defaults::KEEPALIVE, report),
    };
    if overlap(server.listen, server.admin) {
        report.add(&at.place_of("admin"), Situation::AdminIsListen { listen: server.listen.to_string() });
    }
    at.finish(report);
    server
}

fn address(at: &mut Section<'_>, key: &'static str, default: &str, report: &mut Report<'_>) -> SocketAddr {
    let written = at.optional(key, report);
    written.unwrap_or_else(|| default.parse().expect("default addresses are checked by a test"))
}

/// Whether two sockets cannot both be bound, or one would be reachable through the other's address.
/// Port 0 is "any free one" and never overlaps.
pub(super) fn overlap(one: SocketAddr, other: SocketAddr) -> bool {
    let same_host = one.ip() == other.ip() || one.ip().is_unspecified() || other.ip().is_unspecified();
    one.port() != 0 && one.port() == other.port() && same_host
}

pub(super) fn timeouts(root: &mut Section<'_>, report: &mut Report<'_>) -> Timeouts {
    let mut at = root.section_or_empty("timeouts", report);
    let mut first = at.section_or_empty("first_byte", report);
    let first_byte = FirstByte {
        base: duration(&mut first, "base", defaults::FIRST_BYTE_BASE, report),
        per_1k_prompt_tokens: duration_or_zero(&mut first, "per_1k_prompt_tokens", defaults::FIRST_BYTE_PER_1K, report),
    };
    first.finish(report);
    let timeouts = Timeouts {
        connect: duration(&mut at, "connect", defaults::CONNECT_TIMEOUT, report),
        first_byte,
        idle: duration(&mut at, "idle", defaults::IDLE_TIMEOUT, report),
        response: duration(&mut at, "response", defaults::RESPONSE_TIMEOUT, report),
    };
    at.finish(report);
    timeouts
}

pub(super) fn retry(root: &mut Section<'_>, report: &mut Report<'_>) -> Retry {
    let mut at = root.section_or_empty("retry", report);
    let attempts = at.within("attempts", defaults::RETRY_ATTEMPTS, 1..=defaults::MAX_RETRY_ATTEMPTS, report);
    at.finish(report);
    Retry { attempts }
}

/// Objectives; what is not written comes from `general` where there is one.
pub(super) fn slo(mut at: Section<'_>, general: Option<&Slo>, report: &mut Report<'_>) -> Slo {
    let mut target = |key: &'static str, general: Option<Duration>| {
        at.optional_within(key, SHORTEST..=LONGEST, report).map(|period: Period| period.0).or(general)
    };
    let ttft = target("ttft", general.and_then(|slo| slo.ttft));
    let tpot = target("tpot", general.and_then(|slo| slo.tpot));
    let e2el = target("e2el", general.and_then(|slo| slo.e2el));
    let default = general.map_or(defaults::ATTAINMENT, |slo| slo.attainment);
    let attainment = at.within("attainment", default, SMALLEST_SHARE..=1.0, report);
    // What was inherited was decided where it was written for all.
    if general.is_some() {
        for key in ["ttft", "tpot", "e2el", "attainment"].into_iter().filter(|key| !at.has(key)) {
            let origin = report.origins.of(&format!("slo.{key}"));
            report.origins.note(at.place_of(key).path, origin);
        }
    }
    at.finish(report);
    Slo { ttft, tpot, e2el, attainment }
}

pub(super) fn health(root: &mut Section<'_>, report: &mut Report<'_>) -> Health {
    let mut at = root.section_or_empty("health", report);
    let health = Health {
        probe_interval: duration(&mut at, "probe_interval", defaults::PROBE_INTERVAL, report),
        probe_timeout: duration(&mut at, "probe_timeout", defaults::PROBE_TIMEOUT, report),
        failures: at.within("failures", defaults::EJECT_FAILURES, 1..=defaults::MAX_EJECT_FAILURES, report),
        ejection_base: duration(&mut at, "ejection_base", defaults::EJECTION_BASE, report),
        ejection_max: duration(&mut at, "ejection_max", defaults::EJECTION_MAX, report),
        stall: duration(&mut at, "stall", defaults::STALL, report),
    };
    if health.ejection_base > health.ejection_max {
        let (base, max) = (Period(health.ejection_base).to_string(), Period(health.ejection_max).to_string());
        report.add(&at.place_of("ejection_base"), Situation::EjectionOrder { base, max });
    }
    at.finish(report);
    health
}

pub(super) fn access_log(root: &mut Section<'_>, report: &mut Report<'_>) -> Option<AccessLog> {
    let mut at = root.section("access_log", report)?;
    let path: Option<String> = at.required("path", "write a file, or \"-\" for stderr", report);
    let sample = at.within("sample", defaults::ACCESS_LOG_SAMPLE, 0.0..=1.0, report);
    at.finish(report);
    let target = |path: String| {
        if path == "-" { LogTarget::Stderr } else { LogTarget::File(path_in(&report.around.folder, &path)) }
    };
    path.map(|path| AccessLog { path: target(path), sample })
}

pub(super) fn log(root: &mut Section<'_>, report: &mut Report<'_>) -> Log {
    let mut at = root.section_or_empty("log", report);
    let log = Log {
        level: at.value("level", defaults::LOG_LEVEL, report),
        format: at.value("format", defaults::LOG_FORMAT, report),
    };
    at.finish(report);
    log
}
