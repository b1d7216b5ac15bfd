//! What an ELF file says about how it will be loaded.

use std::fs::File;
use std::io::{self, Read};
use std::path::{Path, PathBuf};

use object::elf;
use object::read::elf::{FileHeader, ProgramHeader};
use object::{Endianness, ReadCache, ReadRef};

/// The facts that decide whether a program can load the library.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Facts {
    /// 32 or 64.
    pub bits: u8,
    /// `e_machine`.
    pub machine: u16,
    /// The loader the program asks for; none in libraries and in statically linked programs.
    pub interpreter: Option<PathBuf>,
    /// The file has a table for the loader.
    pub dynamic: bool,
    /// The libraries it names.
    pub needed: Vec<String>,
    /// `DT_RPATH`, where the loader heeds it: it does not beside a `DT_RUNPATH`. Searched before `LD_LIBRARY_PATH`.
    pub rpath: Vec<String>,
    /// Names of the symbol versions it defines.
    pub versions: Vec<String>,
}

impl Facts {
    /// Reads a file; `Ok(None)` where it is no ELF file at all.
    pub fn read(path: &Path) -> io::Result<Option<Facts>> {
        let mut file = File::open(path)?;
        let mut identification = Vec::new();
        file.by_ref().take(5).read_to_end(&mut identification)?;
        let Some([class]) = identification.strip_prefix(&elf::ELFMAG) else { return Ok(None) };
        // Programs can be large, and only a few pages of one matter here.
        let data = ReadCache::new(file);
        let parsed = match *class == elf::ELFCLASS32.0 {
            true => facts::<elf::FileHeader32<Endianness>, _>(&data, 32),
            false => facts::<elf::FileHeader64<Endianness>, _>(&data, 64),
        };
        parsed.map(Some).map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error))
    }

    /// Nothing will be loaded for it at run time.
    pub fn is_static(&self) -> bool {
        self.interpreter.is_none() && self.needed.is_empty()
    }

    /// Whether a library of `other`'s class and machine can be loaded beside it.
    pub fn same_kind(&self, other: &Facts) -> bool {
        (self.bits, self.machine) == (other.bits, other.machine)
    }
}

/// `$ORIGIN` in a search path stands for the directory of the file that has the path.
pub fn expand_origin(entry: &str, file: &Path) -> PathBuf {
    let origin = file.canonicalize().ok().and_then(|file| Some(file.parent()?.to_str()?.to_owned()));
    let origin = origin.unwrap_or_default();
    PathBuf::from(entry.replace("${ORIGIN}", &origin).replace("$ORIGIN", &origin))
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
        }
        std::fs::write(&path, b"\x7fELF\x02\x01\x01 cut short").unwrap();
        assert!(Facts::read(&path).is_err());
    }
}
