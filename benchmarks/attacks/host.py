"""Rows of other users of the host: sockets, ports, names, files, processes, and what a killed launcher leaves."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Final

from benchmarks.attacks.harness import AttackResult, AttackRow, AttackTarget
from pdserve.isolated.tied_program import session_of
from pdserve.launch.child import StartFailed
from pdserve.launch.ports import listeners
from pdserve.launch.running import Running
from pdserve.owned_folder import OwnedFolder

STRANGER: Final = 54_321  # a user id that owns nothing
ONLY_ROOT: Final = "skipped: only root can act as a second user (sudo python -m benchmarks.attack)"
_BECOME: Final = "os.setgroups([]); os.setgid(user); os.setuid(user)"


# ---- Row 3. The next line of defence is not reached here and is tested in tests/unit/router_io/test_forged_workers.py:
# a registered worker receives nothing before it has proven the secret.
#: Prints how each attempt ended.
_TRY: Final = f"""
import errno, json, os, socket, sys
user, path = int(sys.argv[1]), sys.argv[2]
{_BECOME}
folder = os.path.dirname(path)
attempts = {{
    "connect": lambda: socket.socket(socket.AF_UNIX).connect(path),
    "bind": lambda: socket.socket(socket.AF_UNIX).bind(path),
    "bind beside it": lambda: socket.socket(socket.AF_UNIX).bind(path + "2"),
    "unlink": lambda: os.unlink(path),
    "list the folder": lambda: os.listdir(folder),
    "open the folder to others": lambda: os.chmod(folder, 0o777),
    "move the folder": lambda: os.rename(folder, folder + "-moved"),
}}
ends = {{}}
for name, attempt in attempts.items():
    try:
        attempt(); ends[name] = "ok"
    except OSError as error:
        ends[name] = errno.errorcode[error.errno]
print(json.dumps(ends))
"""


def try_socket(path: str) -> dict[str, str]:
    """How the attempts of another user against the socket file `path` end."""
    command = [sys.executable, "-c", _TRY, str(STRANGER), path]
    ends: dict[str, str] = json.loads(subprocess.check_output(command, text=True))
    return ends


def redis_stranger(target: AttackTarget) -> AttackResult:
    """Another user tries to reach the embedded Redis, or to take its place, so that the router connects to a worker of
    the attacker's."""
    if os.geteuid() != 0:
        return AttackResult(attempts=0, rejected=0, note=ONLY_ROOT)
    ends = try_socket(target.address("redis"))
    errors = Counter(ends.values())
    return AttackResult(
        attempts=errors.total(),
        rejected=errors["EACCES"] + errors["EPERM"],
        errors=errors,
        complaints=[f"another user could {name}" for name, end in ends.items() if end == "ok"],
    )


# ---- Row 9. Attacks a cluster of its own, because the benchmark's cluster must keep running.
END_S: Final = 10.0
_SHARED: Final = Path("/dev/shm")
_ORPHAN: Final = (
    "import os, signal; from pdserve.owned_folder import OwnedFolder as F; F.make('ray'); os.kill(os.getpid(), 9)"
)


def killed_launcher(target: AttackTarget) -> AttackResult:
    """Looks for left processes and shared memory. A folder whose owner was killed must be deleted by the next start,
    and a folder of a running owner must stay."""
    with tempfile.TemporaryDirectory(prefix="pdserve-attack-") as parent:
        folder = Path(parent)
        env = {"TMPDIR": parent}
        shared = set(_SHARED.glob("*"))
        cluster = Running.start("--model", "toy", env=env)
        pids = cluster.pids()
        cluster.kill()
        _until(lambda: all(_has_ended(pid) for pid in pids.values()))
        complaints = [f"{name} outlived its launcher" for name, pid in pids.items() if not _has_ended(pid)]
        left = [path for path in set(_SHARED.glob("*")) - shared if "pdserve" in path.name]
        complaints += [f"{path} remained" for path in left]
        subprocess.run([sys.executable, "-c", _ORPHAN], env={**os.environ, **env}, check=False)
        orphans = list(folder.iterdir())  # the killed launcher's sockets, and the folder of _ORPHAN
        living = OwnedFolder.make("ray", folder)
        with Running.start("--model", "toy", env=env):
            if any(orphan.exists() for orphan in orphans):
                complaints.append("the next start left a folder without an owner")
            if not living.path.exists():
                complaints.append("the next start removed a folder of a living owner")
        living.remove()
    attempts = len(pids) + len(orphans) + 1
    return AttackResult(attempts=attempts, rejected=max(0, attempts - len(complaints)), complaints=complaints)


def _until(holds: Callable[[], bool]) -> None:
    ends_s = time.monotonic() + END_S
    while not holds() and time.monotonic() < ends_s:
        time.sleep(0.02)


def _has_ended(pid: int) -> bool:
    """A zombie has ended; its parent has not looked yet."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


# ---- Row 10
def proc_secrets(target: AttackTarget) -> AttackResult:
    """Secrets in /proc, on the command line and in the environment of every process of the cluster."""
    found: Counter[str] = Counter()
    complaints = []
    pids = {name: session_of(pid) for name, pid in target.cluster.pids().items()}
    environ = {pid: _read(pid, "environ") for group in pids.values() for pid in group}
    secrets = {"the callers' token": target.token.encode()}
    for text in environ.values():
        for variable in text.split(b"\0"):
            if variable.startswith(b"PDSERVE_CLUSTER_SECRET="):
                secrets["the cluster's secret"] = variable.partition(b"=")[2]
    if len(secrets) < 2:
        complaints.append(f"of two secrets only {sorted(secrets)} could be looked for")
    for name, group in pids.items():
        for pid in group:
            line = _read(pid, "cmdline")
            for what, secret in secrets.items():
                found["looked"] += 2
                if secret in line:
                    complaints.append(f"{what} is on the command line of {name}")
                if secret in environ[pid] and not _may_know(name, what):
                    complaints.append(f"{what} is in the environment of {name}")
    attempts = found["looked"]
    return AttackResult(attempts=attempts, rejected=attempts - len(complaints), complaints=complaints)


def _may_know(name: str, what: str) -> bool:
    """The router knows both, workers only the cluster's, Redis none."""
    return name == "router" or (name != "redis" and what != "the callers' token")


def _read(pid: int, name: str) -> bytes:
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes()
    except OSError:
        return b""  # it has ended


# ---- Row 11. Slow, because it starts a Ray cluster.
START_S: Final = 300.0
ASK_S: Final = 60.0
_STRANGER: Final = "import sys, ray; ray.init(sys.argv[1], logging_level='ERROR'); print('in')"


def ray_ports(target: AttackTarget) -> AttackResult:
    """The processes that `up --ray` starts must listen on loopback only, its control plane must reject a caller without
    the token, and only its user may read that token."""
    errors: Counter[str] = Counter()
    complaints = []
    with Running.start("--model", "toy", "--ray", timeout_s=START_S) as cluster:
        pids = session_of(cluster.pid("ray"))
        found = listeners(pids)
        complaints += [f"{one} can be reached by others" for one in found if not one.is_on_loopback]
        errors["on loopback"] = sum(one.is_on_loopback for one in found)
        if not {"gcs_server", "raylet"} <= {one.process for one in found}:
            complaints.append(f"gcs_server and raylet are not among {sorted({one.process for one in found})}")
        [control] = [one for one in found if one.process == "gcs_server"]
        errors[said := _ask_without_token(f"127.0.0.1:{control.port}")] += 1
        if said == "OK":
            complaints.append("Ray's control plane let a stranger in without a token")
        folder = _token_folder(pids)
        if folder is None or folder.stat().st_mode & 0o077:
            complaints.append("Ray's token is not in a folder of its user alone")
    return AttackResult(
        attempts=len(found) + 2, rejected=len(found) + 2 - len(complaints), errors=errors, complaints=complaints
    )


def _ask_without_token(address: str) -> str:
    environ = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    environ |= {"RAY_AUTH_MODE": "disabled", "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0", "HOME": "/nonexistent"}
    try:
        done = subprocess.run(
            [sys.executable, "-c", _STRANGER, address],
            env=environ,
            capture_output=True,
            text=True,
            timeout=ASK_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return "no answer"
    return "OK" if "in" in done.stdout.split() else "rejected"


def _token_folder(pids: list[int]) -> Path | None:
    for pid in pids:
        for one in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
            if one.startswith(b"RAY_AUTH_TOKEN_PATH="):
                return Path(one.partition(b"=")[2].decode()).parent
    return None


# ---- Row 20. A cluster of its own is killed part by part, because the benchmark's must not be restarted. Before the
# fix, the first bind succeeded and the gateway sent the attacker its callers' tokens.
#: Runs until its standard input is closed, and prints how often each attempt ended in what.
_TAKE: Final = f"""
import errno, json, os, select, socket, sys
user, port = map(int, sys.argv[1:])
{_BECOME}
ends, first = {{}}, True
while first or not select.select([sys.stdin], [], [], 0.005)[0]:
    first = False
    for host in ("127.0.0.1", "0.0.0.0", "::1", "::"):
        for options in range(4):
            with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as one:
                one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, options & 1)
                one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, options >> 1)
                try:
                    one.bind((host, port)); one.listen(); end = "ok"
                except OSError as error:
                    end = errno.errorcode[error.errno]
            ends[end] = ends.get(end, 0) + 1
print(json.dumps(ends))
"""


def take_port(port: int) -> subprocess.Popen[str]:
    """Another user, who binds the port with all options until its standard input is closed."""
    command = [sys.executable, "-c", _TAKE, str(STRANGER), str(port)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def taken_port(target: AttackTarget) -> AttackResult:
    """Another user binds the port of a process that has crashed, before it is restarted."""
    if os.geteuid() != 0:
        return AttackResult(attempts=0, rejected=0, note=ONLY_ROOT)
    errors: Counter[str] = Counter()
    with Running.start("--model", "toy", "--http", "0", "--http-process") as victim:
        for name in ("router", "gateway", "p0", "d0"):
            pid, port = victim.pid(name), int(victim.address(name).rpartition(":")[2])
            with take_port(port) as stranger:
                os.kill(pid, signal.SIGKILL)
                victim.wait_restarted(name, pid)
                errors.update(json.loads(stranger.communicate()[0]))
    taken = errors["ok"]
    return AttackResult(
        attempts=errors.total(),
        rejected=errors["EADDRINUSE"],
        errors=errors,
        complaints=[f"{taken} binds to a port of the cluster succeeded"] if taken else [],
    )


# ---- Row 21. Before the fix, `up` found no port and did not start.
PORTS: Final = range(20_000, 32_768)


def shared_names(target: AttackTarget) -> AttackResult:
    """The attacker binds the abstract socket names of all ports that a launcher chooses from."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    complaints: list[str] = []
    with contextlib.ExitStack() as taken:
        num_names = 0
        for port in PORTS:
            with contextlib.suppress(OSError):
                one = taken.enter_context(socket.socket(socket.AF_UNIX))
                one.bind(f"\0pdserve.port.{port}")
                num_names += 1
        try:
            with Running.start("--model", "toy", "--http", "0"):
                pass
        except StartFailed as error:
            complaints.append(f"the cluster did not start: {error}")
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return AttackResult(
        attempts=1,
        rejected=0 if complaints else 1,
        note=f"{num_names} of {len(PORTS)} abstract names were taken",
        complaints=complaints,
    )


# ---- Row 22
def log_links(target: AttackTarget) -> AttackResult:
    """A log folder and a recording's folder, in which the attacker has made links, a pipe and readable files."""
    errors: Counter[str] = Counter()
    complaints: list[str] = []
    with tempfile.TemporaryDirectory() as parent:
        victim = Path(parent, "victim")
        victim.write_text("precious")
        makes: tuple[Callable[[Path], object], ...] = (
            lambda file: os.symlink(victim, file),
            lambda file: os.link(victim, file),
            os.mkfifo,
        )
        for number, make in enumerate(makes):
            logs = Path(parent, f"logs{number}")
            logs.mkdir(mode=0o777)
            for name in ("p0.log", "run.jsonl"):
                make(logs / name)
            flags = [("--log-dir", str(logs))]
            if number != 1:  # an older recording is renamed, so a hard link is not written to
                flags.append(("--record", str(logs / "run.jsonl")))
            for flag in flags:
                try:
                    with Running.start("--model", "toy", *flag):
                        complaints.append(f"{flag[0]} wrote through a file of kind {number}")
                except StartFailed as error:
                    errors["ConfigError" if ": got " in str(error) else str(error)] += 1
        if victim.read_text() != "precious":
            complaints.append("the file behind the links has changed")
        logs = Path(parent, "logs")
        logs.mkdir(mode=0o777)
        with Running.start("--model", "toy", "--log-dir", str(logs), "--record", str(logs / "run.jsonl")):
            readable = [one.name for one in logs.iterdir() if one.stat().st_mode & 0o077]
        complaints += [f"others can read {name}" for name in readable]
    return AttackResult(attempts=errors.total(), rejected=errors["ConfigError"], errors=errors, complaints=complaints)


ROWS: Final = (
    AttackRow(number=3, name="another user and the embedded Redis", attack=redis_stranger),
    AttackRow(number=9, name="SIGKILL of a launcher", attack=killed_launcher),
    AttackRow(number=10, name="secrets in /proc", attack=proc_secrets),
    AttackRow(number=11, name="ports of a local Ray", attack=ray_ports, is_slow=True),
    AttackRow(number=20, name="the port of a crashed process, by another user", attack=taken_port),
    AttackRow(number=21, name="names that all users share", attack=shared_names),
    AttackRow(number=22, name="links and pipes in the folder of logs", attack=log_links),
)
