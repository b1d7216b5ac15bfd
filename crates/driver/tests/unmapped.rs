//! Registered memory that the program has unmapped, and whose the faults are.
//!
//! Everything runs in processes of its own: this test program again, with a task in its environment.

#![allow(missing_docs, unsafe_code)]
#![cfg(all(target_arch = "x86_64", target_os = "linux"))]

mod common;

use std::os::unix::process::ExitStatusExt;
use std::process::{Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use common::*;
use uwarp_driver::{Disconnect, StreamParams};
use uwarp_proto::framing::Framing;
use uwarp_rnic::{Mr, SendFlags, SendOp, SendWr, Sge, WcStatus};

const SEND: SendOp = SendOp::Send { invalidate: None };
const TASK: &str = "UWARP_TEST_UNMAPPED";
/// Exit status of a child that has done its task. Not 0: a test program that finds no test of the name it was
/// given exits with 0.
const DONE: i32 = 42;
const SIZE: usize = 2 << 20;
const PAGE: usize = 4096;

/// How the memory goes.
const WAYS: [&str; 3] = ["munmap", "mprotect", "truncate"];

/// Runs this program with a task, to its end.
fn run(task: &str, guard: &str) -> ExitStatus {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", "child", "--nocapture"]).stdout(Stdio::null());
    let mut child = command.env(TASK, task).env("UWARP_GUARD", guard).spawn().unwrap();
    let end = Instant::now() + 2 * LIMIT;
    loop {
        if let Some(status) = child.try_wait().unwrap() {
            return status;
        }
        if Instant::now() > end {
            let _ = child.kill();
            let _ = child.wait();
            panic!("{task}: the process does not end");
        }
        std::thread::sleep(Duration::from_millis(1));
    }
}

fn survives(task: &str) {
    let status = run(task, "on");
    assert_eq!(status.code(), Some(DONE), "{task}: {status}");
}

fn dies(task: &str, guard: &str, signal: i32) {
    let status = run(task, guard);
    assert_eq!(status.signal(), Some(signal), "{task}: {status}");
}

#[test]
fn child() {
    let Ok(task) = std::env::var(TASK) else { return };
    // No core files of what dies on purpose.
    // SAFETY: plain data.
    unsafe { libc::setrlimit(libc::RLIMIT_CORE, &libc::rlimit { rlim_cur: 0, rlim_max: 0 }) };
    let words: Vec<&str> = task.split(' ').collect();
    match words[..] {
        ["unmapped", case, way] => WITH_SIZES.iter().for_each(|size| unmapped(case, way, *size)),
        ["half", way] => half(way),
        ["own_handler", flavour] => own_handler(flavour),
        ["default", cause] => default_action(libc::SIG_DFL, cause),
        ["ignored", cause] => default_action(libc::SIG_IGN, cause),
        ["one_time_handler"] => one_shot(),
        ref other => panic!("{other:?}"),
    }
    std::process::exit(DONE);
}

/// Staged and checked; referenced, not copied; large enough to be placed directly; larger than the sockets
/// hold.
const WITH_SIZES: [u32; 4] = [64, 9000, 60_000, SIZE as u32];

/// Memory that can be taken away.
struct Area {
    at: *mut libc::c_void,
    file: Option<std::fs::File>,
}

impl Area {
    fn new(way: &str) -> Self {
        let mut file = None;
        let (mut flags, mut fd) = (libc::MAP_PRIVATE | libc::MAP_ANONYMOUS, -1);
        if way == "truncate" {
            // SAFETY: a name, and no flags.
            fd = unsafe { libc::memfd_create(c"area".as_ptr(), 0) };
            // SAFETY: just made, and nobody else's.
            let new: std::fs::File = unsafe { std::os::fd::FromRawFd::from_raw_fd(fd) };
            new.set_len(SIZE as u64).unwrap();
            file = Some(new);
            flags = libc::MAP_SHARED;
        }
        // SAFETY: a new mapping.
        let at = unsafe {
            libc::mmap(std::ptr::null_mut(), SIZE, libc::PROT_READ | libc::PROT_WRITE, flags, fd, 0)
        };
        assert_ne!(at, libc::MAP_FAILED);
        Self { at, file }
    }

    fn addr(&self) -> u64 {
        self.at.expose_provenance() as u64
    }

    fn take_away(&self, way: &str) {
        self.take_away_from(way, 0);
    }

    /// What lies behind the first `kept` bytes.
    fn take_away_from(&self, way: &str, kept: usize) {
        let at = self.at.wrapping_byte_add(kept);
        // SAFETY: the mapping made above, to which nothing of this program refers but the region.
        unsafe {
            match way {
                "munmap" => assert_eq!(libc::munmap(at, SIZE - kept), 0),
                "mprotect" => assert_eq!(libc::mprotect(at, SIZE - kept, libc::PROT_NONE), 0),
                "truncate" => self.file.as_ref().unwrap().set_len(kept as u64).unwrap(),
                other => panic!("{other}"),
            }
        }
    }
}

fn exchange(a: &End, b: &End) {
    b.recv(&[b.sge(0, 64)]);
    a.send(SEND, &[a.sge(0, 64)]);
    assert_eq!(a.poll().status, WcStatus::Success);
    assert_eq!(b.poll().status, WcStatus::Success);
}

/// One end's memory is unmapped before it is used in this way; the other connection continues.
fn unmapped(case: &str, way: &str, size: u32) {
    let (c, d) = connect(uwarp(), PAGE);
    exchange(&c, &d);
    let stranger = StreamParams::default();
    for params in [uwarp(), stranger, StreamParams { framing: Framing::PLAIN, ..uwarp() }] {
        let crc = params.framing != Framing::PLAIN;
        let (a, b) = connect(params, SIZE);
        exchange(&a, &b);
        let area = Area::new(way);
        let (addr, here) = (area.addr(), if matches!(case, "write" | "recv" | "source") { &b } else { &a });
        let mr = Mr::register(&here.pd, addr, SIZE as u64, addr, all_rights()).unwrap();
        let gone = Sge { addr, length: size, lkey: mr.stag() };
        area.take_away(way);
        let cause = match case {
            "write" => {
                a.send(SendOp::Write { stag: mr.stag(), to: addr }, &[a.sge(0, size)]);
                b.watch.wait_end()
            }
            "recv" => {
                b.recv(&[gone]);
                a.send(SEND, &[a.sge(0, size)]);
                let wc = b.look_only();
                assert_eq!((wc.wr_id, wc.status), (2, WcStatus::LocProtErr));
                b.watch.wait_end()
            }
            "source" => {
                let op = SendOp::Read { stag: mr.stag(), to: addr, invalidate_local: false };
                a.send(op, &[a.sge(0, size)]);
                assert_eq!(a.look_only().status, WcStatus::RemOpErr);
                b.watch.wait_end()
            }
            "sink" => {
                let op = SendOp::Read { stag: b.mr.stag(), to: b.addr(), invalidate_local: false };
                a.send(op, &[gone]);
                assert_eq!(a.look_only().status, WcStatus::LocProtErr);
                a.watch.wait_end()
            }
            "send" => {
                b.recv(&[b.sge(0, size)]);
                // Before it in the queue, and good.
                let op = SendOp::Write { stag: b.mr.stag(), to: b.addr() };
                let both = [
                    SendWr { wr_id: 5, op, flags: SendFlags::SIGNALED, sges: &[a.sge(0, 9000)] },
                    SendWr { wr_id: 6, op: SEND, flags: SendFlags::SIGNALED, sges: &[gone] },
                ];
                a.qp.post_send(both.into_iter()).unwrap();
                let first = a.look_only();
                assert_eq!((first.wr_id, first.status), (5, WcStatus::Success));
                let second = a.look_only();
                assert_eq!((second.wr_id, second.status), (6, WcStatus::LocProtErr));
                assert_eq!(b.look_only().status, WcStatus::WrFlushErr);
                a.watch.wait_end()
            }
            other => panic!("{other}"),
        };
        // Without CRC the kernel is the first to read what is sent by reference, and the header is out by
        // then.
        let hole = case == "send" && !crc && size >= 9000;
        assert_eq!(matches!(cause, Disconnect::Reset), hole, "{case} {size}: {cause:?}");
        assert_eq!(matches!(cause, Disconnect::Sent(_)), !hole, "{case} {size}: {cause:?}");
        a.watch.wait_end();
        b.watch.wait_end();
        mr.deregister();
        if way != "munmap" {
            // SAFETY: the mapping made above.
            unsafe { libc::munmap(area.at, SIZE) };
        }
    }
    exchange(&d, &c);
    assert_eq!((c.watch.ended(), d.watch.ended()), (None, None));
}

/// A part of the message is sent before the kernel finds that the rest is gone. The sender took that for a
/// full socket; but if the socket was watched already, the kernel never reported that it has room, as it
/// always had.
fn half(way: &str) {
    for kept in [PAGE, 5 * PAGE, SIZE / 2 + PAGE] {
        let params = StreamParams { framing: Framing::PLAIN, ..uwarp() };
        let (a, b) = connect(params, SIZE);
        // More than the sockets hold: now it is watched.
        a.send(SendOp::Write { stag: b.mr.stag(), to: b.addr() }, &[a.sge(0, SIZE as u32)]);
        assert_eq!(a.poll().status, WcStatus::Success);
        let area = Area::new(way);
        let mr = Mr::register(&a.pd, area.addr(), SIZE as u64, area.addr(), all_rights()).unwrap();
        area.take_away_from(way, kept);
        b.recv(&[b.sge(0, SIZE as u32)]);
        a.send(SEND, &[Sge { addr: area.addr(), length: SIZE as u32, lkey: mr.stag() }]);
        assert_eq!(a.look_only().status, WcStatus::LocProtErr, "{kept}");
        assert_eq!(b.look_only().status, WcStatus::WrFlushErr, "{kept}");
        assert_eq!(a.watch.wait_end(), Disconnect::Reset);
        b.watch.wait_end();
        mr.deregister();
    }
}

#[test]
fn b10_a_send_of_which_a_part_is_gone_costs_the_connection_only() {
    WAYS.iter().for_each(|way| survives(&format!("half {way}")));
}

#[test]
fn a_write_into_memory_that_is_gone_costs_the_connection_only() {
    WAYS.iter().for_each(|way| survives(&format!("unmapped write {way}")));
}

#[test]
fn a_receive_whose_memory_is_gone_costs_the_connection_only() {
    WAYS.iter().for_each(|way| survives(&format!("unmapped recv {way}")));
}

#[test]
fn a_send_whose_memory_is_gone_costs_the_connection_only() {
    WAYS.iter().for_each(|way| survives(&format!("unmapped send {way}")));
}

#[test]
fn a_read_of_memory_that_is_gone_costs_the_connection_only() {
    WAYS.iter().for_each(|way| survives(&format!("unmapped source {way}")));
}

#[test]
fn a_read_into_memory_that_is_gone_costs_the_connection_only() {
    WAYS.iter().for_each(|way| survives(&format!("unmapped sink {way}")));
}

static AT: AtomicUsize = AtomicUsize::new(0);
static CALLS: AtomicUsize = AtomicUsize::new(0);

/// Makes the page usable on which the program faulted.
extern "C" fn mend(signal: i32, info: *mut libc::siginfo_t, _: *mut libc::c_void) {
    // SAFETY: called by the kernel, or as the kernel would; the page belongs to this test.
    unsafe {
        assert_eq!((*info).si_addr() as usize, AT.load(Ordering::SeqCst));
        assert_eq!((signal, (*info).si_code), (libc::SIGSEGV, 2));
        CALLS.fetch_add(1, Ordering::SeqCst);
        libc::mprotect((*info).si_addr(), PAGE, libc::PROT_READ | libc::PROT_WRITE);
    }
}

extern "C" fn mend_simply(signal: i32) {
    assert_eq!(signal, libc::SIGSEGV);
    CALLS.fetch_add(1, Ordering::SeqCst);
    let page = std::ptr::with_exposed_provenance_mut(AT.load(Ordering::SeqCst));
    // SAFETY: the page belongs to this test.
    unsafe { libc::mprotect(page, PAGE, libc::PROT_READ | libc::PROT_WRITE) };
}

fn handle(signal: i32, handler: usize, flags: i32) {
    // SAFETY: plain data, of which zeros are valid; the handlers do what is allowed in them.
    unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        (action.sa_sigaction, action.sa_flags) = (handler, flags);
        assert_eq!(libc::sigaction(signal, &raw const action, std::ptr::null_mut()), 0);
    }
}

/// A page without rights, at which this thread then faults.
fn fault() {
    let area = Area::new("mprotect");
    area.take_away("mprotect");
    AT.store(area.addr() as usize, Ordering::SeqCst);
    // SAFETY: the mapping just made; the handler, if there is one, mends it.
    unsafe { std::ptr::with_exposed_provenance_mut::<u8>(area.addr() as usize).write_volatile(1) };
}

/// The program handles its own faults: before the first region and after, and beside faults of ours.
fn own_handler(flavour: &str) {
    let simple = mend_simply as *const () as usize;
    let full = mend as *const () as usize;
    let (handler, flags) = match flavour {
        "simple" => (simple, 0),
        "full" => (full, libc::SA_SIGINFO),
        "on_its_stack" => (full, libc::SA_SIGINFO | libc::SA_ONSTACK | libc::SA_NODEFER),
        other => panic!("{other}"),
    };
    handle(libc::SIGSEGV, handler, flags);
    fault();
    unmapped("write", "mprotect", 64);
    assert_eq!(CALLS.load(Ordering::SeqCst), 1);
    fault();
    assert_eq!(CALLS.load(Ordering::SeqCst), 2);
    unmapped("recv", "truncate", 64);
    std::thread::spawn(fault).join().unwrap();
    assert_eq!(CALLS.load(Ordering::SeqCst), 3);
}

#[test]
fn a_programs_own_faults_go_to_its_own_handler() {
    ["simple", "full", "on_its_stack"].iter().for_each(|flavour| survives(&format!("own_handler {flavour}")));
}

/// No handler takes the signal.
fn default_action(action: usize, cause: &str) {
    handle(libc::SIGSEGV, action, 0);
    let end = End::new(PAGE);
    match cause {
        "fault" => fault(),
        // SAFETY: to this process.
        "kill" => assert_eq!(unsafe { libc::kill(libc::getpid(), libc::SIGSEGV) }, 0),
        // SAFETY: to this thread.
        "raise" => assert_eq!(unsafe { libc::raise(libc::SIGSEGV) }, 0),
        "peer" => unmapped("write", "mprotect", 64),
        other => panic!("{other}"),
    }
    std::thread::sleep(Duration::from_millis(100));
    drop(end);
}

#[test]
fn the_default_action_is_what_it_was() {
    for cause in ["fault", "kill", "raise"] {
        dies(&format!("default {cause}"), "on", libc::SIGSEGV);
    }
    // A fault cannot be ignored.
    dies("ignored fault", "on", libc::SIGSEGV);
    survives("ignored kill");
    survives("ignored peer");
}

#[test]
fn without_the_guard_the_fault_is_the_programs() {
    survives("default peer");
    dies("default peer", "off", libc::SIGSEGV);
}

/// A handler for one time only.
fn one_shot() {
    handle(libc::SIGSEGV, mend as *const () as usize, libc::SA_SIGINFO | libc::SA_RESETHAND);
    unmapped("write", "mprotect", 64);
    fault();
    assert_eq!(CALLS.load(Ordering::SeqCst), 1);
    fault();
}

#[test]
fn a_handler_for_one_time_is_called_once() {
    dies("one_time_handler", "on", libc::SIGSEGV);
}
