//! An id of datagrams (`RDMA_PS_UDP`, `RDMA_PS_IPOIB`). It has no stream: connecting is a lookup, accepting
//! answers it.

use std::net::SocketAddr;
use std::sync::Arc;

use rustix::io::Errno;
use uwarp_rnic::ah::QPN_MULTICAST;
use uwarp_rnic::qp::Now;
use uwarp_wire::datagram::lookup;

use super::{IdEvent, Life, NewId, Part, Report, TOO_MUCH_DATA};
use crate::error::CmError;
use crate::event::{DatagramParam, EventKind};
use crate::machine::lookup::{Asked, Client, Found, Lookup, Question, Server};
use crate::state::{State, Step};

/// The Q_Key of queue pairs of rdma_cm (`RDMA_UDP_QKEY`).
pub const QKEY: u32 = 0x0123_4567;

const NO_DATAGRAMS: CmError = CmError::Invalid("not an id of datagrams");

/// The answer of an id to the lookup that it stands for. Its listener sends it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Reply {
    pub(super) question: Question,
    /// Number and Q_Key; `None`: the program refuses.
    pub(super) pair: Option<(u32, u32)>,
    pub(super) private_data: Vec<u8>,
}

impl Life {
    /// The program listens on the socket of datagrams that it has bound. Each lookup is a
    /// [`Report::Request`]. `key`: random, for cookies; `backlog`: how many may wait for the program.
    pub fn serve(&mut self, now: &Now, key: &[u8; 16], backlog: usize) -> Result<(), CmError> {
        let port_space = self.port_space.ok_or(NO_DATAGRAMS)?;
        self.begin_to_listen()?;
        self.part = Part::Server(Box::new(Server::new(now, key, port_space, backlog)));
        Ok(())
    }

    /// The program asks the peer which queue pair serves its port. Answered by [`EventKind::Established`],
    /// which names the queue pair, or by [`EventKind::Unreachable`]. `transaction`: random.
    pub fn look_up(&mut self, now: &Now, transaction: u32, private_data: &[u8]) -> Result<(), CmError> {
        let port_space = self.port_space.ok_or(NO_DATAGRAMS)?;
        self.check(Step::Connect)?;
        let server = self.peer.ok_or(CmError::Invalid("no remote address"))?;
        let patience = self.rules.timeouts.reply;
        let client = Client::new(now, &Lookup { server, port_space, transaction, private_data, patience })?;
        self.life.take(Step::Connect)?;
        self.part = Part::Client(Box::new(client));
        self.has_connected = true;
        Ok(())
    }

    /// The program answers the lookup that this id stands for with this queue pair. No event follows.
    pub fn answer(&mut self, qpn: u32, qkey: u32, private_data: &[u8]) -> Result<(), CmError> {
        self.check(Step::Accept)?;
        let Part::Question(question) = self.part else {
            return Err(CmError::Invalid("there is no connection request"));
        };
        if private_data.len() > lookup::Reply::MAX_PRIVATE_DATA {
            return Err(TOO_MUCH_DATA);
        }
        self.life.take(Step::Accept)?;
        self.life.take(Step::Established)?;
        self.part = Part::Nothing;
        let private_data = private_data.to_vec();
        self.report(Report::Reply(Reply { question, pair: Some((qpn, qkey)), private_data }));
        Ok(())
    }

    /// The program rejects it.
    pub(super) fn refuse(&mut self, private_data: &[u8]) -> Result<(), CmError> {
        if private_data.len() > lookup::Reply::MAX_PRIVATE_DATA {
            return Err(TOO_MUCH_DATA);
        }
        self.life.take(Step::Reject)?;
        if let Part::Question(question) = self.take_part() {
            self.report(Report::Reply(Reply { question, pair: None, private_data: private_data.to_vec() }));
        }
        Ok(())
    }

    /// To a listener: the answer of an id that came from it.
    pub fn reply(&mut self, reply: &Reply) {
        let Part::Server(server) = &mut self.part else { return };
        // The length was checked when the program answered.
        let _ = match reply.pair {
            Some(pair) => server.answer(&reply.question, pair, &reply.private_data),
            None => server.refuse(&reply.question, &reply.private_data),
        };
    }

    /// The program joins a group; `context` is its own. Answered by [`EventKind::MulticastJoin`], at once:
    /// there is no protocol for it.
    pub fn join(&mut self, group: SocketAddr, context: usize) -> Result<(), CmError> {
        if !self.is_datagram() {
            return Err(NO_DATAGRAMS);
        }
        self.check_alive()?;
        let local = self.local.ok_or(CmError::Invalid("not bound"))?;
        let datagram = DatagramParam { qpn: QPN_MULTICAST, qkey: QKEY, local, peer: group, context };
        self.event(IdEvent {
            datagram: Some(Box::new(datagram)),
            ..IdEvent::plain(EventKind::MulticastJoin, 0)
        });
        Ok(())
    }

    /// The lookup has ended. As Linux' rdma_cm: for every status of the server, the event is "unreachable",
    /// and its status has the reason.
    pub(super) fn looked_up(&mut self, found: Found) {
        self.part = Part::Nothing;
        let unreachable = |status| (Step::Failed, IdEvent::plain(EventKind::Unreachable, status));
        let (step, event) = match found {
            Found::QueuePair { qpn, qkey, private_data } => {
                let ends = self.local.zip(self.peer);
                let param = |(local, peer)| Box::new(DatagramParam { qpn, qkey, local, peer, context: 0 });
                let datagram = ends.map(param);
                let event = IdEvent::plain(EventKind::Established, 0);
                (Step::Established, IdEvent { datagram, private_data, ..event })
            }
            Found::Refused(status, private_data) => {
                let (step, event) = unreachable(status.code().into());
                (step, IdEvent { private_data, ..event })
            }
            Found::Absent => unreachable(-Errno::CONNREFUSED.raw_os_error()),
            Found::Silence => unreachable(-Errno::TIMEDOUT.raw_os_error()),
        };
        if self.life.take(step).is_ok() {
            self.event(event);
        }
    }

    /// A lookup has come: it becomes an id of its own.
    pub(super) fn lookup_requested(&mut self, asked: Asked) {
        let Asked { question, private_data } = asked;
        let local = SocketAddr::new(question.to, self.local.map_or(0, |local| local.port()));
        let mut life = Self::at(Arc::clone(&self.rules), State::RequestPending, self.port_space);
        life.ack_timeout = self.ack_timeout;
        (life.local, life.peer) = (Some(local), Some(question.from));
        life.part = Part::Question(question);
        let datagram = DatagramParam { qpn: 0, qkey: 0, local, peer: question.from, context: 0 };
        let event = IdEvent {
            datagram: Some(Box::new(datagram)),
            private_data,
            ..IdEvent::plain(EventKind::ConnectRequest, 0)
        };
        self.report(Report::Request(Box::new(NewId { life, conn: None, event })));
    }
}
