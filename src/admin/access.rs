//! Who may use the admin port, and which flags a restart may change.
//!
//! Another site's page in the operator's browser can send requests to any address, and make a name
//! that it owns resolve to this machine (DNS rebinding). Therefore, in this order:
//! 1. `Host` must be a name or address of this port ([`Admin::accepts_host`]). `/health` is exempt:
//!    probes use many host names, and the response reveals nothing.
//! 2. A change, or a stream of events, that a browser marks as cross-origin is refused.
//! 3. A change, or a route that shows more than metrics do, needs the token, if there is one.
//!    Digests are compared in constant time.
//! 4. Without a token, a change needs the header `x-sluice-admin`, which a page cannot send across
//!    origins.
//! 5. A restart changes only flags that are tunable, or listed in `admin.flags`.

use std::net::SocketAddr;

use http::header::{AUTHORIZATION, HOST, HeaderName, HeaderValue, ORIGIN};
use http::uri::Authority;
use http::{HeaderMap, Request, StatusCode, Version};
use sha2::{Digest, Sha256};
use subtle::ConstantTimeEq;

use sluice_config::{Admin, Secret};
use sluice_core::engines::EngineKind;
use sluice_core::vllm::flag_effect::FlagEffect;
use sluice_core::vllm::flags::table::dashed;

/// The header that sluice's own clients send with every change. The value is ignored.
pub const ADMIN_HEADER: HeaderName = HeaderName::from_static("x-sluice-admin");
/// Characters of a client's text that a message repeats.
const SHOWN_MAX: usize = 80;

/// The access rules of the configuration in force.
#[derive(Clone, Debug)]
pub struct Access {
    /// The admin token. `None`: changes need only the header [`ADMIN_HEADER`].
    pub token: Option<Secret>,
    /// Names of the port, and further flags that may be changed.
    pub admin: Admin,
    /// The address of the port.
    pub listen: SocketAddr,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Protection {
    None,
    Host,
    /// Needs a host of this port, and the token if there is one.
    Token,
    /// As [`Token`](Self::Token), and not cross-origin, because a page of another site could hold
    /// the stream open.
    Stream,
    /// As [`Token`](Self::Token), and not cross-origin. If there is no token, needs the header
    /// `x-sluice-admin`.
    Change,
}

#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum Denied {
    #[error("the request must have one Host header")]
    NoHost,
    #[error(
        "'{0}' is not a name of this admin port; use localhost or its address, or add the name to the configuration: \
         [admin] hosts = [\"{0}\"]"
    )]
    Host(String),
    #[error("requests from pages of another origin are refused; use the live page, curl or sluice")]
    CrossOrigin,
    #[error("send the admin token as Authorization: Bearer TOKEN (auth.admin_token in the configuration)")]
    Token,
    #[error(
        "a change needs the header x-sluice-admin: 1, which no page of another site can send; with curl: \
         -H 'x-sluice-admin: 1'"
    )]
    Header,
    #[error(
        "--{flag} {does}, so it may not be changed through the admin API; set it in the configuration file and reload, or \
         allow it there: [admin] flags = [\"{flag}\"]"
    )]
    Flag {
        /// The flag as the client wrote it.
        flag: String,
        does: &'static str,
    },
}

impl Denied {
    pub(super) fn status(&self) -> (StatusCode, &'static str) {
        match self {
            Self::NoHost => (StatusCode::BAD_REQUEST, "bad_request"),
            Self::Host(_) => (StatusCode::FORBIDDEN, "unknown_host"),
            Self::CrossOrigin => (StatusCode::FORBIDDEN, "cross_origin"),
            Self::Token => (StatusCode::UNAUTHORIZED, "unauthorized"),
            Self::Header => (StatusCode::FORBIDDEN, "header_required"),
            Self::Flag { .. } => (StatusCode::FORBIDDEN, "flag_not_allowed"),
        }
    }
}

impl Access {
    pub(super) fn check<B>(&self, request: &Request<B>, protection: Protection) -> Result<(), Denied> {
        if protection == Protection::None {
            return Ok(());
        }
        self.check_host(request)?;
        let is_change = protection == Protection::Change;
        if matches!(protection, Protection::Change | Protection::Stream) && !same_origin(request.headers()) {
            return Err(Denied::CrossOrigin);
        }
        match &self.token {
            _ if protection == Protection::Host => Ok(()),
            Some(token) if !has_token(request.headers(), token) => Err(Denied::Token),
            None if is_change && !request.headers().contains_key(ADMIN_HEADER) => Err(Denied::Header),
            _ => Ok(()),
        }
    }

    /// Checks that a restart may change this flag of an engine of this kind. The flag is given
    /// without leading dashes.
    pub(super) fn check_flag(&self, engine: EngineKind, flag: &str) -> Result<(), Denied> {
        let flag = dashed(flag);
        let (is_tunable, does) = match engine.rules().flags {
            Some(table) => (table.is_tunable(&flag), "is not in the gateway's list of flags for scheduling and memory"),
            None => (FlagEffect::of(&flag).is_tunable(), FlagEffect::of(&flag).sentence()),
        };
        let whole = flag.split_once('.').map_or(flag.as_str(), |(whole, _)| whole);
        let listed = |name: &String| [flag.as_str(), whole].contains(&dashed(name).as_str());
        if is_tunable || self.admin.flags.iter().any(listed) {
            return Ok(());
        }
        Err(Denied::Flag { flag: shown(&flag), does })
    }

    fn check_host<B>(&self, request: &Request<B>) -> Result<(), Denied> {
        let mut sent = request.headers().get_all(HOST).iter();
        let host = match (sent.next(), sent.next()) {
            (Some(host), None) => Some(host.as_bytes()),
            // A request of HTTP/1.0 without Host is not from a browser, because every browser sends
            // Host.
            (None, _) if request.version() < Version::HTTP_11 => None,
            _ => return Err(Denied::NoHost),
        };
        let target = request.uri().authority().map(|authority| authority.as_str().as_bytes());
        for authority in [host, target].into_iter().flatten() {
            let parsed = Authority::try_from(authority).ok().filter(|parsed| !parsed.as_str().contains('@'));
            match parsed {
                Some(parsed) if self.admin.accepts_host(parsed.host(), self.listen) => {}
                // Without brackets, as in `admin.hosts`.
                Some(parsed) => return Err(Denied::Host(shown(parsed.host().trim_matches(['[', ']'])))),
                None => return Err(Denied::Host(shown(&String::from_utf8_lossy(authority)))),
            }
        }
        Ok(())
    }
}

/// A client's text, cut to [`SHOWN_MAX`] characters.
fn shown(name: &str) -> String {
    name.chars().take(SHOWN_MAX).collect()
}

fn has_token(headers: &HeaderMap, wanted: &Secret) -> bool {
    let given = headers.get(AUTHORIZATION).map(HeaderValue::as_bytes).unwrap_or_default();
    let bearer = given.len() > 7 && given[..7].eq_ignore_ascii_case(b"bearer ");
    bearer && bool::from(digest(&given[7..]).ct_eq(&digest(wanted.expose().as_bytes())))
}

fn digest(token: &[u8]) -> [u8; 32] {
    Sha256::digest(token).into()
}

/// Whether the request has no header with which browsers mark cross-origin requests.
fn same_origin(headers: &HeaderMap) -> bool {
    let text = |name: HeaderName| headers.get(name).map(|value| value.to_str().unwrap_or("null"));
    let site = text(HeaderName::from_static("sec-fetch-site")).unwrap_or("none");
    if !matches!(site, "none" | "same-origin") {
        return false;
    }
    match text(ORIGIN) {
        None => true,
        Some(origin) => origin.split_once("://").is_some_and(|(_, host)| Some(host) == text(HOST)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn access(flags: &[&str]) -> Access {
        let flags = flags.iter().map(|flag| (*flag).to_owned()).collect();
        let admin = Admin { hosts: vec!["gate.internal".to_owned()], flags };
        Access { token: None, admin, listen: "127.0.0.1:8081".parse().unwrap() }
    }

    fn checked(head: &[(&str, &str)], version: Version) -> Result<(), Denied> {
        let mut request = Request::get("/metrics").version(version);
        for (name, value) in head {
            request = request.header(*name, *value);
        }
        access(&[]).check(&request.body(()).unwrap(), Protection::Host)
    }

    #[test]
    fn a_host_is_one_name_of_this_port() {
        for host in ["127.0.0.1:8081", "localhost", "[::1]:9000", "gate.internal:80"] {
            assert_eq!(checked(&[("host", host)], Version::HTTP_11), Ok(()), "{host}");
        }
        for host in ["evil.example:8081", "a@localhost", "localhost@evil.example", "local host", ""] {
            assert!(matches!(checked(&[("host", host)], Version::HTTP_11), Err(Denied::Host(_))), "{host}");
        }
        let twice = [("host", "localhost"), ("host", "evil.example")];
        assert_eq!(checked(&twice, Version::HTTP_11), Err(Denied::NoHost));
        assert_eq!(checked(&[], Version::HTTP_11), Err(Denied::NoHost));
        assert_eq!(checked(&[], Version::HTTP_10), Ok(()));
        let absolute = Request::get("http://evil.example/metrics").header("host", "localhost").body(()).unwrap();
        assert!(matches!(access(&[]).check(&absolute, Protection::Host), Err(Denied::Host(_))));
    }

    #[test]
    fn the_flags_of_another_engine_are_its_own() {
        let access = access(&["model"]);
        for (engine, flag, allowed) in [
            (EngineKind::Sglang, "max-running-requests", true),
            (EngineKind::Sglang, "max-num-seqs", false),
            (EngineKind::Sglang, "custom-weight-loader", false),
            (EngineKind::LlamaCpp, "parallel", true),
            (EngineKind::LlamaCpp, "model", true),
            (EngineKind::LlamaCpp, "mcp-servers-config", false),
            (EngineKind::Triton, "backend-directory", false),
            (EngineKind::Serial, "workers", false),
        ] {
            assert_eq!(access.check_flag(engine, flag).is_ok(), allowed, "{flag}");
        }
    }

    #[test]
    fn a_flag_is_allowed_by_its_exact_name_only() {
        let access = access(&["chat-template", "compilation_config.cudagraph_mode", "sim-speed"]);
        for flag in ["max-num-seqs", "max_num_seqs", "chat-template", "compilation-config.cudagraph_mode", "sim-speed"]
        {
            assert_eq!(access.check_flag(EngineKind::Vllm, flag), Ok(()), "{flag}");
        }
        for flag in [
            "middleware",
            "chat-templat",
            "compilation-config",
            "compilation-config.backend",
            "sim-seed",
            "tool_server",
        ] {
            let refused = access.check_flag(EngineKind::Vllm, flag).unwrap_err().to_string();
            assert!(
                refused.starts_with(&format!("--{}", dashed(flag))) && refused.contains("[admin] flags"),
                "{refused}"
            );
        }
    }
}
