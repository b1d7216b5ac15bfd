//! Queue pairs that the program moves up and uses while their stream is being made
//! (`QpModify::awaits_stream`).

mod common;

use std::sync::Arc;
use std::time::{Duration, Instant};

use common::{End, LIMIT, all_rights, join, to, uwarp};
use uwarp_driver::Disconnect;
use uwarp_rnic::qp::{QpModify, QpState, Rtr, StreamParams};
use uwarp_rnic::{SendOp, VerbsError, WcStatus};

const SEND: SendOp = SendOp::Send { invalidate: None };

/// RTR, with the stream still to come. A timeout code of 10 and no retries: 4 ms over InfiniBand.
fn rtr() -> QpModify {
    QpModify {
        awaits_stream: true,
        access: Some(all_rights()),
        timeout: Some(10),
        retry_cnt: Some(0),
        ..to(QpState::Rtr)
    }
}

fn up(end: &End) {
    end.qp.modify(&rtr()).unwrap();
    end.qp.modify(&to(QpState::Rts)).unwrap();
}

#[test]
fn what_is_posted_before_the_stream_goes_out_with_it() {
    let (left, right) = (End::new(4096), End::new(4096));
    up(&left);
    for wr_id in 0..3 {
        left.try_send(wr_id, SEND, &[left.sge(0, 100)]).unwrap();
    }
    // The passive end receives in RTR, and has nothing to send.
    right.qp.modify(&rtr()).unwrap();
    for wr_id in 0..3 {
        right.try_recv(wr_id, &[right.sge(0, 100)]).unwrap();
    }
    let early = right.try_send(9, SEND, &[right.sge(0, 1)]);
    assert!(matches!(early, Err(VerbsError::Invalid(_))), "{early:?}");
    join(&left, &right, uwarp());
    assert_eq!((left.qp.query().state, right.qp.query().state), (QpState::Rts, QpState::Rtr));
    for wr_id in 0..3 {
        let (sent, received) = (left.poll(), right.poll());
        assert_eq!((sent.wr_id, sent.status), (wr_id, WcStatus::Success));
        assert_eq!((received.wr_id, received.status, received.byte_len), (wr_id, WcStatus::Success, 100));
    }
    right.qp.modify(&to(QpState::Rts)).unwrap();
    left.try_recv(7, &[left.sge(0, 8)]).unwrap();
    right.try_send(8, SEND, &[right.sge(0, 8)]).unwrap();
    assert_eq!((right.poll().wr_id, left.poll().wr_id), (8, 7));
}

#[test]
fn the_oldest_work_request_runs_out_of_retries_if_no_stream_comes() {
    let end = End::new(4096);
    end.try_recv(5, &[end.sge(0, 8)]).unwrap();
    up(&end);
    let start = Instant::now();
    for wr_id in 0..2 {
        end.try_send(wr_id, SEND, &[end.sge(0, 8)]).unwrap();
    }
    let statuses: Vec<_> = (0..3).map(|_| end.poll()).map(|wc| (wc.wr_id, wc.status)).collect();
    assert_eq!(statuses[0], (0, WcStatus::RetryExcErr));
    assert!(
        statuses[1..].contains(&(1, WcStatus::WrFlushErr))
            && statuses[1..].contains(&(5, WcStatus::WrFlushErr))
    );
    assert!(start.elapsed() < LIMIT);
    assert_eq!(end.qp.query().state, QpState::Err);
}

/// The retries of before the stream were counted on, and those of a peer that had gone never ended.
#[test]
fn retries_begin_anew_when_a_peer_goes_that_was_awaited() {
    let (left, right) = (End::new(4096), End::new(4096));
    up(&left);
    left.try_send(0, SEND, &[left.sge(0, 100)]).unwrap();
    up(&right);
    right.recv(&[right.sge(0, 100)]);
    join(&left, &right, uwarp_rnic::qp::StreamParams { infiniband: true, ..uwarp() });
    assert_eq!((left.poll().status, right.poll().status), (WcStatus::Success, WcStatus::Success));
    right.qp.destroy();
    left.watch.wait_end();
    left.try_send(1, SEND, &[left.sge(0, 100)]).unwrap();
    assert_eq!(left.poll().status, WcStatus::RetryExcErr);
}

#[test]
fn a_queue_pair_that_was_reset_awaits_no_stream() {
    let (left, right) = (End::new(4096), End::new(4096));
    up(&left);
    left.qp.modify(&to(QpState::Reset)).unwrap();
    left.qp.modify(&to(QpState::Init)).unwrap();
    assert!(matches!(left.qp.modify(&to(QpState::Rtr)), Err(VerbsError::NotSupported(_))));
    up(&right);
    right.qp.modify(&to(QpState::Err)).unwrap();
    let (a, _b) = common::sockets();
    a.set_nonblocking(true).unwrap();
    assert!(right.qp.attach(a.into(), uwarp(), right.watch.clone()).is_err());
}

/// A request to disconnect a stream that has ended by itself can come when the next one is there.
#[test]
fn a_late_disconnect_does_not_end_the_next_stream() {
    let (left, right) = (End::new(4096), End::new(4096));
    let begin = |watch: &Arc<common::Watch>| {
        let (a, b) = common::sockets();
        a.set_nonblocking(true).unwrap();
        let params = StreamParams { initiator: true, rtr: Rtr::SendWrite, ..uwarp() };
        (left.qp.attach(a.into(), params, watch.clone()).unwrap(), b)
    };
    let of_first = Arc::default();
    let (first, peer) = begin(&of_first);
    left.qp.modify(&to(QpState::Reset)).unwrap();
    left.qp.modify(&to(QpState::Init)).unwrap();
    drop(peer);
    of_first.wait_end();
    let (second, peer) = begin(&left.watch);
    common::attach(
        &right,
        peer,
        StreamParams { initiator: false, rtr: Rtr::Expect, wait_first_frame: true, ..uwarp() },
    );
    assert_ne!(first, second);
    left.qp.disconnect_stream(first, false);
    right.recv(&[right.sge(0, 100)]);
    left.send(SEND, &[left.sge(0, 100)]);
    assert_eq!((left.poll().status, right.poll().status), (WcStatus::Success, WcStatus::Success));
    left.qp.disconnect_stream(second, false);
    assert_eq!(right.watch.wait_end(), Disconnect::PeerClosed);
}

/// What was posted before the stream, to a peer in RTR, failed after two seconds if that was moved to ERR
/// before the stream was there. Over an adapter it has arrived by then.
#[test]
fn a_queue_pair_whose_stream_is_being_set_up_receives_before_it_ends() {
    let ends: [fn(&End); 3] = [
        |end| end.qp.modify(&to(QpState::Err)).unwrap(),
        |end| end.qp.modify(&to(QpState::Reset)).unwrap(),
        |end| end.qp.destroy(),
    ];
    for end in ends {
        // The stream may come too late by chance, on a busy machine.
        let succeeds = (0..10).any(|_| {
            let (left, right) = (End::new(4096), End::new(4096));
            up(&left);
            left.try_send(1, SEND, &[left.sge(0, 100)]).unwrap();
            right.qp.modify(&rtr()).unwrap();
            right.recv(&[right.sge(0, 100)]);
            let (a, b) = common::sockets();
            let (begun, begins) = std::sync::mpsc::channel();
            let attached = std::thread::scope(|scope| {
                scope.spawn(|| {
                    begun.send(()).unwrap();
                    end(&right);
                });
                begins.recv().unwrap();
                std::thread::sleep(Duration::from_micros(200));
                b.set_nonblocking(true).unwrap();
                let params =
                    StreamParams { placement_acks: true, infiniband: true, by_number: true, ..uwarp() };
                common::attach(&left, a, StreamParams { initiator: true, rtr: Rtr::SendWrite, ..params });
                let params =
                    StreamParams { initiator: false, rtr: Rtr::Expect, wait_first_frame: true, ..params };
                right.qp.attach(b.into(), params, right.watch.clone()).is_ok()
            });
            // Another wait is as long as the first one.
            let good = attached && left.poll().status == WcStatus::Success;
            if !good {
                std::thread::sleep(Duration::from_secs(1));
            }
            good
        });
        assert!(succeeds);
    }
}
