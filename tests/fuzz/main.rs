//! Replays the corpus of fuzzing through the checks.
//!
//! `corpus/NAME/` has the inputs of the check NAME, with one for each failure that fuzzing found.
//! `.github/CONTRIBUTING.md` describes how to fuzz and how to add inputs.

mod checks;

use std::path::Path;

#[test]
fn every_input_of_the_corpus_passes_its_check() {
    let corpus = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fuzz/corpus");
    for (name, check) in checks::ALL {
        let mut inputs = 0;
        for file in std::fs::read_dir(corpus.join(name)).unwrap_or_else(|error| panic!("corpus of {name}: {error}")) {
            let path = file.unwrap().path();
            let input = std::fs::read(&path).unwrap();
            let passed = std::panic::catch_unwind(|| check(&input));
            assert!(passed.is_ok(), "{} fails the check {name}", path.display());
            inputs += 1;
        }
        assert!(inputs > 0, "no input for {name}");
    }
}
