//! Attempts at several addresses, of which the first that works wins: RFC 8305, section 5.
//!
//! The next address is tried as soon as one fails, or after a delay while an attempt is open. So an
//! address that drops packets costs the delay, not the whole time limit. The delay is
//! [`ATTEMPT_DELAY`], or less if many addresses share a short limit. Above [`RUNNING_MAX`] open
//! attempts, the oldest is given up.

use std::collections::VecDeque;
use std::future::{Future, poll_fn};
use std::net::SocketAddr;
use std::pin::{Pin, pin};
use std::task::Poll;
use std::time::Duration;

use tokio::time::{Instant, sleep_until};

use super::failure::ConnectError;

/// How long an attempt may be open before the next address is also tried.
pub(super) const ATTEMPT_DELAY: Duration = Duration::from_millis(250);
const DELAY_MIN: Duration = Duration::from_millis(10);
/// The most open attempts of one call.
pub(super) const RUNNING_MAX: usize = 8;

#[derive(Debug)]
pub(super) struct Raced<T> {
    /// The first attempt that worked.
    pub(super) connected: Option<(SocketAddr, T)>,
    /// The attempts that failed before.
    pub(super) failed: Vec<(SocketAddr, ConnectError)>,
    /// Attempts that began before the winner and were still open when it worked.
    pub(super) overtaken: Vec<SocketAddr>,
}

enum RaceEvent<T> {
    Ended(usize, Result<T, ConnectError>),
    Due,
}

/// Tries `addresses` in their order until one works. `limit`: the time that the caller gives all
/// attempts together.
pub(super) async fn race<T, F>(addresses: &[SocketAddr], limit: Duration, attempt: impl Fn(SocketAddr) -> F) -> Raced<T>
where
    F: Future<Output = Result<T, ConnectError>>,
{
    let parts = u32::try_from(addresses.len()).unwrap_or(u32::MAX).saturating_add(1);
    let delay = (limit / parts).clamp(DELAY_MIN, ATTEMPT_DELAY);
    let mut running: VecDeque<(SocketAddr, Pin<Box<F>>)> = VecDeque::new();
    let mut failed = Vec::new();
    let mut timer = pin!(sleep_until(Instant::now()));
    let mut waiting = addresses.iter();
    let mut next = waiting.next();
    loop {
        let event = poll_fn(|cx| {
            for (place, (_, attempt)) in running.iter_mut().enumerate() {
                if let Poll::Ready(result) = attempt.as_mut().poll(cx) {
                    return Poll::Ready(RaceEvent::Ended(place, result));
                }
            }
            if running.is_empty() {
                return Poll::Ready(RaceEvent::Due);
            }
            if next.is_none() {
                return Poll::Pending;
            }
            timer.as_mut().poll(cx).map(|()| RaceEvent::Due)
        });
        match event.await {
            RaceEvent::Ended(place, Ok(connection)) => {
                let overtaken = running.iter().take(place).map(|(address, _)| *address).collect();
                let connected = running.get(place).map(|(address, _)| (*address, connection));
                return Raced { connected, failed, overtaken };
            }
            RaceEvent::Ended(place, Err(error)) => {
                if let Some((address, _)) = running.remove(place) {
                    failed.push((address, error));
                }
                if running.is_empty() && next.is_none() {
                    return Raced { connected: None, failed, overtaken: Vec::new() };
                }
                timer.as_mut().reset(Instant::now());
            }
            RaceEvent::Due => {
                let Some(address) = next else { return Raced { connected: None, failed, overtaken: Vec::new() } };
                if running.len() >= RUNNING_MAX
                    && let Some((oldest, _)) = running.pop_front()
                {
                    failed.push((oldest, ConnectError::Timeout));
                }
                running.push_back((*address, Box::pin(attempt(*address))));
                next = waiting.next();
                timer.as_mut().reset(Instant::now() + delay);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;

    use tokio::time::sleep;

    use super::*;

    const LIMIT: Duration = Duration::from_secs(2);

    /// Races addresses that work or fail after some milliseconds. Returns the result, the attempts
    /// and times, and the duration.
    async fn raced(script: &[(u64, bool)]) -> (Raced<u8>, Vec<(usize, u64)>, u64) {
        let socket = |number: usize| SocketAddr::from(([10, 0, 0, number as u8], 80));
        let addresses: Vec<SocketAddr> = (0..script.len()).map(socket).collect();
        let (begun, started) = (Instant::now(), RefCell::new(Vec::new()));
        let ms = || begun.elapsed().as_millis() as u64;
        let raced = race(&addresses, LIMIT, |address| {
            let number = addresses.iter().position(|other| *other == address).unwrap();
            started.borrow_mut().push((number, ms()));
            let (after, works) = script[number];
            async move {
                sleep(Duration::from_millis(after)).await;
                if works { Ok(number as u8) } else { Err(ConnectError::Tcp("refused".to_owned())) }
            }
        })
        .await;
        (raced, started.into_inner(), ms())
    }

    const NEVER: u64 = 100_000;

    #[tokio::test(start_paused = true)]
    async fn the_next_address_is_tried_at_once_when_one_refuses() {
        let (raced, started, took) = raced(&[(1, false), (1, false), (1, true), (1, true)]).await;
        assert_eq!(raced.connected.unwrap().1, 2);
        assert_eq!(started.iter().map(|(number, _)| *number).collect::<Vec<_>>(), [0, 1, 2]);
        assert_eq!(raced.failed.len(), 2);
        assert!(took < 20, "{took} ms");
    }

    #[tokio::test(start_paused = true)]
    async fn an_address_that_drops_packets_costs_the_delay_and_is_reported_as_overtaken() {
        let (raced, started, took) = raced(&[(NEVER, true), (5, true), (1, true)]).await;
        assert_eq!(raced.connected.unwrap().1, 1);
        assert_eq!(started, [(0, 0), (1, 250)]);
        assert_eq!(raced.overtaken.len(), 1);
        assert!((255..300).contains(&took), "{took} ms");
    }

    #[tokio::test(start_paused = true)]
    async fn a_slow_address_may_still_win() {
        let (raced, ..) = raced(&[(300, true), (NEVER, true)]).await;
        assert_eq!(raced.connected.unwrap().1, 0);
        assert!(raced.overtaken.is_empty());
    }

    #[tokio::test(start_paused = true)]
    async fn a_hundred_dead_addresses_leave_time_for_the_one_that_works() {
        let mut script = vec![(NEVER, true); 100];
        script[77] = (1, true);
        let (raced, _, took) = raced(&script).await;
        assert_eq!(raced.connected.unwrap().1, 77);
        assert!(took < LIMIT.as_millis() as u64, "{took} ms");
        assert!(raced.overtaken.len() < RUNNING_MAX);
    }

    #[tokio::test(start_paused = true)]
    async fn all_failures_are_returned_when_none_works() {
        let (raced, ..) = raced(&[(1, false), (2, false)]).await;
        assert!(raced.connected.is_none());
        assert_eq!(raced.failed.len(), 2);
    }
}
