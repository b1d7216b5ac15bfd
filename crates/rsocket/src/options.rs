//! What a program sets before it connects.

use uwarp_process::PerProcess;

use crate::machine::{LOW_WATER, Sizes};
use crate::wire::{scale, unscale};

/// Where an administrator sets defaults, one number in each file (rsocket(7)).
const DEFAULTS: &str = "/etc/rdma/rsocket";
/// Fewest work requests of a queue.
const FEWEST: u16 = 16;
/// Least receive buffer. Half of it is granted at a time.
const LEAST_BUFFER: u32 = 2 * LOW_WATER;
/// Each of the two buffers. With librdmacm's 128 KiB, streams with the CRC on reach half to three quarters as
/// much where other work delays an end; with more than this, the rings do not stay in the processor's caches.
const BUFFER: u32 = 256 * 1024;
/// Largest buffer: lengths are 32 bits, of which messages have 29.
const MOST_BUFFER: u32 = 1 << 29;

/// Options of a socket.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(missing_docs)]
pub struct Options {
    /// Of the buffers, as a query returns them: twice what a program sets.
    pub send_buffer: u32,
    pub receive_buffer: u32,
    /// `RDMA_SQSIZE`, `RDMA_RQSIZE`, `RDMA_INLINE`, `RDMA_IOMAPSIZE`.
    pub sends: u16,
    pub receives: u16,
    pub inline: u16,
    pub mappings: u16,
    pub reuse_address: bool,
    pub only_v6: bool,
    pub oob_inline: bool,
    pub no_delay: bool,
    pub keepalive: bool,
    /// Seconds; 0: the system's.
    pub keep_idle: u32,
    /// Seconds that a close waits; `None`: as long as it usefully can.
    pub linger: Option<u32>,
    pub tos: u8,
}

impl Options {
    /// Those of a new socket.
    pub fn new() -> Self {
        static DEFAULT: PerProcess<Options> = PerProcess::new(|| Options::with_defaults(file));
        *DEFAULT
    }

    fn with_defaults(file: impl Fn(&str) -> Option<u32>) -> Self {
        let short = |name, default: u16| {
            file(name).map_or(default, |number| u16::try_from(number).unwrap_or(u16::MAX))
        };
        Self {
            send_buffer: file("wmem_default").unwrap_or(BUFFER),
            receive_buffer: file("mem_default").unwrap_or(BUFFER),
            sends: short("sqsize_default", 384),
            receives: short("rqsize_default", 384),
            inline: short("inline_default", 64),
            mappings: unscale(scale(short("iomap_size", 0))),
            reuse_address: false,
            only_v6: false,
            oob_inline: false,
            no_delay: false,
            keepalive: false,
            keep_idle: 0,
            linger: None,
            tos: 0,
        }
    }

    /// The sizes of a stream.
    pub fn sizes(&self, most_requests: u32) -> Sizes {
        // 0xFFFF would look like no credit at all beside the receives for control messages.
        let most = u16::try_from(most_requests).unwrap_or(u16::MAX).min(0x7FF0) - 16;
        let even = |bytes: u32| bytes.clamp(LEAST_BUFFER, MOST_BUFFER) & !63;
        Sizes {
            sends: self.sends.clamp(FEWEST, most),
            receives: self.receives.clamp(FEWEST, most),
            send_buffer: even(self.send_buffer),
            receive_buffer: even(self.receive_buffer),
            mappings: self.mappings,
        }
    }

    /// Seconds without traffic before a sign of life.
    pub fn keep_idle(&self) -> u32 {
        match self.keep_idle {
            0 => number("/proc/sys/net/ipv4/tcp_keepalive_time").unwrap_or(7200),
            seconds => seconds,
        }
    }
}

impl Default for Options {
    fn default() -> Self {
        Self::new()
    }
}

fn file(name: &str) -> Option<u32> {
    number(&format!("{DEFAULTS}/{name}"))
}

fn number(path: &str) -> Option<u32> {
    std::fs::read_to_string(path).ok()?.split_whitespace().next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_administrators_numbers_are_defaults() {
        let plain = Options::with_defaults(|_| None);
        assert_eq!((plain.sends, plain.receive_buffer, plain.mappings), (384, 262_144, 0));
        let set = Options::with_defaults(|name| match name {
            "mem_default" => Some(4),
            "sqsize_default" => Some(99_999),
            "iomap_size" => Some(300),
            _ => None,
        });
        assert_eq!((set.receive_buffer, set.sends, set.mappings), (4, u16::MAX, 256));
        let sizes = set.sizes(32_768);
        assert_eq!((sizes.receive_buffer, sizes.sends), (LEAST_BUFFER, 0x7FE0));
    }
}
