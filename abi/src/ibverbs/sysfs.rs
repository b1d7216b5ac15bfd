//! Reads sysfs for other libraries. Our device has no entry there; programs read other entries.

use std::ffi::{CStr, OsStr, c_char, c_int};
use std::io::Read;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use uwarp_driver::config;

use crate::convention::MinusOne;
use crate::entry;
use crate::failure::{Failure, required};

entry! {
    /// Where sysfs is mounted.
    fn ibv_get_sysfs_path() -> *const c_char {
        Ok(config::sysfs_path().as_ptr())
    }

    /// Reads `dir/file` into `buf`, without a newline at the end, and with a terminating zero where there is
    /// room. Returns the length or -1.
    fn ibv_read_sysfs_file(
        dir: *const c_char,
        file: *const c_char,
        buf: *mut c_char,
        size: usize,
    ) -> MinusOne<c_int> {
        required(dir.cast_mut(), "dir")?;
        required(file.cast_mut(), "file")?;
        required(buf, "buf")?;
        let part = |text: *const c_char| Path::new(OsStr::from_bytes(CStr::from_ptr(text).to_bytes()));
        let path = part(dir).join(part(file));
        let mut text = Vec::new();
        std::fs::File::open(path)?.take(size as u64).read_to_end(&mut text)?;
        if text.last() == Some(&b'\n') {
            text.pop();
        }
        std::ptr::copy_nonoverlapping(text.as_ptr(), buf.cast::<u8>(), text.len());
        if text.len() < size {
            *buf.add(text.len()) = 0;
        }
        c_int::try_from(text.len()).map_err(|_| Failure::invalid("longer than an int can hold"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_one_line() {
        let mut buf = [1 as c_char; 8];
        let dir = std::env::temp_dir().join(format!("uwarp-sysfs-{}", std::process::id()));
        std::fs::create_dir_all(&dir).unwrap();
        std::fs::write(dir.join("f"), "abc\n").unwrap();
        let c_dir = std::ffi::CString::new(dir.as_os_str().as_bytes()).unwrap();
        // SAFETY: C strings and a buffer of the length given.
        unsafe {
            assert_eq!(ibv_read_sysfs_file(c_dir.as_ptr(), c"f".as_ptr(), buf.as_mut_ptr(), 8), 3);
            assert_eq!(CStr::from_ptr(buf.as_ptr()), c"abc");
            assert_eq!(ibv_read_sysfs_file(c_dir.as_ptr(), c"f".as_ptr(), buf.as_mut_ptr(), 2), 2);
            assert_eq!(ibv_read_sysfs_file(c_dir.as_ptr(), c"none".as_ptr(), buf.as_mut_ptr(), 8), -1);
        }
        std::fs::remove_dir_all(&dir).unwrap();
    }
}
