//! The loop over a scripted machine: over connections that report edges only, and over TCP.

use std::collections::{BTreeMap, VecDeque};
use std::net::Ipv4Addr;
use std::sync::{Arc, Mutex as Shared};
use std::time::Instant;

use uwarp_llp::Link;
use uwarp_llp::carrier::{Ends, tcp::Tcp};

use super::super::Space;
use super::*;

/// Does what the test says, and writes down what it is told.
#[derive(Default)]
struct Script {
    to_send: VecDeque<(ConnKey, Vec<u8>)>,
    full: bool,
    actions: VecDeque<Action<&'static str>>,
    wants: BTreeMap<ConnKey, Want>,
    got: Vec<u8>,
    /// The most bytes that one input had.
    largest: usize,
    log: Vec<String>,
}

impl Machine for Script {
    type Report = &'static str;

    fn handle_input(&mut self, _: &Now, input: Input<'_>) {
        self.log.push(match input {
            Input::Bytes { bytes, .. } => {
                self.got.extend(bytes);
                self.largest = self.largest.max(bytes.len());
                return;
            }
            Input::Sent { bytes: 0, .. } => {
                self.full = true;
                "full".into()
            }
            Input::Sent { bytes, .. } => {
                let (_, rest) = self.to_send.front_mut().unwrap();
                rest.drain(..bytes);
                if rest.is_empty() {
                    self.to_send.pop_front();
                }
                "sent".into()
            }
            Input::Room { .. } => {
                self.full = false;
                "room".into()
            }
            Input::Failed { why, .. } => {
                self.to_send.clear();
                format!("failed {why:?}")
            }
            Input::NotListening(errno) => format!("not listening {}", errno.raw_os_error()),
            Input::NotAccepted { why, .. } => format!("not accepted {why:?}"),
            Input::Opened { .. } => "opened".into(),
            Input::Accepted { .. } => "accepted".into(),
            Input::Waiting => "waiting".into(),
            Input::End { .. } => "end".into(),
            Input::Unpolled(unpolled) => format!("unpolled {unpolled}"),
            other => format!("{other:?}"),
        });
    }

    fn handle_timeout(&mut self, _: &Now) {}

    fn poll_transmit(&mut self) -> Option<Transmit<'_>> {
        let (conn, bytes) = self.to_send.front().filter(|_| !self.full)?;
        Some(Transmit::Bytes { conn: *conn, bytes })
    }

    fn poll_timeout(&self) -> Option<Instant> {
        None
    }

    fn poll_action(&mut self) -> Option<Action<&'static str>> {
        self.actions.pop_front()
    }

    fn want(&self, conn: ConnKey) -> Want {
        self.wants.get(&conn).copied().unwrap_or(Want::Nothing)
    }
}

/// Counts what it is asked for.
#[derive(Default)]
struct Around {
    watches: usize,
    again: usize,
    refuses: bool,
}

impl Surroundings for Around {
    type Watched = ();

    fn watch(&mut self, _: Option<ConnKey>, _: Watch<'_>) -> Result<(), Errno> {
        if self.refuses {
            return Err(Errno::NOSPC);
        }
        self.watches += 1;
        Ok(())
    }

    fn again(&mut self, (): &()) {
        self.again += 1;
    }

    fn send(&mut self, _: Route, _: &[u8]) {}

    fn is_unpolled(&mut self) -> bool {
        true
    }
}

/// One end of a connection, whose other end is the test.
#[derive(Default)]
struct Wire {
    input: VecDeque<u8>,
    ended: bool,
    room: usize,
    sent: Vec<u8>,
    closed: Option<Close>,
}

struct Fake(Arc<Shared<Wire>>);

impl SetUp for Fake {
    fn ends(&self) -> Ends {
        let nowhere = SocketAddr::from((Ipv4Addr::UNSPECIFIED, 0));
        Ends { local: nowhere, peer: nowhere }
    }

    fn set_tos(&self, _: u8) -> Result<(), Errno> {
        Ok(())
    }

    fn send_some(&self, bytes: &[u8]) -> Result<usize, Refusal> {
        let mut wire = self.0.lock().unwrap();
        let some = bytes.len().min(wire.room);
        wire.room -= some;
        wire.sent.extend(&bytes[..some]);
        Ok(some)
    }

    fn receive(&self, buffer: &mut [u8]) -> Result<Got, Refusal> {
        let mut wire = self.0.lock().unwrap();
        let some = wire.input.len().min(buffer.len());
        match some {
            0 if wire.ended => return Ok(Got::End),
            0 => return Ok(Got::Nothing),
            _ => {}
        }
        for (place, byte) in buffer.iter_mut().zip(wire.input.drain(..some)) {
            *place = byte;
        }
        Ok(Got::Bytes(some))
    }

    fn ended(&self) -> bool {
        self.0.lock().unwrap().ended
    }

    fn close(self: Box<Self>, how: Close) {
        self.0.lock().unwrap().closed = Some(how);
    }

    fn watch(&self) -> Watch<'_> {
        Watch::Itself
    }

    fn into_link(self: Box<Self>) -> Link {
        unreachable!("no stream begins here")
    }
}

/// A machine with a connection, and all that belongs to it.
struct World {
    conn: ConnKey,
    names: Space,
    script: Script,
    conns: Conns<()>,
    around: Around,
    deferred: VecDeque<Deferred<&'static str>>,
    wire: Arc<Shared<Wire>>,
}

impl World {
    fn new() -> Self {
        let mut names = Space::new(0);
        let (conn, wire) = (names.name(), Arc::<Shared<Wire>>::default());
        let mut conns = Conns::new(&Tcp, Options::default());
        conns.insert(conn, Box::new(Fake(wire.clone())));
        Self {
            conn,
            names,
            script: Script::default(),
            conns,
            around: Around::default(),
            deferred: VecDeque::new(),
            wire,
        }
    }

    fn run(&mut self) {
        let now = Now::at(Instant::now());
        let mut defer = |result| self.deferred.push_back(result);
        run(&mut self.script, &mut self.conns, &mut self.around, &mut defer, &now);
    }

    fn want(&mut self, want: Want) {
        if self.script.want(self.conn) == Want::Nothing && want != Want::Nothing {
            self.script.actions.push_back(Action::Look { conn: self.conn });
        }
        self.script.wants.insert(self.conn, want);
    }

    /// The lower layer reports that it is ready: once, when something comes.
    fn edge(&mut self) {
        if self.conns.note(self.conn, true, true) {
            self.script.handle_input(&Now::at(Instant::now()), Input::Room { conn: self.conn });
        }
    }
}

/// A run that ends before the lower layer has said that there is nothing has to ask for another report: what
/// was reported once is not reported again, and the connection would stand still.
#[test]
fn a_run_that_leaves_bytes_asks_to_be_called_again() {
    const BYTES: usize = 5 * TURN / 2;
    let mut world = World::new();
    world.want(Want::Bytes(1));
    world.wire.lock().unwrap().input.extend(vec![7; BYTES]);
    world.run();
    assert_eq!(world.script.got.len(), TURN, "others have their turn");
    let mut calls = 1;
    while std::mem::take(&mut world.around.again) > 0 {
        calls += 1;
        world.edge();
        world.run();
    }
    assert_eq!((world.script.got.len(), calls), (BYTES, 3), "all of it, and no call without need");
    assert_eq!((world.script.largest, world.around.watches), (1, 1));
}

#[test]
fn no_byte_behind_what_the_machine_wants_is_read() {
    let mut world = World::new();
    world.wire.lock().unwrap().input.extend(b"framestream");
    world.run();
    assert_eq!((world.script.got.len(), world.around.watches), (0, 0), "it wants nothing yet");
    world.want(Want::Bytes(5));
    // The next frame, and then none: what the machine wants changes with each input.
    world.run_once_and_want(Want::End);
    assert_eq!(world.script.got, b"frame");
    world.run();
    assert_eq!(world.script.log, Vec::<String>::new());
    world.wire.lock().unwrap().ended = true;
    world.edge();
    world.run();
    assert_eq!((world.script.log.join(","), world.script.got.len()), ("end".into(), 5));
    assert_eq!(world.wire.lock().unwrap().input, b"stream");
}

impl World {
    /// Reads one piece, after which the machine wants something else.
    fn run_once_and_want(&mut self, want: Want) {
        let now = Now::at(Instant::now());
        while act(&mut self.script, &mut self.conns, &mut self.around, &mut |_| (), &mut 0, &now) {}
        assert!(read(&mut self.script, &mut self.conns, &now));
        self.want(want);
        self.run();
    }
}

#[test]
fn bytes_that_came_while_they_were_not_wanted_are_read_without_another_report() {
    let mut world = World::new();
    world.want(Want::Nothing);
    world.run();
    world.wire.lock().unwrap().input.extend(b"request");
    world.edge();
    world.run();
    assert_eq!(world.script.got, b"");
    world.want(Want::Bytes(64));
    world.run();
    assert_eq!(world.script.got, b"request");
}

#[test]
fn what_finds_no_room_is_sent_when_there_is_some() {
    let mut world = World::new();
    world.script.to_send.push_back((world.conn, b"reply".to_vec()));
    world.wire.lock().unwrap().room = 2;
    world.run();
    assert_eq!(world.around.watches, 1, "for room, although the machine wants nothing");
    world.wire.lock().unwrap().room = 100;
    world.edge();
    world.run();
    assert_eq!(world.wire.lock().unwrap().sent, b"reply");
    assert_eq!(world.script.log.join(","), "sent,full,room,sent");
}

/// The program's descriptor may hold the connection open, and its peer would wait.
#[test]
fn a_connection_that_cannot_be_watched_is_closed_for_its_peer() {
    let mut world = World::new();
    world.around.refuses = true;
    world.want(Want::End);
    world.run();
    assert_eq!(world.script.log.join(","), format!("failed {:?}", Refusal::Local(Errno::NOSPC)));
    assert_eq!((world.wire.lock().unwrap().closed, world.conns.len()), (Some(Close::Finish), 0));
}

#[test]
fn what_needs_no_lock_is_done_at_once_and_the_rest_is_deferred_in_order() {
    let mut world = World::new();
    let conn = world.conn;
    world.script.actions.extend([
        Action::Report("first"),
        Action::Disconnect { conn, answered: false },
        Action::CheckPolled,
        Action::Report("last"),
        Action::Close { conn, how: Close::Reset },
    ]);
    world.run();
    let deferred: Vec<_> = world
        .deferred
        .iter()
        .map(|deferred| match deferred {
            Deferred::Report(report) => report,
            Deferred::Disconnect(..) => "disconnect",
            _ => "other",
        })
        .collect();
    assert_eq!(deferred, ["first", "disconnect", "last"]);
    assert_eq!(world.script.log.join(","), "unpolled true");
    assert_eq!((world.wire.lock().unwrap().closed, world.conns.is_empty()), (Some(Close::Reset), true));
}

#[test]
fn a_machine_listens_connects_and_accepts() {
    let mut world = World::new();
    world.script.actions.push_back(Action::Listen);
    world.run();
    let at = Bind {
        address: SocketAddr::from((Ipv4Addr::LOCALHOST, 0)),
        port: TakePort::Now,
        options: Options::default(),
    };
    let bound = Tcp.bind(&at).unwrap();
    let to = bound.local();
    world.conns.set_bound(bound);
    let [one, other, none] = [world.names.name(), world.names.name(), world.names.name()];
    world.script.wants.insert(other, Want::Bytes(64));
    world.script.actions.extend([
        Action::Listen,
        Action::Accept { conn: none },
        Action::Connect { conn: one, from: None, to },
        Action::Accept { conn: other },
    ]);
    world.run();
    world.script.to_send.push_back((one, b"hello".to_vec()));
    while world.script.got.is_empty() {
        world.run();
        assert!(!world.script.log.iter().any(|line| line.starts_with("failed")), "{:?}", world.script.log);
        // TCP over loopback is connected at once, but nothing promises it.
        if world.script.log.last().is_some_and(|line| line.starts_with("not accepted")) {
            world.script.actions.push_back(Action::Accept { conn: other });
        }
        world.script.full = false;
        world.conns.note(other, true, true);
    }
    assert_eq!(world.script.got, b"hello");
    let einval = Errno::INVAL.raw_os_error();
    assert_eq!(world.script.log[..2], [format!("not listening {einval}"), "waiting".to_owned()]);
}

/// A port of queue pair numbers listens with what is bound, also after one of its queue pairs has connected.
#[test]
fn what_is_bound_stays_where_the_machine_names_another_address() {
    let mut world = World::new();
    let here = SocketAddr::from((Ipv4Addr::LOCALHOST, 0));
    let bind =
        || Tcp.bind(&Bind { address: here, port: TakePort::Now, options: Options::default() }).unwrap();
    let peer = bind();
    let to = peer.local();
    let _peer = peer.listen(1).map_err(|(errno, _)| errno).unwrap();
    world.conns.set_bound(bind());
    let [one, other] = [world.names.name(), world.names.name()];
    world.script.actions.push_back(Action::Connect { conn: one, from: Some(here), to });
    world.script.actions.push_back(Action::Listen);
    // Its own peer.
    world.script.actions.push_back(Action::Connect { conn: other, from: Some(here), to: here });
    world.run();
    assert_eq!(world.script.log[..3], ["opened", "waiting", "opened"]);
    let ends = world.conns.take(other).unwrap().ends();
    assert_eq!(ends.local, ends.peer);
}

/// The socket went with the attempt, and the program's port with it.
#[test]
fn what_cannot_be_watched_keeps_its_port() {
    let mut world = World::new();
    let here = SocketAddr::from((Ipv4Addr::LOCALHOST, 0));
    let any = SocketAddr::from((Ipv4Addr::UNSPECIFIED, 0));
    let bind = |address| Bind { address, port: TakePort::Now, options: Options::default() };
    let peer = Tcp.bind(&bind(here)).unwrap();
    let to = peer.local();
    let _peer = peer.listen(1).map_err(|(errno, _)| errno).unwrap();
    let bound = Tcp.bind(&bind(any)).unwrap();
    let local = bound.local();
    // As after the route is known.
    let from = Some(SocketAddr::new(here.ip(), local.port()));
    world.conns.set_bound(bound);
    let [one, other] = [world.names.name(), world.names.name()];
    for refuses in [true, false] {
        world.around.refuses = refuses;
        world.script.actions.push_back(Action::Listen);
        if refuses {
            world.script.actions.push_back(Action::Connect { conn: one, from, to });
        }
        world.run();
        assert_eq!(world.conns.bound.as_ref().map(|bound| bound.local()), refuses.then_some(local));
    }
    world.conns.close_ports();
    world.conns.set_bound(Tcp.bind(&bind(SocketAddr::new(any.ip(), local.port()))).unwrap());
    world.script.actions.push_back(Action::Connect { conn: other, from, to });
    world.run();
    let nospc = Errno::NOSPC;
    let refused =
        [format!("not listening {}", nospc.raw_os_error()), format!("failed {:?}", Refusal::Local(nospc))];
    assert_eq!(world.script.log[..2], refused);
    assert_eq!(world.script.log[2..], ["waiting", "opened"]);
}

/// A peer that connects fast enough occupied the thread that serves all others.
#[test]
fn a_run_accepts_so_many_connections_and_asks_to_be_called_again() {
    let mut world = World::new();
    let here = SocketAddr::from((Ipv4Addr::LOCALHOST, 0));
    let bind = Bind { address: here, port: TakePort::Now, options: Options::default() };
    world.conns.set_bound(Tcp.bind(&bind).unwrap());
    world.script.actions.push_back(Action::Listen);
    for (more, again) in [(0, 0), (1, 1)] {
        for _ in 0..ACCEPTED + more {
            let conn = world.names.name();
            world.script.actions.push_back(Action::Accept { conn });
        }
        world.run();
        assert_eq!(world.around.again, again);
    }
    let not_accepted = world.script.log.iter().filter(|line| *line == "not accepted None").count();
    assert_eq!(not_accepted, 2 * ACCEPTED + 1);
}

/// Each run asked for a report of each of them: a thousand connections at once cost as many system calls in
/// each run.
#[test]
fn a_run_that_leaves_many_connections_unread_asks_once() {
    const CONNECTIONS: usize = 5 * TURN / 2;
    let mut world = World::new();
    for _ in 0..CONNECTIONS {
        let (conn, wire) = (world.names.name(), Arc::<Shared<Wire>>::default());
        wire.lock().unwrap().input.push_back(7);
        world.script.wants.insert(conn, Want::Bytes(1));
        world.conns.insert(conn, Box::new(Fake(wire)));
    }
    let mut asked = Vec::new();
    while asked.last() != Some(&0) {
        world.run();
        asked.push(std::mem::take(&mut world.around.again));
    }
    assert_eq!((world.script.got.len(), asked), (CONNECTIONS, vec![1, 1, 0]));
}
