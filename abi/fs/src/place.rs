//! Which paths lead to the device's files, and where these are instead. Pure: bytes in, bytes out, nothing is
//! allocated, as programs may call us from a signal handler or from inside an allocator.

/// Directories below which a program sees the tree that `uwarp run` made, as they are named below its root.
const PLACES: [&[u8]; 3] = [b"/sys/class/infiniband", b"/sys/class/infiniband_verbs", b"/dev/infiniband"];
/// In every path that enters a place from outside, and in few others.
const MARK: &[u8] = b"infiniband";
/// Numbers that Linux gives the character devices below /dev/infiniband: uverbs0 and those after it, rdma_cm.
const UVERBS: (u32, u32) = (231, 192);
const RDMA_CM: (u32, u32) = (10, 58);
/// No number of a device has more digits.
const DIGITS: usize = 3;

/// The longest path that is looked at. Those of the device are shorter.
const LONGEST: usize = 1024;

/// A path with its terminating zero, in a buffer of its own.
pub struct Text {
    bytes: [u8; LONGEST],
    length: usize,
}

impl Text {
    fn new() -> Self {
        Self { bytes: [0; LONGEST], length: 0 }
    }

    /// `None` if it is too long.
    pub fn of(bytes: &[u8]) -> Option<Self> {
        let mut text = Self::new();
        text.push(bytes)?;
        Some(text)
    }

    fn push(&mut self, bytes: &[u8]) -> Option<()> {
        let end = self.length + bytes.len();
        // The zero at the end.
        if end >= LONGEST {
            return None;
        }
        self.bytes.get_mut(self.length..end)?.copy_from_slice(bytes);
        self.length = end;
        Some(())
    }

    fn truncate(&mut self, length: usize) {
        if let Some(rest) = self.bytes.get_mut(length..self.length) {
            rest.fill(0);
            self.length = length;
        }
    }

    /// Without the zero.
    pub fn bytes(&self) -> &[u8] {
        self.bytes.get(..self.length).unwrap_or(&[])
    }

    /// Ends with a zero.
    pub fn as_ptr(&self) -> *const libc::c_char {
        self.bytes.as_ptr().cast()
    }
}

/// Whether a path may lead to the device's files, by what it is made of. Most paths are sorted out here.
pub fn may_enter(path: &[u8]) -> bool {
    match path {
        // Relative to a root that is not ours, mostly.
        [b'/', b's' | b'd' | b'.' | b'/', ..] => contains(path, MARK),
        [b'/', ..] => false,
        _ => contains(path, MARK) || device(path).is_some(),
    }
}

/// Whether a path may lead to the parent of a place, or to one.
pub fn may_list(path: &[u8]) -> bool {
    let end = path.iter().rposition(|byte| *byte != b'/').map_or(0, |last| last + 1);
    let path = path.get(..end).unwrap_or(&[]);
    path.is_empty() || [b"class".as_slice(), b"dev", MARK, b"."].iter().any(|end| path.ends_with(end))
}

fn contains(text: &[u8], part: &[u8]) -> bool {
    text.windows(part.len()).any(|window| window == part)
}

/// The numbers of the character device that a path ends with.
fn device(path: &[u8]) -> Option<(u32, u32)> {
    let name = path.rsplit(|byte| *byte == b'/').next()?;
    if name == b"rdma_cm" {
        return Some(RDMA_CM);
    }
    let number = match name.strip_prefix(b"uverbs")? {
        b"0" => 0,
        [b'0', ..] | [] => return None,
        digits if digits.len() > DIGITS || !digits.iter().all(u8::is_ascii_digit) => return None,
        digits => digits.iter().fold(0, |number, digit| number * 10 + u32::from(digit - b'0')),
    };
    Some((UVERBS.0, UVERBS.1 + number))
}

/// What a path leads to.
pub struct Found {
    /// The path in the tree.
    pub to: Text,
    /// Length of the tree's root in it; behind that it is the path as the program means it.
    root: usize,
}

impl Found {
    /// The path as the program means it, without detours.
    pub fn meant(&self) -> &[u8] {
        self.to.bytes().get(self.root..).unwrap_or(&[])
    }

    /// Major and minor number, if it is a character device.
    pub fn device(&self) -> Option<(u32, u32)> {
        self.meant().starts_with(b"/dev/").then(|| device(self.meant())).flatten()
    }

    /// Whether it is a counter, or a directory of them.
    pub fn is_counter(&self) -> bool {
        contains(self.meant(), b"counters")
    }
}

/// Where `path` leads, seen from the directory `base` (absolute), if it leads into a place, or through one
/// and out again (Mooncake asks for `/sys/class/infiniband/DEVICE/../..`): there, the system finds nothing to
/// go through. `..` is resolved by the text, as no directory on the way is a symbolic link.
pub fn find(root: &[u8], base: &[u8], path: &[u8]) -> Option<Found> {
    let mut to = Text::of(root)?;
    if !path.starts_with(b"/") {
        append(&mut to, root.len(), without_root(root, base))?;
    }
    let passed = append(&mut to, root.len(), path)?;
    let meant = to.bytes().get(root.len()..)?;
    let (mut to, root) = if is_inside(meant) {
        (to, root.len())
    } else if passed {
        (Text::of(if meant.is_empty() { b"/" } else { meant })?, 0)
    } else {
        return None;
    };
    // It asks for a directory.
    if path.ends_with(b"/") || path.ends_with(b"/.") {
        to.push(b"/")?;
    }
    Some(Found { to, root })
}

fn is_inside(meant: &[u8]) -> bool {
    PLACES.iter().any(|place| {
        meant.strip_prefix(*place).is_some_and(|rest| rest.first().is_none_or(|byte| *byte == b'/'))
    })
}

/// Whether it was in a place on the way.
fn append(to: &mut Text, root: usize, path: &[u8]) -> Option<bool> {
    let mut passed = false;
    for part in path.split(|byte| *byte == b'/') {
        match part {
            b"" | b"." => {}
            b".." => {
                let above = to.bytes().get(root..)?.iter().rposition(|byte| *byte == b'/');
                to.truncate(root + above.unwrap_or(0));
            }
            _ => {
                to.push(b"/")?;
                to.push(part)?;
            }
        }
        passed |= is_inside(to.bytes().get(root..)?);
    }
    Some(passed)
}

/// A path in the tree as the program means it; any other path as it is.
pub fn without_root<'a>(root: &[u8], path: &'a [u8]) -> &'a [u8] {
    match path.strip_prefix(root) {
        Some(rest) if rest.first().is_some_and(|byte| *byte == b'/') => rest,
        _ => path,
    }
}

/// What listing a directory must show beside what is there.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Listing {
    /// These names, unless they are there.
    More(&'static [&'static [u8]]),
    /// Character devices in place of the symbolic links of the tree.
    Devices,
}

/// For the directory of this name: absolute, as the kernel has it.
pub fn listing(root: &[u8], directory: &[u8]) -> Option<Listing> {
    match directory {
        b"/sys/class" => Some(Listing::More(&[b"infiniband", b"infiniband_verbs"])),
        b"/dev" => Some(Listing::More(&[b"infiniband"])),
        _ if directory.strip_prefix(root) == Some(b"/dev/infiniband") => Some(Listing::Devices),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ROOT: &[u8] = b"/tmp/t";

    fn found(base: &str, path: &str) -> Option<String> {
        let found = find(ROOT, base.as_bytes(), path.as_bytes())?;
        Some(String::from_utf8_lossy(found.to.bytes()).into_owned())
    }

    #[test]
    fn paths_into_a_place_lead_to_the_tree_and_no_others() {
        for (base, path, to) in [
            ("/", "/sys/class/infiniband", "/tmp/t/sys/class/infiniband"),
            ("/", "/sys/class/infiniband/", "/tmp/t/sys/class/infiniband/"),
            ("/", "//sys/./class//infiniband/uwarp0/fw_ver", "/tmp/t/sys/class/infiniband/uwarp0/fw_ver"),
            ("/", "/sys/class/net/../infiniband/.", "/tmp/t/sys/class/infiniband/"),
            ("/sys/class", "infiniband_verbs/abi_version", "/tmp/t/sys/class/infiniband_verbs/abi_version"),
            ("/sys", "class/infiniband", "/tmp/t/sys/class/infiniband"),
            ("/tmp/t/dev/infiniband", "uverbs0", "/tmp/t/dev/infiniband/uverbs0"),
            ("/tmp/t/sys/class/infiniband", "../infiniband_verbs", "/tmp/t/sys/class/infiniband_verbs"),
            ("/", "/dev/infiniband/rdma_cm", "/tmp/t/dev/infiniband/rdma_cm"),
            ("/", "/../dev/infiniband/", "/tmp/t/dev/infiniband/"),
            // Through a place, and out again.
            ("/", "/sys/class/infiniband/uwarp0/../..", "/sys/class"),
            ("/", "/sys/class/infiniband/../net/lo", "/sys/class/net/lo"),
            ("/sys/class", "infiniband/uwarp0/../../", "/sys/class/"),
            ("/", "/dev/infiniband/../..", "/"),
        ] {
            assert!(may_enter(path.as_bytes()), "{path}");
            assert_eq!(found(base, path).as_deref(), Some(to), "{base} {path}");
        }
        for (base, path) in [
            ("/", "/sys/class/infiniband_mad"),
            ("/home/infiniband", "uwarp0"),
            ("/home", "infiniband/uwarp0"),
            ("/tmp", "uverbs0"),
        ] {
            assert_eq!(found(base, path), None, "{base} {path}");
        }
        assert_eq!(found("/", &format!("/sys/class/infiniband/{}", "a".repeat(LONGEST))), None);
        for path in ["/etc/passwd", "/dev/null", "/home/infiniband", "", "/", "x", "/sys/class/net/lo/mtu"] {
            assert!(!may_enter(path.as_bytes()), "{path}");
        }
    }

    #[test]
    fn devices_and_counters_are_known_by_their_names() {
        let found = |path: &str| find(ROOT, b"/", path.as_bytes()).unwrap();
        assert_eq!(found("/dev/infiniband/uverbs0").device(), Some((231, 192)));
        assert_eq!(found("/dev/infiniband/uverbs1").device(), Some((231, 193)));
        assert_eq!(found("/dev/infiniband/uverbs12").device(), Some((231, 204)));
        assert_eq!(found("/dev/infiniband/rdma_cm").device(), Some((10, 58)));
        for path in ["", "/uverbs", "/uverbs01", "/uverbs1x", "/uverbs1000", "/verbs0"] {
            assert_eq!(found(&format!("/dev/infiniband{path}")).device(), None, "{path}");
        }
        assert_eq!(found("/sys/class/infiniband_verbs/uverbs0").device(), None);
        assert!(found("/sys/class/infiniband/uwarp0/ports/1/hw_counters").is_counter());
        assert!(!found("/sys/class/infiniband/uwarp0/ports/1/rate").is_counter());
    }

    #[test]
    fn the_root_of_the_tree_is_taken_off_whole_names_only() {
        for (path, meant) in
            [("/tmp/t/sys", "/sys"), ("/tmp/t", "/tmp/t"), ("/tmp/tx/sys", "/tmp/tx/sys"), ("", "")]
        {
            assert_eq!(without_root(ROOT, path.as_bytes()), meant.as_bytes());
        }
    }

    #[test]
    fn directories_that_show_more_are_known_by_their_ends() {
        for path in ["/sys/class", "/sys/class/", "class", "/dev", "dev//", ".", "..", "/dev/infiniband", "/"]
        {
            assert!(may_list(path.as_bytes()), "{path}");
        }
        assert!(!may_list(b"/usr/lib"));
        assert_eq!(listing(ROOT, b"/dev"), Some(Listing::More(&[b"infiniband"])));
        assert_eq!(listing(ROOT, b"/tmp/t/dev/infiniband"), Some(Listing::Devices));
        assert_eq!(listing(ROOT, b"/dev/infiniband"), None);
    }
}
