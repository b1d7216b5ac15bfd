//! Which ids of this process have which port.
//!
//! The system's table of TCP ports decides, except among ids of this process, where the rules of Linux'
//! rdma_cm hold (`cma_check_port` in drivers/infiniband/core/cma.c): an id without address reuse gets no port
//! that another id has, and an id with it may listen only while no other id is bound there. The wildcard and
//! the loopback addresses are "any address": they collide with every address, and the errno is then
//! `EADDRNOTAVAIL`. Two equal addresses give `EADDRINUSE`.

use std::net::SocketAddr;
use std::sync::Arc;

use rustix::io::Errno;
use uwarp_llp::route::is_any;
use uwarp_process::Mutex;

/// The ports of the ids that the program has bound.
#[derive(Debug, Default)]
pub(crate) struct Ports {
    taken: Mutex<Vec<Taken>, 29>,
}

/// The address and port that an id has or requests.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Taken {
    /// Key of the id.
    pub key: u64,
    pub address: SocketAddr,
    /// It shares the port with other ids that set this.
    pub reuse: bool,
    /// It occupies its port in its own address family only.
    pub afonly: bool,
}

/// A port that an id has, until this is dropped.
#[derive(Debug)]
pub(crate) struct Claim {
    ports: Arc<Ports>,
    key: u64,
}

impl Ports {
    /// Whether an id may have this address. Port 0 is always free. The system checks the ports of other
    /// programs.
    pub fn check(&self, wanted: Taken) -> Result<(), Errno> {
        if wanted.address.port() == 0 {
            return Ok(());
        }
        self.taken.lock().iter().try_for_each(|taken| taken.admits(wanted))
    }

    /// Records that the id has this address.
    pub fn claim(self: &Arc<Self>, taken: Taken) -> Claim {
        self.taken.lock().push(taken);
        Claim { ports: Arc::clone(self), key: taken.key }
    }
}

impl Taken {
    /// Whether another id may have the address that it requests beside this one.
    fn admits(&self, wanted: Self) -> Result<(), Errno> {
        let (mine, other) = (self.address, wanted.address);
        if self.key == wanted.key
            || mine.port() != other.port()
            || (self.reuse && wanted.reuse)
            || (self.afonly && wanted.afonly && mine.is_ipv4() != other.is_ipv4())
        {
            Ok(())
        } else if is_any(mine.ip()) || is_any(other.ip()) {
            Err(Errno::ADDRNOTAVAIL)
        } else if mine == other {
            Err(Errno::ADDRINUSE)
        } else {
            Ok(())
        }
    }
}

impl Claim {
    /// The id listens: it no longer shares its port.
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

#[cfg(test)]
mod tests {
    use super::*;

    fn taken(key: u64, address: &str, reuse: bool, afonly: bool) -> Taken {
        Taken { key, address: address.parse().unwrap(), reuse, afonly }
    }

    #[test]
    fn only_those_that_reuse_share() {
        let ports = Arc::new(Ports::default());
        let first = ports.claim(taken(1, "192.0.2.1:5", true, true));
        for (address, reuse, expected) in [
            ("192.0.2.1:5", true, Ok(())),
            ("192.0.2.1:5", false, Err(Errno::ADDRINUSE)),
            ("0.0.0.0:5", true, Ok(())),
            ("192.0.2.2:5", false, Ok(())),
            ("192.0.2.1:6", false, Ok(())),
            ("192.0.2.1:0", false, Ok(())),
        ] {
            assert_eq!(ports.check(taken(2, address, reuse, true)), expected, "{address} {reuse}");
        }
        // An id does not collide with itself.
        assert_eq!(ports.check(taken(1, "192.0.2.1:5", false, true)), Ok(()));
        first.alone();
        assert_eq!(ports.check(taken(2, "192.0.2.1:5", true, true)), Err(Errno::ADDRINUSE));
        drop(first);
        assert_eq!(ports.check(taken(2, "192.0.2.1:5", false, true)), Ok(()));
    }

    #[test]
    fn a_port_bound_twice_is_in_use_only_where_the_addresses_are_equal() {
        for (one, other, expected) in [
            ("192.0.2.1:5", "192.0.2.1:5", Err(Errno::ADDRINUSE)),
            ("192.0.2.1:5", "192.0.2.2:5", Ok(())),
            ("0.0.0.0:5", "192.0.2.1:5", Err(Errno::ADDRNOTAVAIL)),
            ("0.0.0.0:5", "0.0.0.0:5", Err(Errno::ADDRNOTAVAIL)),
            ("127.0.0.1:5", "127.0.0.1:5", Err(Errno::ADDRNOTAVAIL)),
            ("127.0.0.1:5", "192.0.2.1:5", Err(Errno::ADDRNOTAVAIL)),
            ("[::1]:5", "[2001:db8::1]:5", Err(Errno::ADDRNOTAVAIL)),
            ("[::]:5", "0.0.0.0:5", Err(Errno::ADDRNOTAVAIL)),
            ("[2001:db8::1]:5", "192.0.2.1:5", Ok(())),
            ("0.0.0.0:5", "0.0.0.0:6", Ok(())),
        ] {
            for (one, other) in [(one, other), (other, one)] {
                let ports = Arc::new(Ports::default());
                // Linux' defaults when no program sets the option: IPv4 sockets are alone, IPv6 sockets are
                // not.
                let v4 = |address: &str| !address.contains('[');
                let _claim = ports.claim(taken(1, one, false, v4(one)));
                assert_eq!(ports.check(taken(2, other, false, v4(other))), expected, "{one} and {other}");
            }
        }
    }

    #[test]
    fn ids_of_one_family_only_do_not_collide_with_the_other_family() {
        let ports = Arc::new(Ports::default());
        let _claim = ports.claim(taken(1, "0.0.0.0:5", false, true));
        assert_eq!(ports.check(taken(2, "[::]:5", false, true)), Ok(()));
        assert_eq!(ports.check(taken(2, "[::]:5", false, false)), Err(Errno::ADDRNOTAVAIL));
    }
}
