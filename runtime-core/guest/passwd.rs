//! The home directory of a user, as `docker exec` would set `HOME`.

use std::fs::File;
use std::io::Read;

/// The home directory that `/etc/passwd` gives for `uid`; `/` if it gives none.
pub(crate) fn home(uid: u32) -> Vec<u8> {
    let mut text = Vec::new();
    if let Ok(file) = File::open("/etc/passwd") {
        // Bounded; what was read before an error still counts.
        let _ = file.take(1 << 20).read_to_end(&mut text);
    }
    find(&text, uid).unwrap_or(b"/").to_vec()
}

fn find(text: &[u8], uid: u32) -> Option<&[u8]> {
    text.split(|byte| *byte == b'\n').find_map(|line| {
        let mut fields = line.split(|byte| *byte == b':');
        let number = fields.nth(2)?;
        let home = fields.nth(2)?;
        let matches = std::str::from_utf8(number).ok()?.parse() == Ok(uid);
        (matches && home.starts_with(b"/") && !home.contains(&0)).then_some(home)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_home_is_found_by_number_and_odd_lines_are_skipped() {
        let text = b"root:x:0:0:root:/root:/bin/sh\nshort:x\n:::\napp:x:1000:1000::/srv/app:\nrel:x:7:7::home:\n";
        assert_eq!(find(text, 0), Some(&b"/root"[..]));
        assert_eq!(find(text, 1000), Some(&b"/srv/app"[..]));
        assert_eq!(find(text, 7), None);
        assert_eq!(find(text, 5), None);
    }
}
