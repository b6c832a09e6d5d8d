//! A hint about the path that a client may have meant, if the path is not served.
//!
//! The hint is the admin port, or the nearest path of this port. The client's path may differ by
//! letter case, a slash too many, a missing or second `/v1`, or up to [`REACH`] typing mistakes.
//! Only paths of up to [`LONGEST`] bytes are compared. The hint never repeats the client's path.

use std::fmt;

use super::kserve;
use super::route::Route;

/// Largest edit distance of a near miss.
const REACH: usize = 3;
/// Longest path that is compared with near paths, bytes.
const LONGEST: usize = 64;

/// Paths of the client port, in their usual spelling.
fn paths() -> impl Iterator<Item = &'static str> {
    Route::ALL.into_iter().filter_map(Route::path).chain(["/v1/models", "/health", "/ready"])
}

/// The path or port that a client may have meant.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RouteHint {
    /// A path of this port.
    Near(&'static str),
    /// A path of the admin port.
    AdminPort,
    /// The path names a model of KServe in a spelling that is not served.
    Kserve,
    /// The engines of the model lack the path; they are of this kind.
    Engine(&'static str),
}

impl RouteHint {
    /// The hint for `path`, which must come without its query string.
    pub fn of(path: &str) -> Option<Self> {
        if matches!(path, "/" | "/metrics" | "/metrics/" | "/admin") || path.starts_with("/admin/") {
            return Some(Self::AdminPort);
        }
        if kserve::is_below_models(path) {
            return Some(Self::Kserve);
        }
        if path.len() > LONGEST {
            return None;
        }
        let parts: Vec<&str> = path.split('/').filter(|part| !part.is_empty()).collect();
        let rest = parts.iter().position(|part| !part.eq_ignore_ascii_case("v1")).map_or(&[][..], |at| &parts[at..]);
        let wanted = rest.join("/").to_lowercase();
        let name = |path: &'static str| path.strip_prefix("/v1").unwrap_or(path).trim_start_matches('/');
        let reach = REACH.min(wanted.len() / 3);
        let distance = |path: &'static str| (strsim::osa_distance(&wanted, name(path)), path);
        let (far, path) = paths().map(distance).min_by_key(|(far, _)| *far)?;
        (far <= reach).then_some(Self::Near(path))
    }
}

impl fmt::Display for RouteHint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Near(path) => write!(f, "did you mean {path}?"),
            Self::Kserve => f.write_str(
                "write /v2/models/NAME/infer, generate or generate_stream; NAME has letters, digits and ._- only, unescaped",
            ),
            Self::Engine(kind) => write!(f, "the model runs on {kind}, which does not serve it"),
            Self::AdminPort => f.write_str("metrics, dashboard and admin API are on the admin port (server.admin)"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_near_miss_names_the_path() {
        for (path, meant) in [
            ("/chat/completions", "/v1/chat/completions"),
            ("/v1/v1/chat/completions", "/v1/chat/completions"),
            ("/v1/chat/completions/", "/v1/chat/completions"),
            ("/V1/Chat/Completions", "/v1/chat/completions"),
            ("/v1/chat/completion", "/v1/chat/completions"),
            ("/v1/completion", "/v1/completions"),
            ("//v1/embedings", "/v1/embeddings"),
            ("/models", "/v1/models"),
            ("/healthz", "/health"),
            ("/readyz", "/ready"),
            ("/v1/tokenize", "/tokenize"),
        ] {
            assert_eq!(RouteHint::of(path), Some(RouteHint::Near(meant)), "{path}");
        }
    }

    #[test]
    fn the_admin_port_is_named_and_what_is_far_from_everything_gets_no_hint() {
        for path in ["/", "/metrics", "/admin/status", "/admin"] {
            assert_eq!(RouteHint::of(path), Some(RouteHint::AdminPort), "{path}");
        }
        let long = "/v1/chat/completions".repeat(9);
        for path in ["", "/x", "/v1", "/v1/load_lora_adapter", "/sleep", "/collective_rpc", long.as_str()] {
            assert_eq!(RouteHint::of(path), None, "{path}");
        }
    }
}
