//! The devices that programs see: one with all addresses of the host, or one for each network interface
//! (`UWARP_DEVICES`, docs/adr/031).
//!
//! Behind each of them is the same [`crate::Nic`]: a process has one engine and one space of queue pair
//! numbers. A device is a port with addresses, and what belongs to it.

use std::ffi::CString;
use std::net::SocketAddr;
use std::time::Instant;

use uwarp_process::{Mutex, OnceValue, PerProcess};

use crate::address::Address;
use crate::config::{Config, Devices};
use crate::fork::OncePerProcess;
use crate::port::Port;
use crate::quota::Made;
use crate::{address, netdev};

/// A device that programs see. It lives as long as the process: programs keep pointers to what C shows of it.
pub struct RdmaDevice {
    number: usize,
    name: String,
    guid: [u8; 8],
    port: Port,
    shown: OnceValue<usize>,
    /// Of interfaces: the one that was found after it.
    next: OnceValue<&'static RdmaDevice>,
    /// How many objects programs have made on it.
    pub made: PerProcess<Made>,
    /// The opened device that ids share, by its cookie.
    pub shared: OncePerProcess<usize, 6>,
}

/// The first of those of interfaces, in the order in which they were found. A look at them takes no lock: a
/// child that was forked while another thread had it would wait for ever.
static FIRST: OnceValue<&'static RdmaDevice> = OnceValue::new();
/// Held while some are added.
static ADDING: PerProcess<Mutex<(), 23>> = PerProcess::new(Mutex::default);
/// All addresses of the host, to find the interface of one.
static ADDRESSES: address::Last = address::Last::new();

impl RdmaDevice {
    fn new(number: usize, interface: Option<&str>) -> Self {
        Self {
            number,
            name: format!("uwarp{number}"),
            guid: interface.map_or_else(netdev::guid, netdev::guid_of),
            port: Port::new(interface.map(str::to_owned)),
            shown: OnceValue::new(),
            next: OnceValue::new(),
            made: PerProcess::new(Made::default),
            shared: OncePerProcess::new(),
        }
    }

    /// Those that programs see now. With `per-interface`: the interfaces with an address that are up, the
    /// default route's first, the loopback interface only if there is no other; later, one that was seen
    /// before stays as long as it exists, and a new one gets the next number.
    pub fn list() -> Vec<&'static Self> {
        match Config::get().devices {
            Devices::One => vec![Self::of_host()],
            Devices::PerInterface => Self::of_interfaces(),
        }
    }

    /// All that this process has seen.
    pub fn known() -> Vec<&'static Self> {
        match Config::get().devices {
            Devices::One => vec![Self::of_host()],
            Devices::PerInterface => Self::found(),
        }
    }

    /// The device that has this address. An address that none has, such as one of the loopback interface, is
    /// the first device's, as with rdma_cm in Linux. `None` if there is no device.
    pub fn of_address(at: SocketAddr) -> Option<&'static Self> {
        if Config::get().devices == Devices::One {
            return Some(Self::of_host());
        }
        let interface = if at.ip().is_loopback() { None } else { interface_with(at) };
        let has = |device: &&'static Self| device.port.interface() == interface.as_deref();
        let known = Self::found();
        let found = if interface.is_some() { known.into_iter().find(has) } else { first_that_exists(known) };
        found.or_else(|| {
            let listed = Self::list();
            listed.iter().copied().find(has).or(listed.first().copied())
        })
    }

    /// The device that C knows by this address, which may be any. Takes no lock.
    pub fn of_shown(at: usize) -> Option<&'static Self> {
        Self::known().into_iter().find(|device| device.shown.get() == Some(&at))
    }

    /// Its number, from 0 on.
    pub fn number(&self) -> usize {
        self.number
    }

    /// Its name: `uwarp` and its number.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Its node GUID.
    pub fn guid(&self) -> [u8; 8] {
        self.guid
    }

    /// Its only port.
    pub fn port(&self) -> &Port {
        &self.port
    }

    /// Where C's structure of it is; `make` makes it, the first time.
    pub fn shown(&self, make: impl FnOnce(&Self) -> usize) -> usize {
        *self.shown.get_or_make(|| make(self))
    }

    fn of_host() -> &'static Self {
        static OF_HOST: OnceValue<RdmaDevice> = OnceValue::new();
        OF_HOST.get_or_make(|| Self::new(0, None))
    }

    fn of_interfaces() -> Vec<&'static Self> {
        let usable = address::list();
        let existing = netdev::list();
        let _adding = ADDING.lock();
        let mut known = Self::found();
        for address in usable {
            if !known.iter().any(|device| device.port.interface() == Some(&address.interface)) {
                let new: &'static Self =
                    Box::leak(Box::new(Self::new(known.len(), Some(&address.interface))));
                known.last().map_or(&FIRST, |last| &last.next).get_or_make(|| new);
                known.push(new);
            }
        }
        known.retain(|device| existing.iter().any(|dev| device.port.interface() == Some(&dev.name)));
        known
    }

    /// Those of interfaces that were found up to now.
    fn found() -> Vec<&'static Self> {
        std::iter::successors(FIRST.get().copied(), |device| device.next.get().copied()).collect()
    }
}

/// The interface with this address. The system is asked once in a tenth of a second, or when the address is
/// not one of those that it named then.
fn interface_with(at: SocketAddr) -> Option<String> {
    let scope = if let SocketAddr::V6(v6) = at { v6.scope_id() } else { 0 };
    let of = |all: &[Address]| {
        let found = all.iter().find(|own| own.ip == at.ip() && (scope == 0 || own.index == scope));
        found.map(|own| own.interface.clone())
    };
    let recent = ADDRESSES.recent(Instant::now());
    recent.and_then(|all| of(&all)).or_else(|| of(&ADDRESSES.keep(address::all())))
}

/// The first of these whose interface has not vanished.
fn first_that_exists(devices: Vec<&'static RdmaDevice>) -> Option<&'static RdmaDevice> {
    let exists = |device: &&RdmaDevice| {
        let name = device.port.interface().and_then(|name| CString::new(name).ok());
        name.is_some_and(|name| address::index(&name) != 0)
    };
    devices.into_iter().find(exists)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::{IpAddr, Ipv4Addr};

    #[test]
    fn each_interface_is_a_device_with_its_own_addresses_and_guid() {
        let devices = RdmaDevice::of_interfaces();
        let first = address::list().first().expect("an interface with an address").interface.clone();
        assert_eq!(devices[0].port().interface(), Some(&*first), "the default route's is the first one");
        for (number, device) in devices.iter().enumerate() {
            let interface = device.port().interface().expect("one");
            assert_eq!((device.number(), device.name()), (number, &*format!("uwarp{number}")));
            assert!(device.port().addresses().iter().all(|own| own.interface == interface));
            assert!(devices.iter().filter(|other| other.guid() == device.guid()).count() == 1);
            assert_eq!(device.guid()[0] & 3, 2, "local, and no group");
        }
        let again = RdmaDevice::of_interfaces();
        assert!(devices.iter().zip(&again).all(|(one, same)| std::ptr::eq(*one, *same)));
    }

    /// A child that was forked while another thread added devices asked for a GUID and waited for ever.
    #[test]
    fn a_look_at_the_devices_waits_for_no_thread_that_adds_some() {
        let adding = ADDING.lock();
        let (sender, receiver) = std::sync::mpsc::channel();
        std::thread::spawn(move || sender.send(RdmaDevice::found().len()));
        receiver.recv_timeout(std::time::Duration::from_secs(60)).expect("an answer while some are added");
        drop(adding);
    }

    #[test]
    fn a_device_that_vanished_is_not_taken_for_the_first_one() {
        let device = |number: usize, interface: &str| -> &'static RdmaDevice {
            Box::leak(Box::new(RdmaDevice::new(number, Some(interface))))
        };
        let existing = address::all().first().expect("an interface with an address").interface.clone();
        let (gone, here) = (device(0, "no-such"), device(1, &existing));
        let found = first_that_exists(vec![gone, here]).expect("the one that exists");
        assert_eq!(found.number(), 1);
        assert!(first_that_exists(vec![gone]).is_none());
    }

    #[test]
    fn the_interface_of_an_address_is_the_one_that_has_it() {
        let loopback = address::all().into_iter().find(|own| own.ip == IpAddr::V4(Ipv4Addr::LOCALHOST));
        let at = SocketAddr::from((Ipv4Addr::LOCALHOST, 0));
        assert_eq!(interface_with(at), loopback.map(|own| own.interface));
        assert_eq!(interface_with("203.0.113.254:0".parse().expect("an address")), None);
    }

    #[test]
    fn one_device_has_all_addresses() {
        assert_eq!(RdmaDevice::list().len(), 1);
        for ip in [IpAddr::V4(Ipv4Addr::LOCALHOST), IpAddr::V4(Ipv4Addr::new(192, 0, 2, 1))] {
            let device = RdmaDevice::of_address(SocketAddr::new(ip, 0)).expect("one");
            assert_eq!((device.name(), device.port().interface()), ("uwarp0", None));
        }
    }
}
