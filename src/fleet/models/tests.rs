//! Lists of models as engines send them, and differences between engines.
//!
//! An unreadable list restricts nothing.

use super::*;

fn list(body: &str) -> Result<ModelList, Unreadable> {
    ModelList::parse(body.as_bytes())
}

fn of(names: &[&str], limit: u64) -> Result<ModelList, Unreadable> {
    let cards = names.iter().map(|name| format!(r#"{{"id":"{name}","max_model_len":{limit}}}"#));
    list(&format!(r#"{{"data":[{}]}}"#, cards.collect::<Vec<_>>().join(",")))
}

#[test]
fn what_is_no_list_says_why_and_restricts_nothing() {
    for body in ["", "<html>", "{}", r#"{"data":{}}"#, r#"{"data":[]}"#, r#"{"data":[1,{"name":"x"}]}"#] {
        let reported = ReportedModels::default();
        let reading = reported.read(BackendId::new(0), list(body));
        assert_eq!(reading.served, Some(Served::unreadable()), "{body}");
        assert!(matches!(reading.readable, Some(Err(_))), "{body}");
        assert_eq!(reported.serves(BackendId::new(0), "x"), None, "{body}");
        let again = reported.read(BackendId::new(0), list(body));
        assert!(again.readable.is_none(), "said once: {body}");
        let mended = reported.read(BackendId::new(0), of(&["x"], 8));
        assert_eq!((mended.readable, mended.max_model_len), (Some(Ok(())), Some(8)), "{body}");
        assert_eq!(reported.serves(BackendId::new(0), "x"), Some(true));
    }
}

#[test]
fn a_list_that_cannot_be_read_for_once_is_kept_and_one_that_is_refused_is_not() {
    let reported = ReportedModels::default();
    let id = BackendId::new(0);
    let slow = || Err(Unreadable::Fetch(FetchError::Timeout(Duration::from_secs(1))));
    assert_eq!(reported.read(id, slow()).served, Some(Served::unreadable()), "nothing is known yet");
    reported.read(id, of(&["x"], 8));
    for passing in [slow(), Err(Unreadable::Status(503))] {
        assert_eq!(reported.read(id, passing).served, None);
        assert_eq!(reported.names(), ["x"]);
    }
    assert_eq!(reported.read(id, Err(Unreadable::Status(401))).served, Some(Served::unreadable()));
    assert!(reported.unreadable(id).unwrap().contains("401") && reported.names().is_empty());
}

#[test]
fn an_engine_may_list_thousands_of_adapters_and_more_than_are_kept_restrict_nothing() {
    let names: Vec<String> = (0..CARDS_MAX + 1).map(|number| format!("adapter-{number}")).collect();
    let names: Vec<&str> = names.iter().map(|name| &**name).collect();
    let reported = ReportedModels::default();
    let all = reported.read(BackendId::new(0), of(&names[..CARDS_MAX], 8));
    assert_eq!(all.served, Some(Served::list(names[..CARDS_MAX].iter().copied())));
    assert_eq!(reported.cards().len(), CARDS_MAX);
    let cut = reported.read(BackendId::new(0), of(&names, 8));
    assert_eq!((cut.served, reported.cards().len()), (Some(Served::unreadable()), CARDS_MAX));
    assert!(reported.unreadable(BackendId::new(0)).unwrap().contains("more than 8192"));
}

#[test]
fn of_two_cards_for_a_name_clients_see_the_one_with_the_higher_limit() {
    let reported = ReportedModels::default();
    reported.read(BackendId::new(0), of(&["x", "y"], 4_096));
    reported.read(BackendId::new(1), of(&["z", "x"], 32_768));
    let cards = reported.cards();
    let shown: Vec<_> = cards.iter().map(|card| (&*card.id, card.max_model_len.unwrap())).collect();
    assert_eq!(shown, [("x", 32_768), ("y", 4_096), ("z", 32_768)]);
}

#[test]
fn engines_that_differ_are_named_with_what_they_lack() {
    let reported = ReportedModels::default();
    let backends = || ["a", "b", "c"].into_iter().zip((0..3).map(BackendId::new));
    assert_eq!(reported.differences(backends()), None);
    for id in 0..3 {
        reported.read(BackendId::new(id), of(&["x", "y"], 8));
    }
    assert_eq!(reported.differences(backends()), None);
    reported.read(BackendId::new(1), of(&["y"], 16));
    reported.read(BackendId::new(2), Err(Unreadable::Status(404)));
    let said = reported.differences(backends()).unwrap();
    assert_eq!(said, "b lacks x; max_model_len is 8 on a, 16 on b");
    let names: Vec<String> = (0..2_000).map(|number| format!("adapter-{number}")).collect();
    let names: Vec<&str> = names.iter().map(|name| &**name).collect();
    reported.read(BackendId::new(0), of(&names, 16));
    let said = reported.differences(backends()).unwrap();
    assert_eq!(said, "a lacks y; b lacks adapter-0, adapter-1, adapter-2, adapter-3 and 1996 more");
}

#[test]
fn routes_are_those_of_the_openapi_page() {
    let routes =
        routes_of(br#"{"paths":{"/health":{},"/v1/embeddings":{"post":{}},"/v1/score":{},"/rerank":{"post":{}}}}"#);
    let routes = routes.unwrap();
    assert!(routes.has(Route::Embeddings) && routes.has(Route::Score) && !routes.has(Route::ChatCompletions));
    assert!(!routes.has(Route::Rerank), "not by the path /v1/rerank");
    assert_eq!(routes_of(br#"{"paths":{"/rerank":{}}}"#), Some(RouteSet::NONE));
    for page in ["", "{}", r#"{"paths":{"/generate":{}}}"#, r#"{"paths":{"/v1/embeddings":{},"/{rest:path}":{}}}"#] {
        assert_eq!(routes_of(page.as_bytes()), None, "{page}");
    }
}
