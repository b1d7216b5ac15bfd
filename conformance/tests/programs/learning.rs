//! Machine learning's communication: what NCCL does with a verbs device, Gloo, Mooncake, and NIXL.

use std::path::{Path, PathBuf};

use uwarp_conformance::netns::Veth;
use uwarp_conformance::process::Cmd;
use uwarp_conformance::topology::Topology::*;
use uwarp_conformance::topology::{Place, free_port};
use uwarp_conformance::{Context, Outcome, cc, check, pair, require};

use super::Run::{Custom, Long};
use super::{CRC_OFF, Case, Env, LONG, Scratch, World};

const NCCL: &str = "functions and files as NCCL looks for them; both ways, each byte of 400 requests; \
                    grants seen without a verb";

const MOONCAKES: &str = "its RDMA transport; what is written is read back, every byte";
const NIXLS: &str = "its UCX over rc_verbs; what is written is read back, every byte";

/// All rows. NCCL's own code does nothing without a GPU.
pub fn cases() -> Vec<Case> {
    let nccl = |manner, at, run| Case { program: "NCCL", manner, checked: NCCL, at, run: Custom(run) };
    vec![
        nccl("its calls, c/nccl.c", &[Veth1500V4], |w, p| w.nccl(1, 1, &[], p)),
        nccl("its calls, c/nccl.c, 8 queue pairs", &[Loopback4], |w, p| w.nccl(8, 1, &[], p)),
        nccl("its calls, c/nccl.c, 2 queue pairs, UWARP_CRC=off", &[Veth9000V4], |w, p| {
            w.nccl(2, 1, CRC_OFF, p)
        }),
        nccl("its calls, c/nccl.c, 4 queue pairs on two devices used as one", &[Veth1500V4], two_devices),
        Case {
            program: "libgloo",
            manner: "c/gloo.cc, 3 ranks",
            checked: "sums over all ranks by two algorithms, every number",
            at: &[Loopback4, Veth1500V4],
            run: Long(|w, p| w.gloo(3, p)),
        },
        Case {
            program: "wheel mooncake-transfer-engine-non-cuda",
            manner: "0.3.13.post1, py/mooncake_transfer.py",
            checked: MOONCAKES,
            at: &[Loopback4, Veth1500V4],
            run: Long(|w, p| w.mooncake(p)),
        },
        Case {
            program: "wheel nixl-cu12",
            manner: "1.5.1, py/nixl_transfer.py, libuwarp.so preloaded",
            checked: NIXLS,
            at: &[Loopback4, Veth1500V4],
            run: Long(|w, p| w.nixl(p)),
        },
    ]
}

impl World {
    /// A program that is shown the device's files, too; they are in `home`.
    pub fn shown_files(&self, cmd: Cmd, home: &Scratch) -> Outcome<Cmd> {
        let words = [self.dist()?.uwarp()?.into_os_string(), "run".into(), "--files".into(), "on".into()];
        let front = words.into_iter().chain(["--".into()]);
        Ok(cmd.behind(front).env("XDG_RUNTIME_DIR", home.path()).unset("LD_LIBRARY_PATH").limit(LONG))
    }

    fn nccl(&self, queue_pairs: u32, devices: u32, env: Env, place: Place<'_>) -> Outcome {
        let (dir, port) = (Scratch::new("nccl")?, free_port());
        let program = cc::build_by("cc", "nccl", dir.path(), "-ldl")?;
        let end = |which: &str, ns| {
            let cmd = Cmd::new(&program).args(&format!("{which} {} {port} {queue_pairs}", place.address));
            Ok(self.shown_files(cmd, &dir)?.envs(env).in_ns(ns))
        };
        let ends = pair::run(&end("first", place.server)?, &end("second", place.client)?, port)?;
        for out in [&ends.server, &ends.client] {
            check::statements(out).or_else(|why| ends.failure(why))?;
            check::has(out, &format!("ok {devices} devices, {queue_pairs} queue pairs each way"))?;
        }
        Ok(())
    }
}

fn two_devices(world: &World, _place: Place<'_>) -> Outcome {
    let veth = Veth::twice(1500)?;
    let (server, client) = (Some(&veth.server), Some(&veth.client));
    let place = Place { server, client, address: Veth::SERVER4, any: "0.0.0.0" };
    world.nccl(4, 2, &[("UWARP_DEVICES", "per-interface")], place)
}

/// Wheels with their versions, and the environment of Python that they are put into.
const MOONCAKE: (&str, &[&str]) = ("mooncake", &["mooncake-transfer-engine-non-cuda==0.3.13.post1"]);
const NIXL: (&str, &[&str]) = ("nixl", &["nixl-cu12==1.5.1", "numpy==2.4.6"]);

/// The interpreter of an environment of Python with these wheels, which is made if it is not there. Without
/// what they depend on: that would be PyTorch, which the programs here do not use.
pub fn python((name, wheels): (&str, &[&str])) -> Outcome<PathBuf> {
    let home = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("python-{name}"));
    let interpreter = home.join("bin/python");
    let ready = home.join("ready");
    if !ready.exists() {
        Cmd::line("/usr/bin/python3 -m venv --clear").arg(&home).run_ok()?;
        let install = Cmd::new(&interpreter).args("-m pip install --quiet --no-deps").args(&wheels.join(" "));
        install.limit(LONG * 10).run_ok()?;
        std::fs::write(&ready, "").context(ready.display())?;
    }
    Ok(interpreter)
}

fn script(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("py").join(name)
}

impl World {
    /// Rank 0 in the server's place, the others in the client's.
    fn gloo(&self, ranks: u32, place: Place<'_>) -> Outcome {
        let dir = Scratch::new("gloo")?;
        let program = cc::build_cpp("gloo", dir.path(), "-lgloo")?;
        let store = dir.path().join("store");
        std::fs::create_dir_all(&store).context(store.display())?;
        let start = |rank: u32| {
            let ns = if rank == 0 { place.server } else { place.client };
            let line = format!("{} {rank} {ranks} {}", program.display(), store.display());
            self.over_uwarp(&line, ns)?.limit(LONG).spawn()
        };
        let running: Vec<_> = (0..ranks).map(start).collect::<Outcome<_>>()?;
        for rank in running {
            let out = rank.wait()?;
            check::statements(&out)?;
            check::has(&out, "a word of each of the others")?;
        }
        Ok(())
    }

    fn mooncake(&self, place: Place<'_>) -> Outcome {
        let (interpreter, dir) = (python(MOONCAKE)?, Scratch::new("mooncake")?);
        let own = if place.client.is_some() { Veth::CLIENT4 } else { place.address };
        let end = |role: &str, own: &str, ns| {
            let cmd = Cmd::new(&interpreter).arg(script("mooncake_transfer.py"));
            let cmd = cmd.args(&format!("{role} {} {own}", place.address)).arg(dir.path().join("where"));
            Ok(self.shown_files(cmd, &dir)?.in_ns(ns))
        };
        let owner = end("owner", place.address, place.server)?.spawn()?;
        let user = end("user", own, place.client)?.run()?;
        let owner = owner.wait()?;
        for out in [&owner, &user] {
            check::statements(out)?;
            // It would also go on over TCP.
            let installed = out.stderr.contains("installTransport, type=rdma");
            require!(installed && !out.stderr.contains("TcpTransport"), "not over RDMA\n{}", out.text());
        }
        Ok(())
    }

    /// The wheel has a libibverbs of its own, under a name of its own. So the library is preloaded.
    fn nixl(&self, place: Place<'_>) -> Outcome {
        let (interpreter, dir) = (python(NIXL)?, Scratch::new("nixl")?);
        let lib = self.dist()?.lib();
        let preloaded = ["libuwarp-fs.so", "libuwarp.so"].map(|name| lib.join(name).display().to_string());
        let cmd = Cmd::new("env").arg(format!("LD_PRELOAD={}", preloaded.join(":")));
        let cmd = cmd.arg(&interpreter).arg(script("nixl_transfer.py"));
        let cmd = cmd.env("UCX_TLS", "rc_verbs,ud_verbs").env("UCX_LOG_LEVEL", "info");
        let out = self.shown_files(cmd, &dir)?.in_ns(place.client).run()?;
        check::statements(&out)?;
        check::has(&out, "rma(rc_verbs/uwarp0:1)")
    }
}
