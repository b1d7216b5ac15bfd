//! The default settings.

pub struct Config {
    pub spin: bool,
    pub crc: bool,
    pub markers: bool,
    pub find_uwarp_peers: bool,
}

impl Config {
    pub fn get() -> &'static Self {
        &Self { spin: false, crc: true, markers: false, find_uwarp_peers: true }
    }
}
