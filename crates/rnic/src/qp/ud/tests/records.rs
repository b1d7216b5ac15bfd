//! RDMA Write-Records over unreliable datagrams.

use std::time::{Duration, Instant};

use proptest::prelude::*;
use uwarp_wire::datagram::record::Segment;

use super::*;
use crate::wr::WcFlags;

const JOB: u64 = 0x1234_5678_9ABC_DEF0;
const SIZE: usize = 1 << 20;

/// A queue pair with registered memory, which peers may write.
struct Peer {
    core: UdCore,
    pd: Arc<Pd>,
    cq: Arc<Cq>,
    memory: Vec<u8>,
    mr: Arc<Mr>,
    start: Instant,
}

impl Peer {
    fn new(job_key: u64, records: u32, rights: Access, fill: u8) -> Self {
        let (pd, events) = (Pd::new(), Arc::new(Events::default()));
        let cq = Cq::new(64, 0, None, events.clone());
        let init = QpInit {
            pd: pd.clone(),
            send_cq: cq.clone(),
            recv_cq: cq.clone(),
            srq: None,
            caps: QpCaps { max_send_wr: 32, ..CAPS },
            sq_sig_all: true,
            cookie: 0,
            async_sink: events,
        };
        let core = UdCore::with_records(QPN, init, job_key, records).unwrap();
        let memory = vec![fill; SIZE];
        let addr = memory.as_ptr().expose_provenance() as u64;
        let mr = Mr::register(&pd, addr, memory.len() as u64, addr, Access::LOCAL_WRITE | rights).unwrap();
        let mut peer = Self { core, pd, cq, memory, mr, start: Instant::now() };
        peer.starts();
        peer
    }

    fn starts(&mut self) {
        for state in [QpState::Init, QpState::Rtr, QpState::Rts] {
            let change = QpModify { state: Some(state), qkey: Some(QKEY), ..QpModify::default() };
            self.core.modify(&change).unwrap();
        }
    }

    fn sender() -> Self {
        let mut sender = Self::new(JOB, 0, Access::empty(), 0);
        (0..).zip(&mut sender.memory).for_each(|(at, byte): (usize, _)| *byte = (at / 7) as u8 | 1);
        sender
    }

    fn receiver() -> Self {
        Self::new(JOB, 4, Access::REMOTE_WRITE, 0)
    }

    /// Posts one to `to`'s memory, at the same place; returns its datagrams.
    fn write(&mut self, to: &Self, at: usize, len: u32, address: Ipv4Addr) -> Vec<Vec<u8>> {
        self.post(to.mr.stag(), to.mr.range().0 + at as u64, at, len, address).unwrap();
        let mut all = Vec::new();
        loop {
            let some: Vec<_> = self.core.outgoing().map(|(_, bytes)| bytes.to_vec()).collect();
            if some.is_empty() {
                return all;
            }
            self.core.sent(some.len());
            all.extend(some);
        }
    }

    fn post(&mut self, stag: u32, to: u64, at: usize, len: u32, address: Ipv4Addr) -> Result<(), VerbsError> {
        let sges = [Sge { addr: self.mr.range().0 + at as u64, length: len, lkey: self.mr.stag() }];
        let op = SendOp::WriteRecord { stag, to, imm: [9, 8, 7, 6] };
        let wr = SendWr { wr_id: 77, op, flags: SendFlags::empty(), sges: &sges };
        let ah = Ah::new(&self.pd, (address, 0).into(), None);
        let ud = UdSendWr { wr, ah: &ah, remote_qpn: QPN, remote_qkey: QKEY, job_key: None };
        self.core.post_send(&ud)
    }

    fn take(&mut self, datagram: &[u8], after: Duration) -> Result<(), Dropped> {
        let segment: Segment<'_> = datagram::parse_record(datagram).unwrap();
        let arrival = Arrival { from: FROM, to: FROM, slid: 0 };
        self.core.deliver_record(&segment, &arrival, self.start + after)
    }

    fn polled(&self) -> Vec<Wc> {
        let mut all = Vec::new();
        self.cq.poll(64, |wc| all.push(wc));
        all
    }
}

const FROM: IpAddr = IpAddr::V4(Ipv4Addr::LOCALHOST);
const NEAR: Ipv4Addr = Ipv4Addr::LOCALHOST;
const FAR: Ipv4Addr = Ipv4Addr::new(192, 0, 2, 9);

fn ms(ms: u64) -> Duration {
    Duration::from_millis(ms)
}

#[test]
fn what_comes_is_written_and_recorded() {
    for (address, pieces) in [(NEAR, 4), (FAR, 36)] {
        let (mut a, mut b) = (Peer::sender(), Peer::receiver());
        let datagrams = a.write(&b, 100, 50_000, address);
        assert_eq!(datagrams.len(), pieces);
        assert!(datagrams.iter().all(|bytes| bytes.len() <= 15_616));
        let wcs = a.polled();
        assert_eq!((wcs.len(), wcs[0].wr_id, wcs[0].status), (1, 77, WcStatus::Success));
        assert_eq!(wcs[0].opcode, WcOpcode::RdmaWrite);
        assert_eq!(a.core.snapshot().counters.sent.write.messages, 1);
        for (at, bytes) in datagrams.iter().enumerate() {
            assert_eq!(b.polled().len(), 0, "after {at}");
            b.take(bytes, ms(0)).unwrap();
        }
        assert_eq!(b.memory[100..50_100], a.memory[100..50_100]);
        assert!(b.memory[..100].iter().chain(&b.memory[50_100..]).all(|byte| *byte == 0));
        let wcs = b.polled();
        assert_eq!((wcs.len(), wcs[0].opcode, wcs[0].byte_len), (1, WcOpcode::Record, 50_000));
        assert_eq!((wcs[0].vendor_err, wcs[0].src_qp, wcs[0].flags), (0, QPN, WcFlags::WITH_IMM));
        assert_eq!(wcs[0].imm_or_inv.to_ne_bytes(), [9, 8, 7, 6]);
        let record = b.core.record(wcs[0].wr_id).unwrap();
        assert_eq!((record.from, record.source_qpn, record.stag), (FROM, QPN, b.mr.stag()));
        assert_eq!((record.to, record.len), (b.mr.range().0 + 100, 50_000));
        assert_eq!((record.valid.len(), &record.valid[0]), (1, &(0..50_000)));
        assert!(b.core.free_record(wcs[0].wr_id) && !b.core.free_record(wcs[0].wr_id));
        assert_eq!((b.core.record(wcs[0].wr_id), b.core.records_due()), (None, None));
        // A copy of any of them is not the first of another message.
        assert_eq!(b.take(&datagrams[0], ms(1)), Err(Dropped::Late));
    }
}

#[test]
fn an_empty_one_and_the_longest_one() {
    let (mut a, mut b) = (Peer::sender(), Peer::receiver());
    for len in [0, SIZE as u32] {
        for bytes in a.write(&b, 0, len, FAR) {
            b.take(&bytes, ms(0)).unwrap();
        }
        let wcs = b.polled();
        assert_eq!((wcs.len(), wcs[0].byte_len, wcs[0].vendor_err), (1, len, 0));
    }
    assert_eq!(b.memory, a.memory);
    let (stag, to) = (b.mr.stag(), b.mr.range().0);
    a.polled();
    // The program's memory is as long; the limit comes first.
    a.post(stag, to, 0, SIZE as u32 + 1, FAR).unwrap();
    assert_eq!(a.polled()[0].status, WcStatus::LocLenErr);
}

#[test]
fn a_record_ends_when_no_more_is_to_be_expected() {
    let (mut a, mut b) = (Peer::sender(), Peer::receiver());
    let first = a.write(&b, 0, 5_000, FAR);
    let second = a.write(&b, 8_000, 5_000, FAR);
    b.take(&first[0], ms(0)).unwrap();
    b.take(&first[2], ms(10)).unwrap();
    // Its sender may have been interrupted.
    b.core.expire_records(b.start + ms(109));
    assert_eq!((b.polled().len(), b.core.records_due()), (0, Some(b.start + ms(110))));
    // It has gone on. The rest may have been overtaken.
    b.take(&second[0], ms(20)).unwrap();
    b.core.expire_records(b.start + ms(20));
    assert_eq!(b.polled().len(), 0);
    assert_eq!(b.core.records_due(), Some(b.start + ms(21)));
    b.core.expire_records(b.start + ms(21));
    let wcs = b.polled();
    assert_eq!((wcs.len(), wcs[0].byte_len, wcs[0].vendor_err), (1, 2 * 1394, 1));
    assert_eq!(b.core.record(wcs[0].wr_id).unwrap().valid[..], [0..1394, 2788..4182]);
    assert_eq!(b.take(&first[1], ms(21)), Err(Dropped::Late));
    assert!(b.memory[1394..2788].iter().all(|byte| *byte == 0), "what comes late is not written");
    // Its last segment has come.
    b.take(&second[3], ms(30)).unwrap();
    assert_eq!(b.core.records_due(), Some(b.start + ms(31)));
    b.take(&second[1], ms(30)).unwrap();
    b.take(&second[2], ms(30)).unwrap();
    assert_eq!((b.polled().len(), b.core.records_due()), (1, None));
}

#[test]
fn who_may_not_write_changes_nothing() {
    let (mut a, mut b) = (Peer::sender(), Peer::receiver());
    let stag = b.mr.stag();
    let good = a.write(&b, 0, 100, FAR).remove(0);
    let change = |at: usize, with: u8| {
        let mut bytes = good.clone();
        bytes[at] ^= with;
        let len = bytes.len() - 4;
        let sum = uwarp_wire::crc::crc32c(&bytes[..len]);
        bytes[len..].copy_from_slice(&datagram::trailer(sum));
        bytes
    };
    // The Q_Key, the job key, the STag, the tagged offset.
    assert_eq!(b.take(&change(8, 1), ms(0)), Err(Dropped::Qkey));
    for at in [32, 39, 43, 48] {
        assert_eq!(b.take(&change(at, 1), ms(0)), Err(Dropped::Access), "{at}");
    }
    // A message that ends behind the region.
    let to = b.mr.range().0;
    a.post(stag, to + SIZE as u64 - 50, 0, 100, FAR).unwrap();
    let beyond = a.core.outgoing().next().unwrap().1.to_vec();
    a.core.sent(1);
    assert_eq!(b.take(&beyond, ms(0)), Err(Dropped::Access));
    assert_eq!(b.core.drops(), Drops { qkey: 1, access: 5, ..Drops::default() });
    let elsewhere = Source { prefix: FAR.into(), bits: 128, qpn: None };
    b.core.allow_source(elsewhere).unwrap();
    assert_eq!(b.take(&good, ms(0)), Err(Dropped::Access), "not on the list");
    b.core.allow_source(Source { prefix: FROM, bits: 128, qpn: Some(QPN) }).unwrap();
    assert!(b.memory.iter().all(|byte| *byte == 0) && b.polled().is_empty());
    b.take(&good, ms(0)).unwrap();
    assert_eq!(b.polled().len(), 1);

    // Without a job key, without records, without the region's right.
    for (job, records, rights) in
        [(0, 4, Access::REMOTE_WRITE), (JOB, 4, Access::REMOTE_READ), (JOB, 0, Access::REMOTE_WRITE)]
    {
        let mut b = Peer::new(job, records, rights, 0);
        let bytes = a.write(&b, 0, 100, FAR).remove(0);
        let why = if records == 0 { Dropped::NoRecord } else { Dropped::Access };
        assert_eq!(b.take(&bytes, ms(0)), Err(why));
        assert!(b.memory.iter().all(|byte| *byte == 0) && b.polled().is_empty());
    }
    let mut end = End::new();
    let segment = datagram::parse_record(&good).unwrap();
    let arrival = Arrival { from: FROM, to: FROM, slid: 0 };
    assert_eq!(end.core.deliver_record(&segment, &arrival, Instant::now()), Err(Dropped::Access));
}

#[test]
fn a_full_table_loses_new_messages_only() {
    let (mut a, mut b) = (Peer::sender(), Peer::receiver());
    for at in 0..4 {
        let bytes = a.write(&b, at * 100, 100, FAR).remove(0);
        b.take(&bytes, ms(0)).unwrap();
    }
    let fifth = a.write(&b, 400, 100, FAR).remove(0);
    assert_eq!(b.take(&fifth, ms(0)), Err(Dropped::NoRecord));
    assert_eq!((b.core.drops().no_record, b.memory[400]), (1, 0));
    let wcs = b.polled();
    assert_eq!(wcs.len(), 4);
    assert!(b.core.free_record(wcs[2].wr_id));
    let sixth = a.write(&b, 500, 100, FAR).remove(0);
    b.take(&sixth, ms(0)).unwrap();
    assert_eq!(b.core.record(wcs[2].wr_id), None, "its place is another one's");
    assert_eq!(b.core.record(b.polled()[0].wr_id).unwrap().to, b.mr.range().0 + 500);
}

#[test]
fn of_a_message_at_most_64_ranges_are_valid() {
    let (mut a, mut b) = (Peer::sender(), Peer::receiver());
    let all = a.write(&b, 0, 1394 * 140, FAR);
    for at in 0..64 {
        b.take(&all[at * 2], ms(0)).unwrap();
    }
    assert_eq!(b.take(&all[130], ms(1)), Err(Dropped::NoRecord));
    assert!(b.memory[130 * 1394..131 * 1394].iter().all(|byte| *byte == 0), "neither written nor valid");
    b.take(&all[1], ms(2)).unwrap();
    b.take(&all[130], ms(2)).unwrap();
    assert_eq!(b.core.records_due(), Some(b.start + ms(100)), "a look too early, at worst");
    b.core.expire_records(b.start + ms(100));
    assert_eq!((b.polled().len(), b.core.records_due()), (0, Some(b.start + ms(102))));
    // Its last segment has no room either, and says that no more will come.
    assert_eq!(b.take(&all[139], ms(90)), Err(Dropped::NoRecord));
    assert_eq!(b.core.records_due(), Some(b.start + ms(3)));
    b.core.expire_records(b.start + ms(90));
    let record = b.core.record(b.polled()[0].wr_id).unwrap();
    assert_eq!((record.valid.len(), &record.valid[0]), (64, &(0..3 * 1394)));
}

#[test]
fn memory_that_is_gone_fails_its_own_message() {
    let (mut a, b) = (Peer::sender(), Peer::receiver());
    let (stag, to) = (b.mr.stag(), b.mr.range().0);
    // Two handfuls of 44 and a third.
    a.post(stag, to, 0, 130_000, FAR).unwrap();
    a.post(stag, to, 0, 100, FAR).unwrap();
    assert_eq!(a.core.outgoing().count(), 44, "the next message waits");
    a.core.sent(44);
    assert!(a.mr.deregister());
    a.core.sent(44);
    let wcs = a.polled();
    let statuses: Vec<_> = wcs.iter().map(|wc| wc.status).collect();
    assert_eq!(statuses, [WcStatus::LocProtErr, WcStatus::WrFlushErr]);
    assert_eq!((a.core.query().state, a.core.outgoing().count()), (QpState::Sqe, 0));
}

#[test]
fn what_has_ended_stays_so_however_old_it_is() {
    let (mut a, mut b) = (Peer::sender(), Peer::receiver());
    let first = a.write(&b, 0, 100, FAR).remove(0);
    let never = a.write(&b, 200, 100, FAR).remove(0);
    let open = a.write(&b, 400, 3_000, FAR);
    b.take(&first, ms(0)).unwrap();
    b.take(&open[0], ms(0)).unwrap();
    for at in 0..600 {
        let bytes = a.write(&b, 8_000 + at, 1, FAR).remove(0);
        a.polled();
        b.take(&bytes, ms(0)).unwrap();
        b.polled().iter().for_each(|wc| assert!(b.core.free_record(wc.wr_id)));
    }
    b.memory[..300].fill(0);
    assert_eq!(b.take(&first, ms(0)), Err(Dropped::Late));
    assert_eq!(b.take(&never, ms(0)), Err(Dropped::Late), "so late, it counts as lost");
    assert!(b.memory[..300].iter().all(|byte| *byte == 0));
    // One that is open goes on.
    b.take(&open[1], ms(0)).unwrap();
    b.take(&open[2], ms(0)).unwrap();
    assert_eq!(b.polled()[0].byte_len, 3_000);
    // Another queue pair of that number is another sender.
    let mut again = Peer::sender();
    let bytes = again.write(&b, 0, 100, FAR).remove(0);
    b.take(&bytes, ms(0)).unwrap();
    assert_eq!(b.polled().len(), 1);
}

#[test]
fn only_so_many_senders_are_known() {
    let (mut a, mut b) = (Peer::sender(), Peer::receiver());
    let open = a.write(&b, 0, 3_000, FAR);
    b.take(&open[0], ms(0)).unwrap();
    let head = datagram::parse_record(&open[0]).unwrap().head;
    for at in 1..=1024 {
        let incarnation = head.incarnation ^ at;
        let head = uwarp_wire::datagram::record::Head { incarnation, message_len: 1, ..head };
        let arrival = Arrival { from: FROM, to: FROM, slid: 0 };
        b.core.deliver_record(&Segment { head, payload: &[1] }, &arrival, b.start + ms(1)).unwrap();
        assert!(b.core.free_record(b.polled()[0].wr_id));
    }
    // The first one is forgotten, with what it had open.
    assert_eq!(b.core.records_due(), None);
    b.take(&open[1], ms(2)).unwrap();
    b.core.expire_records(b.start + ms(500));
    let wcs = b.polled();
    assert_eq!((wcs.len(), wcs[0].byte_len), (1, 1394));
}

#[test]
fn reset_and_err_end_what_is_open() {
    for to in [QpState::Reset, QpState::Err] {
        let (mut a, mut b) = (Peer::sender(), Peer::receiver());
        let open = a.write(&b, 0, 5_000, FAR);
        b.take(&open[0], ms(0)).unwrap();
        let whole = a.write(&b, 8_000, 10, FAR).remove(0);
        b.take(&whole, ms(0)).unwrap();
        b.core.modify(&QpModify { state: Some(to), ..QpModify::default() }).unwrap();
        let wcs = b.polled();
        assert_eq!((wcs.len(), b.core.records_due()), (usize::from(to == QpState::Err), None));
        assert_eq!(b.take(&open[1], ms(0)), Err(Dropped::State));
        if let Some(wc) = wcs.first() {
            assert_eq!(b.core.record(wc.wr_id).unwrap().len, 10, "its program may still read it");
            b.core.modify(&QpModify { state: Some(QpState::Reset), ..QpModify::default() }).unwrap();
            assert_eq!(b.core.record(wc.wr_id), None);
        }
        b.starts();
        for at in 0..4 {
            let bytes = a.write(&b, at * 100, 100, FAR).remove(0);
            b.take(&bytes, ms(0)).unwrap();
        }
        assert_eq!(b.polled().len(), 4, "all places are free again");
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// Whatever is lost, doubled or out of order: a byte is valid if and only if it was written.
    #[test]
    fn no_byte_is_valid_that_has_not_come(
        len in 1u32..60_000,
        order in prop::collection::vec((0usize..64, 0u64..3), 0..90),
    ) {
        let (mut a, mut b) = (Peer::sender(), Peer::receiver());
        let datagrams = a.write(&b, 0, len, FAR);
        let mut after = 0;
        for (which, wait) in order {
            let Some(bytes) = datagrams.get(which) else { continue };
            after += wait;
            b.core.expire_records(b.start + ms(after));
            let _ = b.take(bytes, ms(after));
        }
        b.core.expire_records(b.start + ms(after + 1000));
        let wcs = b.polled();
        prop_assert!(wcs.len() <= 1, "one message is one record");
        let mut valid = vec![false; SIZE];
        for wc in &wcs {
            let record = b.core.record(wc.wr_id).unwrap();
            let bytes: u32 = record.valid.iter().map(|range| range.end - range.start).sum();
            prop_assert_eq!((bytes, wc.vendor_err), (wc.byte_len, u32::from(bytes < len)));
            for range in record.valid {
                valid[range.start as usize..range.end as usize].fill(true);
            }
        }
        for (at, valid) in valid.into_iter().enumerate() {
            prop_assert_eq!(b.memory[at], if valid { a.memory[at] } else { 0 }, "at {}", at);
        }
    }
}
