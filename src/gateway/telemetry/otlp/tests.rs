//! The exporter in front of collectors that refuse, hang, close connections or are gone.
//!
//! A thread answers as the test defines.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::AtomicUsize;
use std::sync::mpsc::{Receiver, Sender, channel};

use opentelemetry_proto::tonic::collector::metrics::v1::ExportMetricsServiceRequest;
use opentelemetry_proto::tonic::collector::trace::v1::{
    ExportTracePartialSuccess, ExportTraceServiceRequest, ExportTraceServiceResponse,
};
use opentelemetry_proto::tonic::metrics::v1::metric::Data;
use opentelemetry_proto::tonic::metrics::v1::number_data_point;
use prost::Message;

use super::super::exposition::Scraped;
use super::*;
use crate::flow::trace::{RequestTrace, TRACEPARENT};
use crate::telemetry::Telemetry;
use crate::telemetry::testing::completed;
use sluice_config::{Config, Machine, Surroundings};

const SOON: Duration = Duration::from_secs(20);

struct TestCollector {
    address: SocketAddr,
    got: Receiver<(String, Vec<u8>)>,
}

/// The answer to a request by the request's number; `None`: no answer at all.
type Answer = fn(usize) -> Option<Vec<u8>>;

impl TestCollector {
    fn start(answer: Answer) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let (say, got) = channel();
        std::thread::spawn(move || {
            let number = Arc::new(AtomicUsize::new(0));
            // Traces and metrics have one connection each, which stay open.
            for connection in listener.incoming() {
                let (number, say) = (Arc::clone(&number), say.clone());
                std::thread::spawn(move || serve(connection.unwrap(), answer, &number, &say));
            }
        });
        Self { address, got }
    }

    fn next(&self) -> (String, ExportTraceServiceRequest) {
        let (head, body) = self.any();
        (head, ExportTraceServiceRequest::decode(&*body).unwrap())
    }

    fn any(&self) -> (String, Vec<u8>) {
        self.got.recv_timeout(SOON).expect("a request to the collector")
    }
}

fn serve(mut connection: TcpStream, answer: Answer, number: &AtomicUsize, say: &Sender<(String, Vec<u8>)>) {
    while let Some((head, body)) = read(&mut connection) {
        let _ = say.send((head, body));
        let number = number.fetch_add(1, Ordering::Relaxed) + 1;
        let Some(response) = answer(number) else { return std::mem::forget(connection) };
        connection.write_all(&response).unwrap();
        if String::from_utf8_lossy(&response).contains("silently") {
            return;
        }
    }
}

fn read(connection: &mut TcpStream) -> Option<(String, Vec<u8>)> {
    let (mut got, mut chunk) = (Vec::new(), [0; 4096]);
    loop {
        if let Some(end) = got.windows(4).position(|four| four == b"\r\n\r\n") {
            let head = String::from_utf8(got[..end].to_vec()).unwrap().to_ascii_lowercase();
            let length = head.lines().find_map(|line| line.strip_prefix("content-length: ")).unwrap();
            let whole = end + 4 + length.parse::<usize>().unwrap();
            if got.len() >= whole {
                return Some((head, got[end + 4..whole].to_vec()));
            }
        }
        let read = connection.read(&mut chunk).unwrap_or(0);
        if read == 0 {
            return None;
        }
        got.extend_from_slice(&chunk[..read]);
    }
}

fn response(status: &str, headers: &str, body: &[u8]) -> Vec<u8> {
    let head = format!("HTTP/1.1 {status}\r\ncontent-length: {}\r\n{headers}\r\n", body.len());
    [head.as_bytes(), body].concat()
}

fn config(address: SocketAddr, extra: &str) -> Config {
    let text = format!(
        "[[pool]]\nname = \"p\"\n[[pool.backend]]\nname = \"b\"\nurl = \"http://h:1\"\n\
         [tracing]\nendpoint = \"http://{address}/otlp\"\nheaders = {{ authorization = \"env:T\" }}\n{extra}"
    );
    let env = |_: &str| Some("Bearer letmein".to_owned());
    let around = Surroundings { env: &env, folder: "/".into(), machine: Machine::with_cores(1) };
    Config::parse(&text, "test", &[], &around).unwrap_or_else(|problems| panic!("{problems}")).config
}

fn exporter(address: SocketAddr, extra: &str) -> Exporter {
    let config = config(address, extra);
    Exporter::start(config.tracing.as_ref().unwrap(), Registry::new(), Exemplars::default()).unwrap()
}

fn sampled() -> Record {
    let mut headers = http::HeaderMap::new();
    let parent = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";
    headers.insert(TRACEPARENT, http::HeaderValue::from_static(parent));
    let trace = RequestTrace::of(&headers, Some(1.0), || unreachable!());
    Record { trace, ..completed(Duration::from_millis(30), Duration::from_millis(5)) }
}

fn counts(exporter: &Exporter) -> [u64; 4] {
    let Counts { sent, failed, queue_full, rejected_spans } = &*exporter.counts;
    [sent, failed, queue_full, rejected_spans].map(|count| count.load(Ordering::Relaxed))
}

/// Waits until the counts of traces are `wanted`: sent, failed, queue full, rejected spans.
fn becomes(exporter: &Exporter, wanted: [u64; 4]) {
    let deadline = Instant::now() + SOON;
    while counts(exporter) != wanted {
        assert!(Instant::now() < deadline, "{:?}, not {wanted:?}", counts(exporter));
        std::thread::sleep(Duration::from_millis(2));
    }
}

fn names(request: &ExportTraceServiceRequest) -> Vec<&str> {
    let spans = request.resource_spans.iter().flat_map(|of| &of.scope_spans).flat_map(|of| &of.spans);
    spans.map(|span| span.name.as_str()).collect()
}

#[test]
fn traces_of_many_requests_are_sent_together_with_path_and_headers() {
    let collector = TestCollector::start(|_| Some(response("200 OK", "", b"")));
    let exporter = exporter(collector.address, "");
    (0..3).for_each(|_| exporter.take(&sampled()));
    exporter.take(&Record { trace: None, ..sampled() });
    exporter.flush();
    let (head, request) = collector.next();
    assert!(head.starts_with("post /otlp/v1/traces http/1.1"), "{head}");
    for part in ["content-type: application/x-protobuf", "authorization: bearer letmein", "host: 127.0.0.1:"] {
        assert!(head.contains(part), "{head}");
    }
    assert_eq!(names(&request), ["chat llama"; 3]);
    assert_eq!(counts(&exporter), [3, 0, 0, 0]);
}

#[test]
fn a_connection_that_the_collector_closed_while_idle_is_no_failure() {
    let collector = TestCollector::start(|number| {
        let comment = if number == 1 { "x-closes: silently\r\n" } else { "" };
        Some(response("200 OK", comment, b""))
    });
    let exporter = exporter(collector.address, "");
    for number in 1..=3 {
        exporter.take(&sampled());
        exporter.flush();
        becomes(&exporter, [number, 0, 0, 0]);
    }
}

#[test]
fn a_collector_that_refuses_or_takes_a_part_is_counted() {
    let collector = TestCollector::start(|number| {
        let said = ExportTracePartialSuccess { rejected_spans: 1, error_message: "too long".to_owned() };
        let body = ExportTraceServiceResponse { partial_success: Some(said) }.encode_to_vec();
        Some(if number == 1 { response("503 Busy", "", b"") } else { response("200 OK", "", &body) })
    });
    let exporter = exporter(collector.address, "");
    exporter.take(&sampled());
    exporter.flush();
    becomes(&exporter, [0, 1, 0, 0]);
    exporter.take(&sampled());
    exporter.flush();
    becomes(&exporter, [1, 1, 0, 1]);
}

#[test]
fn without_a_collector_traces_are_dropped_and_counted() {
    let gone = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let exporter = exporter(gone, "");
    exporter.take(&sampled());
    exporter.flush();
    becomes(&exporter, [0, 1, 0, 0]);
}

#[test]
fn a_collector_that_hangs_fills_the_queue_and_nothing_waits() {
    let collector = TestCollector::start(|_| None);
    let exporter = exporter(collector.address, "timeout = \"30d\"\nqueue = 4");
    exporter.take(&sampled());
    collector.next();
    let begun = Instant::now();
    (0..10).for_each(|_| exporter.take(&sampled()));
    assert!(begun.elapsed() < SOON);
    assert_eq!(counts(&exporter), [0, 0, 6, 0]);
}

#[test]
fn a_collector_that_is_too_slow_is_given_up() {
    let collector = TestCollector::start(|_| None);
    let exporter = exporter(collector.address, "timeout = \"20ms\"");
    exporter.take(&sampled());
    becomes(&exporter, [0, 1, 0, 0]);
}

#[test]
fn when_the_exporter_is_dropped_what_is_queued_is_sent() {
    let collector = TestCollector::start(|_| Some(response("200 OK", "", b"")));
    let exporter = exporter(collector.address, "");
    exporter.take(&sampled());
    drop(exporter);
    assert_eq!(names(&collector.next().1), ["chat llama"]);
}

#[test]
fn the_metrics_page_has_what_became_of_traces() {
    let gone = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let exporter = exporter(gone, "");
    exporter.take(&sampled());
    exporter.flush();
    let registry = prometheus::Registry::new();
    registry.register(Box::new(Scraped::new(&FAMILIES, exporter.metrics()))).unwrap();
    let page = prometheus::TextEncoder::new().encode_to_string(&registry.gather()).unwrap();
    for line in [
        "sluice_traces_total{result=\"failed\"} 1",
        "sluice_traces_total{result=\"queue_full\"} 0",
        "sluice_traces_total{result=\"sent\"} 0",
        "sluice_trace_spans_rejected_total 0",
    ] {
        assert!(page.contains(line), "{page}");
    }
}

#[test]
fn the_collector_gets_the_metrics_of_the_page_again_and_again_and_at_the_end() {
    let collector = TestCollector::start(|_| Some(response("200 OK", "", b"")));
    let config = config(collector.address, "sample = 0\nmetrics_interval = \"1s\"");
    let telemetry = Telemetry::new(&config, Box::new(Vec::new)).unwrap();
    telemetry.record(&sampled());
    let metrics = |collector: &TestCollector| loop {
        let (head, body) = collector.any();
        if head.starts_with("post /otlp/v1/metrics http/1.1") {
            return ExportMetricsServiceRequest::decode(&*body).unwrap().resource_metrics.remove(0);
        }
    };
    let (_, second) = (metrics(&collector), metrics(&collector));
    let named = |name: &str| second.scope_metrics[0].metrics.iter().find(|metric| metric.name == name).unwrap().clone();
    assert!(format!("{:?}", second.resource).contains("service.instance.id"));
    let Some(Data::Sum(sum)) = named("sluice_requests_total").data else { panic!("a sum") };
    assert!(sum.is_monotonic && sum.aggregation_temporality == 2, "{sum:?}");
    assert_eq!(sum.data_points[0].value, Some(number_data_point::Value::AsDouble(1.0)));
    let ttft = named("sluice_time_to_first_token_seconds");
    assert_eq!(ttft.unit, "s");
    let Some(Data::Histogram(histogram)) = ttft.data else { panic!("a histogram") };
    let point = &histogram.data_points[0];
    assert_eq!((point.count, point.bucket_counts.iter().sum::<u64>()), (1, 1));
    assert_eq!(point.bucket_counts.len(), point.explicit_bounds.len() + 1);
    // The request took 30 ms; bounds are inclusive.
    let bucket = point.bucket_counts.iter().position(|count| *count == 1).unwrap();
    assert_eq!(point.explicit_bounds[bucket], 0.03);
    assert_eq!(point.exemplars[0].trace_id[..4], [0x4b, 0xf9, 0x2f, 0x35]);
    telemetry.record(&sampled());
    telemetry.flush();
    let sums = std::iter::repeat_with(|| metrics(&collector)).map(|all| format!("{all:?}"));
    assert!(sums.take(1_000).any(|all| all.contains("count: 2")), "the last request to a collector has everything");
    let page = telemetry.page();
    assert!(!page.contains("sluice_metrics_exports_total{result=\"sent\"} 0"), "{page}");
}

#[test]
fn metrics_that_a_collector_refuses_are_counted() {
    let collector = TestCollector::start(|_| Some(response("503 Busy", "", b"")));
    let telemetry =
        Telemetry::new(&config(collector.address, "metrics_interval = \"1h\""), Box::new(Vec::new)).unwrap();
    telemetry.flush();
    assert!(telemetry.page().contains("sluice_metrics_exports_total{result=\"failed\"} 1"));
}
