"""The official Python SDK against the emulator: what it expects of E2B, the emulator must do.

Prints one line per check, `ok NAME` or `FAILED NAME: why`, and a JSON object of results for the differential test.
Exits with 1 if a check failed. Reads the usual variables (E2B_API_KEY, E2B_API_URL, E2B_SANDBOX_URL).
"""

import asyncio
import json
import os
import sys
import time
import urllib.error
import urllib.request

from e2b import (
    AsyncSandbox,
    CommandExitException,
    FileNotFoundException,
    InvalidArgumentException,
    NotFoundException,
    PtySize,
    Sandbox,
    SandboxException,
    Template,
    TimeoutException,
)

checks = 0
failures = []
results = {}


def check(name, condition, detail=""):
    global checks
    checks += 1
    if condition:
        print(f"ok {name}")
    else:
        failures.append(name)
        print(f"FAILED {name}: {detail}")


def equal(name, got, wanted):
    check(name, got == wanted, f"want {wanted!r}, got {got!r}")


def raises(name, kind, call):
    try:
        value = call()
    except kind:
        check(name, True)
    except Exception as error:  # noqa: BLE001
        check(name, False, f"want {kind.__name__}, got {type(error).__name__}: {error}")
    else:
        check(name, False, f"want {kind.__name__}, got {value!r}")


def run(box, script, **options):
    """A command's result, whatever its exit code."""
    try:
        return box.commands.run(script, user="root", timeout=30, **options)
    except CommandExitException as error:
        return error


def lifecycle():
    box = Sandbox.create(timeout=120, metadata={"purpose": "sdk", "odd": "a b&c=d/é"}, envs={"CREATED": "yes"})
    check("create gives an id", box.sandbox_id.startswith("i"))
    check("a fresh box runs", box.is_running())
    info = box.get_info()
    equal("info has the id", info.sandbox_id, box.sandbox_id)
    equal("info has the labels", info.metadata, {"purpose": "sdk", "odd": "a b&c=d/é"})
    equal("info says running", str(getattr(info.state, "value", info.state)), "running")
    check("info has an end", info.end_at > info.started_at)
    before = info.end_at
    box.set_timeout(600)
    check("set_timeout moves the end", box.get_info().end_at > before)

    from e2b import SandboxQuery

    listed = Sandbox.list(query=SandboxQuery(metadata={"odd": "a b&c=d/é"})).next_items()
    equal("list finds it by its labels", [found.sandbox_id for found in listed], [box.sandbox_id])
    listed = Sandbox.list(query=SandboxQuery(metadata={"odd": "other"})).next_items()
    equal("list finds nothing by other labels", listed, [])
    others = [Sandbox.create(timeout=60, metadata={"page": "1"}) for _ in range(3)]
    pages = Sandbox.list(query=SandboxQuery(metadata={"page": "1"}), limit=2)
    first = pages.next_items()
    equal("a page has its limit", len(first), 2)
    check("there is another page", pages.has_next)
    second = pages.next_items()
    equal("the last page has the rest", len(second), 1)
    equal("pages do not overlap", len({found.sandbox_id for found in first + second}), 3)
    for other in others:
        check("kill says that it was there", other.kill())
    check("kill says that it is gone", not others[0].kill())
    check("a killed box does not run", not others[0].is_running())

    again = Sandbox.connect(box.sandbox_id)
    equal("connect gives the same box", again.sandbox_id, box.sandbox_id)
    equal("connect can run", again.commands.run("echo again").stdout, "again\n")
    raises("connect to nothing", SandboxException, lambda: Sandbox.connect("i00000000000000000000"))
    raises("a lifetime beyond the plan", SandboxException, lambda: Sandbox.create(timeout=10 * 86400))
    raises("a template that does not exist", SandboxException, lambda: Sandbox.create("no-such-template", timeout=60))
    return box


def commands(box):
    result = run(box, "echo out; echo err >&2")
    equal("stdout", result.stdout, "out\n")
    equal("stderr", result.stderr, "err\n")
    equal("exit code 0", result.exit_code, 0)
    results["two streams"] = [result.stdout, result.stderr, result.exit_code]
    result = run(box, "exit 7")
    equal("exit code 7", result.exit_code, 7)
    results["exit 7"] = result.exit_code
    result = run(box, "no-such-program-at-all")
    equal("a missing program is 127", result.exit_code, 127)
    equal("variables of the call", run(box, "echo $WORD", envs={"WORD": "a b*"}).stdout, "a b*\n")
    results["variable"] = run(box, "printf %s \"$WORD\"", envs={"WORD": "a b*é"}).stdout
    equal("variables of the box", run(box, "echo $CREATED").stdout, "yes\n")
    equal("variables of the provider", run(box, "echo $E2B_SANDBOX_ID").stdout, box.sandbox_id + "\n")
    equal("a working directory", run(box, "pwd", cwd="/usr").stdout, "/usr\n")
    results["cwd"] = run(box, "pwd", cwd="/usr").stdout
    raises("a missing directory", InvalidArgumentException, lambda: run(box, "true", cwd="/no/such/dir"))
    equal("root is root", run(box, "id -un").stdout, "root\n")
    equal("the default user is user", box.commands.run("id -un").stdout, "user\n")
    big = run(box, "head -c 300000 /dev/zero | tr '\\0' x")
    equal("300 kB of output", len(big.stdout), 300_000)
    results["big"] = len(big.stdout)
    equal("unicode", run(box, "printf 'é€😀'").stdout, "é€😀")
    results["unicode"] = run(box, "printf 'é€😀'").stdout
    seen = []
    run(box, "for n in 1 2 3; do echo $n; sleep 0.05; done", on_stdout=seen.append)
    equal("output while it runs", "".join(seen), "1\n2\n3\n")
    raises("a timeout", TimeoutException, lambda: box.commands.run("sleep 30", timeout=1))
    gone = run(box, "pgrep -f 'sleep 30$' | wc -l").stdout.strip()
    equal("a timed out command is killed", gone, "0")

    handle = box.commands.run("echo $$; sleep 30", background=True, user="root")
    check("a background command has an id", handle.pid > 0)
    check("it is listed", handle.pid in [found.pid for found in box.commands.list()])
    check("it is killed", handle.kill())
    try:
        handle.wait()
        check("a killed command says so", False, "no exception")
    except CommandExitException as error:
        check("a killed command says so", error.exit_code != 0)
        results["killed"] = error.exit_code
    check("kill of nothing", not box.commands.kill(4_000_000))

    handle = box.commands.run("cat; echo end", background=True, stdin=True, user="root")
    box.commands.send_stdin(handle.pid, "to cat\n")
    box.commands.close_stdin(handle.pid)
    result = handle.wait()
    equal("stdin and its end", result.stdout, "to cat\nend\n")
    results["stdin"] = result.stdout
    raises("stdin of nothing", NotFoundException, lambda: box.commands.send_stdin(4_000_000, "x"))

    handle = box.commands.run("sleep 0.3; echo late", background=True, user="root")
    handle.disconnect()
    again = box.commands.connect(handle.pid)
    equal("a command is found again", again.wait().stdout, "late\n")


def files(box):
    root = "/root/sdk"
    info = box.files.write(f"{root}/deep/down/a b.txt", "content", user="root")
    equal("a write says where", info.path, f"{root}/deep/down/a b.txt")
    equal("text comes back", box.files.read(f"{root}/deep/down/a b.txt", user="root"), "content")
    results["text"] = box.files.read(f"{root}/deep/down/a b.txt", user="root")
    every = bytes(range(256)) * 40
    box.files.write(f"{root}/bytes", every, user="root")
    back = bytes(box.files.read(f"{root}/bytes", format="bytes", user="root"))
    check("bytes come back", back == every)
    results["bytes"] = back.hex()[:64]
    streamed = b"".join(box.files.read(f"{root}/bytes", format="stream", user="root"))
    check("bytes are streamed", streamed == every)
    box.files.write(f"{root}/bytes", b"", user="root")
    equal("a write replaces", bytes(box.files.read(f"{root}/bytes", format="bytes", user="root")), b"")
    raises("a missing file", FileNotFoundException, lambda: box.files.read(f"{root}/none", user="root"))
    raises("a directory is no file", InvalidArgumentException, lambda: box.files.read(root, user="root"))
    check("exists", box.files.exists(f"{root}/bytes", user="root"))
    check("does not exist", not box.files.exists(f"{root}/none", user="root"))
    check("a directory is made", box.files.make_dir(f"{root}/dir/sub", user="root"))
    check("a directory is there", not box.files.make_dir(f"{root}/dir/sub", user="root"))
    names = sorted(entry.name for entry in box.files.list(root, user="root"))
    equal("a directory is listed", names, ["bytes", "deep", "dir"])
    results["names"] = names
    deep = sorted(entry.path for entry in box.files.list(root, depth=3, user="root"))
    check("a tree is listed", f"{root}/deep/down/a b.txt" in deep)
    raises("nothing is listed", NotFoundException, lambda: box.files.list(f"{root}/none", user="root"))
    moved = box.files.rename(f"{root}/bytes", f"{root}/moved", user="root")
    equal("a file is moved", moved.path, f"{root}/moved")
    facts = box.files.get_info(f"{root}/deep/down/a b.txt", user="root")
    equal("facts: size", facts.size, 7)
    equal("facts: owner", facts.owner, "root")
    results["size"] = facts.size
    run(box, f"ln -s '{root}/moved' {root}/link; chmod 751 {root}/moved")
    facts = box.files.get_info(f"{root}/link", user="root")
    equal("facts: link", facts.symlink_target, f"{root}/moved")
    results["link"] = facts.symlink_target
    equal("facts: mode", box.files.get_info(f"{root}/moved", user="root").mode, 0o751)
    results["mode"] = 0o751
    box.files.remove(f"{root}/dir", user="root")
    check("a directory is removed", not box.files.exists(f"{root}/dir", user="root"))
    box.files.remove(f"{root}/none", user="root")
    check("nothing is removed silently", True)
    written = box.files.write_files(
        [{"path": f"{root}/one", "data": "1"}, {"path": f"{root}/two", "data": b"2"}], user="root"
    )
    equal("two files at once", [entry.name for entry in written], ["one", "two"])
    packed = "packed " * 1000
    box.files.write(f"{root}/packed", packed, user="root", gzip=True)
    equal("a compressed upload", box.files.read(f"{root}/packed", user="root"), packed)
    equal("a compressed download", box.files.read(f"{root}/packed", user="root", gzip=True), packed)
    signed(box, root)
    watches(box, root)
    box.files.write("in-my-home", "x")
    check("a relative path is in the home", box.files.exists("/home/user/in-my-home"))


def fetch(url, data=None, headers={}):
    """The status and body of a plain request, without the client and its headers."""
    request = urllib.request.Request(url, data=data, headers={"E2b-Sandbox-Id": headers.pop("id"), **headers})
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        return error.code, error.read()


def signed(box, root):
    def ask(url, data=None):
        kind = {"Content-Type": "application/octet-stream"} if data is not None else {}
        return fetch(url, data, {"id": box.sandbox_id, **kind})

    url = box.upload_url(f"{root}/signed", user="root")
    equal("a signed upload", ask(url, b"by url")[0], 200)
    url = box.download_url(f"{root}/signed", user="root", use_signature_expiration=600)
    equal("a signed download", ask(url), (200, b"by url"))
    equal("a signature is for one path", ask(url.replace("signed", "packed", 1))[0], 401)
    equal("a download without a signature", ask(url.split("&signature")[0])[0], 401)


def watches(box, root):
    box.files.make_dir(f"{root}/watched", user="root")
    raises("nothing is watched", NotFoundException, lambda: box.files.watch_dir(f"{root}/none", user="root"))
    handle = box.files.watch_dir(f"{root}/watched", user="root", recursive=True)
    run(box, f"cd {root}/watched; echo 1 >a; mkdir d; mv a b; rm b")
    seen = []
    for _ in range(100):
        seen += [(event.type.value, event.name) for event in handle.get_new_events()]
        if ("remove", "b") in seen:
            break
        time.sleep(0.05)
    for wanted in [("create", "a"), ("write", "a"), ("create", "d"), ("rename", "a"), ("create", "b"), ("remove", "b")]:
        check(f"a change is seen: {wanted}", wanted in seen, seen)
    run(box, f"echo 2 >{root}/watched/d/deep")
    for _ in range(100):
        seen += [(event.type.value, event.name) for event in handle.get_new_events()]
        if ("create", "d/deep") in seen:
            break
        time.sleep(0.05)
    check("a change further down is seen", ("create", "d/deep") in seen, seen)
    handle.stop()
    raises("a stopped watch", SandboxException, handle.get_new_events)


async def followed():
    box = await AsyncSandbox.create(timeout=60)
    seen = []
    handle = await box.files.watch_dir("/tmp", on_event=lambda event: seen.append((event.type.value, event.name)))
    await box.files.write("/tmp/new", "x")
    for _ in range(100):
        if ("create", "new") in seen:
            break
        await asyncio.sleep(0.05)
    check("a change is told", ("create", "new") in seen, seen)
    await handle.stop()
    await box.kill()


def network(box):
    box.update_network({"allow_out": ["example.com", "1.1.1.1"], "deny_out": ["0.0.0.0/0"]})
    check("an allow list with its floor", True)
    raises(
        "an allow list of names without its floor",
        SandboxException,
        lambda: box.update_network({"allow_out": ["example.com"]}),
    )
    raises("a block list of names", SandboxException, lambda: box.update_network({"deny_out": ["example.com"]}))
    box.update_network({"allow_internet_access": True})
    check("open again", True)
    check("a host of a port", box.get_host(8000).startswith(f"8000-{box.sandbox_id}."))


def terminals(box):
    seen = bytearray()
    shell = box.pty.create(PtySize(rows=30, cols=100), user="root", cwd="/")
    resized = False

    def on_pty(data):
        nonlocal resized
        seen.extend(data)
        if b"30 100" in seen and not resized:
            resized = True
            box.pty.resize(shell.pid, PtySize(rows=40, cols=120))
            box.pty.send_stdin(shell.pid, b"stty size; exit 3\n")

    box.pty.send_stdin(shell.pid, b"stty size; tty\n")
    try:
        shell.wait(on_pty=on_pty)
        code = 0
    except CommandExitException as error:
        code = error.exit_code
    equal("a shell at a terminal ends with its code", code, 3)
    check("a terminal has its size", b"30 100" in seen, seen)
    check("a terminal is resized", b"40 120" in seen, seen)
    check("it is a terminal", b"/dev/pts/" in seen, seen)
    other = box.pty.create(PtySize(rows=24, cols=80), user="root")
    check("a terminal's shell is killed", box.pty.kill(other.pid))
    raises("and ends by that", CommandExitException, other.wait)
    check("it is gone", not box.pty.kill(other.pid))


def templates():
    name = f"sdk-{int(time.time() * 1000)}"
    check("a template is not there", not Template.exists(f"{name}:default"))
    lines = []
    built = Template.build(
        Template().from_image("debian:12"), name, cpu_count=2, memory_mb=512, on_build_logs=lambda line: lines.append(str(line))
    )
    check("a build has an id", bool(built.template_id))
    check("a build has a log", len(lines) > 0)
    check("a template is there", Template.exists(f"{name}:default"))
    box = Sandbox.create(name, timeout=60)
    equal("a box of it runs", box.commands.run("echo built").stdout, "built\n")
    box.kill()
    try:
        Template.build(Template().from_image(os.environ.get("BAD_IMAGE", "bad-image")), f"{name}-bad")
        check("a failing build fails", False, "no exception")
    except Exception as error:  # noqa: BLE001
        check("a failing build fails", "no such image" in str(error), repr(error))
    check("a failed template is not there", not Template.exists(f"{name}-bad:default"))


def pause_and_resume():
    box = Sandbox.create(timeout=60)
    box.files.write("/root/kept", "kept", user="root")
    box.pause()
    check("a paused box does not run", not box.is_running())
    again = Sandbox.connect(box.sandbox_id)
    check("a resumed box runs", again.is_running())
    equal("files are kept", again.files.read("/root/kept", user="root"), "kept")
    check("it is killed", again.kill())


def main():
    box = lifecycle()
    try:
        commands(box)
        files(box)
        network(box)
        terminals(box)
    finally:
        box.kill()
    templates()
    pause_and_resume()
    asyncio.run(followed())
    key = os.environ["E2B_API_KEY"]
    raises("a wrong key", Exception, lambda: Sandbox.create(api_key=key[:-1] + "x", timeout=60))
    print(f"{checks} checks, {len(failures)} failed")
    print("RESULTS " + json.dumps(results, sort_keys=True))
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
