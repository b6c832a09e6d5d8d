//! `tokens = "auto"` in simulated time: an engine whose KV cache thrashes without it, and engines
//! that never preempt.

use super::*;

/// Answers to prompts of 200 tokens. A cache of 64,000 tokens serves up to 192 requests at once.
fn thrashing(tokens: &str, out: Length) -> LabRun {
    let class = Class::new("all", Length::Exactly(200), out, 1.0);
    let workload = Workload::of_classes(MODEL, vec![class], 0);
    let plan = RunPlan::new(workload, Arrival::Poisson { rate: 14.0 }, Extent::Lasting(Duration::from_secs(200)));
    let keys = format!("slots = 192\ntokens = \"{tokens}\"\nqueue = {{ length = 4096, timeout = \"30m\" }}");
    run(
        &Lab::new(
            config(1, &keys),
            engines(1, &["--num-gpu-blocks-override", "4000", "--max-model-len", "8192"]),
            vec![plan],
        ),
        3,
    )
    .unwrap()
}

#[test]
fn an_engine_that_preempts_gets_fewer_tokens_and_answers_sooner() {
    let out = Length::Between { min: 400, max: 1_600 };
    let [without, with] = ["unlimited", "auto"].map(|tokens| {
        let run = thrashing(tokens, out);
        let at = |share| {
            [percentile(&run, 0, |record| record.ttft, share), percentile(&run, 0, |record| record.latency, share)]
        };
        let (preemptions, medians, tails) = (run.engines[0].side.preemptions, at(0.5), at(0.99));
        println!("{tokens}: {preemptions} preemptions, TTFT and E2EL P50 {medians:.0?}, P99 {tails:.0?}");
        assert!(run.result.requests.iter().all(|record| record.is_completed()), "none is refused");
        (preemptions, medians, tails)
    });
    assert!(without.0 > 4_000.0, "it thrashes: {without:?}");
    assert!(with.0 < without.0 / 4.0, "{with:?}");
    for of in 0..2 {
        assert!(with.1[of] < 0.75 * without.1[of] && with.2[of] < without.2[of], "{without:?} {with:?}");
    }
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
