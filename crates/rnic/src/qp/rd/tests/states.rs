//! What the states of a queue pair mean for its messages.

use uwarp_proto::rd::Placed::{Done, Refused};
use uwarp_wire::rd::chunk::Reason;

use super::*;

const FLUSHED: WcStatus = WcStatus::WrFlushErr;

#[test]
fn an_error_flushes_everything_in_the_order_of_posting() {
    let mut a = End::new();
    let list = [a.sge(0, 8)];
    for (wr_id, flags) in [(1, SIGNALED), (2, UNSIGNALED), (3, SIGNALED), (4, UNSIGNALED)] {
        a.send(wr_id, &list, flags).unwrap();
    }
    let tickets = tickets::<4>();
    let requests = [(); 3].map(|()| a.next().request);
    // The machine names them in any order; the second one ends, and its slot is that of another.
    for n in [2, 0, 1] {
        a.core.assign(requests[n], tickets[n]);
    }
    a.core.finished(requests[1], Ok(()));
    a.send(5, &list, UNSIGNALED).unwrap();
    for wr_id in 11..=14 {
        a.recv(wr_id, 0, 8);
    }
    for message in [id(1, 1), id(7, 9), id(2, 9), id(1, 8)] {
        assert_eq!(a.arrives(message, b"x"), Done);
    }
    a.core.deliver(id(1, 1));
    assert_eq!(a.polled(), [(11, WcStatus::Success)]);
    a.modify(QpState::Err);
    let sends = [1, 3, 4, 5].map(|wr_id| (wr_id, FLUSHED));
    let receives = [12, 13, 14].map(|wr_id| (wr_id, FLUSHED));
    assert_eq!(a.polled(), [&sends[..], &receives].concat());
    let withdrawn: Vec<_> = std::iter::from_fn(|| a.core.take_withdrawn()).collect();
    assert_eq!(withdrawn, [tickets[0], tickets[2]]);
    assert_eq!(a.core.snapshot().counters.flushed, 7);
    assert_eq!((a.core.snapshot().sends_posted, a.core.snapshot().receives_posted), (0, 0));
    // What is posted now is flushed, too.
    a.send(6, &list, UNSIGNALED).unwrap();
    a.recv(15, 0, 8);
    assert_eq!(a.polled(), [(6, FLUSHED), (15, FLUSHED)]);
    assert_eq!((a.core.next_message(), a.core.take_withdrawn()), (None, None));
    assert_eq!(a.events(), []);
}

#[test]
fn bound_receives_are_flushed_in_their_order_whatever_their_messages_are_called() {
    for exchange in 1..20 {
        let mut b = End::new();
        for (wr_id, number) in [(1, 3), (2, 1), (3, 4), (4, 2)] {
            b.recv(wr_id, 0, 8);
            assert_eq!(b.arrives(id(exchange, number), b"x"), Done);
        }
        b.modify(QpState::Err);
        assert_eq!(b.polled(), [1, 2, 3, 4].map(|wr_id| (wr_id, FLUSHED)));
    }
}

#[test]
fn nothing_completes_after_an_error_and_segments_are_refused() {
    let mut a = End::new();
    let list = [a.sge(0, 8)];
    a.send(1, &list, SIGNALED).unwrap();
    let sent = a.next();
    a.recv(11, 0, 8);
    a.recv(12, 0, 8);
    assert_eq!(a.place(&segment(id(1, 1), 4, b"efgh", 8)), Done);
    assert_eq!(a.place(&segment(id(1, 2), 4, b"efgh", 8)), Done);
    a.modify(QpState::Err);
    assert_eq!(a.polled(), [(1, FLUSHED), (11, FLUSHED), (12, FLUSHED)]);
    // The machine had no name for it before, and gets one that is withdrawn at once.
    let [ticket] = tickets();
    a.core.assign(sent.request, ticket);
    assert_eq!((a.core.take_withdrawn(), a.core.take_withdrawn()), (Some(ticket), None));
    assert!(!a.core.fill(sent.request, 0, 8, &mut Vec::new()));
    a.core.finished(sent.request, Ok(()));
    a.core.fail(sent.request, WcStatus::LocProtErr);
    assert_eq!(a.place(&segment(id(1, 1), 0, b"abcd", 8)), Refused(Reason::Aborted));
    assert_eq!(a.place(&segment(id(1, 3), 0, b"abcd", 8)), Refused(Reason::InvalidDestination));
    assert!(a.core.take_back(id(1, 1)).is_empty());
    a.core.deliver(id(1, 2));
    assert!(!a.core.take_ready() && a.core.receives.is_empty());
    assert_eq!((a.polled(), a.memory[..4].to_vec()), (vec![], vec![0xEE; 4]));
}

#[test]
fn a_reset_and_a_destruction_forget_without_completions() {
    for destroys in [false, true] {
        let mut a = End::new();
        let list = [a.sge(0, 8)];
        for wr_id in 1..=4 {
            a.send(wr_id, &list, SIGNALED).unwrap();
        }
        let (first, second) = (a.next().request, a.next().request);
        let tickets = tickets::<2>();
        a.core.assign(first, tickets[0]);
        a.core.assign(second, tickets[1]);
        a.core.finished(first, Ok(()));
        for wr_id in 11..=14 {
            a.recv(wr_id, 0, 8);
        }
        assert_eq!(a.place(&segment(id(1, 1), 0, b"ab", 8)), Done);
        assert_eq!(a.place(&segment(id(1, 2), 0, b"ab", 2)), Done);
        a.core.deliver(id(1, 2));
        if destroys {
            a.core.destroy();
        } else {
            a.modify(QpState::Reset);
        }
        assert_eq!(a.polled(), [], "also those that were not polled");
        assert_eq!((a.core.take_withdrawn(), a.core.take_withdrawn()), (Some(tickets[1]), None));
        a.core.finished(second, Err(Failure::Silent));
        assert_eq!(a.place(&segment(id(1, 1), 4, b"x", 8)), Refused(Reason::Aborted));
        assert!(matches!(a.send(5, &list, SIGNALED), Err(VerbsError::Invalid(_))));
        // The next life has all places, and nothing of the messages before it.
        a.start();
        for wr_id in 21..=24 {
            a.send(wr_id, &list, UNSIGNALED).unwrap();
            a.recv(wr_id, 0, 8);
        }
        // Twice, because the queues look at their places only when they seem to be full.
        let ended = a.next().request;
        a.core.finished(ended, Ok(()));
        assert_eq!(a.arrives(id(3, 1), b"x"), Done);
        a.core.deliver(id(3, 1));
        assert_eq!(a.polled(), [(21, WcStatus::Success)]);
        a.send(25, &list, UNSIGNALED).unwrap();
        a.recv(25, 0, 8);
        assert_eq!(a.send(5, &list, SIGNALED), Err(VerbsError::QueueFull));
        assert_eq!(a.core.post_recv(&RecvWr { wr_id: 5, sges: &list }), Err(VerbsError::QueueFull));
        assert_eq!(a.place(&segment(id(1, 1), 4, b"x", 8)), Refused(Reason::Aborted));
        a.core.deliver(id(1, 1));
        assert_eq!((a.polled(), a.core.snapshot().receives_posted), (vec![], 4));
        // Its requests have other names.
        let request = a.next().request;
        a.core.finished(first, Err(Failure::Silent));
        a.core.finished(second, Err(Failure::Silent));
        assert_eq!(a.polled(), []);
        a.core.finished(request, Err(Failure::Silent));
        assert_eq!((a.polled(), a.events()), (vec![(22, WcStatus::RetryExcErr)], vec![]));
    }
}

#[test]
fn draining_ends_what_was_posted_before_and_keeps_the_rest() {
    let mut a = End::new();
    let list = [a.sge(0, 8)];
    for wr_id in 1..=2 {
        a.send(wr_id, &list, SIGNALED).unwrap();
    }
    let first = a.next().request;
    let sqd = QpModify { state: Some(QpState::Sqd), sqd_async_notify: Some(true), ..QpModify::default() };
    a.core.modify(&sqd).unwrap();
    a.send(3, &list, SIGNALED).unwrap();
    let second = a.next().request;
    assert_eq!(a.core.next_message(), None, "it waits");
    a.core.finished(second, Ok(()));
    assert!(a.core.query().sq_draining && a.events().is_empty());
    a.core.finished(first, Err(Failure::NoReceive));
    assert_eq!((a.core.query().sq_draining, a.events()), (false, vec![EventKind::SqDrained]));
    // Messages still arrive.
    a.recv(11, 0, 8);
    assert_eq!(a.arrives(id(1, 1), b"x"), Done);
    a.modify(QpState::Rts);
    let third = a.next().request;
    a.core.finished(third, Ok(()));
    let polled: Vec<_> = a.polled().iter().map(|(wr_id, _)| *wr_id).collect();
    assert_eq!((polled, a.events()), (vec![2, 1, 3], vec![]));
    // With nothing to wait for.
    a.core.modify(&sqd).unwrap();
    assert_eq!(a.events(), [EventKind::SqDrained]);
}

#[test]
fn one_that_fails_while_it_was_not_sent_counts_as_drained() {
    let mut a = End::new();
    let list = [a.sge(0, 8)];
    a.send(1, &list, SIGNALED).unwrap();
    let request = a.next().request;
    let sqd = QpModify { state: Some(QpState::Sqd), sqd_async_notify: Some(true), ..QpModify::default() };
    a.core.modify(&sqd).unwrap();
    // Wrong already at the post, and not among those that drain.
    a.send(2, &[Sge { length: u32::MAX, ..list[0] }], SIGNALED).unwrap();
    assert!(a.core.query().sq_draining);
    a.core.fail(request, WcStatus::LocProtErr);
    assert_eq!(a.events(), [EventKind::SqDrained]);
    assert_eq!(a.polled(), [(2, WcStatus::LocLenErr), (1, WcStatus::LocProtErr)]);
}

#[test]
fn a_lost_completion_fails_the_queue_pair() {
    let mut a = End::with(How { cq_depth: 1, ..PLAIN });
    let list = [a.sge(0, 8)];
    for wr_id in 1..=3 {
        a.send(wr_id, &list, SIGNALED).unwrap();
    }
    let requests = [(); 3].map(|()| a.next().request);
    let [ticket] = tickets();
    a.core.assign(requests[2], ticket);
    a.core.finished(requests[0], Ok(()));
    a.core.finished(requests[1], Ok(()));
    assert_eq!((a.core.query().state, a.core.take_withdrawn()), (QpState::Err, Some(ticket)));
    assert_eq!(a.events(), [EventKind::CqErr, EventKind::QpFatal]);
    a.core.finished(requests[2], Ok(()));
    a.recv(11, 0, 8);
    assert_eq!((a.polled(), a.events()), (vec![(1, WcStatus::Success)], vec![]));
    // So does a receive's.
    let mut b = End::with(How { cq_depth: 1, ..PLAIN });
    for number in 1..=3 {
        b.recv(number, 0, 8);
        assert_eq!(b.arrives(id(1, number), b"x"), Done);
    }
    b.core.deliver(id(1, 1));
    b.core.deliver(id(1, 2));
    assert_eq!(
        (b.core.query().state, b.events()),
        (QpState::Err, vec![EventKind::CqErr, EventKind::QpFatal])
    );
    assert_eq!(b.place(&segment(id(1, 3), 0, b"x", 1)), Refused(Reason::Aborted));
}

#[test]
fn an_error_with_a_shared_receive_queue_completes_the_bound_receives_only() {
    let pool = Pool::new();
    let (mut b, mut c) = (pool.end(), pool.end());
    for wr_id in 1..=3 {
        pool.recv(wr_id, 0, 8).unwrap();
    }
    assert_eq!((b.arrives(id(1, 2), b"x"), b.arrives(id(1, 1), b"x")), (Done, Done));
    b.modify(QpState::Err);
    assert_eq!(b.polled(), [(1, FLUSHED), (2, FLUSHED)]);
    assert_eq!(b.events(), [EventKind::QpLastWqeReached]);
    assert!(b.core.take_back(id(1, 1)).is_empty());
    assert_eq!(c.arrives(id(1, 3), b"x"), Done);
    c.core.deliver(id(1, 3));
    assert_eq!(c.polled(), [(3, WcStatus::Success)]);
}

#[test]
fn attributes_are_kept_and_a_wrong_change_changes_nothing() {
    let mut a = End::new();
    let change = QpModify {
        timeout: Some(14),
        retry_cnt: Some(7),
        rnr_retry: Some(7),
        min_rnr_timer: Some(3),
        ..QpModify::default()
    };
    a.core.modify(&change).unwrap();
    let attr = a.core.query();
    assert_eq!((attr.timeout, attr.retry_cnt, attr.rnr_retry, attr.min_rnr_timer), (14, 7, 7, 3));
    assert_eq!((a.core.how(), attr.qkey), (PLAIN.init, QKEY));
    let list = [a.sge(0, 8)];
    a.send(1, &list, SIGNALED).unwrap();
    assert_eq!(a.next().message.rnr_retry, 7);
    let wrong = QpModify { state: Some(QpState::Init), qkey: Some(1), ..QpModify::default() };
    assert!(matches!(a.core.modify(&wrong), Err(VerbsError::Invalid(_))));
    assert_eq!(a.core.query(), attr);
    // Before RTS nothing can be posted, and so nothing goes out.
    a.modify(QpState::Reset);
    let init = QpModify { state: Some(QpState::Init), ..QpModify::default() };
    a.core.modify(&init).unwrap();
    assert!(matches!(a.send(1, &list, SIGNALED), Err(VerbsError::Invalid(_))));
    assert_eq!(a.core.next_message(), None);
}
