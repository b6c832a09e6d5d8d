//! For each problem, a test expects it at the right key. Most tests apply `--set` texts to two
//! valid pools ([`one`]) and expect exactly one error, with a certain path and a part of the
//! message. One test has a report with many problems at once.

use super::{DIGEST, TWO_POOLS, environment, read, read_with};
use crate::{ArgValue, Config, Problems, Target};

fn errors_with(text: &str, sets: &[&str]) -> Vec<String> {
    let problems = read_with(text, sets).map(|_| ()).unwrap_err();
    problems.errors.iter().map(|problem| format!("{}: {}", problem.path(), problem.situation())).collect()
}

/// Asserts that `sets` give two valid pools exactly one error, at `path`, that contains `part`.
#[track_caller]
fn one(sets: &[&str], path: &str, part: &str) {
    one_in(TWO_POOLS, sets, path, part);
}

#[track_caller]
pub(super) fn one_in(text: &str, sets: &[&str], path: &str, part: &str) {
    let errors = errors_with(text, sets);
    assert_eq!(errors.len(), 1, "{errors:#?}");
    assert!(errors[0].starts_with(&format!("{path}: ")) && errors[0].contains(part), "{}", errors[0]);
}

#[test]
fn unknown_keys_are_all_reported_with_suggestions() {
    let errors =
        errors_with(TWO_POOLS, &["pool.short.slotz=1", "pool.short.queue.lenght=1", "sever.listen=x", "banana=1"]);
    assert_eq!(errors.len(), 4, "{errors:#?}");
    assert!(errors.contains(&"pool[0].slotz: unknown key; did you mean 'slots'?".to_owned()), "{errors:#?}");
    assert!(errors.contains(&"pool[0].queue.lenght: unknown key; did you mean 'length'?".to_owned()), "{errors:#?}");
    assert!(errors.contains(&"sever: unknown key; did you mean 'server'?".to_owned()), "{errors:#?}");
}

#[test]
fn unknown_words_are_errors_and_never_a_default() {
    one(&["pool.short.policy=least-work"], "pool[0].policy", "did you mean 'least_work'?");
    one(&["pool.short.queue.order=lifo"], "pool[0].queue.order", "did you mean 'fifo'?");
    one(&["pool.short.usage=always"], "pool[0].usage", "known: final, continuous, off");
    one(&["log.level=loud"], "log.level", "known: error, warn");
    one(&["log.format=xml"], "log.format", "known: text, json");
}

#[test]
fn fair_queues_have_an_owner_that_exists_and_weights_within_bounds() {
    for weight in ["0", "1000000000", "-1", "0.0001"] {
        let key = format!("auth.keys=[{{name=\"a\", sha256=\"{DIGEST}\", weight={weight}}}]");
        one(&[&key], "auth.keys[0].weight", "is outside 0.001 to 1000");
    }
    one(&["pool.short.queue.fair=users"], "pool[0].queue.fair", "did you mean 'user'?");
    one(&["pool.short.queue.fair=3"], "pool[0].queue.fair", "{ header = \"x-tenant\" }");
    one(&["pool.short.queue.fair={ header = \"a b\" }"], "pool[0].queue.fair", "is not the name of a header");
    one(&["pool.short.queue.fair={ headers = \"x-a\" }"], "pool[0].queue.fair", "expected \"key\"");
}

#[test]
fn values_of_the_wrong_type_are_named() {
    one(&["pool.short.slots=many"], "pool[0].slots", "expected a whole number");
    one(&["pool.short.slots=-1"], "pool[0].slots", "-1 is outside 1 to");
    one(&["pool.short.queue=5"], "pool[0].queue", "expected a table");
    one(&["pool.short.prompt_tokens=..5k"], "pool[0].prompt_tokens", "keys of min, max, found the text \"..5k\"");
    one(&["pool.short.spill=long"], "pool[0].spill", "expected a list");
    one(&["pool.short.spill=[5]"], "pool[0].spill[0]", "expected a text");
    one(&["server.listen=8080"], "server.listen", "expected a text");
    one(&["server.listen=somewhere"], "server.listen", "is not an address");
    one(&["server.drain_timeout=30"], "server.drain_timeout", "has no unit; write \"30s\"");
    one(&["server.max_body=huge"], "server.max_body", "is not a size");
    one(&["pool.short.tokens=-5"], "pool[0].tokens", "-5 is outside 1 to");
}

#[test]
fn values_out_of_bounds_are_named_with_the_bounds() {
    one(&["pool.short.slots=0"], "pool[0].slots", "outside 1 to");
    one(&["timeouts.connect=0s"], "timeouts.connect", "0s is outside");
    one(&["timeouts.idle=0s"], "timeouts.idle", "0s is outside");
    one(&["timeouts.first_byte.base=0s"], "timeouts.first_byte.base", "0s is outside");
    one(&["pool.short.queue.timeout=0s"], "pool[0].queue.timeout", "0s is outside");
    one(&["pool.short.queue.length=1000000"], "pool[0].queue.length", "outside 0 to 100000");
    one(&["health.probe_timeout=99999d"], "health.probe_timeout", "outside");
    one(&["retry.attempts=0"], "retry.attempts", "outside 1 to 8");
    one(&["slo.attainment=1.5"], "slo.attainment", "1.5 is outside");
    one(&["access_log={path=\"-\", sample=2}"], "access_log.sample", "outside 0 to 1");
    one(&["pool.short.backend.a.weight=0"], "pool[0].backend[0].weight", "outside");
    one(&["health.ejection_base=2m"], "health.ejection_base", "2m is more than ejection_max (1m)");
    one(&["fleet.backoff=2m"], "fleet.backoff", "2m is more than backoff_max (1m)");
}

#[test]
fn a_gap_between_pools_is_an_error() {
    one(
        &["pool.long.prompt_tokens.min=6k"],
        "pool[1].prompt_tokens",
        "model 'm': no pool is for prompts of 5k to 6k tokens",
    );
    one(&["pool.short.prompt_tokens.min=1"], "pool[0].prompt_tokens", "no pool is for prompts of 0 to 1 tokens");
    one(&["pool.long.prompt_tokens.max=9k"], "pool[1].prompt_tokens", "9k and more");
}

#[test]
fn an_overlap_of_pools_is_an_error() {
    one(
        &["pool.long.prompt_tokens.min=4k"],
        "pool[1].prompt_tokens",
        "4k to 5k tokens belong to both 'short' and 'long'",
    );
    one(&["pool.short.prompt_tokens={}"], "pool[1].prompt_tokens", "5k and more tokens belong to both");
}

#[test]
fn ranges_are_judged_for_each_model_by_the_pools_that_serve_it() {
    let second = "[[model]]\nname = \"n\"\n";
    let errors = errors_with(&format!("{second}{TWO_POOLS}"), &["pool.short.models=[\"m\", \"n\"]"]);
    assert_eq!(
        errors,
        [
            "pool[0].prompt_tokens: model 'n': no pool is for prompts of 5k and more tokens; let prompt_tokens of one pool begin where another ends"
        ]
    );
}

#[test]
fn an_empty_range_is_an_error() {
    one(&["pool.short.prompt_tokens={min=7, max=7}"], "pool[0].prompt_tokens", "min 7 is not below max 7");
}

#[test]
fn a_model_that_no_pool_serves_is_an_error() {
    one_in(&format!("{TWO_POOLS}[[model]]\nname = \"n\"\n"), &[], "model[1]", "no pool serves model 'n'");
}

#[test]
fn names_are_unique_and_fit_to_be_labels() {
    one(&["pool.long.name=short", "pool.1.spill=[]"], "pool[1].name", "already at pool[0].name");
    one(&["model.m.aliases=[\"m\"]"], "model[0].aliases[0]", "'m' is used twice");
    one(&["model.m.aliases=[\"x\", \"x\"]"], "model[0].aliases[1]", "'x' is used twice");
    let twin = "[[pool.backend]]\nname = \"b\"\nurl = \"http://127.0.0.1:8002\"\n";
    one_in(&format!("{TWO_POOLS}{twin}"), &[], "pool[1].backend[1].name", "'b' is used twice");
    one(&["pool.long.name=lo ng"], "pool[1].name", "only letters");
    one(&["pool.long.name="], "pool[1].name", "empty");
    one(&["model.m.aliases=[\" x\"]"], "model[0].aliases[0]", "blanks");
}

#[test]
fn a_pool_without_backends_is_an_error_and_so_is_no_pool() {
    one(&["pool.long.backend=[]"], "pool[1].backend", "no backend");
    one_in("", &[], "pool", "no pool");
}

#[test]
fn spill_goes_to_another_pool_that_serves_the_models() {
    one(&["pool.long.spill=[\"shrt\"]"], "pool[1].spill[0]", "did you mean 'short'?");
    one(&["pool.long.spill=[\"long\"]"], "pool[1].spill[0]", "cannot spill to itself");
    one(&["pool.long.spill=[\"short\", \"short\"]"], "pool[1].spill[1]", "used twice");
    let other = "[[model]]\nname = \"n\"\n[[pool]]\nname = \"n\"\nmodels = [\"n\"]\n[[pool.backend]]\nname = \"c\"\nurl = \"http://c\"\n";
    one_in(
        &format!("{TWO_POOLS}{other}"),
        &["pool.long.spill=[\"n\"]"],
        "pool[1].spill[0]",
        "does not serve model 'm'",
    );
}

#[test]
fn spilling_in_circles_is_fine() {
    assert!(read_with(TWO_POOLS, &["pool.short.spill=[\"long\"]"]).is_ok());
}

#[test]
fn long_prompts_at_home_need_a_permit_to_exist() {
    one(&["pool.long.long_prefix={threshold=\"5k\", slots=0}"], "pool[1].long_prefix.slots", "could never run here");
    one(&["pool.long.long_prefix={slots=1}"], "pool[1].long_prefix.threshold", "missing");
    assert!(read_with(TWO_POOLS, &["pool.short.long_prefix={threshold=\"5k\", slots=0}"]).is_ok());
}

#[test]
fn models_are_named_as_declared() {
    one(
        &["pool.long.models=[\"mm\"]", "pool.long.spill=[]"],
        "pool[1].models[0]",
        "no model is called 'mm'; did you mean 'm'?",
    );
    one(&["pool.long.models=[]"], "pool[1].models", "the list is empty");
    one(&["pool.long.models=[\"*\", \"m\"]"], "pool[1].models", "already means all");
    one(&["pool.long.models=[\"alias\", \"m\"]"], "pool[1].models[1]", "used twice");
}

#[test]
fn a_backend_has_exactly_one_place() {
    one(&["pool.long.backend.b.launch={command=[\"vllm\"], port=8005}"], "pool[1].backend[0]", "not both");
    one(&["pool.long.backend=[{name=\"b\"}]"], "pool[1].backend[0]", "neither url nor launch");
    one(&["pool.long.backend.b.url=http://h/v1"], "pool[1].backend[0].url", "already begin with /v1");
    one(&["pool.long.backend.b.url=http://127.0.0.1:8000/"], "pool[1].backend[0].url", "already backend 'short/a'");
    one(&["pool.long.backend.b.url=http://localhost:8080"], "pool[1].backend[0].url", "gateway's own address");
}

#[test]
fn commands_for_an_engine_are_checked() {
    let control = |table: &str| format!("pool.long.backend=[{{name=\"b\", url=\"http://h:1\", control={table}}}]");
    one(&[&control("{stop=[\"down\"]}")], "pool[1].backend[0].control.start", "missing");
    one(&[&control("{start=[\"up\"], stop=[]}")], "pool[1].backend[0].control.stop", "empty");
    one(
        &[&control("{start=[\"up\"], stop=[\"down\"], timeout=\"0s\"}")],
        "pool[1].backend[0].control.timeout",
        "outside",
    );
    let launched = "pool.long.backend=[{name=\"b\", launch={command=[\"vllm\"], port=8005}, control={start=[\"up\"], stop=[\"down\"]}}]";
    one(&[launched], "pool[1].backend[0].control", "needs no control commands");
    let loaded =
        read_with(TWO_POOLS, &[&control("{start=[\"up\", \"{args}\"], stop=[\"down\"], args={max-num-seqs=4}}")])
            .unwrap();
    let Target::Control(endpoint, control) = &loaded.config.pools[1].backends[0].target else {
        panic!("not controlled")
    };
    assert_eq!((endpoint.port, control.start.len(), control.timeout.as_secs()), (1, 2, 120));
    assert_eq!(control.args["max-num-seqs"], ArgValue::Int(4));
}

#[test]
fn launch_is_checked_as_far_as_that_is_possible_without_starting_it() {
    let launch = |table: &str| format!("pool.long.backend=[{{name=\"b\", launch={table}}}]");
    one(&[&launch("{port=8005}")], "pool[1].backend[0].launch.command", "missing");
    one(&[&launch("{command=[\"vllm\"], port=70000}")], "pool[1].backend[0].launch.port", "70000");
    // Ports that the gateway chooses later do not clash.
    let unchosen = "pool.long.backend=[{name=\"b\", launch={command=[\"vllm\"]}}, {name=\"c\", launch={command=[\"vllm\"], port=0}}]";
    read_with(TWO_POOLS, &[unchosen]).unwrap();
    for range in ["9000", "9000-8000", "0-9", "a-b"] {
        one(&[&format!("fleet.ports=\"{range}\"")], "fleet.ports", "not a range of ports");
    }
    one(
        &[&launch("{command=[\"vllm\"], port=1, args={x={}}}")],
        "pool[1].backend[0].launch.args.x",
        "JSON arguments as a text",
    );
    read_with(TWO_POOLS, &[&launch("{command=[\"vllm\"], port=8005, args={a=1, b=[\"x\"]}}")]).unwrap();
}

#[test]
fn clients_and_admin_never_share_a_port() {
    one(&["server.admin=127.0.0.1:8080"], "server.admin", "may not overlap");
    one(&["server.admin=127.0.0.1:9000", "server.listen=0.0.0.0:9000"], "server.admin", "may not overlap");
}

#[test]
fn secrets_that_cannot_be_read_are_errors_without_being_shown() {
    one(&["auth.admin_token=env:NOT_SET"], "auth.admin_token", "environment variable NOT_SET is not set");
    one(&["auth.admin_token=env:EMPTY"], "auth.admin_token", "empty");
    one(&["auth.admin_token=env:TWO_LINES"], "auth.admin_token", "one line of visible ASCII");
    one(&["auth.admin_token=file:/no/such/file"], "auth.admin_token", "cannot read the secret in /no/such/file");
    one(&["auth.keys=[{name=\"k\", sha256=\"hunter2\"}]"], "auth.keys[0].sha256", "expected 64 hex digits");
    let report = read_with(TWO_POOLS, &["auth.keys=[{name=\"k\", sha256=\"hunter2\"}]"]).unwrap_err().to_string();
    assert!(!report.contains("hunter2"), "{report}");
}

#[test]
fn a_missing_adapter_folder_is_an_error_where_the_gateway_would_load_it() {
    let with = |backend: &str| {
        let backend = format!("pool.p.backend=[{{name=\"b\", {backend}}}]");
        read_with("", &["model=[{name=\"m\", adapter=\"ad\"}]", "pool=[{name=\"p\", models=[\"m\"]}]", &backend])
    };
    let report = with("launch={command=[\"vllm\"]}").unwrap_err().to_string();
    assert!(report.contains("model[0].adapter: there is no folder /nowhere/ad"), "{report}");
    assert!(with("url=\"http://10.0.0.1:1\"").is_ok());
}

#[test]
fn secrets_of_engines_are_resolved_masked_and_warned_about() {
    let launch = "pool.long.backend=[{name=\"b\", launch={command=[\"vllm\", \"--api-key=hunter2\"], \
                  env={A=\"env:TOKEN\", HF_TOKEN=\"hunter2\", N=1}, \
                  args={api_key=[\"hunter2\", \"env:TOKEN\"], seed=\"env:TOKEN\", hf-token=true, \
                  kv-transfer-config='{\"x\": {\"password\": \"hunter2\"}}', chat-template=\"file:///x\"}}}]";
    let loaded = read_with(TWO_POOLS, &[launch]).unwrap_or_else(|problems| panic!("{problems}"));
    let page = format!("{} {:?}", loaded.config, loaded.config);
    let value = environment("TOKEN").unwrap();
    assert!(!page.contains("hunter2") && !page.contains(&value), "{page}");
    for shown in [
        "A = \"env:TOKEN\"",
        "N = \"********\"",
        "api_key = [\"********\", \"env:TOKEN\"]",
        "hf-token = true",
        "\"file:///x\"",
    ] {
        assert!(page.contains(shown), "no {shown} in {page}");
    }
    let crate::Target::Launch(launch) = &loaded.config.pools[1].backends[0].target else { panic!() };
    assert_eq!((launch.env["A"].expose(), launch.env["N"].expose()), (&*value, "1"));
    assert_eq!(launch.args["seed"].expose(), ArgValue::Text(value.clone()));
    assert_eq!(launch.args["api_key"].expose(), ArgValue::List(vec!["hunter2".to_owned(), value]));
    assert!(serde_json::to_string(&launch.args).is_err(), "a secret cannot be stored");
    let warned: Vec<&str> =
        loaded.warnings.iter().map(|problem| problem.path()).filter(|path| path.contains("launch")).collect();
    assert_eq!(warned.len(), 3, "{warned:?}");
    assert!(
        read_with(TWO_POOLS, &[&launch_with("api-key=\"env:NOT_SET\"")]).unwrap_err().to_string().contains("NOT_SET")
    );
    assert!(
        read_with(TWO_POOLS, &[&launch_with("api-key=\"\"")]).unwrap_err().to_string().contains("the secret is empty")
    );
    let typo = "pool.lnog.backend.b.launch.args.api-key=hunter2";
    assert!(!read_with(TWO_POOLS, &[typo]).unwrap_err().to_string().contains("hunter2"));
}

fn launch_with(args: &str) -> String {
    format!("pool.long.backend=[{{name=\"b\", launch={{command=[\"vllm\"], args={{{args}}}}}}}]")
}

#[test]
fn a_secret_in_a_file_loses_its_line_end() {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("token"), "letmein\r\n").unwrap();
    let text = format!("[auth]\nadmin_token = \"file:token\"\n{TWO_POOLS}");
    let config = Config::parse(&text, "x", &[], &super::surroundings(folder.path())).unwrap().config;
    assert_eq!(config.auth.admin_token.unwrap().expose(), "letmein");
}

#[test]
fn a_plain_secret_is_accepted_with_a_warning_and_masked() {
    let loaded = read_with(TWO_POOLS, &["auth.admin_token=hunter2"]).unwrap();
    assert!(loaded.warnings.iter().any(|warning| warning.path() == "auth.admin_token"));
    assert!(!format!("{} {:?}", loaded.config, loaded.config).contains("hunter2"));
}

#[test]
fn keys_are_checked() {
    let key = |rest: &str| format!("auth.keys=[{{name=\"k\", sha256=\"{DIGEST}\"{rest}}}]");
    assert!(read_with(TWO_POOLS, &[&key("")]).unwrap().warnings.is_empty());
    one(&[&key(", models=[\"x\"]")], "auth.keys[0].models[0]", "no model is called 'x'");
    one(&[&key(", limit={in_flight=0}")], "auth.keys[0].limit.in_flight", "outside 1");
    let twins = "auth.keys=[{name=\"k\", sha256=\"env:DIGEST\"}, {name=\"l\", sha256=\"env:DIGEST\"}]";
    one(&[twins], "auth.keys[1].sha256", "the same key as 'k'");
    one(&["auth.keys=[{sha256=\"env:DIGEST\"}]"], "auth.keys[0].name", "missing");
    one(&["auth.keys=[{name=\"k\"}]"], "auth.keys[0].sha256", "missing");
}

#[test]
fn a_tokenizer_that_is_not_there_is_an_error() {
    one(&["model.m.tokenizer=no.json"], "model[0].tokenizer", "there is no file /nowhere/no.json");
}

#[test]
fn an_admin_port_that_is_not_on_loopback_needs_a_token() {
    for open in ["0.0.0.0:8081", ":8081", "10.0.0.5:8081", "[::]:8081"] {
        one(&[&format!("server.admin={open}")], "auth.admin_token", "is not on loopback");
        read_with(TWO_POOLS, &[&format!("server.admin={open}"), "auth.admin_token=secret"]).unwrap();
    }
    for local in ["127.0.0.2:8081", "localhost:9000", "[::1]:8081", "[::ffff:127.0.0.1]:8081"] {
        read_with(TWO_POOLS, &[&format!("server.admin={local}")]).unwrap();
    }
}

#[test]
fn a_gateway_without_keys_is_worth_a_warning_only_where_other_machines_reach_it() {
    let warnings = |listen: &str| read_with(TWO_POOLS, &[listen]).unwrap().warnings;
    assert_eq!(warnings("server.listen=127.0.0.1:8080"), []);
    let open = warnings("server.listen=:8080");
    assert!(open.len() == 1 && open[0].to_string().contains("0.0.0.0:8080 may send requests"), "{open:?}");
}

#[test]
fn an_access_log_needs_its_folder_and_is_a_file() {
    one(&["access_log={path=\"logs/access.log\"}"], "access_log.path", "there is no folder /nowhere/logs");
    one(&["access_log={path=\"/\"}"], "access_log.path", "/ is a folder");
    let folder = tempfile::tempdir().unwrap();
    let inside = |name: &str| format!("access_log.path={}", folder.path().join(name).display());
    one(&[&inside("")], "access_log.path", "is a folder");
    read_with(TWO_POOLS, &[&inside("new.log")]).unwrap();
}

#[test]
fn a_misspelt_range_or_model_list_of_a_pool_is_one_problem() {
    let misspelt = TWO_POOLS.replacen("prompt_tokens", "prompt_token", 1);
    assert_ne!(misspelt, TWO_POOLS);
    one_in(&misspelt, &[], "pool[0].prompt_token", "did you mean 'prompt_tokens'?");
    let misspelt = TWO_POOLS.replacen("models =", "model =", 1);
    assert_ne!(misspelt, TWO_POOLS);
    one_in(&misspelt, &[], "pool[0].model", "did you mean 'models'?");
    // Another unknown key must not hide a gap.
    let errors = errors_with(&TWO_POOLS.replace("min = \"5k\"", "min = \"6k\""), &["pool.short.slotz=1"]);
    assert_eq!(errors.len(), 2, "{errors:#?}");
}

#[test]
fn a_file_that_is_missing_or_not_toml_is_reported() {
    let problems = Config::load(std::path::Path::new("/no/such.toml"), &[]).unwrap_err();
    assert!(problems.to_string().contains("/no/such.toml: cannot read the file: No such file"), "{problems}");
    let problems = read("[server\nlisten = 1\n").unwrap_err();
    assert!(problems.to_string().starts_with("error: test.toml:1:"), "{problems}");
}

#[test]
fn very_many_problems_are_counted_and_not_all_listed() {
    let text: String = (0..500).map(|number| format!("key{number} = 1\n")).collect();
    let report = read(&text).unwrap_err().to_string();
    assert!(report.contains("test.toml: 501 errors, the first 200 are shown; for more: sluice explain "), "{report}");
}

#[test]
fn the_report_of_a_file_with_many_problems() {
    let root = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).ancestors().nth(2).unwrap();
    let golden = root.join("tests/golden");
    let text = std::fs::read_to_string(golden.join("config_problems.toml")).unwrap();
    let problems: Problems = Config::parse(&text, "bad.toml", &[], &super::surroundings(&golden)).unwrap_err();
    assert!(problems.errors.len() >= 15, "{}", problems.errors.len());
    super::assert_golden("config_problems", &problems.to_string().replace(root.to_str().unwrap(), ""));
}

#[test]
#[cfg(feature = "otel")]
fn tracing_that_cannot_reach_a_collector_is_an_error() {
    let tracing = |table: &str| format!("{TWO_POOLS}[tracing]\n{table}");
    let one = |table: &str, path: &str, part: &str| one_in(&tracing(table), &[], path, part);
    one("", "tracing.endpoint", "http://127.0.0.1:4318");
    one("endpoint = \"c:4318\"", "tracing.endpoint", "must begin with http://");
    one("endpoint = \"http://c:4318/v1/traces/\"", "tracing.endpoint", "leave it out");
    let with = |rest: &str| format!("endpoint = \"http://c:4318\"\n{rest}");
    one(&with("sample = 1.5"), "tracing.sample", "outside 0 to 1");
    one("endpoint = \"http://c:4318/v1/metrics\"", "tracing.endpoint", "/v1/metrics, which the gateway adds itself");
    one(&with("metrics_interval = \"1ms\""), "tracing.metrics_interval", "outside 1s to");
    one(&with("queue = 0"), "tracing.queue", "outside 1 to");
    one(&with("service_name = \"\""), "tracing.service_name", "empty");
    one(&with("headers = { \"a b\" = \"x\" }"), "tracing.headers.a b", "not the name of a header");
    one(&with("headers = { a = \"env:TWO_LINES\" }"), "tracing.headers.a", "one line");
    one(&with("headers = { a = \"env:NOT_SET\" }"), "tracing.headers.a", "NOT_SET is not set");
    one(&with("ca = \"/no/such.pem\""), "tracing.ca", "/no/such.pem");
    let grpc = read(&tracing("endpoint = \"http://c:4317\"\nheaders = { Authorization = \"Basic x\" }")).unwrap();
    let warnings: Vec<_> = grpc.warnings.iter().map(|warning| warning.path()).collect();
    assert!(
        ["tracing.endpoint", "tracing.headers.Authorization"].iter().all(|path| warnings.contains(path)),
        "{warnings:?}"
    );
}

#[test]
#[cfg(not(feature = "otel"))]
fn without_the_feature_tracing_is_an_error_that_says_how_to_get_it() {
    let text = format!("{TWO_POOLS}[tracing]\nendpoint = \"http://c:4318\"");
    one_in(&text, &[], "tracing", "build it with --features otel");
}

#[test]
fn engines_that_the_gateway_does_not_run_are_not_scaled_by_it() {
    let pool = |backend: &str| {
        format!(
            "[[model]]\nname = \"m\"\n[[pool]]\nname = \"p\"\nautoscale = {{ apply = true, max = 2 }}\n\
             [[pool.backend]]\nname = \"a\"\nlaunch = {{ command = [\"vllm\"] }}\n[[pool.backend]]\nname = \"b\"\n{backend}\n"
        )
    };
    assert!(read(&pool("launch = { command = [\"vllm\"] }")).is_ok());
    one_in(&pool("url = \"http://b:1\""), &[], "pool[0].autoscale.apply", "give every backend launch or control");
}

fn pods(table: &str, rest: &str) -> String {
    format!("[[model]]\nname = \"m\"\n[[pool]]\nname = \"p\"\nkubernetes = {{ {table} }}\n{rest}")
}

#[test]
#[cfg(feature = "kubernetes")]
fn a_pool_of_pods_has_no_listed_backends_and_says_which_pods() {
    assert!(read(&pods("selector = \"app=x\"", "")).is_ok());
    one_in(&pods("port = 8000", ""), &[], "pool[0].kubernetes.selector", "labels of the pods");
    let listed = "[[pool.backend]]\nname = \"a\"\nurl = \"http://a:1\"\n";
    one_in(&pods("selector = \"app=x\"", listed), &[], "pool[0].backend", "make two pools");
    let args = "selector = \"app=x\", args = { max-num-seqs = 8 }";
    one_in(&pods(args, ""), &[], "pool[0].kubernetes.args", "name it with statefulset");
    let secret = "selector = \"app=x\", statefulset = \"x\", args = { api-key = \"env:TOKEN\" }";
    one_in(&pods(secret, ""), &[], "pool[0].kubernetes.args.api-key", "VLLM_API_KEY");
}

#[test]
#[cfg(feature = "kubernetes")]
fn pods_become_backends_and_each_of_one_pool_only() {
    let two = pods("selector = \"a\", port = 9", "")
        + "[[pool]]\nname = \"q\"\nprompt_tokens = { min = \"1k\" }\nkubernetes = { selector = \"b\", port = 9 }\n";
    let mut config =
        read(&two.replacen("kubernetes", "prompt_tokens = { max = \"1k\" }\nkubernetes", 1)).unwrap().config;
    let pod = |name: &str, ip: &str| crate::FoundPod { name: name.into(), ip: ip.into(), cordoned: false };
    let found = [
        ("p".to_owned(), vec![pod("x", "10.0.0.1")]),
        ("q".to_owned(), vec![pod("x", "10.0.0.1"), pod("y", "fd00::1")]),
    ];
    let left_out = config.put_pods(&found.into());
    assert_eq!(left_out.len(), 1);
    assert!(left_out[0].0 == "q/x" && left_out[0].1.contains("other selectors"), "{left_out:?}");
    let urls: Vec<_> = config.backends().map(|(_, _, backend)| backend.target.endpoint().to_string()).collect();
    assert_eq!(urls, ["http://10.0.0.1:9", "http://[fd00::1]:9"]);
    config.put_pods(&Default::default());
    assert_eq!(config.backends().count(), 0);
}

#[test]
#[cfg(not(feature = "kubernetes"))]
fn without_the_feature_pods_are_an_error_that_says_how_to_get_them() {
    one_in(&pods("selector = \"app=x\"", ""), &[], "pool[0].kubernetes", "build it with --features kubernetes");
}
