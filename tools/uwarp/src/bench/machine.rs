//! The properties of the machine that the figures depend on.

use std::fs;

use serde::Serialize;

/// The machine and its state.
#[derive(Clone, Debug, Serialize)]
pub struct Machine {
    pub cpu: String,
    /// Those that this process may run on.
    pub cores: usize,
    pub kernel: String,
    /// The kernel's clock source: anything but the processor's own counter makes each reading of the clock a
    /// system call.
    pub clock: String,
    /// Of the last minute, before the first measurement and after the last; the ends themselves make up to 2
    /// of it.
    pub load: [Option<f64>; 2],
    pub uwarp: &'static str,
    /// Settings of the library that were in force.
    pub settings: Vec<String>,
}

impl Machine {
    pub fn look() -> Machine {
        let uname = rustix::system::uname();
        let mut settings: Vec<_> = std::env::vars_os()
            .filter(|(name, _)| name.as_encoded_bytes().starts_with(b"UWARP_"))
            .map(|(name, value)| format!("{}={}", name.to_string_lossy(), value.to_string_lossy()))
            .collect();
        settings.sort();
        Machine {
            cpu: cpu_model(),
            cores: std::thread::available_parallelism().map_or(1, usize::from),
            kernel: format!("{} {}", uname.sysname().to_string_lossy(), uname.release().to_string_lossy()),
            clock: read("/sys/devices/system/clocksource/clocksource0/current_clocksource"),
            load: [load(), None],
            uwarp: env!("UWARP_VERSION"),
            settings,
        }
    }

    /// Reads the load once more.
    pub fn look_again(&mut self) {
        self.load[1] = load();
    }

    /// What to say if other work ran in the minute before the first measurement.
    pub fn busy(&self) -> Option<String> {
        let load = self.load[0].filter(|load| *load > self.cores as f64 / 2.0)?;
        let plural = if self.cores == 1 { "" } else { "s" };
        Some(format!(
            "The machine was busy before (load {load:.1} on {} core{plural}): if it still is, do not trust \
             these figures.",
            self.cores
        ))
    }
}

fn cpu_model() -> String {
    let info = read("/proc/cpuinfo");
    // Of the names in use on the architectures; the first line that has one.
    let value = info.lines().find_map(|line| {
        let (name, value) = line.split_once(':')?;
        matches!(name.trim(), "model name" | "Model" | "cpu model").then(|| value.trim().to_owned())
    });
    value.unwrap_or_else(|| std::env::consts::ARCH.to_owned())
}

fn load() -> Option<f64> {
    read("/proc/loadavg").split_whitespace().next()?.parse().ok()
}

/// A file of the kernel's; empty if there is none.
fn read(path: &str) -> String {
    fs::read_to_string(path).unwrap_or_default().trim().to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_busy_machine_is_named() {
        let busy = |load, cores| Machine { load: [load, Some(9.0)], cores, ..Machine::look() }.busy();
        assert_eq!(busy(Some(0.9), 2), None);
        assert_eq!(busy(None, 2), None);
        assert!(
            busy(Some(6.14), 2).unwrap().starts_with("The machine was busy before (load 6.1 on 2 cores)")
        );
        assert!(busy(Some(0.6), 1).unwrap().contains("on 1 core)"));
    }
}
