# The image of a node: Ray, Shoal and its recipes, for Kubernetes (docs/kubernetes.md), Docker or Podman.
#
#   docker build -t REGISTRY/shoal:1 .
#   docker build -t REGISTRY/shoal:1 --build-arg PIP_EXTRA_INDEX_URL=URL_OF_CPU_WHEELS .      torch without CUDA, 2 GB less
#   docker build -t REGISTRY/shoal:1-cuda --build-arg BASE=nvidia/cuda:13.0.2-devel-ubuntu24.04 .   with CUDA's compiler
#
# A base that stays: BASE=python:3.11-slim@$(docker inspect --format '{{index .RepoDigests 0}}' python:3.11-slim | cut -d@ -f2)
# It runs as user 1000, also with a root that cannot be written (`kube.read_only`): it writes to /tmp and SHOAL_HOME alone.
#
# On PyPI torch for Linux is that of CUDA, with its libraries: on a machine with a driver, the first image computes on GPUs.
# Your own files: FROM REGISTRY/shoal:1, COPY my_task.py ./ - a job finds them by `task=my_task.py:MyTask`.
ARG BASE=python:3.11-slim
FROM ${BASE}
ARG EXTRAS=cluster
ARG PIP_EXTRA_INDEX_URL=

# procps: a pod that is removed waits for its raylet. wget: probes of KubeRay.
RUN apt-get update \
    && apt-get install -y --no-install-recommends procps wget \
    && { command -v python3 >/dev/null || apt-get install -y --no-install-recommends python3 python3-venv; } \
    && rm -rf /var/lib/apt/lists/*

COPY pyproject.toml setup.py MANIFEST.in README.md LICENSE constraints.txt /opt/shoal/source/
# What it needs, as of a package without code: a layer that a change of the code leaves as it is.
RUN cd /opt/shoal/source && mkdir -p platform/shoal jobs serve_apps clients \
    && echo '__version__ = "0"' > platform/shoal/__init__.py \
    && python3 -m venv /opt/shoal/venv \
    && /opt/shoal/venv/bin/pip install --no-cache-dir -c constraints.txt "/opt/shoal/source[${EXTRAS}]"
COPY platform /opt/shoal/source/platform
COPY jobs /opt/shoal/source/jobs
COPY serve_apps /opt/shoal/source/serve_apps
COPY clients /opt/shoal/source/clients
# sbom.json: its packages, with versions, hashes and licences, as pip inspects them.
RUN /opt/shoal/venv/bin/pip install --no-cache-dir --no-deps --force-reinstall /opt/shoal/source \
    && /opt/shoal/venv/bin/pip inspect > /opt/shoal/sbom.json \
    && mv /opt/shoal/source/jobs /opt/shoal/source/serve_apps /opt/shoal/ \
    && rm -rf /opt/shoal/source \
    && mkdir -p /var/lib/shoal \
    && chown 1000:1000 /var/lib/shoal /opt/shoal

# `python` and `ray` of pods, also where KubeRay starts them without a shell's profile.
ENV PATH=/opt/shoal/venv/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
ENV SHOAL_HOME=/var/lib/shoal
# Ray asks for the name of its user.
RUN id -u 1000 >/dev/null 2>&1 || useradd --uid 1000 --create-home shoal
WORKDIR /opt/shoal
USER 1000
