//! `sluice tune --auto-tune-compat`: a tuning from the environment variables of vLLM's
//! `auto_tune.sh`.
//!
//! | variable | default | use |
//! |---|---|---|
//! | `BASE` | the working directory | results go to `BASE/auto-benchmark/TAG` |
//! | `MODEL` | meta-llama/Llama-3.1-8B-Instruct | argument of `vllm serve` |
//! | `TP`, `DOWNLOAD_DIR`, `MAX_MODEL_LEN` | 1, none, 4096 | flags of the server |
//! | `INPUT_LEN`, `OUTPUT_LEN` | 4000, 16 | tokens of each request |
//! | `MIN_CACHE_HIT_PCT` | 0 | percentage of each prompt that all prompts share |
//! | `MAX_LATENCY_ALLOWED_MS` | none | bound on E2EL for 99 % of the requests |
//! | `NUM_SEQS_LIST` | 128 256 | the grid |
//! | `NUM_BATCHED_TOKENS_LIST` | 512 1024 2048 4096 | the grid |
//! | `SYSTEM`, `VLLM_LOGGING_LEVEL` | | not used here; the latter reaches the server |
//!
//! TAG is the time to the minute. Without a bound, the throughput is optimised. The winner is not
//! profiled. The other differences mend faults of the script:
//!
//! - No process is ended by name. The port is free and not always 8004.
//! - A start may last while the log shows progress. A server that does not start is not measured.
//! - Memory is found under load and with the largest values of the lists.
//! - The default flags are a row. The winner has the highest rate within the bound.
//! - Rates are not whole numbers, and are certified with enough requests.
//! - Two runs of one minute get two folders. The exit status is 1 if no setting was found.

use std::path::{Path, PathBuf};

use anyhow::{Context as _, ensure};

/// The value of the variable, in ms, that means no bound.
const NO_BOUND: f64 = 1e11;
/// Most runs in one minute.
const MOST: u32 = 100;

#[derive(Clone, Debug, PartialEq)]
pub(super) struct Compat {
    base: PathBuf,
    text: String,
}

impl Compat {
    pub(super) fn new(env: &dyn Fn(&str) -> Option<String>) -> anyhow::Result<Self> {
        let get = |name: &str, default: &str| {
            env(name).filter(|value| !value.trim().is_empty()).unwrap_or_else(|| default.to_owned())
        };
        let number = |name: &str, default: &str| -> anyhow::Result<f64> {
            let text = get(name, default);
            let value: f64 = text.trim().parse().with_context(|| format!("{name}={text}: it is not a number"))?;
            ensure!(value.is_finite() && value >= 0.0, "{name}={text}: it is negative, or not finite");
            Ok(value)
        };
        let list = |name: &str, default: &str| -> anyhow::Result<Vec<u64>> {
            let text = get(name, default);
            let values = text.split_whitespace().map(str::parse).collect::<Result<Vec<u64>, _>>();
            let values = values.with_context(|| format!("{name}={text}: write whole numbers with spaces between"))?;
            ensure!(!values.is_empty(), "{name} is empty");
            Ok(values)
        };
        let (model, download) = (get("MODEL", "meta-llama/Llama-3.1-8B-Instruct"), get("DOWNLOAD_DIR", ""));
        let (input, output) = (number("INPUT_LEN", "4000")?, number("OUTPUT_LEN", "16")?);
        let (longest, tp) = (number("MAX_MODEL_LEN", "4096")?, number("TP", "1")?);
        ensure!(
            input + output <= longest,
            "INPUT_LEN + OUTPUT_LEN = {} is more than MAX_MODEL_LEN = {longest}: raise MAX_MODEL_LEN, or shorten them",
            input + output
        );
        let (bound, hit) = (number("MAX_LATENCY_ALLOWED_MS", "1e11")?, number("MIN_CACHE_HIT_PCT", "0")?);
        ensure!(hit < 100.0, "MIN_CACHE_HIT_PCT={hit}: it is below 100");
        let (seqs, tokens) =
            (list("NUM_SEQS_LIST", "128 256")?, list("NUM_BATCHED_TOKENS_LIST", "512 1024 2048 4096")?);
        let mut args = format!("tensor-parallel-size = {tp}, max-model-len = {longest}, load-format = \"dummy\"");
        if !download.is_empty() {
            args += &format!(", download-dir = {download:?}");
        }
        let gateway = format!(
            "[[model]]\nname = {model:?}\n[[pool]]\nname = \"vllm\"\n[[pool.backend]]\nname = \"engine\"\n[pool.backend.launch]\n\
             command = [\"vllm\", \"serve\", {model:?}]\nargs = {{ {args}, enable-prefix-caching = true }}\n"
        );
        let bounded = bound < NO_BOUND;
        let load = if bounded { "rate = 1" } else { "concurrency = 1000\nrequests = 1000" };
        let slo = if bounded { format!(", e2el = \"{bound}ms\"") } else { String::new() };
        let share = if hit > 0.0 { format!(", prefix_share = {}", hit / 100.0) } else { String::new() };
        let objective = if bounded { "rate\"\nattainment = 99" } else { "all.rate\"\nruns = 2" };
        let text = format!(
            "gateway = '''\n{gateway}'''\n[[traffic]]\n{load}\n\
             class = [{{ name = \"all\", in = {input}, out = {output}{share}{slo} }}]\n\
             [tune]\nobjective = \"{objective}\n\
             constraints = [\"vllm.max-num-seqs <= vllm.max-num-batched-tokens\"]\n\
             [tune.memory]\nfrom = 0.9\nto = 0.98\nstep = 0.01\n\
             [[tune.dimension]]\nkey = \"vllm.max-num-seqs\"\nvalues = {seqs:?}\n\
             [[tune.dimension]]\nkey = \"vllm.max-num-batched-tokens\"\nvalues = {tokens:?}\n"
        );
        Ok(Self { base: PathBuf::from(get("BASE", ".")), text })
    }

    /// Makes the folder of this run and writes the tuning there, as `tune.toml`. With `resume`,
    /// returns the newest folder instead.
    pub(super) fn folder(&self, tag: &str, resume: bool) -> anyhow::Result<PathBuf> {
        let all = self.base.join("auto-benchmark");
        if resume {
            return newest(&all).with_context(|| format!("{}: no run to go on with", all.display()));
        }
        std::fs::create_dir_all(&all).with_context(|| all.display().to_string())?;
        for number in 1..=MOST {
            let folder = all.join(if number == 1 { tag.to_owned() } else { format!("{tag}-{number}") });
            match std::fs::create_dir(&folder) {
                Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists => {}
                made => {
                    made.with_context(|| folder.display().to_string())?;
                    let file = folder.join("tune.toml");
                    std::fs::write(&file, &self.text).with_context(|| file.display().to_string())?;
                    return Ok(folder);
                }
            }
        }
        anyhow::bail!("{}: {MOST} runs of this minute already", all.display())
    }
}

/// The folder of the latest run, which has the last name, because tags sort by time.
fn newest(all: &Path) -> Option<PathBuf> {
    let folders = std::fs::read_dir(all).ok()?.flatten().map(|entry| entry.path());
    folders.filter(|folder| folder.join("tune.toml").is_file()).max()
}

#[cfg(test)]
mod tests {
    use super::*;
    use sluice_tune::{Goal, Objective, Space, TuneFile};

    fn compat(variables: &[(&str, &str)]) -> anyhow::Result<Compat> {
        let found =
            |name: &str| variables.iter().find(|(other, _)| *other == name).map(|(_, value)| (*value).to_owned());
        Compat::new(&found)
    }

    #[test]
    fn the_variables_of_the_script_become_a_valid_tuning() {
        let bounded = [("MAX_LATENCY_ALLOWED_MS", "500"), ("MIN_CACHE_HIT_PCT", "60"), ("NUM_SEQS_LIST", "64 8192")];
        for (variables, settings, rate) in [(&[][..], 9, false), (&bounded[..], 5, true)] {
            let text = compat(variables).unwrap().text;
            let file =
                TuneFile::parse(&text, "compat", Path::new(".")).unwrap_or_else(|error| panic!("{error}\n{text}"));
            assert_eq!(Space::new(&file.tune).unwrap().settings().unwrap().len(), settings, "{text}");
            let objective = Goal::new(&file.tune, 1).unwrap().objective;
            assert_eq!(matches!(objective, Objective::Rate { .. }), rate);
            assert!(text.contains("command = [\"vllm\", \"serve\", \"meta-llama/Llama-3.1-8B-Instruct\"]"), "{text}");
        }
    }

    #[test]
    fn values_that_make_no_sense_are_refused_with_their_name() {
        for (name, value) in [
            ("INPUT_LEN", "5000"),
            ("TP", "two"),
            ("NUM_SEQS_LIST", "8,16"),
            ("MIN_CACHE_HIT_PCT", "100"),
            ("OUTPUT_LEN", "-1"),
        ] {
            let error = format!("{:#}", compat(&[(name, value)]).unwrap_err());
            assert!(error.contains(name), "{error}");
        }
    }

    #[test]
    fn two_runs_of_one_minute_get_two_folders_and_the_newest_is_resumed() {
        let around = tempfile::tempdir().unwrap();
        let compat = compat(&[("BASE", around.path().to_str().unwrap())]).unwrap();
        assert!(compat.folder("x", true).unwrap_err().to_string().contains("no run to go on with"));
        let folders = [1, 2].map(|_| compat.folder("2026_01_01_00_00", false).unwrap());
        assert!(folders[0] != folders[1] && folders.iter().all(|folder| folder.join("tune.toml").is_file()));
        assert_eq!(compat.folder("y", true).unwrap(), folders[1]);
    }
}
