//! How two ends on one host speak, and how each knows that it is the other one (docs/adr/044).
//!
//! The end that connected has a Unix socket whose name is the connection's addresses, and the end that
//! accepted connects to it. Anybody can have that name, or connect to it. So each shows the other a
//! descriptor of its end of the TCP connection, by `O_PATH`: it says which socket it is, and nothing can be
//! done with it. It has to be the one that the kernel names as the other end. And it is shown only to a
//! process of that socket's owner, and believed only from one: a stranger who has the name, and connects to
//! the other end's, could carry each end's descriptor to the other.
//!
//! Nothing else is believed, and nothing that a stranger passes is held, or closed in a thread that has other
//! work: closing a foreign descriptor can take as long as its owner wants.

use std::ffi::c_int;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use super::kernel::{self, Identity};
use super::wire::{Datagram, Ends, Kind};
use crate::{fds, sys};

/// Links of the peer's user that wait for a proof, and places for those that nobody has accepted yet.
const LINKS: usize = 4;
/// Threads that may wait for strangers' descriptors.
const CLOSING: usize = 16;

static CLOSING_NOW: AtomicUsize = AtomicUsize::new(0);
/// Strangers have used up those: this process has no names any more, and connects to none.
static GIVEN_UP: AtomicBool = AtomicBool::new(false);

/// In a child: its parent's threads are not there.
pub fn in_child() {
    CLOSING_NOW.store(0, Ordering::Relaxed);
}

/// A socket into which strangers can put descriptors.
struct Exposed {
    fd: c_int,
    process: c_int,
    /// Relatives have it, too, and may use it.
    shared: bool,
    /// The set of epoll that it is in; -1: none.
    set: c_int,
}

impl Exposed {
    fn new(fd: c_int) -> Self {
        let moved = sys::second(fd).inspect(|_| sys::close(fd)).unwrap_or(fd);
        fds::enter_own(moved);
        Self { fd: moved, process: sys::pid(), shared: false, set: -1 }
    }

    /// From now on what comes there is reported with this number.
    fn watch(&mut self, set: c_int, data: u64) -> bool {
        let added = sys::epoll_add(set, self.fd, libc::EPOLLIN as u32, data).is_ok();
        self.set = if added { set } else { -1 };
        added
    }
}

impl Drop for Exposed {
    fn drop(&mut self) {
        fds::forget(self.fd);
        let own = self.process == sys::pid();
        // Closing it is not enough if a relative has it, too. In a child, the set is the parent's.
        if own && self.set >= 0 {
            sys::epoll_delete(self.set, self.fd);
        }
        if self.shared || !own {
            return sys::close(self.fd);
        }
        // Nobody puts anything there any more. Who has connected meanwhile comes out of a listener.
        let _ = sys::shutdown(self.fd, libc::SHUT_RDWR);
        if sys::option(self.fd, libc::SOL_SOCKET, libc::SO_ACCEPTCONN) == Some(1) {
            while let Ok(link) = kernel::accept(self.fd) {
                drop(Self::new(link));
            }
            sys::close(self.fd);
        } else if kernel::is_of_own_user(self.fd) {
            sys::close(self.fd);
        } else {
            // Only what a stranger has put there can take long, and most have put nothing there.
            let (mut descriptors, is_empty) = kernel::empty(self.fd);
            if is_empty {
                sys::close(self.fd);
            } else {
                descriptors.push(self.fd);
            }
            if !descriptors.iter().all(|fd| kernel::is_path(*fd)) {
                return close_elsewhere(descriptors);
            }
            descriptors.into_iter().for_each(sys::close);
        }
    }
}

/// Closes what may take long in a thread of its own.
fn close_elsewhere(descriptors: Vec<c_int>) {
    if CLOSING_NOW.fetch_add(1, Ordering::AcqRel) >= CLOSING {
        // They stay open.
        CLOSING_NOW.fetch_sub(1, Ordering::AcqRel);
        GIVEN_UP.store(true, Ordering::Release);
        return;
    }
    let before = sys::block_signals();
    let close = move || {
        descriptors.into_iter().for_each(sys::close);
        CLOSING_NOW.fetch_sub(1, Ordering::AcqRel);
    };
    if std::thread::Builder::new().name("uwarp-close".to_owned()).spawn(close).is_err() {
        CLOSING_NOW.fetch_sub(1, Ordering::AcqRel);
        GIVEN_UP.store(true, Ordering::Release);
    }
    sys::unblock(&before);
}

/// How long nothing is repeated that the peer has read: then its marker, which answers, must be on its way.
const FOR_MARKER: Duration = Duration::from_millis(50);

struct Link {
    socket: Exposed,
    /// The peer has shown its end of the connection.
    proven: bool,
    /// The last HELLO or WELCOME that was sent, and when.
    said: Option<(Datagram, Instant)>,
}

impl Link {
    fn new(socket: Exposed) -> Self {
        Self { socket, proven: false, said: None }
    }
}

/// What has come.
pub enum Heard {
    /// Of the peer itself.
    Datagram(Datagram),
    /// The peer's link has ended.
    Ended,
}

/// Of a connection within this host.
#[derive(Default)]
pub struct Side {
    name: Option<Exposed>,
    /// Each of them is to a process of the owner of the peer's socket, or of root.
    links: Vec<Link>,
    /// The peer's socket, as the kernel has named it. As long as this end is connected, no other one takes
    /// its place.
    peer: Option<Identity>,
}

fn name_of(ends: &Ends) -> (libc::sockaddr_storage, libc::socklen_t) {
    // The scope of a link-local address is each end's own.
    let plain = |end: SocketAddr| SocketAddr::new(end.ip().to_canonical(), end.port());
    kernel::abstract_name(&format!("uwarp-up/{}/{}", plain(ends.connected), plain(ends.accepted)))
}

impl Side {
    /// Of the end that connected.
    pub fn publish(ends: &Ends) -> Result<Self, c_int> {
        if GIVEN_UP.load(Ordering::Acquire) {
            return Err(libc::EPERM);
        }
        let name = Exposed::new(kernel::seqpacket()?);
        let (to, len) = name_of(ends);
        sys::quietly(|| sys::bind(name.fd, &to, len))?;
        kernel::listen(name.fd, LINKS as c_int)?;
        Ok(Self { name: Some(name), ..Self::default() })
    }

    /// Relatives of this process have it, too, from now on.
    pub fn share(&mut self) {
        if let Some(name) = &mut self.name {
            name.shared = true;
        }
    }

    /// Who connects to the name is reported from now on. False: that cannot be.
    pub fn watch(&mut self, set: c_int, data: u64) -> bool {
        self.name.as_mut().is_some_and(|name| {
            // It may be a parent's.
            name.process = sys::pid();
            name.watch(set, data)
        })
    }

    /// Of the end that accepted: a new link to the other one. `EACCES`: who has the name is another user than
    /// the one whose socket the other end is, or nobody can say who that is.
    pub fn connect(&mut self, ends: &Ends, set: c_int, data: u64) -> Result<(), c_int> {
        if GIVEN_UP.load(Ordering::Acquire) {
            return Err(libc::ECONNREFUSED);
        }
        let mut socket = Exposed::new(kernel::seqpacket()?);
        let (to, len) = name_of(ends);
        sys::quietly(|| sys::connect(socket.fd, &to, len))?;
        let peer = self.ask(|| kernel::mirrored(ends.accepted, ends.connected)).ok_or(libc::ENOTCONN)?;
        if !peer.is_of(socket.fd) {
            return Err(libc::EACCES);
        }
        socket.watch(set, data);
        self.links.push(Link::new(socket));
        Ok(())
    }

    /// The peer's socket; the kernel is asked once.
    fn ask(&mut self, peer: impl Fn() -> Option<Identity>) -> Option<Identity> {
        if self.peer.is_none() {
            self.peer = peer();
        }
        self.peer
    }

    /// Whether there is a link.
    pub fn is_linked(&self) -> bool {
        !self.links.is_empty()
    }

    /// Whether this is in the peer's hands already: a link loses nothing. A WELCOME that has been read may be
    /// said again, for an answer where the marker is behind many bytes.
    pub fn has_said(&self, datagram: &Datagram) -> bool {
        let Some(Link { socket, said: Some((before, at)), .. }) = self.links.last() else { return false };
        let has_read = || at.elapsed() >= FOR_MARKER && sys::unread_by_peer(socket.fd) == 0;
        before == datagram && !(datagram.kind == Kind::Welcome && has_read())
    }

    /// Sends to the peer, and shows this descriptor, if there is one to show. False: the link has ended.
    pub fn send(&mut self, datagram: &Datagram, shown: Option<c_int>) -> bool {
        let Some(link) = self.links.last_mut() else { return true };
        // A peer that takes nothing for so long has enough repetitions.
        match kernel::send_with(link.socket.fd, &datagram.to_bytes(None), shown) {
            Ok(_) => {
                link.said = shown.map(|_| (*datagram, Instant::now()));
                true
            }
            Err(libc::EAGAIN | libc::EINTR | libc::ETOOMANYREFS) => true,
            Err(_) => {
                self.links.clear();
                false
            }
        }
    }

    /// Accepts a link; false: nobody has connected. `peer`: the other end, as the kernel names it. Links of
    /// others than its owner are closed at once, so that however many they open, none takes the peer's place.
    pub fn accept(&mut self, set: c_int, data: u64, peer: impl Fn() -> Option<Identity>) -> bool {
        let accepted = self.name.as_ref().map(|name| kernel::accept(name.fd));
        let Some(Ok(link)) = accepted else { return false };
        let mut socket = Exposed::new(link);
        if !self.ask(peer).is_some_and(|peer| peer.is_of(socket.fd)) {
            return true;
        }
        socket.watch(set, data);
        if self.links.len() >= LINKS {
            self.links.remove(0);
        }
        self.links.push(Link::new(socket));
        true
    }

    /// Receives. `peer`: the other end, as the kernel names it. `None`: nothing more is there.
    pub fn receive(&mut self, ends: &Ends, peer: impl Fn() -> Option<Identity>) -> Option<Heard> {
        if self.links.is_empty() {
            return None;
        }
        let peer = self.ask(peer);
        let mut at = 0;
        while let Some(link) = self.links.get_mut(at) {
            let mut bytes = [0; Datagram::LEN + 1];
            let (len, descriptors) = match kernel::receive_with(link.socket.fd, &mut bytes) {
                Err(libc::EAGAIN) => {
                    at += 1;
                    continue;
                }
                Err(libc::EINTR) => continue,
                Ok((1.., descriptors)) if descriptors.len() > 1 => (0, descriptors),
                Ok(got) => got,
                Err(_) => (0, Vec::new()),
            };
            let harmless = descriptors.iter().all(|fd| kernel::is_path(*fd));
            let shown = descriptors.first().filter(|_| harmless).and_then(|fd| kernel::identity(*fd));
            match harmless || kernel::is_of_own_user(link.socket.fd) {
                true => descriptors.into_iter().for_each(sys::close),
                false => close_elsewhere(descriptors),
            }
            let datagram = bytes.get(..len).filter(|bytes| Datagram::is_made_with(bytes, None));
            let datagram = datagram.and_then(Datagram::parse).filter(|datagram| datagram.ends.are(ends));
            let claims =
                datagram.is_some_and(|datagram| matches!(datagram.kind, Kind::Hello | Kind::Welcome));
            if !link.proven && claims && shown.is_some() && shown == peer {
                // The peer is known, and there is only one.
                link.proven = true;
                self.name = None;
                let mut link = self.links.swap_remove(at);
                link.proven = true;
                self.links.clear();
                self.links.push(link);
                at = 0;
            }
            match (self.links.get(at).is_some_and(|link| link.proven), datagram) {
                (true, Some(datagram)) => return Some(Heard::Datagram(datagram)),
                (proven, _) => {
                    self.links.remove(at);
                    // Its owner may have changed.
                    self.peer = None;
                    if proven || self.name.is_none() {
                        return Some(Heard::Ended);
                    }
                }
            }
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use std::net::{TcpListener, TcpStream};
    use std::os::fd::AsRawFd as _;

    use super::*;

    struct Two {
        c: Side,
        a: Side,
        ends: Ends,
        tcp: [TcpStream; 2],
        set: c_int,
        asked: std::cell::Cell<usize>,
    }

    impl Two {
        fn new() -> Self {
            let listener = TcpListener::bind("127.0.0.1:0").unwrap();
            let connected = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
            let accepted = listener.accept().unwrap().0;
            let ends =
                Ends { connected: connected.local_addr().unwrap(), accepted: connected.peer_addr().unwrap() };
            let set = sys::epoll().unwrap();
            let (c, mut a) = (Side::publish(&ends).unwrap(), Side::default());
            a.connect(&ends, set, 0).unwrap();
            Self { c, a, ends, tcp: [connected, accepted], set, asked: std::cell::Cell::new(0) }
        }

        fn say(&self, kind: Kind) -> Datagram {
            Datagram { kind, accepted: [1; 16], connected: [2; 16], ends: self.ends }
        }

        /// A says HELLO, and shows this socket.
        fn hello(&mut self, shown: &TcpStream) -> Datagram {
            let hello = self.say(Kind::Hello);
            let path = kernel::path_of(shown.as_raw_fd());
            assert!(self.a.send(&hello, path));
            path.into_iter().for_each(sys::close);
            hello
        }

        /// C accepts and receives.
        fn heard(&mut self) -> Option<Heard> {
            let Self { c, ends, set, asked, .. } = self;
            let peer = || {
                asked.set(asked.get() + 1);
                kernel::mirrored(ends.connected, ends.accepted)
            };
            while c.accept(*set, 0, peer) {}
            c.receive(ends, peer)
        }
    }

    impl Drop for Two {
        fn drop(&mut self) {
            sys::close(self.set);
        }
    }

    #[test]
    fn the_kernel_is_asked_once_who_the_peer_is() {
        let mut two = Two::new();
        let own = two.tcp[1].try_clone().unwrap();
        two.a.connect(&two.ends.clone(), two.set, 0).unwrap();
        two.hello(&own);
        assert!(matches!(two.heard(), Some(Heard::Datagram(_))));
        assert_eq!(two.asked.get(), 1);
    }

    /// The descriptor of another socket proves nothing, and the next link is asked about anew.
    #[test]
    fn another_socket_is_not_believed() {
        let mut two = Two::new();
        let foreign = two.tcp[0].try_clone().unwrap();
        two.hello(&foreign);
        assert!(two.heard().is_none());
        let own = two.tcp[1].try_clone().unwrap();
        two.a.links.clear();
        two.a.connect(&two.ends.clone(), two.set, 0).unwrap();
        two.hello(&own);
        assert!(matches!(two.heard(), Some(Heard::Datagram(_))));
        assert_eq!(two.asked.get(), 2);
    }

    #[test]
    fn nothing_is_repeated_that_the_peer_has() {
        let mut two = Two::new();
        let own = two.tcp[1].try_clone().unwrap();
        let hello = two.hello(&own);
        assert!(two.a.has_said(&hello) && !two.a.has_said(&two.say(Kind::Never)));
        two.heard();
        assert!(two.a.has_said(&hello), "read, and C answers");
        let welcome = two.say(Kind::Welcome);
        assert!(!two.c.has_said(&welcome));
        let path = kernel::path_of(two.tcp[0].as_raw_fd());
        assert!(two.c.send(&welcome, path) && two.c.has_said(&welcome));
        path.into_iter().for_each(sys::close);
        let past = Instant::now() - FOR_MARKER;
        two.c.links[0].said = Some((welcome, past));
        assert!(two.c.has_said(&welcome), "A has not read it");
        let peer = || kernel::mirrored(two.ends.accepted, two.ends.connected);
        assert!(matches!(two.a.receive(&two.ends.clone(), peer), Some(Heard::Datagram(_))));
        assert!(!two.c.has_said(&welcome), "A's marker may be behind many bytes");
        // Another link has nothing yet.
        two.a.links.clear();
        two.a.connect(&two.ends.clone(), two.set, 0).unwrap_err();
        assert!(!two.a.has_said(&hello));
    }
}
