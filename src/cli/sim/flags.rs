//! The simulator's flags, taken out of the argv before vLLM's flags are read.
//!
//! They may appear anywhere among vLLM's flags, as `--sim-name value` or `--sim-name=value`. A bad
//! flag is refused before anything starts.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::anyhow;

use sluice_core::engines::EngineKind;
use sluice_core::vllm::version::Version;
use sluice_sim::{Constants, Fault, Gpu, Layout, Model, Profile};

const GPU: &str = "h200";
/// The model for names that match no built-in one.
const MODEL: &str = "llama-3.1-8b";
/// Real time of a cold start without `--sim-startup`, seconds.
const STARTUP: f64 = 1.0;

#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Startup {
    /// A cold start takes this long in real time; a warm start takes proportionally less.
    Cold(Duration),
    /// A start takes as long as on the GPU.
    Real,
}

/// The values of the flags. The header of [`super`] has the meaning and the defaults.
#[derive(Clone, Debug)]
pub(super) struct SimFlags {
    pub(super) gpu: String,
    pub(super) model: Option<String>,
    pub(super) host: Option<String>,
    pub(super) version: Version,
    pub(super) speed: f64,
    pub(super) seed: u64,
    pub(super) startup: Startup,
    pub(super) device: Option<PathBuf>,
    pub(super) orphan: Duration,
    pub(super) wake: Duration,
    pub(super) acceptance: Vec<f64>,
    pub(super) fault: Option<Fault>,
    pub(super) engine: EngineKind,
}

impl Default for SimFlags {
    fn default() -> Self {
        Self {
            gpu: GPU.to_owned(),
            model: None,
            host: None,
            version: Version::COMPARED,
            speed: 1.0,
            seed: 0,
            startup: Startup::Cold(Duration::from_secs_f64(STARTUP)),
            device: None,
            orphan: Duration::from_secs(300),
            wake: Duration::ZERO,
            acceptance: Vec::new(),
            fault: None,
            engine: EngineKind::Vllm,
        }
    }
}

impl SimFlags {
    /// The profile of the model in `--sim-model`, else of the model that the served name refers to,
    /// else of an 8B model.
    pub(super) fn profile(&self, served: &str) -> anyhow::Result<Profile> {
        let gpu = Gpu::load(&self.gpu).map_err(|error| anyhow!("argument --sim-gpu: {error}"))?;
        let model = match &self.model {
            Some(name) => Model::load(name).map_err(|error| anyhow!("argument --sim-model: {error}"))?,
            None => match Model::of_served(served) {
                Some(model) => model,
                None => Model::load(MODEL)?,
            },
        };
        let constants = match &self.host {
            Some(name) => Constants::on_host(name).map_err(|error| anyhow!("argument --sim-host: {error}"))?,
            None => Constants::fitted(),
        };
        Ok(Profile::new(gpu, model, Layout::default(), &constants)?)
    }
}

pub(super) fn split(args: Vec<String>) -> anyhow::Result<(SimFlags, Vec<String>)> {
    let mut flags = SimFlags::default();
    let mut rest = Vec::new();
    let mut args = args.into_iter();
    while let Some(arg) = args.next() {
        if !arg.starts_with("--sim-") {
            rest.push(arg);
            continue;
        }
        let (name, attached) = match arg.split_once('=') {
            Some((name, value)) => (name.to_owned(), Some(value.to_owned())),
            None => (arg, None),
        };
        let value =
            attached.or_else(|| args.next()).ok_or_else(|| anyhow!("argument {name}: expected one argument"))?;
        let invalid = || anyhow!("argument {name}: invalid value: '{value}'");
        let number = |least: f64| {
            value.parse::<f64>().ok().filter(|x| x.is_finite() && *x >= least && *x <= 1e6).ok_or_else(invalid)
        };
        match name.as_str() {
            "--sim-gpu" => flags.gpu = value.clone(),
            "--sim-model" => flags.model = Some(value.clone()),
            "--sim-host" => flags.host = Some(value.clone()),
            "--sim-profile" => match value.as_str() {
                "h200-llama-8b" => (flags.gpu, flags.model) = (GPU.to_owned(), Some(MODEL.to_owned())),
                _ => {
                    return Err(anyhow!(
                        "argument {name}: unknown '{value}'; it is h200-llama-8b, or use --sim-gpu and --sim-model"
                    ));
                }
            },
            "--sim-vllm-version" => {
                let version: Version = value.parse().map_err(|error| anyhow!("argument {name}: {error}"))?;
                if version < Version::OLDEST {
                    return Err(anyhow!(
                        "argument {name}: {version} is not simulated; the oldest is {}",
                        Version::OLDEST
                    ));
                }
                flags.version = version;
            }
            "--sim-engine" => {
                let known = [EngineKind::Vllm, EngineKind::Sglang].into_iter().find(|kind| kind.label() == value);
                flags.engine =
                    known.ok_or_else(|| anyhow!("argument {name}: invalid choice: '{value}'; it is vllm or sglang"))?;
            }
            "--sim-speed" => flags.speed = number(1e-3)?,
            "--sim-seed" => flags.seed = value.parse().map_err(|_| invalid())?,
            "--sim-startup" if value == "real" => flags.startup = Startup::Real,
            "--sim-startup" => flags.startup = Startup::Cold(Duration::from_secs_f64(number(0.0)?)),
            "--sim-device" => flags.device = Some(value.clone().into()),
            "--sim-orphan" => flags.orphan = Duration::from_secs_f64(number(0.0)?),
            "--sim-wake" => flags.wake = Duration::from_secs_f64(number(0.0)?),
            "--sim-acceptance" => {
                let rates: Option<Vec<f64>> = value.split(',').map(|rate| rate.trim().parse().ok()).collect();
                flags.acceptance = rates.ok_or_else(invalid)?;
            }
            "--sim-fault" => flags.fault = Some(value.parse().map_err(|error| anyhow!("argument {name}: {error}"))?),
            _ => return Err(anyhow!("unrecognized arguments: {name}")),
        }
    }
    Ok((flags, rest))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn split_of(args: &[&str]) -> anyhow::Result<(SimFlags, Vec<String>)> {
        split(args.iter().map(|arg| (*arg).to_owned()).collect())
    }

    #[test]
    fn flags_of_the_simulator_are_taken_out() {
        let (flags, rest) = split_of(&["m", "--sim-speed", "2.5", "--port", "1", "--sim-seed=7"]).unwrap();
        assert_eq!((flags.speed, flags.seed, rest), (2.5, 7, vec!["m".into(), "--port".into(), "1".into()]));
        assert_eq!(split_of(&["--sim-startup", "real"]).unwrap().0.startup, Startup::Real);
    }

    #[test]
    fn wrong_flags_of_the_simulator_are_named() {
        for wrong in [
            &["--sim-speed", "0"][..],
            &["--sim-what", "1"],
            &["--sim-seed"],
            &["--sim-fault", "x"],
            &["--sim-engine", "triton"],
            &["--sim-vllm-version", "new"],
            &["--sim-vllm-version", "0.3"],
            &["--sim-profile", "b300"],
        ] {
            assert!(split_of(wrong).unwrap_err().to_string().contains(wrong[0]), "{wrong:?}");
        }
    }

    #[test]
    fn the_served_name_chooses_the_model() {
        let layers = |flags: SimFlags, served: &str| flags.profile(served).unwrap().shape.layers;
        assert_eq!(layers(SimFlags::default(), "meta-llama/Llama-3.2-1B-Instruct"), 16);
        assert_eq!(layers(SimFlags::default(), "m"), 32);
        let unknown = SimFlags { gpu: "b300".into(), ..SimFlags::default() };
        assert!(unknown.profile("m").unwrap_err().to_string().contains("--sim-gpu"));
        let launch = |host: Option<&str>| {
            let flags = SimFlags { host: host.map(str::to_owned), ..SimFlags::default() };
            flags.profile("m").map(|profile| profile.constants.host.launch_layer_us)
        };
        assert!(launch(Some("quiet")).unwrap() < 0.6 * launch(None).unwrap());
        let error = launch(Some("mainframe")).unwrap_err().to_string();
        assert!(error.contains("--sim-host: unknown host 'mainframe'; built in: busy, pair, quiet, trio"), "{error}");
    }
}
