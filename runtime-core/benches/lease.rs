//! What a lease adds to the life of a box: the same provisions and stops with and without.
//!
//! `cargo bench -p runtime-core --bench lease [-- lives execs many]`

#[cfg(all(feature = "subprocess", unix))]
fn main() {
    measure::main();
}

#[cfg(not(all(feature = "subprocess", unix)))]
fn main() {
    eprintln!("SKIPPED: there is no embedded runtime to measure with");
}

#[cfg(all(feature = "subprocess", unix))]
#[allow(clippy::unwrap_used, reason = "a measurement that fails has nothing to hand on")]
mod measure {
    use std::time::{Duration, Instant};

    use runtime_core::cache::CacheDir;
    use runtime_core::subprocess::SubprocessConfig;
    use runtime_core::{Builder, Durability, LeasePolicy, Sandbox};

    const ROUNDS: usize = 2_000;
    const MANY: usize = 10_000;

    #[derive(Clone, Copy)]
    struct Way {
        name: &'static str,
        policy: LeasePolicy,
        durability: Durability,
    }

    const OFF: Way = Way {
        name: "no lease",
        policy: LeasePolicy::Off,
        durability: Durability::Process,
    };
    const PROCESS: Way = Way {
        name: "survives the process",
        policy: LeasePolicy::Required,
        durability: Durability::Process,
    };
    const MACHINE: Way = Way {
        name: "survives the machine",
        policy: LeasePolicy::Required,
        durability: Durability::Machine,
    };

    fn builder(cache: &CacheDir, way: Way) -> Builder {
        Sandbox::builder(SubprocessConfig::default())
            .cache(cache.clone())
            .leases(way.policy)
            .lease_durability(way.durability)
    }

    pub(super) fn main() {
        // Where the cache of the user is by default: on a disk, not in memory.
        let parent = CacheDir::from_env().path().to_owned();
        std::fs::create_dir_all(&parent).unwrap();
        let dir = tempfile::tempdir_in(&parent).unwrap();
        let cache = CacheDir::at(dir.path());
        let executor = tokio::runtime::Builder::new_multi_thread()
            .enable_all()
            .build()
            .unwrap();
        // Cargo adds flags of its own.
        let chosen: Vec<String> = std::env::args()
            .skip(1)
            .filter(|argument| !argument.starts_with('-'))
            .collect();
        let wanted = |part: &str| chosen.is_empty() || chosen.iter().any(|chosen| chosen == part);
        executor.block_on(async {
            if wanted("lives") {
                lives(&cache).await;
            }
            if wanted("execs") {
                execs(&cache).await;
            }
            if wanted("many") {
                many(&cache).await;
            }
        });
    }

    fn quantile(times: &mut [Duration], of: f64) -> Duration {
        times.sort();
        times[((times.len() - 1) as f64 * of) as usize]
    }

    /// One box after the other, the ways in turn, so that the weather is the same for all.
    async fn lives(cache: &CacheDir) {
        let ways = [OFF, PROCESS, MACHINE];
        let mut provisions = vec![Vec::new(); ways.len()];
        let mut stops = vec![Vec::new(); ways.len()];
        for _ in 0..ROUNDS {
            for (n, way) in ways.iter().enumerate() {
                let start = Instant::now();
                let sandbox = builder(cache, *way).provision().await.unwrap();
                provisions[n].push(start.elapsed());
                let start = Instant::now();
                sandbox.stop().await.unwrap();
                stops[n].push(start.elapsed());
            }
        }
        println!("{ROUNDS} boxes each, one after the other:");
        let base = (quantile(&mut provisions[0], 0.5), quantile(&mut stops[0], 0.5));
        for (n, way) in ways.iter().enumerate() {
            let (provision, stop) = (quantile(&mut provisions[n], 0.5), quantile(&mut stops[n], 0.5));
            let added = (provision + stop).saturating_sub(base.0 + base.1);
            println!(
                "  {:<22} provision {provision:>10.1?} (p99 {:>8.1?})  stop {stop:>10.1?}  lease adds {added:.1?}",
                way.name,
                quantile(&mut provisions[n], 0.99),
            );
        }
    }

    async fn execs(cache: &CacheDir) {
        println!("500 runs of `true`:");
        for way in [OFF, PROCESS] {
            let sandbox = builder(cache, way).provision().await.unwrap();
            let mut times = Vec::new();
            for _ in 0..500 {
                let start = Instant::now();
                sandbox.run(["true"]).await.unwrap();
                times.push(start.elapsed());
            }
            println!("  {:<22} median {:.1?}", way.name, quantile(&mut times, 0.5));
            sandbox.stop().await.unwrap();
        }
    }

    /// All alive at once, the ways in turn.
    async fn many(parent: &CacheDir) {
        let open = || std::fs::read_dir("/proc/self/fd").map_or(0, Iterator::count);
        let before = open();
        let ways = [OFF, PROCESS].map(|way| (way, parent.join(way.name).unwrap(), Vec::with_capacity(MANY)));
        let mut ways = ways.map(|(way, dir, times)| (way, CacheDir::at(dir), times));
        let mut boxes = Vec::with_capacity(2 * MANY);
        for _ in 0..MANY {
            for (way, cache, times) in &mut ways {
                let start = Instant::now();
                boxes.push(builder(cache, *way).provision().await.unwrap());
                times.push(start.elapsed());
            }
        }
        println!(
            "{MANY} boxes each, all alive at once, {} descriptors more:",
            open() - before
        );
        for (way, _, times) in &mut ways {
            let mean = times.iter().sum::<Duration>() / MANY as u32;
            println!(
                "  {:<22} provision {:>10.1?} (mean {mean:.1?})",
                way.name,
                quantile(times, 0.5)
            );
        }
        let stopped = runtime_core::shutdown::stop_all(Duration::from_secs(300)).await;
        assert!(stopped.is_complete(), "{stopped:?}");
    }
}
