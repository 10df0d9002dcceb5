# Serves a checkpoint that is mounted at /model:
#   docker build --target cpu -t tessera:cpu .
#   docker run --rm --read-only --cap-drop ALL -p 127.0.0.1:50051:50051 -v /path/to/checkpoint:/model:ro --shm-size 1g tessera:cpu
#
# Targets: cpu and cuda serve; cuda has a C compiler, which Triton needs, and train one of C++, because DeepSpeed compiles its operations for the
# processor it trains on.
# Arguments: BASE, the base image, which is pinned by giving it with its digest (python:3.11-slim@sha256:...); PIP_ARGS, which index pip asks;
# CPU_INDEX, where torch without CUDA is; SOURCE_DATE_EPOCH, the time of the files in the wheel.
ARG BASE=docker.io/library/python:3.11-slim

FROM ${BASE} AS tools
RUN apt-get update && apt-get install -y --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*
ARG PIP_ARGS=""
ARG SBOM_TOOL=cyclonedx-bom==7.5.0
RUN python -m venv /opt/sbom && /opt/sbom/bin/pip install --no-cache-dir ${PIP_ARGS} ${SBOM_TOOL} && python -m venv /opt/tessera
ENV PATH=/opt/tessera/bin:$PATH
WORKDIR /build
# Dependencies first: their layer is kept until they change. They are read from pyproject.toml, so that nothing of the package is built
# before its sources are here: setuptools keeps what an earlier build left where that is newer than the source.
COPY pyproject.toml constraints.txt ./
RUN python -c "import tomllib; p = tomllib.load(open('pyproject.toml', 'rb'))['project']; print(*p['dependencies'], *p['optional-dependencies']['serve'], sep='\n')" > serve.txt \
    && python -c "import tomllib; p = tomllib.load(open('pyproject.toml', 'rb'))['project']; print(*p['optional-dependencies']['train'][1:], sep='\n')" > train.txt

# The one wheel of all targets.
FROM tools AS wheel
ARG PIP_ARGS=""
ARG SOURCE_DATE_EPOCH=315532800
COPY LICENSE README.md ./
COPY serve serve
COPY finetune finetune
COPY checkpoint checkpoint
COPY configuration configuration
COPY host host
COPY tessera tessera
COPY protos protos
RUN SOURCE_DATE_EPOCH=${SOURCE_DATE_EPOCH} pip wheel --no-cache-dir ${PIP_ARGS} --no-deps --wheel-dir /wheel .

FROM tools AS cpu-packages
ARG PIP_ARGS=""
ARG CPU_INDEX="--extra-index-url https://download.pytorch.org/whl/cpu"
RUN pip install --no-cache-dir ${PIP_ARGS} ${CPU_INDEX} -c constraints.txt -r serve.txt
COPY --from=wheel /wheel /wheel
# Its kernels for every level of processors, its parts listed.
RUN pip install --no-cache-dir --no-index --no-deps /wheel/*.whl && tessera-serve build-kernels \
    && /opt/sbom/bin/cyclonedx-py environment --output-reproducible --of JSON -o /opt/tessera/sbom.cdx.json /opt/tessera/bin/python

# What every image that serves has beside the packages: no pip but the base's own, a user without a home.
FROM ${BASE} AS runtime
RUN useradd --uid 10001 --no-create-home --home-dir /nonexistent --shell /usr/sbin/nologin tessera \
    && mkdir -p /usr/share/sbom && dpkg-query -W > /usr/share/sbom/debian.txt
# Libraries that want a folder of temporary files find the one that every container can write to, whatever else is read-only, and do not
# ask for the name of the user, who may be any.
ENV PATH=/opt/tessera/bin:$PATH PYTHONDONTWRITEBYTECODE=1 TMPDIR=/dev/shm TORCHINDUCTOR_CACHE_DIR=/dev/shm/torchinductor
USER 10001:10001
WORKDIR /
EXPOSE 50051 9400
STOPSIGNAL SIGTERM
# Plain text at 127.0.0.1:50051, unless TESSERA_ADDRESS, TESSERA_CA and their like say otherwise: the table in deploy/README.md.
HEALTHCHECK --interval=10s --timeout=6s --start-period=300s --retries=3 CMD ["tessera-health"]
ENTRYPOINT ["tessera-serve"]
CMD ["--model", "/model", "--host", "0.0.0.0", "--insecure-public"]

FROM runtime AS cpu
COPY --from=cpu-packages /opt/tessera /opt/tessera

# Trains on the CPU, and with PIP_ARGS and CPU_INDEX="" on CUDA where the base has its compiler.
FROM cpu-packages AS train
ARG PIP_ARGS=""
RUN pip install --no-cache-dir ${PIP_ARGS} -c constraints.txt -r train.txt && useradd --uid 10001 --create-home tessera
USER 10001:10001
WORKDIR /home/tessera
ENTRYPOINT ["tessera-finetune"]
CMD ["doctor"]

FROM tools AS cuda-packages
ARG PIP_ARGS=""
RUN pip install --no-cache-dir ${PIP_ARGS} -c constraints.txt -r serve.txt
COPY --from=wheel /wheel /wheel
RUN pip install --no-cache-dir --no-index --no-deps /wheel/*.whl && tessera-serve build-kernels \
    && /opt/sbom/bin/cyclonedx-py environment --output-reproducible --of JSON -o /opt/tessera/sbom.cdx.json /opt/tessera/bin/python

# Triton compiles kernels for the GPU that it finds, what calls them with a C compiler, and keeps both where code may run: Docker has none run from
# /dev/shm. With --read-only it takes --tmpfs /tmp:exec.
FROM runtime AS cuda
USER root
RUN apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/* \
    && dpkg-query -W > /usr/share/sbom/debian.txt
ENV TRITON_CACHE_DIR=/tmp/triton
USER 10001:10001
COPY --from=cuda-packages /opt/tessera /opt/tessera
