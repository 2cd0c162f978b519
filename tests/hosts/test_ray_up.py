"""cluster.yaml as a user has it: `ray up` over SSH, a run over both hosts one of which loses Ray, and `ray down`.

Each host has processes of its own: the `ray stop` of `ray up` and `ray down` ends no other Ray of the machine. Its SSH
server, its keys and its user exist in its namespaces alone: /etc and /run of the machine do not change.
"""

import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml
from network import RAY_STARTS, SMALL, Host, Network, network, why_none

from shoal_program import END_S, ROOT, STATE_S, Program
from waiting import wait_for, wait_until_none

USER = "shoal"
_SERVER = "/usr/sbin/sshd"  # it wants its own full path
_KEY = ".ssh/id_ed25519"
# The launcher, Ray and Shoal write to /tmp. Of the real one a host has the folders of the test and of the programs.
_SEPARATE = """\
set -e
mount --bind /tmp /mnt
mount -t tmpfs tmp /tmp
for kept in {kept}; do mkdir -p "$kept"; mount --bind "/mnt${{kept#/tmp}}" "$kept"; done
umount /mnt
mount -t tmpfs run /run
mkdir /run/sshd
mount --bind {passwd} /etc/passwd
"""


def why_no_ssh() -> str:
    """Why there can be no SSH servers here; "" when there can."""
    missing = [tool for tool in (_SERVER, "ssh", "ssh-keygen", "rsync") if shutil.which(tool) is None]
    return f"apt install openssh-server openssh-client rsync: there is no {', '.join(missing)}" if missing else ""


class SshNetwork:
    """Adds hosts to a network: one with the user's key, then others whose SSH servers accept it."""

    def __init__(self, network: Network, folder: Path) -> None:
        self._network, self._folder = network, folder

    def add_user(self, name: str) -> Host:
        """The machine of a user, who has a new key."""
        host = self._add(name)
        self._make_key(host.home / _KEY)
        self._public = (host.home / f"{_KEY}.pub").read_text()
        return host

    def add_server(self, name: str) -> Host:
        """A host whose SSH server accepts the user's key, and nothing else."""
        host = self._add(name)
        ssh = host.home / ".ssh"
        self._make_key(key := ssh / "host_key")
        (ssh / "authorized_keys").write_text(self._public)
        options = {
            "ListenAddress": host.address,
            "HostKey": key,
            "PidFile": ssh / "sshd.pid",
            "AuthorizedKeysFile": ssh / "authorized_keys",
            "AuthenticationMethods": "publickey",
            "UsePAM": "no",
            "AllowUsers": USER,
        }
        (ssh / "sshd_config").write_text("".join(f"{name} {value}\n" for name, value in options.items()))
        host.run(_SERVER, "-f", str(ssh / "sshd_config"))  # it ends with the host
        wait_for((ssh / "sshd.pid").exists, what="an SSH server")
        return host

    def _add(self, name: str) -> Host:
        host = self._network.add(name)
        passwd = self._folder / f"{name}.passwd"  # by it SSH finds the user's home, and root's is as it was
        passwd.write_text(f"{USER}:*:0:0::{host.home}:/bin/bash\n{Path('/etc/passwd').read_text()}")
        kept = [str(path) for path in (self._folder, ROOT, Path(sys.prefix)) if path.is_relative_to("/tmp")]
        host.run("bash", "-c", _SEPARATE.format(kept=shlex.join(kept), passwd=shlex.quote(str(passwd))))
        return host

    @staticmethod
    def _make_key(file: Path) -> None:
        file.parent.mkdir(mode=0o700, exist_ok=True)
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(file)], check=True, timeout=600)


WHY_NONE = why_none() or why_no_ssh()
pytestmark = [pytest.mark.skipif(bool(WHY_NONE), reason=WHY_NONE), pytest.mark.timeout(3600)]
# How long Ray waits before it takes a host for lost, and the head for gone, and for the next look at the hosts.
SOONER = {
    "RAY_health_check_period_ms": 1000,
    "RAY_gcs_rpc_server_reconnect_timeout_s": 10,
    "AUTOSCALER_HEARTBEAT_TIMEOUT_S": 1,
    "AUTOSCALER_UPDATE_INTERVAL_S": 1,
}
HELD_STEP, LAST_STEP = 20, 40


@dataclass
class Hosts:
    laptop: Host
    head: Host
    worker: Host
    shared: Path

    @property
    def file(self) -> Path:
        return self.laptop.home / "cluster.yaml"

    @property
    def environment(self) -> dict[str, str]:
        """The laptop's: it does not see what the hosts share."""
        return {"SHOAL_HOME": str(self.laptop.home / ".shoal")}

    def type(self, *words: str) -> str:
        """What a user types on the laptop, in the folder of cluster.yaml. Returns what is printed."""
        # SSH connections stay for some seconds, and would keep a pipe open.
        script = f"{shlex.join(words)} > ~/printed 2>&1; status=$?; cat ~/printed; exit $status"
        command = ["env", "-C", str(ROOT), *(f"{name}={value}" for name, value in self.environment.items())]
        return self.laptop.run(*command, "bash", "-c", script)


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Hosts]:
    with network(tmp_path) as made:
        reached = SshNetwork(made, tmp_path)
        laptop = reached.add_user("laptop")
        yield Hosts(laptop, reached.add_server("head"), reached.add_server("worker"), tmp_path / "shared")


def fill_in(hosts: Hosts) -> None:
    """The user's values; the environment of the tests instead of one that pip would download."""
    cluster = yaml.safe_load((ROOT / "cluster.yaml").read_text())
    cluster["provider"].update(head_ip=hosts.head.address, worker_ips=[hosts.worker.address])
    cluster["auth"].update(ssh_user=USER, ssh_private_key="~/.ssh/id_ed25519")
    commands = cluster["setup_commands"]
    downloads = [command for command in commands if "-m venv" in command or "pip install" in command]
    assert len(downloads) == 2
    exports = [f"SHOAL_HOME={hosts.shared}", *(f"{name}={value}" for name, value in SOONER.items())]
    cluster["setup_commands"] = [
        f"ln -sfn {shlex.quote(sys.prefix)} ~/shoal-venv",
        *(command for command in commands if command not in downloads),
        f"printf 'export %s\\n' {shlex.join(exports)} >> ~/shoal-host.env",
    ]
    for role in ("head", "worker"):
        starts = cluster[f"{role}_start_ray_commands"]
        starts[1] = starts[1].replace("ray start", f"ray start {SMALL.format(num_cpus=2)}")
    hosts.file.write_text(yaml.safe_dump(cluster))


def bring_up(hosts: Hosts) -> None:
    hosts.type(sys.executable, "-c", "from shoal.home import ray_token_path; print(ray_token_path())")
    for attempt in range(1, RAY_STARTS + 1):
        try:
            hosts.type("ray", "up", "--yes", str(hosts.file))
            break
        except AssertionError as error:
            if attempt == RAY_STARTS or "timed out during startup" not in "".join(error.__notes__):
                raise
    both = ". ~/shoal-host.env; until ray status | grep /4.0.CPU; do sleep 1; done"
    hosts.type("ray", "exec", str(hosts.file), both)


def list_ray(host: Host) -> list[str]:
    """Ray's processes there, and what waits for their end."""
    lines = host.run("ps", "-eo", "args").splitlines()
    return [line for line in lines if "/ray/" in line or "ray::" in line or "tail --pid" in line]


def train(hosts: Hosts) -> Program:
    """A run of three ranks, which are more than one host has CPUs for. Rank 0 waits at `HELD_STEP`."""
    shutil.copytree(ROOT / "jobs", hosts.laptop.project / "jobs")
    shutil.copy(ROOT / "tests/train_task.py", hosts.laptop.project)
    notes = hosts.shared / "notes"
    notes.mkdir()
    words = ["task=train_task.py:Toy", f"args.notes={notes}", "args.fault=wait", f"args.fault_step={HELD_STEP}"]
    words += ["parallel=ddp", "workers=3", "batch_size=24", f"stop.steps={LAST_STEP}", "checkpoint.every_steps=10"]
    command = ["shoal", "run", "train", *words, "--address", "http://127.0.0.1:8265"]
    return hosts.laptop.start(command, hosts.environment)


@pytest.mark.soak
def test_a_run_goes_on_after_ray_was_lost_on_a_host_and_ray_down_leaves_nothing(hosts: Hosts) -> None:
    fill_in(hosts)
    bring_up(hosts)
    for host in (hosts.head, hosts.worker):
        variables = host.run("bash", "-c", "cat /proc/$(pgrep -x raylet)/environ").split("\0")
        assert not [each for each in variables if each.startswith("OMP_NUM_THREADS")]
    tunnel = "ssh -fN -o StrictHostKeyChecking=accept-new -L 8265:127.0.0.1:8265"
    hosts.type(*tunnel.split(), f"{USER}@{hosts.head.address}")
    with train(hosts) as training:
        training.wait_until((hosts.shared / "notes/failed").exists, f"step {HELD_STEP}")
        hosts.worker.run("bash", "-c", "kill -KILL $(pgrep -x raylet)")
        training.wait_for_line("workers were lost after step")
        (hosts.shared / "notes/go").touch()
        assert training.wait(STATE_S + END_S) == 0
    assert f": {LAST_STEP} steps" in training.said
    steps = (hosts.shared / "notes/samples-0.jsonl").read_text().splitlines()
    assert LAST_STEP <= len(steps) < HELD_STEP + LAST_STEP, "it has gone on from a checkpoint"
    assert len(list_ray(hosts.worker)) > 1, "the head has started Ray there again"
    hosts.type("ray", "down", "--yes", str(hosts.file))
    assert not list_ray(hosts.head)
    wait_until_none(lambda: list_ray(hosts.worker), STATE_S, "processes of Ray")
