//! The P99 of each class, as Prometheus reads it from the buckets of the gateway, compared with
//! `sluice bench`, which has the time of every request.
//!
//! Both measure the same requests. `sluice bench` measures at the client, so its times also include
//! about a millisecond of work in the gateway and in the client. The test takes a minute.

use super::deployment::{Deployment, KEYS, eventually};
use super::prometheus::Prometheus;

const SECONDS: u32 = 40;
/// Requests per second; one in seven is long.
const RATE: f64 = 20.0;
/// Allowed relative difference between the two P99.
const TOLERANCE: f64 = 0.05;

#[test]
#[ignore = "needs Prometheus and takes a minute"]
fn the_p99_of_each_class_in_prometheus_is_that_of_bench() {
    let deployment = Deployment::start();
    let gateway = &deployment.gateways[0];
    let prometheus = Prometheus::start(&[gateway.admin]);
    let measured = gateway.bench(KEYS[0][0], RATE, SECONDS);
    let completed = measured["completed"].as_f64().unwrap();
    let counted = "sum(sluice_time_to_first_token_seconds_count)";
    eventually("all requests are scraped", || prometheus.query(counted, None).values().sum::<f64>() >= completed);
    for class in ["short", "long"] {
        let of_class = format!("sluice_time_to_first_token_seconds_bucket{{class=\"{class}\"}}");
        let p99 = format!("histogram_quantile(0.99, sum by (le) ({of_class}))");
        let shown: f64 = prometheus.query(&p99, None).values().sum();
        let own = measured["sluice"]["summary"]["by_class"][class]["p99_ttft_ms"]
            .as_f64()
            .unwrap_or_else(|| panic!("{measured}"))
            / 1e3;
        println!("{class}: P99 TTFT {:.1} ms in Prometheus, {:.1} ms in bench", shown * 1e3, own * 1e3);
        assert!((shown / own - 1.0).abs() <= TOLERANCE, "{class}: {shown} and {own} seconds");
    }
}
