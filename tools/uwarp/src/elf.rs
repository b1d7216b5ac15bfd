//! How an ELF file will be loaded.

use std::env::consts::ARCH;
use std::fmt;
use std::fs::File;
use std::io::{self, Read};
use std::path::{Path, PathBuf};

use object::elf;
use object::read::elf::{FileHeader, ProgramHeader, Sym as _};
use object::{Endianness, ReadCache, ReadRef};

/// The properties that decide whether a program can load the library.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Facts {
    /// 32 or 64.
    pub bits: u8,
    /// `e_machine`.
    pub machine: u16,
    /// The loader that the program names; none in libraries and in statically linked programs.
    pub interpreter: Option<PathBuf>,
    /// The file has a table for the loader.
    pub dynamic: bool,
    /// The libraries it names.
    pub needed: Vec<String>,
    /// `DT_RPATH`, if the loader uses it: it ignores it beside a `DT_RUNPATH`. Searched before
    /// `LD_LIBRARY_PATH`.
    pub rpath: Vec<String>,
    /// Names of the symbol versions it defines.
    pub versions: Vec<String>,
    /// The functions and variables that others must define for it.
    pub imports: Vec<String>,
    /// Go's linker has made it.
    pub go: bool,
}

impl Facts {
    /// Reads a file; `Ok(None)` if it is not an ELF file.
    pub fn read(path: &Path) -> io::Result<Option<Facts>> {
        let Some((class, file)) = open(path)? else { return Ok(None) };
        // Programs can be large, and only a few pages of one matter here.
        let data = ReadCache::new(file);
        let parsed = match class == elf::ELFCLASS32.0 {
            true => facts::<elf::FileHeader32<Endianness>, _>(&data, 32),
            false => facts::<elf::FileHeader64<Endianness>, _>(&data, 64),
        };
        parsed.map(Some).map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error))
    }

    /// No library is loaded for it at run time.
    pub fn is_static(&self) -> bool {
        self.interpreter.is_none() && self.needed.is_empty()
    }

    /// Whether a library of `other`'s class and machine can be loaded beside it.
    pub fn same_kind(&self, other: &Facts) -> bool {
        (self.bits, self.machine) == (other.bits, other.machine)
    }

    /// The processor that it is built for.
    pub fn processor(&self) -> String {
        processor(self.machine, self.bits)
    }
}

/// Why this machine cannot run an ELF file.
#[derive(Debug, PartialEq, Eq)]
pub enum Flaw {
    /// It ends before its headers do.
    NoHeaders { bytes: u64 },
    /// It is shorter than its headers describe. The kernel may start it nevertheless; it crashes then.
    CutShort { bytes: u64, wanted: u64 },
    /// It is for a processor that needs an emulator here.
    Foreign { machine: u16, bits: u8 },
    /// It is not a program: its `e_type`.
    NoProgram { kind: u16 },
}

impl Flaw {
    /// Checks a file; `None` if it has no flaw, or is not an ELF file.
    pub fn of(path: &Path) -> io::Result<Option<Flaw>> {
        let Some((class, file)) = open(path)? else { return Ok(None) };
        let bytes = file.metadata()?.len();
        let data = ReadCache::new(file);
        Ok(match class == elf::ELFCLASS32.0 {
            true => flaw::<elf::FileHeader32<Endianness>, _>(&data, 32, bytes),
            false => flaw::<elf::FileHeader64<Endianness>, _>(&data, 64, bytes),
        })
    }

    /// What the user can do about it.
    pub fn remedy(&self) -> String {
        match self {
            Flaw::NoHeaders { .. } | Flaw::CutShort { .. } => "copy or build it again".to_owned(),
            Flaw::Foreign { .. } => format!("build it for {}, or run it on a machine of its kind", host()),
            Flaw::NoProgram { .. } => "give the program itself".to_owned(),
        }
    }
}

/// Continues a sentence that begins with the file's name.
impl fmt::Display for Flaw {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Flaw::NoHeaders { bytes } => {
                write!(f, "is truncated or damaged: its {bytes} bytes do not hold an ELF header")
            }
            Flaw::CutShort { bytes, wanted } => {
                write!(f, "is truncated: it has {bytes} bytes, and its headers describe {wanted}")
            }
            Flaw::Foreign { machine, bits } => {
                write!(f, "is for {}, and this machine is {}", processor(machine, bits), host())
            }
            Flaw::NoProgram { kind } if kind == elf::ET_REL.0 => {
                write!(f, "is an object file, which must be linked first")
            }
            Flaw::NoProgram { kind } if kind == elf::ET_CORE.0 => write!(f, "is a core dump"),
            Flaw::NoProgram { kind } => write!(f, "is not a program but an ELF file of type {kind}"),
        }
    }
}

fn host() -> &'static str {
    match ARCH {
        "x86_64" => "x86-64",
        "aarch64" => "AArch64",
        other => other,
    }
}

/// Whether kernels for this processor can run programs for `machine`; some are built without that.
fn runs_here(machine: elf::Machine) -> bool {
    match ARCH {
        "x86_64" => [elf::EM_X86_64, elf::EM_386].contains(&machine),
        "aarch64" => [elf::EM_AARCH64, elf::EM_ARM].contains(&machine),
        _ => true,
    }
}

fn processor(machine: u16, bits: u8) -> String {
    let name = match elf::Machine(machine) {
        elf::EM_386 => "32-bit x86",
        elf::EM_X86_64 if bits == 32 => "x86-64 with 32-bit pointers (x32)",
        elf::EM_X86_64 => "x86-64",
        elf::EM_ARM => "32-bit ARM",
        elf::EM_AARCH64 => "AArch64",
        elf::EM_PPC64 => "64-bit POWER",
        elf::EM_S390 => "IBM Z",
        elf::EM_RISCV => return format!("{bits}-bit RISC-V"),
        elf::EM_LOONGARCH => return format!("{bits}-bit LoongArch"),
        _ => return format!("a {bits}-bit processor of another kind (ELF machine {machine})"),
    };
    name.to_owned()
}

/// Whether a file begins as ELF files do; `false` if it cannot be read.
pub fn is_elf(path: &Path) -> bool {
    matches!(open(path), Ok(Some(_)))
}

/// The file and its class, if it begins as ELF files do.
fn open(path: &Path) -> io::Result<Option<(u8, File)>> {
    let mut file = File::open(path)?;
    let mut identification = Vec::new();
    file.by_ref().take(5).read_to_end(&mut identification)?;
    let class = identification.strip_prefix(&elf::ELFMAG);
    Ok(class.map(|class| (class.first().copied().unwrap_or_default(), file)))
}

/// `$ORIGIN` in a search path stands for the directory of the file that has the path.
pub fn expand_origin(entry: &str, file: &Path) -> PathBuf {
    let origin = file.canonicalize().ok().and_then(|file| Some(file.parent()?.to_str()?.to_owned()));
    let origin = origin.unwrap_or_default();
    PathBuf::from(entry.replace("${ORIGIN}", &origin).replace("$ORIGIN", &origin))
}

fn flaw<'data, Elf, R>(data: R, bits: u8, bytes: u64) -> Option<Flaw>
where
    Elf: FileHeader<Endian = Endianness>,
    R: ReadRef<'data>,
{
    let no_headers = Some(Flaw::NoHeaders { bytes });
    let Ok(header) = Elf::parse(data) else { return no_headers };
    let Ok(endian) = header.endian() else { return no_headers };
    let machine = header.e_machine(endian);
    if !runs_here(machine) {
        return Some(Flaw::Foreign { machine: machine.0, bits });
    }
    let kind = header.e_type(endian);
    if ![elf::ET_EXEC, elf::ET_DYN].contains(&kind) {
        return Some(Flaw::NoProgram { kind: kind.0 });
    }
    let Ok(segments) = header.program_headers(endian, data) else { return no_headers };
    let end = |offset: u64, len: u64| offset.saturating_add(len);
    // The table of sections is at the end, if there is one.
    let sections = u64::from(header.e_shnum(endian)) * u64::from(header.e_shentsize(endian));
    let sections = end(header.e_shoff(endian).into(), sections);
    let segments =
        segments.iter().map(|segment| end(segment.p_offset(endian).into(), segment.p_filesz(endian).into()));
    let wanted = segments.chain([sections]).max().unwrap_or_default();
    (wanted > bytes).then_some(Flaw::CutShort { bytes, wanted })
}

fn facts<'data, Elf, R>(data: R, bits: u8) -> object::read::Result<Facts>
where
    Elf: FileHeader<Endian = Endianness>,
    R: ReadRef<'data>,
{
    let header = Elf::parse(data)?;
    let endian = header.endian()?;
    let mut facts = Facts { bits, machine: header.e_machine(endian).0, ..Default::default() };
    for segment in header.program_headers(endian, data)? {
        if let Ok(Some(interpreter)) = segment.interpreter(endian, data) {
            facts.interpreter = Some(text(interpreter).into());
        }
        if let Ok(Some(mut notes)) = segment.notes(endian, data) {
            while let Ok(Some(note)) = notes.next() {
                facts.go |= note.name() == b"Go";
            }
        }
    }
    let sections = header.sections(endian, data)?;
    let table = sections.dynamic_table(endian, data)?;
    let mut runpath = false;
    for entry in table.iter() {
        facts.dynamic = true;
        match entry.tag {
            elf::DT_NEEDED => facts.needed.push(text(table.string(entry)?)),
            elf::DT_RPATH => facts.rpath.extend(text(table.string(entry)?).split(':').map(str::to_owned)),
            elf::DT_RUNPATH => runpath = true,
            _ => {}
        }
    }
    if runpath {
        facts.rpath.clear();
    }
    let symbols = sections.symbols(endian, data, elf::SHT_DYNSYM)?;
    for symbol in symbols.iter().filter(|symbol| symbol.is_undefined(endian)) {
        facts.imports.push(text(symbols.symbol_name(endian, symbol)?));
    }
    if let Some((mut definitions, link)) = sections.gnu_verdef(endian, data)? {
        let strings = sections.strings(endian, data, link)?;
        while let Some((definition, mut names)) = definitions.next()? {
            let is_file_name = definition.vd_flags.get(endian) & elf::VER_FLG_BASE != elf::VersionFlags(0);
            if let Some(name) = names.next()?.filter(|_| !is_file_name) {
                facts.versions.push(text(name.name(endian, strings)?));
            }
        }
    }
    Ok(facts)
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::Command;

    /// Compiles an empty program or library, so that the facts come from a real linker.
    fn compiled(directory: &Path, name: &str, flags: &[&str]) -> PathBuf {
        let source = directory.join("empty.c");
        std::fs::write(&source, "int main(void) { return 0; }\n").unwrap();
        let output = directory.join(name);
        let status = Command::new("cc").args(flags).arg("-o").arg(&output).arg(&source).status();
        assert!(status.expect("cc is needed, as for any build of this project").success(), "{flags:?}");
        output
    }

    fn facts_of(path: &Path) -> Facts {
        Facts::read(path).unwrap().unwrap()
    }

    #[test]
    fn a_dynamic_program_names_its_loader_and_libraries() {
        let facts = facts_of(Path::new("/proc/self/exe"));
        assert!(!facts.is_static());
        assert!(facts.needed.iter().any(|name| name == "libc.so.6"), "{facts:?}");
        assert!(facts.imports.iter().any(|name| name == "__libc_start_main"), "{facts:?}");
        assert!(facts.interpreter.unwrap().is_absolute());
        assert_eq!(u32::from(facts.bits), usize::BITS);
    }

    #[test]
    fn both_kinds_of_static_programs_are_known() {
        let directory = tempfile::tempdir().unwrap();
        for flags in [["-static"], ["-static-pie"]] {
            assert!(facts_of(&compiled(directory.path(), "program", &flags)).is_static(), "{flags:?}");
        }
    }

    #[test]
    fn rpath_counts_only_without_runpath() {
        let directory = tempfile::tempdir().unwrap();
        let old = ["-Wl,--disable-new-dtags", "-Wl,-rpath,/opt/a:$ORIGIN/b"];
        let program = compiled(directory.path(), "old", &old);
        let facts = facts_of(&program);
        assert_eq!(facts.rpath, ["/opt/a", "$ORIGIN/b"]);
        assert_eq!(expand_origin("$ORIGIN/b", &program), directory.path().canonicalize().unwrap().join("b"));
        let new = ["-Wl,--enable-new-dtags", "-Wl,-rpath,/opt/a"];
        assert!(facts_of(&compiled(directory.path(), "new", &new)).rpath.is_empty());
    }

    #[test]
    fn versions_leave_out_the_file_name() {
        let directory = tempfile::tempdir().unwrap();
        let map = directory.path().join("map");
        std::fs::write(&map, "ONE_1.0 { global: main; local: *; }; ONE_1.1 { } ONE_1.0;\n").unwrap();
        let script = format!("-Wl,--version-script={}", map.display());
        let library =
            compiled(directory.path(), "lib.so", &["-shared", "-fPIC", "-Wl,-soname,lib.so", &script]);
        assert_eq!(facts_of(&library).versions, ["ONE_1.0", "ONE_1.1"]);
    }

    #[test]
    fn other_files_are_no_elf_and_damaged_ones_an_error() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("file");
        for text in [&b""[..], b"#!/bin/sh\n", b"\x7fEL"] {
            std::fs::write(&path, text).unwrap();
            assert_eq!(Facts::read(&path).unwrap(), None);
            assert_eq!(Flaw::of(&path).unwrap(), None);
        }
        for text in [&b"\x7fELF"[..], b"\x7fELF\x02\x01\x01 cut short"] {
            std::fs::write(&path, text).unwrap();
            assert!(Facts::read(&path).is_err());
            assert_eq!(Flaw::of(&path).unwrap(), Some(Flaw::NoHeaders { bytes: text.len() as u64 }));
        }
    }

    #[test]
    fn files_that_cannot_run_here_are_told_from_each_other() {
        let directory = tempfile::tempdir().unwrap();
        let program = compiled(directory.path(), "program", &[]);
        assert_eq!(Flaw::of(&program).unwrap(), None);
        let object = compiled(directory.path(), "object", &["-c"]);
        assert_eq!(Flaw::of(&object).unwrap(), Some(Flaw::NoProgram { kind: elf::ET_REL.0 }));
        let whole = std::fs::read(&program).unwrap();
        let flaw_of = |bytes: &[u8]| {
            std::fs::write(&object, bytes).unwrap();
            Flaw::of(&object).unwrap()
        };
        // In the header, in the table of segments, right behind it, and at the very end.
        let table = 64 + 56 * usize::from(u16::from_ne_bytes([whole[56], whole[57]]));
        for bytes in [5, 63, 64, table - 1] {
            assert_eq!(flaw_of(&whole[..bytes]), Some(Flaw::NoHeaders { bytes: bytes as u64 }));
        }
        for bytes in [table, whole.len() - 1] {
            let wanted = whole.len() as u64;
            assert_eq!(flaw_of(&whole[..bytes]), Some(Flaw::CutShort { bytes: bytes as u64, wanted }));
        }
        let mut foreign = whole;
        foreign[18..20].copy_from_slice(&elf::EM_S390.0.to_ne_bytes());
        let flaw = flaw_of(&foreign).unwrap();
        assert_eq!(flaw, Flaw::Foreign { machine: elf::EM_S390.0, bits: 64 });
        assert!(flaw.to_string().contains("IBM Z"), "{flaw}");
    }
}
