//! Words that prove, without state, who receives at a UDP port: sent by UDP to that port, shown at the Unix
//! socket. As the cookies of the connection manager, with a shorter life, and each counts once.
//!
//! ```text
//! word = when it was made, 8 bytes | keyed hash of that and of both ends, 8 bytes
//! ```

use std::hash::{Hash as _, Hasher as _};
use std::net::{IpAddr, SocketAddr};
use std::time::{Duration, Instant};

use siphasher::sip::SipHasher24;
use uwarp_process::Mutex;

use super::Why;

/// It is shown as soon as it has come.
const LIFE: Duration = Duration::from_secs(2);
/// Those that were shown in this time.
const MOST: usize = 4096;

pub(super) struct Words {
    key: SipHasher24,
    since: Instant,
    shown: Mutex<Vec<([u8; 16], Instant)>, 26>,
}

impl Words {
    pub fn new(key: &[u8; 16]) -> Self {
        Self { key: SipHasher24::new_with_key(key), since: Instant::now(), shown: Mutex::default() }
    }

    /// For the owner of the second of these ends.
    pub fn make(&self, ends: [SocketAddr; 2]) -> [u8; 16] {
        let made = u64::try_from(self.since.elapsed().as_micros()).unwrap_or(u64::MAX);
        self.word(made, ends)
    }

    fn word(&self, made: u64, ends: [SocketAddr; 2]) -> [u8; 16] {
        let mut hash = self.key;
        made.hash(&mut hash);
        // Not those of connections, which have the same key.
        hash.write(b"datagrams");
        for end in ends {
            let ip = match end.ip().to_canonical() {
                IpAddr::V4(ip) => ip.to_ipv6_mapped(),
                IpAddr::V6(ip) => ip,
            };
            hash.write(&ip.octets());
            hash.write(&end.port().to_be_bytes());
        }
        (u128::from(made) << 64 | u128::from(hash.finish())).to_be_bytes()
    }

    /// Somebody shows this word for these ends. It counts once.
    pub fn take(&self, ends: [SocketAddr; 2], word: [u8; 16]) -> Result<(), Why> {
        let made = u64::try_from(u128::from_be_bytes(word) >> 64).unwrap_or(u64::MAX);
        // As one number, so that the time that this takes says nothing.
        if u128::from_be_bytes(self.word(made, ends)) != u128::from_be_bytes(word) {
            return Err(Why::NotOurs);
        }
        let made = self.since.checked_add(Duration::from_micros(made)).ok_or(Why::NotOurs)?;
        let now = Instant::now();
        if made > now || now.saturating_duration_since(made) > LIFE {
            return Err(Why::NotOurs);
        }
        let mut shown = self.shown.lock();
        shown.retain(|(_, until)| now <= *until);
        if shown.iter().any(|(other, _)| *other == word) {
            return Err(Why::NotOurs);
        }
        if shown.len() >= MOST {
            return Err(Why::NoResources);
        }
        shown.push((word, made + LIFE));
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_word_counts_once_for_its_ends_alone() {
        let words = Words::new(&[7; 16]);
        let [a, b, c] = [1, 2, 3].map(|port| SocketAddr::from(([127, 0, 0, 1], port)));
        let word = words.make([a, b]);
        for other in [[b, a], [a, c], [c, b]] {
            assert_eq!(words.take(other, word), Err(Why::NotOurs), "{other:?}");
        }
        assert_eq!(Words::new(&[8; 16]).take([a, b], word), Err(Why::NotOurs), "another process's");
        for byte in 0..16 {
            let mut guess = word;
            guess[byte] ^= 1;
            assert_eq!(words.take([a, b], guess), Err(Why::NotOurs));
        }
        let mapped = SocketAddr::new("::ffff:127.0.0.1".parse().unwrap(), 2);
        assert_eq!(words.take([a, mapped], word), Ok(()));
        assert_eq!(words.take([a, b], word), Err(Why::NotOurs), "it was shown");
        assert_eq!(words.take([a, b], words.make([a, b])), Ok(()));
    }

    #[test]
    fn a_word_is_for_now() {
        let words = Words { since: Instant::now() - Duration::from_secs(10), ..Words::new(&[7; 16]) };
        let ends = [1, 2].map(|port| SocketAddr::from(([127, 0, 0, 1], port)));
        assert_eq!(words.take(ends, words.word(7_000_000, ends)), Err(Why::NotOurs));
        assert_eq!(words.take(ends, words.word(9_000_000, ends)), Ok(()));
        assert_eq!(words.take(ends, words.word(u64::MAX, ends)), Err(Why::NotOurs));
    }
}
