//! Ports of the box on loopback of this host: each connection is dialled in the box.

use std::collections::HashMap;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr};
use std::sync::{Mutex, PoisonError};

use crate::guest::Link;
use crate::{Error, Result};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::{AbortHandle, JoinSet};

/// Most connections of one port at once; more wait in the listener's queue.
const MOST_CONNECTIONS: usize = 1024;

/// What is exposed of a box.
#[derive(Default)]
pub(super) struct Exposures {
    ports: Mutex<HashMap<u16, (SocketAddr, AbortHandle)>>,
}

impl Exposures {
    /// The URL of a port, which stays the same for as long as the box lives.
    pub(super) async fn url(&self, link: &Link, port: u16) -> Result<String> {
        if let Some((address, _)) = self.ports().get(&port) {
            return Ok(format!("http://{address}"));
        }
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await;
        let listener = listener.map_err(|error| Error::io("listening on loopback", error))?;
        let address = listener
            .local_addr()
            .map_err(|error| Error::io("listening on loopback", error))?;
        let mut ports = self.ports();
        // Somebody else may have been faster; theirs stays.
        let (address, _) = ports.entry(port).or_insert_with(|| {
            let task = tokio::spawn(serve(listener, link.clone(), port));
            (address, task.abort_handle())
        });
        Ok(format!("http://{address}"))
    }

    fn ports(&self) -> std::sync::MutexGuard<'_, HashMap<u16, (SocketAddr, AbortHandle)>> {
        self.ports.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Closes every listener and connection.
    pub(super) fn close(&self) {
        for (_, (_, task)) in self.ports().drain() {
            task.abort();
        }
    }
}

impl Drop for Exposures {
    fn drop(&mut self) {
        self.close();
    }
}

async fn serve(listener: TcpListener, link: Link, port: u16) {
    // Dropped with this task, and its connections with it.
    let mut connections = JoinSet::new();
    loop {
        tokio::select! {
            accepted = listener.accept(), if connections.len() < MOST_CONNECTIONS => match accepted {
                Ok((client, _)) => {
                    let link = link.clone();
                    connections.spawn(async move {
                        if let Err(error) = relay(client, &link, port).await {
                            tracing::debug!(%error, port, "a connection into the box failed");
                        }
                    });
                }
                // No descriptors left, as a rule: it passes.
                Err(_) => tokio::time::sleep(std::time::Duration::from_millis(50)).await,
            },
            Some(_) = connections.join_next() => {}
            _ = link.ended() => return,
        }
    }
}

async fn relay(mut client: TcpStream, link: &Link, port: u16) -> Result<()> {
    let mut inside = match link.dial((Ipv4Addr::LOCALHOST, port).into()).await {
        Ok(connection) => connection,
        // A server that listens on IPv6 alone.
        Err(error) => match link.dial((Ipv6Addr::LOCALHOST, port).into()).await {
            Ok(connection) => connection,
            Err(_) => return Err(error),
        },
    };
    let _ = client.set_nodelay(true);
    // How a connection ends is between its two sides.
    let _ = tokio::io::copy_bidirectional_with_sizes(&mut client, &mut inside, 64 << 10, 64 << 10).await;
    Ok(())
}
