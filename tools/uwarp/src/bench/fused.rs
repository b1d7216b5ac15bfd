//! The cost of the CRC in a stream, beside the copy of the kernel: one more copy, into a buffer that stays in
//! cache, with the CRC taken on the way.

use std::hint::black_box;
use std::time::{Duration, Instant};

use uwarp_mem::{self as mem, MemSeg};
use uwarp_wire::crc::Crc32c;

use super::protocol::{Failure, Figure, LARGEST, Result};

/// The destination's size: what the library fills before it passes it to the kernel, an FPDU of the size
/// between two uwarp ends.
const PIECE: usize = 64 * 1024;

/// Copies a message of `size` bytes again and again, by the routine that the library itself uses; bytes a
/// second.
pub fn measure(size: u32, time: Duration) -> Result<Figure> {
    let bytes: Vec<u8> = (0..size.min(LARGEST)).map(|i| i as u8).collect();
    let message = MemSeg { addr: bytes.as_ptr().expose_provenance() as u64, len: bytes.len() };
    let mut piece = Vec::with_capacity(PIECE);
    let start = Instant::now();
    let mut operations = 0_u64;
    loop {
        let mut at = 0;
        while at < message.len {
            piece.clear();
            let part = message.part(at, PIECE);
            let mut crc = Crc32c::new();
            let done = mem::copy_out_with_crc(part, &mut piece, &mut crc);
            done.map_err(|_| Failure::new("our own memory is not mapped"))?;
            black_box(crc.finish());
            at += part.len;
        }
        operations += 1;
        let elapsed = start.elapsed();
        if elapsed >= time {
            let value = operations as f64 * message.len as f64 / elapsed.as_secs_f64();
            return Ok(Figure { value, p99: None, operations });
        }
    }
}
