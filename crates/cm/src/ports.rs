//! Which ids of this process have which port.
//!
//! The system's table of TCP ports decides, except among ids that reuse addresses: its rules for `SO_REUSEADDR` are laxer than
//! those of rdma_cm. As in Linux' rdma_cm, an id that does not reuse gets no port that another id has, and an id that
//! does may listen only while no other is bound there.

use std::net::SocketAddr;
use std::sync::Arc;

use parking_lot::Mutex;
use rustix::io::Errno;

/// The ports of the ids that the program has bound.
#[derive(Debug, Default)]
pub(crate) struct Ports {
    taken: Mutex<Vec<Taken>>,
}

#[derive(Debug, Clone, Copy)]
struct Taken {
    /// Of the id.
    key: u64,
    address: SocketAddr,
    reuse: bool,
}

/// A port that an id has, until this is dropped.
#[derive(Debug)]
pub(crate) struct Claim {
    ports: Arc<Ports>,
    key: u64,
}

impl Ports {
    /// Whether an id may have this address; `reuse`: it shares with others that do. Port 0 is always free. Other programs' ports
    /// are the system's to know.
    pub fn check(&self, key: u64, address: SocketAddr, reuse: bool) -> Result<(), Errno> {
        let taken = self.taken.lock();
        let in_the_way =
            |other: &Taken| other.key != key && !(reuse && other.reuse) && overlap(other.address, address);
        // Linux says EADDRNOTAVAIL where one of them is the wildcard; TCP says this in either case.
        if address.port() != 0 && taken.iter().any(in_the_way) { Err(Errno::ADDRINUSE) } else { Ok(()) }
    }

    /// The id has this address from now on.
    pub fn claim(self: &Arc<Self>, key: u64, address: SocketAddr, reuse: bool) -> Claim {
        self.taken.lock().push(Taken { key, address, reuse });
        Claim { ports: Arc::clone(self), key }
    }
}

impl Claim {
    /// The id shares its port no more: it listens.
    pub fn alone(&self) {
        let mut taken = self.ports.taken.lock();
        if let Some(mine) = taken.iter_mut().find(|taken| taken.key == self.key) {
            mine.reuse = false;
        }
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        let mut taken = self.ports.taken.lock();
        if let Some(at) = taken.iter().position(|taken| taken.key == self.key) {
            taken.swap_remove(at);
        }
    }
}

/// Of one family; what an IPv6 wildcard has of IPv4 the system knows.
fn overlap(one: SocketAddr, other: SocketAddr) -> bool {
    one.port() == other.port()
        && one.is_ipv4() == other.is_ipv4()
        && (one.ip() == other.ip() || one.ip().is_unspecified() || other.ip().is_unspecified())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_those_that_reuse_share() {
        let at = |text: &str| text.parse::<SocketAddr>().unwrap();
        let ports = Arc::new(Ports::default());
        let first = ports.claim(1, at("127.0.0.1:5"), true);
        for (address, reuse, free) in [
            ("127.0.0.1:5", true, true),
            ("127.0.0.1:5", false, false),
            ("0.0.0.0:5", true, true),
            ("0.0.0.0:5", false, false),
            ("127.0.0.2:5", false, true),
            ("[::1]:5", false, true),
            ("[::]:5", false, true),
            ("127.0.0.1:6", false, true),
            ("127.0.0.1:0", false, true),
        ] {
            assert_eq!(ports.check(2, at(address), reuse).is_ok(), free, "{address} {reuse}");
        }
        // Its own address is in nobody's way.
        assert_eq!(ports.check(1, at("127.0.0.1:5"), false), Ok(()));
        first.alone();
        assert_eq!(ports.check(2, at("127.0.0.1:5"), true), Err(Errno::ADDRINUSE));
        drop(first);
        assert_eq!(ports.check(2, at("127.0.0.1:5"), false), Ok(()));
    }
}
