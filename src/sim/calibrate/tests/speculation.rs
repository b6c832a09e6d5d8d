//! The accuracy of speculative decoding on `tests/fixtures/h200/speculation*.csv`.
//!
//! The constants were fitted to the steps of some runs. Other steps, the results of all runs and
//! the mixed load were left out of the fit. The speed of this machine's CPU changed by a factor of
//! two while it was measured. So each comparison is made twice. With the speed of the runs without
//! drafts (`trio`) it is a forecast. With the speed that the scheduler's times show for the run, it
//! shows the error of the model.

use super::*;
use crate::calibrate::play::{replay_as, speculation};
use crate::machine::Graphs;

const STEPS: &str = include_str!("../../../../tests/fixtures/h200/speculation_steps.csv");
const ROWS: &str = include_str!("../../../../tests/fixtures/h200/speculation.csv");
const MIXED: &str = include_str!("../../../../tests/fixtures/h200/speculation_mixed.csv");

/// The largest median error and the largest single error that a test allows.
type Bounds = (f64, f64);

fn constants() -> Constants {
    Constants::on_host("trio").unwrap()
}

fn trio() -> Profile {
    let (gpu, model) = (Gpu::load("h200").unwrap(), Model::load("llama-3.1-8b").unwrap());
    Profile::new(gpu, model, Layout::default(), &constants()).unwrap()
}

fn data(text: &'static str) -> impl Iterator<Item = &'static str> {
    text.lines().filter(|line| !line.starts_with('#')).skip(1)
}

fn numbers<'a>(fields: impl Iterator<Item = &'a str>) -> Vec<f64> {
    fields.map(|field| field.parse().unwrap_or(f64::NAN)).collect()
}

fn off(simulated: f64, measured: f64) -> f64 {
    simulated / measured - 1.0
}

#[track_caller]
fn assert_within(title: &str, mut errors: Vec<(f64, String)>, (median, largest): Bounds) {
    errors.sort_by(|one, other| one.0.abs().total_cmp(&other.0.abs()));
    let (middle, worst) = (errors[errors.len() / 2].0.abs(), &errors[errors.len() - 1]);
    println!("{title}: {} errors, median {middle:.3}, largest {:+.3} ({})", errors.len(), worst.0, worst.1);
    assert!(middle <= median && worst.0.abs() <= largest, "{title}: {middle:.3}, {worst:?}");
}

/// Milliseconds of a step of `speculation_steps.csv`.
fn simulated_step(profile: &Profile, is_greedy: bool, fields: &[f64]) -> f64 {
    let [_, most, sequences, verified, context, padded, ..] = fields[..] else { panic!("{fields:?}") };
    let query = most as u32 + 1;
    let graphs = Graphs::chosen(256 * query, 8192, None).with_query(query);
    let text = format!("prompt,output,streams,drafts,greedy\n1,2,1,{most},{}", u8::from(is_greedy));
    let row = rows::parse(&text).unwrap().remove(0);
    let cost = CostModel::new(profile, 256, 8192).with_graphs(graphs.clone());
    let cost = cost.with_speculation(speculation(&row).as_ref());
    let mut load = StepLoad::default();
    let (sequences, mut left) = (sequences as u32, verified as u32);
    for number in 0..sequences {
        let own = left.div_ceil(sequences - number).min(query - 1);
        left -= own;
        load.verify((context / f64::from(sequences)) as u32 - own - 1, own, false);
    }
    load.proposed = sequences;
    if padded > 0.0 {
        let is_uniform = load.verified == (query - 1) * sequences;
        assert_eq!(f64::from(graphs.pad(load.tokens, is_uniform).0), padded, "the graph of {fields:?}");
    }
    (cost.preparation(&load) + cost.gpu(&load).max(cost.launch(&load))).as_secs_f64() * 1e3
}

#[test]
fn steps_that_verify_drafts_take_as_long_as_on_the_gpu() {
    let profile = trio();
    for (is_measured, fitted_within, left_out_within) in
        [(false, (0.08, 0.2), (0.04, 0.2)), (true, (0.03, 0.14), (0.035, 0.24))]
    {
        let mut errors = [Vec::new(), Vec::new()];
        for line in data(STEPS) {
            let fields = numbers(line.split(',').skip(1));
            let [fitted, _, _, _, _, _, _, cpu, ms, _] = fields[..] else { panic!("{line}") };
            let profile = profile.with_cpu_time(if is_measured { cpu } else { 1.0 });
            let simulated = simulated_step(&profile, line.contains(" loop "), &fields);
            errors[usize::from(fitted > 0.0)].push((off(simulated, ms), line.to_owned()));
        }
        let [left_out, fitted] = errors;
        assert!(fitted.len() > 20 && left_out.len() > 40);
        assert_within(&format!("fitted steps, CPU measured: {is_measured}"), fitted, fitted_within);
        assert_within(&format!("other steps, CPU measured: {is_measured}"), left_out, left_out_within);
    }
}

#[test]
fn runs_with_drafts_come_out_as_measured() {
    for (is_measured, without, with) in [(false, (0.03, 0.12), (0.05, 0.17)), (true, (0.025, 0.12), (0.045, 0.18))] {
        let mut rows = rows::parse(ROWS).unwrap();
        if !is_measured {
            rows.iter_mut().for_each(|row| row.cpu = 1.0);
        }
        let cells = setting().play_all(&constants(), &rows).unwrap();
        println!("\n== speculation.csv, CPU measured: {is_measured}\n{}", report::table(&rows, &cells));
        let mut errors = [Vec::new(), Vec::new()];
        for (row, cells) in rows.iter().zip(&cells) {
            // The TTFT of a burst is inaccurate with or without drafts.
            for column in [0, 2, 3] {
                let what = format!("{} {}", row.name, rows::MEASURED[column]);
                errors[usize::from(row.drafts > 0)].push((off(cells[column], row.measured[column].unwrap()), what));
            }
        }
        let [plain, drafting] = errors;
        assert_within(&format!("runs without drafts, CPU measured: {is_measured}"), plain, without);
        assert_within(&format!("runs with drafts, CPU measured: {is_measured}"), drafting, with);
    }
}

#[test]
fn a_mixed_load_with_drafts_comes_out_as_measured() {
    let requests: Vec<Vec<f64>> = data(MIXED).map(|line| numbers(line.split(','))).collect();
    let arrival =
        |fields: &Vec<f64>| Arrival { at: fields[0] / 1e3, prompt: fields[1] as u32, output: fields[2] as u32 };
    let arrivals: Vec<Arrival> = requests.iter().map(arrival).collect();
    let servers = "prompt,output,streams,masked,drafts,accepted,proposed,draft_tokens,cpu\n1,1,1,1,0,,,,0.975\n\
                   1,1,1,1,2,0.499;0.239,0.976,1.959,1.070\n1,1,1,1,4,0.497;0.237;0.117;0.057,0.972,3.811,0.954";
    for (is_measured, within) in [(false, (0.07, 0.12)), (true, (0.06, 0.15))] {
        let mut errors = Vec::new();
        for (mut row, column) in rows::parse(servers).unwrap().into_iter().zip([3, 5, 7]) {
            if !is_measured {
                row.cpu = 1.0;
            }
            // The draw of accepted drafts decides when a request meets a long prompt, so there are
            // five draws.
            let draws: Vec<Vec<Life>> = (0..5).map(|draw| replay_as(&trio(), &row, draw, &arrivals)).collect();
            for short in [true, false] {
                let own: Vec<usize> = (0..requests.len()).filter(|at| (requests[*at][1] < 1000.0) == short).collect();
                let times = [("TTFT", Life::ttft as fn(&Life) -> f64), ("E2EL", Life::e2el)];
                for (place, (what, of)) in times.into_iter().enumerate() {
                    let measured = mean(own.iter().map(|at| requests[*at][column + place]));
                    let simulated = mean(draws.iter().flat_map(|lives| own.iter().map(|at| of(&lives[*at]))));
                    println!("drafts {}, short {short}: {what} {simulated:.0} for {measured:.0}", row.drafts);
                    errors.push((off(simulated, measured), format!("{} short {short} {what}", row.drafts)));
                }
            }
        }
        assert_within(&format!("mixed load, CPU measured: {is_measured}"), errors, within);
    }
}
