use super::*;

fn wait(socket: &Socket) {
    let mut fds = [rustix::event::PollFd::from_borrowed_fd(socket.fd(), rustix::event::PollFlags::IN)];
    let limit = rustix::event::Timespec { tv_sec: 10, tv_nsec: 0 };
    assert_eq!(rustix::event::poll(&mut fds, Some(&limit)), Ok(1), "nothing arrived within ten seconds");
}

fn receive(socket: &Socket, slot: usize, most: usize) -> Vec<(Vec<u8>, Incoming)> {
    let mut got = Vec::new();
    let mut buffer = vec![0; slot * most];
    wait(socket);
    socket.receive(&mut buffer, slot, most, |bytes, incoming| got.push((bytes.to_vec(), incoming))).unwrap();
    got
}

#[test]
fn datagrams_have_their_source_and_the_address_they_were_sent_to() {
    let (a, b) = (Socket::bind(0).unwrap(), Socket::bind(0).unwrap());
    let ports = (a.port().unwrap(), b.port().unwrap());
    for (from, to) in [("127.0.0.1", "127.0.0.2"), ("127.0.0.3", "127.0.0.1"), ("::1", "::1")] {
        let (from, to): (IpAddr, IpAddr) = (from.parse().unwrap(), to.parse().unwrap());
        let route = Route { to: SocketAddr::new(to, ports.1), from: Some(from) };
        assert_eq!(a.send(&[Outgoing { route: &route, bytes: b"hello" }]), Ok(1));
        let got = receive(&b, 16, 1);
        assert_eq!(got.len(), 1);
        assert_eq!(got[0].0, b"hello");
        let incoming = got[0].1;
        assert_eq!((incoming.from, incoming.to), (SocketAddr::new(from, ports.0), to));
        assert!(!incoming.truncated);
    }
}

#[test]
fn a_batch_keeps_its_order_and_a_long_datagram_is_marked() {
    let (a, b) = (Socket::bind(0).unwrap(), Socket::bind(0).unwrap());
    let route = Route { to: SocketAddr::from((Ipv4Addr::LOCALHOST, b.port().unwrap())), from: None };
    let texts: [&[u8]; 4] = [b"one", b"", b"seventeen letters", b"4"];
    let batch: Vec<Outgoing<'_>> = texts.iter().map(|bytes| Outgoing { route: &route, bytes }).collect();
    assert_eq!(a.send(&batch), Ok(4));
    let got = receive(&b, 8, 8);
    let texts: Vec<&[u8]> = got.iter().map(|(bytes, _)| &bytes[..]).collect();
    assert_eq!(texts, [&b"one"[..], b"", b"seventee", b"4"]);
    assert_eq!(got.iter().map(|(_, i)| i.truncated).collect::<Vec<_>>(), [false, false, true, false]);
    let mut buffer = [0; 64];
    assert_eq!(b.receive(&mut buffer, 8, 8, |_, _| ()), Err(Errno::AGAIN));
}

/// All of them in few calls; the system decides how it passes them.
#[test]
fn datagrams_that_the_system_splits_and_joins_arrive_as_they_were_sent() {
    let (a, b) = (Socket::bind(0).unwrap(), Socket::bind(0).unwrap());
    b.make_room();
    for ip in [IpAddr::from(Ipv4Addr::LOCALHOST), Ipv6Addr::LOCALHOST.into()] {
        let route = Route { to: SocketAddr::new(ip, b.port().unwrap()), from: Some(ip) };
        // Runs of one length, with a shorter one at their end, and some that are alone.
        let lengths = [100, 100, 100, 7, 2000, 2000, 9, 9, 9, 9, 1, 0, 0, 50, 60, 60];
        let texts: Vec<Vec<u8>> = (1..).zip(lengths).map(|(i, length)| vec![i; length]).collect();
        let batch: Vec<_> = texts.iter().map(|bytes| Outgoing { route: &route, bytes }).collect();
        assert_eq!(a.send(&batch), Ok(batch.len()));
        let mut got = Vec::new();
        while got.len() < texts.len() {
            got.extend(receive(&b, SLOT, 4));
        }
        assert!(got.iter().map(|(bytes, _)| bytes).eq(&texts));
        assert!(got.iter().all(|(_, incoming)| incoming.to == ip && !incoming.truncated));
    }
}

/// One slot has what was sent together, or the datagrams come in several.
#[test]
fn a_slot_says_what_it_holds() {
    let (a, b) = (Socket::bind(0).unwrap(), Socket::bind(0).unwrap());
    b.make_room();
    let route = Route { to: SocketAddr::from((Ipv4Addr::LOCALHOST, b.port().unwrap())), from: None };
    let bytes: Vec<u8> = (0..95).collect();
    assert_eq!(a.send_run(&route, Marks::default(), &bytes, 10), Ok(10));
    let (mut buffer, mut got, mut count) = (vec![0; SLOT * 4], Vec::new(), 0);
    while count < 10 {
        wait(&b);
        let received = b.receive_slots(&mut buffer, SLOT, 4, |slot| {
            let incoming = slot.incoming();
            let before = got.len();
            assert_eq!(slot.each().map(|(_, each)| each.len).sum::<usize>(), incoming.len);
            assert!(slot.datagrams().eq(slot.each().map(|(bytes, _)| bytes)));
            assert!(!incoming.truncated && incoming.from.port() == a.port().unwrap());
            got.extend(slot.datagrams().map(<[u8]>::to_vec));
            assert_eq!(got.len() - before, slot.count());
        });
        count += received.unwrap().datagrams;
    }
    assert!(got.iter().map(|each| &each[..]).eq(bytes.chunks(10)));
}

#[test]
fn only_the_last_datagram_of_a_slot_is_truncated() {
    let from = SocketAddr::from((Ipv4Addr::LOCALHOST, 7));
    let (to, bytes) = (from.ip(), [1; 25]);
    let of = |len: usize, length, truncated| {
        let incoming = Incoming { start: 100, len, from, to, interface: 0, truncated };
        let slot = Slot::new(&bytes[..len], length, incoming);
        slot.each().map(|(_, each)| (each.start, each.len, each.truncated)).collect::<Vec<_>>()
    };
    assert_eq!(of(25, 10, true), [(100, 10, false), (110, 10, false), (120, 5, true)]);
    assert_eq!(of(20, 10, false), [(100, 10, false), (110, 10, false)]);
    assert_eq!(of(0, 0, false), [(100, 0, false)], "one without a byte");
}

/// Also where the system does not cut: then at most a batch goes at once.
#[test]
fn datagrams_that_lie_one_behind_the_other_arrive_as_they_are() {
    for (length, cut_up_to) in [(1000, usize::MAX), (1000, 999), (60_000, usize::MAX)] {
        let (a, b) = (Socket::bind(0).unwrap(), Socket::bind(0).unwrap());
        b.make_room();
        a.cut_up_to.store(cut_up_to, Ordering::Relaxed);
        let route = Route { to: SocketAddr::from((Ipv4Addr::LOCALHOST, b.port().unwrap())), from: None };
        let total = if length > 30_000 { length } else { (RUN - 1) * length + 7 };
        let bytes: Vec<u8> = (0..total).map(|at| (at / length) as u8).collect();
        let mut sent = 0;
        while sent < total.div_ceil(length) {
            let count = a.send_joined(&route, &bytes[sent * length..], length).unwrap();
            assert!(cut_up_to > length || count <= BATCH);
            sent += count;
        }
        let mut got = Vec::new();
        while got.len() < sent {
            got.extend(receive(&b, SLOT, 4));
        }
        assert!(got.iter().map(|(bytes, _)| &bytes[..]).eq(bytes.chunks(length)));
    }
}

/// What a program set in an address handle did not show in its datagrams.
#[test]
fn c16_marks_show_in_the_header_of_each_datagram() {
    for ip in [IpAddr::from(Ipv4Addr::LOCALHOST), Ipv6Addr::LOCALHOST.into()] {
        let (a, b) = (Socket::bind(0).unwrap(), std::net::UdpSocket::bind((ip, 0)).unwrap());
        let yes: libc::c_int = 1;
        let options = match ip {
            IpAddr::V4(_) => (libc::IPPROTO_IP, [libc::IP_RECVTOS, libc::IP_RECVTTL]),
            IpAddr::V6(_) => (libc::IPPROTO_IPV6, [libc::IPV6_RECVTCLASS, libc::IPV6_RECVHOPLIMIT]),
        };
        options.1.iter().for_each(|option| set_option(b.as_fd(), options.0, *option, yes).unwrap());
        let route = Route { to: SocketAddr::new(ip, b.local_addr().unwrap().port()), from: Some(ip) };
        let marks = |traffic_class, hop_limit| Marks { traffic_class, hop_limit };
        // The second and third could be sent as one; the last one is beyond the end of the marks.
        let all = [marks(0x28, 0), marks(0xB8, 9), marks(0xB8, 9), marks(0, 77)];
        let batch = [Outgoing { route: &route, bytes: b"marked" }; 5];
        assert_eq!(a.send_run(&route, marks(0x10, 8), b"markedmarked", 6), Ok(2));
        assert_eq!([(); 2].map(|()| seen_marks(&b)), [(0x10, 8); 2]);
        assert_eq!(a.send_marked(&batch, &all), Ok(5));
        let seen: Vec<_> = (0..5).map(|_| seen_marks(&b)).collect();
        let usual = seen[0].1;
        assert!(usual > 9 && usual != 77);
        assert_eq!(seen, [(0x28, usual), (0xB8, 9), (0xB8, 9), (0, 77), (0, usual)]);
    }
}

/// Traffic class and hop limit of the next datagram.
fn seen_marks(socket: &std::net::UdpSocket) -> (u8, u8) {
    let (mut bytes, mut control) = ([0_u8; 64], Control([0; CONTROL]));
    let mut piece = libc::iovec { iov_base: bytes.as_mut_ptr().cast(), iov_len: bytes.len() };
    // SAFETY: plain data, of which all zeros are valid.
    let mut header: libc::msghdr = unsafe { std::mem::zeroed() };
    (header.msg_iov, header.msg_iovlen) = (&raw mut piece, 1);
    (header.msg_control, header.msg_controllen) = (control.0.as_mut_ptr().cast(), CONTROL as _);
    // SAFETY: the header names room that is valid for writes of these lengths.
    assert_eq!(unsafe { libc::recvmsg(socket.as_raw_fd(), &raw mut header, 0) }, 6);
    let (mut class, mut limit) = (0, 0);
    // SAFETY: the system has filled the control data; each value is at least one byte.
    unsafe {
        let mut next = libc::CMSG_FIRSTHDR(&raw const header);
        while !next.is_null() {
            let value = *libc::CMSG_DATA(next);
            match ((*next).cmsg_level, (*next).cmsg_type) {
                (libc::IPPROTO_IP, libc::IP_TOS) | (libc::IPPROTO_IPV6, libc::IPV6_TCLASS) => class = value,
                (libc::IPPROTO_IP, libc::IP_TTL) | (libc::IPPROTO_IPV6, libc::IPV6_HOPLIMIT) => limit = value,
                other => panic!("{other:?}"),
            }
            next = libc::CMSG_NXTHDR(&raw const header, next);
        }
    }
    (class, limit)
}

#[test]
fn runs_end_where_the_system_cannot_split() {
    let to = |last: u8| Route { to: SocketAddr::from(([127, 0, 0, last], 9)), from: None };
    let (one, other) = (to(1), to(2));
    let group = Route { to: SocketAddr::from(([239, 1, 2, 3], 9)), from: None };
    let room = [0; 40_000];
    let runs = |batch: &[(&Route, usize)], cut_up_to| {
        let out = |&(route, length)| Outgoing { route, bytes: &room[..length] };
        let batch: Vec<_> = batch.iter().map(out).collect();
        run(&batch, cut_up_to)
    };
    assert_eq!(runs(&[(&one, 9), (&one, 9), (&other, 9)], 100), 2);
    assert_eq!(runs(&[(&one, 9), (&one, 8), (&one, 8)], 100), 2);
    assert_eq!(runs(&[(&one, 9), (&one, 10)], 100), 1);
    assert_eq!(runs(&[(&one, 9), (&one, 0)], 100), 1);
    assert_eq!(runs(&[(&one, 0), (&one, 0)], 100), 1);
    assert_eq!(runs(&[(&one, 9), (&one, 9)], 8), 1);
    assert_eq!(runs(&[(&group, 9), (&group, 9)], 100), 1);
    assert_eq!(runs(&[(&one, 40_000), (&one, 40_000)], usize::MAX), 1);
    assert_eq!(runs(&[], 100), 0);
}

#[test]
fn datagrams_that_the_system_does_not_split_are_sent_one_by_one() {
    let (a, b) = (Socket::bind(0).unwrap(), Socket::bind(0).unwrap());
    b.make_room();
    let route = Route { to: SocketAddr::from((Ipv4Addr::LOCALHOST, b.port().unwrap())), from: None };
    let long = vec![7; 200];
    let batch = [Outgoing { route: &route, bytes: &long }; 4];
    a.cut_up_to.store(100, Ordering::Relaxed);
    assert_eq!(a.send(&batch), Ok(4));
    let mut got = Vec::new();
    while got.len() < 4 {
        got.extend(receive(&b, SLOT, 4));
    }
    assert!(got.iter().all(|(bytes, _)| *bytes == long));
}

#[test]
fn what_cannot_be_sent_returns_the_reason() {
    let a = Socket::bind(0).unwrap();
    let route = Route { to: SocketAddr::from((Ipv4Addr::LOCALHOST, 9)), from: None };
    let long = vec![0; 70_000];
    assert_eq!(a.send(&[Outgoing { route: &route, bytes: &long }]), Err(Errno::MSGSIZE));
}

#[test]
fn a_port_that_is_taken_is_refused() {
    let a = Socket::bind(0).unwrap();
    assert_eq!(Socket::bind(a.port().unwrap()).err(), Some(Errno::ADDRINUSE));
}
