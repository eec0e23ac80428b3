//! [`Limits`]: how long the steps of a proxy may take, and how much one box may use.

use std::time::Duration;

/// Bounds of one box's proxy and relays. Every wait has one, except where a framework's route may be silent for as
/// long as it likes.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Limits {
    /// Connections from the box at a time, for each listener. More wait in the listener's backlog, and connections that
    /// are merely kept alive are closed to make room. Default 256.
    pub connections: usize,
    /// From the first byte of a request's head to its last, and the whole of a ClientHello. Default 10 s.
    pub head: Duration,
    /// Between two requests on one connection. Default 90 s.
    pub keep_alive: Duration,
    /// One name. Default 30 s.
    pub resolve: Duration,
    /// All addresses of a name together. Default 10 s.
    pub connect: Duration,
    /// Between two pieces of a request's body, and for the client to take what it is sent. Default 300 s.
    pub body: Duration,
    /// For a response to begin, and between two pieces of it. Not for framework routes: a model may think for long.
    /// Default 300 s.
    pub response: Duration,
    /// A tunnel or relay without a byte in either direction. Dead peers are found by TCP keep-alive long before. Not
    /// for framework routes. Default 1 h.
    pub tunnel: Duration,
    /// The same once one side has ended its direction. Default 300 s.
    pub half_closed: Duration,
    /// For a client to finish a request that was answered early, so that the answer is not lost. Default 10 s.
    pub linger: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            connections: 256,
            head: Duration::from_secs(10),
            keep_alive: Duration::from_secs(90),
            resolve: Duration::from_secs(30),
            connect: Duration::from_secs(10),
            body: Duration::from_secs(300),
            response: Duration::from_secs(300),
            tunnel: Duration::from_secs(3600),
            half_closed: Duration::from_secs(300),
            linger: Duration::from_secs(10),
        }
    }
}
