//! Failures count by distinct origins.
//!
//! Part of a pool stays in rotation, even if requests cause failures.

use super::*;
use crate::origin::Origin;

fn pool(backends: usize) -> Fixture {
    Fixture::new(&[spec("p", backends, limits(8, 8), vec![])])
}

fn origin(number: usize) -> Origin {
    Origin::of_key(&number.to_string())
}

impl Fixture {
    fn id(&self, number: usize) -> BackendId {
        self.layout.backends[0][number]
    }

    fn fail(&self, number: usize, fault: BackendFault, origin: Origin) -> Verdict {
        let now = self.now;
        self.admission.shared.failure(self.id(number), fault, origin, now).verdict
    }

    fn serve(&self, number: usize, origin: Origin) {
        self.admission.shared.success(self.id(number), origin, self.now);
    }

    fn phases(&self) -> Vec<Phase> {
        self.admission.view()[0].backends.iter().map(|backend| backend.phase).collect()
    }

    fn ejected(&self) -> usize {
        self.phases().iter().filter(|phase| matches!(phase, Phase::Ejected { .. })).count()
    }
}

#[test]
fn one_client_ejects_no_backend_that_serves_another() {
    for fault in [BackendFault::Response, BackendFault::Timeout, BackendFault::Credentials] {
        let fixture = pool(8);
        for round in 0..100 {
            for backend in 0..8 {
                if round % 10 == 0 {
                    fixture.serve(backend, origin(1));
                }
                let verdict = fixture.fail(backend, fault, origin(2));
                assert!(!matches!(verdict, Verdict::Ejected(_)), "{fault:?}");
            }
        }
        assert_eq!(fixture.ejected(), 0, "{fault:?}");
    }
}

#[test]
fn one_client_alone_and_several_clients_together_eject() {
    for clients in [1, 2, 5] {
        let fixture = pool(3);
        let verdicts: Vec<Verdict> =
            (0..10).map(|number| fixture.fail(0, BackendFault::Response, origin(number % clients))).collect();
        assert!(verdicts.contains(&Verdict::Ejected(RULES.eject_base)), "{clients} clients: {verdicts:?}");
    }
}

#[test]
fn a_client_that_fails_everywhere_while_others_are_served_somewhere_ejects_nothing() {
    let fixture = pool(4);
    fixture.serve(3, origin(1));
    fixture.fail(2, BackendFault::Response, origin(2));
    for _ in 0..100 {
        fixture.fail(0, BackendFault::Response, origin(2));
    }
    assert_eq!(fixture.ejected(), 0);
}

#[test]
fn at_most_the_share_is_ejected_for_answers_and_dead_engines_leave_whatever_is_out() {
    let fixture = pool(8);
    for backend in 0..8 {
        for client in 0..10 {
            fixture.fail(backend, BackendFault::Response, origin(client));
        }
    }
    assert_eq!(fixture.ejected(), 4);
    let left: Vec<usize> = (0..8).filter(|number| fixture.phases()[*number] == Phase::Ready).collect();
    assert_eq!(fixture.fail(left[0], BackendFault::Response, origin(3)), Verdict::Spared(Spared::MaxEjected));
    for backend in &left {
        for client in 0..3 {
            fixture.fail(*backend, BackendFault::Connect, origin(client));
        }
    }
    assert_eq!(fixture.ejected(), 8);
}

#[test]
fn a_refused_credential_of_one_request_is_no_state_of_an_engine_that_serves_others() {
    let fixture = pool(2);
    let refuse = |origin| {
        let refused = RefusedGateway { status: 401, by_probe: false };
        fixture.admission.shared.refused_gateway(fixture.id(0), refused, origin, fixture.now)
    };
    fixture.serve(0, origin(1));
    assert!(!refuse(origin(2)));
    assert!(refuse(origin(1)), "those of all");
    let other = pool(2);
    other.serve(0, origin(1));
    let refused = RefusedGateway { status: 401, by_probe: true };
    assert!(other.admission.refused_gateway(other.id(0), refused, other.now), "a probe has no client");
}
