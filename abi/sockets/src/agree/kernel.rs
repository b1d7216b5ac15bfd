//! What the kernel is asked about a connection, and descriptors that are passed over Unix sockets.

use std::ffi::c_int;
use std::net::{IpAddr, SocketAddr};

use crate::sys::{self, call, int, transfer};

/// A socket, as the kernel numbers it. The number alone comes again after 2³² sockets.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Identity {
    inode: u64,
    /// The user who made it.
    owner: u32,
}

impl Identity {
    /// Whether the process at the other end of a Unix socket is of this socket's owner, or of root. Nobody
    /// else is shown anything, or believed: he could carry what he is shown from one end to the other.
    pub fn is_of(&self, link: c_int) -> bool {
        let known = |user| user == 0 || user == self.owner;
        user_of(link).is_some_and(known) && is_one_user(self.owner)
    }
}

/// Whether this number is one user's. In a user namespace all users that are not mapped there have one and
/// the same number, so two of them look alike.
fn is_one_user(user: u32) -> bool {
    /// All numbers but the last, which is none.
    const EVERYBODY: u64 = u32::MAX as u64;
    if user != unmapped_user().unwrap_or(65534) {
        return true;
    }
    // A program may have changed its namespace since it began.
    let map = std::fs::read_to_string("/proc/thread-self/uid_map").unwrap_or_default();
    let counts = map.lines().filter_map(|line| line.split_ascii_whitespace().nth(2)?.parse::<u64>().ok());
    counts.sum::<u64>() >= EVERYBODY
}

/// The number of all that have none.
fn unmapped_user() -> Option<u32> {
    let (path, mut text) = (c"/proc/sys/kernel/overflowuid", [0_u8; 16]);
    let (at, flags) = (path.as_ptr().expose_provenance(), int(libc::O_RDONLY | libc::O_CLOEXEC));
    let fd = sys::quietly(|| call(libc::SYS_openat, [int(libc::AT_FDCWD), at, flags, 0, 0])).ok()?;
    let to = text.as_mut_ptr().expose_provenance();
    let len = sys::quietly(|| call(libc::SYS_read, [int(fd), to, text.len(), 0, 0]));
    sys::close(fd);
    std::str::from_utf8(text.get(..usize::try_from(len.ok()?).ok()?)?).ok()?.trim().parse().ok()
}

/// Who is at the other end of a Unix socket.
fn user_of(link: c_int) -> Option<u32> {
    let peer: Option<[u32; 3]> = sys::option_of(link, libc::SOL_SOCKET, libc::SO_PEERCRED);
    peer.map(|[_, user, _]| user)
}

/// The socket that a descriptor is; `None`: it is none. Descriptors by `O_PATH` will do.
///
/// A file system may have files of this type, with any numbers, and may take as long as it likes to answer.
/// So what kind of file it is, the kernel is asked first, by its name.
pub fn identity(fd: c_int) -> Option<Identity> {
    let (path, mut name) = (format!("/proc/self/fd/{fd}\0"), [0_u8; 64]);
    let (at, to, room) =
        (path.as_ptr().expose_provenance(), name.as_mut_ptr().expose_provenance(), name.len());
    let at_cwd = int(libc::AT_FDCWD);
    let len = sys::quietly(|| call(libc::SYS_readlinkat, [at_cwd, at, to, room, 0])).ok()?;
    let name = std::str::from_utf8(name.get(..usize::try_from(len).ok()?)?).ok()?;
    let inode: u64 = name.strip_prefix("socket:[")?.strip_suffix(']')?.parse().ok()?;
    // SAFETY: zeros are a value of numbers.
    let mut stat: libc::stat = unsafe { std::mem::zeroed() };
    let to = (&raw mut stat).expose_provenance();
    sys::quietly(|| call(libc::SYS_fstat, [int(fd), to, 0, 0, 0])).ok()?;
    let socket = stat.st_mode & libc::S_IFMT == libc::S_IFSOCK && stat.st_ino == inode;
    socket.then_some(Identity { inode: stat.st_ino, owner: stat.st_uid })
}

/// A descriptor that says which file this is and can do nothing with it.
pub fn path_of(fd: c_int) -> Option<c_int> {
    let path = format!("/proc/self/fd/{fd}\0");
    let (at, flags) = (path.as_ptr().expose_provenance(), int(libc::O_PATH | libc::O_CLOEXEC));
    sys::quietly(|| call(libc::SYS_openat, [int(libc::AT_FDCWD), at, flags, 0, 0])).ok()
}

/// Whether nothing can be done with the file of this descriptor, so that closing it never waits.
pub fn is_path(fd: c_int) -> bool {
    sys::quietly(|| sys::fcntl(fd, libc::F_GETFL, 0)).is_ok_and(|flags| flags & libc::O_PATH != 0)
}

/// The socket of the other end of a connection, if it is in this process's network namespace.
pub fn mirrored(own: SocketAddr, peer: SocketAddr) -> Option<Identity> {
    by_diag(peer, own).or_else(|| by_list(peer, own)).filter(|found| found.inode != 0)
}

fn bytes_of(ip: IpAddr) -> ([u8; 16], usize) {
    let mut bytes = [0; 16];
    let len = match ip.to_canonical() {
        IpAddr::V4(ip) => {
            bytes[..4].copy_from_slice(&ip.octets());
            4
        }
        IpAddr::V6(ip) => {
            bytes = ip.octets();
            16
        }
    };
    (bytes, len)
}

fn family(len: usize) -> u8 {
    (if len == 4 { libc::AF_INET } else { libc::AF_INET6 }) as u8
}

fn scope(address: SocketAddr) -> u32 {
    match address {
        SocketAddr::V6(v6) => v6.scope_id(),
        SocketAddr::V4(_) => 0,
    }
}

/// Asks by netlink; the answer, without its header, if it is of this type.
fn ask(protocol: c_int, kind: u16, answer: u16, body: &[u8]) -> Option<Vec<u8>> {
    const SEQUENCE: u32 = 0x7577_6172;
    const NLM_F_REQUEST: u16 = 1;
    let len = u32::try_from(16 + body.len()).ok()?;
    let mut request = Vec::new();
    request.extend_from_slice(&len.to_ne_bytes());
    request.extend_from_slice(&kind.to_ne_bytes());
    request.extend_from_slice(&NLM_F_REQUEST.to_ne_bytes());
    request.extend_from_slice(&SEQUENCE.to_ne_bytes());
    request.extend_from_slice(&[0; 4]);
    request.extend_from_slice(body);
    let type_of_socket = int(libc::SOCK_RAW | libc::SOCK_CLOEXEC);
    let made = call(libc::SYS_socket, [int(libc::AF_NETLINK), type_of_socket, int(protocol), 0, 0]);
    let fd = sys::quietly(|| made).ok()?;
    let mut room = vec![0; 4096];
    // The kernel answers before the send returns.
    let got = sys::send_now(fd, &request).and_then(|_| sys::receive_now(fd, &mut room));
    sys::close(fd);
    room.truncate(got.ok()?);
    let is_answer =
        room.get(4..6) == Some(&answer.to_ne_bytes()) && room.get(8..12) == Some(&SEQUENCE.to_ne_bytes());
    is_answer.then(|| room.split_off(16.min(room.len())))
}

fn number<const N: usize>(bytes: &[u8], at: usize) -> Option<[u8; N]> {
    bytes.get(at..at + N)?.try_into().ok()
}

/// By `sock_diag`. It also answers with a listener, if there is no such connection.
fn by_diag(local: SocketAddr, remote: SocketAddr) -> Option<Identity> {
    const NETLINK_SOCK_DIAG: c_int = 4;
    const SOCK_DIAG_BY_FAMILY: u16 = 20;
    let ((from, len), (to, _)) = (bytes_of(local.ip()), bytes_of(remote.ip()));
    let mut id = Vec::new();
    id.extend_from_slice(&local.port().to_be_bytes());
    id.extend_from_slice(&remote.port().to_be_bytes());
    id.extend_from_slice(&from);
    id.extend_from_slice(&to);
    let mut body = vec![family(len), libc::IPPROTO_TCP as u8, 0, 0, 0xff, 0xff, 0xff, 0xff];
    body.extend_from_slice(&id);
    body.extend_from_slice(&scope(local).to_ne_bytes());
    // No cookie.
    body.extend_from_slice(&[0xff; 8]);
    let answer = ask(NETLINK_SOCK_DIAG, SOCK_DIAG_BY_FAMILY, SOCK_DIAG_BY_FAMILY, &body)?;
    // Of addresses of IPv4, only so many bytes have a meaning.
    let same = [0..4, 4..4 + len, 20..20 + len];
    if !same.iter().all(|part| answer.get(part.start + 4..part.end + 4) == id.get(part.clone())) {
        return None;
    }
    let owner = u32::from_ne_bytes(number(&answer, 64)?);
    let inode = u32::from_ne_bytes(number(&answer, 68)?);
    Some(Identity { inode: inode.into(), owner })
}

/// By the list of all, where `sock_diag` is missing.
fn by_list(local: SocketAddr, remote: SocketAddr) -> Option<Identity> {
    let lists: &[&str] = if bytes_of(local.ip()).1 == 4 { &["tcp", "tcp6"] } else { &["tcp6"] };
    lists.iter().find_map(|list| {
        let six = *list == "tcp6";
        let (local, remote) = (listed(local, six), listed(remote, six));
        let text = std::fs::read_to_string(format!("/proc/thread-self/net/{list}")).ok()?;
        text.lines().find_map(|line| {
            let words: Vec<&str> = line.split_ascii_whitespace().collect();
            let [_, from, to, _, _, _, _, owner, _, inode, ..] = words[..] else { return None };
            let same = from == local && to == remote;
            same.then_some(Identity { inode: inode.parse().ok()?, owner: owner.parse().ok()? })
        })
    })
}

/// An address as these lists have it: words in the machine's order.
fn listed(address: SocketAddr, six: bool) -> String {
    let bytes: Vec<u8> = match (address.ip().to_canonical(), six) {
        (IpAddr::V4(ip), false) => ip.octets().to_vec(),
        (IpAddr::V4(ip), true) => ip.to_ipv6_mapped().octets().to_vec(),
        (IpAddr::V6(ip), _) => ip.octets().to_vec(),
    };
    let word = |word: &[u8]| word.try_into().map_or(0, u32::from_ne_bytes);
    let words: String = bytes.chunks(4).map(|four| format!("{:08X}", word(four))).collect();
    format!("{words}:{:04X}", address.port())
}

/// Whether this address is one of this network namespace.
pub fn is_local(peer: SocketAddr, own: SocketAddr) -> bool {
    // (To be near takes a proof, so nothing is lost if an address is of somebody else, too.)
    if peer.ip() == own.ip() {
        return true;
    }
    const NETLINK_ROUTE: c_int = 0;
    const RTM_NEWROUTE: u16 = 24;
    const RTM_GETROUTE: u16 = 26;
    const RTA_DST: u16 = 1;
    const RTA_OIF: u16 = 4;
    const RTN_LOCAL: u8 = 2;
    let (bytes, len) = bytes_of(peer.ip());
    let mut body = vec![family(len), len as u8 * 8, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];
    let mut attribute = |name: u16, value: &[u8]| {
        body.extend_from_slice(&(4 + value.len() as u16).to_ne_bytes());
        body.extend_from_slice(&name.to_ne_bytes());
        body.extend_from_slice(value);
    };
    attribute(RTA_DST, bytes.get(..len).unwrap_or_default());
    if scope(peer) != 0 {
        attribute(RTA_OIF, &scope(peer).to_ne_bytes());
    }
    match ask(NETLINK_ROUTE, RTM_GETROUTE, RTM_NEWROUTE, &body) {
        Some(route) => route.get(7) == Some(&RTN_LOCAL),
        None => peer.ip().to_canonical() == own.ip().to_canonical() || peer.ip().to_canonical().is_loopback(),
    }
}

/// A Unix socket on which messages stay whole and none is lost. It does not wait.
pub fn seqpacket() -> Result<c_int, c_int> {
    let kind = libc::SOCK_SEQPACKET | libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK;
    sys::quietly(|| call(libc::SYS_socket, [int(libc::AF_UNIX), int(kind), 0, 0, 0]))
}

/// An abstract name of a Unix socket: it ends with the last descriptor, and each network namespace has its
/// own.
pub fn abstract_name(text: &str) -> (libc::sockaddr_storage, libc::socklen_t) {
    let (mut storage, _) = crate::address::room();
    storage.ss_family = libc::AF_UNIX as libc::sa_family_t;
    let text = text.as_bytes().get(..106.min(text.len())).unwrap_or_default();
    // SAFETY: 2 bytes of the family, a zero, and at most 106 more are within the storage's 128.
    unsafe {
        let at = (&raw mut storage).cast::<u8>();
        std::ptr::copy_nonoverlapping(text.as_ptr(), at.add(3), text.len());
    }
    (storage, 3 + text.len() as libc::socklen_t)
}

/// listen(2).
pub fn listen(fd: c_int, backlog: c_int) -> Result<c_int, c_int> {
    sys::quietly(|| call(libc::SYS_listen, [int(fd), int(backlog), 0, 0, 0]))
}

/// accept4(2), for a descriptor that does not wait.
pub fn accept(fd: c_int) -> Result<c_int, c_int> {
    let flags = int(libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK);
    sys::quietly(|| call(libc::SYS_accept4, [int(fd), 0, 0, flags, 0]))
}

/// Whether the process at the other end of a Unix socket is of this user, or of root.
pub fn is_of_own_user(fd: c_int) -> bool {
    let own = call(libc::SYS_geteuid, [0; 5]).ok();
    user_of(fd).is_some_and(|user| user == 0 || Some(user.cast_signed()) == own && is_one_user(user))
}

/// Most descriptors in a message, by the kernel.
const MOST: usize = 253;

/// Room for those, and for the sender's process and user. What does not fit the kernel would close at once.
#[repr(C, align(8))]
struct Control([u8; 16 + 4 * (MOST + 1) + 32]);

/// Sends a message with a descriptor, or without one.
pub fn send_with(fd: c_int, bytes: &[u8], shown: Option<c_int>) -> Result<usize, c_int> {
    let Some(shown) = shown else { return sys::send_now(fd, bytes) };
    let mut control = Control([0; size_of::<Control>()]);
    let mut piece = libc::iovec { iov_base: bytes.as_ptr().cast_mut().cast(), iov_len: bytes.len() };
    // SAFETY: zeros are NULL and no bytes.
    let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
    (message.msg_iov, message.msg_iovlen) = (&raw mut piece, 1);
    // SAFETY: the header and one descriptor are within the room for control data.
    unsafe {
        (message.msg_control, message.msg_controllen) =
            ((&raw mut control).cast(), libc::CMSG_SPACE(4) as usize);
        let header = libc::CMSG_FIRSTHDR(&raw const message);
        (*header).cmsg_level = libc::SOL_SOCKET;
        (*header).cmsg_type = libc::SCM_RIGHTS;
        (*header).cmsg_len = libc::CMSG_LEN(4) as usize;
        libc::CMSG_DATA(header).cast::<c_int>().write_unaligned(shown);
    }
    let at = (&raw const message).expose_provenance();
    transfer(libc::SYS_sendmsg, [int(fd), at, int(libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL), 0, 0, 0])
}

/// Receives a message and the descriptors in it, which are the caller's.
pub fn receive_with(fd: c_int, bytes: &mut [u8]) -> Result<(usize, Vec<c_int>), c_int> {
    receive(fd, bytes).map(|(len, descriptors, _)| (len, descriptors))
}

/// Messages that may wait in a Unix socket, by far.
const MOST_WAIT: usize = 256;

/// Of a socket that has been shut down, into which nobody can put anything any more: takes the descriptors
/// that are in it. True: it is empty now, so closing it closes no other file.
pub fn empty(fd: c_int) -> (Vec<c_int>, bool) {
    let mut all = Vec::new();
    // Then each message has a header, and the end of all of them has none.
    sys::set_option(fd, libc::SOL_SOCKET, libc::SO_PASSCRED, 1);
    if sys::option(fd, libc::SOL_SOCKET, libc::SO_PASSCRED) != Some(1) {
        return (all, false);
    }
    for _ in 0..MOST_WAIT {
        match receive(fd, &mut [0]) {
            Ok((_, _, false)) => return (all, true),
            Ok((_, descriptors, true)) => all.extend(descriptors),
            // It was never connected.
            Err(libc::ENOTCONN) => return (all, true),
            Err(_) => {}
        }
    }
    (all, false)
}

/// A message's length, its descriptors, and whether it has a header of any kind.
fn receive(fd: c_int, bytes: &mut [u8]) -> Result<(usize, Vec<c_int>, bool), c_int> {
    let mut control = Control([0; size_of::<Control>()]);
    let mut piece = libc::iovec { iov_base: bytes.as_mut_ptr().cast(), iov_len: bytes.len() };
    // SAFETY: zeros are NULL and no bytes.
    let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
    (message.msg_iov, message.msg_iovlen) = (&raw mut piece, 1);
    (message.msg_control, message.msg_controllen) = ((&raw mut control).cast(), size_of::<Control>());
    let (at, flags) = ((&raw mut message).expose_provenance(), libc::MSG_DONTWAIT | libc::MSG_CMSG_CLOEXEC);
    let len = transfer(libc::SYS_recvmsg, [int(fd), at, int(flags), 0, 0, 0])?;
    let (mut descriptors, mut headers) = (Vec::new(), false);
    // SAFETY: headers that the call wrote, within their length, and numbers behind one of this type.
    unsafe {
        let mut header = libc::CMSG_FIRSTHDR(&raw const message);
        while !header.is_null() {
            headers = true;
            if ((*header).cmsg_level, (*header).cmsg_type) == (libc::SOL_SOCKET, libc::SCM_RIGHTS) {
                let count = (*header).cmsg_len.saturating_sub(libc::CMSG_LEN(0) as usize) / 4;
                let first = libc::CMSG_DATA(header).cast::<c_int>();
                descriptors.extend((0..count).map(|at| first.add(at).read_unaligned()));
            }
            header = libc::CMSG_NXTHDR(&raw const message, header);
        }
    }
    Ok((len, descriptors, headers))
}

#[cfg(test)]
mod tests {
    use std::net::{TcpListener, TcpStream};
    use std::os::fd::AsRawFd;

    use super::*;

    #[test]
    fn a_socket_that_never_had_a_peer_is_empty() {
        let fd = seqpacket().unwrap();
        assert_eq!(empty(fd), (Vec::new(), true));
        sys::close(fd);
    }

    #[test]
    fn the_kernel_names_the_other_end_of_a_connection() {
        for address in ["127.0.0.1:0", "[::1]:0"] {
            let listener = TcpListener::bind(address).unwrap();
            let one = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
            let other = listener.accept().unwrap().0;
            let (own, peer) = (one.local_addr().unwrap(), one.peer_addr().unwrap());
            let wanted = identity(other.as_raw_fd());
            assert!(wanted.is_some());
            assert_eq!(mirrored(own, peer), wanted);
            assert_eq!(by_list(peer, own), wanted);
            assert_eq!(mirrored(peer, own), identity(one.as_raw_fd()));
            let path = path_of(other.as_raw_fd()).unwrap();
            assert_eq!((identity(path), is_path(path), is_path(other.as_raw_fd())), (wanted, true, false));
            sys::close(path);
            drop((one, other));
            assert_eq!(by_diag(peer, own).filter(|found| found.inode != 0), None, "the listener is no end");
        }
    }

    #[test]
    fn a_file_that_looks_like_a_socket_is_none() {
        let place = std::env::temp_dir().join(format!("uwarp-identity-{}", std::process::id()));
        let bound = std::os::unix::net::UnixListener::bind(&place).unwrap();
        let file = format!("{}\0", place.display());
        let (at, flags) = (file.as_ptr().expose_provenance(), int(libc::O_PATH | libc::O_CLOEXEC));
        let file = call(libc::SYS_openat, [int(libc::AT_FDCWD), at, flags, 0, 0]).unwrap();
        std::fs::remove_file(&place).unwrap();
        assert!(identity(bound.as_raw_fd()).is_some());
        assert_eq!(identity(file), None, "of the file system's own numbers");
        sys::close(file);
    }

    #[test]
    fn only_the_owner_of_a_socket_and_root_are_at_its_other_end() {
        let (one, _other) = std::os::unix::net::UnixStream::pair().unwrap();
        let own = call(libc::SYS_geteuid, [0; 5]).unwrap().cast_unsigned();
        let of = |owner| Identity { inode: 1, owner };
        assert!(of(own).is_of(one.as_raw_fd()));
        assert_eq!(of(own + 1).is_of(one.as_raw_fd()), own == 0);
    }

    #[test]
    fn a_socket_is_emptied_of_all_that_is_in_it() {
        let pair = || {
            let (mut fds, kind) = ([0; 2], libc::SOCK_SEQPACKET | libc::SOCK_CLOEXEC);
            let to = fds.as_mut_ptr().expose_provenance();
            call(libc::SYS_socketpair, [int(libc::AF_UNIX), int(kind), 0, to, 0]).unwrap();
            fds
        };
        let [from, to] = pair();
        let shown = std::fs::File::open("/dev/null").unwrap();
        // A message of no bytes looks like the end.
        for shown in [None, Some(shown.as_raw_fd()), None, Some(shown.as_raw_fd())] {
            send_with(from, &[], shown).unwrap();
        }
        sys::shutdown(to, libc::SHUT_RDWR).unwrap();
        let (descriptors, is_empty) = empty(to);
        assert_eq!((descriptors.len(), is_empty), (2, true));
        let open = |fd: &c_int| sys::fcntl(*fd, libc::F_GETFD, 0).is_ok();
        assert!(descriptors.iter().all(open));
        assert_eq!(empty(to), (vec![], true));
        descriptors.into_iter().chain([from, to]).for_each(sys::close);
    }

    #[test]
    fn addresses_of_this_host_are_known() {
        let own = "10.9.9.9:1".parse().unwrap();
        for (peer, local) in
            [("127.0.0.1:80", true), ("127.3.4.5:80", true), ("[::1]:80", true), ("192.0.2.1:80", false)]
        {
            assert_eq!(is_local(peer.parse().unwrap(), own), local, "{peer}");
        }
    }
}
