//! Prints and saves results.
//!
//! A run is saved as soon as it is complete, so an interrupted sweep loses nothing. File names
//! follow `vllm bench serve`: label or backend, load, model, time. A sweep is one file. Results go
//! to stdout, notes to stderr.

use std::fs::File;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::Context as _;
use serde_json::Value;

use super::args::{BenchArgs, OutputArgs};
use super::plan::Setup;
use crate::cli::terminal::{fitted, table_width};
use sluice_bench::report::table;
use sluice_bench::result::csv::RequestCsv;
use sluice_bench::result::file;
use sluice_bench::{Extent, Metrics, RunPlan, RunResult};

pub(super) struct Output<'a> {
    args: &'a OutputArgs,
    varied: Option<&'static str>,
    path: Option<PathBuf>,
    results: Vec<(String, RunResult)>,
    csv: Option<RequestCsv<File>>,
}

impl<'a> Output<'a> {
    pub(super) fn new(args: &'a BenchArgs, setup: &Setup, sweep: bool) -> anyhow::Result<Self> {
        let output = &args.output;
        let wanted =
            output.save_result || output.append_result || output.save_detailed || output.result_filename.is_some();
        let path = wanted.then(|| {
            let name = output.result_filename.clone().unwrap_or_else(|| file_name(args, &setup.plan, &now()).into());
            output.result_dir.as_ref().map_or(name.clone(), |folder| folder.join(name))
        });
        for path in path.iter().chain(&output.html) {
            let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
            std::fs::create_dir_all(folder).with_context(|| format!("cannot write {}", path.display()))?;
        }
        let open_csv = |path: &PathBuf| -> anyhow::Result<RequestCsv<File>> {
            let context = || format!("cannot write {}", path.display());
            RequestCsv::new(File::create(path).with_context(context)?).with_context(context)
        };
        let csv = output.csv.as_ref().map(open_csv).transpose()?;
        Ok(Self { args: output, varied: sweep.then(|| setup.varied()), path, results: Vec::new(), csv })
    }

    /// Saves, prints and keeps a result.
    ///
    /// # Errors
    /// The result cannot be saved. It is printed and kept nevertheless.
    pub(super) fn add_run(&mut self, name: &str, result: RunResult) -> anyhow::Result<()> {
        let first = self.results.is_empty();
        self.results.push((name.to_owned(), result));
        let Some((name, result)) = self.results.last() else { return Ok(()) };
        if !self.args.json {
            match self.varied {
                Some(varied) => {
                    print(&fitted(&format!("\n{varied} {name}\n{}", table::table(result, Some(table_width())))))?;
                }
                None => print(&fitted(&table::table(result, Some(table_width()))))?,
            }
        }
        if let Some(out) = &mut self.csv {
            out.write_run(name, result).context("cannot write to the CSV file")?;
        }
        if let Some(path) = &self.path {
            file::save(result, path, self.args.save_detailed, self.args.append_result || !first)?;
            if !self.args.save_detailed && file::gaps(result) > file::MAX_GAPS {
                eprintln!(
                    "note: gaps between tokens are not saved, because there are over {}; --save-detailed saves them",
                    file::MAX_GAPS
                );
            }
        }
        Ok(())
    }

    pub(super) fn finish(self) -> anyhow::Result<ExitCode> {
        if self.results.is_empty() {
            return Ok(ExitCode::FAILURE);
        }
        if self.args.json {
            let mut all: Vec<Value> =
                self.results.iter().map(|(_, result)| brief(result, self.args.save_detailed)).collect();
            match self.varied {
                None => print(&format!("{:#}\n", all.pop().unwrap_or_default()))?,
                Some(_) => print(&format!("{:#}\n", Value::Array(all)))?,
            }
        } else if let Some(varied) = self.varied {
            print(&format!("\n{}\n", table::sweep_table(varied, &self.results).text(Some(table_width()))))?;
        }
        if let Some(path) = &self.path {
            eprintln!("saved {}", path.display());
        }
        if let Some(path) = &self.args.html {
            let runs: Vec<RunResult> = self.results.iter().map(|(_, result)| result.clone()).collect();
            super::tools::page(&runs, path)?;
        }
        let answered = self.results.iter().any(|(_, result)| Metrics::of(result).completed > 0);
        let partial = self.results.iter().any(|(_, result)| result.partial);
        Ok(if answered && !partial { ExitCode::SUCCESS } else { ExitCode::FAILURE })
    }
}

fn brief(result: &RunResult, detailed: bool) -> Value {
    let mut json = file::to_json(result, detailed);
    if let Some(top) = json.as_object_mut().filter(|_| !detailed) {
        file::brief_arrays(result).keys().for_each(|key| drop(top.remove(key)));
    }
    if let Some(own) = json.get_mut("sluice").and_then(Value::as_object_mut) {
        own.remove("requests");
    }
    json
}

fn print(text: &str) -> anyhow::Result<()> {
    let mut out = std::io::stdout().lock();
    out.write_all(text.as_bytes()).and_then(|()| out.flush()).context("cannot write to stdout")
}

fn now() -> String {
    jiff::Timestamp::now().strftime("%Y%m%d-%H%M%S").to_string()
}

/// The name of a result's file: `openai-8qps-concurrency4-model-20260102-030405.json`.
fn file_name(args: &BenchArgs, plan: &RunPlan, time: &str) -> String {
    let label = args.output.label.as_deref().unwrap_or(args.server.backend.name());
    let load = match (&args.load.ramp_up_strategy, args.load.request_rate.finite()) {
        (Some(strategy), _) => {
            let [start, end] = [args.load.ramp_up_start_rps, args.load.ramp_up_end_rps].map(Option::unwrap_or_default);
            format!("ramp-up-{}-{start}qps-{end}qps", format!("{strategy:?}").to_lowercase())
        }
        (None, Some(rate)) => format!("{rate}qps"),
        (None, None) => "infqps".to_owned(),
    };
    let concurrency = args.load.max_concurrency.map(|most| format!("-concurrency{most}")).unwrap_or_default();
    let model = plan.workload.model.rsplit('/').next().unwrap_or("model").to_owned();
    format!("{label}-{load}{concurrency}-{model}-{time}.json")
}

pub(super) fn dry_run(setup: &Setup, runs: &[(String, RunPlan)]) -> anyhow::Result<()> {
    for (name, plan) in runs {
        let schedule = plan.arrival.schedule(plan.extent, plan.workload.seed)?;
        let count = match (plan.extent, schedule.len()) {
            (Extent::Requests(count), 0) => count,
            (_, due) => due as u64,
        };
        let sample = count.clamp(1, 1_000);
        let requests: Vec<_> = (0..sample).map(|ordinal| plan.workload.request(ordinal)).collect();
        let mean = |of: &dyn Fn(&sluice_bench::load::workload::LoadRequest) -> u32| {
            requests.iter().map(|request| f64::from(of(request))).sum::<f64>() / sample as f64
        };
        let until =
            schedule.last().map(|last| format!(", the last due at {:.1} s", last.as_secs_f64())).unwrap_or_default();
        let title = if name.is_empty() { String::new() } else { format!("{} {name}: ", setup.varied()) };
        let what = if plan.sessions.is_some() { "conversations" } else { "requests" };
        let count = if count == 0 { "as many as fit".to_owned() } else { count.to_string() };
        print(&format!(
            "{title}{count} {what}, {} arrivals{until}; of the first {sample}: {:.1} prompt tokens and {:.1} output tokens \
             on average\n",
            plan.arrival.name(),
            mean(&|request| request.prompt_tokens),
            mean(&|request| request.output_tokens),
        ))?;
    }
    let first = runs.first().map(|(_, plan)| plan.workload.request(0).body).unwrap_or_default();
    let text = String::from_utf8_lossy(&first);
    let cut: String = text.chars().take(300).collect();
    print(&format!("first body ({} bytes): {cut}{}\n", first.len(), if cut.len() < text.len() { " .." } else { "" }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_is_named_by_what_was_done() {
        #[derive(clap::Parser)]
        struct Parsed {
            #[command(flatten)]
            bench: BenchArgs,
        }
        let name = |flags: &[&str]| {
            let parsed = <Parsed as clap::Parser>::parse_from([&["bench"], flags].concat());
            let workload = sluice_bench::Workload::of_classes("org/model", vec![], 0);
            let plan = RunPlan::new(workload, sluice_bench::Arrival::AtOnce, Extent::Requests(1));
            file_name(&parsed.bench, &plan, "T")
        };
        assert_eq!(name(&["--request-rate", "8", "--max-concurrency", "4"]), "openai-8qps-concurrency4-model-T.json");
        assert_eq!(name(&["--label", "x"]), "x-infqps-model-T.json");
        let ramp = ["--ramp-up-strategy", "linear", "--ramp-up-start-rps", "1", "--ramp-up-end-rps", "9"];
        assert_eq!(name(&ramp), "openai-ramp-up-linear-1qps-9qps-model-T.json");
    }
}
