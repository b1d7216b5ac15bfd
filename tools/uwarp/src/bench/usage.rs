//! The memory and processor time that a process uses, measured by itself.

use std::fs;

use rustix::time::ClockId;

use super::protocol::{Failure, Result, Usage};

/// Measures this process, which has this number of connections.
pub fn measure(connections: u64) -> Result<Usage> {
    let before = cpu();
    // (glibc 2.31 has no mallinfo2. These numbers have 32 bits: a heap is known up to 4 GiB.)
    // SAFETY: takes nothing and reads malloc's own counts.
    #[allow(unsafe_code)]
    let heap = unsafe { libc::mallinfo() };
    let mut usage = Usage {
        connections,
        heap: u64::from(heap.uordblks.cast_unsigned()) + u64::from(heap.hblkhd.cast_unsigned()),
        resident: kilobytes("/proc/self/smaps_rollup", &["Private_Dirty"])? * 1024,
        cpu_us: [before, 0],
        kernel: kilobytes("/proc/meminfo", &["Slab", "Shmem"]).unwrap_or(0) * 1024
            + tcp_buffers().unwrap_or(0),
    };
    usage.cpu_us[1] = cpu();
    Ok(usage)
}

fn cpu() -> u64 {
    let time = rustix::time::clock_gettime(ClockId::ProcessCPUTime);
    time.tv_sec.unsigned_abs() * 1_000_000 + time.tv_nsec.unsigned_abs() / 1000
}

/// The sum of the lines with these names.
fn kilobytes(file: &str, names: &[&str]) -> Result<u64> {
    let text = fs::read_to_string(file).map_err(Failure::of("memory in use"))?;
    let value = |line: &str| {
        let (name, rest) = line.split_once(':')?;
        names.contains(&name).then(|| rest.split_whitespace().next()?.parse::<u64>().ok()).flatten()
    };
    Ok(text.lines().filter_map(value).sum())
}

/// Pages that TCP holds for bytes in flight.
fn tcp_buffers() -> Option<u64> {
    let text = fs::read_to_string("/proc/net/sockstat").ok()?;
    let line = text.lines().find(|line| line.starts_with("TCP:"))?;
    let pages: u64 = line.split_once(" mem ")?.1.trim().parse().ok()?;
    Some(pages * rustix::param::page_size() as u64)
}
