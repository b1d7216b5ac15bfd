//! Programs that wait for a completion channel in an epoll instance of their own: its descriptor is
//! non-blocking, the sockets make it readable, and the program's calls serve them.

mod common;

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use common::{End, LIMIT, connect, uwarp};
use rustix::event::{PollFd, PollFlags, Timespec, epoll, poll};
use rustix::fs::OFlags;
use uwarp_driver::ChannelError;
use uwarp_rnic::SendOp;

#[allow(unsafe_code)]
fn fd_of(end: &End) -> BorrowedFd<'_> {
    // SAFETY: open until the channel is closed.
    unsafe { BorrowedFd::borrow_raw(end.channel.fd()) }
}

fn set_nonblocking(end: &End, on: bool) {
    rustix::fs::fcntl_setfl(fd_of(end), if on { OFlags::NONBLOCK } else { OFlags::empty() }).unwrap();
}

fn connected() -> [End; 2] {
    let (a, b) = connect(uwarp(), 4096);
    [a, b]
}

/// What a descriptor is ready for, of what was asked; waits for `limit` if that is nothing.
fn ready(fd: BorrowedFd<'_>, flags: PollFlags, limit: Duration) -> PollFlags {
    let mut fds = [PollFd::from_borrowed_fd(fd, flags)];
    let limit = Timespec { tv_sec: limit.as_secs() as i64, tv_nsec: limit.subsec_nanos().into() };
    poll(&mut fds, Some(&limit)).unwrap();
    fds[0].revents()
}

fn readable(fd: BorrowedFd<'_>) -> bool {
    ready(fd, PollFlags::IN, Duration::ZERO).contains(PollFlags::IN)
}

/// Two connected ends, the second with a non-blocking channel that its sockets ring.
fn ends() -> [End; 2] {
    let ends = connected();
    set_nonblocking(&ends[1], true);
    ends[1].cq.arm(false);
    ends
}

/// As an event loop does: sleeps until `fd` is readable, then takes an event and what has completed. Returns
/// how often the call said that there was none.
fn take(end: &End, wait: &mut dyn FnMut()) -> usize {
    let mut vain = 0;
    loop {
        wait();
        match end.channel.get() {
            Ok(cookie) => {
                assert_eq!(cookie, 7);
                end.cq.arm(false);
                return vain;
            }
            Err(ChannelError::WouldBlock) => vain += 1,
            Err(other) => panic!("{other:?}"),
        }
    }
}

fn message(from: &End, to: &End) {
    to.recv(&[to.sge(0, 64)]);
    from.send(SendOp::Send { invalidate: None }, &[from.sge(0, 64)]);
    from.poll();
}

fn drain(end: &End) -> usize {
    let mut found = 0;
    while end.nic.poll_cq(&end.cq, 16, |_| found += 1) > 0 {}
    found
}

#[test]
fn there_is_never_room_to_write() {
    let [a, b] = connected();
    let limit = Duration::from_millis(20);
    for end in [&a, &b] {
        assert_eq!(ready(fd_of(end), PollFlags::OUT, limit), PollFlags::empty());
    }
    b.cq.arm(false);
    message(&a, &b);
    assert_eq!(ready(fd_of(&b), PollFlags::IN, LIMIT), PollFlags::IN);
    assert_eq!(ready(fd_of(&b), PollFlags::OUT | PollFlags::IN, LIMIT), PollFlags::IN);
    assert_eq!(b.channel.get(), Ok(7));
}

#[test]
fn events_come_by_poll_and_by_edges() {
    let [a, b] = ends();
    let edges = epoll::create(epoll::CreateFlags::CLOEXEC).unwrap();
    let flags = epoll::EventFlags::IN | epoll::EventFlags::ET;
    epoll::add(&edges, fd_of(&b), epoll::EventData::new_u64(1), flags).unwrap();
    let other: OwnedFd = fd_of(&b).try_clone_to_owned().unwrap();
    for round in 0..60 {
        message(&a, &b);
        match round % 3 {
            0 => {
                _ = take(&b, &mut || assert!(ready(fd_of(&b), PollFlags::IN, LIMIT).contains(PollFlags::IN)))
            }
            1 => {
                _ = take(&b, &mut || {
                    assert!(ready(other.as_fd(), PollFlags::IN, LIMIT).contains(PollFlags::IN));
                })
            }
            _ => {
                // Takes everything until EAGAIN, and then waits for an edge.
                let mut got = 0;
                while got == 0 {
                    let mut events = Vec::with_capacity(4);
                    let limit = Timespec { tv_sec: LIMIT.as_secs() as i64, tv_nsec: 0 };
                    epoll::wait(&edges, rustix::buffer::spare_capacity(&mut events), Some(&limit)).unwrap();
                    assert!(!events.is_empty(), "no edge");
                    while b.channel.get().is_ok() {
                        b.cq.arm(false);
                        got += 1;
                    }
                }
            }
        }
        while drain(&b) == 0 {
            std::thread::yield_now();
        }
        while b.channel.get().is_ok() {
            b.cq.arm(false);
        }
    }
}

#[test]
fn an_event_arrives_although_nobody_looks() {
    let [a, b] = ends();
    for _ in 0..5 {
        message(&a, &b);
        b.look_only();
        take(&b, &mut || assert!(ready(fd_of(&b), PollFlags::IN, LIMIT).contains(PollFlags::IN)));
    }
}

#[test]
fn several_threads_share_the_events() {
    let [a, b] = ends();
    let taken = AtomicUsize::new(0);
    let end = Instant::now() + LIMIT;
    std::thread::scope(|scope| {
        for _ in 0..3 {
            scope.spawn(|| {
                while taken.load(Ordering::SeqCst) < 100 {
                    assert!(Instant::now() < end, "an event is missing");
                    ready(fd_of(&b), PollFlags::IN, Duration::from_millis(10));
                    if b.channel.get().is_ok() {
                        b.cq.arm(false);
                        taken.fetch_add(drain(&b), Ordering::SeqCst);
                    }
                }
            });
        }
        for _ in 0..100 {
            message(&a, &b);
        }
    });
}

/// A blocking descriptor is readable only with an event, also after it was non-blocking.
#[test]
fn a_descriptor_that_blocks_again_is_readable_only_with_an_event() {
    let [a, b] = ends();
    message(&a, &b);
    take(&b, &mut || {});
    while drain(&b) == 0 {}
    while b.channel.get().is_ok() {}
    set_nonblocking(&b, false);
    b.cq.arm(false);
    message(&a, &b);
    assert_eq!(b.channel.get(), Ok(7));
    message(&a, &b);
    b.look_only();
    b.look_only();
    assert!(!readable(fd_of(&b)), "not armed");
    b.cq.arm(false);
    message(&a, &b);
    assert_eq!(ready(fd_of(&b), PollFlags::IN, LIMIT), PollFlags::IN);
    assert_eq!(b.channel.get(), Ok(7));
}

/// The descriptor was readable because of a socket, and the program has made it blocking since: it must not
/// wait for ever in a call of which `poll` has said that it need not wait.
#[test]
fn a_descriptor_that_was_readable_in_vain_does_not_block() {
    let [a, b] = ends();
    message(&a, &b);
    take(&b, &mut || {});
    while drain(&b) == 0 {}
    while b.channel.get().is_ok() {
        b.cq.arm(false);
    }
    // It brings no event: what acknowledges, or a part of a message, is such input.
    b.cq.arm(true);
    message(&a, &b);
    assert_eq!(ready(fd_of(&b), PollFlags::IN, LIMIT), PollFlags::IN);
    set_nonblocking(&b, false);
    assert_eq!(b.channel.get(), Ok(7));
    // From now on it is as ever.
    while drain(&b) == 0 {}
    b.cq.arm(true);
    message(&a, &b);
    b.look_only();
    assert!(!readable(fd_of(&b)), "nothing solicited");
}

#[test]
fn a_channel_is_closed_while_its_sockets_are_open() {
    let [a, b] = ends();
    b.channel.close();
    message(&a, &b);
    b.look_only();
    b.cq.arm(false);
    message(&a, &b);
    b.look_only();
}
