//! `uwarp run` as a user meets it: what it does to a program's environment, and what it says when it cannot.

mod common;

use std::ffi::OsStr;
use std::fs;
use std::io::Read;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use common::{cc, uwarp};

/// A directory that has the library's names, which is all that `run` itself asks for.
fn library_directory() -> tempfile::TempDir {
    let directory = tempfile::tempdir().unwrap();
    fs::write(directory.path().join("libuwarp.so"), "").unwrap();
    for name in ["libibverbs.so.1", "librdmacm.so.1"] {
        symlink("libuwarp.so", directory.path().join(name)).unwrap();
    }
    directory
}

fn run<S: AsRef<OsStr>>(libdir: &Path, words: &[S]) -> Output {
    uwarp(libdir).arg("run").args(words).output().unwrap()
}

fn text(bytes: &[u8]) -> &str {
    std::str::from_utf8(bytes).unwrap()
}

#[track_caller]
fn assert_refused(output: &Output, status: i32, words: &[&str]) {
    let complaint = text(&output.stderr);
    assert_eq!(output.status.code(), Some(status), "{complaint}");
    assert!(complaint.starts_with("uwarp: "), "{complaint}");
    for word in words {
        assert!(complaint.contains(word), "{word:?} is not in: {complaint}");
    }
}

fn compiled(directory: &Path, flags: &[&str]) -> PathBuf {
    let (source, program) = (directory.join("program.c"), directory.join("program"));
    fs::write(&source, "int main(void) { return 7; }\n").unwrap();
    cc(flags, &program, &[&source]);
    program
}

#[test]
fn program_sees_library_path_and_settings() {
    let libdir = library_directory();
    let output = uwarp(libdir.path())
        .env("LD_LIBRARY_PATH", "/elsewhere")
        .env("UWARP_PROGRESS", "spin")
        .current_dir(libdir.path())
        .args(["run", "--as", "roce", "--markers", "--trace", "trace.txt", "--", "env"])
        .output()
        .unwrap();
    assert!(output.status.success());
    let variables: Vec<_> = text(&output.stdout).lines().collect();
    let here = libdir.path().canonicalize().unwrap();
    for wanted in [
        format!("LD_LIBRARY_PATH={}:/elsewhere", libdir.path().canonicalize().unwrap().display()),
        "UWARP_VIEW=roce".to_owned(),
        "UWARP_MARKERS=on".to_owned(),
        "UWARP_PROGRESS=spin".to_owned(),
        format!("UWARP_TRACE={}", here.join("trace.txt").display()),
    ] {
        assert!(variables.contains(&wanted.as_str()), "{wanted} is not in {variables:#?}");
    }
    assert!(!variables.iter().any(|line| line.starts_with("UWARP_CRC")));
}

/// The program ran, and nothing but a line in its log said that there would be no trace.
#[test]
fn a_trace_that_cannot_be_written_is_refused_before_the_program_starts() {
    let libdir = library_directory();
    let file = libdir.path().join("no such directory").join("trace.txt");
    let output = run(
        libdir.path(),
        &["--trace".as_ref(), file.as_os_str(), "--".as_ref(), "echo".as_ref(), "ran".as_ref()],
    );
    assert_refused(
        &output,
        125,
        &["cannot write the trace to", "no such directory/trace.txt: No such file or directory\n"],
    );
    assert_eq!(text(&output.stdout), "");
}

/// The reader is still there when the program opens the FIFO: `uwarp run` has not opened and closed it
/// before.
#[test]
fn a_trace_into_a_fifo_is_left_to_the_program() {
    let libdir = library_directory();
    let fifo = libdir.path().join("fifo");
    assert!(Command::new("mkfifo").arg(&fifo).status().unwrap().success());
    let mut reader =
        Command::new("timeout").arg("20").arg("cat").arg(&fifo).stdout(Stdio::piped()).spawn().unwrap();
    let output = uwarp(libdir.path())
        .args(["run", "--trace", fifo.to_str().unwrap(), "--"])
        .args(["timeout", "20", "sh", "-c", "echo traced >\"$UWARP_TRACE\""])
        .output()
        .unwrap();
    let mut read = String::new();
    reader.stdout.take().unwrap().read_to_string(&mut read).unwrap();
    reader.wait().unwrap();
    assert_eq!((output.status.code(), read.as_str()), (Some(0), "traced\n"), "{}", text(&output.stderr));
}

#[test]
fn program_keeps_its_name_arguments_and_exit_status() {
    let libdir = library_directory();
    let output = run(libdir.path(), &["--", "sh", "-c", "echo $0 $1; exit 42", "zero", "--one"]);
    assert_eq!((text(&output.stdout), output.status.code()), ("zero --one\n", Some(42)));
}

#[test]
fn descriptor_limit_goes_up_to_the_hard_one() {
    let libdir = library_directory();
    let line = format!(
        "ulimit -n 300; ulimit -Sn 100; UWARP_LIBDIR={} exec {} run -- sh -c 'ulimit -Sn; ulimit -Hn'",
        libdir.path().display(),
        env!("CARGO_BIN_EXE_uwarp")
    );
    let output = Command::new("sh").args(["-c", &line]).output().unwrap();
    assert_eq!(text(&output.stdout), "300\n300\n");
}

#[test]
fn missing_program_is_127_with_its_package() {
    let libdir = library_directory();
    assert_refused(&run(libdir.path(), &["--", "no-such-program"]), 127, &["no-such-program", "PATH"]);
    assert_refused(
        &run(libdir.path(), &["--", "./rping"]),
        127,
        &["no file ./rping", "apt-get install rdmacm-utils"],
    );
}

#[test]
fn file_that_cannot_be_executed_is_126() {
    let libdir = library_directory();
    let plain = libdir.path().join("plain");
    fs::write(&plain, "").unwrap();
    assert_refused(&run(libdir.path(), &[&plain]), 126, &["not executable", "chmod +x"]);
    assert_refused(&run(libdir.path(), &[libdir.path()]), 126, &["is a directory"]);
    fs::write(&plain, "#!/no/such/interpreter\n").unwrap();
    fs::set_permissions(&plain, fs::Permissions::from_mode(0o755)).unwrap();
    assert_refused(
        &run(libdir.path(), &[&plain]),
        126,
        &["names an interpreter that is not there", "correct the line"],
    );
    let absent = libdir.path().join("absent");
    assert_refused(&run(libdir.path(), &[&absent]), 127, &["there is no file", "check the path"]);
}

fn executable(path: &Path, content: &[u8]) {
    fs::write(path, content).unwrap();
    fs::set_permissions(path, fs::Permissions::from_mode(0o755)).unwrap();
}

/// execvp(3) gives what the kernel refuses to a shell, whose complaint about its syntax was all that the user
/// saw.
#[test]
fn elf_file_that_the_kernel_refuses_is_not_given_to_a_shell() {
    let libdir = library_directory();
    let (program, script) = (compiled(libdir.path(), &[]), libdir.path().join("script"));
    let whole = fs::read(&program).unwrap();
    let refused = |content: &[u8], words: &[&str]| {
        executable(&program, content);
        executable(&script, format!("#!{}\n", program.display()).as_bytes());
        for path in [&program, &script] {
            let output = run(libdir.path(), &[path]);
            assert_refused(&output, 126, &[&["cannot execute", path.to_str().unwrap()], words].concat());
            assert_eq!(text(&output.stderr).lines().count(), 1, "{}", text(&output.stderr));
        }
    };
    refused(&whole[..40], &["is truncated", "40 bytes", "copy or build it again"]);
    let mut foreign = whole.clone();
    // A PDP-10, for which no emulator is registered.
    foreign[18..20].copy_from_slice(&64_u16.to_ne_bytes());
    refused(&foreign, &["ELF machine 64", "this machine is", "build it for"]);
    let mut object = whole;
    object[16..18].copy_from_slice(&1_u16.to_ne_bytes());
    refused(&object, &["is an object file"]);
}

#[test]
fn program_that_is_cut_short_further_on_is_warned_of() {
    let libdir = library_directory();
    let program = compiled(libdir.path(), &[]);
    let whole = fs::read(&program).unwrap();
    // All that is loaded is there, so it runs; but the file is not what it was.
    executable(&program, &whole[..whole.len() - 1]);
    let wanted = format!("its headers describe {}", whole.len());
    assert_refused(&run(libdir.path(), &[&program]), 7, &["warning", "is truncated", &wanted]);
}

#[test]
fn script_without_a_first_line_is_run_by_a_shell() {
    let libdir = library_directory();
    let script = libdir.path().join("script");
    executable(&script, b"echo $1 $UWARP_VIEW; exit 9\n");
    let output =
        run(libdir.path(), &[OsStr::new("--as"), OsStr::new("ib"), script.as_os_str(), OsStr::new("a")]);
    assert_eq!((text(&output.stdout), output.status.code()), ("a ib\n", Some(9)), "{}", text(&output.stderr));
}

/// Rust's own start leaves SIGPIPE ignored, which a program does not expect; but a service of systemd does,
/// and it got the default.
#[test]
fn program_starts_with_the_signals_it_expects() {
    let libdir = library_directory();
    for (before, ignores) in [("", false), ("trap '' PIPE; ", true)] {
        let uwarp = env!("CARGO_BIN_EXE_uwarp");
        let script = format!("{before}exec {uwarp} run -- grep SigIgn /proc/self/status");
        let mut shell = Command::new("sh");
        let output = shell.args(["-c", &script]).env("UWARP_LIBDIR", libdir.path()).output().unwrap();
        let ignored = text(&output.stdout).split_whitespace().last().unwrap();
        let ignored = u64::from_str_radix(ignored, 16).unwrap();
        assert_eq!(ignored & 1 << (libc::SIGPIPE - 1) != 0, ignores, "{ignored:x}");
    }
}

#[test]
fn missing_library_is_125_with_the_way_out() {
    let empty = tempfile::tempdir().unwrap();
    assert_refused(&run(empty.path(), &["--", "true"]), 125, &["libibverbs.so.1", "make", "UWARP_LIBDIR"]);
    let odd = empty.path().join("a:b");
    fs::create_dir(&odd).unwrap();
    fs::write(odd.join("libibverbs.so.1"), "").unwrap();
    assert_refused(&run(&odd, &["--", "true"]), 125, &["`:`", "Move"]);
}

#[test]
fn options_that_make_no_sense_are_2() {
    let libdir = library_directory();
    for words in [
        &["--as", "rxe", "--", "true"][..],
        &["--port-range", "9-5", "--", "true"],
        &["--mpa-revision", "3", "--", "true"],
        &["--sockets=udp:port=5", "--", "true"],
        &[],
    ] {
        assert_eq!(run(libdir.path(), words).status.code(), Some(2), "{words:?}");
    }
    for (words, sentence) in [
        (&["--mcast-port", "0", "true"][..], "--mcast-port=0 is not valid: write a number from 1 to 65535\n"),
        (
            &["--as=rocev2", "true"],
            "--as=rocev2 is not valid: the values are: iwarp, roce, ib; did you mean roce?\n",
        ),
        (&[], "uwarp run needs a PROGRAM; `uwarp run --help` shows how to write it\n"),
        (&["--log", "info", "--log", "debug", "true"], "--log is given more than once\n"),
        (&["--crc"], "--crc without a value is not valid: the values are: on, off\n"),
        (&["--sockets=udp", "true"], "--sockets=udp is not valid: the rule \"udp\": \"udp\" is none of: "),
    ] {
        assert_refused(&run(libdir.path(), words), 2, &[&format!("uwarp: {sentence}")]);
    }
}

/// A mistyped option became the program: "no program --bogus in the directories of PATH".
#[test]
fn a_mistyped_option_is_not_taken_for_the_program() {
    let libdir = library_directory();
    for (words, sentence) in [
        (&["--bogus", "--", "true"][..], "unknown option --bogus; `uwarp run --help` lists the options"),
        (&["-as", "iwarp", "true"], "unknown option -as; did you mean --as?"),
        (&["--cr=off", "true"], "unknown option --cr=off; did you mean --crc?"),
        (&["--prot-range", "1-2", "true"], "unknown option --prot-range; did you mean --port-range?"),
        (&["--sockets", "upgrade:all", "true"], "did you mean --sockets=upgrade:all?"),
    ] {
        let output = run(libdir.path(), words);
        assert_refused(&output, 2, &[sentence]);
        assert_eq!(text(&output.stderr).lines().count(), 1, "{}", text(&output.stderr));
    }
    for (command, sentence) in [
        ("rnu", "there is no command rnu; did you mean run?"),
        ("echo", "there is no command echo; to run the program: uwarp run -- echo"),
    ] {
        let output = uwarp(libdir.path()).args([command, "--", "true"]).output().unwrap();
        assert_refused(&output, 2, &[sentence]);
    }
    for (words, sentence) in [
        (&["help", "rnu"][..], "there is no command rnu; did you mean run?"),
        (&["--as", "iwarp", "--", "true"], "--as is an option of `uwarp run`: uwarp run --as … -- PROGRAM"),
        (&["-v"], "-v is an option of `uwarp run`: uwarp run -v … -- PROGRAM"),
        (&["--vresion"], "unknown option --vresion; did you mean --version?"),
        (&["doctor", "--bogus"], "unknown option --bogus; `uwarp doctor --help` lists the options"),
        (&["bench", "latency", "--bogus"], "unknown option --bogus; `uwarp bench --help` lists the options"),
        (&["bench", "latency", "--ruonds", "3"], "unknown option --ruonds; did you mean --rounds?"),
        (&["bench", "latency", "--seconds", "-1"], "-1 is below 0; `uwarp bench --help` says which values"),
        (&["stat", "--wach"], "unknown option --wach; did you mean --watch?"),
    ] {
        let output = uwarp(libdir.path()).args(words).output().unwrap();
        assert_refused(&output, 2, &[sentence]);
        assert_eq!(text(&output.stderr).lines().count(), 1, "{}", text(&output.stderr));
    }
    // It was an option without a value, and its value the program.
    let output = run(libdir.path(), &["--markers", "1", "--", "env"]);
    assert!(text(&output.stdout).contains("UWARP_MARKERS=on\n"), "{output:?}");
    // Whoever writes `--` means a program.
    assert_refused(&run(libdir.path(), &["--", "--bogus"]), 127, &["no program --bogus"]);
    // The program's own options are its own.
    assert_eq!(text(&run(libdir.path(), &["echo", "--bogus"]).stdout), "--bogus\n");
}

/// "invalid value 'rxe' for '--as <VIEW>'" was said of an option that nobody had given, and of one at a time.
#[test]
fn wrong_variables_are_named_all_at_once() {
    let libdir = library_directory();
    let with = |variables: &[(&str, &str)], words: &[&str]| {
        uwarp(libdir.path()).envs(variables.iter().copied()).arg("run").args(words).output().unwrap()
    };
    let wrong = [("UWARP_VIEW", "rxe"), ("UWARP_CRC", "2"), ("UWARP_TRACE", "/no such directory/t")];
    let output = with(&wrong, &["--", "echo", "ran"]);
    assert_refused(
        &output,
        2,
        &[
            "uwarp: UWARP_VIEW=rxe is not valid: the values are: iwarp, roce, ib; correct it, or unset",
            "uwarp: UWARP_CRC=2 is not valid: the values are: on, off",
            "uwarp: UWARP_TRACE=/no such directory/t is not valid: cannot write the trace to",
        ],
    );
    assert_eq!((text(&output.stdout), text(&output.stderr).lines().count()), ("", 3));
    // An option takes a variable's place.
    let output = with(&[("UWARP_VIEW", "rxe")], &["--as", "ib", "--", "env"]);
    assert!(output.status.success() && text(&output.stdout).contains("UWARP_VIEW=ib\n"), "{output:?}");
    // Empty is as if it were not set. The words of the library are the command's, too.
    let good = [("UWARP_VIEW", ""), ("UWARP_CRC", "0"), ("UWARP_MARKERS", "1"), ("UWARP_STAT", "ON")];
    let output = with(&good, &["--", "echo", "ran"]);
    assert_eq!((text(&output.stdout), text(&output.stderr)), ("ran\n", ""));
    let output = with(&[("UWARP_VEIW", "ib")], &["--", "echo", "ran"]);
    assert_eq!(
        (text(&output.stdout), text(&output.stderr)),
        (
            "ran\n",
            "uwarp: warning: there is no setting UWARP_VEIW, so it has no effect; did you mean UWARP_VIEW?\n"
        )
    );
}

#[test]
fn static_program_runs_with_a_warning() {
    let libdir = library_directory();
    let program = compiled(libdir.path(), &["-static"]);
    assert_refused(&run(libdir.path(), &[&program]), 7, &["warning", "statically"]);
}

#[test]
fn sockets_of_programs_that_do_not_call_libc_are_refused() {
    let libdir = library_directory();
    let program = compiled(libdir.path(), &["-static"]);
    let words = [OsStr::new("--sockets"), OsStr::new("--"), program.as_os_str()];
    assert_refused(&run(libdir.path(), &words), 125, &["--sockets cannot be used", "linked statically"]);
    // The note that Go's linker writes.
    let note = r#".section .note.go.buildid,"a",@note; .long 4, 1, 4; .ascii "Go\0\0"; .long 0"#;
    let source = libdir.path().join("go.c");
    fs::write(&source, format!("__asm__({note:?});\nint main(void) {{ return 7; }}\n")).unwrap();
    cc(&[], &program, &[&source]);
    assert_refused(&run(libdir.path(), &words), 125, &["--sockets cannot be used", "Go"]);
    // The library is not there; it would be used.
    let program = compiled(libdir.path(), &[]);
    let words = [OsStr::new("--sockets"), OsStr::new("--"), program.as_os_str()];
    assert_refused(&run(libdir.path(), &words), 125, &["there is no", "libuwarp-sockets.so"]);
}

#[test]
fn rpath_to_another_library_is_warned_of() {
    let (libdir, other) = (library_directory(), library_directory());
    let rpath = format!("-Wl,--disable-new-dtags,-rpath,{}", other.path().display());
    let program = compiled(libdir.path(), &[&rpath]);
    let output = run(libdir.path(), &[&program]);
    assert_refused(&output, 7, &["warning", "RPATH", other.path().to_str().unwrap(), "patchelf"]);
}

#[test]
fn dynamic_program_runs_without_a_word() {
    let libdir = library_directory();
    let program = compiled(libdir.path(), &[]);
    let output = run(libdir.path(), &[&program]);
    assert_eq!((output.status.code(), text(&output.stderr)), (Some(7), ""));
}
