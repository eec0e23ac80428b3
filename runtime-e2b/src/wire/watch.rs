//! The messages of envd's package `filesystem` that are about changes, in both codecs.

use prost::{Message, Oneof};
use serde::{Deserialize, Serialize, Serializer};

use super::filesystem::EntryInfo;
use super::process::{Empty, KeepAlive};

fn is_default<T: Default + PartialEq>(value: &T) -> bool {
    *value == T::default()
}

/// `WatchDir` and `CreateWatcher`.
#[derive(Clone, PartialEq, Eq, Message, Serialize, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct WatchDirRequest {
    /// Absolute path of a directory.
    #[prost(string, tag = "1")]
    pub path: String,
    /// With all directories below it.
    #[prost(bool, tag = "2")]
    pub recursive: bool,
    /// Whether events bring facts about what changed.
    #[prost(bool, tag = "3")]
    #[serde(alias = "include_entry")]
    pub include_entry: bool,
    /// Whether directories of other machines may be watched, where changes made elsewhere are not seen.
    #[prost(bool, tag = "4")]
    #[serde(alias = "allow_network_mounts")]
    pub allow_network_mounts: bool,
}

/// What happened to a path.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, prost::Enumeration)]
#[repr(i32)]
pub enum EventType {
    /// Not told.
    Unspecified = 0,
    /// It was made, or moved to here.
    Create = 1,
    /// Its content changed.
    Write = 2,
    /// It was removed.
    Remove = 3,
    /// It was moved away from here.
    Rename = 4,
    /// Its permissions, owner or times changed.
    Chmod = 5,
}

fn event_type_name<S: Serializer>(value: &i32, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_str(match EventType::try_from(*value) {
        Ok(EventType::Create) => "EVENT_TYPE_CREATE",
        Ok(EventType::Write) => "EVENT_TYPE_WRITE",
        Ok(EventType::Remove) => "EVENT_TYPE_REMOVE",
        Ok(EventType::Rename) => "EVENT_TYPE_RENAME",
        Ok(EventType::Chmod) => "EVENT_TYPE_CHMOD",
        Ok(EventType::Unspecified) | Err(_) => "EVENT_TYPE_UNSPECIFIED",
    })
}

/// A change below a watched directory.
#[derive(Clone, PartialEq, Message, Serialize)]
pub struct FilesystemEvent {
    /// Path relative to the directory.
    #[prost(string, tag = "1")]
    #[serde(skip_serializing_if = "is_default")]
    pub name: String,
    /// What happened.
    #[prost(enumeration = "EventType", tag = "2")]
    #[serde(skip_serializing_if = "is_default", serialize_with = "event_type_name")]
    pub r#type: i32,
    /// Facts, if they were asked for and it is still there.
    #[prost(message, optional, tag = "3")]
    #[serde(skip_serializing_if = "is_default")]
    pub entry: Option<EntryInfo>,
}

/// One message of the stream of `WatchDir`.
#[derive(Clone, PartialEq, Message, Serialize)]
pub struct WatchDirResponse {
    /// The event.
    #[prost(oneof = "WatchEvent", tags = "1, 2, 3")]
    #[serde(flatten)]
    pub event: Option<WatchEvent>,
}

/// See [`WatchDirResponse`].
#[allow(clippy::large_enum_variant, reason = "nearly all of them are changes")]
#[derive(Clone, PartialEq, Oneof, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum WatchEvent {
    /// Changes are seen from here on.
    #[prost(message, tag = "1")]
    Start(Empty),
    /// A change.
    #[prost(message, tag = "2")]
    Filesystem(FilesystemEvent),
    /// Nothing, for a while.
    #[prost(message, tag = "3")]
    Keepalive(KeepAlive),
}

/// What `CreateWatcher` answers, and what `GetWatcherEvents` and `RemoveWatcher` ask about.
#[derive(Clone, PartialEq, Eq, Message, Serialize, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct Watcher {
    /// Its name.
    #[prost(string, tag = "1")]
    #[serde(alias = "watcher_id")]
    pub watcher_id: String,
}

/// What `GetWatcherEvents` answers: the changes since it was last asked.
#[derive(Clone, PartialEq, Message, Serialize)]
pub struct WatcherEvents {
    /// The changes, oldest first.
    #[prost(message, repeated, tag = "1")]
    #[serde(skip_serializing_if = "is_default")]
    pub events: Vec<FilesystemEvent>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn changes_are_written_in_protobufs_json_and_binary() {
        let event = FilesystemEvent {
            name: "a/b".into(),
            r#type: EventType::Rename as i32,
            entry: None,
        };
        let message = WatchDirResponse {
            event: Some(WatchEvent::Filesystem(event)),
        };
        assert_eq!(
            serde_json::to_string(&message).expect("serialises"),
            r#"{"filesystem":{"name":"a/b","type":"EVENT_TYPE_RENAME"}}"#
        );
        assert_eq!(message.encode_to_vec(), b"\x12\x07\x0a\x03a/b\x10\x04");
        let request: WatchDirRequest =
            serde_json::from_str(r#"{"path":"/w","recursive":true,"includeEntry":true}"#).expect("parses");
        assert_eq!(request.encode_to_vec(), b"\x0a\x02/w\x10\x01\x18\x01");
        let id: Watcher = serde_json::from_str(r#"{"watcherId":"w1"}"#).expect("parses");
        assert_eq!(id.watcher_id, "w1");
    }
}
