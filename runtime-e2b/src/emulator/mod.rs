//! An emulator of E2B on loopback: a control plane, and an envd that runs real processes on this machine.
//!
//! The two halves are separate: each has a listener and a base URL of its own, so that either can be tried against the
//! vendor's other. As root, every box has namespaces: a root that is an overlay over this machine's, so that what a box
//! writes is its own; processes that end with it; and a network on whose one way out the policy is enforced. What a
//! machine does not permit, boxes share with it, and [`Emulator::isolation`] says so.
//!
//! ```
//! use runtime_core::Sandbox;
//! use runtime_e2b::emulator::Emulator;
//!
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() -> runtime_core::Result<()> {
//! let emulator = Emulator::start().expect("loopback");
//! # if !emulator.is_isolated() { return Ok(()); }
//! # let cache = tempfile::tempdir().expect("a directory");
//! let sandbox = Sandbox::builder(emulator.config())
//! #   .cache(runtime_core::cache::CacheDir::at(cache.path()))
//!     .provision().await?;
//! let output = sandbox.run(["echo", "hello"]).await?;
//! assert_eq!(&output.stdout.bytes[..], b"hello\n");
//! sandbox.stop().await?;
//! assert_eq!(emulator.boxes().len(), 0);
//! # Ok(())
//! # }
//! ```
//!
//! # Misbehaviour
//! [`Emulator::inject`] makes it answer wrongly, late or not at all; see [`Fault`].

mod boxes;
mod control;
mod distort;
mod envd;
mod fault;
mod files;
mod filesystem;
mod gateway;
mod home;
mod init;
mod interface;
mod place;
mod process;
mod proxy;
mod rules;
mod server;
mod signals;
mod signature;
mod state;
mod templates;
mod terminal;
mod watching;

use std::collections::BTreeMap;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::oneshot;

use crate::api_key::ApiKey;
use crate::config::E2bConfig;
pub use fault::{Action, Fault};
pub use place::Isolation;
use server::Half;
use state::State;
pub use state::{BoxInfo, BuildInfo};

/// A running emulator. Dropping it deletes its boxes and stops it.
#[derive(Debug)]
pub struct Emulator {
    state: Arc<State>,
    control: SocketAddr,
    envd: SocketAddr,
    stop: Option<oneshot::Sender<()>>,
    thread: Option<std::thread::JoinHandle<()>>,
}

impl Emulator {
    /// Starts one on ports that the system chooses, on a thread of its own.
    ///
    /// # Errors
    /// Those of the listeners, the thread and the directory of the boxes.
    pub fn start() -> io::Result<Self> {
        Self::start_at(0, 0)
    }

    /// Starts one on these ports.
    ///
    /// # Errors
    /// As [`start`](Self::start).
    pub fn start_at(control_port: u16, envd_port: u16) -> io::Result<Self> {
        let bind = |port| {
            let listener = std::net::TcpListener::bind(("127.0.0.1", port))?;
            listener.set_nonblocking(true)?;
            Ok::<_, io::Error>(listener)
        };
        let (control_listener, envd_listener) = (bind(control_port)?, bind(envd_port)?);
        let (control, envd) = (control_listener.local_addr()?, envd_listener.local_addr()?);
        let state = Arc::new(State::new()?);
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(2)
            .thread_name("e2b-emulator")
            .enable_all()
            .build()?;
        {
            let _context = runtime.enter();
            signals::handle_ignored();
        }
        let (stop, stopped) = oneshot::channel();
        let served = state.clone();
        let thread = std::thread::Builder::new().name("e2b-emulator".into()).spawn(move || {
            runtime.block_on(async {
                let control = server::serve(control_listener, served.clone(), Half::ControlPlane);
                let envd = server::serve(envd_listener, served.clone(), Half::Envd);
                tokio::select! {
                    () = control => {}
                    () = envd => {}
                    _ = stopped => {}
                }
                served.delete_all().await;
            });
            runtime.shutdown_timeout(Duration::from_secs(1));
        })?;
        Ok(Self {
            state,
            control,
            envd,
            stop: Some(stop),
            thread: Some(thread),
        })
    }

    /// Base URL of the control plane: `E2B_API_URL`.
    pub fn api_url(&self) -> String {
        format!("http://{}", self.control)
    }

    /// Base URL of envd: `E2B_SANDBOX_URL`.
    pub fn sandbox_url(&self) -> String {
        format!("http://{}", self.envd)
    }

    /// The key that the control plane takes: `E2B_API_KEY`.
    pub fn api_key(&self) -> &str {
        &self.state.api_key
    }

    /// The environment variables that point a client here.
    pub fn variables(&self) -> Vec<(&'static str, String)> {
        vec![
            ("E2B_API_KEY", self.api_key().to_owned()),
            ("E2B_API_URL", self.api_url()),
            ("E2B_SANDBOX_URL", self.sandbox_url()),
            ("NO_PROXY", "127.0.0.1,localhost".to_owned()),
        ]
    }

    /// The pattern of URLs under which the emulator passes requests on to a port of a box, as the provider's edge does.
    pub fn port_url(&self) -> String {
        format!("{}/_port/{{port}}-{{id}}", self.sandbox_url())
    }

    /// A configuration that points here, without pacing.
    pub fn config(&self) -> E2bConfig {
        E2bConfig {
            api_key: Some(ApiKey::new(self.api_key())),
            api_url: Some(self.api_url()),
            sandbox_url: Some(self.sandbox_url()),
            port_url: Some(self.port_url()),
            creates_per_sec: None,
            ..E2bConfig::default()
        }
    }

    /// Whether each box has files of its own.
    pub fn is_isolated(&self) -> bool {
        self.state.isolation.files
    }

    /// What each box has of its own. What it has not, it shares with this machine; without a network of its own its
    /// network policy is checked and recorded, and not enforced.
    pub fn isolation(&self) -> &Isolation {
        &self.state.isolation
    }

    /// Lets a name that a box's policy allows have this address from now on, whatever this machine's resolver says.
    pub fn set_address(&self, name: &str, address: std::net::Ipv4Addr) {
        let mut names = self
            .state
            .names
            .write()
            .unwrap_or_else(std::sync::PoisonError::into_inner);
        names.insert(name.to_ascii_lowercase(), address);
    }

    /// Misbehaves from now on, as often as the fault says.
    pub fn inject(&self, fault: Fault) {
        self.state.faults.inject(fault);
    }

    /// Behaves again.
    pub fn clear_faults(&self) {
        self.state.faults.clear();
    }

    /// The boxes that exist.
    pub fn boxes(&self) -> Vec<BoxInfo> {
        self.state.boxes().iter().map(|found| found.info()).collect()
    }

    /// The access token of a box.
    pub fn access_token(&self, id: &str) -> Option<String> {
        self.state.find(id).map(|found| found.token.clone())
    }

    /// How many boxes were ever created.
    pub fn created(&self) -> usize {
        self.state.creations().len()
    }

    /// The labels of every box that was ever created, oldest first.
    pub fn creations(&self) -> Vec<BTreeMap<String, String>> {
        self.state.creations()
    }

    /// The builds that were asked for.
    pub fn builds(&self) -> Vec<BuildInfo> {
        self.state.templates.builds()
    }

    /// How long builds take from now on. Default: 50 ms.
    pub fn set_build_time(&self, time: Duration) {
        self.state.templates.set_build_time(time);
    }

    /// Builds from this image fail from now on, for this reason.
    pub fn fail_image(&self, image: impl Into<String>, reason: impl Into<String>) {
        self.state.templates.fail_image(image.into(), reason.into());
    }

    /// The longest lifetime that the plan allows, in seconds. Default: 24 hours.
    pub fn set_max_lifetime(&self, seconds: u64) {
        self.state.set_max_lifetime(seconds);
    }

    /// The version that envd claims from now on. Default: `0.6.13`.
    pub fn set_envd_version(&self, version: impl Into<String>) {
        self.state.set_envd_version(version.into());
    }

    /// Makes a box die behind its owner's back.
    ///
    /// # Errors
    /// If there is none of this id.
    pub async fn kill_box(&self, id: &str) -> Result<(), String> {
        self.state
            .delete(id)
            .await
            .then_some(())
            .ok_or_else(|| format!("there is no box {id}"))
    }

    /// The requests that arrived, as `METHOD /path`, oldest first. At most 100,000 are remembered.
    pub fn requests(&self) -> Vec<String> {
        self.state.requests()
    }
}

impl Drop for Emulator {
    fn drop(&mut self) {
        if let Some(stop) = self.stop.take() {
            let _ = stop.send(());
        }
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}
