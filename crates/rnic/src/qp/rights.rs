//! Who may name memory of a queue pair that has no connection.

use std::net::IpAddr;

use crate::error::VerbsError;
use crate::mr::Access;

/// Sources that a program may name.
const SOURCES_MOST: usize = 64;

/// Peers that may name memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Source {
    /// All whose address begins with the first `bits` bits of this one. An IPv4 address stands for its mapped
    /// IPv6 address.
    pub prefix: IpAddr,
    /// Up to 128.
    pub bits: u8,
    /// `None`: any queue pair.
    pub qpn: Option<u32>,
}

impl Source {
    fn covers(&self, from: IpAddr, qpn: u32) -> bool {
        let number = |address: IpAddr| match address {
            IpAddr::V4(v4) => v4.to_ipv6_mapped().to_bits(),
            IpAddr::V6(v6) => v6.to_bits(),
        };
        let differ = (number(self.prefix) ^ number(from)).checked_shr(128 - u32::from(self.bits.min(128)));
        differ.unwrap_or(0) == 0 && self.qpn.is_none_or(|own| own == qpn)
    }
}

/// Why memory must not be used.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Refused {
    /// Nobody names memory here.
    Never,
    /// This peer must not, or not so; nobody learns which of these it is.
    Peer,
}

/// Who may name memory, and how.
#[derive(Debug, Default)]
pub(super) struct Rights {
    /// 0: nobody may.
    pub job_key: u64,
    /// What the queue pair grants. `None`: whatever the region grants.
    pub access: Option<Access>,
    /// Empty: whoever has the job key.
    pub sources: Vec<Source>,
}

impl Rights {
    /// Those of a queue pair with this job key.
    pub fn with(job_key: u64) -> Self {
        Self { job_key, ..Self::default() }
    }

    /// Names peers that may name memory. Once there is one, all others may not.
    pub fn allow(&mut self, source: Source) -> Result<(), VerbsError> {
        if source.bits > 128 {
            return Err(VerbsError::Invalid("a prefix has at most 128 bits"));
        }
        if self.sources.len() >= SOURCES_MOST {
            return Err(VerbsError::Invalid("a queue pair has at most 64 sources"));
        }
        self.sources.push(source);
        Ok(())
    }

    /// Whether the queue pair `qpn` at `from` may use memory so.
    pub fn check(&self, job_key: Option<u64>, from: IpAddr, qpn: u32, need: Access) -> Result<(), Refused> {
        if self.job_key == 0 {
            return Err(Refused::Never);
        }
        let has_key = job_key == Some(self.job_key);
        let is_named = self.sources.is_empty() || self.sources.iter().any(|one| one.covers(from, qpn));
        let is_granted = self.access.is_none_or(|access| access.contains(need));
        if has_key && is_named && is_granted { Ok(()) } else { Err(Refused::Peer) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_source_is_a_prefix_and_perhaps_a_number() {
        let source = |prefix: &str, bits, qpn| Source { prefix: prefix.parse().unwrap(), bits, qpn };
        let at = |address: &str| address.parse::<IpAddr>().unwrap();
        assert!(source("::", 0, None).covers(at("10.1.2.3"), 1), "all");
        assert!(source("10.1.0.0", 112, None).covers(at("10.1.2.3"), 1));
        assert!(!source("10.1.0.0", 112, None).covers(at("10.2.2.3"), 1));
        assert!(source("10.1.2.3", 128, Some(7)).covers(at("10.1.2.3"), 7));
        assert!(!source("10.1.2.3", 128, Some(7)).covers(at("10.1.2.3"), 8));
        assert!(!source("10.1.2.3", 128, None).covers(at("10.1.2.2"), 7));
        assert!(source("fd00::", 8, None).covers(at("fd12::1"), 7));
        assert!(!source("fd00::", 8, None).covers(at("fe80::1"), 7));
        assert!(!source("fd00::", 8, None).covers(at("10.0.0.1"), 7));
    }
}
