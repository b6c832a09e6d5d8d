//! The page about continued streams has every reason why a stream is not continued, and no other.
//!
//! The reasons are the labels of one table in `sluice_core`.

use std::collections::BTreeSet;

use sluice_core::openai::NotContinued;

use crate::read;

#[test]
fn the_page_has_every_reason_and_no_other() {
    let page = read(".github/docs/continued-streams.md");
    let (_, table) = page.split_once("| reason | the stream |\n|---|---|\n").unwrap();
    let rows = table.lines().take_while(|line| line.starts_with('|'));
    let reasons = rows.filter_map(|row| row.split('|').nth(1));
    let named: BTreeSet<&str> =
        reasons.flat_map(|cell| cell.split(',')).map(|name| name.trim().trim_matches('`')).collect();
    let known: BTreeSet<&str> = NotContinued::ALL.iter().map(|reason| reason.label()).collect();
    assert_eq!(named, known);
}
