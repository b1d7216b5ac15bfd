//! QEMU's live migration over RDMA: a guest that writes its memory all the time goes on at another QEMU.

use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use uwarp_conformance::check;
use uwarp_conformance::netns::{self, NetNs};
use uwarp_conformance::process::{Cmd, Output, Running};
use uwarp_conformance::topology::{Place, free_port};
use uwarp_conformance::{Context, Outcome, fail, require};

use super::{Env, Scratch, World};

/// Bounds a wait that nobody measures.
const LONG: Duration = Duration::from_secs(180);

/// How often the guest's memory is gone through before the migration may end.
const PASSES: u64 = 6;

impl World {
    /// Migrates the guest of `c/guest/writer.s`: once, or ten times over where the run is thorough.
    pub fn migrate(&self, pin_all: bool, env: Env, place: Place<'_>) -> Outcome {
        let dir = Scratch::new("guest")?;
        let image = assemble("writer", dir.path())?;
        for time in 1..=if self.thorough { 10 } else { 1 } {
            let result = self.migrate_once(&image, pin_all, env, place, dir.path());
            result.or_else(|why| fail!("migration {time}: {why}"))?;
        }
        Ok(())
    }

    fn migrate_once(&self, image: &Path, pin_all: bool, env: Env, place: Place<'_>, dir: &Path) -> Outcome {
        let mut from = Qemu::start(self, "from", image, "", env, place.client, dir)?;
        let mut to = Qemu::start(self, "to", image, "-incoming defer", env, place.server, dir)?;
        let result = live(&mut from, &mut to, pin_all, place);
        let serial = from.serial() + &to.serial();
        let ends = [from.quit(), to.quit()];
        let good = result.and_then(|()| {
            for end in &ends {
                end.exited_ok()?;
                check::no_complaints(end)?;
            }
            continuous(&serial)
        });
        good.or_else(|why| fail!("{why}\n--- from\n{}--- to\n{}", ends[0].text(), ends[1].text()))
    }
}

fn live(from: &mut Qemu, to: &mut Qemu, pin_all: bool, place: Place<'_>) -> Outcome {
    for end in [&mut *from, &mut *to] {
        let capability = json!({ "capability": "rdma-pin-all", "state": pin_all });
        end.tell("migrate-set-capabilities", json!({ "capabilities": [capability] }))?;
    }
    // The end comes when the rest takes less than this; a millisecond is too little for a guest that writes
    // so much.
    let downtime = |ms: u32| json!({ "max-bandwidth": 10u64 << 30, "downtime-limit": ms });
    from.tell("migrate-set-parameters", downtime(1))?;
    from.prints(3)?;

    let port = free_port();
    let uri = json!({ "uri": format!("rdma:{}:{port}", place.address) });
    to.tell("migrate-incoming", uri.clone())?;
    to.running.until(LONG, "listening", |r| netns::listens(r.pid(), r.ns(), port))?;
    from.tell("migrate", uri)?;
    let deadline = Instant::now() + LONG;
    loop {
        let state = from.tell("query-migrate", json!({}))?;
        match state["status"].as_str().unwrap_or_default() {
            "completed" => break,
            "failed" | "cancelled" => fail!("the migration failed: {state}"),
            _ => {}
        }
        require!(Instant::now() < deadline, "the migration does not end: {state}");
        if state["ram"]["dirty-sync-count"].as_u64().unwrap_or_default() >= PASSES {
            from.tell("migrate-set-parameters", downtime(5000))?;
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    to.prints(3)
}

/// What the guest printed at both places: the numbers of its rounds, none missing, none twice, and no
/// complaint about its memory. The guest goes on while this is read, so the last number may be cut off.
fn continuous(serial: &str) -> Outcome {
    let rounds: Vec<&str> = serial.split_whitespace().collect();
    for (round, printed) in (1u32..).zip(&rounds) {
        let expected = format!("{round:08x}");
        let last = round as usize == rounds.len();
        let right = **printed == expected || last && expected.starts_with(printed);
        require!(right, "the guest printed {printed} for {expected}: {serial}");
    }
    Ok(())
}

/// The boot sector of `c/guest/NAME.s`.
fn assemble(name: &str, dir: &Path) -> Outcome<PathBuf> {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("c/guest").join(format!("{name}.s"));
    let (object, image) = (dir.join(format!("{name}.o")), dir.join(format!("{name}.img")));
    Cmd::line("as --32 -o").arg(&object).arg(source).run_ok()?;
    Cmd::line("ld -m elf_i386 -Ttext 0x7c00 --oformat binary -o").arg(&image).arg(&object).run_ok()?;
    Ok(image)
}

/// A QEMU and the socket on which it takes orders.
struct Qemu {
    running: Running,
    orders: BufReader<UnixStream>,
    /// Where the guest's serial port goes.
    serial: PathBuf,
}

impl Qemu {
    fn start(
        world: &World,
        name: &str,
        image: &Path,
        args: &str,
        env: Env,
        ns: Option<&NetNs>,
        dir: &Path,
    ) -> Outcome<Qemu> {
        let (serial, socket) = (dir.join(format!("{name}.serial")), dir.join(format!("{name}.orders")));
        let _ = std::fs::remove_file(&socket);
        std::fs::write(&serial, "").context(serial.display())?;
        let line = format!(
            "qemu-system-x86_64 -nodefaults -display none -machine pc -accel tcg -m 128 -boot a \
             -drive file={},format=raw,if=floppy,readonly=on -serial file:{} \
             -qmp unix:{},server=on,wait=off {args}",
            image.display(),
            serial.display(),
            socket.display()
        );
        let running = world.over_uwarp(&line, ns)?.envs(env).limit(LONG * 3).spawn()?;
        let mut stream = None;
        running.until(LONG, "taking orders", |_| {
            stream = UnixStream::connect(&socket).ok();
            stream.is_some()
        })?;
        let Some(stream) = stream else { fail!("no socket for orders") };
        stream.set_read_timeout(Some(LONG)).context("set_read_timeout")?;
        let mut qemu = Qemu { running, orders: BufReader::new(stream), serial };
        qemu.line()?;
        qemu.tell("qmp_capabilities", json!({}))?;
        Ok(qemu)
    }

    /// One order, and its answer. Events in between are passed over.
    fn tell(&mut self, order: &str, arguments: Value) -> Outcome<Value> {
        let text = format!("{}\n", json!({ "execute": order, "arguments": arguments }));
        self.orders.get_mut().write_all(text.as_bytes()).context(order)?;
        loop {
            let mut answer = self.line()?;
            require!(answer.get("error").is_none(), "{order}: {answer}");
            if let Some(value) = answer.get_mut("return") {
                return Ok(value.take());
            }
        }
    }

    fn line(&mut self) -> Outcome<Value> {
        let mut line = String::new();
        self.orders.read_line(&mut line).context("QEMU's answer")?;
        serde_json::from_str(&line).context("QEMU's answer")
    }

    /// What the guest has printed so far.
    fn serial(&self) -> String {
        std::fs::read_to_string(&self.serial).unwrap_or_default()
    }

    /// Waits until the guest has printed so many lines here.
    fn prints(&self, lines: usize) -> Outcome {
        let enough = |_: &Running| self.serial().lines().count() >= lines;
        let waited = self.running.until(LONG, "printing", enough);
        waited.or_else(|why| fail!("{why}the guest printed \"{}\"", self.serial()))
    }

    fn quit(mut self) -> Output {
        let _ = self.tell("quit", json!({}));
        self.running.wait_at_most(LONG)
    }
}
