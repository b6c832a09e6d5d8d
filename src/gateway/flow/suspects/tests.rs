//! Which bodies are refused after engines died, on paused time.
//!
//! The tests play deaths by hand: they begin trials, deliver them to backends and report that these
//! died. They check the turns of suspects and the bounds on remembered bodies too.

use super::*;

fn backend(number: usize) -> BackendId {
    BackendId::new(number)
}

fn bodies(suspects: &Suspects) -> [BodyHash; 3] {
    [&b"poison"[..], b"one", b"two"].map(|body| suspects.hash(body))
}

#[tokio::test(start_paused = true)]
async fn the_body_that_was_there_at_two_deaths_is_refused_and_a_bystander_of_each_is_not() {
    let suspects = Arc::new(Suspects::default());
    let [poison, one, two] = bodies(&suspects);
    let now = Instant::now();
    for body in [poison, one] {
        assert_eq!(suspects.died(body, None, backend(0), now), Fate::Suspect);
    }
    let trial = suspects.check(poison, now).unwrap().expect("a suspect");
    trial.turn(TurnOf::Whole).await;
    trial.delivered(backend(1), now);
    assert_eq!(suspects.died(two, None, backend(1), now), Fate::Suspect, "first death");
    assert_eq!(suspects.died(poison, Some(&trial), backend(1), now), Fate::Refused);
    assert_eq!(suspects.check(poison, now).unwrap_err(), REFUSED_FOR);
    drop(trial);
    for body in [one, two] {
        let trial = suspects.check(body, now).unwrap().expect("a suspect");
        trial.turn(TurnOf::Whole).await;
        trial.delivered(backend(2), now);
        trial.acquitted();
        drop(trial);
        assert!(suspects.check(body, now).unwrap().is_none(), "served whole");
    }
    assert!(suspects.check(poison, now + REFUSED_FOR).unwrap().is_none(), "for a while");
    assert_eq!(suspects.counts(), (0, 0));
}

#[tokio::test(start_paused = true)]
async fn several_suspects_on_one_engine_are_not_refused_and_one_behind_its_first_token_is_not_accused() {
    let suspects = Arc::new(Suspects::default());
    let [poison, one, two] = bodies(&suspects);
    let now = Instant::now();
    let begin = |body| {
        suspects.died(body, None, backend(0), now);
        let trial = suspects.check(body, now).unwrap().unwrap();
        trial.delivered(backend(1), now);
        trial
    };
    let trials = [poison, one].map(begin);
    for (trial, body) in trials.iter().zip([poison, one]) {
        assert_eq!(suspects.died(body, Some(trial), backend(1), now), Fate::Suspect, "either may be the cause");
    }
    drop(trials);
    let trials = [poison, one, two].map(begin);
    trials[1].survived();
    trials[2].survived();
    assert_eq!(suspects.died(one, Some(&trials[1]), backend(1), now), Fate::Suspect);
    assert_eq!(suspects.died(poison, Some(&trials[0]), backend(1), now), Fate::Refused);
    assert_eq!(suspects.died(two, Some(&trials[2]), backend(1), now), Fate::Suspect);
}

#[tokio::test(start_paused = true)]
async fn suspects_have_turns_one_after_another_and_no_wait_is_longer_than_its_bound() {
    let suspects = Arc::new(Suspects::default());
    let begun = Instant::now();
    let trials: Vec<SuspectTurn> = (0..20u8).map(|number| suspects.trial(suspects.hash(&[number]))).collect();
    trials[0].turn(TurnOf::Whole).await;
    trials[0].survived();
    trials[1].turn(TurnOf::Whole).await;
    assert_eq!(begun.elapsed(), Duration::ZERO, "the first token of one lets in the next");
    for trial in &trials[2..] {
        trial.turn(TurnOf::Whole).await;
    }
    let longest = begun.elapsed();
    assert_eq!(longest, TURN * 18, "each has its turn");
    let late = suspects.trial(suspects.hash(b"late"));
    let hold = async {
        for trial in &trials {
            trial.turn(TurnOf::Whole).await;
        }
    };
    let waited = async {
        let begun = Instant::now();
        late.turn(TurnOf::Whole).await;
        begun.elapsed()
    };
    let (waited, ()) = tokio::join!(waited, hold);
    assert!(waited <= WAIT_MAX, "{waited:?}");
}

#[tokio::test(start_paused = true)]
async fn continued_streams_have_more_turns_with_each_that_gets_a_token_until_an_engine_dies() {
    let suspects = Arc::new(Suspects::default());
    let now = Instant::now();
    let trials: Vec<SuspectTurn> = (0..40u8).map(|number| suspects.trial(suspects.hash(&[number]))).collect();
    let whole = suspects.trial(suspects.hash(b"whole"));
    // In each round all streams that have a turn get a token, so 1, 2, 4 ... have a turn at once.
    let (mut next, mut rounds) = (0, Vec::new());
    while next < trials.len() {
        let mut round = Vec::new();
        while next < trials.len() {
            let took = suspects.state.lock().take_turn(trials[next].serial, TurnOf::Continued, now);
            if took.is_err() {
                break;
            }
            round.push(next);
            next += 1;
        }
        whole.turn(TurnOf::Whole).await;
        round.iter().for_each(|at| trials[*at].survived());
        rounds.push(round.len());
    }
    assert_eq!(rounds, [1, 2, 4, 8, 16, 9]);
    assert_eq!(now.elapsed(), Duration::ZERO, "no line waits for the other");
    suspects.died(suspects.hash(b"other"), None, backend(0), now);
    let mut state = suspects.state.lock();
    assert_eq!(state.take_turn(trials[0].serial, TurnOf::Continued, now), Ok(()));
    assert_eq!(state.take_turn(trials[1].serial, TurnOf::Continued, now), Err(now + TURN));
}

async fn is_death(suspects: &Suspects, backend: BackendId, others: u32) -> bool {
    suspects.breaks(backend, others) || suspects.others_broke(backend).await
}

#[tokio::test(start_paused = true)]
async fn a_connection_that_breaks_alone_among_many_is_no_death() {
    let suspects = Suspects::default();
    assert!(is_death(&suspects, backend(0), FEW).await, "one of few");
    tokio::time::sleep(TOGETHER * 2).await;
    assert!(!is_death(&suspects, backend(0), FEW + 1).await);
    tokio::time::sleep(TOGETHER * 2).await;
    let both = tokio::join!(is_death(&suspects, backend(0), 40), is_death(&suspects, backend(0), 40));
    assert_eq!(both, (true, true), "the others broke as well");
    assert!(!is_death(&suspects, backend(1), 40).await, "of another engine");
}

#[test]
fn suspects_are_bounded_and_refused_bodies_are_forgotten_last() {
    let suspects = Arc::new(Suspects::default());
    let now = Instant::now();
    let poison = suspects.hash(b"poison");
    suspects.died(poison, None, backend(0), now);
    let trial = suspects.check(poison, now).unwrap().unwrap();
    trial.delivered(backend(0), now);
    assert_eq!(suspects.died(poison, Some(&trial), backend(0), now), Fate::Refused);
    for number in 0..3 * SUSPECTS_MAX {
        suspects.died(suspects.hash(&number.to_le_bytes()), None, backend(0), now);
        assert!(suspects.counts().0 <= SUSPECTS_MAX);
    }
    assert!(suspects.check(poison, now).is_err());
    let trials: Vec<SuspectTurn> = (0..2 * TRIALS_MAX).map(|_| suspects.trial(poison)).collect();
    assert_eq!(suspects.counts().1, TRIALS_MAX);
    drop(trials);
}

#[test]
fn long_bodies_are_recognised_by_parts_and_length() {
    let suspects = Suspects::default();
    let long = vec![7u8; 100_000];
    let base = suspects.hash(&long);
    assert_eq!(suspects.hash(&long), base);
    for at in [0, 99_999, 60_000 / PART * PART] {
        let mut other = long.clone();
        other[at] = 8;
        let is_sampled = at == 0 || at == 99_999;
        assert!(suspects.hash(&other) != base || !is_sampled, "{at}");
    }
    assert_ne!(suspects.hash(&long[1..]), base, "the length counts");
    assert_ne!(Suspects::default().hash(&long), base, "each process has its own key");
}
