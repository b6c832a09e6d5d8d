//! The wants of a request.
//!
//! Tested with engines that have different facts.

use super::*;

fn key(name: &str) -> ModelKey {
    ModelKey::of(name)
}

fn serves(names: &[&str]) -> Facts {
    Facts { served: Served::list(names.iter().copied()), ..Facts::default() }
}

fn limited(limit: u64) -> Facts {
    Facts { max_model_len: Some(limit), ..serves(&["x"]) }
}

fn asks(model: &str) -> Asks {
    Asks { model: Some(key(model)), route: Some(Route::ChatCompletions), ..Asks::default() }
}

/// The engines that may be chosen, if all of them could serve now.
fn chosen(asks: &Asks, engines: &[Facts]) -> Vec<usize> {
    let wants = Wants::of(asks, || engines.iter().map(|facts| (facts, true)));
    (0..engines.len()).filter(|index| engines[*index].meets(&wants)).collect()
}

#[test]
fn a_request_goes_to_the_engines_that_list_its_model() {
    let engines = [serves(&["x", "both"]), serves(&["both", "y"])];
    assert_eq!(["x", "y", "both"].map(|name| chosen(&asks(name), &engines)), [vec![0], vec![1], vec![0, 1]]);
    assert_eq!(chosen(&asks("new"), &engines), [0, 1], "an engine may have loaded it since");
}

#[test]
fn an_engine_without_a_list_counts_as_serving_all_that_it_has_not_denied() {
    let mut unreadable = Facts { served: Served::unreadable(), ..Facts::default() };
    let listed = serves(&["x"]);
    assert_eq!(chosen(&asks("x"), &[listed.clone(), unreadable.clone()]), [0, 1]);
    assert_eq!(chosen(&asks("y"), &[listed.clone(), unreadable.clone()]), [1]);
    assert!(unreadable.correct(Lack::Model(key("x"))) && !unreadable.correct(Lack::Model(key("x"))));
    assert_eq!(chosen(&asks("x"), &[listed.clone(), unreadable.clone()]), [0]);
    for number in 0..2 * DENIED_MAX {
        unreadable.correct(Lack::Model(key(&number.to_string())));
    }
    let Served::Unreadable { denied } = &unreadable.served else { panic!("{unreadable:?}") };
    assert_eq!(denied.len(), DENIED_MAX);
    assert!(unreadable.served.has(key("x")), "the oldest are forgotten");
}

#[test]
fn an_engine_that_was_not_read_yet_excludes_nothing_and_differs_from_none() {
    let unread = Facts::default();
    assert_eq!(chosen(&asks("y"), &[serves(&["x"]), unread.clone()]), [0, 1]);
    assert!(unread.same(&serves(&["x"])) && !serves(&["x"]).same(&serves(&["y"])));
}

#[test]
fn what_an_engine_denies_leaves_its_list() {
    let mut one = serves(&["x", "y"]);
    assert!(one.correct(Lack::Model(key("x"))));
    assert_eq!(one, serves(&["y"]));
    assert!(!one.correct(Lack::Model(key("never listed"))));
    assert_eq!(chosen(&asks("x"), &[one, serves(&["x"])]), [1]);
}

#[test]
fn an_engine_that_lists_the_model_keeps_its_requests_while_it_is_away() {
    let engines = [serves(&["x"]), serves(&["y"])];
    let wants = Wants::of(&asks("x"), || engines.iter().map(|facts| (facts, facts.served.lists(key("y")))));
    assert!(engines[0].meets(&wants) && !engines[1].meets(&wants));
}

#[test]
fn a_route_is_wanted_only_where_one_of_the_engines_with_the_model_has_it() {
    let mut without = serves(&["x"]);
    let embeds = Asks { route: Some(Route::Embeddings), ..asks("x") };
    assert!(without.correct(Lack::Route(Route::Embeddings)) && !without.correct(Lack::Route(Route::Embeddings)));
    assert_eq!(chosen(&embeds, &[without.clone(), serves(&["x"])]), [1]);
    assert_eq!(chosen(&asks("x"), &[without.clone(), serves(&["x"])]), [0, 1], "another route");
    assert_eq!(chosen(&embeds, &[without.clone(), without.clone()]), [0, 1], "the engine says so itself");
    assert_eq!(chosen(&embeds, &[without.clone(), serves(&["y"])]), [0], "the model comes first");
    let again = Asks { needs_route: true, ..embeds };
    assert_eq!(chosen(&again, &[without.clone(), without]), [0; 0], "one has said so");
}

#[test]
fn a_long_prompt_goes_where_it_surely_fits_or_else_to_the_highest_limit() {
    let engines = [limited(4_096), limited(32_768), limited(8_192)];
    let of = |prompt_tokens, output_tokens| chosen(&Asks { prompt_tokens, output_tokens, ..asks("x") }, &engines);
    assert_eq!(of(3_000, 0), [0, 1, 2]);
    assert_eq!(of(3_900, 0), [1, 2], "the estimate may be wrong");
    assert_eq!(of(3_000, 2_000), [0, 1, 2], "the output is shortened");
    assert_eq!(of(3_000, 5_000), [1, 2], "`max_tokens` above the limit is refused");
    assert_eq!(of(7_000, 10_000), [1]);
    assert_eq!(of(3_000, 90_000), [0, 1, 2], "every engine refuses it");
    assert_eq!(of(40_000, 0), [1], "no estimate is a reason to refuse");
    assert_eq!(of(u64::MAX, u64::MAX), [1]);
    let unknown = [limited(4_096), serves(&["x"])];
    assert_eq!(chosen(&Asks { prompt_tokens: 9_000, ..asks("x") }, &unknown), [1]);
    // The only engine with the model takes the prompt, even if other engines could take a longer
    // one.
    let other = [limited(4_096), Facts { max_model_len: Some(32_768), ..serves(&["y"]) }];
    assert_eq!(chosen(&Asks { prompt_tokens: 9_000, ..asks("x") }, &other), [0]);
}

#[test]
fn after_a_refusal_as_too_long_only_a_higher_limit_will_do() {
    let asks = Asks { longer_than: Some(8_192), ..asks("x") };
    assert_eq!(chosen(&asks, &[limited(4_096), limited(32_768), limited(8_192)]), [1]);
    assert_eq!(chosen(&asks, &[limited(8_192), limited(8_192)]), [0; 0]);
    let mut unknown = serves(&["x"]);
    assert!(unknown.correct(Lack::Length(Some(2_048))) && unknown.max_model_len == Some(2_048));
}
