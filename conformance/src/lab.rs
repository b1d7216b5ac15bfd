//! The siw lab: a virtual machine with the kernel's own software iWARP, and commands at both ends of its
//! wire.
//!
//! `siw/build-initramfs.sh` and `siw/run-vm.sh` do the work and can be used by hand; `siw/README.md` says
//! how, and what siw was seen to do.

use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::netns::NetNs;
use crate::process::{Cmd, Output};
use crate::topology::free_port;
use crate::{Context, Failure, Outcome, fail};

/// A booted guest. When this is dropped, the guest is powered off and its namespace is removed.
pub struct Lab {
    ns: NetNs,
    scripts: PathBuf,
}

impl Lab {
    /// The guest's address.
    pub const GUEST: &'static str = "10.77.0.2";
    /// The host's address on the wire to the guest.
    pub const HOST: &'static str = "10.77.0.1";
    /// Longest life of a guest whose owner was killed.
    const LIFE: Duration = Duration::from_secs(1500);

    /// Builds the guest's image unless it is there, and boots it with stock siw on `eth0`. It then takes
    /// commands.
    pub fn boot() -> Outcome<Lab> {
        let scripts = Path::new(env!("CARGO_MANIFEST_DIR")).join("siw");
        let builder = scripts.join("build-initramfs.sh");
        if !is_built_by(&builder).context(builder.display())? {
            let dir = work_dir();
            eprintln!("siw lab: building the guest in {}; once, about a minute", dir.display());
            Cmd::new(builder).limit(Duration::from_secs(900)).run_ok()?;
        }
        let lab = Lab { ns: NetNs::new()?, scripts };
        let start = format!("--ns {} -t {} --start", lab.ns.name(), Lab::LIFE.as_secs());
        lab.script().args(&start).limit(Duration::from_secs(240)).run_ok()?;
        lab.guest_ok(&format!("echo {SEND_BUFFERS} > /proc/sys/net/ipv4/tcp_wmem"))?;
        Ok(lab)
    }

    /// The namespace whose `tap0` is the host's end of the wire.
    pub fn ns(&self) -> &NetNs {
        &self.ns
    }

    /// Runs a shell command in the guest to its end and returns what it printed.
    pub fn guest(&self, command: &str) -> Outcome<Output> {
        let args = format!("--ns {} -t 180 --exec", self.ns.name());
        let mut out = self.script().args(&args).arg(command).limit(Duration::from_secs(190)).run()?;
        out.shown = format!("[guest] {command}");
        Ok(out)
    }

    /// Like [`Lab::guest`]; fails unless it exits with 0.
    pub fn guest_ok(&self, command: &str) -> Outcome<Output> {
        let out = self.guest(command)?;
        out.exited_ok()?;
        Ok(out)
    }

    /// Runs a program in the guest for at most `limit` seconds, and keeps its two streams apart.
    pub fn guest_program(&self, command: &str, limit: u32) -> Outcome<Output> {
        let script = format!(
            "(timeout {limit} {command} >/tmp/client.out 2>/tmp/client.err; rc=$?; {}; exit $rc)",
            show("client")
        );
        Ok(parted(self.guest(&script)?, command))
    }

    /// Starts a server in the guest, at most `limit` seconds long, and returns when it listens on `port`. One
    /// at a time: its output waits for [`Lab::guest_server_end`].
    pub fn guest_serve(&self, command: &str, port: u16, limit: u32) -> Outcome {
        let script = format!(
            "rm -f /tmp/server.rc; \
             sh -c 'timeout {limit} {command} >/tmp/server.out 2>/tmp/server.err; \
               echo $? >/tmp/server.rc' >/dev/null 2>&1 & \
             n=0; while [ $n -lt 1000 ]; do \
               ss -ltn | grep -q ':{port} ' && exit 0; [ -e /tmp/server.rc ] && break; \
               usleep 20000; n=$((n+1)); \
             done; cat /tmp/server.out /tmp/server.err; exit 1"
        );
        // The background job must not hold the exec's connection, whose end is the end of the command: a
        // shell of its own, since a forked subshell would keep the descriptors that `eval` set aside. A
        // subshell, because the guest's exec evaluates the line itself and `exit` would end it before its
        // status.
        let out = self.guest(&format!("({script})"))?;
        if out.ok() { Ok(()) } else { out.failure(format_args!("`{command}` does not listen in the guest")) }
    }

    /// Waits for the guest's server, stops it after `seconds` if need be, and returns its output and status.
    pub fn guest_server_end(&self, program: &str, seconds: u32) -> Outcome<Output> {
        let rounds = seconds * 20;
        let script = format!(
            "(n=0; while [ $n -lt {rounds} ] && ! [ -e /tmp/server.rc ]; do usleep 50000; n=$((n+1)); done; \
             killall {program} 2>/dev/null && usleep 200000; \
             {}; exit $(cat /tmp/server.rc 2>/dev/null || echo 143))",
            show("server")
        );
        Ok(parted(self.guest(&script)?, &format!("{program} (server)")))
    }

    /// Copies a file of this machine into the guest, to be run there.
    pub fn put(&self, file: &Path, to: &str) -> Outcome {
        let port = free_port();
        self.guest_serve(&format!("sh -c \"nc -l -p {port} >{to}\""), port, 60)?;
        let send = format!("cat {} >/dev/tcp/{}/{port}", file.display(), Lab::GUEST);
        Cmd::new("bash").arg("-c").arg(send).in_ns(Some(&self.ns)).run_ok()?;
        let size = std::fs::metadata(file).context(file.display())?.len();
        // Not by name: the guest's own shell comes through another `nc`.
        let received =
            "n=0; while [ $n -lt 600 ] && ! [ -e /tmp/server.rc ]; do usleep 50000; n=$((n+1)); done";
        let check = format!("chmod +x {to} && [ $(stat -c %s {to}) = {size} ]");
        self.guest_ok(&format!("({received}; {check})")).map(drop)
    }

    /// Replaces the guest's iWARP driver: `siw`, or `siw_knobs` with module parameters
    /// ("mpa_crc_required=1").
    pub fn driver(&self, module: &str, parameters: &str) -> Outcome {
        let out = self.guest(&format!(
            "(rmmod siw_knobs 2>/dev/null; rmmod siw 2>/dev/null; \
             modprobe {module} {parameters} && rdma link add siw0 type siw netdev eth0 && \
             rdma link | grep -q ACTIVE)"
        ))?;
        if out.ok() { Ok(()) } else { out.failure(format_args!("cannot load {module} {parameters}")) }
    }

    fn script(&self) -> Cmd {
        Cmd::new(self.scripts.join("run-vm.sh"))
    }
}

impl Drop for Lab {
    fn drop(&mut self) {
        let _ = self.script().args(&format!("--ns {} --down", self.ns.name())).run();
        let _ = std::fs::remove_dir_all(work_dir().join(format!("vm-{}", self.ns.name())));
    }
}

/// `tcp_wmem` of the guest: more than a row of the table sends. A full send buffer makes siw send FPDUs with
/// a wrong CRC (trap 12 of `siw/README.md`), which uwarp must refuse.
const SEND_BUFFERS: &str = "4096 16777216 16777216";

const STDERR: &str = "SIWLAB-STDERR";

/// Shell that prints both streams of a program so that [`parted`] can tell them apart.
fn show(who: &str) -> String {
    format!("cat /tmp/{who}.out; echo; echo {STDERR}; cat /tmp/{who}.err")
}

fn parted(mut out: Output, command: &str) -> Output {
    out.shown = format!("[guest] {command}");
    let all = std::mem::take(&mut out.stdout);
    let (stdout, stderr) = all.split_once(&format!("\n{STDERR}\n")).unwrap_or((&all, ""));
    (out.stdout, out.stderr) = (stdout.to_owned(), stderr.to_owned());
    out
}

/// Runs the small independent iWARP peer of `siw/mpa_lab.py` on the host's side of the wire.
pub fn mpa_lab(lab: &Lab, args: &str) -> Cmd {
    Cmd::new("python3").arg(lab.scripts.join("mpa_lab.py")).args(args).in_ns(Some(lab.ns()))
}

/// Where the scripts keep the guest's image.
fn work_dir() -> PathBuf {
    match (std::env::var_os("SIWLAB_WORK"), std::env::var_os("HOME")) {
        (Some(dir), _) => dir.into(),
        (None, Some(home)) => Path::new(&home).join(".cache/siwlab"),
        (None, None) => "/root/.cache/siwlab".into(),
    }
}

/// Whether the guest's image is there, complete, and made by this very script.
fn is_built_by(builder: &Path) -> std::io::Result<bool> {
    let builder = std::fs::read(builder)?;
    Ok(std::fs::read(work_dir().join("built-by")).is_ok_and(|earlier| earlier == builder))
}

/// Boots the lab; the failure explains the remedy to every case that needs it.
pub fn boot_or_explain() -> Outcome<Lab> {
    match Lab::boot() {
        Ok(lab) => Ok(lab),
        Err(Failure(why)) => {
            fail!("the siw lab does not start (try conformance/siw/run-vm.sh 'rdma link'): {why}")
        }
    }
}
