//! The messages of envd's package `filesystem`, in both codecs, and the requests that carry them.

use std::collections::BTreeMap;

use prost::Message;
use serde::{Deserialize, Serialize, Serializer};

use super::Request;
use super::json::{int64, rfc3339};
use super::rpc::{self, Auth, UNARY_TIMEOUT};

fn is_default<T: Default + PartialEq>(value: &T) -> bool {
    *value == T::default()
}

/// `Stat`, `MakeDir` and `Remove`.
#[derive(Clone, PartialEq, Eq, Message, Serialize, Deserialize)]
#[serde(default)]
pub struct PathRequest {
    /// Absolute path.
    #[prost(string, tag = "1")]
    pub path: String,
}

/// `Move`.
#[derive(Clone, PartialEq, Eq, Message, Serialize, Deserialize)]
#[serde(default)]
pub struct MoveRequest {
    /// From here.
    #[prost(string, tag = "1")]
    pub source: String,
    /// To here.
    #[prost(string, tag = "2")]
    pub destination: String,
}

/// `ListDir`.
#[derive(Clone, PartialEq, Eq, Message, Serialize, Deserialize)]
#[serde(default)]
pub struct ListDirRequest {
    /// Absolute path of a directory.
    #[prost(string, tag = "1")]
    pub path: String,
    /// Levels; 0 is 1.
    #[prost(uint32, tag = "2")]
    pub depth: u32,
}

/// What a path is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, prost::Enumeration)]
#[repr(i32)]
pub enum FileType {
    /// Something else, such as a FIFO.
    Unspecified = 0,
    /// A regular file.
    File = 1,
    /// A directory.
    Directory = 2,
    /// A symbolic link.
    Symlink = 3,
}

fn file_type_name<S: Serializer>(value: &i32, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_str(match FileType::try_from(*value) {
        Ok(FileType::File) => "FILE_TYPE_FILE",
        Ok(FileType::Directory) => "FILE_TYPE_DIRECTORY",
        Ok(FileType::Symlink) => "FILE_TYPE_SYMLINK",
        Ok(FileType::Unspecified) | Err(_) => "FILE_TYPE_UNSPECIFIED",
    })
}

/// A moment.
#[derive(Clone, Copy, PartialEq, Eq, Message)]
pub struct Timestamp {
    /// Seconds since the epoch.
    #[prost(int64, tag = "1")]
    pub seconds: i64,
    /// And nanoseconds.
    #[prost(int32, tag = "2")]
    pub nanos: i32,
}

impl Serialize for Timestamp {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(&rfc3339(self.seconds, self.nanos))
    }
}

/// Facts about a path.
#[derive(Clone, PartialEq, Message, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct EntryInfo {
    /// Its last part.
    #[prost(string, tag = "1")]
    #[serde(skip_serializing_if = "is_default")]
    pub name: String,
    /// What it is; of a symbolic link, what the link leads to.
    #[prost(enumeration = "FileType", tag = "2")]
    #[serde(skip_serializing_if = "is_default", serialize_with = "file_type_name")]
    pub r#type: i32,
    /// The whole path.
    #[prost(string, tag = "3")]
    #[serde(skip_serializing_if = "is_default")]
    pub path: String,
    /// Bytes.
    #[prost(int64, tag = "4")]
    #[serde(skip_serializing_if = "is_default", with = "int64")]
    pub size: i64,
    /// Permission bits.
    #[prost(uint32, tag = "5")]
    #[serde(skip_serializing_if = "is_default")]
    pub mode: u32,
    /// Permission bits as `ls` shows them.
    #[prost(string, tag = "6")]
    #[serde(skip_serializing_if = "is_default")]
    pub permissions: String,
    /// Owner.
    #[prost(string, tag = "7")]
    #[serde(skip_serializing_if = "is_default")]
    pub owner: String,
    /// Group.
    #[prost(string, tag = "8")]
    #[serde(skip_serializing_if = "is_default")]
    pub group: String,
    /// Last change.
    #[prost(message, optional, tag = "9")]
    #[serde(skip_serializing_if = "is_default")]
    pub modified_time: Option<Timestamp>,
    /// Where a symbolic link leads.
    #[prost(string, optional, tag = "10")]
    #[serde(skip_serializing_if = "is_default")]
    pub symlink_target: Option<String>,
    /// Labels.
    #[prost(btree_map = "string, string", tag = "11")]
    #[serde(skip_serializing_if = "is_default")]
    pub metadata: BTreeMap<String, String>,
}

/// What `Stat`, `MakeDir` and `Move` answer.
#[derive(Clone, PartialEq, Message, Serialize)]
pub struct EntryResponse {
    /// The facts.
    #[prost(message, optional, tag = "1")]
    #[serde(skip_serializing_if = "is_default")]
    pub entry: Option<EntryInfo>,
}

/// What `ListDir` answers.
#[derive(Clone, PartialEq, Message, Serialize)]
pub struct ListDirResponse {
    /// The entries.
    #[prost(message, repeated, tag = "1")]
    #[serde(skip_serializing_if = "is_default")]
    pub entries: Vec<EntryInfo>,
}

/// `Stat`.
pub fn stat(path: &str, user: &str) -> Request {
    call("Stat", &PathRequest { path: path.to_owned() }, user)
}

/// `MakeDir`, with parents; `already_exists` for a directory that does.
pub fn make_dir(path: &str, user: &str) -> Request {
    call("MakeDir", &PathRequest { path: path.to_owned() }, user)
}

/// `Remove`, with all that is in it; silent when it is missing.
pub fn remove(path: &str, user: &str) -> Request {
    call("Remove", &PathRequest { path: path.to_owned() }, user)
}

/// `Move`.
pub fn rename(source: &str, destination: &str, user: &str) -> Request {
    let message = MoveRequest {
        source: source.to_owned(),
        destination: destination.to_owned(),
    };
    call("Move", &message, user)
}

/// `ListDir`, one level.
pub fn list_dir(path: &str, user: &str) -> Request {
    let message = ListDirRequest {
        path: path.to_owned(),
        depth: 1,
    };
    call("ListDir", &message, user)
}

fn call(method: &str, message: &impl Message, user: &str) -> Request {
    rpc::unary(
        &format!("filesystem.Filesystem/{method}"),
        message,
        Auth::User(user),
        Some(UNARY_TIMEOUT),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_entry_is_written_in_protobufs_json() {
        let entry = EntryInfo {
            name: "a".into(),
            r#type: FileType::File as i32,
            path: "/w/a".into(),
            size: 5,
            mode: 0o644,
            permissions: "-rw-r--r--".into(),
            owner: "root".into(),
            group: "root".into(),
            modified_time: Some(Timestamp { seconds: 0, nanos: 0 }),
            ..EntryInfo::default()
        };
        assert_eq!(
            serde_json::to_value(EntryResponse { entry: Some(entry) }).expect("serialises"),
            serde_json::json!({"entry": {
                "name": "a", "type": "FILE_TYPE_FILE", "path": "/w/a", "size": "5", "mode": 420,
                "permissions": "-rw-r--r--", "owner": "root", "group": "root", "modifiedTime": "1970-01-01T00:00:00Z"
            }})
        );
    }

    #[test]
    fn file_calls_name_their_user_and_deadline() {
        let request = make_dir("/app", "root");
        assert_eq!(request.path, "/filesystem.Filesystem/MakeDir");
        assert_eq!(&request.body[..], b"\x0a\x04/app");
        let names: Vec<_> = request
            .headers
            .iter()
            .map(|(name, value)| (name.as_str(), value.as_str()))
            .collect();
        assert!(
            names.contains(&("authorization", "Basic cm9vdDo=")) && names.contains(&("connect-timeout-ms", "60000"))
        );
    }
}
