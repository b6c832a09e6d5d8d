//! What the gateway says of itself to clients: `/ready`, `/ping`, `/v1/models` and `/v1/models/{id}`.
//!
//! `/ready` is 200 while a pool has a backend in rotation, or holds requests until an engine is started. Replicas share their
//! engines: if one pool without a backend were enough, all replicas would leave the load balancer at once, and requests for the
//! healthy pools with them. It is 503, too, while a gateway with `[cluster]` may admit nothing by its ledger, and while it stands
//! by for another one.

use std::sync::Arc;

use bytes::Bytes;
use serde_json::json;
use serde_json::value::{RawValue, to_raw_value};

use super::app::App;
use crate::flow::RoutingTable;
use crate::flow::keys::ApiKey;
use crate::pool::BackendView;
use crate::proxy::LocalRoutes;

/// `/ready` and `/v1/models` of a running gateway.
#[derive(Debug)]
pub struct ModelList {
    app: Arc<App>,
}

impl ModelList {
    pub(super) fn new(app: Arc<App>) -> Self {
        Self { app }
    }
}

impl LocalRoutes for ModelList {
    fn ready(&self) -> bool {
        if self.app.cluster.as_ref().is_some_and(|cluster| !cluster.is_ready()) {
            return false;
        }
        if self.app.leader.as_ref().is_some_and(|leader| !leader.is_ready()) {
            return false;
        }
        let pools = self.app.admission.view();
        pools.iter().any(|pool| pool.holds || pool.backends.iter().any(BackendView::in_rotation))
    }

    /// The union over all backends, each card as its engine sent it. Aliases, and declared models that no backend
    /// reports yet, get a generated card. Names that this client may not use are left out.
    fn models(&self, routing: &RoutingTable, key: Option<&ApiKey>) -> Bytes {
        let cards = self.cards(routing, key);
        let data: Vec<&str> = cards.iter().map(|(_, json)| json.get()).collect();
        Bytes::from(format!(r#"{{"object":"list","data":[{}]}}"#, data.join(",")))
    }

    fn model(&self, routing: &RoutingTable, key: Option<&ApiKey>, name: &str) -> Option<Bytes> {
        let card = self.cards(routing, key).into_iter().find(|(id, _)| id == name);
        card.map(|(_, json)| Bytes::from(String::from(Box::<str>::from(json))))
    }
}

impl ModelList {
    /// The names that this client may use, with their cards.
    fn cards(&self, routing: &RoutingTable, key: Option<&ApiKey>) -> Vec<(String, Box<RawValue>)> {
        let mut cards = Vec::new();
        let reported = self.app.reported.cards();
        for entry in routing.models_for(key) {
            match reported.iter().find(|card| card.id == *entry.name) {
                Some(card) => cards.push((card.id.clone(), card.json.clone())),
                None => cards.extend(own_card(&entry.name, None)),
            }
            let aliases = entry.declared.map(|id| &routing.config.models[id.index()].aliases);
            for alias in aliases.into_iter().flatten() {
                cards.extend(own_card(alias, Some(&entry.name)));
            }
        }
        cards
    }
}

fn own_card(name: &str, root: Option<&str>) -> Option<(String, Box<RawValue>)> {
    let card = json!({
        "id": name, "object": "model", "created": 0, "owned_by": "sluice", "root": root.unwrap_or(name), "parent": null,
    });
    Some((name.to_owned(), to_raw_value(&card).ok()?))
}
