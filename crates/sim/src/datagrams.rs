//! Datagram queue pairs over a network that loses, duplicates, delays and corrupts, with peers that die and
//! come back.
//!
//! Some queue pairs send each other numbered messages and post receives at random moments. For each message
//! the model knows its sender, its receiver and how many copies the network made. What must hold:
//! - a received message equals the sent one, has the right sender and receiver, and is received no more often
//!   than it arrived;
//! - every datagram that arrives is received or counted under one reason;
//! - every work request completes as it must, in order;
//! - a destroyed queue pair writes no memory any more, and the one that gets its number receives only
//!   datagrams that arrive after that.

use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv4Addr};
use std::sync::Arc;

use uwarp_proto::datagram;
use uwarp_rnic::event::{AsyncEvent, AsyncSink};
use uwarp_rnic::qp::{Arrival, Drops, QpCaps, QpInit, QpModify, QpState, UdCore, UdSendWr};
use uwarp_rnic::{Access, Ah, Cq, Mr, Pd, RecvWr, SendFlags, SendOp, SendWr, Sge, Wc, WcFlags, WcStatus};

use crate::{Arena, Rng};

/// Queue pairs.
const ENDS: usize = 4;
/// Receives of each, and places for them.
const RECEIVES: usize = 16;
const SENDS: usize = 16;
const SLOT: usize = 1100;
const GRH: usize = 40;
const LONGEST: usize = SLOT - GRH;
const QKEY: u32 = 0x0102_0304;
/// Longest delay of a datagram, in steps.
const DELAY: u64 = 40;

/// Frequency of each fault of the network or a peer, in thousandths.
#[derive(Debug, Clone, Copy, Default)]
#[allow(missing_docs)]
pub struct Faults {
    pub loss: u32,
    pub duplication: u32,
    pub reordering: u32,
    pub corruption: u32,
    /// A queue pair is destroyed, and another one gets its number.
    pub death: u32,
    /// A queue pair goes through the error state, or stops and resumes sending.
    pub modify: u32,
    /// The system refuses to send a datagram.
    pub refusal: u32,
    /// A wrong Q_Key, or a number that no queue pair has.
    pub mistake: u32,
    /// Receives are posted late, and may be too short.
    pub scarce_receives: bool,
}

/// Counts of all datagrams.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[allow(missing_docs)]
pub struct Tally {
    /// The system took them.
    pub sent: u64,
    pub lost: u64,
    /// Datagrams at a receiver's socket, copies included.
    pub arrived: u64,
    pub corrupted: u64,
    pub malformed: u64,
    pub unknown: u64,
    pub received: u64,
    pub drops: Drops,
}

struct NoEvents;

impl AsyncSink for NoEvents {
    fn async_event(&self, event: AsyncEvent) {
        panic!("no datagram makes an event here: {event:?}");
    }
}

/// One incarnation of a queue pair.
struct End {
    qpn: u32,
    core: UdCore,
    pd: Arc<Pd>,
    send_cq: Arc<Cq>,
    recv_cq: Arc<Cq>,
    memory: Arena,
    mr: Arc<Mr>,
    /// Places without a receive.
    free: Vec<usize>,
    /// Receives in the order in which they were posted, and their lengths.
    posted: Vec<(usize, usize)>,
    /// Work requests that are not complete: number and whether a completion is certain.
    sends: Vec<(u64, bool)>,
}

/// What the model knows of a message.
struct Sent {
    from: u32,
    to: u32,
    payload: Vec<u8>,
    immediate: Option<[u8; 4]>,
    /// How often it reached the receiver's present incarnation, unchanged.
    arrived: u64,
    received: u64,
}

struct Flying {
    due: u64,
    order: u64,
    /// None: it was corrupted.
    message: Option<u64>,
    bytes: Vec<u8>,
}

struct Run {
    rng: Rng,
    faults: Faults,
    ends: Vec<End>,
    /// Memory of destroyed queue pairs, with its contents at that time.
    destroyed: Vec<(Arena, Vec<u8>)>,
    sent: BTreeMap<u64, Sent>,
    flying: Vec<Flying>,
    now: u64,
    next: u64,
    tally: Tally,
}

fn qpn(end: usize) -> u32 {
    (20_000 + end as u32) << 8 | (end as u32 + 1)
}

fn address(qpn: u32) -> IpAddr {
    Ipv4Addr::new(10, 0, 0, qpn as u8).into()
}

impl End {
    fn new(qpn: u32) -> Self {
        let pd = Pd::new();
        let events: Arc<dyn AsyncSink> = Arc::new(NoEvents);
        let cq = || Cq::new(4096, 0, None, events.clone());
        let (send_cq, recv_cq) = (cq(), cq());
        let caps = QpCaps {
            max_send_wr: SENDS as u32,
            max_recv_wr: RECEIVES as u32,
            max_send_sge: 2,
            max_recv_sge: 2,
            max_inline_data: 64,
        };
        let init = QpInit {
            pd: pd.clone(),
            send_cq: send_cq.clone(),
            recv_cq: recv_cq.clone(),
            srq: None,
            caps,
            sq_sig_all: false,
            cookie: 0,
            async_sink: events,
        };
        let core = UdCore::new(qpn, init).expect("a queue pair");
        // The last place is for messages to send.
        let memory = Arena::new((RECEIVES + 1) * SLOT);
        let mr = memory.register(&pd, 0, memory.len(), Access::LOCAL_WRITE);
        let free = (0..RECEIVES).collect();
        let mut end =
            Self { qpn, core, pd, send_cq, recv_cq, memory, mr, free, posted: Vec::new(), sends: Vec::new() };
        end.rise();
        end
    }

    fn modify(&mut self, state: QpState) {
        let qkey = (state == QpState::Init).then_some(QKEY);
        let change = QpModify { state: Some(state), qkey, ..QpModify::default() };
        self.core.modify(&change).expect("a legal step");
    }

    fn rise(&mut self) {
        [QpState::Init, QpState::Rtr, QpState::Rts].into_iter().for_each(|state| self.modify(state));
    }

    fn sges(&self, offset: usize, len: usize, cut: usize) -> [Sge; 2] {
        let lkey = self.mr.stag();
        let sge = |at: usize, len: usize| Sge { addr: self.memory.addr(at), length: len as u32, lkey };
        let cut = cut.min(len);
        [sge(offset, cut), sge(offset + cut, len - cut)]
    }
}

/// Runs `steps` steps of a network with these faults, then lets everything arrive, and checks the result.
///
/// # Panics
/// If a check fails.
pub fn run(seed: u64, faults: Faults, steps: usize) -> Tally {
    let mut run = Run {
        rng: Rng::new(seed),
        faults,
        ends: (0..ENDS).map(|end| End::new(qpn(end))).collect(),
        destroyed: Vec::new(),
        sent: BTreeMap::new(),
        flying: Vec::new(),
        now: 0,
        next: 1,
        tally: Tally::default(),
    };
    for _ in 0..steps {
        run.step();
    }
    run.finish();
    run.tally
}

impl Run {
    fn any_end(&mut self) -> usize {
        self.rng.size(0, ENDS - 1)
    }

    fn step(&mut self) {
        self.now += 1;
        let scarce = self.faults.scarce_receives;
        for end in 0..ENDS {
            if !scarce || self.rng.chance(200) {
                self.post_receives(end);
            }
        }
        let from = self.any_end();
        self.post_send(from);
        let end = self.any_end();
        self.transmit(end);
        self.deliver_due();
        if self.rng.chance(self.faults.modify) {
            self.change_state();
        }
        if self.rng.chance(self.faults.death) {
            self.replace_one();
        }
        for end in 0..ENDS {
            self.completions(end);
        }
    }

    fn post_receives(&mut self, at: usize) {
        let end = &mut self.ends[at];
        while let Some(slot) = end.free.pop() {
            let len = match self.faults.scarce_receives {
                true => self.rng.size(GRH, SLOT),
                false => SLOT,
            };
            let sges = end.sges(slot * SLOT, len, self.rng.size(0, SLOT));
            end.core.post_recv(&RecvWr { wr_id: slot as u64, sges: &sges }).expect("there is a place");
            end.posted.push((slot, len));
        }
    }

    fn post_send(&mut self, from: usize) {
        let mut to = qpn(self.any_end());
        let mut qkey = QKEY;
        if self.rng.chance(self.faults.mistake) {
            match self.rng.chance(500) {
                true => qkey ^= 1 << self.rng.below(31),
                false => to ^= 0x80,
            }
        }
        let mut payload = vec![0; self.rng.size(8, LONGEST)];
        self.rng.fill(&mut payload);
        let number = self.next;
        payload[..8].copy_from_slice(&number.to_le_bytes());
        let immediate = self.rng.chance(300).then(|| (number as u32).to_be_bytes());
        let signaled = self.rng.chance(500);
        let end = &mut self.ends[from];
        end.memory.write(RECEIVES * SLOT, &payload);
        let sges = end.sges(RECEIVES * SLOT, payload.len(), self.rng.size(0, LONGEST));
        let op = immediate.map_or(SendOp::Send { invalidate: None }, |imm| SendOp::SendImmediate { imm });
        let flags = if signaled { SendFlags::SIGNALED } else { SendFlags::empty() };
        let wr = SendWr { wr_id: number, op, flags, sges: &sges };
        let ah = Ah::new(&end.pd, (address(to), 0).into(), None);
        if end
            .core
            .post_send(&UdSendWr { wr, ah: &ah, remote_qpn: to, remote_qkey: qkey, job_key: None })
            .is_ok()
        {
            self.next += 1;
            end.sends.push((number, signaled));
            let from = end.qpn;
            self.sent.insert(number, Sent { from, to, payload, immediate, arrived: 0, received: 0 });
        }
        // The post has copied the bytes.
        end.memory.write(RECEIVES * SLOT, &[0xDD; LONGEST]);
    }

    /// The lower layer takes some of the waiting datagrams, or refuses the first.
    fn transmit(&mut self, at: usize) {
        let end = &mut self.ends[at];
        let waiting: Vec<Vec<u8>> = end.core.outgoing().map(|(_, bytes)| bytes.to_vec()).collect();
        if !waiting.is_empty() && self.rng.chance(self.faults.refusal) {
            end.core.refused(false);
            return;
        }
        let take = self.rng.size(0, waiting.len());
        end.core.sent(take);
        for bytes in waiting.into_iter().take(take) {
            self.tally.sent += 1;
            if self.rng.chance(self.faults.loss) {
                self.tally.lost += 1;
                continue;
            }
            let copies = 1 + u32::from(self.rng.chance(self.faults.duplication));
            (0..copies).for_each(|_| self.fly(bytes.clone()));
        }
    }

    fn fly(&mut self, mut bytes: Vec<u8>) {
        let message = datagram::parse(&bytes).expect("what we send is well formed").payload;
        let mut message = message.first_chunk().copied().map(u64::from_le_bytes);
        if self.rng.chance(self.faults.corruption) {
            let bit = self.rng.size(0, bytes.len() * 8 - 1);
            bytes[bit / 8] ^= 1 << (bit % 8);
            message = None;
        }
        let late = self.rng.chance(self.faults.reordering);
        let due = self.now + if late { self.rng.below(DELAY) } else { 0 };
        self.flying.push(Flying { due, order: self.flying.len() as u64, message, bytes });
    }

    fn deliver_due(&mut self) {
        let now = self.now;
        let (mut due, later): (Vec<_>, Vec<_>) =
            std::mem::take(&mut self.flying).into_iter().partition(|one| one.due <= now);
        self.flying = later;
        due.sort_by_key(|one| (one.due, one.order));
        due.iter().for_each(|one| self.deliver(one));
    }

    /// Delivers one, as the owner of a socket does.
    fn deliver(&mut self, one: &Flying) {
        self.tally.arrived += 1;
        let Ok(message) = datagram::parse(&one.bytes) else {
            self.tally.malformed += 1;
            self.tally.corrupted += 1;
            assert!(one.message.is_none(), "a good datagram is dropped as malformed");
            return;
        };
        let number = one.message.expect("a corrupted datagram passes");
        let to = message.head.destination_qpn;
        let Some(end) = self.ends.iter_mut().find(|end| end.qpn == to) else {
            self.tally.unknown += 1;
            return;
        };
        let arrival = Arrival { from: address(message.head.source_qpn), to: address(to), slid: 0 };
        let before = end.core.query().state;
        if end.core.deliver(&message, &arrival).is_ok() {
            self.sent.get_mut(&number).expect("it was sent").arrived += 1;
        }
        assert_eq!(end.core.query().state, before, "what arrives changes the state");
    }

    fn change_state(&mut self) {
        let at = self.any_end();
        let end = &mut self.ends[at];
        if self.rng.chance(500) {
            end.modify(QpState::Sqd);
            end.modify(QpState::Rts);
            return;
        }
        end.modify(QpState::Err);
        // Everything is flushed; received messages complete before.
        self.completions(at);
        let end = &mut self.ends[at];
        assert!(end.posted.is_empty(), "receives outlive the error state: {:?}", end.posted);
        assert!(end.sends.iter().all(|(_, certain)| !certain), "sends outlive it: {:?}", end.sends);
        end.sends.clear();
        end.modify(QpState::Reset);
        end.rise();
    }

    /// Destroys one. Another one gets its number, at once or never in this run.
    fn replace_one(&mut self) {
        let at = self.any_end();
        self.completions(at);
        let new = End::new(self.ends[at].qpn);
        let old = std::mem::replace(&mut self.ends[at], new);
        self.tally.drops += old.core.drops();
        for sent in self.sent.values_mut().filter(|sent| sent.to == old.qpn) {
            assert_eq!(sent.arrived, sent.received, "a message was placed and not completed");
        }
        let End { memory, core, .. } = old;
        drop(core);
        let held = memory.snapshot();
        self.destroyed.push((memory, held));
    }

    fn completions(&mut self, at: usize) {
        let (mut sends, mut recvs) = (Vec::new(), Vec::new());
        self.ends[at].send_cq.poll(4096, |wc| sends.push(wc));
        self.ends[at].recv_cq.poll(4096, |wc| recvs.push(wc));
        let end = &mut self.ends[at];
        for wc in sends {
            let place = end.sends.iter().position(|(number, _)| *number == wc.wr_id);
            let place = place.unwrap_or_else(|| panic!("send {} completes twice, or never was", wc.wr_id));
            let mut before = end.sends.drain(..=place).take(place);
            assert!(before.all(|(_, certain)| !certain), "sends do not complete in order");
            assert!(matches!(wc.status, WcStatus::Success | WcStatus::WrFlushErr), "{wc:?}");
        }
        for wc in recvs {
            let (slot, len) = end.posted.remove(0);
            assert_eq!(wc.wr_id, slot as u64, "receives do not complete in order");
            end.free.push(slot);
            if wc.status == WcStatus::Success {
                let bytes = end.memory.read(slot * SLOT, len);
                received(&mut self.sent, end.qpn, &wc, &bytes);
                self.tally.received += 1;
            } else {
                assert_eq!(wc.status, WcStatus::WrFlushErr);
            }
        }
    }

    fn finish(&mut self) {
        while self.ends.iter().any(|end| end.core.has_outgoing()) || !self.flying.is_empty() {
            self.now += DELAY;
            (0..ENDS).for_each(|end| self.post_receives(end));
            (0..ENDS).for_each(|end| self.transmit(end));
            self.deliver_due();
            (0..ENDS).for_each(|end| self.completions(end));
        }
        for end in &self.ends {
            assert!(
                end.sends.iter().all(|(_, certain)| !certain),
                "sends without completion: {:?}",
                end.sends
            );
            self.tally.drops += end.core.drops();
        }
        for (memory, held) in &self.destroyed {
            assert!(memory.snapshot() == *held, "a destroyed queue pair has written");
        }
        for (number, sent) in &self.sent {
            assert_eq!(sent.arrived, sent.received, "message {number} was placed and not completed");
        }
        let Tally { arrived, malformed, unknown, received, drops, .. } = self.tally;
        let dropped = drops.state + drops.qkey + drops.no_receive + drops.too_long;
        assert_eq!(arrived, malformed + unknown + received + dropped, "{:?}", self.tally);
    }
}

/// A received message equals the sent one, and is received no more often than it arrived.
fn received(all: &mut BTreeMap<u64, Sent>, by: u32, wc: &Wc, bytes: &[u8]) {
    let payload = &bytes[GRH..wc.byte_len as usize];
    let number = payload.first_chunk().copied().map_or(0, u64::from_le_bytes);
    let sent = all.get_mut(&number).unwrap_or_else(|| panic!("message {number} was never sent"));
    assert!(payload == sent.payload, "message {number} was changed");
    assert_eq!((sent.from, sent.to), (wc.src_qp, by), "message {number} is from or for another");
    let immediate = wc.flags.contains(WcFlags::WITH_IMM).then(|| wc.imm_or_inv.to_ne_bytes());
    assert_eq!(immediate, sent.immediate, "message {number}");
    sent.received += 1;
    assert!(sent.received <= sent.arrived, "message {number} was received more often than it arrived");
}
