//! What can only be judged over all pools: ranges, reachability, spill, and backends listed twice.
//!
//! For each declared model, and once more for models that only `"*"` pools serve, the ranges of the
//! pools that serve it must cover every prompt length exactly once: otherwise some request has no home
//! or two. Pools sorted by where they begin, each must begin where the one before ended.
//!
//! Spilling in circles is fine and useful (two pools that help each other), since a request is handed
//! on at most once.

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;

use super::super::origin::Origin;
use super::super::problem::Situation;
use super::super::{Endpoint, Model, ModelScope, PromptRange, Server, defaults};
use super::pool::Draft;
use super::section::{Place, Report};
use sluice_core::base::{ModelId, Tokens};

pub(super) fn check(models: &[Model], drafts: &[Draft], server: &Server, report: &mut Report<'_>) {
    let all_sound = drafts.iter().all(|draft| draft.sound);
    // Models served by the same pools have the same gaps: those are reported once.
    let mut judged = BTreeSet::new();
    for (index, model) in models.iter().enumerate() {
        let serves = |draft: &Draft| draft.pool.models.includes(ModelId::new(index));
        if all_sound && !drafts.iter().any(serves) {
            let path = format!("model[{index}]");
            let origin = report.origins.of(&format!("{path}.name"));
            report.add(&Place { path, origin }, Situation::UnreachableModel { model: model.name.clone() });
        }
        check_cover(&format!("model '{}'", model.name), drafts, serves, &mut judged, report);
    }
    let open = |draft: &Draft| draft.pool.models == ModelScope::All;
    check_cover("models of pools with \"*\"", drafts, open, &mut judged, report);
    check_spill(models, drafts, report);
    check_endpoints(drafts, server, report);
}

/// Reports gaps and overlaps of the ranges for one model, at the pool that could be changed.
fn check_cover(
    model: &str,
    drafts: &[Draft],
    serves: impl Fn(&Draft) -> bool,
    judged: &mut BTreeSet<Vec<usize>>,
    report: &mut Report<'_>,
) {
    let serving: Vec<usize> = (0..drafts.len()).filter(|index| serves(&drafts[*index])).collect();
    let mut sorted: Vec<&Draft> = serving.iter().map(|index| &drafts[*index]).collect();
    if sorted.is_empty() || sorted.iter().any(|draft| !draft.sound) || !judged.insert(serving) {
        return;
    }
    sorted.sort_by_key(|draft| draft.pool.prompt_tokens.min);
    let mut covered = PromptRange { min: Tokens(0), max: Some(Tokens(0)) };
    let mut owner = sorted[0];
    for draft in sorted {
        let range = draft.pool.prompt_tokens;
        let place = range_place(draft, report);
        match covered.max {
            Some(end) if end < range.min => {
                let gap = PromptRange { min: end, max: Some(range.min) }.to_string();
                report.add(&place, Situation::Gap { model: model.to_owned(), gap });
            }
            Some(end) if end == range.min => {}
            end => {
                let until = [end, range.max].into_iter().flatten().min();
                let overlap = PromptRange { min: range.min, max: until }.to_string();
                let (first, second) = (owner.pool.name.clone(), draft.pool.name.clone());
                report.add(&place, Situation::Overlap { model: model.to_owned(), overlap, first, second });
            }
        }
        let further = covered.max.is_some_and(|end| range.max.is_none_or(|max| max > end));
        if further {
            (covered.max, owner) = (range.max, draft);
        }
    }
    if let Some(end) = covered.max {
        let gap = PromptRange { min: end, max: None }.to_string();
        report.add(&range_place(owner, report), Situation::Gap { model: model.to_owned(), gap });
    }
}

/// The range of a pool, or the pool itself where no range was written.
fn range_place(draft: &Draft, report: &Report<'_>) -> Place {
    let path = format!("{}.prompt_tokens", draft.place.path);
    match report.origins.of(&path) {
        Origin::Default => Place { path, origin: draft.place.origin },
        origin => Place { path, origin },
    }
}

/// A pool may spill only where all of its models are served.
fn check_spill(models: &[Model], drafts: &[Draft], report: &mut Report<'_>) {
    for draft in drafts.iter().filter(|draft| draft.sound) {
        for target in &draft.pool.spill {
            let to = &drafts[target.index()];
            let name = &to.pool.name;
            let Some((place, _)) = draft.spill.iter().find(|(_, written)| written == name).filter(|_| to.sound) else {
                continue;
            };
            let missing = match (&draft.pool.models, &to.pool.models) {
                (_, ModelScope::All) => None,
                (ModelScope::All, ModelScope::Only(_)) => Some("all models (\"*\")".to_owned()),
                (ModelScope::Only(own), ModelScope::Only(_)) => own
                    .iter()
                    .find(|model| !to.pool.models.includes(**model))
                    .map(|model| format!("model '{}'", models[model.index()].name)),
            };
            if let Some(model) = missing {
                report.add(place, Situation::SpillWithoutModel { to: name.clone(), model });
            }
        }
    }
}

/// A backend stands in one place only, since its limits have one owner; and it is not the gateway.
fn check_endpoints(drafts: &[Draft], server: &Server, report: &mut Report<'_>) {
    let mut seen: BTreeMap<Endpoint, String> = BTreeMap::new();
    let mut count = 0;
    for draft in drafts {
        for (backend, place) in draft.pool.backends.iter().zip(&draft.targets) {
            count += 1;
            let endpoint = backend.target.endpoint();
            // A port that is chosen later is chosen so that it is nobody else's.
            if endpoint.port == 0 {
                continue;
            }
            let address = endpoint.authority().replace("localhost:", "127.0.0.1:").parse();
            if address.is_ok_and(|address| is_own(address, server.listen) || is_own(address, server.admin)) {
                report.add(place, Situation::OwnAddress { endpoint: endpoint.to_string() });
            }
            if let Some(first) = seen.get(&endpoint) {
                report.add(place, Situation::SameEndpoint { endpoint: endpoint.to_string(), first: first.clone() });
            } else {
                seen.insert(endpoint, format!("{}/{}", draft.pool.name, backend.name));
            }
        }
    }
    if count > defaults::MAX_BACKENDS {
        let place = Place { path: "pool".to_owned(), origin: Origin::Default };
        report.add(&place, Situation::TooMany { found: count, max: defaults::MAX_BACKENDS });
    }
}

/// Whether `address` certainly leads to a socket of ours. Only this machine's loopback is judged when we
/// listen on all addresses: another machine may well use the same port.
fn is_own(address: SocketAddr, ours: SocketAddr) -> bool {
    let same_host = address.ip() == ours.ip() || (ours.ip().is_unspecified() && address.ip().is_loopback());
    ours.port() != 0 && address.port() == ours.port() && same_host
}
