//! What each MPI needs for each transport: one table, and how it is carried out and printed.

use std::ffi::{OsStr, OsString};

use clap::ValueEnum as _;

use super::launcher::{Kind, Launcher, Way};
use crate::cli::{DeviceOptions, Transport, View};
use crate::libdir;

/// What the user requests.
#[derive(Debug, Clone, Copy)]
pub struct Wanted {
    pub transport: Transport,
    /// Ranks of one host may use shared memory.
    pub shared_memory: bool,
}

/// What is set, and why.
#[derive(Debug)]
struct Setting {
    name: &'static str,
    value: OsString,
    why: &'static str,
    /// The user's environment has another value, which stays.
    kept: bool,
}

/// MVAPICH2 listens on the addresses of this file. It looks for the interfaces itself only with multicast of
/// InfiniBand.
const ADDRESSES: &str = "In place of /etc/mv2.conf, if there is none, a file with this host's address \
                         (MV2_RDMA_CM_CONF_FILE_PATH)";

/// What is done before the launcher starts.
#[derive(Debug)]
pub struct Plan {
    title: String,
    settings: Vec<Setting>,
    notes: Vec<&'static str>,
    /// Inserted behind the launcher's name.
    inserted: Vec<OsString>,
    /// The view that the device must have.
    pub view: Option<View>,
    /// The device's files must be there.
    pub files: bool,
    /// Otherwise nothing of uwarp is loaded.
    pub over_uwarp: bool,
}

/// One row of the table: a variable, its value without and with shared memory, and why.
type Row = (&'static str, [&'static str; 2], &'static str);

const UCX_RC: Row = (
    "UCX_TLS",
    ["rc_verbs,ud_verbs:aux,self", "rc_verbs,ud_verbs:aux,self,sm"],
    "connected queue pairs; datagrams to bring them up",
);
const UCX_UD: Row = ("UCX_TLS", ["ud_verbs,self", "ud_verbs,self,sm"], "datagrams only");
const UCX_TCP: Row = ("UCX_TLS", ["tcp,self", "tcp,self,sm"], "UCX's own TCP, without uwarp");

/// UCX cuts messages into fragments of 8 KiB, up to the size (about 200 KiB) at which the receiver fetches
/// them. Each is a work request, a system call and a completion. With four times the size, 64 KiB take two
/// thirds of the time and have 1.7 times the bandwidth. No attribute of the port has this effect.
///
/// MPICH 4.0 unpacks a fragment only if it ends where an element of a derived datatype ends: with this size
/// the payload of each is a multiple of eight.
///
/// UCX's buffers come in pools, 4095 to receive and 1024 to send. Here fewer are enough: a Send without a
/// receive waits, and the pool to send grows. A rank then takes 40 MB less than with 8 KiB.
const UCX_FRAGMENTS: [Row; 4] = [
    ("UCX_RC_VERBS_SEG_SIZE", ["33025"; 2], "fewer fragments; MPICH 4.0 needs whole elements in each"),
    ("UCX_RC_VERBS_RX_QUEUE_LEN", ["512"; 2], "fewer of these larger buffers"),
    ("UCX_RC_VERBS_RX_BUFS_GROW", ["256"; 2], "fewer of these larger buffers"),
    ("UCX_RC_VERBS_TX_BUFS_GROW", ["128"; 2], "fewer of these larger buffers"),
];

const OMPI_UCX: [Row; 4] = [
    ("OMPI_MCA_pml", ["ucx"; 2], "messages go through UCX"),
    ("OMPI_MCA_osc", ["ucx"; 2], "windows too"),
    ("OMPI_MCA_opal_common_ucx_devices", ["any"; 2], "UCX may use a device that it does not know"),
    ("OMPI_MCA_opal_common_ucx_tls", ["any"; 2], "and any transport"),
];
/// UCX 1.20 fences with a Read by a key that it has only of adapters of one maker. Queue pairs keep the order
/// that a weak fence wants.
const WEAK_FENCE: Row =
    ("UCX_FENCE_MODE", ["weak"; 2], "UCX 1.20's strong fence needs a key that verbs lack");
const OMPI_OFI: [Row; 3] = [
    ("OMPI_MCA_pml", ["cm"; 2], "messages go through libfabric"),
    ("OMPI_MCA_mtl", ["ofi"; 2], "messages go through libfabric"),
    ("OMPI_MCA_mtl_ofi_provider_include", ["verbs;ofi_rxm"; 2], "over connected queue pairs"),
];
/// Up to libfabric 1.21, `ofi_rxm` cuts messages that are larger than its buffer into segments, up to eight
/// buffers, and never completes one that the program has claimed: MPI_Mrecv, which mpi4py uses, waits for
/// ever. With buffers of 64 KiB or more there are no segments. A rank then takes 100 MB more, however many
/// peers it has, and messages of 16 to 64 KiB take less time.
const WHOLE_MESSAGES: Row =
    ("FI_OFI_RXM_BUFFER_SIZE", ["65536"; 2], "libfabric 1 never ends MPI_Mrecv of a message in segments");
/// Open MPI 4 refuses the libfabric provider for Put and Get.
const OMPI_WINDOWS: Row = ("OMPI_MCA_osc", ["pt2pt"; 2], "windows by messages");
/// Open MPI 5 has no other.
const OMPI_5_WINDOWS: Row = ("OMPI_MCA_osc", ["rdma"; 2], "windows by active messages");
const OMPI_OPENIB: [Row; 5] = [
    ("OMPI_MCA_pml", ["ob1"; 2], "messages go through Open MPI's own use of verbs"),
    ("OMPI_MCA_btl", ["openib,self", "openib,self,vader"], "connected queue pairs, brought up by LID"),
    ("OMPI_MCA_btl_openib_allow_ib", ["1"; 2], "it is switched off by default"),
    // Its osc/rdma waits for ever now and then, and crashes in MPI_Compare_and_swap, over shared memory too.
    ("OMPI_MCA_osc", ["pt2pt"; 2], "windows by messages"),
    ("OMPI_MCA_btl_openib_warn_no_device_params_found", ["0"; 2], "it has no parameters for this device"),
];
const OMPI_TCP: Row = ("OMPI_MCA_pml", ["ob1"; 2], "Open MPI's own transports, without uwarp");
const OMPI_4_TCP: Row = ("OMPI_MCA_btl", ["tcp,self", "tcp,self,vader"], "its TCP");
const OMPI_5_TCP: Row = ("OMPI_MCA_btl", ["tcp,self", "tcp,self,sm"], "its TCP");
const MPICH_OFI: Row = ("FI_PROVIDER", ["verbs;ofi_rxm"; 2], "libfabric, over connected queue pairs");
const MPICH_OFI_TCP: Row = ("FI_PROVIDER", ["tcp;ofi_rxm"; 2], "libfabric's own TCP, without uwarp");
/// Of an MPICH that has both; others do not look at it.
const MPICH_BY_UCX: Row = ("MPIR_CVAR_CH4_NETMOD", ["ucx"; 2], "messages go through UCX");
const MPICH_BY_OFI: Row = ("MPIR_CVAR_CH4_NETMOD", ["ofi"; 2], "messages go through libfabric");

const INTEL_FABRICS: Row = ("I_MPI_FABRICS", ["ofi", "shm:ofi"], "messages go through libfabric");
const INTEL_VERBS: Row = ("I_MPI_OFI_PROVIDER", ["verbs"; 2], "over connected queue pairs");
const INTEL_TCP: Row = ("I_MPI_OFI_PROVIDER", ["tcp"; 2], "libfabric's own TCP, without uwarp");

/// It uses no device that it does not know. The number is that of EDR InfiniBand in its tables.
const MV2_TYPE: Row = ("MV2_FORCE_HCA_TYPE", ["21"; 2], "it refuses a device that it does not know");
/// It binds each rank to one core, with the library's thread, and does not start where ranks outnumber cores.
const MV2_CORES: Row = ("MV2_ENABLE_AFFINITY", ["0"; 2], "ranks and the library's threads use all cores");
const MV2_PLACE: Row =
    ("MV2_PROCESS_PLACEMENT_AWARE_HCA_MAPPING", ["0"; 2], "the device is near no processor");
const MV2_SHARED: Row = ("MV2_USE_SHARED_MEM", ["0", "1"], "whether ranks of one host use shared memory");
const MV2_IWARP: Row = ("MV2_USE_IWARP_MODE", ["1"; 2], "connected by rdma_cm, as over iWARP adapters");
/// Over Ethernet it tries rdma_cm first.
const MV2_BY_NUMBER: Row = ("MV2_USE_RDMA_CM", ["0"; 2], "connected by number");
/// From 65 ranks on it connects on demand, by datagrams of 1,296 bytes, which an MTU of 1,500 does not allow.
const MV2_AT_ONCE: Row = ("MV2_ON_DEMAND_THRESHOLD", ["16384"; 2], "all ranks connect at the start");
/// Its direct Puts and Gets outrun its own fences, posts and flushes where ranks are not alike fast.
const MV2_WINDOWS: Row =
    ("MV2_USE_RDMA_ONE_SIDED", ["0"; 2], "windows by messages: its direct ones come early");
const MV2_UD: Row = ("MV2_USE_ONLY_UD", ["1"; 2], "datagrams only");
const MV2_HYBRID: [Row; 2] = [
    ("MV2_USE_UD_HYBRID", ["1"; 2], "datagrams; connected queue pairs for large messages"),
    ("MV2_HYBRID_ENABLE_THRESHOLD", ["1"; 2], "with any number of ranks"),
];

fn mvapich2(transport: Transport, view: Option<View>) -> Vec<Row> {
    let all = [MV2_TYPE, MV2_CORES, MV2_PLACE, MV2_SHARED, MV2_WINDOWS];
    let own = match transport {
        Transport::Ud => vec![MV2_UD, MV2_BY_NUMBER],
        Transport::Hybrid => [&MV2_HYBRID[..], &[MV2_BY_NUMBER]].concat(),
        _ if view == Some(View::Iwarp) => vec![MV2_IWARP],
        _ => vec![MV2_BY_NUMBER, MV2_AT_ONCE],
    };
    [own, all.to_vec()].concat()
}

/// What this MPI would need for the transport and is built without.
pub fn lacks(launcher: &Launcher, transport: Transport) -> Option<&'static str> {
    let mvapich2 = launcher.kind == Kind::Mvapich2;
    let (way, name) = match transport {
        Transport::Rc | Transport::Ud | Transport::Hybrid if mvapich2 => (Way::Mrail, "verbs"),
        Transport::Rc | Transport::Ud => (Way::Ucx, "UCX"),
        Transport::Hybrid => return Some("MVAPICH2's own use of verbs"),
        Transport::Ofi => (Way::Libfabric, "libfabric"),
        Transport::Openib => (Way::Openib, "the openib BTL, a part of Open MPI 4,"),
        Transport::Tcp => return mvapich2.then_some("TCP"),
    };
    let foreign = way == Way::Openib && launcher.kind != Kind::OpenMpi;
    (foreign || !launcher.has(way)).then_some(name)
}

fn rows(launcher: &Launcher, transport: Transport, view: Option<View>) -> Result<Vec<Row>, String> {
    if let Some(way) = lacks(launcher, transport) {
        let others = Transport::value_variants().iter().filter(|other| lacks(launcher, **other).is_none());
        let others: Vec<_> = others.map(|other| other.word()).collect();
        let (word, others) = (transport.word(), others.join(" or "));
        return Err(match transport {
            Transport::Hybrid => {
                format!("--transport {word} is {way}, and this is {launcher}. Use --transport {others}")
            }
            _ => format!(
                "this {launcher} is built without {way}, which --transport {word} needs. \
                 Use --transport {others}"
            ),
        });
    }
    let with = |head: Row, rest: &[Row]| std::iter::once(head).chain(rest.iter().copied()).collect();
    // Without a variable that this MPI would not know.
    let ompi_5 = launcher.major() >= 5;
    let fence: &[Row] = if ompi_5 { &[WEAK_FENCE] } else { &[] };
    let windows = if ompi_5 { OMPI_5_WINDOWS } else { OMPI_WINDOWS };
    let both = launcher.has(Way::Ucx) && launcher.has(Way::Libfabric);
    let chosen = |netmod: Row, rest: Vec<Row>| if both { with(netmod, &rest) } else { rest };
    Ok(match (launcher.kind, transport) {
        (Kind::OpenMpi, Transport::Rc) => with(UCX_RC, &[&UCX_FRAGMENTS[..], &OMPI_UCX, fence].concat()),
        (Kind::OpenMpi, Transport::Ud) => with(UCX_UD, &[&OMPI_UCX, fence].concat()),
        (Kind::OpenMpi, Transport::Ofi) => [&OMPI_OFI[..], &[WHOLE_MESSAGES, windows]].concat(),
        (_, Transport::Openib) => OMPI_OPENIB.to_vec(),
        (Kind::OpenMpi, Transport::Tcp) if ompi_5 => vec![OMPI_TCP, OMPI_5_TCP, windows],
        (Kind::OpenMpi, Transport::Tcp) => vec![OMPI_TCP, OMPI_4_TCP, windows],
        (Kind::Mpich, Transport::Rc) => chosen(MPICH_BY_UCX, with(UCX_RC, &UCX_FRAGMENTS)),
        (Kind::Mpich, Transport::Ud) => chosen(MPICH_BY_UCX, vec![UCX_UD]),
        (Kind::Mpich, Transport::Ofi) => chosen(MPICH_BY_OFI, vec![MPICH_OFI]),
        (Kind::Mpich, Transport::Tcp) if launcher.has(Way::Ucx) => chosen(MPICH_BY_UCX, vec![UCX_TCP]),
        (Kind::Mpich, Transport::Tcp) => vec![MPICH_OFI_TCP],
        // UCX only over adapters of one maker: its provider `mlx`.
        (Kind::Intel, Transport::Tcp) => vec![INTEL_FABRICS, INTEL_TCP],
        (Kind::Intel, _) => vec![INTEL_FABRICS, INTEL_VERBS],
        (Kind::Mvapich2, _) => mvapich2(transport, view),
        // Refused above.
        (_, Transport::Hybrid) => Vec::new(),
    })
}

impl Plan {
    /// `environment` is the user's. A variable that is set there keeps its value.
    pub fn new(
        launcher: &Launcher,
        wanted: Wanted,
        device: &DeviceOptions,
        environment: impl Fn(&str) -> Option<OsString>,
    ) -> Result<Self, String> {
        let transport = wanted.transport;
        let rows = rows(launcher, transport, device.view)?;
        let over_uwarp = transport != Transport::Tcp;
        let view = (transport == Transport::Openib).then_some(View::Ib);
        let mvapich2 = launcher.kind == Kind::Mvapich2;
        if let (Some(view), Transport::Rc | Transport::Ud) = (device.view, transport)
            && view == View::Iwarp
            && !mvapich2
        {
            return Err(format!(
                "UCX uses no iWARP device, and --transport {} needs UCX. Leave out --as iwarp",
                transport.word()
            ));
        }
        if view.is_some() && device.view.is_some_and(|view| view != View::Ib) {
            return Err(
                "the openib BTL brings queue pairs up by LID. Use --as ib, or leave it out".to_owned()
            );
        }
        let mut plan = Plan {
            title: format!("{launcher}, transport {}", transport.word()),
            settings: Vec::new(),
            notes: Vec::new(),
            inserted: Vec::new(),
            view,
            files: over_uwarp && transport != Transport::Ofi,
            over_uwarp,
        };
        for (name, values, why) in rows {
            plan.set(name, values[usize::from(wanted.shared_memory)].into(), why, &environment);
        }
        if over_uwarp && launcher.kind == Kind::OpenMpi {
            plan.reach_other_hosts(launcher, device, &environment);
        }
        if mvapich2 && transport == Transport::Rc && device.view == Some(View::Iwarp) {
            plan.notes.push(ADDRESSES);
        }
        plan.note(launcher, wanted);
        Ok(plan)
    }

    fn set(
        &mut self,
        name: &'static str,
        value: OsString,
        why: &'static str,
        environment: &impl Fn(&str) -> Option<OsString>,
    ) {
        let theirs = environment(name);
        let kept = theirs.as_ref().is_some_and(|theirs| *theirs != value);
        self.settings.push(Setting { name, value: theirs.unwrap_or(value), why, kept });
    }

    /// Open MPI gives its daemons on other hosts no environment, and the ranks there have their daemon's. So
    /// `uwarp run` starts the daemon. What it cannot know goes through mpirun's `-x`.
    fn reach_other_hosts(
        &mut self,
        launcher: &Launcher,
        device: &DeviceOptions,
        environment: &impl Fn(&str) -> Option<OsString>,
    ) {
        let (variable, daemon) = match launcher.major() >= 5 {
            true => ("PRTE_MCA_prte_launch_agent", "prted"),
            false => ("OMPI_MCA_orte_launch_agent", "orted"),
        };
        let Ok(uwarp) = libdir::executable() else { return };
        let mut agent = uwarp.into_os_string();
        agent.push(" run");
        let view = DeviceOptions { view: device.view.or(self.view), devices: device.devices };
        for (name, value) in view.environment() {
            agent.push(if name == "UWARP_VIEW" { " --as " } else { " --devices " });
            agent.push(value);
        }
        agent.push(if self.files { " --files on -- " } else { " -- " });
        agent.push(daemon);
        self.set(variable, agent, "ranks of other hosts run over uwarp, too", environment);
        // mpirun passes these by itself.
        let passed = |name: &&str| name.starts_with("OMPI_") || name.starts_with("PRTE_");
        let names = self.settings.iter().map(|setting| setting.name).filter(|name| !passed(name));
        self.inserted = names.flat_map(|name| ["-x".into(), name.into()]).collect();
    }

    fn note(&mut self, launcher: &Launcher, wanted: Wanted) {
        // libfabric's provider of Open MPI and MPICH has no shared memory beside it; Intel MPI has its own.
        let beside = wanted.transport != Transport::Ofi || launcher.kind == Kind::Intel;
        let both = wanted.shared_memory && beside;
        if self.over_uwarp && both {
            self.notes.push(
                "Ranks of one host use shared memory; to send their messages over uwarp: --shared-memory off",
            );
        }
        if self.files && launcher.kind != Kind::OpenMpi {
            self.notes.push(
                "On other hosts, ranks find the device only if uwarp run --files on -- starts each of them",
            );
        }
        if wanted.transport == Transport::Hybrid {
            self.notes
                .push("Its datagrams have 1,296 bytes: it needs an interface with an MTU of 2,048 or more");
        }
        if wanted.transport == Transport::Ud && launcher.kind == Kind::OpenMpi && launcher.major() == 4 {
            // Its osc/ucx destroys a window's queue pairs while other ranks wait for their acknowledgements.
            self.notes
                .push("A program with windows may end with a timeout of UCX: use --transport rc for it");
        }
        if self.over_uwarp {
            self.notes.push("On other hosts, uwarp must be in the same directory");
        }
    }

    /// The launcher's name and arguments.
    pub fn command(&self, words: &[OsString]) -> Vec<OsString> {
        let (name, rest) = words.split_at(words.len().min(1));
        [name, &self.inserted, rest].concat()
    }

    /// For the launcher's environment.
    pub fn variables(&self) -> Vec<(&'static str, OsString)> {
        self.settings.iter().map(|setting| (setting.name, setting.value.clone())).collect()
    }

    /// The plan for people.
    pub fn lines(&self, words: &[OsString]) -> Vec<String> {
        let mut lines = vec![self.title.clone()];
        for Setting { name, value, why, kept } in &self.settings {
            let why = if *kept { "as your environment has it" } else { why };
            lines.push(format!("  {name}={}   ({why})", value.display()));
        }
        if self.files {
            lines.push("  --files on   (this transport looks for the device below /sys and /dev)".to_owned());
        }
        if let Some(view) = self.view.and_then(|view| view.to_possible_value()) {
            lines.push(format!("  --as {}   (it brings queue pairs up by LID)", view.get_name()));
        }
        lines.extend(self.notes.iter().map(|note| format!("  {note}")));
        let words: Vec<_> = words.iter().map(|word| quoted(word)).collect();
        lines.push(format!("  {}", words.join(" ")));
        lines
    }
}

/// As a shell would have to read it.
fn quoted(word: &OsStr) -> String {
    let word = word.to_string_lossy();
    let plain = |c: char| c.is_ascii_alphanumeric() || "-_./:=,+@%".contains(c);
    if !word.is_empty() && word.chars().all(plain) {
        word.into()
    } else {
        format!("'{}'", word.replace('\'', "'\\''"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn launcher(kind: Kind, built: &[Way]) -> Launcher {
        Launcher { kind, version: "4.1.4".to_owned(), built: built.to_vec() }
    }

    fn plan(launcher: &Launcher, transport: Transport, shared_memory: bool) -> Result<Plan, String> {
        Plan::new(launcher, Wanted { transport, shared_memory }, &DeviceOptions::default(), |_| None)
    }

    fn value(plan: &Plan, name: &str) -> Option<String> {
        let found = plan.settings.iter().find(|setting| setting.name == name)?;
        Some(found.value.display().to_string())
    }

    #[test]
    fn every_transport_of_a_complete_mpi_has_a_plan() {
        for transport in Transport::value_variants().iter().filter(|other| **other != Transport::Hybrid) {
            let plan = plan(&launcher(Kind::OpenMpi, &[]), *transport, false).unwrap();
            assert_eq!(plan.over_uwarp, *transport != Transport::Tcp);
            assert_eq!(plan.files, matches!(transport, Transport::Rc | Transport::Ud | Transport::Openib));
            // What would carry the ranks of one host past uwarp.
            let text = plan.lines(&[]).join("\n");
            assert!(!text.contains(",sm") && !text.contains("vader"), "{text}");
        }
    }

    #[test]
    fn what_is_not_built_in_is_refused_with_what_works_instead() {
        let ucx = launcher(Kind::Mpich, &[Way::Ucx]);
        let reason = plan(&ucx, Transport::Ofi, true).unwrap_err();
        assert!(reason.ends_with("Use --transport rc or ud or tcp"), "{reason}");
        let ofi = launcher(Kind::Mpich, &[Way::Libfabric]);
        assert_eq!(ofi.best(), Transport::Ofi);
        let reason = plan(&ofi, Transport::Rc, true).unwrap_err();
        assert!(reason.ends_with("Use --transport ofi or tcp"), "{reason}");
        assert!(plan(&ucx, Transport::Openib, true).is_err());
    }

    #[test]
    fn views_that_cannot_work_are_refused() {
        let ompi = launcher(Kind::OpenMpi, &[]);
        for (transport, view, works) in [
            (Transport::Rc, View::Iwarp, false),
            (Transport::Ud, View::Iwarp, false),
            (Transport::Ofi, View::Iwarp, true),
            (Transport::Openib, View::Roce, false),
            (Transport::Openib, View::Ib, true),
        ] {
            let device = DeviceOptions { view: Some(view), ..Default::default() };
            let plan = Plan::new(&ompi, Wanted { transport, shared_memory: true }, &device, |_| None);
            assert_eq!(plan.is_ok(), works, "{transport:?} {view:?}");
        }
    }

    #[test]
    fn the_users_own_settings_stay() {
        let ompi = launcher(Kind::OpenMpi, &[]);
        let theirs = |name: &str| (name == "UCX_TLS").then(|| OsString::from("rc_verbs"));
        let wanted = Wanted { transport: Transport::Rc, shared_memory: true };
        let plan = Plan::new(&ompi, wanted, &DeviceOptions::default(), theirs).unwrap();
        assert_eq!(value(&plan, "UCX_TLS").as_deref(), Some("rc_verbs"));
        assert!(plan.lines(&[])[1].ends_with("(as your environment has it)"));
    }

    #[test]
    fn other_hosts_get_the_same() {
        let plan = plan(&launcher(Kind::OpenMpi, &[]), Transport::Openib, true).unwrap();
        let agent = value(&plan, "OMPI_MCA_orte_launch_agent").unwrap();
        assert!(agent.ends_with(" run --as ib --files on -- orted"), "{agent}");
        let words = ["mpirun", "-np", "2"].map(OsString::from);
        assert_eq!(plan.command(&words), words, "mpirun passes OMPI_ variables by itself");
        let rc = super::tests::plan(&launcher(Kind::OpenMpi, &[]), Transport::Rc, true).unwrap();
        let command: Vec<_> =
            rc.command(&words).into_iter().map(|word| word.into_string().unwrap()).collect();
        let passed: Vec<_> = command.iter().filter(|word| word.starts_with("UCX_")).collect();
        assert_eq!(passed.len(), 5, "mpirun passes each: {command:?}");
        assert_eq!(command[1..3], ["-x", "UCX_TLS"]);
        assert_eq!(command[command.len() - 2..], ["-np", "2"]);
    }

    #[test]
    fn open_mpi_5_gets_no_setting_of_its_predecessors() {
        let built = vec![Way::Ucx, Way::Libfabric];
        let ompi = Launcher { kind: Kind::OpenMpi, version: "5.0.11".to_owned(), built };
        assert!(plan(&ompi, Transport::Openib, true).is_err());
        for transport in [Transport::Rc, Transport::Ud, Transport::Ofi, Transport::Tcp] {
            let text = plan(&ompi, transport, true).unwrap().lines(&[]).join("\n");
            assert!(!text.contains("pt2pt") && !text.contains("vader") && !text.contains("orte"), "{text}");
        }
    }

    #[test]
    fn the_way_is_chosen_where_an_mpich_has_both() {
        let both = launcher(Kind::Mpich, &[Way::Ucx, Way::Libfabric]);
        for (transport, netmod) in
            [(Transport::Rc, "ucx"), (Transport::Ud, "ucx"), (Transport::Ofi, "ofi"), (Transport::Tcp, "ucx")]
        {
            let plan = plan(&both, transport, true).unwrap();
            assert_eq!(value(&plan, "MPIR_CVAR_CH4_NETMOD").as_deref(), Some(netmod));
        }
        let one = plan(&launcher(Kind::Mpich, &[Way::Ucx]), Transport::Rc, true).unwrap();
        assert_eq!(value(&one, "MPIR_CVAR_CH4_NETMOD"), None);
    }

    #[test]
    fn mvapich2_uses_verbs_itself() {
        let mv2 = Launcher { kind: Kind::Mvapich2, version: "2.3.7".to_owned(), built: vec![Way::Mrail] };
        assert_eq!(mv2.best(), Transport::Rc);
        for transport in [Transport::Ofi, Transport::Openib, Transport::Tcp] {
            let reason = plan(&mv2, transport, true).unwrap_err();
            assert!(reason.ends_with("Use --transport rc or ud or hybrid"), "{reason}");
        }
        let others = plan(&launcher(Kind::OpenMpi, &[]), Transport::Hybrid, true).unwrap_err();
        assert!(others.contains("is MVAPICH2's own use of verbs, and this is Open MPI"), "{others}");
        let iwarp = DeviceOptions { view: Some(View::Iwarp), ..Default::default() };
        for (transport, device, set, unset) in [
            (Transport::Rc, &DeviceOptions::default(), "MV2_ON_DEMAND_THRESHOLD", "MV2_USE_IWARP_MODE"),
            (Transport::Rc, &iwarp, "MV2_USE_IWARP_MODE", "MV2_USE_RDMA_CM"),
            (Transport::Ud, &iwarp, "MV2_USE_ONLY_UD", "MV2_USE_IWARP_MODE"),
            (Transport::Hybrid, &DeviceOptions::default(), "MV2_USE_UD_HYBRID", "MV2_USE_ONLY_UD"),
        ] {
            let plan = Plan::new(&mv2, Wanted { transport, shared_memory: false }, device, |_| None).unwrap();
            assert!(plan.files && value(&plan, set).is_some() && value(&plan, unset).is_none(), "{plan:?}");
            assert_eq!(value(&plan, "MV2_USE_SHARED_MEM").as_deref(), Some("0"));
            assert_eq!(plan.notes.contains(&ADDRESSES), set == "MV2_USE_IWARP_MODE");
            assert!(!plan.lines(&[]).join("\n").contains("UCX"), "{plan:?}");
        }
    }

    #[test]
    fn intel_mpi_uses_libfabric() {
        let intel = launcher(Kind::Intel, &[Way::Libfabric]);
        assert_eq!(intel.best(), Transport::Ofi);
        let reason = plan(&intel, Transport::Rc, true).unwrap_err();
        assert!(reason.ends_with("Use --transport ofi or tcp"), "{reason}");
        let plan = plan(&intel, Transport::Ofi, false).unwrap();
        assert_eq!(value(&plan, "I_MPI_FABRICS").as_deref(), Some("ofi"));
    }
}
