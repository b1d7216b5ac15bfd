//! The loop that runs any machine over the connections of any carrier. The shell runs it with the clock and
//! the engine ([`crate::runner`]); a simulator can run it with others.
//!
//! ```text
//!   what has happened ─▶ machine ─▶ run: send, act, read, until nothing is left
//!                                     ├─ at once: Connect, Listen, Accept, Close, CheckPolled
//!                                     ├─ watch each connection that the machine wants to know of
//!                                     └─ deferred, without a lock: Attach, Disconnect, Fail, reports
//! ```
//!
//! A machine that has wanted only the end of a connection never wants its bytes again. So the loop looks only
//! at connections of which something may be read: those that wait to become streams, and early requests,
//! would otherwise stay at the head of its list, and each run would begin with them.

use std::net::SocketAddr;

use rustix::io::Errno;
use uwarp_driver::Recorded;
use uwarp_llp::carrier::{
    Bind, Bound, Carrier, Close, Got, Listening, Options, Refusal, SetUp, TakePort, Watch,
};
use uwarp_llp::route::wildcard_for;
use uwarp_llp::udp::Route;
use uwarp_proto::setup::Negotiated;
use uwarp_rnic::qp::Now;
use uwarp_wire::mpa;

use super::sorted::Sorted;
use super::{Action, ConnKey, Input, Machine, Recipient, Transmit, Want};
use crate::event::ConnParam;

/// Pieces that are read in one run, two or three for each request: others must be served, too.
const TURN: usize = 128;
/// Connections that are accepted in one run.
const ACCEPTED: usize = 64;

/// What the loop has around it.
pub trait Surroundings {
    /// A watch, which ends when this is dropped.
    type Watched;
    /// Reports from now on what happens to a connection, or to what listens (`None`). If it is ready already,
    /// that is reported soon.
    fn watch(&mut self, conn: Option<ConnKey>, watch: Watch<'_>) -> Result<Self::Watched, Errno>;
    /// The name by which a lower layer that reports by itself calls the watch.
    fn name(&self, _watched: &Self::Watched) -> u64 {
        0
    }
    /// Reports again, soon, what is ready: this run has left it.
    fn again(&mut self, watched: &Self::Watched);
    /// Sends a datagram.
    fn send(&mut self, route: Route, bytes: &[u8]);
    /// Whether completions wait that the program has not polled.
    fn is_unpolled(&mut self) -> bool;
    /// Begins to receive datagrams on a socket that the machine's owner has bound; `None`: it has none.
    fn serve(&mut self) -> Option<Result<(), Errno>> {
        None
    }
}

/// What a thread without a lock must do, in this order.
pub enum Deferred<R> {
    /// See [`Action::Attach`]: answered by [`Input::Stream`].
    #[allow(missing_docs)]
    Attach { conn: ConnKey, to: Recipient, said: Box<Negotiated>, param: ConnParam },
    /// See [`Action::Disconnect`].
    Disconnect(ConnKey, bool),
    /// See [`Action::Fail`].
    Fail,
    /// See [`Action::Answer`].
    Answer(Result<(), Errno>),
    /// See [`Action::Report`].
    Report(R),
}

/// The connections of one machine. `W`: a watch.
pub struct Conns<W> {
    carrier: &'static dyn Carrier,
    options: Options,
    /// What the program has bound, until it listens or connects.
    bound: Option<Box<dyn Bound>>,
    listening: Option<Listener<W>>,
    open: Sorted<Open<W>>,
    /// Those that may have something to read, or have ended. Each read looks at them from the first on, so
    /// those of which nothing is to be read stay out: hundreds of peers may wait early.
    marked: Sorted<()>,
    /// Those that are not watched, and may have to be.
    unwatched: Sorted<()>,
}

// Fields are dropped in this order: the watch first.
struct Listener<W> {
    watched: W,
    socket: Box<dyn Listening>,
}

struct Open<W> {
    watched: Option<W>,
    /// Watched or not: a request is not before its answer.
    recorded: Option<Recorded>,
    set_up: Box<dyn SetUp>,
    /// Bytes may have arrived since reading last found none.
    unread: bool,
    /// It may have ended since that was checked last.
    unchecked: bool,
    /// The machine wants only its end, and never bytes again.
    only_end: bool,
    /// It has taken nothing when something was sent last.
    full: bool,
}

impl<W> Open<W> {
    fn is_to_be_read(&self, want: Want) -> bool {
        match want {
            Want::Bytes(most) => self.unread && most > 0,
            Want::End => self.unchecked,
            Want::Nothing => false,
        }
    }
}

impl<W> Conns<W> {
    /// None yet. New ones are made over `carrier`.
    pub fn new(carrier: &'static dyn Carrier, options: Options) -> Self {
        Self {
            carrier,
            options,
            bound: None,
            listening: None,
            open: Sorted::default(),
            marked: Sorted::default(),
            unwatched: Sorted::default(),
        }
    }

    /// What the next [`Action::Listen`], or a [`Action::Connect`] without address, uses.
    pub fn set_bound(&mut self, bound: Box<dyn Bound>) {
        self.bound = Some(bound);
    }

    /// The options of what is bound and connected from now on.
    pub fn set_options(&mut self, options: Options) {
        self.options = options;
    }

    /// Sets the type of service of what is bound, or of the connections if nothing is.
    pub fn set_tos(&self, tos: u8) -> Result<(), Errno> {
        match &self.bound {
            Some(bound) => bound.set_tos(tos),
            None => self.open.iter().try_for_each(|(_, open)| open.set_up.set_tos(tos)),
        }
    }

    /// Closes what is bound or listens. Connections stay.
    pub fn close_ports(&mut self) {
        (self.bound, self.listening) = (None, None);
    }

    /// How many connections there are.
    pub fn len(&self) -> usize {
        self.open.len()
    }

    /// Whether there is no connection.
    pub fn is_empty(&self) -> bool {
        self.open.is_empty()
    }

    /// A connection that the machine knows by this name. It may have bytes already.
    pub fn insert(&mut self, conn: ConnKey, set_up: Box<dyn SetUp>) {
        self.insert_watched(conn, None, set_up);
        self.unwatched.insert(conn, ());
        self.marked.insert(conn, ());
    }

    /// The machine wants to know of it again.
    fn look(&mut self, conn: ConnKey) {
        let Some(open) = self.open.get(conn) else { return };
        if open.watched.is_none() {
            self.unwatched.insert(conn, ());
        }
        if open.unchecked || open.unread && !open.only_end {
            self.marked.insert(conn, ());
        }
    }

    /// One that is watched already is read when the watch reports it.
    fn insert_watched(&mut self, conn: ConnKey, watched: Option<W>, set_up: Box<dyn SetUp>) {
        let recorded = set_up.watch().descriptor().map(Recorded::new);
        let unread = watched.is_none();
        let open =
            Open { watched, recorded, set_up, unread, unchecked: unread, only_end: false, full: false };
        self.open.insert(conn, open);
    }

    /// A connection that becomes a stream. It is not watched any more.
    pub fn take(&mut self, conn: ConnKey) -> Option<Box<dyn SetUp>> {
        self.marked.remove(conn);
        self.unwatched.remove(conn);
        let Open { watched, recorded, set_up, .. } = self.open.remove(conn)?;
        // Before another owner watches the same descriptor, or it is closed.
        drop((watched, recorded));
        Some(set_up)
    }

    /// The lower layer has reported something. Returns whether the machine must learn that there is room.
    pub fn note(&mut self, conn: ConnKey, readable: bool, writable: bool) -> bool {
        let Some(open) = self.open.get_mut(conn) else { return false };
        if readable {
            (open.unread, open.unchecked) = (true, true);
            self.marked.insert(conn, ());
        }
        writable && std::mem::take(&mut open.full)
    }

    /// Whether the next run finds what the machine wants to know of it.
    fn is_attended(&self, conn: ConnKey, open: &Open<W>, want: Want) -> bool {
        let is_marked = self.marked.get(conn).is_some() || !open.is_to_be_read(want);
        want == Want::Nothing || is_marked && open.watched.is_some()
    }

    fn close(&mut self, conn: ConnKey, how: Close) {
        if let Some(set_up) = self.take(conn) {
            set_up.close(how);
        }
    }

    /// It has failed. Another descriptor may hold it open, and its peer must not wait for that one.
    fn fail(&mut self, conn: ConnKey, why: Refusal) -> Input<'static> {
        self.close(conn, Close::Finish);
        Input::Failed { conn, why }
    }

    /// Connects, and watches the connection: what cannot be watched was not begun, and keeps its port.
    fn connect<S: Surroundings<Watched = W>>(
        &mut self,
        around: &mut S,
        conn: ConnKey,
        from: Option<SocketAddr>,
        to: SocketAddr,
    ) -> Input<'static> {
        // Pairings have bound what they listen on, and connect from any port. What is bound to a wildcard
        // address gets the one of its route.
        let ours = self.bound.take_if(|bound| {
            let local = bound.local();
            from.is_none_or(|from| {
                from.port() == local.port() && (from.ip() == local.ip() || local.ip().is_unspecified())
            })
        });
        let was_ours = ours.as_ref().map(|bound| bound.local());
        // A connection to itself has the port that it gets when it is bound.
        let to_itself = from == Some(to) && to.port() == 0;
        let at = match from {
            Some(address) if to_itself => (address, TakePort::Now),
            Some(address) if address.port() != 0 => (address, TakePort::Now),
            Some(address) => (address, TakePort::AtConnect),
            None => (wildcard_for(to), TakePort::AtConnect),
        };
        let bound = match ours {
            Some(bound) => Ok(bound),
            None => self.carrier.bind(&Bind { address: at.0, port: at.1, options: self.options }),
        };
        match bound.map(|bound| {
            let to = if to_itself { bound.local() } else { to };
            bound.connect(to)
        }) {
            Ok(Ok(set_up)) => {
                let local = set_up.ends().local;
                match around.watch(Some(conn), set_up.watch()) {
                    Ok(watched) => {
                        set_up.name(around.name(&watched));
                        self.insert_watched(conn, Some(watched), set_up);
                        Input::Opened { conn, local }
                    }
                    Err(errno) => {
                        // So that its port is free at once.
                        set_up.close(Close::Reset);
                        if let Some(local) = was_ours {
                            self.bind_again(local);
                        }
                        Input::Failed { conn, why: Refusal::Local(errno) }
                    }
                }
            }
            Ok(Err((why, bound))) => {
                if was_ours.is_some() {
                    self.bound = Some(bound);
                }
                Input::Failed { conn, why }
            }
            Err(errno) => Input::Failed { conn, why: Refusal::Local(errno) },
        }
    }

    fn listen<S: Surroundings<Watched = W>>(&mut self, around: &mut S) -> Input<'static> {
        match around.serve() {
            Some(Ok(())) => return Input::Waiting,
            Some(Err(errno)) => return Input::NotListening(errno),
            None => {}
        }
        let Some(bound) = self.bound.take() else { return Input::NotListening(Errno::INVAL) };
        let local = bound.local();
        match bound.listen(BACKLOG) {
            Ok(socket) => match around.watch(None, socket.watch()) {
                Ok(watched) => {
                    socket.name(around.name(&watched));
                    self.listening = Some(Listener { watched, socket });
                    Input::Waiting
                }
                Err(errno) => {
                    drop(socket);
                    self.bind_again(local);
                    Input::NotListening(errno)
                }
            },
            Err((errno, bound)) => {
                self.bound = Some(bound);
                Input::NotListening(errno)
            }
        }
    }

    /// The port that was bound, if it can be bound again.
    fn bind_again(&mut self, address: SocketAddr) {
        self.bound = self.carrier.bind(&Bind { address, port: TakePort::Now, options: self.options }).ok();
    }

    fn accept(&mut self, conn: ConnKey) -> Input<'static> {
        let accepted = self.listening.as_ref().map_or(Ok(None), |listener| listener.socket.accept());
        match accepted {
            Ok(Some(set_up)) => {
                let ends = set_up.ends();
                self.insert(conn, set_up);
                Input::Accepted { conn, ends }
            }
            Ok(None) => Input::NotAccepted { conn, why: None },
            Err(errno) => Input::NotAccepted { conn, why: Some(errno) },
        }
    }
}

/// The most connections that wait in the system, where a connection that does not fit is lost and repeated
/// after a second.
const BACKLOG: usize = 65_535;

/// Runs a machine until nothing is left to do without waiting.
pub fn run<M: Machine, S: Surroundings>(
    machine: &mut M,
    conns: &mut Conns<S::Watched>,
    around: &mut S,
    defer: &mut impl FnMut(Deferred<M::Report>),
    now: &Now,
) {
    let (mut turns, mut accepts) = (TURN, ACCEPTED);
    loop {
        if send(machine, conns, around, now) || act(machine, conns, around, defer, &mut accepts, now) {
            continue;
        }
        if turns > 0 && read(machine, conns, now) {
            turns -= 1;
            continue;
        }
        if !watch(machine, conns, around, now) {
            break;
        }
    }
    // Nothing reports again what was reported and not read. One report is enough: the next run reads the
    // others, too. (A thousand peers that come at once would cost as many system calls in each run.)
    let mut left = conns.marked.iter().filter_map(|(conn, ())| {
        let open = conns.open.get(*conn)?;
        open.watched.as_ref().filter(|_| open.is_to_be_read(machine.want(*conn)))
    });
    if let Some(watched) = left.next() {
        around.again(watched);
    }
    debug_assert!(
        conns.open.iter().all(|(conn, open)| conns.is_attended(*conn, open, machine.want(*conn))),
        "the machine wants to know of a connection and did not say so"
    );
}

/// Sends one piece; false: there is none.
fn send<M: Machine, S: Surroundings>(
    machine: &mut M,
    conns: &mut Conns<S::Watched>,
    around: &mut S,
    now: &Now,
) -> bool {
    let input = match machine.poll_transmit() {
        None => return false,
        Some(Transmit::Datagram { route, bytes }) => {
            around.send(route, bytes);
            return true;
        }
        Some(Transmit::Bytes { conn, bytes }) => match conns.open.get_mut(conn) {
            None => Input::Failed { conn, why: Refusal::Gone },
            Some(open) => match open.set_up.send_some(bytes) {
                Ok(sent) => {
                    open.full = sent == 0;
                    if open.full && open.watched.is_none() {
                        conns.unwatched.insert(conn, ());
                    }
                    Input::Sent { conn, bytes: sent }
                }
                Err(why) => conns.fail(conn, why),
            },
        },
    };
    machine.handle_input(now, input);
    true
}

/// Carries out one action, or defers it; false: there is none.
fn act<M: Machine, S: Surroundings>(
    machine: &mut M,
    conns: &mut Conns<S::Watched>,
    around: &mut S,
    defer: &mut impl FnMut(Deferred<M::Report>),
    accepts: &mut usize,
    now: &Now,
) -> bool {
    let Some(action) = machine.poll_action() else { return false };
    let input = match action {
        Action::Connect { conn, from, to } => conns.connect(around, conn, from, to),
        Action::Listen => conns.listen(around),
        Action::Accept { conn } if *accepts > 0 => {
            *accepts -= 1;
            conns.accept(conn)
        }
        Action::Accept { conn } => {
            // Others have their turn. That connections wait is reported again.
            conns.listening.iter().for_each(|listener| around.again(&listener.watched));
            Input::NotAccepted { conn, why: None }
        }
        Action::Close { conn, how } => {
            conns.close(conn, how);
            return true;
        }
        Action::Look { conn } => {
            conns.look(conn);
            return true;
        }
        Action::CheckPolled => Input::Unpolled(around.is_unpolled()),
        Action::Attach { conn, to, said, param } => {
            // Nothing is read or watched until it is taken, or comes back.
            conns.marked.remove(conn);
            conns.unwatched.remove(conn);
            defer(Deferred::Attach { conn, to, said, param });
            return true;
        }
        Action::Disconnect { conn, answered } => {
            defer(Deferred::Disconnect(conn, answered));
            return true;
        }
        Action::Fail => {
            defer(Deferred::Fail);
            return true;
        }
        Action::Report(report) => {
            defer(Deferred::Report(report));
            return true;
        }
        Action::Answer(answer) => {
            defer(Deferred::Answer(answer));
            return true;
        }
    };
    machine.handle_input(now, input);
    true
}

/// Reads one piece, no longer than the machine wants: the next byte is the stream's. False: nothing more can
/// be read. Until the lower layer has said that there is nothing, a connection stays marked: it does not
/// report again what it has reported.
fn read<M: Machine, W>(machine: &mut M, conns: &mut Conns<W>, now: &Now) -> bool {
    let mut after = None;
    while let Some(conn) = conns.marked.next(after) {
        after = Some(conn);
        let want = machine.want(conn);
        let Some(open) = conns.open.get_mut(conn) else { continue };
        if !open.is_to_be_read(want) {
            if want == Want::Nothing {
                // Until it says otherwise.
                conns.marked.remove(conn);
            }
            continue;
        }
        let mut buffer = [0; mpa::MAX_PRIVATE_DATA];
        let got = match want {
            Want::Bytes(most) => {
                debug_assert!(!open.only_end, "bytes are wanted after the end alone was");
                let room = buffer.get_mut(..most.min(mpa::MAX_PRIVATE_DATA)).unwrap_or_default();
                open.set_up.receive(room)
            }
            _ if open.set_up.ended() => Ok(Got::End),
            _ => {
                (open.unchecked, open.only_end) = (false, true);
                conns.marked.remove(conn);
                continue;
            }
        };
        let input = match got {
            Ok(Got::Bytes(count)) => Input::Bytes { conn, bytes: buffer.get(..count).unwrap_or_default() },
            Ok(Got::Nothing) => {
                (open.unread, open.unchecked) = (false, false);
                conns.marked.remove(conn);
                continue;
            }
            Ok(Got::End) => {
                (open.unread, open.unchecked) = (false, false);
                conns.marked.remove(conn);
                Input::End { conn }
            }
            Err(why) => conns.fail(conn, why),
        };
        machine.handle_input(now, input);
        return true;
    }
    false
}

/// Watches what the machine wants to know of. Returns whether it has learned of a failure.
fn watch<M: Machine, S: Surroundings>(
    machine: &mut M,
    conns: &mut Conns<S::Watched>,
    around: &mut S,
    now: &Now,
) -> bool {
    let mut after = None;
    while let Some(conn) = conns.unwatched.next(after) {
        after = Some(conn);
        let Some(open) = conns.open.get_mut(conn) else { continue };
        if machine.want(conn) == Want::Nothing && !open.full {
            conns.unwatched.remove(conn);
            continue;
        }
        match around.watch(Some(conn), open.set_up.watch()) {
            Ok(watched) => {
                open.set_up.name(around.name(&watched));
                open.watched = Some(watched);
                conns.unwatched.remove(conn);
            }
            Err(errno) => {
                let input = conns.fail(conn, Refusal::Local(errno));
                machine.handle_input(now, input);
                return true;
            }
        }
    }
    false
}

#[cfg(test)]
#[path = "tests/run.rs"]
mod tests;
