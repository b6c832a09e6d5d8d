//! Whether a backend may leave service.
//!
//! Pools "one" and "two" have two ready backends each, and "one0" leaves.

use super::*;
use crate::pool::replacement::{Irreplaceable, Replacement};

fn pools(slots: u32) -> Fixture {
    Fixture::new(&[spec("one", 2, limits(slots, 1), vec![]), spec("two", 2, limits(slots, 1), vec![])])
}

impl Fixture {
    fn may_leave(&self, spill: &[&str], names: impl Fn(&BackendView) -> Vec<String>) -> Result<(), Irreplaceable> {
        let replacement = Replacement { pool: "one", backend: "one0", spill: spill.to_vec(), headroom: 0.5 };
        replacement.check(&self.admission.view(), names)
    }
}

fn same(_: &BackendView) -> Vec<String> {
    vec!["m".to_owned(), "lora".to_owned()]
}

#[test]
fn another_backend_in_rotation_and_in_reach_must_serve_every_name() {
    let fixture = pools(8);
    assert_eq!(fixture.may_leave(&[], same), Ok(()));
    let without_lora =
        |view: &BackendView| same(view).into_iter().take(if *view.name == *"one0" { 2 } else { 1 }).collect();
    assert_eq!(fixture.may_leave(&[], without_lora), Err(Irreplaceable::Unserved("lora".to_owned())));
    fixture.admission.set_cordon(fixture.layout.backends[0][1], Cordon::Starting);
    assert_eq!(fixture.may_leave(&[], same), Err(Irreplaceable::Unserved("m, lora".to_owned())));
    assert_eq!(fixture.may_leave(&["two"], same), Ok(()));
}

#[test]
fn running_and_waiting_requests_must_fit_on_the_other_backends_with_a_margin() {
    let fixture = pools(4);
    let _two = [fixture.granted(0, 1), fixture.granted(0, 1)];
    assert_eq!(fixture.may_leave(&[], same), Ok(()));
    let _third = fixture.granted(0, 1);
    assert_eq!(fixture.may_leave(&[], same), Err(Irreplaceable::NoRoom { used: 3, room: 4, headroom_percent: 50 }));
}
