//! The arrangements in turn, in real time, behind one gateway.
//!
//! A round puts every arrangement in force, sends it the same requests, and ends with the
//! comparison. `--once` runs one round. If requests were sent late, the machine was too busy, and
//! the arrangement is measured again with new engines. Bounds: [`ATTEMPTS`], [`REQUEST_LIMIT`].

use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context as _;
use tokio::time::Instant;

use super::arrangement::{ALL, Arrangement};
use super::compare::{Comparison, LATE_MS, Row};
use super::load::{DemoArgs, RATES, plan};
use crate::cli::line::Line;
use sluice_bench::{LoadClient, RunPlan, RunResult};

/// Time after which a request counts as failed. The slowest measured request took 14 s.
const REQUEST_LIMIT: Duration = Duration::from_secs(120);
/// Warm-up requests of each class, enough to use every engine and connection.
const WARM_UP: u64 = 4;
/// Most measurements of an arrangement on a busy machine. The last one counts.
const ATTEMPTS: u32 = 2;
/// First number of the warm-up requests, far from the numbers of counted requests.
const WARM_UP_FROM: u64 = 1 << 40;

pub(super) struct Out<'a> {
    pub(super) row: &'a dyn Fn(&Row, bool) -> anyhow::Result<()>,
    pub(super) end: &'a dyn Fn(&Comparison) -> anyhow::Result<()>,
}

/// Runs rounds against the gateway at `url`. `put` puts an arrangement in force; `stopped` ends
/// when the user stops the demo.
pub(super) async fn show(
    args: &DemoArgs,
    url: &str,
    put: impl AsyncFn(Arrangement) -> anyhow::Result<()>,
    out: &Out<'_>,
    stopped: impl Future<Output = ()>,
) -> anyhow::Result<ExitCode> {
    let rounds = async {
        loop {
            let comparison = round(args, url, &put, out).await?;
            (out.end)(&comparison)?;
            if args.once {
                let failed = comparison.failures() > 0;
                return anyhow::Ok(if failed { ExitCode::FAILURE } else { ExitCode::SUCCESS });
            }
        }
    };
    tokio::select! {
        ended = rounds => ended,
        () = stopped => {
            if args.once {
                eprintln!("interrupted before all three arrangements were measured, so there is no live result");
            }
            Ok(if args.once { ExitCode::FAILURE } else { ExitCode::SUCCESS })
        }
    }
}

async fn round(
    args: &DemoArgs,
    url: &str,
    put: &impl AsyncFn(Arrangement) -> anyhow::Result<()>,
    out: &Out<'_>,
) -> anyhow::Result<Comparison> {
    let plan = plan(args.seed, args.seconds());
    let mut rows = Vec::new();
    for (index, arrangement) in ALL.into_iter().enumerate() {
        let title = format!("{} of {}: {}", index + 1, ALL.len(), arrangement.label());
        for attempt in 1..=ATTEMPTS {
            put(arrangement).await.with_context(|| format!("cannot start '{}'", arrangement.label()))?;
            let row = Row::of(arrangement, &measure(&plan, url, &title).await?);
            let late = row.late_ms();
            if attempt == ATTEMPTS || late <= LATE_MS {
                (out.row)(&row, rows.is_empty())?;
                rows.push(row);
                break;
            }
            eprintln!(
                "{}: this machine was busy (requests were sent {late:.0} ms late), measuring again",
                arrangement.label()
            );
        }
    }
    Ok(Comparison { rows, seconds: args.seconds(), seed: args.seed })
}

async fn measure(plan: &RunPlan, url: &str, title: &str) -> anyhow::Result<RunResult> {
    let client = Arc::new(LoadClient::new(&[url.to_owned()], plan.workload.api, REQUEST_LIMIT)?);
    for ordinal in WARM_UP_FROM..WARM_UP_FROM + WARM_UP {
        for class in 0..RATES.len() {
            let question = plan.workload.request_in_class(class as u32, ordinal);
            client
                .send(&question, Instant::now())
                .await
                .map_err(|failure| anyhow::anyhow!("the first requests failed ({failure})"))?;
        }
    }
    let progress = Arc::new(sluice_bench::Progress::default());
    let shown = Line::start(title, plan.extent, progress.clone());
    let run = sluice_bench::run(plan, &client, &progress).await?;
    shown.end();
    Ok(run)
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::super::load::TYPICAL_SEED;
    use super::*;
    use sluice_bench::testing::{MockEngine, MockResponse, completion_stream};

    fn args(once: bool) -> DemoArgs {
        DemoArgs { once, json: true, seconds: Some(1.0), seed: TYPICAL_SEED, listen: None, admin: None }
    }

    async fn engine() -> MockEngine {
        MockEngine::start(|_| MockResponse::stream(completion_stream(2), Duration::ZERO)).await
    }

    fn is(code: ExitCode, wanted: ExitCode) -> bool {
        format!("{code:?}") == format!("{wanted:?}")
    }

    #[tokio::test]
    async fn three_arrangements_get_the_same_requests_and_each_is_shown_once() {
        let engine = engine().await;
        let (put, shown, ended) = (RefCell::new(Vec::new()), RefCell::new(Vec::new()), RefCell::new(Vec::new()));
        let row = |row: &Row, first: bool| {
            shown.borrow_mut().push((row.arrangement, first));
            anyhow::Ok(())
        };
        let end = |all: &Comparison| {
            ended.borrow_mut().push(all.rows.iter().map(|row| row.all.sent).collect::<Vec<u64>>());
            anyhow::Ok(())
        };
        let putting = async |arrangement: Arrangement| {
            put.borrow_mut().push(arrangement);
            anyhow::Ok(())
        };
        let out = Out { row: &row, end: &end };
        let code = show(&args(true), &engine.url(), putting, &out, std::future::pending()).await.unwrap();
        assert!(is(code, ExitCode::SUCCESS));
        assert_eq!(*shown.borrow(), [(ALL[0], true), (ALL[1], false), (ALL[2], false)]);
        let mut order = put.into_inner();
        order.dedup();
        assert_eq!(order, ALL);
        let [sent] = &ended.borrow()[..] else { panic!("one round") };
        assert!(sent.len() == 3 && sent[0] > 0 && sent.iter().all(|count| *count == sent[0]), "{sent:?}");
    }

    #[tokio::test]
    async fn without_once_the_first_arrangement_follows_the_last_until_the_user_stops() {
        let engine = engine().await;
        let (rounds, (stop, mut stopped)) = (AtomicUsize::new(0), tokio::sync::mpsc::channel(1));
        let end = |_: &Comparison| {
            if rounds.fetch_add(1, Ordering::SeqCst) == 1 {
                stop.try_send(())?;
            }
            anyhow::Ok(())
        };
        let out = Out { row: &|_, _| Ok(()), end: &end };
        let stopping = async move { stopped.recv().await.unwrap_or(()) };
        let code = show(&args(false), &engine.url(), async |_| anyhow::Ok(()), &out, stopping).await.unwrap();
        assert!(is(code, ExitCode::SUCCESS));
        assert_eq!(rounds.load(Ordering::SeqCst), 2);
    }

    #[tokio::test]
    async fn failed_requests_make_the_demo_fail() {
        let since = Arc::new(AtomicUsize::new(0));
        let counted = Arc::clone(&since);
        let engine = MockEngine::start(move |_| MockResponse {
            status: if counted.fetch_add(1, Ordering::SeqCst) < 2 * WARM_UP as usize { 200 } else { 503 },
            ..MockResponse::stream(completion_stream(2), Duration::ZERO)
        })
        .await;
        let put = async |_: Arrangement| {
            since.store(0, Ordering::SeqCst);
            anyhow::Ok(())
        };
        let out = Out { row: &|_, _| Ok(()), end: &|_| Ok(()) };
        let code = show(&args(true), &engine.url(), put, &out, std::future::pending()).await.unwrap();
        assert!(is(code, ExitCode::FAILURE));
    }

    #[tokio::test]
    async fn an_interrupt_ends_it_at_once() {
        let out = Out { row: &|_, _| Ok(()), end: &|_| Ok(()) };
        let put = async |_: Arrangement| std::future::pending::<anyhow::Result<()>>().await;
        let code = show(&args(true), "http://127.0.0.1:9", put, &out, std::future::ready(())).await.unwrap();
        assert!(is(code, ExitCode::FAILURE));
    }
}
