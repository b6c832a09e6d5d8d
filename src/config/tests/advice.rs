//! Messages must say what to write instead.
//!
//! Each test makes one mistake in a valid configuration and looks for the advice in the only
//! message.

use super::problems::one_in;
use super::{TWO_POOLS, read};

#[test]
fn a_number_that_the_type_cannot_hold_is_named_with_its_bounds() {
    let whole = |set: &str, path: &str, said: &str| one_in(TWO_POOLS, &[set], path, said);
    whole("pool.short.slots=-1", "pool[0].slots", "-1 is outside 1 to 65536");
    whole("pool.short.slots=9999999999", "pool[0].slots", "9999999999 is outside 1 to 65536");
    whole("pool.short.slots=1.5", "pool[0].slots", "expected a whole number, found the number 1.5");
}

#[test]
fn a_number_without_a_unit_is_answered_with_units() {
    for text in ["30", "1.5"] {
        let said = format!("'{text}' has no unit; write \"{text}s\" for seconds");
        one_in(TWO_POOLS, &[&format!("timeouts.idle={text}")], "timeouts.idle", &said);
    }
    one_in(TWO_POOLS, &["timeouts.idle=30 sec"], "timeouts.idle", "has no known unit");
}

#[test]
fn a_key_that_is_set_twice_is_named_at_its_second_place() {
    let twice = TWO_POOLS.replacen("[[pool]]", "[log]\nlevel = \"info\"\nlevel = \"warn\"\n[[pool]]", 1);
    let problems = read(&twice).unwrap_err().to_string();
    assert!(problems.contains("the key level is set twice; remove one of the two"), "{problems}");
}

#[test]
fn the_problem_with_a_key_in_the_wrong_table_names_its_own() {
    one_in(TWO_POOLS, &["listen=x"], "listen", "write it as server.listen");
    one_in(TWO_POOLS, &["pool.short.backend.a.long_prefix={}"], "pool[0].backend[0].long_prefix", "pool.long_prefix");
    one_in(TWO_POOLS, &["tls={}"], "tls", "server.tls");
    // The hint for an unknown key is a similar key of the same table.
    one_in(TWO_POOLS, &["pool.short.backend.a.wieght=1"], "pool[0].backend[0].wieght", "did you mean 'weight'?");
    // No table is suggested for a key that many tables have.
    one_in(TWO_POOLS, &["name=x"], "name", "known: server");
}

#[test]
fn a_flag_in_two_spellings_is_one_flag() {
    let engine = "[[pool]]\nname = \"p\"\n[[pool.backend]]\nname = \"b\"\n\
                  launch = { command = [\"vllm\"], args = { max-num-seqs = 1, max_num_seqs = 2 } }\n";
    one_in(engine, &[], "pool[0].backend[0].launch.args.max_num_seqs", "used twice");
}
