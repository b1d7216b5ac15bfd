//! C programs compiled against the distribution's headers. Here is what needs no connection; programs that
//! connect are in `conformance/`.

mod common;

use std::net::{Ipv4Addr, TcpListener, UdpSocket};

#[test]
fn vendor_libraries_say_that_the_device_is_not_theirs() {
    common::passes("vendor", &["-lmlx5", "-lefa", "-libverbs"]);
}

#[test]
fn objects_without_a_connection() {
    common::passes("objects", &["-libverbs"]);
}

#[test]
fn extended_completion_queues_and_work_request_builders() {
    common::passes("extended", &["-libverbs"]);
}

#[test]
fn a_forked_child_cannot_use_what_its_parent_has() {
    common::passes("forked", &["-libverbs"]);
}

#[test]
fn nothing_starts_before_a_device_is_opened() {
    common::passes("idle", &["-libverbs"]);
}

#[test]
fn the_view_decides_what_the_device_passes_for() {
    let program = common::compile("view", &["-libverbs"]);
    let seen = ["iwarp", "roce", "ib"].map(|view| common::run(&program, &[("UWARP_VIEW", view)]));
    assert_eq!(
        seen,
        [
            "node 4 transport 1 link layer 2 gid type 0 first state 1\n",
            "node 1 transport 0 link layer 2 gid type 2 first state 0\n",
            "node 1 transport 0 link layer 1 gid type 0 first state 0\n",
        ]
    );
}

/// So many ports one after the other that nothing uses, each held in TCP and in UDP.
fn free_ports(count: u16) -> (u16, Vec<(TcpListener, UdpSocket)>) {
    let any = Ipv4Addr::UNSPECIFIED;
    let from = |first: u16| -> std::io::Result<Vec<_>> {
        let last = first.checked_add(count - 1).ok_or(std::io::ErrorKind::AddrInUse)?;
        (first..=last)
            .map(|port| Ok((TcpListener::bind((any, port))?, UdpSocket::bind((any, port))?)))
            .collect()
    };
    // Below those that the kernel gives to others meanwhile, and that tests beside this one take.
    let found = (0..500).find_map(|i| {
        let first = 16_000 + (std::process::id() as u16).wrapping_add(i * 23) % 2400;
        Some((first, from(first).ok()?))
    });
    found.expect("some ports are free")
}

#[test]
fn queue_pairs_take_ports_of_the_range_that_are_free_in_tcp_and_udp() {
    let (first, mut held) = free_ports(4);
    let range = format!("{first}-{}", first + 3);
    let program = common::compile("numbers", &["-libverbs"]);
    let ports_of = |queue_pairs: u32| {
        common::run_with(&program, &[queue_pairs.to_string()], &[("UWARP_PORT_RANGE", &range)])
    };
    let all_taken = ports_of(1);
    for word in ["no port for queue pairs", &format!("in UWARP_PORT_RANGE={range}"), "Cannot allocate memory"]
    {
        assert!(all_taken.contains(word), "{word:?} is not in: {all_taken}");
    }
    // Free again are the second in UDP, the third and the fourth.
    held.truncate(2);
    let (second, _) = held.pop().unwrap();
    assert_eq!(ports_of(257), format!("{}\n{}\n", first + 2, first + 3));
    assert_eq!(ports_of(256), format!("{}\n", first + 2));
    drop((held, second));
    assert_eq!(ports_of(257), format!("{first}\n{}\n", first + 1));
}

#[test]
fn the_log_says_why_a_call_was_refused() {
    let program = common::compile("refused", &["-libverbs"]);
    let text = common::run(&program, &[("UWARP_LOG", "debug")]);
    assert!(text.contains("ibv_create_cq: cqe is outside what the device allows"), "{text}");
}

#[test]
fn the_log_says_that_a_trace_cannot_be_written() {
    let program = common::compile("refused", &["-libverbs"]);
    let text = common::run(&program, &[("UWARP_TRACE", "/no such directory/trace.txt")]);
    assert!(text.contains("no trace: cannot write /no such directory/trace.txt: "), "{text}");
}

#[test]
fn a_child_forked_while_nothing_was_open_begins_afresh() {
    common::passes("forked_before", &["-lrdmacm", "-libverbs"]);
}

/// "Resource temporarily unavailable" alone sent people to look for memory and descriptors.
#[test]
fn a_device_that_gets_no_thread_names_the_limits() {
    let program = common::compile("no_threads", &["-libverbs"]);
    let text = common::run(&program, &[("UWARP_LOG", "error")]);
    for word in ["cannot start: ", "`ulimit -u`", "pids.max", "kernel.threads-max"] {
        assert!(text.contains(word), "{word:?} is not in: {text}");
    }
}
