//! Plans: the engines that the objectives need, their cost, and traffic for which neither is known.
//!
//! Prices are made up. The number of engines is checked against the trials.

use super::{SMALL, scenario};
use crate::plan::{MORE, plan};
use crate::prices::Prices;

#[test]
fn a_plan_finds_the_fewest_engines_and_their_price() {
    let text = format!("{SMALL}[plan]\nload = [0.1, 3]\ncandidate = [{{ name = \"H200\", gpu = \"h200\" }}]\n");
    let prices = Prices { currency: "X".to_owned(), per_hour: [("h200".to_owned(), 3.6)].into() };
    let mut trials = Vec::new();
    let results = plan(&scenario(&text), &prices, &[1], |_, load, engines, share| trials.push((load, engines, share)));
    let results = results.unwrap();
    let needs: Vec<_> = results.iter().map(|result| result.needs.as_ref().unwrap()).collect();
    assert_eq!((needs[0].engines, needs[0].with_one_less.as_ref()), (1, None));
    let fewest = needs[1].engines;
    assert!(fewest > 1 && needs[1].gpus == fewest, "{fewest}");
    let share = |engines| trials.iter().find(|(load, at, _)| *load == 3.0 && *at == engines).unwrap().2;
    assert!(share(fewest) >= 99.0 && share(fewest - 1) < 99.0, "{trials:?}");
    // These engines must meet the objectives at the factor of the headroom, and not at the next
    // factor.
    for (load, need) in [0.1, 3.0].into_iter().zip(&needs) {
        let met = |factor: f64| {
            let is_it =
                |(at, engines, _): &&(f64, u32, f64)| (at / load - factor).abs() < 1e-9 && *engines == need.engines;
            trials.iter().find(is_it).map(|(.., share)| *share >= 99.0)
        };
        let place = MORE.iter().rposition(|factor| (factor - 1.0 - need.headroom).abs() < 1e-9);
        assert!(place.is_none_or(|place| met(MORE[place]) == Some(true)), "{load}: {trials:?}");
        let next = place.map_or(0, |place| place + 1);
        assert!(next == MORE.len() || met(MORE[next]) == Some(false), "{load}: {trials:?}");
    }
    // 3.60 per hour is 0.001 per second, which serves 120 requests of 2,004 tokens.
    let cost = needs[1].cost.unwrap();
    assert_eq!(cost.per_hour, 3.6 * f64::from(fewest));
    let expected = 0.001 * f64::from(fewest) / 120.0;
    assert!((cost.per_request / expected - 1.0).abs() < 0.2, "{} and {expected}", cost.per_request);
    assert!((cost.per_million_tokens / (cost.per_request / 2004.0 * 1e6) - 1.0).abs() < 1e-9);
    assert!(cost.per_million_output > 400.0 * cost.per_million_tokens);
}

#[test]
fn a_plan_does_not_judge_requests_that_leave() {
    let leaving = scenario(&format!("{SMALL}leave = 0.3\n[plan]\nload = [0.1]\nmax_engines = 1\n"));
    let results = plan(&leaving, &Prices::default(), &[1], |_, _, _, _| ()).unwrap();
    assert_eq!(results[0].needs.as_ref().map(|needs| needs.attainment.0), Ok(100.0));
}

#[test]
fn a_plan_says_why_no_number_of_engines_suffices() {
    let results = |more: &str| plan(&scenario(&format!("{SMALL}{more}")), &Prices::default(), &[1], |_, _, _, _| ());
    let needs = results("[plan]\nmax_engines = 1\nload = [6]\n").unwrap().remove(0).needs.unwrap_err();
    assert!(needs.starts_with("not met with 1 engine: "), "{needs}");
    let small = "[plan]\nload = [1]\ncandidate = [{ name = \"small\", gpu = \"rtx3080-10\" }]\n";
    let needs = results(small).unwrap().remove(0).needs.unwrap_err();
    assert!(needs.starts_with("does not start: "), "{needs}");
    let aimless = scenario("[[traffic]]\nclass = [{ name = \"a\", rate = 1, in = 10, out = 2 }]\n");
    let error = plan(&aimless, &Prices::default(), &[1], |_, _, _, _| ()).unwrap_err().to_string();
    assert!(error.contains("a plan needs objectives"), "{error}");
}

#[test]
fn every_engine_costs_what_its_own_gpu_costs() {
    let engines = "[[engine]]\ngpu = \"h100-80\"\n[[engine]]\ngpu = \"h200\"\n";
    let two = scenario(&format!("{SMALL}{engines}[plan]\nload = [0.8]\nattainment = 50\nmax_engines = 2\n"));
    let one = scenario(&format!("{SMALL}{}[plan]\nload = [0.1]\n", "[[engine]]\ngpu = \"h100-80\"\n"));
    let cost = |of: &crate::Scenario, names: &[(&str, f64)]| {
        let per_hour = names.iter().map(|(name, price)| ((*name).to_owned(), *price)).collect();
        let prices = Prices { currency: String::new(), per_hour };
        let needs = plan(of, &prices, &[1], |_, _, _, _| ()).unwrap().remove(0).needs.unwrap();
        (needs.engines, needs.cost.map(|cost| cost.per_hour), needs.unpriced.join(" "))
    };
    let all = [("h200", 3.0), ("h100-80", 2.0)];
    assert_eq!(cost(&one, &all), (1, Some(2.0), String::new()));
    assert_eq!(cost(&two, &all), (2, Some(5.0), String::new()));
    assert_eq!(cost(&two, &all[..1]), (2, None, "h100-80".to_owned()));
}

#[test]
fn a_class_that_sends_nothing_is_named_and_does_not_pass() {
    let rare = "class = [{ name = \"tiny\", rate = 5, in = 200, out = 4, e2el = \"4s\" }, \
                { name = \"rare\", rate = 1e-6, in = 200, out = 4, e2el = \"4s\" }]";
    let rare = scenario(&format!("duration = \"5s\"\n[[traffic]]\n{rare}\n[plan]\nload = [1]\n"));
    let why = plan(&rare, &Prices::default(), &[1, 17], |_, _, _, _| ()).unwrap().remove(0).needs.unwrap_err();
    assert!(why.starts_with("class 'rare' had no requests to judge; give a longer duration"), "{why}");
}

#[test]
fn engines_are_paid_for_the_time_that_is_configured() {
    let prices = Prices { currency: String::new(), per_hour: [("h200".to_owned(), 3_600.0)].into() };
    let paid = |text: &str| {
        let text = format!("[[traffic]]\nclass = [{{ name = \"a\", in = 200, out = 4, e2el = \"9s\" }}]\n{text}\n");
        let plan = plan(&scenario(&format!("{text}[plan]\nload = [1]\n")), &prices, &[1], |_, _, _, _| ());
        plan.unwrap().remove(0).needs.unwrap().cost.unwrap()
    };
    // About 8 requests in 40 s, at a price of 1 per second.
    let rate = paid("rate = 0.2\nduration = \"40s\"");
    let requests = 40.0 / rate.per_request;
    assert!((requests - requests.round()).abs() < 1e-9, "40 s are paid for: {requests} requests");
    // All requests are sent at once, but engines still cost something.
    let at_once = paid("concurrency = 4\nrequests = 4");
    assert!(at_once.per_request > 0.0);
}
