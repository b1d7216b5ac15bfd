//! Prints the speed of the CRC at each length, beside the `crc32c` crate. Run it with `--release` on an idle
//! machine: `cargo run --release -p uwarp-wire --example crc_speed`.

use std::hint::black_box;
use std::time::Instant;

use uwarp_wire::crc::{self, Crc32c};

const LENGTHS: [usize; 14] = [4, 20, 36, 64, 88, 128, 200, 256, 512, 1460, 9000, 16 << 10, 64 << 10, 1 << 20];

type Method = (&'static str, fn(&[u8]) -> u32);

const METHODS: [Method; 4] = [
    ("crc32c", crc::crc32c),
    ("Crc32c, one piece", |data| {
        let mut crc = Crc32c::new();
        crc.update(data);
        crc.finish()
    }),
    ("Crc32c, 4 bytes + rest", |data| {
        let (front, back) = data.split_at(4);
        let mut crc = Crc32c::new();
        crc.update(front);
        crc.update(back);
        crc.finish()
    }),
    ("crate crc32c", crc32c::crc32c),
];

fn main() {
    println!("backend: {}", crc_fast::get_calculator_target(crc_fast::CrcAlgorithm::Crc32Iscsi));
    println!(
        "one call in ns up to 512 bytes, GB/s above; best of 9 rounds, data in cache, alignments 0 to 15"
    );
    print!("{:24}", "bytes");
    LENGTHS.iter().for_each(|len| print!(" {len:>8}"));
    println!();

    let data: Vec<u8> = (0..(1usize << 20) + 16).map(|i| (i * 7) as u8).collect();
    for (name, method) in METHODS {
        print!("{name:24}");
        for len in LENGTHS {
            let seconds = best_time(&data, len, method);
            if len <= 512 {
                print!(" {:>8.1}", seconds * 1e9);
            } else {
                print!(" {:>8.1}", len as f64 / seconds / 1e9);
            }
        }
        println!();
    }
}

/// Seconds for one call.
fn best_time(data: &[u8], len: usize, method: fn(&[u8]) -> u32) -> f64 {
    let calls = (20_000_000 / (len + 60)).max(20);
    let round = || {
        let start = Instant::now();
        for call in 0..calls {
            black_box(method(black_box(&data[call & 15..][..len])));
        }
        start.elapsed().as_secs_f64() / calls as f64
    };
    (0..9).map(|_| round()).fold(f64::MAX, f64::min)
}
