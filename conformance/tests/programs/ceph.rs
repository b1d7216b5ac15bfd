//! Ceph whose daemons and clients talk by its messenger `async+rdma`: a monitor, one OSD that keeps its data
//! in memory, and `rados`.

use std::path::PathBuf;

use serde_json::Value;
use uwarp_conformance::netns::{NetNs, Veth};
use uwarp_conformance::process::{Cmd, Output, Running};
use uwarp_conformance::topology::Place;
use uwarp_conformance::topology::Topology::*;
use uwarp_conformance::{Context, Outcome, fail, require};

use super::Run::Long;
use super::{Case, LONG, Scratch, World};

const FSID: &str = "11111111-2222-3333-4444-555555555555";
const OSD: &str = "22222222-2222-3333-4444-555555555555";
/// Of the object that is put and got.
const SIZE: usize = 24_000_000;

/// All rows.
pub fn cases() -> Vec<Case> {
    vec![Case {
        program: "ceph-osd",
        manner: "ms_type async+rdma: a monitor, an OSD, rados put and get",
        checked: "24 MB come back as they were, and went over RDMA",
        at: &[Veth1500V4],
        run: Long(|w, p| w.ceph(p)),
    }]
}

/// A cluster of one monitor and one OSD, in the server's place.
struct Cluster<'a> {
    world: &'a World,
    place: Place<'a>,
    dir: Scratch,
}

impl World {
    fn ceph(&self, place: Place<'_>) -> Outcome {
        let cluster = Cluster { world: self, place, dir: Scratch::new("ceph")? };
        let daemons = cluster.start()?;
        let result = cluster.put_and_get();
        let outputs: Vec<Output> = daemons.into_iter().map(Running::stop).collect();
        result.or_else(|why| {
            fail!("{why}--- daemons\n{}", outputs.iter().map(Output::text).collect::<String>())
        })
    }
}

impl Cluster<'_> {
    fn file(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// A command over uwarp that reads the cluster's settings.
    fn command(&self, line: &str, ns: Option<&NetNs>) -> Outcome<Cmd> {
        let settings = self.file("ceph.conf");
        Ok(self.world.over_uwarp(&format!("{line} -c {}", settings.display()), ns)?.limit(LONG))
    }

    fn settings(&self) -> String {
        let (dir, address) = (self.dir.path().display(), Veth::SERVER4);
        // Few buffers: a process registers all of them when it starts.
        format!(
            "[global]\nfsid = {FSID}\nmon host = v2:{address}:3300\nmon initial members = a\n\
             auth cluster required = none\nauth service required = none\nauth client required = none\n\
             public network = 10.55.0.0/24\n\
             ms type = async+rdma\nms async rdma device name = uwarp0\nms async rdma gid idx = 0\n\
             ms async rdma buffer size = 8192\nms async rdma send buffers = 256\n\
             ms async rdma receive buffers = 8192\nms async rdma receive queue len = 1024\n\
             run dir = {dir}\nlog file = {dir}/$name.log\nadmin socket = {dir}/$name.asok\n\
             mon data = {dir}/mon\nosd data = {dir}/osd\nosd objectstore = memstore\n\
             memstore device bytes = 268435456\nosd pool default size = 1\nosd crush chooseleaf type = 0\n"
        )
    }

    fn start(&self) -> Outcome<[Running; 2]> {
        for name in ["mon", "osd"] {
            std::fs::create_dir(self.file(name)).context(name)?;
        }
        std::fs::write(self.file("ceph.conf"), self.settings()).context("ceph.conf")?;
        let (map, server) = (self.file("monmap"), self.place.server);
        let monitors = format!("monmaptool --create --fsid {FSID} --addv a [v2:{}:3300]", Veth::SERVER4);
        Cmd::line(&monitors).arg(&map).run_ok()?;
        let mkfs = format!("ceph-mon -i a --mkfs --monmap {}", map.display());
        self.command(&mkfs, server)?.run_ok()?;
        let monitor = self.command("ceph-mon -i a -f", server)?.limit(LONG * 4).spawn()?;
        // Each waits until there is one that answers.
        self.command(&format!("ceph osd new {OSD}"), server)?.run_ok()?;
        self.command(&format!("ceph-osd -i 0 --mkfs --osd-uuid {OSD}"), server)?.run_ok()?;
        let osd = self.command("ceph-osd -i 0 -f", server)?.limit(LONG * 4).spawn()?;
        self.command("ceph osd pool create things 1", server)?.run_ok()?;
        Ok([monitor, osd])
    }

    fn put_and_get(&self) -> Outcome {
        let (put, got) = (self.file("put"), self.file("got"));
        let bytes: Vec<u8> = (0..SIZE).map(|n| (n * 7 + n / 251) as u8).collect();
        std::fs::write(&put, &bytes).context(put.display())?;
        for (what, file) in [("put", &put), ("get", &got)] {
            let line = format!("rados -p things {what} object {}", file.display());
            self.command(&line, self.place.client)?.run_ok()?;
        }
        let same = std::fs::read(&got).context(got.display())? == bytes;
        require!(same, "what came back is not what was put there");
        let socket = self.file("osd.0.asok");
        let counters = Cmd::new("ceph").arg("--admin-daemon").arg(socket).args("perf dump").run_ok()?;
        let counters: Value = serde_json::from_str(&counters.stdout).context("perf dump")?;
        let workers = counters.as_object().into_iter().flatten();
        let workers = workers.filter(|(name, _)| name.starts_with("AsyncMessenger::RDMAWorker"));
        let bytes =
            |name: &str| -> u64 { workers.clone().filter_map(|(_, worker)| worker[name].as_u64()).sum() };
        let (received, sent) = (bytes("rx_bytes"), bytes("tx_bytes"));
        let all = received.min(sent) >= SIZE as u64;
        require!(all, "only {received} bytes received over RDMA, and {sent} sent");
        Ok(())
    }
}
