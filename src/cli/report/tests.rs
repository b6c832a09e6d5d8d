//! Tests of `sluice report`, from files to a page and a summary.
//!
//! The records are generated: a quiet minute, then a crowded one.

use clap::Parser as _;

use super::*;
use crate::cli::{Cli, Command};

fn records(folder: &Path) -> String {
    let path = folder.join("records.jsonl");
    let line = |number: u32| {
        let (minute, second) = (number / 60, number % 60);
        let (ttft, met) = if minute == 0 { (40, true) } else { (900, false) };
        format!(
            "{{\"version\":1,\"time\":\"2026-01-02T03:{minute:02}:{second:02}Z\",\"route\":\"completions\",\"model\":\"m\",\
             \"home\":\"all\",\"pool\":\"all\",\"backend\":\"gpu0\",\"stream\":true,\"total_ms\":990,\"queue_ms\":1,\
             \"ttft_ms\":{ttft},\"backend_ttft_ms\":30,\"e2el_ms\":980,\"prompt_tokens\":900,\"completion_tokens\":20,\
             \"outcome\":\"completed\",\"slo_met\":{met},\"prompt_bytes\":3600,\"prefix\":[\"0a\",\"0b\"]}}\n"
        )
    };
    std::fs::write(&path, (0..120).map(line).collect::<String>()).unwrap();
    path.to_str().unwrap().to_owned()
}

fn made(words: &[&str]) -> anyhow::Result<Made> {
    match Cli::try_parse_from(["sluice", "report"].iter().chain(words)).unwrap().command {
        Command::Report(args) => make(&args),
        _ => panic!("another command"),
    }
}

#[test]
fn a_day_becomes_a_page_that_says_how_to_see_what_would_have_helped() {
    let folder = tempfile::tempdir().unwrap();
    let Made { page, summary } = made(&[&records(folder.path())]).unwrap();
    for part in ["Requests from 2026-01-02 02:59:59", "Where TTFT went", "The slowest requests", "--gpu h200"] {
        assert!(page.contains(part), "{part}");
    }
    assert!(!page.contains("<script") && !page.contains("src=\"") && !page.contains("href=\""));
    assert!(summary.contains("60 of 120 requests failed or missed an objective"), "{summary}");
    let longest = wrapped(&summary, COLUMNS).lines().map(|line| line.chars().count()).max();
    assert!(longest <= Some(COLUMNS + folder.path().display().to_string().len()), "{summary}");
}

#[test]
fn the_worst_period_is_simulated_with_other_settings() {
    let folder = tempfile::tempdir().unwrap();
    let Made { page, summary } = made(&[&records(folder.path()), "--gpu", "h200", "--model", "llama-3.1-8b"]).unwrap();
    for part in [
        "as it was, simulated",
        "one prefill permit",
        "long-prefill-token-threshold 256",
        "1 more engine",
        "60 of them",
        "and 0.0 % fail",
    ] {
        assert!(page.contains(part), "{part}");
    }
    // An engine with one request each second is never that slow.
    assert!(summary.contains("measured was 900 ms. That is far apart, so do not rely on the rest"), "{summary}");
}

#[test]
fn the_configuration_says_which_engines_are_simulated() {
    let folder = tempfile::tempdir().unwrap();
    let config = folder.path().join("sluice.toml");
    let text = "[[model]]\nname = \"m\"\n[[pool]]\nname = \"all\"\nmodels = [\"m\"]\n\
                [[pool.backend]]\nname = \"gpu0\"\nurl = \"http://10.0.0.1:8000\"\n";
    std::fs::write(&config, text).unwrap();
    let records = records(folder.path());
    let words = [&records, "--gpu", "h200", "--model", "llama-3.1-8b", "--config", config.to_str().unwrap()];
    let page = made(&words).unwrap().page;
    // The keys of clients are not needed.
    let keys = "[[auth.keys]]\nname = \"a\"\nsha256 = \"env:SLUICE_NO_SUCH_DIGEST\"\n[[auth.keys]]\nname = \"b\"\n\
                sha256 = \"env:SLUICE_NO_OTHER_DIGEST\"\n";
    std::fs::write(&config, format!("{text}{keys}")).unwrap();
    assert!(made(&words).unwrap().page.contains("and 0.0 % fail"));
    assert!(page.contains("1 more engine") && page.contains("and 0.0 % fail"));
    assert!(
        !page.contains("the gateway&#39;s limits") && !page.contains("the gateway's limits"),
        "256 slots hold nothing back"
    );
    std::fs::write(&config, text.replace("url =", "ulr =")).unwrap();
    let error = format!("{:#}", made(&words).err().unwrap());
    assert!(error.contains("cannot be simulated") && error.contains("ulr"), "{error}");
}

#[test]
fn slots_that_hold_requests_back_are_raised_before_engines_are_added() {
    let folder = tempfile::tempdir().unwrap();
    let config = folder.path().join("sluice.toml");
    let text = "[[model]]\nname = \"m\"\n[[pool]]\nname = \"all\"\nmodels = [\"m\"]\nslots = 3\nqueue = { timeout = \"5m\" }\n\
                [[pool.backend]]\nname = \"gpu0\"\nurl = \"http://10.0.0.1:8000\"\n";
    std::fs::write(&config, text).unwrap();
    let path = folder.path().join("records.jsonl");
    let line = |number: u32| {
        format!(
            "{{\"version\":1,\"time\":\"2026-01-02T03:01:{:02}Z\",\"route\":\"completions\",\"model\":\"m\",\"home\":\"all\",\
             \"pool\":\"all\",\"backend\":\"gpu0\",\"stream\":true,\"total_ms\":9900,\"queue_ms\":9000,\"ttft_ms\":9040,\
             \"backend_ttft_ms\":40,\"e2el_ms\":9800,\"prompt_tokens\":300,\"completion_tokens\":400,\"outcome\":\"completed\",\
             \"slo_met\":false,\"prompt_bytes\":1200,\"prefix\":[]}}\n",
            number / 3
        )
    };
    std::fs::write(&path, (0..90).map(line).collect::<String>()).unwrap();
    let words =
        [path.to_str().unwrap(), "--gpu", "h200", "--model", "llama-3.1-8b", "--config", config.to_str().unwrap()];
    let Made { page, summary } = made(&words).unwrap();
    assert!(page.contains("all.slots=6") && page.contains("all.slots=24"), "{summary}");
    assert!(summary.contains("all.slots="), "the limits of the gateway are advised: {summary}");
    assert!(
        !summary.contains("Best was \"2 more engines\"") && !summary.contains("Best was \"1 more engine\""),
        "{summary}"
    );
}

#[test]
fn files_without_records_are_errors_that_say_what_to_do() {
    let folder = tempfile::tempdir().unwrap();
    let good = records(folder.path());
    let empty = folder.path().join("empty.jsonl");
    std::fs::write(&empty, "").unwrap();
    let message = |words: &[&str]| format!("{:#}", made(words).err().unwrap());
    assert!(message(&[empty.to_str().unwrap()]).contains("is [records] in the configuration?"));
    assert!(message(&["/no/such.jsonl"]).contains("cannot read /no/such.jsonl"));
    assert!(message(&[folder.path().to_str().unwrap()]).contains("is a folder; give the files in it"));
    let twice = folder.path().join(".").join("records.jsonl");
    assert!(message(&[&good, twice.to_str().unwrap()]).contains("is given twice"));
}
