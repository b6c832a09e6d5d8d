//! The facts of engines take part in the choice.
//!
//! Tested for requests that enter and for requests that wait.

use super::*;

/// A pool of engines that serve these names.
fn pool_of(served: &[&[&str]]) -> Fixture {
    let fixture = Fixture::new(&[spec("one", served.len(), limits(1, 1), vec![])]);
    served.iter().enumerate().for_each(|(index, names)| fixture.serves(index, names));
    fixture
}

impl Fixture {
    fn serves(&self, backend: usize, names: &[&str]) {
        let served = Served::list(names.iter().copied());
        self.admission.set_served(self.layout.backends[0][backend], served, None, self.now);
        self.admission.check_invariants().unwrap();
    }

    fn for_model(&self, model: &str) -> AdmissionRequest {
        let asks = Asks { model: Some(ModelKey::of(model)), ..Asks::default() };
        AdmissionRequest { asks, ..self.request(0, 10) }
    }

    fn enter(&self, model: &str) -> AdmissionDecision<Lease, Ticket> {
        self.admission.enter(self.for_model(model))
    }

    fn lease(&self, model: &str) -> Lease {
        match self.enter(model) {
            AdmissionDecision::Granted(lease) => lease,
            other => panic!("expected a lease, got {other:?}"),
        }
    }

    fn waits(&self, model: &str) -> Ticket {
        match self.enter(model) {
            AdmissionDecision::Queued(ticket, _) => ticket,
            other => panic!("expected a ticket, got {other:?}"),
        }
    }
}

#[test]
fn a_request_takes_no_room_of_an_engine_without_its_model_and_delays_no_other() {
    let fixture = pool_of(&[&["x"], &["y"]]);
    let first = fixture.lease("x");
    assert_eq!(&**first.name(), "one0");
    let mut second = fixture.waits("x");
    let other = fixture.lease("y");
    assert_eq!(&**other.name(), "one1");
    drop(other);
    assert!(poll(&mut second).is_none(), "one1 is free and has no x");
    drop(first);
    assert_eq!(&**lease_of(&mut second).name(), "one0");
}

#[test]
fn a_model_that_no_engine_lists_is_asked_of_any() {
    let fixture = pool_of(&[&["x"], &["y"]]);
    let held: Vec<Lease> = (0..2).map(|_| fixture.lease("new")).collect();
    assert_ne!(held[0].backend(), held[1].backend());
}

#[test]
fn a_request_that_waits_goes_to_the_engine_that_serves_its_model_now() {
    let fixture = pool_of(&[&["old"], &["old"]]);
    let held: Vec<Lease> = (0..2).map(|_| fixture.lease("old")).collect();
    let (mut old, mut new) = (fixture.waits("old"), fixture.waits("new"));
    // The first engine now serves the new name. The request for the old name waits for the second
    // engine, and the request for the new name for the first.
    let first = held.iter().position(|lease| &**lease.name() == "one0").unwrap();
    fixture.serves(0, &["new"]);
    let mut held = held;
    drop(held.remove(first));
    assert!(poll(&mut old).is_none());
    let renamed = lease_of(&mut new);
    assert_eq!(&**renamed.name(), "one0");
    drop(held);
    assert_eq!(&**lease_of(&mut old).name(), "one1");
}

#[test]
fn a_request_that_waits_is_refused_when_the_last_engine_drops_its_model() {
    let fixture = pool_of(&[&["x", "y"], &["x"]]);
    let held: Vec<Lease> = (0..2).map(|_| fixture.lease("x")).collect();
    let mut waiting = [fixture.waits("x"), fixture.waits("x"), fixture.waits("y")];
    fixture.serves(0, &["y"]);
    assert!(waiting.iter_mut().all(|ticket| poll(ticket).is_none()), "one1 still has x");
    fixture.serves(1, &["y"]);
    let [first, second, third] = &mut waiting;
    assert!([first, second].into_iter().all(|ticket| matches!(poll(ticket), Some(WaitResult::Unserved))));
    assert!(poll(third).is_none());
    drop(held);
    lease_of(third);
    fixture.admission.check_invariants().unwrap();
}

#[test]
fn a_request_that_waits_is_not_refused_while_an_engine_without_a_list_may_have_its_model() {
    let fixture = pool_of(&[&["x"], &["x"]]);
    fixture.admission.set_served(fixture.layout.backends[0][1], Served::unreadable(), None, fixture.now);
    let held: Vec<Lease> = (0..2).map(|_| fixture.lease("x")).collect();
    let mut waiting = fixture.waits("x");
    fixture.serves(0, &["y"]);
    assert!(poll(&mut waiting).is_none());
    drop(held);
    assert_eq!(&**lease_of(&mut waiting).name(), "one1");
}

#[test]
fn an_engine_s_refusal_counts_until_it_is_read_again_and_asks_for_that() {
    let fixture = pool_of(&[&["x"], &["x"]]);
    let due = |fixture: &Fixture| fixture.admission.view()[0].backends.iter().map(|b| b.facts_due).collect::<Vec<_>>();
    let first = fixture.lease("x");
    let other = if &**first.name() == "one0" { "one1" } else { "one0" };
    first.refused_by_engine(Lack::Model(ModelKey::of("x")), fixture.now);
    assert_eq!(due(&fixture).iter().filter(|due| **due).count(), 1);
    let refused = usize::from(other == "one0");
    drop(first);
    let second = fixture.lease("x");
    assert_eq!(&**second.name(), other);
    let mut third = fixture.waits("x");
    fixture.serves(refused, &["x"]);
    assert_ne!(&**lease_of(&mut third).name(), other);
    assert_eq!(due(&fixture), [false, false]);
}

#[test]
fn a_request_spills_only_to_engines_that_serve_it() {
    let fixture = Fixture::new(&two_pools());
    let [short, long] = [0, 1].map(|pool| fixture.layout.backends[pool][0]);
    let set =
        |id, names: &[&str]| fixture.admission.set_served(id, Served::list(names.iter().copied()), None, fixture.now);
    set(short, &["y"]);
    set(long, &["x", "y"]);
    let ask = |model: &str| {
        let asks = Asks { model: Some(ModelKey::of(model)), ..Asks::default() };
        AdmissionRequest { asks, ..fixture.request(1, 10) }
    };
    let held: Vec<Lease> = (0..4)
        .map(|_| match fixture.admission.enter(ask("x")) {
            AdmissionDecision::Granted(lease) => lease,
            other => panic!("{other:?}"),
        })
        .collect();
    assert!(held.iter().all(|lease| lease.backend() == long));
    assert!(matches!(fixture.admission.enter(ask("x")), AdmissionDecision::Queued(..)));
    assert!(matches!(fixture.admission.enter(ask("y")), AdmissionDecision::Granted(lease) if lease.backend() == short));
}

#[test]
fn engines_with_another_root_of_a_model_are_known_also_after_a_reload_that_moves_them() {
    let fixture = pool_of(&[&["m"], &["m"], &["m"]]);
    let others = |layout: &PoolLayout, name| {
        fixture.admission.of_another_root(layout.backends[0][0], ModelKey::of(name)).to_vec()
    };
    let backends = &fixture.layout.backends[0];
    fixture.admission.set_roots(backends[0], [("m", "org/m")]);
    assert_eq!(others(&fixture.layout, "m"), [], "the roots of the others are unknown");
    fixture.admission.set_roots(backends[1], [("a", "/a"), ("m", "org/m-2")]);
    fixture.admission.set_roots(backends[2], [("m", "org/m")]);
    assert_eq!(others(&fixture.layout, "m"), [backends[1]]);
    assert_eq!(others(&fixture.layout, "a"), [], "the first engine has no such model");
    let moved = fixture.admission.apply(&[spec("two", 3, limits(1, 1), vec![])], RULES, fixture.now);
    assert_eq!(others(&moved, "m"), [moved.backends[0][1]]);
}

#[test]
fn a_reload_that_removes_the_only_engine_of_a_model_frees_those_that_wait_for_it() {
    let fixture = pool_of(&[&["x"], &["y"]]);
    let held = fixture.lease("x");
    let mut waiting = fixture.waits("x");
    let mut only_second = spec("one", 2, limits(1, 1), vec![]);
    only_second.backends.remove(0);
    fixture.admission.apply(&[only_second], RULES, fixture.now);
    // The remaining engine lists another model. It is asked, and the answer goes to the client.
    assert_eq!(&**lease_of(&mut waiting).name(), "one1");
    drop(held);
    fixture.admission.check_invariants().unwrap();
}

#[test]
fn engines_that_serve_the_same_cost_nothing_and_differences_end_with_the_reading_that_ends_them() {
    let fixture = pool_of(&[&["x"], &["x"]]);
    let wants = |model: &str| fixture.admission.shared.lock().wants_of(&fixture.for_model(model));
    assert_eq!([wants("x"), wants("unheard")], [Wants::default(); 2]);
    fixture.serves(0, &["x", "y"]);
    assert_ne!(wants("y"), Wants::default());
    assert_eq!(wants("x"), Wants::default(), "all have it");
    fixture.serves(1, &["x", "y"]);
    assert_eq!(wants("y"), Wants::default());
}

/// The wants of a request that enters now.
fn wants_of(fixture: &Fixture, asks: Asks) -> Wants {
    let request = AdmissionRequest { asks, ..fixture.request(0, 10) };
    fixture.admission.shared.lock().wants_of(&request)
}

#[test]
fn a_request_that_waits_for_an_adapter_is_not_refused_while_its_engine_loads_it() {
    let fixture = pool_of(&[&["x"], &["x", "adapter"]]);
    let [_, loading] = fixture.layout.backends[0][..] else { panic!("two engines") };
    fixture.admission.set_cordon(loading, Cordon::Starting);
    let mut waiting = fixture.waits("adapter");
    fixture.serves(1, &["x"]);
    assert!(poll(&mut waiting).is_none(), "its adapters are loaded after its start");
    assert!(fixture.admission.view()[0].backends[1].facts_due);
    // The other engine was never believed to have the adapter.
    fixture.serves(0, &["x", "y"]);
    assert!(poll(&mut waiting).is_none());
    fixture.admission.engine_replaced(loading, fixture.now);
    fixture.admission.set_cordon(loading, Cordon::Open);
    assert_eq!(lease_of(&mut waiting).backend(), loading);
    fixture.serves(1, &["x", "adapter"]);
    assert!(!fixture.admission.view()[0].backends[1].facts_due);
}

#[test]
fn an_engine_that_is_about_to_be_read_again_may_serve_a_model_that_another_one_drops() {
    let fixture = pool_of(&[&["x"], &["y"]]);
    let held = [fixture.lease("x"), fixture.lease("y")];
    let mut waiting = fixture.waits("x");
    fixture.admission.engine_replaced(fixture.layout.backends[0][1], fixture.now);
    fixture.serves(0, &["y"]);
    assert!(poll(&mut waiting).is_none());
    drop(held);
    lease_of(&mut waiting);
}

#[test]
fn a_route_that_was_refused_is_tried_again_after_some_seconds() {
    let fixture = pool_of(&[&["x"], &["x"]]);
    let asks = || Asks { route: Some(Route::Embeddings), ..fixture.for_model("x").asks };
    let lease = fixture.lease("x");
    let (refusing, later) = (lease.backend(), fixture.now + known_routes::DENIED_FOR);
    lease.refused_by_engine(Lack::Route(Route::Embeddings), fixture.now);
    drop(lease);
    let due = || fixture.admission.view()[0].backends.iter().map(|engine| engine.routes_due).collect::<Vec<_>>();
    assert_eq!(due(), [true, true], "the routes of the others are of interest, too");
    assert_ne!(wants_of(&fixture, asks()), Wants::default());
    for engine in &fixture.layout.backends[0] {
        fixture.admission.set_routes(*engine, None, fixture.now);
    }
    assert_eq!(due(), [false, false]);
    fixture.admission.record_probe(refusing, true, later - Duration::from_millis(1));
    assert_ne!(wants_of(&fixture, asks()), Wants::default());
    fixture.admission.record_probe(refusing, true, later);
    assert_eq!(wants_of(&fixture, asks()), Wants::default());
    // A page of routes that is read after the refusal ends it at once; an older page does not.
    let lease = fixture.lease("x");
    lease.refused_by_engine(Lack::Route(Route::Embeddings), later);
    fixture.admission.set_routes(lease.backend(), Some(RouteSet::ALL), fixture.now);
    assert_ne!(wants_of(&fixture, asks()), Wants::default());
    fixture.admission.set_routes(lease.backend(), Some(RouteSet::ALL), later);
    assert_eq!(wants_of(&fixture, asks()), Wants::default());
}

#[test]
fn a_reading_that_began_before_a_refusal_does_not_undo_it() {
    let fixture = pool_of(&[&["x"], &["x"]]);
    let at = |seconds| fixture.now + Duration::from_secs(seconds);
    let lease = fixture.lease("x");
    let refusing = lease.backend();
    lease.refused_by_engine(Lack::Model(ModelKey::of("x")), at(2));
    drop(lease);
    let due = || fixture.admission.view()[0].backends.iter().any(|engine| engine.facts_due);
    let reads = |begun| fixture.admission.set_served(refusing, Served::list(["x", "y"]), None, begun);
    reads(at(1));
    assert!(due(), "it is to be read again");
    let held = fixture.lease("x");
    assert_ne!(held.backend(), refusing);
    assert_eq!(fixture.lease("y").backend(), refusing, "the rest of the reading counts");
    reads(at(3));
    assert!(!due());
    assert_eq!(fixture.lease("x").backend(), refusing);
}

#[test]
fn engines_differ_from_the_moment_at_which_one_has_started_again() {
    let fixture = pool_of(&[&["x"], &["x"]]);
    let [first, second] = fixture.layout.backends[0][..] else { panic!("two engines") };
    let limit = |engine| fixture.admission.set_served(engine, Served::list(["x"]), Some(4_096), fixture.now);
    [first, second].into_iter().for_each(limit);
    let long = || Asks { prompt_tokens: 9_000, ..fixture.for_model("x").asks };
    assert_eq!(wants_of(&fixture, long()), Wants::default(), "both have the same limit");
    fixture.admission.engine_replaced(first, fixture.now);
    assert_ne!(wants_of(&fixture, long()), Wants::default(), "the limit of the new engine is not known");
    limit(first);
    // An engine that was away counts as having all routes again, until it refuses one.
    let lease = fixture.lease("x");
    lease.refused_by_engine(Lack::Route(Route::Embeddings), fixture.now);
    let embeds = || Asks { route: Some(Route::Embeddings), ..fixture.for_model("x").asks };
    assert_ne!(wants_of(&fixture, embeds()), Wants::default());
    for up in [false, false, true] {
        fixture.admission.record_probe(lease.backend(), up, fixture.now);
    }
    assert!(!fixture.admission.shared.lock().pools[0].differ);
    fixture.admission.check_invariants().unwrap();
}

#[test]
fn a_refusal_of_a_model_is_no_matter_of_requests_that_wait_for_another() {
    let fixture = pool_of(&[&["x"], &["x"]]);
    let engine = fixture.layout.backends[0][0];
    fixture.admission.set_served(engine, Served::unreadable(), None, fixture.now);
    let held: Vec<Lease> = (0..2).map(|_| fixture.lease("x")).collect();
    let mut waiting = fixture.waits("x");
    // Wants that the waiter would lose if they were determined again.
    let mark = wants_of(&fixture, Asks { route: Some(Route::Embeddings), needs_route: true, ..Asks::default() });
    assert_ne!(mark, Wants::default());
    let wants = |set: Option<Wants>| {
        let mut state = fixture.admission.shared.lock();
        let request = &mut state.waiters.iter_mut().flatten().next().expect("one waits").request;
        request.wants = set.unwrap_or(request.wants);
        request.wants
    };
    wants(Some(mark));
    let refuse =
        |lack| held.iter().find(|lease| lease.backend() == engine).unwrap().refused_by_engine(lack, fixture.now);
    refuse(Lack::Model(ModelKey::of("made up")));
    refuse(Lack::Route(Route::Embeddings));
    assert_eq!(wants(None), mark);
    refuse(Lack::Model(ModelKey::of("x")));
    assert_ne!(wants(None), mark);
    drop(held);
    assert_ne!(lease_of(&mut waiting).backend(), engine);
    fixture.admission.check_invariants().unwrap();
}

#[test]
fn an_engine_that_is_away_would_serve_what_it_has_said_and_nothing_that_it_has_not() {
    let fixture = pool_of(&[&["x"], &["x", "y"]]);
    let [first, second] = fixture.layout.backends[0][..] else { panic!("two engines") };
    fixture.admission.set_served(second, Served::list(["x", "y"]), Some(8_192), fixture.now);
    fixture.admission.mark_hung(second, fixture.now);
    let request = AdmissionRequest { avoid: smallvec![first], ..fixture.request(0, 10) };
    let later = |asks: Asks| fixture.admission.may_serve_later(&AdmissionRequest { asks, ..request.clone() });
    let of = |model: &str| Asks { longer_than: Some(4_096), ..fixture.for_model(model).asks };
    assert!(later(of("x")) && later(of("y")) && !later(of("made up")));
    assert!(!later(Asks { longer_than: Some(8_192), ..of("x") }) && !later(Asks { prompt_tokens: 9_000, ..of("x") }));
    let route = |route| Asks { needs_route: true, route, ..fixture.for_model("x").asks };
    assert!(later(route(Some(Route::Embeddings))) && !later(route(None)), "of another spelling nothing is known");
    fixture.admission.set_cordon(second, Cordon::Down);
    assert!(!later(of("x")), "it is not about to start");
}
