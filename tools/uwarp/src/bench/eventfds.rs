//! The fastest that two processes can wake each other by descriptors: one eventfd for each direction, whose
//! number is the message. What is compared with it is a ping-pong whose ends sleep each time.

use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::time::{Duration, Instant};

use rustix::event::{EventfdFlags, eventfd};
use rustix::io::Errno;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags, recvmsg, sendmsg,
};

use super::protocol::{Failure, Figure, Result};
use super::raw::{Raw, Trips, is_last};

/// How much later than it could each end answers, so that the other one does sleep: longer than anybody looks
/// before.
pub const LATE: Duration = Duration::from_micros(200);

/// Computes until an answer to what came at `since` is due.
pub fn be_late(since: Instant) {
    while since.elapsed() < LATE {
        std::hint::spin_loop();
    }
}

/// The active side; `raw` carries what the ends must tell each other first.
pub fn ping(raw: &mut Raw, time: Duration) -> Result<Figure> {
    let [there, back] = receive(raw)?;
    let mut trips = Trips::start(time);
    be_late(Instant::now());
    while let Some(number) = trips.next() {
        write(&there, number)?;
        let number = read(&back)?;
        let since = Instant::now();
        trips.end(number)?;
        be_late(since);
    }
    trips.late_figure(2, 2 * LATE)
}

/// The passive side.
pub fn pong(raw: &mut Raw) -> Result<()> {
    let [there, back] = offer(raw)?;
    loop {
        let number = read(&there)?;
        be_late(Instant::now());
        write(&back, number)?;
        if is_last(number) {
            return Ok(());
        }
    }
}

fn write(fd: &OwnedFd, number: u64) -> Result<()> {
    rustix::io::write(fd, &number.to_ne_bytes()).map(drop).map_err(Failure::of("eventfd: write"))
}

fn read(fd: &OwnedFd) -> Result<u64> {
    let mut bytes = [0; 8];
    loop {
        match rustix::io::read(fd, &mut bytes) {
            Err(Errno::INTR) => {}
            Ok(_) => return Ok(u64::from_ne_bytes(bytes)),
            Err(error) => return Err(Failure(format!("eventfd: read: {error}"))),
        }
    }
}

/// Where the passive end, of this process number, hands them over.
fn meeting(process: u64) -> PathBuf {
    std::env::temp_dir().join(format!("uwarp-bench-eventfds-{process}"))
}

/// Makes them, and gives them to the peer.
fn offer(raw: &mut Raw) -> Result<[OwnedFd; 2]> {
    let new = || eventfd(0, EventfdFlags::CLOEXEC).map_err(Failure::of("eventfd"));
    let both = [new()?, new()?];
    let place = meeting(std::process::id().into());
    // What another process has there makes this fail.
    let listener = UnixListener::bind(&place).map_err(Failure::of("a socket for eventfds"))?;
    let given = raw.send_number(std::process::id().into()).and_then(|()| {
        let (stream, _) = listener.accept().map_err(Failure::of("a socket for eventfds"))?;
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(2))];
        let mut rights = SendAncillaryBuffer::new(&mut space);
        let fds = both.each_ref().map(AsFd::as_fd);
        rights.push(SendAncillaryMessage::ScmRights(&fds));
        sendmsg(&stream, &[IoSlice::new(&[0])], &mut rights, SendFlags::NOSIGNAL)
            .map_err(Failure::of("a socket for eventfds"))
    });
    let _ = std::fs::remove_file(&place);
    given.map(|_| both)
}

fn receive(raw: &mut Raw) -> Result<[OwnedFd; 2]> {
    let place = meeting(raw.receive_number()?);
    let stream = UnixStream::connect(place).map_err(Failure::of("a socket for eventfds"))?;
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(2))];
    let mut rights = RecvAncillaryBuffer::new(&mut space);
    let mut byte = [0];
    recvmsg(&stream, &mut [IoSliceMut::new(&mut byte)], &mut rights, RecvFlags::CMSG_CLOEXEC)
        .map_err(Failure::of("a socket for eventfds"))?;
    let fds = rights.drain().filter_map(|message| match message {
        RecvAncillaryMessage::ScmRights(fds) => Some(fds),
        _ => None,
    });
    let fds: Vec<OwnedFd> = fds.flatten().collect();
    <[OwnedFd; 2]>::try_from(fds).map_err(|_| Failure::new("the other end gave no eventfds"))
}
