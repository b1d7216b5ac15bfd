//! Ids of datagrams (`RDMA_PS_UDP`, `RDMA_PS_IPOIB`) have no stream. Connecting is a lookup; accepting
//! answers it.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::sync::{Arc, Weak};

use parking_lot::MutexGuard;
use rustix::io::Errno;
use uwarp_llp::udp::Socket;
use uwarp_rnic::ah::QPN_MULTICAST;

use super::{Id, Inner, check_scope};
use crate::error::CmError;
use crate::event::{DatagramParam, Event, EventKind};
use crate::listener::Listener;
use crate::lookup::{Client, Found, LookupObserver, Question, QuestionObserver, Server};
use crate::state::{State, Step};

/// The Q_Key of queue pairs of rdma_cm (`RDMA_UDP_QKEY`).
pub const QKEY: u32 = 0x0123_4567;

/// The part of an id that only datagrams need.
#[derive(Default)]
pub(super) struct Datagrams {
    bound: Option<Arc<Socket>>,
    server: Option<Arc<Server>>,
    client: Option<Arc<Client>>,
    question: Option<Question>,
}

impl Id {
    /// Whether this is an id of datagrams.
    pub fn is_datagram(&self) -> bool {
        self.port_space.is_some()
    }

    pub(super) fn bind_datagrams(
        &self,
        inner: &mut MutexGuard<'_, Inner>,
        address: SocketAddr,
    ) -> Result<(), CmError> {
        inner.life.check(Step::Bind)?;
        check_scope(address)?;
        let socket = Socket::bind_address(address)?;
        inner.local = Some(SocketAddr::new(address.ip(), socket.port()?));
        inner.datagrams.bound = Some(Arc::new(socket));
        inner.life.take(Step::Bind)
    }

    pub(super) fn listen_datagrams(&self, port_space: u16, backlog: i32) -> Result<(), CmError> {
        let mut inner = self.inner.lock();
        inner.life.check(Step::Listen)?;
        if inner.life.state() == State::Idle {
            self.bind_datagrams(&mut inner, SocketAddr::new(IpAddr::V4(Ipv4Addr::UNSPECIFIED), 0))?;
        }
        let socket = inner.datagrams.bound.clone().ok_or(CmError::Invalid("not bound"))?;
        inner.life.take(Step::Listen)?;
        let me: Weak<Self> = Weak::clone(&self.me);
        let backlog = Listener::backlog(backlog);
        match Server::start(self.cm.engine(), &socket, port_space, backlog, me) {
            Ok(server) => {
                inner.datagrams.server = Some(server);
                Ok(())
            }
            Err(errno) => {
                // The socket is not consumed: the id is bound as before.
                inner.life.take(Step::ListenRefused)?;
                Err(errno.into())
            }
        }
    }

    /// Asks the peer which queue pair serves its port. Answered by [`EventKind::Established`], which names
    /// the queue pair, or by [`EventKind::Unreachable`].
    pub fn look_up(&self, private_data: &[u8]) -> Result<(), CmError> {
        let port_space = self.port_space.ok_or(CmError::Invalid("not an id of datagrams"))?;
        let mut inner = self.inner.lock();
        inner.life.check(Step::Connect)?;
        let (Some(local), Some(peer)) = (inner.local, inner.peer) else {
            return Err(CmError::Invalid("no remote address"));
        };
        inner.life.take(Step::Connect)?;
        inner.has_connected = true;
        drop(inner);
        let me: Weak<Self> = Weak::clone(&self.me);
        let patience = self.cm.timeouts().reply;
        let client = Client::start(self.cm.engine(), me, (local, peer), port_space, private_data, patience);
        let mut inner = self.inner.lock();
        match client {
            Ok(client) if inner.life.state() == State::Connecting => {
                inner.datagrams.client = Some(client);
                Ok(())
            }
            Ok(client) => {
                // It has ended already, or the program has destroyed the id.
                drop(inner);
                client.cancel();
                Ok(())
            }
            Err(error) => {
                // Refused only if the id is destroyed.
                let _ = inner.life.take(Step::ConnectRefused);
                Err(error)
            }
        }
    }

    /// Answers the lookup that this id stands for with this queue pair. No event follows.
    pub fn answer(&self, qpn: u32, qkey: u32, private_data: &[u8]) -> Result<(), CmError> {
        let mut inner = self.inner.lock();
        inner.life.check(Step::Accept)?;
        let question =
            inner.datagrams.question.as_ref().ok_or(CmError::Invalid("there is no connection request"))?;
        question.answer(qpn, qkey, private_data)?;
        inner.datagrams.question = None;
        inner.life.take(Step::Accept)?;
        inner.life.take(Step::Established)
    }

    pub(super) fn refuse(mut inner: MutexGuard<'_, Inner>, private_data: &[u8]) -> Result<(), CmError> {
        let question = inner.datagrams.question.take();
        drop(inner);
        question.map_or(Ok(()), |question| question.refuse(private_data))
    }

    /// Reports that the program may join a group; `context` is the program's. Answered by
    /// [`EventKind::MulticastJoin`], at once.
    pub fn join(&self, group: SocketAddr, context: usize) -> Result<(), CmError> {
        let Some(me) = self.me.upgrade().filter(|_| self.is_datagram()) else {
            return Err(CmError::Invalid("not an id of datagrams"));
        };
        let mut inner = self.inner.lock();
        let local = inner.local.ok_or(CmError::Invalid("not bound"))?;
        let mut event = Event::plain(&me, EventKind::MulticastJoin, 0);
        event.datagram = Some(DatagramParam { qpn: QPN_MULTICAST, qkey: QKEY, local, peer: group, context });
        Self::push(&mut inner, event);
        Ok(())
    }
}

impl Datagrams {
    /// The id is destroyed.
    pub fn close(self) {
        if let Some(client) = self.client {
            client.cancel();
        }
        if let Some(server) = self.server {
            server.cancel();
        }
        if let Some(question) = self.question {
            // The only possible error is too much private data.
            let _ = question.refuse(&[]);
        }
    }
}

impl LookupObserver for Id {
    fn looked_up(&self, found: Found) {
        let Some(me) = self.me.upgrade() else { return };
        let mut inner = self.inner.lock();
        inner.datagrams.client = None;
        if inner.life.state() != State::Connecting {
            return;
        }
        // As Linux' rdma_cm: for every status of the server, the event is "unreachable", and its status has
        // the reason.
        let (step, kind, status, private_data) = match &found {
            Found::QueuePair { private_data, .. } => {
                (Step::Established, EventKind::Established, 0, private_data.clone())
            }
            Found::Refused(status, private_data) => {
                (Step::Failed, EventKind::Unreachable, status.code().into(), private_data.clone())
            }
            Found::Absent => {
                (Step::Failed, EventKind::Unreachable, -Errno::CONNREFUSED.raw_os_error(), Vec::new())
            }
            Found::Silence => {
                (Step::Failed, EventKind::Unreachable, -Errno::TIMEDOUT.raw_os_error(), Vec::new())
            }
        };
        if inner.life.take(step).is_err() {
            return;
        }
        let mut event = Event::plain(&me, kind, status);
        event.private_data = private_data;
        if let (Found::QueuePair { qpn, qkey, .. }, Some(local), Some(peer)) =
            (found, inner.local, inner.peer)
        {
            event.datagram = Some(DatagramParam { qpn, qkey, local, peer, context: 0 });
        }
        Self::push(&mut inner, event);
    }
}

impl QuestionObserver for Id {
    fn lookup_requested(&self, question: Question, private_data: Vec<u8>) {
        let Some(me) = self.me.upgrade() else { return };
        let inner = self.inner.lock();
        if inner.life.state() != State::Listening {
            return;
        }
        let (from, to) = (question.from, question.to);
        let local = SocketAddr::new(to, inner.local.map_or(0, |local| local.port()));
        let id = Self::with_state(&self.cm, &inner.channel, State::RequestPending, self.port_space);
        {
            let mut new = id.inner.lock();
            (new.local, new.peer) = (Some(local), Some(from));
            new.options = inner.options;
            new.datagrams.question = Some(question);
        }
        let mut event = Event::plain(&id, EventKind::ConnectRequest, 0);
        event.listener = Some(me);
        event.private_data = private_data;
        event.datagram = Some(DatagramParam { qpn: 0, qkey: 0, local, peer: from, context: 0 });
        inner.channel.push(event);
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsRawFd as _;

    use uwarp_driver::{Nic, Readiness, Source};

    use super::*;
    use crate::{Cm, EventChannel, Timeouts};

    struct Ignore;

    impl Source for Ignore {
        fn ready(&self, _: Readiness) {}

        fn timeout(&self) {}
    }

    /// It was idle although bound, so a program that bound it again had two sockets, and could not have the
    /// port.
    #[test]
    fn an_id_of_datagrams_that_may_not_listen_stays_bound() {
        let nic = Nic::open().unwrap();
        let cm = Cm::new(&nic, Timeouts::default());
        let channel = EventChannel::new(&nic).unwrap();
        let id = Id::of_datagrams(&cm, &channel, 0x111);
        id.bind(SocketAddr::from((Ipv4Addr::LOCALHOST, 0))).unwrap();
        let address = id.local_address();
        let fd = id.inner.lock().datagrams.bound.as_ref().unwrap().fd().as_raw_fd();
        // The system does not watch a descriptor twice.
        let token = nic.engine().register(fd, Arc::new(Ignore)).unwrap();
        assert!(id.listen(1).is_err());
        assert_eq!((id.state(), id.local_address()), (State::Bound, address));
        nic.engine().deregister(token);
        id.listen(1).unwrap();
        id.destroy();
    }
}
