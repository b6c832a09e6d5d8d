//! The accuracy of speculative decoding on `tests/fixtures/h200/speculation*.csv`.
//!
//! The constants were fitted to the steps alone (`speculation_steps.csv`). The runs and the mixed
//! load were left out of the fit; they also need the scheduler, the acceptance and the API server.

use super::*;
use crate::calibrate::play::replay_with;
use crate::machine::Graphs;

const STEPS: &str = include_str!("../../../../tests/fixtures/h200/speculation_steps.csv");
const ROWS: &str = include_str!("../../../../tests/fixtures/h200/speculation.csv");
const MIXED: &str = include_str!("../../../../tests/fixtures/h200/speculation_mixed.csv");

fn fields(line: &str) -> Vec<f64> {
    line.split(',').map(|field| field.parse().unwrap_or(f64::NAN)).collect()
}

fn data(text: &'static str) -> impl Iterator<Item = &'static str> {
    text.lines().filter(|line| !line.starts_with('#')).skip(1)
}

fn off(simulated: f64, measured: f64) -> f64 {
    (simulated / measured - 1.0).abs()
}

#[test]
fn steps_that_verify_drafts_take_as_long_as_on_the_gpu() {
    let mut errors = Vec::new();
    for line in data(STEPS) {
        let [most, sequences, drafts, context, padded, _, ms, _] = fields(line)[..] else { panic!("{line}") };
        let query = most as u32 + 1;
        let graphs = Graphs::chosen(256 * query, 8192, None).with_query(query);
        let row = rows::parse(&format!("prompt,output,streams,drafts\n1,2,1,{most}")).unwrap().remove(0);
        let cost = CostModel::new(&quiet(), 256, 8192).with_graphs(graphs.clone());
        let cost = cost.with_speculation(crate::calibrate::play::speculation(&row).as_ref());
        let mut load = StepLoad::default();
        let (sequences, mut left) = (sequences as u32, drafts as u32);
        for number in 0..sequences {
            let own = left.div_ceil(sequences - number).min(query - 1);
            left -= own;
            load.verify((context / f64::from(sequences)) as u32 - own - 1, own, false);
        }
        (load.proposed, load.searched) = (sequences, context as u64);
        let is_uniform = load.verified == (query - 1) * sequences;
        assert_eq!(f64::from(graphs.pad(load.tokens, is_uniform).0), padded, "the graph of {line}");
        let step = cost.preparation(&load) + cost.gpu(&load).max(cost.launch(&load));
        errors.push((off(step.as_secs_f64() * 1e3, ms), line));
    }
    errors.sort_by(|one, other| one.0.total_cmp(&other.0));
    let (median, worst) = (errors[errors.len() / 2].0, errors[errors.len() - 1]);
    println!("steps: median {median:.3}, worst {worst:?}");
    assert!(errors.len() > 70 && median <= 0.05 && worst.0 <= 0.15, "{median} {worst:?}");
}

#[test]
fn runs_with_drafts_come_out_as_measured() {
    let rows = rows::parse(ROWS).unwrap();
    let cells = setting().play_all(&quiet_constants(), &rows).unwrap();
    println!("\n== speculation.csv\n{}", report::table(&rows, &cells));
    let mut errors = Vec::new();
    for (row, cells) in rows.iter().zip(&cells).filter(|(row, _)| row.drafts > 0) {
        // The TTFT of a burst is rough with or without drafts.
        for column in [0, 2, 3] {
            errors.push((off(cells[column], row.measured[column].unwrap()), format!("{} {}", row.name, column)));
        }
    }
    errors.sort_by(|one, other| one.0.total_cmp(&other.0));
    let (median, worst) = (errors[errors.len() / 2].0, &errors[errors.len() - 1]);
    println!("runs: {} cells, median {median:.3}, worst {worst:?}", errors.len());
    assert!(median <= 0.05 && worst.0 <= 0.15, "{median} {worst:?}");
}

#[test]
fn a_mixed_load_with_drafts_comes_out_as_measured() {
    let requests: Vec<Vec<f64>> = data(MIXED).map(fields).collect();
    let arrival =
        |fields: &Vec<f64>| Arrival { at: fields[0] / 1e3, prompt: fields[1] as u32, output: fields[2] as u32 };
    let arrivals: Vec<Arrival> = requests.iter().map(arrival).collect();
    let mut errors = Vec::new();
    for (drafts, accepted, proposed, column) in
        [(0, &[][..], 1.0, 3), (2, &[0.499, 0.239][..], 0.976, 5), (4, &[0.497, 0.237, 0.117, 0.057][..], 0.972, 7)]
    {
        let lives = replay_with(&quiet(), Server::default(), (drafts, accepted, proposed), &arrivals);
        for short in [true, false] {
            let own: Vec<usize> = (0..requests.len()).filter(|at| (requests[*at][1] < 1000.0) == short).collect();
            let measured = |column: usize| mean(own.iter().map(|at| requests[*at][column]));
            let (ttft, e2el) =
                (mean(own.iter().map(|at| lives[*at].ttft())), mean(own.iter().map(|at| lives[*at].e2el())));
            println!(
                "drafts {drafts}, short {short}: TTFT {ttft:.0} for {:.0}, E2EL {e2el:.0} for {:.0}",
                measured(column),
                measured(column + 1)
            );
            errors.push(off(e2el, measured(column + 1)));
        }
    }
    errors.sort_by(f64::total_cmp);
    assert!(errors[errors.len() / 2] <= 0.05 && errors[errors.len() - 1] <= 0.15, "{errors:?}");
}
