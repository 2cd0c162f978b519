"""Hosts on one machine, for tests of what crosses a network: each has network, processes and shared memory of its own.

A host is a process in namespaces of its own, and what runs there is a child of its init: it dies with it, as with a
host that loses power. They share the file system, as hosts that mount the same one do, but for /dev/shm and Ray's
folder; or nothing: then each has a disk of its own, which is lost with it, and what is installed can only be read.
Nothing of this is visible outside, and all of it ends with the process that made it, however that ends.
"""

import fcntl
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path

import yaml

from shoal_program import ROOT, Program

RAYS = Path("/tmp/ray")  # where each host mounts a folder of its own
NETWORK = "198.18.7"  # of RFC 2544, for tests of networks
# Bash reaps whom their parents have left, and ends, and with it the host, when nobody holds its standard input.
# No name server is reached from there: a query would only take its time.
_INIT = (
    "set -e; hostname {name}; mount -t tmpfs ray /tmp/ray; mount -t tmpfs shm /dev/shm;"
    " mount --bind /dev/null /etc/resolv.conf; {disk} mkdir -p {home}/project; echo up; read -r"
)
# What is mounted can only be read, but for the kernel's own and its own. A disk hides the folder of all hosts.
_OWN_DISK = (
    'for each in $(findmnt -rno TARGET); do case "$each" in /proc*|/sys*|/dev*|/tmp/ray|/etc/resolv.conf) ;;'
    ' *) mount -o remount,bind,ro "$each";; esac; done; mount -t tmpfs disk {folder};'
)
SMALL = "--num-cpus={num_cpus} --object-store-memory=300000000"
LIMIT_S, GRACE_S = 800.0, 60.0
# Nothing is heard of a host without power: how long it is waited for, five times; else 10 s.
_PATIENCE = {"RAY_health_check_timeout_ms": "3000"}
RAY_STARTS = 4  # Ray gives up a start of its own after 30 s, which a machine that others use takes


def why_none() -> str:
    """Why there can be no hosts here; "" when there can."""
    if os.geteuid() != 0:
        return "hosts are namespaces, which take root to make"
    tools = ("ip", "unshare", "findmnt", "nsenter", "pgrep", "hostname")
    missing = [tool for tool in tools if shutil.which(tool) is None]
    if missing:
        return f"apt install iproute2 util-linux procps hostname: there is no {', '.join(missing)}"
    may = subprocess.run(["unshare", "--net", "--mount", "--pid", "--fork", "true"], capture_output=True, check=False)
    return "" if may.returncode == 0 else "namespaces cannot be made here, for all that this is root"


class Host:
    """One of them. `home` is its user's, whose programs run in `project`; the others reach it at `address`.

    files: `home`, from outside
    """

    def __init__(self, name: str, address: str, home: Path, init: int, environment: Mapping[str, str]) -> None:
        self.name = name
        self.address = address
        self.home = home
        self.project, self.files = home / "project", Path(f"/proc/{init}/root{home}")
        self._init, self._environment = init, environment

    def command(self, words: Sequence[str]) -> list[str]:
        """What runs `words` there, from here."""
        spaces = ["nsenter", "-t", str(self._init), "-m", "-u", "-i", "-n", "-p"]
        return [*spaces, "--", "env", "-C", str(self.project), *words]

    def kill(self) -> None:
        """All of its processes, at once. The host stays, and its files."""
        subprocess.run(self.command(["bash", "-c", "kill -KILL -1"]), check=True, timeout=60)

    def environment(self) -> dict[str, str]:
        """Of a user there: what is not said here, nobody has set."""
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        kept = {name: os.environ[name] for name in ("PYTHONPATH", "LANG") if name in os.environ}
        return {**kept, "PATH": path, "HOME": str(self.home), "PYTHONUNBUFFERED": "1", **self._environment}

    def start(
        self,
        words: Sequence[str],
        env: Mapping[str, str] | None = None,
        limit_s: float = LIMIT_S,
        stdin: int = subprocess.DEVNULL,
    ) -> Program:
        """A program there, for a `with`. It is ended there after `limit_s`: whoever waits for it here, and could be
        killed, is only its herald."""
        there = self.command(["timeout", "--kill-after=5", f"{limit_s:g}", *words])
        return Program(there, {**self.environment(), **(env or {})}, stdin=stdin)

    def run(self, *words: str, timeout_s: float = LIMIT_S) -> str:
        """A program there, to its end; what it said. Raises AssertionError when it failed."""
        with self.start(words, limit_s=timeout_s) as program:
            assert program.wait(timeout_s + GRACE_S) == 0
            return program.said


class Network:
    """A switch and the hosts at it.

    shared:      what all hosts have for $SHOAL_HOME; None: hosts have a disk each, and no other folder to write to
    environment: of the users of all hosts
    """

    def __init__(self, shared: Path | None, folder: Path) -> None:
        self._shared, self.folder = shared, folder
        self.environment = {} if shared is None else {"SHOAL_HOME": str(shared)}
        self._inits: dict[str, subprocess.Popen[str]] = {}
        self._ending = ExitStack()
        with ExitStack() as on_failure:
            on_failure.callback(self.close)
            self._switch = self._begin("switch", ["unshare", "--net", "bash", "-c", "echo up; read -r"])
            self._on_switch("ip", "link", "add", "switch", "type", "bridge")
            self._on_switch("ip", "link", "set", "switch", "up")
            on_failure.pop_all()

    def add(self, name: str) -> Host:
        """A host that is up, and reached by the others at its address."""
        home = self.folder / (name if self._shared else "user")
        disk = "" if self._shared else _OWN_DISK.format(folder=self.folder)
        init_words = _INIT.format(name=name, home=home, disk=disk)
        spaces = ["--net", "--mount", "--uts", "--ipc", "--pid", "--fork", "--mount-proc", "--kill-child"]
        self._inits[name] = self._begin(name, ["unshare", *spaces, "bash", "-c", init_words])
        init = int(_output("pgrep", "-P", str(self._inits[name].pid)))
        address = f"{NETWORK}.{9 + len(self._inits)}"
        port, here = f"to-{name}", ["nsenter", "-t", str(init), "-n", "ip"]
        self._on_switch("ip", "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", str(init))
        self._on_switch("ip", "link", "set", port, "master", "switch", "up")
        for words in ("link set lo up", "link set eth0 up", f"addr add {address}/24 dev eth0"):
            _output(*here, *words.split())
        _output(*here, *f"route add default via {NETWORK}.1".split())  # by it Ray finds its own address
        own = {} if self._shared else {"TMPDIR": str(RAYS)}
        return Host(name, address, home, init, own | self.environment)

    def cut(self, host: Host) -> None:
        """Its link: it goes on, and nobody on the network hears a word of it."""
        self._on_switch("ip", "link", "set", f"to-{host.name}", "down")

    def power_off(self, host: Host) -> None:
        """All at once, and nobody on the network hears a word of it."""
        self.cut(host)
        self._end(self._inits[host.name])

    def close(self) -> None:
        self._ending.close()

    def _begin(self, name: str, words: Sequence[str]) -> subprocess.Popen[str]:
        holder = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._ending.callback(self._end, holder)
        assert holder.stdout.readline() == "up\n", f"{name} did not come up"
        return holder

    @staticmethod
    def _end(holder: subprocess.Popen[str]) -> None:
        holder.kill()
        holder.communicate()

    def _on_switch(self, *words: str) -> None:
        _output("nsenter", "-t", str(self._switch.pid), "-n", *words)


def _output(*words: str) -> str:
    done = subprocess.run(words, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, f"{shlex.join(words)}: {done.stderr}"
    return done.stdout


@contextmanager
def network(folder: Path, *, has_disks: bool = False) -> Iterator[Network]:
    """A network without hosts, whose files are in `folder`; what they share is `folder/shared`, unless they have disks
    of their own there."""
    if not has_disks:
        (folder / "shared").mkdir()
    with _hold_mount_point(), closing(Network(None if has_disks else folder / "shared", folder)) as made:
        yield made


@contextmanager
def _hold_mount_point() -> Iterator[None]:
    """Remove `RAYS` after its last network: that would unmount what the hosts of others have there, Ray's files."""
    RAYS.mkdir(exist_ok=True)
    mount_point = os.open(RAYS, os.O_RDONLY)
    try:
        fcntl.flock(mount_point, fcntl.LOCK_SH)
        yield
    finally:
        with suppress(OSError):  # another network, or somebody else's Ray is there
            fcntl.flock(mount_point, fcntl.LOCK_EX | fcntl.LOCK_NB)
            RAYS.rmdir()
        os.close(mount_point)


def start_ray(host: Host, head: Host, num_cpus: int = 2) -> None:
    """By the commands of cluster.yaml, without what its launcher does."""
    cluster = yaml.safe_load((ROOT / "cluster.yaml").read_text())
    if not (venv := host.files / "shoal-venv").exists():
        venv.symlink_to(sys.prefix)
    if host is not head and "SHOAL_HOME" not in host.environment():  # file_mounts of cluster.yaml copies it
        (own := host.files / ".shoal").mkdir(mode=0o700)
        (own / "ray-token").touch(0o600)
        (own / "ray-token").write_bytes((head.files / ".shoal/ray-token").read_bytes())
    host_environment = next(line for line in cluster["setup_commands"] if "host_environment" in line)
    in_ray = "shoal.cluster.host_environment /tmp/ray/ha"  # a folder that each host has for itself
    patience = " ".join(f"{name}={value}" for name, value in _PATIENCE.items())
    more = f" && echo export {patience} >> ~/shoal-host.env"
    host.run("bash", "-c", host_environment.replace("shoal.cluster.host_environment", in_ray) + more)
    kind = "head" if host is head else "worker"
    end, start, *_ = cluster[f"{kind}_start_ray_commands"]
    small = SMALL.format(num_cpus=num_cpus)
    start = re.sub(r"--autoscaling-config=\S+| \|\| ray stop", "", start).replace("ray start", f"ray start {small}")
    for attempt in range(1, RAY_STARTS + 1):
        try:
            host.run("bash", "-c", f"cd; export RAY_HEAD_IP={head.address}; {start}")
            return
        except AssertionError as error:
            if attempt == RAY_STARTS or "timed out during startup" not in "".join(error.__notes__):
                raise
            host.run("bash", "-c", f"cd; {end}")  # it sees this host's processes alone
