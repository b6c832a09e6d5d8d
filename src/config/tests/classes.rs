//! The classes of a configuration: written, or derived from pools and permits.

use super::{read, read_with};

const POOL: &str = "[[pool]]\nname = \"all\"\n[[pool.backend]]\nname = \"a\"\nurl = \"http://127.0.0.1:9\"\n";

/// For each class: the name, the first length, and the first length after the class.
fn classes(text: &str) -> Vec<(String, u64, Option<u64>)> {
    let config = read(text).expect("a valid configuration").config;
    let each = config
        .classes
        .iter()
        .map(|class| (class.name.clone(), class.prompt_tokens.min.0, class.prompt_tokens.max.map(|max| max.0)));
    each.collect()
}

fn pools(ranges: &[(&str, &str)]) -> String {
    let mut text = String::new();
    for (index, (range, more)) in ranges.iter().enumerate() {
        text += &format!("[[pool]]\nname = \"p{index}\"\nprompt_tokens = {{ {range} }}\n{more}\n");
        text += &format!("[[pool.backend]]\nname = \"b{index}\"\nurl = \"http://127.0.0.1:{}\"\n", 9 + index);
    }
    text
}

fn named(all: &[(&str, u64, Option<u64>)]) -> Vec<(String, u64, Option<u64>)> {
    all.iter().map(|(name, min, max)| ((*name).to_owned(), *min, *max)).collect()
}

#[test]
fn every_configuration_has_a_class_of_short_and_one_of_long_prompts() {
    assert_eq!(classes(POOL), named(&[("short", 0, Some(5_000)), ("long", 5_000, None)]));
    let permits =
        POOL.replace("\n[[pool.backend]]", "\nlong_prefix = { threshold = \"8k\", slots = 1 }\n[[pool.backend]]");
    assert_eq!(classes(&permits), named(&[("short", 0, Some(8_001)), ("long", 8_001, None)]));
    let long = "long_prefix = { threshold = \"4k\", slots = 2 }";
    let two = pools(&[("max = \"4k\"", long), ("min = \"4k\"", long)]);
    assert_eq!(classes(&two), named(&[("short", 0, Some(4_000)), ("long", 4_000, None)]), "one end, not two");
}

#[test]
fn the_strictest_share_of_a_class_with_objectives_is_the_share_of_a_pool() {
    let share = |text: &str| {
        let config = read(&format!("{POOL}{text}")).expect("a valid configuration").config;
        crate::attainment(&config.classes, &config.pools[0])
    };
    let class = |name: &str, slo: &str| format!("[[class]]\nname = \"{name}\"\nslo = {{ {slo} }}\n");
    assert_eq!(share("[slo]\nttft = \"1s\"\nattainment = 0.8\n"), 0.8);
    let loose = class("a", "ttft = \"1s\", attainment = 0.5");
    assert_eq!(share(&loose), 0.5);
    assert_eq!(share(&(loose.clone() + &class("b", "e2el = \"9s\", attainment = 0.9"))), 0.9);
    assert_eq!(share(&(loose + &class("b", "attainment = 0.9"))), 0.5, "a class without objectives has no share");
}

#[test]
fn more_ends_give_more_classes_up_to_the_bound() {
    let three = pools(&[("max = \"2k\"", ""), ("min = \"2k\", max = \"16k\"", ""), ("min = \"16k\"", "")]);
    let expected = [("short", 0, Some(2_000)), ("medium", 2_000, Some(16_000)), ("long", 16_000, None)];
    assert_eq!(classes(&three), named(&expected));
    let ends: Vec<String> = (0..12).map(|end| format!("min = {}, max = {}", end * 1_000, (end + 1) * 1_000)).collect();
    let mut ranges: Vec<(&str, &str)> = ends.iter().map(|range| (range.as_str(), "")).collect();
    ranges.push(("min = 12000", ""));
    let many = classes(&pools(&ranges));
    assert_eq!(many.len(), crate::limits::MAX_CLASSES);
    assert_eq!((many[0].0.as_str(), many[7].0.as_str(), many[7].2), ("to-1k", "from-7k", None));
}

#[test]
fn the_objectives_of_a_class_replace_those_of_the_pool() {
    let text = format!(
        "{POOL}[slo]\nttft = \"2s\"\ntpot = \"50ms\"\nttft_per_1k_prompt_tokens = \"100ms\"\n\
         [[class]]\nname = \"short\"\nprompt_tokens = {{ max = \"5k\" }}\nslo = {{ ttft = \"300ms\", attainment = 0.9 }}\n\
         [[class]]\nname = \"adapters\"\nadapter = true\n"
    );
    let config = read(&text).expect("a valid configuration").config;
    let [short, adapters] = &config.classes[..] else { panic!("two classes: {:?}", config.classes) };
    let (of_short, of_adapters) = (short.objectives_in(&config.pools[0]), adapters.objectives_in(&config.pools[0]));
    assert_eq!((of_short.ttft, of_short.ttft_per_1k.as_millis()), (Some(std::time::Duration::from_millis(300)), 0));
    assert_eq!((of_short.tpot, of_adapters.ttft_per_1k.as_millis()), (of_adapters.tpot, 100));
    assert_eq!((short.attainment_in(&config.pools[0]), adapters.attainment_in(&config.pools[0])), (0.9, 0.99));
    assert!(short.has(4_999, true, true) && !short.has(5_000, true, true) && !adapters.has(9_000, false, true));
}

#[test]
fn a_class_without_lengths_with_a_name_that_is_used_or_reserved_is_refused() {
    let with = |classes: &str| read(&format!("{POOL}{classes}")).expect_err("a problem").to_string();
    assert!(
        with("[[class]]\nname = \"a\"\nprompt_tokens = { min = 7, max = 7 }\n").contains("min 7 is not below max 7")
    );
    assert!(with("[[class]]\nname = \"other\"\n").contains("choose another name"));
    assert!(with("[[class]]\nname = \"a\"\n[[class]]\nname = \"a\"\n").contains("used twice"));
    assert!(with("[[class]]\nname = \"a\\\"b\"\n").contains("may contain only letters"));
    let nine: String = (0..9).map(|index| format!("[[class]]\nname = \"c{index}\"\n")).collect();
    assert!(with(&nine).contains('8'), "the bound is named");
    assert!(read_with(POOL, &["class=[{name=\"x\"}]"]).is_ok());
}
