//! The paths of the admin port, with their methods and protection.
//!
//! Names in paths are percent-decoded; a slash in a name must be encoded. [`routes`](super::routes)
//! has the actions. Bounds: a fixed list of paths.

use http::Method;

use super::access::Protection;
use super::experiments::ExperimentRoute;
use super::restart_query::decode;
use super::tuner::TunerRoute;
use super::ui;

/// A path; for experiments with the method.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Route {
    Page,
    File(&'static ui::File),
    Metrics,
    Health,
    Status,
    Events,
    History,
    Findings,
    /// One request by id, or the lists.
    Requests(Option<String>),
    Reload,
    SetDraining {
        pool: String,
        backend: String,
        draining: bool,
    },
    Restart {
        pool: String,
        backend: String,
    },
    EngineLog {
        pool: String,
        backend: String,
    },
    Experiments(ExperimentRoute),
    Feedback(String),
    Tuner(TunerRoute),
}

impl Route {
    /// The route of a path, if there is one.
    pub(super) fn of(path: &str, method: &Method) -> Option<Self> {
        Some(match path {
            "/" => Self::Page,
            "/admin/events" => Self::Events,
            "/admin/history" => Self::History,
            "/admin/findings" => Self::Findings,
            "/admin/requests" => Self::Requests(None),
            _ if path.starts_with("/ui/") => Self::File(ui::file(&path["/ui/".len()..])?),
            _ if path.starts_with("/admin/requests/") => {
                Self::Requests(Some(decode(&path["/admin/requests/".len()..])?))
            }
            "/metrics" => Self::Metrics,
            "/health" => Self::Health,
            "/admin/status" => Self::Status,
            "/admin/reload" => Self::Reload,
            _ if path.starts_with("/admin/feedback/") => Self::Feedback(decode(&path["/admin/feedback/".len()..])?),
            _ if path.starts_with("/admin/tuner") => Self::Tuner(TunerRoute::of(path)?),
            _ if path.starts_with("/admin/experiments") => Self::Experiments(ExperimentRoute::of(path, method)?),
            _ => {
                // A slash in a name is encoded.
                let mut parts = path.strip_prefix("/admin/backends/")?.split('/');
                let (pool, backend, action) = (decode(parts.next()?)?, decode(parts.next()?)?, parts.next()?);
                if parts.next().is_some() {
                    return None;
                }
                match action {
                    "drain" => Self::SetDraining { pool, backend, draining: true },
                    "enable" => Self::SetDraining { pool, backend, draining: false },
                    "restart" => Self::Restart { pool, backend },
                    "log" => Self::EngineLog { pool, backend },
                    _ => return None,
                }
            }
        })
    }

    /// The methods of the path.
    pub(super) fn methods(&self) -> &'static [Method] {
        match self {
            Self::Page | Self::File(_) | Self::Metrics | Self::Health => &[Method::GET, Method::HEAD],
            Self::Status | Self::History | Self::Findings | Self::Requests(_) | Self::EngineLog { .. } => {
                &[Method::GET, Method::HEAD]
            }
            Self::Events => &[Method::GET],
            Self::Experiments(route) => route.methods(),
            Self::Tuner(route) => route.methods(),
            Self::Reload | Self::SetDraining { .. } | Self::Restart { .. } | Self::Feedback(_) => &[Method::POST],
        }
    }

    /// Whether the route changes something.
    pub(super) fn is_change(&self) -> bool {
        matches!(self.protection(), Protection::Change)
    }

    /// Whether only the leader may answer, if one of several gateways leads: the change is saved,
    /// or applied to engines.
    pub(super) fn is_for_the_leader(&self) -> bool {
        let reads = |route: &ExperimentRoute| matches!(route, ExperimentRoute::List | ExperimentRoute::Show(_));
        match self {
            Self::Restart { .. } | Self::Tuner(TunerRoute::Order(_)) => true,
            Self::Experiments(route) => !reads(route),
            _ => false,
        }
    }

    pub(super) fn takes_body(&self) -> bool {
        matches!(self, Self::Experiments(ExperimentRoute::Put(_)) | Self::Feedback(_))
    }

    /// The requirements on a request.
    pub(super) fn protection(&self) -> Protection {
        match self {
            Self::Health => Protection::None,
            Self::Page | Self::File(_) | Self::Metrics => Protection::Host,
            Self::Events => Protection::Stream,
            Self::Status | Self::History | Self::Findings | Self::Requests(_) | Self::EngineLog { .. } => {
                Protection::Token
            }
            Self::Tuner(TunerRoute::Show) => Protection::Token,
            Self::Experiments(route) if !route.is_change() => Protection::Token,
            Self::Reload
            | Self::SetDraining { .. }
            | Self::Restart { .. }
            | Self::Experiments(_)
            | Self::Feedback(_)
            | Self::Tuner(_) => Protection::Change,
        }
    }
}
