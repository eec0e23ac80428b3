//! The network of a box: taken away by disconnecting the container from every network, given back by connecting it to
//! the same ones.

use std::collections::BTreeMap;
use std::sync::Mutex;

use bollard::models::{EndpointSettings, NetworkConnectRequest, NetworkDisconnectRequest};
use runtime_core::box_network::BoxNetwork;
use runtime_core::egress::EgressLog;
use runtime_core::guest::Link;
use runtime_core::network::{Policy, Routes};
use runtime_core::{Env, Error, ErrorKind, Result};

use super::lock;
use crate::engine::Engine;

/// The network of one box with a guest.
pub(super) struct BoxNet {
    engine: Engine,
    container: String,
    inside: BoxNetwork,
    /// The link, where the engine's resolver has to be blocked.
    resolver: Option<Link>,
    /// What the container was connected to before it was cut off.
    cut_from: Mutex<BTreeMap<String, EndpointSettings>>,
}

impl BoxNet {
    pub(super) fn new(engine: Engine, container: String, inside: BoxNetwork, resolver: Option<Link>) -> Self {
        Self {
            engine,
            container,
            inside,
            resolver,
            cut_from: Mutex::default(),
        }
    }

    /// The variables to lay over those of a program.
    pub(super) fn environment(&self, caller: &Env, background: bool) -> Env {
        self.inside.environment(caller, background)
    }

    pub(super) async fn host_url(&self, url: &str) -> Result<String> {
        self.inside.host_url(url).await
    }

    /// What the box asked for.
    pub(super) fn log(&self) -> EgressLog {
        self.inside.log().clone()
    }

    /// Returns only when the network is proven closed.
    pub(super) async fn close(&self, policy: &Policy, routes: &Routes) -> Result<()> {
        let closed = self.inside.close(policy, routes, self.disconnect()).await;
        closed.map_err(|error| match error.kind() {
            ErrorKind::NetworkPolicy | ErrorKind::SandboxGone | ErrorKind::Protocol => error,
            _ => {
                let message = format!("the network could not be closed: {}", error.message());
                Error::new(ErrorKind::NetworkPolicy, message).with_source(error)
            }
        })
    }

    pub(super) async fn open(&self) -> Result<()> {
        self.inside.open(self.connect()).await
    }

    /// Closes proxy and relays.
    pub(super) async fn stop(&self) {
        self.inside.stop().await;
    }

    /// Takes the container off every network that it is on, however often it is asked to.
    async fn disconnect(&self) -> Result<()> {
        let networks = self.networks().await?;
        {
            // Before the first one goes, so that a cut that fails half-way can be undone as a whole.
            let mut cut_from = lock(&self.cut_from);
            for (name, settings) in &networks {
                cut_from.insert(name.clone(), kept(settings));
            }
        }
        for name in networks.keys() {
            let request = NetworkDisconnectRequest {
                container: self.container.clone(),
                force: Some(false),
            };
            if let Err(error) = self.engine.client.disconnect_network(name, request).await {
                // Somebody else may have been faster; what counts is what is left.
                let error = self.engine.error("disconnecting the container", error);
                tracing::debug!(%error, network = name, "not disconnected");
            }
        }
        if let Some(left) = self.networks().await?.keys().next() {
            return Err(Error::new(
                ErrorKind::NetworkPolicy,
                format!("the engine keeps the container on the network `{left}`"),
            ));
        }
        match &self.resolver {
            Some(link) => link.set_resolver_reachable(false).await,
            None => Ok(()),
        }
    }

    async fn connect(&self) -> Result<()> {
        let present = self.networks().await?;
        let missing: Vec<_> = lock(&self.cut_from)
            .iter()
            .filter(|(name, _)| !present.contains_key(*name))
            .map(|(name, settings)| (name.clone(), settings.clone()))
            .collect();
        for (name, settings) in missing {
            let request = NetworkConnectRequest {
                container: self.container.clone(),
                endpoint_config: Some(settings),
            };
            let connected = self.engine.client.connect_network(&name, request).await;
            connected.map_err(|error| self.engine.error("connecting the container again", error))?;
        }
        lock(&self.cut_from).clear();
        match &self.resolver {
            Some(link) => link.set_resolver_reachable(true).await,
            None => Ok(()),
        }
    }

    /// The networks that the engine says the container is on. `none` is not one.
    async fn networks(&self) -> Result<BTreeMap<String, EndpointSettings>> {
        let inspect = self.engine.inspect(&self.container).await?;
        let inspect = inspect.ok_or_else(|| Error::new(ErrorKind::SandboxGone, "the container is gone"))?;
        let networks = inspect.network_settings.and_then(|settings| settings.networks);
        Ok(networks
            .unwrap_or_default()
            .into_iter()
            .filter(|(name, _)| name != "none")
            .collect())
    }
}

/// What a connection needs to be as it was; its addresses are the engine's to choose unless they were asked for.
fn kept(settings: &EndpointSettings) -> EndpointSettings {
    EndpointSettings {
        ipam_config: settings.ipam_config.clone(),
        links: settings.links.clone(),
        aliases: settings.aliases.clone(),
        driver_opts: settings.driver_opts.clone(),
        ..EndpointSettings::default()
    }
}
