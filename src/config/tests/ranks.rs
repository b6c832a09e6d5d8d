//! Data-parallel ranks of the configuration.
//!
//! The tests check the backends that ranks become, and the keys with which ranks cannot be
//! combined.

use super::{read, read_with, valid};
use crate::{Address, Config};

fn pool(keys: &str, backend: &str) -> String {
    format!(
        "[[model]]\nname = \"m\"\n[[pool]]\nname = \"all\"\n{keys}\n[[pool.backend]]\nname = \"gpu0\"\n\
         url = \"http://10.0.0.7:8000\"\n{backend}\n"
    )
}

fn launched(keys: &str, launch: &str) -> String {
    pool(keys, "ranks = 2")
        .replace("url = \"http://10.0.0.7:8000\"", &format!("launch = {{ command = [\"vllm\"]{launch} }}"))
}

fn ranks(config: &Config) -> Vec<(&str, Option<u16>)> {
    config.pools[0].backends.iter().map(|backend| (backend.name.as_str(), backend.rank)).collect()
}

fn refused(text: &str) -> Vec<String> {
    read(text).unwrap_err().lines().collect()
}

#[test]
fn each_rank_is_a_backend_at_the_same_address() {
    let config = valid(&pool("", "ranks = 3\nweight = 2.0"));
    assert_eq!(ranks(&config), [("gpu0-0", Some(0)), ("gpu0-1", Some(1)), ("gpu0-2", Some(2))]);
    let backends = &config.pools[0].backends;
    assert!(backends.iter().all(|backend| backend.target == backends[0].target && backend.weight == 2.0));
    assert!(backends.iter().all(|backend| !backend.follows()), "no process of the gateway");
    let addresses: Vec<Address> = backends.iter().map(Address::of).collect();
    assert!(addresses[0].is_same_server(&addresses[2]) && addresses[2].rank == Some(2));
    assert_eq!(ranks(&valid(&pool("", ""))), [("gpu0", None)]);
    assert_eq!(ranks(&valid(&pool("ranks = 2", ""))), [("gpu0-0", Some(0)), ("gpu0-1", Some(1))]);
    assert_eq!(ranks(&valid(&pool("ranks = 2", "ranks = 1"))), [("gpu0-0", Some(0))]);
    let set = read_with(&pool("", "ranks = 1"), &["pool.all.backend.gpu0.ranks=2"]).unwrap().config;
    assert_eq!(ranks(&set).len(), 2);
}

#[test]
fn the_first_rank_stands_for_a_launched_process() {
    let config = valid(&launched("", ", port = 9000"));
    let follows: Vec<_> = config.pools[0].backends.iter().map(crate::Backend::follows).collect();
    assert_eq!(follows, [false, true]);
    let copies = valid(&launched("", ", port = 9000, copies = 2"));
    let names: Vec<_> = ranks(&copies).into_iter().map(|(name, _)| name).collect();
    assert_eq!(names, ["gpu0-0-0", "gpu0-0-1", "gpu0-1-0", "gpu0-1-1"]);
    let ports: Vec<_> = copies.pools[0].backends.iter().map(|backend| backend.target.endpoint().port).collect();
    assert_eq!(ports, [9000, 9000, 9001, 9001]);
}

#[test]
fn more_ranks_leave_the_others_as_they_are() {
    let (few, many) = (valid(&pool("", "ranks = 2")), valid(&pool("", "ranks = 3")));
    let changes: Vec<String> = crate::diff::changes(&few, &many).iter().map(ToString::to_string).collect();
    assert_eq!(changes, ["pool.all.backend.gpu0-2: added"]);
}

#[test]
fn ranks_of_one_server_may_be_in_different_pools() {
    let second = "rank = 0\n[[pool.backend]]\nname = \"gpu1\"\nurl = \"http://10.0.0.7:8000\"\nrank = ";
    assert_eq!(ranks(&valid(&pool("", &format!("{second}1")))), [("gpu0", Some(0)), ("gpu1", Some(1))]);
    let twice = refused(&pool("", &format!("{second}0")));
    assert!(twice.len() == 1 && twice[0].contains("backend[1].url: http://10.0.0.7:8000 is already"), "{twice:?}");
}

#[test]
fn each_mistake_is_reported_once() {
    for (text, key, words) in [
        (pool("", "ranks = 0"), "pool[0].backend[0].ranks", "0 is outside 1 to 256"),
        (pool("", "ranks = 257"), "pool[0].backend[0].ranks", "257 is outside 1 to 256"),
        (pool("", "ranks = 2\nrank = 0"), "pool[0].backend[0].rank", "remove rank or ranks"),
        (pool("engine = \"sglang\"", "ranks = 2"), "pool[0].engine", "does not read X-Data-Parallel-Rank"),
        (launched("", ", share = \"a\", gpu = [0]"), "pool[0].backend[0].rank", "cannot start on demand"),
        (launched("", "").replace("ranks = 2", "rank = 1"), "pool[0].backend[0].rank", "write ranks = N"),
        (pool("", "ranks = 2\nweight = -1"), "pool[0].backend[0].weight", "outside"),
    ] {
        let lines = refused(&text);
        assert!(lines.len() == 1 && lines[0].contains(key) && lines[0].contains(words), "{text}\n{lines:#?}");
    }
    let clash = "ranks = 2\n[[pool.backend]]\nname = \"gpu0-1\"\nurl = \"http://10.0.0.8:8000\"";
    assert!(refused(&pool("", clash))[0].contains("'gpu0-1' is used twice"));
    let many =
        (0..5).map(|n| format!("[[pool.backend]]\nname = \"n{n}\"\nurl = \"http://10.0.1.{n}:1\"\nranks = 256\n"));
    let many = refused(&format!("[[pool]]\nname = \"all\"\n{}", many.collect::<String>()));
    assert!(many.len() == 1 && many[0].contains("1024"), "{many:?}");
}
