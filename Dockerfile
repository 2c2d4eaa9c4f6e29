# For hosts with NVIDIA GPUs and the container toolkit:
#   docker build -t expert-launcher .
#   docker run --gpus all --shm-size 8g --user "$(id -u):$(id -g)" -v "$PWD:/workspace" expert-launcher train neo4j
# The CUDA toolkit is there for what is compiled at first use: Triton's kernels and DeepSpeed's CPU optimizer.
FROM nvidia/cuda:13.0.1-devel-ubuntu24.04

RUN apt-get update \
    && apt-get install --yes --no-install-recommends build-essential python3 python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/*

ENV PATH=/opt/venv/bin:$PATH

# The large packages first: this layer stays while the code changes. torch before those that look for it when they are built.
COPY constraints.txt /opt/expert-launcher/
RUN python3 -m venv /opt/venv \
    && pip install --no-cache-dir --constraint /opt/expert-launcher/constraints.txt torch \
    && pip install --no-cache-dir --constraint /opt/expert-launcher/constraints.txt accelerate deepspeed ninja transformers

COPY pyproject.toml README.md LICENSE /opt/expert-launcher/
COPY launcher /opt/expert-launcher/launcher
COPY experts /opt/expert-launcher/experts
COPY accelerate_configs /opt/expert-launcher/accelerate_configs
COPY ds_configs /opt/expert-launcher/ds_configs
COPY docs /opt/expert-launcher/docs
RUN pip install --no-cache-dir --constraint /opt/expert-launcher/constraints.txt '/opt/expert-launcher[train,cuda,quality]'

# A plain user, who may write nothing of yours: `--user` says who you are.
RUN useradd --create-home --uid 10001 trainer && mkdir /workspace && chown trainer /workspace
# Caches are next to the runs, so that they outlive the container; torch needs a user name. Set last: a step above that
# writes to its home would leave files of root there.
ENV HOME=/workspace \
    LOGNAME=trainer
USER trainer
WORKDIR /workspace
ENTRYPOINT ["launcher"]
CMD ["doctor"]
