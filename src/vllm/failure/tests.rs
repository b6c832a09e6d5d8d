//! Failure classes on captured logs and on the texts of other versions.

use super::*;

macro_rules! captured {
    ($name:literal) => {
        include_str!(concat!("../../../tests/fixtures/vllm-0.32/", $name)).lines().collect::<Vec<_>>()
    };
}

#[track_caller]
fn starts(lines: &[&str], code: i32, phase: StartPhase, class: Class, cause: &str) -> Diagnosis {
    let found = diagnose(lines, Some(Exit::Code(code)), phase);
    assert_eq!(found.class, class, "{found:?}");
    assert!(found.cause.as_deref().is_some_and(|text| text.contains(cause)), "{found:?}");
    assert!(!found.advice.is_empty());
    found
}

#[test]
fn a_context_longer_than_the_cache_names_the_length_that_fits() {
    let log = captured!("start-refused-context-over-kv.log");
    let found = starts(&log, 1, StartPhase::SizingKvCache, Class::KvTooSmall, "To serve at least one request");
    let suggestion = found.suggestion.unwrap();
    assert_eq!((suggestion.flag.as_str(), suggestion.value), ("max-model-len", 2_097_024));
    assert!(found.advice.contains("max-model-len to 2097024"), "{}", found.advice);
}

#[test]
fn captured_refusals_are_told_apart() {
    let batched = captured!("start-refused-batched-under-seqs.log");
    starts(&batched, 1, StartPhase::Configuring, Class::BadArguments, "max_num_batched_tokens (64) must be greater");
    let length = captured!("start-refused-context-over-model.log");
    starts(
        &length,
        1,
        StartPhase::Configuring,
        Class::BadArguments,
        "max_model_len (65536) is greater than the derived",
    );
    let flag = captured!("start-refused-unknown-flag.log");
    starts(&flag, 2, StartPhase::Launching, Class::UnknownFlag, "--disable-log-requests");
}

#[test]
fn the_root_cause_of_a_dead_engine_is_found_before_its_consequences() {
    let log = captured!("death-engine.log");
    starts(&log, 0, StartPhase::Serving, Class::EngineDied, "RuntimeError: CPU Generator does not use offset");
}
