//! What a person reads at the default level where he gets stuck: one line, with what to do.

use std::path::{Path, PathBuf};
use std::time::Duration;

use uwarp_conformance::dist::Dist;
use uwarp_conformance::netns::{NetNs, Veth};
use uwarp_conformance::process::{Cmd, Output, Running};
use uwarp_conformance::topology::free_port;
use uwarp_conformance::{Context, Failure, Outcome, cc, check, pair, require};

/// Bounds a hang.
const LIMIT: Duration = Duration::from_secs(120);

fn test(run: impl FnOnce() -> Outcome) {
    if let Err(Failure(why)) = run() {
        panic!("{why}");
    }
}

/// `uwarp run` with these options and a program.
fn run(options: &str, program: &str) -> Cmd {
    let uwarp = Dist::find().and_then(|dist| dist.uwarp()).expect("the built command");
    let names = std::env::vars_os().map(|(name, _)| name);
    let ours = names.filter(|name| name.as_encoded_bytes().starts_with(b"UWARP_"));
    let command = ours.fold(Cmd::new(uwarp), Cmd::unset).unset("LD_LIBRARY_PATH");
    command.args(&format!("run {options} -- {program}"))
}

fn place(name: &str) -> PathBuf {
    Path::new(env!("CARGO_TARGET_TMPDIR")).join(name)
}

/// The lines of uwarp itself. Each says what it is about, and none where in the library it comes from.
fn lines(text: &str) -> Vec<&str> {
    text.lines().filter(|line| line.starts_with("uwarp: ")).collect()
}

/// There is exactly one line, with these words.
fn one_line(text: &str, words: &[&str]) -> Outcome {
    let lines = lines(text);
    require!(lines.len() == 1, "{} lines instead of one:\n{text}", lines.len());
    for word in words {
        require!(lines[0].contains(word), "no \"{word}\" in the line:\n{text}");
    }
    Ok(())
}

/// It has said one line with these words, and goes on or has ended.
fn says(end: &Running, words: &[&str]) -> Outcome {
    end.until(LIMIT, "saying why it waits", |end| !lines(&end.so_far()).is_empty())?;
    one_line(&end.so_far(), words)
}

fn silent(out: &Output) -> Outcome {
    require!(out.stderr.is_empty(), "words without need:\n{}", out.text());
    Ok(())
}

/// "Failed to modify QP to RTR" was all, and for datagrams "Failed to create AH".
#[test]
fn pingpong_without_a_gid_index_is_told_to_add_it() {
    test(|| {
        for program in ["ibv_rc_pingpong", "ibv_ud_pingpong"] {
            let port = free_port();
            let server = run("", &format!("{program} -p {port}"));
            let client = run("", &format!("{program} -p {port} 127.0.0.1"));
            let ends = pair::run_any(&server, &client, port)?;
            require!(!ends.server.ok() && !ends.client.ok(), "it runs without: {}", ends.server.text());
            let words = ["needs a GID index: add -g 0", "at both ends (or run both ends with --as ib)"];
            one_line(&ends.server.stderr, &words)?;
        }
        Ok(())
    });
}

/// "Failed to modify QP to RTR" was all at the end that is right; the other one says that it needs an index.
#[test]
fn one_end_without_a_gid_or_a_lid_is_named_at_the_other() {
    test(|| {
        let no_gid = "needs a GID index: add -g 0 to the program's options at both ends";
        let no_lid = "the other end has sent no LID: run both ends with --as ib, or neither, and add -g 0";
        for (options, index, words) in [("", "-g 0", no_gid), ("--as ib", "", no_lid)] {
            let port = free_port();
            let server = run(options, &format!("ibv_rc_pingpong {index} -p {port}"));
            let client = run("", &format!("ibv_rc_pingpong -p {port} 127.0.0.1"));
            let ends = pair::run_any(&server, &client, port)?;
            require!(!ends.server.ok() && !ends.client.ok(), "it runs without: {}", ends.server.text());
            one_line(&ends.server.stderr, &[words])?;
        }
        Ok(())
    });
}

/// "Cannot assign requested address" was all.
#[test]
fn an_address_of_another_host_is_named() {
    test(|| {
        for program in ["rping -s -a", "udaddy -b"] {
            let server = run("", &format!("{program} 203.0.113.9")).run()?;
            require!(!server.ok(), "it listens there: {}", server.text());
            one_line(&server.stderr, &["203.0.113.9 is not an address of this host; `uwarp devices` lists"])?;
        }
        Ok(())
    });
}

/// `RDMA_CM_EVENT_REJECTED, error 8` was all.
#[test]
fn a_server_that_does_not_run_is_named() {
    test(|| {
        for (options, words) in [("", "nothing listens there"), ("--as iwarp", "nothing listens there, or ")]
        {
            let port = free_port();
            let client = run(options, &format!("rping -c -a 127.0.0.1 -p {port} -C 1")).run()?;
            require!(!client.ok(), "connected to nothing");
            let address = format!("127.0.0.1:{port} refused the connection: ");
            one_line(&client.stderr, &[&address, words, "is the server running under uwarp?"])?;
        }
        // On the way to another host there may be a firewall that rejects.
        let veth = Veth::new(1500)?;
        firewall(&veth.server, &["meta l4proto tcp reject with tcp reset"])?;
        let program = format!("rping -c -a {} -p 7174 -C 1", Veth::SERVER4);
        let client = run("", &program).in_ns(Some(&veth.client)).run()?;
        let line =
            format!("{}:7174 refused the connection: nothing listens there, or a firewall", Veth::SERVER4);
        one_line(&client.stderr, &[&line, "is the server running under uwarp?"])
    });
}

/// `rdma_getaddrinfo: Success` was all.
#[test]
fn a_host_name_without_an_address_is_named() {
    test(|| {
        let client = run("", "udaddy -s no-such-host.invalid").run()?;
        require!(!client.ok(), "it has an address: {}", client.text());
        one_line(&client.stderr, &["uwarp: no address for no-such-host.invalid: "])
    });
}

/// A minute of silence.
#[test]
fn a_peer_that_says_nothing_is_named() {
    test(|| {
        // A server of something else: the system accepts for it.
        let other = std::net::TcpListener::bind("127.0.0.1:0").context("a port")?;
        let port = other.local_addr().context("its address")?.port();
        let client = run("", &format!("rping -c -a 127.0.0.1 -p {port} -C 1")).spawn()?;
        let line = format!("connected to 127.0.0.1:{port}, but no MPA reply for 3 s: ");
        says(&client, &[&line, "is that an iWARP server"])?;
        client.stop();
        // A firewall.
        let veth = Veth::new(1500)?;
        firewall(&veth.server, &["meta l4proto tcp drop"])?;
        let program = format!("rping -c -a {} -p 7174 -C 1", Veth::SERVER4);
        let client = run("", &program).in_ns(Some(&veth.client)).spawn()?;
        let line = format!("no answer from {}:7174 for 3 s: ", Veth::SERVER4);
        says(&client, &[&line, "does a firewall drop TCP to this port?"])?;
        client.stop();
        // No way there at all: `RDMA_CM_EVENT_ADDR_ERROR, error -101` was all.
        let client = run("", "rping -c -a 203.0.113.9 -C 1").in_ns(Some(&veth.client)).run()?;
        let line = "uwarp: no route to 203.0.113.9: Network is unreachable. Is the address right, and ";
        one_line(&client.stderr, &[line])
    });
}

/// `2026-11-25T00:12:04.832594Z  WARN uwarp_rnic::qp::rc::errors: the peer terminated the stream qpn=10518272
/// error=RDMAP: …`
#[test]
fn the_log_is_for_people_up_to_info_and_has_the_places_from_debug_on() {
    test(|| {
        let program = cc::build("errno_table", &place("words"))?;
        let said = |level: &str| {
            let cmd = run(&format!("--log {level}"), &program.display().to_string());
            Ok::<_, Failure>(cmd.args("127.0.0.1 remote_writes").run_ok()?.stderr)
        };
        let warnings = said("warn")?;
        let line = warnings.lines().find(|line| line.contains("the peer ended the connection: "));
        let line = line.ok_or_else(|| Failure(format!("not said:\n{warnings}")))?;
        let number = line.strip_prefix("uwarp: qp 0x").and_then(|rest| rest.split_once(": "));
        require!(number.is_some_and(|(number, _)| u32::from_str_radix(number, 16).is_ok()), "{line}");
        require!(line.ends_with(": invalid remote key") || line.contains("registered memory"), "{line}");
        require!(warnings.lines().all(|line| line.starts_with("uwarp: ")), "other lines:\n{warnings}");
        let debug = said("debug")?;
        let detailed = debug.lines().any(|line| {
            line.contains(" WARN uwarp_rnic::qp::rc::errors: ")
                && line.starts_with("20")
                && line.contains("qpn=")
        });
        require!(detailed, "no places:\n{debug}");
        Ok(())
    });
}

/// "The end that terminates has failed", at both ends.
#[test]
fn a_wrong_local_key_is_named_at_both_ends() {
    test(|| {
        let program = cc::build("errno_table", &place("words-local"))?;
        let cmd = run("", &program.display().to_string());
        let out = cmd.args("127.0.0.1 local_protection").run_ok()?;
        for words in [
            "this end ends the connection: the memory of its own work request: a wrong local key, or",
            "the peer ended the connection: a failure of its own, not of what the other end has sent",
        ] {
            require!(out.stderr.contains(words), "not said: {words}\n{}", out.text());
        }
        Ok(())
    });
}

/// The same line for each try of the peer.
#[test]
fn wrong_packet_sequence_numbers_are_named_once() {
    test(|| {
        let program = cc::build("other_psns", &place("words-psns"))?;
        let out = run("", &program.display().to_string()).run_ok()?;
        one_line(&out.stderr, &["shows other packet sequence numbers", "(rq_psn 0x1, sq_psn 0x5)"])
    });
}

/// The peer's packet sequence numbers were compared with those that nobody had set.
#[test]
fn two_views_that_talk_to_each_other_are_no_reason_for_a_warning() {
    test(|| {
        for (server, client) in [("--as iwarp", ""), ("", "--as iwarp"), ("--as iwarp", "--as ib")] {
            let port = free_port();
            let program = format!("ibv_rc_pingpong -g 0 -n 50 -p {port}");
            let client = run(client, &format!("{program} 127.0.0.1"));
            let ends = pair::run(&run(server, &program), &client, port)?;
            silent(&ends.server)?;
            silent(&ends.client)?;
        }
        Ok(())
    });
}

/// What this namespace lets in of another host: everything but what such a rule names.
fn firewall(place: &NetNs, rules: &[&str]) -> Outcome {
    let nft = |rule: &str| Cmd::line("nft").args(rule).in_ns(Some(place)).run_ok().map(drop);
    nft("add table inet fire")?;
    nft("add chain inet fire in { type filter hook input priority 0 ; }")?;
    rules.iter().try_for_each(|rule| nft(&format!("add rule inet fire in iif != lo {rule}")))
}

/// Two ends that exchange numbers, through a firewall: what the connecting end and the waiting one say.
fn blocked(rules: &[&str], connecting: &[&str]) -> Outcome {
    let veth = Veth::new(1500)?;
    firewall(&veth.server, rules)?;
    firewall(&veth.client, rules)?;
    // The end with the smaller address waits.
    let [waits, connects] = [(&veth.server, Veth::SERVER4), (&veth.client, Veth::CLIENT4)];
    let program = "ibv_rc_pingpong -g 0 -p 18515";
    let options = "--port-range 20000-20099";
    let server = pair::serve(&run(options, program).in_ns(Some(waits.0)), 18515)?;
    let client = run(options, &format!("{program} {}", waits.1)).in_ns(Some(connects.0)).spawn()?;
    says(&client, connecting)?;
    says(&server, &["still waiting for queue pair 0x", connects.1, "to TCP port 20", "--port-range"])?;
    client.stop();
    server.stop();
    Ok(())
}

/// The client ended with "transport retry counter exceeded", and its server waited without a word.
#[test]
fn blocked_ports_are_named_at_both_ends() {
    test(|| {
        let ports = "20000-20099";
        let words = ["still waiting for queue pair 0x", Veth::SERVER4, "--port-range"];
        let udp = format!("udp dport {ports} drop");
        blocked(&[&udp], &[&words[..], &["TCP port 20", "but UDP port 20"]].concat())?;
        let tcp = format!("tcp dport {ports} drop");
        blocked(&[&tcp], &[&words[..], &["UDP port 20", "but TCP port 20", "block TCP?"]].concat())?;
        let reset = format!("tcp dport {ports} reject with tcp reset");
        blocked(&[&reset], &[&words[..], &["UDP port 20", "and TCP port 20", "refuses"]].concat())?;
        blocked(&[&udp, &tcp], &[&words[..], &["neither UDP port 20"]].concat())
    });
}

/// Both programs waited without a word.
#[test]
fn a_send_without_a_receive_is_named_at_both_ends() {
    test(|| {
        let program = cc::build("starving", &place("words-starving"))?;
        let port = free_port();
        let end = |role: &str| run("", &format!("{} {role} 127.0.0.1 {port}", program.display()));
        let server = pair::serve(&end("server"), port)?;
        let client = end("client").spawn()?;
        says(&server, &["uwarp: qp 0x", "has waited for 5 s", "has posted no receive"])?;
        says(&client, &["uwarp: qp 0x", "has taken nothing for 10 s", "no receive"])?;
        client.stop();
        server.stop();
        Ok(())
    });
}

/// An adapter in /sys and /dev, as GitHub's runners have one (`mana_0`): a mount namespace shows `rxe_0`,
/// which Debian's libibverbs finds.
const ADAPTER: &str = r#"set -e
mount -t tmpfs none "$1"; mkdir -p "$1/class" "$1/dev/shm" "$1/dev/infiniband"
for class in /sys/class/*; do cp -a "$class" "$1/class/" 2>/dev/null || true; done
verbs="$1/class/infiniband_verbs"; device="$1/class/infiniband/rxe_0"
mkdir -p "$verbs/uverbs0" "$device"
echo 6 >"$verbs/abi_version"; echo 2 >"$verbs/uverbs0/abi_version"
echo rxe_0 >"$verbs/uverbs0/ibdev"; echo 231:192 >"$verbs/uverbs0/dev"
echo "1: CA" >"$device/node_type"; echo 5054:00ff:fe12:3456 >"$device/node_guid"
cp -a /dev/null /dev/zero /dev/urandom /dev/tty "$1/dev/"; mknod "$1/dev/infiniband/uverbs0" c 231 192
mount --bind "$1/class" /sys/class; mount --bind "$1/dev" /dev
shift; exec "$@"
"#;

#[test]
fn beside_a_real_adapter_programs_see_uwarp_alone() {
    test(|| {
        let mock = place("words-adapter");
        std::fs::create_dir_all(&mock).context("a directory")?;
        let beside = |cmd: Cmd| {
            let front = ["unshare", "-m", "sh", "-c", ADAPTER, "sh"].map(Into::into);
            cmd.behind(front.into_iter().chain([mock.clone().into_os_string()])).run_ok()
        };
        let real = beside(Cmd::new("ibv_devices").unset("LD_LIBRARY_PATH"))?;
        require!(real.stdout.contains("rxe_0"), "no adapter to be seen\n{}", real.text());
        let shown = beside(run("", "ibv_devices"))?;
        require!(shown.stdout.contains("uwarp0") && !shown.stdout.contains("rxe_0"), "{}", shown.text());
        silent(&shown)?;
        // By rdma_cm, for an address that both have.
        let port = free_port();
        let both = format!(
            "rping -s -a 127.0.0.1 -p {port} -C 2 & sleep 1; rping -c -a 127.0.0.1 -p {port} -C 2 -v"
        );
        check::has(&beside(run("", "sh -c").arg(both))?, "ping data: rdma-ping-1")?;
        // Who looks below /sys himself sees the adapter, unless the files are shown.
        let looks = |options: &str| beside(run(options, "ls /sys/class/infiniband")).map(|out| out.stdout);
        require!(looks("")? == "rxe_0\n" && looks("--files on")? == "uwarp0\n", "{:?}", looks("--files on"));
        let uwarp = Dist::find()?.uwarp()?;
        let doctor = beside(Cmd::new(uwarp).args("doctor"))?;
        check::has(&doctor, "this host has rxe_0, too")?;
        check::has(&doctor, "see uwarp's devices alone")
    });
}

/// A wheel brings its own libibverbs under another name, and a path to it; its module saw no device.
#[test]
fn a_library_bundled_in_a_wheel_is_replaced_too() {
    test(|| {
        let venv = place("words-venv");
        let _ = std::fs::remove_dir_all(&venv);
        let interpreter =
            Cmd::line("python3 -c").arg("import sys; print(sys.executable, *sys.version_info[:2])");
        let told = interpreter.run_ok()?.stdout;
        let [python, major, minor] = told.split_whitespace().collect::<Vec<_>>()[..] else {
            return Err(Failure(told.clone()));
        };
        let packages = venv.join(format!("lib/python{major}.{minor}/site-packages"));
        let (libs, bin) = (packages.join("wheel.libs"), venv.join("bin"));
        std::fs::create_dir_all(&libs).context("a directory")?;
        std::fs::create_dir_all(&bin).context("a directory")?;
        std::os::unix::fs::symlink(python, bin.join("python3")).context("a link")?;
        let renamed = "libibverbs-1de1263b.so.1";
        let compile = |text: &str, output: &Path, options: &str| {
            let source = output.with_extension("c");
            std::fs::write(&source, text).context("a source")?;
            let cc = Cmd::line("cc -shared -fPIC -o").arg(output).arg(source).args(options);
            cc.run_ok().map(drop)
        };
        std::fs::write(libs.join("map"), "IBVERBS_1.1 { global: *; };\n").context("a map")?;
        let options = format!("-Wl,-soname,{renamed} -Wl,--version-script={}", libs.join("map").display());
        let none = "void *ibv_get_device_list(int *n) { *n = 0; return n; }\n";
        compile(none, &libs.join(renamed), &options)?;
        let module = "void *ibv_get_device_list(int *);\n\
                      int devices(void) { int n; ibv_get_device_list(&n); return n; }\n";
        let options = format!("-L{} -l:{renamed} -Wl,-rpath,$ORIGIN/wheel.libs", libs.display());
        compile(module, &packages.join("wheel.so"), &options)?;
        let script =
            format!("import ctypes; print(ctypes.CDLL('{}').devices())", packages.join("wheel.so").display());
        let python = bin.join("python3");
        let alone = Cmd::new(&python).arg("-c").arg(&script).unset("LD_LIBRARY_PATH").run_ok()?;
        require!(alone.stdout == "0\n", "{}", alone.text());
        let over = run("", &python.display().to_string()).arg("-c").arg(&script).run_ok()?;
        require!(over.stdout == "1\n", "the wheel's own was used\n{}", over.text());
        let doctor = Cmd::new(Dist::find()?.uwarp()?).args("doctor --").arg(&python).run_ok()?;
        check::has(&doctor, renamed)?;
        check::has(&doctor, "`uwarp run` preloads uwarp's, which comes first")
    });
}
