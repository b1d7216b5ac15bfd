//! Lists that go in one call, and what came together.

use super::*;

/// What can go in one call, one after the other: how many, and the length of each.
fn runs(core: &mut UdCore, most: usize, most_bytes: usize) -> Vec<(usize, usize)> {
    let mut all = Vec::new();
    while let Some(run) = core.run(most, most_bytes) {
        let (count, length, bytes, to) = (run.count, run.length, run.bytes.to_vec(), *run.endpoint);
        let each: Vec<_> = core.outgoing().take(count).map(|(to, bytes)| (*to, bytes.to_vec())).collect();
        assert!(each.iter().all(|(endpoint, _)| *endpoint == to));
        assert!(each.iter().map(|(_, bytes)| &bytes[..]).eq(bytes.chunks(length)));
        for (_, bytes) in &each {
            datagram::parse(bytes).unwrap();
        }
        assert_eq!(core.first(), Some(&to));
        all.push((count, length - datagram::OVERHEAD));
        core.sent(count);
    }
    assert!(core.first().is_none() && !core.has_outgoing());
    all
}

fn many() -> End {
    End::with_caps(None, 64, QpCaps { max_send_wr: 64, max_recv_wr: 64, ..CAPS })
}

impl End {
    fn post(&mut self, ah: &Ah, qpn: u32, length: u32) {
        let (sges, op) = ([self.sge(0, length)], SendOp::Send { invalidate: None });
        let wr = SendWr { wr_id: u64::from(length), op, flags: SendFlags::empty(), sges: &sges };
        self.core.post_next(&UdSendWr { wr, ah, remote_qpn: qpn, remote_qkey: QKEY, job_key: None }).unwrap();
    }

    fn posts(&mut self, ah: &Ah, lengths: &[u32]) {
        lengths.iter().for_each(|length| self.post(ah, QPN, *length));
        self.core.end_posts();
    }

    /// What a run of messages with these payloads and Q_Keys comes to.
    fn arrive_together(&mut self, messages: &[(u32, &[u8])]) -> Vec<Result<(), Dropped>> {
        let ip = |last| Ipv4Addr::new(10, 0, 0, last).into();
        let arrival = Arrival { from: ip(1), to: ip(2), slid: 0 };
        let mut receiving = self.core.receiving(&arrival);
        let head = |qkey| Head {
            source_qpn: QPN,
            destination_qpn: QPN,
            qkey,
            immediate: None,
            solicited: false,
            msn: 1,
            incarnation: 2,
        };
        let each = messages.iter().map(|&(qkey, payload)| datagram::Message { head: head(qkey), payload });
        each.map(|message| receiving.deliver(&message)).collect()
    }
}

#[test]
fn datagrams_of_one_length_to_one_receiver_go_together_and_a_shorter_one_ends_that() {
    let mut a = many();
    let ah = a.ah();
    a.posts(&ah, &[100, 100, 100, 7, 100, 100, 200, 100, 0, 0]);
    assert_eq!(runs(&mut a.core, 44, 65_000), [(4, 100), (2, 100), (2, 200), (2, 0)]);
    // By number and by bytes; what is left begins a run.
    a.posts(&ah, &[100; 9]);
    assert_eq!(runs(&mut a.core, 4, 65_000), [(4, 100), (4, 100), (1, 100)]);
    a.posts(&ah, &[100; 9]);
    assert_eq!(runs(&mut a.core, 44, 3 * 142), [(3, 100), (3, 100), (3, 100)]);
    a.posts(&ah, &[4000]);
    assert_eq!(runs(&mut a.core, 44, 1000), [(1, 4000)], "one goes in any case");
}

#[test]
fn posts_continue_the_run_of_those_that_wait() {
    let mut a = many();
    let ah = a.ah();
    a.posts(&ah, &[100, 100]);
    a.posts(&ah, &[100, 60]);
    a.core.sent(1);
    a.posts(&ah, &[100]);
    assert_eq!(runs(&mut a.core, 44, 65_000), [(3, 100), (1, 100)]);
    // What has gone is continued by nothing.
    a.posts(&ah, &[100]);
    assert_eq!(runs(&mut a.core, 44, 65_000), [(1, 100)]);
    a.posts(&ah, &[100]);
    assert_eq!(runs(&mut a.core, 44, 65_000), [(1, 100)]);
}

#[test]
fn a_run_has_one_receiver() {
    let mut a = many();
    let ah = a.ah();
    let same = Ah::new(&a.pd, (Ipv4Addr::LOCALHOST, 0).into(), None);
    let other = Ah::new(&a.pd, (Ipv4Addr::new(127, 0, 0, 2), 0).into(), None);
    let marked = Ah::new(&a.pd, (Ipv4Addr::LOCALHOST, 0).into(), None).marked(8, 0);
    // Another handle of the same place, another queue pair of the same port; another port.
    for (handle, qpn) in [(&ah, QPN), (&same, QPN), (&ah, QPN + 1), (&ah, QPN + 0x100), (&ah, QPN)] {
        a.post(handle, qpn, 10);
    }
    for handle in [&other, &marked, &ah, &ah] {
        a.post(handle, QPN, 10);
    }
    a.core.end_posts();
    let all = runs(&mut a.core, 44, 65_000);
    assert_eq!(all, [(3, 10), (1, 10), (1, 10), (1, 10), (1, 10), (2, 10)]);
}

#[test]
fn a_run_ends_where_a_work_request_has_failed() {
    let mut a = many();
    let ah = a.ah();
    a.posts(&ah, &[10, 10]);
    let bad = [Sge { lkey: 0xBAD, ..a.sge(0, 10) }];
    let wr = SendWr { wr_id: 1, op: SendOp::Send { invalidate: None }, flags: SIGNALED, sges: &bad };
    a.core.post_send(&UdSendWr { wr, ah: &ah, remote_qpn: QPN, remote_qkey: QKEY, job_key: None }).unwrap();
    a.posts(&ah, &[10, 10]);
    assert_eq!(runs(&mut a.core, 44, 65_000), [(2, 10)]);
    let failed = [(1, WcStatus::LocProtErr), (10, WcStatus::WrFlushErr), (10, WcStatus::WrFlushErr)];
    assert_eq!(a.polled(), failed);
}

/// Only what was posted before goes out, and the rest later.
#[test]
fn in_sqd_a_run_ends_with_what_drains() {
    let mut a = many();
    let ah = a.ah();
    a.posts(&ah, &[10, 10, 10]);
    a.modify(QpState::Sqd).unwrap();
    a.posts(&ah, &[10, 10]);
    assert_eq!(runs(&mut a.core, 44, 65_000), [(3, 10)]);
    a.modify(QpState::Rts).unwrap();
    assert_eq!(runs(&mut a.core, 44, 65_000), [(2, 10)]);
}

#[test]
fn memory_of_posts_can_be_deregistered_behind_them() {
    let mut a = many();
    let ah = a.ah();
    a.posts(&ah, &[10, 10]);
    assert!(a.mr.deregister());
    assert_eq!(runs(&mut a.core, 44, 65_000), [(2, 10)]);
}

#[test]
fn of_messages_that_came_together_each_is_placed_or_dropped_by_itself() {
    let mut b = many();
    (0..3).for_each(|n| b.recv(n, 100 * n as usize, 100));
    let dropped = b.arrive_together(&[
        (QKEY, b"first"),
        (QKEY + 1, b"another key"),
        (QKEY, &[7; 61]),
        (QKEY, b"again"),
        (QKEY, b"and as long"),
        (QKEY, b"none left"),
    ]);
    let (qkey, long, none) = (Err(Dropped::Qkey), Err(Dropped::TooLong), Err(Dropped::NoReceive));
    assert_eq!(dropped, [Ok(()), qkey, long, Ok(()), Ok(()), none]);
    assert_eq!(b.polled(), [0, 1, 2].map(|n| (n, WcStatus::Success)));
    for (n, text) in [&b"first"[..], b"again", b"and as long"].iter().enumerate() {
        let area = &b.memory[100 * n..][..40];
        // IPv4's total length, which differs from one to the next.
        let total = u16::from_be_bytes([area[22], area[23]]);
        assert_eq!(usize::from(total), 28 + datagram::OVERHEAD + text.len());
        assert_eq!(&b.memory[100 * n + 40..][..text.len()], *text);
    }
    let drops = b.core.drops();
    assert_eq!((drops.qkey, drops.too_long, drops.no_receive), (1, 1, 1));
    assert_eq!(b.core.snapshot().counters.received.send.messages, 3);
    assert!(b.mr.deregister(), "nothing uses the memory any more");
}

/// More than are completed at once.
#[test]
fn a_long_run_completes_in_order() {
    let mut b = many();
    (0..40).for_each(|n| b.recv(n, 64 * n as usize, 64));
    let texts: Vec<[u8; 1]> = (0..40).map(|n| [n]).collect();
    let messages: Vec<(u32, &[u8])> = texts.iter().map(|text| (QKEY, &text[..])).collect();
    assert!(b.arrive_together(&messages).iter().all(Result::is_ok));
    assert!(b.polled().into_iter().eq((0..40).map(|n| (n, WcStatus::Success))));
    assert!((0..40).all(|n| b.memory[64 * n + 40] == n as u8));
    // All places are free again.
    (0..64).for_each(|n| b.recv(n, 0, 64));
}

/// What the counters say does not depend on how the messages came.
#[test]
fn a_full_completion_queue_in_the_middle_of_a_run_fails_the_queue_pair() {
    let one_by_one = |b: &mut End, messages: &[(u32, &[u8])]| -> Vec<_> {
        messages.iter().flat_map(|message| b.arrive_together(&[*message])).collect()
    };
    let mut ends = [(); 2].map(|()| End::with(None, 2));
    let messages: [(u32, &[u8]); 4] = [(QKEY, b"a"), (QKEY, b"bc"), (QKEY, b"def"), (QKEY, b"ghij")];
    for (together, b) in [true, false].into_iter().zip(&mut ends) {
        (0..4).for_each(|n| b.recv(n, 100 * n as usize, 100));
        if together {
            b.arrive_together(&messages)
        } else {
            one_by_one(b, &messages)
        };
        assert_eq!(b.polled(), [0, 1].map(|n| (n, WcStatus::Success)));
        assert_eq!(b.core.query().state, QpState::Err);
        let received = b.core.snapshot().counters.received.send;
        assert_eq!((received.messages, received.bytes, b.core.drops().state), (3, 6, 1));
        assert_eq!(*b.events.0.lock().unwrap(), [EventKind::CqErr, EventKind::QpFatal]);
        assert_eq!(b.arrive_together(&messages[..1]), [Err(Dropped::State)]);
    }
}

#[test]
fn receives_of_a_shared_queue_are_taken_for_a_run() {
    let (events, pd) = (Arc::new(Events::default()), Pd::new());
    let srq = Srq::new(SrqInit { pd: pd.clone(), max_wr: 2, max_sge: 2, cookie: 0, async_sink: events });
    let mut b = End::with(Some(srq.clone()), 16);
    let memory = vec![0u8; 256];
    let addr = memory.as_ptr().expose_provenance() as u64;
    let mr = Mr::register(&pd, addr, 256, addr, Access::LOCAL_WRITE).unwrap();
    // The places of those that have completed are free when they are polled.
    for _ in 0..3 {
        for wr_id in [5, 6] {
            let sges = [Sge { addr, length: 64, lkey: mr.stag() }];
            let (posted, woken) = srq.post_recv(std::iter::once(RecvWr { wr_id, sges: &sges }));
            woken.wake();
            posted.unwrap();
        }
        let taken = b.arrive_together(&[(QKEY, b"one"), (QKEY, b"two"), (QKEY, b"three")]);
        assert_eq!(taken, [Ok(()), Ok(()), Err(Dropped::NoReceive)]);
        assert_eq!(b.polled(), [5, 6].map(|n| (n, WcStatus::Success)));
    }
    assert!(mr.deregister());
    drop(memory);
}

/// The completions of those before it come first.
#[test]
fn a_receive_in_memory_that_is_gone_fails_the_queue_pair_behind_those_that_came_before() {
    let mut b = many();
    b.recv(0, 0, 100);
    let bad = [Sge { lkey: 0xBAD, ..b.sge(100, 100) }];
    b.core.post_recv(&RecvWr { wr_id: 1, sges: &bad }).unwrap();
    b.recv(2, 200, 100);
    let taken = b.arrive_together(&[(QKEY, b"a"), (QKEY, b"b"), (QKEY, b"c")]);
    assert_eq!(taken, [Ok(()), Ok(()), Err(Dropped::State)]);
    let all = [(0, WcStatus::Success), (1, WcStatus::LocProtErr), (2, WcStatus::WrFlushErr)];
    assert_eq!(b.polled(), all);
}
