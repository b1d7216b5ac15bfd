//! Any bytes for a request or reply; see `hostile/mod.rs`. The fuzz target `cm_setup` does the same for
//! longer.

#[path = "hostile/mod.rs"]
mod hostile;

/// Bytes that are the same in every run.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u8 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 32) as u8
    }
}

#[test]
fn any_bytes_for_a_frame_and_any_decision() {
    let mut random = Random(0x9E37_79B9_7F4A_7C15);
    for n in 0..600u32 {
        // The attacker's reads to the end wait for the victim's time limits, so that they are few.
        let mut bytes = vec![random.next() & 0x1F, random.next()];
        let flags = [0x40, 0x50, 0x54, random.next()][n as usize % 4];
        let len = u16::from(random.next()) * if n % 16 == 0 { 3 } else { 1 };
        bytes.extend([flags, 1 + (flags >> 4 & 1)]);
        bytes.extend(len.to_be_bytes());
        let cut = if n % 8 == 0 { u16::from(random.next() & 7) } else { 0 };
        bytes.extend((0..len.saturating_sub(cut)).map(|_| random.next()));
        bytes.extend((0..random.next() & 63).map(|_| random.next()));
        hostile::check(&bytes);
    }
}
