//! `tokens = "auto"` in simulated time: an engine whose KV cache thrashes without it, and engines
//! that never preempt.

use super::*;

/// Answers of 1,000 tokens to prompts of 200, on a cache of 64,000 tokens for up to 192 at once.
fn thrashing(tokens: &str) -> LabRun {
    let class = Class::new("all", Length::Exactly(200), Length::Exactly(1_000), 1.0);
    let workload = Workload::of_classes(MODEL, vec![class], 0);
    let plan = RunPlan::new(workload, Arrival::Poisson { rate: 14.0 }, Extent::Lasting(Duration::from_secs(200)));
    let keys = format!("slots = 192\ntokens = \"{tokens}\"\nqueue = {{ length = 4096, timeout = \"30m\" }}");
    run(&Lab::new(config(1, &keys), engines(1, &["--num-gpu-blocks-override", "4000"]), vec![plan]), 3).unwrap()
}

#[test]
fn an_engine_that_preempts_gets_fewer_tokens_and_serves_more() {
    let [without, with] = ["unlimited", "auto"].map(thrashing);
    let preemptions = |run: &LabRun| run.engines[0].side.preemptions;
    let of = |run: &LabRun| {
        let done = run.result.requests.iter().filter(|record| record.is_completed()).count();
        let (ttft, e2el) =
            (percentile(run, 0, |record| record.ttft, 0.5), percentile(run, 0, |record| record.latency, 0.5));
        println!("{done} completed, {} preemptions, TTFT P50 {ttft:.0}, E2EL P50 {e2el:.0}", preemptions(run));
        (done, ttft, e2el)
    };
    let ((done, ttft, e2el), (more, sooner, faster)) = (of(&without), of(&with));
    assert!(preemptions(&without) > 400.0, "it thrashes: {}", preemptions(&without));
    assert!(preemptions(&with) < preemptions(&without) / 4.0, "{}", preemptions(&with));
    assert!(more >= done && sooner <= ttft && faster <= e2el, "{more} {sooner} {faster}");
}

#[test]
fn a_load_that_preempts_nothing_is_served_the_same_to_the_digit() {
    let played = |tokens: &str| {
        let config = config(2, &format!("long_prefix = {{ threshold = \"5k\", slots = 1 }}\ntokens = \"{tokens}\""));
        let run = run(&Lab::new(config, engines(2, &[]), vec![mixed(30)]), 5).unwrap();
        run.result.requests.iter().map(|record| (record.ttft, record.latency)).collect::<Vec<_>>()
    };
    assert_eq!(played("auto"), played("unlimited"));
}
