//! Storage: tgt's iSER target, with libiscsi's programs and QEMU's as initiators.
//!
//! libiscsi 1.19 crashes now and then when it closes an iSER connection (docs/limits.md, "Stacks on top").
//! `qemu-io`, which checks the data, frees much at its end and meets this once in some tens of runs. It is
//! killed when its work is done, which is also a test of the target. libiscsi's own programs end right after
//! they close; none of them crashed.

use std::os::unix::fs::FileExt;
use std::os::unix::process::ExitStatusExt;
use std::path::PathBuf;
use std::time::Duration;

use uwarp_conformance::check;
use uwarp_conformance::pair;
use uwarp_conformance::process::{Cmd, Output, Running};
use uwarp_conformance::topology::{Place, free_port};
use uwarp_conformance::{Context, Outcome, fail, require};

use super::{Env, Scratch, World};

/// For programs that a busy machine slows down.
const LONG: Duration = Duration::from_secs(180);

const TARGET: &str = "iqn.2026-01.test.uwarp:disk";
const INITIATOR: &str = "iqn.2026-01.test.uwarp:client";
/// Of `qemu-io`.
const OTHER_INITIATOR: &str = "iqn.2008-11.org.linux-kvm";
const DISK: u64 = 64 << 20;
/// How much is written with one command. libiscsi takes less than 512 KiB over iSER.
const CHUNK: usize = 256 << 10;

/// A running `tgtd` with one disk.
struct Target<'a> {
    world: &'a World,
    env: Env,
    place: Place<'a>,
    daemon: Running,
    dir: Scratch,
    /// Of the disk, as initiators name it.
    url: String,
}

impl World {
    /// `tgtd` with an iSER target, and its initiators one after the other.
    pub fn iser(&self, env: Env, place: Place<'_>) -> Outcome {
        let target = Target::start(self, env, place)?;
        let all = || -> Outcome {
            target.inquiry()?;
            target.patterns()?;
            target.load()
        };
        let result = all();
        let out = target.daemon.stop();
        result.or_else(|why| fail!("{why}--- target\n{}", out.text()))
    }
}

impl<'a> Target<'a> {
    fn start(world: &'a World, env: Env, place: Place<'a>) -> Outcome<Target<'a>> {
        let dir = Scratch::new("tgt")?;
        let (iscsi, iser) = (free_port(), free_port());
        // The pool is 64 MiB of registered memory. iSCSI's own port has to be somewhere, too.
        let line =
            format!("tgtd -f -C 0 --iscsi portal={}:{iscsi} --iser port={iser},pool_sz_mb=64", place.address);
        let daemon = world
            .over_uwarp(&line, place.server)?
            .envs(env)
            .env("TGT_IPC_SOCKET", dir.path().join("control"));
        let daemon = pair::serve(&daemon.limit(LONG * 2), iser)?;
        let url = format!("iser://{}:{iser}/{TARGET}/1", place.address);
        let target = Target { world, env, place, daemon, dir, url };
        let socket = target.dir.path().join("control.0");
        target.daemon.until(LONG, "controllable", |_| socket.exists())?;
        target.prepare()?;
        Ok(target)
    }

    fn disk(&self) -> PathBuf {
        self.dir.path().join("disk")
    }

    fn prepare(&self) -> Outcome {
        let file = std::fs::File::create(self.disk()).context(self.disk().display())?;
        file.set_len(DISK).context("set_len")?;
        let admin = |line: &str| -> Outcome {
            let line = format!("tgtadm -C 0 --lld iser {line}");
            let admin =
                self.world.over_uwarp(&line, None)?.env("TGT_IPC_SOCKET", self.dir.path().join("control"));
            admin.run_ok().map(drop)
        };
        admin(&format!("--op new --mode target --tid 1 -T {TARGET}"))?;
        admin(&format!("--op new --mode logicalunit --tid 1 --lun 1 -b {}", self.disk().display()))?;
        // Over iSER, tgt 1.0.85 wants the initiator's address and its name to be allowed.
        admin("--op bind --mode target --tid 1 -I ALL")?;
        for name in [OTHER_INITIATOR, INITIATOR] {
            admin(&format!("--op bind --mode target --tid 1 -Q {name}"))?;
        }
        Ok(())
    }

    fn initiator(&self, line: &str) -> Outcome<Cmd> {
        Ok(self.world.over_uwarp(line, self.place.client)?.envs(self.env).limit(LONG))
    }

    /// Runs an initiator with the disk's name behind its arguments.
    fn run(&self, line: &str) -> Outcome<Output> {
        let out = self.initiator(line)?.arg(&self.url).run_ok()?;
        check::no_complaints(&out)?;
        Ok(out)
    }

    fn inquiry(&self) -> Outcome {
        let out = self.run(&format!("iscsi-inq -i {INITIATOR}"))?;
        check::has(&out, "Vendor:IET")?;
        let out = self.run(&format!("iscsi-readcapacity16 -i {INITIATOR}"))?;
        check::has(&out, &format!("Total size:{DISK}"))
    }

    /// `qemu-io` writes a byte for each chunk, many at once, and reads them back in another connection; and
    /// they are in the target's file.
    fn patterns(&self) -> Outcome {
        const CHUNKS: usize = 32;
        let byte = |chunk: usize| chunk as u8 + 0x41;
        for (what, done) in [("aio_write", "wrote"), ("aio_read", "read")] {
            let mut io = self.initiator("qemu-io -f raw")?;
            for chunk in 0..CHUNKS {
                io = io.arg("-c").arg(format!("{what} -P {} {} {CHUNK}", byte(chunk), chunk * CHUNK));
            }
            let out = io.args("-c aio_flush -c").arg("sigraise 9").arg(&self.url).run()?;
            check::no_complaints(&out)?;
            let killed = out.status.is_some_and(|status| status.signal() == Some(9));
            let done = format!("{done} {CHUNK}/{CHUNK} bytes");
            let lines = out.stdout.lines().filter(|line| line.contains(&done)).count();
            require!(killed && lines == CHUNKS, "{lines} of {CHUNKS} chunks\n{}", out.text());
        }
        let file = std::fs::File::open(self.disk()).context(self.disk().display())?;
        let mut bytes = vec![0; CHUNK];
        for chunk in 0..CHUNKS {
            file.read_exact_at(&mut bytes, (chunk * CHUNK) as u64).context("read")?;
            require!(
                bytes.iter().all(|b| *b == byte(chunk)),
                "chunk {chunk} is not in the target's file as it was written"
            );
        }
        Ok(())
    }

    /// `iscsi-perf`: 32 reads in flight for some seconds.
    fn load(&self) -> Outcome {
        let seconds = if self.world.thorough { 20 } else { 1 };
        let out = self.run(&format!("iscsi-perf -i {INITIATOR} -r -m 32 -b 64 -t {seconds}"))?;
        check::has(&out, "finished.")
    }
}
