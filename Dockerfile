# For GPU nodes: everything of requirements/cuda.lock and this checkout, in /opt/mrl. Not built on a machine of ours yet (docs/on-gpus.md).
#   docker build -t mrl .
#   enroot import -o mrl.sqsh dockerd://mrl            then sbatch with --container-image=mrl.sqsh (pyxis)
#   apptainer build mrl.sif docker-daemon://mrl:latest then apptainer exec --nv mrl.sif mrl train ...
# The base has no cuDNN: Transformer Engine would load it instead of the lock's, which torch loads.
FROM nvidia/cuda:13.0.2-devel-ubuntu24.04
RUN apt-get update \
 && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends \
    build-essential git make python3.12 python3.12-dev python3.12-venv bubblewrap libnuma1 \
 && rm -rf /var/lib/apt/lists/*
WORKDIR /opt/mrl
COPY . .
ENV PIP_NO_CACHE_DIR=1
RUN make setup-cuda PYTHON=python3.12
ENV PATH=/opt/mrl/.venv/bin:$PATH
