//! Programs: how they start, talk, are signalled and end.

use std::ffi::OsString;
use std::os::unix::fs::PermissionsExt;
use std::time::Duration;

use runtime_core::guest::{Output, SpawnOptions, User};
use runtime_core::{Env, ErrorKind, Signal};
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};

use crate::support::*;

/// The processes whose command line contains `marker`.
fn running(marker: &str) -> Vec<u32> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir("/proc").unwrap().flatten() {
        let Ok(pid) = entry.file_name().to_string_lossy().parse::<u32>() else {
            continue;
        };
        let line = std::fs::read(entry.path().join("cmdline")).unwrap_or_default();
        if String::from_utf8_lossy(&line).contains(marker) {
            found.push(pid);
        }
    }
    found
}

/// A number of seconds that no other test sleeps for, to find a process by.
fn marker() -> String {
    use std::sync::atomic::{AtomicU32, Ordering};
    static NEXT: AtomicU32 = AtomicU32::new(0);
    let number = 1_000_000 + (std::process::id() % 10_000) * 1000 + NEXT.fetch_add(1, Ordering::Relaxed);
    number.to_string()
}

over_both_links! {
    async fn a_program_gives_its_exit_code_and_its_output(guest: Guest) {
        let (status, stdout, stderr) = guest.run(["sh", "-c", "echo out; echo err >&2; exit 7"]).await;
        assert_eq!(status.code(), Some(7));
        assert_eq!(stdout, b"out\n");
        assert_eq!(stderr, b"err\n");
        assert_eq!(guest.run(["true"]).await.0.code(), Some(0));
        assert_eq!(guest.run(["sh", "-c", "exit 255"]).await.0.code(), Some(255));
    }

    async fn a_death_by_signal_is_told_from_an_exit_code(guest: Guest) {
        let (status, ..) = guest.run(["sh", "-c", "kill -TERM $$"]).await;
        assert_eq!((status.code(), status.signal()), (None, Some(15)));
        let (status, ..) = guest.run(["sh", "-c", "kill -KILL $$"]).await;
        assert_eq!(status.signal(), Some(9));
        assert!(!status.oom_killed(), "nobody ran out of memory");
        let (status, ..) = guest.run(["sh", "-c", "exit 137"]).await;
        assert_eq!((status.code(), status.oom_killed()), (Some(137), false));
    }

    async fn arguments_environment_and_workdir_arrive_byte_for_byte(guest: Guest) {
        use std::os::unix::ffi::OsStringExt;
        let mut exec = exec(["sh", "-c", r#"printf '%s|%s|%s|' "$1" "$ODD" "$FROM_IMAGE"; pwd"#, "sh"]);
        let odd = OsString::from_vec(b"a\n\xff'\"$(x)".to_vec());
        exec.argv.push(odd.clone());
        exec.env = Env::from_iter([("ODD", odd)]);
        exec.workdir = guest.directory.path().to_path_buf();
        let process = guest.link.spawn(&exec, &SpawnOptions::default()).await.unwrap();
        let (status, stdout, _) = within(collect(process)).await;
        assert!(status.success());
        let mut wanted = b"a\n\xff'\"$(x)|a\n\xff'\"$(x)|yes|".to_vec();
        wanted.extend(guest.directory.path().as_os_str().as_encoded_bytes());
        wanted.push(b'\n');
        assert_eq!(stdout, wanted);
    }

    async fn the_base_environment_can_be_replaced_and_home_and_path_are_set(guest: Guest) {
        assert_eq!(guest.shell("echo $FROM_IMAGE").await, "yes");
        let passwd = std::fs::read_to_string("/etc/passwd").unwrap();
        let id = rustix::process::geteuid().as_raw().to_string();
        let home = passwd.lines().find(|line| line.split(':').nth(2) == Some(&id)).and_then(|line| line.split(':').nth(5));
        assert_eq!(guest.shell("echo $HOME").await, home.unwrap_or("/"));
        let env = Env::from_iter([("ONLY", "this")]);
        guest.link.configure(Some(&env), false).await.unwrap();
        let printed = guest.shell("env").await;
        assert!(printed.contains("ONLY=this"), "{printed}");
        assert!(printed.contains("PATH=/usr/local/sbin:/usr/local/bin:"), "{printed}");
        assert!(!printed.contains("FROM_IMAGE"), "{printed}");
    }

    async fn the_token_is_nowhere_in_the_box(guest: Guest) {
        assert_eq!(guest.shell("env | grep -c SANDBOX || true").await, "0");
        let environ = std::fs::read(format!("/proc/{}/environ", guest.id())).unwrap();
        let at = environ.windows(20).position(|window| window == b"SANDBOX_GUEST_TOKEN=").unwrap();
        assert!(environ[at + 20..at + 84].iter().all(|byte| *byte == b'0'), "overwritten in place");
    }

    async fn a_missing_program_is_told_from_one_that_cannot_be_executed(guest: Guest) {
        let options = SpawnOptions::default();
        let kind = async |argv: [&str; 1]| guest.link.spawn(&exec(argv), &options).await.unwrap_err().kind();
        assert_eq!(kind(["no-such-program-here"]).await, ErrorKind::ProgramNotFound);
        assert_eq!(kind(["/no/such/program"]).await, ErrorKind::ProgramNotFound);
        assert_eq!(kind(["/etc/passwd"]).await, ErrorKind::ProgramNotExecutable);
        assert_eq!(kind(["/etc"]).await, ErrorKind::ProgramNotExecutable);
        let text = guest.path("not-a-program");
        std::fs::write(&text, "just text").unwrap();
        std::fs::set_permissions(&text, std::fs::Permissions::from_mode(0o755)).unwrap();
        assert_eq!(kind([text.to_str().unwrap()]).await, ErrorKind::ProgramNotExecutable);
        // A shell that does not find a program is a result, not an error.
        assert_eq!(guest.run(["sh", "-c", "no-such-program-here"]).await.0.code(), Some(127));
        assert_eq!(guest.run(["sh", "-c", "/etc/passwd"]).await.0.code(), Some(126));
    }

    async fn a_bad_workdir_names_the_field(guest: Guest) {
        let mut exec = exec(["true"]);
        exec.workdir = "/no/such/directory".into();
        let error = guest.link.spawn(&exec, &SpawnOptions::default()).await.unwrap_err();
        assert_eq!((error.kind(), error.field()), (ErrorKind::NotFound, Some("workdir")));
        exec.workdir = "/etc/passwd".into();
        let error = guest.link.spawn(&exec, &SpawnOptions::default()).await.unwrap_err();
        assert_eq!((error.kind(), error.field()), (ErrorKind::WrongFileType, Some("workdir")));
    }

    async fn stdin_is_null_unless_asked_for_and_closing_it_is_eof(guest: Guest) {
        let (status, stdout, _) = guest.run(["cat"]).await;
        assert!(status.success() && stdout.is_empty());
        let mut cat = guest.spawn(["cat"]).await;
        let mut stdin = cat.stdin.take().unwrap();
        stdin.write_all(b"ping\n").await.unwrap();
        let mut stdout = BufReader::new(cat.stdout.take().unwrap());
        let mut line = String::new();
        within(stdout.read_line(&mut line)).await.unwrap();
        assert_eq!(line, "ping\n", "echoed while it runs");
        assert!(cat.try_wait().unwrap().is_none());
        drop(stdin);
        within(stdout.read_line(&mut line)).await.unwrap();
        assert!(within(cat.wait()).await.unwrap().success());
    }

    async fn writing_to_a_program_that_does_not_read_fails_once_it_has_ended(guest: Guest) {
        let mut process = guest.spawn(["sh", "-c", "exec 0<&-; echo closed; exec sleep 1000"]).await;
        let mut line = String::new();
        let mut stdout = BufReader::new(process.stdout.take().unwrap());
        within(stdout.read_line(&mut line)).await.unwrap();
        let mut stdin = process.stdin.take().unwrap();
        let chunk = vec![0; 64 << 10];
        let error = within(async {
            loop {
                if let Err(error) = stdin.write_all(&chunk).await {
                    return error;
                }
            }
        })
        .await;
        assert_eq!(error.kind(), std::io::ErrorKind::BrokenPipe);
        assert_eq!(within(process.kill()).await.unwrap().signal(), Some(9));
    }

    async fn a_reader_that_stops_holds_the_program_back(guest: Guest) {
        let count = guest.path("count");
        let script = format!("while :; do head -c 65536 /dev/zero; echo >> {}; done", count.display());
        let mut process = guest.spawn(["sh", "-c", &script]).await;
        let lines = || std::fs::read(&count).map_or(0, |text| text.len());
        eventually("it writes", || lines() > 0).await;
        // It must come to rest: pipe, window and queue hold less than 4 MiB in all.
        let mut last = 0;
        let mut rest = 0;
        eventually("it comes to rest", || {
            let now = lines();
            rest = if now == last { rest + 1 } else { 0 };
            last = now;
            rest > 40
        })
        .await;
        assert!(last < 64, "{last} chunks of 64 KiB went nowhere");
        let mut out = process.stdout.take().unwrap();
        let mut buffer = vec![0; 1 << 20];
        for _ in 0..32 {
            within(out.read_exact(&mut buffer)).await.unwrap();
        }
        assert!(lines() > last, "it goes on when it is read again");
        process.kill().await.unwrap();
    }

    async fn sixty_four_mebibytes_on_both_streams_arrive_whole(guest: Guest) {
        let script = "head -c 67108864 /dev/zero | tr '\\0' 'a' & head -c 67108864 /dev/zero | tr '\\0' 'b' >&2; wait";
        let (status, stdout, stderr) = guest.run(["sh", "-c", script]).await;
        assert!(status.success());
        assert_eq!((stdout.len(), stderr.len()), (64 << 20, 64 << 20));
        assert!(stdout.iter().all(|byte| *byte == b'a') && stderr.iter().all(|byte| *byte == b'b'));
    }

    async fn sixty_four_mebibytes_go_through_a_program(guest: Guest) {
        let mut cat = guest.spawn(["cat"]).await;
        let (mut stdin, mut stdout) = (cat.stdin.take().unwrap(), cat.stdout.take().unwrap());
        let sent: Vec<u8> = (0..64u32 << 18).flat_map(|number| number.to_le_bytes()).collect();
        let copy = sent.clone();
        let writing = tokio::spawn(async move { stdin.write_all(&copy).await });
        let mut received = Vec::new();
        within(stdout.read_to_end(&mut received)).await.unwrap();
        writing.await.unwrap().unwrap();
        assert!(received == sent, "{} bytes came back", received.len());
        assert!(within(cat.wait()).await.unwrap().success());
    }

    async fn a_signal_reaches_the_whole_group(guest: Guest) {
        let marker = marker();
        let script = format!("sleep {marker} & sleep {marker} & trap 'exit 9' USR1; echo ready; wait; wait; wait");
        let mut process = guest.spawn(["sh", "-c", &script]).await;
        let mut line = String::new();
        within(BufReader::new(process.stdout.as_mut().unwrap()).read_line(&mut line)).await.unwrap();
        eventually("both children run", || running(&marker).len() == 3).await;
        process.signal(Signal::USR1).await.unwrap();
        assert_eq!(within(process.wait()).await.unwrap().code(), Some(9));
        eventually("the children got it too", || running(&marker).is_empty()).await;
        process.signal(Signal::TERM).await.expect("signalling what has ended does nothing");
    }

    async fn dropping_a_process_kills_its_whole_group(guest: Guest) {
        let marker = marker();
        let script = format!("sleep {marker} & echo ready; wait");
        let mut process = guest.spawn(["sh", "-c", &script]).await;
        let mut line = String::new();
        within(BufReader::new(process.stdout.as_mut().unwrap()).read_line(&mut line)).await.unwrap();
        let handle = process.handle();
        drop(process);
        assert_eq!(within(handle.wait()).await.unwrap().signal(), Some(9), "its end is still told");
        eventually("the group is gone", || running(&marker).is_empty()).await;
    }

    async fn what_a_leader_left_behind_dies_when_the_handle_is_dropped(guest: Guest) {
        let marker = marker();
        let script = format!("sleep {marker} >/dev/null 2>&1 & echo done");
        let mut process = guest.spawn(["sh", "-c", &script]).await;
        assert!(within(process.wait()).await.unwrap().success());
        // The leader may end before its child has become `sleep`.
        eventually("a child outlives its leader", || running(&marker).len() == 1).await;
        drop(process);
        eventually("the rest of the group is gone", || running(&marker).is_empty()).await;
    }

    async fn every_orphan_is_reaped(guest: Guest) {
        guest.shell("for i in 1 2 3 4 5; do (setsid sh -c 'sleep 0.05' >/dev/null 2>&1 &) ; done").await;
        let children = format!("/proc/{}/task/{}/children", guest.id(), guest.id());
        eventually("no child is left", || std::fs::read_to_string(&children).unwrap().trim().is_empty()).await;
    }

    async fn every_program_leads_a_session_and_is_killed_before_the_guest(guest: Guest) {
        let stat = guest.shell("cat /proc/self/stat; cat /proc/self/oom_score_adj").await;
        let (stat, score) = stat.split_once('\n').unwrap();
        let fields: Vec<&str> = stat.rsplit_once(") ").unwrap().1.split(' ').collect();
        let session: u32 = fields[3].parse().unwrap();
        assert_ne!(session, guest.id());
        guest.link.configure(None, false).await.unwrap();
        let own: i32 = std::fs::read_to_string(format!("/proc/{}/oom_score_adj", guest.id())).unwrap().trim().parse().unwrap();
        assert_eq!(score.parse::<i32>().unwrap_or(-1), 0, "before it is configured");
        let raised: i32 = guest.shell("cat /proc/self/oom_score_adj").await.parse().unwrap();
        assert!(raised > own, "{raised} > {own}");
    }

    async fn a_program_gets_no_descriptor_but_its_three(guest: Guest) {
        let _kept = guest.spawn(["cat"]).await;
        // The directory that `ls` reads is its own fourth.
        assert_eq!(guest.shell("ls /proc/self/fd | sort -n | tr '\\n' ' '").await, "0 1 2 3");
        assert_eq!(guest.shell("grep -E '^Sig(Ign|Blk)' /proc/self/status | cut -f2 | sort -u").await, "0000000000000000");
    }

    async fn output_can_go_to_a_log_in_the_box(guest: Guest) {
        let mut exec = exec(["sh", "-c", "echo one; echo two >&2"]);
        exec.workdir = guest.directory.path().to_path_buf();
        let options = SpawnOptions {
            output: Output::Log("server.log".into()),
            ..SpawnOptions::default()
        };
        for _ in 0..2 {
            let mut process = guest.link.spawn(&exec, &options).await.unwrap();
            assert!(process.stdout.is_none() && process.stderr.is_none());
            assert!(within(process.wait()).await.unwrap().success());
        }
        assert_eq!(std::fs::read_to_string(guest.path("server.log")).unwrap(), "one\ntwo\none\ntwo\n");
    }

    async fn a_hundred_programs_run_at_once(guest: Guest) {
        let mut running = tokio::task::JoinSet::new();
        for number in 0..100 {
            let link = guest.link.clone();
            running.spawn(async move {
                let script = format!("echo {number}; exit {number}");
                let process = link.spawn(&exec(["sh", "-c", &script]), &SpawnOptions::default()).await.unwrap();
                let (status, stdout, _) = within(collect(process)).await;
                assert_eq!(status.code(), Some(number));
                assert_eq!(stdout, format!("{number}\n").into_bytes());
            });
        }
        while let Some(result) = running.join_next().await {
            result.unwrap();
        }
    }

    async fn a_large_environment_arrives_and_one_that_is_too_large_is_refused(guest: Guest) {
        let mut large = exec(["sh", "-c", "echo ${#LARGE}"]);
        large.env = Env::from_iter([("LARGE", "x".repeat(100_000))]);
        let process = guest.link.spawn(&large, &SpawnOptions::default()).await.unwrap();
        assert_eq!(within(collect(process)).await.1, b"100000\n");
        large.env = Env::from_iter([("LARGE", "x".repeat(5 << 20))]);
        let error = guest.link.spawn(&large, &SpawnOptions::default()).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidArgument);
        // The kernel's own limit on one string is an error of the call too.
        large.env = Env::from_iter([("LARGE", "x".repeat(1 << 20))]);
        let error = guest.link.spawn(&large, &SpawnOptions::default()).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidArgument);
        assert!(guest.run(["true"]).await.0.success(), "the link is unharmed");
    }

    async fn a_program_can_run_as_another_user(guest: Guest) {
        let mut as_user = exec(["sh", "-c", "id -u; id -g; id -G; echo $HOME; touch /etc/not-allowed"]);
        as_user.workdir = "/".into();
        let options = SpawnOptions {
            user: Some(User { uid: 12345, gid: 23456, groups: vec![34567] }),
            ..SpawnOptions::default()
        };
        let spawned = guest.link.spawn(&as_user, &options).await;
        if rustix::process::geteuid().is_root() {
            let (status, stdout, _) = within(collect(spawned.unwrap())).await;
            assert!(!status.success(), "an ordinary user cannot write to /etc");
            assert_eq!(stdout, b"12345\n23456\n23456 34567\n/\n");
        } else {
            let error = spawned.unwrap_err();
            assert_eq!((error.kind(), error.field()), (ErrorKind::PermissionDenied, Some("user")));
        }
    }

    async fn a_closed_link_ends_the_guest_and_everything_it_started(guest: Guest) {
        let marker = marker();
        let mut process = guest.spawn(["sleep", &marker]).await;
        guest.link.close();
        assert_eq!(process.wait().await.unwrap_err().kind(), ErrorKind::SandboxGone);
        assert_eq!(guest.link.ping().await.unwrap_err().kind(), ErrorKind::SandboxGone);
        assert!(guest.exit().await.success());
        eventually("the program is gone", || running(&marker).is_empty()).await;
    }

    async fn the_death_of_the_guest_fails_everything_that_was_under_way(guest: Guest) {
        let mut process = guest.spawn(["sleep", "1000"]).await;
        let pid = rustix::process::Pid::from_raw(process.id().unwrap() as i32).unwrap();
        let own = rustix::process::Pid::from_raw(guest.id() as i32).unwrap();
        rustix::process::kill_process(own, rustix::process::Signal::KILL).unwrap();
        assert_eq!(within(process.wait()).await.unwrap_err().kind(), ErrorKind::SandboxGone);
        assert_eq!(within(guest.link.ended()).await.kind(), ErrorKind::SandboxGone);
        assert_eq!(guest.link.ping().await.unwrap_err().kind(), ErrorKind::SandboxGone);
        // Outside a namespace of its own its programs outlive it.
        rustix::process::kill_process(pid, rustix::process::Signal::KILL).unwrap();
    }

    async fn a_stopped_engine_ends_the_guest_in_order(guest: Guest) {
        let told = guest.path("told");
        let script = format!("trap 'echo told > {}; exit 3' TERM; echo ready; while :; do sleep 0.01; done", told.display());
        let mut process = guest.spawn(["sh", "-c", &script]).await;
        let mut line = String::new();
        within(BufReader::new(process.stdout.as_mut().unwrap()).read_line(&mut line)).await.unwrap();
        let own = rustix::process::Pid::from_raw(guest.id() as i32).unwrap();
        rustix::process::kill_process(own, rustix::process::Signal::TERM).unwrap();
        assert_eq!(within(process.wait()).await.unwrap().code(), Some(3), "its end is still told");
        assert!(guest.exit().await.success());
        assert_eq!(std::fs::read_to_string(told).unwrap(), "told\n");
    }

    async fn shutdown_ends_the_guest_within_its_grace(guest: Guest) {
        let stubborn = guest.spawn(["sh", "-c", "trap '' TERM; while :; do sleep 0.01; done"]).await;
        guest.link.shutdown(Duration::from_secs(30)).await.unwrap();
        let status = guest.exit().await;
        assert!(status.success(), "{status}");
        drop(stubborn);
    }

    async fn shutdown_lets_programs_end_in_order(guest: Guest) {
        let script = "trap 'sleep 0.3; echo last; exit 3' TERM; echo ready; while :; do sleep 0.01; done";
        let mut process = guest.spawn(["sh", "-c", script]).await;
        let mut stdout = BufReader::new(process.stdout.take().unwrap());
        let mut line = String::new();
        within(stdout.read_line(&mut line)).await.unwrap();
        let (shutdown, read) = tokio::join!(guest.link.shutdown(Duration::from_secs(30)), stdout.read_line(&mut line));
        shutdown.unwrap();
        read.unwrap();
        assert_eq!(line, "ready\nlast\n");
        assert_eq!(within(process.wait()).await.unwrap().code(), Some(3));
        let status = guest.exit().await;
        assert!(status.success(), "{status}");
    }
}
