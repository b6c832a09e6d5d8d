//! The classes of the gateway in a result of the load generator.
//!
//! The load generator does not know `[[class]]`, so the rule of the configuration is applied to the
//! records of a run. It sees whether the request asks for an adapter, and the prompt's length: as
//! the engine counted it or, without a count, as it was sent. All requests of the load generator
//! generate tokens. Requests without a class are in the class `other`, as in the gateway.

use sluice_bench::RunResult;
use sluice_bench::result::record::GatewayClass;
use sluice_bench::result::slices;
use sluice_config::{Class, OTHER_CLASS};

/// Divides a result as the gateway divides requests.
pub fn divide(result: &mut RunResult, classes: &[Class]) {
    let named = |class: &Class| GatewayClass { name: class.name.clone(), requests: class.requests() };
    let other = GatewayClass { name: OTHER_CLASS.to_owned(), requests: "all others".to_owned() };
    slices::divide(result, classes.iter().map(named).chain([other]).collect(), |record| {
        let has = |class: &Class| class.has(record.prompt_tokens, record.adapter.is_some(), true);
        classes.iter().position(has).unwrap_or(classes.len())
    });
}

#[cfg(test)]
mod tests {
    use super::*;
    use sluice_bench::result::record::{ClassConfig, RunConfig};
    use sluice_bench::result::slices::{SliceBy, slices};
    use sluice_bench::{Outcome, Record};

    #[test]
    fn requests_are_in_the_class_that_the_gateway_gives_them() {
        let mut result = RunResult::default();
        let lengths = [(10, None), (4_999, None), (5_000, None), (9, Some(0))];
        let of = |(prompt_tokens, adapter)| Record {
            prompt_tokens,
            adapter,
            outcome: Outcome::Completed,
            ..Record::default()
        };
        result.requests = lengths.map(of).to_vec();
        let mut classes = Class::usual();
        divide(&mut result, &classes);
        let counts = |result: &RunResult| {
            let each = slices(result, SliceBy::Class).into_iter().map(|(name, metrics)| (name, metrics.sent));
            each.collect::<Vec<_>>()
        };
        assert_eq!(counts(&result), [("short".to_owned(), 3), ("long".to_owned(), 1)]);
        assert_eq!(result.config.gateway_classes[0].requests, "0 to 5k");
        classes.iter_mut().for_each(|class| class.adapter = Some(false));
        divide(&mut result, &classes);
        let expected = [("short".to_owned(), 2), ("long".to_owned(), 1), ("other".to_owned(), 1)];
        assert_eq!(counts(&result), expected);
        assert_eq!(result.config.gateway_classes[1].requests, "5k and more, without adapter");
    }

    #[test]
    fn a_name_that_the_load_uses_for_other_requests_is_a_warning() {
        let class = |name: &str| ClassConfig { name: name.to_owned(), ..ClassConfig::default() };
        let config = RunConfig { classes: vec![class("short"), class("chat")], ..RunConfig::default() };
        let of = |(class, prompt_tokens)| Record { class, prompt_tokens, ..Record::default() };
        let requests = [(0, 100), (0, 6_000), (0, 7_000), (1, 6_000)].map(of).to_vec();
        let mut result = RunResult { config, requests, ..RunResult::default() };
        divide(&mut result, &Class::usual());
        assert_eq!(result.warnings.len(), 1, "{:?}", result.warnings);
        assert!(
            result.warnings[0].starts_with("2 requests that the load calls 'short' are not"),
            "{:?}",
            result.warnings
        );
        assert_eq!(SliceBy::shown(&result).take(2).collect::<Vec<_>>(), [SliceBy::Class, SliceBy::Load]);
        result.requests.remove(1);
        result.requests.remove(1);
        result.config.classes[1].name = "long".to_owned();
        result.warnings.clear();
        divide(&mut result, &Class::usual());
        assert!(result.warnings.is_empty() && SliceBy::shown(&result).all(|by| by != SliceBy::Load), "{result:?}");
    }
}
