//! The gateway's own answers to clients: `/ready`, `/ping`, `/v1/models` and `/v1/models/{id}`.
//!
//! `/ready` is 200 while at least one pool has a backend in rotation, or holds requests until an
//! engine is started. A single pool without a backend does not make the gateway unready: replicas
//! share engines, so all replicas would leave the load balancer at once. It is 503 while the
//! gateway leaves, may admit nothing by the ledger (`[cluster]`), or stands by for the leader.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use bytes::Bytes;
use serde_json::json;
use serde_json::value::{RawValue, to_raw_value};

use crate::core::Core;
use sluice_fleet::ModelCard;
use sluice_gateway::flow::RoutingTable;
use sluice_gateway::flow::keys::ApiKey;
use sluice_gateway::pool::BackendView;
use sluice_gateway::proxy::LocalRoutes;

/// `/ready` and `/v1/models` of a running gateway.
#[derive(Debug)]
pub struct ModelList {
    core: Arc<Core>,
}

impl ModelList {
    pub(crate) fn new(core: Arc<Core>) -> Self {
        Self { core }
    }
}

impl LocalRoutes for ModelList {
    fn ready(&self) -> bool {
        if self.core.cluster.as_ref().is_some_and(|cluster| !cluster.is_ready()) {
            return false;
        }
        if self.core.leader.as_ref().is_some_and(|leader| !leader.is_ready()) {
            return false;
        }
        let pools = self.core.admission.view();
        pools.iter().any(|pool| pool.holds || pool.backends.iter().any(BackendView::in_rotation))
    }

    /// The cards of the models that `key` may use, as the engines sent them. If the cards for a
    /// name differ, the card with the largest context limit counts, because that engine gets the
    /// long prompts. Aliases, and declared models that no backend reports yet, get a generated
    /// card.
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
    fn cards(&self, routing: &RoutingTable, key: Option<&ApiKey>) -> Vec<(String, Box<RawValue>)> {
        let mut cards: Vec<(String, Box<RawValue>)> = Vec::new();
        let (reported, mut listed) = (self.core.reported.cards(), HashSet::new());
        let by_name: HashMap<&str, &ModelCard> = reported.iter().map(|card| (&*card.id, card)).collect();
        for entry in routing.models_for(key) {
            let card = by_name.get(&*entry.name);
            match card {
                Some(card) => cards.push((card.id.clone(), card.json.clone())),
                None => cards.extend(own_card(&entry.name, None, None)),
            }
            listed.insert(&*entry.name);
            let aliases = entry.declared.map(|id| &routing.config.models[id.index()].aliases);
            for alias in aliases.into_iter().flatten() {
                listed.insert(alias.as_str());
                cards.extend(own_card(alias, Some(&entry.name), card.and_then(|card| card.max_model_len)));
            }
        }
        // The names in the routing table are bounded. An engine may list more.
        if routing.is_open_for(key) {
            let others = reported.iter().filter(|card| !listed.contains(&*card.id) && routing.is_undeclared(&card.id));
            cards.extend(others.map(|card| (card.id.clone(), card.json.clone())));
        }
        cards
    }
}

fn own_card(name: &str, root: Option<&str>, max_model_len: Option<u64>) -> Option<(String, Box<RawValue>)> {
    let mut card = json!({
        "id": name, "object": "model", "created": 0, "owned_by": "sluice", "root": root.unwrap_or(name), "parent": null,
    });
    if let Some(limit) = max_model_len {
        card["max_model_len"] = limit.into();
    }
    Some((name.to_owned(), to_raw_value(&card).ok()?))
}
