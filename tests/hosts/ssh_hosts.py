"""Hosts with SSH servers, for tests of Ray's cluster launcher. Each has a folder /tmp of its own.

Server, keys and user exist in the host's namespaces alone: /etc and /run of the machine do not change.
"""

from __future__ import annotations

import shlex
import shutil
import subprocess
import sys
from pathlib import Path

from network import Host, Network

from shoal_program import ROOT
from waiting import wait_for

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
