"""Runs the steps of the Dockerfile where there is no Docker: in a fresh root of Debian; then a node and a job in it.

    python tests/image_root.py [FOLDER]        as root; takes debootstrap, 8 GB in FOLDER and several minutes

The base image is a Debian made by debootstrap. The instructions are carried out in namespaces of their own for mounts
and processes; the network and pip's settings are this machine's. At the end a head of Ray is started by the command of
a rendered manifest, as the image's user, and trains a recipe.
"""

import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from shoal.libs.kube.manifests import SET_ENVIRONMENT

ROOT = Path(__file__).parents[1]
SUITE, PACKAGES = "bookworm", "python3,python3-venv,ca-certificates"  # what python:3.11-slim has
JOB = "python /opt/shoal/jobs/train.py task=forecaster stop.epochs=1"
NODE = (
    f"{SET_ENVIRONMENT} && ulimit -n 65536; ray start --head --num-cpus=2 --object-store-memory=200000000"
    f" && RAY_ADDRESS=auto {JOB}; status=$?; ray stop --force; exit $status"
)


class Image:
    """A root folder, with what the instructions before have set."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.workdir = "/"
        self.user = "0"
        self.variables: dict[str, str] = {}
        self.arguments: dict[str, str] = {}

    def run(self, command: str) -> None:
        """Run a shell's command in the root. Raises CalledProcessError."""
        own = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "HOME": "/tmp", **self.arguments, **self.variables}
        passed = {name: value for name, value in os.environ.items() if name.startswith("PIP_")}
        words = [f"{name}={value}" for name, value in (passed | own).items()]
        mounts = [f"mount -t proc proc {self.root}/proc", f"mount --rbind /dev {self.root}/dev"]
        mounts += [f"mount -t tmpfs shm {self.root}/dev/shm"] if self.user != "0" else []
        mounts += [f"mount --bind {path} {self.root}{path}" for path in _list_pip_paths(self.root)]
        inside = shlex.join(["chroot", f"--userspec={self.user}:{self.user}", str(self.root), "env", "-i", *words])
        there = shlex.join(["sh", "-c", f"cd {self.workdir} && {command}"])
        script = " && ".join([*mounts, f"exec {inside} {there}"])
        subprocess.run(["unshare", "--mount", "--pid", "--fork", "--kill-child", "sh", "-c", script], check=True)

    def apply(self, instruction: str, words: str) -> None:
        """Carry out one instruction."""
        if instruction == "RUN":
            self.run(words)
        elif instruction == "COPY":
            *sources, target = words.split()
            for source in sources:
                _copy(ROOT / source, self.root / target.lstrip("/"), is_into=target.endswith("/"))
        elif instruction == "ENV":
            name, _, value = words.partition("=")
            self.variables[name] = value
        elif instruction == "ARG":
            name, _, value = words.partition("=")
            self.arguments[name] = os.environ.get(name, value)
        elif instruction in ("WORKDIR", "USER"):
            setattr(self, instruction.lower(), words)
        elif instruction != "FROM":
            sys.exit(f"{instruction} is not known here")


def main(folder: Path) -> None:
    """Make the root, apply the Dockerfile, start a node and run a job in it."""
    root = folder / "root"
    subprocess.run(["debootstrap", "--variant=minbase", f"--include={PACKAGES}", SUITE, str(root)], check=True)
    for name in ("/etc/resolv.conf", "/etc/hosts"):
        shutil.copy(name, root / name[1:])
    for name in ("/etc/pip.conf", "/etc/ssl/certs/ca-certificates.crt"):
        if Path(name).exists():
            shutil.copy(name, root / name[1:])
    for proxy in Path("/etc/apt/apt.conf.d").glob("*proxy*"):
        shutil.copy(proxy, root / "etc/apt/apt.conf.d")
    image = Image(root)
    text = re.sub(r"\\\n\s*", " ", (ROOT / "Dockerfile").read_text())
    for line in filter(None, (line.strip() for line in text.splitlines() if not line.startswith("#"))):
        _say(f"--- {line[:110]}")
        image.apply(*line.split(maxsplit=1))
    _say("--- a node, and a job")
    image.variables["HOME"] = "/home/shoal"
    image.run(NODE)
    _say("the image has run a job")


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def _copy(source: Path, target: Path, *, is_into: bool) -> None:
    if source.is_dir():
        shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    else:
        there = target / source.name if is_into else target
        there.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(source, there)


def _list_pip_paths(root: Path) -> list[Path]:
    """Folders of this machine that pip's settings name, made in the root too."""
    said = subprocess.run([sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=True)
    found = {Path(each) for each in re.findall(r"(?:file://)?(/[^\s'\"\\]+)", said.stdout)}
    folders = sorted(
        {path if path.is_dir() else path.parent for path in found if path.exists()} - {Path("/etc/ssl/certs")}
    )
    for each in folders:
        (root / str(each)[1:]).mkdir(parents=True, exist_ok=True)
    return folders


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(Path(sys.argv[1]))
    else:
        with tempfile.TemporaryDirectory(prefix="shoal-image-") as made:
            main(Path(made))
