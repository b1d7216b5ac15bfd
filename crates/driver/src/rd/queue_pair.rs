//! A queue pair of reliable datagrams, as the calls of a program see it.

use std::sync::{Arc, Weak};

use uwarp_rnic::cq::{Coverage, Feeder};
use uwarp_rnic::qp::{
    Drops, Now, QpAttr, QpInit, QpModify, QpState, RdCore, RdInit, Record, Snapshot, Source as Allowed,
    UdSendWr,
};
use uwarp_rnic::{RecvWr, VerbsError};
use uwarp_wire::rd::chunk::Reason;

use super::{Exchanges, Turn};
use crate::nic::Nic;
use crate::pair::QueuePair;
use crate::shell::{Shell, post_each, post_together};
use crate::sync::{Mutex, MutexGuard};
use crate::ud::DatagramPort;

/// A queue pair of reliable datagrams.
pub struct RdQp {
    pub(super) me: Weak<Self>,
    shell: Shell,
    port: Arc<DatagramPort>,
    pub(super) exchanges: Arc<Exchanges>,
    pub(super) inner: Mutex<RdCore, 18>,
    destroyed: Mutex<bool, 19>,
}

impl RdQp {
    /// Makes a queue pair in RESET. Fails when a limit of the device is exceeded or no number is free.
    pub fn create(nic: &Arc<Nic>, mut init: QpInit, how: RdInit) -> Result<Arc<Self>, VerbsError> {
        let shell = Shell::admit(nic, &mut init)?;
        let qpn = shell.qpn();
        let port = nic.datagram_port(qpn)?;
        let (exchanges, core) = (port.exchanges()?, RdCore::new(qpn, init, how)?);
        let qp = Arc::new_cyclic(|me: &Weak<Self>| Self {
            me: me.clone(),
            shell,
            port,
            exchanges,
            inner: Mutex::new(core),
            destroyed: Mutex::new(false),
        });
        qp.exchanges.enter(&qp);
        let feeder: Weak<dyn Feeder> = qp.me.clone();
        qp.shell.arrive(&QueuePair::Rd(qp.clone()), &feeder);
        qp.shell.fed_by(None);
        Ok(qp)
    }

    /// Its number.
    pub fn qpn(&self) -> u32 {
        self.shell.qpn()
    }

    /// Posts messages. On a refusal, says which one (the ones before it are posted) and why. Never blocks.
    pub fn post_send<'a>(&self, wrs: impl Iterator<Item = UdSendWr<'a>>) -> Result<(), (usize, VerbsError)> {
        if self.shell.is_parents() {
            return Err((0, VerbsError::Forked));
        }
        let turn = self.exchanges.turn.lock();
        let mut core = self.inner.lock();
        let result = post_each(wrs, |wr| core.post_send(wr));
        self.send_posted(turn, core);
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
        let turn = self.exchanges.turn.lock();
        let mut core = self.inner.lock();
        let result = post_together(&mut *core, wrs, RdCore::check_send, RdCore::post_checked);
        self.send_posted(turn, core);
        result
    }

    fn send_posted(&self, mut turn: MutexGuard<'_, Turn, 17>, mut core: MutexGuard<'_, RdCore, 18>) {
        let now = Now::unread();
        turn.post(&now, self, &mut core);
        turn.withdraw(&mut core);
        drop(core);
        self.exchanges.finish(&mut turn, &now);
        let sent = std::mem::take(&mut turn.outbox.sent);
        self.exchanges.release(turn);
        // A thread that posts without end must not lose what comes meanwhile.
        self.port.has_sent(sent);
    }

    /// Posts receives. On a refusal, says which one (the ones before it are posted) and why. Never blocks.
    pub fn post_recv<'a>(&self, wrs: impl Iterator<Item = RecvWr<'a>>) -> Result<(), (usize, VerbsError)> {
        if self.shell.is_parents() {
            return Err((0, VerbsError::Forked));
        }
        let mut core = self.inner.lock();
        let result = post_each(wrs, |wr| core.post_recv(wr));
        let is_awaited = core.take_ready();
        drop(core);
        if is_awaited {
            self.tell_ready();
        }
        result
    }

    /// A record that has completed, until the program frees it.
    pub fn record(&self, name: u64) -> Option<Record> {
        self.inner.lock().record(name)
    }

    /// The program does not need a record any more. False: there is none of this name.
    pub fn free_record(&self, name: u64) -> bool {
        let mut core = self.inner.lock();
        let freed = core.free_record(name);
        let is_awaited = core.take_ready();
        drop(core);
        if is_awaited && !self.shell.is_parents() {
            self.tell_ready();
        }
        freed
    }

    /// Messages have found no receive or no record, and now there is one.
    #[cold]
    fn tell_ready(&self) {
        let now = Now::unread();
        let mut turn = self.exchanges.turn.lock();
        let receives = self.inner.lock().snapshot().receives_posted;
        turn.machine.on_receives_posted(&now, self.qpn(), receives);
        turn.to_itself.on_receives_posted(self.qpn());
        self.exchanges.end(turn, &now);
    }

    /// Changes attributes or state.
    pub fn modify(&self, change: &QpModify) -> Result<(), VerbsError> {
        if self.shell.is_parents() {
            return Err(VerbsError::Forked);
        }
        let now = Now::unread();
        let mut turn = self.exchanges.turn.lock();
        let mut core = self.inner.lock();
        let result = core.modify(change);
        let ends = matches!(core.query().state, QpState::Reset | QpState::Err);
        turn.withdraw(&mut core);
        turn.post(&now, self, &mut core);
        drop(core);
        if ends {
            turn.withdraw_own(&now, &self.me, self.qpn());
            turn.machine.refuse_all(&now, self.qpn(), Reason::Aborted);
        }
        self.exchanges.end(turn, &now);
        result
    }

    /// Names peers that may name memory; once there is one, all others may not.
    pub fn allow_source(&self, source: Allowed) -> Result<(), VerbsError> {
        self.inner.lock().allow_source(source)
    }

    /// Its attributes.
    pub fn query(&self) -> QpAttr {
        self.inner.lock().query()
    }

    /// Its state, what it has done, and what it has dropped.
    pub fn look_at(&self) -> (QpState, Snapshot, Drops) {
        let core = self.inner.lock();
        (core.query().state, core.snapshot(), core.drops())
    }

    /// Destroys the queue pair: no completion and no event follows. What it has received is acknowledged.
    pub fn destroy(&self) {
        if std::mem::replace(&mut *self.destroyed.lock(), true) {
            return;
        }
        self.shell.stop_feeding();
        if self.shell.is_parents() {
            // Its exchanges are the parent's.
            return;
        }
        let now = Now::unread();
        let mut turn = self.exchanges.turn.lock();
        turn.qps.remove(&self.qpn());
        let mut core = self.inner.lock();
        let (counters, drops) = (core.snapshot().counters, core.drops());
        core.destroy();
        turn.withdraw(&mut core);
        drop(core);
        turn.withdraw_own(&now, &self.me, self.qpn());
        turn.machine.refuse_all(&now, self.qpn(), Reason::Aborted);
        if turn.is_deserted() {
            turn.port = Some(Arc::clone(&self.port));
        }
        self.exchanges.end(turn, &now);
        self.shell.depart(counters, drops);
    }
}

impl Feeder for RdQp {
    fn make_progress(&self, in_earnest: bool) -> Coverage {
        self.port.make_progress(in_earnest)
    }

    fn rest(&self) {
        let _ = self.exchanges.poll(self.port.engine());
    }
}

impl Drop for RdQp {
    fn drop(&mut self) {
        self.destroy();
    }
}
