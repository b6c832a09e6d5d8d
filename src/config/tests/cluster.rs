//! `[cluster]`: each mistake is reported at the key.
//!
//! The base is a valid configuration of two pools with a `[cluster]` table. Some mistakes depend on
//! the cargo feature `kubernetes`.

use std::time::Duration;

use super::problems::one_in;
use super::{TWO_POOLS, read};
use crate::{ClusterLeader, ClusterMode};

fn cluster(table: &str) -> String {
    format!("{TWO_POOLS}[cluster]\n{table}")
}

#[test]
fn without_the_table_there_is_no_cluster_and_with_it_there_are_defaults() {
    assert_eq!(read(TWO_POOLS).unwrap().config.cluster, None);
    let config = read(&cluster("etcd = [\"http://a:2379\", \"https://b\"]")).unwrap().config.cluster.unwrap();
    assert_eq!(
        (config.mode, config.lease, &*config.key, config.leader),
        (ClusterMode::Keep, Duration::from_secs(10), "sluice-ledger", ClusterLeader::None)
    );
    let secure: Vec<bool> = config.endpoints().map(|(_, tls)| tls.is_some()).collect();
    assert_eq!(secure, [false, true]);
}

#[test]
fn mistakes_are_named_with_their_key() {
    let one = |table: &str, path: &str, part: &str| one_in(&cluster(table), &[], path, part);
    one("", "cluster", "etcd = [\"http://127.0.0.1:2379\"]");
    one("etcd = [\"a:2379\"]", "cluster.etcd[0]", "must begin with http://");
    let with = |rest: &str| format!("etcd = [\"http://a:2379\"]\n{rest}");
    one(&with("lease = \"1s\""), "cluster.lease", "outside 2s to 5m");
    one(&with("mode = \"loose\""), "cluster.mode", "known: keep, strict");
    one(&with("leader = \"me\""), "cluster.leader", "known: none, decides, serves");
    one(&with("name = \"two words\""), "cluster.name", "only letters");
    one(&with("key = \"\""), "cluster.key", "empty");
    one(&with("tls = { ca = \"/no/such.pem\" }"), "cluster.tls.ca", "/no/such.pem");
    one(&with("tls = { server_name = \"etcd\" }"), "cluster.tls", "https");
    one(&with("kubernetes = {}"), "cluster.etcd", "remove one of them");
    one(&with("lese = \"5s\""), "cluster.lese", "did you mean 'lease'?");
}

#[test]
fn with_a_leader_an_engine_that_is_started_has_a_port_that_all_know() {
    let engine = |port: &str| {
        format!(
            "[cluster]\netcd = [\"http://a:2379\"]\nleader = \"decides\"\n[[model]]\nname = \"m\"\n[[pool]]\nname = \"p\"\n\
             models = [\"m\"]\n[[pool.backend]]\nname = \"a\"\nlaunch = {{ command = [\"vllm\"], {port} }}\n"
        )
    };
    one_in(&engine("gpu = [0]"), &[], "pool[0].backend[0].launch.port", "give it a port");
    assert!(read(&engine("port = 8001")).is_ok());
}

#[test]
#[cfg(feature = "kubernetes")]
fn a_config_map_has_a_name_that_kubernetes_takes() {
    assert!(read(&cluster("kubernetes = { namespace = \"n\" }")).is_ok());
    one_in(&cluster("kubernetes = {}\nkey = \"A/b\""), &[], "cluster.key", "name of a ConfigMap");
}

#[test]
#[cfg(not(feature = "kubernetes"))]
fn without_the_feature_a_config_map_is_an_error_that_says_how_to_get_it() {
    one_in(&cluster("kubernetes = {}"), &[], "cluster.kubernetes", "build it with --features kubernetes");
}

#[test]
fn a_pool_without_engines_is_refused_where_gateways_serve_that_start_none() {
    let file = |min: u32, leader: &str| {
        format!(
            "[cluster]\netcd = [\"http://e:2379\"]\nleader = \"{leader}\"\n[[model]]\nname = \"m\"\n[[pool]]\nname = \"p\"\n\
             autoscale = {{ apply = true, min = {min}, max = 2 }}\n\
             [[pool.backend]]\nname = \"a\"\nlaunch = {{ command = [\"vllm\"], port = 8000 }}\n"
        )
    };
    one_in(&file(0, "decides"), &[], "pool[0].autoscale.min", "set min to 1 or more");
    assert!(read(&file(1, "decides")).is_ok());
    assert!(read(&file(0, "serves")).is_ok(), "only the gateway that starts engines is ready");
}
