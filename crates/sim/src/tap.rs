//! The wire as text: one line for each segment that was sent, in order of time.
//!
//! ```text
//! 0.000 A Write L stag=#1 to=0x0 len=4
//! 0.012 B Send L qn=0 msn=1 mo=0 len=16
//! ```
//! The first column is the virtual time in milliseconds at which the sender's lower layer took the last byte,
//! the second is the sender. STags, which are random, are numbered in order of appearance.

use std::fmt::Write as _;

use uwarp_proto::framing::{Framing, Mpa, Step};
use uwarp_wire::text::Segment;

use crate::net::Pipe;
use crate::{Side, Time, World};

/// All segments of both directions. `markers`: whether the streams of A and B have them; `crc`: whether CRCs
/// are checked.
pub fn lines(world: &World, crc: bool, markers: [bool; 2]) -> String {
    let mut all: Vec<(Time, usize, String)> = Vec::new();
    for side in Side::BOTH {
        let name = if side == Side::A { 'A' } else { 'B' };
        for (at, line) in segments(world.pipe(side), crc, markers[side.index()]) {
            all.push((at, all.len(), format!("{:.3} {name} {line}", millis(at))));
        }
    }
    all.sort_by_key(|(at, index, _)| (*at, *index));
    let text: String = all.into_iter().fold(String::new(), |mut text, (_, _, line)| {
        let _ = writeln!(text, "{line}");
        text
    });
    name_stags(&text)
}

#[allow(clippy::cast_precision_loss)]
fn millis(at: Time) -> f64 {
    at as f64 / 1e6
}

/// The segments of one direction, each with the time at which its last byte was sent.
pub fn segments(pipe: &Pipe, crc: bool, markers: bool) -> Vec<(Time, String)> {
    let framing = Framing::Mpa(Mpa { crc, receive_markers: markers, ..Mpa::default() });
    let (mut receiver, mut scratch) = (framing.receiver(), Vec::new());
    let stream: Vec<u8> = pipe.tapped().iter().flat_map(|(_, bytes)| bytes.iter().copied()).collect();
    let mut ends = Vec::new();
    let mut end = 0;
    for (at, bytes) in pipe.tapped() {
        end += bytes.len();
        ends.push((end, *at));
    }
    let when = |position: usize| ends.iter().find(|(end, _)| *end >= position).map_or(0, |(_, at)| *at);
    let mut out = Vec::new();
    let mut start = 0;
    while let Some(rest) = stream.get(start..).filter(|rest| !rest.is_empty()) {
        match receiver.next(rest, &mut scratch) {
            Ok(Step::Ulpdu { ulpdu, consumed }) => {
                start += consumed;
                let line = match Segment::parse(ulpdu) {
                    Ok(segment) => segment.to_string(),
                    Err(e) => format!("{} bytes: {e}", ulpdu.len()),
                };
                out.push((when(start), line));
            }
            Ok(Step::Incomplete { .. }) => {
                out.push((when(stream.len()), format!("({} bytes of an FPDU)", rest.len())));
                break;
            }
            Err(e) => {
                out.push((when(stream.len()), format!("({} bytes: {e})", rest.len())));
                break;
            }
        }
    }
    out
}

/// Replaces STags by numbers: the values after `stag=`, `inv=`, `sink=` and `src=`.
pub fn name_stags(text: &str) -> String {
    let mut known: Vec<String> = Vec::new();
    let mut out = String::new();
    let mut rest = text;
    let keys = ["stag=", "inv=", "sink=", "src="];
    while let Some(at) = keys.iter().filter_map(|k| rest.find(k).map(|i| i + k.len())).min() {
        out.push_str(&rest[..at]);
        rest = &rest[at..];
        let end = rest.find(|c: char| !c.is_ascii_alphanumeric()).unwrap_or(rest.len());
        let (number, tail) = rest.split_at(end);
        rest = tail;
        // These name no region.
        if let "0x0" | "0x1" = number {
            out.push_str(number.trim_start_matches("0x"));
            continue;
        }
        let index = known.iter().position(|k| k == number).unwrap_or_else(|| {
            known.push(number.to_owned());
            known.len() - 1
        });
        let _ = write!(out, "#{}", index + 1);
    }
    out.push_str(rest);
    out
}
