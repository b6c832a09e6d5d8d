//! KV events of engines in the configuration: ports, and the keys with which they cannot be
//! combined.

use super::{read, valid};
use crate::{Address, Config};

fn pool(keys: &str, backends: &str) -> String {
    format!(
        "[[model]]\nname = \"m\"\n[[pool]]\nname = \"all\"\nprefix = \"events\"\n{keys}\n[[pool.backend]]\n\
         name = \"gpu0\"\nurl = \"http://10.0.0.7:8000\"\n{backends}\n"
    )
}

fn ports(config: &Config) -> Vec<Option<u16>> {
    config.pools[0].backends.iter().map(|backend| Address::of(backend).events).collect()
}

#[test]
fn each_rank_has_the_port_of_the_server_and_its_number() {
    assert_eq!(ports(&valid(&pool("", ""))), [Some(5557)]);
    assert_eq!(ports(&valid(&pool("", "ranks = 3\nevents_port = 6000"))), [Some(6000), Some(6001), Some(6002)]);
    assert_eq!(ports(&valid(&pool("", "").replace("events", "estimate"))), [None]);
    let other = "[[pool.backend]]\nname = \"gpu1\"\nurl = \"http://10.0.0.8:8000\"";
    assert_eq!(ports(&valid(&pool("", other))), [Some(5557); 2], "another host");
    let launched =
        "[[pool.backend]]\nname = \"gpu1\"\nlaunch = { command = [\"vllm\"], args = { kv-events-config = '{}' } }";
    assert_eq!(ports(&valid(&pool("", launched))), [Some(5557); 2]);
}

#[test]
fn each_mistake_is_reported_once() {
    let same = "[[pool.backend]]\nname = \"gpu1\"\nurl = \"http://10.0.0.7:8001\"";
    let launched = "[[pool.backend]]\nname = \"gpu1\"\nlaunch = { command = [\"vllm\"] }\nevents_port = 6000";
    for (text, key, words) in [
        (pool("engine = \"sglang\"", ""), "pool[0].prefix", "for vLLM engines"),
        (pool("policy = \"round_robin\"", ""), "pool[0].prefix", "policy"),
        (pool("", same), "pool[0].backend[1].events_port", "all/gpu0 has the same host and port"),
        (pool("", launched), "pool[0].backend[1].launch", "\"endpoint\": \"tcp://*:6000\""),
        (pool("", "").replace("\"events\"", "\"event\""), "pool[0].prefix", "event"),
    ] {
        let lines: Vec<String> = read(&text).unwrap_err().lines().collect();
        assert!(lines.len() == 1 && lines[0].contains(key) && lines[0].contains(words), "{text}\n{lines:#?}");
    }
}
