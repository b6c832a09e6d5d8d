//! Complaints of a rule about the repository: there must be none, or, in the test of the rule itself, just the one that is meant.

#[track_caller]
pub(crate) fn clean(complaints: &[String]) {
    assert!(complaints.is_empty(), "\n{}\n", complaints.join("\n"));
}

#[track_caller]
pub(crate) fn one_complaint(complaints: &[String], about: &str) {
    assert_eq!(complaints.len(), 1, "{complaints:#?}");
    assert!(complaints[0].contains(about), "{complaints:#?}");
}
