//! Whether this gateway may act on engines now.
//!
//! One gateway leads at a time. Its lease ends unless it keeps renewing the lease. A process that
//! was suspended or got no processor does not notice that the lease has ended. So all code that
//! acts on engines first reads the clock.

use std::future::poll_fn;
use std::pin::pin;
use std::task::Poll;

use tokio::sync::watch;
use tokio::time::{Instant, sleep_until};

#[derive(Clone, Copy, Debug, Default)]
enum Term {
    /// No gateway is elected: each one runs its own engines.
    #[default]
    Always,
    /// This gateway leads until this moment; `None`: another one may lead.
    Elected(Option<Instant>),
}

impl Term {
    fn is_held(self) -> bool {
        match self {
            Self::Always => true,
            Self::Elected(until) => until.is_some_and(|until| Instant::now() < until),
        }
    }
}

/// Says whether this gateway may act on engines. By default it always may.
#[derive(Debug, Default)]
pub struct Lead(watch::Sender<Term>);

impl Lead {
    /// Lets the gateway act until this moment; `None`: not at all.
    pub fn set(&self, until: Option<Instant>) {
        self.0.send_replace(Term::Elected(until));
    }

    /// Whether gateways elect a leader.
    pub fn is_elected(&self) -> bool {
        matches!(*self.0.borrow(), Term::Elected(_))
    }

    /// Whether the gateway may act.
    pub fn is_held(&self) -> bool {
        self.0.borrow().is_held()
    }

    /// Returns when the gateway may act.
    pub async fn held(&self) {
        let mut terms = self.0.subscribe();
        // Cannot fail: `self` has the sender.
        let _ = terms.wait_for(|term| term.is_held()).await;
    }

    /// Returns when the gateway may no longer act. Poll it before the future that acts.
    pub async fn lost(&self) {
        let mut terms = self.0.subscribe();
        loop {
            let term = *terms.borrow_and_update();
            if !term.is_held() {
                return;
            }
            let mut end = pin!(async {
                match term {
                    Term::Elected(Some(until)) => sleep_until(until).await,
                    _ => std::future::pending().await,
                }
            });
            // The timer may come late, after the future that acts was polled.
            let over = poll_fn(|cx| if self.is_held() { end.as_mut().poll(cx) } else { Poll::Ready(()) });
            tokio::select! {
                biased;
                () = over => {}
                _ = terms.changed() => {}
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn it_is_lost_at_the_end_of_the_last_term() {
        let lead = Lead::default();
        assert!(lead.is_held());
        let begun = Instant::now();
        lead.set(Some(begun + Duration::from_secs(5)));
        let renews = async {
            tokio::time::sleep(Duration::from_secs(4)).await;
            lead.set(Some(begun + Duration::from_secs(9)));
        };
        tokio::join!(lead.lost(), renews);
        assert_eq!(begun.elapsed(), Duration::from_secs(9));
        assert!(!lead.is_held());
    }

    #[tokio::test(start_paused = true)]
    async fn what_goes_on_after_the_end_does_not_act_whatever_wakes_it_first() {
        let lead = Lead::default();
        lead.set(Some(Instant::now() + Duration::from_secs(5)));
        let (wake, woken) = tokio::sync::oneshot::channel();
        let acts = async {
            tokio::select! {
                biased;
                () = lead.lost() => false,
                _ = woken => true,
            }
        };
        // Time passes without a turn of the timers, as in a suspended process.
        let stopped = async {
            lead.set(None);
            let _ = wake.send(());
        };
        let (acted, ()) = tokio::join!(acts, stopped);
        assert!(!acted);
    }
}
