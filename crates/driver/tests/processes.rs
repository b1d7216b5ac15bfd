//! Processes that exit, are stopped, or are killed.
//!
//! The other process is this test program again: it runs the test `child` with a task in its environment.

#![allow(missing_docs, unsafe_code)]

mod common;

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use common::*;
use uwarp_driver::{Disconnect, Rtr, StreamParams};
use uwarp_rnic::qp::QpState;
use uwarp_rnic::{SendOp, WcStatus};

const SEND: SendOp = SendOp::Send { invalidate: None };
const TASK: &str = "UWARP_TEST_CHILD";

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

    fn code(&mut self) -> Option<i32> {
        let end = Instant::now() + LIMIT;
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
    attach(&end, to_parent(port), StreamParams { crc: false, ..plain() });
    end.send(SendOp::Write { stag: 1, to: 0 }, &[end.sge(0, AMOUNT)]);
    assert_eq!(end.poll().status, WcStatus::Success);
    std::process::exit(0);
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
    assert_eq!(process.code(), Some(0));
}

/// Receives and sends back, until the peer goes.
fn serve(port: u16) {
    let end = End::new(1 << 20);
    for _ in 0..100 {
        end.recv(&[end.sge(0, 1 << 20)]);
    }
    let params = StreamParams { initiator: false, rtr: Rtr::Expect, wait_first_fpdu: true, ..uwarp() };
    let mut socket = to_parent(port);
    socket.write_all(&end.mr.stag().to_be_bytes()).unwrap();
    socket.write_all(&end.addr().to_be_bytes()).unwrap();
    attach(&end, socket, params);
    end.watch.wait_end();
    std::process::exit(0);
}

/// A process that serves, and the connection to it.
fn served() -> (Process, End, u32, u64) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let process = Process::start(&format!("serve {}", listener.local_addr().unwrap().port()));
    let (mut socket, _) = listener.accept().unwrap();
    let (mut stag, mut addr) = ([0; 4], [0; 8]);
    socket.read_exact(&mut stag).unwrap();
    socket.read_exact(&mut addr).unwrap();
    let end = End::new(1 << 20);
    attach(&end, socket, StreamParams { rtr: Rtr::SendWrite, ..uwarp() });
    (process, end, u32::from_be_bytes(stag), u64::from_be_bytes(addr))
}

#[test]
fn a_killed_peer_fails_what_is_outstanding() {
    for reads in [false, true] {
        let (process, end, stag, to) = served();
        let op = if reads {
            SendOp::Read { stag, to, invalidate_local: false }
        } else {
            SendOp::Write { stag, to }
        };
        end.send(op, &[end.sge(0, 1 << 20)]);
        assert_eq!(end.poll().status, WcStatus::Success);
        for wr_id in 100..110 {
            end.try_send(wr_id, op, &[end.sge(0, 1 << 20)]).unwrap();
        }
        drop(process);
        let mut failed = 0;
        for wr_id in 100..110 {
            let wc = end.poll();
            assert_eq!(wc.wr_id, wr_id);
            match wc.status {
                WcStatus::Success if failed == 0 => {}
                WcStatus::WrFlushErr => failed += 1,
                other => panic!("{other:?} after {failed}"),
            }
        }
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
    assert_eq!(process.code(), Some(0));
}
