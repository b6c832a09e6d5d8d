//! The three arrangements of the same two engines.
//!
//! Each is flags and a configuration as a user would write them, measured on real GPUs
//! (`.github/docs/measurements/tails.md`):
//! - round robin over two engines with vLLM's defaults;
//! - one engine for each side of 5,000 prompt tokens, with at most two long prompts in prefill on
//!   the long side and one on the short side; long prompts without a permit spill to the short
//!   side;
//! - one pool of both engines with one permit each, which was best in three of four columns.
//!
//! The engines' flags suit the arrangement: small prefill chunks next to short requests, small
//! steps on the long side. All other limits are too wide to refuse a request, because no
//! arrangement may win by shedding load.

use std::fmt::Write as _;
use std::net::SocketAddr;

pub(super) const MODEL: &str = "llama-3.1-8b";
pub(super) const PROFILE: &str = "h200-llama-8b";

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Arrangement {
    RoundRobin,
    /// One engine for short and one for long prompts, with permits for long prefills and spill to
    /// the short side.
    Split,
    Permits,
}

/// The arrangements in the order of display. The last one is compared with the first one.
pub(super) const ALL: [Arrangement; 3] = [Arrangement::RoundRobin, Arrangement::Split, Arrangement::Permits];

/// Limits of every pool, as wide as the engine's (900k tokens of KV cache). Beyond 256 sequences,
/// requests wait in the engine as they would without a gateway.
const WIDE: &str = "slots = 1024\ntokens = \"900k\"\nqueue = { length = 4096, timeout = \"2m\", order = \"fifo\" }\n";

impl Arrangement {
    pub(super) fn label(self) -> &'static str {
        match self {
            Self::RoundRobin => "round robin",
            Self::Split => "split by length",
            Self::Permits => "one pool with permits",
        }
    }

    pub(super) fn engine_args(self) -> [Vec<String>; 2] {
        let own: [&[&str]; 2] = match self {
            Self::RoundRobin => [&[], &[]],
            Self::Split => [&["--long-prefill-token-threshold", "512"], &["--max-num-batched-tokens", "2048"]],
            Self::Permits => [&["--long-prefill-token-threshold", "256"]; 2],
        };
        // 256 sequences, as in the measurement on GPUs. vLLM's default for this GPU is larger
        // today.
        own.map(|own| [MODEL, "--max-num-seqs", "256"].iter().chain(own).map(|arg| (*arg).to_owned()).collect())
    }

    pub(super) fn config(self, urls: &[String; 2], listen: SocketAddr, admin: SocketAddr) -> String {
        let mut text =
            format!("[server]\nlisten = \"{listen}\"\nadmin = \"{admin}\"\n\n[[model]]\nname = \"{MODEL}\"\n");
        let [gpu0, gpu1] = [0, 1].map(|index| backend(index, &urls[index]));
        match self {
            Self::RoundRobin => {
                // There are more permits than requests, so no request waits for one. The threshold
                // only divides short from long requests on the live page.
                let own = "policy = \"round_robin\"\nlong_prefix = { threshold = \"5k\", slots = 4096 }\n";
                pool(&mut text, "round_robin", own, &[&gpu0, &gpu1]);
            }
            Self::Split => {
                let short = "prompt_tokens = { max = \"5k\" }\nlong_prefix = { threshold = \"5k\", slots = 1 }\n";
                let long = "prompt_tokens = { min = \"5k\" }\nlong_prefix = { threshold = \"5k\", slots = 2 }\n\
                            spill = [\"short\"]\n";
                pool(&mut text, "short", short, &[&gpu0]);
                pool(&mut text, "long", long, &[&gpu1]);
            }
            Self::Permits => {
                pool(&mut text, "permits", "long_prefix = { threshold = \"5k\", slots = 1 }\n", &[&gpu0, &gpu1]);
            }
        }
        text
    }
}

fn pool(text: &mut String, name: &str, own: &str, backends: &[&str]) {
    let _ = write!(text, "\n[[pool]]\nname = \"{name}\"\nmodels = [\"{MODEL}\"]\n{own}{WIDE}{}", backends.concat());
}

fn backend(index: usize, url: &str) -> String {
    format!("[[pool.backend]]\nname = \"gpu{index}\"\nurl = \"{url}\"\n")
}

#[cfg(test)]
mod tests {
    use super::*;
    use sluice_config::{Config, Surroundings};

    fn config(arrangement: Arrangement) -> toml::Table {
        let urls = ["http://127.0.0.1:9000".to_owned(), "http://127.0.0.1:9001".to_owned()];
        let [listen, admin] = [8080, 8081].map(|port| SocketAddr::from(([127, 0, 0, 1], port)));
        arrangement.config(&urls, listen, admin).parse().unwrap()
    }

    #[test]
    fn every_configuration_is_valid() {
        let urls = ["http://127.0.0.1:9000".to_owned(), "http://127.0.0.1:9001".to_owned()];
        let [listen, admin] = [8080, 8081].map(|port| SocketAddr::from(([127, 0, 0, 1], port)));
        for arrangement in ALL {
            let text = arrangement.config(&urls, listen, admin);
            let around = Surroundings::of_process(std::path::Path::new("."));
            let loaded = Config::parse(&text, "demo", &[], &around);
            assert!(loaded.is_ok(), "{}:\n{}\n{text}", arrangement.label(), loaded.unwrap_err());
        }
    }

    #[test]
    fn round_robin_is_one_pool_of_both_engines() {
        let pools = config(Arrangement::RoundRobin)["pool"].as_array().unwrap().clone();
        assert_eq!(pools.len(), 1);
        assert_eq!(pools[0]["policy"].as_str(), Some("round_robin"));
        assert_eq!(pools[0]["backend"].as_array().unwrap().len(), 2);
    }

    #[test]
    fn the_split_has_two_permits_on_the_long_side_one_on_the_short_side_and_spill_goes_one_way() {
        let pools = config(Arrangement::Split)["pool"].as_array().unwrap().clone();
        let [short, long] = &pools[..] else { panic!("two pools expected") };
        assert_eq!(short["long_prefix"]["slots"].as_integer(), Some(1));
        assert_eq!(long["long_prefix"]["slots"].as_integer(), Some(2));
        assert_eq!(long["spill"][0].as_str(), Some("short"));
        assert!(short.get("spill").is_none());
        let [short, long] = Arrangement::Split.engine_args();
        assert!(short.ends_with(&["--long-prefill-token-threshold".into(), "512".into()]));
        assert!(long.ends_with(&["--max-num-batched-tokens".into(), "2048".into()]));
    }

    #[test]
    fn the_last_one_is_what_the_sample_one_pool_says() {
        let sample: toml::Table = include_str!("../../../config/one-pool.toml").parse().unwrap();
        let (demo, sample) = (config(Arrangement::Permits)["pool"].clone(), sample["pool"].clone());
        assert_eq!(demo.as_array().unwrap().len(), sample.as_array().unwrap().len());
        assert_eq!(demo[0]["long_prefix"], sample[0]["long_prefix"]);
        assert_eq!((demo[0].get("policy"), sample[0].get("policy")), (None, None), "the default");
        for args in Arrangement::Permits.engine_args() {
            assert!(args.ends_with(&["--long-prefill-token-threshold".into(), "256".into()]));
        }
        assert!(
            include_str!("../../../config/one-pool.toml").contains("--port 8001 --long-prefill-token-threshold 256")
        );
    }

    #[test]
    fn other_limits_are_the_same_in_every_arrangement() {
        for arrangement in ALL {
            for pool in config(arrangement)["pool"].as_array().unwrap() {
                assert_eq!(pool["slots"].as_integer(), Some(1024));
                assert_eq!(pool["tokens"].as_str(), Some("900k"));
            }
        }
    }
}
