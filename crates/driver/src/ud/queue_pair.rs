//! A queue pair of unreliable datagrams, as the calls of a program see it.

use std::net::IpAddr;
use std::sync::{Arc, Weak};

use rustix::io::Errno;
use smallvec::SmallVec;
use uwarp_llp::udp::{self, Marks, Outgoing, Route};
use uwarp_proto::parts::How;
use uwarp_rnic::ah::Endpoint;
use uwarp_rnic::cq::{Coverage, Feeder};
use uwarp_rnic::qp::{Drops, PeerError, QpAttr, QpInit, QpModify, QpState, Snapshot, UdCore, UdSendWr};
use uwarp_rnic::{RecvWr, VerbsError};

use super::records::RecordTimer;
use super::unclaimed::Rate;
use super::{AwaitsRoom, Carried, DatagramPort, LIST_COUNTS};
use crate::held::Holder;
use crate::nic::Nic;
use crate::pair::QueuePair;
use crate::rings::Last;
use crate::shell::{Shell, post_each, post_together};
use crate::sync::{Mutex, MutexGuard};

/// Posts of a queue pair since a thread last polled in vain that go out at once. The posts behind come from a
/// program that has many messages, and wait for more.
const AT_ONCE: u32 = 1;
/// One post in this number stamps the time, as empty polls do: between these, a thread may be busy with posts
/// for longer than a poller counts as alive. After so many posts without an empty poll, none does.
const STAMP_EVERY: u32 = 8;
const STAMPS_UNTIL: u32 = 512;
/// Most that waits: what goes in one call.
const MOST_HELD: usize = udp::RUN;
const MOST_HELD_BYTES: usize = udp::MOST_JOINED;
/// So many posted together wait for no more: the program has gathered them itself.
const LIST: usize = 16;
/// As many datagrams of one route go in a call of their own. Fewer go with those of other routes: a call
/// takes as long as the pieces of some datagrams.
const LONG_RUN: usize = 8;

pub(super) struct Inner {
    pub core: UdCore,
    /// The socket had no room, and the port knows; or the memory, and the way knows.
    blocked: bool,
    destroyed: bool,
    /// Posts in this round ([`Held::round`](crate::held::Held::round)).
    posts: u32,
    round: u32,
    /// The engine knows that datagrams are held.
    held: bool,
    /// The way by memory that was used last.
    last: Last,
    /// Groups whose messages it takes. The port of groups knows them, too, but a thread may have looked there
    /// before the queue pair left.
    pub groups: SmallVec<[IpAddr; 1]>,
    /// For records of which a part is missing.
    pub timer: RecordTimer,
}

/// A datagram queue pair.
pub struct UdQp {
    pub(super) me: Weak<Self>,
    shell: Shell,
    pub(super) port: Arc<DatagramPort>,
    /// Of multicast groups, if it is a member of any.
    groups: Mutex<Option<Arc<DatagramPort>>, 19>,
    pub(super) inner: Mutex<Inner, 18>,
    /// Error Messages that it causes.
    pub(super) answers: Rate,
}

impl UdQp {
    /// Makes a queue pair in RESET. Fails when a limit of the device is exceeded or no number is free.
    pub fn create(nic: &Arc<Nic>, init: QpInit) -> Result<Arc<Self>, VerbsError> {
        Self::create_of(nic, init, UdCore::new)
    }

    pub(super) fn create_of(
        nic: &Arc<Nic>,
        mut init: QpInit,
        core: impl FnOnce(u32, QpInit) -> Result<UdCore, VerbsError>,
    ) -> Result<Arc<Self>, VerbsError> {
        let shell = Shell::admit(nic, &mut init)?;
        let qpn = shell.qpn();
        let (port, core) = (nic.datagram_port(qpn)?, core(qpn, init)?);
        let qp = Arc::new_cyclic(|me: &Weak<Self>| Self {
            me: me.clone(),
            shell,
            port,
            groups: Mutex::default(),
            inner: Mutex::new(Inner {
                core,
                blocked: false,
                destroyed: false,
                posts: 0,
                round: 0,
                held: false,
                last: Last::default(),
                groups: SmallVec::new(),
                timer: RecordTimer::default(),
            }),
            answers: Rate::default(),
        });
        qp.port.receivers.enter(qpn, qp.me.clone());
        let feeder: Weak<dyn Feeder> = qp.me.clone();
        qp.shell.arrive(&QueuePair::Ud(qp.clone()), &feeder);
        qp.shell.fed_by(None);
        Ok(qp)
    }

    /// Its number.
    pub fn qpn(&self) -> u32 {
        self.shell.qpn()
    }

    /// Posts datagrams. On a refusal, says which one (the ones before it are posted) and why. Never blocks.
    pub fn post_send<'a>(&self, wrs: impl Iterator<Item = UdSendWr<'a>>) -> Result<(), (usize, VerbsError)> {
        if self.shell.is_parents() {
            return Err((0, VerbsError::Forked));
        }
        let mut inner = self.inner.lock();
        let before = inner.core.waiting().0;
        let result = post_each(wrs, |wr| inner.core.post_next(wr));
        self.send_posted(inner, before);
        result
    }

    /// As [`Self::post_send`], but if one is refused, none is posted.
    pub fn post_send_together<'a>(
        &self,
        wrs: impl Iterator<Item = UdSendWr<'a>> + Clone,
    ) -> Result<(), VerbsError> {
        if self.shell.is_parents() {
            return Err(VerbsError::Forked);
        }
        let mut inner = self.inner.lock();
        let before = inner.core.waiting().0;
        let result = post_together(&mut inner.core, wrs, UdCore::check_send, UdCore::post_checked);
        self.send_posted(inner, before);
        result
    }

    /// Sends what was posted behind the first `before` that waited, or lets it wait for more.
    fn send_posted(&self, mut inner: MutexGuard<'_, Inner, 18>, before: usize) {
        inner.core.end_posts();
        if !self.goes_by_ring(&inner) && self.holds(&mut inner, before) {
            return;
        }
        let sent = self.transmit(&mut inner);
        drop(inner);
        self.port.has_sent(sent);
    }

    /// Whether what was posted goes by memory, as far as that is known: then it waits for nothing.
    #[inline]
    fn goes_by_ring(&self, inner: &Inner) -> bool {
        self.port.rings.any() && inner.core.first().is_some_and(|to| inner.last.is_ring_to(to.to, to.from))
    }

    /// Whether what was posted waits for more. A call to the system takes as long for one datagram as for
    /// several, and UCX posts its messages of many datagrams one by one.
    fn holds(&self, inner: &mut Inner, before: usize) -> bool {
        let engine = &self.port.engine;
        let held = &engine.held;
        if inner.round != held.round() || inner.posts == 0 {
            (inner.round, inner.posts) = (held.begin(), 0);
        }
        inner.posts = inner.posts.saturating_add(1);
        if inner.posts <= AT_ONCE {
            return false;
        }
        if !held.may_hold() {
            return false;
        }
        if inner.posts.is_multiple_of(STAMP_EVERY) && inner.posts <= STAMPS_UNTIL {
            engine.note_posts();
        }
        let (count, bytes) = inner.core.waiting();
        let is_much = count >= MOST_HELD || bytes >= MOST_HELD_BYTES || inner.core.is_full();
        if is_much || count - before.min(count) >= LIST {
            return false;
        }
        if !inner.held {
            inner.held = true;
            let me: Weak<dyn Holder> = self.me.clone();
            held.add(me, engine);
        }
        true
    }

    /// Hands what waits to the system, as long as that takes it; returns for how many datagrams alone that
    /// counts ([`DatagramPort::has_sent`]).
    fn transmit(&self, inner: &mut Inner) -> usize {
        let mut sent = 0;
        while !inner.blocked {
            let Inner { core, last, .. } = inner;
            let Some(first) = core.first().copied() else { break };
            let sent_some = match self.port.rings.way(first.to, first.from, last) {
                Some(way) => {
                    way.send(&self.me, &first, core.outgoing(), |most| self.send_some(core, || most))
                }
                None => self.send_some(core, || self.by_udp(core)).map(Some),
            };
            match sent_some {
                Ok(Some(n)) => {
                    inner.core.sent(n);
                    sent += n.min(LIST_COUNTS);
                }
                // The way knows.
                Ok(None) => inner.blocked = true,
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => {
                    inner.blocked = true;
                    let me: Weak<dyn AwaitsRoom> = self.me.clone();
                    self.port.block(me);
                }
                Err(e) => {
                    tracing::debug!(qpn = self.qpn(), to = %first.to, "datagram not sent: {e}");
                    inner.core.refused(e == Errno::MSGSIZE);
                }
            }
        }
        sent
    }

    /// There may be room for what waits.
    pub(crate) fn use_room(&self) {
        let mut inner = self.inner.lock();
        inner.blocked = false;
        self.transmit(&mut inner);
    }

    /// How many datagrams, counted from the first, go by UDP in any case.
    fn by_udp(&self, core: &UdCore) -> usize {
        if !self.port.rings.is_on() {
            return udp::BATCH;
        }
        let concerns = |to: &Endpoint| self.port.rings.concerns(to.to, to.from);
        // The first one may have found no way: there are too many.
        core.outgoing().skip(1).take(udp::BATCH - 1).take_while(|(to, _)| !concerns(to)).count() + 1
    }

    /// Hands the first of what waits to the system: a run, or `most` datagrams of any route.
    fn send_some(&self, core: &UdCore, most: impl FnOnce() -> usize) -> Result<usize, Errno> {
        let marks = |to: &Endpoint| Marks { traffic_class: to.marks.0, hop_limit: to.marks.1 };
        let run = core.run(udp::RUN, udp::MOST_JOINED);
        if let Some(run) = &run {
            match self.port.how(run.endpoint, run.bytes.get(..run.length).unwrap_or(run.bytes)) {
                How::Whole => {}
                How::Parts(packet) => return self.port.send_in_parts(run, marks(run.endpoint), packet),
                How::Fragments => return self.port.send_in_fragments(run, marks(run.endpoint)),
            }
        }
        if let Some(run) = run.filter(|run| run.count >= LONG_RUN || run.count >= core.waiting().0) {
            let route = Route { to: run.endpoint.to, from: run.endpoint.from };
            return self.port.socket.send_run(&route, marks(run.endpoint), run.bytes, run.length);
        }
        let whole = |(to, bytes): &(&Endpoint, &[u8])| self.port.how(to, bytes) == How::Whole;
        let most = most().min(udp::BATCH);
        // (The first one goes as it is.)
        let most = core.outgoing().take(most).skip(1).take_while(whole).count() + 1;
        let routes: SmallVec<[Route; 2]> =
            core.outgoing().take(most).map(|(to, _)| Route { to: to.to, from: to.from }).collect();
        let batch: SmallVec<[Outgoing<'_>; 2]> =
            routes.iter().zip(core.outgoing()).map(|(route, (_, bytes))| Outgoing { route, bytes }).collect();
        let marks: SmallVec<[Marks; 2]> = core.outgoing().take(most).map(|(to, _)| marks(to)).collect();
        self.port.socket.send_marked(&batch, &marks)
    }

    /// Posts receives. On a refusal, says which one (the ones before it are posted) and why. Never blocks.
    pub fn post_recv<'a>(&self, wrs: impl Iterator<Item = RecvWr<'a>>) -> Result<(), (usize, VerbsError)> {
        if self.shell.is_parents() {
            return Err((0, VerbsError::Forked));
        }
        let mut inner = self.inner.lock();
        post_each(wrs, |wr| inner.core.post_recv(wr))
    }

    /// Changes attributes or state.
    pub fn modify(&self, change: &QpModify) -> Result<(), VerbsError> {
        if self.shell.is_parents() {
            return Err(VerbsError::Forked);
        }
        let mut inner = self.inner.lock();
        // An adapter would have sent it by now.
        self.transmit(&mut inner);
        inner.core.modify(change)?;
        self.transmit(&mut inner);
        Ok(())
    }

    /// Its attributes.
    pub fn query(&self) -> QpAttr {
        self.inner.lock().core.query()
    }

    /// Payload of the largest message that it sends, and whether it keeps what peers say of dropped messages.
    pub fn extras(&self) -> (u32, bool) {
        let inner = self.inner.lock();
        (inner.core.max_message(), inner.core.keeps_errors())
    }

    /// Changes these; see [`UdCore::set_max_message`] and [`UdCore::keep_errors`]. All or nothing.
    pub fn set_extras(&self, max_message: Option<u32>, keep_errors: Option<bool>) -> Result<(), VerbsError> {
        if self.shell.is_parents() {
            return Err(VerbsError::Forked);
        }
        let mut inner = self.inner.lock();
        if let Some(bytes) = max_message {
            inner.core.set_max_message(bytes)?;
        }
        if let Some(keep) = keep_errors {
            inner.core.keep_errors(keep);
        }
        Ok(())
    }

    /// The oldest of what peers said of dropped messages.
    pub fn take_error(&self) -> Option<PeerError> {
        self.inner.lock().core.take_error()
    }

    /// Its state, what it has done, and what it has dropped.
    pub fn look_at(&self) -> (QpState, Snapshot, Drops) {
        let inner = self.inner.lock();
        (inner.core.query().state, inner.core.snapshot(), inner.core.drops())
    }

    /// What carries the datagrams between its port and other processes of this host.
    pub fn carried(&self) -> Vec<Carried> {
        self.port.rings.carried()
    }

    /// Becomes a member of a group, or of those that get what is sent to a broadcast address, on one
    /// interface (its index; 0: on all).
    /// Nothing changes for one that is a member already.
    pub fn attach(&self, group: IpAddr, interface: u32) -> Result<(), VerbsError> {
        let port = self.shell.nic().group_port()?;
        port.add_member(&self.me, group, interface)?;
        *self.groups.lock() = Some(port);
        let mut inner = self.inner.lock();
        if !inner.groups.contains(&group) {
            inner.groups.push(group);
        }
        Ok(())
    }

    /// Is a member no more: no message to the group completes after this has returned.
    pub fn detach(&self, group: IpAddr) -> Result<(), VerbsError> {
        self.inner.lock().groups.retain(|of| *of != group);
        let port = self.groups.lock().clone();
        let left = port.is_some_and(|port| port.remove_members(&self.me, |of| of == group));
        if left { Ok(()) } else { Err(VerbsError::Invalid("the queue pair is not a member of the group")) }
    }

    /// Whether it is a member of a group.
    pub fn is_member(&self) -> bool {
        !self.inner.lock().groups.is_empty()
    }

    /// Is a member of no group any more.
    pub fn leave_all(&self) {
        self.inner.lock().groups.clear();
        let port = self.groups.lock().take();
        if let Some(port) = port {
            port.remove_members(&self.me, |_| true);
        }
    }

    /// Destroys the queue pair: no completion and no event follows.
    pub fn destroy(&self) {
        let mut inner = self.inner.lock();
        if std::mem::replace(&mut inner.destroyed, true) {
            return;
        }
        self.shell.stop_feeding();
        self.port.receivers.enter(self.qpn(), Weak::new());
        drop(inner);
        self.leave_all();
        let mut inner = self.inner.lock();
        let (counters, drops) = (inner.core.snapshot().counters, inner.core.drops());
        self.transmit(&mut inner);
        let reset = QpModify { state: Some(QpState::Reset), ..QpModify::default() };
        // Cannot be refused: any state may become RESET.
        let _ = inner.core.modify(&reset);
        drop(inner);
        self.shell.depart(counters, drops);
    }
}

impl Feeder for UdQp {
    fn make_progress(&self, in_earnest: bool) -> Coverage {
        let groups = self.groups.lock().clone();
        let covered = groups.map_or(Coverage::Complete, |groups| groups.make_progress(in_earnest));
        self.port.make_progress(in_earnest).and(covered)
    }
}

impl Holder for UdQp {
    fn send_held(&self) {
        let mut inner = self.inner.lock();
        inner.held = false;
        self.transmit(&mut inner);
    }
}

impl Drop for UdQp {
    fn drop(&mut self) {
        self.destroy();
    }
}
