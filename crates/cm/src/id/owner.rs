//! What an id has around its machine: everything real but the connections, which are the runner's.

use std::sync::{Arc, Weak};

use rustix::io::Errno;
use uwarp_driver::Qp;
use uwarp_llp::carrier::Watch;
use uwarp_llp::udp::{self, Outgoing, Route};
use uwarp_process::Mutex;
use uwarp_proto::setup::Negotiated;
use uwarp_rnic::VerbsError;
use uwarp_rnic::mr::random_u32;
use uwarp_rnic::qp::{Now, StreamParams};

use super::by_number::StandIn;
use super::{Id, LifeRunner};
use crate::cm::{Cm, Options};
use crate::event::ConnParam;
use crate::machine::life::{Awaits, IdEvent, Life, NewId, Pair, Report, Socket};
use crate::machine::lookup::ROOM;
use crate::machine::run::Conns;
use crate::machine::{ConnKey, Input, Machine as _, Recipient};
use crate::params::stream_params;
use crate::ports::Claim;
use crate::runner::{Environment, Watched};
use crate::state::State;
use crate::timeouts::ACK_TIMEOUT;
use crate::{Event, EventChannel};

/// Datagrams received before others are served.
const TURN: usize = 64;

/// Who runs an id's machine.
pub(super) struct Owner {
    me: Weak<Id>,
    pub key: u64,
    pub cm: Arc<Cm>,
    pub is_datagram: bool,
    origin: Option<Origin>,
    pub kept: Mutex<Kept, 11>,
}

/// Where a request came from.
pub(super) struct Origin {
    /// A listener that is gone needs to know nothing.
    listener: Weak<LifeRunner>,
    /// Its connection; `None`: a lookup.
    conn: Option<ConnKey>,
}

/// Changed under the runner's lock; read without it, too.
pub(super) struct Kept {
    channel: Arc<EventChannel>,
    pub options: Options,
    /// Its port, if the program has bound it: until it is destroyed.
    pub claim: Option<Claim>,
    /// The queue pair of the connection. When that has ended, it may still be in RTS: the program has to
    /// disconnect first.
    pair: Weak<Qp>,
    /// The same while the connection lives.
    held: Option<Arc<Qp>>,
    /// The queue pair that the program moves to RTS itself, until it has the connection.
    by_number: Option<Weak<Qp>>,
    /// Takes the place of a queue pair that takes no connection.
    pub stand_in: Option<StandIn>,
    /// The socket of datagrams that the program has bound, and the watch while it listens there.
    pub bound: Option<Arc<udp::Socket>>,
    serving: Option<Watched>,
    pub asking: Option<Asking>,
    /// The row in the table of connections that wait for a queue pair.
    awaits: Option<Awaits>,
}

/// The socket of a lookup. Its watch ends first.
pub(super) struct Asking {
    watched: Watched,
    socket: Arc<udp::Socket>,
}

impl Asking {
    pub fn new(watched: Watched, socket: udp::Socket) -> Self {
        Self { watched, socket: Arc::new(socket) }
    }
}

impl Owner {
    pub fn new(
        me: Weak<Id>,
        cm: &Arc<Cm>,
        is_datagram: bool,
        origin: Option<Origin>,
        channel: &Arc<EventChannel>,
        options: Options,
    ) -> Self {
        let kept = Kept {
            channel: Arc::clone(channel),
            options,
            claim: None,
            pair: Weak::new(),
            held: None,
            by_number: None,
            stand_in: None,
            bound: None,
            serving: None,
            asking: None,
            awaits: None,
        };
        Self { me, key: cm.next_key(), cm: Arc::clone(cm), is_datagram, origin, kept: Mutex::new(kept) }
    }

    pub fn channel(&self) -> Arc<EventChannel> {
        Arc::clone(&self.kept.lock().channel)
    }

    /// Returns the one before.
    pub fn set_channel(&self, channel: &Arc<EventChannel>) -> Arc<EventChannel> {
        std::mem::replace(&mut self.kept.lock().channel, Arc::clone(channel))
    }

    /// The queue pair of the connection, if it exists.
    pub fn pair(&self) -> Option<Arc<Qp>> {
        self.kept.lock().pair.upgrade()
    }

    /// The program has given it.
    pub fn take_pair(&self, pair: Pair, qp: &Arc<Qp>) {
        let mut kept = self.kept.lock();
        let known = Arc::downgrade(qp);
        match pair {
            Pair::Own(_) | Pair::StandIn => {
                (kept.pair, kept.held, kept.by_number) = (known, Some(Arc::clone(qp)), None);
            }
            Pair::Number(_) => (kept.pair, kept.held, kept.by_number) = (Weak::new(), None, Some(known)),
        }
    }

    /// The program accepts; the listener must know before the reply is sent.
    pub fn answered(&self) {
        if let Some(Origin { listener, conn: Some(conn) }) = &self.origin
            && let Some(listener) = listener.upgrade()
        {
            listener.call(|life, now| life.answered(now, *conn));
        }
    }

    /// The program's call was refused: it may accept the request again.
    pub fn unanswered(&self) {
        if let Some(Origin { listener, conn: Some(conn) }) = &self.origin
            && let Some(listener) = listener.upgrade()
        {
            listener.call(|life, now| life.unanswered(now, *conn));
        }
    }

    /// The program has taken a request of this listener.
    pub fn request_delivered(&self, runner: &LifeRunner) {
        runner.post_call(|life, now| life.handle_input(now, Input::Delivered));
    }

    /// Tells the listener of a request.
    fn tell_listener(&self, f: impl FnOnce(&mut Life, &Now) + Send + 'static) {
        if let Some(listener) = self.origin.as_ref().and_then(|origin| origin.listener.upgrade()) {
            listener.post_call(f);
        }
    }

    fn push(&self, event: IdEvent) {
        let Some(id) = self.me.upgrade() else { return };
        self.channel().push(shown(event, id, None));
    }

    /// A request becomes an id. Nobody knows it yet, so its runner's lock may be taken under the listener's.
    fn push_request(&self, conns: &mut Conns<Watched>, new: NewId) {
        let Some(me) = self.me.upgrade() else { return };
        let NewId { life, conn, event } = new;
        let (channel, options) = {
            let kept = self.kept.lock();
            (Arc::clone(&kept.channel), kept.options)
        };
        let moved = conn.and_then(|conn| Some((conn, conns.take(conn)?)));
        let origin = Origin { listener: Arc::downgrade(&me.runner), conn };
        let id = Id::start(&self.cm, &channel, options, life, Some(origin), moved);
        channel.push(shown(event, id, Some(me)));
    }
}

fn shown(event: IdEvent, id: Arc<Id>, listener: Option<Arc<Id>>) -> Event {
    let IdEvent { kind, status, param, datagram, private_data } = event;
    Event { id, listener, kind, status, param, datagram, private_data }
}

impl Environment<Life> for Owner {
    fn queue_pair(&self, _: Recipient) -> Option<Arc<Qp>> {
        self.pair()
    }

    fn stream_params(&self, qp: &Qp, said: &Negotiated, param: ConnParam) -> StreamParams {
        let timeout = self.kept.lock().options.ack_timeout.unwrap_or(ACK_TIMEOUT);
        stream_params(said, param, timeout, qp.query().min_rnr_timer)
    }

    fn report(&self, report: Report) {
        match report {
            Report::Settled(conn) => {
                self.tell_listener(move |life, now| life.handle_input(now, Input::Settled(conn)));
            }
            Report::Reply(reply) => self.tell_listener(move |life, _| life.reply(&reply)),
            // Reported at once.
            Report::Event(_) | Report::Request(_) => {}
        }
    }

    fn prepare(&self, life: &mut Life, now: &Now) {
        let is_gone = self.kept.lock().by_number.as_ref().is_some_and(|qp| qp.strong_count() == 0);
        if is_gone {
            life.pair_is_gone(now);
        }
    }

    fn follow(&self, life: &Life, conns: &mut Conns<Watched>) -> Option<Arc<Qp>> {
        let (state, awaits, socket) = (life.state(), life.awaits(), life.socket());
        let mut kept = self.kept.lock();
        if kept.awaits != awaits {
            kept.awaits = awaits;
            let from = life.peer().map(|peer| peer.ip());
            let me: Weak<Id> = Weak::clone(&self.me);
            self.cm.set_awaiting(self.key, me, awaits, from);
        }
        if socket != Socket::Asking {
            kept.asking = None;
        }
        if socket != Socket::Serving {
            kept.serving = None;
        }
        if state == State::Destroyed {
            kept.bound = None;
            conns.close_ports();
            // The port becomes free after its socket is closed.
            kept.claim = None;
        }
        match state {
            State::Connecting | State::Responded | State::Accepting | State::Established => None,
            _ => kept.held.take(),
        }
    }

    /// Under the lock: nothing is reported of an id that is destroyed. The call may have returned, and the
    /// program may use the id's memory for something else by now.
    fn report_at_once(&self, conns: &mut Conns<Watched>, report: Report) -> Option<Report> {
        match report {
            Report::Event(event) => self.push(event),
            Report::Request(new) => self.push_request(conns, *new),
            report => return Some(report),
        }
        None
    }

    fn send(&self, route: Route, bytes: &[u8]) {
        let socket = {
            let kept = self.kept.lock();
            kept.asking.as_ref().map(|asking| &asking.socket).or(kept.bound.as_ref()).cloned()
        };
        if let Some(socket) = socket {
            // Lost, or refused because of an earlier one: whoever waits for it asks again.
            let _ = socket.send(&[Outgoing { route: &route, bytes }]);
        }
    }

    fn receive(&self, each: &mut dyn FnMut(Input<'_>)) {
        let (socket, serves) = {
            let kept = self.kept.lock();
            match (&kept.asking, &kept.bound) {
                (Some(asking), _) => (Arc::clone(&asking.socket), false),
                (None, Some(bound)) if kept.serving.is_some() => (Arc::clone(bound), true),
                _ => return,
            }
        };
        let mut room = [0; ROOM];
        for _ in 0..TURN {
            let received = socket.receive(&mut room, ROOM, 1, |bytes, incoming| {
                if !(serves && incoming.truncated) {
                    each(Input::Datagram { from: incoming.from, to: incoming.to, bytes });
                }
            });
            match received {
                Ok(_) | Err(Errno::INTR) => {}
                Err(Errno::CONNREFUSED) if !serves => each(Input::NoListener),
                Err(_) => return,
            }
        }
        // The system does not report again that datagrams wait.
        let kept = self.kept.lock();
        let watched = kept.asking.as_ref().map(|asking| &asking.watched).or(kept.serving.as_ref());
        watched.into_iter().for_each(Watched::again);
    }

    fn serve(&self, runner: &LifeRunner) -> Option<Result<(), Errno>> {
        let socket = self.is_datagram.then(|| self.kept.lock().bound.clone())?;
        let watched = socket
            .ok_or(Errno::INVAL)
            .and_then(|socket| runner.watch_datagrams(Watch::Descriptor(socket.fd())));
        Some(watched.map(|watched| self.kept.lock().serving = Some(watched)))
    }

    fn is_unpolled(&self) -> bool {
        self.pair().is_some_and(|qp| qp.has_unpolled())
    }
}

/// For cookies.
pub(super) fn random_key() -> Result<[u8; 16], VerbsError> {
    let mut key = [0; 16];
    for part in key.chunks_exact_mut(4) {
        part.copy_from_slice(&random_u32()?.to_ne_bytes());
    }
    Ok(key)
}
