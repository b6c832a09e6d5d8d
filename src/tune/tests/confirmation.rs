//! Which settings are confirmed, and how often, with made-up service rates.

use std::cell::Cell;

use super::*;

/// The default is best, and starts at most this often. Returns the report and the number of starts
/// of the default.
fn with_starts(most: usize) -> (Report, usize) {
    let file = file("", CLASS, &format!("[tune]\nrequests = 400\n{}", dimension("a", 5)));
    let plan = plan(&file, Some(Method::Random), 1, Budget::default());
    let starts = Cell::new(0);
    let service = |setting: &setting::Setting| {
        starts.set(starts.get() + usize::from(setting.is_empty()));
        // The services are so close that no race ends early.
        let service = if setting.is_empty() { 40.0 } else { 39.0 };
        (!setting.is_empty() || starts.get() <= most).then_some(service)
    };
    let report = tuned(&plan, &mut Queues::new(service));
    (report, starts.get())
}

#[test]
fn a_default_that_did_not_hold_is_not_measured_a_second_time() {
    let (report, starts) = with_starts(usize::MAX);
    assert!(report.winner.is_some_and(|winner| winner.setting.is_empty()));
    // Now the default does not start the last time, for the confirmation.
    let (report, _) = with_starts(starts - 1);
    let confirmed = report.trials.iter().filter(|trial| trial.effort == Effort::Confirm);
    assert_eq!(confirmed.filter(|trial| trial.setting.is_empty()).count(), 1);
    assert!(report.winner.is_some_and(|winner| !winner.setting.is_empty()));
    assert!(report.default.is_some_and(|default| matches!(default.outcome, Outcome::Refused { .. })));
}
