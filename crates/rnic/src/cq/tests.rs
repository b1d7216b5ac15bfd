use super::*;

#[derive(Default)]
struct Count(AtomicUsize);
impl AsyncSink for Count {
    fn async_event(&self, _: AsyncEvent) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }
}
impl CompletionSink for Count {
    fn completion_event(&self, _: u64) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }
}

fn wc(status: WcStatus) -> Wc {
    Wc::new(1, status, WcOpcode::Recv, 1)
}

/// With none left, threads that poll need not call the system.
#[test]
fn feeders_that_need_the_system_are_counted() {
    struct Idle;
    impl Feeder for Idle {
        fn make_progress(&self, _: bool) -> Coverage {
            Coverage::Complete
        }
    }
    let cq = Cq::new(2, 0, None, Arc::new(Count::default()));
    let idle: Arc<dyn Feeder> = Arc::new(Idle);
    assert!(!cq.needs_system());
    // A queue pair that sends and receives here is added twice.
    [1, 1, 2].into_iter().for_each(|qpn| cq.add_feeder(qpn, Arc::downgrade(&idle)));
    cq.set_needs_system(1, false);
    cq.set_needs_system(1, false);
    assert!(cq.needs_system());
    cq.set_needs_system(2, false);
    assert!(!cq.needs_system());
    cq.set_needs_system(1, true);
    cq.set_needs_system(3, true);
    assert!(cq.needs_system());
    cq.remove_feeder(2);
    assert!(cq.needs_system());
    cq.remove_feeder(1);
    cq.remove_feeder(1);
    assert!(!cq.needs_system());
}

#[test]
fn overflow_is_reported_once() {
    let events = Arc::new(Count::default());
    let cq = Cq::new(2, 0, None, events.clone());
    assert!(cq.push(wc(WcStatus::Success), false));
    assert!(cq.push(wc(WcStatus::Success), false));
    assert!(!cq.push(wc(WcStatus::Success), false));
    assert!(!cq.push(wc(WcStatus::Success), false));
    assert_eq!(events.0.load(Ordering::Relaxed), 1);
    assert!(cq.overflowed());
    assert_eq!(cq.poll(10, |_| ()), 2);
}

/// The place stayed taken for ever, although other queue pairs share the queue.
#[test]
fn a_lost_completion_frees_its_place_in_a_shared_queue() {
    let cq = Cq::new(1, 0, None, Arc::new(Count::default()));
    let (places, shared) = (Places::in_order(), Places::in_any_order());
    let own = Outlet::new(cq.clone(), places.clone());
    let pool = Outlet::new(cq.clone(), shared.clone());
    assert!(own.push(1, wc(WcStatus::Success), false));
    assert!(!own.push(2, wc(WcStatus::Success), false));
    assert!(!pool.push(1, wc(WcStatus::Success), false));
    assert_eq!((places.freed(), shared.freed()), (0, 1));
}

#[test]
fn a_dropped_work_queue_drops_its_completions() {
    let cq = Cq::new(16, 0, None, Arc::new(Count::default()));
    let (places, shared) = (Places::in_order(), Places::in_any_order());
    let gone = Outlet::new(cq.clone(), places.clone());
    let stays = Outlet::new(cq.clone(), shared.clone());
    for tail in 1..=3 {
        assert!(gone.push(tail, Wc { wr_id: 1, ..wc(WcStatus::Success) }, false));
        assert!(stays.push(tail, Wc { wr_id: 2, ..wc(WcStatus::Success) }, false));
    }
    assert_eq!(cq.poll(1, |wc| assert_eq!(wc.wr_id, 1)), 1);
    assert_eq!((places.freed(), shared.freed()), (1, 0));
    drop(gone);
    assert_eq!((places.freed(), shared.freed()), (3, 0));
    // A new work queue may get the key of the dropped one.
    let next = Outlet::new(cq.clone(), Places::in_order());
    assert!(next.push(1, Wc { wr_id: 3, ..wc(WcStatus::Success) }, false));
    let mut found = Vec::new();
    cq.poll(16, |wc| found.push(wc.wr_id));
    assert_eq!((found, shared.freed()), (vec![2, 2, 2, 3], 3));
    assert!(cq.is_empty());
}

#[derive(Default)]
struct Looks(AtomicUsize);
impl Feeder for Looks {
    fn make_progress(&self, _: bool) -> Coverage {
        self.0.fetch_add(1, Ordering::Relaxed);
        Coverage::Complete
    }
}

#[test]
fn of_many_feeders_the_one_that_brings_everything_is_polled_directly() {
    const DIRECT: Direct = Direct { few: 2, favourite: 16, partial_every: 4 };
    let cq = Cq::new(64, 0, None, Arc::new(Count::default()));
    let many: Vec<_> = (0..100).map(|_| Arc::new(Looks::default())).collect();
    for (qpn, feeder) in (1..).zip(&many) {
        let feeder: Arc<dyn Feeder> = feeder.clone();
        cq.add_feeder(qpn, Arc::downgrade(&feeder));
    }
    let looks = |index: usize| many[index].0.load(Ordering::Relaxed);
    let complete = |qpn| {
        cq.push(Wc::new(1, WcStatus::Success, WcOpcode::Recv, qpn), false);
        cq.poll(64, drop);
    };
    let covers_all = || cq.make_progress(&DIRECT, true) == Coverage::Complete;
    assert!(!covers_all() && (0..100).all(|index| looks(index) == 0), "only the system knows");
    (0..=DIRECT.favourite + 1).for_each(|_| complete(7));
    cq.note_poll(true);
    let direct = (0..8).filter(|_| cq.note_poll(false) > 0 && covers_all()).count();
    assert_eq!((looks(6), direct), (8, 6), "now and then the system is still asked");
    complete(8);
    assert!(!covers_all());
    assert_eq!(looks(6), 8, "another feeder has brought a completion");
    (1..=99).for_each(|qpn| cq.remove_feeder(qpn));
    assert!(covers_all());
    assert_eq!(looks(99), 1, "the last feeder is polled");
}

#[test]
fn arming_behind_completions_that_no_event_has_announced() {
    let events = Arc::new(Count::default());
    let count = || events.0.load(Ordering::Relaxed);
    let cq = Cq::new(16, 0, Some(events.clone()), Arc::new(Count::default()));
    cq.push(wc(WcStatus::Success), false);
    cq.arm(true);
    assert_eq!(count(), 0, "it is not solicited");
    cq.arm(false);
    assert_eq!(count(), 1);
    cq.push(wc(WcStatus::Success), true);
    cq.arm(false);
    assert_eq!(count(), 1, "the program knows that it must poll");
    cq.push(wc(WcStatus::Success), false);
    assert_eq!(count(), 2);
    assert_eq!(cq.poll(2, drop), 2);
    cq.arm(false);
    assert_eq!(count(), 2, "one is left, and was announced");
    assert_eq!(cq.poll(2, drop), 1);
    cq.push(wc(WcStatus::Success), false);
    assert_eq!(count(), 3);
    assert_eq!(cq.poll(2, drop), 1);
    cq.push(wc(WcStatus::Success), true);
    cq.arm(true);
    assert_eq!(count(), 4);
    assert_eq!(cq.poll(2, drop), 1);
    cq.arm(false);
    assert_eq!(count(), 4, "all has been polled");
}

#[test]
fn arming_both_kinds() {
    let events = Arc::new(Count::default());
    let count = || events.0.load(Ordering::Relaxed);
    let cq = Cq::new(16, 0, Some(events.clone()), Arc::new(Count::default()));
    cq.push(wc(WcStatus::Success), false);
    assert_eq!(count(), 0);
    cq.arm(true);
    cq.push(wc(WcStatus::Success), false);
    assert_eq!(count(), 0);
    cq.push(wc(WcStatus::Success), true);
    assert_eq!(count(), 1);
    cq.push(wc(WcStatus::Success), true);
    assert_eq!(count(), 1);
    cq.arm(true);
    cq.push(wc(WcStatus::WrFlushErr), false);
    assert_eq!(count(), 2);
    cq.arm(false);
    cq.arm(true);
    cq.push(wc(WcStatus::Success), false);
    assert_eq!(count(), 3);
}
