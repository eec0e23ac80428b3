//! The messages of envd's package `process`, in both codecs, and the requests that carry them.

use std::collections::BTreeMap;
use std::fmt;

use bytes::Bytes;
use prost::{Message, Oneof};
use serde::{Deserialize, Serialize};

use super::Request;
use super::envelope;
use super::json::base64_bytes;
use super::rpc::{self, Auth};

fn is_default<T: Default + PartialEq>(value: &T) -> bool {
    *value == T::default()
}

/// A program. Its `Debug` shows the names of variables only.
#[derive(Clone, PartialEq, Message, Serialize, Deserialize)]
#[prost(skip_debug)]
#[serde(default)]
pub struct ProcessConfig {
    /// The program, looked up in the child's `PATH`.
    #[prost(string, tag = "1")]
    #[serde(skip_serializing_if = "is_default")]
    pub cmd: String,
    /// Its arguments.
    #[prost(string, repeated, tag = "2")]
    #[serde(skip_serializing_if = "is_default")]
    pub args: Vec<String>,
    /// Variables, laid over the sandbox's.
    #[prost(btree_map = "string, string", tag = "3")]
    #[serde(skip_serializing_if = "is_default")]
    pub envs: BTreeMap<String, String>,
    /// Working directory; it must exist.
    #[prost(string, optional, tag = "4")]
    #[serde(skip_serializing_if = "is_default")]
    pub cwd: Option<String>,
}

impl fmt::Debug for ProcessConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ProcessConfig")
            .field("cmd", &self.cmd)
            .field("args", &self.args)
            .field("envs", &self.envs.keys())
            .field("cwd", &self.cwd)
            .finish()
    }
}

/// Size of a terminal.
#[derive(Clone, Copy, PartialEq, Message, Serialize, Deserialize)]
#[serde(default)]
pub struct PtySize {
    /// Columns.
    #[prost(uint32, tag = "1")]
    #[serde(skip_serializing_if = "is_default")]
    pub cols: u32,
    /// Rows.
    #[prost(uint32, tag = "2")]
    #[serde(skip_serializing_if = "is_default")]
    pub rows: u32,
}

/// A terminal.
#[derive(Clone, Copy, PartialEq, Message, Serialize, Deserialize)]
#[serde(default)]
pub struct Pty {
    /// Its size.
    #[prost(message, optional, tag = "1")]
    #[serde(skip_serializing_if = "is_default")]
    pub size: Option<PtySize>,
}

/// `Start`.
#[derive(Clone, PartialEq, Message, Serialize, Deserialize)]
#[serde(default)]
pub struct StartRequest {
    /// What to start.
    #[prost(message, optional, tag = "1")]
    #[serde(skip_serializing_if = "is_default")]
    pub process: Option<ProcessConfig>,
    /// In a terminal.
    #[prost(message, optional, tag = "2")]
    #[serde(skip_serializing_if = "is_default")]
    pub pty: Option<Pty>,
    /// A free label.
    #[prost(string, optional, tag = "3")]
    #[serde(skip_serializing_if = "is_default")]
    pub tag: Option<String>,
    /// Whether standard input is a pipe. Unset means it is: always say it.
    #[prost(bool, optional, tag = "4")]
    #[serde(skip_serializing_if = "is_default")]
    pub stdin: Option<bool>,
}

/// The process runs.
#[derive(Clone, Copy, PartialEq, Message, Serialize, Deserialize)]
#[serde(default)]
pub struct StartEvent {
    /// Its id.
    #[prost(uint32, tag = "1")]
    #[serde(skip_serializing_if = "is_default")]
    pub pid: u32,
}

/// Which stream a piece of output came from.
#[derive(Clone, PartialEq, Oneof, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Output {
    /// Standard output.
    #[prost(bytes = "bytes", tag = "1")]
    Stdout(#[serde(with = "base64_bytes")] Bytes),
    /// Standard error.
    #[prost(bytes = "bytes", tag = "2")]
    Stderr(#[serde(with = "base64_bytes")] Bytes),
    /// A terminal.
    #[prost(bytes = "bytes", tag = "3")]
    Pty(#[serde(with = "base64_bytes")] Bytes),
}

/// A piece of output.
#[derive(Clone, PartialEq, Message, Serialize, Deserialize)]
pub struct DataEvent {
    /// The piece.
    #[prost(oneof = "Output", tags = "1, 2, 3")]
    #[serde(flatten)]
    pub output: Option<Output>,
}

/// The process has ended and both its streams are at their end.
#[derive(Clone, PartialEq, Message, Serialize, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct EndEvent {
    /// Exit code; -1 for a signal.
    #[prost(sint32, tag = "1")]
    #[serde(skip_serializing_if = "is_default", alias = "exit_code")]
    pub exit_code: i32,
    /// Whether it exited by itself.
    #[prost(bool, tag = "2")]
    #[serde(skip_serializing_if = "is_default")]
    pub exited: bool,
    /// In words: `exit status 7`, `signal: killed`.
    #[prost(string, tag = "3")]
    #[serde(skip_serializing_if = "is_default")]
    pub status: String,
    /// The same words when it did not exit with 0.
    #[prost(string, optional, tag = "4")]
    #[serde(skip_serializing_if = "is_default")]
    pub error: Option<String>,
}

/// Nothing happened, and the path is alive.
#[derive(Clone, Copy, PartialEq, Eq, Message, Serialize, Deserialize)]
pub struct KeepAlive {}

/// What happened to a process.
#[derive(Clone, PartialEq, Oneof, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Event {
    /// It runs.
    #[prost(message, tag = "1")]
    Start(StartEvent),
    /// It printed something.
    #[prost(message, tag = "2")]
    Data(DataEvent),
    /// It ended.
    #[prost(message, tag = "3")]
    End(EndEvent),
    /// Nothing, for a while.
    #[prost(message, tag = "4")]
    Keepalive(KeepAlive),
}

/// An [`Event`] or, from a newer envd, something unknown.
#[derive(Clone, PartialEq, Message, Serialize, Deserialize)]
pub struct ProcessEvent {
    /// The event.
    #[prost(oneof = "Event", tags = "1, 2, 3, 4")]
    #[serde(flatten)]
    pub event: Option<Event>,
}

/// One message of the streams of `Start` and `Connect`.
#[derive(Clone, PartialEq, Message, Serialize, Deserialize)]
#[serde(default)]
pub struct StartResponse {
    /// The event.
    #[prost(message, optional, tag = "1")]
    #[serde(skip_serializing_if = "is_default")]
    pub event: Option<ProcessEvent>,
}

impl StartResponse {
    /// A message of one event.
    pub fn of(event: Event) -> Self {
        Self {
            event: Some(ProcessEvent { event: Some(event) }),
        }
    }

    /// The event, if it is one that we know.
    pub fn into_event(self) -> Option<Event> {
        self.event?.event
    }
}

/// How a process is named.
#[derive(Clone, PartialEq, Eq, Oneof, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Selector {
    /// By id.
    #[prost(uint32, tag = "1")]
    Pid(u32),
    /// By label, which envd finds only sometimes.
    #[prost(string, tag = "2")]
    Tag(String),
}

/// A process.
#[derive(Clone, PartialEq, Eq, Message, Serialize, Deserialize)]
pub struct ProcessSelector {
    /// Which one.
    #[prost(oneof = "Selector", tags = "1, 2")]
    #[serde(flatten)]
    pub selector: Option<Selector>,
}

impl ProcessSelector {
    /// A process by its id.
    pub fn pid(pid: u32) -> Self {
        Self {
            selector: Some(Selector::Pid(pid)),
        }
    }
}

/// `Connect` and `CloseStdin`.
#[derive(Clone, PartialEq, Eq, Message, Serialize, Deserialize)]
#[serde(default)]
pub struct ProcessRequest {
    /// Which process.
    #[prost(message, optional, tag = "1")]
    #[serde(skip_serializing_if = "is_default")]
    pub process: Option<ProcessSelector>,
}

/// What a process is to read.
#[derive(Clone, PartialEq, Eq, Oneof, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Input {
    /// From its pipe.
    #[prost(bytes = "bytes", tag = "1")]
    Stdin(#[serde(with = "base64_bytes")] Bytes),
    /// From its terminal.
    #[prost(bytes = "bytes", tag = "2")]
    Pty(#[serde(with = "base64_bytes")] Bytes),
}

/// See [`Input`].
#[derive(Clone, PartialEq, Eq, Message, Serialize, Deserialize)]
pub struct ProcessInput {
    /// The input.
    #[prost(oneof = "Input", tags = "1, 2")]
    #[serde(flatten)]
    pub input: Option<Input>,
}

/// `SendInput`.
#[derive(Clone, PartialEq, Eq, Message, Serialize, Deserialize)]
#[serde(default)]
pub struct SendInputRequest {
    /// Which process.
    #[prost(message, optional, tag = "1")]
    #[serde(skip_serializing_if = "is_default")]
    pub process: Option<ProcessSelector>,
    /// The input.
    #[prost(message, optional, tag = "2")]
    #[serde(skip_serializing_if = "is_default")]
    pub input: Option<ProcessInput>,
}

/// `Update`: resizes a terminal.
#[derive(Clone, PartialEq, Message, Serialize, Deserialize)]
#[serde(default)]
pub struct UpdateRequest {
    /// Which process.
    #[prost(message, optional, tag = "1")]
    pub process: Option<ProcessSelector>,
    /// The new size.
    #[prost(message, optional, tag = "2")]
    pub pty: Option<Pty>,
}

/// The signals that envd sends.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, prost::Enumeration)]
#[repr(i32)]
pub enum SignalKind {
    /// None.
    Unspecified = 0,
    /// SIGKILL.
    Sigkill = 9,
    /// SIGTERM.
    Sigterm = 15,
}

mod signal_name {
    use serde::{Deserialize, Deserializer, Serializer};

    use super::SignalKind;

    const NAMES: [(SignalKind, &str); 3] = [
        (SignalKind::Unspecified, "SIGNAL_UNSPECIFIED"),
        (SignalKind::Sigkill, "SIGNAL_SIGKILL"),
        (SignalKind::Sigterm, "SIGNAL_SIGTERM"),
    ];

    pub(crate) fn serialize<S: Serializer>(signal: &i32, serializer: S) -> Result<S::Ok, S::Error> {
        let name = NAMES.iter().find(|(kind, _)| *kind as i32 == *signal);
        serializer.serialize_str(name.map_or("SIGNAL_UNSPECIFIED", |(_, name)| name))
    }

    pub(crate) fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<i32, D::Error> {
        #[derive(Deserialize)]
        #[serde(untagged)]
        enum Form {
            Name(String),
            Number(i32),
        }
        match Form::deserialize(deserializer)? {
            Form::Number(number) => Ok(number),
            Form::Name(text) => NAMES
                .iter()
                .find(|(_, name)| *name == text)
                .map(|(kind, _)| *kind as i32)
                .ok_or_else(|| serde::de::Error::custom("no such signal")),
        }
    }
}

/// `SendSignal`.
#[derive(Clone, PartialEq, Eq, Message, Serialize, Deserialize)]
#[serde(default)]
pub struct SendSignalRequest {
    /// Which process.
    #[prost(message, optional, tag = "1")]
    #[serde(skip_serializing_if = "is_default")]
    pub process: Option<ProcessSelector>,
    /// Which signal.
    #[prost(enumeration = "SignalKind", tag = "2")]
    #[serde(with = "signal_name")]
    pub signal: i32,
}

/// One message of `StreamInput`'s request.
#[derive(Clone, PartialEq, Message, Serialize, Deserialize)]
pub struct StreamInputRequest {
    /// The event.
    #[prost(oneof = "StreamInputEvent", tags = "1, 2, 3")]
    #[serde(flatten)]
    pub event: Option<StreamInputEvent>,
}

/// See [`StreamInputRequest`].
#[derive(Clone, PartialEq, Oneof, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum StreamInputEvent {
    /// Which process; always first.
    #[prost(message, tag = "1")]
    Start(ProcessRequest),
    /// Input.
    #[prost(message, tag = "2")]
    Data(StreamInputData),
    /// Nothing, for a while.
    #[prost(message, tag = "3")]
    Keepalive(KeepAlive),
}

/// Input of a stream; there is no field 1.
#[derive(Clone, PartialEq, Eq, Message, Serialize, Deserialize)]
#[serde(default)]
pub struct StreamInputData {
    /// The input.
    #[prost(message, optional, tag = "2")]
    pub input: Option<ProcessInput>,
}

/// A process of `List`.
#[derive(Clone, PartialEq, Message, Serialize, Deserialize)]
#[serde(default)]
pub struct ProcessInfo {
    /// What was started.
    #[prost(message, optional, tag = "1")]
    #[serde(skip_serializing_if = "is_default")]
    pub config: Option<ProcessConfig>,
    /// Its id.
    #[prost(uint32, tag = "2")]
    #[serde(skip_serializing_if = "is_default")]
    pub pid: u32,
    /// Its label.
    #[prost(string, optional, tag = "3")]
    #[serde(skip_serializing_if = "is_default")]
    pub tag: Option<String>,
}

/// What `List` answers.
#[derive(Clone, PartialEq, Message, Serialize, Deserialize)]
#[serde(default)]
pub struct ListResponse {
    /// The processes that were started by RPC.
    #[prost(message, repeated, tag = "1")]
    #[serde(skip_serializing_if = "is_default")]
    pub processes: Vec<ProcessInfo>,
}

/// A message without fields.
#[derive(Clone, Copy, PartialEq, Eq, Message, Serialize, Deserialize)]
pub struct Empty {}

/// `Start` as `root` or another user. There is never a deadline header: envd would kill the process by it.
pub fn start(message: &StartRequest, user: &str) -> Request {
    rpc::streaming("process.Process/Start", message, Auth::User(user))
}

/// `Connect`: what a running process does from now on.
pub fn connect(pid: u32) -> Request {
    rpc::streaming("process.Process/Connect", &of(pid), Auth::None)
}

/// `SendInput` to a pipe.
pub fn send_input(pid: u32, bytes: Bytes) -> Request {
    let message = SendInputRequest {
        process: Some(ProcessSelector::pid(pid)),
        input: Some(ProcessInput {
            input: Some(Input::Stdin(bytes)),
        }),
    };
    rpc::unary("process.Process/SendInput", &message, Auth::None, None)
}

/// `StreamInput`; the client adds the body: [`stream_input_start`], then [`stream_input_data`] as it comes. The end of the
/// body is not the end of the input.
pub fn stream_input() -> Request {
    rpc::client_streaming("process.Process/StreamInput")
}

/// The first frame of `StreamInput`.
pub fn stream_input_start(pid: u32) -> Bytes {
    let start = StreamInputRequest {
        event: Some(StreamInputEvent::Start(of(pid))),
    };
    envelope::encode(0, &start.encode_to_vec())
}

/// A further frame of `StreamInput`.
pub fn stream_input_data(bytes: Bytes) -> Bytes {
    let data = StreamInputRequest {
        event: Some(StreamInputEvent::Data(StreamInputData {
            input: Some(ProcessInput {
                input: Some(Input::Stdin(bytes)),
            }),
        })),
    };
    envelope::encode(0, &data.encode_to_vec())
}

/// `CloseStdin`: EOF.
pub fn close_stdin(pid: u32) -> Request {
    rpc::unary("process.Process/CloseStdin", &of(pid), Auth::None, None)
}

/// `SendSignal` to the process alone, not to its children.
pub fn send_signal(pid: u32, signal: SignalKind) -> Request {
    let message = SendSignalRequest {
        process: Some(ProcessSelector::pid(pid)),
        signal: signal as i32,
    };
    rpc::unary(
        "process.Process/SendSignal",
        &message,
        Auth::None,
        Some(rpc::UNARY_TIMEOUT),
    )
}

fn of(pid: u32) -> ProcessRequest {
    ProcessRequest {
        process: Some(ProcessSelector::pid(pid)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use prost::Message;

    fn hex(message: &impl Message) -> String {
        message
            .encode_to_vec()
            .iter()
            .map(|byte| format!("{byte:02x}"))
            .collect()
    }

    fn check<T>(message: T, json: &str, binary: &str)
    where
        T: Message + Default + PartialEq + std::fmt::Debug + Serialize + for<'de> Deserialize<'de>,
    {
        assert_eq!(serde_json::to_string(&message).expect("serialises"), json);
        assert_eq!(serde_json::from_str::<T>(json).expect("parses"), message);
        assert_eq!(hex(&message), binary);
        assert_eq!(T::decode(&message.encode_to_vec()[..]).expect("decodes"), message);
    }

    #[test]
    fn messages_have_their_measured_bytes_in_both_codecs() {
        check(
            StartRequest {
                process: Some(ProcessConfig {
                    cmd: "/bin/sh".into(),
                    args: vec!["-c".into(), "x".into()],
                    envs: [("A".to_owned(), "1".to_owned())].into(),
                    cwd: Some("/w".into()),
                }),
                stdin: Some(true),
                ..StartRequest::default()
            },
            r#"{"process":{"cmd":"/bin/sh","args":["-c","x"],"envs":{"A":"1"},"cwd":"/w"},"stdin":true}"#,
            "0a1c0a072f62696e2f736812022d631201781a060a014112013122022f772001",
        );
        check(
            StartResponse::of(Event::Start(StartEvent { pid: 4242 })),
            r#"{"event":{"start":{"pid":4242}}}"#,
            "0a050a03089221",
        );
        check(
            StartResponse::of(Event::Data(DataEvent {
                output: Some(Output::Stdout(Bytes::from_static(&[0, 255]))),
            })),
            r#"{"event":{"data":{"stdout":"AP8="}}}"#,
            "0a0612040a0200ff",
        );
        check(
            StartResponse::of(Event::End(EndEvent {
                exited: true,
                status: "exit status 0".into(),
                ..EndEvent::default()
            })),
            r#"{"event":{"end":{"exited":true,"status":"exit status 0"}}}"#,
            "0a131a1110011a0d65786974207374617475732030",
        );
        check(
            StartResponse::of(Event::End(EndEvent {
                exit_code: -1,
                exited: false,
                status: "signal: killed".into(),
                error: Some("signal: killed".into()),
            })),
            r#"{"event":{"end":{"exitCode":-1,"status":"signal: killed","error":"signal: killed"}}}"#,
            "0a241a2208011a0e7369676e616c3a206b696c6c6564220e7369676e616c3a206b696c6c6564",
        );
    }

    #[test]
    fn a_start_names_its_user_and_never_a_deadline() {
        let request = start(&StartRequest::default(), "root");
        assert_eq!(request.path, "/process.Process/Start");
        let header = |name: &str| {
            request
                .headers
                .iter()
                .find(|(key, _)| key == name)
                .map(|(_, value)| value.as_str())
        };
        assert_eq!(header("authorization"), Some("Basic cm9vdDo="));
        assert_eq!(header("content-type"), Some("application/connect+proto"));
        assert_eq!(header("keepalive-ping-interval"), Some("50"));
        assert_eq!(header("connect-timeout-ms"), None);
        assert_eq!(&request.body[..], b"\0\0\0\0\0");
    }

    #[test]
    fn variables_never_show_their_values() {
        let config = ProcessConfig {
            envs: [("TOKEN".to_owned(), "hunter2".to_owned())].into(),
            ..ProcessConfig::default()
        };
        let shown = format!(
            "{:?}",
            StartRequest {
                process: Some(config),
                ..StartRequest::default()
            }
        );
        assert!(shown.contains("TOKEN") && !shown.contains("hunter2"), "{shown}");
    }
}
