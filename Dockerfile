# Airflow, all stages, DAGs and plugins: one image for every service. No secrets, no root.
#
#   docker build -t craw4llm:cpu .                                torch for CPUs (default): about 3 GB
#   docker build -t craw4llm:cuda --build-arg VARIANT=cuda .      torch with CUDA: about 9 GB; needs the NVIDIA container toolkit to run on GPUs
#
# BASE_IMAGE: any Debian or Ubuntu with Python 3.11 to 3.13 and its venv module. A folder of wheels and certificates: deploy/build/README.md.
ARG BASE_IMAGE=python:3.11-slim-bookworm
FROM ${BASE_IMAGE}

ARG VARIANT=cpu
ARG TORCH_CPU_INDEX=https://download.pytorch.org/whl/cpu
ARG UV_VERSION=0.13.9

# CUDA: torch.compile builds launchers of its kernels with a C compiler.
RUN if [ "$VARIANT" = cuda ]; then \
        apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*; \
    elif [ "$VARIANT" != cpu ]; then echo "VARIANT is $VARIANT; expected cpu or cuda" >&2; exit 1; fi

# The user of Airflow's own images and of its Helm chart; group 0, so that another user id works where a cluster assigns one. The chart's
# probes call `/entrypoint COMMAND`, which in Airflow's images waits for the database; here it just runs the command.
RUN useradd --uid 50000 --gid 0 --home-dir /opt/airflow --create-home airflow \
    && mkdir -p /opt/airflow/logs /opt/craw4llm /artifacts /secrets/airflow /secrets/worker /secrets/postgres /secrets/redis \
    && chown -R 50000:0 /opt/airflow /artifacts /secrets \
    && chmod -R g=u /opt/airflow /artifacts && chmod 0770 /secrets/airflow /secrets/worker && chmod 0775 /secrets/postgres /secrets/redis \
    && ln -s /usr/bin/env /entrypoint

ENV VIRTUAL_ENV=/opt/venv PATH=/opt/venv/bin:$PATH PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PYTHONUNBUFFERED=1

WORKDIR /opt/craw4llm
COPY requirements/ requirements/
COPY deploy/build/ /tmp/build/
# Torch first, with its own dependencies (its build decides them), then everything else from the lock: about 240 packages.
RUN cat /etc/ssl/certs/ca-certificates.crt /tmp/build/*.crt > /tmp/certs.pem 2>/dev/null; \
    if ls /tmp/build/*.crt >/dev/null 2>&1; then export PIP_CERT=/tmp/certs.pem SSL_CERT_FILE=/tmp/certs.pem; fi; \
    python3 -m venv /opt/venv && \
    pip install --quiet uv==${UV_VERSION} && \
    if ls /tmp/build/torch-*.whl >/dev/null 2>&1; then pip install --find-links /tmp/build -r requirements/torch.txt; \
    elif [ "$VARIANT" = cpu ]; then pip install --extra-index-url "$TORCH_CPU_INDEX" "$(sed 's/$/+cpu/' requirements/torch.txt)"; \
    else pip install -r requirements/torch.txt; fi && \
    uv pip install --no-cache --no-deps --find-links /tmp/build -r requirements/lock.txt && \
    rm -rf /tmp/certs.pem

COPY pyproject.toml README.md LICENSE ./
COPY craw4llm/ craw4llm/
COPY training/ training/
COPY dags/ dags/
COPY plugins/ plugins/
COPY deploy/ deploy/
RUN cat /etc/ssl/certs/ca-certificates.crt /tmp/build/*.crt > /tmp/certs.pem 2>/dev/null; \
    if ls /tmp/build/*.crt >/dev/null 2>&1; then export SSL_CERT_FILE=/tmp/certs.pem; fi; \
    uv pip install --no-cache --no-deps -e . && rm -rf /tmp/certs.pem /tmp/build && chmod -R a+rX,go-w /opt/craw4llm

ENV AIRFLOW_HOME=/opt/airflow \
    AIRFLOW__CORE__DAGS_FOLDER=/opt/craw4llm/dags \
    AIRFLOW__CORE__PLUGINS_FOLDER=/opt/craw4llm/plugins \
    CRAW4LLM_ROOT=/artifacts
USER 50000:0
CMD ["airflow", "version"]
