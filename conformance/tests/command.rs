//! The command over the built library: `uwarp doctor` finds nothing that fails, and `uwarp bench` measures
//! each of its figures and says so in JSON. How fast anything is, is not asserted. `uwarp mpi` plans for the
//! MPIs of this machine.

use std::collections::BTreeSet;
use std::time::Duration;

use serde_json::Value;
use uwarp_conformance::dist::Dist;
use uwarp_conformance::process::{Cmd, Output};

/// The command without the settings of the user who runs the test, which doctor would report.
fn uwarp(arguments: &str) -> Cmd {
    let command = Cmd::new(Dist::find().unwrap().uwarp().unwrap()).args(arguments).unset("LD_LIBRARY_PATH");
    let names = std::env::vars_os().map(|(name, _)| name);
    names.filter(|name| name.as_encoded_bytes().starts_with(b"UWARP_")).fold(command, Cmd::unset)
}

fn document(output: &Output) -> Value {
    serde_json::from_str(&output.stdout).unwrap_or_else(|error| panic!("{error}\n{}", output.text()))
}

#[test]
fn doctor_finds_the_built_tree_sound() {
    let output = uwarp("doctor --json").run_ok().unwrap();
    let answer = document(&output);
    let checks = answer["checks"].as_array().unwrap();
    for name in ["library", "versions", "device", "settings", "loader"] {
        let check = checks.iter().find(|check| check["name"] == name);
        let check = check.unwrap_or_else(|| panic!("no {name} in {answer}"));
        assert_eq!(check["status"], "ok", "{check}");
    }
    let device = checks.iter().find(|check| check["name"] == "device").unwrap();
    assert!(device["found"].as_str().unwrap().contains("uwarp0 (roce view, "), "{device}");
    assert_ne!(answer["worst"], "fail");
    // Of a program that is made for libibverbs, too.
    let output = uwarp("doctor --json ibv_devinfo").run_ok().unwrap();
    let libraries = document(&output)["checks"].as_array().unwrap().clone();
    let libraries = libraries.iter().find(|check| check["name"] == "libraries").unwrap();
    assert!(libraries["found"].as_str().unwrap().starts_with("it loads libibverbs"), "{libraries}");
}

/// auto shows the files to a shell, since nobody knows what it starts, and not to ls. Without the option,
/// nobody is shown them.
#[test]
fn who_looks_at_the_files_is_shown_them() {
    let class = "/sys/class/infiniband";
    let shows = |options: &str, shell: bool| {
        let command = uwarp(&format!("run {options} --"));
        let command = if shell {
            command.args("sh -c").arg(format!("ls {class}"))
        } else {
            command.arg("ls").arg(class)
        };
        let output = command.run().unwrap();
        (output.stdout == "uwarp0\n", output.stderr)
    };
    for (options, shell, shown) in [
        ("-v", true, false),
        ("--files auto -v", true, true),
        ("--files off -v", true, false),
        ("--files auto -v", false, false),
        ("--files on -v", false, true),
    ] {
        let (seen, said) = shows(options, shell);
        assert_eq!(seen, shown, "{options}, shell: {shell}: {said}");
        let words = if shown { "are shown: " } else { "are not shown: " };
        assert!(said.contains(words) && said.contains(" sees the device as roce"), "{said}");
    }
    let answer = document(&uwarp("doctor --json sh").run_ok().unwrap());
    let found = |name: &str| {
        let checks = answer["checks"].as_array().unwrap().clone();
        let check = checks.into_iter().find(|check| check["name"] == name);
        check.unwrap_or_else(|| panic!("no {name}"))["found"].as_str().unwrap().to_owned()
    };
    assert!(found("view").starts_with("roce"), "{answer}");
    assert!(found("files").starts_with("`uwarp run --files auto` shows it the device's files: "), "{answer}");
}

/// `rdma` of iproute2 asks the kernel. Under `--files`, links and devices are uwarp's, and the rest is
/// iproute2's.
#[test]
fn rdma_of_iproute2_shows_the_device() {
    let rdma = |call: &str| uwarp(&format!("run --files auto -- {call}")).run_ok().unwrap();
    let links = document(&rdma("rdma -j link show"));
    let link = &links.as_array().unwrap()[0];
    assert_eq!((link["ifname"].as_str(), link["port"].as_u64()), (Some("uwarp0"), Some(1)), "{link}");
    assert_eq!((&link["state"], &link["physical_state"]), (&"ACTIVE".into(), &"LINK_UP".into()), "{link}");
    let netdev = link["netdev"].as_str().unwrap();
    assert!(std::path::Path::new("/sys/class/net").join(netdev).exists(), "{link}");
    let expected = format!("link uwarp0/1 state ACTIVE physical_state LINK_UP netdev {netdev} \n");
    assert_eq!(rdma("rdma link show uwarp0/1").stdout, expected);
    // A shell looks for all its commands where PATH says. Nobody else may come to make that directory.
    let path = uwarp("run --files on -- sh -c").arg("echo $PATH").run_ok().unwrap();
    let first = std::path::PathBuf::from(path.stdout.split(':').next().unwrap());
    assert!(first.ends_with("lib/uwarp/commands"), "{}", path.text());
    assert_eq!(
        first.canonicalize().unwrap(),
        Dist::find().unwrap().lib().join("commands").canonicalize().unwrap()
    );
    // Of a child as well.
    let device = uwarp("run --as iwarp --files on -- sh -c").arg("rdma dev | cat").run_ok().unwrap();
    assert!(device.stdout.starts_with("0: uwarp0: node_type rnic protocol iw fw "), "{}", device.text());
    assert!(rdma("rdma -V").stdout.contains("iproute2"));
}

/// The lines of a plan for the MPI of this launcher.
fn plan(options: &str, launcher: &str) -> String {
    let output = uwarp(&format!("mpi --dry-run {options} -- {launcher} -n 2 program")).unset("UCX_TLS");
    output.run_ok().unwrap().stdout
}

#[test]
fn mpi_plans_for_each_mpi_what_it_needs() {
    let ompi = plan("--shared-memory off", "mpirun.openmpi");
    let heads =
        ["Open MPI 4", "  UCX_TLS=rc_verbs,ud_verbs:aux,self ", "  OMPI_MCA_pml=ucx ", "  --files on "];
    for head in heads {
        assert!(ompi.lines().any(|line| line.starts_with(head)), "no {head}\n{ompi}");
    }
    let last = ompi.lines().next_back().unwrap_or_default();
    assert!(last.starts_with("  mpirun.openmpi -x UCX_TLS ") && last.ends_with(" -n 2 program"), "{ompi}");
    let openib = plan("--transport openib", "mpirun.openmpi");
    assert!(openib.lines().any(|line| line.starts_with("  --as ib ")), "{openib}");
    let mpich = plan("--transport ud", "mpirun.mpich");
    for head in ["MPICH 4", "  UCX_TLS=ud_verbs,self,sm ", "  mpirun.mpich -n 2 program"] {
        assert!(mpich.lines().any(|line| line.starts_with(head)), "no {head}\n{mpich}");
    }
}

#[test]
fn mpi_refuses_what_cannot_work_and_says_what_does() {
    for (line, reason) in [
        ("mpi --transport ofi -- mpirun.mpich -n 2 true", "is built without libfabric"),
        ("mpi --transport openib -- mpirun.mpich -n 2 true", "Use --transport rc or ud or tcp"),
        ("mpi --as iwarp -- mpirun.openmpi -n 2 true", "Leave out --as iwarp"),
        ("mpi -- ls", "names neither Open MPI nor MPICH"),
        ("mpi -- no-such-launcher", "no program no-such-launcher"),
    ] {
        let output = uwarp(line).run().unwrap();
        assert!(!output.ok() && output.stderr.starts_with("uwarp: "), "{line}\n{}", output.text());
        assert!(output.stderr.contains(reason) && output.stdout.is_empty(), "{line}\n{}", output.text());
    }
}

/// The real Open MPI over each transport, with a program that is compiled for it.
#[test]
fn mpi_is_measured_over_each_transport() {
    let command = uwarp("bench mpi --json --rounds 1 --seconds 0.02")
        .env("OMPI_ALLOW_RUN_AS_ROOT", "1")
        .env("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1");
    let report = document(&command.limit(LIMIT).run_ok().unwrap());
    assert!(report["mpi"].as_str().unwrap().starts_with("Open MPI"), "{}", report["mpi"]);
    let figures = report["figures"].as_array().unwrap();
    for id in ["ping-pong-8", "stream-65536", "allreduce-8", "put-8", "get-1048576", "memory-0"] {
        let row =
            figures.iter().find(|figure| figure["id"] == id).unwrap_or_else(|| panic!("{id}: {report}"));
        for transport in ["tcp", "rc", "ud", "ofi"] {
            let side = &row["transports"][transport];
            assert!(positive(&side["median"]), "{id} over {transport}: {row}");
            assert_eq!(side.get("ratio").is_some(), transport != "tcp", "{id} over {transport}: {row}");
        }
    }
    let complaint = uwarp("bench mpi --launcher ls").run().unwrap();
    assert!(!complaint.ok() && complaint.stderr.contains("names neither"), "{}", complaint.text());
}

/// Each way of sockets, and the plot beside the figures.
#[test]
fn sockets_are_measured_in_every_way() {
    let plot = std::env::temp_dir().join(format!("uwarp-sockets-{}.svg", std::process::id()));
    let command = uwarp("bench sockets --json --rounds 1 --seconds 0.02")
        .args("--only latency-6 --only bandwidth-1048576")
        .arg("--plot")
        .arg(&plot);
    let report = document(&command.limit(LIMIT).run_ok().unwrap());
    let ways: BTreeSet<_> = report["ways"].as_object().unwrap().keys().cloned().collect();
    for way in ["plain", "through", "iwarp-mode-crc-off", "descriptors-crc-on", "rule-rsockets-crc-on"] {
        assert!(ways.contains(way), "no {way}: {ways:?}");
    }
    let figures = report["figures"].as_array().unwrap();
    let names: Vec<_> = figures.iter().map(|figure| figure["id"].as_str().unwrap()).collect();
    assert_eq!(names, ["latency-64", "latency-65536", "bandwidth-1048576"]);
    for figure in figures {
        let best = figure["best"].as_str().unwrap();
        for way in &ways {
            let side = &figure["ways"][way];
            assert!(positive(&side["median"]), "{way}: {figure}");
            assert_eq!(positive(&side["ratio"]["median"]), !way.starts_with("plain"), "{way}: {figure}");
        }
        assert!(best.starts_with("plain"), "{figure}");
    }
    let drawn = std::fs::read_to_string(&plot);
    let _ = std::fs::remove_file(&plot);
    let plot = drawn.unwrap();
    assert!(plot.starts_with("<svg ") && plot.contains("--sockets=rsockets, CRC on"), "{plot}");
    let complaint = uwarp("bench latency --plot /dev/null").run().unwrap();
    assert!(!complaint.ok() && complaint.stderr.contains("--plot is for"), "{}", complaint.text());
}

/// Long enough that each figure comes about, too short for any to mean something.
const SHORT: &str = "--quick --seconds 0.06 --rounds 2";

/// Bounds a run that hangs. It takes a minute and a half on a quiet machine, most of it to make 10,000
/// connections over each link and to see what they cost while nothing happens.
const LIMIT: Duration = Duration::from_secs(900);

#[test]
fn every_figure_is_measured_and_has_its_fields() {
    let groups = measured("all");
    assert_eq!(groups.len(), 12, "{groups:?}");
}

/// On one processor, beside a loop for each processor, and emulated.
#[test]
fn figures_are_measured_where_processors_are_few_or_slow() {
    assert_eq!(measured("crowded"), BTreeSet::from(["crowded".to_owned()]));
}

/// Of an event loop and its clients, beside raw TCP.
#[test]
fn event_loops_are_measured() {
    let output = uwarp(&format!("bench loops --json {SHORT} --only memory-many-16 --only tcp-one-25"));
    let report = document(&output.limit(LIMIT).run_ok().unwrap());
    let rows = report["figures"].as_array().unwrap();
    let ids: Vec<_> = rows.iter().map(|row| row["id"].as_str().unwrap()).collect();
    assert_eq!(ids, ["tcp-sockets-16", "memory-many-16", "tcp-sockets-256", "tcp-one-256"]);
    for row in rows {
        assert!(positive(&row["rate"]) && row["rounds"].as_array().unwrap().len() == 2, "{row}");
        assert_eq!(row.get("ratio").is_some(), !row["id"].as_str().unwrap().starts_with("tcp-sockets"));
    }
    let output = uwarp(&format!("bench loops --netns --json {SHORT} --only tcp-one-16"));
    let report = document(&output.limit(LIMIT).run_ok().unwrap());
    let rows = report["figures"].as_array().unwrap();
    assert_eq!(
        rows.iter().map(|row| row["id"].as_str().unwrap()).collect::<Vec<_>>(),
        ["tcp-sockets-16", "tcp-one-16"]
    );
    assert_eq!(rows[1]["target"], "at least 0.90");
}

/// By UCX's own program, over a link that is required.
#[test]
fn ucx_is_measured() {
    for (place, ids) in [
        ("", &["tag-lat-8-tcp", "tag-lat-8-rc-memory", "tag-lat-8-rc-tcp", "tag-lat-8-rc-rd"][..]),
        ("--netns", &["tag-lat-8-tcp", "tag-lat-8-rc-tcp", "tag-lat-8-rc-rd"]),
    ] {
        let output = uwarp(&format!("bench ucx --json --quick {place} --only tag-lat-8-rc"));
        let report = document(&output.limit(LIMIT).run_ok().unwrap());
        let rows = report["figures"].as_array().unwrap();
        assert_eq!(rows.iter().map(|row| row["id"].as_str().unwrap()).collect::<Vec<_>>(), ids);
        for row in rows {
            assert!(positive(&row["median"]) && positive(&row["p99"]), "{row}");
            assert_eq!(row.get("ratio").is_some(), row["id"] != "tag-lat-8-tcp", "{row}");
        }
    }
}

/// Streams that share a path which the command makes.
#[test]
fn shares_of_a_path_are_measured() {
    let output =
        uwarp("bench sharing --json --quick --only short-rd-cubic --only loss-5-rd --only usual-one");
    let report = document(&output.limit(LIMIT).run_ok().unwrap());
    let rows = report["figures"].as_array().unwrap();
    let ids: Vec<_> = rows.iter().map(|row| row["id"].as_str().unwrap()).collect();
    assert_eq!(ids, ["loss-5-rd", "short-rd-cubic", "usual-one"]);
    for (row, streams) in rows.iter().zip([1, 2, 1]) {
        let [round] = &row["rounds"].as_array().unwrap()[..] else { panic!("not one round: {row}") };
        let goodput = round["goodput"].as_array().unwrap();
        assert!(goodput.len() == streams && goodput.iter().all(positive), "{row}");
        assert_eq!(row.get("share").is_some(), streams == 2, "{row}");
        assert_eq!(positive(&round["lost"]), row["id"] == "loss-5-rd", "{row}");
    }
}

/// By callgrind, so few figures: each takes some seconds.
#[test]
fn instructions_of_a_message_are_counted() {
    let figures = ["empty-poll", "write-list"];
    let wanted: Vec<_> =
        figures.iter().flat_map(|id| ["tcp", "memory"].map(|link| format!("{id} {link}"))).collect();
    let only = figures.map(|name| format!("--only {name}")).join(" ");
    let output = uwarp(&format!("bench instructions --quick --json {only}")).limit(LIMIT).run_ok().unwrap();
    let report = document(&output);
    let rows = report["figures"].as_array().unwrap();
    let text = |row: &Value, name: &str| row[name].as_str().unwrap().to_owned();
    let counted: Vec<_> =
        rows.iter().map(|row| format!("{} {}", text(row, "id"), text(row, "link"))).collect();
    assert_eq!(counted, wanted);
    for row in rows {
        assert!(row.get("failure").is_none() && positive(&row["messages"]), "{row}");
        for name in ["instructions", "locked"] {
            assert!(positive(&row["ends"][0][name]), "{row}");
        }
    }
    // Each Write is copied to be sent, and into its place.
    for row in &rows[2..] {
        let copies: u64 =
            row["ends"].as_array().unwrap().iter().filter_map(|end| end["copies"].as_u64()).sum();
        assert!(copies >= 2 * row["messages"].as_u64().unwrap(), "{row}");
    }
}

/// By a connection to each, and by one queue pair of datagrams.
#[test]
fn memory_is_measured_for_some_peers() {
    let plot = std::env::temp_dir().join(format!("uwarp-peers-{}.svg", std::process::id()));
    let words = format!("bench memory --peers 1..3 --json --plot {}", plot.display());
    let report = document(&uwarp(&words).limit(LIMIT).run_ok().unwrap());
    let lines = report["lines"].as_array().unwrap();
    let ways: Vec<_> = lines.iter().map(|line| line["way"].as_str().unwrap()).collect();
    assert_eq!(ways, ["RC over TCP", "RC over memory", "RC over rd", "UD", "RD"]);
    for line in lines {
        let points = line["points"].as_array().unwrap();
        let peers: Vec<_> = points.iter().map(|point| point["peers"].as_u64().unwrap()).collect();
        assert_eq!(peers, [1, 2, 3], "{line}");
        assert!(line.get("failure").is_none() && positive(&points[0]["active_heap_bytes"]), "{line}");
    }
    let drawn = std::fs::read_to_string(&plot);
    let _ = std::fs::remove_file(&plot);
    assert!(drawn.unwrap().contains(">RC over rd<"));
}

/// Measures each figure of `what`; returns their groups.
fn measured(what: &str) -> BTreeSet<String> {
    // The complaint about a name that is none lists all that are.
    let complaint = uwarp(&format!("bench {what} --only no-such-figure")).run().unwrap();
    let (_, known) = complaint.stderr.trim().split_once("there are: ").unwrap();
    let known: BTreeSet<_> = known.split(", ").collect();

    let output = uwarp(&format!("bench {what} --json {SHORT}")).limit(LIMIT).run().unwrap();
    let report = document(&output);
    let failed = |figure: &&Value| figure.get("failure").is_some();
    let failed: Vec<_> = report["figures"].as_array().unwrap().iter().filter(failed).collect();
    assert!(output.ok() && failed.is_empty(), "{failed:?}\n{}", output.stderr);
    for name in ["command", "place"] {
        assert!(report[name].is_string(), "{name} in {report}");
    }
    assert_eq!((&report["rounds"], &report["seconds"]), (&2.into(), &0.06.into()));
    for name in ["cpu", "kernel", "clock", "uwarp"] {
        assert!(report["machine"][name].is_string(), "{name} in {}", report["machine"]);
    }
    assert!(report["machine"]["cores"].as_u64().is_some_and(|cores| cores > 0), "{}", report["machine"]);

    let figures = report["figures"].as_array().unwrap();
    let measured: BTreeSet<_> = figures.iter().map(|figure| figure["id"].as_str().unwrap()).collect();
    assert_eq!(measured, known);
    let mut groups = BTreeSet::new();
    for figure in figures {
        for name in ["title", "unit", "target", "link"] {
            assert!(figure[name].is_string(), "{name} in {figure}");
        }
        let group = figure["group"].as_str().unwrap();
        groups.insert(group.to_owned());
        match group {
            "latency" | "transactions" | "datagrams" | "crowded" => {
                sides(figure, true);
                assert!(positive(&figure["target_p99_ratio"]), "{figure}");
            }
            // Queue pairs that are brought up side by side have no times of their own.
            "connections" => sides(figure, !figure["id"].as_str().unwrap().ends_with("bring-up")),
            "bandwidth" | "messages" => {
                sides(figure, false);
                // Over rd, the target is what TCP has.
                let over_rd = figure["link"] == "rd";
                assert_eq!(positive(&figure["target_ratio"]), !over_rd, "{figure}");
                let with_crc = !over_rd && figure["id"].as_str().unwrap().contains("-crc-on");
                assert_eq!(positive(&figure["copy_crc"]), with_crc, "{figure}");
            }
            "rate" | "datagram-rate" | "datagram-bandwidth" => sides(figure, false),
            "syscalls" => calls(figure),
            "memory" | "datagram-facts" => {
                let fact = figure["fact"].as_object().unwrap();
                assert!(!fact.is_empty() && fact.values().all(Value::is_number), "{figure}");
            }
            other => panic!("a group of which this test does not know: {other}"),
        }
    }
    groups
}

fn positive(value: &Value) -> bool {
    value.as_f64().is_some_and(|number| number > 0.0)
}

/// Raw TCP and uwarp, in turns.
fn sides(figure: &Value, with_tail: bool) {
    for side in [&figure["raw"], &figure["uwarp"]] {
        assert!(positive(&side["median"]), "{figure}");
        let rounds = side["rounds"].as_array().unwrap();
        assert!(!rounds.is_empty() && rounds.iter().all(positive), "{figure}");
        assert_eq!(side.get("p99").is_some_and(positive), with_tail, "{figure}");
    }
    for name in ["median", "least", "most"] {
        assert!(positive(&figure["ratio"][name]), "{figure}");
        assert_eq!(positive(&figure["p99_ratio"][name]), with_tail, "{figure}");
    }
    // What raw TCP did, and that it was the best of several ways, where it could choose.
    let tried = figure["baseline"]["tried"].as_array().unwrap();
    let chosen = figure["group"] != "crowded" && !figure["id"].as_str().unwrap().ends_with("send-asleep");
    assert_eq!(tried.len() > 1, chosen, "{figure}");
    assert!(tried.iter().all(|one| positive(&one["value"])), "{figure}");
    assert!(tried.iter().any(|one| one["way"] == figure["baseline"]["chosen"]), "{figure}");
}

/// System calls by name.
fn calls(figure: &Value) {
    assert!(positive(&figure["operations"]) && figure["spared"].is_u64(), "{figure}");
    for call in figure["calls"].as_array().unwrap() {
        assert!(call["name"].is_string() && call["empty"].is_boolean() && positive(&call["count"]), "{call}");
    }
}
