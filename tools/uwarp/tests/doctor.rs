//! `uwarp doctor` finds what it must find. The library here is a stand-in from the C compiler: complete on
//! the outside, with symbols that do nothing.

mod common;

use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use common::{cc, uwarp};
use serde_json::Value;

fn write(path: PathBuf, content: &str) -> PathBuf {
    fs::write(&path, content).unwrap();
    path
}

/// A libuwarp.so that defines a symbol of each library, and every version but those in `without`.
fn library(directory: &Path, without: &[&str]) {
    let source = write(
        directory.join("library.c"),
        "void *ibv_get_device_list(int *n) { *n = 0; return 0; }\nint rdma_listen(void) { return -1; }\n",
    );
    let nodes = include_str!("../../../abi/symbols.txt").lines().filter_map(|line| line.strip_prefix('['));
    let map: String = nodes
        .filter_map(|line| line.split([' ', ']']).next())
        .filter(|version| !without.contains(version))
        .map(|version| match version {
            "IBVERBS_1.1" => "IBVERBS_1.1 { global: ibv_get_device_list; local: *; };\n".to_owned(),
            "RDMACM_1.0" => "RDMACM_1.0 { global: rdma_listen; };\n".to_owned(),
            _ => format!("{version} {{ }};\n"),
        })
        .collect();
    let script = format!("-Wl,--version-script={}", write(directory.join("map"), &map).display());
    cc(&["-shared", "-fPIC", "-Wl,-soname,libuwarp.so", &script], &directory.join("libuwarp.so"), &[&source]);
    for name in ["libibverbs.so.1", "librdmacm.so.1", "libibverbs.so", "librdmacm.so"] {
        symlink("libuwarp.so", directory.join(name)).unwrap();
    }
}

/// Another libibverbs, and a program that is linked against it.
fn program(directory: &Path, flags: &[&str]) -> String {
    let source = write(directory.join("other.c"), "void *ibv_get_device_list(int *n) { return n; }\n");
    let map = write(directory.join("other.map"), "IBVERBS_1.1 { global: *; };\n");
    let other = directory.join("libibverbs.so.1");
    let script = format!("-Wl,--version-script={}", map.display());
    cc(&["-shared", "-fPIC", "-Wl,-soname,libibverbs.so.1", &script], &other, &[&source]);
    let source = write(
        directory.join("main.c"),
        "void *ibv_get_device_list(int *);\nint main(void) { int n; return ibv_get_device_list(&n) != 0; }\n",
    );
    let program = directory.join("program");
    cc(flags, &program, &[&source, &other]);
    program.to_str().unwrap().to_owned()
}

/// What doctor says about one check, and its exit status.
fn check(
    libdir: &Path,
    name: &str,
    variables: &[(&str, &str)],
    program: &[&str],
) -> (String, String, Option<i32>) {
    let mut doctor = uwarp(libdir);
    doctor.envs(variables.iter().copied()).args(["doctor", "--json", "--"]).args(program);
    let answer = Answer::of(&mut doctor);
    let (status, found, remedy) = answer.check(name);
    (status, format!("{found} {remedy}"), answer.code)
}

/// All that doctor says.
struct Answer {
    document: Value,
    code: Option<i32>,
}

impl Answer {
    fn of(doctor: &mut Command) -> Answer {
        let output = doctor.output().unwrap();
        let document = serde_json::from_slice(&output.stdout)
            .unwrap_or_else(|error| panic!("{error}: {}", String::from_utf8_lossy(&output.stderr)));
        Answer { document, code: output.status.code() }
    }

    /// Status, finding and remedy of one check.
    fn check(&self, name: &str) -> (String, String, String) {
        let checks = self.document["checks"].as_array().unwrap();
        let found = checks.iter().find(|check| check["name"] == name);
        let found = found.unwrap_or_else(|| panic!("no {name} in {}", self.document));
        let word = |key: &str| found[key].as_str().unwrap_or_default().to_owned();
        (word("status"), word("found"), word("remedy"))
    }

    /// One check is so, what it finds and its remedy have these words, and the exit status follows.
    #[track_caller]
    fn says(&self, name: &str, status: &str, words: &[&str]) {
        let (is, found, remedy) = self.check(name);
        assert_eq!(is, status, "{name}: {found}");
        let both = format!("{found} -> {remedy}");
        for word in words {
            assert!(both.contains(word), "{word:?} is not in: {both}");
        }
        assert_eq!(remedy.is_empty(), status == "ok", "{name}: {both}");
        assert_eq!(self.code, Some(i32::from(self.document["worst"] == "fail")), "{}", self.document);
    }
}

/// A library in which doctor finds nothing, so that the exit status depends on the host only.
fn sound_library() -> tempfile::TempDir {
    let libdir = tempfile::tempdir().unwrap();
    // tempfile's directory is accessible to its owner only.
    fs::set_permissions(libdir.path(), fs::Permissions::from_mode(0o755)).unwrap();
    let nodes = include_str!("../../../abi/symbols.txt").lines().filter_map(|line| line.strip_prefix('['));
    let map: String = nodes
        .filter_map(|line| line.split([' ', ']']).next())
        .map(|version| match version {
            "IBVERBS_1.1" => "IBVERBS_1.1 { global: ibv_*; _ibv_*; local: *; };\n".to_owned(),
            _ => format!("{version} {{ }};\n"),
        })
        .collect();
    let script = format!("-Wl,--version-script={}", write(libdir.path().join("map"), &map).display());
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/stand_in.c");
    let library = libdir.path().join("libuwarp.so");
    cc(&["-shared", "-fPIC", "-Wl,-soname,libuwarp.so", &script], &library, &[&source]);
    for name in ["libibverbs.so.1", "librdmacm.so.1", "libibverbs.so", "librdmacm.so"] {
        symlink("libuwarp.so", libdir.path().join(name)).unwrap();
    }
    libdir
}

/// doctor in a shell in which this line was run first; `front` comes before the shell.
fn doctor_behind(front: &[&str], libdir: &Path, line: &str) -> Answer {
    let command = uwarp(libdir);
    let script = format!("{line} && exec \"$0\" doctor --json");
    let words = [front, &["sh", "-c", &script]].concat();
    let mut shell = Command::new(words[0]);
    shell.args(&words[1..]).arg(command.get_program()).stdin(Stdio::null());
    for (name, value) in command.get_envs() {
        match value {
            Some(value) => shell.env(name, value),
            None => shell.env_remove(name),
        };
    }
    Answer::of(&mut shell)
}

fn doctor_after(libdir: &Path, line: &str) -> Answer {
    doctor_behind(&[], libdir, line)
}

/// The same in a network namespace of its own.
fn doctor_in_namespace(libdir: &Path, line: &str) -> Answer {
    assert!(rustix::process::geteuid().is_root(), "network namespaces need root: run the tests as root");
    doctor_behind(&["unshare", "--net", "--"], libdir, line)
}

#[test]
fn whole_library_passes_and_its_silence_about_devices_fails() {
    let libdir = tempfile::tempdir().unwrap();
    library(libdir.path(), &[]);
    assert_eq!(check(libdir.path(), "library", &[], &[]).0, "ok");
    assert_eq!(check(libdir.path(), "versions", &[], &[]).0, "ok");
    let (status, words, code) = check(libdir.path(), "device", &[], &[]);
    assert_eq!((status.as_str(), code), ("fail", Some(1)));
    assert!(words.contains("ibv_free_device_list"), "the loader's own words: {words}");
}

#[test]
fn missing_version_and_astray_link_are_named() {
    let libdir = tempfile::tempdir().unwrap();
    library(libdir.path(), &["IBVERBS_1.14"]);
    let (status, words, _) = check(libdir.path(), "versions", &[], &[]);
    assert!(status == "fail" && words.contains("IBVERBS_1.14"), "{words}");
    let link = libdir.path().join("librdmacm.so.1");
    fs::remove_file(&link).unwrap();
    fs::write(&link, "").unwrap();
    let (status, words, _) = check(libdir.path(), "library", &[], &[]);
    assert!(status == "fail" && words.contains("librdmacm.so.1"), "{words}");
}

#[test]
fn program_that_takes_ours_passes() {
    let (libdir, elsewhere) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    library(libdir.path(), &[]);
    // A RUNPATH comes after LD_LIBRARY_PATH, so it does no harm.
    let runpath = format!("-Wl,--enable-new-dtags,-rpath,{}", elsewhere.path().display());
    let program = program(elsewhere.path(), &[&runpath]);
    let (status, words, _) = check(libdir.path(), "libraries", &[], &[&program]);
    assert!(status == "ok" && words.contains("it loads libibverbs"), "{words}");
}

#[test]
fn rpath_to_another_library_is_found() {
    let (libdir, elsewhere) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    library(libdir.path(), &[]);
    let rpath = format!("-Wl,--disable-new-dtags,-rpath,{}", elsewhere.path().display());
    let program = program(elsewhere.path(), &[&rpath]);
    let (status, words, _) = check(libdir.path(), "libraries", &[], &[&program]);
    assert!(status == "fail" && words.contains("RPATH in the program"), "{words}");
}

#[test]
fn program_that_does_not_start_at_all_is_told_apart() {
    let (libdir, elsewhere) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    library(libdir.path(), &["IBVERBS_1.1"]);
    let program = program(elsewhere.path(), &[]);
    let (status, words, _) = check(libdir.path(), "libraries", &[], &[&program]);
    assert!(status == "fail" && words.contains("IBVERBS_1.1"), "{words}");
}

/// As the man page has it: `--` is needed for none but a program whose name begins with a dash.
#[test]
fn program_and_its_arguments_need_no_double_dash() {
    let libdir = tempfile::tempdir().unwrap();
    library(libdir.path(), &[]);
    let output = uwarp(libdir.path()).args(["doctor", "--json", "sh", "-c", "--json"]).output().unwrap();
    let answer: Value = serde_json::from_slice(&output.stdout).unwrap();
    let found = answer["checks"].as_array().unwrap().iter().find(|check| check["name"] == "program");
    assert!(found.is_some_and(|check| check["found"].as_str().unwrap().contains("/sh")), "{answer}");
}

#[test]
fn static_missing_and_foreign_programs_are_named() {
    let libdir = tempfile::tempdir().unwrap();
    library(libdir.path(), &[]);
    let source = write(libdir.path().join("static.c"), "int main(void) { return 0; }\n");
    let path = libdir.path().join("static");
    cc(&["-static"], &path, &[&source]);
    let program = path.to_str().unwrap();
    let (status, words, _) = check(libdir.path(), "program", &[], &[program]);
    assert!(status == "fail" && words.contains("statically"), "{words}");
    // Nothing is said of a loader that it does not have.
    let output = uwarp(libdir.path()).args(["doctor", "--", program]).output().unwrap();
    assert!(!String::from_utf8_lossy(&output.stdout).contains("the loader uses"), "{output:?}");
    let (status, words, _) = check(libdir.path(), "program", &[("PATH", "/nowhere")], &["rping"]);
    assert!(status == "fail" && words.contains("rdmacm-utils"), "{words}");
    // A dynamic program for another processor (e_machine, here of a PDP-10).
    let mut bytes = fs::read("/bin/true").unwrap();
    bytes[18..20].copy_from_slice(&64_u16.to_ne_bytes());
    fs::write(&path, bytes).unwrap();
    let (status, words, _) = check(libdir.path(), "program", &[], &[program]);
    assert!(status == "fail" && words.contains("ELF machine 64"), "{words}");
    // And one of which a part is missing.
    let bytes = fs::read("/bin/true").unwrap();
    fs::write(&path, &bytes[..bytes.len() / 2]).unwrap();
    let (status, words, _) = check(libdir.path(), "program", &[], &[program]);
    assert!(status == "fail" && words.contains("truncated"), "{words}");
}

/// A 32-bit program of x86 as short as one can be: a header, one segment, and the loader it asks for.
fn program_of_32_bits(path: &Path) -> String {
    let loader = b"/lib/ld-linux.so.2\0";
    let (header_len, segment_len) = (52_u32, 32_u32);
    let mut bytes = b"\x7fELF\x01\x01\x01".to_vec();
    bytes.resize(16, 0);
    let half =
        |bytes: &mut Vec<u8>, values: &[u16]| bytes.extend(values.iter().flat_map(|v| v.to_le_bytes()));
    let word =
        |bytes: &mut Vec<u8>, values: &[u32]| bytes.extend(values.iter().flat_map(|v| v.to_le_bytes()));
    // ET_EXEC, EM_386.
    half(&mut bytes, &[2, 3]);
    word(&mut bytes, &[1, 0, header_len, 0, 0]);
    half(&mut bytes, &[52, 32, 1, 40, 0, 0]);
    // PT_INTERP.
    let (at, len) = (header_len + segment_len, loader.len() as u32);
    word(&mut bytes, &[3, at, 0, 0, len, len, 4, 1]);
    bytes.extend(loader);
    fs::write(path, bytes).unwrap();
    fs::set_permissions(path, fs::Permissions::from_mode(0o755)).unwrap();
    path.to_str().unwrap().to_owned()
}

/// It would be sent to look for 32-bit libraries otherwise, and none of them is uwarp.
#[test]
#[cfg(target_arch = "x86_64")]
fn program_of_32_bits_is_told_that_there_is_no_uwarp_for_it() {
    let libdir = tempfile::tempdir().unwrap();
    library(libdir.path(), &[]);
    let program = program_of_32_bits(&libdir.path().join("program"));
    let (status, words, _) = check(libdir.path(), "program", &[], &[&program]);
    assert_eq!(status, "fail");
    for word in ["32-bit x86", "the library is for x86-64", "there is no uwarp for 32-bit programs"] {
        assert!(words.contains(word), "{word:?} is not in: {words}");
    }
    let output = uwarp(libdir.path()).args(["doctor", "--json", "--", &program]).output().unwrap();
    let answer: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert!(
        answer["checks"].as_array().unwrap().iter().all(|check| check["name"] != "libraries"),
        "{answer}"
    );
}

#[test]
fn settings_and_ports_of_the_environment_are_judged() {
    let libdir = tempfile::tempdir().unwrap();
    library(libdir.path(), &[]);
    let (status, words, _) = check(libdir.path(), "settings", &[("UWARP_CRC", "perhaps")], &[]);
    assert!(status == "fail" && words.contains("UWARP_CRC=perhaps"), "{words}");
    let taken = std::net::TcpListener::bind("0.0.0.0:0").unwrap();
    let port = taken.local_addr().unwrap().port();
    let range = format!("{port}-{port}");
    let (status, words, _) = check(libdir.path(), "ports", &[("UWARP_PORT_RANGE", &range)], &[]);
    assert!(status == "fail" && words.contains("0 of the first 1"), "{words}");
    drop(taken);
    assert_eq!(check(libdir.path(), "ports", &[("UWARP_PORT_RANGE", &range)], &[]).0, "ok");
}

#[test]
fn a_sound_library_on_a_host_that_gives_everything_passes() {
    let libdir = sound_library();
    let answer = doctor_in_namespace(
        libdir.path(),
        "ip link set lo up && ip link add near type veth peer name far \
         && ip address add 10.55.0.1/24 dev near && ip link set near up && ip link set far up \
         && for i in $(seq 500); do ip -br link show near | grep -qw UP && break; sleep 0.01; done",
    );
    for name in [
        "library", "versions", "device", "settings", "loader", "kernel", "loopback", "buffers", "ports",
        "udp",
    ] {
        answer.says(name, "ok", &[]);
    }
    answer.says("interface", "ok", &["10.55.0.1 (near)"]);
    assert_eq!(answer.code, Some(0));
}

#[test]
fn few_descriptors_are_found() {
    let libdir = sound_library();
    let remedy = ["raise the hard limit", "LimitNOFILE=", "limits.conf"];
    let answer = doctor_after(libdir.path(), "ulimit -n 63");
    answer.says("descriptors", "fail", &[&["63 now, 63 for programs"], &remedy[..]].concat());
    assert_eq!(answer.code, Some(1));
    // Enough to run, and for few connections only.
    let answer = doctor_after(libdir.path(), "ulimit -n 64");
    answer.says("descriptors", "warn", &[&["64 now, 64 for programs"], &remedy[..]].concat());
    assert_eq!(answer.code, Some(0));
    // The soft limit does not matter: `uwarp run` raises it.
    let answer = doctor_after(libdir.path(), "ulimit -Sn 63 && ulimit -Hn 4096");
    answer.says("descriptors", "ok", &["63 now, 4096 for programs"]);
}

#[test]
fn loopback_that_is_down_is_found() {
    let libdir = sound_library();
    let answer = doctor_in_namespace(libdir.path(), "true");
    answer.says("loopback", "fail", &["no TCP connection over 127.0.0.1", "ip link set lo up"]);
    // It advised to change the firewall.
    answer.says("udp", "fail", &["(127.0.0.1: Network is unreachable)", "ip link set lo up"]);
    assert_eq!(answer.code, Some(1));
}

/// TCP alone is not enough: queue pairs that are joined by number prove their numbers by UDP.
#[test]
fn a_firewall_that_drops_udp_is_found() {
    let libdir = sound_library();
    let firewall = |family: &str, ports: &str| {
        format!(
            "ip link set lo up && ip link add near type veth peer name far \
             && ip address add 10.55.0.1/24 dev near && ip link set near up && ip link set far up \
             && for i in $(seq 500); do ip -br link show near | grep -qw UP && break; sleep 0.01; done \
             && nft add table inet fire \
             && nft 'add chain inet fire in {{ type filter hook input priority 0; }}' \
             && nft add rule inet fire in {family} {ports} drop"
        )
    };
    let answer = doctor_in_namespace(libdir.path(), &firewall("meta l4proto", "udp"));
    answer.says(
        "udp",
        "fail",
        &["10.55.0.1: nothing came", "connect by number", "pass UDP as well as TCP", "--port-range"],
    );
    answer.says("loopback", "ok", &[]);
    assert_eq!(answer.code, Some(1));
    // What is blocked is not in the range.
    let range = |line: String| format!("{line} && export UWARP_PORT_RANGE=20000-20001");
    let blocked = range(firewall("udp dport", "20000-20001"));
    doctor_in_namespace(libdir.path(), &blocked).says("udp", "fail", &["10.55.0.1: nothing came"]);
    let passed = range(firewall("udp dport", "!= 20000-20001"));
    doctor_in_namespace(libdir.path(), &passed).says("udp", "ok", &["datagrams to 10.55.0.1 come back"]);
}

#[test]
fn host_without_a_usable_interface_is_found() {
    let libdir = sound_library();
    for line in [
        "true",
        // Up without an address, and an address on one that is down.
        "ip link add near type veth peer name far && ip link set far up \
         && ip address add 10.55.0.1/24 dev near",
    ] {
        let answer = doctor_in_namespace(libdir.path(), &format!("ip link set lo up && {line}"));
        answer.says("loopback", "ok", &[]);
        answer.says(
            "interface",
            "warn",
            &["no interface but loopback is up with an address", "ip link set NAME up; ip address add"],
        );
        assert_eq!(answer.code, Some(0));
    }
}

#[test]
fn small_socket_buffers_and_few_ports_are_found() {
    let libdir = sound_library();
    let set = |line: &str| doctor_in_namespace(libdir.path(), &format!("ip link set lo up && {line}"));
    let answer = set("echo 4096 65536 131072 >/proc/sys/net/ipv4/tcp_rmem");
    answer.says(
        "buffers",
        "warn",
        &["128 KiB for receiving, which bounds throughput", "sysctl -w net.ipv4.tcp_rmem='"],
    );
    let (_, _, remedy) = answer.check("buffers");
    assert!(!remedy.contains("tcp_wmem"), "{remedy}");
    assert_eq!(answer.code, Some(0));
    // What the remedy sets is enough.
    let value = remedy.split('\'').nth(1).unwrap();
    set(&format!("echo {value} >/proc/sys/net/ipv4/tcp_rmem")).says(
        "buffers",
        "ok",
        &["6144 KiB for receiving"],
    );

    let answer = set("echo 40000 40099 >/proc/sys/net/ipv4/ip_local_port_range");
    answer.says(
        "ports",
        "warn",
        &["only ports from 40000 to 40099", "sysctl -w net.ipv4.ip_local_port_range='"],
    );
    assert_eq!(answer.code, Some(0));
}

#[test]
fn a_single_core_is_found() {
    let libdir = sound_library();
    let answer = doctor_after(
        libdir.path(),
        "taskset -cp $(awk '/^Cpus_allowed_list/ { split($2, cpu, \"[,-]\"); print cpu[1] }' \
         /proc/$$/status) $$ >/dev/null",
    );
    answer.says("cores", "warn", &["one core for two programs that poll", "prefer polling or events"]);
    assert_eq!(answer.code, Some(0));
}

/// Of the one who asks: root gains nothing by a program that is setuid to root.
#[test]
fn program_that_gains_rights_is_found() {
    assert!(rustix::process::geteuid().is_root(), "to be another user needs root: run the tests as root");
    let libdir = sound_library();
    let program = libdir.path().join("true");
    let program = program.to_str().unwrap();
    fs::copy("/bin/true", program).unwrap();
    fs::set_permissions(program, fs::Permissions::from_mode(0o4755)).unwrap();
    // Other users may not enter the directory where cargo puts it.
    let command = libdir.path().join("uwarp");
    fs::copy(env!("CARGO_BIN_EXE_uwarp"), &command).unwrap();
    let ask_as = |uid: u32, program: &str| {
        let mut doctor = Command::new("setpriv");
        doctor.args([&format!("--reuid={uid}"), &format!("--regid={uid}"), "--clear-groups", "--"]);
        doctor.arg(&command).args(["doctor", "--json", program]).env("UWARP_LIBDIR", libdir.path());
        Answer::of(doctor.env_remove("LD_LIBRARY_PATH").current_dir("/"))
    };
    let answer = ask_as(65534, program);
    answer.says("rights", "fail", &["it is setuid to user 0", "run a copy of it: cp drops these rights"]);
    assert_eq!(answer.code, Some(1));
    ask_as(0, program).says("rights", "ok", &[]);
    // As the remedy says.
    let copy = format!("{program}-copy");
    let status = Command::new("cp").args([program, &copy]).status().unwrap();
    assert!(status.success());
    let answer = ask_as(65534, &copy);
    answer.says("rights", "ok", &[]);
    assert_eq!(answer.code, Some(0));
}

/// It was silent about the first three, and said of a program without sockets that --sockets can be used.
#[test]
fn scripts_and_paths_that_lead_past_the_library_are_found() {
    let libdir = sound_library();
    let script = |name: &str, text: &str| {
        let path = write(libdir.path().join(name), text);
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
        path.to_str().unwrap().to_owned()
    };
    let said = |name: &str, program: &str| {
        let (status, words, _) = check(libdir.path(), name, &[], &[program]);
        (status, words)
    };
    let (status, words) =
        said("script", &script("reset", "#!/bin/sh\nexport LD_LIBRARY_PATH=/opt/lib\n./p\n"));
    assert!(status == "warn" && words.contains("sets LD_LIBRARY_PATH anew"), "{words}");
    let (status, words) = said("program", &script("broken", "#!/no/such/shell\n"));
    assert!(
        status == "fail" && words.contains("an interpreter that is not there: #!/no/such/shell"),
        "{words}"
    );
    let other = write(libdir.path().join("libibverbs-own.so.1"), "");
    let text = format!("#include <stdio.h>\nint main(void) {{ return puts({:?}); }}\n", other.display());
    let source = write(libdir.path().join("opens.c"), &text);
    let program = libdir.path().join("opens");
    cc(&[], &program, &[&source]);
    let program = program.to_str().unwrap();
    let (status, words) = said("bundled", program);
    assert!(status == "warn" && words.contains("which it may open by this path"), "{words}");
    let (status, words) = said("sockets", program);
    assert!(status == "ok" && words.contains("it calls no sockets itself"), "{words}");
    let (status, words) = said("program", ".");
    assert!(status == "fail" && words.contains(". is a directory"), "{words}");
}

/// The device's check ended with an error, and said "please report it".
#[test]
fn a_wrong_setting_is_a_finding_of_its_own() {
    let libdir = sound_library();
    let wrong = [("UWARP_VIEW", "nonsense"), ("UWARP_CRC", "2")];
    let (status, words, _) = check(libdir.path(), "device", &wrong, &[]);
    assert_eq!(status, "ok", "{words}");
    let (status, words, code) = check(libdir.path(), "settings", &wrong, &[]);
    assert_eq!((status.as_str(), code), ("fail", Some(1)), "{words}");
}
