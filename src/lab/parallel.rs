//! Spreads runs over threads.
//!
//! Results are in the order of the jobs, whatever the number of threads. Bounds: the requested
//! threads, at least one and at most one for each job.

use std::sync::atomic::{AtomicUsize, Ordering};

use parking_lot::Mutex;

/// Results of `job` for 0 to `count` - 1. A panic of a job becomes a panic of the caller.
pub(crate) fn each<T: Send>(count: usize, threads: usize, job: impl Fn(usize) -> T + Sync) -> Vec<T> {
    let next = AtomicUsize::new(0);
    let done: Mutex<Vec<Option<T>>> = Mutex::new((0..count).map(|_| None).collect());
    let work = || {
        loop {
            let at = next.fetch_add(1, Ordering::Relaxed);
            if at >= count {
                return;
            }
            let result = job(at);
            done.lock()[at] = Some(result);
        }
    };
    std::thread::scope(|scope| {
        for _ in 0..threads.clamp(1, count.max(1)) {
            scope.spawn(work);
        }
    });
    done.into_inner().into_iter().flatten().collect()
}

pub(crate) fn cores() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn jobs_run_on_so_many_threads_at_most_and_their_results_are_in_order() {
        let (running, most) = (AtomicUsize::new(0), AtomicUsize::new(0));
        let job = |at: usize| {
            most.fetch_max(running.fetch_add(1, Ordering::SeqCst) + 1, Ordering::SeqCst);
            std::thread::yield_now();
            running.fetch_sub(1, Ordering::SeqCst);
            at * 2
        };
        assert_eq!(each(20, 3, job), (0..20).map(|at| at * 2).collect::<Vec<_>>());
        assert!(most.into_inner() <= 3);
        assert!(each(0, 3, |at| at).is_empty());
    }
}
