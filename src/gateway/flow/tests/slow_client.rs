//! A client that reads slower than the engine writes.
//!
//! The gateway must hold the bytes for such a client, within bounds, and keep no resource of the
//! engine for it.

use super::*;

/// A client that takes each piece of the body only after a pause; the last pause repeats.
struct SlowClient {
    inner: TestClient,
    pauses: Vec<Duration>,
    /// Number of pieces after which the client has left.
    leaves_after: usize,
}

impl SlowClient {
    fn new(pauses: &[u64]) -> Self {
        let pauses = pauses.iter().rev().map(|ms| Duration::from_millis(*ms)).collect();
        Self { inner: TestClient::default(), pauses, leaves_after: usize::MAX }
    }
}

impl Downstream for SlowClient {
    async fn head(&mut self, head: ResponseHead) -> Result<(), ClientGone> {
        self.inner.head(head).await
    }

    async fn body(&mut self, bytes: Bytes, more: bool) -> Result<(), ClientGone> {
        let pause = if self.pauses.len() > 1 { self.pauses.pop() } else { self.pauses.last().copied() };
        sleep(pause.unwrap_or_default()).await;
        if self.inner.announced.len() >= self.leaves_after {
            return Err(ClientGone);
        }
        self.inner.body(bytes, more).await
    }

    async fn finish(&mut self) -> Result<(), ClientGone> {
        self.inner.finish().await
    }

    fn abort(&mut self) {
        self.inner.abort();
    }

    async fn gone(&mut self) {
        std::future::pending().await
    }
}

/// `words` tokens, one every 5 ms, and a proper end.
fn stream(words: usize) -> Vec<(u64, &'static str)> {
    let mut chunks = vec![(10, ROLE)];
    chunks.extend((0..words).map(|_| (5, WORD)));
    chunks.extend([(5, LAST), (0, USAGE), (0, DONE)]);
    chunks
}

fn sent(words: usize) -> String {
    [ROLE, &WORD.repeat(words), LAST, DONE].concat()
}

async fn run(test: &TestFlow, client: &mut SlowClient) -> Record {
    test.flow.run(test.incoming(STREAM), client).await;
    let record = test.records.0.lock().pop().expect("a record");
    test.idle();
    record
}

fn ms(ms: u64) -> Duration {
    Duration::from_millis(ms)
}

#[tokio::test(start_paused = true)]
async fn the_pauses_of_a_client_are_its_own_time_and_no_part_of_the_engine_s() {
    let test = TestFlow::new(vec![Script::Stream(stream(60), true)], vec![good()]);
    let mut client = SlowClient::new(&[8_000, 0]);
    let serving = test.flow.run(test.incoming(STREAM), &mut client);
    let looking = async {
        sleep(ms(200)).await;
        assert_eq!(test.flow.admission().load(), (1, 0), "the engine generates");
        sleep(ms(200)).await;
        assert_eq!(test.flow.admission().load(), (0, 0), "the engine has ended, and the client has not read");
        assert_eq!(*test.flow.upstream().open.lock(), 0, "its connection can be used again");
        assert!(test.records.0.lock().is_empty(), "the client still reads");
        assert!(test.flow.response_memory().view().used > 4_000);
    };
    tokio::join!(serving, looking);
    let record = test.records.0.lock().pop().unwrap();
    assert_eq!(String::from_utf8(client.inner.body).unwrap(), sent(60));
    assert!(client.inner.finished);
    let stats = record.stats.clone().unwrap();
    assert_eq!((record.outcome, stats.ttft, stats.e2el), (Outcome::Completed, Some(ms(15)), Some(ms(315))));
    assert_eq!(stats.itl.max_seconds(), 0.005);
    assert_eq!((record.client_wait, record.held_up, record.e2el()), (ms(8_000), false, Some(ms(315))));
    assert_eq!((record.total, test.flow.response_memory().view().used), (ms(8_015), 0));
}

#[tokio::test(start_paused = true)]
async fn a_client_that_keeps_up_waits_for_nothing_and_leaves_no_backlog() {
    let test = TestFlow::new(vec![Script::Stream(stream(60), true)], vec![good()]);
    let record = run(&test, &mut SlowClient::new(&[0])).await;
    assert_eq!((record.client_wait, record.held_up), (Duration::ZERO, false));
}

#[tokio::test(start_paused = true)]
async fn at_the_bound_the_engine_is_not_read_and_has_no_times_from_then_on() {
    let long: &'static str = WORD.repeat(4_000).leak();
    let mut chunks = vec![(10, ROLE), (5, WORD)];
    chunks.extend((0..8).map(|_| (5, long)));
    chunks.extend([(5, LAST), (0, USAGE), (0, DONE)]);
    let test = TestFlow::with(vec![Script::Stream(chunks, true)], vec![good()], "slo = { e2el = \"1s\" }");
    test.flow.set_response_memory(512 << 10);
    let mut client = SlowClient::new(&[20_000, 1]);
    let serving = test.flow.run(test.incoming(STREAM), &mut client);
    let looking = async {
        sleep(ms(10_000)).await;
        let held = test.flow.response_memory().view().used;
        assert!((400 << 10..=512 << 10).contains(&held), "{held}");
        assert_eq!(test.flow.admission().load(), (1, 0), "it may go on to generate");
        let now = Instant::now();
        assert!(test.flow.admission().silent_backends(ms(5_000), now).is_empty(), "the client is silent");
    };
    tokio::join!(serving, looking);
    let record = test.records.0.lock().pop().unwrap();
    assert_eq!(client.inner.body.len(), sent(1).len() + 8 * long.len());
    let stats = record.stats.clone().unwrap();
    assert_eq!((record.outcome, record.held_up, stats.ttft), (Outcome::Completed, true, Some(ms(15))));
    assert_eq!((stats.e2el, stats.tpot, record.e2el(), record.slo_met), (None, None, None, None));
    assert!(stats.itl.max_seconds() < 0.006, "{}", stats.itl.max_seconds());
    test.idle();
}

#[tokio::test(start_paused = true)]
async fn an_engine_that_dies_while_its_client_is_slow_is_reported_behind_all_that_came() {
    let chunks = stream(60)[..40].to_vec();
    let test = TestFlow::new(vec![Script::Stream(chunks, false)], vec![good()]);
    let mut client = SlowClient::new(&[3_000, 0]);
    let serving = test.flow.run(test.incoming(STREAM), &mut client);
    let looking = async {
        sleep(ms(1_000)).await;
        assert_eq!(test.flow.admission().load(), (0, 0), "the backend has no part in it any more");
    };
    tokio::join!(serving, looking);
    let record = test.records.0.lock().pop().unwrap();
    assert_eq!(record.outcome, Outcome::UpstreamError(UpstreamFault::Broken));
    let body = String::from_utf8(client.inner.body).unwrap();
    assert!(body.starts_with(&[ROLE, &WORD.repeat(39)].concat()) && body.contains("event: error"));
    assert!(client.inner.aborted && !client.inner.finished);
}

#[tokio::test(start_paused = true)]
async fn a_client_that_leaves_before_it_has_all_did_not_complete() {
    let test = TestFlow::new(vec![Script::Stream(stream(600), true)], vec![good()]);
    let mut client = SlowClient::new(&[8_000, 0]);
    client.leaves_after = 2;
    let record = run(&test, &mut client).await;
    assert_eq!((record.outcome, record.stats.unwrap().generated()), (Outcome::ClientGone, 601));
}

#[tokio::test(start_paused = true)]
async fn a_shutdown_does_not_wait_for_a_client_beyond_its_time() {
    let test = TestFlow::new(vec![Script::Stream(stream(60), true)], vec![good()]);
    let mut client = SlowClient::new(&[60_000]);
    let serving = test.flow.run(test.incoming(STREAM), &mut client);
    let stopping = async {
        sleep(ms(1_000)).await;
        test.flow.abort_all();
    };
    tokio::join!(serving, stopping);
    let record = test.records.0.lock().pop().unwrap();
    assert_eq!((record.outcome, record.total), (Outcome::Timeout(Stage::Drain), ms(1_000)));
    assert!(client.inner.aborted);
}

#[tokio::test(start_paused = true)]
async fn a_stream_moves_to_another_engine_while_its_client_reads_a_ping() {
    let dying = Script::Stream(vec![(1, ": ping\n\n"), (5, ROLE), (5, BUSY)], true);
    let test = TestFlow::new(vec![dying], vec![good()]);
    let mut client = SlowClient::new(&[4_000, 0]);
    let serving = test.flow.run(test.incoming(STREAM), &mut client);
    let looking = async {
        sleep(ms(1_000)).await;
        assert_eq!(test.flow.admission().load(), (0, 0), "the first engine has no part in it any more");
    };
    tokio::join!(serving, looking);
    let record = test.records.0.lock().pop().unwrap();
    assert_eq!((record.outcome, record.retries.len()), (Outcome::Completed, 1));
    let body = String::from_utf8(client.inner.body).unwrap();
    assert_eq!(body, [": ping\n\n", ROLE, WORD, LAST, DONE].concat());
}
