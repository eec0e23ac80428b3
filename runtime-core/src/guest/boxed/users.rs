//! Who an image's user is, by number: `user[:group]` against the box's `/etc/passwd` and `/etc/group`.

use crate::error::{Error, Result};
use crate::guest::User;

/// Whether the files of the box are needed to know who this is.
pub fn is_root(user: &str) -> bool {
    matches!(user, "" | "0" | "0:0" | "root:0")
}

/// Resolves `user[:group]` as engines do: names by the files, numbers also without an entry; without a group, the
/// primary group and the supplementary ones.
///
/// # Errors
/// [`InvalidConfig`](crate::ErrorKind::InvalidConfig) naming `user` for a name that the box does not have.
pub fn resolve(user: &str, passwd: &str, group: &str) -> Result<User> {
    let (name, wanted_group) = match user.split_once(':') {
        Some((name, group)) => (name, Some(group).filter(|group| !group.is_empty())),
        None => (user, None),
    };
    let missing =
        |what: &str, name: &str| Error::invalid_config("user", format!("the image has no {what} named `{name}`"));
    let name = if name.is_empty() { "0" } else { name };
    let entry = passwd.lines().find_map(|line| {
        let mut fields = line.split(':');
        let login = fields.next()?;
        let uid: u32 = fields.nth(1)?.parse().ok()?;
        let gid: u32 = fields.next()?.parse().ok()?;
        (login == name || name.parse() == Ok(uid)).then_some((login, uid, gid))
    });
    let (login, uid, primary) = match (entry, name.parse::<u32>()) {
        (Some(entry), _) => entry,
        (None, Ok(uid)) => ("", uid, 0),
        (None, Err(_)) => return Err(missing("user", name)),
    };
    let groups = || {
        group.lines().filter_map(|line| {
            let mut fields = line.split(':');
            let name = fields.next()?;
            let gid: u32 = fields.nth(1)?.parse().ok()?;
            Some((name, gid, fields.next().unwrap_or("")))
        })
    };
    match wanted_group {
        Some(wanted) => {
            let known = groups().find(|(name, gid, _)| *name == wanted || wanted.parse() == Ok(*gid));
            let gid = match (known, wanted.parse()) {
                (Some((_, gid, _)), _) => gid,
                (None, Ok(gid)) => gid,
                (None, Err(_)) => return Err(missing("group", wanted)),
            };
            Ok(User {
                uid,
                gid,
                groups: Vec::new(),
            })
        }
        None => Ok(User {
            uid,
            gid: primary,
            groups: groups()
                .filter(|(_, _, members)| !login.is_empty() && members.split(',').any(|member| member == login))
                .map(|(_, gid, _)| gid)
                .collect(),
        }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PASSWD: &str = "root:x:0:0:root:/root:/bin/sh\nbroken\napp:x:1000:1001::/home/app:\n";
    const GROUP: &str = "root:x:0:\napp:x:1001:\nvideo:x:44:other,app\nodd:x:9:app2\n";

    fn ids(uid: u32, gid: u32, groups: &[u32]) -> User {
        User {
            uid,
            gid,
            groups: groups.to_vec(),
        }
    }

    #[test]
    fn names_and_numbers_are_resolved_as_engines_do() {
        for (user, expected) in [
            ("", ids(0, 0, &[])),
            ("root", ids(0, 0, &[])),
            ("app", ids(1000, 1001, &[44])),
            ("1000", ids(1000, 1001, &[44])),
            ("app:video", ids(1000, 44, &[])),
            ("app:7", ids(1000, 7, &[])),
            ("4242", ids(4242, 0, &[])),
            ("4242:4243", ids(4242, 4243, &[])),
            ("app:", ids(1000, 1001, &[44])),
        ] {
            assert_eq!(resolve(user, PASSWD, GROUP).expect(user), expected, "{user}");
        }
    }

    #[test]
    fn a_name_that_is_not_there_names_the_field() {
        for user in ["nobody", "app:none"] {
            let error = resolve(user, PASSWD, GROUP).expect_err(user);
            assert_eq!(error.field(), Some("user"));
        }
        assert_eq!(resolve("1000", "", "").expect("a number"), ids(1000, 0, &[]));
    }
}
