"""Every command of docs/commands.md and every view of the page, in a process whose network is cut.

`python tests/offline.py FOLDER LOG` runs them in FOLDER; run it in a network namespace of its own.
Each Python process that is started from here, and this one, appends the connections that it tries
to LOG, and none is made but to this machine. Writes the exit status of each command as JSON, the
bytes of each view, and whether a connection elsewhere is refused by the system: then the network is
cut. A planted connection, of a process that is started from here, is the last thing tried.
"""

import contextlib
import fcntl
import http.client
import io
import json
import os
import re
import shlex
import socket
import struct
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ELSEWHERE = "192.0.2.1"  # an address for documentation, which nobody has
# put on the path of every process: it sees each call of Python's that looks for another machine
HOOK = """
import ipaddress, os, sys

def watch(event, given):
    if event in ("socket.connect", "socket.sendto", "socket.sendmsg"):
        where = given[1]
        if not isinstance(where, tuple) or ipaddress.ip_address(where[0]).is_loopback:
            return
    elif event in ("socket.getaddrinfo", "socket.gethostbyname", "socket.gethostbyaddr"):
        where = given[0]
        if where in (None, "", "127.0.0.1", "localhost"):
            return
    else:
        return
    with open(os.environ["CONNECTIONS"], "a") as log:
        log.write(f"{event} {where}\\n")
    raise PermissionError(f"{event} {where}")

sys.addaudithook(watch)
"""
# what makes an example short without another way through the code; of the demonstration, its tokens
SHORTER = {"bench": ["--seq", "64", "--rounds", "1"], "plan": ["--context", "16384"]}
DEMO_TOKENS = 64
PLANTED = f"import socket; socket.socket().connect(({ELSEWHERE!r}, 9))"


def examples():
    """The commands that the page shows, as lists of words, but for `explore`, which serves."""
    text = (ROOT / "docs" / "commands.md").read_text(encoding="utf-8")
    found = [shlex.split(line)[1:] for line in re.findall(r"^\$ (rotary .+)$", text, re.MULTILINE)]
    return [[*words, *SHORTER.get(words[0], [])] for words in found if words[0] != "explore"]


def loopback_up():
    """A new network namespace has 127.0.0.1, but it is down."""
    with socket.socket() as any_socket:
        up = struct.pack("16sH22x", b"lo", 0x41)  # IFF_UP, IFF_RUNNING
        fcntl.ioctl(any_socket, 0x8914, up)  # SIOCSIFFLAGS


def is_cut():
    """Whether the system itself refuses to send: asked without sending anything."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        try:
            any_socket.connect((ELSEWHERE, 9))  # of UDP: only looks for a way there
        except OSError:
            return True
    return False


def command(words):
    """The exit status of a command, in this process."""
    from rotary import cli, demo

    demo.SEQ = DEMO_TOKENS
    sys.argv = ["rotary", *words]
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            cli.main()
    except SystemExit as stop:
        return stop.code or 0
    return 0


def views(folder):
    """The page, in a process of its own as `rotary explore` starts it: the bytes of each view."""
    from rotary.explorer.views import VIEWS

    code = "from rotary.explorer import serve; serve(ready=lambda at: print(at, flush=True))"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as page:
        try:
            address = page.stdout.readline().strip()
            assert address.startswith("http://127.0.0.1:"), address
            connection = http.client.HTTPConnection("127.0.0.1", int(address[17:-1]), timeout=60)
            sizes = {}
            for name in VIEWS:
                body = json.dumps({"fields": {"view": name}})
                connection.request("POST", "/draw", body, {"content-type": "application/json"})
                answer = connection.getresponse()
                content = answer.read()
                assert answer.status == 200, (name, content[:200])
                sizes[name] = len(content)
            connection.request("GET", "/")
            sizes["/"] = len(connection.getresponse().read())
        finally:
            page.terminate()
    return sizes


def main(folder, log):
    hooks = folder / "hooks"
    hooks.mkdir()
    (hooks / "sitecustomize.py").write_text(HOOK)
    paths = [str(hooks), *filter(None, [os.environ.get("PYTHONPATH")])]
    os.environ |= {"CONNECTIONS": str(log), "PYTHONPATH": os.pathsep.join(paths)}
    cut = is_cut()
    if cut:
        loopback_up()
    exec(HOOK, {})
    os.chdir(folder)
    statuses = {" ".join(words): command(words) for words in examples()}
    sizes = views(folder)
    seen = log.read_text() if log.exists() else ""
    subprocess.run([sys.executable, "-c", PLANTED], stderr=subprocess.DEVNULL)
    result = {"cut": cut, "statuses": statuses, "views": sizes, "connections": seen,
              "planted": log.read_text().removeprefix(seen)}  # fmt: skip
    sys.stdout.write(json.dumps(result))


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
