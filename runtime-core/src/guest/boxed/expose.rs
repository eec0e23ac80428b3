//! Ports of the box on loopback of this host: each connection is dialled in the box.

use std::collections::HashMap;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use crate::guest::Link;
use crate::{Error, Result};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::{AbortHandle, JoinSet};

/// Most connections of one port at once; more wait in the listener's queue.
const MOST_CONNECTIONS: usize = 1024;

/// What is exposed of a box.
#[derive(Default)]
pub(super) struct Exposures {
    ports: Mutex<HashMap<u16, (SocketAddr, AbortHandle)>>,
    /// The box's programs are on the host's network at present, where their ports are then.
    outside: Arc<AtomicBool>,
}

impl Exposures {
    /// Where the ports of programs are from now on: on this host's loopback, or on the box's.
    #[cfg(feature = "isolation")]
    pub(super) fn set_outside(&self, outside: bool) {
        self.outside.store(outside, Ordering::Relaxed);
    }

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
            let task = tokio::spawn(serve(listener, link.clone(), port, self.outside.clone()));
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

async fn serve(listener: TcpListener, link: Link, port: u16, outside: Arc<AtomicBool>) {
    // Dropped with this task, and its connections with it.
    let mut connections = JoinSet::new();
    loop {
        tokio::select! {
            accepted = listener.accept(), if connections.len() < MOST_CONNECTIONS => match accepted {
                Ok((client, _)) => {
                    let link = link.clone();
                    let outside = outside.load(Ordering::Relaxed);
                    connections.spawn(async move {
                        let relayed = match outside {
                            true => relay_outside(client, port).await,
                            false => relay(client, &link, port).await,
                        };
                        if let Err(error) = relayed {
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
    carry(&mut client, &mut inside).await;
    Ok(())
}

async fn relay_outside(mut client: TcpStream, port: u16) -> Result<()> {
    let mut server = match TcpStream::connect((Ipv4Addr::LOCALHOST, port)).await {
        Ok(connection) => connection,
        Err(error) => match TcpStream::connect((Ipv6Addr::LOCALHOST, port)).await {
            Ok(connection) => connection,
            Err(_) => return Err(Error::io("connecting to a server of the setup", error)),
        },
    };
    let _ = server.set_nodelay(true);
    carry(&mut client, &mut server).await;
    Ok(())
}

async fn carry(client: &mut TcpStream, server: &mut (impl AsyncRead + AsyncWrite + Unpin)) {
    let _ = client.set_nodelay(true);
    // How a connection ends is between its two sides.
    let _ = tokio::io::copy_bidirectional_with_sizes(client, server, 64 << 10, 64 << 10).await;
}
