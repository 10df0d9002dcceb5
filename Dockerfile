# Serves a checkpoint mounted at /model:
#   docker build -t tessera . && docker run --rm -p 127.0.0.1:50051:50051 -v /path/to/checkpoint:/model:ro --shm-size 1g tessera
#
# The default torch brings its CUDA libraries along (several GB). PIP_ARGS can point pip at another index with a CPU-only build.
FROM python:3.11-slim

# A compiler, because kernels of this package and of DeepSpeed are built on first use for the CPU they run on.
RUN apt-get update && apt-get install -y --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*

ARG PIP_ARGS=""
WORKDIR /opt/tessera
# Dependencies first: this layer is kept until they change.
COPY pyproject.toml constraints.txt LICENSE README.md ./
RUN mkdir serve finetune checkpoint \
    && touch serve/__init__.py finetune/__init__.py checkpoint/__init__.py \
    && pip install --no-cache-dir ${PIP_ARGS} -c constraints.txt .
COPY serve serve
COPY finetune finetune
COPY checkpoint checkpoint
RUN pip install --no-cache-dir --no-deps --force-reinstall .

RUN useradd --uid 10001 --create-home tessera
USER tessera
WORKDIR /home/tessera
EXPOSE 50051 9400
ENTRYPOINT ["tessera-serve"]
CMD ["--model", "/model", "--host", "0.0.0.0", "--insecure-public"]
