//! A whole link to a guest that says anything at all after its introduction, with operations of every kind under way:
//! no panic, and when the guest goes away everything ends.
#![no_main]

use std::cell::RefCell;
use std::path::Path;
use std::time::Duration;

use libfuzzer_sys::fuzz_target;
use runtime_core::guest::frame::{Event, MAGIC, VERSION, encode};
use runtime_core::guest::{Link, LinkOptions, SpawnOptions, Token};
use runtime_core::{Env, Exec, StdinMode};
use tokio::io::{AsyncReadExt, AsyncWriteExt};

fn hello(token: &Token) -> Vec<u8> {
    let (_, digits) = token.variable();
    let byte = |at: usize| u8::from_str_radix(&digits[2 * at..2 * at + 2], 16).expect("digits");
    let event = Event::Hello {
        magic: MAGIC,
        version: VERSION,
        token: std::array::from_fn(byte),
        pid: 1,
    };
    encode(0, 0, &event).expect("short")
}

async fn run(bytes: &[u8]) {
    let token = Token::generate().expect("random bytes");
    let (ours, theirs) = tokio::io::duplex(1 << 20);
    let (reader, writer) = tokio::io::split(ours);
    let (mut requests, mut events) = tokio::io::split(theirs);
    events.write_all(&hello(&token)).await.expect("there is room");
    let link = Link::over_stdio(reader, writer, &token, LinkOptions::default()).await.expect("it is ours");
    let exec = Exec {
        argv: vec!["true".into()],
        env: Env::new(),
        workdir: "/".into(),
        stdin: StdinMode::Piped,
    };
    let options = SpawnOptions::default();
    let address = "127.0.0.1:1".parse().expect("an address");
    let path = Path::new("/x");
    let guest = async {
        // After the requests of below.
        for _ in 0..20 {
            tokio::task::yield_now().await;
        }
        let _ = events.write_all(bytes).await;
        let _ = events.shutdown().await;
        let mut sink = Vec::new();
        let _ = requests.read_to_end(&mut sink).await;
    };
    let spawn = async {
        if let Ok(mut process) = link.spawn(&exec, &options).await {
            let mut output = Vec::new();
            if let Some(stdout) = process.stdout.take() {
                let _ = stdout.take(1 << 20).read_to_end(&mut output).await;
            }
            let _ = process.wait().await;
        }
    };
    let listen = async {
        if let Ok(mut listener) = link.listen(address).await {
            while let Ok((mut connection, _)) = listener.accept().await {
                let _ = connection.read(&mut [0; 64]).await;
            }
        }
    };
    let dial = async {
        if let Ok(mut connection) = link.dial(address).await {
            let _ = connection.write_all(&[0; 1000]).await;
            let _ = connection.read_to_end(&mut Vec::new()).await;
        }
    };
    let rest = async {
        let (read, list, network, ping) =
            tokio::join!(link.read(path, 1 << 20), link.list(path, 1000), link.network(), link.ping());
        drop((read, list, network, ping));
        let _ = link.ended().await;
    };
    tokio::time::timeout(Duration::from_secs(20), async { tokio::join!(guest, spawn, listen, dial, rest) })
        .await
        .expect("everything ends with the guest");
}

fuzz_target!(|bytes: &[u8]| {
    thread_local! {
        static RUNTIME: RefCell<tokio::runtime::Runtime> = RefCell::new(
            tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime"),
        );
    }
    RUNTIME.with(|runtime| runtime.borrow_mut().block_on(run(bytes)));
});
