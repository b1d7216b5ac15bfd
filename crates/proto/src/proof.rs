//! Cookies: a proof, without state, that a peer receives at the address and port that it names.
//!
//! A cookie is the time when it was made and a keyed hash of that time, the address, the port and what the
//! user adds. It is sent to this address and port, so only their owner can bring it back, and it proves that
//! the owner was there at that time. Nothing is kept for a peer that has not proven this.
//!
//! ```text
//!   UDP from (address, port) ─▶ make ─▶ back to (address, port) ─▶ request of the peer ─▶ made: when
//! ```
//!
//! Three kinds of users:
//! - Bring-up by number sends the time with the hash ([`Cookie`]), and a cookie counts only if it was made
//!   after the queue pair's move: `made(..).is_some_and(|made| made > moved)`.
//! - Lookups have room for the hash alone ([`Proof::make_short`]); its time is the start of the present
//!   period of 64 seconds, or of the one before.
//! - Reliable datagrams send the time with the hash, and want it younger than [`LIFE`] ([`crate::rd`]).
//!
//! The hash is SipHash-2-4, a pseudo-random function: without its key of 128 random bits nobody can make the
//! hash of an address that he has not received at. A guess is right with a probability of 2⁻⁶⁴ (2⁻⁶³ in a
//! lookup), and each costs the peer a request.

use std::hash::Hasher as _;
use std::net::{IpAddr, SocketAddr};
use std::time::{Duration, Instant};

use siphasher::sip::SipHasher24;
use uwarp_wire::introduction::Cookie;

use crate::clock::Now;

/// A cookie is valid for this long. One without its time is valid for at least this long, and for at most
/// twice as long.
pub const LIFE: Duration = Duration::from_secs(64);
const LIFE_US: u64 = LIFE.as_secs() * 1_000_000;

/// Makes cookies, and checks them.
pub struct Proof {
    key: SipHasher24,
    since: Instant,
}

/// Without the key.
impl std::fmt::Debug for Proof {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Proof").field("since", &self.since).finish_non_exhaustive()
    }
}

impl Proof {
    /// With 16 random bytes that nobody else knows.
    pub fn new(now: &Now, key: &[u8; 16]) -> Self {
        Self { key: SipHasher24::new_with_key(key), since: now.get() }
    }

    /// A cookie for the owner of this address and port. `added`: what else it must be returned with.
    pub fn make(&self, now: &Now, owner: SocketAddr, added: &[u8]) -> Cookie {
        let made = self.time(now);
        Cookie { made, hash: self.hash(made, owner, added) }
    }

    /// When this cookie was made; `None`: it is not one for this owner with this addition, or it is older
    /// than [`LIFE`].
    ///
    /// The answer is at most a microsecond too early and never too late: the time was rounded down. So a
    /// cookie from before an event never counts as made after it, if "after" is `>`: at one and the same
    /// time the order is not known. A cookie from the same microsecond after the event does not count either;
    /// its owner asks again. Coarser units would turn away cookies that were made soon after a move, which is
    /// when its peer asks.
    ///
    /// The clock must be read no earlier than the event begins: a move whose time is older than the program's
    /// call would count cookies of the port's last owner.
    pub fn made(&self, now: &Now, owner: SocketAddr, added: &[u8], cookie: Cookie) -> Option<Instant> {
        // Compared as one number, which takes the same time wherever the two differ. So a wrong hash says
        // nothing about the right one, and no hash can be found byte by byte.
        if self.hash(cookie.made, owner, added) != cookie.hash {
            return None;
        }
        // It is ours, and a clock that was read before another thread's may be behind it.
        let age = self.time(now).saturating_sub(cookie.made);
        self.since.checked_add(Duration::from_micros(cookie.made)).filter(|_| age <= LIFE_US)
    }

    /// A cookie without its time, never 0.
    pub fn make_short(&self, now: &Now, owner: SocketAddr, added: &[u8]) -> u64 {
        self.short(self.time(now) / LIFE_US, owner, added)
    }

    /// Whether this is a cookie for this owner with this addition, from this period or the one before.
    pub fn is_short_valid(&self, now: &Now, owner: SocketAddr, added: &[u8], cookie: u64) -> bool {
        let period = self.time(now) / LIFE_US;
        [Some(period), period.checked_sub(1)]
            .into_iter()
            .flatten()
            .any(|period| self.short(period, owner, added) == cookie)
    }

    fn short(&self, period: u64, owner: SocketAddr, added: &[u8]) -> u64 {
        self.hash(period * LIFE_US, owner, added) | 1
    }

    /// 2⁶⁴ µs are half a million years.
    fn time(&self, now: &Now) -> u64 {
        u64::try_from(now.get().saturating_duration_since(self.since).as_micros()).unwrap_or(u64::MAX)
    }

    /// Of fields of fixed length, and then the addition: no two inputs have the same bytes.
    fn hash(&self, time: u64, owner: SocketAddr, added: &[u8]) -> u64 {
        // UDP and TCP show one owner alike: an IPv4 address may be mapped, and the flow is not the owner's.
        let (ip, scope) = match (owner.ip().to_canonical(), owner) {
            (IpAddr::V4(ip), _) => (ip.to_ipv6_mapped(), 0),
            // Two links may have the same link-local address.
            (IpAddr::V6(ip), SocketAddr::V6(owner)) => (ip, owner.scope_id()),
            (IpAddr::V6(ip), SocketAddr::V4(_)) => (ip, 0),
        };
        let mut hash = self.key;
        hash.write(&time.to_be_bytes());
        hash.write(&ip.octets());
        hash.write(&scope.to_be_bytes());
        hash.write(&owner.port().to_be_bytes());
        hash.write(added);
        hash.finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const KEY: [u8; 16] = [7; 16];
    const US: Duration = Duration::from_micros(1);

    fn bytes_of(cookie: Cookie) -> [u8; 16] {
        (u128::from(cookie.made) << 64 | u128::from(cookie.hash)).to_be_bytes()
    }

    fn cookie_of(bytes: [u8; 16]) -> Cookie {
        let both = u128::from_be_bytes(bytes);
        Cookie { made: (both >> 64) as u64, hash: both as u64 }
    }

    fn owner(text: &str) -> SocketAddr {
        text.parse().unwrap()
    }

    /// The vectors of SipHash's authors for 15 bytes and for none.
    #[test]
    fn the_hash_is_siphash_2_4() {
        let key = [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15];
        let hash = SipHasher24::new_with_key(&key);
        assert_eq!(hash.hash(&key[..15]), 0xA129_CA61_49BE_45E5);
        assert_eq!(hash.hash(&[]), 0x726F_DB47_DD0E_0E31);
        // In parts it is that of the whole.
        let mut parts = hash;
        parts.write(&key[..3]);
        parts.write(&key[3..15]);
        assert_eq!(parts.finish(), 0xA129_CA61_49BE_45E5);
    }

    #[test]
    fn golden() {
        let start = Instant::now();
        let proof = Proof::new(&Now::at(start), &KEY);
        let cookie = proof.make(&Now::at(start + 0x0102 * US), owner("192.0.2.1:20000"), b"");
        let bytes = bytes_of(cookie);
        assert_eq!(bytes[..8], [0, 0, 0, 0, 0, 0, 1, 2]);
        // time, ::ffff:192.0.2.1, scope, port
        let input = [
            &bytes[..8],
            &[0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xFF, 0xFF, 192, 0, 2, 1],
            &[0; 4],
            &20_000_u16.to_be_bytes(),
        ]
        .concat();
        assert_eq!(bytes[8..], SipHasher24::new_with_key(&KEY).hash(&input).to_be_bytes());
        assert_eq!(cookie_of(bytes), cookie);
    }

    #[test]
    fn a_cookie_is_its_owners_alone() {
        let start = Instant::now();
        let now = Now::at(start + Duration::from_secs(5));
        let proof = Proof::new(&Now::at(start), &KEY);
        let at = owner("192.0.2.1:20000");
        let cookie = proof.make(&now, at, b"added");
        let short = proof.make_short(&now, at, b"added");
        assert_eq!(proof.made(&now, at, b"added", cookie), Some(now.get()));
        assert!(proof.is_short_valid(&now, at, b"added", short));
        for (other, added) in [
            (owner("192.0.2.2:20000"), &b"added"[..]),
            (owner("192.0.2.1:20001"), b"added"),
            (at, b"adde"),
            (at, b""),
            (at, b"Added"),
        ] {
            assert_eq!(proof.made(&now, other, added, cookie), None, "{other} {added:?}");
            assert!(!proof.is_short_valid(&now, other, added, short), "{other} {added:?}");
        }
        for bit in 0..128 {
            let bytes = (u128::from_be_bytes(bytes_of(cookie)) ^ (1 << bit)).to_be_bytes();
            assert_eq!(proof.made(&now, at, b"added", cookie_of(bytes)), None, "bit {bit}");
        }
        for bit in 0..64 {
            assert!(!proof.is_short_valid(&now, at, b"added", short ^ (1 << bit)), "bit {bit}");
        }
        assert!(!proof.is_short_valid(&now, at, b"added", 0));
        let other_key = Proof::new(&Now::at(start), &[8; 16]);
        assert_eq!(other_key.made(&now, at, b"added", cookie), None);
        assert!(!other_key.is_short_valid(&now, at, b"added", short));
        assert!(!format!("{proof:?}").contains("key"), "{proof:?}");
    }

    #[test]
    fn one_owner_may_be_shown_in_several_ways() {
        let now = Now::at(Instant::now());
        let proof = Proof::new(&now, &KEY);
        let cookie = |text| bytes_of(proof.make(&now, owner(text), b""));
        assert_eq!(cookie("192.0.2.1:7"), cookie("[::ffff:192.0.2.1]:7"));
        assert_eq!(cookie("192.0.2.1:7"), cookie("[::ffff:192.0.2.1%3]:7"));
        assert_ne!(cookie("[fe80::1%2]:7"), cookie("[fe80::1%3]:7"));
        let flow = |flow| std::net::SocketAddrV6::new("fe80::1".parse().unwrap(), 7, flow, 2).into();
        assert_eq!(proof.make(&now, flow(1), b""), proof.make(&now, flow(2), b""));
    }

    #[test]
    fn a_cookie_expires() {
        let start = Instant::now();
        let proof = Proof::new(&Now::at(start), &KEY);
        let at = owner("[2001:db8::1]:20000");
        for age in [0, 1, 63, 64, 65, 127, 1000].map(Duration::from_secs) {
            let made = start + age;
            let cookie = proof.make(&Now::at(made), at, b"");
            let check = |now| proof.made(&Now::at(now), at, b"", cookie);
            assert_eq!(check(made + LIFE), Some(made));
            assert_eq!(check(made + LIFE + US), None);
            // A clock that was read earlier.
            assert_eq!(check(made - US), Some(made));

            let short = proof.make_short(&Now::at(made), at, b"");
            let check = |now| proof.is_short_valid(&Now::at(now), at, b"", short);
            assert!(check(made) && check(made + LIFE));
            assert!(!check(made + LIFE * 2));
        }
        // The limits of a short one: made at the end of a period, and at its start.
        let [early, late] = [start + LIFE, start + LIFE * 2 - US];
        let short = proof.make_short(&Now::at(early), at, b"");
        assert_eq!(short, proof.make_short(&Now::at(late), at, b""));
        assert!(proof.is_short_valid(&Now::at(late + LIFE), at, b"", short));
        assert!(!proof.is_short_valid(&Now::at(late + LIFE + US), at, b"", short));
    }

    /// Whatever the fractions of a microsecond: a cookie from before the move, or from its very moment, never
    /// counts as made after it, and one from a microsecond after it does.
    #[test]
    fn a_cookie_from_before_a_move_is_not_made_after_it() {
        let at = owner("127.0.0.1:20000");
        let start = Instant::now();
        let ns = Duration::from_nanos;
        let proof = Proof::new(&Now::at(start + ns(123)), &KEY);
        for moved in 0..2_500 {
            let moved = start + ns(5_000 + moved);
            let counts = |made: Instant| {
                let cookie = proof.make(&Now::at(made), at, b"");
                let made = proof.made(&Now::at(moved + LIFE / 2), at, b"", cookie);
                made.is_some_and(|made| made > moved)
            };
            for before in [0, 1, 2, 999, 1_000, 1_001, 2_000] {
                assert!(!counts(moved - ns(before)), "{before} ns before");
            }
            assert!(counts(moved + ns(1_000)) && counts(moved + ns(1_001)), "after");
        }
    }
}
