//! Speculative decoding behind the gateway in simulated time: events of several tokens, and the
//! acceptance that a file gives.

use super::*;
use sluice_online::engines::flags::EngineFlag;

fn scenario(args: &str, acceptance: &str) -> Scenario {
    let gateway = "[[model]]\nname = \"llama-3.1-8b\"\n[[pool]]\nname = \"all\"\n[[pool.backend]]\nname = \"gpu0\"\n\
                   url = \"http://127.0.0.1:8000\"";
    let engine = format!("[[engine]]\nargs = {{ max-model-len = 32768{args} }}\n{acceptance}");
    let traffic = "[[traffic]]\nclass = [{ name = \"a\", in = 200, out = 128 }]\nrate = 4\nduration = \"20s\"";
    let file = LabFile::parse(&format!("gateway = '''{gateway}'''\n{engine}\n{traffic}\n"), "test").unwrap();
    Scenario { file, folder: "/".into() }
}

fn played(args: &str, acceptance: &str) -> LabRun {
    let scenario = scenario(args, acceptance);
    run(&scenario.lab(&scenario.file.variants()[0]).unwrap(), 1).unwrap()
}

const DRAFTS: &str = ", \"speculative-config.method\" = \"eagle3\", \"speculative-config.num_speculative_tokens\" = 3";

#[test]
fn every_token_arrives_in_fewer_events_and_sooner() {
    let mean = |run: &LabRun| {
        let records = run.result.requests.iter().filter(|record| record.is_completed());
        let (events, tokens, time) = records.fold((0, 0, 0.0), |(events, tokens, time), record| {
            assert_eq!(record.output_tokens, Some(128), "no token is lost or added");
            (events + record.itls.len() + 1, tokens + 128, time + (record.latency - record.ttft))
        });
        (tokens as f64 / events as f64, time / tokens as f64)
    };
    let (plain, none, some) =
        (played("", ""), played(DRAFTS, "acceptance = [0, 0, 0]"), played(DRAFTS, "acceptance = [0.8, 0.6, 0.4]"));
    let [(one, slow), (also_one, slower), (several, fast)] = [&plain, &none, &some].map(mean);
    assert_eq!((one, also_one), (1.0, 1.0));
    // 1 + 0.8 + 0.6 + 0.4 tokens a step, except for the first token and the end of a response.
    assert!((2.6..2.85).contains(&several), "{several}");
    assert!(fast < 0.6 * slow && slower > 1.05 * slow, "{fast} {slow} {slower}");
}

#[test]
fn rates_that_cannot_be_are_refused() {
    for (acceptance, why) in [("acceptance = [0.4, 0.6]", "must not rise"), ("acceptance = [2.0]", "each in [0, 1]")] {
        let scenario = scenario(DRAFTS, acceptance);
        let error = scenario.lab(&scenario.file.variants()[0]).unwrap_err().to_string();
        assert!(error.contains(why), "{error}");
    }
}

#[test]
fn a_changed_flag_keeps_the_acceptance() {
    let scenario = scenario(DRAFTS, "acceptance = [0.8, 0.6, 0.4]");
    let lab = scenario.lab(&scenario.file.variants()[0]).unwrap();
    let changed = lab.engines[0].with_flag(EngineFlag::MaxNumSeqs, 64.0).unwrap();
    assert_eq!(changed.sim.engine.speculation.unwrap().acceptance, [0.8, 0.6, 0.4]);
}

#[test]
fn drafts_that_stop_at_one_sequence_change_nothing_but_the_graph() {
    let off = ", \"speculative-config.num_speculative_tokens_per_batch_size\" = \"[[1, 256, 0]]\"";
    let (plain, never) = (played("", ""), played(&format!("{DRAFTS}{off}"), "acceptance = [1, 1, 1]"));
    let events = |run: &LabRun| -> usize { run.result.requests.iter().map(|record| record.itls.len()).sum() };
    assert_eq!(events(&plain), events(&never), "one token an event");
}
