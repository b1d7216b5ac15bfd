//! Processes that exit, are stopped, or are killed.
//!
//! The other process is this test program again: it runs the test `child` with a task in its environment.

#![allow(missing_docs, unsafe_code)]

mod common;

use std::fs::File;
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::fd::AsRawFd;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use common::*;
use uwarp_driver::{Disconnect, Nic, Qp, Readiness, Rtr, Source, StreamParams, UdQp};
use uwarp_proto::framing::Framing;
use uwarp_rnic::qp::{QpCaps, QpInit, QpState};
use uwarp_rnic::{Cq, Mr, Pd, RecvWr, SendFlags, SendOp, SendWr, Sge, WcStatus};

const SEND: SendOp = SendOp::Send { invalidate: None };
const TASK: &str = "UWARP_TEST_CHILD";
/// Exit status of a child that has done its task. Not 0: a test program that finds no test of the name it was
/// given exits with 0.
const DONE: i32 = 42;

/// Ends the child however the test ends.
struct Process(Child);
impl Drop for Process {
    fn drop(&mut self) {
        // Gone already where all is well.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}
impl Process {
    fn start(task: &str) -> Self {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["--exact", "child", "--nocapture"]).env(TASK, task).stdout(Stdio::null());
        Self(command.spawn().unwrap())
    }

    fn signal(&self, signal: i32) {
        // SAFETY: a process that this test started and has not waited for.
        assert_eq!(unsafe { libc::kill(self.0.id().cast_signed(), signal) }, 0);
    }

    /// Stops all of its threads, and returns when they stand.
    fn stop(&self) {
        self.signal(libc::SIGSTOP);
        let tasks = format!("/proc/{}/task", self.0.id());
        let stands = |task: std::io::Result<std::fs::DirEntry>| {
            // A thread may end before it is stopped.
            let stat = std::fs::read_to_string(task.unwrap().path().join("stat")).unwrap_or_default();
            stat.rsplit(") ").next().is_some_and(|state| state.starts_with('T'))
        };
        let end = Instant::now() + LIMIT;
        while !std::fs::read_dir(&tasks).unwrap().all(stands) {
            assert!(Instant::now() < end, "the process does not stop");
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    fn code(&mut self) -> Option<i32> {
        // Longer than the process's own waits.
        let end = Instant::now() + 2 * LIMIT;
        loop {
            if let Some(status) = self.0.try_wait().unwrap() {
                return status.code();
            }
            assert!(Instant::now() < end, "the process does not end");
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

#[test]
fn child() {
    let Ok(task) = std::env::var(TASK) else { return };
    let words: Vec<&str> = task.split(' ').collect();
    match words[..] {
        ["exit_in_handler", micros] => exit_in_handler(micros.parse().unwrap()),
        ["send_and_exit", port] => send_and_exit(port.parse().unwrap()),
        ["idle"] => idle(),
        ["memory"] => memory(),
        ["forks"] => forks(),
        ["fork_behind_a_group"] => fork_behind_a_group(),
        ["panic"] => panic_in_background(),
        ["serve", port] => serve(port.parse().unwrap()),
        ref other => panic!("{other:?}"),
    }
}

fn plain() -> StreamParams {
    StreamParams { rtr: Rtr::None, emss: 0, ..StreamParams::default() }
}

fn to_parent(port: u16) -> TcpStream {
    TcpStream::connect(("127.0.0.1", port)).unwrap()
}

extern "C" fn exit_now(_: libc::c_int) {
    // SAFETY: not to be called in a handler, says the standard; programs do it all the same.
    unsafe { libc::exit(7) }
}

fn exit_in_handler(micros: u64) {
    let (end, peer) = with_raw_peer(plain(), 4096);
    std::thread::spawn(move || std::io::copy(&mut &peer, &mut std::io::sink()));
    // SAFETY: a handler that ends the process; plain C data.
    let me = unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = exit_now as *const () as usize;
        libc::sigaction(libc::SIGUSR1, &raw const action, std::ptr::null_mut());
        libc::pthread_self()
    };
    std::thread::spawn(move || {
        std::thread::sleep(Duration::from_micros(20_000 + micros));
        // SAFETY: that thread goes on until the process ends.
        unsafe { libc::pthread_kill(me, libc::SIGUSR1) };
    });
    loop {
        end.send(SEND, &[end.sge(0, 64)]);
        end.poll();
        end.qp.query();
    }
}

#[test]
fn a_signal_handler_that_exits_is_not_caught_in_our_locks() {
    for round in 0..24 {
        let mut process = Process::start(&format!("exit_in_handler {}", round * 37));
        assert_eq!(process.code(), Some(7));
    }
}

const AMOUNT: u32 = 3 << 20;

fn send_and_exit(port: u16) {
    let end = End::new(AMOUNT as usize);
    attach(&end, to_parent(port), StreamParams { framing: Framing::PLAIN, ..plain() });
    end.send(SendOp::Write { stag: 1, to: 0 }, &[end.sge(0, AMOUNT)]);
    assert_eq!(end.poll().status, WcStatus::Success);
    std::process::exit(DONE);
}

#[test]
fn what_was_accepted_arrives_although_the_process_exits_with_input_unread() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let mut process = Process::start(&format!("send_and_exit {}", listener.local_addr().unwrap().port()));
    let (mut peer, _) = listener.accept().unwrap();
    peer.set_read_timeout(Some(LIMIT)).unwrap();
    // Sends that find no receive stay in the socket.
    for msn in 1..=100 {
        write_all(&peer, &send_message(msn, &[1; 4000]));
    }
    let mut first = [0; 1 << 20];
    peer.read_exact(&mut first).unwrap();
    let mut rest = Vec::new();
    // No reset, and the whole message.
    peer.read_to_end(&mut rest).unwrap();
    assert!(first.len() + rest.len() > AMOUNT as usize);
    drop(peer);
    assert_eq!(process.code(), Some(DONE));
}

/// How often the threads of this process went to sleep, all in all.
fn sleeps() -> u64 {
    let tasks = std::fs::read_dir("/proc/self/task").unwrap();
    tasks
        .map(|task| {
            let status = std::fs::read_to_string(task.unwrap().path().join("status")).unwrap();
            let line = status.lines().find_map(|line| line.strip_prefix("voluntary_ctxt_switches:"));
            line.unwrap().trim().parse::<u64>().unwrap()
        })
        .sum()
}

/// Connected, polled and blocked on once, and then at rest.
fn idle() {
    let (a, b) = connect(uwarp(), 4096);
    for _ in 0..100 {
        b.recv(&[b.sge(0, 64)]);
        a.send(SEND, &[a.sge(0, 64)]);
        a.poll();
        b.poll();
    }
    for _ in 0..20_000 {
        assert_eq!(a.nic.poll_cq(&a.cq, 1, |_| ()), 0);
    }
    let stalled = connect(uwarp(), 4096);
    stalled.0.send(SEND, &[stalled.0.sge(0, 64)]);
    stalled.0.poll();
    a.cq.arm(false);
    let channel = a.channel.clone();
    std::thread::spawn(move || channel.get());
    // On a busy machine the threads come to rest late. What disturbs their rest does so all the time.
    let end = Instant::now() + LIMIT;
    loop {
        let (before, cpu_before) = (sleeps(), cpu());
        std::thread::sleep(Duration::from_millis(700));
        let (slept, worked) = (sleeps() - before, cpu() - cpu_before);
        // This thread has slept, and counted.
        if slept <= 4 && worked < Duration::from_millis(200) {
            std::process::exit(DONE);
        }
        assert!(Instant::now() < end, "{slept} sleeps, {worked:?} of processor time");
    }
}

/// Processor time of this process.
fn cpu() -> Duration {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
    Duration::new(time.tv_sec.unsigned_abs(), time.tv_nsec as u32)
}

/// Many connections that were used once, all their receives posted.
fn memory() {
    const CONNECTIONS: usize = 200;
    let nic = Nic::open().unwrap();
    let (pd, events) = (Pd::new(), Arc::new(Events::default()));
    let cq = Cq::new(100_000, 0, None, events.clone());
    let mut area = vec![0u8; 4096].into_boxed_slice();
    let addr = address(&mut area);
    let mr = Mr::register(&pd, addr, 4096, addr, all_rights()).unwrap();
    let sges = [Sge { addr, length: 64, lkey: mr.stag() }];
    let caps =
        QpCaps { max_send_wr: 16, max_recv_wr: 16, max_send_sge: 1, max_recv_sge: 1, max_inline_data: 0 };
    let attach = |socket: TcpStream, params| {
        let (send_cq, recv_cq, pd) = (cq.clone(), cq.clone(), pd.clone());
        let async_sink = events.clone();
        let init = QpInit { pd, send_cq, recv_cq, srq: None, caps, sq_sig_all: true, cookie: 0, async_sink };
        let qp = Qp::create(&nic, init).unwrap();
        qp.modify(&to(QpState::Init)).unwrap();
        socket.set_nonblocking(true).unwrap();
        qp.attach(socket.into(), params, Arc::new(Watch::default())).unwrap();
        qp
    };
    let heap = || {
        // SAFETY: no argument, plain data.
        let info = unsafe { libc::mallinfo() };
        info.uordblks + info.hblkhd
    };
    let mut before = 0;
    let mut pairs = Vec::with_capacity(2 * CONNECTIONS);
    for i in 0..CONNECTIONS + 10 {
        if i == 10 {
            before = heap();
        }
        let (a, b) = sockets();
        let a = attach(a, StreamParams { rtr: Rtr::SendWrite, ..uwarp() });
        let b =
            attach(b, StreamParams { initiator: false, rtr: Rtr::Expect, wait_first_frame: true, ..uwarp() });
        for (qp, peer) in [(&a, &b), (&b, &a)] {
            for wr_id in 0..16 {
                peer.post_recv(std::iter::once(RecvWr { wr_id, sges: &sges })).unwrap();
                let op = SEND;
                let wr = SendWr { wr_id, op, flags: SendFlags::empty(), sges: &sges };
                qp.post_send(std::iter::once(wr)).unwrap();
            }
            let mut done = 0;
            while done < 32 {
                done += nic.poll_cq(&cq, 16, |wc| assert_eq!(wc.status, WcStatus::Success));
            }
            for wr_id in 0..16 {
                peer.post_recv(std::iter::once(RecvWr { wr_id, sges: &sges })).unwrap();
            }
        }
        pairs.push((a, b));
    }
    let each = (heap() - before) as usize / (2 * CONNECTIONS);
    println!("{each} bytes for each queue pair");
    assert!(each <= 8192, "{each}");
    std::process::exit(DONE);
}

struct Broken(AtomicBool);
impl Source for Broken {
    fn ready(&self, _: Readiness) {}
    fn timeout(&self) {
        self.0.store(true, Ordering::SeqCst);
        panic!("on purpose");
    }
}

fn panic_in_background() {
    let nic = Nic::open().unwrap();
    let broken = Arc::new(Broken(false.into()));
    let token = nic.engine().new_token(broken.clone());
    nic.engine().set_timer(token, Some(Instant::now()));
    while !broken.0.load(Ordering::SeqCst) {
        std::thread::sleep(Duration::from_millis(1));
    }
    let (a, b) = connect(uwarp(), 4096);
    b.recv(&[b.sge(0, 64)]);
    a.send(SEND, &[a.sge(0, 64)]);
    assert_eq!(b.look_only().status, WcStatus::Success);
    std::process::exit(DONE);
}

#[test]
fn a_panic_does_not_end_the_background_thread() {
    assert_eq!(Process::start("panic").code(), Some(DONE));
}

/// Descriptors of this process that are sockets or belong to an event loop.
fn watched_descriptors() -> usize {
    let all = std::fs::read_dir("/proc/self/fd").unwrap();
    let links = all.filter_map(|entry| std::fs::read_link(entry.ok()?.path()).ok());
    let ours = |link: &std::path::Path| {
        let link = link.to_string_lossy().into_owned();
        link.starts_with("socket:") || link.contains("eventpoll") || link.contains("eventfd")
    };
    links.filter(|link| ours(link)).count()
}

/// Forks beside threads that post, poll and connect all the time.
fn forks() {
    let stop = AtomicBool::new(false);
    let (a, b) = connect(uwarp(), 4096);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !stop.load(Ordering::SeqCst) {
                a.send(
                    SendOp::Read { stag: b.mr.stag(), to: b.addr(), invalidate_local: false },
                    &[a.sge(0, 8)],
                );
                assert_eq!(a.poll().status, WcStatus::Success);
            }
        });
        scope.spawn(|| {
            while !stop.load(Ordering::SeqCst) {
                let (a, b) = connect(uwarp(), 64);
                a.qp.disconnect();
                b.watch.wait_end();
            }
        });
        for round in 0..60 {
            std::thread::sleep(Duration::from_millis(1));
            // SAFETY: the child calls what a forked child of a program with threads may call, and ours.
            let pid = unsafe { libc::fork() };
            if pid == 0 {
                let refused = Nic::get().is_none()
                    && a.try_send(1, SEND, &[]).is_err()
                    && a.try_recv(1, &[]).is_err()
                    && a.nic.poll_cq(&a.cq, 1, |_| ()) == 0;
                // Those of the test are not ours to close: the sockets of a connection that is being made.
                let closed = watched_descriptors() <= 8;
                // And it has a device of its own.
                let refused = refused && Nic::open().is_ok_and(|own| !Arc::ptr_eq(&own, &a.nic));
                // SAFETY: runs the handlers, ours among them.
                unsafe { libc::exit(i32::from(!(refused && closed))) }
            }
            assert!(pid > 0);
            let end = Instant::now() + LIMIT;
            let mut status = 0;
            // SAFETY: a child of this process.
            while unsafe { libc::waitpid(pid, &raw mut status, libc::WNOHANG) } == 0 {
                assert!(Instant::now() < end, "forked child {round} does not end");
                std::thread::sleep(Duration::from_micros(200));
            }
            assert_eq!(status, 0, "forked child {round}");
        }
        stop.store(true, Ordering::SeqCst);
    });
    assert_eq!((a.watch.ended(), b.watch.ended()), (None, None));
    std::process::exit(DONE);
}

/// Forks when a multicast group's socket is closed, and the program has its number for something else.
fn fork_behind_a_group() {
    const LO: u32 = 1;
    let (nic, events) = (Nic::open().unwrap(), Arc::new(Events::default()));
    let cq = Cq::new(8, 0, None, events.clone());
    let qp = UdQp::create(&nic, init(&Pd::new(), &cq, &events)).unwrap();
    qp.attach("239.77.1.2".parse().unwrap(), LO).unwrap();
    qp.destroy();
    drop(qp);
    let files: Vec<File> = (0..64).map(|_| File::open("/dev/null").unwrap()).collect();
    // SAFETY: the child looks at its descriptors, and ends.
    let pid = unsafe { libc::fork() };
    if pid == 0 {
        // SAFETY: asks for flags.
        let open = files.iter().all(|file| unsafe { libc::fcntl(file.as_raw_fd(), libc::F_GETFD) } >= 0);
        // SAFETY: ends this process.
        unsafe { libc::_exit(i32::from(!open)) }
    }
    let mut status = 0;
    // SAFETY: a child of this process.
    assert_eq!(unsafe { libc::waitpid(pid, &raw mut status, 0) }, pid);
    assert_eq!(status, 0, "the child has lost a descriptor of the program");
    std::process::exit(DONE);
}

#[test]
fn a_forked_child_keeps_the_programs_descriptors_behind_a_group() {
    assert_eq!(Process::start("fork_behind_a_group").code(), Some(DONE));
}

#[test]
fn forked_children_leave_connections_alone() {
    assert_eq!(Process::start("forks").code(), Some(DONE));
}

#[test]
fn a_queue_pair_at_rest_takes_little_memory() {
    assert_eq!(Process::start("memory").code(), Some(DONE));
}

#[test]
fn connections_at_rest_wake_nobody() {
    assert_eq!(Process::start("idle").code(), Some(DONE));
}

/// A Write completes when the peer has placed it.
fn acknowledged() -> StreamParams {
    StreamParams { placement_acks: true, ..uwarp() }
}

/// Posts receives and calls nothing more, until the peer goes.
fn serve(port: u16) {
    let end = End::new(1 << 20);
    for _ in 0..100 {
        end.recv(&[end.sge(0, 1 << 20)]);
    }
    let params =
        StreamParams { initiator: false, rtr: Rtr::Expect, wait_first_frame: true, ..acknowledged() };
    let mut socket = to_parent(port);
    socket.write_all(&end.mr.stag().to_be_bytes()).unwrap();
    socket.write_all(&end.addr().to_be_bytes()).unwrap();
    attach(&end, socket, params);
    end.watch.wait_end();
    std::process::exit(DONE);
}

/// A process that serves and whose program makes no calls after set-up, and the connection to it. In a
/// process of its own, because this one's polls would serve both ends.
fn served() -> (Process, End, u32, u64) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let process = Process::start(&format!("serve {}", listener.local_addr().unwrap().port()));
    let (mut socket, _) = listener.accept().unwrap();
    let (mut stag, mut addr) = ([0; 4], [0; 8]);
    socket.read_exact(&mut stag).unwrap();
    socket.read_exact(&mut addr).unwrap();
    let end = End::new(1 << 20);
    attach(&end, socket, StreamParams { rtr: Rtr::SendWrite, ..acknowledged() });
    (process, end, u32::from_be_bytes(stag), u64::from_be_bytes(addr))
}

#[test]
fn the_background_thread_serves_a_program_that_never_calls() {
    let (_process, end, stag, to) = served();
    for _ in 0..100 {
        end.send(SendOp::Read { stag, to, invalidate_local: false }, &[end.sge(0, 512)]);
        assert_eq!(end.poll().status, WcStatus::Success);
    }
}

/// No receive is taken and no completion made in the target: a Write needs only its acknowledgement.
#[test]
fn a_target_that_never_calls_acknowledges_writes() {
    let (process, end, stag, to) = served();
    for _ in 0..200 {
        end.send(SendOp::Write { stag, to }, &[end.sge(0, 64)]);
        assert_eq!(end.poll().status, WcStatus::Success);
    }
    // A process that does not run acknowledges nothing: what completed above did not complete by itself.
    process.stop();
    end.send(SendOp::Write { stag, to }, &[end.sge(0, 64)]);
    for _ in 0..1000 {
        assert_eq!(end.cq.poll(1, |wc| panic!("{wc:?} of a stopped peer")), 0);
        std::thread::yield_now();
    }
    process.signal(libc::SIGCONT);
    assert_eq!(end.poll().status, WcStatus::Success);
}

#[test]
fn a_killed_peer_fails_what_is_outstanding() {
    for reads in [false, true] {
        let (process, end, stag, to) = served();
        // More than the sockets hold, and a peer that takes nothing any more.
        const LAST: u64 = 130;
        let op = if reads {
            SendOp::Read { stag, to, invalidate_local: false }
        } else {
            SendOp::Write { stag, to }
        };
        end.send(op, &[end.sge(0, 1 << 20)]);
        assert_eq!(end.poll().status, WcStatus::Success);
        process.stop();
        for wr_id in 100..LAST {
            end.try_send(wr_id, op, &[end.sge(0, 1 << 20)]).unwrap();
        }
        drop(process);
        let mut failed = 0;
        for wr_id in 100..LAST {
            let wc = end.poll();
            assert_eq!(wc.wr_id, wr_id);
            match wc.status {
                WcStatus::Success if failed == 0 => {}
                WcStatus::WrFlushErr => failed += 1,
                other => panic!("{other:?} after {failed}"),
            }
        }
        assert!(failed > 0, "nothing was outstanding");
        assert!(matches!(end.watch.wait_end(), Disconnect::Reset | Disconnect::PeerClosed));
        assert_eq!(end.qp.query().state, QpState::Err);
    }
}

#[test]
fn a_stopped_peer_holds_up_neither_a_disconnect_nor_a_destroy() {
    let (mut process, end, stag, to) = served();
    process.signal(libc::SIGSTOP);
    for wr_id in 100..130 {
        end.try_send(wr_id, SendOp::Write { stag, to }, &[end.sge(0, 1 << 20)]).unwrap();
    }
    end.qp.disconnect();
    assert_eq!(end.watch.wait_end(), Disconnect::LocalClosed);
    let mut got = 0;
    while end.cq.poll(1, |_| ()) == 1 {
        got += 1;
    }
    assert_eq!(got, 30);
    drop(end);
    // A second one, destroyed without a word.
    let (other_process, other, stag, to) = served();
    other_process.signal(libc::SIGSTOP);
    other.send(SendOp::Write { stag, to }, &[other.sge(0, 1 << 20)]);
    drop(other);
    process.signal(libc::SIGCONT);
    assert_eq!(process.code(), Some(DONE));
}
