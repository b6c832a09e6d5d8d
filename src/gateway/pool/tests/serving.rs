//! What engines serve takes part in the choice, for requests that enter and for those that wait.

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
        self.admission.set_served(self.layout.backends[0][backend], served, None);
        self.admission.check_invariants().unwrap();
    }

    fn for_model(&self, model: &str) -> AdmissionRequest {
        let asks = Asks { model: Some(ModelKey::of(model)), ..Asks::default() };
        AdmissionRequest { asks, ..self.request(0, 10) }
    }

    fn enter(&self, model: &str) -> AdmissionDecision {
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
    // The first engine is renamed: the old name waits for the second one, the new name for the first.
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
    fixture.admission.set_served(fixture.layout.backends[0][1], Served::unreadable(), None);
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
    first.refused_by_engine(Lack::Model(ModelKey::of("x")));
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
    let set = |id, names: &[&str]| fixture.admission.set_served(id, Served::list(names.iter().copied()), None);
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
fn a_reload_that_removes_the_only_engine_of_a_model_frees_those_that_wait_for_it() {
    let fixture = pool_of(&[&["x"], &["y"]]);
    let held = fixture.lease("x");
    let mut waiting = fixture.waits("x");
    let mut only_second = spec("one", 2, limits(1, 1), vec![]);
    only_second.backends.remove(0);
    fixture.admission.apply(&[only_second], RULES, fixture.now);
    // Its engine lists another model; it is asked, and its answer goes to the client.
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
