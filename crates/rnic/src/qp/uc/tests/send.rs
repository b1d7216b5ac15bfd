use super::*;

const FLUSHED: WcStatus = WcStatus::WrFlushErr;
const SUCCESS: WcStatus = WcStatus::Success;

impl End {
    /// The next message for the exchange.
    fn next(&mut self) -> UcMessage {
        self.core.next_message().unwrap()
    }

    fn sends(&mut self, wr_ids: std::ops::Range<u64>) -> Vec<u64> {
        wr_ids.clone().for_each(|wr_id| self.send(wr_id, SEND, 10, SIGNALED).unwrap());
        wr_ids.map(|_| self.next().request).collect()
    }
}

/// Names of messages, as a machine gives them.
fn tickets<const N: usize>(message: Outgoing) -> [Ticket; N] {
    use uwarp_proto::clock::Now;
    use uwarp_proto::rd::{Config, Rd, Route};
    let now = Now::unread();
    let route = Route { local: ([10, 0, 0, 1], 1).into(), remote: ([10, 0, 0, 2], 1).into() };
    let mut machine = Rd::new(&now, Config::default(), &[0; 32]);
    [(); N].map(|()| machine.post(&now, route, message).unwrap())
}

#[test]
fn a_send_completes_when_it_has_left() {
    let mut a = End::new();
    a.memory[..5].copy_from_slice(b"hello");
    a.send(1, SEND, 5, SIGNALED).unwrap();
    a.send(2, SendOp::SendImmediate { imm: *b"imm!" }, 5, SendFlags::empty()).unwrap();
    a.send(3, SendOp::Write { stag: 7, to: 8 }, 5, SIGNALED).unwrap();
    let [first, second, third] = [a.next(), a.next(), a.next()];
    assert_eq!(a.core.next_message(), None);
    assert_eq!(first.endpoint.to, REMOTE, "the number of the peer names its port");
    let message = first.message;
    assert_eq!((message.pair.source, message.pair.destination), (QPN, PEER));
    assert_eq!((message.first.qkey, message.len, message.unrepeated), (SQ_PSN, 5, true));
    assert_eq!(second.message.first.immediate, Some(*b"imm!"));
    assert!(matches!(third.message.target, Target::Tagged { stag: 7, to: 8, .. }));
    let mut bytes = vec![7];
    assert!(a.core.fill(first.request, 1, 3, &mut bytes));
    assert_eq!(bytes, b"\x07ell");
    assert!(!a.core.fill(first.request, 3, 3, &mut bytes), "it has five bytes");
    assert_eq!(a.polled(), []);
    a.core.finished(first.request, true);
    assert_eq!(a.polled(), [(1, SUCCESS)]);
    a.core.finished(second.request, true);
    a.core.finished(third.request, true);
    assert_eq!(a.polled(), [(3, SUCCESS)]);
    assert!(!a.core.fill(first.request, 1, 3, &mut bytes), "it has ended");
}

#[test]
fn inline_bytes_are_those_of_the_post() {
    let mut a = End::new();
    a.memory[..5].copy_from_slice(b"hello");
    a.send(1, SEND, 5, SIGNALED | SendFlags::INLINE).unwrap();
    a.memory[..5].copy_from_slice(b"later");
    let (request, mut bytes) = (a.next().request, Vec::new());
    assert!(a.core.fill(request, 0, 5, &mut bytes));
    assert_eq!(bytes, b"hello");
}

#[test]
fn what_cannot_leave_is_lost_and_succeeds() {
    let mut a = End::new();
    let [request] = a.sends(1..2).try_into().unwrap();
    a.core.finished(request, false);
    assert_eq!(a.polled(), [(1, SUCCESS)]);
    assert_eq!((a.core.drops().unsent, a.core.snapshot().counters.sent.send.messages), (1, 0));
}

#[test]
fn reads_and_atomics_are_refused() {
    let mut a = End::new();
    let refused = [
        SendOp::Read { stag: 1, to: 0, invalidate_local: false },
        SendOp::FetchAdd { stag: 1, to: 0, add: 1 },
        SendOp::Send { invalidate: Some(1) },
        SendOp::LocalInvalidate { stag: 1 },
    ];
    for op in refused {
        assert!(matches!(a.send(1, op, 8, SIGNALED), Err(VerbsError::Invalid(_))), "{op:?}");
    }
    a.modify(QpState::Reset);
    assert!(a.send(1, SEND, 8, SIGNALED).is_err(), "it is not ready to send");
}

#[test]
fn a_full_queue_refuses_and_has_room_when_a_completion_is_polled() {
    let mut a = End::new();
    let requests = a.sends(0..4);
    assert_eq!(a.send(4, SEND, 1, SIGNALED), Err(VerbsError::QueueFull));
    a.core.finished(requests[0], true);
    assert_eq!(a.send(4, SEND, 1, SIGNALED), Err(VerbsError::QueueFull));
    assert_eq!(a.polled().len(), 1);
    a.send(4, SEND, 1, SIGNALED).unwrap();
}

/// As InfiniBand: a send error of this service leaves the receive queue alone.
#[test]
fn memory_that_may_not_be_read_leads_to_sqe() {
    let mut a = End::new();
    a.recv(9, 100, 20);
    a.send(0, SEND, 10, SIGNALED).unwrap();
    let first = a.next();
    let [second, third] = a.sends(1..3).try_into().unwrap();
    let [of_second, of_third] = tickets(first.message);
    a.core.assign(second, of_second);
    a.core.assign(third, of_third);
    a.core.fail(second, WcStatus::LocProtErr);
    assert_eq!((a.polled(), a.core.query().state), (vec![], QpState::Rts), "the one before it comes first");
    a.core.finished(first.request, true);
    assert_eq!(a.polled(), [(0, SUCCESS), (1, WcStatus::LocProtErr), (2, FLUSHED)]);
    assert_eq!(a.core.query().state, QpState::Sqe);
    assert_eq!((a.core.take_withdrawn(), a.core.take_withdrawn()), (Some(of_third), None));
    a.send(3, SEND, 1, SendFlags::empty()).unwrap();
    assert_eq!(a.polled(), [(3, FLUSHED)]);
    a.core.place(&segment(id(1, 1), 0, b"x", 1));
    assert_eq!(a.polled(), [(9, SUCCESS)], "it still receives");
    a.modify(QpState::Rts);
    let [request] = a.sends(4..5).try_into().unwrap();
    a.core.finished(request, true);
    assert_eq!(a.polled(), [(4, SUCCESS)]);
}

#[test]
fn the_error_state_flushes_what_has_not_left() {
    let mut a = End::new();
    a.recv(9, 100, 20);
    a.send(0, SEND, 10, SIGNALED).unwrap();
    let first = a.next();
    let [second] = a.sends(1..2).try_into().unwrap();
    let [ticket, late] = tickets(first.message);
    a.core.assign(first.request, ticket);
    a.modify(QpState::Err);
    assert_eq!(a.polled(), [(0, FLUSHED), (1, FLUSHED), (9, FLUSHED)]);
    assert_eq!((a.core.take_withdrawn(), a.core.take_withdrawn()), (Some(ticket), None));
    a.core.assign(second, late);
    assert_eq!(a.core.take_withdrawn(), Some(late), "it had ended when the machine gave it a name");
    a.core.finished(first.request, true);
    a.core.fail(second, WcStatus::LocProtErr);
    assert_eq!(a.polled(), []);
    a.send(3, SEND, 1, SIGNALED).unwrap();
    assert_eq!(a.polled(), [(3, FLUSHED)]);
}

#[test]
fn sqd_drains_what_was_posted_before() {
    let mut a = End::new();
    let [request] = a.sends(0..1).try_into().unwrap();
    a.send(1, SEND, 1, SIGNALED).unwrap();
    let sqd = QpModify { state: Some(QpState::Sqd), sqd_async_notify: Some(true), ..QpModify::default() };
    a.core.modify(&sqd, None).unwrap();
    a.send(2, SEND, 1, SIGNALED).unwrap();
    let second = a.next().request;
    assert_eq!(a.core.next_message(), None);
    a.core.finished(request, true);
    assert!(a.events.0.lock().unwrap().is_empty());
    a.core.finished(second, true);
    assert_eq!(*a.events.0.lock().unwrap(), [EventKind::SqDrained]);
    a.modify(QpState::Rts);
    let third = a.next().request;
    a.core.finished(third, true);
    assert_eq!(a.polled().len(), 3);
}

#[test]
fn a_full_completion_queue_ends_the_queue_pair() {
    let mut a = End::with(None, 1);
    for request in a.sends(0..3) {
        a.core.finished(request, true);
    }
    assert_eq!(a.core.query().state, QpState::Err);
    assert!(a.events.0.lock().unwrap().contains(&EventKind::QpFatal));
}
