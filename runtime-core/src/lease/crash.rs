//! Places between two system calls at which a test makes the process die.

/// Names such a place. Outside this crate's own tests it is nothing.
macro_rules! crash_point {
    ($place:literal) => {
        #[cfg(test)]
        {
            crate::lease::crash::reached($place);
        }
    };
}

pub(crate) use crash_point;

#[cfg(all(test, feature = "subprocess", target_os = "linux"))]
pub(crate) use for_tests::COUNTDOWN;
#[cfg(test)]
pub(crate) use for_tests::reached;

#[cfg(test)]
mod for_tests {
    use std::sync::Mutex;

    /// The environment variable of a child of a test: after how many places it dies.
    pub(crate) const COUNTDOWN: &str = "RUNTIME_CORE_TEST_CRASH_AFTER";

    static LEFT: Mutex<Option<u64>> = Mutex::new(None);

    /// Dies by SIGKILL, as nothing else leaves a process so little to do, when the countdown is over.
    pub(crate) fn reached(place: &str) {
        let Some(countdown) = std::env::var_os(COUNTDOWN) else {
            return;
        };
        let mut left = LEFT.lock().unwrap();
        let now = left.unwrap_or_else(|| countdown.to_str().unwrap().parse().unwrap());
        *left = Some(now.saturating_sub(1));
        if now == 0 {
            eprintln!("crash at {place}");
            let _ = rustix::process::kill_process(rustix::process::getpid(), rustix::process::Signal::KILL);
            loop {
                std::thread::park();
            }
        }
    }
}
