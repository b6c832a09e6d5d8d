//! What is printed reads back as the same configuration.

use proptest::prelude::*;

use super::{read, read_with, valid};
use crate::config::Resolved;

/// A valid file with the given choices; pools tile all lengths.
fn file(cuts: &[u64], slots: u32, micros: u64, words: (usize, usize, usize), name: &str) -> String {
    let policy = ["least_work", "two_choices", "round_robin", "prefix_affinity"][words.0];
    let order = ["fifo", "shortest_first"][words.1];
    let usage = ["final", "continuous", "off"][words.2];
    let quoted = toml::Value::from(name).to_string();
    let mut text = format!(
        "[server]\ndrain_timeout = \"{micros}us\"\n[auth]\nadmin_token = \"env:TOKEN\"\n\
         [[auth.keys]]\nname = \"k\"\nsha256 = \"env:DIGEST\"\nmodels = [{quoted}]\nlimit = {{ in_flight = {slots} }}\n\
         [slo]\nttft = \"{micros}us\"\nattainment = 0.5{slots}1\n[access_log]\npath = \"-\"\n[[model]]\nname = {quoted}\n"
    );
    let mut bounds = cuts.to_vec();
    bounds.sort_unstable();
    bounds.dedup();
    for (index, end) in bounds.iter().map(Some).chain([None]).enumerate() {
        let min = if index == 0 { 0 } else { bounds[index - 1] };
        let max = end.map_or(String::new(), |end| format!(", max = {end}"));
        let spill = if index > 0 { "\"p0\"" } else { "" };
        text += &format!(
            "[[pool]]\nname = \"p{index}\"\nmodels = [{quoted}]\nprompt_tokens = {{ min = {min}{max} }}\n\
             slots = {slots}\npolicy = \"{policy}\"\nusage = \"{usage}\"\nspill = [{spill}]\ntokens = {slots}\n\
             queue = {{ order = \"{order}\", timeout = \"{micros}us\" }}\nlong_prefix = {{ threshold = {slots}, slots = 1 }}\n\
             [[pool.backend]]\nname = \"b\"\nurl = \"http://h{index}:8000/p\"\nweight = 0.{slots}1\napi_key = \"env:TOKEN\"\n\
             [[pool.backend]]\nname = \"c\"\nlaunch = {{ command = [\"x\", {quoted}], port = {port}, gpu = [1, 2], \
             env = {{ {quoted} = {quoted} }}, args = {{ a = {slots}, b = true, c = 1.5, d = {quoted}, e = [{quoted}] }} }}\n\
             [[pool.backend]]\nname = \"d\"\nurl = \"http://d{index}:1\"\ncontrol = {{ start = [\"up\", {quoted}], stop = [\"down\"], \
             status = [{quoted}], timeout = \"{micros}us\", args = {{ a = {slots}, e = [{quoted}] }} }}\n",
            port = 20_000 + index
        );
    }
    text
}

proptest! {
    #[test]
    fn a_printed_configuration_reads_back_as_the_same(
        cuts in prop::collection::vec(1u64..1_000_000, 0..6),
        slots in 1u32..65_536,
        micros in 1u64..1_000_000_000_000,
        words in (0usize..4, 0usize..2, 0usize..3),
        name in "[a-zA-Z0-9äß/._ \"\\\\#=-]{0,20}x",
    ) {
        prop_assume!(name.trim() == name);
        let loaded = read(&file(&cuts, slots, micros, words, &name)).map_err(|problems| TestCaseError::fail(problems.to_string()))?;
        let plain = loaded.config.to_string();
        prop_assert_eq!(&valid(&plain), &loaded.config);
        let annotated = Resolved { config: &loaded.config, origins: Some(&loaded.origins) }.to_string();
        prop_assert_eq!(&valid(&annotated), &loaded.config);
    }

    #[test]
    fn no_text_makes_the_reader_panic(text in "(\\[\\[?(pool|server|auth|model)(\\.backend|\\.queue|\\.keys)?\\]?\\]\n|(name|slots|url|models|spill|keys|tokens) = (\"[a-z:/*]{0,6}\"|-?[0-9]{1,21}|\\[\\]|\\[\"[*a]\"\\]|\\{\\}|1e400|nan|2020-01-01)\n){0,12}") {
        let _ = read(&text);
    }

    #[test]
    fn no_set_makes_the_reader_panic(text in "[a-z0-9.\\[\\]\"= {}]{0,30}") {
        let _ = read_with(super::TWO_POOLS, &[&text]);
    }
}

#[test]
fn the_resolved_two_pools_as_sluice_check_prints_them() {
    let loaded = read_with(super::TWO_POOLS, &["pool.short.slots=32"]).unwrap();
    let shown = Resolved { config: &loaded.config, origins: Some(&loaded.origins) }.to_string();
    let mut settings = insta::Settings::clone_current();
    settings.set_snapshot_path(std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").join("tests/golden"));
    settings.set_prepend_module_to_snapshot(false);
    settings.set_omit_expression(true);
    settings.bind(|| insta::assert_snapshot!("config_resolved", shown));
}
