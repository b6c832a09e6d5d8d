//! Emulates a smaller `max-num-seqs` without a start: the gateway caps engines that run with the
//! largest one.
//!
//! An engine with at most N sequences, and a larger one behind a cap of N, serve the same requests
//! at once. The others wait in the engine or in the gateway, and TTFT and E2EL include both waits.
//! The engines must be equal otherwise. vLLM captures CUDA graphs for steps of up to twice
//! `max-num-seqs`, at most [`MOST_CAPTURED`] tokens. With 512 tokens in a step, engines of 256 and
//! 128 sequences had simulated capacities of 8.2 and 4.3 requests/s, because only the first replays
//! graphs. So a limit is emulated only where both engines capture the same sizes: from 256 on, or
//! with `max-cudagraph-capture-size`. The reserved memory still differs a little. Hence
//! `tune.emulate = true` must ask for it, only the search uses it, and winner and default are
//! confirmed with their real flags.

use crate::error::TuneError;
use crate::file::TuneFile;
use crate::setting::{RestartCost, Setting};
use crate::space::Space;
use sluice_config::ArgValue;
use sluice_lab::Variant;

const SEQS: &str = "vllm.max-num-seqs";
const CAPTURE: &str = "max-cudagraph-capture-size";
/// The largest step, in tokens, for which vLLM captures a graph by default.
pub const MOST_CAPTURED: f64 = 512.0;

/// Replaces a smaller `max-num-seqs` by a cap.
#[derive(Clone, Debug, PartialEq)]
pub struct Emulation {
    /// The key of the cap.
    cap: String,
    /// Whether the file gives all engines their capture size.
    sizes_given: bool,
}

impl Emulation {
    /// The emulation that a file asks for. Makes changes of `max-num-seqs` free in the space.
    ///
    /// # Errors
    /// There are several pools, or the cap is tuned, or `max-num-seqs` is not.
    pub fn new(file: &TuneFile, space: &mut Space) -> Result<Option<Self>, TuneError> {
        if !file.tune.emulate {
            return Ok(None);
        }
        let bad = |why: &str| Err(TuneError::Goal(format!("tune.emulate {why}")));
        let lab = file.scenario.lab(&Variant::default())?;
        let [pool] = &lab.config.pools[..] else {
            return bad("caps the engines of one pool, and there are several; remove it");
        };
        let cap = format!("pool.{}.slots", pool.name);
        if space.dimensions.iter().any(|dimension| dimension.key == cap) {
            return bad(&format!("needs {cap}, which is tuned itself; remove one of them"));
        }
        let Some(seqs) = space.dimensions.iter_mut().find(|dimension| dimension.key == SEQS) else {
            return bad("is for the dimension vllm.max-num-seqs, which is not given; remove it");
        };
        seqs.cost = RestartCost::None;
        let args = || file.scenario.file.engine.iter().map(|engine| &engine.args);
        let sizes_given = args().count() > 0 && args().all(|args| args.contains_key(CAPTURE));
        Ok(Some(Self { cap, sizes_given }))
    }

    /// The setting that runs in place of `setting`: the most sequences that the space allows with
    /// the other values, and a cap. `None` if there is none, or if it would capture other graphs.
    pub(crate) fn stand_in(&self, space: &Space, setting: &Setting) -> Option<Setting> {
        let own = setting.get(SEQS)?;
        let values =
            space.dimensions.iter().filter(|dimension| dimension.key == SEQS).flat_map(|d| d.values.iter().flatten());
        let with = |value| {
            let mut other = setting.clone();
            other.insert(SEQS.to_owned(), value);
            other
        };
        let larger = values.filter(|value| value.number() > own.number()).cloned();
        let most = larger.filter(|value| space.allows(&with(value.clone())));
        let most =
            most.max_by(|one, other| one.number().partial_cmp(&other.number()).unwrap_or(std::cmp::Ordering::Equal))?;
        let is_given = self.sizes_given || setting.contains_key(&format!("vllm.{CAPTURE}"));
        let captured = |value: &ArgValue| value.number().map(|seqs| (2.0 * seqs).min(MOST_CAPTURED));
        if !is_given && captured(&most) != captured(own) {
            return None;
        }
        let mut stand_in = with(most);
        stand_in.insert(self.cap.clone(), own.clone());
        Some(stand_in)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::setting::name;

    fn emulation(tune: &str) -> Result<(Space, Option<Emulation>), TuneError> {
        let text = format!(
            "[[traffic]]\nrate = 1\nclass = [{{ name = \"a\", in = 500, out = 20 }}]\n[tune]\nemulate = true\n{tune}"
        );
        let file = TuneFile::parse(&text, "test", std::path::Path::new("."))?;
        let mut space = Space::new(&file.tune)?;
        let emulation = Emulation::new(&file, &mut space)?;
        Ok((space, emulation))
    }

    #[test]
    fn fewer_sequences_are_a_cap_on_the_most_that_the_other_values_allow() {
        let (space, emulation) = emulation(
            "constraints = [\"vllm.max-num-seqs <= vllm.max-num-batched-tokens\"]\n\
             [[tune.dimension]]\nkey = \"vllm.max-num-seqs\"\nvalues = [64, 256, 1024]\n\
             [[tune.dimension]]\nkey = \"vllm.max-num-batched-tokens\"\nvalues = [512, 2048]\n",
        )
        .unwrap();
        let stand_in = |setting: &Setting| emulation.as_ref().unwrap().stand_in(&space, setting).map(|own| name(&own));
        let names: Vec<Option<String>> = space.settings().unwrap().iter().map(stand_in).collect();
        let capped = |tokens: u32, seqs: u32, cap: u32| {
            Some(format!("pool.all.slots={cap} max-num-batched-tokens={tokens} max-num-seqs={seqs}"))
        };
        // The defaults; then 64 with both (fewer graphs), 256 with both, 1024 with 2048.
        let expected = [None, None, None, None, capped(2048, 1024, 256), None];
        assert_eq!(names, expected);
        assert_eq!(space.dimensions[0].cost, RestartCost::None);
        let given: Setting =
            [("vllm.max-num-seqs", 64), ("vllm.max-num-batched-tokens", 512), ("vllm.max-cudagraph-capture-size", 512)]
                .map(|(key, value)| (key.to_owned(), ArgValue::Int(value)))
                .into();
        let expected = "pool.all.slots=64 max-cudagraph-capture-size=512 max-num-batched-tokens=512 max-num-seqs=256";
        assert_eq!(stand_in(&given).as_deref(), Some(expected));
    }

    #[test]
    fn an_emulation_that_makes_no_sense_is_refused_with_the_reason() {
        for (tune, reason) in [
            ("[[tune.dimension]]\nkey = \"vllm.watermark\"\nvalues = [0.1]\n", "vllm.max-num-seqs, which is not given"),
            (
                "[[tune.dimension]]\nkey = \"pool.all.slots\"\nvalues = [8]\n",
                "needs pool.all.slots, which is tuned itself",
            ),
        ] {
            let error = emulation(tune).unwrap_err().to_string();
            assert!(error.contains(reason), "{error}");
        }
    }
}
