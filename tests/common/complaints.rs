//! Complaints of a rule about the repository.
//!
//! The repository must cause none; the bad sample in a rule's own test must cause exactly the
//! expected one.

#[track_caller]
pub(crate) fn clean(complaints: &[String]) {
    assert!(complaints.is_empty(), "\n{}\n", complaints.join("\n"));
}

#[track_caller]
pub(crate) fn one_complaint(complaints: &[String], about: &str) {
    assert_eq!(complaints.len(), 1, "{complaints:#?}");
    assert!(complaints[0].contains(about), "{complaints:#?}");
}
