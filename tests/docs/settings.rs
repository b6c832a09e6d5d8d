//! Blocks of TOML: whole configurations of the gateway, and fragments.
//!
//! A block `toml` is a whole configuration and must be valid. A block `toml fragment` is a part of
//! a configuration: its keys and values must be valid, but may refer to parts that are elsewhere.
//! Blocks `toml lab` and `toml tune` are files of `sluice lab` and `sluice tune`; only their
//! syntax is checked here.

use std::path::Path;

use sluice_config::{Config, Machine, Situation, Surroundings};

use crate::page::{Block, Page};
use crate::{clean, one_complaint, pages, root};

/// 64 hex digits, valid both as a token and as a digest.
const SECRET: &str = "0000000000000000000000000000000000000000000000000000000000000000";

/// Whether a fault of a fragment is allowed: the fragment refers to a part that is elsewhere.
fn is_elsewhere(situation: &Situation) -> bool {
    use Situation as S;
    matches!(
        situation,
        S::NoPool
            | S::NoBackend
            | S::WithoutKubernetes
            | S::UnknownModel { .. }
            | S::NoModelDeclared { .. }
            | S::UnknownPool { .. }
            | S::UnknownBackend { .. }
            | S::UnknownKeyName { .. }
            | S::UnreachableModel { .. }
            | S::Gap { .. }
            | S::FewArms
            | S::WeightsSum { .. }
            | S::TlsWithoutHttps
    )
}

/// Whether the fault is a missing file or folder of an operator, which a page cannot contain.
fn is_file_of_operator(situation: &Situation) -> bool {
    use Situation as S;
    matches!(situation, S::FileMissing { .. } | S::FolderMissing { .. } | S::PemFile { .. } | S::SecretFile { .. })
}

fn faults_of(block: &Block, folder: &Path) -> Vec<String> {
    let around =
        Surroundings { env: &|_| Some(SECRET.to_owned()), folder: folder.to_owned(), machine: Machine::of_process() };
    let fragment = match block.info.strip_prefix("toml").map(str::trim) {
        Some("") => false,
        Some("fragment") => true,
        Some("lab" | "tune") => {
            return block.text.parse::<toml::Table>().err().map(|error| error.to_string()).into_iter().collect();
        }
        _ => return Vec::new(),
    };
    let problems = match Config::parse(&block.text, "block", &[], &around) {
        Ok(_) => return Vec::new(),
        Err(problems) => problems.errors,
    };
    let excused = |situation: &Situation| is_file_of_operator(situation) || (fragment && is_elsewhere(situation));
    let missing_only = |path: &str| fragment && path.ends_with(".name");
    let bad = problems.iter().filter(|found| !excused(found.situation()) && !missing_only(found.path()));
    bad.map(ToString::to_string).collect()
}

fn faults(pages: &[Page], folder: &Path) -> (usize, Vec<String>) {
    let (mut count, mut complaints) = (0, Vec::new());
    for page in pages {
        for block in page.blocks.iter().filter(|block| block.info.starts_with("toml")) {
            count += 1;
            let faults = faults_of(block, folder).into_iter();
            complaints.extend(faults.map(|fault| format!("{}:{}: {fault}", page.path, block.line)));
        }
    }
    (count, complaints)
}

#[test]
fn every_block_of_toml_is_a_valid_configuration_or_a_part_of_one() {
    let (count, complaints) = faults(&pages(), &root().join("config"));
    clean(&complaints);
    assert!(count >= 7, "only {count} blocks were found");
}

#[test]
fn an_invalid_block_is_caught() {
    let check =
        |info: &str, text: &str| faults(&[Page::parse("a.md", &format!("```{info}\n{text}\n```\n"))], Path::new("/")).1;
    let pool = "[[pool]]\nname = \"p\"\n[[pool.backend]]\nname = \"b\"\nurl = \"http://127.0.0.1:8000\"\n";
    clean(&check("toml", pool));
    clean(&check("toml fragment", "[slo]\nttft = \"2s\""));
    one_complaint(&check("toml", "[slo]\nttft = \"2s\""), "there is no pool");
    one_complaint(&check("toml fragment", "[slo]\nttfd = \"2s\""), "ttfd");
    one_complaint(&check("toml fragment", "[slo]\nttft = 2"), "ttft");
    one_complaint(&check("toml lab", "a ="), "a =");
}
