//! `sluice tune`: finds the best settings for a workload and objectives, on simulated or real
//! engines.
//!
//! A file describes the tuning (`sluice_tune::file`). Every trial is written to a journal, so an
//! interrupted tuning continues with `--resume`. Progress goes to stderr, the result to stdout.
//!
//! Exit codes: 0 a setting was found (perhaps the default); 1 none was found, a file could not be
//! written, the machine or the gateway prevents a real engine from running, or the tuning was
//! interrupted; 2 the file is not valid.

mod compat;
mod progress;
mod real;
mod in_place;

use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::Context as _;
use clap::Args;

use progress::Shown;
use real::Ended;
use sluice_admin::AdminClient;
use sluice_core::base::Period;
use sluice_tune::report::{answer, flags, json, page, result_txt, table};
use sluice_tune::setting::name;
use sluice_tune::{
    Budget, Goal, Header, Journal, Laboratory, Method, Plan, Report, Space, TuneError, TuneFile, at_once, tune,
};

/// Find the best settings of vLLM and of the gateway, with proof.
#[derive(Clone, Debug, Args)]
pub struct TuneArgs {
    /// The file with the tuning
    #[arg(value_name = "FILE", required_unless_present = "auto_tune_compat")]
    file: Option<PathBuf>,
    /// Take the environment variables of vLLM's auto_tune.sh in place of FILE, tune real engines,
    /// and write the files of auto_tune.sh
    #[arg(long, conflicts_with_all = ["file", "journal", "engines", "result", "gateway", "subject_to"])]
    auto_tune_compat: bool,
    /// Continue the journal of an earlier run
    #[arg(long)]
    resume: bool,
    /// The journal [default: the name of FILE with the ending .journal, in the working directory]
    #[arg(long, value_name = "FILE")]
    journal: Option<PathBuf>,
    /// Limit at which the search ends: engine time such as 2h, or trials such as 45 (repeatable)
    #[arg(long, value_name = "TIME|TRIALS", value_parser = limit)]
    budget: Vec<Limit>,
    /// Bound that a setting must keep, beside those of FILE, such as "long.e2el.p99 <= 3.3s"
    /// (repeatable)
    #[arg(long, value_name = "BOUND")]
    subject_to: Vec<String>,
    /// Method of the search: race, random, model or auto-tune [default: race up to 60 settings,
    /// else model]
    #[arg(long, value_name = "METHOD")]
    method: Option<Method>,
    /// Do not simulate the settings first: try them in random order, and show no predicted values
    #[arg(long)]
    no_prior: bool,
    /// Start, restart and stop the engines that the configuration of FILE launches, instead of
    /// simulating them
    #[arg(long)]
    real: bool,
    /// Folder for logs and the journal of the real engines [default: the name of FILE with the
    /// ending .engines, in the working directory]
    #[arg(long, value_name = "FOLDER", requires = "real")]
    engines: Option<PathBuf>,
    /// Tune one engine of a running gateway in place, through this admin port: other backends serve
    /// meanwhile
    #[arg(long, value_name = "URL", conflicts_with = "real", requires = "backend")]
    gateway: Option<String>,
    /// The backend to tune in place, such as gpu0 or short/gpu0
    #[arg(long, value_name = "NAME", requires = "gateway")]
    backend: Option<String>,
    /// Admin token of the gateway, if it has one
    #[arg(long, value_name = "TOKEN", env = "SLUICE_ADMIN_TOKEN", hide_env_values = true)]
    token: Option<String>,
    /// Seed of the loads and of the search
    #[arg(long, value_name = "SEED", default_value_t = 1)]
    seed: u64,
    /// Print the settings of the space, and try none
    #[arg(long)]
    list: bool,
    /// Print JSON instead of the table
    #[arg(long)]
    json: bool,
    /// Write the results as an HTML page with plots
    #[arg(long, value_name = "FILE")]
    html: Option<PathBuf>,
    /// Write the result.txt of vLLM's auto_tune.sh
    #[arg(long, value_name = "FILE")]
    result: Option<PathBuf>,
    /// Write the winner as lines for sluice.toml; no lines if the defaults are as good
    #[arg(long, value_name = "FILE")]
    patch: Option<PathBuf>,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Limit {
    Trials(usize),
    Time(Period),
}

fn limit(text: &str) -> Result<Limit, String> {
    match text.parse::<usize>() {
        Ok(0) => Err("0 trials find nothing".to_owned()),
        Ok(trials) => Ok(Limit::Trials(trials)),
        Err(_) => text
            .parse()
            .map(Limit::Time)
            .map_err(|_| "it is neither a number of trials nor a time; write 45 or 2h".to_owned()),
    }
}

/// Runs the command.
pub fn run(args: &TuneArgs) -> ExitCode {
    if !args.auto_tune_compat {
        return run_file(args);
    }
    match of_variables(args) {
        Ok(args) => run_file(&args),
        Err(error) => {
            eprintln!("tune: {error:#}");
            ExitCode::from(2)
        }
    }
}

fn of_variables(args: &TuneArgs) -> anyhow::Result<TuneArgs> {
    let compat = compat::Compat::new(&|name| std::env::var(name).ok())?;
    let tag = jiff::Zoned::now().strftime("%Y_%m_%d_%H_%M").to_string();
    let folder = compat.folder(&tag, args.resume)?;
    let result = folder.join("result.txt");
    // Scripts around auto_tune.sh look for this line.
    print(&format!("RESULT_FILE={}\n", result.display()));
    Ok(TuneArgs {
        file: Some(folder.join("tune.toml")),
        real: true,
        journal: Some(folder.join("journal")),
        engines: Some(folder.join("engines")),
        result: Some(result),
        ..args.clone()
    })
}

impl TuneArgs {
    fn file(&self) -> &Path {
        self.file.as_deref().expect("clap requires the file, or the variables give it")
    }
}

fn run_file(args: &TuneArgs) -> ExitCode {
    match tuned(args) {
        Ok(None) => ExitCode::SUCCESS,
        Ok(Some((report, goal))) => match show(args, &report, &goal) {
            Ok(()) if report.winner.is_some() => ExitCode::SUCCESS,
            Ok(()) => ExitCode::FAILURE,
            Err(error) => {
                eprintln!("tune: {error:#}");
                ExitCode::FAILURE
            }
        },
        Err(error) => {
            eprintln!("tune: {error}");
            if error.is_of_file() { ExitCode::from(2) } else { ExitCode::FAILURE }
        }
    }
}

impl Ended {
    /// Whether the file is at fault. Otherwise the trials are in the journal, and the tuning can
    /// continue.
    fn is_of_file(&self) -> bool {
        use TuneError::{Died, Engine, Folder, JournalWrite, Ports};
        let outside =
            |error: &TuneError| matches!(error, JournalWrite { .. } | Engine(_) | Died(_) | Folder(_) | Ports(_));
        matches!(self, Self::Failed(error) if !outside(error))
    }
}

/// Tunes, or lists the space.
fn tuned(args: &TuneArgs) -> Result<Option<(Report, Goal)>, Ended> {
    let mut file = TuneFile::load(args.file())?;
    file.add_bounds(&args.subject_to);
    let space = Space::new(&file.tune)?;
    let settings = space.settings()?;
    if args.list {
        let lines: String = settings.iter().map(|setting| name(setting) + "\n").collect();
        print(&lines);
        return Ok(None);
    }
    let goal = Goal::new(&file.tune, args.seed)?;
    let mut budget = Budget::default();
    for limit in &args.budget {
        match limit {
            Limit::Trials(trials) => budget.trials = Some(*trials),
            Limit::Time(Period(time)) => budget.time = Some(*time),
        }
    }
    let method = args.method.unwrap_or(Method::for_space(settings.len()));
    // The results of real engines are predicted only if the file describes these engines.
    let is_real = args.real || args.gateway.is_some();
    let described = !is_real || !file.scenario.file.engine.is_empty();
    let prior = (!args.no_prior && described).then(|| file.scenario.clone());
    let bench = args.gateway.as_ref().zip(args.backend.clone()).map(|(url, backend)| {
        let admin = AdminClient::new(url, args.token.as_deref());
        let admin = admin.map_err(|error| TuneError::Deployment(error.to_string()))?;
        Ok::<_, TuneError>(in_place::Bench { admin, backend })
    });
    let bench = bench.transpose()?;
    let plan = Plan { space, goal, method, budget, prior };
    let own = |ending| PathBuf::from(args.file().file_stem().unwrap_or_default()).with_extension(ending);
    let path = args.journal.clone().unwrap_or_else(|| own("journal"));
    let header = Header::new(&file.fingerprint, method.name(), args.seed).of_real_engines(is_real);
    let (mut journal, done) = match args.resume {
        true => Journal::resume(&path, &header)?,
        false => (Journal::create(&path, &header)?, Vec::new()),
    };
    eprintln!("{} settings, method {}, journal {}", settings.len(), method.name(), path.display());
    if !done.is_empty() {
        eprintln!("{} trials are taken from the journal", done.len());
    }
    let mut shown = Shown::new(&plan, settings.len(), done.len(), is_real);
    let report = match (&bench, args.real) {
        (Some(bench), _) => in_place::tuned(&plan, file.scenario, bench.clone(), &mut journal, done, &mut shown)?,
        (None, true) => {
            let folder = args.engines.clone().unwrap_or_else(|| own("engines"));
            real::tuned(&plan, file.scenario, &folder, &mut journal, done, &mut shown)?
        }
        (None, false) => {
            let mut backend = Laboratory::new(file.scenario, plan.goal.measures());
            at_once(tune(&plan, &mut backend, &mut journal, done, |progress| shown.show(&progress)))?
        }
    };
    Ok(Some((report, plan.goal)))
}

fn show(args: &TuneArgs, report: &Report, goal: &Goal) -> anyhow::Result<()> {
    let write = |path: &PathBuf, text: String| std::fs::write(path, text).with_context(|| path.display().to_string());
    if let Some(path) = &args.html {
        let title = args.file().file_stem().map_or_else(String::new, |stem| stem.to_string_lossy().into_owned());
        write(path, page::page(&title, report, goal))?;
    }
    if let Some(path) = &args.result {
        write(path, result_txt::text(report, goal))?;
    }
    if let (Some(path), Some(setting)) = (&args.patch, answer::advised(report, goal)) {
        write(path, flags::patch(&setting))?;
    }
    print(&if args.json { format!("{:#}\n", json::json(report, goal)) } else { table::text(report, goal) });
    Ok(())
}

fn print(text: &str) {
    // A reader that leaves early (`| head`) is no failure.
    let _ = std::io::stdout().lock().write_all(text.as_bytes());
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[test]
    fn a_budget_is_a_number_of_trials_or_a_time() {
        assert_eq!(limit("45"), Ok(Limit::Trials(45)));
        assert_eq!(limit("2h"), Ok(Limit::Time(Period(Duration::from_secs(7200)))));
        assert!(limit("0").is_err() && limit("much").unwrap_err().contains("45 or 2h"));
    }

    #[test]
    fn the_shipped_spaces_are_valid_and_their_defaults_start() {
        use sluice_tune::{Backend as _, Started};
        let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("config/tune");
        let mut names = Vec::new();
        for entry in std::fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            let file = TuneFile::load(&path).unwrap_or_else(|error| panic!("{error}"));
            let space = Space::new(&file.tune).unwrap();
            let settings = space.settings().unwrap();
            let goal = Goal::new(&file.tune, 1).unwrap();
            let mut backend = Laboratory::new(file.scenario.clone(), goal.measures());
            let started =
                at_once(backend.start(&settings[0])).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
            assert!(matches!(started, Started::Up { .. }), "{}: {started:?}", path.display());
            // This would fail if a value of the space did not fit the key.
            for setting in settings.iter().step_by(1 + settings.len() / 20) {
                at_once(backend.start(setting)).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
            }
            names.push(path.file_name().unwrap().to_string_lossy().into_owned());
        }
        names.sort();
        assert_eq!(
            names,
            ["auto_tune.toml", "hand.toml", "lora.toml", "memory.toml", "scheduling.toml", "speculation.toml"]
        );
    }
}
