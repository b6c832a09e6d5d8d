//! Data-parallel ranks behind one address, and the times that the engine reports.
//!
//! The header of a request chooses the rank; otherwise the rank with the lowest load gets it.

use std::sync::Arc;

use super::*;

/// Sends a completion with these headers and fields.
async fn complete(handle: &Handle, header: &str, fields: &str) -> (u16, String) {
    let body = format!("{{\"model\":\"m\",\"prompt\":\"hello\",\"max_tokens\":4,\"ignore_eos\":true{fields}}}");
    let mut stream = TcpStream::connect(handle.addr()).await.unwrap();
    let head = format!("POST {COMPLETION} HTTP/1.1\r\nhost: sim\r\ncontent-type: application/json\r\n{header}");
    let rest = format!("content-length: {}\r\nconnection: close\r\n\r\n{body}", body.len());
    stream.write_all((head + &rest).as_bytes()).await.unwrap();
    let (status, _, body, _) = receive(stream).await;
    (status, body)
}

fn finished(handle: &Handle) -> Vec<u64> {
    handle.by_rank().iter().map(|rank| rank.finished).collect()
}

#[tokio::test]
async fn the_header_chooses_the_rank_and_without_it_the_least_loaded_gets_the_request() {
    let handle = Arc::new(server(|config| config.data_parallel = 3).await);
    for _ in 0..4 {
        assert_eq!(complete(&handle, "X-data-parallel-rank: 2\r\n", "").await.0, 200);
    }
    assert_eq!(finished(&handle), [0, 0, 4]);
    let (status, body) = complete(&handle, "X-data-parallel-rank: 3\r\n", "").await;
    assert_eq!((status, body.contains("data_parallel_rank 3 is out of range [0, 3).")), (400, true), "{body}");
    // vLLM ignores a header that is no number.
    let mut many = tokio::task::JoinSet::new();
    for _ in 0..30 {
        let handle = Arc::clone(&handle);
        many.spawn(async move { complete(&handle, "X-data-parallel-rank: x\r\n", ",\"n\":2").await });
    }
    assert!(many.join_all().await.iter().all(|(status, _)| *status == 200));
    let (_, page) = call(&handle, "GET", "/metrics", "").await;
    for (rank, finished) in finished(&handle).into_iter().enumerate() {
        assert!(finished >= 10, "rank {rank} finished {finished} of 64");
        let shown =
            format!("vllm:request_success_total{{engine=\"{rank}\",finished_reason=\"length\",model_name=\"m\"}}");
        assert!(page.contains(&format!("{shown} {finished}.0\n")), "{page}");
    }
}

#[tokio::test]
async fn the_times_of_a_request_come_with_the_usage() {
    let handle = server(|config| config.request_metrics = true).await;
    let (_, whole) = complete(&handle, "", "").await;
    let whole: Value = serde_json::from_str(&whole).unwrap();
    let prefill = whole["metrics"]["time_to_first_token_ms"].as_f64().unwrap();
    assert!(prefill > 0.0 && whole["metrics"]["queue_time_ms"].as_f64().unwrap() >= 0.0, "{whole}");
    assert!(whole["metrics"]["speculative_decoding"].is_null());
    let (_, stream) = complete(&handle, "", ",\"stream\":true,\"stream_options\":{\"include_usage\":true}").await;
    assert_eq!(stream.matches("\"metrics\":{\"time_to_first_token_ms\":").count(), 1, "{stream}");
    let (_, stream) = complete(&handle, "", ",\"stream\":true").await;
    assert!(!stream.contains("metrics"), "{stream}");
    for (fields, count) in [("", 1), (",\"stream\":true", 1)] {
        let body = format!("{{\"model\":\"m\",\"input\":\"hello\",\"max_output_tokens\":4{fields}}}");
        let (_, text) = call(&handle, "POST", "/v1/responses", &body).await;
        assert_eq!(text.matches("\"metrics\":{\"time_to_first_token_ms\":").count(), count, "{text}");
    }
}
