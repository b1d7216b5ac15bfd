//! The default settings.

#[derive(PartialEq, Eq)]
pub enum View {
    Roce,
    Ib,
}

pub struct Config {
    pub view: View,
    pub multicast_port: u16,
    pub spin: bool,
    pub crc: bool,
    pub markers: bool,
    pub find_uwarp_peers: bool,
    pub ud_mtu: UdMtu,
}

/// Messages of the scenarios are short.
#[derive(PartialEq)]
pub enum UdMtu {
    Auto,
    Interface,
}

impl Config {
    pub fn get() -> &'static Self {
        &Self {
            view: View::Roce,
            multicast_port: 4791,
            spin: false,
            crc: true,
            markers: false,
            find_uwarp_peers: true,
            ud_mtu: UdMtu::Interface,
        }
    }
}
