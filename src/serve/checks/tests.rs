//! Checks with slow programs (`tail`, which never lists flags), with denied files, and with engines
//! that another gateway starts.

use super::*;

fn loaded(folder: &Path, engines: &[(&str, u16)], more: &str) -> Loaded {
    let backend = |(at, (program, port)): (usize, &(&str, u16))| {
        format!(
            "[[pool.backend]]\nname = \"b{at}\"\nlaunch = {{ command = [\"{program}\", \"serve\", \"m\"], port = {port} }}\n"
        )
    };
    let backends: String = engines.iter().enumerate().map(backend).collect();
    let state = folder.join("state");
    let text = format!("[fleet]\nstate = {state:?}\n{more}[[model]]\nname = \"m\"\n[[pool]]\nname = \"p\"\n{backends}");
    let file = folder.join("sluice.toml");
    std::fs::write(&file, text).unwrap();
    Config::load(&file, &[]).unwrap()
}

fn found(loaded: &Loaded, looks: bool, others_lead: bool) -> Found<'_> {
    Found { loaded, looks, others_lead, errors: Vec::new(), remarks: Vec::new() }
}

#[tokio::test(start_paused = true)]
async fn a_start_waits_once_for_all_programs_that_do_not_list_their_flags() {
    let folder = tempfile::tempdir().unwrap();
    let engines: Vec<(&str, u16)> = (0..8).map(|at| ("tail", 20_900 + at)).collect();
    let mut loaded = loaded(folder.path(), &engines, "");
    for backend in loaded.config.pools.iter_mut().flat_map(|pool| &mut pool.backends) {
        let Target::Launch(launch) = &mut backend.target else { panic!("it is launched") };
        launch.command =
            vec!["sh".to_owned(), "-c".to_owned(), "exec sleep 1000".to_owned(), "serve".to_owned()].into();
    }
    let begun = Instant::now();
    let remarks = check(&loaded, Purpose::Start).await.unwrap();
    let waited = begun.elapsed();
    assert!(waited >= START_FLAGS_MAX && waited < START_FLAGS_MAX + Duration::from_secs(1), "{waited:?}");
    let slow = |remark: &&String| remark.contains("has not listed its flags within 20 s");
    assert_eq!(remarks.iter().filter(slow).count(), 8, "{remarks:?}");
}

#[tokio::test(start_paused = true)]
async fn a_program_that_was_too_slow_is_not_run_again_by_the_same_start() {
    let folder = tempfile::tempdir().unwrap();
    let loaded = loaded(folder.path(), &[("tail", 20_910)], "");
    let spec = specs_of(&loaded.config).remove(0);
    let mut flags = FlagLists::new(Purpose::Start);
    flags.slow.insert(program(&spec.target).unwrap());
    let begun = Instant::now();
    assert!(flags.check(&spec, &driver(&spec, Purpose::Start)).await.is_none());
    assert_eq!(begun.elapsed(), Duration::ZERO);
}

#[test]
fn what_is_denied_to_the_user_who_looks_is_a_remark_and_to_a_start_an_error() {
    let folder = tempfile::tempdir().unwrap();
    let loaded = loaded(folder.path(), &[("tail", 20_920)], "");
    for (looks, kind, refused) in [
        (true, io::ErrorKind::PermissionDenied, false),
        (false, io::ErrorKind::PermissionDenied, true),
        (true, io::ErrorKind::ReadOnlyFilesystem, true),
    ] {
        let mut found = found(&loaded, looks, false);
        found.refuse_place(STATE, "/x: why".to_owned(), &kind.into());
        assert_eq!((found.errors.len(), found.remarks.len()), if refused { (1, 0) } else { (0, 1) }, "{looks} {kind}");
        assert!(found.names(STATE) && !found.names("fleet"));
        let said = found.remarks.concat() + &found.errors.iter().map(ToString::to_string).collect::<String>();
        assert_eq!(said.matches(STATE).count(), 1, "{said}");
        assert_eq!(said.contains("as that user"), !refused, "{said}");
    }
}

#[test]
fn a_folder_is_judged_by_the_nearest_one_that_exists_and_by_the_files_in_it() {
    let folder = tempfile::tempdir().unwrap();
    assert!(can_make(&folder.path().join("a/b/c")).is_ok());
    std::fs::write(folder.path().join("file"), "").unwrap();
    let (path, error) = can_make(&folder.path().join("file/state")).unwrap_err();
    assert_eq!((path, error.kind()), (folder.path().join("file"), io::ErrorKind::NotADirectory));
    let loaded = loaded(folder.path(), &[("tail", 20_930)], "");
    // `lock` is a folder, which not even root can open as a file.
    std::fs::create_dir_all(folder.path().join("state/lock")).unwrap();
    let mut found = found(&loaded, true, false);
    found.check_state();
    assert_eq!(found.errors.iter().map(Problem::path).collect::<Vec<_>>(), [STATE], "{:?}", found.remarks);
}

#[tokio::test]
async fn a_look_refuses_an_engine_only_if_this_gateway_starts_it() {
    let folder = tempfile::tempdir().unwrap();
    let loaded = loaded(folder.path(), &[("/nowhere/vllm", 20_940)], "");
    let problems = check(&loaded, Purpose::Look).await.unwrap_err();
    assert!(problems.to_string().contains("/nowhere/vllm: not an executable file"), "{problems}");
    let mut found = found(&loaded, true, true);
    found.check_engines(&loaded.config, Purpose::Look).await;
    assert_eq!(found.errors, []);
    let said = found.remarks.concat();
    assert!(said.contains("/nowhere/vllm: not an executable") && said.contains("the gateway that leads"), "{said}");
}
