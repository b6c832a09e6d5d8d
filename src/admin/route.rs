//! The routes of the admin port: path, methods, requirements and action, one row each.
//!
//! **To add a route, add a row here and an action in [`actions`](super::actions).** Names in paths
//! are percent-decoded; a slash in a name must be encoded. Bounds: a fixed list of paths.

use http::{Method, StatusCode};
use serde_json::{Map, Value};

use super::access::Protection;
use super::actions::Actions;
use super::answer::{AdminResponse, file, health, json};
use super::encoding::decode;
use super::experiments::Order;
use super::snapshot::RequestLists;
use super::tuner::TunerOrder;
use super::ui;

const READS: &[Method] = &[Method::GET, Method::HEAD];

pub(super) struct Ask {
    pub(super) query: String,
    /// The body, empty for routes that take none.
    pub(super) body: Map<String, Value>,
    /// Whether the client prefers OpenMetrics to plain text.
    pub(super) open_metrics: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum TakesBody {
    No,
    IfSent,
    Yes,
}

type Blocking = Box<dyn FnOnce(&Actions, Ask) -> AdminResponse + Send>;

pub(super) enum Action {
    /// Runs on the thread of the connection, so that probes are answered even while many handlers
    /// run.
    AtOnce(fn(&Actions) -> AdminResponse),
    /// Runs on a thread that may block, because reloads read files, and the status takes locks that
    /// requests use.
    Blocking(Blocking),
}

pub(super) struct Route {
    pub(super) methods: &'static [Method],
    pub(super) protection: Protection,
    pub(super) takes_body: TakesBody,
    /// Whether only the leader of several gateways may answer, because the change is saved, or
    /// applied to engines.
    pub(super) is_for_the_leader: bool,
    pub(super) action: Action,
}

fn at_once(methods: &'static [Method], protection: Protection, action: fn(&Actions) -> AdminResponse) -> Route {
    let (takes_body, is_for_the_leader) = (TakesBody::No, false);
    Route { methods, protection, takes_body, is_for_the_leader, action: Action::AtOnce(action) }
}

fn page(action: impl FnOnce(&Actions, Ask) -> AdminResponse + Send + 'static) -> Route {
    let (takes_body, is_for_the_leader) = (TakesBody::No, false);
    let action = Action::Blocking(Box::new(action));
    Route { methods: READS, protection: Protection::Host, takes_body, is_for_the_leader, action }
}

fn read(action: impl FnOnce(&Actions, Ask) -> AdminResponse + Send + 'static) -> Route {
    Route { protection: Protection::Token, ..page(action) }
}

fn change(action: impl FnOnce(&Actions, Ask) -> AdminResponse + Send + 'static) -> Route {
    Route { methods: &[Method::POST], protection: Protection::Change, ..page(action) }
}

fn order(action: impl FnOnce(&Actions, Ask) -> AdminResponse + Send + 'static) -> Route {
    Route { is_for_the_leader: true, ..change(action) }
}

impl Route {
    /// The route of a path. For `/admin/experiments/{name}`, the route depends on the method.
    pub(super) fn of(path: &str, method: &Method) -> Option<Self> {
        let parts: Vec<&str> = path.strip_prefix('/')?.split('/').collect();
        Some(match parts[..] {
            [""] => page(|_, _| file(&ui::PAGE)),
            ["ui", name] => {
                let found = ui::file(name)?;
                page(move |_, _| file(found))
            }
            ["metrics"] => page(|actions, ask| actions.metrics(ask.open_metrics)),
            ["health"] => at_once(READS, Protection::None, |_| health()),
            ["admin", "events"] => at_once(&[Method::GET], Protection::Stream, Actions::listen),
            ["admin", "status"] => read(|actions, _| json(StatusCode::OK, &actions.control.status())),
            ["admin", "findings"] => read(|actions, _| json(StatusCode::OK, &actions.control.diagnosis())),
            ["admin", "history"] => read(|actions, _| actions.history()),
            ["admin", "requests"] => read(|actions, _| json(StatusCode::OK, &RequestLists::of(&*actions.control))),
            ["admin", "requests", ref id @ ..] => {
                let id = decode(&id.join("/"))?;
                read(move |actions, _| actions.requests(&id))
            }
            ["admin", "reload"] => change(|actions, _| actions.reload()),
            ["admin", "feedback", ref id @ ..] => {
                let id = decode(&id.join("/"))?;
                let rate = change(move |actions, ask| actions.feedback(&id, &ask.body));
                Self { takes_body: TakesBody::Yes, ..rate }
            }
            ["admin", "backends", pool, backend, action] => of_backend(decode(pool)?, decode(backend)?, action)?,
            ["admin", "experiments"] => read(|actions, _| json(StatusCode::OK, &actions.control.experiments())),
            ["admin", "experiments", name] => of_experiment(decode(name)?, method),
            ["admin", "experiments", name, ref action @ ..] => {
                let name = decode(name)?;
                let given = match action[..] {
                    ["start"] => Order::Start,
                    ["stop"] => Order::Stop,
                    ["promote", arm] => Order::Promote(decode(arm)?),
                    _ => return None,
                };
                order(move |actions, _| actions.order(&name, given))
            }
            ["admin", "tuner"] => read(|actions, _| json(StatusCode::OK, &actions.control.tuner())),
            ["admin", "tuner", ref action @ ..] => {
                let given = match action[..] {
                    ["freeze"] => TunerOrder::Freeze,
                    ["resume"] => TunerOrder::Resume,
                    ["reset"] => TunerOrder::Reset,
                    ["approve", ref id @ ..] => TunerOrder::Approve(decode(&id.join("/"))?),
                    _ => return None,
                };
                order(move |actions, _| actions.order_tuner(given))
            }
            _ => return None,
        })
    }
}

fn of_backend(pool: String, backend: String, action: &str) -> Option<Route> {
    Some(match action {
        "drain" => change(move |actions, _| actions.set_draining(&pool, &backend, true)),
        "enable" => change(move |actions, _| actions.set_draining(&pool, &backend, false)),
        "restart" => {
            let restart = order(move |actions, ask| actions.restart(&pool, &backend, ask.body, &ask.query));
            Route { takes_body: TakesBody::IfSent, ..restart }
        }
        "log" => read(move |actions, ask| actions.engine_log(&pool, &backend, &ask.query)),
        _ => return None,
    })
}

fn of_experiment(name: String, method: &Method) -> Route {
    let route = match *method {
        Method::PUT => {
            let put = order(move |actions, ask| actions.put_experiment(&name, ask.body));
            Route { takes_body: TakesBody::Yes, ..put }
        }
        Method::DELETE => order(move |actions, _| actions.remove_experiment(&name)),
        _ => read(move |actions, _| actions.experiment(&name)),
    };
    Route { methods: &[Method::GET, Method::HEAD, Method::PUT, Method::DELETE], ..route }
}
