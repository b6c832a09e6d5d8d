//! The priorities that requests may ask for, and engines that schedule by them.
//!
//! A range must contain the default priority. Mistakes must be reported at their keys: in
//! `[[auth.keys]]` with keys, in `[server]` without them.

use super::problems::one_in;
use super::{DIGEST, TWO_POOLS, read, read_with};

#[test]
fn a_range_of_priorities_holds_the_default() {
    let text = format!("{TWO_POOLS}\n[[auth.keys]]\nname = \"k\"\nsha256 = \"{DIGEST}\"\npriority = 5\n");
    let path = "auth.keys[0].priority";
    one_in(
        &text,
        &["auth.keys.k.priority_min=6"],
        path,
        "5 is not between priority_min (6) and priority_max (2147483647)",
    );
    one_in(&text, &["auth.keys.k.priority_max=4"], path, "5 is not between priority_min (5) and priority_max (4)");
    one_in(TWO_POOLS, &["server.priority_min=1"], "server.priority_min", "1 is outside");
    one_in(TWO_POOLS, &["pool.short.scheduling_policy=lifo"], "pool[0].scheduling_policy", "known: fcfs, priority");
    let config = read_with(&text, &["auth.keys.k.priority_min=-2", "auth.keys.k.priority_max=9"]).unwrap().config;
    let range = config.auth.keys[0].priorities();
    let asked = [None, Some(i64::MIN), Some(-2), Some(0), Some(9), Some(i64::MAX)];
    assert_eq!(asked.map(|asked| range.of(asked)), [5, -2, -2, 0, 9, 9]);
    let range = read(&text).unwrap().config.auth.keys[0].priorities();
    assert_eq!([Some(-1), Some(5), Some(i64::MAX)].map(|asked| range.of(asked)), [5, 5, i32::MAX], "it may step back");
    let range = config.server.priorities();
    assert_eq!([None, Some(-1), Some(7)].map(|asked| range.of(asked)), [0, 0, 7]);
}
