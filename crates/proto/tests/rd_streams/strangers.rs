//! Whoever has no keys, or keys of an exchange of its own, and what it says of streams.

use std::net::SocketAddr;
use std::time::Duration;

use uwarp_proto::rd::{Config, PacketBuf, Rd, Route, StreamEvent};
use uwarp_wire::crc;
use uwarp_wire::rd::chunk::{self, Stream as Chunk, StreamCredit, StreamReset};
use uwarp_wire::rd::{Header, Kind, VERSION};

use super::bytes;
use super::world::{LONG, MS, Path, SERVICE, World};

/// A packet that says it comes from the peer of the victim. Without the key of the exchange, which is 64
/// random bits, it does nothing.
fn forged(from: SocketAddr, to: SocketAddr, key: u64, number: u32, body: &[u8]) -> Vec<u8> {
    let header = Header {
        version: VERSION,
        kind: Kind::Packet,
        source_port: from.port(),
        destination_port: to.port(),
        key,
        number,
    };
    let mut packet = header.to_bytes().to_vec();
    packet.extend_from_slice(body);
    let sum = crc::to_wire(crc::crc32c(&packet));
    packet.extend_from_slice(&sum);
    packet
}

/// Everything that opens, feeds, ends or stalls a stream.
fn attacks(stream: u32, position: u32) -> Vec<Vec<u8>> {
    let open = Chunk {
        stream: stream + 2,
        offset: 0,
        open: Some(SERVICE),
        fin: false,
        acknowledge: true,
        data: b"!",
    };
    let feed = Chunk { open: None, stream, offset: position, ..open };
    let bytes = |chunk: Chunk<'_>| {
        let mut out = vec![0; chunk.head_len()];
        chunk.emit_head(&mut out);
        [&out[..], chunk.data].concat()
    };
    let fixed = |chunk: chunk::Chunk<'_>| {
        let mut out = [0; 24];
        let len = chunk.emit_fixed(&mut out);
        out[..len].to_vec()
    };
    vec![
        bytes(open),
        bytes(feed),
        bytes(Chunk { fin: true, ..feed }),
        fixed(chunk::Chunk::StreamReset(StreamReset { stream, reason: 0 })),
        fixed(chunk::Chunk::StreamCredit(StreamCredit { stream, limit: u32::MAX })),
        fixed(chunk::Chunk::StreamCredit(StreamCredit { stream, limit: 0 })),
        fixed(chunk::Chunk::Close(chunk::Close { floor: 1, reason: 0 })),
    ]
}

/// Another process, which does not have the keys: whatever it sends, in whoever's name, the stream goes on.
#[test]
fn a_stranger_opens_feeds_ends_and_stalls_nothing() {
    let mut world = World::new(1, Path { loss: 20, ..Path::default() });
    world.keeps = true;
    let ours = world.open();
    let data = bytes(11, LONG);
    let now = world.at();
    world.hosts[0].send(&now, ours, &data[..1000]);
    world.run_for(10 * MS);
    let theirs = world.hosts[1].opened[0];
    let mut key = 1u64;
    for round in 0..100usize {
        let now = world.at();
        let (from, to) = (1000 + round * 4000, 5000 + round * 4000);
        world.hosts[0].send(&now, ours, &data[from..to]);
        for victim in 0..2 {
            let Route { local, remote } = world.hosts[victim].route;
            let elsewhere = SocketAddr::new([10, 9, 9, 9].into(), 20_000);
            for attack in attacks(0, world.end(1, theirs).readable as u32) {
                key = key.wrapping_mul(0x9E37_79B9_7F4A_7C15).wrapping_add(round as u64);
                for (name, key) in [(remote, key), (remote, 0), (elsewhere, key)] {
                    let packet = forged(name, local, key, round as u32 * 7 + 1, &attack);
                    let route = Route { local, remote: name };
                    let mut arrivals = Vec::new();
                    world.hosts[victim].rd.handle_input(&now, route, &packet, &mut arrivals);
                    assert!(arrivals.is_empty());
                    world.hosts[victim].events(&now, &packet);
                }
            }
            // And what it has seen, once more: it is known by its number.
            let copy = world.seen.get(world.seen.len().wrapping_sub(round + 1)).cloned();
            if let Some((to, packet)) = copy {
                let route = world.hosts[to].route;
                world.hosts[to].rd.handle_input(&now, route, &packet, &mut Vec::new());
                world.hosts[to].events(&now, &packet);
            }
        }
        world.run_for(MS);
    }
    world.path = Path::default();
    world.run_for(Duration::from_secs(2));
    assert_eq!(world.hosts[1].opened, [theirs]);
    assert!(world.end(1, theirs).came == data[..401_000]);
    assert_eq!((world.end(0, ours).ended, world.end(1, theirs).ended), (None, None));
}

/// A process with an exchange of its own has no part in another's streams, although they have the same
/// numbers.
#[test]
fn a_process_with_keys_of_its_own_ends_no_stream_of_another() {
    let mut world = World::new(1, Path::default());
    let ours = world.open();
    let now = world.at();
    world.hosts[0].send(&now, ours, b"x");
    world.run_for(10 * MS);
    let server = world.hosts[1].route.local;
    let other = Route { local: SocketAddr::new([10, 0, 0, 9].into(), 20_000), remote: server };
    let back = Route { local: server, remote: other.local };
    let mut stranger = Rd::new(&world.at(), Config::default(), &[77; 32]);
    let stream = stranger.open_stream(&world.at(), other, SERVICE).expect("there is room");
    stranger.offer(&world.at(), stream, 1);
    let mut opened = None;
    for step in 0..20 {
        world.now += MS;
        let now = world.at();
        if step == 10 {
            stranger.reset_stream(&now, stream);
        }
        let mut packet = PacketBuf::new();
        stranger.handle_timeout(&now);
        while stranger.poll_transmit(&now, &mut packet).is_some() {
            let mut bytes = Vec::new();
            packet.assemble(0, &mut bytes, |_, out| out.push(b'!'));
            world.hosts[1].rd.handle_input(&now, back, &bytes, &mut Vec::new());
            while let Some(StreamEvent { stream, what }) = world.hosts[1].rd.poll_stream_event() {
                assert!(!world.hosts[1].streams.contains_key(&stream), "{what:?} of another's stream");
                opened = opened.or(Some(stream));
            }
        }
        while let Some(to) = world.hosts[1].rd.poll_transmit(&now, &mut packet) {
            let mut bytes = Vec::new();
            packet.assemble(0, &mut bytes, |_, _| {});
            if to == back {
                stranger.handle_input(&now, other, &bytes, &mut Vec::new());
            }
        }
        while stranger.poll_stream_event().is_some() {}
    }
    assert!(opened.is_some());
    let theirs = world.hosts[1].opened[0];
    let now = world.at();
    world.hosts[0].send(&now, ours, b"y");
    world.run_for(300 * MS);
    assert_eq!((&world.end(1, theirs).came[..], world.end(1, theirs).ended), (&b"xy"[..], None));
}

/// A process that acknowledges nothing, and asks for streams that nobody takes.
#[test]
fn refusals_that_are_not_acknowledged_wait_for_the_window() {
    let mut world = World::new(1, Path::default());
    world.keeps = true;
    let ours = world.open();
    let now = world.at();
    world.hosts[0].send(&now, ours, b"x");
    world.run_for(10 * MS);
    let key = |seen: &(usize, Vec<u8>)| (seen.0 == 1 && seen.1[4] == 0x40).then(|| seen.1[8..16].to_vec());
    let key = world.seen.iter().find_map(key).expect("a packet to the victim");
    let key = u64::from_be_bytes(key.try_into().expect("eight bytes"));
    let Route { local, remote } = world.hosts[1].route;
    let now = world.at();
    let (mut refusals, mut taken) = (0, 0usize);
    for number in 0..3000u32 {
        let chunk = Chunk {
            stream: (number + 10) << 1,
            offset: 0,
            open: Some(SERVICE + 1),
            fin: false,
            acknowledge: true,
            data: b"?",
        };
        let mut body = vec![0; chunk.head_len()];
        chunk.emit_head(&mut body);
        body.extend(chunk.data);
        let packet = forged(remote, local, key, 1000 + number, &body);
        world.hosts[1].rd.handle_input(&now, Route { local, remote }, &packet, &mut Vec::new());
        let mut out = PacketBuf::new();
        let before = refusals;
        while world.hosts[1].rd.poll_transmit(&now, &mut out).is_some() {
            let mut bytes = Vec::new();
            out.assemble(0, &mut bytes, |_, _| {});
            let mut chunks = chunk::chunks(&bytes[20..bytes.len() - 4]);
            let is_reset = |chunk: &_| matches!(chunk, Ok(chunk::Chunk::StreamReset(_)));
            refusals += chunks.by_ref().filter(is_reset).count();
        }
        taken += usize::from(refusals > before);
    }
    assert!((1..100).contains(&taken), "{refusals} refusals, with {taken} packets");
}
