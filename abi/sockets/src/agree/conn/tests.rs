use std::io::Write as _;
use std::net::Shutdown;
use std::os::fd::IntoRawFd as _;
use std::os::unix::net::UnixStream;

use super::super::machine::Role;
use super::super::wire::{Ends, Word, marker};
use super::*;

const PATTERN: Pattern = [7; 32];

/// Behind the library, looking for a marker; and the other end of its connection.
fn behind() -> (Arc<Conn>, UnixStream) {
    let ends =
        Ends { connected: "127.0.0.1:40000".parse().unwrap(), accepted: "127.0.0.1:80".parse().unwrap() };
    let conn = Conn::new(0, Agreement::new(Role::Connected, ends, [2; 16], None), None, None);
    let (ours, peers) = UnixStream::pair().unwrap();
    conn.set_tcp(ours.into_raw_fd());
    conn.begin_to_look(PATTERN, Stage::Behind);
    (conn, peers)
}

/// All that the program can read now.
fn read(conn: &Conn) -> Vec<u8> {
    let mut all = Vec::new();
    loop {
        let mut block = [0; 5000];
        let spans = Spans::one(block.as_mut_ptr().cast(), block.len());
        match conn.receive(&spans, 0, Wait::Not) {
            Outcome::Done(more @ 1..) => all.extend(&block[..more.unsigned_abs()]),
            Outcome::Done(-1) if errno() == libc::EAGAIN => return all,
            Outcome::Done(other) => panic!("{other}, errno {}", errno()),
            Outcome::Elsewhere => panic!("it is no stream"),
        }
    }
}

/// The end of the connection was shown while the program had bytes to read in front of a marker that had not
/// been received yet. It read these, and slept: a stand-in shows an end once, and nothing told of the bytes
/// behind the marker.
#[test]
fn an_end_is_not_shown_before_what_lies_in_front_of_it_can_be_read() {
    let (conn, mut peers) = behind();
    // More than is received at once.
    let front = vec![1; 100_000];
    peers.write_all(&[&front[..], &marker(&PATTERN, Word::No), b"behind"].concat()).unwrap();
    peers.shutdown(Shutdown::Write).unwrap();
    let shown = || conn.look() & (libc::POLLIN | libc::POLLRDHUP);
    assert_eq!(shown(), libc::POLLIN);
    assert_eq!(read(&conn), front);
    assert_eq!(shown(), 0, "the service has not answered the marker");
    conn.inbound.lock().is_plain();
    assert_eq!(shown(), libc::POLLIN | libc::POLLRDHUP);
    let mut rest = [0; 10];
    let spans = Spans::one(rest.as_mut_ptr().cast(), rest.len());
    assert!(matches!(conn.receive(&spans, 0, Wait::Not), Outcome::Done(6)));
    assert_eq!(&rest[..6], b"behind");
    assert!(matches!(conn.receive(&spans, 0, Wait::Not), Outcome::Done(0)));
}
