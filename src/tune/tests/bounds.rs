//! Bounds beside an objective: the winner keeps them, and the report names each setting that does
//! not. Settings, service rates and second measures are made up; the noise of runs is 7 %.

use super::*;

/// Service rises with `a`, and so does the second measure: 1 ms times `a`.
fn plan_of(tune: &str, method: Method) -> (TuneFile, Plan) {
    let text = format!("[tune]\nobjective = \"all.ttft.p99\"\nruns = 4\n{tune}\n{}", dimension("a", 6));
    let file = file("", CLASS, &text);
    let plan = plan(&file, Some(method), 3, Budget::default());
    (file, plan)
}

fn report_of(plan: &Plan) -> (Report, Vec<String>) {
    let mut queues = Queues::new(|setting: &setting::Setting| Some(10.0 * of(setting, "a")));
    queues.other = |setting| of(setting, "a");
    let report = tuned(plan, &mut queues);
    let lines = answer::answer(&report, &plan.goal);
    (report, lines)
}

#[test]
fn the_winner_is_the_best_of_those_that_keep_the_bound() {
    for method in [Method::Race, Method::Model] {
        let winner = |tune: &str| {
            let (report, _) = report_of(&plan_of(tune, method).1);
            of(&report.winner.unwrap().setting, "a")
        };
        assert_eq!(winner(""), 6.0, "{}", method.name());
        assert_eq!(winner("subject_to = [\"all.e2el.p99 <= 4.5ms\"]"), 4.0, "{}", method.name());
    }
}

#[test]
fn every_text_names_the_bound_and_the_value_beyond_it() {
    let (file, plan) = plan_of("subject_to = [\"all.e2el.p99 <= 4.5ms\"]", Method::Race);
    let (report, _) = report_of(&plan);
    let text = table::text(&report, &plan.goal);
    assert!(text.contains("all.e2el.p99 <= 4.50 ms"), "{text}");
    let beyond = report.trials.iter().filter(|trial| matches!(trial.outcome, Outcome::Exceeds { .. }));
    let beyond: Vec<f64> = beyond.map(|trial| of(&trial.setting, "a")).collect();
    assert!(!beyond.is_empty() && beyond.iter().all(|a| *a > 4.5), "{beyond:?}");
    assert!(text.contains("out of bounds") && text.contains("is beyond the bound"), "{text}");
    assert_eq!(json::json(&report, &plan.goal)["subject_to"][0], "all.e2el.p99 <= 4.50 ms");
    // A journal keeps the outcome. With a bound of the command line, the tuning is another one.
    let trial = report.trials.iter().find(|trial| matches!(trial.outcome, Outcome::Exceeds { .. })).unwrap();
    let again: Trial = serde_json::from_str(&serde_json::to_string(trial).unwrap()).unwrap();
    assert_eq!(again, *trial);
    let mut other = file.clone();
    other.add_bounds(&["all.ttft.p99 <= 1s".to_owned()]);
    assert!(other.fingerprint != file.fingerprint && other.tune.subject_to.len() == 2);
}

#[test]
fn without_a_setting_within_the_bounds_the_nearest_is_named() {
    let (_, plan) = plan_of("subject_to = [\"all.e2el.p99 <= 0.5ms\"]", Method::Race);
    let (report, lines) = report_of(&plan);
    assert!(report.winner.is_none());
    assert!(lines[0].contains("no setting keeps the bounds. The nearest is a=1"), "{lines:?}");
    // The default is the setting `a = 2` of this backend.
    let (_, plan) = plan_of("subject_to = [\"all.e2el.p99 <= 1.5ms\"]", Method::Race);
    let (report, lines) = report_of(&plan);
    assert_eq!(of(&report.winner.unwrap().setting, "a"), 1.0);
    assert!(lines.iter().any(|line| line.starts_with("the defaults do not qualify: ")), "{lines:?}");
}

#[test]
fn bounds_need_a_measure_as_the_objective() {
    let text = "[tune]\nsubject_to = [\"all.e2el.p99 <= 1s\"]\n[[tune.dimension]]\nkey = \"vllm.a\"\nvalues = [1]";
    let error = Goal::new(&file("", CLASS, text).tune, 1).unwrap_err().to_string();
    assert!(error.starts_with("tune.subject_to is for a measure as the objective"), "{error}");
    let many = format!("objective = \"all.ttft.p99\"\nsubject_to = [{}]", "\"all.e2el.p99 <= 1s\", ".repeat(9));
    let error = Goal::new(&file("", CLASS, &format!("[tune]\n{many}")).tune, 1).unwrap_err().to_string();
    assert!(error.contains("more than 8 bounds"), "{error}");
}
